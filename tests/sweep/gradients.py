"""The differentiable operators of torch's own database, in the form in which torch checks gradients."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError
from torch.utils._pytree import tree_flatten, tree_unflatten

import foregrad
from helpers import nop
from sweep.operators import Call, database, seeds_itself

CALLS_PER_OPERATOR = 4
MOST_CALLS_LOOKED_AT = 24
MOST_ELEMENTS = 200  # of the tensors that are differentiated, where an operator has calls so small

Check = Callable[[Callable[..., Any], tuple[Tensor, ...]], bool]


@dataclass(frozen=True)
class Sample:
    """A function of tensors that require grad: an operator with everything else that it is called with."""

    text: str
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]

    @property
    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self.inputs)


@dataclass(frozen=True, eq=False)
class Differentiable:
    """An operator of the database, of which torch has a gradient in float64."""

    name: str
    info: Any

    def samples(self, limit: int) -> list[Sample]:
        """A few small calls that differ in more than their data; the same ones each time."""
        torch.manual_seed(0)
        numpy.random.seed(0)
        found = itertools.islice((sample for sample in self._all_samples() if sample.elements), MOST_CALLS_LOOKED_AT)
        distinct = list({sample.text: sample for sample in found}.values())
        small = [sample for sample in distinct if sample.elements <= MOST_ELEMENTS]
        chosen = small or sorted(distinct, key=lambda sample: sample.elements)[:1]
        return chosen[:: max(1, len(chosen) // limit)][:limit]

    def _all_samples(self) -> Iterator[Sample]:
        info = self.info
        for sample in info.sample_inputs_func(info, "cpu", torch.float64, True, small_inputs_only=True):
            yield self._sample(Call(sample.input, sample.args, sample.kwargs), sample.output_process_fn_grad)

    def _sample(self, call: Call, process: Callable[[Any], Any] | None) -> Sample:
        info = self.info
        leaves, tree = tree_flatten((call.input, call.args, call.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        inputs = tuple(leaves[i] for i in places)
        rest = [None if i in places else leaf for i, leaf in enumerate(leaves)]

        def function(*tensors: Tensor) -> Any:
            given = list(rest)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            first, args, kwargs = tree_unflatten(given, tree)
            if seeds_itself(info.gradcheck_wrapper):
                result = info.op(first, *args, **kwargs)
            else:
                result = info.gradcheck_wrapper(info.op, first, *args, **kwargs)
            return result if process is None else process(result)

        return Sample(str(call), function, inputs)

    def checks(self) -> dict[str, Check]:
        """torch's own checks, by name."""
        info = self.info
        shared = {"nondet_tol": info.gradcheck_nondet_tol, "check_grad_dtypes": True, "fast_mode": True}
        first = functools.partial(gradcheck, check_batched_grad=info.check_batched_grad, **shared)
        second = functools.partial(gradgradcheck, check_batched_grad=info.check_batched_gradgrad, **shared)
        if not info.supports_gradgrad:
            return {"gradcheck": first}
        return {
            "gradcheck": first,
            "gradgradcheck": second,
            "gradgradcheck, strided": functools.partial(second, gen_non_contig_grad_outputs=True),
        }


@functools.cache
def differentiable_operators() -> dict[str, Differentiable]:
    """By name."""
    found: dict[str, Differentiable] = {}
    for info in database():
        if info.supports_autograd and torch.float64 in info.supported_backward_dtypes("cpu"):
            name = f"{info.name}.{info.variant_test_name}".removesuffix(".")
            found[name] = Differentiable(name, info)
    return found


def seeded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the same random numbers in each call: a gradient of random numbers is of no use otherwise."""

    def call(*args: Any) -> Any:
        torch.manual_seed(0)
        return function(*args)

    return call


def complaint(check: Check, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> str:
    """Why a check does not pass; empty if it does."""
    fresh = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs)
    try:
        torch.manual_seed(1)  # the checks draw directions
        check(seeded(function), fresh)
    except (GradcheckError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The tensors are small: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def complaints(operator: Differentiable, limit: int = CALLS_PER_OPERATOR) -> list[str] | None:
    """What is said of the compiled operator by those checks that pass in eager; None where none does."""
    none_passes = True
    found: list[str] = []
    for sample in operator.samples(limit):
        compiled = foregrad.aot_function(sample.function, nop)
        for name, check in operator.checks().items():
            if complaint(check, sample.function, sample.inputs):
                continue
            none_passes = False
            why = complaint(check, compiled, sample.inputs)
            if why:
                found.append(f"{name} of {operator.name}({sample.text}): {why}")
    return None if none_passes else found
