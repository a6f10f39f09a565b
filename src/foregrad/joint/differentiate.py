"""Differentiate a recording: every backward that is asked for is taken from the recording's own autograd graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload, frees_when_run, is_internal_assertion, is_version_error, names_jagged_size, set_version
from ..abstract.engine import Engine, has_gaps
from ..abstract.kernel_checks import storage_of
from ..errors import BackwardError, ExportError, ForegradError, UnsupportedError
from ..functionalize.effect_tokens import Chain
from ..functionalize.functionalizer import Functionalizer
from ..functionalize.rng import RandomInputs
from ..functionalize.state import Storage, TensorState
from ..functionalize.storage import changes_memory
from ..functionalize.view_inverses import repeats_elements
from ..graph.graph import Graph, GraphOutput, Node, Step, get_constant, name_nodes, nodes_in
from ..graph.subgraph import between, impure_since, inputs_needed, read_by, read_from_given
from ..ops import Kind, aten, op_info, tensors_in
from ..options import AOTConfig, Loss
from ..record.fakify import RecordedInput
from ..record.hooks import BackwardState
from ..record.refusals import without_frames
from ..record.retrace import LateInputs, Retrace, WholeMemory
from ..record.session import RecordedBackward, Session
from ..record.tape import tape_nodes
from ..slots import (
    BackwardUpdate,
    Base,
    Grad,
    Inner,
    LowerTangent,
    Output,
    Primal,
    RandomState,
    Returned,
    Slot,
    Tangent,
    Updated,
    ViewRoot,
)
from ..stack_traces import where
from ..subclasses.layout import Layout, Wrapped, is_wrapper, layout_of, leaves_of, spread
from .inputs import Autograd, InputFacts, WrittenBack, is_stale
from .outputs import OutputFacts, Plain, view_root
from .subclasses import wrapper_tangent


# ---------------------------------------------------------------------------------------------------------------------
# Tensors that the program makes from Python values: part of the graph, and fresh at each call for whoever sees them.
#
# A constant that is not seen outside is used as it is. One whose memory a result shows is copied where it is first
# met, so that everything else in the graph reads the very copy that the caller gets: autograd then notices a write to
# it as it does in eager.
def copy_seen_constants(walk: Functionalizer, results: Sequence[Any]) -> None:
    """Turn each constant whose memory is seen through `results` into a copy of itself, for all who read it."""
    seen = {id(root): root for node in nodes_in(results) if (root := _memory_of(node)) is not None}
    if not seen:
        return
    graph = walk.graph
    before, graph.nodes = graph.nodes, []
    for node in before:
        if id(node) in seen:
            graph.stack, graph.backward, graph.origin = node.stack, node.backward, node.origin
            node.become(_copy(walk, graph.constant(node.args[0], node.value)))
            graph.nodes.pop()  # the copy: the node stands in its place
        graph.nodes.append(node)
    graph.stack, graph.backward, graph.origin = (), False, None


def with_own_constants(walk: Functionalizer, results: Sequence[Any]) -> list[Any]:
    """The same results over copies of the constants that they show; graphs that were made before stay as they are."""
    regenerated: dict[int, Node] = {}

    def again(node: Node) -> Node:
        if id(node) not in regenerated:
            if node.op is get_constant:
                regenerated[id(node)] = _copy(walk, node)
            else:
                assert node.op is not None
                args = (again(node.args[0]), *node.args[1:])
                regenerated[id(node)] = walk.graph.call(node.op, args, node.kwargs, node.value)
        return regenerated[id(node)]

    return [again(r) if isinstance(r, Node) and _memory_of(r) is not None else r for r in results]


def _memory_of(node: Node) -> Node | None:
    """The constant whose memory a node shows."""
    while _looks_at_its_argument(node):
        node = node.args[0]
    return node if node.op is get_constant and isinstance(node.args[0], Tensor) else None


def _looks_at_its_argument(node: Node) -> bool:
    if node.op is operator.getitem:
        return _looks_at_its_argument(node.args[0])
    return isinstance(node.op, OpOverload) and op_info(node.op).kind is Kind.VIEW


def _copy(walk: Functionalizer, constant: Node) -> Node:
    held = constant.value
    alike = walk.engine.strided(held, held.stride(), held.device)
    if has_gaps(held):
        return walk.with_layout(constant, alike)
    return walk.graph.call(aten.lift_fresh_copy.default, (constant,), {}, alike)


# ---------------------------------------------------------------------------------------------------------------------
# Writes that a backward makes to what the caller holds.
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
    """Functionalizes backwards one after another, each of which starts from what the forward left."""

    def __init__(self, functionalizer: Functionalizer) -> None:
        self._functionalizer = functionalizer
        # Storages that a backward writes, as the forward left them.
        self._ends: dict[int, tuple[TensorState, Node]] = {}

    def rewind(self) -> None:
        """Forget what an earlier backward wrote."""
        for root, node in self._ends.values():
            root.node = node
            root.storage.generation += 1
            root.generation = root.storage.generation

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
            if isinstance(slot, ViewRoot):
                raise UnsupportedError(
                    "the backward writes to memory at which inputs with histories of their own look, which cannot be "
                    "compiled yet. Pass a clone, or compile with fallback='eager'."
                )
            if written and not isinstance(slot, Tangent) and repeats_elements(tensor):
                raise Retrace(WholeMemory(slot))  # its new value cannot be written to it, but to its memory it can
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


def _positions(step: Step) -> list[int]:
    written = op_info(step.op).written if op_info(step.op).kind is Kind.WRITE else (0,)
    return [i for i in written if i < len(step.args)]


# ---------------------------------------------------------------------------------------------------------------------
# What is differentiated of a program's results: all that can be, and in export the loss, or nothing.
def targets_of(
    config: AOTConfig, facts: Sequence[InputFacts], outputs: OutputFacts, visible: int
) -> dict[Returned, Tensor]:
    """What is differentiated, as the options ask for it; the first `visible` results are the user's."""
    match config.differentiate:
        case Loss(index, others_may_require_grad):
            target = _loss_target(index, outputs, visible)
            if not others_may_require_grad:
                _refuse_other_targets(index, outputs, visible)
            return target
        case False:
            return {}
        case _:
            return _all_targets(facts, outputs)


def _all_targets(facts: Sequence[InputFacts], outputs: OutputFacts) -> dict[Returned, Tensor]:
    """Everything that can be differentiated."""
    targets: dict[Returned, Tensor] = {}
    for item in facts:
        match item.data:
            case WrittenBack(Autograd.FOLLOWED):
                targets[Updated(item.recorded.slot)] = item.recorded.seen
    for i, result in enumerate(outputs.results):
        if isinstance(result, Plain) and result.differentiable:
            targets[Output(i)] = result.tensor
    for i, base in enumerate(outputs.bases):
        targets[Base(i)] = base
    return targets


def _loss_target(index: int, outputs: OutputFacts, visible: int) -> dict[Returned, Tensor]:
    """The loss among the first `visible` results."""
    if not 0 <= index < visible:
        raise ExportError(f"output_loss_index={index}, but the program returns {visible} values.")
    loss = outputs.tensors[index]
    if loss is None:
        raise ExportError(f"output {index} was marked as the loss, but it does not require gradients: it is no tensor.")
    if is_stale(loss) or not loss.requires_grad:
        raise ExportError(
            f"output {index} was marked as the loss, but it does not require gradients. Mark another output, or let a "
            "parameter or an input that it is computed from require grad."
        )
    if loss.numel() != 1:
        raise ExportError(
            f"We require the output marked as the loss (at index {index}) to be a scalar, but it has shape "
            f"{tuple(loss.shape)}. Reduce it, as with sum() or mean()."
        )
    if loss.is_complex():
        raise ExportError(f"the loss (at index {index}) is complex. Take a real number of it, as with abs().")
    return {Output(index): loss}


def _refuse_other_targets(index: int, outputs: OutputFacts, visible: int) -> None:
    loss = outputs.tensors[index]
    for i, tensor in enumerate(outputs.tensors[:visible]):
        if i != index and tensor is not None and tensor is not loss and not is_stale(tensor) and tensor.requires_grad:
            raise ExportError(
                "Found an output of the forward that requires gradients, that was not the scalar loss: it stands at "
                f"index {i}, has shape {tuple(tensor.shape)}, and the loss is at {index}. A backward exists for the "
                "loss alone: detach() the other outputs, or use foregrad.export.export, which returns them as they are."
            )


# ---------------------------------------------------------------------------------------------------------------------
# The recording's own autograd graph, kept: every backward that is asked for is taken from it.
#
# A `Tape` is one order of differentiation. The targets of the first are what the program returns; those of the next
# are the gradients that a backward gave, recorded once more to be differentiated themselves (`double_backward`).
@dataclass(frozen=True, slots=True)
class Differentiated:
    """Gradients as nodes of the flat graph, one or None for each primal, and what else the backward does."""

    gradients: list[Any]  # those that are wrapper subclasses as several nodes
    writes: tuple[BackwardWrite, ...] = ()
    tokens: Chain = field(default_factory=Chain)  # of its effects
    refused: dict[Returned, Exception] = field(default_factory=dict)  # autograd's errors, by target
    state: BackwardState | None = None  # that code of the user's has read in it
    emptied: frozenset[int] = frozenset()  # selective checkpoints that it runs through

    def outputs(self, primals: Sequence[RecordedInput]) -> list[GraphOutput]:
        """What the backward returns: gradients of primals and of lower tangents, what it wrote, tokens."""
        lower = [LowerTangent(i) for i in range(len(self.gradients) - len(primals))]
        slots = (*(recorded.slot for recorded in primals), *lower)
        gradients = [output for pair in zip(slots, self.gradients, strict=True) for output in outputs_for(*pair)]
        return [
            *(GraphOutput(Grad(slot), node) for slot, node in gradients),  # type: ignore[arg-type]
            *(GraphOutput(BackwardUpdate(write.of), write.new) for write in self.writes),
            *map(GraphOutput, self.tokens.slots, self.tokens.ends),
        ]

    @property
    def is_checked(self) -> bool:
        """Whether autograd finds what it wrote changed, when it is asked again."""
        return any(write.checked for write in self.writes)

    @property
    def layouts(self) -> tuple[Layout | None, ...]:
        """How each gradient is put together, where it is a wrapper subclass."""
        return tuple(g.layout if isinstance(g, Wrapped) else None for g in self.gradients)


def outputs_for(slot: Slot, value: Any) -> list[GraphOutput]:
    """The outputs of a graph for a value; several for one that is a wrapper subclass."""
    if isinstance(value, Wrapped):
        return [*map(GraphOutput, value.layout.slots(slot), value.leaves)]
    return [GraphOutput(slot, value)]


@dataclass(frozen=True, slots=True)
class PartialBackward:
    """A backward for some of the tangents: its graph, and which saved values it takes before all the tangents."""

    graph: Graph
    saved: tuple[int, ...]
    backward: Differentiated  # what else it does


def refuse_late_inputs(backward: RecordedBackward) -> None:
    """A tensor that only the backward finds must be an input from the start."""
    if backward.late:
        raise Retrace(LateInputs(backward.late))


class Tape:
    """Differentiates the targets of one order, all together or some of them."""

    def __init__(
        self,
        session: Session,
        functionalizer: Functionalizer,
        primals: Sequence[RecordedInput],
        targets: dict[Returned, Tensor],
        lower_tangents: Sequence[Tensor] = (),
        number: int = 1,
        written_views: frozenset[Any] = frozenset(),
        fresh_leaves: Sequence[Tensor] = (),
    ) -> None:
        self.session = session
        self.functionalizer = functionalizer
        self.primals = primals
        self.number = number  # of the order
        self.lower_tangents = lower_tangents  # of lower orders: they too can be differentiated for
        self._writes = BackwardWrites(functionalizer)
        self.targets = targets
        self.tangents: dict[Returned, Tensor] = {}
        self.nodes_of_tangents: dict[Returned, list[Node]] = {}  # several for a wrapper subclass
        self.by_name: dict[str, Node] = {}  # for a higher order, whose graph is a copy: the originals of its nodes
        self._freed: dict[tuple[Returned, ...], frozenset[Any]] = {}
        self._behind_checkpoints: dict[tuple[Returned, ...], set[Primal]] = {}
        self.fresh_leaves = fresh_leaves  # that the program made and returned: no gradient reaches them from here
        self._written_views = written_views  # nodes of writes to inputs that are views: eager frees what wraps them
        for slot, target in targets.items():
            tangent = self.tangents[slot] = tangent_like(session.engine, target)
            for place, leaf in zip(_places(slot, tangent), leaves_of(tangent), strict=True):
                node = functionalizer.graph.placeholder(place, leaf)
                self.nodes_of_tangents.setdefault(slot, []).append(node)
                if number > 1:  # those of the first order are named with the whole program
                    node.name = f"order{number}_tangents_{len(self.tangent_nodes)}"
                if not names_jagged_size(leaf):  # that is the forward's own
                    functionalizer.add_fresh(leaf, node)

    @property
    def gradients(self) -> int:
        """How many gradients, or None, a backward gives."""
        return len(self.primals) + len(self.lower_tangents)

    def chosen(self, mask: Sequence[bool]) -> tuple[Returned, ...]:
        """Those targets that take part in a backward: one flag for each says so."""
        return tuple(slot for slot, used in zip(self.targets, mask, strict=True) if used)

    @property
    def tangent_nodes(self) -> list[Node]:
        """The placeholders of all tangents."""
        return [node for nodes in self.nodes_of_tangents.values() for node in nodes]

    @cached_property
    def has_wrappers(self) -> bool:
        """Whether wrapper subclasses take part: a graph then takes and gives what is inside of them."""
        tangents = (*self.tangents.values(), *self.lower_tangents)
        return any(r.layout is not None for r in self.primals) or any(map(is_wrapper, tangents))

    @property
    def random(self) -> RandomInputs | None:
        """The seed and the offset that a backward draws from, under `functionalize_rng_ops`."""
        return self.functionalizer.random[1]

    @cached_property
    def reached(self) -> set[Primal]:
        """Inputs that autograd has an edge to: higher orders may give them gradients where this one does not."""
        return self.session.reached_inputs(list(self.targets.values()))

    @property
    def holds_checkpoints(self) -> bool:
        """Whether there is a reentrant checkpoint on it."""
        return self.session.holds_checkpoints

    def behind_checkpoints(self, slots: tuple[Returned, ...]) -> set[Primal]:
        """Inputs that a backward of these targets reaches through a reentrant checkpoint."""
        known = self._behind_checkpoints.get(slots)
        if known is None:
            known = self.session.inputs_behind_checkpoints([self.targets[slot] for slot in slots])
            self._behind_checkpoints[slots] = known
        return known

    def differentiate(self, slots: Sequence[Returned], autocast: bool = False) -> Differentiated:
        """Gradients of some of the targets."""
        session, walk = self.session, self.functionalizer
        self._writes.rewind()
        walk.restart_backward()
        start = len(session.steps)
        targets, tangents = [self.targets[s] for s in slots], [self.tangents[s] for s in slots]
        versions = {id(r.seen): r.seen._version for r in self.primals if r.is_tensor and not r.seen.is_inference()}
        try:
            backward = session.differentiate(targets, tangents, autocast, self.lower_tangents)
        except Exception:
            self._writes.give_up(session.steps[start:], self._held_by_the_caller(slots), versions)
            raise
        refuse_late_inputs(backward)
        found = self.in_order(backward)
        nodes, writes = self._writes.run(
            backward.steps,
            start,
            self._held_by_the_caller(slots),
            versions,
            lambda: [None if g is None else value_of(walk, g) for g in found],
            lambda: self._fails_again(targets, tangents, autocast),
        )
        for write in writes:
            if isinstance(write.of, Inner):
                raise UnsupportedError(
                    f"the backward writes to {write.of}, in a tensor subclass, which cannot be compiled yet."
                )
        return Differentiated(nodes, writes, walk.chain(), state=backward.state, emptied=backward.emptied)

    def differentiate_all(self) -> Differentiated:
        """Gradients of everything that can be differentiated, and autograd's errors for what cannot.

        Eager raises such an error when backward is called, and so does the compiled program.
        """
        nothing = Differentiated([None] * self.gradients)
        graph, wanted = self.functionalizer.graph, tuple(self.targets)
        start = len(graph.nodes)
        derived = self._attempt(wanted) if wanted else nothing
        if isinstance(derived, Differentiated):
            return derived
        refused: dict[Returned, Exception] = {}
        for slot in wanted:
            error = self._attempt((slot,))
            if isinstance(error, Exception):
                self._refuse_sparse(error)
                refused[slot] = _named(without_frames(error))
        for node in graph.nodes[start:]:  # of attempts that were given up
            node.impure = False
        sound = tuple(slot for slot in wanted if slot not in refused)
        derived = self._attempt(sound) if sound else nothing
        if isinstance(derived, Differentiated):
            return replace(derived, refused=refused)
        refusal = UnsupportedError(
            "the backward of one result writes to what the backward of another has saved, so that they cannot be "
            f"differentiated together ({derived}): this cannot be compiled yet. Compile with fallback='eager'."
        )
        return replace(nothing, refused=refused | dict.fromkeys(sound, refusal))

    def _attempt(self, slots: Sequence[Returned]) -> Differentiated | Exception:
        """Gradients of some of the targets, or what autograd said when it was asked for them."""
        try:
            return self.differentiate(slots)
        except (ForegradError, Retrace):  # what says nothing about gradients
            raise
        except Exception as error:
            return error

    def _refuse_sparse(self, error: Exception) -> None:
        """How many elements a sparse tensor holds is data: an error about them need not be eager's."""
        made = tensors_in([step.out for step in self.session.steps])
        if any(tensor.layout is not torch.strided for tensor in made):
            raise UnsupportedError(
                f"the program differentiates sparse tensors in a way that cannot be compiled yet ({error}). Compile "
                "with fallback='eager'."
            ) from error

    def in_order(self, backward: RecordedBackward) -> list[Tensor | None]:
        """Its gradients: those of the primals, then those of lower tangents."""
        return [*(backward.by_slot.get(recorded.slot) for recorded in self.primals), *backward.others]

    def writes_to_inputs(self, steps: Sequence[Step]) -> bool:
        """Whether a backward writes to anything that the caller has passed."""
        return bool(self._writes.written(steps, self._held_by_the_caller(())))

    def _held_by_the_caller(self, slots: Sequence[Returned]) -> Held:
        held: Held = {}
        for recorded in self.primals:
            plain = [recorded] if recorded.layout is None else recorded.inner
            held |= {r.slot: r.seen for r in plain if r.is_tensor and not r.same_as}
        for slot in slots:
            tangent = self.tangents[slot]
            held |= dict(zip(_places(slot, tangent), leaves_of(tangent), strict=True))
        return held

    def _fails_again(self, targets: Sequence[Tensor], tangents: Sequence[Tensor], autocast: bool) -> bool:
        """Whether autograd, asked a second time, finds that the backward has changed what it had saved."""
        try:
            with self.session.nothing_kept():
                self.session.differentiate(targets, tangents, autocast)
        except RuntimeError as error:
            return is_version_error(error)
        return False

    def differentiably(self, slots: Sequence[Returned], tangents: Sequence[Tensor]) -> RecordedBackward:
        """A backward for these tangents whose gradients have a history themselves."""
        targets = [self.targets[slot] for slot in slots]
        return self.session.differentiate(targets, tangents, True, self.lower_tangents, create_graph=True)

    def require_grad_afterwards(
        self, slots: Sequence[Returned], with_grad: Sequence[bool]
    ) -> tuple[list[bool], set[Primal | Tangent]]:
        """Which gradients require grad under `create_graph`, and which inputs are written with gradients on.

        Nothing of this backward is kept.
        """
        session = self.session
        tangents = [tangent_like(session.engine, self.targets[slot]) for slot in slots]
        for tangent, required in zip(tangents, with_grad, strict=True):
            tangent.requires_grad_(required)
        before = [
            (r.slot, r.seen, r.seen._version, r.seen.requires_grad)
            for r in self.primals
            if r.is_tensor and not r.seen.is_inference()
        ]
        try:
            with session.nothing_kept():
                backward = self.differentiably(slots, tangents)
        except RuntimeError as error:
            own = session.leads_to_own_leaves([self.targets[slot] for slot in slots])
            if isinstance(error, ForegradError) or not own:
                raise
            raise UnsupportedError(
                f"with create_graph=True this backward raises '{error}', perhaps on the way to a leaf that the program "
                "made, where eager goes only if nobody says which gradients are wanted: this cannot be compiled yet."
            ) from error
        written = [t for step in backward.steps if step.grad_enabled for t in written_by(step)]
        exposed: set[Primal | Tangent] = {
            slot for slot, seen, _, _ in before if any(view_root(t) is view_root(seen) for t in written)
        }
        for slot, seen, version, required in before:
            set_version(seen, version)
            if seen.requires_grad and not required:
                raise UnsupportedError(
                    f"with create_graph=True this backward makes {slot} require grad by writing to it, which cannot be "
                    "compiled yet. Compile with fallback='eager', or write a detached value."
                )
        return [gradient is not None and gradient.requires_grad for gradient in self.in_order(backward)], exposed

    # ------------------------------------------------------------------------------------------- in part
    def freed_by(self, slots: tuple[Returned, ...]) -> frozenset[Any]:
        """Nodes of the tape that would free what they saved in a backward of these targets."""
        known = self._freed.get(slots)
        if known is None:
            nodes = tape_nodes([self.targets[slot] for slot in slots])
            known = self._freed[slots] = frozenset(filter(self._is_freed, nodes))
        return known

    def _is_freed(self, node: Any) -> bool:
        return node in self._written_views or frees_when_run(node)

    @cached_property
    def frees_anything(self) -> bool:
        """Whether eager would refuse a second backward: one node is enough, and to ask all of them takes long."""
        return any(map(self._is_freed, tape_nodes(list(self.targets.values()))))

    def partial_backward(
        self, slots: Sequence[Returned], saved: Sequence[str], writes: Sequence[BackwardWrite]
    ) -> PartialBackward:
        """The backward for some of the tangents, over the values that the forward saved (their names are given).

        It has the same outputs as the backward for all of them, and takes the other tangents without reading them. It
        is recorded under the autocast state of the caller.
        """
        graph = self.functionalizer.graph
        start = len(graph.nodes)
        derived = self.differentiate(slots, autocast=True)
        new = {write.of: write.new for write in derived.writes}
        late = next((slot for slot in new if slot not in {write.of for write in writes}), None)
        if late is not None:
            raise BackwardError(
                f"The backward of a compiled program writes to {late}, which it did not when the program was "
                "compiled, because something that it reads has changed. Call the original function."
            )
        gradients = with_own_constants(self.functionalizer, spread(derived.gradients))
        places = [slot for slot, _ in derived.outputs(self.primals)]
        outputs = [GraphOutput(*pair) for pair in zip(places, gradients, strict=False)]
        outputs += [GraphOutput(BackwardUpdate(write.of), new.get(write.of)) for write in writes]
        outputs += map(GraphOutput, derived.tokens.slots, derived.tokens.ends)
        given, tangents = self.named(saved), [*self.tangent_nodes, *derived.tokens.heads]
        if self.random is not None and self.random.draws:
            tangents += [self.random.seed, self.random.base]  # what only the backward is given
            outputs.append(GraphOutput(RandomState("bwd", "offset"), self.random.offset))
        read_from_given(graph, start, given)
        results = nodes_in([value for _, value in outputs])
        nodes = between(graph, [*given, *tangents], [*results, *impure_since(graph, start)])
        read = read_by(nodes, results)
        used = inputs_needed(given, read)
        name_nodes([*given, *nodes], [node.name for node in (*graph.placeholders, *graph.nodes) if node.name])
        excerpt = Graph([*(given[i] for i in used), *tangents], nodes, outputs)
        return PartialBackward(excerpt, tuple(used), derived)

    def named(self, names: Sequence[str]) -> list[Node]:
        """The nodes that stand for saved values, by the names that they have in the graph of this order."""
        graph = self.functionalizer.graph
        known = self.by_name or {node.name: node for node in (*graph.placeholders, *graph.nodes) if node.name}
        return [known[name] for name in names]


def value_of(walk: Functionalizer, tensor: Tensor) -> Any:
    """The node of a tensor, or the nodes of the tensors in a wrapper."""
    if not is_wrapper(tensor):
        return walk.node_of(tensor)
    return Wrapped(layout_of(tensor), tuple(walk.node_of(leaf) for leaf in leaves_of(tensor)))


def tangent_like(engine: Engine, target: Tensor) -> Tensor:
    """A fake for the gradient of a result."""
    return wrapper_tangent(engine, target) if is_wrapper(target) else engine.like(target, dense=True)


def _named(error: Exception) -> Exception:
    """An error of autograd's; where it fails by itself, eager may not: it looks closer for single gradients."""
    if not is_internal_assertion(error):
        return error
    return BackwardError(
        "autograd itself fails when it is asked for single gradients of this program, as it is where a program is "
        f"compiled ({str(error).splitlines()[0]}). Does one operator write to a list of tensors that share memory? "
        "Write to one after another, or call the original function."
    )


def _places(slot: Returned, tangent: Tensor) -> list[Any]:
    """Where the tangent of a result stands, or the tensors in it if it is a wrapper subclass."""
    return list(layout_of(tangent).slots(Tangent(slot))) if is_wrapper(tangent) else [Tangent(slot)]
