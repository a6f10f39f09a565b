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
from collections.abc import Iterator
from typing import Any

from ..slots import Slot

_NO_WORD = re.compile(r"\W+")
_BUILTINS = vars(builtins)


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
        self._reads: dict[int, Any] = {}  # slots of lines that stand only if somebody reads the variable, by line
        self._unread: set[Any] = set()

    def line(self, text: str = "") -> None:
        """Write one line at the current depth."""
        self._lines.append("    " * self._indent + text if text else "")

    def line_if_read(self, slot: Slot, text: str) -> None:
        """A line that gives a slot its variable; it stands there only if that variable is asked for afterwards."""
        name = self.variable(slot)
        self._unread.add(slot)
        self._reads[len(self._lines)] = slot
        self.line(f"{name} = {text}")

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
        if self._unread:
            self._unread.discard(slot)
        name = self.variables.get(slot)
        if name is None:
            name = self.variables[slot] = self.fresh(str(slot))
        return name

    @property
    def source(self) -> str:
        """The text so far."""
        lines = self._lines
        if self._unread:
            lines = [line for i, line in enumerate(lines) if self._reads.get(i) not in self._unread]
        return "\n".join([f'"""{self._title}"""', *lines]) + "\n"

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


def unpack(names: list[str]) -> str:
    """The left side of an assignment that takes a sequence apart."""
    return f"{names[0]}," if len(names) == 1 else ", ".join(names)
