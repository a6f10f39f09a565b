"""Build the joint graph of a recording: functionalize, differentiate, functionalize the backward, drop dead code."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import AutocastState, OpOverload, effect_type, is_backward_state, is_custom_function_node
from ..errors import BackwardStateError, UnsupportedError
from ..functionalize.effect_tokens import Chain
from ..functionalize.functionalizer import Functionalizer
from ..functionalize.rng import RandomInputs
from ..graph.fx import to_fx
from ..graph.graph import Graph, GraphBuilder, GraphOutput, Node, live_nodes, name_nodes, nodes_in
from ..graph.host_part import compare_decisions_only
from ..ops import Kind, aten, op_info
from ..options import AOTConfig
from ..record.fakify import RecordedInput
from ..record.recording import Recording
from ..record.tape import tape_edges
from ..slots import (
    Base,
    Grad,
    Grown,
    Inner,
    Output,
    Primal,
    RandomState,
    Returned,
    SyntheticBase,
    Tangent,
    Token,
    Updated,
    ViewRoot,
    belongs_to_backward,
)
from ..subclasses.layout import Wrapped, spread, wrappers_in
from .differentiate import Differentiated, Tape, copy_seen_constants, outputs_for, targets_of, value_of
from .hooks import HookEffect, HookEffects
from .inputs import InputFacts, Reshaped, Resized, StorageReplaced, WrittenBack, WrittenInGraph, input_facts, is_stale
from .outputs import Constant, Number, OutputClassifier, OutputFacts, SameAsInput
from .regenerated_views import refuse_regenerated_views
from .side_effects import (
    NO_CHANGES,
    ArgumentChanges,
    AttributeSet,
    Effect,
    Effects,
    Escape,
    InnerResult,
    attributes_of_results,
    inner_results,
)
from .subclasses import refuse_related_wrappers, wrapper_facts

# ---------------------------------------------------------------------------------------------------------------------
# Operators that may refuse what they are given, by its values.
#
# Eager runs an operator whether its result is read or not: an index out of range or a singular matrix is an
# error all the same. So dead code elimination may drop only what refuses nothing once its arguments have the right
# sizes.
# Of torch's operators, beside the pointwise ones, views and reductions: those that take any values.
_TAKES_ANYTHING = frozenset(
    f"aten::{name}"
    for name in (
        *("_log_softmax", "_softmax", "_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy", "fill"),
        *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "convolution", "dot", "linear", "mm", "mv", "vdot"),
        *("as_strided_scatter", "diagonal_scatter", "select_scatter", "slice_backward", "slice_scatter"),
        *("cumprod", "cumsum", "flip", "logcumsumexp", "repeat", "roll", "stack", "tril", "triu"),
        *("_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
        *("native_batch_norm", "native_group_norm", "native_layer_norm", "_fused_rms_norm"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_conj_physical", "_neg_view_copy", "empty_like", "full_like", "ones_like", "zeros_like"),
        *("lift_fresh_copy", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    )
)
# Of pointwise ones: those that refuse some integers (a divisor of zero, a negative exponent).
_REFUSE_INTEGERS = frozenset({"aten::div", "aten::floor_divide", "aten::fmod", "aten::pow", "aten::remainder"})


def may_refuse(node: Node) -> bool:
    """Whether running a node of the forward may raise, depending on the values that it reads.

    >>> may_refuse(Node(torch.ops.aten.sin.default, (Node(None, (), {}, None),), {}, None))
    False
    >>> may_refuse(Node(torch.ops.aten.linalg_cholesky_ex.default, (Node(None, (), {}, None),), {}, None))
    True
    """
    op = node.op
    if not isinstance(op, OpOverload) or not node.inputs():
        return False
    info = op_info(op)
    if op.namespace != "aten":  # a custom operator may do more than it says
        return op.namespace != "foregrad"
    if info.kind is Kind.VIEW or "identity" in info.traits:
        return False
    if "pointwise" in info.traits:
        return op._schema.name in _REFUSE_INTEGERS and _is_of_integers(node)
    if torch.Tag.reduction in op.tags:
        return False
    return op._schema.name not in _TAKES_ANYTHING


def _is_of_integers(node: Node) -> bool:
    value = node.value
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


# ---------------------------------------------------------------------------------------------------------------------
# What a joint graph is.
@dataclass(frozen=True, slots=True)
class Signature:
    """What stands at each place of the joint graph."""

    primals: tuple[Primal, ...]
    tangents: tuple[Tangent, ...]
    returned: tuple[Returned, ...]
    grads: tuple[Grad | None, ...]  # one for each primal
    tokens: tuple[Token, ...] = ()  # before the primals, and before what is returned
    backward_tokens: tuple[Token, ...] = ()  # after the tangents, and after everything that the backward gives


@dataclass(frozen=True, slots=True)
class RandomFacts:
    """Seeds and offsets, forward and backward; None where draws stay as they are."""

    forward: RandomInputs | None
    backward: RandomInputs | None

    @property
    def placeholders(self) -> list[Node]:
        """Seed and offset of the forward, then of the backward."""
        sides = [side for side in (self.forward, self.backward) if side is not None]
        return [node for side in sides for node in (side.seed, side.base)]

    @property
    def values(self) -> list[Any]:
        """Abstract values of the placeholders."""
        return [node.value for node in self.placeholders]

    @property
    def forward_outputs(self) -> list[GraphOutput]:
        """The forward's new offset."""
        return [] if self.forward is None else [GraphOutput(RandomState("fwd", "offset"), self.forward.offset)]

    @property
    def backward_outputs(self) -> list[GraphOutput]:
        """The backward's new offset, if it draws."""
        if self.backward is None or not self.backward.draws:
            return []
        return [GraphOutput(RandomState("bwd", "offset"), self.backward.offset)]


@dataclass(frozen=True)
class Joint:
    """Forward and backward as one functional graph, with the facts that the run time needs."""

    graph: Graph
    signature: Signature
    inputs: tuple[InputFacts, ...]  # of the user
    memories: tuple[InputFacts, ...]  # that some of them share
    primals: tuple[InputFacts, ...]  # what the graph takes: duplicates and shared memory are merged
    outputs: OutputFacts
    visible: int  # so many of the outputs are the user's; the rest are for the effects
    effects: tuple[Effect, ...]
    hooks: tuple[HookEffect, ...]  # that a call registers on inputs and results
    attributes: tuple[AttributeSet, ...]  # that a call puts on results
    inner_results: tuple[InnerResult, ...]  # whose gradients are not whole outside
    primal_nodes: tuple[Node | Wrapped, ...]  # what stands for the primals in the graph
    returned_nodes: tuple[Any, ...]  # what the forward returns, without tokens
    grad_mode_after: bool | None  # set if the program changed it for its caller
    autocast_after: AutocastState | None  # likewise
    backward: Differentiated  # what else its backward does
    random: RandomFacts  # what the graph takes and gives under `functionalize_rng_ops`
    recording: Recording
    tape: Tape

    @cached_property
    def module(self) -> fx.GraphModule:
        """The graph as `torch.fx`, made when it is asked for."""
        return to_fx(self.graph)

    @property
    def primal_values(self) -> list[Any]:
        """Abstract values of what the forward takes, tokens first, without seeds and offsets."""
        inputs = [node for node in self.graph.inputs if not belongs_to_backward(node.slot)]
        return [node.value for node in inputs if not isinstance(node.slot, RandomState)]

    @property
    def tangent_values(self) -> list[Tensor]:
        """Abstract values of the tangents."""
        return [node.value for node in self.graph.inputs_of(Tangent)]

    @property
    def tokens(self) -> dict[Any, Any]:
        """The forward's tokens, by torch's own names for the effects."""
        return {effect_type(token.effect): torch.empty(0) for token in self.signature.tokens}

    @property
    def touched(self) -> list[InputFacts]:
        """Everything that the program wrote to or changed the shape of: shared memory first, then inputs."""
        members = [f for f in self.inputs if f.recorded.parent is not None and f.recorded.same_as is None]
        changed = [f for f in (*self.memories, *self.inputs) if f.is_acted_on or f.version_change]
        return changed + [f for f in members if f not in changed]

    @property
    def has_wrappers(self) -> bool:
        """Whether wrapper subclasses take part."""
        values = (*self.primal_nodes, *self.returned_nodes)
        return any(isinstance(v, Wrapped) for v in values) or any(self.backward.layouts) or self.tape.has_wrappers

    @property
    def is_training(self) -> bool:
        """Whether there is anything to differentiate."""
        return bool(self.signature.tangents)

    @property
    def op_count(self) -> int:
        """How many operators the graph runs."""
        return sum(node.op is not operator.getitem for node in self.graph.nodes)


# ---------------------------------------------------------------------------------------------------------------------
# How it is built.
def build_joint(
    recording: Recording,
    leaves: Sequence[Any],
    paths: Sequence[str],
    escapes: Sequence[Escape],
    config: AOTConfig,
    changes: ArgumentChanges = NO_CHANGES,
) -> Joint:
    """The joint graph of a recording whose flat results are `leaves`, found at `paths` in the user's result.

    `escapes` are tensors that the program put somewhere else, `changes` what it did to the objects in its arguments.
    """
    functionalizer = _functionalized_forward(recording, config)
    graph, tokens = functionalizer.graph, functionalizer.chain()
    hidden = Effects(leaves, paths)
    with torch.set_grad_enabled(recording.after.grad_enabled):  # autograd answers as it would to the caller
        facts = _facts(recording, functionalizer, config.keep_inference_input_mutations)
        hidden.add_inputs(recording, functionalizer, [facts[recorded.slot] for recorded in recording.inputs])
        hidden.add_escapes(escapes)
        hidden.add_changes(changes)
        hooks = HookEffects(recording, hidden) if recording.hooks.on_inputs or recording.hooks.inside else None
        attributes = attributes_of_results(hidden, recording)
        outputs = _classified(recording, functionalizer, hidden, config)
    targets = targets_of(config, list(facts.values()), outputs, len(leaves))
    primal_nodes, primals = _primals_of(graph, recording, facts, targets)
    tape = _tape(recording, functionalizer, primals, targets, outputs)
    if hooks is None and _retains_gradients(recording, outputs):
        hooks = HookEffects(recording, hidden)
    hook_effects = () if hooks is None else hooks.effects(outputs, targets.values())
    forward = _forward_values(functionalizer, facts.values(), outputs)
    derived = _differentiated(recording, tape)
    shown = [value for slot, value in forward.items() if isinstance(slot, (Output, Base))]
    copy_seen_constants(functionalizer, [*spread(shown), *spread(derived.gradients)])
    functionalizer.closed = True
    drawn_from = functionalizer.random
    random = RandomFacts(copy(drawn_from[0]), copy(drawn_from[1]) if targets else None)
    graph.placeholders += random.placeholders
    overwritten = _overwritten(graph, facts, derived)
    return Joint(
        graph=_live_graph(graph, tokens, forward, tape, derived, random, overwritten),
        signature=_signature(primals, tape, forward, derived, tokens),
        inputs=tuple(facts[recorded.slot] for recorded in recording.inputs),
        memories=tuple(facts[recorded.slot] for recorded in recording.memories),
        primals=primals,
        outputs=outputs,
        visible=len(leaves),
        effects=tuple(hidden.effects),
        hooks=hook_effects,
        attributes=attributes,
        inner_results=inner_results(outputs, hidden.paths, targets, recording.hooks.inside),
        primal_nodes=primal_nodes,
        returned_nodes=tuple(forward.values()),
        grad_mode_after=_if_changed(recording.grad_enabled, recording.after.grad_enabled),
        autocast_after=_if_changed(recording.before.autocast, recording.after.autocast),
        backward=derived,
        random=random,
        recording=recording,
        tape=tape,
    )


def _functionalized_forward(recording: Recording, config: AOTConfig) -> Functionalizer:
    """Write the forward into a graph; what is written there afterwards has no line of the program."""
    graph = GraphBuilder()
    functionalizer = Functionalizer(recording, graph)
    functionalizer.draws_in_order = config.draws_in_order
    if config.options.functionalize_rng_ops:
        functionalizer.draws.functionalize()
    for recorded in recording.all_inputs:
        functionalizer.add_input(recorded)
    functionalizer.run(recording.steps, 0)
    for expression, answer in recording.decisions:
        graph.decide(expression, answer)
    if graph.part:  # it reads data
        compare_decisions_only(graph)
    graph.stack, graph.backward, graph.origin = (), False, None
    return functionalizer


def _classified(
    recording: Recording, functionalizer: Functionalizer, hidden: Effects, config: AOTConfig
) -> OutputFacts:
    """The cases of all results, hidden ones among them."""
    shown = len(hidden.leaves)
    hidden.add_leaves(recording, functionalizer)
    replay = config.options.view_replay_for_aliased_outputs
    return OutputClassifier(recording, functionalizer, hidden.leaves, hidden.paths, replay, shown).classify()


def _tape(
    recording: Recording,
    functionalizer: Functionalizer,
    primals: Sequence[InputFacts],
    targets: dict[Returned, Tensor],
    outputs: OutputFacts,
) -> Tape:
    """The tape of what is differentiated; what it would lose gradients of is refused."""
    strided = any(step.op is aten.as_strided.default for step in recording.steps)
    if strided or recording.mutations.reshaped_without_grad:
        refuse_regenerated_views(recording, outputs, list(targets.values()))
    inputs = [facts.recorded for facts in primals]
    views = [facts.recorded for facts in primals if _is_written_view(facts, recording)]
    writes = frozenset(node for recorded in views for node in _nodes_of_writes(recorded))
    leaves = tuple(outputs.fresh_leaves)
    tape = Tape(recording.session, functionalizer, inputs, targets, written_views=writes, fresh_leaves=leaves)
    _refuse_edges_to_fresh_leaves(recording, targets, outputs)
    _refuse_edges_into_wrappers(recording, targets)
    return tape


def _differentiated(recording: Recording, tape: Tape) -> Differentiated:
    """The gradients; a program that takes a BackwardState refuses them all."""
    derived = tape.differentiate_all()
    if _takes_backward_state(recording):
        derived = replace(derived, refused=dict.fromkeys(tape.targets, BackwardStateError(_NO_CAPTURE)))
    return derived


def _overwritten(graph: GraphBuilder, facts: dict[Primal, InputFacts], derived: Differentiated) -> set[Node]:
    """What the backward cannot compute from: the partitioner must know."""
    late = {write.current for write in derived.writes if not isinstance(write.of, Tangent)}
    return late | {node for node in graph.placeholders if node.slot in facts and _is_out_of_reach(facts[node.slot])}


def _live_graph(
    graph: GraphBuilder,
    tokens: Chain,
    forward: dict[Returned, Any],
    tape: Tape,
    derived: Differentiated,
    random: RandomFacts,
    overwritten: set[Node],
) -> Graph:
    """What the graph's outputs need, with names."""
    if random.placeholders and (tokens.slots or derived.tokens.slots):
        raise UnsupportedError("functionalize_rng_ops does not go together with side effects yet. Switch it off.")
    outputs = [
        *map(GraphOutput, tokens.slots, tokens.ends),
        *(output for slot, value in forward.items() for output in outputs_for(slot, value)),
        *random.forward_outputs,
        *(derived.outputs(tape.primals) if tape.targets else ()),
        *random.backward_outputs,
    ]
    live = live_nodes(graph, nodes_in([value for _, value in outputs]), may_refuse)
    inputs, tangents = [*tokens.heads, *graph.placeholders], tape.tangent_nodes
    primals = len(inputs) - len(tangents) - len(random.placeholders)
    names = [f"primals_{i + 1}" if tangents else f"arg{i}_1" for i in range(primals)]
    names += [f"tangents_{i + 1}" for i in range(len(tangents))]
    names += [f"{node.slot}_1" for node in random.placeholders]
    for node, name in zip(inputs, names, strict=True):
        node.name = name
    inputs += derived.tokens.heads
    name_nodes(live, [node.name for node in inputs])
    return Graph(inputs, live, outputs, overwritten.intersection((*inputs, *live)))


def _signature(
    primals: Sequence[InputFacts], tape: Tape, forward: dict[Returned, Any], derived: Differentiated, tokens: Chain
) -> Signature:
    slots = tuple(primal.recorded.slot for primal in primals)
    found = zip(slots, derived.gradients, strict=True)
    grads = tuple(Grad(slot) if node is not None else None for slot, node in found)
    tangents = tuple(Tangent(slot) for slot in tape.targets)
    return Signature(slots, tangents, tuple(forward), grads, tokens.slots, derived.tokens.slots)


def _refuse_edges_to_fresh_leaves(recording: Recording, targets: dict[Returned, Tensor], outputs: OutputFacts) -> None:
    """A leaf that the program makes and returns is no input: the gradient of another result would be lost."""
    if recording.session.depend_on(list(targets.values()), outputs.fresh_leaves):
        raise UnsupportedError(
            "the program returns a tensor that it made require grad together with a result that is computed from it, "
            "which cannot be compiled yet. Pass that tensor as an argument, or compile with fallback='eager'."
        )


def _refuse_edges_into_wrappers(recording: Recording, targets: dict[Returned, Tensor]) -> None:
    """A wrapper subclass inside of another is no input: its gradient would be lost."""
    outer = [recorded for recorded in recording.inputs if recorded.layout is not None]
    nested = {id(part): recorded.slot for recorded in outer for part in wrappers_in(recorded.seen)}
    if nested:
        ends = (getattr(node, "variable", None) for _, node in tape_edges(list(targets.values())))
        inside = [nested[id(end)] for end in ends if id(end) in nested]
        if inside:
            raise UnsupportedError(
                f"the program differentiates a tensor subclass inside of {inside[0]}, which is one itself: this cannot "
                "be compiled yet. Pass it as an argument of its own."
            )


_NO_CAPTURE = (
    "BackwardState requires CompiledAutograd: its hooks are for a backward that is captured as a whole, which Foregrad "
    "does not do. Register the hooks on tensors instead."
)


def _takes_backward_state(recording: Recording) -> bool:
    """Whether an argument carries hooks for a backward that is captured whole (J-15)."""
    states = [i.slot for i in recording.inputs if not i.is_tensor and is_backward_state(i.seen)]
    if len(states) > 1:
        raise BackwardStateError(f"At most one BackwardState may be passed, not {' and '.join(map(str, states))}.")
    return bool(states)


def _facts(recording: Recording, functionalizer: Functionalizer, keep: bool) -> dict[Primal, InputFacts]:
    """What happened to every input: to plain tensors first, then to the wrapper subclasses around them."""
    everything = (*recording.memories, *recording.inputs)
    facts = {r.slot: input_facts(functionalizer, r, keep) for r in everything if r.layout is None}
    wrappers = [r for r in everything if r.layout is not None]
    for recorded in wrappers:
        facts[recorded.slot] = wrapper_facts(functionalizer, recorded, facts, recording.session.recorder.wrappers)
    if not wrappers:
        return facts
    refuse_related_wrappers(recording, [facts[recorded.slot] for recorded in wrappers])
    return {r.slot: facts[r.slot] for r in everything}


def _primals_of(
    graph: GraphBuilder, recording: Recording, facts: dict[Primal, InputFacts], targets: dict[Returned, Tensor]
) -> tuple[tuple[Node | Wrapped, ...], tuple[InputFacts, ...]]:
    """What the graph takes; the second place of a tensor that was passed twice is dropped if it is written (D-2).

    To autograd, and to everything around the graph, the tensors in a wrapper subclass are one input; one that the
    program itself has taken out, and differentiates, is an input beside the wrapper.
    """
    kept: dict[Primal, Node] = {}
    for node in graph.placeholders:
        slot: Any = node.slot
        first = facts[slot].recorded.same_as
        if first is None or not (facts[first.slot].data_changed or facts[first.slot].reshapes):
            kept[slot] = node
    graph.placeholders[:] = kept.values()
    outer = {i.slot: r for r in recording.inputs if r.layout is not None and r.same_as is None for i in r.inner}
    if not outer:
        return tuple(kept.values()), tuple(facts[slot] for slot in kept)
    primals: dict[Primal, Node | Wrapped] = {}
    for slot, node in kept.items():
        around = outer.get(slot)
        if around is None:
            primals[slot] = node
        elif around.slot not in primals:
            primals[around.slot] = _in_wrapper(around, kept)
    for recorded in outer.values():  # even if the graph needs nothing of it, autograd does
        primals.setdefault(recorded.slot, _in_wrapper(recorded, kept))
    reached = recording.session.reached_inputs(list(targets.values()))
    primals |= {slot: kept[slot] for slot in outer if slot in reached}
    return tuple(primals.values()), tuple(facts[slot] for slot in primals)


def _in_wrapper(recorded: RecordedInput, kept: dict[Primal, Node]) -> Wrapped:
    assert recorded.layout is not None
    return Wrapped(recorded.layout, tuple(kept[item.slot] for item in recorded.inner if item.slot in kept))


def _forward_values(
    functionalizer: Functionalizer, inputs: Iterable[InputFacts], outputs: OutputFacts
) -> dict[Returned, Any]:
    """The values that the forward returns: updated inputs, the user's outputs, bases."""
    values: dict[Returned, Any] = {}
    kept: dict[Primal, Node] = {}
    placeholders = {node.slot: node for node in functionalizer.graph.placeholders}
    for facts in inputs:
        slot = facts.recorded.slot
        match facts.data, facts.place:
            case WrittenInGraph(), _:
                new = functionalizer.node_of(facts.recorded.seen)
                kept[slot] = functionalizer.graph.write_placeholder(placeholders[slot], new)
            case data, Resized() | StorageReplaced():
                if isinstance(data, WrittenBack):
                    values[Updated(slot)] = functionalizer.read(functionalizer.state_before(facts.recorded))
                grown = isinstance(facts.place, Resized) and not isinstance(slot, (SyntheticBase, ViewRoot))
                if grown and functionalizer.state_of(facts.recorded.seen).storage.writes:
                    values[Grown(slot)] = functionalizer.node_of(facts.recorded.seen)
            case (WrittenBack(), _) | (_, Reshaped()):
                values[Updated(slot)] = value_of(functionalizer, facts.recorded.seen)
    for i, (result, tensor) in enumerate(zip(outputs.results, outputs.tensors, strict=True)):
        match result:
            case Constant(value):
                values[Output(i)] = value
            case Number(value):
                values[Output(i)] = functionalizer.graph.number(value)
            case SameAsInput(recorded) if recorded.slot in kept:
                values[Output(i)] = kept[recorded.slot]
            case _:
                assert tensor is not None
                values[Output(i)] = value_of(functionalizer, tensor)
    for i, base in enumerate(outputs.bases):
        values[Base(i)] = value_of(functionalizer, base)
    return values


def _retains_gradients(recording: Recording, outputs: OutputFacts) -> bool:
    """Whether the program asks autograd to keep the gradient of an input or of a result."""
    tensors = (*(recorded.seen for recorded in recording.inputs if recorded.is_tensor), *outputs.tensors)
    return any(tensor is not None and not is_stale(tensor) and tensor.retains_grad for tensor in tensors)


def _is_out_of_reach(facts: InputFacts) -> bool:
    """Whether an input has another value by the time that the backward runs, or cannot be kept for it.

    It may be written through the wrapper around it. After `x.data = y`, which autograd does not notice, nothing may be
    computed from `x` again. Autograd saves no inference tensors, but what eager computes from them.
    """
    through_wrapper = isinstance(facts.recorded.slot, Inner) and facts.data_changed
    unnoticed = isinstance(facts.place, StorageReplaced) and not facts.place.counted
    return facts.written or through_wrapper or unnoticed or facts.recorded.was_inference


def _is_written_view(facts: InputFacts, recording: Recording) -> bool:
    """Whether autograd saw a write to an input that is a view; it was recorded as if it were none."""
    real = recording.real_tensors.get(facts.recorded.slot)
    return isinstance(facts.data, WrittenBack) and facts.followed and real is not None and real._is_view()


def _nodes_of_writes(recorded: RecordedInput) -> Iterator[Any]:
    """The nodes of the writes to an input, the last one first: the first edge of each leads to the one before.

    A custom function may have what it writes among its arguments anywhere; of several it is not known which.
    """
    node = recorded.seen.grad_fn
    while node is not None and node is not recorded.start_node:
        yield node
        before = [other for other, _ in node.next_functions]
        before = [other for other in before if other is not None] if is_custom_function_node(node) else before[:1]
        node = before[0] if len(before) == 1 else None


def _if_changed(before: Any, after: Any) -> Any:
    return after if after != before else None
