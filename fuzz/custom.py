"""Operators and functions of our own, as users write them: some write to their arguments, some return views.

The kernels write through `.data`, as kernels in C++ would write to memory: only the operator itself then counts as a
write in the version of a tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_NAMESPACE = "foregrad_fuzz"


@torch.library.custom_op(f"{_NAMESPACE}::scale_", mutates_args=("x",))
def scale_(x: Tensor, factor: float) -> None:
    """Multiply in place; autograd knows nothing of it."""
    x.data.mul_(factor)


@torch.library.custom_op(f"{_NAMESPACE}::add_and_sum", mutates_args=("x",))
def add_and_sum(x: Tensor, y: Tensor) -> Tensor:
    """Add in place, and return something as well."""
    x.data.add_(y)
    return x.sum()


@add_and_sum.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.sum()


@torch.library.custom_op(f"{_NAMESPACE}::shift_all_", mutates_args=("xs",))
def shift_all_(xs: Sequence[Tensor], by: float) -> None:
    """Write to each tensor of a list."""
    for x in xs:
        x.data.add_(by)


@torch.library.custom_op(f"{_NAMESPACE}::count_", mutates_args=("seen",))
def count_(x: Tensor, seen: Tensor | None = None) -> Tensor:
    """Write to an argument that may be left out."""
    doubled = x + x
    if seen is not None:
        seen.data.add_(1)
    return doubled


@count_.register_fake
def _(x: Tensor, seen: Tensor | None = None) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{_NAMESPACE}::smooth", mutates_args=())
def smooth(x: Tensor) -> Tensor:
    """An operator that writes nothing, with a derivative."""
    return x * x + x


@smooth.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _smooth_backward(ctx: Any, tangent: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return tangent * (x.conj() * 2 + 1)


smooth.register_autograd(_smooth_backward, setup_context=_keep_input)


class Doubled(Function):
    """Writes to its argument and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0] * 2


class ScaledByOperator(Function):
    """Writes to its argument through an operator of our own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.mark_dirty(x)
        scale_(x, factor)
        return x

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor, None]:
        return tangents[0] * ctx.factor, None


class Flat(Function):
    """Returns a view of its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].reshape(ctx.shape)


class SineAndCosine(Function):
    """Saves its argument and a value that it computed; one of its results is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        sine, cosine = x.sin(), x.cos()
        ctx.save_for_backward(x, cosine)
        ctx.mark_non_differentiable(cosine)
        return sine, cosine

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Tensor:
        _, cosine = ctx.saved_tensors
        return tangents[0] * cosine


class WritesInBackward(Function):
    """Counts its backward calls in a tensor that it was given, and scales gradients by the count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.count = count
        return x * 2

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor, None]:
        ctx.count.add_(1)
        return tangents[0] * ctx.count.sum().to(tangents[0].dtype), None


NAMES = (
    "Doubled",
    "Flat",
    "ScaledByOperator",
    "SineAndCosine",
    "WritesInBackward",
    "add_and_sum",
    "count_",
    "scale_",
    "shift_all_",
    "smooth",
)
