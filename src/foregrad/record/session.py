"""Record a program: run it on abstract tensors, then backwards from autograd's tape over them.

The tape is kept as long as the program: it is the one right source for every backward that may be asked for. What later
layers read about the program is a `Recording`; a session is what makes it, and records backwards after it.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import (
    AutocastState,
    FakeTensor,
    PythonNode,
    Settings,
    ambient_state_kept,
    autocast_off,
    autocast_state,
    autograd_watched,
    dynamo_aside,
    gradients_of,
    is_reentrant_checkpoint,
    module_calls_seen,
    nested_tensors_made,
    overrides_told_as_in_eager,
    questions_answered_as_in_eager,
    recording_autograd,
    script_calls_seen,
    script_functions_seen,
    shares_version_counter,
    sizes_like_numbers,
    sizes_of_any_kind,
    storages_asked_first,
    without_function_modes,
)
from .._torch.errors import DYNAMO, FX_TRACING, HIGHER_ORDER_OPERATORS, SCRIPT_TRACING
from ..errors import ForegradError, StateChangeError, UnsupportedError
from ..graph.graph import Step
from ..host_numbers import HostNumber, HostNumbers
from ..ops import tensors_in
from ..slots import FreeNumber, FreeTensor, GradOf, Inner, Input, Primal
from ..stack_traces import caller_of, is_users_code, passes_through, user_stack, where
from ..subclasses.layout import is_jagged, is_wrapper, layout_of, leaves_of, require_comparable, with_symbols
from .alias_groups import SharedMemory, root_of
from .borrowed import Borrowed
from .checked_reads import CheckedReads, Symbols
from .fakify import (
    Argument,
    FoundAttributes,
    Object,
    RecordedInput,
    fakify,
    fakify_member,
    fakify_root,
    fakify_wrapper,
    has_hooks,
    let_go_of_attributes,
)
from .hooks import BackwardGuards, BackwardState, UserCode, user_code_seen
from .host_state import HostState
from .lift import LiftedTensors
from .recorder import Recorder
from .replay import Replay
from .retrace import GradientBefore, Retrace
from .survivors import Beginning, References, escape_error
from .tape import accumulated, edges_from, follow_determinants, node_of, tape_edges, with_added


class Ambient(NamedTuple):
    """Settings that a program may change for its caller."""

    grad_enabled: bool
    autocast: AutocastState

    @classmethod
    def now(cls) -> Ambient:
        return cls(torch.is_grad_enabled(), autocast_state())


class RecordedBackward(NamedTuple):
    """A backward that was recorded after the forward."""

    by_slot: dict[Primal, Tensor | None]  # gradients of inputs
    others: list[Tensor | None]  # of further tensors that were asked for
    start: int  # the number of its first step
    steps: list[Step]
    late: tuple[Tensor, ...]  # real tensors that it has found by itself, and the forward has not
    state: BackwardState | None  # that code of the user's has read in it
    emptied: frozenset[int]  # selective checkpoints that it has run through


@dataclass(frozen=True)
class RunAgain:
    """A program that was run once more after it was recorded, on other tensors: what it had, and what came of it."""

    session: Session
    start: int  # the number of its first step
    inputs: list[RecordedInput]
    memories: tuple[RecordedInput, ...] = ()

    @property
    def steps(self) -> list[Step]:
        return self.session.steps[self.start :]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.session.arguments

    @property
    def result(self) -> Any:
        return self.session.result

    @property
    def held_beside(self) -> Iterator[Tensor]:
        return self.session.held_beside

    def made(self, tensor: Tensor) -> bool:
        """Whether a tensor is none of those that were there before, to which it may have written."""
        before = (*self.session.inputs, *self.session.memories)
        known = {id(out) for step in self.session.steps[: self.start] for out in tensors_in([step.out])}
        kept = {id(recorded) for recorded in self.inputs}  # to compare them would compare their tensors
        known.update(id(recorded.seen) for recorded in before if id(recorded) not in kept)
        return id(tensor) not in known


class Session:
    """Runs a program on abstract tensors, and keeps what backwards are recorded from."""

    def __init__(
        self,
        recorder: Recorder,
        source_of: Callable[[Tensor], FreeTensor],
        beginning: Beginning,
        backward_guards: BackwardGuards | None,
        found_elsewhere: frozenset[int],
        noting_code: Callable[[], AbstractContextManager[None]],
        kernel_runs: Callable[[FrameType], None],
    ) -> None:
        """Nothing has run yet.

        Args:
            recorder: Sees all operators.
            source_of: Gives a slot to a tensor that the program finds by itself.
            beginning: When objects that the program makes begin to be new.
            backward_guards: For the user's code that runs in backwards.
            found_elsewhere: Ids of arguments that the program also finds by itself, and may compare: it is given them
                as they are.
            noting_code: What holds while code of the user's runs.
            kernel_runs: Is told of functions of the user's that torch is about to call as kernels of operators.
        """
        self.recorder = recorder
        self.engine = recorder.engine
        self.steps = recorder.steps  # every operator so far, forward first
        self.beginning: Beginning | None = beginning  # until the recording is over
        self.arguments: tuple[Any, ...] = ()  # what the program was called with, until then
        self._backward_guards = backward_guards
        self._found_elsewhere = found_elsewhere
        self.noting_code, self.kernel_runs = noting_code, kernel_runs
        self.inputs: list[RecordedInput] = []
        self.memories: list[RecordedInput] = []  # memory that inputs share, and roots in it
        self._shared: dict[int, SharedMemory] = {}  # by id of the real tensors that look at it
        self._roots: dict[int, RecordedInput] = {}  # by id of the real root
        self.real_tensors: dict[Primal, Tensor] = {}
        self._real_memories: dict[Primal, Tensor] = {}
        self._found: dict[Primal, weakref.ref[Tensor]] = {}  # what is left of them once they are released
        self._by_identity: dict[int, RecordedInput] = {}
        self._wrappers_by_storage: dict[int, list[tuple[Tensor, Tensor]]] = {}  # those met so far, and what stands in
        self.grads_before: dict[Primal, Tensor] = {}  # what stood for gradients of inputs before the program ran
        self._attributes = FoundAttributes()
        self._last_nodes: list[Any] = []  # of autograd, whose edges were asked for last
        self._last_edges: list[tuple[Any, Any]] = []
        self._with_grads: set[int] = set()  # ids of real tensors whose gradients are inputs
        self.result: Any = None
        self.finished = False  # the program has run to its end
        self.before = self.after = Ambient.now()
        self.holds_checkpoints = False  # reentrant ones, on the tape
        self.lifted = LiftedTensors(
            recorder,
            functools.partial(self._adopt_found, source_of),
            self._need_grad,
            self._refuse_late_requires_grad,
            lambda frame: self.kernel_runs(frame),
        )

    def _adopt_found(self, source_of: Callable[[Tensor], FreeTensor], real: Tensor) -> Tensor:
        """Make an input of a tensor that the program finds by itself."""
        self.recorder.generators.refuse_state(real)
        return self._adopt(Argument(source_of(real), real))

    def _answers(self) -> AbstractContextManager[None]:
        """What a program hears that asks whether it is traced: eager's answer, if calls can check what it reads then.

        A graph that is to serve all data, an exported one, is that of a program which knows.
        """
        as_in_eager = self.recorder.reads.can_be_checked
        return questions_answered_as_in_eager(self.engine.own_mode) if as_in_eager else contextlib.nullcontext()

    def check_reads(self, symbols: Symbols, most: int, changing: frozenset[str]) -> None:
        """Calls can check what the program reads; so many reads at most, beside those that inputs determine."""
        if most:
            self.recorder.checked_reads = CheckedReads(self._replay(), self.engine, symbols, most, changing)
        self.recorder.reads.check(
            lambda: {
                id(recorded.seen): (recorded.slot, self.real_tensors[recorded.slot])
                for recorded in self.inputs
                if recorded.slot in self.real_tensors
            }
        )

    def begin_numbers(self, late: bool) -> None:
        """Calls can work numbers of the host out, and graphs those that are read of what they compute, if `late`."""
        self.recorder.numbers, self.recorder.meets_numbers = HostNumbers(), True
        if late and self.recorder.checked_reads is not None:
            self.recorder.checked_reads.follow = self.recorder.numbers.new
        real_tensors = self.real_tensors
        self.recorder.host_state = HostState(
            self.steps, self.engine, self.inputs, lambda recorded: real_tensors.get(recorded.slot)
        )

    def follow_numbers(self, found: Sequence[tuple[FreeNumber, float]]) -> list[HostNumber]:
        """What stands for floats that the program finds by itself."""
        assert self.recorder.numbers is not None
        followed = [self.recorder.numbers.new(value) for _, value in found]
        self.inputs += [RecordedInput(slot, number) for (slot, _), number in zip(found, followed, strict=True)]
        return followed

    def _replay(self) -> Replay:
        recorder = self.recorder
        return Replay(
            self.steps,
            self.engine,
            self._inputs_and_reals,
            recorder.generators,
            lambda step: step.kwargs.get("generator") or recorder.default_generator(step.args, step.kwargs),
        )

    def _inputs_and_reals(self) -> Iterator[tuple[RecordedInput, Tensor]]:
        for recorded in (*self.memories, *self.inputs):
            real = self._real_memories.get(recorded.slot)
            real = self.real_tensors.get(recorded.slot) if real is None else real
            if recorded.is_tensor and real is not None:
                yield recorded, real

    def run(
        self,
        program: Callable[[list[Any]], Any],
        arguments: Sequence[Argument],
        state: Sequence[Argument],
        shared: Sequence[SharedMemory] = (),
        early: Sequence[Tensor] = (),
        with_grads: Sequence[Tensor] = (),
    ) -> None:
        """Run the program: `state` is what it finds by itself, `arguments` is what it is called with.

        `early` are further tensors that it is known to find, in backward; `with_grads` are those whose gradients it is
        known to look at.
        """
        self._with_grads = {id(tensor) for tensor in with_grads}
        for memory in shared:
            self._adopt_memory(memory)
        for argument in state:
            self.lifted.register(argument.value, self._adopt(argument))
        seen = self._adopt_arguments(arguments)
        for real in early:
            self.lifted.fake_of(real)
        self._run(program, seen)
        self.lifted.finish({id(recorded.seen) for recorded in self.inputs})
        self.require_known_grads()
        self.finished = True

    def run_again(self, program: Callable[[list[Any]], Any], arguments: Sequence[Argument]) -> RunAgain:
        """Run the program as the next call would: on other tensors like those that it was given.

        Nothing can be made of the recording afterwards; it shows what a later call does to the user's objects.
        """
        start = len(self.steps)
        others: dict[int, RecordedInput] = {}  # by id of the real tensor
        seen = [self._seen_again(argument, others) for argument in arguments]
        self._run(program, seen)
        return RunAgain(self, start, list(others.values()))

    def _seen_again(self, argument: Argument, others: dict[int, RecordedInput]) -> Any:
        """What the next call would be given in the place of an argument; of a wrapper, what the first one was given."""
        value = argument.value
        first = next(recorded for recorded in self.inputs if recorded.slot == argument.slot)
        if not first.is_tensor:
            return value if isinstance(first.seen, (Object, set, frozenset)) else first.seen
        if id(value) in self._found_elsewhere:
            return value
        if first.layout is None and id(value) not in others:
            others[id(value)] = another = fakify(self.engine, argument)
            self.inputs.append(another)
            self.lifted.note_argument(value, another.seen)
        return others.get(id(value), first).seen

    def _adopt_arguments(self, arguments: Sequence[Argument]) -> list[Any]:
        """What the program is called with."""
        seen = [self._adopt(argument) for argument in arguments]
        for i, (argument, value) in enumerate(zip(arguments, seen, strict=True)):
            found_elsewhere = id(argument.value) in self._found_elsewhere
            if isinstance(value, Tensor):
                (self.lifted.register if found_elsewhere else self.lifted.note_argument)(argument.value, value)
            if found_elsewhere:
                seen[i] = argument.value
        return seen

    def _run(self, program: Callable[[list[Any]], Any], seen: list[Any]) -> None:
        settings, recorder = Settings.now(), self.recorder
        with self._modes():
            recorder.generators.begin()
            try:
                with recorder.running(), module_calls_seen(recorder.calls), self.noting_code():
                    self.result = program(seen)
                recorder.calls.root = None  # nothing keeps the user's module alive
                recorder.follow_seeds(recorder.generators.met)
                recorder.raise_caught()
                if recorder.is_used("foreign"):
                    recorder.foreign.require_unchanged(self.result)
            except Exception as error:
                recorder.raise_caught(error)
                _refuse_higher_order(error)
                raise
            finally:
                self.after = Ambient.now()
                changed = settings.restore()
                attributes = self._attributes.put_back()
        if changed is not None:
            raise StateChangeError(
                f"the program leaves another {changed} behind: a compiled call would not change it again. Set it "
                "outside the program, or compile with fallback='eager'."
            )
        if attributes is not None:
            raise attributes

    def adopt_results(self, results: Sequence[Any]) -> None:
        """Tensors that the program found and passed through unused are inputs like any other."""
        for value in results:
            if isinstance(value, Tensor):
                self.seen(value)

    def seen(self, tensor: Tensor) -> Tensor:
        """The abstract tensor for a tensor of the result: itself, or the fake of a real one that was passed through."""
        return tensor if self.engine.is_abstract(tensor) else self.lifted.fake_of(tensor)

    def end(self) -> None:
        """The recording is over: what is made from now on is not looked for."""
        self.beginning, self.arguments = None, ()

    def _adopt(self, argument: Argument) -> Any:
        """An input that is the very tensor of an earlier one is seen as that one."""
        first = self._by_identity.get(id(argument.value)) if isinstance(argument.value, Tensor) else None
        if first is not None:
            recorded = first._replace(slot=argument.slot, leaf=None, same_as=first)
        else:
            memory = self._shared.get(id(argument.value))
            if is_wrapper(argument.value):
                return self._adopt_wrapper(argument)
            if memory is None:
                recorded = fakify(self.engine, argument)
            else:
                base = next(i for i in self.memories if i.slot == memory.slot)
                recorded = fakify_member(base, self._roots[id(root_of(argument.value))], argument, memory)
            self._by_identity[id(argument.value)] = recorded
        self.inputs.append(recorded)
        return self._keep(argument, recorded)

    def _adopt_wrapper(self, argument: Argument) -> Any:
        """A wrapper subclass stands before the plain tensors in it, which are inputs of their own."""
        wrapper, place = argument.value, len(self.inputs)
        layout = layout_of(wrapper)
        require_comparable(wrapper, str(argument.slot))
        for slot, tensor in zip(layout.slots(argument.slot), leaves_of(wrapper), strict=True):
            self._adopt(Argument(slot, tensor, argument.dynamic and not is_jagged(wrapper)))
        inner = [recorded for recorded in self.inputs[place:] if isinstance(recorded.slot, Inner)]
        layout = with_symbols(layout, leaves_of(wrapper), [recorded.seen for recorded in inner])
        recorded = fakify_wrapper(argument, layout, inner)
        self._relate_wrapper(wrapper, recorded.seen)
        self._by_identity[id(wrapper)] = recorded
        self.inputs.insert(place, recorded)
        return self._keep(argument, recorded)

    def _relate_wrapper(self, wrapper: Tensor, seen: Tensor) -> None:
        """Wrappers with one version counter: views, and what was detached, of one that they share their memory with."""
        for leaf in leaves_of(wrapper)[:1]:
            known = self._wrappers_by_storage.setdefault(leaf.untyped_storage()._cdata, [])
            others = [other for real, other in known if shares_version_counter(wrapper, real)]
            if others:
                self.recorder.wrappers.relate(seen, others)
            known.append((wrapper, seen))

    def _keep(self, argument: Argument, recorded: RecordedInput) -> Any:
        """Remember the real tensor of an input, and take its gradient for an input too where that is needed."""
        first = recorded.same_as
        if isinstance(argument.value, Tensor):
            if recorded.required_grad and first is None and has_hooks(argument.value):
                self.lifted.hooks.guard(recorded)
            self.real_tensors[argument.slot] = argument.value
            if recorded.layout is None and first is None:
                self._attributes.note(argument.slot, argument.value, recorded.seen)
            if id(argument.value) in self._with_grads and first is None and argument.value.grad is not None:
                if argument.value.grad.shape != argument.value.shape:
                    raise UnsupportedError(
                        f"{argument.slot} has a gradient of another shape than its own, since it was moved to other "
                        "memory: a program that reads it cannot be compiled. Set .grad to None first."
                    )
                grad = self._adopt(Argument(GradOf(argument.slot), argument.value.grad))  # type: ignore[arg-type]
                recorded.seen.grad = self.grads_before[argument.slot] = grad
        return argument.value if isinstance(recorded.seen, (Object, set, frozenset)) else recorded.seen

    def _need_grad(self, real: Tensor) -> None:
        with warnings.catch_warnings():  # that it is no leaf, and has none: the program gets that warning by itself
            warnings.simplefilter("ignore", UserWarning)
            has_grad = real.grad is not None
        if has_grad and id(real) not in self._with_grads:
            raise self.recorder.refuse(Retrace(GradientBefore((real,))))

    def _refuse_late_requires_grad(self, real: Tensor, seen: Tensor) -> None:
        """A view requires grad when its base does, and the base of a view of a view is not the view.

        An input that is a view is recorded as a base, so its own views would begin to require grad with it.
        """
        if not real._is_view() or real.requires_grad:
            return
        if any(t._base is seen for step in self.steps for t in tensors_in([step.out])):
            raise UnsupportedError(
                f"requires_grad_(), at {where(user_stack(4))}, of an input that is a view, after a view of it was "
                "taken: this cannot be compiled yet. Call it first, or before the compiled program."
            )

    @property
    def held_beside(self) -> Iterator[Tensor]:
        """What is held beside steps and inputs, once for each reference."""
        yield from self.grads_before.values()
        yield from self.lifted.held

    def require_known_grads(self) -> None:
        """A gradient that the program has added to, or replaced, must have been there when it started."""
        for recorded in self.inputs:
            is_member = recorded.parent is not None and bool(recorded.views)
            if not recorded.was_leaf or recorded.same_as is not None or is_member:
                continue
            if recorded.seen.is_leaf and recorded.seen.grad is not None:
                real = self.real_tensors.get(recorded.slot)
                if real is not None and not isinstance(real, FakeTensor) and real.is_leaf:
                    self._need_grad(real)

    def _adopt_memory(self, memory: SharedMemory) -> None:
        """Memory that inputs share is seen before the inputs are."""
        base = fakify(self.engine, Argument(memory.slot, memory.base))
        self.memories.append(base)
        self._real_memories[memory.slot] = memory.base
        self._real_memories |= {alias_group.slot: alias_group.root for alias_group in memory.families}
        for alias_group in memory.families:
            root = base if alias_group.is_memory else fakify_root(base, alias_group)
            if root is not base:
                self.memories.append(root)
            self._roots[id(alias_group.root)] = root
        self._shared.update((id(member), memory) for member in memory.members)

    def release_arguments(self) -> None:
        """Let go of the tensors that the program was recorded on; a compiled program holds no data of its own."""
        self._found = {s: weakref.ref(t) for s, t in self.real_tensors.items() if not isinstance(s, Input)}
        self.real_tensors.clear()
        self._real_memories.clear()
        for recorded in (*self.memories, *self.inputs):
            if recorded.is_tensor and recorded.layout is None and vars(recorded.seen):
                let_go_of_attributes(recorded.seen)
        if self.recorder.checked_reads is not None:
            self.recorder.checked_reads.release()
        if self.recorder.host_state is not None:
            self.recorder.host_state.release()
        self._by_identity.clear()
        self._shared.clear()
        self.lifted.release_arguments()

    @property
    def borrowed(self) -> Borrowed | None:
        """The user's objects that were taken off the tape, if any were on it."""
        return self.lifted.borrowed if self.lifted.is_used("borrowed") else None

    def return_borrowed(self, is_users: Callable[[Any], bool]) -> None:
        """Take the user's own objects off the tape, so that they need not live as long as the program."""
        nodes = []
        if self.lifted.applies_functions:
            ends = [node_of(tensor) for step in self.steps for tensor in tensors_in([step.out])]
            starts = list(dict.fromkeys(node for node in ends if node is not None))
            every = dict.fromkeys([*starts, *(node for _, node in edges_from(list(starts)))])
            nodes = [node for node in every if isinstance(node, PythonNode)]
        if nodes or self.borrowed is not None:
            self.lifted.borrowed.take(is_users, nodes)

    def abandon(self) -> None:
        """Take it apart: its parts lead to each other, and to the user's objects."""
        self.recorder.forget_refusal()
        if self.recorder.checked_reads is not None:
            self.recorder.checked_reads.release()
        if self.recorder.host_state is not None:
            self.recorder.host_state.release()
        self.real_tensors.clear()  # which the joint graph has as well
        vars(self.lifted).clear()
        vars(self).clear()

    def _real(self, slot: Primal) -> Tensor | None:
        """The real tensor that the program found, if it is still there."""
        found = self._found.get(slot)
        return self.real_tensors.get(slot) if found is None else found()

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        with ambient_state_kept(), contextlib.ExitStack() as symbols:
            if self.engine.symbolic:
                for context in sizes_like_numbers(is_users_code):
                    symbols.enter_context(context)
                if self.recorder.has_symbols_of_reads:
                    symbols.enter_context(sizes_of_any_kind())
            try:
                with (
                    recording_autograd(),
                    script_calls_seen,
                    script_functions_seen,
                    nested_tensors_made(),
                    storages_asked_first,
                    self.engine.withheld.while_running(),
                    dynamo_aside(),
                    autograd_watched(self.lifted),
                    self.lifted,
                    overrides_told_as_in_eager(),
                    self.recorder,
                    self._answers(),
                ):
                    yield
            finally:
                self.recorder.generators.restore()

    def differentiate(
        self,
        targets: Sequence[Tensor],
        tangents: Sequence[Tensor],
        autocast: bool,
        others: Sequence[Tensor] = (),
        create_graph: bool = False,
    ) -> RecordedBackward:
        """Record a backward after the forward: a gradient, or None, for each input that has one, and for the others.

        With `autocast` it is recorded under the autocast state of the caller, otherwise without any: what counts in
        eager is the state in which backward is called, not that of the forward. With `create_graph` it can be
        differentiated itself. No tensor may be put where it outlives the recording.
        """
        start, known = len(self.steps), len(self.inputs)
        if self.beginning is None or not self._may_run_user_code(targets):  # autograd itself puts nothing anywhere
            with contextlib.nullcontext() if self.borrowed is None else self.borrowed.put_back():
                gradients, state = self._differentiate(targets, tangents, autocast, others, create_graph)
        else:
            references = References(self)
            gradients, state = self._differentiate(targets, tangents, autocast, others, create_graph)
            references.results = gradients
            survivors = self.beginning.survivors(references.suspects)
            if survivors:
                raise escape_error(survivors[0], self)
        late = tuple(self.real_tensors[recorded.slot] for recorded in self.inputs[known:])
        emptied = self.lifted.caches.emptied() if self.lifted.is_used("caches") else frozenset()
        return RecordedBackward(*gradients, start, self.steps[start:], late, state, emptied)

    def _differentiate(
        self,
        targets: Sequence[Tensor],
        tangents: Sequence[Tensor],
        autocast: bool,
        others: Sequence[Tensor],
        create_graph: bool,
    ) -> tuple[tuple[dict[Primal, Tensor | None], list[Tensor | None]], BackwardState | None]:
        """Gradients of inputs and of others, and what code of the user's has read.

        A custom function that was applied to a real parameter has its edge to the real tensor and not to its fake:
        gradients are taken for both, and added.
        """
        self._prepare_backward(targets)
        differentiable = self.differentiable_inputs
        lifted = self._lifted_leaves(differentiable)
        casts = contextlib.nullcontext() if autocast else autocast_off()
        watched = self._watching_code() if self._may_run_user_code(targets) else contextlib.nullcontext()
        with self._modes(), torch.set_grad_enabled(create_graph), casts, watched as code:
            self.recorder.generators.resume()
            leaves = [i.differentiated for i in differentiable if i.differentiated is not None]
            found = self._gradients(targets, tangents, [*leaves, *others, *lifted.values()], create_graph)
            by_slot = dict(zip((i.slot for i in differentiable), found, strict=False))
            beside = list(found[len(leaves) : len(leaves) + len(others)])
            for slot, extra in zip(lifted, found[len(leaves) + len(others) :], strict=True):
                if extra is not None:
                    known = by_slot[slot]
                    by_slot[slot] = extra if known is None else known + extra
        self.recorder.raise_caught()
        if self.recorder.is_used("foreign"):
            self.recorder.foreign.require_unchanged(None)
        return (by_slot, beside), None if code is None else self._state_read_by(code)

    @contextlib.contextmanager
    def nothing_kept(self) -> Iterator[None]:
        """Forget the steps of what is recorded here."""
        end = len(self.steps)
        try:
            yield
        finally:
            del self.steps[end:]

    def _prepare_backward(self, targets: Sequence[Tensor]) -> None:
        """Every backward starts from what the forward has left."""
        self.recorder.backward = True
        self.recorder.forget_refusal()
        self.lifted.found_in_backward.clear()
        if self.lifted.is_used("caches"):
            self.lifted.caches.refill()
        if self.recorder.is_used("objects"):
            self.recorder.objects.rewind(self.steps)
        self.recorder.watch_gradient_sums(self._edges(targets))

    def _lifted_leaves(self, differentiable: Sequence[RecordedInput]) -> dict[Primal, Tensor]:
        """The real tensors of inputs that the program found by itself: custom functions may have taken them."""
        found: dict[Primal, Tensor] = {}
        for recorded in differentiable:
            real = None if isinstance(recorded.slot, Input) else self._real(recorded.slot)
            if real is not None and real.requires_grad:  # the user may have frozen it since the forward
                found[recorded.slot] = real
        return found

    def _gradients(
        self, targets: Sequence[Tensor], tangents: Sequence[Tensor], wanted: list[Tensor], create_graph: bool
    ) -> Sequence[Tensor | None]:
        """What autograd gives for some tensors.

        Leaves of the program's own get gradients too: what eager runs on the way to them is run, or refused.
        """
        pairs = [(t, g) for t, g in zip(targets, tangents, strict=True) if not _refuse_dead_end(t, g)]
        if not pairs:
            return [None] * len(wanted)
        ends, given = [target for target, _ in pairs], [tangent for _, tangent in pairs]
        nodes = [*(t.grad_fn for t in ends), *(node for _, node in self._edges(ends))]
        if create_graph:
            follow_determinants(nodes)
        reentrant = any(map(is_reentrant_checkpoint, nodes))
        self.holds_checkpoints |= reentrant
        add_up = accumulated if reentrant else with_added
        return add_up(self.engine, ends, given, wanted + self._other_leaves(nodes, wanted), create_graph)[: len(wanted)]

    @contextlib.contextmanager
    def _watching_code(self) -> Iterator[UserCode]:
        """Collects the user's code that runs; what it changes is put back, and refused."""
        with without_function_modes():  # to ask a tensor for its hash would count as finding it
            before = None if self._backward_guards is None else self._backward_guards.before()
        error = None
        try:
            with self.noting_code(), user_code_seen() as code:  # which passes on what it sees
                yield code
        finally:
            with without_function_modes():
                error = None if before is None else before.undo(self)
        if error is not None:
            raise error

    def _may_run_user_code(self, targets: Sequence[Tensor]) -> bool:
        """Whether a backward may call functions of the user's."""
        subclasses = self.recorder.is_used("wrappers") and self.recorder.wrappers.runs_user_code
        if subclasses or self.lifted.hooks_left.inside or self.lifted.reaches_into_tape:
            return True
        nodes = [*(target.grad_fn for target in targets), *(node for _, node in self._edges(targets))]
        return any(isinstance(node, PythonNode) for node in nodes)

    def _state_read_by(self, code: UserCode) -> BackwardState | None:
        found = self.lifted.found_in_backward
        code.tensors = {
            i.slot: real
            for i in self.inputs
            if id(i.seen) in found and i.same_as is None and (real := self._real(i.slot)) is not None
        }
        return None if self._backward_guards is None else self._backward_guards.read_by(code)

    def _edges(self, targets: Sequence[Tensor]) -> list[tuple[Any, Any]]:
        """The edges of the tape that lead from targets; of those that were asked for last they are known."""
        nodes = [target.grad_fn for target in targets]
        if nodes != self._last_nodes:
            self._last_nodes, self._last_edges = nodes, list(tape_edges(targets))
        return self._last_edges

    @property
    def differentiable_inputs(self) -> list[RecordedInput]:
        """Inputs that gradients are taken for."""
        return [i for i in (*self.memories, *self.inputs) if i.differentiated is not None]

    def reached_inputs(self, targets: Sequence[Tensor]) -> set[Primal]:
        """Inputs that autograd has an edge to from some of the targets, whether or not a gradient comes out there."""
        return self._inputs_at(self._edges(targets))

    def inputs_behind_checkpoints(self, targets: Sequence[Tensor]) -> set[Primal]:
        """Inputs that autograd reaches through a reentrant checkpoint."""
        nodes = [*(target.grad_fn for target in targets), *(node for _, node in self._edges(targets))]
        return self._inputs_at(edges_from([node for node in nodes if is_reentrant_checkpoint(node)]))

    def _inputs_at(self, edges: Iterable[tuple[Any, Any]]) -> set[Primal]:
        ends = {id(v) for _, node in edges if (v := getattr(node, "variable", None)) is not None}
        return {
            i.slot for i in self.differentiable_inputs if id(i.differentiated) in ends or id(self._real(i.slot)) in ends
        }

    def _other_leaves(self, nodes: Sequence[Any], known: Sequence[Tensor]) -> list[Tensor]:
        """Leaves on the tape that are no inputs: the program made them."""
        ids = {id(tensor) for tensor in known}
        found = {id(v): v for node in nodes if (v := getattr(node, "variable", None)) is not None}
        return [variable for key, variable in found.items() if key not in ids and variable.requires_grad]

    def leads_to_own_leaves(self, targets: Sequence[Tensor]) -> bool:
        """Whether a backward from these targets reaches leaves that the program itself has made."""
        inputs = [i.differentiated for i in self.differentiable_inputs if i.differentiated is not None]
        return bool(self._other_leaves([node for _, node in self._edges(targets)], inputs))

    def depend_on(self, targets: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
        """Whether any target is differentiable with respect to a leaf that the program made."""
        wanted = {id(leaf) for leaf in leaves}
        return bool(wanted) and any(id(getattr(node, "variable", None)) in wanted for _, node in tape_edges(targets))


def _refuse_higher_order(error: Exception) -> None:
    """Say which operator of the program had a part of it traced by torch itself, where that has failed."""
    if isinstance(error, ForegradError):  # a refusal says itself what it is about
        return
    refusal = "the higher-order operator {} cannot be compiled yet."
    if type(error).__module__.startswith(DYNAMO):
        raise UnsupportedError(refusal.format(caller_of(error, DYNAMO))) from error
    checked = type(error).__module__ == SCRIPT_TRACING  # it runs what it has traced, to compare
    if checked or (isinstance(error, RuntimeError) and passes_through(error, SCRIPT_TRACING)):
        raise UnsupportedError(
            f"TorchScript cannot trace recorded tensors: {caller_of(error, SCRIPT_TRACING)} this cannot be "
            "compiled yet. Trace before the program, or compile with fallback='eager'."
        ) from error
    if isinstance(error, AssertionError) and passes_through(error, HIGHER_ORDER_OPERATORS):
        # Without its cause: frames of that hold tensors without data, and tools may print what frames hold.
        raise UnsupportedError(refusal.format(caller_of(error, HIGHER_ORDER_OPERATORS))) from None
    if isinstance(error, AssertionError) and passes_through(error, FX_TRACING):
        raise UnsupportedError(
            f"torch.fx cannot trace recorded tensors: {caller_of(error, FX_TRACING)} this cannot be compiled yet. "
            "Trace outside of the program (torch.func.jvp gives what torch.func.linearize does), or compile with "
            "fallback='eager'."
        ) from None


def _refuse_dead_end(target: Tensor, tangent: Tensor) -> bool:
    """Whether a target leads to no leaf.

    Eager's `backward()` runs it all the same and may fail there, while its `autograd.grad()` does not run it.
    """
    if target.grad_fn is None or any(hasattr(node, "variable") for _, node in tape_edges([target])):
        return False
    try:
        gradients_of([target], [tangent], (), False)
    except RuntimeError as error:
        raise UnsupportedError(
            f"a result requires grad and leads to no input, and its backward fails, which cannot be compiled: {error}"
        ) from error
    return True
