"""Inputs that look at the same memory.

A program is first recorded as if its inputs lay apart. If the record shows that it wrote to memory which another
input looks at as well, it is recorded again with that memory as one input of the graph, and with the others as views
of it. The rare case pays, the common one does not.

Autograd has its own idea of what belongs together: tensors are of one family if they are views of one root. If a
single family fills the memory, its root is the graph's input. Otherwise a flat tensor over the whole storage is, and
each family that is differentiated adds its root as an input for the sake of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .._torch import shares_version_counter
from ..abstract.engine import has_gaps
from ..abstract.sparse import storages_of
from ..ops import ViewStep, aten
from ..slots import Primal, SyntheticBase, ViewRoot
from ..subclasses.layout import is_wrapper


@dataclass(frozen=True, slots=True)
class Source:
    """How a call finds a tensor that was not passed: from one of the inputs that look at its memory."""

    member: Primal
    how: Literal["itself", "root", "flat"]
    dtype: torch.dtype

    def find(self, member: Tensor) -> Tensor:
        """The tensor itself."""
        match self.how:
            case "itself":
                return member
            case "root":
                assert member._base is not None
                return member._base
            case "flat":
                return over_storage(member, self.dtype)


def over_storage(member: Tensor, dtype: torch.dtype) -> Tensor:
    """A flat tensor over the whole storage of another one.

    >>> over_storage(torch.arange(4.0)[2:], torch.float32)
    tensor([0., 1., 2., 3.])
    """
    with torch.no_grad():
        return torch.empty(0, dtype=dtype, device=member.device).set_(member.untyped_storage())


@dataclass(frozen=True, slots=True)
class AliasGroup:
    """Inputs that are views of one root, which may be one of them."""

    slot: SyntheticBase | ViewRoot
    root: Tensor
    source: Source
    own_version: bool  # its version counter is not that of the memory
    views: tuple[ViewStep, ...]  # that give the root from the memory; none if it is the memory

    @property
    def is_memory(self) -> bool:
        return isinstance(self.slot, SyntheticBase)


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemory:
    """A storage that is one input of the graph, and the inputs of the user that look at it."""

    slot: SyntheticBase
    base: Tensor
    source: Source
    families: tuple[AliasGroup, ...]
    members: tuple[Tensor, ...]

    def views_from(self, start: Tensor, member: Tensor) -> tuple[ViewStep, ...]:
        """The views that give a member from the base, or from the root of its family."""
        return () if member is start else views_between(start, member)


def root_of(tensor: Tensor) -> Tensor:
    """What autograd takes a tensor to be a view of, or the tensor itself."""
    base = tensor._base
    if base is None or (tensor.requires_grad and tensor.is_leaf and not base.requires_grad):
        return tensor
    return base


# ------------------------------------------------------------------------------------------------ planning
def groups_by_storage(tensors: dict[Primal, Tensor]) -> list[dict[Primal, Tensor]]:
    """Inputs by the storage that they look at; the same tensor counts once."""
    groups: dict[int, dict[Primal, Tensor]] = {}
    known: set[int] = set()
    for slot, tensor in tensors.items():
        if id(tensor) not in known and tensor.layout is torch.strided and not is_wrapper(tensor):
            known.add(id(tensor))
            groups.setdefault(tensor.untyped_storage()._cdata, {})[slot] = tensor
    return list(groups.values())


def overlaps_somewhere(tensors: Iterable[Tensor]) -> bool:
    """Whether any two of the tensors may overlap (B-2)."""
    several = list(tensors)
    return any(may_overlap(a, b) for i, a in enumerate(several) for b in several[:i])


def related_to(group: dict[Primal, Tensor], rebased: Set[Primal]) -> bool:
    """Whether autograd sees a write to one of the inputs as a change of another, wherever they lie in memory."""
    roots = [id(root_of(tensor)) for tensor in group.values()]
    return any(slot in rebased and roots.count(id(root_of(tensor))) > 1 for slot, tensor in group.items())


def has_views_among(group: dict[Primal, Tensor], slots: Set[Primal]) -> bool:
    """Whether some inputs are views of one of these: autograd asks it when they are asked whether they require grad."""
    bases = [tensor for slot, tensor in group.items() if slot in slots]
    return any(root_of(tensor) is base and tensor is not base for tensor in group.values() for base in bases)


def may_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage may have memory in common.

    >>> t = torch.ones(4, 8)
    >>> may_overlap(t[:2], t[2:]), may_overlap(t[:, :4], t[:, 4:]), may_overlap(t[:2], t[1:])
    (False, False, True)
    """
    if not a.numel() or not b.numel():
        return False
    left, right = sorted((a, b), key=_first_byte)
    if _last_byte(left) < _first_byte(right):
        return False
    if left.is_contiguous() and right.is_contiguous():
        return True
    rows = left.dim() == right.dim() == 2 and left.dtype == right.dtype and left.stride(1) == right.stride(1) == 1
    if rows and left.stride(0) == right.stride(0) >= max(left.shape[1], right.shape[1]):
        pitch = left.stride(0)
        shift = (right.storage_offset() - left.storage_offset()) % pitch
        return bool(shift < left.shape[1] or shift + right.shape[1] > pitch)
    return True


def _first_byte(tensor: Tensor) -> int:
    return int(tensor.storage_offset() * tensor.itemsize)


def _last_byte(tensor: Tensor) -> int:
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + reach + 1) * tensor.itemsize - 1)


def lies_in_more(tensor: Tensor) -> bool:
    """Whether a tensor is not all of its storage."""
    whole = not tensor.storage_offset() and not has_gaps(tensor)
    return not whole or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize


def share(index: int, group: dict[Primal, Tensor], flat: bool = False) -> SharedMemory:
    """Plan one storage as an input: choose what stands for it, and find the families in it.

    `flat` asks for the whole storage where the root that would stand for it is only a part.
    """
    slot = SyntheticBase(index)
    roots: dict[int, tuple[Primal, Tensor]] = {}
    for member, real in group.items():
        roots.setdefault(id(root_of(real)), (member, real))
    only = next(iter(roots.values())) if len(roots) == 1 else None
    differentiated = [pair for pair in roots.values() if root_of(pair[1]).requires_grad]
    chosen = only or (differentiated[0] if len(differentiated) == 1 else None)
    if chosen is not None and _stands_for_all(root_of(chosen[1]), group.values(), whole=flat):
        base, source = root_of(chosen[1]), _source(*chosen)
    else:
        first_slot, first = next(iter(group.items()))
        sizes = {real.itemsize for real in group.values()} | {root_of(real).itemsize for real in group.values()}
        source = Source(first_slot, "flat", first.dtype if len(sizes) == 1 else torch.uint8)
        base = source.find(first)
    counted = base if id(base) in roots else root_of(next(iter(group.values())))  # whose version the memory's is
    families: list[AliasGroup] = []
    for number, (member, real) in enumerate(roots.values()):
        root = root_of(real)
        if root is base:
            families.append(AliasGroup(slot, root, source, False, ()))
        else:
            own = root is not counted and not shares_version_counter(root, counted)
            views = views_between(base, root)
            families.append(AliasGroup(ViewRoot(index, number), root, _source(member, real), own, views))
    return SharedMemory(slot, base, source, tuple(families), tuple(group.values()))


def _source(slot: Primal, real: Tensor) -> Source:
    return Source(slot, "itself" if root_of(real) is real else "root", root_of(real).dtype)


def _stands_for_all(root: Tensor, members: Iterable[Tensor], whole: bool) -> bool:
    """Whether every member can be had from the root by `as_strided`."""
    if whole and lies_in_more(root):
        return False
    if root.storage_offset() or has_gaps(root) or root.is_conj() or root.is_neg():
        return False
    last, own = _last_byte(root), root.is_complex()
    for member in members:
        if _last_byte(member) > last:
            return False
        if member.itemsize != root.itemsize and not (own and member.dtype == root.dtype.to_real()):
            return False
    return True


def views_between(base: Tensor, real: Tensor) -> tuple[ViewStep, ...]:
    """Views that give a tensor from another one that starts its storage."""
    steps: list[ViewStep] = []
    if base.is_complex() and real.dtype == base.dtype.to_real():
        steps.append(ViewStep(aten.view_as_real.default, (), {}, None))
    elif base.dtype != real.dtype:
        if base.itemsize < real.itemsize:
            whole = base.numel() * base.itemsize // real.itemsize * (real.itemsize // base.itemsize)
            steps.append(ViewStep(aten.slice.Tensor, (0, 0, whole), {}, None))
        steps.append(ViewStep(aten.view.dtype, (real.dtype,), {}, None))
    geometry = list(real.shape), list(real.stride()), real.storage_offset()
    steps.append(ViewStep(aten.as_strided.default, geometry, {}, None))
    if real.is_conj():
        steps.append(ViewStep(aten._conj.default, (), {}, None))
    if real.is_neg():
        steps.append(ViewStep(aten._neg_view.default, (), {}, None))
    return tuple(steps)


def in_order(slots: Sequence[tuple[Primal, object]]) -> list[Primal]:
    """The order of the remaining inputs beside shared memory: non-tensors, then tensors by storage (B-3)."""
    others = [slot for slot, value in slots if not isinstance(value, Tensor)]
    first: dict[int, int] = {}
    tensors: list[tuple[int, Primal]] = []
    for slot, value in slots:
        if isinstance(value, Tensor):
            tensors.append((first.setdefault(storages_of(value)[-1], len(first)), slot))
    return others + [slot for _, slot in sorted(tensors, key=lambda pair: pair[0])]
