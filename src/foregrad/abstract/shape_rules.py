"""Shape rules for the operators that programs are made of.

Each gives the results of an operator for the plain case: contiguous tensors of one floating dtype on one device, of
shapes that fit. Whatever is not that plain is left to torch, which also raises the errors. A rule says what
FakeTensorMode says, and takes microseconds where that runs a decomposition of dozens of operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ops import aten
from .tensor_meta import TensorMeta, contiguous

Sizes = list[tuple[int, ...] | None]  # of the results, contiguous, in the dtype of the arguments; None for none
Rule = Callable[..., Sizes | tuple[int, ...] | None]

_DTYPES = (torch.float32, torch.float64)
_DEVICES = ("cpu", "cuda")


def is_plain(meta: TensorMeta) -> bool:
    """Whether rules speak about such a tensor: contiguous, with elements, of a common dtype and device."""
    return (
        meta.dtype in _DTYPES
        and meta.device.type in _DEVICES
        and 0 not in meta.size
        and meta.stride == contiguous(meta.size)
    )


def _like_first(first: TensorMeta, *others: Any) -> tuple[int, ...] | None:
    """Pointwise, of tensors of one shape."""
    tensors = [other for other in others if hasattr(other, "stride")]
    return first.size if all(other.size == first.size for other in tensors) else None


def _of_two(first: TensorMeta, second: Any) -> tuple[int, ...] | None:
    return first.size if hasattr(second, "stride") and second.size == first.size else None


def _softmax(x: TensorMeta, dim: int, half_to_float: bool) -> tuple[int, ...] | None:
    return x.size if not half_to_float and -len(x.size) <= dim < len(x.size) else None


def _softmax_backward(grad: TensorMeta, out: TensorMeta, dim: int, dtype: torch.dtype) -> tuple[int, ...] | None:
    fits = grad.size == out.size and dtype is grad.dtype and -len(grad.size) <= dim < len(grad.size)
    return grad.size if fits else None


def _mm(a: TensorMeta, b: TensorMeta) -> tuple[int, ...] | None:
    """The factors may lie as they like."""
    fit = len(a.size) == 2 and len(b.size) == 2 and a.size[1] == b.size[0] and 0 not in (*a.size, *b.size)
    common = a.dtype in _DTYPES and a.device.type in _DEVICES and _alike(a, b)
    return (a.size[0], b.size[1]) if fit and common else None


def _addmm(bias: TensorMeta, a: TensorMeta, b: TensorMeta) -> tuple[int, ...] | None:
    size = _mm(a, b)
    fits = size is not None and is_plain(bias) and _alike(bias, a) and bias.size in (size, size[1:])
    return size if fits else None


def _reduced(x: TensorMeta, dims: Sequence[int] | None = None, keep: bool = False) -> tuple[int, ...] | None:
    """A sum, or a mean: no dimensions are all of them."""
    rank = len(x.size)
    gone = {dim % rank for dim in dims if -rank <= dim < rank} if dims and rank else set(range(rank))
    if dims and len(gone) != len(dims):
        return None  # one that is not there, or one twice
    return tuple(1 if dim in gone else size for dim, size in enumerate(x.size) if keep or dim not in gone)


def _embedding(weight: Any, indices: Any, padding: int = -1, *flags: bool) -> tuple[int, ...] | None:
    fits = is_plain(weight) and len(weight.size) == 2 and -weight.size[0] <= padding < weight.size[0]
    counted = hasattr(indices, "stride") and indices.dtype is torch.int64 and indices.device == weight.device
    if not fits or not counted or 0 in indices.size or indices.stride != contiguous(indices.size):
        return None
    return (*indices.size, weight.size[1])


def _nll_loss(x: TensorMeta, target: TensorMeta, weight: Any, reduction: int, ignored: int) -> Sizes | None:
    if not is_plain(x) or weight is not None or reduction not in (1, 2) or len(x.size) != 2:
        return None
    fits = target.dtype is torch.int64 and target.size == x.size[:1] and target.device == x.device
    return [(), ()] if fits else None


def _nll_loss_backward(
    grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int, total: Any
) -> tuple[int, ...] | None:
    fits = _nll_loss(x, target, weight, reduction, ignored) is not None
    return x.size if fits and _alike(grad, x, total) and grad.size == total.size == () else None


def _alike(first: TensorMeta, *others: TensorMeta) -> bool:
    return all(other.dtype is first.dtype and other.device == first.device for other in others)


def _fit(size: tuple[int, ...], *tensors: TensorMeta | None) -> bool:
    return all(tensor is None or tensor.size == size for tensor in tensors)


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: float) -> Sizes | None:
    if not training or len(x.size) < 2 or not _fit(x.size[1:2], weight, bias, mean, var):
        return None
    return [x.size, x.size[1:2], x.size[1:2]]


def _batch_norm_functional(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Sizes | None:
    """The functional variant gives new running statistics as well."""
    results = _batch_norm(x, weight, bias, mean, var, *rest)
    return None if results is None or mean is None or var is None else [*results, mean.size, var.size]


def _batch_norm_backward(
    grad: Any, x: Any, weight: Any, mean: Any, var: Any, saved: Any, saved_var: Any, train: bool, eps: float, mask: Any
) -> Sizes | None:
    if not train or grad.size != x.size or len(x.size) < 2 or weight is None or saved is None or saved_var is None:
        return None
    if not _fit(x.size[1:2], weight, mean, var, saved, saved_var) or not all(mask):
        return None
    return [x.size, x.size[1:2], x.size[1:2]]


def _layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Sizes | None:
    inner = tuple(shape)
    outer = x.size[: len(x.size) - len(inner)]
    if not inner or x.size != outer + inner or not _fit(inner, weight, bias):
        return None
    reduced = outer + (1,) * len(inner)
    return [x.size, reduced, reduced]


def _layer_norm_backward(
    grad: Any, x: Any, shape: Sequence[int], mean: Any, rstd: Any, weight: Any, bias: Any, mask: Sequence[bool]
) -> Sizes | None:
    forward = _layer_norm(x, shape, weight, bias, 0.0)
    if forward is None or grad.size != x.size:
        return None
    if not _fit(forward[1] or (), mean, rstd) or math.prod(forward[1] or ()) == 0:
        return None
    has_result = mask[0], mask[1] and weight is not None, mask[2] and bias is not None
    return [size if wanted else None for size, wanted in zip((x.size, *[tuple(shape)] * 2), has_result, strict=True)]


POINTWISE = (
    *(aten.relu.default, aten.gelu.default, aten.silu.default, aten.tanh.default, aten.sigmoid.default),
    *(aten.neg.default, aten.exp.default, aten.sin.default, aten.cos.default, aten.rsqrt.default, aten.sqrt.default),
)
POINTWISE_OF_TWO = (
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    *(aten.sigmoid_backward.default, aten.tanh_backward.default, aten.silu_backward.default),
    aten.gelu_backward.default,
)

RULES: dict[Any, Rule] = {
    **dict.fromkeys(POINTWISE, _like_first),
    **dict.fromkeys(POINTWISE_OF_TWO, _of_two),
    aten.sum.default: _reduced,
    aten.sum.dim_IntList: _reduced,
    aten.mean.default: _reduced,
    aten.mean.dim: _reduced,
    aten.threshold_backward.default: lambda grad, x, threshold: _of_two(grad, x),
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm_functional,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
LOOSE_RULES: dict[Any, Rule] = {  # that see for themselves what is plain
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.embedding.default: _embedding,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
}
KEYWORDS = frozenset({"approximate"})  # that leave the shape alone


def results_by_rule(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], metas: Sequence[TensorMeta]
) -> Sizes | tuple[int, ...] | None:
    """The sizes of the results, if the case is plain: `args` holds metadata in place of tensors."""
    if not KEYWORDS.issuperset(kwargs) or not (args and hasattr(args[0], "stride")):
        return None  # torch.sub(1, x) has a number in the first place
    if op in LOOSE_RULES:
        return LOOSE_RULES[op](*args)
    return RULES[op](*args) if _alike(*metas) and all(map(is_plain, metas)) else None
