"""Markdown tables that also read well in a terminal, and the marks that a run is held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Table:
    """A table under a title, with a line below it that says how to read it."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    note: str = ""

    def add(self, *cells: str) -> None:
        if len(cells) != len(self.header):
            raise ValueError(f"{self.title}: a row of {len(cells)} cells under {len(self.header)} headings")
        self.rows.append(cells)

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]

        def text(line: Sequence[str]) -> str:
            first, *numbers = (
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            return "| " + " | ".join([first, *numbers]) + " |"

        rule = "|" + "|".join(
            "-" * (width + 2) if column == 0 else "-" * (width + 1) + ":" for column, width in enumerate(widths)
        )
        body = [text(self.header), rule + "|", *map(text, self.rows)]
        return "\n".join([f"## {self.title}", "", *body, *(["", self.note] if self.note else [])])


@dataclass(frozen=True)
class Mark:
    """What a figure has to be, and what it was."""

    name: str
    wanted: str
    got: str
    holds: bool


def at_least(name: str, got: float, wanted: float) -> Mark:
    return Mark(name, f"≥ {wanted:g}×", f"{got:.2f}×", got >= wanted)


def at_most(name: str, got: float, wanted: float) -> Mark:
    return Mark(name, f"≤ {wanted:g}×", f"{got:.2f}×", got <= wanted)


def marks_table(marks: Sequence[Mark]) -> Table:
    table = Table("Marks", ["mark", "wanted", "got", "holds"])
    for mark in marks:
        table.add(mark.name, mark.wanted, mark.got, "yes" if mark.holds else "NO")
    return table
