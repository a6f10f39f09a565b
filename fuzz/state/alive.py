"""What of a recording is left in a world: every object that its names lead to is asked."""

import contextvars
import functools
import gc
import itertools
import threading
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .same import MODULE_NAME, has_gradient, is_abstract

_CACHED_FUNCTION = type(functools.lru_cache(len))
_LEAVES = (str, bytes, int, float, complex, type(None), types.CodeType, types.FrameType)


def abstract_tensors(world: dict[str, Any]) -> Iterator[str]:
    """The ways that lead from a world's names to an abstract tensor.

    >>> import torch
    >>> list(abstract_tensors({"seen": [torch.ones(1), torch.ones(1, device="meta")]}))
    ['seen: Tensor in a list']

    Args:
        world: The names of the world.
    """
    for name, inside, tensor in tensors_of(world):
        if is_abstract(tensor):
            yield f"{name}: {type(tensor).__name__} in {inside}"


def tensors_of(world: dict[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """Every tensor of a world, each once, with the name that leads to it and the kind of object that holds it.

    >>> import torch
    >>> [(name, inside) for name, inside, _ in tensors_of({"o": {"a": (torch.ones(1),)}})]
    [('o', 'a tuple')]

    Args:
        world: The names of the world.
    """
    seen = {id(world)}
    todo = [(name, "the namespace", value) for name, value in world.items()]
    while todo:
        name, inside, value = todo.pop()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield name, inside, value
            if is_abstract(value):
                continue
        described = f"a {type(value).__name__}"
        todo += [(name, described, part) for part in _parts(value)]


def _parts(value: Any) -> list[Any]:
    """What an object holds, as far as it is the program's own."""
    match value:
        case types.ModuleType():
            return [] if getattr(value, "__spec__", None) is not None else [vars(value)]
        case type():
            return [dict(vars(value))] if value.__module__ == MODULE_NAME else []
        case types.FunctionType():
            return _parts_of_function(value)
        case contextvars.ContextVar():
            return [value.get(None)]
        case threading.local():
            return [vars(value)]
        case Tensor():
            held = [value.grad] if has_gradient(value) else []
            return [*held, value.__dict__, value._backward_hooks]
        case _ if type(value) is _CACHED_FUNCTION:
            return _parts_of_cache(value)
        case _ if type(value).__module__.startswith("foregrad"):
            return []
        case _:
            return gc.get_referents(value)


def _parts_of_cache(cache: Any) -> list[Any]:
    """The calls that a cached function would answer from memory; the list beside them may be behind."""
    held = gc.get_referents(cache)
    keys = {id(key) for table in held if type(table) is dict and table is not vars(cache) for key in table}
    following = [result for key, result in itertools.pairwise(held) if id(key) in keys]
    return [*(part for part in held if id(part) in keys or type(part) is dict), *following, cache.__wrapped__]


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    if function.__module__ is not None and function.__module__.startswith("foregrad."):
        return []
    held: list[Any] = [function.__defaults__, function.__kwdefaults__, function.__dict__, *(function.__closure__ or ())]
    return held
