"""Run-time concerns as stages around the compiled graphs."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch
from torch import SymInt, Tensor

from .._torch import (
    AutocastState,
    is_jagged_size,
    mark_dynamic_dims,
    saved_hooks_are_on,
    set_autocast_state,
    set_grad_enabled,
    set_version,
    set_versions,
    shares_version_counter,
    versions_of,
)
from ..abstract.sparse import storages_of
from ..codegen.changes import write_change
from ..codegen.writer import Stage, Writer, arguments_text, grad_mode, literal, op_name, tuple_of
from ..errors import AssumptionError, UnsupportedError
from ..graph.graph import Step
from ..joint.build import Joint
from ..joint.hooks import GradRetained, HookAdded, HookEffect, hook_over
from ..joint.inputs import InputFacts, Reshaped, Resized, StorageReplaced, WrittenBack, WrittenInGraph, has_version
from ..joint.side_effects import Assigned, AttributeSet, Changed, Effect, GradAssigned, InnerResult, Moved
from ..locks import recording_lock
from ..slots import Grown, Inner, Output, Primal, Returned, Updated
from ..subclasses.layout import is_wrapper
from .aliases import Aliases, is_late, move_version
from .saved_tensors import Noted


# ---------------------------------------------------------------------------------------------------------------------
# Hooks that a program registers on inputs and results, and gradients that it asks autograd to keep there.
@dataclass(frozen=True)
class RegisterHooks(Stage):
    """Each call registers them again, as eager does: on inputs that are written later right at the start."""

    effects: tuple[HookEffect, ...]

    def enter(self, writer: Writer) -> None:
        for effect in self.effects:
            if isinstance(effect, HookAdded) and effect.before_writes:
                self._register(writer, effect)

    def leave(self, writer: Writer) -> None:
        for effect in self.effects:
            match effect:
                case GradRetained(of):
                    self._bring_up_to_date(writer, of)
                    writer.line(f"{writer.variable(of)}.retain_grad()")
                case HookAdded(before_writes=False):
                    self._register(writer, effect)

    def _register(self, writer: Writer, effect: HookAdded) -> None:
        hook = writer.bind(effect.hook, "hook")
        if effect.captured:
            tensors = [writer.variable(Output(output)) for _, output in effect.captured]
            over = partial(hook_over, effect.hook, [old for old, _ in effect.captured])
            hook = f"{writer.bind(over, 'hook_over')}({', '.join(tensors)})"
        self._bring_up_to_date(writer, effect.of)
        writer.line(f"{writer.variable(effect.of)}.{effect.how}({hook})")

    def _bring_up_to_date(self, writer: Writer, of: Primal | Output) -> None:
        """Torch 2.13 crashes where a hook is given to a view whose base was written and that was not used since."""
        writer.line(f"{writer.variable(of)}.grad_fn")


@dataclass(frozen=True)
class TellNode(Stage):
    """Tell the program's node of results, as long as the caller holds them: `watch` and `note_results` say what for."""

    tell: Callable[[Tensor, tuple[Tensor, ...]], None]
    results: tuple[Returned | Primal, ...]
    tracked: Returned  # something that the node gives

    def leave(self, writer: Writer) -> None:
        results = tuple_of([writer.variable(slot) for slot in self.results])
        tell = writer.bind(self.tell, self.tell.__name__)
        writer.line(f"{tell}({writer.variable(self.tracked)}, {results})")


def note_results(tracked: Tensor, results: tuple[Tensor, ...]) -> None:
    """Let the backward see that the caller has written to a result which it computes again, where eager saves it."""
    node = tracked.grad_fn
    if node is not None:  # gradients are on
        known = () if node.noted is None else node.noted.versions  # type: ignore[attr-defined]
        versions = [(weakref.ref(tensor), tensor._version) for tensor in results if not tensor.is_inference()]
        node.noted = Noted(saved_hooks_are_on(), known, versions)  # type: ignore[attr-defined]


def watch(tracked: Tensor, results: tuple[Tensor, ...]) -> None:
    """Let the backward find results whose gradients are not whole outside."""
    node = tracked.grad_fn
    if node is not None:  # gradients are on
        node.watched = tuple(map(weakref.ref, results))  # type: ignore[attr-defined]


def refusing_whole_gradients(inner: tuple[InnerResult, ...]) -> Callable[..., None]:
    """A function that refuses a backward if more of a gradient is waited for than comes from outside."""

    def refuse(watched: Sequence[weakref.ref[Tensor]], tangents: Sequence[Tensor | None]) -> None:
        for reference, result in zip(watched, inner, strict=True):
            tensor = reference()
            if tensor is None or all(tangents[k] is None for k in result.tangents):
                continue
            if tensor.retains_grad or tensor._backward_hooks:
                raise UnsupportedError(
                    f"{result.name} has a hook, or retain_grad() was called on it, and {result.why}. Do so with what "
                    "is computed from it outside, or compile with fallback='eager'."
                )

    return refuse


# ---------------------------------------------------------------------------------------------------------------------
# Run-time concerns as stages around the compiled graphs.
#
# A stage writes lines on the way in and on the way out. Stages nest: the first of the list is the outermost. A concern
# that a program does not have adds no stage, and so no line.
@dataclass(frozen=True)
class Assumptions(Stage):
    """Under `debug_assert`: check what the program was compiled for, where no guard does."""

    inputs: tuple[InputFacts, ...]
    state: int  # how many of them are parameters and buffers
    aot_id: int

    def enter(self, writer: Writer) -> None:
        broken = writer.bind(self._broken, "broken_assumption")
        tensor = writer.bind(Tensor, "Tensor")
        outer = [facts for facts in self.inputs if not isinstance(facts.recorded.slot, Inner)]
        for i, facts in enumerate(outer):
            name, layout = writer.variable(facts.recorded.slot), facts.recorded.layout
            if not facts.recorded.is_tensor:
                writer.line(f"if isinstance({name}, {tensor}): {broken}({i}, 'would not be a tensor')")
                continue
            if layout is not None:
                fact = f"would be a {layout.kind.__name__} of {' and '.join(layout.metadata[0])}"
                same = f"{writer.bind(layout.is_that_of, 'same_structure')}({name})"
                writer.line(f"if not {same}: {broken}({i}, {fact!r})")
            if facts.recorded.leaf is None:
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
    at_once: bool  # otherwise at the end: nothing is differentiated, and memory that they share is written

    def enter(self, writer: Writer) -> None:
        if self.at_once:
            self._set(writer)

    def leave(self, writer: Writer) -> None:
        if not self.at_once:
            self._set(writer)

    def undo(self, writer: Writer) -> None:
        for slot in self.slots if self.at_once else ():
            writer.line(f"{writer.variable(slot)}.requires_grad_(False)")

    def _set(self, writer: Writer) -> None:
        for slot in self.slots:
            writer.line(f"{writer.variable(slot)}.requires_grad_()")


class Count(Enum):
    """How the version counter of an input is kept right."""

    UNSEEN = auto()  # it has none that can be seen
    SHARED = auto()  # the recording had one for all inputs in a memory: noted at the start, and set from there
    AT_THE_END = auto()  # how often the changes would count is not known: they do not, and are counted together
    AS_DONE = auto()  # each change counts as it is carried out; what is missing is added
    NEVER = auto()  # eager does not count the write, such as that of batch norm to its running statistics


def count_of(facts: InputFacts, training: bool) -> Count:
    """Which case an input is; a counter that is not noted is moved on and not set, for other inputs may share it."""
    if not has_version(facts):
        return Count.UNSEEN
    if facts.recorded.parent is not None:
        return Count.SHARED
    match facts.place:
        case Reshaped() if training:  # it may be counted already, when it was saved
            return Count.AT_THE_END
        case Resized() | StorageReplaced(counted=True):
            return Count.AT_THE_END
    uncounted = facts.version_change == 0 and facts.place is None and not is_wrapper(facts.recorded.seen)
    return Count.NEVER if uncounted and isinstance(facts.data, WrittenBack) else Count.AS_DONE


@dataclass(frozen=True)
class WriteBack(Stage):
    """Inputs that the program changed: first their shape, then their data, in input order."""

    inputs: tuple[InputFacts, ...]
    returned: frozenset[Returned]  # by the graph
    training: bool
    grad_enabled: bool  # by the caller

    def leave(self, writer: Writer) -> None:
        early = [facts for facts in self.inputs if facts.takes_old_elements]
        for facts in early:
            self._write(writer, facts)
        for facts in self.inputs:
            if facts.reshapes:
                if early and self.training and facts.recorded.parent is not None:
                    # Of a view whose base was written, torch knows only then that it is no leaf any more.
                    writer.line(f"{writer.variable(facts.recorded.slot)}.grad_fn")
                with self._counted_later(writer, facts):
                    for step in facts.reshapes:
                        self._reshape(writer, writer.variable(facts.recorded.slot), step)
        for facts in self.inputs:
            if facts not in early:
                self._write(writer, facts)
            if Grown(facts.recorded.slot) in self.returned:
                grown = writer.variable(Grown(facts.recorded.slot))
                with self._counted_later(writer, facts):
                    writer.line(f"{writer.variable(facts.recorded.slot)}.detach().copy_({grown})")

    def _write(self, writer: Writer, facts: InputFacts) -> None:
        if isinstance(facts.data, WrittenBack):
            target, new = writer.variable(facts.recorded.slot), writer.variable(Updated(facts.recorded.slot))
            if count_of(facts, self.training) is Count.NEVER:  # not even for a moment: another thread may be looking
                writer.line(f"{target}.data.copy_({new})")
                return
            # A write that autograd did not see in eager must not be seen here.
            unseen = facts.requires_grad and not facts.followed
            seen = self.grad_enabled or facts.followed
            with self._counted_later(writer, facts), grad_mode(writer, seen, self.grad_enabled):
                writer.line(f"{target}{'.detach()' if unseen else ''}.copy_({new})")

    def _reshape(self, writer: Writer, target: str, step: Step) -> None:
        """Change the shape of the caller's tensor as the program did."""
        arguments = [target, *arguments_text(writer, step.args[1:], step.kwargs)]
        with grad_mode(writer, step.grad_enabled, self.grad_enabled):
            writer.line(f"{op_name(writer, step.op)}({', '.join(arguments)})")

    def _counted_later(self, writer: Writer, facts: InputFacts) -> contextlib.AbstractContextManager[None]:
        """Lines that leave the version of an input alone, if all of its changes are counted at the end."""
        at_the_end = count_of(facts, self.training) is Count.AT_THE_END
        return _version_kept(writer, facts) if at_the_end else contextlib.nullcontext()


@contextlib.contextmanager
def _version_kept(writer: Writer, facts: InputFacts) -> Iterator[None]:
    name, version = writer.variable(facts.recorded.slot), writer.fresh("version")
    writer.line(f"{version} = {name}._version")
    yield
    writer.line(f"{writer.bind(set_version, 'set_version')}({name}, {version})")


@dataclass(frozen=True)
class Versions(Stage):
    """Version counters say what they would say in eager, however often the run time itself has written."""

    inputs: tuple[InputFacts, ...]
    training: bool
    when_saved: Mapping[Primal, int]  # what was counted already when autograd saved an input

    def enter(self, writer: Writer) -> None:
        """Note shared counters. What only counts does so before anything is saved: others may share its counter."""
        for facts in filter(self._only_counts, self.inputs):
            move_version(writer, writer.variable(facts.recorded.slot), self._missing(facts))
        for facts in filter(self._is_shared, self.inputs):
            name = writer.variable(facts.recorded.slot)
            version = writer.variables["version of", name] = writer.fresh("version")
            writer.line(f"{version} = {name}._version")
        for facts in filter(self._only_counts_in_memory, self.inputs):
            self._set(writer, facts)

    def undo(self, writer: Writer) -> None:
        for facts in filter(self._only_counts, self.inputs):
            move_version(writer, writer.variable(facts.recorded.slot), -self._missing(facts))
        for facts in filter(self._only_counts_in_memory, self.inputs):
            name, setter = writer.variable(facts.recorded.slot), writer.bind(set_version, "set_version")
            writer.line(f"{setter}({name}, {writer.variables['version of', name]})")

    def leave(self, writer: Writer) -> None:
        for facts in self.inputs:
            match count_of(facts, self.training):
                case Count.SHARED if not self._only_counts_in_memory(facts):
                    self._set(writer, facts)
                case Count.AT_THE_END | Count.AS_DONE if self._missing(facts) and not self._only_counts(facts):
                    move_version(writer, writer.variable(facts.recorded.slot), self._missing(facts))

    def _set(self, writer: Writer, facts: InputFacts) -> None:
        """The version of an input in shared memory, from the one that was noted."""
        name, setter = writer.variable(facts.recorded.slot), writer.bind(set_version, "set_version")
        version = writer.variables["version of", name]
        writer.line(f"{setter}({name}, {version} + {facts.version_change - self._later_moves(facts)})")

    def _missing(self, facts: InputFacts) -> int:
        counted = self.when_saved.get(facts.recorded.slot, 0)
        if count_of(facts, self.training) is not Count.AT_THE_END:
            counted += isinstance(facts.data, WrittenBack) + len(facts.reshapes)
        return facts.version_change - counted - self._later_moves(facts)

    def _is_shared(self, facts: InputFacts) -> bool:
        return count_of(facts, self.training) is Count.SHARED

    def _only_counts(self, facts: InputFacts) -> bool:
        """Whether nothing is done to an input but that its counter moves: a write to no elements."""
        as_done = count_of(facts, self.training) is Count.AS_DONE
        return as_done and not facts.is_acted_on and self._missing(facts) > 0

    def _only_counts_in_memory(self, facts: InputFacts) -> bool:
        """Likewise where inputs share memory, and nothing at all is done to it."""
        memory = facts.recorded.parent
        alias_group = [f for f in self.inputs if f.recorded is memory or f.recorded.parent is memory]
        return self._is_shared(facts) and not any(f.written or f.place for f in alias_group)

    def _later_moves(self, facts: InputFacts) -> int:
        """How often `set_` will still count for an input: once for itself, and for those whose counter it shares."""
        memory = facts.recorded.parent
        alias_group = [f for f in self.inputs if f is facts or f.recorded.parent is memory] if memory else [facts]
        moving = [f for f in alias_group if isinstance(f.place, StorageReplaced) and f.place.counted]
        seen = facts.recorded.seen
        return sum(f is facts or shares_version_counter(f.recorded.seen, seen) for f in moving)


@dataclass(frozen=True)
class WritesInGraph(Stage):
    """Inputs that the graph itself writes to: a compiler may count that or not, so what it counts is taken back."""

    inputs: tuple[InputFacts, ...]

    def enter(self, writer: Writer) -> None:
        written, before = writer.fresh("written"), writer.fresh("versions")
        writer.variables["written", "in graph"], writer.variables["versions", "before"] = written, before
        writer.line(f"{written} = {tuple_of(writer.listed(facts.recorded.slot for facts in self.inputs))}")
        writer.line(f"{before} = {writer.bind(versions_of, 'versions_of')}({written})")

    def leave(self, writer: Writer) -> None:
        written, before = writer.variables["written", "in graph"], writer.variables["versions", "before"]
        writer.line(f"{writer.bind(set_versions, 'set_versions')}({written}, {before})")


@dataclass(frozen=True)
class Escapes(Stage):
    """Tensors that the program put elsewhere than into its result."""

    effects: tuple[Effect, ...]

    def leave(self, writer: Writer) -> None:
        for effect in self.effects:
            match effect:
                case Assigned():
                    self._assign(writer, effect)
                case GradAssigned(output, of):
                    writer.line(f"{writer.variable(of)}.grad = {writer.variable(Output(output))}")
                case Changed(outputs, changes, shared):
                    names = [writer.variable(Output(output)) for output in outputs]
                    with writer.block(f"with {writer.bind(recording_lock, 'recording_lock')}:"):
                        for change in changes:
                            write_change(writer, change, names, shared)

    def _assign(self, writer: Writer, effect: Assigned) -> None:
        """Put a result where the program put it; no recording in another thread takes it for one of its own."""
        values = [writer.variable(Output(output)) for output in effect.outputs]
        value = values[0] if effect.build is None else f"{writer.bind(effect.build, 'build')}([{', '.join(values)}])"
        owner, key = writer.fresh("owner"), literal(writer, effect.key)
        with writer.block(f"with {writer.bind(recording_lock, 'recording_lock')}:"):
            writer.line(f"{owner} = {writer.bind(effect.owner.find, 'find_owner')}()")
            if type(effect.owner.find()) is dict:
                writer.line(f"if {owner} is not None: {owner}[{key}] = {value}")
            else:
                writer.line(f"if {owner} is not None: {writer.bind(effect.put, 'put')}({owner}, {key}, {value})")


@dataclass(frozen=True)
class Moves(Stage):
    """Inputs that the program moved to other memory, and the views that it took of them afterwards."""

    effects: tuple[Moved, ...]
    aliases: Aliases

    def leave(self, writer: Writer) -> None:
        for effect in self.effects:
            name, value = writer.variable(effect.input), writer.variable(Output(effect.output))
            if effect.leaf:  # `set_` would give it a new end of its tape, which the program's own node does not know
                writer.line(f"{name}.data = {value}")
            else:
                grad = writer.bind(torch.enable_grad if effect.with_grad else torch.no_grad, "grad_mode")
                with writer.block(f"with {grad}():"):
                    writer.line(f"{name}.set_({value})")
            if effect.counted is effect.leaf:  # `set_` counts as a write, and `.data =` does not
                move_version(writer, name, 1 if effect.counted else -1)
        self.aliases.take_late(writer)


@dataclass(frozen=True)
class Attributes(Stage):
    """Python attributes of results; a list or dict is a new one at each call."""

    attributes: tuple[AttributeSet, ...]

    def leave(self, writer: Writer) -> None:
        for attribute in self.attributes:
            match attribute.value:
                case Output():
                    value = writer.variable(attribute.value)
                case list() | dict() | set() | tuple():
                    value = f"{writer.bind(copy.deepcopy, 'deepcopy')}({writer.bind(attribute.value, attribute.name)})"
                case _:
                    value = literal(writer, attribute.value)
            writer.line(f"vars({writer.variable(attribute.of)})[{attribute.name!r}] = {value}")


@dataclass(frozen=True)
class DynamicMarks(Stage):
    """Tell a front end which sizes of the outputs are symbolic."""

    dims: tuple[tuple[int, frozenset[int]], ...]

    def leave(self, writer: Writer) -> None:
        mark = writer.bind(mark_dynamic_dims, "mark_dynamic_dims")
        for index, dims in self.dims:
            writer.line(f"{mark}({writer.variable(Output(index))}, {set(dims)})")


@dataclass(frozen=True)
class ModesAfter(Stage):
    """A program that leaves another grad mode, or another autocast state, to its caller."""

    grad_enabled: bool | None
    autocast: AutocastState | None

    def leave(self, writer: Writer) -> None:
        if self.grad_enabled is not None:
            writer.line(f"{writer.bind(set_grad_enabled, 'set_grad_enabled')}({self.grad_enabled})")
        if self.autocast is not None:
            state = writer.bind(self.autocast, "autocast_state")
            writer.line(f"{writer.bind(set_autocast_state, 'set_autocast_state')}({state})")


def stages_of(
    joint: Joint,
    debug_assert: bool,
    state: int,
    aot_id: int,
    counted: Mapping[Primal, int],
    noted: Sequence[Returned],
) -> list[Stage]:
    """The stages that a program needs, outermost first.

    `counted` is what was counted when inputs were saved, `noted` are results whose versions the backward compares.
    """
    stages: list[Stage] = []
    if noted:
        stages.append(TellNode(note_results, tuple(noted), joint.signature.tangents[0].of))
    if debug_assert:
        stages.append(Assumptions(joint.inputs, state, aot_id))
    if joint.inner_results:
        inner = tuple(result.of for result in joint.inner_results)
        stages.append(TellNode(watch, inner, joint.signature.tangents[0].of))
    if joint.hooks:
        stages.append(RegisterHooks(joint.hooks))
    stages += _requiring_grad(joint)
    if joint.autocast_after is not None or joint.grad_mode_after is not None:
        stages.append(ModesAfter(joint.grad_mode_after, joint.autocast_after))
    dims = tuple((i, dynamic_dims(t)) for i, t in enumerate(joint.outputs.tensors) if t is not None and dynamic_dims(t))
    if dims and not joint.recording.session.recorder.has_symbols_of_reads:
        stages.append(DynamicMarks(dims))
    return [*stages, *_giving_results(joint), *_writing_back(joint, counted)]


def _requiring_grad(joint: Joint) -> Iterator[Stage]:
    """Inputs that the program makes require grad: those last whose memory it writes, if it differentiates nothing."""
    made = [facts.recorded.slot for facts in joint.inputs if facts.made_to_require_grad]
    last = [] if joint.is_training else [slot for slot in made if _shares_written_memory(joint, slot)]
    if first := tuple(slot for slot in made if slot not in last):
        yield RequireGrad(first, at_once=True)
    if last:
        yield RequireGrad(tuple(last), at_once=False)


def _giving_results(joint: Joint) -> Iterator[Stage]:
    """Results are taken from the caller's tensors, then go where the program put them, and inputs are moved."""
    moves = tuple(effect for effect in joint.effects if isinstance(effect, Moved))
    grads = tuple(effect for effect in joint.effects if isinstance(effect, GradAssigned))
    late = tuple(effect for effect in grads if is_late(joint.outputs.results[effect.output]))
    early = tuple(effect for effect in grads if effect not in late)  # in the shape that their tensors still have
    escapes = tuple(effect for effect in joint.effects if effect not in (*moves, *early))
    aliases = Aliases(joint.outputs, joint.recording.grad_enabled)
    if escapes:
        yield Escapes(escapes)
    if joint.attributes:
        yield Attributes(joint.attributes)
    if moves:
        yield Moves(moves, aliases)
    if early:
        yield Escapes(early)
    if not joint.outputs.are_as_the_graph_gives_them:
        yield aliases


def _writing_back(joint: Joint, counted: Mapping[Primal, int]) -> Iterator[Stage]:
    """Changes of inputs: before views are taken, which would take a new version for a write."""
    if touched := tuple(joint.touched):
        yield Versions(touched, joint.is_training, counted)
        returned = frozenset(joint.signature.returned)
        yield WriteBack(touched, returned, joint.is_training, joint.recording.grad_enabled)
        in_graph = tuple(f for f in touched if isinstance(f.data, WrittenInGraph) and has_version(f))
        if in_graph:
            yield WritesInGraph(in_graph)


def _shares_written_memory(joint: Joint, slot: Primal) -> bool:
    """Whether a view of an input is written: autograd would forbid it once the input requires grad."""
    lifted = joint.recording.real_tensors
    written = [lifted[f.recorded.slot] for f in joint.touched if f.written and f.recorded.slot in lifted]
    return any(not set(storages_of(t)).isdisjoint(storages_of(lifted[slot])) for t in written)


def dynamic_dims(tensor: Tensor) -> frozenset[int]:
    """The dimensions of a tensor whose size is symbolic."""
    return frozenset(d for d, n in enumerate(tensor.shape) if _is_symbol(n))


def _is_symbol(number: int | SymInt) -> bool:
    return isinstance(number, SymInt) and not is_jagged_size(number) and not number.node.expr.is_number
