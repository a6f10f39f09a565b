"""Parts of a report on a terminal, with rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table as RichTable
from rich.text import Text as RichText

from .parts import Excerpt, Part, Table, Text, Verdict

_TITLE, _GOOD, _BAD = "bold cyan", "bold green", "bold red"


def show_with_rich(parts: Sequence[Part], stream: TextIO) -> None:
    """Print a report, with an empty line after each part."""
    console = Console(file=stream, highlight=False)
    for part in parts:
        for piece in _pieces(part):
            console.print(piece)
        console.print()


def _pieces(part: Part) -> list[RenderableType]:
    match part:
        case Verdict():
            return [RichText(part.line, _GOOD if part.good else _BAD)]
        case Text():
            return [RichText(paragraph) for paragraph in part.paragraphs]
        case Table():
            remarks = [Padding(RichText(remark, "dim"), (0, 0, 0, 2)) for remark in part.remarks]
            return [RichText(part.title, _TITLE), Padding(_table(part), (0, 0, 0, 1)), *remarks]
        case Excerpt():
            return [RichText(f"{part.file}:{part.meant}", _TITLE), _excerpt(part)]


def _table(table: Table) -> RichTable:
    made = RichTable(box=SIMPLE_HEAD, show_header=any(table.head), show_edge=False, pad_edge=True)
    for k, title in enumerate(table.head):
        made.add_column(title, justify="right" if k in table.numbers else "left", style="bold" if k == 0 else "")
    for row in table.rows:
        made.add_row(*map(RichText, row))
    return made


def _excerpt(excerpt: Excerpt) -> Syntax:
    code = "\n".join(line for _, line in excerpt.lines)
    return Syntax(
        code,
        "python",
        theme="ansi_dark",
        line_numbers=True,
        start_line=excerpt.lines[0][0],
        highlight_lines={excerpt.meant},
        background_color="default",
    )
