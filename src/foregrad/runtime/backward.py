"""The backward of a compiled program: compiled on first use, chosen by which tangents arrive."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from .._torch import (
    any_autocast_enabled,
    autocast_off,
    autocast_state,
    deterministic_enabled,
    garbage_collection_paused,
    guards_noticed,
    is_version_error,
    keeps_graph,
    refusal_of_write,
    refuse_single_gradients,
    set_version,
    single_gradients_asked,
    under_vmap,
    will_run,
)
from ..errors import BackwardError, UnsupportedError
from ..graph.graph import Graph
from ..joint.differentiate import BackwardWrite, Differentiated, Tape
from ..locks import Lock
from ..options import AOTConfig
from ..record.hooks import BackwardState
from ..record.retrace import LateInputs, Retrace
from ..slots import Primal, Returned, Tangent
from .compilers import (
    Boxed,
    CompilerInput,
    batched,
    checked,
    compile_graph,
    example_values,
    for_compiler,
    with_nan_checks,
)
from .effect_tokens import count_tokens, unlift_tokens, without_last_tokens
from .rng import with_state
from .saved_tensors import (
    SavedTensors,
    SavedValue,
    backward_again,
    give_back,
    perhaps_elsewhere,
    refuse_later,
    run_once,
    under_hooks,
)
from .subclasses import WrapperEdge
from .tangents import RecordedTangents


# ---------------------------------------------------------------------------------------------------------------------
# Writes that a backward makes to what the caller holds: its graph returns the new values, here they are written.
class WritesOfBackward:
    """Carries out the writes of a backward; those to inputs go to the tensors in `ctx.live`."""

    def __init__(self, tape: Tape, derived: Differentiated) -> None:
        self._tape = tape
        self.writes = derived.writes
        self._whole = derived

    def carry_out(
        self, ctx: Any, results: Sequence[Any], tangents: Sequence[Tensor | None], part: Differentiated | None = None
    ) -> None:
        """Write to inputs and tangents what the backward writes to them, or what a part of it does."""
        if not self.writes:
            return
        new_values = results[self._tape.gradients : self._tape.gradients + len(self.writes)]
        if self._whole.is_checked and getattr(ctx, "has_written", False):
            _refuse_second_time(None if part is None else part.is_checked)
        done = {write.of: (write, new) for write, new in zip(self.writes, new_values, strict=True)}
        if part is not None:  # which counts and reshapes less
            done = {write.of: (write, done[write.of][1]) for write in part.writes}
        done = {of: (write, new) for of, (write, new) in done.items() if new is not None or write.reshapes}
        if done:
            ctx.has_written = True
        targets: dict[Any, Tensor | None] = dict(zip(map(Tangent, self._tape.targets), tangents, strict=True))
        targets |= {write.of: held for write, held in zip(self.writes, ctx.live, strict=True) if held is not None}
        for of, (write, new) in done.items():
            target = targets[of]
            if target is not None:
                _carry_out(write, new, target)

    def refuse_locked(self, ctx: Any, exposed: Container[Primal | Tangent]) -> None:
        """Eager's own refusal of writes to leaves and to some views, for inputs that are written with gradients on."""
        for write, target in zip(self.writes, ctx.live, strict=True):
            if write.of in exposed:
                _refuse_write_to_locked(target)


def _carry_out(write: BackwardWrite, new: Tensor | None, target: Tensor) -> None:
    """Give a tensor of the caller's its new value and its new shape."""
    with torch.no_grad():
        if new is not None:
            target.detach().copy_(new)
        for step in write.reshapes:
            step.op(target, *step.args[1:], **step.kwargs)
    if not isinstance(write.of, Tangent):
        moves = len(write.reshapes) + (new is not None)
        set_version(target, target._version + write.version_change - moves)


def _refuse_second_time(checked: bool | None) -> None:
    """What the backward had saved, it has changed when it ran before; `checked` says whether this one reads it."""
    if checked is False:  # what was saved is not what it would read now
        raise UnsupportedError(
            "outputs are differentiated one after another, and the backward of one wrote to what the other "
            "needs: this cannot be compiled yet. Differentiate them together."
        )
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: the "
        "backward itself wrote to it when it ran before."
    )


def _refuse_write_to_locked(target: Tensor | None) -> None:
    if target is None or not target.requires_grad:
        return
    if target.is_leaf:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    refusal = refusal_of_write(target)
    if refusal is not None:
        raise refusal


def refusing_second_order(gradients: Sequence[Any], require_grad: Sequence[bool]) -> list[Any]:
    """Gradients of which some require grad, as in eager, but refuse to be differentiated."""
    dummy_leaf = torch.empty(0, requires_grad=True)
    pairs = zip(gradients, require_grad, strict=False)
    return [_NoSecondOrder.apply(dummy_leaf, gradient) if required else gradient for gradient, required in pairs]


class _NoSecondOrder(torch.autograd.Function):
    """Marks a gradient as differentiable, and refuses to differentiate it."""

    @staticmethod
    def forward(ctx: Any, dummy_leaf: Tensor, gradient: Tensor) -> Tensor:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        raise BackwardError(
            "Double backward through a program whose backward writes to its inputs is not supported yet. Compute the "
            "first gradients inside the function that you compile, or run the original function."
        )


# ---------------------------------------------------------------------------------------------------------------------
# The backward of a compiled program: compiled on first use, chosen by which tangents arrive.
log = logging.getLogger("foregrad")


class HigherOrders(Protocol):
    """The gradients of gradients above a backward (see `double_backward`, whose orders have a backward each)."""

    def described(self, order: int) -> list[SavedValue]: ...

    def gradients(
        self, ctx: Any, values: Sequence[Any], wrappers: Sequence[Any], tangents: Sequence[Tensor | None]
    ) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class _Graph:
    """A backward graph, and which saved values it takes before the tangents."""

    given: CompilerInput
    run: Boxed
    saved: Sequence[int]
    derived: Differentiated  # what it does beside giving gradients


def _holds(state: BackwardState | None) -> bool:
    return state is None or state.holds()


class Backward:
    """Compiles backward graphs when they are first needed, and runs the slow backward."""

    def __init__(
        self,
        saved: SavedTensors,
        given: CompilerInput,
        derived: Differentiated,
        config: AOTConfig,
        higher_orders: Callable[[SavedTensors, AOTConfig, Lock], HigherOrders],
        strides: Sequence[Any] | None = None,
    ) -> None:
        """`strides` are those of the saved tensors, as the forward's compiler reported them."""
        self.saved = saved
        self.deterministic = deterministic_enabled()
        self.state = derived.state
        self.writing = WritesOfBackward(saved.tape, derived)
        self._derived = derived
        self._given = given
        self._tape = saved.tape
        self._strides = strides
        self._config = config
        self._lock = Lock()
        self._compiled: Boxed | None = None
        self._assumes_more = False  # about sizes than calls compare
        self._partial: dict[Any, list[_Graph]] = {}  # by which tangents arrive, and the autocast state
        self._higher_orders = higher_orders

    @cached_property
    def _tangents(self) -> RecordedTangents:
        return RecordedTangents(self._tape)

    @cached_property
    def _orders(self) -> HigherOrders:
        return self._higher_orders(self.saved, self._config, self._lock)

    @property
    def saved_sizes(self) -> int:
        """How many symbolic sizes are kept for it."""
        return len(self.saved.sizes)

    def described(self, order: int = 1) -> list[SavedValue]:
        """What is saved for this backward, and for the orders above it that were asked for so far."""
        higher = self._orders.described(order + 1) if "_orders" in vars(self) else ()
        return [*self.saved.described(order), *higher]

    # -------------------------------------------------------------------------------------- the usual backward
    def install(self, place: Callable[[Boxed], None]) -> None:
        """Put a stub in place that compiles the backward in its first call; symbols ask for it at once.

        A compiler may assume something about them, and calls compare only what is assumed by now.
        """

        def stub(args: list[Any]) -> Any:
            return self.compile(place)(args)

        place(stub)
        if self.saved.sizes or self._tape.session.engine.symbolic:
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

                def install(compiled: Boxed) -> None:
                    self._compiled = without_last_tokens(compiled, count_tokens(self._given.graph))
                    place(self._compiled)

                with garbage_collection_paused():
                    install(checked(self._compile(self._given), "backward", self._given.graph, self._config, install))
            assert self._compiled is not None
            return self._compiled

    def _compile(self, given: CompilerInput) -> Boxed:
        values = [node.shown_value for node in given.graph.inputs]
        strides: list[Any] | None = None
        if self._strides is not None and given is self._given:
            padding = len(values) - len(self.saved.sizes) - len(self._strides)
            strides = [None] * len(self.saved.sizes) + list(self._strides) + [None] * padding
        examples = example_values(self._tape.session.engine, values, strides)
        return compile_graph(self._config.bw_compiler, given, examples, "backward", self._config)[0]

    # ----------------------------------------------------------------------------------------- the slow backward
    def slow_backward(
        self, ctx: Any, tangents: Sequence[Tensor | None], anchored: Sequence[Tensor | None]
    ) -> list[Any]:
        """A gradient for each edge: where outputs take no part, under `create_graph`, vmap or autocast.

        An input that only the missing outputs depend on gets None; under autocast the backward itself is cast.
        """
        found = self._gradients(ctx, tangents)
        if all(tangent is not None for tangent in tangents):
            give_back(ctx)
        if self._tape.holds_checkpoints and single_gradients_asked():
            found = self.without_added(found)
        through = [found[i] for i in self.saved.through]
        for edge, tangent in zip(self.saved.anchors, anchored, strict=True):
            if tangent is not None:
                known = through[edge]
                through[edge] = tangent if known is None else known + tangent
        if not keeps_graph():
            functions = zip(ctx.next_functions, through, strict=False)
            refuse_later([node for (node, _), gradient in functions if gradient is None], self._config.name)
        return through

    def _gradients(self, ctx: Any, tangents: Sequence[Tensor | None]) -> Sequence[Any]:
        mask = tuple(tangent is not None for tangent in tangents)
        if not any(mask):
            return [None] * self._tape.gradients
        for slot, tangent in zip(self._tape.targets, tangents, strict=True):
            if tangent is not None and slot in self._derived.refused:
                raise self.refused(slot, ctx)
        if self._tape.has_wrappers and under_vmap():
            raise UnsupportedError(
                "a batched backward (is_grads_batched, vmap) through a compiled program with tensor subclasses is not "
                "supported yet. Compute the gradients one after another, or use torch.func over the compiled function."
            )
        marks = self._marks(ctx, mask, tangents) if self.writing.writes and torch.is_grad_enabled() else None
        values, wrappers = self.saved.take(ctx, mask)
        given = self._tangents.fit(tangents)
        if torch.is_grad_enabled() and not self.writing.writes:
            with self._lock:  # made when it is first asked for
                orders = self._orders
            return orders.gradients(ctx, values, wrappers, given)
        graph = self._graph(mask)
        run_once(ctx, graph.derived.emptied)
        arguments = self._arguments(graph, values, given)
        run = self._runner(graph)
        del values
        if self.saved.tensors and not self.saved.keeps:
            ctx.maybe_clear_saved_tensors()  # only the list holds them now, and the graph may empty it
        with autocast_off(), torch.no_grad():  # the casts are in the graph
            found: Sequence[Any] = run(arguments)
        self.writing.carry_out(ctx, found, tangents, graph.derived)
        return found if marks is None else refusing_second_order(found, marks)

    def _arguments(self, graph: _Graph, values: Sequence[Any], given: Sequence[Tensor | None]) -> list[Any]:
        """What a graph takes: saved values, and all tangents."""
        if any(values[i] is None for i in graph.saved):
            raise backward_again(self._config.name)
        tangents = [self._tangents.missing_tangent(i) if t is None else t for i, t in enumerate(given)]
        return [*(values[i] for i in graph.saved), *tangents]

    def refused(self, slot: Returned, ctx: Any) -> Exception:
        """What autograd says about the gradients of a result; with hooks on saved tensors it checks no versions."""
        error = self._derived.refused[slot]
        if getattr(ctx, "hooked", False) and is_version_error(error):  # gradients of gradients do not ask
            return under_hooks(error)
        return perhaps_elsewhere(error, self._config.name) if single_gradients_asked() else error

    def _runner(self, graph: _Graph) -> Boxed:
        """What runs a graph here: vmap and anomaly mode look at each of its operators."""
        run = graph.run
        if under_vmap():
            run = self._without_extras(batched(graph.given.module), graph.given.graph)
        elif torch.is_anomaly_enabled():
            run = self._without_extras(with_nan_checks(graph.given.module), graph.given.graph)
        if self._tape.has_wrappers:
            run = WrapperEdge(len(graph.saved), self._tangents.tensors, graph.derived.layouts).around(run)
        return run

    def _marks(self, ctx: Any, mask: Sequence[bool], tangents: Sequence[Tensor | None]) -> list[bool]:
        """Which gradients of a backward with writes require grad in eager: they refuse to be differentiated."""
        with self._lock:
            marks, exposed = self._tape.require_grad_afterwards(
                self._tape.chosen(mask), [t.requires_grad for t in tangents if t is not None]
            )
        self.writing.refuse_locked(ctx, exposed)
        return marks

    def _graph(self, mask: tuple[bool, ...]) -> _Graph:
        """The graph for these tangents, under the autocast state of the caller."""
        autocast = autocast_state() if any_autocast_enabled() else None
        if all(mask) and autocast is None and _holds(self.state):
            compiled = self.compile(lambda _: None) if self._compiled is None else self._compiled
            compiled = with_state(compiled, self._given.graph, self._tape.random)
            saved = range(len(self.saved.names))
            return _Graph(self._given, compiled, saved, self._derived)
        with self._lock:
            known = self._partial.setdefault((mask, autocast), [])
            graph = next((graph for graph in known if _holds(graph.derived.state)), None)
            if graph is None:
                graph = self._recorded(mask)
                del known[: -self._config.options.max_specializations]
                known.append(graph)
            return graph

    def _recorded(self, mask: tuple[bool, ...]) -> _Graph:
        """The backward for these tangents, with Python's state as it is."""
        try:
            with self._sizes_settled():
                part = self._tape.partial_backward(self._tape.chosen(mask), self.saved.names, self.writing.writes)
        except Retrace as retrace:
            if not isinstance(retrace.reason, LateInputs):
                raise
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in retrace.reason.tensors)
            raise BackwardError(
                f"The backward of a compiled program finds a tensor (of shape {shapes}) that it did not find when the "
                "program was compiled, because something that it reads has changed. Pass the tensor as an argument, or "
                "call the original function."
            ) from None
        # It has effects of its own: a custom function may do something else where a tangent is missing.
        given = for_compiler(part.graph)
        if self._config.options.unlift_effect_tokens:
            given = unlift_tokens(given)
        run = self._without_extras(self._compile(given), given.graph)
        return _Graph(given, run, part.saved, part.backward)

    @contextlib.contextmanager
    def _sizes_settled(self) -> Iterator[None]:
        """Refuse a backward that assumes more about sizes than calls compare: their guards are written."""
        shape_env = self._tape.session.engine.shape_env
        if shape_env is None:
            yield
            return
        with guards_noticed(shape_env) as assumed_more:
            yield
            self._assumes_more |= assumed_more()
            if self._assumes_more:
                raise BackwardError(
                    f"The backward of some results of {self._config.name} depends on sizes otherwise than that of all "
                    "of them: it cannot be compiled for sizes that change. Compile with dynamic=False, or "
                    "differentiate all results."
                )

    def _without_extras(self, run: Boxed, graph: Graph) -> Boxed:
        """A backward graph as a function of saved values and tangents alone."""
        return without_last_tokens(with_state(run, graph, self._tape.random), count_tokens(graph))

    def refuse_single_gradients(self, ctx: Any, tangents: Sequence[Tensor | None]) -> None:
        """Eager's error for `torch.autograd.grad` of an input that is reached through a reentrant checkpoint."""
        mask = [tangent is not None for tangent in tangents]
        behind = self._tape.behind_checkpoints(self._tape.chosen(mask))
        for position, (node, _) in zip(self.saved.through, ctx.next_functions, strict=False):
            if self._tape.primals[position].slot in behind and node is not None and will_run(node):
                refuse_single_gradients()

    def without_added(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Gradients without those that a reentrant checkpoint adds to `.grad` by itself: they go nowhere else."""
        kept = [recorded.slot in self._tape.reached for recorded in self._tape.primals]
        kept += [True] * (len(gradients) - len(kept))
        return [gradient if keep else None for gradient, keep in zip(gradients, kept, strict=True)]

    def run_once(self, ctx: Any) -> None:
        """The usual backward runs."""
        run_once(ctx, self._derived.emptied)

    def refuse_nondeterminism(self) -> None:
        """Raised when determinism was switched on after the program was compiled."""
        raise BackwardError(
            "This compiled backward function is being run with torch.use_deterministic_algorithms(True), but it was "
            "compiled with it off and may hold nondeterministic kernels. Switch it on before the first call."
        )
