"""In-place operators that torch's database leaves out, each with a call or two on a 4 by 3 tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sweep.operators import Call, Operator

aten = torch.ops.aten
SHAPE = (4, 3)

UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round"
)
MORE_UNARY = "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero"
BINARY = "add sub mul div clamp_max clamp_min maximum minimum pow"


def _leaf(*shape: int) -> Tensor:
    return torch.rand(shape).add_(0.5).requires_grad_()


def _foreach(name: str) -> Callable[..., Any]:
    """The operator over a list of the tensor that is written and one more."""
    operator = getattr(torch, f"_foreach_{name}_")

    def function(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        second = x.sin()
        operator([x, second], *args, **kwargs)
        return second

    return function


def _set_item(index: Any) -> Callable[..., Any]:
    return lambda x, value: x.__setitem__(index, value)


def _rows() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    two = [_leaf(*SHAPE), _leaf(*SHAPE)]
    yield "relu_", torch.relu_, ()
    yield "relu6_", lambda x: F.relu6(x, inplace=True), ()
    yield "hardtanh_", lambda x: F.hardtanh(x, inplace=True), ()
    yield "hardswish_", lambda x: F.hardswish(x, inplace=True), ()
    yield "gelu_", aten.gelu_.default, ()
    yield "bernoulli_", Tensor.bernoulli_, (0.5,)
    yield "bernoulli_ of a tensor", Tensor.bernoulli_, (torch.full(SHAPE, 0.5),)
    yield "random_", Tensor.random_, (0, 10)
    yield "copy_", Tensor.copy_, (_leaf(*SHAPE),)
    yield "copy_ of another shape and dtype", Tensor.copy_, (torch.arange(3),)
    yield "fill_diagonal_", Tensor.fill_diagonal_, (2.0,)
    yield "detach_", Tensor.detach_, ()
    yield "embedding_renorm_", aten.embedding_renorm_.default, (torch.tensor([0, 2, 0]), 1.0, 2.0)
    yield "x[i] = value", _set_item(1), (_leaf(3),)
    yield "x[i] = number", _set_item((slice(1, 3), 0)), (2.0,)
    yield "x[...] = value", _set_item(Ellipsis), (_leaf(1),)
    yield "x[indices] = value", _set_item(torch.tensor([0, 2])), (_leaf(2, 3),)
    yield "x[mask] = number", _set_item(torch.tensor([True, False, True, False])), (2.0,)
    for name in f"{UNARY} {MORE_UNARY}".split():
        yield f"_foreach_{name}_", _foreach(name), ()
    for name in BINARY.split():
        yield f"_foreach_{name}_ of a number", _foreach(name), (2.0,)
        yield f"_foreach_{name}_ of numbers", _foreach(name), ([2.0, 3.0],)
        yield f"_foreach_{name}_ of tensors", _foreach(name), (two,)
    yield "_foreach_copy_", _foreach("copy"), (two,)
    yield "_foreach_lerp_", _foreach("lerp"), (two, 0.3)
    yield "_foreach_addcmul_", _foreach("addcmul"), (two, two[::-1], 0.5)
    yield "_foreach_addcdiv_", _foreach("addcdiv"), (two, two[::-1], 0.5)


def other_in_place_operators() -> list[Operator]:
    def operator(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Operator:
        return Operator(name, function, lambda gradients: iter([Call(_leaf(*SHAPE), args, {})]))

    return [operator(*row) for row in _rows()]
