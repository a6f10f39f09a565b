"""Writes that a backward makes to what the caller holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from .._torch import set_version
from ..errors import UnsupportedError
from ..functionalize.state import Storage, TensorState
from ..functionalize.storages import changes_memory
from ..functionalize.walk import Functionalizer
from ..ops import Kind, op_info, tensors_in
from ..record.lines import where
from ..record.overlap import storage_of
from ..record.step import Step
from ..slots import Primal, Root, Tangent
from .ir import Node

Held = dict[Primal | Tangent, Tensor]


@dataclass(frozen=True, slots=True)
class BackwardWrite:
    """A write that the backward makes to something that the caller holds: an input, or a tangent."""

    of: Primal | Tangent
    current: Node  # what stands for its value when the backward starts
    new: Node | None  # its value afterwards, if the data changes
    reshapes: tuple[Step, ...]
    version_change: int
    checked: bool  # autograd saved it as well, so that a second backward finds it changed


class BackwardWrites:
    """Functionalizes backwards one after another, each of which starts from what the forward left behind."""

    def __init__(self, functionalizer: Functionalizer) -> None:
        self._functionalizer = functionalizer
        self._ends: dict[
            int, tuple[TensorState, Node]
        ] = {}  # storages that a backward writes, as the forward left them

    def rewind(self) -> None:
        """Forget what an earlier backward wrote."""
        for root, node in self._ends.values():
            _renew(root, node)

    def run(
        self,
        steps: Sequence[Step],
        start: int,
        candidates: Held,
        versions: Mapping[int, int],
        gradients: Callable[[], list[Node | None]],
        fails_again: Callable[[], bool],
    ) -> tuple[list[Node | None], tuple[BackwardWrite, ...]]:
        """Walk over the steps of a backward: its gradients, and its writes to the candidates."""
        walk = self._functionalizer
        held = self.written(steps, candidates)
        states = {slot: walk.state_of(tensor) for slot, tensor in held.items()}
        walk.run(steps, start)
        nodes = gradients()
        writes = self._writes(held, steps, versions)
        if writes and fails_again():
            writes = [replace(write, checked=True) for write in writes]
        for slot, tensor in held.items():  # the tape may be asked again
            walk.put_back(tensor, states[slot], start)
            if id(tensor) in versions:
                set_version(tensor, versions[id(tensor)])
        return nodes, tuple(writes)

    def give_up(self, steps: Sequence[Step], candidates: Held, versions: Mapping[int, int]) -> None:
        """Put back what a backward that autograd has refused midway did to the candidates."""
        held = {storage_of(tensor) for tensor in candidates.values()}
        made = {storage_of(t) for step in steps if not written_by(step) for t in tensors_in([step.out])}
        for step in steps:
            if any(storage_of(t) not in held | made for t in written_by(step)):
                raise _writes_to_the_forwards(step)
        for tensor in candidates.values():
            if id(tensor) in versions:
                set_version(tensor, versions[id(tensor)])

    def written(self, steps: Sequence[Step], candidates: Held) -> Held:
        """Candidates whose memory the backward writes to, or whose shape it changes.

        They are read from their roots again: what crosses from forward to backward is their memory, not a view of it.
        """
        changing = [step for step in steps if op_info(step.op).kind in (Kind.WRITE, Kind.RESHAPE)]
        if not changing:
            return {}
        touched = {storage_of(t) for step in changing for t in tensors_in([step.args[i] for i in _positions(step)])}
        moving = [step.args[0] for step in changing if op_info(step.op).kind is Kind.RESHAPE and changes_memory(step)]
        for slot, tensor in candidates.items():
            if any(tensor is other for other in moving):
                raise UnsupportedError(f"the backward resizes or moves {slot}, which cannot be compiled yet.")
        held = {slot: tensor for slot, tensor in candidates.items() if storage_of(tensor) in touched}
        for tensor in held.values():
            root = self._functionalizer.state_of(tensor).root
            self._ends.setdefault(id(root.storage), (root, root.node))
        self.rewind()
        return held

    def _writes(self, held: Held, steps: Sequence[Step], versions: Mapping[int, int]) -> list[BackwardWrite]:
        walk = self._functionalizer
        known: list[Storage] = []
        found: list[BackwardWrite] = []
        for slot, tensor in held.items():
            storage = walk.state_of(tensor).storage
            reshapes = tuple(step for step in steps if op_info(step.op).kind is Kind.RESHAPE and step.args[0] is tensor)
            written = any(write.step in steps for write in storage.writes)
            known.append(storage)
            if not written and not reshapes:
                continue
            if isinstance(slot, Root):
                raise UnsupportedError(
                    "the backward writes to memory at which inputs with histories of their own look, which cannot be "
                    "compiled yet. Pass a clone, or compile with fallback='eager'."
                )
            root, current = self._ends[id(storage)]
            change = tensor._version - versions.get(id(tensor), 0)
            found.append(BackwardWrite(slot, current, walk.read(root) if written else None, reshapes, change, False))
        for write in walk.backward_writes:
            if write.step in steps and not write.target.storage.made_in_backward and write.target.storage not in known:
                raise _writes_to_the_forwards(write.step)
        return found


def _writes_to_the_forwards(step: Step) -> UnsupportedError:
    return UnsupportedError(
        f"{step.op}, at {where(step.stack)}, writes in backward to a tensor that the forward made, which cannot be "
        "compiled yet. Pass it as an argument, or compile with fallback='eager'."
    )


def written_by(step: Step) -> list[Tensor]:
    """The tensors that a step writes to."""
    if op_info(step.op).kind is not Kind.WRITE:
        return []
    return list(tensors_in([step.args[i] for i in _positions(step)]))


def _renew(root: TensorState, node: Node) -> None:
    root.node = node
    root.storage.generation += 1
    root.generation = root.storage.generation


def _positions(step: Step) -> list[int]:
    written = op_info(step.op).written if op_info(step.op).kind is Kind.WRITE else (0,)
    return [i for i in written if i < len(step.args)]
