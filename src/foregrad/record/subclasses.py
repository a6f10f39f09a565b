"""Operators on wrapper subclasses: the subclass itself says what they do to the tensors inside.

The recorder is asked first and steps aside, so that the subclass's own `__torch_dispatch__` runs; the operators that it
calls on its inner tensors come back to the recorder. What is noted here is how wrappers relate to each other: which is
a view of which, and whose shape was changed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    dispatched_in_cpp,
    set_version,
    shares_version_counter,
    without_function_modes,
)
from ..errors import CaptureError, UnsupportedError
from ..graph.graph import Step
from ..ops import Kind, ViewStep, op_info, tensors_in, written_arguments
from ..stack_traces import Stack, where

PLAIN_TYPES = frozenset({FakeTensor, Tensor, torch.nn.Parameter})


class WrapperCalls:
    """Runs operators on wrappers, and notes how their results belong together."""

    def __init__(self) -> None:
        self._stepping_aside: OpOverload | None = None
        self._views: dict[int, tuple[Tensor, Tensor, ViewStep]] = {}  # by id of the view: it, its source, and how
        self.reshapes: dict[int, list[Step]] = {}  # in-place changes of shape, by id of the wrapper
        self._families: list[list[Tensor]] = []  # inputs whose reals have one version counter
        self.runs_user_code = False  # a subclass of the user's has run operators
        self._borrowed: dict[int, int] = {}  # versions that came from writes to another of the family, by id

    def run(
        self,
        mode: TorchDispatchMode,
        op: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stack: Stack,
    ) -> Any:
        """The result of an operator that takes a wrapper."""
        if self._stepping_aside is op:
            self._stepping_aside = None
            return NotImplemented
        with mode, without_function_modes():
            out = self._dispatch(op, [kind for kind in types if kind not in PLAIN_TYPES], types, args, kwargs)
        if out is NotImplemented:
            names = " and ".join(sorted({kind.__name__ for kind in types if kind not in PLAIN_TYPES}))
            raise CaptureError(f"{names} has no implementation of {op}, at {where(stack)}.")
        self._note(op, args, kwargs, out, stack)
        if self._families and op_info(op).kind is Kind.WRITE:
            for target in tensors_in(written_arguments(op, args, kwargs)):
                self._count(target)
        return out

    def _dispatch(
        self, op: OpOverload, kinds: Sequence[type], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        for kind in kinds:
            self.runs_user_code |= not kind.__module__.startswith(("torch.", "foregrad."))
            if dispatched_in_cpp(kind):  # there is no method to call: the operator is called again
                self._stepping_aside = op
                try:
                    return op(*args, **kwargs)
                finally:
                    self._stepping_aside = None
            out = kind.__torch_dispatch__(op, types, args, kwargs)  # type: ignore[attr-defined]
            if out is not NotImplemented:
                return out
        return NotImplemented

    def _note(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, stack: Stack) -> None:
        if not list(tensors_in([out])):  # sizes and the like
            return
        kind = op_info(op).kind
        if kind is Kind.VIEW and args and isinstance(args[0], Tensor):
            several = out if isinstance(out, (list, tuple)) else None
            for i, view in enumerate([out] if several is None else several):
                if isinstance(view, Tensor) and view is not args[0]:
                    index = None if several is None else i
                    step = ViewStep(op, tuple(args[1:]), kwargs, index, torch.is_grad_enabled())
                    self._views[id(view)] = view, args[0], step
        elif kind is Kind.RESHAPE:
            if args[0].requires_grad or list(tensors_in(args[1:])):
                raise UnsupportedError(
                    f"{op}, at {where(stack)}, of a tensor subclass that requires grad, or by another tensor: this "
                    "cannot be compiled yet. Take a view, or make a new tensor."
                )
            reshape = Step(op, args, kwargs, out, torch.is_grad_enabled(), False, stack, None)
            self.reshapes.setdefault(id(args[0]), []).append(reshape)

    def relate(self, wrapper: Tensor, others: Sequence[Tensor]) -> None:
        """Let writes to some inputs count for each other, as they do for what they stand for."""
        alias_group = next((f for f in self._families if any(o is member for o in others for member in f)), None)
        if alias_group is None:
            self._families.append(alias_group := list(others))
        alias_group.append(wrapper)

    def _count(self, target: Tensor) -> None:
        """Count a write to an input, or to a view of it, for the others of its family."""
        for alias_group in self._families:
            own = [shares_version_counter(target, member) for member in alias_group]
            for member, counts_already in zip(alias_group, own, strict=True):
                if any(own) and not counts_already:
                    set_version(member, member._version + 1)
                    self._borrowed[id(member)] = self._borrowed.get(id(member), 0) + 1

    def own_version(self, wrapper: Tensor) -> int:
        """How often an input was written itself."""
        return 0 if wrapper.is_inference() else wrapper._version - self._borrowed.get(id(wrapper), 0)

    def chain(self, wrapper: Tensor) -> list[tuple[Tensor, ViewStep]]:
        """What a wrapper was taken from, what that was taken from, and so on; each with the view that was taken."""
        found = []
        while (known := self._views.get(id(wrapper))) is not None:
            _, wrapper, step = known
            found.append((wrapper, step))
        return found
