"""Notice when a module that a program called is no longer what it was.

Training flag, attributes, children, hooks and the names of parameters and buffers are facts of the program. Python
numbers the versions of a dict: as long as no dict of any module has changed, little else is looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .._torch import dict_version, global_module_hooks
from ..values import Remembered, is_plain, is_unchanged
from .module_parts import ModuleParts

_ABSENT = object()


class _Facts:
    """What a program may depend on in a module. Parameters and buffers themselves are read at each call."""

    __slots__ = ("_attributes", "_children", "_hooks", "_module", "_state", "_tensors")

    def __init__(self, parts: ModuleParts) -> None:
        module = self._module = parts.module
        self._attributes = dict(vars(module))
        self._tensors = [name for name in parts.others if isinstance(self._attributes.get(name), Tensor)]
        for name in self._tensors:  # which are inputs, too
            self._attributes.pop(name, None)
        self._children = dict(module._modules)
        self._hooks = _hooks(parts)
        self._state = _state(module)

    def hold(self) -> bool:
        module, now = self._module, vars(self._module)
        if len(now) != len(self._attributes) + len(self._tensors):
            return False
        for name, before in self._attributes.items():
            value = now.get(name, _ABSENT)
            container = isinstance(before, (list, dict, set))  # whose contents are compared apart
            if value is not before if container else not is_unchanged(value, before):
                return False
        hooks = _hooks(ModuleParts("", module))
        return (
            all(isinstance(now.get(name), Tensor) for name in self._tensors)
            and same_items(module._modules, self._children)
            and len(hooks) == len(self._hooks)
            and all(map(same_items, hooks, self._hooks))
            and _state(module) == self._state
        )


def _hooks(parts: ModuleParts) -> list[dict[Any, Any]]:
    return [dict(table) for name, table, _ in parts.filled if name]


def _state(module: nn.Module) -> list[tuple[str, bool]]:
    return [(name, tensor is None) for name, tensor in (*module._parameters.items(), *module._buffers.items())]


def same_items(table: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Whether two tables hold the same objects under the same names, in the same order."""
    return [*table] == [*before] and all(map(operator.is_, table.values(), before.values()))


class ModuleGuard:
    """Facts about the modules that a program called, and a fast way to see that they still hold."""

    def __init__(self, modules: Sequence[ModuleParts]) -> None:
        self._modules = [parts.module for parts in modules]
        self._types = list(map(type, self._modules))
        self._attributes = list(map(vars, self._modules))
        self._note_tables(modules)
        self._facts = list(map(_Facts, modules))
        values = [value for parts in modules for _, value in parts.containers]
        self._containers = [(value, Remembered(value)) for value in values if is_plain(value)]

    def _note_tables(self, modules: Sequence[ModuleParts]) -> None:
        hooks = global_module_hooks()
        self._global_hooks = list(map(dict, hooks))
        filled = [(table, dict_version(table)) for table in hooks if table]
        filled += [(table, version) for parts in modules for _, table, version in parts.filled]
        self._tables, self._versions = [table for table, _ in filled], [version for _, version in filled]
        self._empty: list[dict[Any, Any] | set[Any]] = [table for table in hooks if not table]
        for parts in modules:
            self._empty += parts.empty

    def holds(self) -> bool:
        """Whether every fact is as it was."""
        for container, before in self._containers:
            if not before.equals(container):
                return False
        if list(map(type, self._modules)) != self._types:
            return False
        if not all(map(operator.is_, map(vars, self._modules), self._attributes)):
            return False
        if any(self._empty):
            return self._look_again()
        return list(map(dict_version, self._tables)) == self._versions or self._look_again()

    def _look_again(self) -> bool:
        modules = [ModuleParts("", module) for module in self._modules]
        same_hooks = all(map(same_items, global_module_hooks(), self._global_hooks))
        if not same_hooks or not all(facts.hold() for facts in self._facts):
            return False
        self._note_tables(modules)
        return True
