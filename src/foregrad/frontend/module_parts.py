"""A module taken apart in one look, for everybody who asks about modules while a program is captured."""

from __future__ import annotations

from typing import Any

from torch import nn

from .._torch import dict_version
from ..values import PLAIN

MODULE_TABLES = ("_parameters", "_buffers", "_modules")


class ModuleParts:
    """What of a module can change by itself: its dicts, with their versions, and whatever its attributes lead to."""

    __slots__ = ("containers", "hooks", "module", "others", "path", "tables")

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        attributes = vars(module)
        # Versions come first: what another thread changes from then on shows.
        self.tables: list[tuple[dict[Any, Any], int]] = [(attributes, dict_version(attributes))]
        self.hooks: list[tuple[str, dict[Any, Any], int]] = []
        self.containers: list[tuple[str, list[Any] | dict[Any, Any] | set[Any]]] = []
        self.others: list[tuple[str, Any]] = []  # neither plain values nor containers
        for name, value in list(attributes.items()):
            if type(value) in PLAIN:
                continue
            if name in MODULE_TABLES:
                self.tables.append((value, dict_version(value)))
            elif not isinstance(value, (list, dict, set)):
                self.others.append((name, value))
            elif "_hooks" in name and isinstance(value, dict):
                self.hooks.append((name, value, dict_version(value)))
            else:
                self.containers.append((name, value))

    @property
    def versions(self) -> list[tuple[dict[Any, Any], int]]:
        """Dicts whose versions tell that nothing has changed."""
        return [*self.tables, *((table, version) for _, table, version in self.hooks)]
