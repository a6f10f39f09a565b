"""Operators without an abstract kernel: what they give, as their real kernels say; and how long sparse tensors are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import FakeTensor, OpOverload, kernels_only, pytree, stored_elements
from ..ops import aten, tensors_in
from ..subclasses.layout import is_wrapper
from .engine import Engine

SIZED_BY_LISTS = frozenset({aten._ctc_loss.default})
"""Operators whose results have sizes that follow from lists of numbers; torch says that they follow from data."""


def given_by_kernel(engine: Engine, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator gives, if that is dense, and if it takes sparse tensors, or lists of sizes; None otherwise.

    Its kernel is run on zeros, and on sparse tensors of the same sizes that hold no element. How a dense result lies
    does not depend on them; how many elements a sparse result holds does, so that none is made.
    """
    given = list(tensors_in((args, list(kwargs.values()))))
    sparse = any(tensor.layout is not torch.strided for tensor in given)
    if engine.symbolic or not (sparse or op in SIZED_BY_LISTS):
        return None
    if not all(type(tensor) is FakeTensor and tensor.layout in _EMPTY for tensor in given):
        return None
    try:
        with kernels_only():
            real = pytree.tree_map_only(Tensor, lambda tensor: _real(engine, tensor), (args, kwargs))
            out = op(*real[0], **real[1])
            if any(tensor.layout is not torch.strided for tensor in tensors_in([out])):
                return None
            return pytree.tree_map_only(Tensor, lambda t: engine.strided(t, t.stride(), t.device), out)
    except Exception:
        if op in SIZED_BY_LISTS:  # it is eager's error
            raise
        return None  # the abstract kernel's own error is told then


def has_unknown_length(tensor: Tensor) -> bool:
    """Whether only data tells how many elements an abstract sparse tensor holds: it holds none then.

    One that was made of its parts holds as many as they do.
    """
    if tensor.layout is torch.strided or is_wrapper(tensor):
        return False
    with kernels_only():
        return not stored_elements(tensor)


SPARSE_MASK = aten.sparse_mask.default


def masked(engine: Engine, tensor: Tensor, mask: Tensor) -> Tensor | None:
    """A sparse tensor that holds elements where another does, if it is known how many those are."""
    if mask.layout is not torch.sparse_coo or has_unknown_length(mask):
        return None
    types = (FakeTensor,)
    indices, values = (engine.run(part, types, (mask,), {}) for part in (aten._indices.default, aten._values.default))
    kept = engine.run(aten.empty_like.default, types, (values,), {"dtype": tensor.dtype})
    parts = (mask.sparse_dim(), mask.dense_dim(), list(mask.shape), indices, kept)
    options = {"dtype": tensor.dtype, "layout": torch.sparse_coo, "device": engine.device_of(mask)}
    made: Tensor = engine.run(
        aten._sparse_coo_tensor_with_dims_and_tensors.default,
        types,
        parts,
        {**options, "is_coalesced": mask.is_coalesced()},
    )
    return made


def _real(engine: Engine, tensor: Tensor) -> Tensor:
    return _EMPTY[tensor.layout](tensor, engine.device_of(tensor))


def _coo(tensor: Tensor, device: torch.device) -> Tensor:
    size = list(tensor.shape)
    indices = torch.empty(tensor.sparse_dim(), 0, dtype=torch.int64, device=device)
    values = torch.empty(0, *size[tensor.sparse_dim() :], dtype=tensor.dtype, device=device)
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=tensor.is_coalesced(), check_invariants=False)


def _csr(tensor: Tensor, device: torch.device) -> Tensor:
    size = list(tensor.shape)
    compressed = torch.zeros(*size[:-2], size[-2] + 1, dtype=torch.int64, device=device)
    plain = torch.empty(*size[:-2], 0, dtype=torch.int64, device=device)
    values = torch.empty(*size[:-2], 0, dtype=tensor.dtype, device=device)
    return torch.sparse_csr_tensor(compressed, plain, values, size, check_invariants=False)


_EMPTY = {
    torch.strided: lambda tensor, device: torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
    ).zero_(),
    torch.sparse_coo: _coo,
    torch.sparse_csr: _csr,
}
