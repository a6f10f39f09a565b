"""Smaller tensors that stand in for large ones of the same class of layout, and what they tell about those.

Sizes are replaced consistently: equal ones stay equal, zeros and ones stay what they are. The order of the dimensions
in memory, gaps between them and expanded dimensions stay too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .layouts import fills_memory
from .metas import Fresh, Meta, Result, Several, interned

_KEPT = 8  # sizes up to this stay: kernel sizes, groups
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)


class NoStandIn(Exception):
    """Nothing smaller can stand in."""


def shrinkings(metas: Sequence[Meta]) -> Iterator[Mapping[int, int]]:
    """Ways to replace large sizes by small ones: by ones without a common factor, or by fractions of themselves."""
    large = sorted({n for meta in metas for n in meta.size if n > _KEPT})
    if large and len(large) <= len(_PRIMES):
        yield {n: min(n, prime) for n, prime in zip(large, _PRIMES, strict=False)}
    yield {n: _halved(n) for n in large}


def _halved(n: int) -> int:
    while n > 2 * _KEPT and n % 2 == 0:
        n //= 2
    return n


def smaller(value: Any, sizes: Mapping[int, int]) -> Any:
    """What takes the place of an argument: a tensor, or a number that is the size of one."""
    if isinstance(value, Meta):
        return _smaller_tensor(value, sizes)
    return sizes.get(value, value) if type(value) is int else value


def _smaller_tensor(meta: Meta, sizes: Mapping[int, int]) -> Meta:
    if meta.dtype is torch.uint8 and len(meta.size) == 1:  # maybe a library's workspace, which it reads as it sees fit
        return meta
    size = tuple(sizes.get(n, n) for n in meta.size)
    stride = list(meta.stride)
    extents = {1: 1}  # of what lies further inside: in the large tensor, and in the small one
    large = small = 1
    for d in sorted((d for d, n in enumerate(size) if n > 1 and meta.stride[d]), key=lambda d: meta.stride[d]):
        if meta.stride[d] < large:
            raise NoStandIn("its elements overlap")
        stride[d] = small if meta.stride[d] == large else 2 * small
        large, small = meta.stride[d] * meta.size[d], stride[d] * size[d]
        extents[large] = small
    for d, n in enumerate(size):
        if n == 1:
            stride[d] = extents.get(meta.stride[d], meta.stride[d])
    return interned(size, tuple(stride), meta.offset % 4, meta.dtype, meta.device, meta.conj, meta.neg)


def alike(small: Any, large: Any) -> bool:
    """Whether two answers are of the same form: the same words for tensors of the same ranks, with the same ones."""
    if isinstance(small, Several) and isinstance(large, Several):
        same = len(small.results) == len(large.results)
        return same and all(alike(a, b) for a, b in zip(small.results, large.results, strict=True))
    if type(small) is not type(large):
        return False
    if not isinstance(small, Fresh):
        return small == large
    return [min(n, 2) for n in small.meta.size] == [min(n, 2) for n in large.meta.size]


def carried_over(
    real: Any, guess: Any, given: Sequence[Meta], inferred: Any, large: Sequence[Meta]
) -> Result | Several | None:
    """What an operator gives to large tensors if it gives `real` to small ones.

    Args:
        real: What it gives to the small ones.
        guess: What shape inference says to the small ones.
        given: The small ones.
        inferred: What shape inference says to the large ones.
        large: The large ones.
    """
    if isinstance(real, Several):
        parts = zip(real.results, guess.results, inferred.results, strict=True)
        results = tuple(carried_over(r, g, given, i, large) for r, g, i in parts)
        known = all(result is not None or r is None for result, r in zip(results, real.results, strict=True))
        return Several(real.kind, results) if known else None  # type: ignore[arg-type]
    if real == guess:
        return inferred
    if not (isinstance(real, Fresh) and isinstance(inferred, Fresh) and alike(real, inferred)):
        return None
    size, meta = inferred.meta.size, real.meta
    stride = strides_in_order(meta, size, _strides_of_ones(given, large))
    if stride is None:
        return None
    return Fresh(interned(size, stride, 0, meta.dtype, meta.device, meta.conj, meta.neg))


def _strides_of_ones(given: Sequence[Meta], large: Sequence[Meta]) -> dict[int, int]:
    """Strides of dimensions of size one: those in small tensors to those in large ones."""
    pairs = zip(given, large, strict=True)
    return {a.stride[d]: b.stride[d] for a, b in pairs for d, n in enumerate(a.size) if n == 1}


def strides_in_order(like: Meta, size: Sequence[Any], ones: Mapping[int, Any]) -> tuple[Any, ...] | None:
    """The strides of a tensor of other sizes that lies as a tensor does, if that fills its memory.

    Args:
        like: The tensor.
        size: The other sizes.
        ones: Further strides that dimensions of size one may have taken over: here, and there.
    """
    if not fills_memory(like.size, like.stride):
        return None
    stride: list[Any] = [0] * len(size)
    step: Any = 1
    steps: dict[int, Any] = {1: 1}
    for d in sorted((d for d, n in enumerate(like.size) if n > 1), key=lambda d: like.stride[d]):
        stride[d] = step
        step = step * size[d]
        steps[like.stride[d] * like.size[d]] = step
    for d, n in enumerate(like.size):
        if n <= 1:
            known = steps.get(like.stride[d], ones.get(like.stride[d]))
            if known is None:
                return None
            stride[d] = known
    return tuple(stride)
