"""Sparse tensors: their parts, what of them stays the same from call to call, and what operators give for them.

Few operators have shape inference for them. What their kernels give to small sparse tensors of the same sizes tells
everything but how many elements a sparse result holds: that is known where it holds what an argument does, and is data
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import FakeTensor, FakeTensorMode, OpOverload, kernels_only, make_fake, pytree, stored_elements
from ..ops import IDENTITIES, Kind, aten, op_info, tensors_in

_BY_ROW = frozenset({torch.sparse_csr, torch.sparse_bsr})
SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
"""The layouts of tensors that are put together from indices and values."""


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Indices, of one kind or of two, and values; a strided tensor has no part but itself.

    >>> [tuple(part.shape) for part in parts_of(torch.eye(3).to_sparse())]
    [(2, 3), (3,)]
    """
    if tensor.layout not in SPARSE:
        return (tensor,)
    with torch.no_grad():
        if tensor.layout is torch.sparse_coo:
            return tensor._indices(), tensor._values()
        if tensor.layout in _BY_ROW:
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def storages_of(tensor: Tensor) -> tuple[int, ...]:
    """The storages in which a tensor lies."""
    return tuple([part.untyped_storage()._cdata for part in parts_of(tensor)])


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor: a sparse one has none."""
    return () if tensor.layout in SPARSE else tensor.stride()


def sparse_facts(tensor: Tensor) -> dict[str, Any]:
    """What a program may ask of a sparse tensor beside what all tensors have, under the names by which it does.

    >>> sparse_facts(torch.eye(3).to_sparse())
    {'is_coalesced()': True, '_indices().shape': (2, 3), '_values().shape': (3,)}
    """
    parts = parts_of(tensor)
    if tensor.layout is torch.sparse_coo:
        names: tuple[str, ...] = ("_indices()", "_values()")
        facts: dict[str, Any] = {"is_coalesced()": tensor.is_coalesced()}
    else:
        by_row = tensor.layout in _BY_ROW
        names = ("crow_indices()", "col_indices()") if by_row else ("ccol_indices()", "row_indices()")
        names, facts = (*names, "values()"), {f"{names[0]}.dtype": parts[0].dtype}
    return facts | {f"{name}.shape": tuple(part.shape) for name, part in zip(names, parts, strict=True)}


def abstract_sparse(tensor: Tensor, stored: int | None = None) -> Tensor:
    """A sparse tensor of the meta device that is like another, and holds as many elements, or some other number."""
    parts = [torch.empty_like(part, device="meta") for part in parts_of(tensor)]
    if stored is not None:
        batch = 0 if tensor.layout is torch.sparse_coo else parts[0].dim() - 1
        values = parts[-1]
        parts[-1] = values.new_empty((*values.shape[:batch], stored, *values.shape[batch + 1 :]))
        parts[-2] = parts[-2].new_empty((*parts[-2].shape[:-1], stored))
    return _put_together(tensor, parts)


def _put_together(tensor: Tensor, parts: Sequence[Tensor]) -> Tensor:
    options: dict[str, Any] = {"dtype": parts[-1].dtype, "check_invariants": False}
    if tensor.layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=tensor.is_coalesced(), **options)
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(compressed, plain, values, tensor.shape, layout=tensor.layout, **options)


def has_unknown_length(tensor: Tensor) -> bool:
    """Whether only data tells how many elements an abstract sparse tensor holds: it holds none then."""
    if tensor.layout not in SPARSE:
        return False
    with kernels_only():
        return not stored_elements(tensor)


# ---------------------------------------------------------------------------------------------------------------------
# What operators give.
_ASKS_FOR_PARTS = frozenset(
    getattr(aten, name).default
    for name in (
        *("_values", "_indices", "values", "indices", "crow_indices", "col_indices", "ccol_indices", "row_indices"),
        *("_nnz", "is_coalesced", "sparse_dim", "dense_dim"),
    )
)
_KEEPS_PLACES = IDENTITIES | {aten.clone.default, aten._to_copy.default, aten.t.default, aten.transpose.int}


def given_for_sparse(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator gives for arguments some of which are sparse; NotImplemented where shape inference says it."""
    given = list(tensors_in((args, list(kwargs.values()))))
    sparse = [tensor for tensor in given if tensor.layout in SPARSE]
    if not sparse or op in _ASKS_FOR_PARTS or op_info(op).kind not in (Kind.PURE, Kind.VIEW):
        return NotImplemented
    if not all(type(tensor) is FakeTensor for tensor in given):
        return NotImplemented
    alike = _whose_places_it_keeps(op, args, given, sparse)
    with kernels_only():
        trials = {id(tensor): _real(tensor) for tensor in given}
        real = pytree.tree_map_only(Tensor, lambda tensor: trials[id(tensor)], (args, kwargs))
        out = op(*real[0], **real[1])  # its error is eager's

        def fake(tensor: Tensor) -> Tensor:
            if tensor.layout not in SPARSE:
                meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                return make_fake(mode, meta, tensor.device)
            kept = alike is not None and stored_elements(tensor) == stored_elements(trials[id(alike)])
            stored = stored_elements(alike) if kept and alike is not None else 0
            return make_fake(mode, abstract_sparse(tensor, stored), tensor.device)

        return pytree.tree_map_only(Tensor, fake, out)


def _whose_places_it_keeps(
    op: OpOverload, args: tuple[Any, ...], given: Sequence[Tensor], sparse: Sequence[Tensor]
) -> Tensor | None:
    """The argument whose elements a sparse result has elements for, if there is such an argument."""
    if op is aten.sparse_mask.default:
        return args[1] if args[1].layout in SPARSE else None
    alone = len(sparse) == 1 and all(tensor is sparse[0] or not tensor.dim() for tensor in given)
    return sparse[0] if alone and (op in _KEEPS_PLACES or torch.Tag.pointwise in op.tags) else None


def _real(tensor: Any) -> Tensor:
    """A real tensor like an abstract one: of zeros, or with up to two elements, at one place if they may be."""
    if tensor.layout not in SPARSE:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.fake_device)
        return empty.zero_()
    parts = [torch.empty(part.shape, dtype=part.dtype, device=tensor.fake_device) for part in parts_of(tensor)]
    return _put_together(tensor, _coo(tensor, *parts) if tensor.layout is torch.sparse_coo else _compressed(*parts))


_TRIED = 2  # elements: the flags of results depend on whether there is more than one


def _coo(tensor: Tensor, indices: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    sizes = tensor.shape[: tensor.sparse_dim()]
    distinct = tensor.is_coalesced()
    places = sizes.numel() if distinct else _TRIED if sizes.numel() else 0
    stored = min(values.shape[0] or _TRIED, _TRIED, places)
    flat = torch.arange(stored, device=indices.device) * int(distinct)
    at = torch.stack(torch.unravel_index(flat, sizes)) if sizes else indices.new_zeros(0, stored)
    return at, values.new_ones((stored, *values.shape[1:]))


def _compressed(compressed: Tensor, plain: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """All elements lie in the first row, or column, of each matrix."""
    batch = compressed.shape[:-1]
    stored = min(plain.shape[-1] or _TRIED, _TRIED) if compressed.shape[-1] > 1 else 0
    pointers = torch.full_like(compressed, stored)
    pointers[..., 0] = 0
    at = torch.arange(stored, dtype=plain.dtype, device=plain.device).expand(*batch, stored).contiguous()
    return pointers, at, values.new_ones((*batch, stored, *values.shape[len(batch) + 1 :]))
