"""Whether the inputs of a call lie in memory as those that were recorded: front ends compare shapes, and not this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor

from .._torch import FakeTensor
from ..joint.build import Joint
from ..ops import aten
from ..record.alias_groups import SharedMemory, may_overlap, root_of
from ..slots import Primal, Tangent
from ..subclasses.layout import is_wrapper, leaves_of
from .call import gives_geometry

_BY_OFFSET = frozenset(
    {
        *(aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_.default),
        aten.as_strided_scatter.default,
    }
)


@dataclass(frozen=True)
class Layouts:
    """What a program takes for granted about the memory of its inputs, by their places."""

    written: tuple[int, ...]  # must not overlap others
    together: tuple[tuple[int, ...], ...]  # share a storage, and lie as they did
    facts: Mapping[int, Any]  # of those: how they lie
    same: tuple[tuple[int, int], ...]  # are one tensor
    offsets: Mapping[int, int]  # are written into the graph

    def hold(self, given: Sequence[Any]) -> bool:
        """Whether a call has inputs that lie so."""
        return (
            all(given[i] is given[j] for i, j in self.same)
            and all(given[i].storage_offset() == offset for i, offset in self.offsets.items())
            and all(_one_storage([given[i] for i in places]) for places in self.together)
            and all(_facts(given[i]) == facts for i, facts in self.facts.items())
            and (not self.written or self._apart(given))
        )

    def _apart(self, given: Sequence[Any]) -> bool:
        """Whether what is written overlaps nothing that it did not."""
        places = [i for i, value in enumerate(given) if isinstance(value, Tensor) and value.layout is torch.strided]
        storages = {i: _storages(given[i]) for i in places}
        every = [storage for held in storages.values() for storage in held]
        if len(set(every)) == len(every):
            return True
        known = {frozenset((i, j)) for group in (*self.together, *self.same) for i in group for j in group}
        return not any(
            i != j
            and frozenset((i, j)) not in known
            and not storages[i].isdisjoint(storages[j])
            and _related(given[i], given[j])
            for i in self.written
            for j in places
        )


def _storages(tensor: Tensor) -> frozenset[int]:
    return frozenset(part.untyped_storage()._cdata for part in _parts(tensor))


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    return leaves_of(tensor) if is_wrapper(tensor) else (tensor,)


def _one_storage(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1


def _related(a: Tensor, b: Tensor) -> bool:
    """Whether a write to one of two tensors of one storage may show in the other, or in what autograd knows of it."""
    if is_wrapper(a) or is_wrapper(b) or may_overlap(a, b):
        return True
    return root_of(a) is root_of(b)


def _facts(tensor: Tensor) -> Any:
    lies = tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
    return (*lies, tensor._is_view(), tensor._base is None)


def _changed(joint: Joint) -> set[Any]:
    """Inputs to which the program, or its backward, does something that others may show."""
    changed = {f.recorded.slot for f in joint.inputs if f.data_changed or f.is_acted_on or f.version_change}
    changed |= {f.recorded.slot for f in joint.inputs if f.made_to_require_grad}
    return changed | {write.of for write in joint.backward.writes if not isinstance(write.of, Tangent)}


def layouts_of(
    joint: Joint, shared: Sequence[SharedMemory], slots: Sequence[Primal], tensors: Mapping[Primal, Tensor]
) -> Layouts | None:
    """What a recorded program takes for granted; None where it would be right wherever its inputs lie."""
    place = {slot: i for i, slot in enumerate(slots)}
    real = {slot: tensor for slot, tensor in tensors.items() if slot in place and not isinstance(tensor, FakeTensor)}
    by_id = {id(tensor): place[slot] for slot, tensor in reversed(real.items())}
    together = [tuple(by_id[id(m)] for m in memory.members if id(m) in by_id) for memory in shared]
    changed = _changed(joint)
    same = [f.recorded for f in joint.inputs if f.recorded.same_as is not None and f.recorded.slot in place]
    found = Layouts(
        written=tuple(sorted(place[slot] for slot in changed if slot in place)),
        together=tuple(places for places in together if places),
        facts={i: _facts(real[slots[i]]) for places in together for i in places},
        same=tuple((place[r.slot], place[r.same_as.slot]) for r in same if r.same_as and r.same_as.slot in place),
        offsets=_offsets(joint, place, real) if _depends_on_offsets(joint) else {},
    )
    return found if any(vars(found).values()) else None


def _depends_on_offsets(joint: Joint) -> bool:
    return any(node.op in _BY_OFFSET for node in joint.graph.nodes) or any(map(gives_geometry, joint.outputs.results))


def _offsets(joint: Joint, place: Mapping[Any, int], real: Mapping[Primal, Tensor]) -> dict[int, int]:
    """The offsets of inputs, but for those that are symbols."""
    seen = {f.recorded.slot: f.recorded.seen for f in joint.inputs if isinstance(f.recorded.seen, Tensor)}
    return {
        place[slot]: int(tensor.storage_offset())
        for slot, tensor in real.items()
        if slot in seen
        and tensor.layout is torch.strided
        and not is_wrapper(tensor)
        and not isinstance(seen[slot].storage_offset(), SymInt)
    }
