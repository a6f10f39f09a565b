"""Notice when a dict that a program reads is no longer what it was: namespaces, attributes of objects, containers.

Python numbers the versions of a dict: as long as none has changed, its items are not looked at. A namespace of a large
library costs one comparison at each call, however many of its names a program may read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._torch import dict_version
from ..values import is_unchanged

_ABSENT = object()
SETTLED = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Plain values that cannot change as long as they stay where they are."""


class TableGuard:
    """Items of dicts as they were while recording: plain values by equality, anything else by identity."""

    def __init__(self, items: Iterable[tuple[dict[Any, Any], Any, Any]], lengths: Iterable[dict[Any, Any]]) -> None:
        found: dict[int, _Table] = {}
        for table, key, value in items:
            found.setdefault(id(table), _Table(table)).items[key] = value
        for table in lengths:
            found.setdefault(id(table), _Table(table)).length = len(table)
        self._tables = list(found.values())

    def holds(self) -> bool:
        """Whether every item is as it was."""
        return all(table.version == dict_version(table.table) or table.look() for table in self._tables)


class _Table:
    __slots__ = ("items", "length", "table", "version")

    def __init__(self, table: dict[Any, Any]) -> None:
        self.table = table
        self.items: dict[Any, Any] = {}
        self.length: int | None = None
        self.version: int | None = None  # not looked at yet

    def look(self) -> bool:
        version = dict_version(self.table)  # first: what another thread changes from now on shows
        if self.length is not None and len(self.table) != self.length:
            return False
        for key, before in self.items.items():
            if not is_unchanged(dict.get(self.table, key, _ABSENT), before):
                return False
        self.version = version
        return True
