"""What a forward left in autograd's store, as its backward finds it: saved values, then anchors, then wrappers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from .._torch import is_version_error, keeps_graph, saved_hooks_are_on
from ..errors import BackwardError
from ..joint.tape import Tape
from ..subclasses.layout import leaves_of
from .edges import Edges
from .refusing import backward_again, named, under_hooks
from .saved import Reread, Saved
from .stash import Stash


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
        module: fx.GraphModule,
        saved: Saved,
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
        self._module = module
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
            single = iter(_saved_read_by_tangents(self._module, len(self.saved.names), sum(counts)))
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


def _saved_read_by_tangents(module: fx.GraphModule, saved: int, count: int) -> list[frozenset[int]]:
    """For each tangent of a backward graph, which of the saved values it is combined with on its way.

    What comes from another tangent is only added to it. Values that nobody reads here are for higher orders, and those
    behind a gradient that no tangent reaches (zeros of a saved size) may belong to any of them.
    """
    placeholders = module.graph.find_nodes(op="placeholder")[: saved + count]
    read: dict[fx.Node, set[int]] = {node: {i} for i, node in enumerate(placeholders[:saved])}  # where no tangent is
    reached: dict[fx.Node, set[int]] = {node: {i} for i, node in enumerate(placeholders[saved:])}
    unread = {i for i, node in enumerate(placeholders[:saved]) if not node.users}
    readers: list[set[int]] = [set(unread) for _ in placeholders[saved:]]
    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            without = [read[item] for item in node.all_input_nodes if item in read]
            readers = [positions.union(*without) for positions in readers]
            continue
        known: set[int] = set().union(*(read.get(item, ()) for item in node.all_input_nodes))
        tangents: set[int] = set().union(*(reached.get(item, ()) for item in node.all_input_nodes))
        if tangents:
            reached[node] = tangents
        else:
            read[node] = known
        for tangent in tangents:
            readers[tangent] |= known
    return [frozenset(positions) for positions in readers]
