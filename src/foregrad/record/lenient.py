"""Operators whose abstract kernels accept what the real ones refuse, or refuse what those accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload, hint_of
from ..ops import aten
from .overlap import error_of_eager


def _is_broadcast(out: Any, *sizes: Any) -> bool:
    """What is added must expand to the product; abstract kernels broadcast it the other way round as well."""
    return isinstance(out, Tensor) and [hint_of(n) for n in out.shape] != [hint_of(n) for n in sizes]


# Calls that the real kernel may refuse where the abstract one does not. By id: to hash an operator takes longer.
_DOUBTFUL: dict[int, Callable[[tuple[Any, ...], Any], bool]] = {
    id(aten.addmm.default): lambda args, out: _is_broadcast(out, args[1].shape[0], args[2].shape[1]),
    id(aten.addmv.default): lambda args, out: _is_broadcast(out, args[1].shape[0]),
    id(aten.index_select.default): lambda args, out: args[0].dim() == 0,
}


def may_miss_errors(op: OpOverload) -> bool:
    """Whether the abstract kernel of an operator accepts more than the real one."""
    return id(op) in _DOUBTFUL


def error_missed(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Exception | None:
    """Eager's error for a call that an abstract kernel has let pass."""
    is_doubtful = _DOUBTFUL.get(id(op))
    return error_of_eager(op, args, kwargs) if is_doubtful is not None and is_doubtful(args, out) else None


def _check_classes(index: Tensor, num_classes: int = -1) -> None:
    if index.device.type == "cpu" and num_classes > 0:
        aten._assert_async.msg((index >= 0).all(), "Class values must be non-negative.")
        aten._assert_async.msg((index < num_classes).all(), "Class values must be smaller than num_classes.")


# Functions of torch that look at values, except at those of recorded tensors: the graph looks at them.
VALUE_CHECKS: dict[Any, Callable[..., None]] = {
    torch.nn.functional.one_hot: _check_classes,
}


def _split_of_nothing(tensor: Tensor, size: Any, dim: int = 0) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """Torch 2.11 finds no piece in an empty dimension; there is one, as empty."""
    return (aten.split_with_sizes.default, (tensor, [0], dim)) if hint_of(tensor.shape[dim]) == 0 else None


_TWINS: dict[int, Callable[..., tuple[OpOverload, tuple[Any, ...]] | None]] = {
    id(aten.split.Tensor): _split_of_nothing,
}


def twin_of_refused(op: OpOverload, args: tuple[Any, ...]) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """A call with the same result, for one that an abstract kernel refuses although the real one takes it."""
    find = _TWINS.get(id(op))
    return None if find is None else find(*args)
