"""Write the Python source of a call: lines, literals, packed arguments, and the stages that lines come from."""

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
from typing import Any, NamedTuple

import torch

from .._torch import OpOverload, leave_untraced
from ..slots import Slot

# ---------------------------------------------------------------------------------------------------------------------
# Many values of generated code as one list: Python compiles a line of hundreds of names for longer than it runs it.
#
# A model of 48 layers has 600 parameters and saves 1,200 tensors. Few values have a name each, which is easier to read
# and quicker to run.
FEW = 16


class PackedArgs(NamedTuple):
    """A variable that holds several values."""

    name: str
    size: int

    def items(self) -> list[Item]:
        """The values in it."""
        return [Item(self, i) for i in range(self.size)]


class Item(NamedTuple):
    """One value of a row."""

    row: PackedArgs
    position: int

    def __str__(self) -> str:
        return f"{self.row.name}[{self.position}]"


Value = Item | str  # of generated code: in a row, or any other text


def pack_if_many(letter: str, name: str, count: int) -> tuple[list[str], Sequence[Value]]:
    """Names to bind values to, and how each of the values is read: a few have names of their own.

    >>> pack_if_many("s", "saved", 2)
    (['s0', 's1'], ['s0', 's1'])
    >>> names, values = pack_if_many("s", "saved", 600)
    >>> names, str(values[599])
    (['*saved'], 'saved[599]')
    """
    if count > FEW:
        return [f"*{name}"], PackedArgs(name, count).items()
    names = [f"{letter}{n}" for n in range(count)]
    return names, names


def spread(values: Sequence[Value]) -> list[str]:
    """Text for values in a call or a list: many that lie side by side in a row are taken together.

    >>> state = PackedArgs("state", 100).items()
    >>> spread(["x", *state]), spread([*state[:50], state[99], "x"])
    (['x', '*state'], ['*state[0:50]', 'state[99]', 'x'])
    """
    parts: list[str] = []
    start = 0
    while start < len(values):
        first, end = values[start], start + 1
        if isinstance(first, Item):
            row, index = first
            while end < len(values) and values[end] == (row, index + end - start):
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


# ---------------------------------------------------------------------------------------------------------------------
# Writes the run-time code of a program.
#
# Values have slots; the writer knows the variable that holds each. Objects that the code needs (compiled graphs,
# dtypes, helper functions) are bound to names in its namespace. The text is kept: what it says is exactly what runs.
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
        self._if_read: dict[int, list[tuple[Any, str, int]]] = {}  # slots that get a variable only if it is asked for

    def line(self, text: str = "") -> None:
        """Write one line at the current depth."""
        self._lines.append("    " * self._indent + text if text else "")

    def line_if_read(self, slot: Slot, text: str) -> None:
        """A line that gives a slot its variable; it stands there only if that variable is asked for."""
        self._if_read.setdefault(len(self._lines), []).append((slot, text, self._indent))

    def row(self, slots: Sequence[Slot], hint: str, text: str) -> PackedArgs:
        """A line that gives many slots one variable; those that are asked for get their own after it."""
        row = PackedArgs(self.fresh(hint), len(slots))
        self.line(f"{row.name} = {text}")
        for slot, item in zip(slots, row.items(), strict=True):
            self._rows[slot] = item
            self.line_if_read(slot, str(item))
        return row

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
        whole, after = self.fresh("values"), names[star + 1 :]
        end = f"len({whole}) - {len(after)}" if after else ""
        self.line(f"{whole} = [*{text}]")
        self.line(f"{unpack(names[:star])} = {whole}[:{star}]")
        self.line(f"{names[star].removeprefix('*')} = {whole}[{star}:{end}]")
        if after:
            self.line(f"{unpack(after)} = {whole}[-{len(after)}:]")
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
        leave_untraced(code)
        if len(_codes) > _MOST_CODES:
            _codes.popitem(last=False)
    return code


def tuple_of(names: list[str]) -> str:
    """A Python tuple of these names."""
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"


def unpack(names: Sequence[str]) -> str:
    """The left side of an assignment that takes a sequence apart."""
    return f"{names[0]}," if len(names) == 1 else ", ".join(names)


# ---------------------------------------------------------------------------------------------------------------------
# Values and calls as Python text.
def op_name(writer: Writer, op: OpOverload) -> str:
    return writer.bind(op, f"{op._schema.name.split('::')[1]}_{op._overloadname}")


def arguments_text(writer: Writer, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    return [*(literal(writer, a) for a in args), *(f"{key}={literal(writer, a)}" for key, a in kwargs.items())]


def literal(writer: Writer, value: Any) -> str:
    """A value as Python text, bound to a name where text cannot say it."""
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    if type(value) in (list, tuple) and all(type(v) in (bool, int) for v in value):
        return repr(value)
    return writer.bind(value, type(value).__name__)


def grad_mode(writer: Writer, wanted: bool, now: bool) -> contextlib.AbstractContextManager[None]:
    """A block in a grad mode; none if gradients are on, or off, already."""
    if wanted == now:
        return contextlib.nullcontext()
    mode = writer.bind(torch.enable_grad, "enable_grad") if wanted else writer.bind(torch.no_grad, "no_grad")
    return writer.block(f"with {mode}():")


# ---------------------------------------------------------------------------------------------------------------------
# A run-time concern around the compiled graphs.
#
# A stage writes lines on the way in and on the way out. Stages nest: the first of the list is the outermost. A concern
# that a program does not have adds no stage, and so no line.
class Stage:
    """One concern: what it writes before the inner stages, and what after them; by default nothing."""

    def enter(self, writer: Writer) -> None:
        """Lines on the way in."""

    def leave(self, writer: Writer) -> None:
        """Lines on the way out."""

    def undo(self, writer: Writer) -> None:
        """Lines that take back what those on the way in did, for a call that is for another program."""
