"""Writes the run-time code of a program.

Values have slots; the writer knows the variable that holds each. Objects that the code needs (compiled graphs,
dtypes, helper functions) are bound to names in its namespace. The text is kept: what it says is exactly what runs.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import keyword
import linecache
import re
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..slots import Slot
from .rows import Item, Row, spread

_NO_WORD = re.compile(r"\W+")
_BUILTINS = vars(builtins)
_MOST_BEFORE_A_STAR = 255


class Writer:
    """Lines of Python, with a name for each value."""

    def __init__(self, title: str) -> None:
        self.namespace: dict[str, Any] = {}
        self.variables: dict[Any, str] = {}
        self._title = title
        self._lines: list[str] = []
        self._indent = 0
        self._taken: set[str] = set(dir(builtins))  # which the code uses by their names
        self._counts: dict[str, int] = {}
        self._bound: dict[int, str] = {}
        self._rows: dict[Any, Item] = {}
        self._if_read: dict[int, list[tuple[Any, str, int]]] = {}  # slots that get a variable only if somebody asks

    def line(self, text: str = "") -> None:
        """Write one line at the current depth."""
        self._lines.append("    " * self._indent + text if text else "")

    def line_if_read(self, slot: Slot, text: str) -> None:
        """A line that gives a slot its variable; it stands there only if that variable is asked for."""
        self._if_read.setdefault(len(self._lines), []).append((slot, text, self._indent))

    def row(self, slots: Sequence[Slot], hint: str, text: str) -> None:
        """A line that gives many slots one variable; those that are asked for get their own behind it."""
        row = Row(self.fresh(hint), len(slots))
        self.line(f"{row.name} = {text}")
        for slot, item in zip(slots, row.items(), strict=True):
            self._rows[slot] = item
            self.line_if_read(slot, str(item))

    def listed(self, slots: Iterable[Slot]) -> list[str]:
        """Text for the values of slots in a call or a list."""
        variables, rows = self.variables, self._rows
        return spread([variables.get(slot) or rows.get(slot) or self.variable(slot) for slot in slots])

    def take_apart(self, names: Sequence[str], text: str) -> None:
        """Lines that give the values of a sequence their names, of which one may be starred.

        Python allows 255 names before that one; where there are more, the sequence is cut into slices.
        """
        star = next((i for i, name in enumerate(names) if name.startswith("*")), 0)
        if star <= _MOST_BEFORE_A_STAR:
            self.line(f"{unpack(names)} = {text}")
            return
        whole, behind = self.fresh("values"), names[star + 1 :]
        end = f"len({whole}) - {len(behind)}" if behind else ""
        self.line(f"{whole} = [*{text}]")
        self.line(f"{unpack(names[:star])} = {whole}[:{star}]")
        self.line(f"{names[star].removeprefix('*')} = {whole}[{star}:{end}]")
        if behind:
            self.line(f"{unpack(behind)} = {whole}[-{len(behind)}:]")
        self.line(f"del {whole}")

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Write a line that opens a block, and indent what follows."""
        self.line(head)
        self._indent += 1
        yield
        self._indent -= 1

    def fresh(self, hint: str) -> str:
        """A name that nothing else has."""
        stem = _stem(hint)
        name, n = stem, self._counts.get(stem, 1)
        while name in self._taken:
            n += 1
            name = f"{stem}_{n}"
        self._counts[stem] = n
        self._taken.add(name)
        return name

    def bind(self, value: Any, hint: str) -> str:
        """A name in the namespace for an object; built-in ones have theirs."""
        name = self._bound.get(id(value))
        if name is None:
            if _BUILTINS.get(hint) is value:
                return hint
            name = self._bound[id(value)] = self.fresh(hint)
            self.namespace[name] = value
        return name

    def rebind(self, name: str, value: Any) -> None:
        """Give a name of the namespace another object: code that runs later sees it."""
        self.namespace[name] = value

    def variable(self, slot: Slot) -> str:
        """The variable of a slot, named after it when it is first asked for."""
        name = self.variables.get(slot)
        if name is None:
            name = self.variables[slot] = self.fresh(str(slot))
        return name

    @property
    def source(self) -> str:
        """The text so far."""
        lines = [f'"""{self._title}"""']
        done = 0
        for place, readable in self._if_read.items():
            lines += self._lines[done:place]
            lines += [
                f"{'    ' * indent}{self.variables[slot]} = {text}"
                for slot, text, indent in readable
                if slot in self.variables
            ]
            done = place
        return "\n".join([*lines, *self._lines[done:]]) + "\n"

    def run(self, filename: str) -> None:
        """Execute the text; its functions land in the namespace. Tracebacks show its lines."""
        exec(_compiled(self.source, filename), self.namespace)


@functools.lru_cache(maxsize=8192)
def _stem(hint: str) -> str:
    """What a name begins with: the hint, as far as Python allows it."""
    stem = _NO_WORD.sub("_", hint).strip("_") or "value"
    return f"_{stem}" if stem[0].isdigit() or keyword.iskeyword(stem) else stem


_codes: OrderedDict[str, types.CodeType] = OrderedDict()  # by text: a program that is captured again has the same
_MOST_CODES = 256


def _compiled(source: str, filename: str) -> types.CodeType:
    code = _codes.get(source)
    if code is None:
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        code = _codes[source] = compile(source, filename, "exec")
        if len(_codes) > _MOST_CODES:
            _codes.popitem(last=False)
    return code


def tuple_of(names: list[str]) -> str:
    """A Python tuple of these names."""
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"


def unpack(names: Sequence[str]) -> str:
    """The left side of an assignment that takes a sequence apart."""
    return f"{names[0]}," if len(names) == 1 else ", ".join(names)
