"""Outputs that are inputs, or views of something: taken again from the caller's own tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import SymInt, Tensor

from .._torch import lock_view, made_in_mode, set_lazy_bits, set_version
from ..codegen.writer import Stage, Writer, arguments_text, grad_mode, literal, op_name
from ..joint.outputs import (
    ByGeometry,
    ByViews,
    Constant,
    CounterOf,
    Differentiable,
    History,
    NotDifferentiable,
    OutputFacts,
    OwnCounter,
    Plain,
    Result,
    SameAsInput,
    SameAsOutput,
    ViewOfBase,
    ViewOfInput,
    ViewOfOutput,
    ViewReplay,
    When,
)
from ..ops import ViewStep, aten
from ..slots import Base, Output, Slot


@dataclass(frozen=True)
class Taken:
    """Splits that were called already, each once for all its pieces; but no two outputs are the same piece."""

    pieces: dict[tuple[str, bool], str] = field(default_factory=dict)  # variables, by the call and its grad mode
    given: set[tuple[str, int | None]] = field(default_factory=set)  # variables and numbers of pieces that are outputs


@dataclass(frozen=True)
class Aliases(Stage):
    """Outputs that are inputs, or views of something, are taken from the caller's own tensors."""

    outputs: OutputFacts
    grad_enabled: bool  # by the caller

    def enter(self, writer: Writer) -> None:
        for i, result in enumerate(self.outputs.results):
            match result:
                case ViewOfInput(recorded, replay, When.BEFORE_WRITES):
                    self._take(writer, Output(i), recorded.slot, replay, Taken())

    def leave(self, writer: Writer) -> None:
        taken = Taken()
        results = list(enumerate(self.outputs.results))
        for i, result in results:  # what stands for itself comes first: a view may be of a later output
            self._finish(writer, Output(i), result)
        for i, result in results:
            match result:
                case ViewOfInput(recorded, replay, When.AFTER_WRITES):
                    self._take(writer, Output(i), recorded.slot, replay, taken)
                case ViewOfBase(base, _, replay):
                    self._take(writer, Output(i), Base(base), replay, taken)
        for i, result in results:
            if isinstance(result, ViewOfOutput):
                self._take(writer, Output(i), Output(result.index), result.replay, taken)
        self._set_counters(writer)
        for i in self.outputs.parameters:
            name, make = writer.variable(Output(i)), writer.bind(torch.nn.Parameter, "Parameter")
            writer.line(f"{name} = {make}({name}, {name}.requires_grad)")
        for i, result in results:
            if isinstance(result, SameAsOutput) and not is_late(self.outputs.results[result.index]):
                writer.variables[Output(i)] = writer.variable(Output(result.index))

    def take_late(self, writer: Writer) -> None:
        """Views of inputs that have been moved to other memory by now."""
        taken = Taken()
        for i, result in enumerate(self.outputs.results):
            match result:
                case ViewOfInput(recorded, replay, When.AFTER_MOVES):
                    self._take(writer, Output(i), recorded.slot, replay, taken)
                case SameAsOutput(index) if is_late(self.outputs.results[index]):
                    writer.variables[Output(i)] = writer.variable(Output(index))

    def _finish(self, writer: Writer, output: Output, result: Result) -> None:
        """Name what is no view; what the graph gave is made what the program returned."""
        match result:
            case Constant(value):
                writer.variables[output] = literal(writer, value)
            case SameAsInput(recorded):
                writer.variables[output] = writer.variable(recorded.slot)
            case Plain(history=Differentiable(memory=ViewOfInput(recorded, replay))):
                self._lie_in_memory(writer, output, recorded.slot, replay)
            case Plain(history=NotDifferentiable(is_leaf, inference)):
                name = writer.variable(output)
                if inference is not None:
                    make = writer.bind(made_in_mode, "made_in_mode")
                    writer.line(f"{name} = {make}({name}, inference={inference})")
                if is_leaf:
                    writer.line(f"{name}.requires_grad_()")

    def _set_counters(self, writer: Writer) -> None:
        for counter in self.outputs.counters:
            name = writer.variable(Output(counter.index))
            match counter:
                case OwnCounter(_, version):
                    writer.line(f"{name} = {writer.bind(counted_alone, 'counted_alone')}({name}, {version})")
                case CounterOf(_, earlier):
                    with_other = f"{name}, {writer.variable(Output(earlier))}"
                    writer.line(f"{name} = {writer.bind(counted_with, 'counted_with')}({with_other})")

    def _lie_in_memory(self, writer: Writer, output: Output, base: Slot, replay: ViewReplay) -> None:
        """Give a result that autograd takes for computed the memory of the input that it is an alias of."""
        name = writer.variables.pop(output)
        with writer.block(f"with {writer.bind(torch.no_grad, 'no_grad')}():"):
            self._take(writer, output, base, replay, Taken())
        writer.line(f"{name}.data = {writer.variables[output]}")
        writer.variables[output] = name

    def _take(self, writer: Writer, output: Output, base: Slot, replay: ViewReplay, taken: Taken) -> None:
        """Write the lines that take a view from its base again."""
        match replay.how:
            case ByGeometry():
                name = writer.variable(output)
                self._show(writer, output, writer.variable(base), replay.how, replay.history)
            case ByViews():
                source = writer.variable(base)
                name = writer.variables[output] = writer.fresh(str(output))
                self._call_views(writer, name, source, replay.how, replay.history, taken)
        if replay.history in (History.LEAF, History.DETACHED_LEAF):
            writer.line(f"{name}.requires_grad_()")

    def _show(self, writer: Writer, output: Output, source: str, how: ByGeometry, history: History) -> None:
        """Show the base as the graph's own result lies in memory."""
        name, tensor = writer.variable(output), self.outputs.tensors[output.index]
        geometry = f"{name}.size(), {name}.stride(), {name}.storage_offset()"
        if tensor is not None and not is_symbolic(tensor):
            geometry = f"{tuple(tensor.shape)}, {tensor.stride()}, {tensor.storage_offset()}"
        view = f"{source}.as_strided({geometry})"
        if history in (History.DETACHED, History.DETACHED_LEAF):
            view += ".detach()"
        if how.conj or how.neg:
            view = f"{writer.bind(set_lazy_bits, 'set_lazy_bits')}({view}, conj={how.conj}, neg={how.neg})"
        with grad_mode(writer, self.grad_enabled and history is not History.WITHOUT_GRAD, self.grad_enabled):
            writer.line(f"{name} = {view}")
        if how.locked:
            writer.line(f"{writer.bind(lock_view, 'lock_view')}({name})")

    def _call_views(self, writer: Writer, name: str, source: str, how: ByViews, history: History, taken: Taken) -> None:
        """Call the recorded views one after another."""
        current, followed = source, history is History.FOLLOWED
        for n, step in enumerate(how.steps):
            # Under no_grad a change of shape leaves the history of the tensor alone, where a view would have none.
            on_itself = step.in_place is not None and not step.with_grad and current != source
            call = self._call(writer, step, current, on_itself)
            if step.index is None:
                with grad_mode(writer, step.with_grad, self.grad_enabled):
                    writer.line(f"{name} = {call}")
            else:
                pieces = self._pieces(writer, step, call, n == len(how.steps) - 1, taken)
                writer.line(f"{name} = {pieces}[{step.index}]")
            if on_itself:
                _take_back_version(writer, name, followed)
            current = name
        if not how.steps:
            writer.line(f"{name} = {writer.bind(aten.alias.default, 'alias')}({source})")
        if history is History.DETACHED and all(step.op is not aten.detach.default for step in how.steps):
            writer.line(f"{name} = {name}.detach()")
        if how.regenerated:
            move_version(writer, name, 1)
            _take_back_version(writer, name, followed=True)

    def _call(self, writer: Writer, step: ViewStep, current: str, on_itself: bool) -> str:
        if step.counts_alone:
            return f"{current}.data"
        op = step.in_place if step.in_place is not None and on_itself else step.op
        return f"{op_name(writer, op)}({', '.join([current, *arguments_text(writer, step.args, step.kwargs)])})"

    def _pieces(self, writer: Writer, step: ViewStep, call: str, is_output: bool, taken: Taken) -> str:
        """The variable that holds all the pieces of a split, which is called once for all of them."""
        pieces = taken.pieces.get((call, step.with_grad))
        if pieces is None or (is_output and (pieces, step.index) in taken.given):
            pieces = taken.pieces[call, step.with_grad] = writer.fresh("pieces")
            with grad_mode(writer, step.with_grad, self.grad_enabled):
                writer.line(f"{pieces} = {call}")
        if is_output:
            taken.given.add((pieces, step.index))
        return pieces


def counted_alone(tensor: Tensor, version: int) -> Tensor:
    """The same tensor with a version counter of its own."""
    apart = tensor.data
    set_version(apart, version)
    return apart.requires_grad_(tensor.requires_grad)


def counted_with(tensor: Tensor, other: Tensor) -> Tensor:
    """The same tensor with the version counter of another."""
    together = other.detach()
    together.data = tensor.detach()
    return together.requires_grad_(tensor.requires_grad)


def is_late(result: Result) -> bool:
    """Whether a result is taken only when inputs have been moved."""
    return isinstance(result, ViewOfInput) and result.when is When.AFTER_MOVES


def _take_back_version(writer: Writer, name: str, followed: bool) -> None:
    """Autograd takes a view that it follows again, by its geometry, if its version says that it was changed."""
    if followed:
        writer.line(f"{name}.grad_fn")
    move_version(writer, name, -1)


def move_version(writer: Writer, name: str, by: int) -> None:
    """Let a version counter grow or shrink."""
    setter = writer.bind(set_version, "set_version")
    writer.line(f"{setter}({name}, {name}._version {'-' if by < 0 else '+'} {abs(by)})")


def is_symbolic(tensor: Tensor) -> bool:
    """Whether the geometry of a tensor is not known in numbers."""
    return any(isinstance(n, SymInt) for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))
