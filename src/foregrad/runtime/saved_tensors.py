"""What a forward saves for its backward: positions, edges to inputs, what is freed when, and the errors about it."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import (
    OpOverload,
    backward_id,
    frees_when_run,
    hint_of,
    is_second_backward,
    is_version_error,
    keeps_graph,
    saved_hooks_are_on,
    will_run,
)
from ..errors import BackwardError, ForegradError, UnsupportedError
from ..graph.graph import Graph, Node, nodes_in
from ..joint.build import Joint
from ..joint.differentiate import Tape
from ..joint.inputs import InputFacts, has_version
from ..ops import Kind, op_info
from ..slots import Output, Primal, Returned, Saved, Size, Updated
from ..subclasses.layout import Wrapped, is_jagged, leaves_of

# ---------------------------------------------------------------------------------------------------------------------
# Errors of autograd's about what a compiled program has saved, in autograd's words and with the program's name.
#
# A program is one function to autograd, and saves what its backward reads for all of its results at once. Eager frees
# and checks node by node: it may have kept what is gone here, and may not look at what was written. When a backward
# is refused that is not known, so the error is always Foregrad's own, of the class that eager would raise.
SECOND_TIME = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
    "been freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). "
    "Specify retain_graph=True if you need to backward through the graph a second time or if you need to access saved "
    "tensors after calling backward."
)


def named(error: RuntimeError, program: str) -> RuntimeError:
    """An error of autograd's about saved tensors, as the program's own; any other as it is."""
    if isinstance(error, BackwardError):
        return error
    if is_second_backward(error):
        return backward_again(program, str(error))
    if is_version_error(error):
        return BackwardError(
            f"{error} The backward of {program}, which is compiled, checks all tensors that it saved, also those that "
            "eager would not save, or not read for these gradients. Run the backward before you write, write to a "
            "copy, or call the original function."
        )
    return error


def perhaps_elsewhere(error: Exception, program: str) -> Exception:
    """What autograd said of a whole backward, where only some gradients are asked for."""
    if not isinstance(error, RuntimeError) or isinstance(error, ForegradError):
        return error
    return BackwardError(
        f"{error} {program} is compiled, and its backward runs as a whole: eager may not get there on its way to the "
        "gradients that were asked for. Call the original function."
    )


def backward_again(program: str, words: str = SECOND_TIME) -> BackwardError:
    """What is said where something is freed that a backward needs."""
    return BackwardError(
        f"{words} {program} is compiled, and one function to autograd: a backward through some of its results frees "
        "also what leads to arguments that only others depend on. Pass retain_graph=True to the first backward, "
        "differentiate the results together, or detach what needs no gradient."
    )


def refuse_later(nodes: Iterable[Any], program: str) -> None:
    """Nodes before a program, and those before them, run now without a gradient, and free what they saved.

    Eager would not get there. A later backward that does is refused by name, before it meets what is gone.
    """
    now = backward_id()

    def refuse(gradients: Any) -> None:
        if backward_id() != now:
            raise backward_again(program)

    waiting, seen = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node is None or hasattr(node, "variable") or node in seen or not will_run(node):
            continue  # a leaf saves nothing
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        if not hasattr(node, "stash") and frees_when_run(node):  # a compiled program names its own errors
            node.register_prehook(refuse)


def under_hooks(error: Exception) -> BackwardError:
    """What is said in the place of an error about versions that eager does not raise."""
    return BackwardError(
        f"{error} Eager does not look, for saved-tensor hooks were active in the forward, and computes with what the "
        "hooks give back: this cannot be compiled. Call it without the hooks, or call the original function."
    )


# ---------------------------------------------------------------------------------------------------------------------
# What a forward hands to its backward, and how much memory that takes.
@dataclass(frozen=True, slots=True)
class SavedValue:
    """A tensor that is kept between a forward and its backward.

    Args:
        order: 1 for what the program keeps for its gradients, 2 for what these keep for theirs, and so on.
        name: Its node in the graphs.
        shape: By the sizes of the recording.
        dtype: Of its elements.
        nbytes: What it takes; an input that is kept takes no memory of its own.
        is_input: Whether it is an input of that forward.
        line: The user's line that made it, if it is known.
    """

    order: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    is_input: bool
    line: str

    def __str__(self) -> str:
        kind = "an input" if self.is_input else f"{self.nbytes:,} bytes"
        return f"order {self.order}: {self.name}, {str(self.dtype).removeprefix('torch.')}{list(self.shape)}, {kind}"


def saved_origin(node: Node) -> Node:
    """What a saved view, or a view of a view, was taken from."""
    while is_view(node):
        node = node.args[0]
    return node


def is_view(node: Node) -> bool:
    """Whether a node takes a view."""
    return isinstance(node.op, OpOverload) and op_info(node.op).kind is Kind.VIEW


def origin_of(node: Node) -> Node:
    """What a view, or a view of a view, was taken from; a piece of a split is a view too."""
    while True:
        source = node.args[0] if node.op is operator.getitem else node
        if not is_view(source):
            return node
        node = source.args[0]


@dataclass(frozen=True, slots=True)
class Reread:
    """What versions matter to a backward beyond what autograd checks by itself; primals by their places.

    Args:
        only_again: Those that are saved only because something is computed from them again: eager saves that instead.
        again: Those from which anything is computed again, eager reads them or not.
        updated: Those that the program writes to and whose new value is saved: by how much their versions grow.
        returned: Results that are computed again where eager saves them.
    """

    only_again: Mapping[int, str] = field(default_factory=dict)  # with their names
    again: Sequence[int] = ()
    updated: Mapping[int, int] = field(default_factory=dict)
    returned: Sequence[Returned] = ()

    def __bool__(self) -> bool:
        return bool(self.only_again or self.checks)

    @property
    def checks(self) -> bool:
        """Whether the backward looks at versions itself."""
        return bool(self.again or self.updated or self.returned)


def _described(node: Node, order: int) -> SavedValue:
    value: Tensor = node.value
    shape = tuple(hint_of(n) for n in value.shape)
    is_input = node.op is None
    nbytes = 0 if is_input else torch.Size(shape).numel() * value.element_size()
    lines = node.stack_trace.strip().splitlines()
    return SavedValue(order, node.name, shape, value.dtype, nbytes, is_input, lines[-1].strip() if lines else "")


# ---------------------------------------------------------------------------------------------------------------------
# What is kept in the `ctx` of a call.
def anchor(tensor: Tensor) -> Tensor:
    """A tensor of the same shape that takes no memory to speak of."""
    return torch.empty_strided(tensor.shape, (0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)


def anchor_of_any(tensor: Tensor) -> Tensor:
    """The same for what may be a wrapper subclass: nothing else has the shape of a jagged one."""
    return tensor.detach() if is_jagged(tensor) else anchor(tensor)


def run_once(ctx: Any, emptied: frozenset[int]) -> None:
    """A backward runs through selective checkpoints, which let only one through."""
    if emptied & ctx.emptied:
        raise RuntimeError(
            "Trying to backward an extra time. You are only allowed to backward once on any region computed under "
            "selective activation checkpoint."
        )
    ctx.emptied |= emptied


def give_back(ctx: Any) -> None:
    """A backward has run: what checkpoints run again need not live for another one, unless the graph is kept."""
    if not keeps_graph():
        ctx.checkpointed = ()


class Noted(NamedTuple):
    """Versions of tensors, as they are when a call is over."""

    hooked: bool  # what is saved goes through hooks, and eager checks no versions
    versions: Sequence[tuple[weakref.ref[Tensor], int]]  # of inputs
    results: Sequence[tuple[weakref.ref[Tensor], int]] = ()


class Stash:
    """Saved values that a backward of some outputs left for the others.

    Eager frees what belongs to the nodes that ran, and no more. A program is one node to autograd, which frees
    everything at once: so the program keeps what eager would have kept, and refuses what eager would refuse.
    """

    def __init__(self, values: Sequence[Any], kept: set[int], freed: frozenset[Any]) -> None:
        stays = (i in kept or not isinstance(value, Tensor) for i, value in enumerate(values))  # sizes are not freed
        self._values: list[Any] = [value if stay else None for value, stay in zip(values, stays, strict=True)]
        self._versions = [value._version if isinstance(value, Tensor) else None for value in self._values]
        self.freed = freed  # nodes of the recording's tape

    def values(self) -> list[Any]:
        """The values by position, None where nothing is kept; one that was changed since then is refused."""
        for value, version in zip(self._values, self._versions, strict=True):
            if version is not None and value._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a {value.dtype} of shape {list(value.shape)} is at version {value._version}; expected version "
                    f"{version} instead."
                )
        return list(self._values)


# ---------------------------------------------------------------------------------------------------------------------
# What a forward leaves for its backward.
@dataclass(frozen=True)
class SavedTensors:
    """What a forward leaves for its backward, and where: nothing else knows positions.

    Sizes are kept in `ctx.sizes`. Autograd keeps the tensors, then anchors, then wrapper subclasses. The backward takes
    sizes first, then tensors, and a position counts in that order.

    Autograd has an edge from the program's node to each input that gets a gradient. For each edge higher orders need a
    tensor with the history of that input. A leaf is known to autograd; a saved input has its history; for any other the
    program returns an *anchor*, a tensor of its shape without data, whose gradient is its gradient. A wrapper subclass
    is saved itself where a tensor in it is: a write to a wrapper counts for the wrapper only.
    """

    program: str  # its name, for errors
    tape: Tape
    backward: Graph
    tensors: Sequence[Node]
    sizes: Sequence[Node]
    through: Sequence[int]  # of which gradients autograd's edges are, in their order
    inputs: Mapping[int, int] = field(default_factory=dict)  # positions of saved inputs, by edge
    anchors: Sequence[int] = ()  # edges with an anchor, in their order
    wrapped_inputs: Sequence[int] = ()  # wrappers that are saved: primals,
    wrapped_results: Sequence[Returned] = ()  # and results
    in_wrappers: Sequence[frozenset[int]] = ()  # positions of what lies in each wrapper that is saved
    made_late: Sequence[Primal] = ()  # inputs that eager's gradients of gradients reach, and no edge leads to
    live: Mapping[int, int] = field(default_factory=dict)  # tensors that are read from `ctx.live`: places there
    counted: Mapping[Primal, int] = field(default_factory=dict)  # inputs whose changes count before they are made
    frees: bool = True  # eager does not keep what is saved, however often backward is called; custom functions can
    reread: Reread = field(default_factory=Reread)

    @cached_property
    def names(self) -> list[str]:
        """In the order in which the backward takes them."""
        return [node.name for node in (*self.sizes, *self.tensors)]

    @property
    def keeps(self) -> bool:
        """Whether tensors are saved, and stay however often backward is called."""
        return bool(self.tensors) and not self.frees

    def described(self, order: int) -> list[SavedValue]:
        """The tensors, as a user sees them."""
        return [_described(node, order) for node in self.tensors]

    # ------------------------------------------------------------------------------------ for the whole backward
    def values(self, ctx: Any) -> list[Any]:
        """What the forward saved, sizes first, with the caller's own tensors among it."""
        sizes = ctx.sizes if self.sizes else ()
        held = iter(ctx.kept if self.keeps else self._held(ctx))
        live = self.live
        return [*sizes, *(ctx.live[live[i]] if i in live else next(held) for i in range(len(self.tensors)))]

    def _held(self, ctx: Any) -> Sequence[Any]:
        """What autograd kept; it refuses where that is gone, or was written to."""
        try:
            found: Sequence[Any] = ctx.saved_tensors
            return found
        except RuntimeError as error:
            raise self.refusal(error) from None

    def _after_tensors(self, ctx: Any) -> tuple[list[Any], list[Any]]:
        """The anchors and the wrapper subclasses, which autograd keeps after the tensors."""
        rest = list(self._held(ctx)[0 if self.keeps else len(self.tensors) - len(self.live) :])
        return rest[: len(self.anchors)], rest[len(self.anchors) :]

    def noted(self, again: Sequence[Tensor], updated: Sequence[Tensor]) -> Noted | None:
        """Versions that the backward checks itself: autograd has nothing to check, or hooks keep it from doing so."""
        hooked = saved_hooks_are_on()
        grown = zip(updated, self.reread.updated.values(), strict=True)
        versions = [(weakref.ref(tensor), tensor._version + change) for tensor, change in grown]
        versions += [(weakref.ref(tensor), tensor._version) for tensor in again] if hooked else []
        return Noted(hooked, versions) if versions else None

    def require_unwritten(self, ctx: Any, whole: bool = True) -> None:
        """Refuse where something that was noted has changed; of what is gone, hooks have made a copy.

        Of inputs, what only other outputs need than those that are differentiated is eager's matter then.
        """
        noted: Noted = ctx.noted
        for reference, version in (*noted.results, *(noted.versions if whole or noted.hooked else ())):
            tensor = reference()
            # It is lower where another thread was about to write without counting: versions are put back after that.
            if tensor is not None and tensor._version > version:
                error = RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
                    f"{version} instead."
                )
                raise under_hooks(error) if noted.hooked else named(error, self.program)

    def refusal(self, error: RuntimeError) -> RuntimeError:
        """An error of autograd's, as the program's own; where it reads more than eager does, that is said."""
        if not self.reread.only_again or not is_version_error(error) or isinstance(error, BackwardError):
            return named(error, self.program)
        return BackwardError(
            f"{error} The compiled backward reads {', '.join(self.reread.only_again.values())} once more, where eager "
            "keeps what it computed from there. Run the backward before you write, write to a copy, or save more "
            "(default_partition)."
        )

    # ------------------------------------------------------------------------- for some of the outputs only
    def take(self, ctx: Any, mask: tuple[bool, ...]) -> tuple[list[Any], list[Any]]:
        """Saved values, sizes first, and the wrapper subclasses that some of them lie in.

        What this backward does not leave to others is gone afterwards, as in eager.
        """
        if self.reread and ctx.noted is not None:
            self.require_unwritten(ctx, all(mask))
        uses = self.tape.freed_by(self.tape.chosen(mask))
        stash: Stash | None = ctx.stash
        values, wrappers = self._found(ctx, stash, uses)
        if not keeps_graph() and (stash is not None or not all(mask)):
            freed = uses if stash is None else stash.freed | uses
            ctx.stash = self._left(values, wrappers, freed)
        return values, wrappers

    def _found(self, ctx: Any, stash: Stash | None, uses: frozenset[Any]) -> tuple[list[Any], list[Any]]:
        """The same, from autograd's store or from what an earlier backward left."""
        count, gone = len(self.names), [None] * len(self.tensors)
        if stash is None:
            try:
                return self.values(ctx), self._after_tensors(ctx)[1] if self.in_wrappers else []
            except RuntimeError:
                if uses:
                    raise
                # The tensors are freed, and perhaps not needed; sizes are no tensors.
                return [*ctx.sizes, *gone] if self.sizes else gone, [None] * len(self.in_wrappers)
        if stash.freed & uses:
            raise backward_again(self.program)
        try:
            left = stash.values()
        except RuntimeError as error:
            raise self.refusal(error) from None
        for i, k in self.live.items():  # the caller's own tensors are read as they are, however often
            left[len(self.sizes) + i] = ctx.live[k]
        return left[:count], left[count:]

    def _left(self, values: Sequence[Any], wrappers: Sequence[Any], freed: frozenset[Any]) -> Stash:
        """What later backwards may read."""
        own = range(len(self.wrapped_inputs))
        kept = self._needed_later(freed) - {len(self.sizes) + i for i in self.live}
        apart = kept - set(self.inputs.values())
        left = [v.detach() if i in apart and isinstance(v, Tensor) else v for i, v in enumerate(values)]
        left += [w if w is None or i in own else w.detach() for i, w in enumerate(wrappers)]
        inside = {len(values) + i for i, positions in enumerate(self.in_wrappers) if positions & kept}
        return Stash(left, kept | inside, freed)

    def _needed_later(self, freed: frozenset[Any]) -> set[int]:
        """Positions of saved values that a later backward may read: of an output of which nothing is freed yet."""
        readers = zip(self.tape.targets, self._readers, strict=True)
        return set().union(*(positions for slot, positions in readers if not self.tape.freed_by((slot,)) & freed))

    @cached_property
    def _readers(self) -> list[frozenset[int]]:
        """For each output, the positions of the saved values that its backward reads."""
        counts = [len(leaves_of(tangent)) for tangent in self.tape.tangents.values()]
        single = iter(_saved_read_by_tangents(self.backward, len(self.names), sum(counts)))
        return [frozenset().union(*itertools.islice(single, count)) for count in counts]

    # --------------------------------------------------------------------------------------- for higher orders
    def links(
        self, ctx: Any, nodes: Sequence[Any], values: Sequence[Any], wrappers: Sequence[Any]
    ) -> list[Tensor | None]:
        """For each edge, which leads to one of the nodes, a tensor with the history of what the program was applied
        to."""
        known = {self.through.index(i): wrappers[k] for k, i in enumerate(self.wrapped_inputs) if i in self.through}
        known |= {edge: values[position] for edge, position in self.inputs.items()}
        links: list[Tensor | None] = []
        for edge, node in enumerate(nodes):
            if node is None or hasattr(node, "variable"):
                links.append(None if node is None else node.variable)
                continue
            found = self._after_tensors(ctx)[0][self.anchors.index(edge)] if edge in self.anchors else known.get(edge)
            if found is None:
                raise BackwardError(
                    "An input was a leaf when the program was compiled and is none now, so that its gradients cannot "
                    "be differentiated. Compile it with an input of this kind."
                )
            links.append(found)
        return links


# ---------------------------------------------------------------------------------------------------------------------
# What is saved of a program, read off its graphs.
def saved_by(joint: Joint, forward: Graph, backward: Graph, program: str) -> SavedTensors:
    """What the forward of a program saves; `program` is its name."""
    tensors, sizes = ([node for _, node in forward.outputs_of(kind)] for kind in (Saved, Size))
    names, first = {node.name: i for i, node in enumerate(tensors)}, len(sizes)
    through = [
        i
        for i, (facts, grad) in enumerate(zip(joint.primals, joint.signature.grads, strict=True))
        if grad is not None or facts.recorded.slot in joint.tape.reached
    ]
    counted = _changed_after_saving(joint, tensors)
    wrapped_inputs, wrapped_results, in_wrappers = _wrappers_saved(joint, tensors, first)
    in_place = {write.current.name for write in joint.backward.writes}
    inputs: dict[int, int] = {}
    anchors: list[int] = []
    for edge, i in enumerate(through):
        node, facts = joint.primal_nodes[i], joint.primals[i]
        if i in wrapped_inputs:
            continue
        name = node.name if isinstance(node, Node) else None
        if name in names and facts.recorded.slot not in counted and name not in in_place:
            inputs[edge] = first + names[name]
        elif not facts.recorded.was_leaf:
            anchors.append(edge)
    return SavedTensors(
        program,
        joint.tape,
        backward,
        tensors,
        sizes,
        through,
        inputs,
        anchors,
        wrapped_inputs,
        wrapped_results,
        in_wrappers,
        made_late=_made_late(joint, through, names),
        live={
            names[write.current.name]: k
            for k, write in enumerate(joint.backward.writes)
            if write.current.name in names and not write.checked
        },
        counted=counted,
        frees=joint.tape.frees_anything,
        reread=_reread_by(joint, tensors, backward),
    )


def _changed_after_saving(joint: Joint, tensors: Sequence[Node]) -> dict[Primal, int]:
    """Inputs that the backward needs as they are, and that change their shape or their place: by how many versions."""
    names = {origin_of(node).name for node in tensors}
    changing = [
        (node.name, facts)
        for node, facts in zip(joint.primal_nodes, joint.primals, strict=True)
        if isinstance(node, Node) and node.name in names and facts.version_change and _changes_later(joint, facts)
    ]
    moving = {name for name, _ in changing}
    for node in tensors:
        if node.op is operator.getitem and node is not origin_of(node) and origin_of(node).name in moving:
            raise UnsupportedError(
                "the backward needs one of several views (of a split, an unbind) of an input whose shape the program "
                "changes: this cannot be compiled yet. Take the views one by one, or of a clone."
            )
    return {facts.recorded.slot: facts.version_change for _, facts in changing}


def _changes_later(joint: Joint, facts: InputFacts) -> bool:
    """Whether the shape or place of an input, or of one that looks at its memory, changes once the graph has run."""
    members = [f for f in joint.inputs if f.recorded.parent is facts.recorded]
    return not facts.data_changed and any(f.place for f in (facts, *members))


def _made_late(joint: Joint, through: Sequence[int], saved: Container[str]) -> list[Primal]:
    """Inputs that are saved and made to require grad without being differentiated: their use came first."""
    primals = enumerate(zip(joint.primals, joint.primal_nodes, strict=True))
    return [
        facts.recorded.slot
        for i, (facts, node) in primals
        if facts.made_to_require_grad and i not in through and isinstance(node, Node) and node.name in saved
    ]


def _wrappers_saved(
    joint: Joint, tensors: Sequence[Node], first: int
) -> tuple[list[int], list[Returned], list[frozenset[int]]]:
    """Wrappers of which something is saved: inputs, by position, and results; and for each, what is saved of it.

    Positions of tensors begin at `first`.
    """
    tracked = {tangent.of for tangent in joint.signature.tangents}
    results = [
        (slot, value)
        for slot, value in zip(joint.signature.returned, joint.returned_nodes, strict=True)
        if slot in tracked and isinstance(slot, Output) and isinstance(value, Wrapped)
    ]
    inputs = [(i, value) for i, value in enumerate(joint.primal_nodes) if isinstance(value, Wrapped)]
    if not inputs and not results:
        return [], [], []
    origins = [saved_origin(node).name for node in tensors]

    def saved_in(value: Wrapped) -> frozenset[int]:
        names = {leaf.name for leaf in value.leaves if isinstance(leaf, Node)}
        return frozenset(first + i for i, name in enumerate(origins) if name in names)

    kept = [(i, saved_in(value)) for i, value in inputs if saved_in(value)]
    returned: list[tuple[Returned, frozenset[int]]] = [(s, saved_in(value)) for s, value in results if saved_in(value)]
    return [i for i, _ in kept], [slot for slot, _ in returned], [inside for _, inside in (*kept, *returned)]


def _reread_by(joint: Joint, tensors: Sequence[Node], backward: Graph) -> Reread:
    """What a backward graph reads otherwise than eager does."""
    nodes = joint.graph.nodes
    kept = {origin_of(node).name for node in tensors}
    of_primals = _views_of([node for node in joint.primal_nodes if isinstance(node, Node) and node.name in kept], nodes)
    recorded = {item for node in nodes if node.backward for item in node.inputs()} | {
        *nodes_in(value for _, value in joint.graph.backward_outputs)
    }
    read = {of_primals[node] for node in recorded if node in of_primals}
    computed = {node.name: node.inputs() for node in backward.nodes}
    again = [node for node in nodes if not node.backward and node.name in computed]
    repeated = [computed[node.name] for node in again if not is_view(node)]
    sources = {origin_of(item).name for items in repeated for item in items}
    plain = {i: node.name for i, node in enumerate(joint.primal_nodes) if isinstance(node, Node)}
    return Reread(
        {i: str(joint.primals[i].recorded.slot) for i, name in plain.items() if name in kept - read},
        [i for i, name in plain.items() if name in sources],
        {} if joint.backward.writes else _updated(joint, kept),
        _returned(joint, recorded, {node.name for node in again}) if again else (),
    )


def _returned(joint: Joint, read: set[Node], again: set[str]) -> list[Returned]:
    """Results that the recorded backward reads, and that are computed again, not saved."""
    origins = {origin_of(node).name for node in read} & again
    results = zip(joint.signature.returned, joint.returned_nodes, strict=True)
    return [
        slot
        for slot, node in results
        if not isinstance(slot, Updated) and isinstance(node, Node) and origin_of(node).name in origins
    ]


def _views_of(origins: Sequence[Node], nodes: Sequence[Node]) -> dict[Any, str]:
    """Some nodes and all views of them, with the names of those that they were taken from."""
    found = {node: node.name for node in origins}
    for node in nodes:
        name = found.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if name is not None and (node.op is operator.getitem or is_view(node)):
            found[node] = name
    return found


def _updated(joint: Joint, kept: set[str]) -> dict[int, int]:
    """Eager saves the tensor that was written to, and checks it; the graph saves the value."""
    returned = zip(joint.signature.returned, joint.returned_nodes, strict=True)
    new = {slot.of: node for slot, node in returned if isinstance(slot, Updated) and isinstance(node, Node)}
    found = [(i, facts, new.get(facts.recorded.slot)) for i, facts in enumerate(joint.primals)]
    return {
        i: facts.version_change
        for i, facts, node in found
        if node is not None and has_version(facts) and origin_of(node).name in kept
    }


def _saved_read_by_tangents(graph: Graph, saved: int, count: int) -> list[frozenset[int]]:
    """For each tangent of a backward graph, which of the saved values it is combined with on its way.

    What comes from another tangent is only added to it. Values that are not read here are for higher orders, and those
    of a gradient that no tangent reaches (zeros of a saved size) may belong to any of them.
    """
    inputs = graph.inputs[: saved + count]
    used = {item for node in graph.nodes for item in node.inputs()} | set(nodes_in(graph.results))
    read: dict[Node, set[int]] = {node: {i} for i, node in enumerate(inputs[:saved])}  # where no tangent is
    reached: dict[Node, set[int]] = {node: {i} for i, node in enumerate(inputs[saved:])}
    readers: list[set[int]] = [{i for i, node in enumerate(inputs[:saved]) if node not in used} for _ in inputs[saved:]]
    for node in graph.nodes:
        known: set[int] = set().union(*(read.get(item, ()) for item in node.inputs()))
        tangents: set[int] = set().union(*(reached.get(item, ()) for item in node.inputs()))
        if tangents:
            reached[node] = tangents
        else:
            read[node] = known
        for tangent in tangents:
            readers[tangent] |= known
    without = set().union(*(read.get(node, ()) for node in nodes_in(graph.results)))
    return [frozenset(positions | without) for positions in readers]
