"""What a program does to the objects around it, beside its results: tensors that it assigns.

Each such tensor is a result that the user does not see: it is computed, classified and rebuilt like any other, and the
run time then puts it where the program put it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymFloat, SymInt, Tensor

from .._torch import disable_modes
from ..codegen.changes import Change
from ..errors import UnsupportedError
from ..functionalize.functionalizer import Functionalizer
from ..ops import ViewStep, aten
from ..record.fakify import own_attributes
from ..record.hooks import Registered
from ..record.recording import Recording
from ..record.tape import ends_behind
from ..slots import Output, Primal, Returned, Updated
from ..subclasses.layout import is_wrapper
from ..values import UserObject, is_plain
from .inputs import InputFacts, StorageReplaced, is_stale
from .outputs import OutputFacts, Plain, SameAsInput, SameAsOutput, leaf_behind

Put = Callable[[Any, Any, Any], None]  # into an object, under a key, a value
Build = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Escape:
    """A tensor, or a new container with tensors in it, that the program put into an object of the user's."""

    owner: Any
    put: Put
    key: Any
    paths: tuple[str, ...]  # of the leaves, in the user's words
    leaves: tuple[Any, ...]  # tensors, and constants beside them; a single None where it took a tensor away
    build: Build | None = None  # makes a new container of them


@dataclass(frozen=True, slots=True)
class Assigned:
    """Hidden results that go into an object of the user's: a single one as it is, or several in a new container."""

    outputs: tuple[int, ...]
    owner: UserObject
    put: Put
    key: Any
    build: Build | None


@dataclass(frozen=True, slots=True)
class GradAssigned:
    """A hidden result that becomes the gradient of an input."""

    output: int
    of: Primal


@dataclass(frozen=True, slots=True)
class Moved:
    """A hidden result to whose memory an input was moved, by `set_`."""

    output: int
    input: Primal
    with_grad: bool  # gradients were on
    counted: bool  # as a write to the input: `set_` is, `.data =` is not
    leaf: bool  # it requires grad and was a leaf


@dataclass(frozen=True, slots=True)
class Changed:
    """Hidden results that go into the lists, dicts and objects of the arguments."""

    outputs: tuple[int, ...]
    changes: tuple[Change, ...]
    shared: frozenset[int]  # numbers of new objects that something else leads to as well


Effect = Assigned | GradAssigned | Moved | Changed


@dataclass(frozen=True, slots=True)
class ArgumentChanges:
    """What a program does to the lists, dicts and objects that it was given."""

    changes: tuple[Change, ...] = ()
    leaves: tuple[Any, ...] = ()
    paths: tuple[str, ...] = ()
    shared: frozenset[int] = frozenset()


NO_CHANGES = ArgumentChanges()


class Effects:
    """Collects the hidden results of a program after those that the user sees."""

    def __init__(self, visible: Sequence[Any], paths: Sequence[str]) -> None:
        self.leaves = list(visible)
        self.paths = list(paths)
        self.effects: list[Effect] = []

    def add(self, leaf: Any, path: str) -> int:
        """A hidden result; gives its place."""
        self.leaves.append(leaf)
        self.paths.append(path)
        return len(self.leaves) - 1

    def add_escapes(self, escapes: Sequence[Escape]) -> None:
        """Tensors that the program assigned."""
        for escape in escapes:
            outputs = tuple(map(self.add, escape.leaves, escape.paths))
            self.effects.append(Assigned(outputs, UserObject(escape.owner), escape.put, escape.key, escape.build))

    def add_changes(self, made: ArgumentChanges) -> None:
        """New values in the arguments."""
        if made.changes:
            outputs = tuple(map(self.add, made.leaves, made.paths))
            self.effects.append(Changed(outputs, made.changes, made.shared))

    def add_leaves(self, recording: Recording, functionalizer: Functionalizer) -> None:
        """Leaves that the program made, where it gives out views of them alone."""
        known = {id(leaf) for leaf in self.leaves}
        for leaf, path in list(zip(self.leaves, self.paths, strict=True)):
            base = leaf_behind(recording, functionalizer, leaf)
            if base is not None and id(base) not in known:
                known.add(id(base))
                self.add(base, path)

    def add_inputs(self, recording: Recording, functionalizer: Functionalizer, inputs: Sequence[InputFacts]) -> None:
        """Inputs that were moved to other memory, and gradients that the program gave them."""
        for facts in inputs:
            recorded = facts.recorded
            if not recorded.is_tensor or recorded.same_as is not None:
                continue
            if not is_stale(recorded.seen) and recorded.seen.is_leaf:
                before, after = recording.grads_before.get(recorded.slot), recorded.seen.grad
                if after is not before:
                    output = self.add(after, f"{recorded.slot}.grad")
                    self.effects.append(GradAssigned(output, recorded.slot))
            if isinstance(facts.place, StorageReplaced):
                with disable_modes():
                    alias = recorded.seen.data  # whose writes do not count for the input
                step = ViewStep(aten.detach.default, (), {}, None, counts_alone=True)
                functionalizer.add_view(functionalizer.state_of(recorded.seen), alias, step)
                output = self.add(alias, str(recorded.slot))
                leaf = recorded.was_leaf and (recorded.required_grad or facts.made_to_require_grad)
                counted = facts.place.counted or recorded.was_inference  # those count nothing
                self.effects.append(Moved(output, recorded.slot, facts.place.step.grad_enabled, counted, leaf))


# ---------------------------------------------------------------------------------------------------------------------
# Python attributes that the program puts on its results: each call puts them there again.
@dataclass(frozen=True, slots=True)
class AttributeSet:
    """An attribute of a result: a plain value, or another result."""

    of: Output
    name: str
    value: Any


def attributes_of_results(hidden: Effects, recording: Recording) -> tuple[AttributeSet, ...]:
    """What stands on the results; tensors and symbolic numbers among it become results that the user does not see.

    Attributes of inputs are the caller's own.
    """
    found: list[AttributeSet] = []
    known = {id(recorded.seen) for recorded in recording.inputs}
    for i, leaf in enumerate(hidden.leaves):  # it grows
        if id(leaf) in known or not recording.engine.is_abstract(leaf) or is_wrapper(leaf):
            continue
        known.add(id(leaf))
        for name, value in own_attributes(leaf).items():
            path = f"{hidden.paths[i]}.{name}"
            if isinstance(value, (Tensor, SymInt, SymFloat)):
                place = next((n for n, other in enumerate(hidden.leaves) if other is value), None)
                found.append(AttributeSet(Output(i), name, Output(hidden.add(value, path) if place is None else place)))
            elif is_plain(value):
                found.append(AttributeSet(Output(i), name, value))
            else:
                raise UnsupportedError(
                    f"the program puts a {type(value).__name__} on a result, as {path}: this cannot be compiled yet. "
                    "Return it beside the result, or compile with fallback='eager'."
                )
    return tuple(found)


# ---------------------------------------------------------------------------------------------------------------------
# Results whose gradient is not known outside of the program: others are computed from them, or they have a hook.
#
# The program is one node of autograd's graph, so a result gets, outside of it, only the gradient that comes from
# outside, as it is before a hook of the program's has seen it. Who asks for its whole gradient, by a hook or by
# `retain_grad()`, is told so.
_COMPUTED_FROM = "other results are computed from it: their part of its gradient stays inside of the compiled backward"
_HOOKED = "the program gave it a hook, which is a part of the compiled backward: outside, its gradient is as before"


@dataclass(frozen=True, slots=True)
class InnerResult:
    """A tensor that the caller gets, and whose gradient it does not see whole."""

    of: Output | Primal
    name: str  # in the user's words
    tangents: tuple[int, ...]  # when one of them arrives, a part of the gradient stays inside
    why: str


def is_hooked(result: Tensor | None, hooks: Sequence[Registered]) -> bool:
    """Whether one of the program's hooks may change the gradient of a result, rather than of what it was before."""
    own = [hook for hook in hooks if hook.tensor is result and not hook.serves_several]
    return bool(own) and not is_stale(own[0].tensor) and any(hook.node is hook.tensor.grad_fn for hook in own)


def inner_results(
    outputs: OutputFacts, paths: Sequence[str], targets: Mapping[Returned, Tensor], hooks: Sequence[Registered]
) -> tuple[InnerResult, ...]:
    """Results, and inputs that were written, on the way from a target to the inputs; then results with a hook."""
    hooked = [
        InnerResult(slot, paths[slot.index], (k,), _HOOKED)
        for k, (slot, tensor) in enumerate(targets.items())
        if isinstance(slot, Output) and isinstance(outputs.results[slot.index], Plain) and is_hooked(tensor, hooks)
    ]
    return (*_results_inside(outputs, paths, targets), *hooked)


def _results_inside(
    outputs: OutputFacts, paths: Sequence[str], targets: Mapping[Returned, Tensor]
) -> Iterator[InnerResult]:
    if len(targets) < 2:
        return
    shown: list[tuple[Output | Primal, str, Tensor]] = [
        (slot.of, str(slot.of), tensor) for slot, tensor in targets.items() if isinstance(slot, Updated)
    ]
    for i, (result, tensor) in enumerate(zip(outputs.results, outputs.tensors, strict=True)):
        if tensor is not None and not isinstance(result, (SameAsInput, SameAsOutput)) and not is_stale(tensor):
            shown.append((Output(i), paths[i], tensor))
    everything = ends_behind(list(targets.values()))
    inner = [(slot, name, end) for slot, name, t in shown if (end := (t.grad_fn, t.output_nr)) in everything]
    reached = [ends_behind([tensor]) for tensor in targets.values()] if inner else []
    for slot, name, end in inner:
        yield InnerResult(slot, name, tuple(k for k, ends in enumerate(reached) if end in ends), _COMPUTED_FROM)
