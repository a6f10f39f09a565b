"""Where a program finds things by itself: closures, globals, defaults, modules, attributes.

A tensor that the program finds in one of these places is a hidden input: it is read from its place at each call. A
plain value is guarded by equality, anything else by identity. What is reached through a container or an object is
guarded as well, a few levels deep.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from ..record.lines import is_users_code
from ..values import is_plain

_DEPTH = 3
_MOST_ITEMS = 4096  # of a container that is looked into


@dataclass(frozen=True, slots=True)
class Place:
    """A place that can be read again: a cell, an item of a container, an attribute, or the object itself."""

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


class Surroundings:
    """Everything that a function can reach without being given it."""

    def __init__(self, root: Callable[..., Any], arguments: Iterable[tuple[str, Any]] = ()) -> None:
        self.plain: list[tuple[Place, Any]] = []
        self.fixed: list[tuple[Place, Any]] = []
        self.containers: list[tuple[str, Any]] = []  # lists, dicts and sets
        self.objects: list[tuple[str, dict[str, Any]]] = []  # attributes of objects that are not modules
        self.cells: list[tuple[str, types.CellType]] = []
        self.stored_globals: list[tuple[str, dict[str, Any], str]] = []
        self.modules: dict[int, tuple[str, nn.Module]] = {}
        self._tensors: dict[int, Place] = {}
        self._seen: set[int] = set()
        self._enter_callable(root, "")
        for path, value in arguments:  # guarded as arguments; here for what is reached through them
            if isinstance(value, (nn.Module, types.FunctionType, types.MethodType, functools.partial)):
                self._enter_callable(value, path)
            elif not isinstance(value, Tensor) and not is_plain(value):
                self._visit_parts(path, value, 1)

    def place_of(self, tensor: Tensor) -> Place:
        """Where a tensor was found; one that is nowhere to be found is held as it is."""
        return self._tensors.get(id(tensor)) or Place(tensor, "held", None, f"a tensor of shape {tuple(tensor.shape)}")

    # ----------------------------------------------------------------------------------------- callables
    def _enter_callable(self, value: Any, path: str) -> None:
        if isinstance(value, nn.Module):
            self._enter_module(value, path)
        elif isinstance(value, types.MethodType):
            self._visit(Place(value, "attribute", "__self__", path or "self"), value.__self__, 1)
            self._enter_function(value.__func__)
        elif isinstance(value, functools.partial):
            self._enter_callable(value.func, path)
            self._visit_parts(f"{path}.args", value.args, 1)
            self._visit_parts(f"{path}.keywords", value.keywords, 1)
        elif isinstance(value, types.FunctionType):
            self._enter_function(value)
        elif not isinstance(value, type) and callable(value):
            self._visit(Place(value, "held", None, path or "self"), value, 1)

    def _enter_function(self, function: Any) -> None:
        if not isinstance(function, types.FunctionType) or id(function) in self._seen:
            return
        self._seen.add(id(function))
        name, code = function.__name__, function.__code__
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if _is_filled(cell):
                path = f"{variable} (closure of {name})"
                self.cells.append((path, cell))
                self._visit(Place(cell, "cell", None, path), cell.cell_contents, 1)
        if not is_users_code(code):  # a wrapper of torch's around the user's function
            return
        loaded, stored = _global_names(code)
        for variable in sorted(loaded & function.__globals__.keys()):
            place = Place(function.__globals__, "item", variable, f"{variable} (global)")
            self._visit(place, function.__globals__[variable], 1)
        self.stored_globals += [(f"{v} (global)", function.__globals__, v) for v in sorted(stored)]
        if function.__defaults__:
            self._visit(Place(function, "attribute", "__defaults__", f"defaults of {name}"), function.__defaults__, 1)
        if function.__kwdefaults__:
            place = Place(function, "attribute", "__kwdefaults__", f"defaults of {name}")
            self._visit(place, function.__kwdefaults__, 1)

    def _enter_class(self, kind: type) -> None:
        """The functions of a class of the user's, which may read globals of their own."""
        for base in kind.__mro__:
            if id(base) in self._seen or base is object or _is_torchs(base):
                continue
            self._seen.add(id(base))
            for member in vars(base).values():
                inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                self._enter_function(inner)

    # ------------------------------------------------------------------------------------------- modules
    def _enter_module(self, module: nn.Module, path: str) -> None:
        for name, child in module.named_modules():
            full = ".".join(part for part in (path, name) if part)
            if id(child) in self.modules:
                continue
            self.modules[id(child)] = (full, child)
            self._enter_class(type(child))
            for table in (child._parameters, child._buffers):
                for key, tensor in list(table.items()):
                    if tensor is not None:
                        self._found(tensor, Place(table, "item", key, _join(full, key)))
            for key, value in list(vars(child).items()):
                self._visit_attribute(vars(child), key, value, _join(full, key))

    def _visit_attribute(self, table: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Attributes of modules are guarded together; what they lead to is guarded here."""
        if isinstance(value, Tensor):
            self._found(value, Place(table, "item", key, path))
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._enter_callable(value, path)
        elif not key.endswith("_hooks") and key not in _MODULE_TABLES and not is_plain(value):
            self._visit_parts(path, value, 1)

    # -------------------------------------------------------------------------------------------- values
    def _visit(self, place: Place, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self._found(value, place)
        elif is_plain(value):
            self.plain.append((place, value))
            if isinstance(value, (list, dict, set)):
                self.containers.append((place.path, value))
        elif not isinstance(value, types.ModuleType):
            self.fixed.append((place, value))
            if isinstance(value, nn.Module):
                self._enter_module(value, place.path.split(" ")[0])
            elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                self._enter_callable(value, place.path)
            elif isinstance(value, type):
                self._enter_class(value)
            else:
                self._visit_parts(place.path, value, depth + 1)

    def _visit_parts(self, path: str, value: Any, depth: int) -> None:
        """What a container or an object of the user's leads to."""
        if depth > _DEPTH or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, (list, tuple, dict)):
            if isinstance(value, (list, dict)):
                self.containers.append((path, value))
                length = Place(value, "attribute", "__len__()", f"the length of {path}")
                self.plain.append((length, len(value)))
            parts = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
            for key, item in parts[:_MOST_ITEMS]:
                self._visit(Place(value, "item", key, f"{path}[{key!r}]"), item, depth)
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not _is_torchs(type(value)):
            self._enter_class(type(value))
            self.objects.append((path, vars(value)))
            for key, item in list(vars(value).items()):
                self._visit(Place(vars(value), "item", key, f"{path}.{key}"), item, depth)

    def _found(self, tensor: Tensor, place: Place) -> None:
        self._tensors.setdefault(id(tensor), place)


_MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "builtins", "foregrad")


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


@functools.cache
def _global_names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Global names that a function and the functions inside it read, and those that they assign."""
    instructions = list(dis.get_instructions(code))
    loaded = {i.argval for i in instructions if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    stored = {i.argval for i in instructions if i.opname == "STORE_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_loaded, inner_stored = _global_names(constant)
            loaded, stored = loaded | inner_loaded, stored | inner_stored
    return loaded, stored
