"""Notice when a module that a program called is no longer what it was.

Training flag, attributes, children, hooks and the names of parameters and buffers are facts of the program. Python
numbers the versions of a dict: as long as no dict of any module has changed, little else is looked at.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .._torch import dict_version, global_module_hooks
from ..values import PLAIN, Change, Remembered, are_settled, is_plain, shown
from .forward import OWN_HOOKS
from .kinds import Lifetime
from .state_guards import ABSENT, change_in, change_in_items, note, still

_OF_ANY_MODULE = frozenset(vars(nn.Module()))
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_DICTS = (dict, OrderedDict)  # nearly all that a module is made of


class ModuleParts:
    """What of a module can change by itself: the dicts that it is made of, and whatever its attributes lead to.

    Dicts have the name of the attribute that holds them, and none if assigning to an attribute of the module changes
    them: its own dict, and those of its parameters, buffers and children.
    """

    __slots__ = ("containers", "empty", "filled", "module", "others", "own_hooks", "path", "read")

    def __init__(
        self, path: str, module: nn.Module, own_hooks: bool = True, read: Container[str] | None = None
    ) -> None:
        self.path = path
        self.module = module
        self.own_hooks = own_hooks  # whether the program calls them
        self.read = read  # names of attributes that the program reads; None if it may be any
        attributes = vars(module)
        # Versions come first: what another thread changes from then on shows.
        self.filled: list[tuple[str, dict[Any, Any], int]] = [("", attributes, dict_version(attributes))]
        self.empty: list[dict[Any, Any] | set[Any]] = []  # of what torch keeps in a module, most: hooks nearly always
        self.containers: list[tuple[str, list[Any] | dict[Any, Any] | set[Any]]] = []  # of the user's own
        self.others: list[str] = []  # names of what is neither plain nor a container: nothing here keeps a tensor alive
        for name, value in list(attributes.items()):
            kind = type(value)
            if kind in PLAIN:
                continue
            is_dict = kind in _DICTS or isinstance(value, dict)
            if not is_dict and not isinstance(value, (list, set)):
                self.others.append(name)
            elif is_dict and (name in MODULE_TABLES or "_hooks" in name):
                if value:
                    self.filled.append((_shown(name), value, dict_version(value)))
                else:
                    self.empty.append(value)
            elif name == "_non_persistent_buffers_set" and not value:
                self.empty.append(value)
            else:
                self.containers.append((name, value))

    def counts(self, name: str) -> bool:
        """Whether a program may depend on an attribute."""
        return self.read is None or name in self.read or name in _OF_ANY_MODULE

    def called_hooks(self) -> list[dict[Any, Any]]:
        """Hooks that the program may call."""
        return [table for name, table, _ in self.filled if name and (self.own_hooks or name not in OWN_HOOKS)]

    def compared(self) -> tuple[list[tuple[dict[Any, Any], int]], list[dict[Any, Any] | set[Any]]]:
        """The dicts that a program depends on, with their versions, and the empty ones."""
        filled = [(table, version) for _, table, version in self.filled]
        if self.own_hooks:
            return filled, self.empty
        apart = {id(vars(self.module).get(name)) for name in OWN_HOOKS}
        return [one for one in filled if id(one[0]) not in apart], [t for t in self.empty if id(t) not in apart]

    def name_of(self, table: dict[Any, Any] | set[Any]) -> str:
        """The name of a container that was empty."""
        return next((_shown(name) for name, value in vars(self.module).items() if value is table), "")


def _shown(name: str) -> str:
    return "" if name in MODULE_TABLES else name


class _Facts:
    """What a program may depend on in a module. Parameters and buffers themselves are read at each call."""

    __slots__ = ("_attributes", "_children", "_containers", "_hooks", "_state", "_tensors")

    def __init__(self, parts: ModuleParts, lifetime: Lifetime) -> None:
        module = parts.module
        self._tensors: list[str] = []  # which are inputs, too
        self._containers: dict[str, Any] = {}  # whose contents are compared apart
        self._attributes: dict[str, Any] = {}
        attributes = vars(module)
        counted = attributes if parts.read is None else filter(parts.counts, attributes)
        for name in counted:
            value = attributes[name]
            kind = type(value)
            if kind in PLAIN:
                self._attributes[name] = value
            elif kind in _DICTS or isinstance(value, (list, dict, set)):
                self._containers[name] = value
            elif isinstance(value, Tensor):
                self._tensors.append(name)
            else:
                self._attributes[name] = note(value, lifetime)
        self._children = noted_items(module._modules, lifetime)
        self._hooks = [noted_items(table, lifetime) for table in parts.called_hooks()]
        self._state = _state(module)

    def hold(self, parts: ModuleParts) -> bool:
        """Whether the module is as it was, taken apart anew."""
        module = parts.module
        now = vars(module)
        count = len(now) if parts.read is None else sum(map(parts.counts, now))
        if count != len(self._attributes) + len(self._containers) + len(self._tensors):
            return False
        hooks = parts.called_hooks()
        return (
            all(now.get(name) is before for name, before in self._containers.items())
            and all(still(now.get(name, ABSENT), before) for name, before in self._attributes.items())
            and all(isinstance(now.get(name), Tensor) for name in self._tensors)
            and still_holds(module._modules, self._children)
            and len(hooks) == len(self._hooks)
            and all(map(still_holds, hooks, self._hooks))
            and _state(module) == self._state
        )

    def change(self, parts: ModuleParts, path: str) -> Change | None:
        """The first fact that is not as it was."""
        module, now = parts.module, vars(parts.module)
        known = {**self._attributes, **self._containers, **dict.fromkeys(self._tensors)}
        for name in filter(parts.counts, now.keys() - known.keys()):
            return change_in(f"{path}.{name}", now[name], ABSENT)
        for name, before in self._attributes.items():
            if not still(now.get(name, ABSENT), before):
                return change_in(f"{path}.{name}", now.get(name, ABSENT), before)
        for name, before in self._containers.items():
            if now.get(name) is not before:
                return Change(f"{path}.{name}", f"another {type(before).__name__}", shown(now.get(name)))
        for name in self._tensors:
            if not isinstance(now.get(name), Tensor):
                return Change(f"{path}.{name}", "a tensor", shown(now.get(name)))
        return self._change_in_tables(parts, path) or _change_of_state(f"{path}.", _state(module), self._state)

    def _change_in_tables(self, parts: ModuleParts, path: str) -> Change | None:
        change = change_in_items(parts.module._modules, self._children, None, attribute=True)
        if change is not None:
            return replace(change, path=f"{path}{change.path}")
        hooks, before = parts.called_hooks(), self._hooks
        if len(hooks) == len(before) and all(map(still_holds, hooks, before)):
            return None
        was, now = sum(map(len, before)), sum(map(len, hooks))
        return Change(f"{path}, its hooks,", f"{was} functions", f"{'' if was != now else 'as many '}{now} functions")


def _change_of_state(path: str, now: list[tuple[str, bool]], before: list[tuple[str, bool]]) -> Change | None:
    words = {True: "None", False: "a tensor"}
    for name in [name for name, _ in (*before, *now)]:
        was, found = dict(before).get(name), dict(now).get(name)
        if was is not found:
            return Change(f"{path}{name}", words.get(was, "absent"), words.get(found, "absent"))  # type: ignore[arg-type]
    return (
        None if now == before else Change(f"{path.removesuffix('.')}, its tensors,", "in another order", "in this one")
    )


def _state(module: nn.Module) -> list[tuple[str, bool]]:
    return [(name, tensor is None) for name, tensor in (*module._parameters.items(), *module._buffers.items())]


def _containers_in(parts: ModuleParts) -> Iterator[tuple[str, Any]]:
    """Attributes whose contents may change while they stay the same objects, as a list in a tuple does."""
    yield from (named for named in parts.containers if parts.counts(named[0]))
    for name in filter(parts.counts, parts.others):
        value = vars(parts.module).get(name)
        if type(value) is tuple and not are_settled(value):
            yield name, value


def noted_items(table: Mapping[Any, Any], lifetime: Lifetime) -> dict[Any, Any]:
    """What is kept of a table of modules or hooks."""
    return {name: note(value, lifetime) for name, value in table.items()}


def still_holds(table: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Whether a table holds the same objects under the same names, in the same order."""
    return [*table] == [*before] and all(map(still, table.values(), before.values()))


class ModuleGuard:
    """What a program relies on in the modules that it called, and a fast way to see that it still holds."""

    def __init__(self, modules: Sequence[ModuleParts], lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        for parts in modules:
            lifetime.hold(type(parts.module))
        self._modules = [lifetime.hold(parts.module) for parts in modules]
        self._as_taken = [(parts.own_hooks, parts.read) for parts in modules]
        self._types = [id(type(parts.module)) for parts in modules]
        self._attributes = [vars(parts.module) for parts in modules]
        self._tables: list[dict[Any, Any]] = []
        self._versions: list[int] = []
        self._empty: list[dict[Any, Any] | set[Any]] = []
        self._global_hooks: list[dict[Any, Any]] = []
        self._note_tables(modules)
        self._facts = [_Facts(parts, lifetime) for parts in modules]
        values = [(parts.path, *named) for parts in modules for named in _containers_in(parts)]
        self._containers = [(value, Remembered(value)) for _, _, value in values if is_plain(value)]
        self._places = [(path, name) for path, name, value in values if is_plain(value)]
        self._paths = [parts.path for parts in modules]
        lifetime.when_gone(self._release)

    def _release(self) -> None:
        self._modules, self._attributes, self._facts, self._containers = [], [], [], []
        self._tables, self._empty, self._global_hooks = [], [], []

    def _note_tables(self, modules: Sequence[ModuleParts]) -> None:
        hooks = global_module_hooks()
        self._global_hooks = [noted_items(table, self._lifetime) for table in hooks]
        filled = [(table, dict_version(table)) for table in hooks if table]
        self._empty = [table for table in hooks if not table]
        for parts in modules:
            own, empty = parts.compared()
            filled += own
            self._empty += empty
        self._tables, self._versions = [table for table, _ in filled], [version for _, version in filled]

    def holds(self) -> bool:
        """Whether every fact is as it was."""
        if self._lifetime.is_gone:
            return False
        for container, before in self._containers:
            if not before.equals(container):
                return False
        modules = list(map(operator.call, self._modules))
        if list(map(id, map(type, modules))) != self._types:
            return False
        if not all(map(operator.is_, map(vars, modules), self._attributes)):
            return False
        if any(self._empty):
            return self._look_again()
        return list(map(dict_version, self._tables)) == self._versions or self._look_again()

    def explain(self) -> Change | None:
        """The first fact that is not as it was, by the same comparisons."""
        if self._lifetime.is_gone:
            return Change("a module that the program depends on", "there", "gone")
        modules = list(map(operator.call, self._modules))
        children = {
            path
            for found, root in zip(modules, self._paths, strict=True)
            if not root
            for path, _ in found.named_modules()
        }

        def below(path: str, name: str = "") -> str:
            return ".".join(part for part in ("self" if path in children else "", path, name) if part)

        for place, (container, before) in zip(self._places, self._containers, strict=True):
            if not before.equals(container):
                return replace(before.explain(container), path=below(*place))
        for path, module, kind, table in zip(self._paths, modules, self._types, self._attributes, strict=True):
            if id(type(module)) != kind:
                return Change(f"{below(path)}, its class,", "another one", shown(type(module)))
            if vars(module) is not table:
                return Change(below(path, "__dict__"), "another dict", "a dict")
        if not all(map(still_holds, global_module_hooks(), self._global_hooks)):
            return Change("hooks of all modules", "others", f"{sum(map(len, global_module_hooks()))}")
        found = zip(self._paths, modules, self._as_taken, strict=True)
        parts = [ModuleParts(path, module, *how) for path, module, how in found]
        changes = (facts.change(one, below(one.path)) for facts, one in zip(self._facts, parts, strict=True))
        return next((change for change in changes if change is not None), None)

    def _look_again(self) -> bool:
        modules = [ModuleParts("", find(), *how) for find, how in zip(self._modules, self._as_taken, strict=True)]
        same_hooks = all(map(still_holds, global_module_hooks(), self._global_hooks))
        if not same_hooks or not all(map(_Facts.hold, self._facts, modules)):
            return False
        self._note_tables(modules)
        return True
