"""Notice when a module that a program called is no longer what it was.

Training flag, attributes, children, hooks and the names of parameters and buffers are facts of the program. Python
numbers the versions of a dict: as long as no dict of any module has changed, little else is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .._torch import dict_version, global_module_hooks
from ..values import Remembered, is_plain, same_value

MODULE_TABLES = ("_parameters", "_buffers", "_modules")


def module_dicts(module: nn.Module) -> list[dict[Any, Any]]:
    """The dicts that make up a module: attributes, parameters, buffers, children."""
    return [vars(module), *(vars(module)[name] for name in MODULE_TABLES)]


def _hooks(module: nn.Module) -> list[Mapping[Any, Any]]:
    return [table for name, table in vars(module).items() if name.endswith("_hooks") and isinstance(table, Mapping)]


def _facts(module: nn.Module) -> list[Any]:
    """What a program may depend on. Parameters and buffers themselves are read at each call."""
    attributes: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            attributes[name] = "a tensor"
        elif name not in MODULE_TABLES and not name.endswith("_hooks"):
            attributes[name] = value if is_plain(value) and not isinstance(value, (list, dict, set)) else id(value)
    children = [(name, id(child)) for name, child in module._modules.items()]
    hooks = [[id(hook) for hook in table.values()] for table in _hooks(module)]
    state = [(name, tensor is None) for name, tensor in (*module._parameters.items(), *module._buffers.items())]
    return [attributes, children, hooks, state]


class ModuleGuard:
    """Facts about the modules that a program called, and a fast way to see that they still hold."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._types = list(map(type, modules))
        self._versions = self._versions_now()  # first: what another thread changes from now on shows
        self._facts = [_facts(module) for module in modules]
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
        if any(global_module_hooks()) or not same_value([_facts(module) for module in self._modules], self._facts):
            return False
        self._versions = versions
        return True
