"""What the recording says about outputs.

An output is one of a few cases, each a small frozen type that says how the run time gets it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor

from .._torch import OpOverload, creation_of, hint_of, is_custom_function_node, shares_version_counter
from ..abstract.engine import geometry_of
from ..errors import UnknownOutputError, UnsupportedError
from ..functionalize.functionalizer import Functionalizer
from ..functionalize.state import TensorState
from ..ops import Kind, ViewStep, aten, op_info, tensors_in, written_arguments
from ..record.fakify import RecordedInput, is_start_node
from ..record.recording import Recording
from ..subclasses.layout import is_wrapper
from ..values import PLAIN
from .inputs import is_stale
from .subclasses import chain_to, refuse_lost_aliasing

# How views come about that autograd does not allow to be written with gradients on, in its own words.
_LOCKED = frozenset({"IN_CUSTOM_FUNCTION", "MULTI_OUTPUT_NODE", "MULTI_OUTPUT_SAFE"})

KNOWN_CONSTANTS: tuple[type, ...] = (*PLAIN, torch.Size, slice, type(Ellipsis))


# ---------------------------------------------------------------------------------------------------------------------
# How a view is taken again from its base.
@dataclass(frozen=True, slots=True)
class ByViews:
    """The recorded views are called again."""

    steps: tuple[ViewStep, ...]
    regenerated: bool = False  # autograd took it again by its geometry, for its memory changed after it was taken


@dataclass(frozen=True, slots=True)
class ByGeometry:
    """The base is shown as the graph's own result lies in memory, which does not tell everything."""

    conj: bool  # the conj bit of the view is not that of its base
    neg: bool  # nor is the neg bit
    locked: bool  # it is one of several views


class History(Enum):
    """What autograd makes of a view."""

    FOLLOWED = auto()  # it knows what it is a view of, or there is nothing to know
    WITHOUT_GRAD = auto()  # it was taken under no_grad, and requires grad where its base does
    DETACHED = auto()  # it does not know that the view belongs to its base, which requires grad
    LEAF = auto()  # the program made the view itself require grad
    DETACHED_LEAF = auto()  # both
    GOES_STALE = auto()  # it does not allow the view to be used once its base has been written


@dataclass(frozen=True, slots=True)
class ViewReplay:
    """How a view is taken again from its base, and what autograd then makes of it."""

    how: ByViews | ByGeometry
    history: History


class When(Enum):
    """When a view is taken from an input."""

    BEFORE_WRITES = auto()  # it goes stale by the writes as it does in eager, or hides an input that does
    AFTER_WRITES = auto()
    AFTER_MOVES = auto()  # the input lies on other memory by then


# ---------------------------------------------------------------------------------------------------------------------
# The cases of an output.
@dataclass(frozen=True, slots=True)
class Constant:
    """A Python value that the program returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Number:
    """A symbolic number: the graph returns it."""

    value: Any


@dataclass(frozen=True, slots=True)
class SameAsInput:
    """The caller's own tensor."""

    input: RecordedInput


@dataclass(frozen=True, slots=True)
class SameAsOutput:
    """The very tensor that stands at an earlier place of the result."""

    index: int


@dataclass(frozen=True, slots=True)
class ViewOfInput:
    """A view of the caller's tensor."""

    input: RecordedInput
    replay: ViewReplay
    when: When = When.AFTER_WRITES
    one_of_many: bool = False  # made by `unbind` or `split`


@dataclass(frozen=True, slots=True)
class ViewOfBase:
    """A view of an intermediate that the graph returns after the outputs."""

    base: int
    first: bool
    replay: ViewReplay


@dataclass(frozen=True, slots=True)
class ViewOfOutput:
    """A view of another output."""

    index: int
    replay: ViewReplay


class PlainKind(Enum):
    """Where a tensor that the graph returns comes from."""

    FRESH = auto()
    UNSAFE_VIEW = auto()
    CUSTOM_FUNCTION_VIEW = auto()


@dataclass(frozen=True, slots=True)
class Differentiable:
    """A tensor with a history."""

    locked: bool = False  # a view that autograd does not allow to be written with gradients on
    memory: ViewOfInput | None = None  # where its data lies, although autograd does not relate it to that input


@dataclass(frozen=True, slots=True)
class NotDifferentiable:
    """A tensor without a history."""

    is_leaf: bool  # it requires grad, and was made so in the program
    inference: bool | None = None  # an inference tensor or not, where the graph runs in the other mode


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor that the graph returns and the caller gets as it is."""

    tensor: Tensor
    kind: PlainKind
    is_view: bool
    history: Differentiable | NotDifferentiable

    @property
    def differentiable(self) -> bool:
        """Whether the graph is differentiated for it."""
        return isinstance(self.history, Differentiable)

    @property
    def is_new_leaf(self) -> bool:
        """Whether the program itself made it require grad."""
        return isinstance(self.history, NotDifferentiable) and self.history.is_leaf


Result = Constant | Number | SameAsInput | SameAsOutput | ViewOfInput | ViewOfBase | ViewOfOutput | Plain

_TAKEN = (ViewOfInput, ViewOfBase, ViewOfOutput, Plain)  # what a call makes or takes itself


@dataclass(frozen=True, slots=True)
class OwnCounter:
    """A result whose version counter is its own, although it is taken from a tensor with another."""

    index: int
    version: int


@dataclass(frozen=True, slots=True)
class CounterOf:
    """A result that counts its writes together with an earlier one, although it is not taken from that."""

    index: int
    earlier: int


@dataclass(frozen=True, slots=True)
class OutputFacts:
    """The cases of all outputs, and the intermediates that some of them are views of."""

    results: tuple[Result, ...]
    tensors: tuple[Tensor | None, ...]  # the abstract tensor of each output
    bases: tuple[Tensor, ...]
    counters: tuple[OwnCounter | CounterOf, ...]
    shown: int  # so many of the results are seen; the others are leaves that views among them are taken of

    @property
    def are_as_the_graph_gives_them(self) -> bool:
        """Whether nothing is left to do to the values that the graph returns."""
        return not self.counters and not self.parameters and all(map(_comes_from_graph, self.results))

    @property
    def parameters(self) -> list[int]:
        """Places of outputs that the program made parameters of."""
        return [
            i
            for i, (tensor, result) in enumerate(zip(self.tensors, self.results, strict=True))
            if isinstance(tensor, torch.nn.Parameter) and not isinstance(result, (SameAsInput, SameAsOutput))
        ]

    @property
    def fresh_leaves(self) -> list[Tensor]:
        """Outputs that the program itself made require grad."""
        shown = list(zip(self.tensors, self.results, strict=True))[: self.shown]
        return [
            tensor
            for tensor, result in shown
            if tensor is not None
            and not is_stale(tensor)
            and tensor.requires_grad
            and tensor.grad_fn is None
            and not isinstance(result, SameAsInput)
        ]


# ---------------------------------------------------------------------------------------------------------------------
# Which case an output is.
class OutputClassifier:
    """Sorts the outputs of a recording into their cases; the first that fits wins (A-1)."""

    def __init__(
        self,
        recording: Recording,
        functionalizer: Functionalizer,
        leaves: Sequence[Any],
        paths: Sequence[str],
        replay: bool,
        shown: int,
    ) -> None:
        self._shown = shown
        self._paths = paths
        self._recording = recording
        self._functionalizer = functionalizer
        self._replay = replay
        self._leaves = [recording.session.seen(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._inputs: dict[int, RecordedInput] = {}
        for recorded in recording.inputs:
            self._inputs.setdefault(id(recorded.seen), recorded)
        self._roots = {id(recorded.seen) for recorded in (*recording.inputs, *recording.memories)}
        self._position: dict[int, int] = {}
        for i, leaf in enumerate(self._leaves):
            self._position.setdefault(id(leaf), i)
        self._moved_inputs = [recorded for recorded in recording.inputs if self._is_moved(recorded)]
        self._bases: list[Tensor] = []
        self._by_storage: dict[int, list[Tensor]] = {}
        for tensor in {id(t): t for t in self._tensors if not is_wrapper(t)}.values():
            self._by_storage.setdefault(id(self._state(tensor).storage), []).append(tensor)

    def classify(self) -> OutputFacts:
        """The case of each output, in order."""
        results = tuple(self._case(i, leaf) for i, leaf in enumerate(self._leaves))
        self._refuse_two_histories(results)
        differentiable = any(isinstance(result, Plain) and result.differentiable for result in results)
        inference = torch.is_inference_mode_enabled() and not differentiable
        results = tuple(_told_apart(result, inference) for result in results)
        tensors = tuple(leaf if isinstance(leaf, Tensor) else None for leaf in self._leaves)
        return OutputFacts(results, tensors, tuple(self._bases), tuple(self._counters(results)), self._shown)

    def _case(self, i: int, leaf: Any) -> Result:
        """The questions in their order."""
        path = self._paths[i]
        if isinstance(leaf, (SymInt, SymFloat)):
            return Number(leaf)
        if not isinstance(leaf, Tensor):
            return _constant(leaf, path)
        if id(leaf) in self._inputs:
            return SameAsInput(self._inputs[id(leaf)])
        if self._position[id(leaf)] != i:
            return SameAsOutput(self._position[id(leaf)])
        if is_wrapper(leaf):
            return self._wrapper(leaf, path)
        self._refuse_view_into_wrapper(leaf, path)
        if leaf.layout is not torch.strided and leaf.requires_grad:
            raise UnsupportedError(
                f"{path} is a sparse tensor that requires grad: this cannot be compiled yet. Return its values, or "
                "to_dense() of it."
            )
        self._refuse_untracked_view_of_moved(leaf, path)
        if (late := self._counts_with_moved(leaf)) is not None:
            return late
        if is_stale(leaf):
            return self._stale(leaf, path)
        self._refuse_view_without_history(leaf, path)
        owner = self._state(leaf).owner
        if owner is not None:
            return self._in_memory_of(owner, leaf)
        return self._view_of_intermediate(leaf) or self._detached_output(leaf) or self._plain(leaf, PlainKind.FRESH)

    def _state(self, tensor: Tensor) -> TensorState:
        return self._functionalizer.state_of(tensor)

    def _siblings(self, tensor: Tensor) -> list[Tensor]:
        """The outputs that share a tensor's memory, itself among them."""
        return self._by_storage[id(self._state(tensor).storage)]

    # ------------------------------------------------------------------------------------------- wrappers
    def _refuse_view_into_wrapper(self, leaf: Tensor, path: str) -> None:
        owner = None if leaf._base is None or not is_wrapper(leaf._base) else self._state(leaf).owner
        if owner is not None:
            raise UnsupportedError(
                f"{path} is a view of {owner.slot}, which lies in a wrapper subclass (nested.values()): this cannot be "
                "compiled yet. Return a clone of it."
            )

    def _wrapper(self, leaf: Tensor, path: str) -> Result:
        """A wrapper subclass: views of it are known from its own operators, what is inside from the record."""
        sources = [source for source, _ in self._recording.session.recorder.wrappers.chain(leaf)]
        owner = next((self._inputs[id(source)] for source in sources if id(source) in self._inputs), None)
        if is_stale(leaf):
            steps = None if owner is None else chain_to(self._recording, leaf, owner.seen)
            return self._before_writes(leaf, owner, steps, path)
        if owner is not None and not is_custom_function_node(leaf.grad_fn):
            return ViewOfInput(owner, self._wrapper_replay(leaf, owner.seen, path))
        base = leaf._base
        siblings = [t for t in self._tensors if t is not leaf and base is not None and (t is base or t._base is base)]
        if base is not None and siblings and leaf.requires_grad and base.grad_fn is not None:
            return self._view_of_base(base, self._wrapper_replay(leaf, base, path))
        refuse_lost_aliasing(self._functionalizer, leaf, path)
        kind = PlainKind.FRESH if base is None else PlainKind.UNSAFE_VIEW
        history = NotDifferentiable(leaf.requires_grad) if leaf.grad_fn is None else Differentiable()
        return Plain(leaf, kind, False, history)

    def _wrapper_replay(self, leaf: Tensor, base: Tensor, path: str) -> ViewReplay:
        steps = chain_to(self._recording, leaf, base)
        if steps is None or any(map(_is_symbolic, steps)):
            raise UnsupportedError(
                f"{path} is a view of a tensor subclass, taken in a way that cannot be compiled yet. Return a clone."
            )
        return ViewReplay(ByViews(tuple(steps)), self._history(leaf, base))

    # ---------------------------------------------------------------------------------------- moved inputs
    def _is_moved(self, recorded: RecordedInput) -> bool:
        if not recorded.is_tensor or recorded.same_as is not None or recorded.layout is not None:
            return False
        return self._state(recorded.seen).storage is not self._functionalizer.state_before(recorded).storage

    def _moved(self, leaf: Tensor) -> RecordedInput | None:
        """The input that autograd takes a tensor for a view of, where that was moved to other memory."""
        base = None if leaf._base is None else self._inputs.get(id(leaf._base))
        if base is None or not base.seen.requires_grad or self._state(leaf).owner is base:
            return None
        before = self._functionalizer.state_before(base)
        return None if self._state(leaf).storage is before.storage else base

    def _refuse_untracked_view_of_moved(self, leaf: Tensor, path: str) -> None:
        """Such a view goes with the new memory, and with the history, or the version, of the input that was moved."""
        moved = self._moved(leaf)
        if moved is not None and (is_stale(leaf) or leaf.grad_fn is None):
            raise UnsupportedError(
                f"{path} is a view of {moved.slot}, taken under no_grad after that was moved to other memory: this "
                "cannot be compiled yet. Take it with gradients on, or return a clone."
            )

    def _counts_with_moved(self, leaf: Tensor) -> ViewOfInput | None:
        """A view, without a history, of an input that was moved: its writes count for the input, wherever it lies."""
        if is_stale(leaf) or leaf.is_inference() or leaf.requires_grad:
            return None
        for recorded in self._moved_inputs:
            steps = self._state(leaf).chain_from(self._state(recorded.seen))
            if steps is not None and shares_version_counter(leaf, recorded.seen):
                return ViewOfInput(recorded, self._replay_of(leaf, recorded.seen), When.AFTER_MOVES)
        return None

    def _view_of_moved(self, leaf: Tensor) -> ViewOfInput | None:
        """A view, with a history, of an input that was moved to other memory before it was taken."""
        moved = self._moved(leaf)
        if moved is None or not moved.required_grad or leaf.grad_fn is None or self._is_from_custom_function(leaf):
            return None
        if self._state(leaf).chain_from(self._state(moved.seen)) is None:
            return None
        return ViewOfInput(moved, self._replay_of(leaf, moved.seen), When.AFTER_MOVES, self._from_many(leaf))

    # --------------------------------------------------------------------------------------- stale views
    def _stale(self, leaf: Tensor, path: str) -> ViewOfInput:
        """A view that may not be used any more: what it was taken from was written with gradients on."""
        owner = self._state(leaf).owner
        before = None if owner is None else self._functionalizer.state_before(owner)
        return self._before_writes(leaf, owner, None if before is None else self._state(leaf).chain_from(before), path)

    def _before_writes(
        self, leaf: Tensor, owner: RecordedInput | None, steps: Sequence[ViewStep] | None, path: str
    ) -> ViewOfInput:
        """A view that is taken from the caller's tensor before anything is written."""
        base = leaf._base
        fresh = base is not None and id(base) not in self._roots and self._recording.made_to_require_grad(base)
        through = [] if owner is None or is_wrapper(leaf) else self._state(leaf).views_of_owner()[1:]
        fresh = fresh or any(self._recording.made_to_require_grad(state.tensor) for state in through)
        unknown = owner is None or steps is None or fresh or creation_of(leaf) == "IN_CUSTOM_FUNCTION"
        # Views do not lead through a detached tensor, unless the input itself was moved to one.
        if unknown or any(step.op is aten.detach.default or _is_symbolic(step) for step in steps or ()):
            raise UnsupportedError(
                f"{path} is a view that may not be used any more, because what it is a view of was written: this "
                "cannot be compiled yet. Take the view after the write."
            )
        assert owner is not None and steps is not None
        return ViewOfInput(owner, ViewReplay(ByViews(tuple(steps)), History.GOES_STALE), When.BEFORE_WRITES)

    # ------------------------------------------------------------------------------------ memory of inputs
    def _in_memory_of(self, owner: RecordedInput, leaf: Tensor) -> Result:
        """An output whose memory belongs to an input: a view of it, unless autograd sees it otherwise."""
        self._refuse_view_from_before(owner, leaf)
        view = self._view_of_input(owner, leaf)
        own = self._view_of_fresh_leaf(leaf) or self._view_of_moved(leaf) or self._alias_with_own_history(leaf, view)
        return own or view

    def _refuse_view_from_before(self, owner: RecordedInput, leaf: Tensor) -> None:
        """A view that was taken before the program made its input require grad."""
        if owner.required_grad:
            return
        views = [state.tensor for state in self._state(leaf).views_of_owner()]
        untracked = any(not is_stale(view) and view.grad_fn is None for view in views)
        chain = self._state(leaf).chain_from(self._state_at_the_end(owner)) or []
        roots = [t for t in (owner.seen, leaf._base) if t is not None and id(t) in self._roots]
        made = any(map(self._recording.made_to_require_grad, roots))
        if made and untracked and all(step.op is not aten.detach.default for step in chain):
            raise UnsupportedError(
                f"a view of {owner.slot} is taken before the program makes it require grad, or what it is a view of, "
                "and returned: this cannot be compiled yet. Take the view afterwards."
            )

    def _view_of_input(self, owner: RecordedInput, leaf: Tensor) -> ViewOfInput:
        siblings = self._siblings(leaf)
        one_of_many = all(self._from_many(t) and not is_stale(t) and t.grad_fn is not None for t in siblings)
        replay = self._replay_of(leaf, owner.seen, self._state_at_the_end(owner))
        when = When.AFTER_WRITES
        match replay:
            case ViewReplay(ByViews(), History.DETACHED | History.DETACHED_LEAF) if is_stale(owner.seen):
                # No view is taken of it afterwards; before, it has the shape that it came with.
                when, before = When.BEFORE_WRITES, self._functionalizer.state_before(owner)
                replay = self._replay_of(leaf, owner.seen, before)
        return ViewOfInput(owner, replay, when, one_of_many)

    def _alias_with_own_history(self, leaf: Tensor, view: ViewOfInput) -> Plain | None:
        """An alias of an input that autograd takes for something computed."""
        custom = is_custom_function_node(leaf.grad_fn)
        if leaf.grad_fn is None or not (custom or self._has_own_history(leaf)):
            return None
        if isinstance(view.replay.how, ByGeometry) and any(isinstance(n, SymInt) for n in leaf.shape):
            raise UnsupportedError("an alias of a symbolic size, with a history of its own, cannot be compiled yet.")
        written = bool(self._state(leaf).storage.writes)
        goes_stale = leaf._is_view() and creation_of(leaf) != "DEFAULT"
        if written and goes_stale and shares_version_counter(leaf, view.input.seen):
            raise UnsupportedError(
                f"the program writes to {view.input.slot} and returns an alias of it with a history of its own (a "
                "custom function made it, or what it is a view of), which may not be used any more once the caller "
                "writes to it too: this cannot be compiled yet. Return a clone, or write to a clone."
            )
        kind = PlainKind.CUSTOM_FUNCTION_VIEW if custom else PlainKind.FRESH
        return self._plain(leaf, kind, memory=view if written else None)

    def _has_own_history(self, leaf: Tensor) -> bool:
        if id(view_root(leaf)) not in self._roots or self._moved(leaf) is not None:
            return True
        return self._is_from_custom_function(leaf) or self._is_from_fresh_leaf(leaf)

    def _is_from_custom_function(self, leaf: Tensor) -> bool:
        """Whether a custom function, which has a derivative of its own, is among the views that led here."""
        node = self._behind_views(leaf)
        return is_custom_function_node(node) and not is_start_node(node)

    def _is_from_fresh_leaf(self, leaf: Tensor) -> bool:
        """Whether the views that led here start at a view that the program itself made require grad."""
        start = getattr(self._behind_views(leaf), "variable", None)
        return start is not None and self._recording.made_to_require_grad(start) and id(start) not in self._roots

    def _behind_views(self, leaf: Tensor) -> Any:
        """The first node on the tape that does not belong to a view, as far as views can lead."""
        node, views = leaf.grad_fn, len(self._state(leaf).path_to_root())
        for _ in range(views):
            if node is None or is_custom_function_node(node) or hasattr(node, "variable"):
                break
            node = node.next_functions[0][0] if node.next_functions else None
        return node

    # --------------------------------------------------------------------------------- what the graph makes
    def _refuse_view_without_history(self, leaf: Tensor, path: str) -> None:
        """A view that requires grad, and whose base was detached, or does not lead autograd to it."""
        base = leaf._base
        if base is None or not leaf.requires_grad:
            return
        if leaf.grad_fn is None and base.requires_grad and id(base) not in self._roots:
            raise UnsupportedError(
                f"{path} is a view, taken under no_grad, of a tensor that is differentiable: this cannot be "
                "compiled yet. Return a detached tensor instead."
            )
        if any(base is tensor for tensor in self._recording.mutations.detached):
            raise UnsupportedError(
                f"{path} is a view of a tensor that was detached in place after the view was taken: this "
                "cannot be compiled yet. Use detach()."
            )

    def _view_of_intermediate(self, leaf: Tensor) -> Result | None:
        base = leaf._base
        if base is None or not (leaf.requires_grad and base.requires_grad) or is_wrapper(base):
            return None  # what lies in a wrapper is not taken from it again: `nested.values()`
        if self._is_from_custom_function(leaf) and self._behind_views(leaf) is not base.grad_fn:
            return None
        if self._state(base).storage is not self._state(leaf).storage:  # it was moved to other memory since
            return None
        if (found := self._view_of_fresh_leaf(leaf) or self._view_of_moved(leaf)) is not None:
            return found
        siblings = self._siblings(leaf)
        single = [t for t in siblings if not self._from_many(t)]
        if len(siblings) == 1 or (self._from_many(leaf) and len(single) <= 1) or base.grad_fn is None:
            return self._plain(leaf, PlainKind.UNSAFE_VIEW)
        return self._view_of_base(base, self._replay_of(leaf, base))

    def _view_of_base(self, base: Tensor, replay: ViewReplay) -> ViewOfOutput | ViewOfBase:
        """A view of another output, or of an intermediate that the graph returns for its sake."""
        if id(base) in self._position:
            return ViewOfOutput(self._position[id(base)], replay)
        known = next((n for n, other in enumerate(self._bases) if other is base), None)
        if known is not None:
            return ViewOfBase(known, False, replay)
        self._bases.append(base)
        return ViewOfBase(len(self._bases) - 1, True, replay)

    def _view_of_fresh_leaf(self, leaf: Tensor) -> ViewOfOutput | None:
        base = leaf_behind(self._recording, self._functionalizer, leaf)
        if base is None or id(base) not in self._position:
            return None
        return ViewOfOutput(self._position[id(base)], self._replay_of(leaf, base))

    def _detached_output(self, leaf: Tensor) -> ViewOfOutput | None:
        """A detached output beside the output itself."""
        if leaf.requires_grad:
            return None
        for other in self._siblings(leaf):
            if other is leaf or id(other) in self._inputs or is_stale(other) or not other.requires_grad:
                continue
            taken_from = self._state(leaf).chain_from(self._state(other)) is not None
            is_plain = other._base is None or len(self._siblings(other)) == 1
            if taken_from and is_plain and geometry_of(other) == geometry_of(leaf):
                return ViewOfOutput(self._position[id(other)], self._replay_of(leaf, other))
        return None

    def _plain(self, leaf: Tensor, kind: PlainKind, memory: ViewOfInput | None = None) -> Plain:
        node = self._functionalizer.read(self._state(leaf))
        is_view = node.op is None or not isinstance(node.op, OpOverload) or op_info(node.op).kind is Kind.VIEW
        if leaf.grad_fn is None:
            return Plain(leaf, kind, is_view, NotDifferentiable(leaf.requires_grad))
        return Plain(leaf, kind, is_view, Differentiable(leaf._is_view() and _is_locked(leaf), memory))

    # ------------------------------------------------------------------------------------------ view replay
    def _from_many(self, tensor: Tensor) -> bool:
        step = self._state(tensor).step
        return step is not None and step.index is not None

    def _state_at_the_end(self, recorded: RecordedInput) -> TensorState:
        """The state of the caller's tensor when views are taken from it: it is moved to other memory only later."""
        before, now = self._functionalizer.state_before(recorded), self._state(recorded.seen)
        return now if now.storage is before.storage else before

    def _replay_of(self, leaf: Tensor, base: Tensor, start: TensorState | None = None) -> ViewReplay:
        steps = self._steps_to_replay(leaf, base, start or self._state(base))
        has_history = leaf.grad_fn is not None
        if steps is not None:
            how: ByViews | ByGeometry = ByViews(tuple(steps), has_history and self._is_regenerated(leaf, steps))
            return ViewReplay(how, self._history(leaf, base))
        symbolic = any(isinstance(n, SymInt) for n in (*leaf.shape, *leaf.stride()))
        if symbolic and self._state(leaf).storage.writes and hint_of(base.storage_offset()):
            raise UnsupportedError("a view of a symbolic size, of memory that was written, cannot be compiled yet.")
        if leaf.dtype != base.dtype:
            raise UnsupportedError(
                "a view of another dtype, of a symbolic size or of an input that changes its shape, cannot be compiled."
            )
        locked = has_history and creation_of(leaf) in _LOCKED
        how = ByGeometry(leaf.is_conj() != base.is_conj(), leaf.is_neg() != base.is_neg(), locked)
        return ViewReplay(how, self._history(leaf, base))

    def _steps_to_replay(self, leaf: Tensor, base: Tensor, start: TensorState) -> list[ViewStep] | None:
        """The views to call again; None where they are not known, or not wanted."""
        steps = self._state(leaf).chain_from(start)
        if (
            steps is not None and leaf.grad_fn is not None
        ):  # a wrapper gives what is inside without autograd's knowledge
            steps = [replace(step, op=aten.alias.default) if step.op is aten.detach.default else step for step in steps]
        if steps is None or not any(map(_is_symbolic, steps)):
            return steps if self._replay or leaf.dtype != base.dtype else None
        if leaf.grad_fn is not None and not all(step.with_grad for step in steps):
            raise UnsupportedError(
                "a view of a symbolic size, taken under no_grad in part, cannot be compiled yet. Take it with "
                "gradients on or off."
            )
        return None

    def _history(self, leaf: Tensor, base: Tensor) -> History:
        if leaf.grad_fn is not None:
            return History.FOLLOWED
        if not leaf.requires_grad:
            return History.DETACHED if base.requires_grad else History.FOLLOWED
        # A view taken under no_grad requires grad if its base does. The caller's may itself be a view of another one.
        if leaf._is_view() and not self._recording.made_to_require_grad(leaf):
            return History.WITHOUT_GRAD
        return History.DETACHED_LEAF if base.requires_grad else History.LEAF

    def _is_regenerated(self, leaf: Tensor, steps: Sequence[ViewStep]) -> bool:
        """Whether the views that gave a tensor say less than its geometry: `as_strided` may reach beyond its base."""
        if not any(step.op is aten.as_strided.default for step in steps):
            return False
        forward = self._recording.steps
        taken = min((i for i, step in enumerate(forward) if any(t is leaf for t in tensors_in([step.out]))), default=0)
        later = [step for step in forward[taken + 1 :] if op_info(step.op).kind in (Kind.WRITE, Kind.RESHAPE)]
        changed = [t for step in later for t in tensors_in(written_arguments(step.op, step.args, step.kwargs))]
        return any(shares_version_counter(t, leaf) for t in changed)

    # --------------------------------------------------------------------------- what is asked of all results
    def _refuse_two_histories(self, results: Sequence[Result]) -> None:
        """Results that are one value of the graph and two tensors for autograd: one of them was written by itself."""
        computed = [r for r in results if isinstance(r, Plain) and r.differentiable and not is_wrapper(r.tensor)]
        written = [r for r in computed if self._state(r.tensor).storage.writes]
        nodes = [self._functionalizer.node_of(r.tensor) for r in written]
        for i, result in enumerate(written):
            for k, other in enumerate(written[:i]):
                # Of a view each result has a tensor of its own; autograd gives any other value out as one.
                apart = result.is_view and view_root(other.tensor) is view_root(result.tensor)
                if nodes[k] is nodes[i] and not apart:
                    raise UnsupportedError(
                        "the program returns two tensors that share memory and have histories of their own, because "
                        "it has written to an alias that was detached: this cannot be compiled yet. Return a clone."
                    )

    def _counters(self, results: Sequence[Result]) -> Iterator[OwnCounter | CounterOf]:
        """Version counters that do not come about by themselves when results are taken again."""
        for i, (leaf, result) in enumerate(zip(self._leaves, results, strict=True)):
            partners = [t for t in self._counts_with(i, result, results) if not t.is_inference() and not is_stale(t)]
            if not partners or leaf.is_inference() or is_stale(leaf) or leaf.grad_fn is not None:
                continue
            if not all(shares_version_counter(leaf, partner) for partner in partners):
                yield from self._counter(i, leaf, results)

    def _counter(self, i: int, leaf: Tensor, results: Sequence[Result]) -> Iterator[OwnCounter | CounterOf]:
        if any(shares_version_counter(leaf, recorded.seen) for recorded in self._moved_inputs):
            raise UnsupportedError(
                f"{self._paths[i]} is an alias of an input that was moved to other memory, and again after it was "
                "taken: this cannot be compiled yet. Return a clone."
            )
        earlier = (k for k in range(i) if isinstance(results[k], _TAKEN) and not is_stale(self._leaves[k]))
        partner = next((k for k in earlier if shares_version_counter(leaf, self._leaves[k])), None)
        if partner is not None:
            yield CounterOf(i, partner)
        elif leaf._version or not _counts_alone(results[i]):
            yield OwnCounter(i, leaf._version)

    def _counts_with(self, i: int, result: Result, results: Sequence[Result]) -> list[Tensor]:
        """The tensors whose counter a result has when it is taken again, or may have if the graph gives it."""
        match result:
            case ViewOfInput(recorded, _, when) if not recorded.was_inference and when is not When.AFTER_MOVES:
                return [recorded.seen]
            case ViewOfBase(base, _, _):
                return [self._bases[base]]
            case ViewOfOutput(index, _):
                return [self._leaves[index]]
            case Plain(tensor, history=NotDifferentiable()) if not is_wrapper(tensor):
                places = [self._position[id(t)] for t in self._siblings(tensor)]
                return [self._leaves[k] for k in places if k < i and isinstance(results[k], Plain)]
            case _:
                return []


def leaf_behind(recording: Recording, functionalizer: Functionalizer, view: Any) -> Tensor | None:
    """The leaf that a view was taken of, where the program itself made it: the view is taken from it again."""
    if not isinstance(view, Tensor) or is_wrapper(view) or is_stale(view) or view.grad_fn is None:
        return None
    base = view._base
    if base is None or not base.is_leaf or not base.requires_grad or creation_of(view) == "IN_CUSTOM_FUNCTION":
        return None
    if any(base is recorded.seen or base is recorded.leaf for recorded in recording.all_inputs):
        return None
    if is_wrapper(base):
        return None
    same_memory = functionalizer.state_of(view).storage is functionalizer.state_of(base).storage
    return base if same_memory else None


def _told_apart(result: Result, inference: bool) -> Result:
    """A result that is an inference tensor, or none, unlike what the graph gives in the mode that it runs in."""
    match result:
        case Plain(tensor, history=NotDifferentiable(is_leaf)) if not is_wrapper(tensor):
            if tensor.is_inference() is not inference:
                return replace(result, history=NotDifferentiable(is_leaf, tensor.is_inference()))
    return result


def _comes_from_graph(result: Result) -> bool:
    match result:
        case Number():
            return True
        case Plain(history=Differentiable(memory=None) | NotDifferentiable(is_leaf=False, inference=None)):
            return True
        case _:
            return False


def _counts_alone(result: Result) -> bool:
    """Whether one of the views that are called again gives it a version counter of its own."""
    match result:
        case ViewOfInput(replay=replay) | ViewOfBase(replay=replay) | ViewOfOutput(replay=replay):
            return isinstance(replay.how, ByViews) and any(step.counts_alone for step in replay.how.steps)
        case _:
            return False


def _is_locked(view: Tensor) -> bool:
    """Whether autograd forbids writes to a view with gradients on: leaves may not be written through their views."""
    base = view._base
    return (base is not None and base.is_leaf) or creation_of(view) in {*_LOCKED, "NO_GRAD_MODE"}


def _constant(value: Any, path: str) -> Constant:
    if not isinstance(value, KNOWN_CONSTANTS):
        raise UnknownOutputError(
            f"Found {type(value)} in output, which is not a known type, at {path}: its state cannot be seen, so that "
            "no call could make it again. Return the tensors in it instead, or make it outside of the program."
        )
    return Constant(value)


def view_root(tensor: Tensor) -> Tensor:
    """What autograd takes a tensor to be a view of, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def _is_symbolic(step: ViewStep) -> bool:
    numbers = [n for arg in step.args for n in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return any(isinstance(n, SymInt) for n in numbers)
