"""Memory that several inputs look at, and the program writes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch import FakeTensor, Geometry
from ..abstract.sparse import SPARSE, storages_of
from ..errors import UnsupportedError
from ..joint.build import Joint
from ..joint.inputs import InputFacts, Resized
from ..record.alias_groups import (
    SharedMemory,
    groups_by_storage,
    has_views_among,
    lies_in_more,
    overlaps_somewhere,
    related_to,
    share,
)
from ..record.fakify import Argument
from ..record.session import Session
from ..slots import Primal, Tangent
from ..subclasses.layout import leaves_of
from .free_variables import Holder
from .kinds import memory_of


def plan_memories(session: Session, changes: Changes, whole: Set[Primal]) -> list[SharedMemory]:
    """Storages that must be inputs, for the inputs that look at them: written, where these may overlap (B-1)."""
    plan: list[SharedMemory] = []
    for group in groups_by_storage(session.real_tensors) if whole or changes else ():
        flat = not whole.isdisjoint(group)
        if not flat and not changes.show_in(group):
            continue
        if any(isinstance(tensor, FakeTensor) for tensor in group.values()):
            names = ", ".join(map(str, group))
            raise UnsupportedError(f"{names} share memory that is written, and are fake: this cannot be compiled yet.")
        plan.append(share(len(plan), group, flat=flat))
    _refuse_sharing_with_sparse(session.real_tensors, changes)
    _refuse_memory_of_two_storages(session.real_tensors, changes)
    return plan


def _refuse_sharing_with_sparse(tensors: Mapping[Primal, Tensor], changes: Changes) -> None:
    """Refuse a write that shows in a sparse input: its indices and values are no inputs of their own."""
    written = {key for slot in changes.written if slot in tensors for key in storages_of(tensors[slot])}
    for slot, tensor in tensors.items() if written else ():
        if tensor.layout in SPARSE and not written.isdisjoint(storages_of(tensor)):
            raise UnsupportedError(
                f"the program writes to memory that the sparse {slot} shares: this cannot be compiled yet. Pass a "
                "clone of it."
            )


class _Span(NamedTuple):
    start: int
    stop: int
    of: Primal
    is_written: bool


def _refuse_memory_of_two_storages(tensors: Mapping[Primal, Tensor], changes: Changes) -> None:
    """Refuse a write to memory for which another input has a storage of its own, as `from_numpy` makes one."""
    found: dict[int, _Span] = {}
    for slot, tensor in tensors.items() if changes.written else ():
        for leaf in leaves_of(tensor):
            if leaf.device.type == "cpu" and leaf.layout is torch.strided and not isinstance(leaf, FakeTensor):
                memory = leaf.untyped_storage()
                start, is_written = memory.data_ptr(), slot in changes.written
                if is_written or memory._cdata not in found:
                    found[memory._cdata] = _Span(start, start + memory.nbytes(), slot, is_written)
    before: list[_Span] = []
    for span in sorted(found.values(), key=lambda span: span.start):
        before = [other for other in before if other.stop > span.start]
        for other in before:
            if span.is_written or other.is_written:
                raise UnsupportedError(
                    f"the program writes to memory of {other.of} and {span.of}, each of which has a storage of its own "
                    "over it (torch.from_numpy makes such): this cannot be compiled yet. Pass a clone of one of them."
                )
        before.append(span)


def refuse_sharing_with_arrays(holders: Sequence[Holder], tensors: Mapping[Primal, Tensor], changes: Changes) -> None:
    """Refuse a write to memory of an array that the program can reach: one that it reads later shows it in eager."""
    holders = [holder for holder in holders if holder.kind.compared == "numbers"]
    written = changes.written & tensors.keys() if holders else frozenset()
    for slot, tensor in [(place, leaf) for place in written for leaf in leaves_of(tensors[place])]:
        if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            continue
        start = tensor.untyped_storage().data_ptr()
        memory = range(start, start + tensor.untyped_storage().nbytes())
        for path, owner, _, _ in holders:
            shared = memory_of(owner)
            if shared and memory and shared.start < memory.stop and memory.start < shared.stop:
                raise UnsupportedError(
                    f"the program writes to {slot}, which shares its memory with {path}, an array that it can reach: "
                    "what it reads there would not show the write. Read the tensor in place of the array, or pass a "
                    "clone."
                )


class Changes(NamedTuple):
    """What a program did to its inputs that may show in others which share their memory."""

    written: frozenset[Primal] = frozenset()
    refitted: frozenset[Primal] = frozenset()  # they look at other elements of their storage now
    counted: frozenset[Primal] = frozenset()  # their versions have changed
    flagged: frozenset[Primal] = frozenset()  # they were made to require grad
    rebased: frozenset[Primal] = frozenset()  # autograd has seen the write, and takes it for one to all views

    @classmethod
    def of(cls, joint: Joint) -> Changes:
        """What is known once the program is differentiated."""

        changed = [
            facts
            for facts in joint.inputs
            if facts.data is not None or facts.place is not None or facts.version_change or facts.made_to_require_grad
        ]

        def those(holds: Callable[[InputFacts], object]) -> frozenset[Primal]:
            return frozenset(facts.recorded.slot for facts in changed if holds(facts))

        in_backward = [write.of for write in joint.backward.writes if not isinstance(write.of, Tangent)]
        return cls(
            written=those(lambda facts: facts.data_changed).union(in_backward),
            refitted=those(lambda facts: isinstance(facts.place, Resized)),
            counted=those(lambda facts: facts.version_change),
            flagged=those(lambda facts: facts.made_to_require_grad),
            rebased=those(lambda facts: facts.data_changed and (facts.followed or joint.is_training)),
        )

    def __bool__(self) -> bool:
        return bool(self.written or self.counted or self.flagged)

    def show_in(self, group: dict[Primal, Tensor]) -> bool:
        """Whether they show in several inputs that share one storage."""
        if len(group) == 1 and self.flagged.isdisjoint(group):
            return False
        if len(group) > 1 and not self.written.isdisjoint(group):
            # Two that take other elements of one memory may meet there, wherever they came from.
            meet = overlaps_somewhere(group.values()) or len(self.refitted.intersection(group)) > 1
            if meet or related_to(group, self.rebased):
                return True
        # A change of shape, or a write to nothing, shows in the versions of views that autograd follows.
        differentiated = len(group) > 1 and any(tensor.requires_grad for tensor in group.values())
        return (differentiated and related_to(group, self.counted)) or has_views_among(group, self.flagged)


def in_larger_memory(session: Session) -> set[Primal]:
    """Inputs that are not all of their storage: what lies beside them may explain an error."""
    lifted = {slot: t for slot, t in session.real_tensors.items() if not isinstance(t, FakeTensor)}
    groups = groups_by_storage({slot: t for slot, t in lifted.items() if t.layout is torch.strided})
    return {slot for group in groups for slot, tensor in group.items() if len(group) > 1 or lies_in_more(tensor)}


def guarded_where_shared(arguments: Sequence[Argument], shared: Sequence[SharedMemory]) -> list[Argument]:
    """Inputs that share written memory have sizes that the front end compares: it compiles again for others."""
    members = {id(tensor) for memory in shared for tensor in memory.members}
    fixed = []
    for argument in arguments:
        if isinstance(argument.dynamic, Geometry) and id(argument.value) in members:
            argument.dynamic.as_numbers()
            argument = argument._replace(dynamic=False)
        fixed.append(argument)
    return fixed
