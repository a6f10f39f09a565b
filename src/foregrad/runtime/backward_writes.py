"""Writes that a backward makes to what the caller holds: its graph returns the new values, here they are written."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import refusal_of_write, set_version
from ..errors import BackwardError, UnsupportedError
from ..joint.backward_writes import BackwardWrite
from ..joint.tape import Tape
from ..slots import Primal, Tangent
from .saved import Saved


class WritesOfBackward:
    """Carries out the writes of a backward; those to inputs go to the tensors in `ctx.live`."""

    def __init__(self, tape: Tape, saved: Saved, writes: Sequence[BackwardWrite]) -> None:
        self._tape = tape
        self.writes = writes
        names = [node.name for node in saved.tensors]
        # Which saved tensors are the caller's own as they are when the backward runs, by position.
        self.live = {
            names.index(w.current.name): k for k, w in enumerate(writes) if w.current.name in names and not w.checked
        }

    @property
    def are_checked(self) -> bool:
        """Whether autograd finds what is written changed, when it is asked again."""
        return any(write.checked for write in self.writes)

    def carry_out(
        self, ctx: Any, results: Sequence[Any], tangents: Sequence[Tensor | None], checked: bool | None = None
    ) -> None:
        """Write to inputs and tangents what the backward writes to them."""
        new_values = results[self._tape.gradients : self._tape.gradients + len(self.writes)]
        if self.are_checked and getattr(ctx, "has_written", False):
            _refuse_second_time(checked)
        if any(new is not None or write.reshapes for write, new in zip(self.writes, new_values, strict=True)):
            ctx.has_written = True
        by_slot = dict(zip(map(Tangent, self._tape.targets), tangents, strict=True))
        for k, (write, new) in enumerate(zip(self.writes, new_values, strict=True)):
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

    def refuse_locked(self, ctx: Any, exposed: Container[Primal | Tangent]) -> None:
        """Eager's own refusal of writes to leaves and to some views, for inputs that are written with gradients on."""
        for write, target in zip(self.writes, ctx.live, strict=True):
            if write.of in exposed:
                _refuse_write_to_locked(target)


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
    spark = torch.empty(0, requires_grad=True)
    pairs = zip(gradients, require_grad, strict=False)
    return [_NoSecondOrder.apply(spark, gradient) if required else gradient for gradient, required in pairs]


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
