"""What memory and work cost: bytes of a storage, FLOPs of an operator, bytes that it moves.

Rules are tables. A tensor that is a view costs nothing beyond what it is a view of, which `storages.py` knows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, Tensor

from .._torch import HigherOrderOperator, OpOverload, hint_of
from ..abstract.sparse import SPARSE, parts_of
from ..graph.graph import Node
from ..ops import Kind, op_info

UNKNOWN = 10**15
"""FLOPs of an unknown operator: too many to recompute it."""


def bytes_of(value: Any) -> int:
    """The memory that a fresh tensor takes, by the sizes of the recording.

    >>> bytes_of(torch.empty(2, 3)), bytes_of(torch.empty(3, 2).t()), bytes_of(5)
    (24, 24, 0)
    """
    if not isinstance(value, Tensor):
        return 0
    if value.layout in SPARSE:
        return sum(map(bytes_of, parts_of(value)))
    last = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        extent, step = _hint(size), _hint(stride)
        if not extent:
            return 0
        last += (extent - 1) * step
    return last * int(value.element_size())


def _hint(value: Any) -> int:
    """A size that the data decides has no hint: some size must be assumed."""
    return _UNBACKED if isinstance(value, SymInt) and value.node.hint is None else hint_of(value)


_UNBACKED = 4096


def _count(value: Tensor) -> int:
    return math.prod(_hint(size) for size in value.shape)


# ------------------------------------------------------------------------------------------------------- FLOPs
def _matmul(first: int) -> Callable[..., int]:
    """Of a product whose factors are the arguments from `first` on."""

    def flops(args: tuple[Any, ...], out: Any) -> int:
        return 2 * _count(out) * _hint(args[first].shape[-1])

    return flops


def _convolution(args: tuple[Any, ...], out: Any) -> int:
    transposed = bool(args[6]) if len(args) > 6 else False
    positions = _count(args[0]) if transposed else _count(out)
    return 2 * positions * math.prod(_hint(n) for n in args[1].shape[1:])


def _attention(args: tuple[Any, ...], out: Any) -> int:
    query, key, value = args[0], args[1], args[2]
    *batch, length, width = (_hint(n) for n in query.shape)
    return 2 * math.prod(batch) * length * _hint(key.shape[-2]) * (width + _hint(value.shape[-1]))


def _heavy(args: tuple[Any, ...], out: Any) -> int:
    """Of operators that go through several products inside, such as recurrent layers and factorizations."""
    values = [item for item in args if isinstance(item, Tensor)]
    return 2 * sum(map(_count, values)) * max((_hint(value.shape[-1]) for value in values if value.dim()), default=1)


_FLOPS: dict[str, Callable[..., int]] = {
    "aten::mm": _matmul(0),
    "aten::bmm": _matmul(0),
    "aten::addmm": _matmul(1),
    "aten::baddbmm": _matmul(1),
    "aten::addbmm": _matmul(1),
    "aten::addmv": _matmul(1),
    "aten::mv": _matmul(0),
    "aten::dot": lambda args, out: 2 * _count(args[0]),
    "aten::linear": _matmul(0),
    "aten::_int_mm": _matmul(0),
    "aten::_scaled_mm": _matmul(0),
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::mkldnn_convolution": _heavy,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::_flash_attention_forward": _attention,
    "aten::_efficient_attention_forward": _attention,
    "aten::_trilinear": _heavy,
    "aten::mkldnn_rnn_layer": _heavy,
    "aten::_cudnn_rnn": _heavy,
    "aten::_thnn_fused_lstm_cell": _heavy,
    "aten::_thnn_fused_gru_cell": _heavy,
}

_FACTORIZATIONS = (
    "aten::linalg_", "aten::_linalg_", "aten::cholesky", "aten::triangular_solve", "aten::lu_", "aten::geqrf",
    "aten::ormqr", "aten::orgqr",
)  # fmt: skip

# Operators of ATen that are neither products nor quick: they sort, search, scan or iterate.
_SLOW = (
    "sort", "topk", "kthvalue", "median", "mode", "unique", "nonzero", "cumsum", "cumprod", "cummax", "cummin",
    "logcumsumexp", "histc", "bincount", "searchsorted", "bucketize", "cdist", "_cdist_forward", "_pdist_forward",
    "_ctc_loss", "grid_sampler", "_fft_r2c", "_fft_c2r", "_fft_c2c", "scatter", "scatter_add", "scatter_reduce",
    "index_put", "index_add", "index_reduce", "index_copy", "_unsafe_index_put", "masked_scatter", "roll",
)  # fmt: skip
_SLOW_WEIGHT = 64
_SLOW_NAMES = frozenset(f"aten::{name}" for name in _SLOW)

# Reductions and lookups: one pass over memory that a compiler fuses with its surroundings in part only.
_PASSES = frozenset(
    f"aten::{name}"
    for name in (
        "sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "std", "std_mean", "prod", "any", "all",
        "argmax", "argmin", "norm", "linalg_vector_norm", "logsumexp", "_softmax", "_log_softmax", "native_layer_norm",
        "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training", "embedding", "gather", "index", "index_select", "_unsafe_index",
        "avg_pool2d", "max_pool2d_with_indices", "_low_memory_max_pool_with_offsets", "upsample_nearest2d",
        "upsample_bilinear2d", "_adaptive_avg_pool2d", "native_dropout", "cat", "constant_pad_nd",
    )
)  # fmt: skip


def values_in(args: Any) -> Any:
    """The abstract values of a node's arguments."""
    kind = args.__class__
    if kind is Node:
        return args.value
    if kind is tuple or kind is list:
        return tuple([values_in(item) for item in args])
    return args


@functools.cache
def _formula(op: Any) -> Callable[..., int] | int:
    """How to count the FLOPs of an operator, or the count itself."""
    if isinstance(op, HigherOrderOperator):
        return UNKNOWN
    if not isinstance(op, OpOverload):
        return 0
    name = op._schema.name
    known = _FLOPS.get(name)
    if known is not None:
        return known
    namespace = name.partition("::")[0]
    if namespace in ("aten", "prims"):
        return _heavy if name.startswith(_FACTORIZATIONS) and name not in _PASSES else 0
    if namespace == "foregrad" or torch.Tag.pointwise in op.tags:
        return 0
    return UNKNOWN


def flops_of(op: Any, args: tuple[Any, ...], value: Any) -> int:
    """Floating-point operations of matrix products, convolutions and the like; the rest counts as none.

    >>> flops_of(torch.ops.aten.mm.default, (torch.empty(2, 3), torch.empty(3, 5)), torch.empty(2, 5))
    60
    """
    formula = _formula(op)
    if isinstance(formula, int):
        return formula
    out = value[0] if isinstance(value, (tuple, list)) else value
    return formula(values_in(args), out)


@functools.cache
def weight_of(op: Any) -> int:
    """How much a byte that an operator moves weighs: nothing for views, little for what compilers fuse."""
    if not isinstance(op, OpOverload):
        return 0
    name = op._schema.name
    if op_info(op).kind is Kind.VIEW:
        return 0
    if name in _SLOW_NAMES:
        return _SLOW_WEIGHT
    if name in _PASSES:
        return 3
    return 1
