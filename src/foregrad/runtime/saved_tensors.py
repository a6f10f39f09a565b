"""What a forward saves for its backward: positions, edges to inputs, what is freed when, and the errors about it."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from ..errors import BackwardError, ForegradError
from ..graph.graph import Graph, Node, nodes_in
from ..joint.build import Joint
from ..joint.differentiate import Tape
from ..joint.inputs import has_version
from ..ops import Kind, op_info
from ..slots import Output, Primal, Returned, Saved, Size, Updated
from ..subclasses.layout import Wrapped, is_jagged, leaves_of

# ---------------------------------------------------------------------------------------------------------------------
# Errors of autograd's about what a compiled program has saved, in autograd's words and with the program's name.
#
# A program is one function to autograd, and saves what its backward reads for all of its results at once. Eager frees
# and checks node by node: it may have kept what is gone here, and may not look at what was written. Nobody can tell
# when a backward is refused, so the error is always Foregrad's own, of the class that eager would raise.
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
    refuse = _refusing_after(backward_id(), program)
    waiting, seen = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node is None or hasattr(node, "variable") or node in seen or not will_run(node):
            continue  # a leaf saves nothing
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        if not _is_compiled(node) and frees_when_run(node):
            node.register_prehook(refuse)


def _refusing_after(now: int, program: str) -> Callable[[Any], None]:
    def refuse(gradients: Any) -> None:
        if backward_id() != now:
            raise backward_again(program)

    return refuse


def _is_compiled(node: Any) -> bool:
    """Whether a node is that of a compiled program, which names its own errors."""
    return hasattr(node, "stash")


def under_hooks(error: Exception) -> BackwardError:
    """What is said in the place of an error about versions that eager does not raise."""
    return BackwardError(
        f"{error} Eager does not look, for saved-tensor hooks were active in the forward, and computes with what the "
        "hooks give back: this cannot be compiled. Call it without the hooks, or call the original function."
    )


# ---------------------------------------------------------------------------------------------------------------------
# What is left of the saved values once autograd has freed them, where other outputs still need them.
class Stash:
    """Saved values that a backward of some outputs left for the others.

    Eager frees what belongs to the nodes that ran, and no more. A program is one node to autograd, which frees
    everything at once: so the program keeps what eager would have kept, and refuses what eager would refuse.
    """

    def __init__(self, values: Sequence[Any], kept: Iterable[int], freed: frozenset[Any]) -> None:
        self._count = len(values)
        self._kept: dict[int, Any] = {i: values[i] for i in kept}
        self._versions = {i: value._version for i, value in self._kept.items() if isinstance(value, Tensor)}
        self.freed = freed  # nodes of the recording's tape

    def values(self) -> list[Any]:
        """The values by position, None where nothing is kept; one that was changed since then is refused."""
        for i, version in self._versions.items():
            value = self._kept[i]
            if value._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a {value.dtype} of shape {list(value.shape)} is at version {value._version}; expected version "
                    f"{version} instead."
                )
        return [self._kept.get(i) for i in range(self._count)]


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


@dataclass(frozen=True, slots=True)
class SavedNodes:
    """What the forward hands to the backward: tensors first in the forward's outputs."""

    tensors: tuple[Node, ...]
    sizes: tuple[Node, ...]

    @property
    def names(self) -> list[str]:
        """In the order in which the backward takes them."""
        return [node.name for node in (*self.sizes, *self.tensors)]

    def described(self, order: int) -> list[SavedValue]:
        """The tensors, for somebody who asks."""
        return [_described(node, order) for node in self.tensors]


def saved_by(forward: Graph) -> SavedNodes:
    """What a forward saves."""
    tensors, sizes = (tuple(node for _, node in forward.outputs_of(kind)) for kind in (Saved, Size))
    return SavedNodes(tensors, sizes)


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


def reread_by(joint: Joint, saved: SavedNodes, backward: Graph) -> Reread:
    """What a backward graph reads otherwise than eager does."""
    nodes = joint.graph.nodes
    kept = {origin_of(node).name for node in saved.tensors}
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
        {} if joint.backward_writes else _updated(joint, kept),
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


def _described(node: Node, order: int) -> SavedValue:
    value: Tensor = node.value
    shape = tuple(hint_of(n) for n in value.shape)
    is_input = node.op is None
    nbytes = 0 if is_input else torch.Size(shape).numel() * value.element_size()
    lines = node.stack_trace.strip().splitlines()
    return SavedValue(order, node.name, shape, value.dtype, nbytes, is_input, lines[-1].strip() if lines else "")


# ---------------------------------------------------------------------------------------------------------------------
# What leads from the node of a program, in autograd's graph, to the tensors that it was applied to.
@dataclass(frozen=True, slots=True)
class Edges:
    """The edges of a program's node, and where higher orders find a tensor with the history of each.

    A leaf is known to autograd; a saved input has its history; for any other the program returns an *anchor*, a tensor
    of its shape without data, whose gradient is its gradient. A wrapper subclass is saved itself where a tensor in it
    is.
    """

    through: tuple[int, ...]  # of which gradients autograd's edges are, in their order
    saved: Mapping[int, int] = field(default_factory=dict)  # positions of saved inputs, by edge
    anchors: tuple[int, ...] = ()  # edges with an anchor, in their order
    wrappers: Mapping[int, int] = field(default_factory=dict)  # positions among the wrappers that are saved, by edge
    made_late: tuple[Primal, ...] = ()  # inputs that eager's gradients of gradients reach, and no edge leads to


def anchor(tensor: Tensor) -> Tensor:
    """A tensor of the same shape that takes no memory to speak of."""
    return torch.empty_strided(tensor.shape, (0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)


def anchor_of_any(tensor: Tensor) -> Tensor:
    """The same for what may be a wrapper subclass: nothing else has the shape of a jagged one."""
    return tensor.detach() if is_jagged(tensor) else anchor(tensor)


def edges_of(joint: Joint, saved: SavedNodes, counted: Mapping[Primal, int]) -> Edges:
    """The edges of a program; `counted` are inputs whose changes count before they are made."""
    through = [
        i
        for i, (facts, grad) in enumerate(zip(joint.primals, joint.signature.grads, strict=True))
        if grad is not None or facts.recorded.slot in joint.tape.reached
    ]
    names = [node.name for node in saved.tensors]
    in_place = {write.current.name for write in joint.backward_writes}
    places: dict[int, int] = {}
    anchors = []
    wrappers = {}
    kept, _ = wrappers_saved(joint, saved)
    for edge, i in enumerate(through):
        node, facts = joint.primal_nodes[i], joint.primals[i]
        if i in kept:
            wrappers[edge] = kept.index(i)
            continue
        name = node.name if isinstance(node, Node) else None
        if name in names and facts.recorded.slot not in counted and name not in in_place:
            places[edge] = len(saved.sizes) + names.index(name)
        elif not facts.recorded.was_leaf:
            anchors.append(edge)
    return Edges(tuple(through), places, tuple(anchors), wrappers, _made_late(joint, through, names))


def _made_late(joint: Joint, through: Sequence[int], saved: Sequence[str]) -> tuple[Primal, ...]:
    """Inputs that are saved and made to require grad without being differentiated: their use came first."""
    primals = enumerate(zip(joint.primals, joint.primal_nodes, strict=True))
    return tuple(
        facts.recorded.slot
        for i, (facts, node) in primals
        if facts.made_to_require_grad and i not in through and isinstance(node, Node) and node.name in saved
    )


def wrappers_saved(joint: Joint, saved: SavedNodes) -> tuple[list[int], list[Returned]]:
    """Wrappers of which something is saved: inputs, by position, and results.

    They are saved too: a write to a wrapper counts for the wrapper only, and not for the tensors in it.
    """
    names = {saved_origin(node).name for node in saved.tensors}

    def is_saved(value: Any) -> bool:
        return isinstance(value, Wrapped) and any(isinstance(n, Node) and n.name in names for n in value.leaves)

    tracked = {tangent.of for tangent in joint.signature.tangents}
    returned = zip(joint.signature.returned, joint.returned_nodes, strict=True)
    results: list[Returned] = [
        slot for slot, value in returned if slot in tracked and isinstance(slot, Output) and is_saved(value)
    ]
    return [n for n, value in enumerate(joint.primal_nodes) if is_saved(value)], results


def values_in_wrappers(joint: Joint, saved: SavedNodes) -> list[frozenset[int]]:
    """For each wrapper that is saved, which of the saved values lie in it."""
    origins = [saved_origin(node).name for node in saved.tensors]
    node_of = dict(zip(joint.signature.returned, joint.returned_nodes, strict=True))
    positions, results = wrappers_saved(joint, saved)
    found = []
    for value in (*(joint.primal_nodes[i] for i in positions), *(node_of[slot] for slot in results)):
        names = {leaf.name for leaf in value.leaves if isinstance(leaf, Node)}
        found.append(frozenset(len(saved.sizes) + i for i, name in enumerate(origins) if name in names))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What a forward left in autograd's store, as its backward finds it: saved values, then anchors, then wrappers.
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


class Store:
    """Reads what was saved from the `ctx` of a backward, and keeps for others what autograd would free."""

    def __init__(
        self,
        tape: Tape,
        backward: Graph,
        saved: SavedNodes,
        edges: Edges,
        live: dict[int, int],
        frees: bool,
        wrappers: Sequence[frozenset[int]],
        reread: Reread,
        program: str,
    ) -> None:
        self.saved = saved
        self.edges = edges
        self.live = live  # saved tensors that are read from `ctx.live`: their places there, by position
        # Whether eager would keep what is saved, however often backward is called: custom functions can do that.
        self.keeps = bool(saved.tensors) and not frees
        self.in_wrappers = wrappers  # which of the saved values lie in each wrapper subclass that is saved
        self.reread = reread
        self.program = program  # its name, for errors
        self._tape = tape
        self._backward = backward
        self._readers: list[frozenset[int]] | None = None

    def values(self, ctx: Any) -> list[Any]:
        """What the forward saved, sizes first, with the caller's own tensors among it."""
        sizes = ctx.sizes if self.saved.sizes else ()
        held = iter(ctx.kept if self.keeps else self._held(ctx))
        live = self.live
        return [*sizes, *(ctx.live[live[i]] if i in live else next(held) for i in range(len(self.saved.tensors)))]

    def _held(self, ctx: Any) -> Sequence[Any]:
        """What autograd kept; it refuses where that is gone, or was written to."""
        try:
            found: Sequence[Any] = ctx.saved_tensors
            return found
        except RuntimeError as error:
            raise self.refusal(error) from None

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

    def _wrappers(self, ctx: Any) -> list[Any]:
        """Wrapper subclasses that are saved because tensors in them are."""
        return [*self._held(ctx)[self._behind_values + len(self.edges.anchors) :]] if self.in_wrappers else []

    @property
    def _behind_values(self) -> int:
        """Where autograd's store goes on behind the saved values: anchors first, then wrappers."""
        return 0 if self.keeps else len(self.saved.tensors) - len(self.live)

    # ------------------------------------------------------------------------- for some of the outputs only
    def take(self, ctx: Any, mask: tuple[bool, ...]) -> tuple[list[Any], list[Any]]:
        """Saved values, sizes first, and the wrapper subclasses that some of them lie in.

        What this backward does not leave to others is gone afterwards, as in eager.
        """
        if self.reread and ctx.noted is not None:
            self.require_unwritten(ctx, all(mask))
        uses = self._tape.freed_by(self._tape.chosen(mask))
        stash: Stash | None = ctx.stash
        values, wrappers = self._found(ctx, stash, uses)
        if not keeps_graph() and (stash is not None or not all(mask)):
            freed = uses if stash is None else stash.freed | uses
            ctx.stash = self._left(values, wrappers, freed)
        return values, wrappers

    def _found(self, ctx: Any, stash: Stash | None, uses: frozenset[Any]) -> tuple[list[Any], list[Any]]:
        """The same, from autograd's store or from what an earlier backward left."""
        count, gone = len(self.saved.names), [None] * len(self.saved.tensors)
        if stash is None:
            try:
                return self.values(ctx), self._wrappers(ctx)
            except RuntimeError:
                if uses:
                    raise
                # The tensors are freed, and perhaps not needed; sizes are no tensors.
                return [*ctx.sizes, *gone] if self.saved.sizes else gone, [None] * len(self.in_wrappers)
        if stash.freed & uses:
            raise backward_again(self.program)
        try:
            left = stash.values()
        except RuntimeError as error:
            raise self.refusal(error) from None
        for i, k in self.live.items():  # the caller's own tensors are read as they are, however often
            left[len(self.saved.sizes) + i] = ctx.live[k]
        return left[:count], left[count:]

    def _left(self, values: Sequence[Any], wrappers: Sequence[Any], freed: frozenset[Any]) -> Stash:
        """What later backwards may read."""
        inputs, own = set(self.edges.saved.values()), set(self.edges.wrappers.values())
        left = [v.detach() if isinstance(v, Tensor) and i not in inputs else v for i, v in enumerate(values)]
        left += [w if w is None or i in own else w.detach() for i, w in enumerate(wrappers)]
        kept = self._needed_later(freed) - {len(self.saved.sizes) + i for i in self.live}
        inside = {len(values) + i for i, positions in enumerate(self.in_wrappers) if positions & kept}
        return Stash(left, kept | inside, freed)

    def _needed_later(self, freed: frozenset[Any]) -> set[int]:
        """Positions of saved values that a later backward may read: of an output of which nothing is freed yet."""
        if self._readers is None:
            counts = [len(leaves_of(tangent)) for tangent in self._tape.tangents.values()]
            single = iter(_saved_read_by_tangents(self._backward, len(self.saved.names), sum(counts)))
            self._readers = [frozenset().union(*(next(single) for _ in range(count))) for count in counts]
        needed: set[int] = set()
        for slot, positions in zip(self._tape.targets, self._readers, strict=True):
            if not self._tape.freed_by((slot,)) & freed:
                needed |= positions
        return needed

    # --------------------------------------------------------------------------------------- for higher orders
    def links(
        self, ctx: Any, nodes: Sequence[Any], values: Sequence[Any], wrappers: Sequence[Any]
    ) -> list[Tensor | None]:
        """For each edge, which leads to one of the nodes, a tensor with the history of what the program was applied
        to."""
        edges = self.edges
        anchors = {edge: self._behind_values + i for i, edge in enumerate(edges.anchors)}
        links: list[Tensor | None] = []
        for edge, node in enumerate(nodes):
            if node is None:
                links.append(None)
            elif hasattr(node, "variable"):
                links.append(node.variable)
            elif edge in anchors:
                links.append(self._held(ctx)[anchors[edge]])
            elif edge in edges.wrappers and wrappers[edges.wrappers[edge]] is not None:
                links.append(wrappers[edges.wrappers[edge]])
            elif edge in edges.saved and values[edges.saved[edge]] is not None:
                links.append(values[edges.saved[edge]])
            else:
                raise BackwardError(
                    "An input was a leaf when the program was compiled and is none now, so that its gradients cannot "
                    "be differentiated. Compile it with an input of this kind."
                )
        return links


def _saved_read_by_tangents(graph: Graph, saved: int, count: int) -> list[frozenset[int]]:
    """For each tangent of a backward graph, which of the saved values it is combined with on its way.

    What comes from another tangent is only added to it. Values that nobody reads here are for higher orders, and those
    behind a gradient that no tangent reaches (zeros of a saved size) may belong to any of them.
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
