"""What `torch.fx` nodes tell about their tensors in `tensor_meta`, beside the abstract value itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.passes.shape_prop import TensorMetadata

_LAST = {4: ((0, 2, 3, 1), torch.channels_last), 5: ((0, 2, 3, 4, 1), torch.channels_last_3d)}


def tensor_meta(value: Any) -> Any:
    """The metadata of a tensor, or of those in a list or tuple.

    >>> tensor_meta(torch.ones(2, 3)).stride
    (3, 1)
    """
    if isinstance(value, Tensor):
        return _metadata(value)
    return type(value)(map(tensor_meta, value)) if type(value) in (list, tuple) else None


def _metadata(tensor: Tensor) -> TensorMetadata:
    facts = tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
    try:
        return _known(*facts)
    except TypeError:  # symbols cannot be looked up
        return _made(*facts)


def _made(size: Any, stride: Any, dtype: torch.dtype, requires_grad: bool) -> TensorMetadata:
    return TensorMetadata(size, dtype, requires_grad, stride, _memory_format(size, stride), dtype in _QUANTIZED, {})


_known = functools.lru_cache(maxsize=4096)(_made)  # a model has few shapes, and many tensors
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def _memory_format(size: Sequence[Any], stride: Sequence[Any]) -> torch.memory_format | None:
    if _is_dense(size, stride, range(len(size))):
        return torch.contiguous_format
    order, layout = _LAST.get(len(size), ((), None))
    return layout if order and _is_dense(size, stride, order) else None


def _is_dense(size: Sequence[Any], stride: Sequence[Any], order: Sequence[int]) -> bool:
    """Whether dimensions follow each other in memory in an order; those of size one may lie anywhere."""
    expected: Any = 1
    for dim in reversed(order):
        if not _same(size[dim], 1):
            if not _same(stride[dim], expected):
                return False
            expected = expected * size[dim]
    return True


def _same(one: Any, other: Any) -> bool:
    """Whether numbers are equal as they stand: symbols are compared without a guard."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return str(one) == str(other)
