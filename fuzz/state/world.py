"""A world: a script executed for one side of a comparison, and the steps that its caller takes in it."""

import functools
import gc
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from foregrad._torch import without_function_modes
from foregrad.record.refusals import without_frames

from .alive import tensors_of
from .ambient import Ambient
from .same import MODULE_NAME

# Names that the comparison puts into a world.
GIVEN = frozenset({"alive", "call", "backward", "forget", "STEPS", "__builtins__", "compile", "compare"})


class World:
    """The names that a script defines, and what the process looks like from there.

    Args:
        code: The script, compiled.
    """

    def __init__(self, code: types.CodeType) -> None:
        self.names = vars(types.ModuleType(MODULE_NAME))
        self.ambient = Ambient()
        with self.ambient.in_place():
            torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a traceback for each call, without a GPU
            random.seed(0)
            numpy.random.seed(0)
            exec(code, self.names)
        self.names["backward"] = backward
        self.names["forget"] = functools.partial(_forget, self.names)

    def do(self, step: types.CodeType, call: Callable[..., Any]) -> BaseException | None:
        """Take one step; what it raises is returned.

        Args:
            step: Python over the names of the world.
            call: What `call` means in it.
        """
        self.names["call"] = call
        with self.ambient.in_place():
            try:
                exec(step, self.names)
            except Exception as error:
                return without_frames(error)  # a checkpoint that it left has its hooks set until its frame is gone
            finally:
                self.names.pop("call")
        return None


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a result: in lists, tuples and dicts.

    >>> len(tensors_in({"a": [torch.ones(1), 2], "b": (torch.ones(1),)}))
    2

    Args:
        value: The result.
    """
    match value:
        case Tensor():
            return [value]
        case dict():
            return [tensor for part in value.values() for tensor in tensors_in(part)]
        case list() | tuple():
            return [tensor for part in value for tensor in tensors_in(part)]
        case _:
            return []


def backward(result: Any) -> None:
    """Differentiate every tensor of a result, each with a tangent of its own.

    >>> x = torch.ones(2, requires_grad=True)
    >>> backward([x * 3]); x.grad
    tensor([1.5000, 4.5000])

    Args:
        result: What a call returned.
    """
    able = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    torch.autograd.backward(able, [_tangent_of(tensor) for tensor in able])


def _tangent_of(result: Tensor) -> Tensor:
    """It lies in memory as its result does: where a compiled backward has to move it first, sums round otherwise."""
    values = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float32).reshape(result.shape)
    lying = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")  # of no subclass
    return torch.empty_like(lying, device="cpu").copy_(values)


def _forget(names: dict[str, Any], *forgotten: str) -> None:
    """Let go of some names, and note which of the tensors and objects behind them live on."""
    watched = [reference for name in forgotten for reference in _references(names.pop(name, None))]
    names["alive"] = []
    # A compiled call is one node of the tape: as long as one of its results lives, so does what the others need.
    with without_function_modes():
        if any(tensor.grad_fn is not None for _, _, tensor in tensors_of(names)):
            return
    if any(reference() is not None for reference in watched):
        gc.collect()
    names["alive"] = [reference() is not None for reference in watched]


def _references(value: Any) -> list[weakref.ref[Any]]:
    try:
        return [weakref.ref(part) for part in tensors_in(value) or [value]]
    except TypeError:
        return []
