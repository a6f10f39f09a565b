"""The operators of torch's own database, and the calls that it has for them."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

CALLS_PER_OPERATOR = 6
OTHER_OUT = {"equal", "histogramdd", "sparse.sampled_addmm", "_batch_norm_with_update"}
DTYPES = (torch.float32, torch.complex64, torch.int64)  # the first that an operator knows
CONJUGATES = {"conj", "conj_physical", "resolve_conj", "resolve_neg", "real", "H", "mH"}  # idle for real numbers


@dataclass(frozen=True)
class Call:
    """What an operator is called with."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def made_by(self, function: Callable[..., Any]) -> Any:
        return function(self.input, *self.args, **self.kwargs)

    @property
    def dense(self) -> bool:
        """Whether the first argument is a plain tensor."""
        return isinstance(self.input, Tensor) and self.input.layout == torch.strided

    def __str__(self) -> str:
        def text(value: Any) -> Any:
            return f"{value.dtype}{list(value.shape)}".removeprefix("torch.") if isinstance(value, Tensor) else value

        shown = tree_map(text, (self.input, *self.args))
        return ", ".join([*map(str, shown), *(f"{k}={tree_map(text, v)}" for k, v in self.kwargs.items())])


@dataclass(frozen=True, eq=False)
class Operator:
    """A function of torch, and where its calls come from, with tensors that require grad or without."""

    name: str
    function: Callable[..., Any]
    all_calls: Callable[[bool], Iterator[Call]]

    @functools.cache  # noqa: B019, the operators live as long as the sweep
    def calls(self, gradients: bool = True, limit: int = CALLS_PER_OPERATOR) -> list[Call]:
        """A few calls that differ in more than their data; the same ones each time."""
        torch.manual_seed(0)
        numpy.random.seed(0)
        distinct = list({str(call): call for call in self.all_calls(gradients)}.values())
        return distinct[:: max(1, len(distinct) // limit)][:limit]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a result."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor are the same memory."""
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + stride * torch.arange(size)).flatten()
    return places.unique().numel() < tensor.numel()


# ------------------------------------------------------------------------------------------- the database
@functools.cache
def database() -> list[Any]:
    """torch's OpInfo database, which wants `expecttest` only for the base class of torch's own tests."""
    if importlib.util.find_spec("expecttest") is None:
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as database
    # Random operators come wrapped into code that sets a seed, which would be recorded too.
    database.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
    on_cpu = [info for info in database.op_db if info.supported_dtypes("cpu") & set(DTYPES)]
    return [info for info in on_cpu if not info.name.startswith("jiterator")]  # made on a GPU


def seeds_itself(wrapper: Callable[..., Any]) -> bool:
    """Whether a wrapper around an operator does nothing but to set a seed."""
    return getattr(wrapper, "__name__", "") == "wrapper_set_seed"


def _dtype_of(info: Any) -> torch.dtype:
    if info.name == "float_power":  # writes float64 only
        return torch.float64
    supported = info.supported_dtypes("cpu")
    return next(dtype for dtype in DTYPES if dtype in supported)


def _operator(info: Any, function: Any, name: str = "", dtype: torch.dtype | None = None) -> Operator:
    name, dtype = name or info.name, dtype or _dtype_of(info)
    differentiable = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)

    def calls(gradients: bool) -> Iterator[Call]:
        # Not `sample_inputs`, which looks through the whole Python stack for a test case.
        for sample in info.sample_inputs_func(info, "cpu", dtype, gradients and differentiable):
            yield Call(sample.input, sample.args, sample.kwargs)

    return Operator(f"{name}.{info.variant_test_name}".removesuffix("."), function, calls)


def _listed(make: Callable[[], Iterator[Operator]]) -> Callable[[], list[Operator]]:
    """pytest imports a test module twice, once to look for doctests: the database is searched only once."""
    return functools.cache(lambda: list(make()))


@_listed
def in_place_operators() -> Iterator[Operator]:
    """All in-place variants: methods like `add_`, functions with `inplace=True`, operators like `+=`, and aliases."""
    for info in database():
        if info.inplace_variant is not None:
            yield _operator(info, info.inplace_variant, f"{info.name.removesuffix('_')}_")
        if info.inplace_operator_variant is not None:
            yield _operator(info, info.inplace_operator_variant, info.inplace_operator_variant.__name__)
        for alias in info.aliases:
            if alias.inplace_variant is not None:
                yield _operator(info, alias.inplace_variant, f"{alias.name}_")


@_listed
def view_operators() -> Iterator[Operator]:
    """All operators of which a result shares memory with the first argument, for one of their first calls at least."""
    for info in database():
        operator = _operator(info, info.op, dtype=torch.complex64 if info.name in CONJUGATES else None)
        if _gives_views(operator):
            yield operator


@_listed
def out_operators() -> Iterator[Operator]:
    """All operators that take a dense tensor, or a tuple of them, as `out=`."""
    for info in database():
        if info.supports_out and info.name not in OTHER_OUT:
            yield _operator(info, info.op)


def _gives_views(operator: Operator) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = itertools.islice(operator.all_calls(False), CALLS_PER_OPERATOR)
        return any(_gives_view(operator.function, call) for call in calls)


def _gives_view(function: Callable[..., Any], call: Call) -> bool:
    if not call.dense:
        return False
    version, storage = call.input._version, call.input.untyped_storage()._cdata
    results = [t for t in tensors_in(call.made_by(function)) if t.layout == torch.strided]
    return call.input._version == version and any(t.untyped_storage()._cdata == storage for t in results)


@_listed
def all_operators() -> Iterator[Operator]:
    """Every operator, in place where it has such a variant, for each of the dtypes that it knows."""
    for info in database():
        for dtype in DTYPES:
            if dtype in info.supported_dtypes("cpu"):
                name = f"{info.name}, {dtype}".replace("torch.", "")
                yield _operator(info, info.op, name, dtype)
                if info.inplace_variant is not None:
                    yield _operator(info, info.inplace_variant, f"{name}, in place", dtype)
