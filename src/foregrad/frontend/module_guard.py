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

_ABSENT = object()
MODULE_TABLES = ("_parameters", "_buffers", "_modules")


def module_dicts(module: nn.Module) -> list[dict[Any, Any]]:
    """The dicts that make up a module: attributes, parameters, buffers, children."""
    return [vars(module), *(vars(module)[name] for name in MODULE_TABLES)]


def _hooks(module: nn.Module) -> list[Mapping[Any, Any]]:
    return [table for name, table in vars(module).items() if name.endswith("_hooks") and isinstance(table, Mapping)]


class _Facts:
    """What a program may depend on in a module. Parameters and buffers themselves are read at each call."""

    __slots__ = ("_attributes", "_children", "_hooks", "_module", "_state", "_tensors")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._tensors = {name for name, value in self._attributes.items() if isinstance(value, Tensor)}
        for name in self._tensors:  # which are inputs, too
            del self._attributes[name]
        self._children = dict(module._modules)
        self._hooks = [dict(table) for table in _hooks(module) if table]
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
        hooks = [dict(table) for table in _hooks(module) if table]
        return (
            all(isinstance(now.get(name), Tensor) for name in self._tensors)
            and same_items(module._modules, self._children)
            and len(hooks) == len(self._hooks)
            and all(map(same_items, hooks, self._hooks))
            and _state(module) == self._state
        )


def _state(module: nn.Module) -> list[tuple[str, bool]]:
    return [(name, tensor is None) for name, tensor in (*module._parameters.items(), *module._buffers.items())]


def same_items(table: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Whether two tables hold the same objects under the same names, in the same order."""
    return [*table] == [*before] and all(map(operator.is_, table.values(), before.values()))


class ModuleGuard:
    """Facts about the modules that a program called, and a fast way to see that they still hold."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._types = list(map(type, modules))
        self._versions = self._versions_now()  # first: what another thread changes from now on shows
        self._facts = [_Facts(module) for module in modules]
        self._containers = [
            (value, Remembered(value))
            for module in modules
            for value in vars(module).values()
            if isinstance(value, (list, dict, set)) and value and is_plain(value)
        ]

    def _versions_now(self) -> list[tuple[Any, int]]:
        tables = [table for module in self._modules for table in (*module_dicts(module), *_hooks(module))]
        return [(table, dict_version(table)) for table in (*tables, *global_module_hooks())]

    def holds(self) -> bool:
        """Whether every fact is as it was."""
        for container, before in self._containers:
            if not before.equals(container):
                return False
        if list(map(type, self._modules)) != self._types:
            return False
        for table, version in self._versions:
            if dict_version(table) != version:
                return self._look_again()
        return True

    def _look_again(self) -> bool:
        versions = self._versions_now()
        if any(global_module_hooks()) or not all(facts.hold() for facts in self._facts):
            return False
        self._versions = versions
        return True
