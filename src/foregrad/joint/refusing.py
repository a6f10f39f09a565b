"""Operators that may refuse what they are given, by its values.

Eager runs an operator whether anybody reads its result or not: an index out of range or a singular matrix is an error
all the same. So dead code elimination may drop only what refuses nothing once its arguments have the right sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch import OpOverload
from ..ops import Kind, op_info
from .ir import Node

# Of torch's operators, beside the pointwise ones, views and reductions: those that take any values.
_TAKES_ANYTHING = frozenset(
    f"aten::{name}"
    for name in (
        *("_log_softmax", "_softmax", "_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy", "fill"),
        *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "convolution", "dot", "linear", "mm", "mv", "vdot"),
        *("as_strided_scatter", "diagonal_scatter", "select_scatter", "slice_backward", "slice_scatter"),
        *("cumprod", "cumsum", "flip", "logcumsumexp", "repeat", "roll", "stack", "tril", "triu"),
        *("_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
        *("native_batch_norm", "native_group_norm", "native_layer_norm", "_fused_rms_norm"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_conj_physical", "_neg_view_copy", "empty_like", "full_like", "ones_like", "zeros_like"),
        *("lift_fresh_copy", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    )
)
# Of pointwise ones: those that refuse some integers (a divisor of zero, a negative exponent).
_REFUSE_INTEGERS = frozenset({"aten::div", "aten::floor_divide", "aten::fmod", "aten::pow", "aten::remainder"})


def may_refuse(node: Node) -> bool:
    """Whether running a node of the forward may raise, depending on the values that it reads.

    >>> may_refuse(Node(torch.ops.aten.sin.default, (Node(None, (), {}, None),), {}, None))
    False
    >>> may_refuse(Node(torch.ops.aten.linalg_cholesky_ex.default, (Node(None, (), {}, None),), {}, None))
    True
    """
    op = node.op
    if not isinstance(op, OpOverload) or not node.inputs():
        return False
    info = op_info(op)
    if op.namespace != "aten":  # somebody's own: it may do more than it says
        return op.namespace != "foregrad"
    if info.kind is Kind.VIEW or info.identity:
        return False
    if info.pointwise:
        return op._schema.name in _REFUSE_INTEGERS and _is_of_integers(node)
    if torch.Tag.reduction in op.tags:
        return False
    return op._schema.name not in _TAKES_ANYTHING


def _is_of_integers(node: Node) -> bool:
    value = node.value
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
