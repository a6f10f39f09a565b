"""How a compiled call begins and ends: where its inputs come from, and the form of its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..slots import Output, Primal
from .writer import Writer


class Entry(Protocol):
    """The outermost stage: it defines `call`, gives every input a variable, and returns the result."""

    @property
    def guarded(self) -> bool:
        """Whether a call reaches the program only if its facts are those of the recording."""

    @property
    def frees(self) -> Sequence[Primal]:
        """Inputs that nobody else holds, so that the graph may free them."""

    def open(self, writer: Writer) -> str:
        """The `def` line."""

    def enter(self, writer: Writer) -> None:
        """Lines that give inputs their variables."""

    def leave(self, writer: Writer, results: int) -> None:
        """The `return`."""


@dataclass(frozen=True)
class FlatEntry:
    """Unpacked flat arguments, parameters as they were when the program was compiled, a flat list as the result."""

    state: Sequence[tuple[Primal, Any]]
    inputs: Sequence[Primal]
    boxed: bool  # one list of arguments, which is emptied
    guarded: bool = False

    @property
    def frees(self) -> Sequence[Primal]:
        return self.inputs if self.boxed else ()

    def open(self, writer: Writer) -> str:
        for slot, value in self.state:
            name = writer.fresh(str(slot))
            writer.namespace[name] = value
            writer.variables[slot] = name
        names = [writer.variable(slot) for slot in self.inputs]
        return f"def call({'args' if self.boxed else ', '.join(names)}):"

    def enter(self, writer: Writer) -> None:
        if self.boxed:
            names = [writer.variable(slot) for slot in self.inputs]
            if names:
                writer.line(f"{', '.join(names)}, = args")
            writer.line("args.clear()")

    def leave(self, writer: Writer, results: int) -> None:
        writer.line(f"return [{', '.join(writer.variable(Output(i)) for i in range(results))}]")
