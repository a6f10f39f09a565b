"""Writes of which eager leaves open what they do, because they read or write one place in memory twice."""

from collections.abc import Sequence

import torch
from torch import Tensor


def is_unclear(written: Sequence[Tensor], read: Sequence[Tensor]) -> bool:
    """Whether the outcome of a statement depends on the order in which elements are written.

    >>> x = torch.ones(4)
    >>> is_unclear([x], [x, x]), is_unclear([x[1:]], [x[1:], x[:-1]]), is_unclear([x[:1].expand(2)], [])
    (False, True, True)

    Args:
        written: The tensors that it writes to.
        read: All tensors that it uses.
    """
    if any(len(set(places(target))) < target.numel() for target in written):
        return True
    return any(_overlap_in_part(target, source) for target in written for source in read)


def places(tensor: Tensor) -> list[int]:
    """The address of each element of a small tensor.

    >>> x = torch.ones(4)
    >>> [place - x.data_ptr() for place in places(x[::2])]
    [0, 8]

    Args:
        tensor: The tensor.
    """
    steps = torch.zeros(tensor.shape, dtype=torch.int64)
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[dimension] = size
        steps = steps + stride * torch.arange(size).reshape(shape)
    return [tensor.data_ptr() + tensor.itemsize * step for step in steps.flatten().tolist()]


def _overlap_in_part(target: Tensor, source: Tensor) -> bool:
    if target is source or target.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
        return False
    return places(target) != places(source) and not set(places(target)).isdisjoint(places(source))
