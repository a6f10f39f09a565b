"""Outputs that are inputs, or views of something: taken again from the caller's own tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import SymInt, Tensor

from .._torch import lock_view, made_in_mode, set_lazy_bits, set_version
from ..codegen.writer import Stage, Writer, arguments_text, grad_mode, literal, op_name
from ..joint.outputs import (
    Constant,
    CounterOf,
    Number,
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
)
from ..ops import aten
from ..slots import Base, Output, Slot


@dataclass(frozen=True)
class Taken:
    """Splits that were called already, each once for all its pieces; but no two outputs are the same piece."""

    pieces: dict[tuple[str, bool], str] = field(default_factory=dict)  # variables, by the call and its grad mode
    given: set[tuple[str, int]] = field(default_factory=set)  # variables and numbers of pieces that are outputs


@dataclass(frozen=True)
class Aliases(Stage):
    """Outputs that are inputs, or views of something, are taken from the caller's own tensors."""

    outputs: OutputFacts
    grad_enabled: bool  # by the caller

    def enter(self, writer: Writer) -> None:
        for i, result in enumerate(self.outputs.results):
            if isinstance(result, ViewOfInput) and result.replay.before_writes:
                self._take(writer, Output(i), result.input.slot, result.replay, Taken())

    def leave(self, writer: Writer) -> None:
        taken = Taken()
        results = list(enumerate(self.outputs.results))
        # What stands for itself comes first: a view may be of a later output.
        for i, result in results:
            match result:
                case Constant(value):
                    writer.variables[Output(i)] = literal(writer, value)
                case SameAsInput(recorded):
                    writer.variables[Output(i)] = writer.variable(recorded.slot)
                case Plain(memory=ViewOfInput(recorded, replay, _)):
                    self._lie_in_memory(writer, Output(i), recorded.slot, replay)
                case Plain(inference=bool(inference)):
                    name, make = writer.variable(Output(i)), writer.bind(made_in_mode, "made_in_mode")
                    writer.line(f"{name} = {make}({name}, inference={inference})")
                    if result.fresh_leaf:
                        writer.line(f"{name}.requires_grad_()")
                case Plain(fresh_leaf=True):
                    writer.line(f"{writer.variable(Output(i))}.requires_grad_()")
                case Plain() | Number():
                    writer.variable(Output(i))
        for i, result in results:
            match result:
                case ViewOfInput(recorded, replay, _) if not (replay.before_writes or replay.late):
                    self._take(writer, Output(i), recorded.slot, replay, taken)
                case ViewOfBase(base, _, replay):
                    self._take(writer, Output(i), Base(base), replay, taken)
        for i, result in results:
            match result:
                case ViewOfOutput(index, replay):
                    self._take(writer, Output(i), Output(index), replay, taken)
        for counter in self.outputs.counters:
            name = writer.variable(Output(counter.index))
            match counter:
                case OwnCounter(_, version):
                    writer.line(f"{name} = {writer.bind(counted_alone, 'counted_alone')}({name}, {version})")
                case CounterOf(_, earlier):
                    with_other = f"{name}, {writer.variable(Output(earlier))}"
                    writer.line(f"{name} = {writer.bind(counted_with, 'counted_with')}({with_other})")
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
                case ViewOfInput(recorded, ViewReplay(late=True) as replay, _):
                    self._take(writer, Output(i), recorded.slot, replay, taken)
                case SameAsOutput(index) if is_late(self.outputs.results[index]):
                    writer.variables[Output(i)] = writer.variable(Output(index))

    def _lie_in_memory(self, writer: Writer, output: Output, base: Slot, replay: ViewReplay) -> None:
        """Give a result that autograd takes for computed the memory of the input that it is an alias of."""
        name = writer.variables[output]
        del writer.variables[output]
        with writer.block(f"with {writer.bind(torch.no_grad, 'no_grad')}():"):
            self._take(writer, output, base, replace(replay, becomes_leaf=False), Taken())
        writer.line(f"{name}.data = {writer.variables[output]}")
        writer.variables[output] = name

    def _take(self, writer: Writer, output: Output, base: Slot, replay: ViewReplay, taken: Taken) -> None:
        """Write the lines that take a view from its base again."""
        source = writer.variable(base)
        if replay.steps is None:
            name = writer.variable(output)
            geometry = f"{name}.size(), {name}.stride(), {name}.storage_offset()"
            tensor = self.outputs.tensors[output.index]
            if tensor is not None and not is_symbolic(tensor):
                size, stride = tuple(tensor.shape), tensor.stride()
                geometry = f"{size}, {stride}, {tensor.storage_offset()}"
            detached = ".detach()" if replay.hides_base else ""
            taken_again = f"{source}.as_strided({geometry}){detached}"
            if replay.conj or replay.neg:
                bits = writer.bind(set_lazy_bits, "set_lazy_bits")
                taken_again = f"{bits}({taken_again}, conj={replay.conj}, neg={replay.neg})"
            with grad_mode(writer, self.grad_enabled and not replay.without_grad, self.grad_enabled):
                writer.line(f"{name} = {taken_again}")
            if replay.locked:
                writer.line(f"{writer.bind(lock_view, 'lock_view')}({name})")
        else:
            name = writer.variables[output] = writer.fresh(str(output))
            self._replay(writer, name, source, replay, taken)
            is_cut = any(step.op is aten.detach.default for step in replay.steps)
            if replay.hides_base and not replay.becomes_leaf and not is_cut:
                writer.line(f"{name} = {name}.detach()")
        if replay.regenerated:
            setter = writer.bind(set_version, "set_version")
            writer.line(f"{setter}({name}, {name}._version + 1)")
            _take_back_version(writer, name, followed=True)
        if replay.leaf_by_force:
            writer.line(f"{name}.requires_grad_()")
        elif replay.becomes_leaf:  # a view made under no_grad requires grad already, and has nothing to differentiate
            writer.line(f"if not {name}.requires_grad: {name}.requires_grad_()")

    def _replay(self, writer: Writer, name: str, source: str, replay: ViewReplay, taken: Taken) -> None:
        """Call the recorded views one after another; a split is called once for all its pieces."""
        current, steps = source, replay.steps or ()
        followed = not (replay.before_writes or replay.hides_base or replay.becomes_leaf or replay.without_grad)
        for step in steps:
            arguments = [current, *arguments_text(writer, step.args, step.kwargs)]
            # Under no_grad a change of shape leaves the history of the tensor alone, where a view would have none.
            on_itself = step.in_place is not None and not step.with_grad and current != source
            op = step.in_place if step.in_place is not None and on_itself else step.op
            call = f"{current}.data" if step.counts_alone else f"{op_name(writer, op)}({', '.join(arguments)})"
            pieces = taken.pieces.get((call, step.with_grad))
            if pieces is not None and step is steps[-1] and (pieces, step.index) in taken.given:
                pieces = None
            if pieces is None:
                result = name if step.index is None else writer.fresh("pieces")
                with grad_mode(writer, step.with_grad, self.grad_enabled):
                    writer.line(f"{result} = {call}")
            if on_itself:
                _take_back_version(writer, name, followed)
            if step.index is not None:
                pieces = taken.pieces[call, step.with_grad] = pieces or result
                taken.given.update([(pieces, step.index)] if step is steps[-1] else ())
                writer.line(f"{name} = {pieces}[{step.index}]")
            current = name
        if not steps:
            writer.line(f"{name} = {writer.bind(aten.alias.default, 'alias')}({source})")


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
    return isinstance(result, ViewOfInput) and result.replay.late


def _take_back_version(writer: Writer, name: str, followed: bool) -> None:
    """Autograd takes a view that it follows again, by its geometry, if its version says that it was changed."""
    if followed:
        writer.line(f"{name}.grad_fn")
    writer.line(f"{writer.bind(set_version, 'set_version')}({name}, {name}._version - 1)")


def is_symbolic(tensor: Tensor) -> bool:
    """Whether the geometry of a tensor is not known in numbers."""
    return any(isinstance(n, SymInt) for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))
