"""The recording's own autograd graph, kept: every backward that anybody asks for is taken from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from .._torch import set_version
from ..errors import UnsupportedError
from ..functionalize.state import Storage, TensorState
from ..functionalize.storages import changes_memory
from ..functionalize.walk import Functionalizer
from ..ops import Kind, op_info
from ..record.lines import where
from ..record.overlap import storage_of, tensors_in
from ..record.recording import InputsFoundLate, Recording
from ..record.step import Step
from ..slots import Base, Output, Primal, Returned, Tangent, Updated
from .graph import Part, to_fx
from .inputs import InputFacts
from .ir import Node, name_nodes
from .outputs import OutputFacts, Plain


@dataclass(frozen=True, slots=True)
class BackwardWrite:
    """A write that the backward makes to something that the caller holds: an input, or a tangent."""

    of: Primal | Tangent
    current: Node  # what stands for its value when the backward starts
    new: Node | None  # its value afterwards, if the data changes
    reshapes: tuple[Step, ...]
    version_change: int
    checked: bool  # autograd saved it as well, so that a second backward finds it changed


@dataclass(frozen=True, slots=True)
class Differentiated:
    """Gradients as nodes of the flat graph, one or None for each primal, and what else the backward does."""

    gradients: list[Node | None]
    writes: tuple[BackwardWrite, ...]

    @property
    def outputs(self) -> list[Node | None]:
        """What the backward returns."""
        return [*self.gradients, *(write.new for write in self.writes)]


class Tape:
    """Differentiates the targets of a recording, all together or some of them."""

    def __init__(
        self,
        recording: Recording,
        functionalizer: Functionalizer,
        facts_by_slot: dict[Primal, InputFacts],
        primals: Sequence[InputFacts],
        outputs: OutputFacts,
    ) -> None:
        self._recording = recording
        self._primals = [facts.recorded for facts in primals]
        self._functionalizer = functionalizer
        self._ends: dict[
            int, tuple[TensorState, Node]
        ] = {}  # storages that a backward writes, as the forward left them
        self.targets: dict[Returned, Tensor] = {}
        for facts in facts_by_slot.values():
            if facts.written and facts.write_seen_by_autograd and not facts.written_in_graph:
                self.targets[Updated(facts.recorded.slot)] = facts.recorded.seen
        for i, result in enumerate(outputs.results):
            if isinstance(result, Plain) and result.differentiable:
                self.targets[Output(i)] = result.tensor
        for i, base in enumerate(outputs.bases):
            self.targets[Base(i)] = base
        self.tangents: dict[Returned, Tensor] = {}
        for slot, target in self.targets.items():
            tangent = self.tangents[slot] = recording.engine.like(target, dense=True)
            functionalizer.add_fresh(tangent, functionalizer.graph.placeholder(Tangent(slot), tangent))

    def differentiate(self, slots: Sequence[Returned], autocast: bool = False) -> Differentiated:
        """Gradients of some of the targets."""
        recording, functionalizer = self._recording, self._functionalizer
        self._rewind()
        start = len(recording.steps)
        targets, tangents = [self.targets[s] for s in slots], [self.tangents[s] for s in slots]
        versions = {id(r.seen): r.seen._version for r in self._primals if r.is_tensor and not r.seen.is_inference()}
        inputs = len(recording.inputs)
        found = recording.differentiate(targets, tangents, autocast)
        if len(recording.inputs) > inputs:
            raise InputsFoundLate([recording.real_tensors[late.slot] for late in recording.inputs[inputs:]])
        steps = recording.steps[start:]
        held = self._held_by_the_caller(steps, slots)
        states = {slot: functionalizer.state_of(tensor) for slot, tensor in held.items()}
        functionalizer.run(steps, start)
        gradients = [found.get(recorded.slot) for recorded in self._primals]
        nodes = [None if g is None else functionalizer.node_of(g) for g in gradients]
        writes = self._writes(held, steps, versions, lambda: self._fails_again(targets, tangents, autocast))
        for slot, tensor in held.items():  # the tape may be asked again
            functionalizer.put_back(tensor, states[slot], start)
            if id(tensor) in versions:
                set_version(tensor, versions[id(tensor)])
        return Differentiated(nodes, writes)

    # ------------------------------------------------------------------------------------- writes in backward
    def _rewind(self) -> None:
        """Every backward starts from what the forward left behind."""
        self._functionalizer.draws.restart_backward()
        for root, node in self._ends.values():
            _renew(root, node)

    def _held_by_the_caller(self, steps: Sequence[Step], slots: Sequence[Returned]) -> dict[Primal | Tangent, Tensor]:
        """Inputs and tangents whose memory the backward writes to, or whose shape it changes.

        They are read from their roots again: what crosses from forward to backward is their memory, not a view of it.
        """
        changing = [step for step in steps if op_info(step.op).kind in (Kind.WRITE, Kind.RESHAPE)]
        if not changing:
            return {}
        touched = {storage_of(t) for step in changing for t in tensors_in([step.args[i] for i in _positions(step)])}
        held: dict[Primal | Tangent, Tensor] = {r.slot: r.seen for r in self._primals if r.is_tensor and not r.same_as}
        held |= {Tangent(slot): self.tangents[slot] for slot in slots}
        moving = [step.args[0] for step in changing if op_info(step.op).kind is Kind.RESHAPE and changes_memory(step)]
        for slot, tensor in held.items():
            if any(tensor is other for other in moving):
                raise UnsupportedError(f"the backward resizes or moves {slot}, which cannot be compiled yet.")
        held = {slot: tensor for slot, tensor in held.items() if storage_of(tensor) in touched}
        for tensor in held.values():
            root = self._functionalizer.state_of(tensor).root
            self._ends.setdefault(id(root.storage), (root, root.node))
        self._rewind()
        return held

    def _writes(
        self,
        held: dict[Primal | Tangent, Tensor],
        steps: Sequence[Step],
        versions: dict[int, int],
        fails_again: Callable[[], bool],
    ) -> tuple[BackwardWrite, ...]:
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
            root, current = self._ends[id(storage)]
            change = tensor._version - versions.get(id(tensor), 0)
            found.append(BackwardWrite(slot, current, walk.read(root) if written else None, reshapes, change, False))
        for write in walk.backward_writes:
            if write.step in steps and not write.target.storage.made_in_backward and write.target.storage not in known:
                raise UnsupportedError(
                    f"{write.step.op}, at {where(write.step.stack)}, writes in backward to a tensor that the forward "
                    "made, which cannot be compiled yet. Pass it as an argument, or compile with fallback='eager'."
                )
        if found and fails_again():
            found = [replace(write, checked=True) for write in found]
        return tuple(found)

    def _fails_again(self, targets: Sequence[Tensor], tangents: Sequence[Tensor], autocast: bool) -> bool:
        """Whether autograd, asked a second time, finds that the backward has changed what it had saved."""
        recording = self._recording
        end = len(recording.steps)
        try:
            recording.differentiate(targets, tangents, autocast)
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        finally:
            del recording.steps[end:]
        return False

    # ----------------------------------------------------------------------------------------------- in part
    def partial_backward(
        self, slots: Sequence[Returned], saved: Sequence[str], writes: Sequence[BackwardWrite]
    ) -> fx.GraphModule:
        """The backward for some of the tangents, over the values that the forward saved (their names are given).

        It has the same inputs and outputs as the backward for all of them; the other tangents are not read. It is
        recorded under the autocast state of the caller.
        """
        graph = self._functionalizer.graph
        start = len(graph.nodes)
        derived = self.differentiate(slots, autocast=True)
        new = {write.of: write.new for write in derived.writes}
        outputs = [*derived.gradients, *(new.get(write.of) for write in writes)]
        by_name = {node.name: node for node in (*graph.placeholders, *graph.nodes) if node.name}
        given = [by_name[name] for name in saved]
        tangents = [node for node in graph.placeholders if isinstance(node.slot, Tangent)]
        random = self._functionalizer.draws.backward
        drawn = [node for node in graph.nodes[start:] if node.impure]  # runs whether anybody reads it or not
        if random is not None and random.draws:
            tangents += [random.seed, random.base]  # what only the backward is given
            outputs.append(random.offset)
        nodes = _between([*given, *tangents], [*(node for node in outputs if node is not None), *drawn])
        name_nodes(nodes, by_name)
        return to_fx(Part([*given, *tangents], nodes, outputs))


def _renew(root: TensorState, node: Node) -> None:
    root.node = node
    root.storage.generation += 1
    root.generation = root.storage.generation


def _positions(step: Step) -> list[int]:
    written = op_info(step.op).written if op_info(step.op).kind is Kind.WRITE else (0,)
    return [i for i in written if i < len(step.args)]


def _between(given: Sequence[Node], wanted: Sequence[Node]) -> list[Node]:
    """What computes the wanted nodes from the given ones, in order."""
    done = {id(node) for node in given}
    order: list[Node] = []
    pending: list[tuple[Node, bool]] = [(node, False) for node in reversed(wanted)]
    while pending:
        node, ready = pending.pop()
        if id(node) in done and not ready:
            continue
        if ready:
            if id(node) not in done:
                done.add(id(node))
                order.append(node)
            continue
        if node.op is None or (node.impure and not node.backward):
            raise UnsupportedError("this backward needs a value of the forward that was not saved for it.")
        pending.append((node, True))
        pending.extend((item, False) for item in node.inputs())
    return order
