"""The innermost part of a call with gradients off: one graph, called as it is."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

import torch

from .._torch import set_grad_enabled
from ..joint.build import Joint
from ..joint.outputs import Plain, SameAsInput, ViewOfInput
from ..slots import Inner, Output, Primal, Returned, Slot
from .results import gives_geometry, repeated_results, values_needed, write_graph_call
from .writer import Writer


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
            self._frees += [slot for slot in inner if _outermost(slot) in freed]

    def define(self, writer: Writer) -> None:
        """Nothing stands before the call."""

    def write(self, writer: Writer, inputs: Sequence[Primal]) -> None:
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
        apart = self._joint.recording.grad_enabled or any(isinstance(r, Plain) and r.fresh_leaf for r in results)
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


def _outermost(slot: Slot) -> Slot:
    """The wrapper in which a tensor lies."""
    return _outermost(slot.of) if isinstance(slot, Inner) else slot
