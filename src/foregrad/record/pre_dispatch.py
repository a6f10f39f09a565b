"""A recorder above autograd: composite operators stay whole, and switches of the grad mode are operators.

Autograd is left out while the program runs, so operators come to the mode as the program called them. The graph is
meant to be differentiated by whoever runs it. What would then be differentiated otherwise than in eager is refused:
custom functions, and writes that autograd does not see to tensors that it follows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .._torch import SET_GRAD_ENABLED, OpOverload, autograd_left_out, custom_functions_refused, is_not_differentiable
from ..abstract.engine import Engine
from ..abstract.kernel_checks import storage_of
from ..errors import UnsupportedError
from ..graph.graph import Step
from ..ops import Kind, OpInfo, aten, does_more, op_info, tensors_in
from ..stack_traces import user_stack, where
from ..subclasses.layout import is_wrapper
from .recorder import Recorder


class AboveAutograd(Recorder):
    """Writes down what the program calls, before autograd takes it apart."""

    def __init__(self, engine: Engine, decompositions: Mapping[Any, Callable[..., Any]], from_nodes: bool) -> None:
        super().__init__(engine, decompositions, from_nodes)
        self._inference = torch.is_inference_mode_enabled()
        self._made_with_grad: dict[int, bool] = {}  # storages of results, and whether gradients were on
        self._followed: set[int] = set()  # storages of inputs that require grad
        self._of_leaves: set[int] = set()  # those among them that eager does not let be written
        self._detached: set[int] = set()  # storages at which autograd looks in two ways

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the program here."""
        try:
            with GradSwitches(self), custom_functions_refused(self._refuse_function), autograd_left_out():
                yield
        except RuntimeError as error:
            if not is_not_differentiable(error):
                raise
            raise UnsupportedError(
                "the program differentiates something by itself (torch.autograd.grad, backward()), which cannot be "
                "exported with pre_dispatch. Export the training step instead, with loss= or trace_joint=True."
            ) from error

    def switch(self, enabled: bool) -> None:
        """The program switches gradients on or off."""
        step = Step(SET_GRAD_ENABLED, (enabled,), {}, None, enabled, False, user_stack(3), None)
        self.steps.append(step)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled() != self._inference:
            raise UnsupportedError(
                f"inference mode inside of a program, at {where(user_stack(2))}, cannot be exported with pre_dispatch. "
                "Use torch.no_grad()."
            )
        looked_at = isinstance(op, OpOverload) and op.namespace not in ("prim", "profiler")
        if looked_at:
            self._look_at(op, args, kwargs or {})
        out = super().__torch_dispatch__(op, types, args, kwargs)
        if looked_at:
            known = {storage_of(t) for t in tensors_in([*args, *(kwargs or {}).values()])}
            for tensor in tensors_in([out]):
                if storage_of(tensor) not in known:
                    self._made_with_grad.setdefault(storage_of(tensor), torch.is_grad_enabled())
                elif op is aten.detach.default:
                    self._detached.add(storage_of(tensor))
        return out

    def _look_at(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a write whose functional form autograd would see otherwise."""
        for tensor in tensors_in([*args, *kwargs.values()]):
            if is_wrapper(tensor):
                raise UnsupportedError(
                    f"{op} of a {type(tensor).__name__}, at {where(user_stack(3))}: autograd differentiates operators "
                    "of a tensor subclass, not those that it runs inside, so it cannot be exported with pre_dispatch. "
                    "Export the training step instead, with loss= or trace_joint=True."
                )
            if tensor.requires_grad:
                self._followed.add(storage_of(tensor))
                if tensor.is_leaf:
                    self._of_leaves.add(storage_of(tensor))
        if op_info(op).kind not in (Kind.WRITE, Kind.RESHAPE):
            return
        for tensor in tensors_in([args[i] for i in op_info(op).written if i < len(args)]):
            memory = storage_of(tensor)
            if torch.is_grad_enabled() and memory in self._of_leaves and memory not in self._detached:
                is_view = any(t is tensor for step in self.steps for t in tensors_in([step.out]))
                what = "view of a leaf Variable" if is_view else "leaf Variable"
                raise RuntimeError(f"a {what} that requires grad is being used in an in-place operation.")
            hidden = not torch.is_grad_enabled() and self._made_with_grad.get(memory, memory in self._followed)
            if hidden or memory in self._detached:
                raise UnsupportedError(
                    f"a write that autograd does not see, at {where(user_stack(3))}, to a tensor that it may follow: "
                    "this cannot be exported with pre_dispatch. Write to a copy."
                )

    def _decompose(self, op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A composite operator stays whole if its parts write nothing, draw nothing, and it returns no alias."""
        start = len(self.steps)
        out = super()._decompose(op, info, args, kwargs)
        if out is NotImplemented or op in self._decompositions or "composite" not in info.traits:
            return out
        inner = self.steps[start:]
        plain = all(
            op_info(s.op).kind in (Kind.PURE, Kind.VIEW) and not does_more(s.op, s.args, s.kwargs) for s in inner
        )
        given = {storage_of(t) for t in tensors_in([*args, *kwargs.values()])}
        fresh = all(storage_of(t) not in given for t in tensors_in([out]))
        if inner and plain and fresh and op_info(op).kind is Kind.PURE:
            whole = Step(op, args, kwargs, out, torch.is_grad_enabled(), False, inner[0].stack, None)
            whole.origin = inner[0].origin
            self.steps[start:] = [whole]
        return out

    def _refuse_function(self, name: str) -> None:
        raise UnsupportedError(
            f"the custom function {name}, at {where(user_stack(3))}, has a derivative of its own, which a graph above "
            "autograd would lose. Export the training step instead, with loss= or trace_joint=True."
        )


class GradSwitches(TorchFunctionMode):
    """Sees the program switch gradients on and off."""

    def __init__(self, recorder: AboveAutograd) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not SET_GRAD_ENABLED:
            return func(*args, **(kwargs or {}))
        before = torch.is_grad_enabled()
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() != before:
            self._recorder.switch(not before)
        return result
