"""The programs that an operator is tried in: `program(x, args, kwargs)`, built around the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sweep.operators import tensors_in

Function = Callable[..., Any]


# ------------------------------------------------------------------------------------------- writers
def writes_to_an_intermediate(write: Function) -> Function:
    def program(x: Tensor, args: Any, kwargs: Any) -> Any:
        y = x.clone()
        result = write(y, *args, **kwargs)
        return y, result

    return program


def writes_to_its_input(write: Function) -> Function:
    def program(x: Tensor, args: Any, kwargs: Any) -> Any:
        result = write(x, *args, **kwargs)
        return result, x.clone()

    return program


def writes_to_a_part_of_an_intermediate(write: Function) -> Function:
    """The written tensor is a view, of a tensor with another layout."""

    def program(x: Tensor, args: Any, kwargs: Any) -> Any:
        y = x.unsqueeze(0).expand(2, *x.shape).clone()
        write(y[1], *args, **kwargs)
        return y

    return program


# ------------------------------------------------------------------------------------------- views
def returns_a_view(take: Function) -> Function:
    return lambda x, args, kwargs: take(x, *args, **kwargs)


def returns_a_view_of_an_intermediate(take: Function) -> Function:
    return lambda x, args, kwargs: take(x.clone(), *args, **kwargs)


def returns_an_intermediate_and_its_view(take: Function) -> Function:
    def program(x: Tensor, args: Any, kwargs: Any) -> Any:
        y = x.clone()
        return y, take(y, *args, **kwargs)

    return program


def writes_through_a_view_of_an_intermediate(take: Function) -> Function:
    def program(x: Tensor, args: Any, kwargs: Any) -> Any:
        y = x.clone()
        views = take(y, *args, **kwargs)
        tensors_in(views)[-1].mul_(2).add_(1)
        return y, views

    return program


def writes_through_a_view_of_its_input(take: Function) -> Function:
    def program(x: Tensor, args: Any, kwargs: Any) -> Any:
        views = take(x, *args, **kwargs)
        tensors_in(views)[-1].mul_(2).add_(1)
        return views

    return program


def writes_to_what_was_viewed(take: Function) -> Function:
    def program(x: Tensor, args: Any, kwargs: Any) -> Any:
        y = x.clone()
        views = take(y, *args, **kwargs)
        y.mul_(2).add_(1)
        return views

    return program


# ------------------------------------------------------------------------------------------- out=
def writes_to_out(compute: Function) -> Function:
    def program(x: Tensor, args: Any, kwargs: Any, out: Any) -> Any:
        result = compute(x, *args, **kwargs, out=out)
        return result

    return program


def writes_to_an_intermediate_out(compute: Function) -> Function:
    def program(x: Tensor, args: Any, kwargs: Any, out: Any) -> Any:
        own = out.clone() if isinstance(out, Tensor) else tuple(o.clone() for o in out)
        compute(x, *args, **kwargs, out=own)
        return own

    return program
