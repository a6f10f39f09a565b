"""Tangents as the backward was recorded for them: those that arrive are fitted, the others are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

from .._torch import hint_of
from ..joint.differentiate import Tape
from ..slots import Returned
from ..subclasses.layout import is_wrapper, layout_of, leaves_of
from ..subclasses.tangents import ExpectedTangent


class RecordedTangents:
    """The tangents of a tape, in the order of its targets."""

    def __init__(self, tape: Tape) -> None:
        self.tensors = list(tape.tangents.values())
        self._slots = list(tape.targets)
        self._engine = tape.session.engine

    def fit(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Tangents in the recorded layout, with their history."""
        return [None if tangent is None else self._fitted(i, tangent) for i, tangent in enumerate(tangents)]

    def _fitted(self, index: int, tangent: Tensor) -> Tensor:
        recorded = self.tensors[index]
        if is_wrapper(recorded) or is_wrapper(tangent):
            fitted = expected_tangent(self._slots[index], recorded).fit(tangent)
            loses = torch.is_grad_enabled() and tangent.requires_grad and not fitted.requires_grad
            return _SameValue.apply(tangent, [fitted]) if loses else fitted
        if not any(isinstance(n, SymInt) for n in recorded.stride()) and tangent.stride() == recorded.stride():
            return tangent
        return permuted(recorded.stride())(tangent)

    def missing_tangent(self, index: int) -> Tensor:
        """Something in the place of a tangent that did not arrive: it is not read, but has its shape."""
        recorded = self.tensors[index]
        if is_wrapper(recorded):
            unread: Tensor = layout_of(recorded).build([self._empty(leaf) for leaf in leaves_of(recorded)])
            return unread
        return self._empty(recorded)

    def _empty(self, recorded: Tensor) -> Tensor:
        size, stride = [hint_of(n) for n in recorded.shape], [hint_of(n) for n in recorded.stride()]
        device = self._engine.device_of(recorded)
        return torch.empty_strided(size, stride, dtype=recorded.dtype, device=device)


class _SameValue(torch.autograd.Function):
    """Gives a tangent that was put together anew its history."""

    @staticmethod
    def forward(ctx: Any, tangent: Tensor, fitted: list[Tensor]) -> Tensor:
        return fitted[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def expected_tangent(slot: Returned, tangent: Tensor) -> ExpectedTangent:
    """What the backward takes for a result."""
    leaves = leaves_of(tangent)
    layout = layout_of(tangent) if is_wrapper(tangent) else None
    strides = tuple(None if any(isinstance(n, SymInt) for n in leaf.stride()) else leaf.stride() for leaf in leaves)
    return ExpectedTangent(
        str(slot), layout, strides, tuple(restride(tuple(leaf.shape), tuple(leaf.stride())) for leaf in leaves)
    )


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


def permuted(stride: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """A function that gives a tangent strides in this order, without writing to memory of its own."""
    order = sorted(range(len(stride)), key=lambda d: -hint_of(stride[d]))
    back = [order.index(d) for d in range(len(order))]
    return lambda t: t.permute(order).contiguous().permute(back)
