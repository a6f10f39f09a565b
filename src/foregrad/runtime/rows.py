"""Many values of generated code as one list: Python compiles a line of hundreds of names for longer than it runs it.

A model of 48 layers has 600 parameters and saves 1,200 tensors. Few values have a name each, which is easier to read
and quicker to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FEW = 16


class Row(NamedTuple):
    """A variable that holds several values."""

    name: str
    size: int

    def items(self) -> list[Item]:
        """The values in it."""
        return [Item(self, i) for i in range(self.size)]


class Item(NamedTuple):
    """One value of a row."""

    row: Row
    position: int

    def __str__(self) -> str:
        return f"{self.row.name}[{self.position}]"


Value = Item | str  # of generated code: in a row, or any other text


def few_or_row(letter: str, name: str, count: int) -> tuple[list[str], Sequence[Value]]:
    """Names to bind values to, and how each of the values is read: a few have names of their own.

    >>> few_or_row("s", "saved", 2)
    (['s0', 's1'], ['s0', 's1'])
    >>> names, values = few_or_row("s", "saved", 600)
    >>> names, str(values[599])
    (['*saved'], 'saved[599]')
    """
    if count > FEW:
        return [f"*{name}"], Row(name, count).items()
    names = [f"{letter}{n}" for n in range(count)]
    return names, names


def spread(values: Sequence[Value]) -> list[str]:
    """Text for values in a call or a list: many that lie side by side in a row are taken together.

    >>> state = Row("state", 100).items()
    >>> spread(["x", *state]), spread([*state[:50], state[99], "x"])
    (['x', '*state'], ['*state[0:50]', 'state[99]', 'x'])
    """
    parts: list[str] = []
    start = 0
    while start < len(values):
        first, end = values[start], start + 1
        if isinstance(first, Item):
            row, index = first
            while end < len(values) and _follows(values[end], row, index + end - start):
                end += 1
            if end - start > FEW:
                whole = end - start == row.size
                parts.append(f"*{row.name}" if whole else f"*{row.name}[{index}:{index + end - start}]")
                start = end
                continue
            end = start + 1
        parts.append(str(first))
        start = end
    return parts


def _follows(value: Value, row: Row, position: int) -> bool:
    return isinstance(value, Item) and value.position == position and value.row is row
