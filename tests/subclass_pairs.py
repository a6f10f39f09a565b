"""Wrapper subclasses for the tests, and a comparison of compiled programs with eager ones."""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

import foregrad
from foregrad.subclasses.layout import is_wrapper, leaves_of
from helpers import nop


class Pair(torch.Tensor):
    """Two tensors and a tag: every operator runs on both."""

    @staticmethod
    def __new__(cls, p, q, tag="std"):
        return torch.Tensor._make_wrapper_subclass(
            cls, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device, requires_grad=p.requires_grad
        )

    def __init__(self, p, q, tag="std"):
        self.p, self.q, self.tag = p, q, tag

    def __repr__(self):
        return f"{type(self).__name__}({self.p}, {self.q}, {self.tag})"

    def __tensor_flatten__(self):
        return ["p", "q"], self.tag

    @classmethod
    def __tensor_unflatten__(cls, inner, tag, outer_size, outer_stride):
        return cls(inner["p"], inner["q"], tag)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        tag = next(t.tag for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Pair))

        def pick(which):
            return pytree.tree_map_only(Pair, lambda t: getattr(t, which), (args, kwargs or {}))

        (ap, kp), (aq, kq) = pick("p"), pick("q")
        out = pytree.tree_map(
            lambda u, v: cls(u, v, tag) if isinstance(u, Tensor) else u, func(*ap, **kp), func(*aq, **kq)
        )
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


def pair(*shape: int, grad: bool = False) -> Pair:
    """A pair of 1, 2, 3, ... and 2, 4, 6, ..."""
    values = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).clone()
    return Pair(values, values * 2).requires_grad_(grad)


def ones_like(tensor: Tensor) -> Tensor:
    """A gradient of ones with the structure of a tensor."""
    return torch.ones_like(tensor.detach())


def look(value: Any, versions: bool = True) -> Any:
    """What can be seen of a value: types, shapes, data, autograd's flags."""
    if not isinstance(value, Tensor):
        return value
    version = value._version if versions else None
    kind = (type(value).__name__, tuple(value.shape), value.requires_grad, value.is_leaf, version)
    if is_wrapper(value):
        names, context = value.__tensor_flatten__()
        return (*kind, context, [look(getattr(value, name), versions) for name in names])
    return (*kind, value.stride(), value.tolist())


def storages(values: list[Any]) -> list[int]:
    """Which plain tensors share memory: for each, the first that it shares with."""
    first: dict[int, int] = {}
    leaves = [leaf for value in values if isinstance(value, Tensor) for leaf in leaves_of(value)]
    return [first.setdefault(leaf.untyped_storage()._cdata, i) for i, leaf in enumerate(leaves)]


def observe(function: Callable[..., Any], make: Callable[[], list[Any]], backward: bool) -> Any:
    """Everything that a caller sees of one call: results, arguments afterwards, sharing of memory, gradients."""
    args = make()
    result = function(*args)
    outputs = pytree.tree_leaves(result)
    seen = [look(v) for v in (*outputs, *args)]
    shared = storages([*outputs, *args])
    same = [[a is b for b in args] for a in outputs if isinstance(a, Tensor)]
    views = [t._is_view() for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    grads = []
    differentiable = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    if backward and differentiable:
        torch.autograd.backward(differentiable, [ones_like(t) for t in differentiable])
        for arg in args:
            if isinstance(arg, Tensor) and arg.is_leaf:
                grads.append(look(arg.grad, versions=False))
    return seen, shared, same, views, grads


def compare(function: Callable[..., Any], make: Callable[[], list[Any]], backward: bool = True, **options: Any) -> Any:
    """Run a program in eager and compiled, twice, and require that nobody can tell them apart."""
    compiled = foregrad.aot_function(function, nop, **options)
    expected = observe(function, make, backward)
    for _ in range(2):
        got = observe(compiled, make, backward)
        for what, a, b in zip(("values", "memory", "identity", "views", "gradients"), expected, got, strict=True):
            assert a == b, f"{what}: eager has {a}, compiled has {b}"
    assert len(compiled.specializations) == 1
    return compiled
