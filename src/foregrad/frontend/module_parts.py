"""A module taken apart in one look, for everybody who asks about modules while a program is captured."""

from __future__ import annotations

from typing import Any

from torch import nn

from .._torch import dict_version
from ..values import PLAIN

MODULE_TABLES = ("_parameters", "_buffers", "_modules")


class ModuleParts:
    """What of a module can change by itself: the dicts that it is made of, and whatever its attributes lead to.

    Dicts have the name of the attribute that holds them, and none if assigning to an attribute of the module changes
    them: its own dict, and those of its parameters, buffers and children.
    """

    __slots__ = ("containers", "empty", "filled", "module", "others", "path")

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
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
            if kind is not dict and not isinstance(value, (list, dict, set)):
                self.others.append(name)
            elif (kind is dict or isinstance(value, dict)) and (name in MODULE_TABLES or "_hooks" in name):
                if value:
                    self.filled.append((_shown(name), value, dict_version(value)))
                else:
                    self.empty.append(value)
            elif name == "_non_persistent_buffers_set" and not value:
                self.empty.append(value)
            else:
                self.containers.append((name, value))

    def name_of(self, table: dict[Any, Any] | set[Any]) -> str:
        """The name of a container that was empty."""
        return next((_shown(name) for name, value in vars(self.module).items() if value is table), "")


def _shown(name: str) -> str:
    return "" if name in MODULE_TABLES else name
