"""Backwards that are differentiated themselves: each is a joint graph of its own, on the tape of the next order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .._torch import names_jagged_size
from ..errors import UnsupportedError
from ..functionalize.effect_tokens import Chain
from ..graph.fx import saved_slot
from ..graph.graph import Graph, GraphOutput, Node, ancestors, nodes_in
from ..graph.subgraph import between, copied_joint, impure_since, inputs_needed, read_by
from ..record.hooks import BackwardState
from ..record.session import RecordedBackward
from ..slots import LowerTangent, Output, Returned, Slot, Token
from ..subclasses.layout import Layout, Wrapped, leaves_of, spread
from .differentiate import Differentiated, Tape, refuse_late_inputs, tangent_like, value_of, with_own_constants


@dataclass(frozen=True, slots=True)
class HigherOrderGraph:
    """A backward that can be differentiated itself, with its own backward as one joint graph.

    The graph takes saved values, tangents, and the tangents of the gradients; it returns the gradients, then theirs.
    """

    tape: Tape  # its targets are those gradients that require grad
    graph: Graph
    saved: tuple[int, ...]  # which saved values the graph takes, and then
    tangents: tuple[int, ...]  # which of the tensors in the tangents
    results: tuple[int, ...]  # which gradients it returns; the others are None
    layouts: tuple[Layout | None, ...]  # of those that are wrapper subclasses
    backward: Differentiated  # the gradients of these gradients
    state: BackwardState | None  # that code of the user's has read in this backward
    emptied: frozenset[int]  # selective checkpoints that this backward runs through


def next_order(
    tape: Tape, slots: Sequence[Returned], with_grad: Sequence[bool], wanted: Sequence[bool], saved: Sequence[str]
) -> HigherOrderGraph:
    """The backward of some of a tape's targets, to be differentiated itself.

    Args:
        tape: of the order below.
        slots: the targets whose tangents arrive.
        with_grad: which of these tangents require grad.
        wanted: which of the gradients are asked for.
        saved: the names of the values that the forward saved.
    """
    walk = tape.functionalizer
    tangents, backward = _recorded(tape, slots, with_grad)
    first_node = len(walk.graph.nodes)
    walk.run(backward.steps, backward.start)
    _refuse_functional_draws(tape)
    chain = walk.chain()
    walk.tokens.begin_order()
    results = [g if use else None for g, use in zip(tape.in_order(backward), wanted, strict=True)]
    nodes = [None if g is None else value_of(walk, g) for g in results]
    differentiable: dict[Returned, Tensor] = {
        Output(i): g for i, g in enumerate(results) if g is not None and g.requires_grad
    }
    if tape.session.depend_on(list(differentiable.values()), tape.fresh_leaves):
        raise UnsupportedError(
            "a gradient is to be differentiated for a tensor that the program made require grad and returned, and that "
            "its backward reads: this cannot be compiled yet. Compile with fallback='eager'."
        )
    lower = (*tape.lower_tangents, *(t for t in tangents if t.requires_grad))
    higher = Tape(
        tape.session, walk, tape.primals, differentiable, lower, tape.number + 1, fresh_leaves=tape.fresh_leaves
    )
    given, impure = tape.named(saved), impure_since(walk.graph, first_node)
    return _with_its_gradients(higher, nodes, given, tape.tangent_nodes, chain, impure, backward)


def _recorded(
    tape: Tape, slots: Sequence[Returned], with_grad: Sequence[bool]
) -> tuple[list[Tensor], RecordedBackward]:
    """Record the backward with new tangents, of which some require grad: these tangents, and what came of it."""
    walk = tape.functionalizer
    walk.restart_backward()
    tangents = [tangent_like(tape.session.engine, tape.targets[slot]) for slot in slots]
    for slot, tangent, required in zip(slots, tangents, with_grad, strict=True):
        for leaf, node in zip(leaves_of(tangent), tape.nodes_of_tangents[slot], strict=True):
            if not names_jagged_size(leaf):
                walk.add_fresh(leaf, node)
        tangent.requires_grad_(required)
    backward = tape.differentiably(slots, tangents)
    refuse_late_inputs(backward)
    if tape.writes_to_inputs(backward.steps):
        raise UnsupportedError("a backward that writes to its inputs cannot be differentiated yet.")
    return tangents, backward


def _with_its_gradients(
    tape: Tape,
    results: Sequence[Node | Wrapped | None],
    given: Sequence[Node],
    tangents: Sequence[Node],
    chain: Chain,
    impure: Sequence[Node],
    backward: RecordedBackward,
) -> HigherOrderGraph:
    """The joint graph of `results`, which are computed from saved values and tangents, and of their gradients.

    `tape` is that of the results, `impure` are nodes that must run with them, and `chain` has the tokens of those with
    effects. `backward` is what they were recorded with.
    """
    graph = tape.functionalizer.graph
    start = len(graph.nodes)
    derived = _differentiated_later(tape)
    positions = tuple(i for i, node in enumerate(results) if node is not None)
    layouts = tuple(node.layout if isinstance(node, Wrapped) else None for node in results if node is not None)
    walk = tape.functionalizer
    own_results = iter(with_own_constants(walk, spread(results[i] for i in positions)))
    tokens = [Token(slot.effect) for slot in chain.slots]
    returned = [*map(GraphOutput, tokens, chain.ends)]
    for i, layout in zip(positions, layouts, strict=True):
        places = [Output(i)] if layout is None else layout.slots(Output(i))
        returned += [GraphOutput(place, next(own_results)) for place in places]
    gradients = derived.outputs(tape.primals)
    copies = with_own_constants(walk, [value for _, value in gradients])
    outputs = [*returned, *(GraphOutput(slot, value) for (slot, _), value in zip(gradients, copies, strict=True))]
    own = [*tape.tangent_nodes, *derived.tokens.heads]
    wanted = [*nodes_in([value for _, value in outputs]), *impure, *impure_since(graph, start)]
    nodes = between(graph, [*chain.heads, *given, *tangents, *own], wanted)
    read = read_by(nodes, [value for _, value in outputs])
    used = inputs_needed(given, read)
    used_tangents = [i for i, node in enumerate(tangents) if node in read]
    inputs: list[tuple[Slot, Node]] = [
        *zip(tokens, chain.heads, strict=True),
        *((saved_slot(given[i]), given[i]) for i in used),
        *((LowerTangent(i), tangents[i]) for i in used_tangents),
    ]
    in_forward = ancestors([*nodes_in([value for _, value in returned]), *impure])
    copied, tape.by_name = copied_joint(inputs, own, nodes, outputs, in_forward)
    return HigherOrderGraph(
        tape=tape,
        graph=copied,
        saved=tuple(used),
        tangents=tuple(used_tangents),
        results=positions,
        layouts=layouts,
        backward=derived,
        state=backward.state,
        emptied=backward.emptied,
    )


def _differentiated_later(tape: Tape) -> Differentiated:
    """The gradients of an order; what cannot be compiled of them is only said when they are asked for."""
    try:
        derived = tape.differentiate_all()
        _refuse_functional_draws(tape)
        if derived.writes:
            raise UnsupportedError("a double backward that writes to its inputs cannot be compiled yet.")
    except UnsupportedError as error:
        return Differentiated([None] * tape.gradients, refused=dict.fromkeys(tape.targets, error))
    return derived


def _refuse_functional_draws(tape: Tape) -> None:
    if tape.random is not None and tape.random.draws:
        raise UnsupportedError(
            "a backward that draws random numbers cannot be differentiated under functionalize_rng_ops yet. Keep "
            "preserve_rng_state=True, or switch the option off."
        )
