"""Operators whose abstract kernels accept what the real ones refuse, or refuse what those accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._torch import OpOverload, hint_of
from ..ops import aten
from .overlap import error_of_eager

# What is added must expand to the product; abstract kernels broadcast it the other way round as well.
_SIZES: dict[int, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {  # by id: to hash an operator takes longer
    id(aten.addmm.default): lambda args: (args[1].shape[0], args[2].shape[1]),
    id(aten.addmv.default): lambda args: (args[1].shape[0],),
}


def may_miss_errors(op: OpOverload) -> bool:
    """Whether the abstract kernel of an operator accepts more than the real one."""
    return id(op) in _SIZES


def error_missed(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Exception | None:
    """Eager's error for a call that an abstract kernel has let pass."""
    sizes = _SIZES.get(id(op))
    if sizes is None or not isinstance(out, Tensor):
        return None
    if [hint_of(n) for n in out.shape] == [hint_of(n) for n in sizes(args)]:
        return None
    return error_of_eager(op, args, kwargs)


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
