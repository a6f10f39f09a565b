"""Operators without an abstract kernel: what they give, as their real kernels say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import FakeTensor, OpOverload, kernels_only, pytree
from ..ops import aten, tensors_in
from .engine import Engine

SIZED_BY_LISTS = frozenset({aten._ctc_loss.default})
"""Operators whose results have sizes that follow from lists of numbers; torch says that they follow from data."""


def given_by_kernel(engine: Engine, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator gives whose results have sizes that follow from lists: its kernel is run on zeros."""
    if engine.symbolic or not all(type(tensor) is FakeTensor for tensor in tensors_in((args, list(kwargs.values())))):
        return None

    def zeros(tensor: Tensor) -> Tensor:
        device = engine.device_of(tensor)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).zero_()

    with kernels_only():
        real = pytree.tree_map_only(Tensor, zeros, (args, kwargs))
        out = op(*real[0], **real[1])
        return pytree.tree_map_only(Tensor, lambda t: engine.strided(t, t.stride(), t.device), out)
