"""How a compiled call begins and ends: where its inputs come from, and the form of its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..joint.build import Joint
from ..record.memory import SharedMemory, Source, over_storage
from ..slots import GradOf, Inner, Output, Primal, Slot
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


def source_expression(writer: Writer, source: Source) -> str:
    """Python text that finds a tensor which nobody passed, from an input that looks at its memory."""
    member = writer.variable(source.member)
    match source.how:
        case "itself":
            return member
        case "root":
            return f"{member}._base"
        case "flat":
            return f"{writer.bind(over_storage, 'over_storage')}({member}, {writer.bind(source.dtype, 'dtype')})"


def write_shared_memory(writer: Writer, shared: Sequence[SharedMemory]) -> None:
    """Lines that give shared memory, and the roots in it, their variables."""
    for memory in shared:
        sources = {memory.slot: memory.source, **{family.slot: family.source for family in memory.families}}
        for slot, source in sources.items():
            writer.line(f"{writer.variable(slot)} = {source_expression(writer, source)}")


def write_inner_tensors(writer: Writer, joint: Joint, in_gradients: bool = False) -> None:
    """Lines that give tensors in wrapper subclasses their variables, where anything outside of the graph reads them.

    Those in gradients come later.
    """
    for facts in joint.inputs:
        slot = facts.recorded.slot
        if isinstance(slot, Inner) and lies_in_gradient(slot) is in_gradients:
            writer.line_if_read(slot, read_inner(writer, slot))


def lies_in_gradient(slot: Slot) -> bool:
    """Whether a tensor is a gradient from before the call, or in one."""
    return lies_in_gradient(slot.of) if isinstance(slot, Inner) else isinstance(slot, GradOf)


def read_inner(writer: Writer, slot: Slot) -> str:
    """How a tensor is read out of the wrapper around it."""
    return f"{read_inner(writer, slot.of)}.{slot.attr}" if isinstance(slot, Inner) else writer.variable(slot)


def write_gradients(writer: Writer, joint: Joint) -> None:
    """Lines that give gradients from before the call their variables."""
    for facts in joint.inputs:
        slot = facts.recorded.slot
        if isinstance(slot, GradOf):
            writer.line(f"{writer.variable(slot)} = {writer.variable(slot.of)}.grad")


@dataclass(frozen=True)
class FlatEntry:
    """Unpacked flat arguments, parameters as they were when the program was compiled, a flat list as the result."""

    state: Sequence[tuple[Primal, Any]]
    inputs: Sequence[Primal]
    boxed: bool  # one list of arguments, which is emptied
    joint: Joint
    shared: Sequence[SharedMemory] = ()
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
        write_inner_tensors(writer, self.joint)
        write_gradients(writer, self.joint)
        write_inner_tensors(writer, self.joint, in_gradients=True)
        write_shared_memory(writer, self.shared)

    def leave(self, writer: Writer, results: int) -> None:
        writer.line(f"return [{', '.join(writer.variable(Output(i)) for i in range(results))}]")
