"""Things of the user's that hold values, as they were before a recording: what changed since, and how to undo it."""

from __future__ import annotations

import operator
import types
from typing import Any

from ..values import is_unchanged

_ABSENT = object()


class Noted:
    """Something of the user's that holds values, as it was."""

    __slots__ = ("_within", "before", "kind", "name")

    def __init__(self, within: str, name: str, kind: str, before: dict[Any, Any]) -> None:
        self._within, self.name, self.kind, self.before = within, name, kind, before

    @property
    def path(self) -> str:
        return f"{self._within}.{self.name}" if self._within and self.name else self._within or self.name

    @property
    def assignable(self) -> dict[Any, Any] | None:
        """A dict of a module, into which a compiled call can put tensors."""
        return None

    def read(self) -> dict[Any, Any]:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def changes(self) -> dict[Any, Any]:
        """What is there now and was not before."""
        now, before = self.read(), self.before
        if now.keys() == before.keys() and all(map(operator.is_, now.values(), before.values())):
            return {}
        both = {key: (now.get(key, _ABSENT), before.get(key, _ABSENT)) for key in {**before, **now}}
        return {key: value for key, (value, old) in both.items() if not is_unchanged(value, old)}


class NotedTable(Noted):
    __slots__ = ("_table",)

    def __init__(self, within: str, name: str, kind: str, table: dict[Any, Any], before: dict[Any, Any]) -> None:
        super().__init__(within, name, kind, before)
        self._table = table

    @property
    def assignable(self) -> dict[Any, Any] | None:
        return self._table if self.kind == "module" and not self.name else None

    def read(self) -> dict[Any, Any]:
        return self._table

    def restore(self) -> None:
        table, before = self._table, self.before
        for key in table.keys() - before.keys():
            del table[key]
        table.update(before)  # another thread that looks at the table finds nothing missing
        if list(table) != list(before):
            table.clear()
            table.update(before)


class NotedList(Noted):
    __slots__ = ("_list",)

    def __init__(self, within: str, name: str, kind: str, values: list[Any]) -> None:
        super().__init__(within, name, kind, dict(enumerate(values)))
        self._list = values

    def read(self) -> dict[Any, Any]:
        return dict(enumerate(self._list))

    def restore(self) -> None:
        self._list[:] = self.before.values()


class NotedCell(Noted):
    __slots__ = ("_cell",)

    def __init__(self, path: str, cell: types.CellType) -> None:
        super().__init__(path, "", "variable", {"": cell.cell_contents})
        self._cell = cell

    def read(self) -> dict[Any, Any]:
        return {"": self._cell.cell_contents}

    def restore(self) -> None:
        self._cell.cell_contents = self.before[""]


class NotedGlobal(Noted):
    __slots__ = ("_namespace", "_variable")

    def __init__(self, path: str, namespace: dict[str, Any], variable: str) -> None:
        self._namespace, self._variable = namespace, variable
        super().__init__(path, "", "variable", self.read())

    def read(self) -> dict[Any, Any]:
        return {self._variable: self._namespace[self._variable]} if self._variable in self._namespace else {}

    def restore(self) -> None:
        self._namespace.pop(self._variable, None)
        self._namespace.update(self.before)
