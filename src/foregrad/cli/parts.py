"""Parts of a report, and what each is as plain text."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from ..partition.report import columns

WIDTH = 110  # of a paragraph


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of it, in one line."""

    line: str
    good: bool


@dataclass(frozen=True, slots=True)
class Text:
    """Some paragraphs."""

    paragraphs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a title, with remarks below them; a head that is empty is not shown."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()  # columns of them
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Lines of a file, by their numbers, one of which is meant."""

    file: str
    lines: tuple[tuple[int, str], ...]
    meant: int


Part = Verdict | Text | Table | Excerpt


def as_text(part: Part) -> list[str]:
    """A part as lines of plain text.

    >>> print(*as_text(Table("memory", ("", "saved"), (("default", "8 bytes"), ("min cut", "0 bytes")))), sep="\\n")
    memory
               saved
      default  8 bytes
      min cut  0 bytes
    """
    match part:
        case Verdict():
            return [part.line]
        case Text():
            return [line for paragraph in part.paragraphs for line in (textwrap.wrap(paragraph, WIDTH) or [""])]
        case Table():
            rows = [row for row in (part.head, *part.rows) if any(row)]
            return [part.title, *(f"  {line}".rstrip() for line in (*columns(rows, part.numbers), *part.remarks))]
        case Excerpt():
            lines = [f"{'>' if n == part.meant else ' '} {n:4}  {line}".rstrip() for n, line in part.lines]
            return [f"{part.file}:{part.meant}", *lines]


def size(count: int) -> str:
    """A number of bytes.

    >>> size(12), size(1536), size(3 << 20)
    ('12 bytes', '1.5 KiB', '3.0 MiB')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
