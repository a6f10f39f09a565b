"""Parts of a report, as text or, on a terminal that has rich, as tables; and a word about what is being done."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Text:
    """Some lines."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a title; a head that is empty is not shown."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Part = Text | Table


def show(parts: Sequence[Part], stream: TextIO | None = None) -> None:
    """Print a report."""
    stream = stream or sys.stdout
    with_rich = has_rich(stream)
    for part in parts:
        if with_rich and isinstance(part, Table):
            _show_with_rich(part, stream)
        else:
            print(*(part.lines if isinstance(part, Text) else as_text(part)), "", sep="\n", file=stream)


def has_rich(stream: TextIO) -> bool:
    """Whether a stream is a terminal, and rich is installed."""
    return stream.isatty() and importlib.util.find_spec("rich") is not None


def as_text(table: Table) -> list[str]:
    """A table in columns.

    >>> print(*as_text(Table("memory", ("", "saved"), (("default", "8 bytes"), ("min cut", "0 bytes")))), sep="\\n")
    memory
               saved
      default  8 bytes
      min cut  0 bytes
    """
    rows = [row for row in (table.head, *table.rows) if any(row)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))] if rows else []
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [table.title, *(f"  {line}".rstrip() for line in lines)]


def _show_with_rich(table: Table, stream: TextIO) -> None:
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    made = rich.table.Table(
        *table.head, title=table.title, title_justify="left", box=rich.box.SIMPLE_HEAD, show_header=any(table.head)
    )
    for row in table.rows:
        made.add_row(*map(rich.text.Text, row))
    rich.console.Console(file=stream).print(made)


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Say on the error stream what is being done, for as long as it takes."""
    if has_rich(sys.stderr):
        import rich.console

        with rich.console.Console(stderr=True).status(what):
            yield
    else:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield


def size(count: int) -> str:
    """A number of bytes.

    >>> size(12), size(1536), size(3 << 20)
    ('12 bytes', '1.5 KiB', '3.0 MiB')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
