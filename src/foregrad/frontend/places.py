"""Where a program finds things by itself: closures, globals, defaults, modules, attributes.

A tensor that the program finds in one of these places is a hidden input: it is read from its place at each call. A
plain value is guarded by equality, a function or a module by identity.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..record.lines import is_users_code

PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Place:
    """A place that can be read again: a cell, an item or an attribute of an object, or the object itself."""

    owner: Any
    how: Literal["cell", "item", "attribute", "held"]
    key: Any
    path: str  # in the user's words

    def expression(self, owner: str, key: str) -> str:
        """Python text that reads the place."""
        match self.how:
            case "cell":
                return f"{owner}.cell_contents"
            case "item":
                return f"{owner}[{key}]"
            case "attribute":
                return f"{owner}.{self.key}"
            case "held":
                return owner


def is_plain(value: Any) -> bool:
    """Whether a value is fully described by comparing it."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return len(value) <= 256 and all(map(is_plain, value))
    if type(value) is dict:
        return len(value) <= 256 and all(is_plain(k) and is_plain(v) for k, v in value.items())
    return isinstance(value, PLAIN)


class Surroundings:
    """Everything that a function can reach without being given it."""

    def __init__(self, root: Callable[..., Any]) -> None:
        self.plain: list[tuple[Place, Any]] = []
        self.fixed: list[tuple[Place, Any]] = []  # functions and modules, by identity
        self.containers: list[tuple[str, Any]] = []
        self.modules: dict[int, tuple[str, nn.Module]] = {}
        self._tensors: dict[int, Place] = {}
        self._seen: set[int] = set()
        self._enter_callable(root, "")

    def place_of(self, tensor: Tensor) -> Place:
        """Where a tensor was found; one that is nowhere to be found is held as it is."""
        return self._tensors.get(id(tensor)) or Place(tensor, "held", None, f"a tensor of shape {tuple(tensor.shape)}")

    # ------------------------------------------------------------------------------------------- looking
    def _enter_callable(self, value: Any, path: str) -> None:
        if isinstance(value, nn.Module):
            self._enter_module(value, path)
        elif isinstance(value, types.MethodType):
            self._visit(Place(value, "attribute", "__self__", f"{path or value.__name__}.self"), value.__self__, 0)
            self._enter_callable(value.__func__, path)
        elif isinstance(value, functools.partial):
            self._enter_callable(value.func, path)
            for i, item in enumerate(value.args):
                self._visit(Place(value.args, "item", i, f"{path}.args[{i}]"), item, 0)
            for key, item in value.keywords.items():
                self._visit(Place(value.keywords, "item", key, f"{path}.{key}"), item, 0)
        elif isinstance(value, types.FunctionType):
            self._enter_function(value)
        elif not isinstance(value, type) and callable(value):
            self._visit(Place(value, "held", None, path), value, 0)

    def _enter_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen or not is_users_code(function.__code__):
            return
        self._seen.add(id(function))
        name = function.__name__
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if _is_filled(cell):
                place = Place(cell, "cell", None, f"{variable} (closure of {name})")
                self._visit(place, cell.cell_contents, 0)
        for variable in _names_in(function.__code__):
            if variable in function.__globals__:
                place = Place(function.__globals__, "item", variable, f"{variable} (global)")
                self._visit(place, function.__globals__[variable], 0)
        for i, item in enumerate(function.__defaults__ or ()):
            self._visit(Place(function.__defaults__, "item", i, f"a default of {name}"), item, 1)
        for key, item in (function.__kwdefaults__ or {}).items():
            self._visit(Place(function.__kwdefaults__, "item", key, f"the default {key} of {name}"), item, 1)

    def _enter_module(self, module: nn.Module, path: str) -> None:
        for name, child in module.named_modules():
            full = ".".join(part for part in (path, name) if part)
            if id(child) in self.modules:
                continue
            self.modules[id(child)] = (full, child)
            for table in (child._parameters, child._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        self._found(tensor, Place(table, "item", key, f"{full}.{key}" if full else key))
            for key, value in vars(child).items():
                if isinstance(value, (Tensor, list, dict, tuple)) and not key.startswith("_"):
                    place = Place(vars(child), "item", key, f"{full}.{key}" if full else key)
                    self._visit(place, value, 1)
            self._enter_function_of(type(child))

    def _enter_function_of(self, kind: type) -> None:
        forward = getattr(kind, "forward", None)
        if isinstance(forward, types.FunctionType):
            self._enter_function(forward)

    def _visit(self, place: Place, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self._found(value, place)
        elif is_plain(value):
            if depth == 0:
                self.plain.append((place, value))
            if isinstance(value, (list, dict, set)):
                self.containers.append((place.path, value))
        elif isinstance(value, nn.Module):
            self.fixed.append((place, value))
            self._enter_module(value, place.path.split(" ")[0])
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            if depth == 0 and isinstance(value, types.FunctionType):
                self.fixed.append((place, value))
            self._enter_callable(value, place.path)
        elif depth < _DEPTH and id(value) not in self._seen:
            self._seen.add(id(value))
            self._visit_parts(place, value, depth + 1)

    def _visit_parts(self, place: Place, value: Any, depth: int) -> None:
        if isinstance(value, (list, tuple)):
            parts: Iterator[tuple[Any, Any]] = iter(enumerate(value))
        elif isinstance(value, dict):
            parts = iter(list(value.items()))
        elif isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)) or not hasattr(value, "__dict__"):
            return
        else:
            for key, item in list(vars(value).items()):
                self._visit(Place(vars(value), "item", key, f"{place.path}.{key}"), item, depth)
            return
        if isinstance(value, (list, dict)):
            self.containers.append((place.path, value))
        if len(value) <= 4096:
            for key, item in parts:
                self._visit(Place(value, "item", key, f"{place.path}[{key!r}]"), item, depth)

    def _found(self, tensor: Tensor, place: Place) -> None:
        self._tensors.setdefault(id(tensor), place)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


@functools.cache
def _names_in(code: types.CodeType) -> set[str]:
    """Global names that a function and the functions inside it read."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names
