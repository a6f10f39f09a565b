"""The frame of a compiled call: where inputs come from, what is read of a graph's results, calls without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .._torch import autocast_off, set_grad_enabled
from ..codegen.writer import Writer
from ..joint.build import Joint
from ..joint.outputs import ByGeometry, Number, Plain, Result, SameAsInput, ViewOfBase, ViewOfInput, ViewOfOutput
from ..record.alias_groups import SharedMemory, Source, over_storage
from ..slots import GradOf, Inner, Output, Primal, Returned, Slot, Updated, outermost


# ---------------------------------------------------------------------------------------------------------------------
# What a graph returns: which of it the code around the graph reads, and the line that names it.
def values_needed(joint: Joint) -> list[Returned]:
    """Which of the graph's results the stages around it read."""
    needed: list[Returned] = []
    written = {facts.recorded.slot for facts in joint.touched if facts.written}
    for slot in joint.signature.returned:
        match slot:
            case Output(index):
                result = joint.outputs.results[index]
                if isinstance(result, (Plain, Number)) or gives_geometry(result):
                    needed.append(slot)
            case Updated(of) if of not in written:  # its shape is set without looking at the graph's result
                continue
            case _:
                needed.append(slot)
    return needed


def gives_geometry(result: Result) -> bool:
    """Whether the graph's own result only says where a view lies; it may be an input that changes its shape later."""
    match result:
        case ViewOfInput(replay=r) | ViewOfBase(replay=r) | ViewOfOutput(replay=r):
            return isinstance(r.how, ByGeometry)
        case _:
            return False


def repeated_results(joint: Joint) -> set[Returned]:
    """Outputs that are tensors of their own to the user, but one value to the graph."""
    seen: set[int] = set()
    repeated: set[Returned] = set()
    for slot, node in zip(joint.signature.returned, joint.returned_nodes, strict=True):
        if isinstance(slot, Output) and isinstance(joint.outputs.results[slot.index], Plain) and id(node) in seen:
            repeated.add(slot)
        seen.add(id(node))
    return repeated


def write_graph_call(writer: Writer, names: Sequence[str], call: str, autocast: bool) -> None:
    """Call a graph and name its results; without autocast if it was on while recording: its casts are in the graph."""
    with writer.block(f"with {writer.bind(autocast_off, 'autocast_off')}():") if autocast else contextlib.nullcontext():
        if names:
            writer.take_apart(names, call)
        else:
            writer.line(call)


# ---------------------------------------------------------------------------------------------------------------------
# How a compiled call begins and ends: where its inputs come from, and the form of its result.
class Entry(Protocol):
    """The outermost stage: it defines `call`, gives every input a variable, and returns the result."""

    @property
    def guarded(self) -> bool:
        """Whether a call reaches the program only if its facts are those of the recording."""

    @property
    def frees(self) -> Sequence[Primal]:
        """Inputs that only the call holds, so that the graph may free them."""

    def open(self, writer: Writer) -> str:
        """The `def` line."""

    def enter(self, writer: Writer) -> None:
        """Lines that give inputs their variables."""

    def leave(self, writer: Writer, results: int) -> None:
        """The `return`."""

    def miss(self, writer: Writer) -> str:
        """What a call returns that read other data than the recording, as `missed` says."""

    def other_numbers(self, writer: Writer) -> str:
        """The line for a call that has other numbers than the program is for."""


def source_expression(writer: Writer, source: Source) -> str:
    """Python text that finds a tensor that was not passed, from an input that is a view of its memory."""
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
        sources = {
            memory.slot: memory.source,
            **{alias_group.slot: alias_group.source for alias_group in memory.families},
        }
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
    return isinstance(outermost(slot), GradOf)


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
    fits: Callable[[Sequence[Any]], bool] | None = None  # whether inputs lie in memory as they did, where that matters
    otherwise: Callable[..., Sequence[Any]] | None = None  # what runs where they do not

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
        if self.fits is not None:
            given = ", ".join(writer.variable(slot) for slot in self.inputs)
            fits, otherwise = writer.bind(self.fits, "lie_as_recorded"), writer.bind(self.otherwise, "run_as_it_is")
            with writer.block(f"if not {fits}(({given},)):"):
                writer.line(f"return list({otherwise}({given}))")
        write_inner_tensors(writer, self.joint)
        write_gradients(writer, self.joint)
        write_inner_tensors(writer, self.joint, in_gradients=True)
        write_shared_memory(writer, self.shared)

    def leave(self, writer: Writer, results: int) -> None:
        writer.line(f"return [{', '.join(writer.variable(Output(i)) for i in range(results))}]")

    def miss(self, writer: Writer) -> str:
        raise AssertionError("a program that is called as it is reads no data")

    def other_numbers(self, writer: Writer) -> str:
        raise AssertionError("a program that is called as it is follows no numbers")


# ---------------------------------------------------------------------------------------------------------------------
# The innermost part of a call with gradients off: one graph, called as it is.
class WrapperLines(Protocol):
    """What a call says around a graph with gradients off, where wrapper subclasses take part."""

    def taken(self) -> Sequence[Primal]:
        """What the graph takes; the call has a variable for each."""

    def names(self, writer: Writer, needed: Container[Returned]) -> list[str]:
        """Variables for what the graph returns."""

    def build(self, writer: Writer, needed: Container[Returned]) -> None:
        """Lines that put wrappers around what the graph returned."""


class InferenceCore:
    """Runs one graph with gradients off."""

    def __init__(
        self, joint: Joint, guarded: bool, autocast: bool, frees: Sequence[Primal], wrappers: WrapperLines | None
    ) -> None:
        self._joint = joint
        self._guarded = guarded
        self._autocast = autocast
        self._wrappers = wrappers
        kept = _inputs_kept(joint)
        self._frees: list[Primal] = [slot for slot in frees if slot not in kept]
        if wrappers is not None:
            freed = {*self._frees}
            inner = [slot for slot in wrappers.taken() if isinstance(slot, Inner) and slot not in kept]
            self._frees += [slot for slot in inner if outermost(slot) in freed]

    def define(self, writer: Writer) -> None:
        """Nothing stands before the call."""

    def write(self, writer: Writer, inputs: Sequence[Slot]) -> None:
        """The call of the graph."""
        joint = self._joint
        needed = set(values_needed(joint))
        if self._wrappers is None:
            names = [writer.variable(slot) if slot in needed else "_" for slot in joint.signature.returned]
        else:
            inputs = self._wrappers.taken()
            names = self._wrappers.names(writer, needed)
        given = ", ".join(writer.listed(inputs))
        call = f"inference_graph([{given}])"
        if self._frees:  # only the list holds them from here on, and the graph may empty it
            writer.line(f"graph_inputs = [{given}]")
            writer.line(f"del {', '.join(writer.variable(slot) for slot in self._frees)}")
            call = "inference_graph(graph_inputs)"
        set_grad = writer.bind(set_grad_enabled, "set_grad_enabled")
        if not self._guarded:
            is_enabled = writer.bind(torch.is_grad_enabled, "is_grad_enabled")
            writer.line(f"grad_was_enabled = {is_enabled}()")
            restore = "grad_was_enabled"
        elif joint.recording.grad_enabled:
            restore = "True"
        else:
            self._run(writer, names, call, needed)
            return
        writer.line(f"{set_grad}(False)")
        with writer.block("try:"):
            self._run(writer, names, call, needed)
        with writer.block("finally:"):
            writer.line(f"{set_grad}({restore})")

    def _run(self, writer: Writer, names: list[str], call: str, needed: set[Returned]) -> None:
        write_graph_call(writer, names, call, self._autocast)
        if self._wrappers is not None:
            self._wrappers.build(writer, needed)
        self._detach_views(writer)

    def _detach_views(self, writer: Writer) -> None:
        """A view taken with gradients off could not be written to with gradients on, which eager allows."""
        alike = repeated_results(self._joint)
        results = self._joint.outputs.results
        apart = self._joint.recording.grad_enabled or any(isinstance(r, Plain) and r.is_new_leaf for r in results)
        for i, result in enumerate(results):
            plain_view = isinstance(result, Plain) and result.is_view and apart
            if plain_view or Output(i) in alike or gives_geometry(result):
                name = writer.variable(Output(i))
                writer.line(f"{name} = {name}.detach()")


def _inputs_kept(joint: Joint) -> set[Primal]:
    """Inputs that are needed after the graph has run: written ones, and those that an output is or views."""
    kept: set[Primal] = {facts.recorded.slot for facts in joint.touched}
    for result in joint.outputs.results:
        if isinstance(result, (SameAsInput, ViewOfInput)):
            kept.add(result.input.slot)
    return kept
