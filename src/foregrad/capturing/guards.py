"""Guards: the checks that let a call reach a program only if all that the recording relied on still holds (F-2).

The checks are written out in front of the program's own lines, in the same function: a call takes its arguments
apart, looks at the global state and the Python values, and checks all tensors in one call into C++.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import SymInt, Tensor

from .._torch import (
    FakeTensor,
    GlobalStateGuard,
    attention_settings,
    backend_settings,
    dispatch_mode_depth,
    expression_of,
    foreign_function_mode,
    forward_ad_level,
    function_mode_depth,
    is_jagged_size,
    is_static,
    is_view,
    shape_guard,
    shape_guard_expression,
    tensor_guard,
)
from ..abstract.lean_engine import chosen_by_backends
from ..abstract.sparse import SPARSE, parts_of, sparse_facts
from ..codegen.pytree import Object, build_expression, numbered, write_take_apart, write_told_apart
from ..codegen.writer import FEW, Writer, literal, tuple_of
from ..joint.inputs import InputFacts
from ..joint.side_effects import Changed
from ..record.alias_groups import root_of
from ..record.fakify import has_hooks
from ..record.reads import Read
from ..runtime.assemble import Program
from ..runtime.call import (
    lies_in_gradient,
    read_inner,
    source_expression,
    write_gradients,
    write_inner_tensors,
    write_shared_memory,
)
from ..runtime.parts import Missed
from ..slots import FreeNumber, GradOf, Inner, Input, Output, Part, Primal, Slot
from ..subclasses.layout import Fixed, FromLeaf, Layout
from ..values import Change, Remembered, is_plain, same_value, shown, weakly
from .capture import Capture
from .draws import Otherwise
from .explain import AmbientBefore, GuardText, TensorsBefore
from .found_numbers import write_numbers
from .kinds import is_users_wrapper, own_attributes
from .patterns import ObjectPattern
from .sources import Source

MISS = object()  # what a program returns when a call is not for it


class Misses(threading.local):
    """The read, or the draw, at which the last call of this thread found other data than the recording."""

    last: Change | None = None

    def note(self, missed: Missed) -> object:
        """The call is for another program."""
        read = missed.read
        place = "" if read.sized or type(missed.value) is bool else read.place
        self.last = Change(f"{read.what} at {read.place}", shown(read.value), shown(missed.value), place=place)
        return MISS

    def note_draw(self, otherwise: Otherwise) -> object:
        """The call has drawn numbers for another program."""
        self.last = Change(otherwise.what, shown(otherwise.was), shown(otherwise.now))
        return MISS

    def take(self) -> Change | None:
        """What it was, if there was one; it is told once."""
        last, self.last = self.last, None
        return last


class GuardedEntry:
    """Takes the user's own arguments, checks them, and gives back the user's own structure."""

    guarded = True
    frees: Sequence[Primal] = ()

    def __init__(self, capture: Capture) -> None:
        self.joint = capture.joint
        self.arguments = capture.arguments.tree  # of (args, kwargs)
        self.inputs = [
            f.recorded.slot for f in capture.joint.inputs if isinstance(f.recorded.slot, Input)
        ]  # its leaves
        self.result = capture.result
        self.state = capture.state
        self.free_tensors = capture.free_tensors
        self.free_variables = capture.free_variables
        self.shared = capture.shared
        self.reads = capture.reads
        self.numbers = capture.numbers
        self.drawn = capture.drawn
        self.misses = Misses()
        self.places: dict[str, str] = {}  # text that reads a place: the user's name for it
        self.explainers: dict[str, Callable[..., Change | None]] = {}  # by the names of checks that are in C++
        self._variables: dict[Slot, str] = {}

    def text(self, program: Program) -> GuardText:
        """The guards, to be asked why they refuse a call."""
        known = [(slot, name) for slot, name in self._variables.items() if not isinstance(slot, Part)]
        variables = {name: str(slot) for slot, name in known if name.isidentifier()}  # others are constants
        places = {**self.places, **variables}
        return GuardText(program.source, program.call.__globals__, places, self.explainers, self.misses.take)

    def open(self, writer: Writer) -> str:
        return "def call(args, kwargs):"

    def enter(self, writer: Writer) -> None:
        miss = f"return {writer.bind(MISS, 'MISS')}"
        self._variables = writer.variables
        self._check_ambient(writer, miss)
        self._take_arguments(writer, miss)
        self._check_constants(writer, miss)
        self._look_around(writer, miss)
        self._take_inner_tensors(writer, miss, in_gradients=False)
        self._take_gradients(writer, miss)
        self._take_inner_tensors(writer, miss, in_gradients=True)
        self._check_tensors(writer, miss)
        self._check_shared(writer, miss)
        self._check_shapes(writer, miss)
        self._check_reads(writer, miss)
        self._draw(writer)

    def leave(self, writer: Writer, results: int) -> None:
        names = [writer.variable(Output(i)) for i in range(results)]
        writer.line(f"return {build_expression(writer, self.result.tree, names, self.result.shared)}")

    def miss(self, writer: Writer) -> str:
        if self.drawn is not None:
            writer.line(self._undo_draws(writer))
        return writer.bind(self.misses.note, "missed_read")

    def other_numbers(self, writer: Writer) -> str:
        miss = writer.bind(MISS, "MISS")
        return f"return {miss}" if self.drawn is None else f"return {self._undo_draws(writer)} or {miss}"

    def _draw(self, writer: Writer) -> None:
        """Draw from generators of Python's and numpy's, as the program did; this comes last, for it moves them."""
        if self.drawn is not None:
            note, again = writer.bind(self.misses.note_draw, "missed_draw"), writer.bind(self.drawn, "draw_again")
            writer.line(f"drawn = {again}()")
            writer.line(f"if type(drawn) is not list: return {note}(drawn)")

    def _undo_draws(self, writer: Writer) -> str:
        assert self.drawn is not None
        return f"{writer.bind(self.drawn.undo, 'undo_draws')}(drawn)"

    # -------------------------------------------------------------------------------------------- checks
    def _check_ambient(self, writer: Writer, miss: str) -> None:
        """Grad mode, autocast, determinism, default dtype; no transform or recording may be under way."""
        ambient = GlobalStateGuard()
        state = writer.bind(ambient.check, "same_global_state")
        self.explainers[state] = AmbientBefore(ambient).explain
        inference = writer.bind(torch.is_inference_mode_enabled, "is_inference_mode_enabled")
        depth = writer.bind(dispatch_mode_depth, "dispatch_mode_depth")
        level = writer.bind(forward_ad_level, "forward_ad_level")
        modes = writer.bind(function_mode_depth, "function_mode_depth")
        self.places |= {
            f"{inference}()": "inference mode",
            f"{depth}()": "the number of dispatch modes",
            f"{level}()": "the level of forward-mode AD",
            f"{modes}()": "the number of function modes",
        }
        wanted = "" if torch.is_inference_mode_enabled() else "not "
        conditions = [f"{state}()", f"{wanted}{inference}()", f"{depth}() == 0", f"{level}() < 0"]
        conditions.append(f"{modes}() == {function_mode_depth()}")
        if function_mode_depth():  # a default device is such a mode
            conditions.append(f"not {writer.bind(foreign_function_mode, 'foreign_function_mode')}()")
            device = writer.bind(torch.get_default_device, "get_default_device")
            self.places[f"{device}()"] = "the default device"
            conditions.append(f"{device}() == {writer.bind(torch.get_default_device(), 'default_device')}")
        for read in self._settings_of_kernels():
            conditions.append(f"{writer.bind(read, read.__name__)}() == {writer.bind(read(), 'settings')}")
            self.places[f"{writer.bind(read, read.__name__)}()"] = f"the {read.__name__.replace('_', ' ')}"
        _require(writer, conditions, miss)

    def _settings_of_kernels(self) -> Iterator[Callable[[], Any]]:
        """Settings that decide which operators run, or how their results lie in memory."""
        recording = self.joint.recording
        if recording.access.attention:
            yield attention_settings
        if any(chosen_by_backends(step.op) for step in recording.session.steps):
            yield backend_settings

    def _take_arguments(self, writer: Writer, miss: str) -> None:
        names = [writer.variable(slot) for slot in self.inputs]
        positional, keywords = self.arguments.items  # type: ignore[union-attr]
        write_take_apart(writer, positional, "args", names, miss)
        write_take_apart(writer, keywords, "kwargs", names, miss)
        opened = [node for _, node in numbered(self.arguments) if isinstance(node, Object)]
        if opened or any(isinstance(effect, Changed) for effect in self.joint.effects):
            write_told_apart(writer, self.arguments, miss)
        classes = {node.shape.kind for node in opened}
        found = frozenset(key for key, value in self.free_variables.seen.items() if type(value) in classes)
        if found:  # the program finds others of the kind by itself: none of those may be given
            ids = [f"id({writer.variable(Part(node.number))})" for node in opened]
            writer.line(f"if not {writer.bind(found, 'found_by_itself')}.isdisjoint({tuple_of(ids)}): {miss}")

    def _look_around(self, writer: Writer, miss: str) -> None:
        """What the program finds by itself; a place that no longer exists is another fact too."""
        around = self.free_variables
        found = around.plain or around.fixed or around.guards_state or around.modules_guard
        held = self._held_arguments()
        if not (self.state or self.free_tensors or found or held or self.numbers):
            return
        with writer.block("try:"):
            self._check_free_variables(writer, miss)
            self._take_state(writer)
            for slot, source in self.free_tensors.items():
                writer.line(f"{writer.variable(slot)} = {self._read(writer, source)}")
            write_numbers(writer, {self._read(writer, place.source): place for place in self.numbers}, miss)
            same = [f"{self._read(writer, source)} is {writer.variable(slot)}" for source, slot in held]
            _require(writer, same, miss)
            self._check_not_found(writer, miss)
        writer.line(f"except (KeyError, IndexError, AttributeError, ValueError, TypeError): {miss}")

    def _held_arguments(self) -> list[tuple[Source, Primal]]:
        """Places in which the program finds a tensor that it is given too, or finds in an argument: with it."""
        lifted = self.joint.recording.real_tensors
        read: list[tuple[Primal, Source | None]] = [
            *((slot, None) for slot in self.inputs),
            *self.free_tensors.items(),
            *self.state,
        ]
        return [
            (source, slot)
            for slot, known in read
            if slot in lifted
            for source in self.free_variables.sources.of_argument(lifted[slot])
            if known is None or (source is not known and "argument" in (source.how, known.how))
        ]

    def _check_not_found(self, writer: Writer, miss: str) -> None:
        """A program that may compare tensors must not be given one that it finds by itself, unless it was then, too."""
        if self.free_variables.compares_objects:
            found, lifted = self.free_variables.sources.outside_arguments(), self.joint.recording.real_tensors
            self.free_variables.lifetime.when_gone(found.readers.clear)
            given = [slot for slot in self.inputs if slot in lifted and not found.holds(lifted[slot])]
            if found and given:
                known = writer.bind(found.holds, "found_by_itself")
                _require(writer, [f"not {known}({writer.variable(slot)})" for slot in given], miss)

    def _take_state(self, writer: Writer) -> None:
        if len(self.state) <= FEW:
            for slot, source in self.state:
                writer.line(f"{writer.variable(slot)} = {self._read(writer, source)}")
            return
        tables = writer.bind(tuple([source.owner for _, source in self.state]), "tables")
        keys = writer.bind(tuple([source.key for _, source in self.state]), "keys")
        getitem = writer.bind(operator.getitem, "getitem")
        row = writer.row([slot for slot, _ in self.state], "state", f"[*map({getitem}, {tables}, {keys})]")
        self.places |= {str(item): str(slot) for item, (slot, _) in zip(row.items(), self.state, strict=True)}

    def _check_free_variables(self, writer: Writer, miss: str) -> None:
        around = self.free_variables
        conditions = [equality(writer, self._read(writer, source), value) for source, value in around.plain]
        for source, value in around.fixed:
            read = self._read(writer, source)
            known = around.lifetime.knows(value)
            conditions.append(f"id({read}) == {id(value)}" if known else f"{read} is {self._bind(writer, value)}")
        if around.guards_state:
            conditions.append(f"{writer.bind(around.state.holds, 'state_unchanged')}()")
        if around.modules_guard is not None:
            conditions.append(f"{writer.bind(around.modules_guard.holds, 'modules_unchanged')}()")
        _require(writer, conditions, miss)

    def _check_constants(self, writer: Writer, miss: str) -> None:
        conditions = []
        objects = {self.inputs[i]: pattern for i, pattern in self.free_variables.patterns.items()}
        for facts in self.joint.inputs:
            slot, seen = facts.recorded.slot, facts.recorded.seen
            if isinstance(seen, SymInt):
                conditions.append(f"type({writer.variable(slot)}) is int")
            elif not isinstance(seen, Tensor) and slot not in objects and not isinstance(slot, FreeNumber):
                conditions.append(equality(writer, writer.variable(slot), seen))
        _require(writer, conditions, miss)
        for slot, pattern in objects.items():  # of a tensor, these are the attributes that it was given
            name, match = writer.variable(slot), writer.bind(pattern.match, f"match_{pattern.name}")
            value = f"getattr({name}, '__dict__', None)" if slot in self._tensor_slots() else name
            writer.line(f"{name}_tensors = {match}({value})")
            writer.line(f"if {name}_tensors is None: {miss}")

    def _take_inner_tensors(self, writer: Writer, miss: str, in_gradients: bool) -> None:
        """Tensors in wrapper subclasses: of the same type, put together in the same way."""
        for facts in self.joint.inputs:
            slot, layout = facts.recorded.slot, facts.recorded.layout
            chosen = lies_in_gradient(slot) is in_gradients
            if layout is not None and facts.recorded.same_as is None and chosen:
                self._check_wrapper(writer, slot, layout, miss)
                self._check_beside_wrapper(writer, slot, layout, miss)
        write_inner_tensors(writer, self.joint, in_gradients)

    def _check_beside_wrapper(self, writer: Writer, slot: Primal, layout: Layout, miss: str) -> None:
        """What is on a wrapper subclass of the user's beside its tensors and its context."""
        real = self.joint.recording.real_tensors.get(slot)
        if real is not None and is_users_wrapper(real):
            names, context = layout.metadata
            beside = AttributesBeside(vars(real), names, context)
            _require(
                writer, [f"{writer.bind(beside.hold, 'attributes_beside')}({writer.variable(slot)}.__dict__)"], miss
            )

    def _check_wrapper(self, writer: Writer, slot: Slot, layout: Layout, miss: str) -> None:
        name = read_inner(writer, slot)
        _require(writer, [f"type({name}) is {writer.bind(layout.kind, layout.kind.__name__)}"], miss)
        names, context = layout.metadata
        attributes, now = writer.fresh("attributes"), writer.fresh("context")
        writer.line(f"{attributes}, {now} = {name}.__tensor_flatten__()")
        _require(writer, [f"[*{attributes}] == {names}", _same_context(writer, now, context)], miss)
        leaves = [read_inner(writer, leaf) for leaf in layout.slots(slot)]
        for kind, numbers in (("size", layout.size), ("stride", layout.stride)):
            for dim, number in enumerate(numbers):
                if isinstance(number, FromLeaf):
                    same = f"{name}.{kind}()[{dim}] == {leaves[number.leaf]}.{number.kind}()[{number.dim}]"
                    _require(writer, [f"{name}.dim() == {len(numbers)}", same], miss)
        for attr, inner in layout.attrs:
            if isinstance(inner, Fixed):
                _require(writer, [_same_context(writer, f"{name}.{attr}", inner.value)], miss)
            elif inner is not None:
                self._check_wrapper(writer, Inner(slot, attr), inner, miss)

    def _take_gradients(self, writer: Writer, miss: str) -> None:
        """Gradients from before the call that the program looks at, or finds missing."""
        known = {facts.recorded.slot for facts in self.joint.inputs if isinstance(facts.recorded.slot, GradOf)}
        write_gradients(writer, self.joint)
        for facts in self.joint.inputs:
            slot = facts.recorded.slot
            if facts.recorded.same_as is not None:  # a tensor that is passed twice has one gradient
                continue
            if slot in known:
                _require(writer, [f"{writer.variable(slot)} is not None"], miss)
            elif self.joint.recording.looks_at_grad(facts.recorded) and GradOf(slot) not in known:  # type: ignore[arg-type]
                _require(writer, [f"{writer.variable(slot)}.grad is None"], miss)

    def _read(self, writer: Writer, source: Source) -> str:
        read = self._reading(writer, source)
        self.places[read] = source.path
        return read

    def _reading(self, writer: Writer, source: Source) -> str:
        if source.how == "argument":
            return source.expression(f"{writer.variable(self.inputs[source.owner])}_tensors", str(source.key))
        if source.how == "attribute":  # of an object that is not kept alive
            return source.expression(f"{writer.bind(self.free_variables.lifetime.hold(source.owner), 'source')}()", "")
        return source.expression(self._bind(writer, source.owner), literal(writer, source.key))

    def _bind(self, writer: Writer, owner: Any) -> str:
        """A name for a place, which is let go when the program can no longer run."""
        name = writer.bind(owner, "source")
        self.free_variables.lifetime.when_gone(functools.partial(writer.rebind, name, None))
        return name

    def _real(self, facts: InputFacts) -> Tensor:
        return self.joint.recording.real_tensors[facts.recorded.slot]

    def _tensor_slots(self) -> set[Primal]:
        return {facts.recorded.slot for facts in self.joint.inputs if facts.recorded.is_tensor}

    def _tensors(self) -> list[InputFacts]:
        return [facts for facts in self.joint.inputs if facts.recorded.is_tensor]

    def _check_tensors(self, writer: Writer, miss: str) -> None:
        tensors = self._tensors()
        if not tensors:
            return
        tensors = self._check_identities(writer, tensors, miss)
        lifted = [self._real(facts) for facts in tensors]
        shapes = [_shape(facts, real) for facts, real in zip(tensors, lifted, strict=True)]
        check = tensor_guard(lifted, [_fixed(size) for size, _ in shapes], [_fixed(stride) for _, stride in shapes])
        listed = writer.listed(facts.recorded.slot for facts in tensors)
        name = writer.bind(check, "tensors_match")
        self.explainers[name] = TensorsBefore(lifted, *map(list, zip(*map(_fixed_shape, shapes), strict=True))).explain
        _require(writer, [f"{name}({', '.join(listed)})"], miss)
        for facts, real in zip(tensors, lifted, strict=True):
            if real.layout in SPARSE:
                self._check_sparse(writer, facts.recorded.slot, real, miss)
        self._check_sources(writer, tensors, lifted, miss)
        self._check_attributes(writer, tensors, lifted, miss)
        self._check_sharing(writer, tensors, miss)

    def _check_sparse(self, writer: Writer, slot: Primal, real: Tensor, miss: str) -> None:
        """How many elements a sparse tensor holds, and what else the recording knew of it."""
        check = writer.bind(SparseBefore(real).holds, "sparse_alike")
        _require(writer, [f"{check}({writer.variable(slot)})"], miss)

    def _check_sources(
        self, writer: Writer, tensors: Sequence[InputFacts], lifted: Sequence[Tensor], miss: str
    ) -> None:
        """Leaves, views, offsets; hooks that a backward inside the program would meet."""
        conditions = self._hook_conditions(writer, tensors, lifted) if self.joint.recording.runs_backward else []
        for facts, real in zip(tensors, lifted, strict=True):
            for read in sorted(self.joint.recording.properties_read(facts.recorded)):
                found = f"{writer.variable(facts.recorded.slot)}.{read}"
                kind = type(real.grad_fn)
                conditions.append(
                    f"type({found}) is {writer.bind(kind, 'Node')}" if read == "grad_fn" else f"not {found}"
                )
        plainly = [are_base_leaves(real) for real in lifted] if not are_base_leaves(*lifted) else [True] * len(lifted)
        special = [i for i, facts in enumerate(tensors) if not plainly[i] or _has_symbolic_offset(facts)]
        for facts, real in ((tensors[i], lifted[i]) for i in special):
            name = writer.variable(facts.recorded.slot)
            conditions.append(f"{name}.is_leaf" if real.is_leaf else f"not {name}.is_leaf")
            conditions.append(f"{name}._is_view()" if real._is_view() else f"not {name}._is_view()")
            if not _has_symbolic_offset(facts):
                conditions.append(f"{name}.storage_offset() == {real.storage_offset()}")
        plain = [facts.recorded.slot for i, facts in enumerate(tensors) if i not in special]
        if len(plain) <= _WRITTEN_OUT:
            names = map(writer.variable, plain)
            conditions += [f"{x}.is_leaf and not {x}._is_view() and not {x}.storage_offset()" for x in names]
        else:
            leaves = [slot for slot in plain if self.joint.recording.real_tensors[slot].requires_grad]  # others are
            conditions.append(self._condition(writer, are_bases, _no_base_leaf, plain))
            conditions += [self._condition(writer, are_leaves, _no_base_leaf, leaves)] if leaves else []
        _require(writer, conditions, miss)

    def _hook_conditions(self, writer: Writer, tensors: Sequence[InputFacts], lifted: Sequence[Tensor]) -> list[str]:
        """Hooks that a backward inside the program would meet."""
        leaves = [
            (facts.recorded.slot, real) for facts, real in zip(tensors, lifted, strict=True) if real.requires_grad
        ]
        free = [slot for slot, real in leaves if not has_hooks(real)]
        check = writer.bind(has_hooks, "has_hooks")
        conditions = [f"{check}({writer.variable(slot)})" for slot, real in leaves if has_hooks(real)]
        return [*conditions, self._condition(writer, have_no_hooks, _hooks_found, free)] if free else conditions

    def _condition(
        self,
        writer: Writer,
        check: Callable[..., bool],
        explain: Callable[..., Change | None],
        slots: Sequence[Slot],
    ) -> str:
        """A check of many tensors at once, and what says why it fails."""
        name = writer.bind(check, check.__name__)
        self.explainers[name] = explain
        return f"{name}({', '.join(writer.listed(slots))})"

    def _check_attributes(
        self, writer: Writer, tensors: Sequence[InputFacts], lifted: Sequence[Tensor], miss: str
    ) -> None:
        """What the user has put on tensors: nothing, on nearly all."""
        bare, conditions = [], []
        arguments = {self.inputs[i] for i in self.free_variables.patterns}
        for facts, real in zip(tensors, lifted, strict=True):
            slot, held = facts.recorded.slot, own_attributes(real)
            if isinstance(slot, Inner):  # what is on it is the wrapper's own matter
                continue
            if held is None and type(real) in (Tensor, torch.nn.Parameter):
                bare.append(slot)
            elif held is not None and slot not in arguments:
                pattern, name = ObjectPattern(held), writer.variable(slot)
                conditions.append(f"{writer.bind(pattern.match, 'match_attributes')}({name}.__dict__) is not None")
                if pattern.tensors:  # which are read from this very tensor
                    conditions.append(f"{name} is {writer.bind(weakly(real), 'the_tensor')}()")
                pattern.release()
        if bare:
            check = writer.bind(have_no_attributes, "have_no_attributes")
            self.explainers[check] = _attributes_found
            if len(bare) <= _WRITTEN_OUT:
                conditions += [f"(not {x}.__dict__ or {check}({x}))" for x in map(writer.variable, bare)]
            else:
                conditions.append(f"{check}({', '.join(writer.listed(bare))})")
        _require(writer, conditions, miss)

    def _check_sharing(self, writer: Writer, tensors: Sequence[InputFacts], miss: str) -> None:
        """What is done to one input shows in those whose memory, or whose version counter, it shares."""
        changed = any(facts.data_changed or facts.version_change or facts.made_to_require_grad for facts in tensors)
        plain = [facts for facts in tensors if facts.recorded.layout is None]
        if len(plain) > 1 and (changed or self.shared or self.joint.backward.writes):
            reals = [self._real(facts) for facts in plain]
            if _lie_apart_from_the_start(plain, reals):
                slots = [facts.recorded.slot for facts in plain]
                _require(writer, [self._condition(writer, lie_apart, _none_apart, slots)], miss)
                return
            listed = writer.listed(facts.recorded.slot for facts in plain)
            shared = sharing_of_parts if any(real.layout in SPARSE for real in reals) else sharing_pattern
            pattern = shared(reals)
            found = f"{writer.bind(shared, 'sharing_pattern')}({tuple_of(listed)})"
            self.places[found] = f"which of {', '.join(str(facts.recorded.slot) for facts in plain)} share memory"
            _require(writer, [f"{found} == {pattern}"], miss)

    def _check_identities(self, writer: Writer, tensors: Sequence[InputFacts], miss: str) -> list[InputFacts]:
        """A tensor that was passed twice must be passed twice again; gives each tensor once."""
        once: dict[int, InputFacts] = {}
        conditions = []
        for facts in tensors:
            first = once.setdefault(id(self._real(facts)), facts)
            if first is not facts:
                conditions.append(f"{writer.variable(facts.recorded.slot)} is {writer.variable(first.recorded.slot)}")
        _require(writer, conditions, miss)
        return list(once.values())

    def _check_shared(self, writer: Writer, miss: str) -> None:
        """Shared memory: what autograd takes the inputs to be views of must be related as it was."""
        if not self.shared:
            return
        conditions = []
        for memory in self.shared:
            for slot, real in self.joint.recording.real_tensors.items():
                if any(real is member for member in memory.members):
                    alias_group = next(f for f in memory.families if f.root is root_of(real))
                    root, name = source_expression(writer, alias_group.source), writer.variable(slot)
                    found = name if root_of(real) is real else f"{name}._base"
                    conditions += [f"{found} is {root}"] if found != root else []
            for one, other in itertools.pairwise(memory.families):
                first, second = (source_expression(writer, alias_group.source) for alias_group in (one, other))
                conditions.append(f"{first} is not {second}")
        _require(writer, conditions, miss)
        write_shared_memory(writer, self.shared)
        roots = [(f.slot, f.root) for memory in self.shared for f in memory.families]
        roots += [(memory.slot, memory.base) for memory in self.shared]
        known = dict(roots)
        reals = [*known.values()]
        sizes: list[list[int | None]] = [[*real.shape] for real in reals]
        strides: list[list[int | None]] = [[*real.stride()] for real in reals]
        check = writer.bind(tensor_guard(reals, sizes, strides), "roots_match")
        self.explainers[check] = TensorsBefore(reals, sizes, strides).explain
        names = [writer.variable(slot) for slot in known]
        conditions = [f"{check}({', '.join(names)})"]
        for name, real in zip(names, known.values(), strict=True):
            conditions.append(f"{name}.is_leaf" if real.is_leaf else f"not {name}.is_leaf")
        _require(writer, conditions, miss)

    def _check_shapes(self, writer: Writer, miss: str) -> None:
        """Relations between sizes that the recording relied on."""
        engine = self.joint.recording.engine
        shape_env = getattr(engine, "shape_env", None)
        if shape_env is None or self.joint.recording.session.recorder.has_symbols_of_reads:
            return
        symbolic = [f for f in self.joint.inputs if isinstance(f.recorded.seen, (FakeTensor, SymInt))]
        expression = shape_guard_expression(
            shape_env, [f.geometry if f.geometry is not None else f.recorded.seen for f in symbolic]
        )
        if expression is not None:
            names = ", ".join(writer.variable(facts.recorded.slot) for facts in symbolic)
            check = writer.bind(shape_guard(expression, len(symbolic)), "sizes_fit")
            words = expression
            for i, facts in enumerate(symbolic):
                words = words.replace(f"L['t{i}']", str(facts.recorded.slot))
            self.explainers[check] = functools.partial(_sizes_found, words)
            _require(writer, [f"{check}({names})"], miss)

    def _check_reads(self, writer: Writer, miss: str) -> None:
        """Values that the program has read of its inputs, after all that they follow from is known to fit."""
        for read in self.reads:
            names = ", ".join(writer.variable(slot) for slot in read.inputs)
            check = writer.bind(read.holds, "read_holds")
            self.explainers[check] = functools.partial(_read_found, read)
            _require(writer, [f"{check}({names})"], miss)


def geometry(facts: InputFacts) -> Tensor:
    """An abstract tensor with the shape of an input before the program ran."""
    assert facts.geometry is not None
    return facts.geometry


def _shape(facts: InputFacts, real: Tensor) -> tuple[Sequence[Any], Sequence[Any]]:
    """Size and stride of an input before the program ran: symbols where they may change, None where there is none."""
    layout = facts.recorded.layout
    if layout is not None:
        return layout.size, layout.stride
    if real.layout in SPARSE:  # what it is put together from is compared beside
        return real.shape, (None,) * real.dim()
    tensor = real if is_static(facts.recorded.seen) else geometry(facts)
    return tensor.shape, tensor.stride()


def _fixed_shape(shape: tuple[Sequence[Any], Sequence[Any]]) -> tuple[list[int | None], list[int | None]]:
    return _fixed(shape[0]), _fixed(shape[1])


def _has_symbolic_offset(facts: InputFacts) -> bool:
    return not is_static(facts.recorded.seen) and isinstance(geometry(facts).storage_offset(), SymInt)


def _require(writer: Writer, conditions: Sequence[str], miss: str) -> None:
    for start in range(0, len(conditions), 16):
        writer.line(f"if not ({' and '.join(conditions[start : start + 16])}): {miss}")


def _fixed(numbers: Sequence[int | SymInt | FromLeaf | None]) -> list[int | None]:
    """Sizes or strides, with None for those that may change."""
    return [n if type(n) is int else None if n is None or _may_change(n) else int(n) for n in numbers]  # type: ignore[arg-type]


def _may_change(number: int | SymInt | FromLeaf) -> bool:
    if isinstance(number, SymInt):
        return is_jagged_size(number) or not expression_of(number).is_number
    return isinstance(number, FromLeaf)


_WRITTEN_OUT = 3  # tensors that are asked one by one; for more a call is shorter, and as fast
_is_leaf, _offset = operator.attrgetter("is_leaf"), Tensor.storage_offset


def are_base_leaves(*tensors: Tensor) -> bool:
    """Whether tensors are leaves and no views, each at the start of its storage: nearly all are.

    >>> x = torch.ones(4)
    >>> are_base_leaves(x, torch.ones(2)), are_base_leaves(x, x[1:])
    (True, False)
    """
    return are_leaves(*tensors) and are_bases(*tensors)


def are_leaves(*tensors: Tensor) -> bool:
    """Whether tensors are leaves."""
    return all(map(_is_leaf, tensors))


def are_bases(*tensors: Tensor) -> bool:
    """Whether tensors are no views, each at the start of its storage."""
    return not any(map(is_view, tensors)) and not any(map(_offset, tensors))


_hooks = tuple(map(operator.attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad")))


def have_no_hooks(*tensors: Tensor) -> bool:
    """Whether nothing happens when gradients of tensors are computed, as `has_hooks` says of each."""
    return not any(any(map(hooks, tensors)) for hooks in _hooks)


_attributes = operator.attrgetter("__dict__")


def have_no_attributes(*tensors: Tensor) -> bool:
    """Whether the user has put nothing on any of these tensors.

    >>> x = torch.ones(4)
    >>> x.tag = 1
    >>> have_no_attributes(torch.ones(2)), have_no_attributes(x, torch.ones(2))
    (True, False)
    """
    return not any(map(_attributes, tensors)) or all(own_attributes(tensor) is None for tensor in tensors)


def _attributes_found(*tensors: Tensor) -> Change | None:
    for i, tensor in enumerate(tensors):
        held = own_attributes(tensor)
        if held is not None:
            return Change(", its attributes,", "none", shown([*held]), argument=i)
    return None


def _hooks_found(*tensors: Tensor) -> Change | None:
    for i, tensor in enumerate(tensors):
        if has_hooks(tensor):
            return Change(", its hooks,", "none", "there", argument=i)
    return None


def _no_base_leaf(*tensors: Tensor) -> Change | None:
    for i, tensor in enumerate(tensors):
        for what, was, now in (
            (".is_leaf", True, tensor.is_leaf),
            ("._is_view()", False, is_view(tensor)),
            (".storage_offset()", 0, tensor.storage_offset()),
        ):
            if was != now:
                return Change(what, shown(was), shown(now), argument=i)
    return None


def _read_found(read: Read, *inputs: Tensor) -> Change:
    now = read.work_out(inputs)
    place = read.place if read.value.dtype is not torch.bool else ""
    what = f", as to what is read of it at {read.place},"
    return Change(what, shown(read.value.tolist()), shown(now.tolist()), place=place)


def _sizes_found(expression: str, *values: Any) -> Change:
    sizes = ", ".join(shown(tuple(value.shape) if isinstance(value, Tensor) else value) for value in values)
    return Change(
        ", as to sizes," if len(values) == 1 else " and others, as to sizes,", f"such that {expression}", sizes
    )


class SparseBefore:
    """What a sparse tensor was put together from.

    >>> before = SparseBefore(torch.eye(3).to_sparse())
    >>> before.holds(2 * torch.eye(3).to_sparse()), before.holds(torch.ones(3, 3).to_sparse())
    (True, False)
    """

    def __init__(self, tensor: Tensor) -> None:
        self._facts = sparse_facts(tensor)

    def holds(self, now: Tensor) -> bool:
        """Whether another one is put together alike."""
        return sparse_facts(now) == self._facts

    def explain(self, now: Tensor) -> Change | None:
        """The first difference."""
        found = sparse_facts(now)
        for what, was in self._facts.items():
            if found.get(what) != was:
                return Change(f".{what}", shown(was), shown(found.get(what)))
        return None


class AttributesBeside:
    """Attributes of a wrapper subclass that neither are tensors in it nor stand in its context.

    >>> beside = AttributesBeside({"inner": torch.ones(1), "scale": 2.0, "note": "a"}, ["inner"], (2.0,))
    >>> beside.hold({"inner": torch.ones(1), "scale": 3.0, "note": "a"}), beside.hold({"note": "b"})
    (True, False)
    """

    def __init__(self, attributes: dict[str, Any], inner: Sequence[str], context: Any) -> None:
        values = [context, *(context.values() if isinstance(context, dict) else ())]
        values += context if isinstance(context, (tuple, list)) else ()
        known = {name for name, held in attributes.items() if any(held is value for value in values)}
        self._known = frozenset((*inner, *known))
        self._beside = {name: Remembered(held) for name, held in attributes.items() if name not in self._known}

    def explain(self, now: dict[str, Any]) -> Change | None:
        """What another one has instead."""
        for name in self._beside.keys() | (now.keys() - self._known):
            before = self._beside.get(name)
            if before is None or name not in now:
                return Change(f"[{name!r}]", "absent" if before is None else "there", shown(now.get(name)))
            if not before.equals(now[name]):
                return replace(before.explain(now[name]), path=f"[{name!r}]")
        return None

    def hold(self, now: dict[str, Any]) -> bool:
        """Whether another one has the same."""
        return (now.keys() - self._known) == self._beside.keys() and all(
            held.equals(now[name]) for name, held in self._beside.items()
        )


def sharing_pattern(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Which tensors share storage: for each, the first of the list that it shares with.

    >>> x = torch.ones(4)
    >>> sharing_pattern((x, torch.ones(2), x[:2]))
    (0, 1, 0)
    """
    first: dict[int, int] = {}
    return tuple([first.setdefault(t.untyped_storage()._cdata, i) for i, t in enumerate(tensors)])


_address = Tensor.data_ptr


def lie_apart(*tensors: Tensor) -> bool:
    """Whether no two tensors, of which each has elements and lies at the start of its storage, share one.

    >>> x = torch.ones(4)
    >>> lie_apart(x, torch.ones(2)), lie_apart(x, torch.ones(2), x.view(2, 2))
    (True, False)
    """
    return len(set(map(_address, tensors))) == len(tensors)


def _lie_apart_from_the_start(inputs: Sequence[InputFacts], reals: Sequence[Tensor]) -> bool:
    """Whether addresses tell that tensors share no storage, which is faster than to ask for storages."""
    plain = all(type(real) in (Tensor, torch.nn.Parameter) and real.layout is torch.strided for real in reals)
    return plain and are_bases(*reals) and not any(map(_has_symbolic_offset, inputs)) and lie_apart(*reals)


def _none_apart(*tensors: Tensor) -> Change | None:
    first: dict[int, int] = {}
    for i, tensor in enumerate(tensors):
        if first.setdefault(_address(tensor), i) != i:
            return Change(", its memory,", "its own", "shared with another input", argument=i)
    return None


def sharing_of_parts(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The same for tensors some of which are sparse: indices and values are counted one by one."""
    return sharing_pattern([part for tensor in tensors for part in parts_of(tensor)])


def _same_context(writer: Writer, name: str, value: Any) -> str:
    """A condition that holds if what a wrapper subclass remembers is what it was; it may not allow to be copied."""
    if is_plain(value):
        return equality(writer, name, value)
    return f"{writer.bind(functools.partial(same_value, value), 'same')}({name})"


def equality(writer: Writer, name: str, value: Any) -> str:
    """A condition that holds if a Python value is what it was while recording."""
    kind = type(value)
    if value is None or kind in (bool, torch.dtype, torch.layout, torch.memory_format, torch.qscheme):
        return f"{name} is {literal(writer, value)}"
    if kind in (int, str):
        return f"type({name}) is {kind.__name__} and {name} == {value!r}"
    return f"{writer.bind(Remembered(value).equals, 'unchanged')}({name})"
