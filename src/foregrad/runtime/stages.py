"""Run-time concerns as stages around the compiled graphs.

A stage writes lines on the way in and on the way out. Stages nest: the first of the list is the outermost. A concern
that a program does not have adds no stage, and so no line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import SymInt, Tensor

from .._torch import (
    AutocastState,
    OpOverload,
    mark_dynamic_dims,
    set_autocast_state,
    set_grad_enabled,
    set_version,
)
from ..errors import AssumptionError
from ..joint.build import Joint
from ..joint.effects import Assigned, Effect, GradAssigned, Moved
from ..joint.facts import (
    Constant,
    InputFacts,
    Number,
    OutputFacts,
    Plain,
    Rebuild,
    SameAsInput,
    SameAsOutput,
    ViewOfBase,
    ViewOfInput,
    ViewOfOutput,
)
from ..ops import ViewStep, aten
from ..record.step import Step
from ..slots import Base, Grown, Memory, Output, Primal, Returned, Root, Slot, Updated
from .writer import Writer


class Stage:
    """One concern: what it writes before the inner stages, and what behind them; by default nothing."""

    def enter(self, writer: Writer) -> None:
        """Lines on the way in."""

    def leave(self, writer: Writer) -> None:
        """Lines on the way out."""


@dataclass(frozen=True)
class Assumptions(Stage):
    """Under `debug_assert`: check what the program was compiled for, where no guard does."""

    inputs: tuple[InputFacts, ...]
    state: int  # how many of them are parameters and buffers
    aot_id: int

    def enter(self, writer: Writer) -> None:
        broken = writer.bind(self._broken, "broken_assumption")
        tensor = writer.bind(Tensor, "Tensor")
        for i, facts in enumerate(self.inputs):
            name = writer.variable(facts.recorded.slot)
            if not facts.recorded.is_tensor:
                writer.line(f"if isinstance({name}, {tensor}): {broken}({i}, 'would not be a tensor')")
            elif facts.recorded.leaf is None:
                writer.line(f"if {name}.requires_grad: {broken}({i}, 'would not require grad')")

    def _broken(self, index: int, fact: str) -> None:
        name = f"parameter/buffer {index}" if index < self.state else f"input {index - self.state}"
        raise AssumptionError(
            f"At compilation time, graph {self.aot_id} was compiled under the assumption that {name} {fact}, but at "
            "runtime this was not the case."
        )


@dataclass(frozen=True)
class RequireGrad(Stage):
    """Inputs that the program makes require grad."""

    slots: tuple[Primal, ...]
    at_once: bool  # the program differentiates them; otherwise only what comes after it does

    def enter(self, writer: Writer) -> None:
        if self.at_once:
            self._set(writer)

    def leave(self, writer: Writer) -> None:
        if not self.at_once:
            self._set(writer)

    def _set(self, writer: Writer) -> None:
        for slot in self.slots:
            writer.line(f"{writer.variable(slot)}.requires_grad_()")


@dataclass(frozen=True)
class WriteBack(Stage):
    """Inputs that the program changed: first their shape, then their data, in input order."""

    inputs: tuple[InputFacts, ...]
    returned: frozenset[Returned]  # by the graph

    def leave(self, writer: Writer) -> None:
        early = [facts for facts in self.inputs if facts.keeps_place]
        for facts in early:
            self._write(writer, facts)
        for facts in self.inputs:
            for step in facts.reshapes:
                _reshape(writer, writer.variable(facts.recorded.slot), step)
        for facts in self.inputs:
            if facts not in early:
                self._write(writer, facts)
            if Grown(facts.recorded.slot) in self.returned:
                grown = writer.variable(Grown(facts.recorded.slot))
                writer.line(f"{writer.variable(facts.recorded.slot)}.detach().copy_({grown})")

    def _write(self, writer: Writer, facts: InputFacts) -> None:
        if facts.written and not facts.written_in_graph:
            target, new = writer.variable(facts.recorded.slot), writer.variable(Updated(facts.recorded.slot))
            # A write that autograd did not see in eager must not be seen here.
            unseen = facts.requires_grad and not facts.write_seen_by_autograd
            writer.line(f"{target}{'.detach()' if unseen else ''}.copy_({new})")


@dataclass(frozen=True)
class Versions(Stage):
    """Version counters say what they would say in eager, however often the run time itself has written."""

    inputs: tuple[InputFacts, ...]

    def enter(self, writer: Writer) -> None:
        """Note versions where what moves them by itself is not known: in shared memory, and by changes of shape."""
        for facts in filter(self._counts_at_once, self.inputs):
            name, setter = writer.variable(facts.recorded.slot), writer.bind(set_version, "set_version")
            writer.line(f"{setter}({name}, {name}._version + {self._missing(facts)})")
        for facts in filter(self._is_noted, self.inputs):
            name = writer.variable(facts.recorded.slot)
            version = writer.variables["version of", name] = writer.fresh("version")
            writer.line(f"{version} = {name}._version")

    def leave(self, writer: Writer) -> None:
        setter = writer.bind(set_version, "set_version")
        for facts in self.inputs:
            name = writer.variable(facts.recorded.slot)
            missing = self._missing(facts)
            if self._is_noted(facts):
                version = writer.variables["version of", name]
                writer.line(f"{setter}({name}, {version} + {facts.version_change - self._later_moves(facts)})")
            elif missing and _has_version(facts) and not self._counts_at_once(facts):
                writer.line(f"{setter}({name}, {name}._version + {missing})")

    def _missing(self, facts: InputFacts) -> int:
        return facts.version_change - facts.written - self._later_moves(facts)

    def _counts_at_once(self, facts: InputFacts) -> bool:
        """Writes to nothing only count: they do so before anything is saved, for others may share the counter."""
        nothing_to_do = not facts.written and not facts.moved and self._missing(facts) > 0
        return nothing_to_do and _has_version(facts) and not self._is_noted(facts)

    def _later_moves(self, facts: InputFacts) -> int:
        """How often `set_` will still count for an input: once for itself, and for those whose counter it shares."""
        memory = facts.recorded.parent
        family = [f for f in self.inputs if f is facts or (memory is not None and f.recorded.parent is memory)]
        return sum(f.moved is not None and not f.moved_uncounted for f in family)

    def _is_noted(self, facts: InputFacts) -> bool:
        in_memory = facts.recorded.parent is not None
        counts_by_moving = facts.moved is not None and not facts.moved_uncounted
        return _has_version(facts) and bool(in_memory or facts.reshapes or facts.refitted or counts_by_moving)


def _has_version(facts: InputFacts) -> bool:
    """Whether anybody can look at the version counter."""
    return not facts.recorded.was_inference and not isinstance(facts.recorded.slot, (Memory, Root))


def _reshape(writer: Writer, target: str, step: Step) -> None:
    """Change the shape of the caller's tensor as the program did."""
    call = f"{_op_name(writer, step.op)}({', '.join([target, *_arguments(writer, step.args[1:], step.kwargs)])})"
    if step.grad_enabled:
        writer.line(call)
    else:
        with writer.block(f"with {writer.bind(torch.no_grad, 'no_grad')}():"):
            writer.line(call)


Taken = dict[tuple[str, bool], str]  # variables that hold all pieces of a split, by the call and its grad mode


@dataclass(frozen=True)
class Aliases(Stage):
    """Outputs that are inputs, or views of something, are taken from the caller's own tensors."""

    outputs: OutputFacts
    grad_enabled: bool  # by the caller

    def enter(self, writer: Writer) -> None:
        for i, result in enumerate(self.outputs.results):
            if isinstance(result, ViewOfInput) and result.rebuild.early:
                self._take(writer, Output(i), result.input.slot, result.rebuild, {})

    def leave(self, writer: Writer) -> None:
        taken: Taken = {}
        results = list(enumerate(self.outputs.results))
        # What stands for itself comes first: a view may be of a later output.
        for i, result in results:
            match result:
                case Constant(value):
                    writer.variables[Output(i)] = literal(writer, value)
                case SameAsInput(recorded):
                    writer.variables[Output(i)] = writer.variable(recorded.slot)
                case Plain(memory=ViewOfInput(recorded, rebuild, _)):
                    self._lie_in_memory(writer, Output(i), recorded.slot, rebuild)
                case Plain(fresh_leaf=True):
                    writer.line(f"{writer.variable(Output(i))}.requires_grad_()")
                case Plain() | Number():
                    writer.variable(Output(i))
        for i, result in results:
            match result:
                case ViewOfInput(recorded, rebuild, _) if not rebuild.early:
                    self._take(writer, Output(i), recorded.slot, rebuild, taken)
                case ViewOfBase(base, _, rebuild):
                    self._take(writer, Output(i), Base(base), rebuild, taken)
                case ViewOfOutput(index, rebuild):
                    self._take(writer, Output(i), Output(index), rebuild, taken)
        for i, result in results:
            if isinstance(result, SameAsOutput):
                writer.variables[Output(i)] = writer.variable(Output(result.index))

    def _lie_in_memory(self, writer: Writer, output: Output, base: Slot, rebuild: Rebuild) -> None:
        """Give a result that autograd takes for computed the memory of the input that it is an alias of."""
        name = writer.variables[output]
        del writer.variables[output]
        with writer.block(f"with {writer.bind(torch.no_grad, 'no_grad')}():"):
            self._take(writer, output, base, replace(rebuild, becomes_leaf=False), {})
        writer.line(f"{name}.data = {writer.variables[output]}")
        writer.variables[output] = name

    def _take(self, writer: Writer, output: Output, base: Slot, rebuild: Rebuild, taken: Taken) -> None:
        """Write the lines that take a view from its base again."""
        source = writer.variable(base)
        if rebuild.steps is None:
            name = writer.variable(output)
            geometry = f"{name}.size(), {name}.stride(), {name}.storage_offset()"
            tensor = self.outputs.tensors[output.index]
            if tensor is not None and not is_symbolic(tensor):
                size, stride = tuple(tensor.shape), tensor.stride()
                geometry = f"{size}, {stride}, {tensor.storage_offset()}"
            detached = ".detach()" if rebuild.hides_base else ""
            writer.line(f"{name} = {source}.as_strided({geometry}){detached}")
        else:
            name = writer.variables[output] = writer.fresh(str(output))
            self._replay(writer, name, source, rebuild.steps, taken)
        if rebuild.leaf_by_force:
            writer.line(f"{name}.requires_grad_()")
        elif rebuild.becomes_leaf:  # a view made under no_grad requires grad already, and has nothing to differentiate
            writer.line(f"if not {name}.requires_grad: {name}.requires_grad_()")

    def _replay(self, writer: Writer, name: str, source: str, steps: Sequence[ViewStep], taken: Taken) -> None:
        """Call the recorded views one after another; a split is called once for all its pieces."""
        current = source
        for step in steps:
            arguments = [current, *_arguments(writer, step.args, step.kwargs)]
            # Under no_grad a change of shape leaves the history of the tensor alone, where a view would have none.
            on_itself = step.in_place is not None and not step.with_grad and current != source
            op = step.in_place if step.in_place is not None and on_itself else step.op
            call = f"{_op_name(writer, op)}({', '.join(arguments)})"
            pieces = taken.get((call, step.with_grad))
            if pieces is None:
                result = name if step.index is None else writer.fresh("pieces")
                with self._grad_mode(writer, step.with_grad):
                    writer.line(f"{result} = {call}")
            if on_itself:
                setter = writer.bind(set_version, "set_version")
                writer.line(f"{setter}({name}, {name}._version - 1)")
            if step.index is not None:
                pieces = taken.setdefault((call, step.with_grad), pieces or result)
                writer.line(f"{name} = {pieces}[{step.index}]")
            current = name
        if not steps:
            writer.line(f"{name} = {writer.bind(aten.alias.default, 'alias')}({source})")

    def _grad_mode(self, writer: Writer, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """A block in the grad mode in which a view was taken."""
        if enabled == self.grad_enabled:
            return contextlib.nullcontext()
        mode = writer.bind(torch.enable_grad, "enable_grad") if enabled else writer.bind(torch.no_grad, "no_grad")
        return writer.block(f"with {mode}():")


@dataclass(frozen=True)
class Escapes(Stage):
    """Tensors that the program put elsewhere than into its result."""

    effects: tuple[Effect, ...]

    def leave(self, writer: Writer) -> None:
        for effect in self.effects:
            value = writer.variable(Output(effect.output))
            match effect:
                case Assigned(_, table, key):
                    writer.line(f"{writer.bind(table, 'module')}[{literal(writer, key)}] = {value}")
                case GradAssigned(_, of):
                    writer.line(f"{writer.variable(of)}.grad = {value}")
                case Moved(_, slot, with_grad, counted):
                    name = writer.variable(slot)
                    grad = writer.bind(torch.enable_grad if with_grad else torch.no_grad, "grad_mode")
                    with writer.block(f"with {grad}():"):
                        writer.line(f"{name}.set_({value})")
                    if not counted:
                        writer.line(f"{writer.bind(set_version, 'set_version')}({name}, {name}._version - 1)")


@dataclass(frozen=True)
class DynamicMarks(Stage):
    """Tell a front end which sizes of the outputs are symbolic."""

    dims: tuple[tuple[int, frozenset[int]], ...]

    def leave(self, writer: Writer) -> None:
        mark = writer.bind(mark_dynamic_dims, "mark_dynamic_dims")
        for index, dims in self.dims:
            writer.line(f"{mark}({writer.variable(Output(index))}, {set(dims)})")


@dataclass(frozen=True)
class GradModeAfter(Stage):
    """A program that leaves another grad mode to its caller."""

    enabled: bool

    def leave(self, writer: Writer) -> None:
        writer.line(f"{writer.bind(set_grad_enabled, 'set_grad_enabled')}({self.enabled})")


@dataclass(frozen=True)
class AutocastAfter(Stage):
    """A program that leaves another autocast state to its caller."""

    state: AutocastState

    def leave(self, writer: Writer) -> None:
        setter = writer.bind(set_autocast_state, "set_autocast_state")
        writer.line(f"{setter}({writer.bind(self.state, 'autocast_state')})")


def stages_of(joint: Joint, debug_assert: bool, state: int, aot_id: int) -> list[Stage]:
    """The stages that a program needs, outermost first."""
    stages: list[Stage] = []
    if debug_assert:
        stages.append(Assumptions(joint.inputs, state, aot_id))
    made = tuple(facts.recorded.slot for facts in joint.inputs if facts.made_to_require_grad)
    if made:
        stages.append(RequireGrad(made, joint.is_training or not any(facts.written for facts in joint.touched)))
    if joint.autocast_after is not None:
        stages.append(AutocastAfter(joint.autocast_after))
    if joint.grad_mode_after is not None:
        stages.append(GradModeAfter(joint.grad_mode_after))
    dims = tuple((i, dynamic_dims(t)) for i, t in enumerate(joint.outputs.tensors) if t is not None and dynamic_dims(t))
    if dims:
        stages.append(DynamicMarks(dims))
    if joint.effects:
        stages.append(Escapes(joint.effects))
    stages.append(Aliases(joint.outputs, joint.recording.grad_enabled))
    if joint.touched:
        # Before views are taken: they would take a new version for a write.
        stages.append(Versions(tuple(joint.touched)))
        stages.append(WriteBack(tuple(joint.touched), frozenset(joint.signature.returned)))
    return stages


def is_symbolic(tensor: Tensor) -> bool:
    """Whether the geometry of a tensor is not known in numbers."""
    return any(isinstance(n, SymInt) for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


def dynamic_dims(tensor: Tensor) -> frozenset[int]:
    """The dimensions of a tensor whose size is symbolic."""
    return frozenset(d for d, n in enumerate(tensor.shape) if isinstance(n, SymInt) and not n.node.expr.is_number)


def _op_name(writer: Writer, op: OpOverload) -> str:
    return writer.bind(op, f"{op._schema.name.split('::')[1]}_{op._overloadname}")


def _arguments(writer: Writer, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    return [*(literal(writer, a) for a in args), *(f"{key}={literal(writer, a)}" for key, a in kwargs.items())]


def literal(writer: Writer, value: Any) -> str:
    """A value as Python text, bound to a name where text cannot say it."""
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    if type(value) in (list, tuple) and all(type(v) in (bool, int) for v in value):
        return repr(value)
    return writer.bind(value, type(value).__name__)
