"""Where a program finds things by itself: closures, globals, defaults, modules, attributes.

A tensor that the program finds in one of these places is a hidden input: it is read from its place at each call. A
plain value is guarded by equality, anything else by identity. What is reached through a container or an object is
guarded as well, a few levels deep.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from ..record.lines import is_users_code
from ..values import is_plain
from .calls import in_a_library, methods_of, names_in
from .module_parts import ModuleParts
from .table_guard import SETTLED

_DEPTH = 3
_MOST_ITEMS = 4096  # of a container that is looked into


class Place(NamedTuple):
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
    """Everything that a function can reach without being given it.

    Which functions it calls is told from the names in their code: more than are called. `ran`, the code that did run by
    its id, leaves out the others.
    """

    def __init__(
        self,
        root: Callable[..., Any],
        arguments: Iterable[tuple[str, Any]] = (),
        ran: Mapping[int, types.CodeType] | None = None,
    ) -> None:
        self.plain: list[tuple[Place, Any]] = []
        self.fixed: list[tuple[Place, Any]] = []
        self.items: list[tuple[dict[Any, Any], Any, Any]] = []  # plain and fixed values in dicts
        self.whole_tables: list[dict[Any, Any]] = []  # to which nothing may be added
        self.containers: list[tuple[str, Any]] = []  # lists, dicts and sets
        self.objects: list[tuple[str, dict[str, Any]]] = []  # attributes of objects that are not modules
        self.cells: list[tuple[str, types.CellType]] = []
        self.stored_globals: list[tuple[str, dict[str, Any], str]] = []
        self.modules: dict[int, ModuleParts] = {}  # by id
        self._tensors: dict[int, Place] = {}
        self._state: dict[int, Place] = {}  # parameters and buffers of modules, once somebody asks
        self._tables: list[
            tuple[str, dict[str, Any], list[tuple[str, int]]]
        ] = []  # those that are not in it yet, by id
        self._seen: set[int] = set()
        self._ran = ran
        self._names: set[str] = {"forward"}  # that the program may look up in an object
        self._unnamed: dict[str, list[Any]] = {}  # members of classes that no function has named yet
        self._functions: list[types.FunctionType] = []  # still to be looked at
        self._seen_classes: set[tuple[int, bool]] = set()
        self._seen_globals: dict[int, set[str]] = {}  # by the id of a namespace
        self._enter_callable(root, "")
        for path, value in arguments:  # guarded as arguments; here for what is reached through them
            if isinstance(value, (nn.Module, types.FunctionType, types.MethodType, functools.partial)):
                self._enter_callable(value, path)
            elif not isinstance(value, Tensor) and not is_plain(value):
                self._visit_parts(path, value, 1)
        self._look_at_functions()

    def place_of(self, tensor: Tensor) -> Place:
        """Where a tensor was found; one that is nowhere to be found is held as it is."""
        found = self._known_place(tensor)
        if found is None:  # a method was called by a name that stands nowhere
            for member in itertools.chain.from_iterable(self._unnamed.values()):
                self._enter_function(member)
            self._unnamed.clear()
            self._look_at_functions()
            found = self._known_place(tensor)
        return found or Place(tensor, "held", None, f"a tensor of shape {tuple(tensor.shape)}")

    def _known_place(self, tensor: Tensor) -> Place | None:
        """A parameter or buffer belongs to its module, wherever else it is held."""
        for path, table, before in self._tables:  # as they were found: the program may have exchanged them since
            for key, identity in before:
                self._state.setdefault(identity, Place(table, "item", key, _join(path, key)))
        self._tables.clear()
        return self._state.get(id(tensor)) or self._tensors.get(id(tensor))

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
        if self._ran is None or id(function.__code__) in self._ran:
            self._seen.add(id(function))
            self._functions.append(function)

    def _look_at_functions(self) -> None:
        while self._functions:
            self._look_at(self._functions.pop())

    def _look_at(self, function: types.FunctionType) -> None:
        name, code = function.__name__, function.__code__
        if function.__closure__:
            for variable, cell in zip(code.co_freevars, function.__closure__, strict=True):
                if _is_filled(cell):
                    path = f"{variable} (closure of {name})"
                    self.cells.append((path, cell))
                    self._visit(Place(cell, "cell", None, path), cell.cell_contents, 1)
        if not is_users_code(code) or in_a_library(function.__module__):  # a wrapper around the user's function
            return
        names = names_in(code)
        self._look_at_globals(function.__globals__, names.loaded)
        if names.stored:
            self.stored_globals += [(f"{v} (global)", function.__globals__, v) for v in sorted(names.stored)]
        if function.__defaults__ and not SETTLED.issuperset(map(type, function.__defaults__)):
            self._visit_parts(f"defaults of {name}", function.__defaults__, 1)
        if function.__kwdefaults__:
            self._visit_parts(f"defaults of {name}", function.__kwdefaults__, 1)
        new = names.attributes - self._names
        self._names |= new
        for attribute in new & self._unnamed.keys():
            for member in self._unnamed.pop(attribute):
                self._enter_function(member)

    def _look_at_globals(self, namespace: dict[str, Any], names: frozenset[str]) -> None:
        seen = self._seen_globals.setdefault(id(namespace), set())
        for name in sorted(names - seen):
            value = namespace.get(name)
            kind: type = type(value)
            if kind is types.FunctionType or (kind in SETTLED and name in namespace):
                self.items.append((namespace, name, value))
                self._enter_function(value)
            elif kind not in SETTLED and kind is not types.ModuleType:
                self._visit(Place(namespace, "item", name, f"{name} (global)"), value, 1)
        seen |= names

    def _enter_class(self, kind: type, called: bool = False) -> None:
        """The functions of a class of the user's that the program may come to call, which read globals of their own.

        A method is called by its name, which stands in the function that calls it, or by Python and torch, which know
        it from a class of their own. Making an object calls more of them.
        """
        for base in kind.__mro__:
            if in_a_library(base.__module__) or (id(base), called) in self._seen_classes:
                continue
            self._seen_classes.add((id(base), called))
            for name, function, use in methods_of(base):
                if use == "by others" or name in self._names or (use == "to make one" and called):
                    self._enter_function(function)
                elif use == "by name":
                    self._unnamed.setdefault(name, []).append(function)

    # ------------------------------------------------------------------------------------------- modules
    def _enter_module(self, module: nn.Module, path: str) -> None:
        for name, child in module.named_modules():
            full = ".".join(part for part in (path, name) if part)
            if id(child) in self.modules:
                continue
            parts = self.modules[id(child)] = ModuleParts(full, child)
            self._enter_class(type(child))
            for table in (child._parameters, child._buffers):
                if table:
                    self._tables.append((full, table, [(key, id(tensor)) for key, tensor in table.items()]))
            others = [(key, vars(child).get(key)) for key in parts.others]
            for key, value in (*parts.containers, *others):
                self._visit_attribute(vars(child), key, value, _join(full, key))

    def _visit_attribute(self, table: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Attributes of modules are guarded together; what they lead to is guarded here."""
        if isinstance(value, Tensor):
            self._found(value, Place(table, "item", key, path))
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._enter_callable(value, path)
        elif not is_plain(value):
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
            if isinstance(place.owner, dict):
                self.items.append((place.owner, place.key, value))
            elif not isinstance(place.owner, tuple):
                self.fixed.append((place, value))
            if isinstance(value, nn.Module):
                self._enter_module(value, place.path.split(" ")[0])
            elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                self._enter_callable(value, place.path)
            elif isinstance(value, type):
                self._enter_class(value, called=True)
            else:
                self._visit_parts(place.path, value, depth + 1)

    def _visit_parts(self, path: str, value: Any, depth: int) -> None:
        """What a container or an object of the user's leads to."""
        if depth > _DEPTH or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            self.containers.append((path, value))
            self.whole_tables.append(value)
            self._visit_items(path, value, dict.items(value), depth)  # as it is, whatever a subclass shows
        elif isinstance(value, (list, tuple)):
            if isinstance(value, list):
                self.containers.append((path, value))
                length = Place(value, "attribute", "__len__()", f"the length of {path}")
                self.plain.append((length, len(value)))
            self._visit_items(path, value, enumerate(value), depth)
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not in_a_library(type(value).__module__):
            self._enter_class(type(value))
            self.objects.append((path, vars(value)))
            self._visit_items(path, vars(value), vars(value).items(), depth, attributes=True)

    def _visit_items(
        self, path: str, owner: Any, items: Iterable[tuple[Any, Any]], depth: int, attributes: bool = False
    ) -> None:
        for key, item in itertools.islice(list(items), _MOST_ITEMS):
            if type(item) not in SETTLED:
                full = f"{path}.{key}" if attributes else f"{path}[{key!r}]"
                self._visit(Place(owner, "item", key, full), item, depth)
            elif isinstance(owner, dict):
                self.items.append((owner, key, item))
            elif isinstance(owner, list):  # no other value can come to its place in a tuple
                self.plain.append((Place(owner, "item", key, f"{path}[{key!r}]"), item))

    def _found(self, tensor: Tensor, place: Place) -> None:
        self._tensors.setdefault(id(tensor), place)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
