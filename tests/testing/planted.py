"""Planted faults that any program can have: each makes a right callable wrong in one way.

Unlike those in `faults.py` they know nothing of the program that they are planted in, and do nothing where it gives
them no opportunity.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Program = Callable[..., Any]
Wrapper = Callable[[Program], Program]


@dataclass(frozen=True)
class Planted:
    plant: Wrapper
    aspect: str


PLANTED: dict[str, Planted] = {}


def planted(name: str, aspect: str) -> Callable[[Wrapper], Wrapper]:
    def register(plant: Wrapper) -> Wrapper:
        PLANTED[name] = Planted(plant, aspect)
        return plant

    return register


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def outputs_changed(change: Callable[[Tensor], Tensor], when: Callable[[Tensor, list[Tensor]], bool]) -> Wrapper:
    """A fault in some of the outputs, chosen by what they are to the inputs."""

    def plant(right: Program) -> Program:
        def wrong(*args: Tensor) -> Any:
            output = right(*args)
            return pytree.tree_map_only(Tensor, lambda t: change(t) if when(t, list(args)) else t, output)

        return wrong

    return plant


def is_fresh(output: Tensor, inputs: list[Tensor]) -> bool:
    return all(storage(output) != storage(given) for given in inputs)


def is_differentiable(output: Tensor, inputs: list[Tensor]) -> bool:
    return is_fresh(output, inputs) and output.grad_fn is not None


def is_a_view_of_an_input(output: Tensor, inputs: list[Tensor]) -> bool:
    return not is_fresh(output, inputs) and not is_an_input(output, inputs)


def is_an_input(output: Tensor, inputs: list[Tensor]) -> bool:
    return any(output is given for given in inputs)


class _ReadsRowMajor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, tangent):
        if 0 in tangent.stride() or tangent.numel() == 0:
            return tangent
        return tangent.as_strided(tangent.shape, torch.empty(tangent.shape).stride())


class _Redraws(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, tangent):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(99)
            return tangent * torch.rand(tangent.shape)


PLANTED["lost output stride"] = Planted(outputs_changed(Tensor.contiguous, is_fresh), "stride")
PLANTED["lost alias"] = Planted(outputs_changed(Tensor.clone, is_a_view_of_an_input), "storage sharing")
PLANTED["lost identity"] = Planted(outputs_changed(lambda t: t.view_as(t), is_an_input), "identity")
PLANTED["lost requires_grad"] = Planted(outputs_changed(Tensor.detach, is_differentiable), "requires_grad")
PLANTED["transposed tangent read as contiguous"] = Planted(
    outputs_changed(_ReadsRowMajor.apply, is_differentiable), "gradient value"
)


@planted("dropped write-back", "value")
def _(right):
    def wrong(*args):
        before = [given.untyped_storage().clone() for given in args]
        output = right(*args)
        for given, old in zip(args, before, strict=True):
            if given.untyped_storage().nbytes() == old.nbytes():
                given.untyped_storage().copy_(old)
        return output

    return wrong


@planted("zeros for a None gradient", "gradient presence")
def _(right):
    def wrong(*args):
        leaves = [given for given in args if given.requires_grad and given.is_leaf]
        output = right(*args)
        zero = sum(0 * leaf.real.sum() for leaf in leaves)

        def add(tensor):
            return tensor + zero.to(tensor.dtype) if leaves and is_differentiable(tensor, list(args)) else tensor

        return pytree.tree_map_only(Tensor, add, output)

    return wrong


@planted("stale guard: data of the first call", "value")
def _(right):
    first = []

    def wrong(*args):
        output = right(*args)
        fresh = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and is_fresh(t, list(args))]
        first[:] = first or [t.detach().clone() for t in fresh]
        for now, then in zip(fresh, first, strict=False):
            if now.shape == then.shape and now.dtype == then.dtype and 0 not in now.stride():
                now.data.copy_(then)
        return output

    return wrong


@planted("stale guard: aliasing of the first call", "value")
def _(right):
    first = []

    def wrong(*args):
        now = [next(i for i, other in enumerate(args) if other is given) for given in args]
        first[:] = first or now
        return right(
            *(
                args[leader] if leader != position else given if now[position] == position else given.clone()
                for position, (given, leader) in enumerate(zip(args, first, strict=True))
            )
        )

    return wrong


@planted("random number drawn once more", "random state")
def _(right):
    def wrong(*args):
        before = torch.get_rng_state()
        output = right(*args)
        if not torch.equal(before, torch.get_rng_state()):
            torch.rand(1)
        return output

    return wrong


@planted("random number redrawn in backward", "gradient value")
def _(right):
    redrawn = outputs_changed(_Redraws.apply, is_differentiable)

    def wrong(*args):
        before = torch.get_rng_state()
        output = right(*args)
        if torch.equal(before, torch.get_rng_state()):
            return output
        return redrawn(lambda *_: output)(*args)

    return wrong


@planted("wrong version counter", "version counter")
def _(right):
    def wrong(*args):
        before = [given._version for given in args]
        output = right(*args)
        for given, version in zip(args, before, strict=True):
            if given._version != version:
                torch.autograd.graph.increment_version(given)
                break
        return output

    return wrong
