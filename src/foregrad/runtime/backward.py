"""The backward of a compiled program: compiled on first use, chosen by which tangents arrive."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from .._torch import any_autocast_enabled, autocast_off, autocast_state, garbage_collection_paused, hint_of, set_version
from ..errors import BackwardError
from ..joint.build import Joint
from ..locks import Lock
from ..options import AOTConfig
from ..slots import Returned, Tangent
from .anomaly import watched
from .compilers import Boxed, checked, compile_graph, example_values

log = logging.getLogger("foregrad")


@dataclass(frozen=True, slots=True)
class Saved:
    """What the forward hands to the backward: names of the nodes, tensors first in the forward's outputs."""

    tensors: tuple[fx.Node, ...]
    sizes: tuple[fx.Node, ...]

    @property
    def names(self) -> list[str]:
        """In the order in which the backward takes them."""
        return [node.name for node in (*self.sizes, *self.tensors)]


def saved_between(forward: fx.GraphModule, returned: int) -> Saved:
    """Read off a partitioned forward what it saves behind its own outputs."""
    outputs: Sequence[Any] = forward.graph.output_node().args[0][returned:]  # type: ignore[index, assignment]
    tensors = tuple(node for node in outputs if isinstance(node.meta.get("val"), Tensor))
    sizes = tuple(node for node in outputs if not isinstance(node.meta.get("val"), Tensor))
    return Saved(tensors, sizes)


class Backward:
    """Compiles backward graphs when they are first needed, and runs the rare ones."""

    def __init__(
        self,
        joint: Joint,
        module: fx.GraphModule,
        saved: Saved,
        strides: Sequence[Any] | None,
        config: AOTConfig,
        deterministic: bool,
    ) -> None:
        self.module = module
        self._joint = joint
        self._saved = saved
        self._strides = strides  # of the saved tensors, as the forward's compiler reported them
        self._config = config
        self.deterministic = deterministic
        self._lock = Lock()
        self._compiled: Boxed | None = None
        self._partial: dict[Any, Boxed] = {}  # by which tangents arrive, and the autocast state
        self._live = self.live_positions()
        self._depends_on_inputs = _behind_saved(joint, saved)

    # -------------------------------------------------------------------------------------- the usual backward
    def install(self, place: Callable[[Boxed], None]) -> None:
        """Put a stub in place that compiles the backward in its first call; sizes that are saved ask for it at once."""

        def stub(args: list[Any]) -> Any:
            self.compile(place)
            assert self._compiled is not None
            return checked(self._compiled, "backward", self.module, place)(args)

        place(stub)
        if self._saved.sizes:
            try:
                self.compile(place)
            except Exception:
                log.warning(
                    "compiling the backward ahead of its first call failed; it will be tried again", exc_info=True
                )

    def compile(self, place: Callable[[Boxed], None]) -> None:
        """Compile the backward, once."""
        with self._lock:  # several threads may run their first backward at once
            if self._compiled is None:
                with garbage_collection_paused():
                    self._compiled = self._compile(self.module)
                place(checked(self._compiled, "backward", self.module, place))

    def _compile(self, module: fx.GraphModule) -> Boxed:
        values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
        strides: list[Any] | None = None
        if self._strides is not None and module is self.module:
            padding = len(values) - len(self._saved.sizes) - len(self._strides)
            strides = [None] * len(self._saved.sizes) + list(self._strides) + [None] * padding
        examples = example_values(self._joint.recording.engine, values, strides)
        return compile_graph(self._config.bw_compiler, module, examples, "backward", self._config)[0]

    # ----------------------------------------------------------------------------------------- the rare ones
    def partial(self, ctx: Any, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients when some outputs take no part, or when autocast is on.

        An input that only the missing outputs depend on gets None; under autocast the backward itself is cast.
        """
        mask = tuple(tangent is not None for tangent in tangents)
        key = mask, autocast_state() if any_autocast_enabled() else None
        joint = self._joint
        if not any(mask):
            return [None] * (len(joint.primals) + len(joint.backward_writes))
        with self._lock:
            if key not in self._partial:
                slots: list[Returned] = [t.of for t, used in zip(joint.signature.tangents, mask, strict=True) if used]
                module = joint.tape.partial_backward(slots, self._saved.names, joint.backward_writes)
                self._partial[key] = watched(module, self._compile(module))
        sizes = ctx.sizes if self._saved.sizes else ()
        given = [self._tangent(i, tangent) for i, tangent in enumerate(tangents)]
        saved = self.saved_values(ctx)
        compiled = self._partial[key]
        with autocast_off():  # the casts are in the graph
            if torch.is_grad_enabled():
                return self.connected(lambda: compiled([*sizes, *saved, *given]), (*saved, *given))
            return list(compiled([*sizes, *saved, *given]))

    # ------------------------------------------------------------------------------------- writes in backward
    def live_positions(self) -> dict[int, int]:
        """Which saved values are the caller's own tensors as they are when the backward runs, by position."""
        names = [node.name for node in self._saved.tensors]
        writes = self._joint.backward_writes
        return {
            names.index(w.current.name): k for k, w in enumerate(writes) if w.current.name in names and not w.checked
        }

    def saved_values(self, ctx: Any) -> Sequence[Tensor]:
        """What the forward saved, with the caller's own tensors among it."""
        live = self._live
        if not live:
            saved: Sequence[Tensor] = ctx.saved_tensors
            return saved
        kept = iter(ctx.saved_tensors)
        return [ctx.live[live[i]] if i in live else next(kept) for i in range(len(self._saved.tensors))]

    def carry_out_writes(self, ctx: Any, results: Sequence[Any], tangents: Sequence[Tensor | None]) -> None:
        """Write to inputs and tangents what the backward writes to them."""
        joint = self._joint
        if any(write.checked for write in joint.backward_writes):
            if getattr(ctx, "has_written", False):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    "the backward itself wrote to it when it ran before."
                )
            ctx.has_written = True
        by_slot = dict(zip(joint.signature.tangents, tangents, strict=True))
        for write, kept, new in zip(joint.backward_writes, ctx.live, results[len(joint.primals) :], strict=True):
            target: Tensor | None = by_slot[write.of] if isinstance(write.of, Tangent) else kept
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

    def _tangent(self, index: int, tangent: Tensor | None) -> Tensor:
        """A tangent in the recorded layout. One that did not arrive is not read, but must have its shape."""
        recorded = self._joint.tangent_values[index]
        if tangent is not None:
            return restride(recorded.shape, recorded.stride())(tangent)
        size = [hint_of(n) for n in recorded.shape]
        stride = [hint_of(n) for n in recorded.stride()]
        device = self._joint.recording.engine.device_of(recorded)
        return torch.empty_strided(size, stride, dtype=recorded.dtype, device=device)

    def connected(self, run: Callable[[], Sequence[Tensor | None]], sources: Sequence[Any]) -> list[Tensor | None]:
        """Gradients under `create_graph=True`: they require grad, and say why they cannot be differentiated again."""
        with torch.no_grad():
            gradients = list(run())
        tensors = [g for g in gradients if g is not None]
        # What was saved has lost its history: where inputs are behind it, there is something to differentiate.
        spark = [torch.empty(0, requires_grad=True)] if self._depends_on_inputs else []
        joined = iter(_NoSecondOrder.apply(tensors, *(s for s in (*sources, *spark) if isinstance(s, Tensor))))
        return [None if g is None else next(joined) for g in gradients]

    def refuse_nondeterminism(self) -> None:
        """Raised when determinism was switched on after the program was compiled."""
        raise BackwardError(
            "This compiled backward function is being run with torch.use_deterministic_algorithms(True), but it was "
            "compiled with it off and may hold nondeterministic kernels. Switch it on before the first call."
        )


def _behind_saved(joint: Joint, saved: Saved) -> bool:
    """Whether what the forward saves is computed from an input that requires grad."""
    names = {node.name for node in saved.tensors}
    pending = [node for node in (*joint.part.placeholders, *joint.part.nodes) if node.name in names]
    wanted = {f.recorded.slot for f in joint.primals if f.recorded.differentiated is not None}
    seen: set[int] = set()
    while pending:
        node = pending.pop()
        if node.slot in wanted:
            return True
        for item in node.inputs():
            if id(item) not in seen:
                seen.add(id(item))
                pending.append(item)
    return False


class _NoSecondOrder(torch.autograd.Function):
    """Joins gradients to what they depend on, and refuses to differentiate them."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *sources: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.view_as(g).detach() for g in gradients)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        raise BackwardError(
            "Double backward through a compiled function is not supported yet. Compute the first gradients inside the "
            "function that you compile, or run the original function."
        )


def restride(size: Sequence[Any], stride: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """A function that gives a tangent the strides for which the backward was recorded."""
    if any(isinstance(n, SymInt) for n in (*size, *stride)):
        order = sorted(range(len(stride)), key=lambda d: -hint_of(stride[d]))
        back = [order.index(d) for d in range(len(order))]
        return lambda t: t.permute(order).contiguous().permute(back)

    def exact(tangent: Tensor) -> Tensor:
        return torch.empty_strided(size, stride, dtype=tangent.dtype, device=tangent.device).copy_(tangent)

    return exact
