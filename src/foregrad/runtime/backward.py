"""The backward of a compiled program: compiled on first use, chosen by which tangents arrive."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from .._torch import (
    any_autocast_enabled,
    autocast_off,
    autocast_state,
    garbage_collection_paused,
    hint_of,
    keeps_graph,
    set_version,
    under_vmap,
    will_run,
)
from ..errors import BackwardError, UnsupportedError
from ..joint.backward_writes import BackwardWrite
from ..joint.lazy import placeholders_of, value_of
from ..joint.tape import Tape
from ..locks import Lock
from ..options import AOTConfig
from ..slots import Returned, Tangent
from ..subclasses.layout import Layout, is_jagged, is_wrapper, layout_of, leaves_of
from ..subclasses.tangents import ExpectedTangent
from .anomaly import watched
from .batched import batched
from .compilers import Boxed, checked, compile_graph, example_values
from .randomness import with_state
from .saved import Saved, SavedValue
from .stash import SECOND_TIME, Stash
from .tokens import count_tokens, hiding_last_tokens, unlift_last_tokens, without_last_tokens

log = logging.getLogger("foregrad")


@dataclass(frozen=True, slots=True)
class Edges:
    """What leads from the node of a program to the tensors that it was applied to.

    Higher orders need a tensor with the history of each. A leaf is known to autograd; a saved input has its history;
    for any other the program returns an *anchor*, a tensor of its shape without data, whose gradient is its gradient.
    A wrapper subclass is saved itself where a tensor in it is.
    """

    through: tuple[int, ...]  # of which gradients autograd's edges are, in their order
    saved: Mapping[int, int] = field(default_factory=dict)  # positions of saved inputs, by edge
    anchors: tuple[int, ...] = ()  # edges with an anchor, in their order
    wrappers: Mapping[int, int] = field(default_factory=dict)  # positions among the wrappers that are saved, by edge


def anchor(tensor: Tensor) -> Tensor:
    """A tensor of the same shape that takes no memory to speak of."""
    return torch.empty_strided(tensor.shape, (0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)


def anchor_of_any(tensor: Tensor) -> Tensor:
    """The same for what may be a wrapper subclass: nothing else has the shape of a jagged one."""
    return tensor.detach() if is_jagged(tensor) else anchor(tensor)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A backward graph, and which saved values it takes before the tangents."""

    module: fx.GraphModule
    run: Boxed
    saved: Sequence[int]
    layouts: Sequence[Layout | None]  # of gradients that are wrapper subclasses
    checked: bool  # autograd finds what it wrote changed, when it is asked again


class Backward:
    """Compiles backward graphs when they are first needed, and runs the rare ones."""

    def __init__(
        self,
        tape: Tape,
        module: fx.GraphModule,
        saved: Saved,
        edges: Edges,
        config: AOTConfig,
        deterministic: bool,
        strides: Sequence[Any] | None = None,
        writes: Sequence[BackwardWrite] = (),
        refused: Mapping[Returned, Exception] | None = None,
        frees: bool = True,
        layouts: Sequence[Layout | None] = (),
        wrappers: Sequence[frozenset[int]] = (),
    ) -> None:
        self.module = module
        self._layouts = layouts  # of gradients that are wrapper subclasses
        self._wrappers = wrappers  # that are saved behind the anchors: which of the saved values lie in each
        self.edges = edges
        self.deterministic = deterministic
        self._tape = tape
        self._recorded_tangents = list(tape.tangents.values())
        self._saved = saved
        self._strides = strides  # of the saved tensors, as the forward's compiler reported them
        self._writes = writes
        self._config = config
        self._refused = refused or {}
        self._lock = Lock()
        self._compiled: Boxed | None = None
        self._partial: dict[Any, _Graph] = {}  # by which tangents arrive, and the autocast state
        self._orders: dict[Any, Any] = {}  # backwards that can be differentiated themselves
        self._live = self.live_positions()
        # Whether eager would keep what is saved, however often backward is called: custom functions can do that.
        self.keeps = bool(saved.tensors) and not frees
        self._readers: list[frozenset[int]] | None = None

    @property
    def saved_sizes(self) -> int:
        """How many symbolic sizes are kept for it."""
        return len(self._saved.sizes)

    # -------------------------------------------------------------------------------------- the usual backward
    def install(self, place: Callable[[Boxed], None]) -> None:
        """Put a stub in place that compiles the backward in its first call; sizes that are saved ask for it at once."""

        def stub(args: list[Any]) -> Any:
            return self.compile(place)(args)

        place(stub)
        if self._saved.sizes:
            try:
                self.compile(place)
            except Exception:
                log.warning(
                    "compiling the backward ahead of its first call failed; it will be tried again", exc_info=True
                )

    def compile(self, place: Callable[[Boxed], None]) -> Boxed:
        """Compile the backward, once."""
        with self._lock:  # several threads may run their first backward at once
            if self._compiled is None:

                def found(compiled: Boxed) -> None:
                    self._compiled = compiled
                    place(compiled)

                install = hiding_last_tokens(found, count_tokens(self.module))
                with garbage_collection_paused():
                    install(checked(self._compile(self.module), "backward", self.module, install))
            assert self._compiled is not None
            return self._compiled

    def _compile(self, module: fx.GraphModule) -> Boxed:
        values = [value_of(node) for node in placeholders_of(module)]
        strides: list[Any] | None = None
        if self._strides is not None and module is self.module:
            padding = len(values) - len(self._saved.sizes) - len(self._strides)
            strides = [None] * len(self._saved.sizes) + list(self._strides) + [None] * padding
        examples = example_values(self._tape.recording.engine, values, strides)
        return compile_graph(self._config.bw_compiler, module, examples, "backward", self._config)[0]

    # ----------------------------------------------------------------------------------------- the rare ones
    def rare(self, ctx: Any, tangents: Sequence[Tensor | None], anchored: Sequence[Tensor | None]) -> list[Any]:
        """A gradient for each edge: where outputs take no part, under `create_graph`, vmap or autocast.

        An input that only the missing outputs depend on gets None; under autocast the backward itself is cast.
        """
        found = self._gradients(ctx, tangents)
        through = [found[i] for i in self.edges.through]
        for edge, tangent in zip(self.edges.anchors, anchored, strict=True):
            if tangent is not None:
                known = through[edge]
                through[edge] = tangent if known is None else known + tangent
        return through

    def _gradients(self, ctx: Any, tangents: Sequence[Tensor | None]) -> Sequence[Any]:
        mask = tuple(tangent is not None for tangent in tangents)
        if not any(mask):
            return [None] * self._tape.gradients
        for slot, tangent in zip(self._tape.targets, tangents, strict=True):
            if tangent is not None and slot in self._refused:
                raise self._refused[slot]
        if self._tape.has_wrappers and under_vmap():
            raise UnsupportedError(
                "a batched backward (is_grads_batched, vmap) through a compiled program with tensor subclasses is not "
                "supported yet. Compute the gradients one after another, or use torch.func over the compiled function."
            )
        marks = self._marks(ctx, mask, tangents) if self._writes and torch.is_grad_enabled() else None
        values, wrappers = self._take(ctx, mask)
        given = [None if t is None else self._coerced(i, t) for i, t in enumerate(tangents)]
        if torch.is_grad_enabled() and not self._writes:
            return self._differentiable(ctx, values, wrappers, given)
        graph = self._graph(mask)
        if any(values[i] is None for i in graph.saved):
            raise RuntimeError(SECOND_TIME)
        arguments = [values[i] for i in graph.saved]
        arguments += [self._unread(i) if t is None else t for i, t in enumerate(given)]
        run = graph.run
        if under_vmap():
            run = self._without_extras(batched(graph.module), graph.module)
        elif torch.is_anomaly_enabled():
            run = self._without_extras(watched(graph.module), graph.module)
        if self._tape.has_wrappers:
            from .wrappers import WrapperEdge  # which writes code around a backward

            run = WrapperEdge(len(graph.saved), self._recorded_tangents, graph.layouts).around(run)
        with autocast_off(), torch.no_grad():  # the casts are in the graph
            found: Sequence[Any] = run(arguments)
        self.carry_out_writes(ctx, found, tangents, graph.checked)
        if marks is None:
            return found
        spark = torch.empty(0, requires_grad=True)
        return [_NoSecondOrder.apply(spark, g) if marked else g for g, marked in zip(found, marks, strict=False)]

    def _marks(self, ctx: Any, mask: Sequence[bool], tangents: Sequence[Tensor | None]) -> list[bool]:
        """Which gradients of a backward with writes require grad in eager: they refuse to be differentiated."""
        with self._lock:
            marks, exposed = self._tape.require_grad_afterwards(
                self._slots(mask), [t.requires_grad for t in tangents if t is not None]
            )
        for write, target in zip(self._writes, ctx.live, strict=True):
            if write.of in exposed:
                _refuse_write_to_a_leaf(target)
        return marks

    def _graph(self, mask: tuple[bool, ...]) -> _Graph:
        """The graph for these tangents, under the autocast state of the caller."""
        autocast = autocast_state() if any_autocast_enabled() else None
        if all(mask) and autocast is None:
            compiled = self.compile(lambda _: None) if self._compiled is None else self._compiled
            compiled = with_state(compiled, self.module, self._tape.random)
            return _Graph(self.module, compiled, range(len(self._saved.names)), self._layouts, self._is_checked)
        key = mask, autocast
        with self._lock:
            if key not in self._partial:
                part = self._tape.partial_backward(self._slots(mask), self._saved.names, self._writes)
                run = self._compile_partial(part.module)
                self._partial[key] = _Graph(part.module, run, part.saved, part.layouts, part.checked)
            return self._partial[key]

    def _compile_partial(self, module: fx.GraphModule) -> Boxed:
        """It has effects of its own: a custom function may do something else where a tangent is missing."""
        if self._config.options.unlift_effect_tokens:
            unlift_last_tokens(module, count_tokens(module))
        return self._without_extras(self._compile(module), module)

    def _without_extras(self, run: Boxed, module: fx.GraphModule) -> Boxed:
        """A backward graph as a function of saved values and tangents alone."""
        return without_last_tokens(with_state(run, module, self._tape.random), count_tokens(module))

    def _slots(self, mask: Sequence[bool]) -> tuple[Returned, ...]:
        return tuple(slot for slot, used in zip(self._tape.targets, mask, strict=True) if used)

    def _coerced(self, index: int, tangent: Tensor) -> Tensor:
        """A tangent in the recorded layout, with its history."""
        recorded = self._recorded_tangents[index]
        if is_wrapper(recorded) or is_wrapper(tangent):
            from .wrappers import expected

            fitted = expected(list(self._tape.targets)[index], recorded).fit(tangent)
            loses = torch.is_grad_enabled() and tangent.requires_grad and not fitted.requires_grad
            return _SameValue.apply(tangent, [fitted]) if loses else fitted
        if not any(isinstance(n, SymInt) for n in recorded.stride()) and tangent.stride() == recorded.stride():
            return tangent
        return permuted(recorded.stride())(tangent)

    def _unread(self, index: int) -> Tensor:
        """Something in the place of a tangent that did not arrive: nobody reads it, but it has its shape."""
        recorded = self._recorded_tangents[index]
        if is_wrapper(recorded):
            unread: Tensor = layout_of(recorded).build([self._empty(leaf) for leaf in leaves_of(recorded)])
            return unread
        return self._empty(recorded)

    def _empty(self, recorded: Tensor) -> Tensor:
        size, stride = [hint_of(n) for n in recorded.shape], [hint_of(n) for n in recorded.stride()]
        device = self._tape.recording.engine.device_of(recorded)
        return torch.empty_strided(size, stride, dtype=recorded.dtype, device=device)

    # --------------------------------------------------------------------------------- saved, and saved no more
    def _take(self, ctx: Any, mask: tuple[bool, ...]) -> tuple[list[Any], list[Any]]:
        """Saved values, sizes first, and the wrapper subclasses that some of them lie in.

        What this backward does not leave to others is gone afterwards, as in eager.
        """
        uses = self._tape.freed_by(self._slots(mask))
        stash: Stash | None = ctx.stash
        freed: frozenset[Any] = frozenset()
        count = len(self._saved.names)
        if stash is not None:
            if stash.freed & uses:
                raise RuntimeError(SECOND_TIME)
            values, freed = stash.values(), stash.freed
            values, wrappers = self._with_live(ctx, values[:count]), values[count:]
        else:
            try:
                values, wrappers = self.saved_values(ctx), self._saved_wrappers(ctx)
            except RuntimeError:
                if uses:
                    raise
                values, wrappers = [None] * count, [None] * len(self._wrappers)  # freed, and perhaps not needed
        if not keeps_graph() and (stash is not None or not all(mask)):
            freed |= uses
            inputs = set(self.edges.saved.values())
            left = [v.detach() if isinstance(v, Tensor) and i not in inputs else v for i, v in enumerate(values)]
            kept = self._needed_by_others(mask, freed) - {len(self._saved.sizes) + i for i in self._live}
            inside = {count + i for i, positions in enumerate(self._wrappers) if positions & kept}
            own = set(self.edges.wrappers.values())
            left += [w if w is None or i in own else w.detach() for i, w in enumerate(wrappers)]
            ctx.stash = Stash(left, kept | inside, freed)
        return values, wrappers

    def _with_live(self, ctx: Any, values: list[Any]) -> list[Any]:
        """The caller's own tensors are read as they are, however often."""
        for i, k in self._live.items():
            values[len(self._saved.sizes) + i] = ctx.live[k]
        return values

    def _needed_by_others(self, mask: Sequence[bool], freed: frozenset[Any]) -> set[int]:
        """Positions of saved values that a later backward of another output may read."""
        if self._readers is None:
            counts = [len(leaves_of(tangent)) for tangent in self._recorded_tangents]
            single = iter(_saved_read_by_tangents(self.module, len(self._saved.names), sum(counts)))
            self._readers = [frozenset().union(*(next(single) for _ in range(count))) for count in counts]
        needed: set[int] = set()
        for slot, positions, used in zip(self._tape.targets, self._readers, mask, strict=True):
            if not used and not self._tape.freed_by((slot,)) & freed:
                needed |= positions
        return needed

    def described(self, order: int = 1) -> list[SavedValue]:
        """What is saved for this backward, and for the orders above it that were asked for so far."""
        higher = [value for running in self._orders.values() for value in running.backward.described(order + 1)]
        return [*self._saved.described(order), *higher]

    def saved_values(self, ctx: Any) -> list[Any]:
        """What the forward saved, sizes first, with the caller's own tensors among it."""
        sizes = ctx.sizes if self._saved.sizes else ()
        held = iter(ctx.kept if self.keeps else ctx.saved_tensors)  # autograd refuses where they are gone
        live = self._live
        return [*sizes, *(ctx.live[live[i]] if i in live else next(held) for i in range(len(self._saved.tensors)))]

    # ------------------------------------------------------------------------------------------ higher orders
    def _differentiable(
        self, ctx: Any, values: Sequence[Any], wrappers: Sequence[Any], tangents: Sequence[Tensor | None]
    ) -> Sequence[Any]:
        """Gradients that can be differentiated themselves."""
        from .orders import RunningOrder  # an order has a backward of its own

        if under_vmap():
            raise UnsupportedError(
                "a batched backward with create_graph=True through a compiled program is not supported yet. Call the "
                "original function inside vmap, or compute the gradients one after another."
            )
        mask = tuple(t is not None for t in tangents)
        nodes = [node for node, _ in ctx.next_functions[: len(self.edges.through)]]
        wanted = [False] * self._tape.gradients
        for position, node in zip(self.edges.through, nodes, strict=True):
            wanted[position] = node is not None and will_run(node)
        links = self._links(ctx, nodes, values, wrappers)
        with_grad = tuple(t.requires_grad for t in tangents if t is not None)
        linked = tuple(link is not None for link in links)
        key = mask, with_grad, tuple(wanted), linked, autocast_state() if any_autocast_enabled() else None
        with self._lock:
            if key not in self._orders:
                order = self._tape.order(self._slots(mask), with_grad, wanted, self._saved.names)
                through = tuple(p for p, link in zip(self.edges.through, links, strict=True) if link is not None)
                self._orders[key] = RunningOrder(
                    order, self._tape.gradients, self._recorded_tangents, self._wrappers, through, self._config
                )
        running: RunningOrder = self._orders[key]
        with autocast_off():
            return running.gradients(values, tangents, [link for link in links if link is not None], wrappers)

    def _links(
        self, ctx: Any, nodes: Sequence[Any], values: Sequence[Any], wrappers: Sequence[Any]
    ) -> list[Tensor | None]:
        """For each edge a tensor with the history of what the program was applied to."""
        anchors = {edge: self._behind_values + i for i, edge in enumerate(self.edges.anchors)}
        links: list[Tensor | None] = []
        for edge, node in enumerate(nodes):
            if node is None:
                links.append(None)
            elif hasattr(node, "variable"):
                links.append(node.variable)
            elif edge in anchors:
                links.append(ctx.saved_tensors[anchors[edge]])
            elif edge in self.edges.wrappers and wrappers[self.edges.wrappers[edge]] is not None:
                links.append(wrappers[self.edges.wrappers[edge]])
            elif edge in self.edges.saved and values[self.edges.saved[edge]] is not None:
                links.append(values[self.edges.saved[edge]])
            else:
                raise BackwardError(
                    "An input was a leaf when the program was compiled and is none now, so that its gradients cannot "
                    "be differentiated. Compile it with an input of this kind."
                )
        return links

    @property
    def _behind_values(self) -> int:
        """Where autograd's store goes on behind the saved values: anchors first, then wrappers."""
        return 0 if self.keeps else len(self._saved.tensors) - len(self._live)

    def _saved_wrappers(self, ctx: Any) -> list[Any]:
        """Wrapper subclasses that are saved because tensors in them are."""
        return [*ctx.saved_tensors[self._behind_values + len(self.edges.anchors) :]] if self._wrappers else []

    # ------------------------------------------------------------------------------------- writes in backward
    def live_positions(self) -> dict[int, int]:
        """Which saved tensors are the caller's own as they are when the backward runs, by position."""
        names = [node.name for node in self._saved.tensors]
        writes = enumerate(self._writes)
        return {names.index(w.current.name): k for k, w in writes if w.current.name in names and not w.checked}

    @property
    def _is_checked(self) -> bool:
        return any(write.checked for write in self._writes)

    def carry_out_writes(
        self, ctx: Any, results: Sequence[Any], tangents: Sequence[Tensor | None], checked: bool | None = None
    ) -> None:
        """Write to inputs and tangents what the backward writes to them."""
        new_values = results[self._tape.gradients : self._tape.gradients + len(self._writes)]
        if self._is_checked and getattr(ctx, "has_written", False):
            if checked is False:  # what was saved is not what it would read now
                raise UnsupportedError(
                    "outputs are differentiated one after another, and the backward of one wrote to what the other "
                    "needs: this cannot be compiled yet. Differentiate them together."
                )
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                "backward itself wrote to it when it ran before."
            )
        if any(new is not None or write.reshapes for write, new in zip(self._writes, new_values, strict=True)):
            ctx.has_written = True
        by_slot = dict(zip(map(Tangent, self._tape.targets), tangents, strict=True))
        for k, (write, new) in enumerate(zip(self._writes, new_values, strict=True)):
            target: Tensor | None = by_slot[write.of] if isinstance(write.of, Tangent) else ctx.live[k]
            if target is None or (new is None and not write.reshapes):
                continue
            with torch.no_grad():
                if new is not None:
                    target.detach().copy_(new)
                for step in write.reshapes:
                    step.op(target, *step.args[1:], **step.kwargs)
            if not isinstance(write.of, Tangent):
                moves = len(write.reshapes) + (new is not None)
                set_version(target, target._version + write.version_change - moves)

    def refuse_nondeterminism(self) -> None:
        """Raised when determinism was switched on after the program was compiled."""
        raise BackwardError(
            "This compiled backward function is being run with torch.use_deterministic_algorithms(True), but it was "
            "compiled with it off and may hold nondeterministic kernels. Switch it on before the first call."
        )


def _saved_read_by_tangents(module: fx.GraphModule, saved: int, count: int) -> list[frozenset[int]]:
    """For each tangent of a backward graph, which of the saved values it is combined with on its way.

    What comes from another tangent is only added to it. Values that nobody reads here are for higher orders.
    """
    placeholders = module.graph.find_nodes(op="placeholder")[: saved + count]
    read: dict[fx.Node, set[int]] = {node: {i} for i, node in enumerate(placeholders[:saved])}  # where no tangent is
    reached: dict[fx.Node, set[int]] = {node: {i} for i, node in enumerate(placeholders[saved:])}
    unread = {i for i, node in enumerate(placeholders[:saved]) if not node.users}
    readers: list[set[int]] = [set(unread) for _ in placeholders[saved:]]
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
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


def _refuse_write_to_a_leaf(target: Tensor | None) -> None:
    """Eager's own refusal."""
    if target is None or not target.requires_grad:
        return
    base = target._base
    if target.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
        what = "leaf Variable" if target.is_leaf else "view of a leaf Variable"
        raise RuntimeError(f"a {what} that requires grad is being used in an in-place operation.")


class _SameValue(torch.autograd.Function):
    """Gives a tangent that was put together anew its history."""

    @staticmethod
    def forward(ctx: Any, tangent: Tensor, fitted: list[Tensor]) -> Tensor:
        return fitted[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _NoSecondOrder(torch.autograd.Function):
    """Marks a gradient as differentiable, and refuses to differentiate it."""

    @staticmethod
    def forward(ctx: Any, spark: Tensor, gradient: Tensor) -> Tensor:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        raise BackwardError(
            "Double backward through a program whose backward writes to its inputs is not supported yet. Compute the "
            "first gradients inside the function that you compile, or run the original function."
        )


def permuted(stride: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """A function that gives a tangent strides in this order, without writing to memory of its own."""
    order = sorted(range(len(stride)), key=lambda d: -hint_of(stride[d]))
    back = [order.index(d) for d in range(len(order))]
    return lambda t: t.permute(order).contiguous().permute(back)


def plain_tangent(name: str, size: Sequence[Any], stride: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """A function that gives the tangent of a result the recorded strides, and refuses a wrapper subclass."""
    fix = restride(size, stride)
    if any(isinstance(n, SymInt) for n in (*size, *stride)):
        refuse = ExpectedTangent(name, None, ((),), (fix,)).fit
        return lambda tangent: refuse(tangent) if is_wrapper(tangent) else fix(tangent)
    return ExpectedTangent(name, None, (tuple(stride),), (fix,)).fit


def restride(size: Sequence[Any], stride: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """A function that gives a tangent the strides for which the backward was recorded."""
    if any(isinstance(n, SymInt) for n in (*size, *stride)):
        return permuted(stride)

    def exact(tangent: Tensor) -> Tensor:
        return torch.empty_strided(size, stride, dtype=tangent.dtype, device=tangent.device).copy_(tangent)

    return exact
