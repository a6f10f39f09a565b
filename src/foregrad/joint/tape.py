"""The recording's own autograd graph, kept: every backward that anybody asks for is taken from it.

A `Tape` is one order of differentiation. The targets of the first are what the program returns; those of the next are
the gradients that a backward gave, recorded once more so that they can be differentiated themselves, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from .._torch import frees_when_run, names_jagged_size, set_version
from ..errors import ForegradError, UnsupportedError
from ..functionalize.draws import RandomInputs
from ..functionalize.effects import Chain
from ..functionalize.walk import Functionalizer
from ..record.memory import WholeMemoryNeeded
from ..record.overlap import storage_of
from ..record.recording import InputsFoundLate, Recording
from ..record.stand_ins import RecordedInput
from ..record.tape import tape_nodes
from ..slots import Base, Inner, Output, Primal, Returned, Tangent, Updated
from ..subclasses.layout import Layout, Wrapped, is_wrapper, layout_of, leaves_of, spread
from .backward_writes import BackwardWrite, BackwardWrites, Held, written_by
from .graph import Part, to_fx
from .inputs import InputFacts
from .ir import Node, ancestors, name_nodes, nodes_in
from .outputs import OutputFacts, Plain
from .wrappers import tangent_like, wrapped_value

_NOT_AUTOGRADS = (ForegradError, InputsFoundLate, WholeMemoryNeeded)  # what says nothing about gradients


@dataclass(frozen=True, slots=True)
class Differentiated:
    """Gradients as nodes of the flat graph, one or None for each primal, and what else the backward does."""

    gradients: list[Any]  # those that are wrapper subclasses as several nodes
    writes: tuple[BackwardWrite, ...] = ()
    tokens: Chain = field(default_factory=Chain)  # of its effects
    refused: dict[Returned, Exception] = field(default_factory=dict)  # autograd's errors, by target

    @property
    def outputs(self) -> list[Node | None]:
        """What the backward returns."""
        return [*spread(self.gradients), *(write.new for write in self.writes), *self.tokens.ends]

    @property
    def layouts(self) -> tuple[Layout | None, ...]:
        """How each gradient is put together, where it is a wrapper subclass."""
        return tuple(g.layout if isinstance(g, Wrapped) else None for g in self.gradients)


@dataclass(frozen=True, slots=True)
class PartialBackward:
    """A backward for some of the tangents: its graph, and which saved values it takes before all the tangents."""

    module: fx.GraphModule
    saved: tuple[int, ...]
    layouts: tuple[Layout | None, ...]  # of gradients that are wrapper subclasses
    checked: bool  # autograd finds what it wrote changed, when it is asked again


@dataclass(frozen=True, slots=True)
class Order:
    """A backward that can be differentiated itself, with its own backward as one joint graph.

    The graph takes saved values, tangents, and the tangents of the gradients; it returns the gradients, then theirs.
    """

    tape: Tape  # its targets are those gradients that require grad
    part: Part
    saved: tuple[int, ...]  # which saved values the graph takes, and then
    tangents: tuple[int, ...]  # which of the tensors in the tangents
    results: tuple[int, ...]  # which gradients it returns; the others are None
    layouts: tuple[Layout | None, ...]  # of those that are wrapper subclasses
    gradient_layouts: tuple[Layout | None, ...]  # and of the gradients of these gradients
    tokens: int  # of its effects, which it takes and returns before everything else
    refused: dict[Returned, Exception]

    @property
    def returned(self) -> int:
        """How many tensors the graph returns for the gradients."""
        return sum(1 if layout is None else layout.leaves for layout in self.layouts)


def program_targets(facts: Sequence[InputFacts], outputs: OutputFacts) -> dict[Returned, Tensor]:
    """What can be differentiated of a program's results."""
    targets: dict[Returned, Tensor] = {}
    for item in facts:
        if item.written and item.write_seen_by_autograd and not item.written_in_graph:
            targets[Updated(item.recorded.slot)] = item.recorded.seen
    for i, result in enumerate(outputs.results):
        if isinstance(result, Plain) and result.differentiable:
            targets[Output(i)] = result.tensor
    for i, base in enumerate(outputs.bases):
        targets[Base(i)] = base
    return targets


class Tape:
    """Differentiates the targets of one order, all together or some of them."""

    def __init__(
        self,
        recording: Recording,
        functionalizer: Functionalizer,
        primals: Sequence[RecordedInput],
        targets: dict[Returned, Tensor],
        lower_tangents: Sequence[Tensor] = (),
        number: int = 1,
        written_views: frozenset[Any] = frozenset(),
    ) -> None:
        self.recording = recording
        self._functionalizer = functionalizer
        self._primals = primals
        self._number = number  # of the order
        self._lower_tangents = lower_tangents  # of lower orders: they too can be differentiated for
        self._writes = BackwardWrites(functionalizer)
        self.targets = targets
        self.tangents: dict[Returned, Tensor] = {}
        self._tangent_nodes: dict[Returned, list[Node]] = {}  # several for a wrapper subclass
        self._by_name: dict[str, Node] = {}  # of an order's own graph
        self._freed: dict[tuple[Returned, ...], frozenset[Any]] = {}
        self._written_views = written_views  # nodes of writes to inputs that are views: eager frees what wraps them
        for slot, target in targets.items():
            tangent = self.tangents[slot] = tangent_like(recording.engine, target)
            for place, leaf in zip(_places(slot, tangent), leaves_of(tangent), strict=True):
                node = functionalizer.graph.placeholder(place, leaf)
                self._tangent_nodes.setdefault(slot, []).append(node)
                if number > 1:  # those of the first order are named with the whole program
                    node.name = f"order{number}_tangents_{len(self.tangent_nodes)}"
                if not names_jagged_size(leaf):  # that is the forward's own
                    functionalizer.add_fresh(leaf, node)

    @property
    def gradients(self) -> int:
        """How many gradients, or None, a backward gives."""
        return len(self._primals) + len(self._lower_tangents)

    def chosen(self, mask: Sequence[bool]) -> tuple[Returned, ...]:
        """Those targets that take part in a backward: one flag for each says so."""
        return tuple(slot for slot, used in zip(self.targets, mask, strict=True) if used)

    @property
    def tangent_nodes(self) -> list[Node]:
        """The placeholders of all tangents."""
        return [node for nodes in self._tangent_nodes.values() for node in nodes]

    @cached_property
    def has_wrappers(self) -> bool:
        """Whether wrapper subclasses take part: a graph then takes and gives what is inside of them."""
        tangents = (*self.tangents.values(), *self._lower_tangents)
        return any(r.layout is not None for r in self._primals) or any(map(is_wrapper, tangents))

    @property
    def random(self) -> RandomInputs | None:
        """The seed and the offset that a backward draws from, under `functionalize_rng_ops`."""
        return self._functionalizer.draws.backward

    @cached_property
    def reached(self) -> set[Primal]:
        """Inputs that autograd has an edge to: higher orders may give them gradients where this one does not."""
        return self.recording.reached_inputs(list(self.targets.values()))

    def differentiate(self, slots: Sequence[Returned], autocast: bool = False) -> Differentiated:
        """Gradients of some of the targets."""
        recording, walk = self.recording, self._functionalizer
        self._writes.rewind()
        walk.draws.restart_backward()
        start, inputs = len(recording.steps), len(recording.inputs)
        targets, tangents = [self.targets[s] for s in slots], [self.tangents[s] for s in slots]
        versions = {id(r.seen): r.seen._version for r in self._primals if r.is_tensor and not r.seen.is_inference()}
        by_slot, others = recording.differentiate(targets, tangents, autocast, self._lower_tangents)
        self._refuse_late_inputs(inputs)
        found = [*(by_slot.get(recorded.slot) for recorded in self._primals), *others]
        nodes, writes = self._writes.run(
            recording.steps[start:],
            start,
            self._held_by_the_caller(slots),
            versions,
            lambda: [None if g is None else wrapped_value(g, walk.node_of) for g in found],
            lambda: self._fails_again(targets, tangents, autocast),
        )
        for write in writes:
            if isinstance(write.of, Inner):
                raise UnsupportedError(
                    f"the backward writes to {write.of}, in a tensor subclass, which cannot be compiled yet."
                )
        return Differentiated(nodes, writes, walk.tokens.chain())

    def differentiate_all(self) -> Differentiated:
        """Gradients of everything that can be differentiated, and autograd's errors for what cannot.

        Eager raises such an error when backward is called, and so does the compiled program.
        """
        refused: dict[Returned, Exception] = {}
        wanted = tuple(self.targets)
        if not wanted:
            return Differentiated([None] * self.gradients)
        graph = self._functionalizer.graph
        start = len(graph.nodes)
        try:
            return self.differentiate(wanted)
        except _NOT_AUTOGRADS:
            raise
        except Exception:
            for slot in wanted:
                try:
                    self.differentiate((slot,))
                except _NOT_AUTOGRADS:
                    raise
                except Exception as error:
                    refused[slot] = error
        for node in graph.nodes[start:]:  # of attempts that were given up
            node.impure = False
        sound = tuple(slot for slot in wanted if slot not in refused)
        derived = self.differentiate(sound) if sound else Differentiated([None] * self.gradients)
        return replace(derived, refused=refused)

    def _refuse_late_inputs(self, known: int) -> None:
        recording = self.recording
        if len(recording.inputs) > known:
            raise InputsFoundLate([recording.real_tensors[late.slot] for late in recording.inputs[known:]])

    def _held_by_the_caller(self, slots: Sequence[Returned]) -> Held:
        held: Held = {}
        for recorded in self._primals:
            plain = [recorded] if recorded.layout is None else recorded.inner
            held |= {r.slot: r.seen for r in plain if r.is_tensor and not r.same_as}
        for slot in slots:
            tangent = self.tangents[slot]
            held |= dict(zip(_places(slot, tangent), leaves_of(tangent), strict=True))
        return held

    def _fails_again(self, targets: Sequence[Tensor], tangents: Sequence[Tensor], autocast: bool) -> bool:
        """Whether autograd, asked a second time, finds that the backward has changed what it had saved."""
        recording = self.recording
        end = len(recording.steps)
        try:
            recording.differentiate(targets, tangents, autocast)
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        finally:
            del recording.steps[end:]
        return False

    def require_grad_afterwards(
        self, slots: Sequence[Returned], with_grad: Sequence[bool]
    ) -> tuple[list[bool], set[Primal | Tangent]]:
        """Which gradients require grad under `create_graph`, and which inputs are written with gradients on.

        Nothing of this backward is kept.
        """
        recording = self.recording
        end = len(recording.steps)
        tangents = [tangent_like(recording.engine, self.targets[slot]) for slot in slots]
        for tangent, required in zip(tangents, with_grad, strict=True):
            tangent.requires_grad_(required)
        before = [
            (r.slot, r.seen, r.seen._version, r.seen.requires_grad)
            for r in self._primals
            if r.is_tensor and not r.seen.is_inference()
        ]
        targets = [self.targets[slot] for slot in slots]
        by_slot, others = recording.differentiate(targets, tangents, True, self._lower_tangents, create_graph=True)
        written = [t for step in recording.steps[end:] if step.grad_enabled for t in written_by(step)]
        exposed: set[Primal | Tangent] = {
            slot
            for slot, seen, _, _ in before
            if any(t is seen or (t.requires_grad and storage_of(t) == storage_of(seen)) for t in written)
        }
        del recording.steps[end:]
        for slot, seen, version, required in before:
            set_version(seen, version)
            if seen.requires_grad and not required:
                raise UnsupportedError(
                    f"with create_graph=True this backward makes {slot} require grad by writing to it, which cannot be "
                    "compiled yet. Compile with fallback='eager', or write a detached value."
                )
        found = [*(by_slot.get(recorded.slot) for recorded in self._primals), *others]
        return [gradient is not None and gradient.requires_grad for gradient in found], exposed

    # -------------------------------------------------------------------------------- in part, and in order
    def freed_by(self, slots: tuple[Returned, ...]) -> frozenset[Any]:
        """Nodes of the tape that would free what they saved in a backward of these targets."""
        known = self._freed.get(slots)
        if known is None:
            nodes = tape_nodes([self.targets[slot] for slot in slots])
            known = self._freed[slots] = frozenset(node for node in nodes if self._is_freed(node))
        return known

    def _is_freed(self, node: Any) -> bool:
        return node in self._written_views or frees_when_run(node)

    @cached_property
    def frees_anything(self) -> bool:
        """Whether eager would refuse a second backward."""
        return any(map(self._is_freed, tape_nodes(list(self.targets.values()))))

    def partial_backward(
        self, slots: Sequence[Returned], saved: Sequence[str], writes: Sequence[BackwardWrite]
    ) -> PartialBackward:
        """The backward for some of the tangents, over the values that the forward saved (their names are given).

        It has the same outputs as the backward for all of them, and takes the other tangents without reading them. It
        is recorded under the autocast state of the caller.
        """
        graph = self._functionalizer.graph
        start = len(graph.nodes)
        derived = self.differentiate(slots, autocast=True)
        new = {write.of: write.new for write in derived.writes}
        outputs = [*spread(derived.gradients), *(new.get(write.of) for write in writes), *derived.tokens.ends]
        given, tangents = self._named(saved), [*self.tangent_nodes, *derived.tokens.heads]
        if self.random is not None and self.random.draws:
            tangents += [self.random.seed, self.random.base]  # what only the backward is given
            outputs.append(self.random.offset)
        nodes = self._in_order(_between([*given, *tangents], [*nodes_in(outputs), *self._impure_since(start)]))
        read = _read_by(nodes, outputs)
        used = [i for i, node in enumerate(given) if id(node) in read]
        name_nodes([*given, *nodes], [node.name for node in (*graph.placeholders, *graph.nodes) if node.name])
        module = to_fx(Part([*(given[i] for i in used), *tangents], nodes, outputs))
        checked = any(write.checked for write in derived.writes)
        return PartialBackward(module, tuple(used), derived.layouts, checked)

    def order(
        self, slots: Sequence[Returned], with_grad: Sequence[bool], wanted: Sequence[bool], saved: Sequence[str]
    ) -> Order:
        """The backward of some of the targets, to be differentiated itself.

        Args:
            slots: the targets whose tangents arrive.
            with_grad: which of these tangents require grad.
            wanted: which of the gradients anybody asks for.
            saved: the names of the values that the forward saved.
        """
        recording, walk = self.recording, self._functionalizer
        walk.draws.restart_backward()
        start, inputs = len(recording.steps), len(recording.inputs)
        tangents = [tangent_like(recording.engine, self.targets[slot]) for slot in slots]
        for slot, tangent, required in zip(slots, tangents, with_grad, strict=True):
            for leaf, node in zip(leaves_of(tangent), self._tangent_nodes[slot], strict=True):
                if not names_jagged_size(leaf):
                    walk.add_fresh(leaf, node)
            tangent.requires_grad_(required)
        targets = [self.targets[slot] for slot in slots]
        by_slot, others = recording.differentiate(targets, tangents, True, self._lower_tangents, create_graph=True)
        self._refuse_late_inputs(inputs)
        steps = recording.steps[start:]
        if self._writes.written(steps, self._held_by_the_caller(())):
            raise UnsupportedError("a backward that writes to its inputs cannot be differentiated yet.")
        first_node = len(walk.graph.nodes)
        walk.run(steps, start)
        self._refuse_functional_draws()
        chain = walk.tokens.chain()
        walk.tokens.begin_order()
        found = [*(by_slot.get(recorded.slot) for recorded in self._primals), *others]
        results = [g if use else None for g, use in zip(found, wanted, strict=True)]
        nodes = [None if g is None else wrapped_value(g, walk.node_of) for g in results]
        differentiable: dict[Returned, Tensor] = {
            Output(i): g for i, g in enumerate(results) if g is not None and g.requires_grad
        }
        leaves = [t for t in tangents if t.requires_grad]
        lower = (*self._lower_tangents, *leaves)
        higher = Tape(recording, walk, self._primals, differentiable, lower, self._number + 1)
        return higher._as_order(nodes, self._named(saved), self.tangent_nodes, chain, self._impure_since(first_node))

    def _as_order(
        self,
        results: Sequence[Node | Wrapped | None],
        given: Sequence[Node],
        tangents: Sequence[Node],
        chain: Chain,
        impure: Sequence[Node],
    ) -> Order:
        """The joint graph of `results`, which are computed from saved values and tangents, and of their gradients.

        `impure` are nodes that must run with the results, and `chain` the tokens of those with effects.
        """
        start = len(self._functionalizer.graph.nodes)
        derived = self._differentiate_later()
        positions = tuple(i for i, node in enumerate(results) if node is not None)
        layouts = tuple(node.layout if isinstance(node, Wrapped) else None for node in results if node is not None)
        returned = [*chain.ends, *spread(results[i] for i in positions)]
        outputs = [*returned, *derived.outputs]
        own = [*self.tangent_nodes, *derived.tokens.heads]
        wanted = [*nodes_in(outputs), *impure, *self._impure_since(start)]
        nodes = self._in_order(_between([*chain.heads, *given, *tangents, *own], wanted))
        read = _read_by(nodes, outputs)
        used = [i for i, node in enumerate(given) if id(node) in read]
        used_tangents = [i for i, node in enumerate(tangents) if id(node) in read]
        placeholders = [*chain.heads, *(given[i] for i in used), *(tangents[i] for i in used_tangents)]
        in_forward = {id(node) for node in ancestors([*nodes_in(returned), *impure])}
        part = self._own_part(placeholders, own, nodes, outputs, in_forward)
        return Order(
            tape=self,
            part=part,
            saved=tuple(used),
            tangents=tuple(used_tangents),
            results=positions,
            layouts=layouts,
            gradient_layouts=derived.layouts,
            tokens=len(chain.heads),
            refused=derived.refused,
        )

    def _differentiate_later(self) -> Differentiated:
        """The gradients of an order; what cannot be compiled of them is only said when somebody asks for them."""
        try:
            derived = self.differentiate_all()
            self._refuse_functional_draws()
            if derived.writes:
                raise UnsupportedError("a double backward that writes to its inputs cannot be compiled yet.")
        except UnsupportedError as error:
            return Differentiated([None] * self.gradients, refused=dict.fromkeys(self.targets, error))
        return derived

    def _refuse_functional_draws(self) -> None:
        if self.random is not None and self.random.draws:
            raise UnsupportedError(
                "a backward that draws random numbers cannot be differentiated under functionalize_rng_ops yet. Keep "
                "preserve_rng_state=True, or switch the option off."
            )

    def _impure_since(self, start: int) -> list[Node]:
        """What was written into the graph from a place on and runs whether anybody reads it or not."""
        return [node for node in self._functionalizer.graph.nodes[start:] if node.impure]

    def _in_order(self, nodes: list[Node]) -> list[Node]:
        """Nodes as they were recorded: draws must not change places."""
        if any(node.impure for node in nodes):
            place = {id(node): i for i, node in enumerate(self._functionalizer.graph.nodes)}
            nodes.sort(key=lambda node: place[id(node)])
        return nodes

    def _own_part(
        self,
        placeholders: Sequence[Node],
        tangents: Sequence[Node],
        nodes: Sequence[Node],
        outputs: Sequence[Node | None],
        in_forward: set[int],
    ) -> Part:
        """A copy of a part of the graph with names as those of any joint graph: an order is partitioned like one."""
        copies: dict[int, Node] = {}

        def copied(value: Any) -> Any:
            kind = value.__class__
            if kind is Node:
                return copies[id(value)]
            return kind([copied(item) for item in value]) if kind is list or kind is tuple else value

        for stem, inputs in (("primals", placeholders), ("tangents", tangents)):
            for i, node in enumerate(inputs):
                copy = copies[id(node)] = Node(None, (), {}, node.value)
                copy.name, copy.slot = f"{stem}_{i + 1}", node.slot
        taken = list(copies.values())
        for node in nodes:
            kwargs = {key: copied(item) for key, item in node.kwargs.items()}
            copy = copies[id(node)] = Node(node.op, copied(node.args), kwargs, node.value)
            copy.backward, copy.impure, copy.stack = id(node) not in in_forward, node.impure, node.stack
        own = [copies[id(node)] for node in nodes]
        name_nodes(own, [node.name for node in taken])
        self._by_name = {copies[id(node)].name: node for node in (*placeholders, *tangents, *nodes)}
        return Part(taken, own, [None if node is None else copies[id(node)] for node in outputs])

    def _named(self, names: Sequence[str]) -> list[Node]:
        graph = self._functionalizer.graph
        known = self._by_name or {node.name: node for node in (*graph.placeholders, *graph.nodes) if node.name}
        return [known[name] for name in names]


def _places(slot: Returned, tangent: Tensor) -> list[Any]:
    """Where the tangent of a result stands, or the tensors in it if it is a wrapper subclass."""
    return list(layout_of(tangent).slots(Tangent(slot))) if is_wrapper(tangent) else [Tangent(slot)]


def _read_by(nodes: Sequence[Node], outputs: Sequence[Any]) -> set[int]:
    return {id(item) for node in nodes for item in node.inputs()} | {id(node) for node in nodes_in(outputs)}


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
            raise UnsupportedError(
                "this backward needs a value of the forward that was not saved for it. default_partition saves what "
                "autograd does: compile with it, and without a memory budget."
            )
        pending.append((node, True))
        pending.extend((item, False) for item in node.inputs())
    return order
