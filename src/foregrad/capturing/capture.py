"""Record a program on its arguments, with everything around it noted before and checked afterwards."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, ParamSpec

from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from .._torch import DynamoWatch, FakeTensor, Geometry, garbage_collection_paused, is_about_symbols
from ..abstract.engine import Engine, EngineReport
from ..abstract.lean_tensors import to_fake_tensors
from ..codegen.pytree import Around, Flat, Items, Leaf
from ..errors import (
    EscapeError,
    FirstCallError,
    ForegradError,
    GraphOutputError,
    InternalError,
    StateChangeError,
    UnsupportedError,
)
from ..joint.build import Joint, build_joint
from ..joint.side_effects import Assigned
from ..locks import recording_lock, state_lock
from ..options import AOTConfig
from ..record.alias_groups import SharedMemory
from ..record.checked_reads import Symbols
from ..record.fakify import Argument, engine_for
from ..record.hooks import UserCode
from ..record.pre_dispatch import AboveAutograd
from ..record.reads import Read
from ..record.recorder import Recorder
from ..record.recording import Recording
from ..record.refusals import explained, without_frames
from ..record.retrace import (
    ArgumentsElsewhere,
    DynamoLoaded,
    GradientBefore,
    LateInputs,
    NumbersAreExact,
    Reason,
    Retrace,
    SchedulesAreRead,
    SizesAreExact,
    SizesAreRead,
    WholeMemory,
)
from ..record.session import Session
from ..record.survivors import Beginning, disown, escape_error, show
from ..slots import Buffer, FreeTensor, Input, Param, Primal
from ..stack_traces import clear_own_frames, drop_own_frames, note_place, starts_programs
from ..subclasses.layout import is_wrapper, leaves_of
from ..values import UserObject, loosely
from .ahead import Ahead
from .backward_guards import ReadInBackward, calls_of_users
from .code import AnyName, can_see_code_that_runs
from .draws import DrawnAgain, Draws, require_no_drawn_numbers
from .first_calls import NextCall
from .forward import Forward
from .found_numbers import FollowedNumbers, NumberPlace, leave_to_calls, parameters_of_optimizers
from .free_variables import FreeVariables, Reached, refuse_inputs_as_keys, refuse_unknown
from .given import Copies, Opening, OpenOtherwise, TakenArguments, user_path
from .graph_programs import run_graph_program
from .results import Results
from .schedules import Schedules
from .shared_memory import Changes, guarded_where_shared, in_larger_memory, plan_memories, refuse_sharing_with_arrays
from .snapshot import Refused, Snapshot, assigned_buffers, refuse_private_state
from .sources import Source
from .walk import Walk

P = ParamSpec("P")
Inexact = Literal["symbols", "host numbers"]  # what can stand for numbers that a recording depends on

log = logging.getLogger("foregrad")

# A recording that shows something new is made again; each input may show its memory and its gradient.
_MOST_RECORDINGS = 16


@dataclass(frozen=True)
class Capture:
    """A program recorded and differentiated, before anything is compiled."""

    joint: Joint
    arguments: Flat
    result: Flat
    state: tuple[tuple[Primal, Source], ...]
    free_tensors: dict[FreeTensor, Source]
    free_variables: FreeVariables
    shared: tuple[SharedMemory, ...]
    numbers: tuple[NumberPlace, ...] = ()  # that each call reads
    drawn: DrawnAgain | None = None  # from generators of Python's and numpy's

    @property
    def reads(self) -> tuple[Read, ...]:
        """What the program has read of its inputs: each call compares it."""
        return tuple(self.joint.recording.session.recorder.reads.checked)

    @property
    def has_read_symbols(self) -> bool:
        """Whether whole numbers that the program has read are symbols."""
        checked = self.joint.recording.session.recorder.checked_reads
        return checked is not None and any(read.symbols and not read.sized for read in checked.reads)

    @property
    def joint_graph(self) -> fx.GraphModule:
        """Forward and backward as one graph; a program without gradients has its forward only."""
        return self.joint.module

    @property
    def example_inputs(self) -> tuple[Any, ...]:
        """Abstract values for the graph's primals and tangents, and for seeds and offsets after them."""
        joint = self.joint
        return to_fake_tensors((list(joint.primal_values), list(joint.tangent_values), *joint.random.values))

    @property
    def engine(self) -> EngineReport:
        """Which abstract tensors the program was recorded on, and what the lean ones left to FakeTensorMode."""
        return self.joint.recording.engine.report()

    def return_borrowed(self) -> None:
        """Let no object of the user's live for the tape: the program depends on it, and ends with it."""
        session = self.joint.recording.session
        session.return_borrowed(self.free_variables.knows)
        if session.borrowed is not None:
            self.free_variables.require(session.borrowed.objects)

    def __str__(self) -> str:
        return show_joint(self.joint)


def show_joint(joint: Joint) -> str:
    """A program's inputs and outputs, to be read."""
    signature = joint.signature
    lines = [f"{'training' if joint.is_training else 'inference'} program, {joint.op_count} operators"]
    lines += [f"  input   {slot}" for slot in signature.tokens]
    lines += [f"  input   {slot}{_about_input(joint, i)}" for i, slot in enumerate(signature.primals)]
    lines += [f"  returns {slot}" for slot in signature.returned]
    lines += [f"  takes   {slot}" for slot in (*signature.tangents, *signature.backward_tokens)]
    lines += [f"  gives   {slot}" for slot in signature.grads if slot is not None]
    return "\n".join(lines)


def _about_input(joint: Joint, index: int) -> str:
    facts = joint.primals[index]
    seen = facts.recorded.seen
    if not isinstance(seen, Tensor):
        return f" = {seen!r}"
    words = [str(seen.dtype).removeprefix("torch."), str(tuple(seen.shape))]
    words += ["written"] if facts.written else []
    words += ["requires grad"] if facts.requires_grad else []
    return ": " + ", ".join(words)


def _serialized(capture: Callable[P, Capture]) -> Callable[P, Capture]:
    """One thread at a time: what another recording has put into the user's objects must not be taken for theirs."""

    @functools.wraps(capture)
    def locked(*args: P.args, **kwargs: P.kwargs) -> Capture:
        with state_lock, recording_lock:
            dynamo = DynamoWatch()
            try:
                return capture(*args, **kwargs)
            except BaseException as error:
                note_place(error, next((arg for arg in args if isinstance(arg, nn.Module)), None))
                clear_own_frames(error)
                drop_own_frames(error)
                raise
            finally:
                if dynamo.loaded:
                    gc.collect(1)  # its modules leave frames in cycles, which lead to those of the user

    return locked


@_serialized
def capture_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: nn.Module | None,
    config: AOTConfig,
    once_more: bool = False,
) -> Capture:
    """Record a function on the user's own arguments; once more, where no guards fit, with guards as exact as can be."""
    opening = Opening(closed=config.is_export)
    while True:
        try:
            call = _program_call(function, opening.take((args, kwargs)), module, config)
            captured = _capture(call, once_more)
        except OpenOtherwise as otherwise:
            opening = otherwise.opening
            without_frames(otherwise)  # which hold it, and what the caller has passed
            continue
        session = captured.joint.recording.session
        if not (isinstance(function, Forward) and session.recorder.calls.root_is_called) or function.calls_itself:
            return captured
        session.abandon()
        function = replace(function, calls_itself=True)


def _program_call(
    function: Callable[..., Any], taken: TakenArguments, module: nn.Module | None, config: AOTConfig
) -> ProgramCall:
    fixed = config.num_params_buffers if config.options.static_weight_shapes else 0
    inputs = [
        Argument(Input(name), leaf, config.dynamic_shapes and i >= fixed and _symbols(name, config))
        for i, (name, leaf) in enumerate(zip(map(user_path, taken.flat.paths), taken.flat.leaves, strict=True))
    ]
    dynamic_state = config.dynamic_shapes and not config.options.static_weight_shapes
    state = state_of(module, dynamic_state) if module is not None else []
    given = Copies(taken, [argument.slot for argument in inputs if isinstance(argument.slot, Input)])

    def run(seen: list[Any]) -> Any:
        return _run(function, *given.put_together(seen))

    return ProgramCall(function, run, taken.flat, inputs, state, config, given)


@_serialized
def capture_flat(
    module: nn.Module, args: Sequence[Any], config: AOTConfig, slots: Sequence[Input] | None = None
) -> Capture:
    """Record a module on flat arguments; its result must be flat too."""
    named = [Input(f"args[{i}]") for i in range(len(args))] if slots is None else slots
    inputs = [Argument(slot, value, _known_sizes(value, config)) for slot, value in zip(named, args, strict=True)]
    tree = Items(tuple, tuple(Leaf(i) for i in range(len(inputs))))
    flat = Flat(tree, list(args), [str(argument.slot) for argument in inputs])

    def run(seen: list[Any]) -> Any:
        result = _run(module, tuple(seen), {})
        if not isinstance(result, (tuple, list)):
            raise GraphOutputError(
                "Graph output must be a tuple() or list(): the module must return its results flat, in one of them."
            )
        return result

    return _capture(ProgramCall(module, run, flat, inputs, state_of(module, dynamic=False), config))


def _known_sizes(value: Any, config: AOTConfig) -> bool | Geometry:
    """Which sizes of an argument are symbols: those of the front end, where there is one."""
    front_end = config.front_end
    if front_end is None:
        return config.dynamic_shapes
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return False
    if is_wrapper(value):
        front_end.require_numbers(value, leaves_of)
        return False
    found = front_end.geometry(value)
    if found is not None and not found.has_numbers:
        raise UnsupportedError(
            "an input has a size without a number behind it (mark_unbacked), which cannot be compiled yet. Mark it "
            "with mark_dynamic, or leave it to Dynamo."
        )
    return found or False


@dataclass(frozen=True)
class ProgramCall:
    """A program and the arguments to record it on."""

    function: Callable[..., Any]
    run: Callable[[list[Any]], Any]  # calls the function on abstract values for the inputs
    arguments: Flat
    inputs: Sequence[Argument]  # its leaves
    state: Sequence[tuple[Argument, Source]]  # parameters and buffers
    config: AOTConfig
    given: Copies | None = None  # None if the program gets its arguments flat

    @property
    def is_followed(self) -> bool:
        """Whether a front end has followed the code of the program, and compares what that depends on."""
        return self.config.front_end is not None and isinstance(self.function, fx.GraphModule)

    @property
    def held(self) -> tuple[Any, ...]:
        """What the program was last called with."""
        return () if self.given is None else self.given.held

    @property
    def named_arguments(self) -> list[tuple[str, Any]]:
        """Each leaf, by its path in the user's words."""
        return [(str(argument.slot), argument.value) for argument in self.inputs]

    @property
    def classes(self) -> list[type]:
        """Of the objects in the arguments that were taken apart."""
        return [] if self.given is None else [type(value) for value in self.given.taken.opened()]


def _capture(call: ProgramCall, exact_guards: bool = False) -> Capture:
    """Look at everything around the program, record until nothing new shows, and keep what each call compares."""
    recordings = _Recordings(call, exact_guards)
    with garbage_collection_paused():
        recorded, shared = recordings.until_stable()
    free_variables = recordings.free_variables_read()
    leave_to_calls(recorded.numbers, free_variables)
    refuse_unknown(free_variables.unknown)
    _hold_owners(recorded, free_variables)
    state = tuple((argument.slot, source) for argument, source in call.state)
    free_tensors = recordings.free_tensors.sources
    return Capture(
        recorded.joint,
        call.arguments,
        recorded.result,
        state,
        free_tensors,
        free_variables,
        tuple(shared),
        recorded.numbers,
        recordings.draws.drawn(),
    )


def _reachable(call: ProgramCall, exact_guards: bool, schedules: Schedules) -> Walk:
    """What the program can reach, as it is before anything runs."""
    function, arguments, classes = call.function, call.named_arguments, call.classes
    if call.is_followed:
        return Walk(len)  # the front end has followed the program: its graph reads nothing but tensors
    found = Walk(function, arguments, classes=classes, schedules=schedules)
    refuse_unknown(found.changed_for_good())  # an iterator would be used up by the recording
    if exact_guards or found.needs_code_that_runs:
        if can_see_code_that_runs():
            found = Ahead(function, arguments, classes, schedules)
        else:
            found = Walk(function, arguments, AnyName(), classes, schedules)
            refuse_unknown(found.changed_for_good())
    if call.given is not None:
        call.given.taken.require_unknown(found.seen)
    refuse_unknown(found.unknown_arguments)
    refuse_inputs_as_keys(found.holders, call.arguments.leaves)
    found.note_state()
    return found


def _hold_owners(recorded: Recorded, free_variables: FreeVariables) -> None:
    """The objects that calls write to, or give back, must be the very same ones, and are let go with the program."""
    assigned = [effect.owner for effect in recorded.joint.effects if isinstance(effect, Assigned)]
    owners: list[UserObject] = [*assigned, *recorded.around]
    free_variables.fix(owner.find() for owner in owners)
    free_variables.require(owner.find() for owner in recorded.around)
    for owner in owners:
        free_variables.lifetime.when_gone(owner.release)


# ---------------------------------------------------------------------------------------------------------------------
# Recording a call, as often as it takes.
@dataclass(frozen=True)
class Recorded:
    """A program recorded to its end, and differentiated."""

    joint: Joint
    result: Flat
    around: tuple[Around, ...]  # objects of the user's in the result
    numbers: tuple[NumberPlace, ...] = ()  # that the program has found, and that stand for themselves no more


@dataclass(frozen=True)
class Raised:
    """What the program raised."""

    error: Exception


@dataclass(frozen=True)
class Attempt:
    """One recording of a program, and what came of it."""

    session: Session
    outcome: Recorded | Raised | Reason


@dataclass(frozen=True)
class Shown:
    """What the recordings so far have shown about the inputs: the next one takes it into account."""

    shared: Sequence[SharedMemory] = ()
    whole: frozenset[Primal] = frozenset()  # inputs whose whole storage must be seen
    late: tuple[Tensor, ...] = ()  # inputs that a backward found by itself
    with_grads: tuple[Tensor, ...] = ()  # tensors whose gradients, from before the call, are inputs
    symbols: Symbols = "wanted"  # for sizes that the program reads
    follows_numbers: bool = True  # of the host, wherever a backend takes them
    performs_schedules: bool = True  # where the program steps them, and does nothing else with them

    def after(self, attempt: Attempt) -> Shown | None:
        """With what one more recording has shown; None if that is nothing new."""
        whole, late, with_grads, stable = self.whole, self.late, self.with_grads, False
        symbols, follows_numbers, performs = self.symbols, self.follows_numbers, self.performs_schedules
        match attempt.outcome:
            case WholeMemory(slot):
                whole, stable = whole | {slot}, True
            case GradientBefore(tensors):
                with_grads = (*with_grads, *tensors)
            case LateInputs(tensors):
                late = (*late, *tensors)
            case SizesAreRead():
                symbols = "given"
            case SizesAreExact():
                symbols = "refused"
            case NumbersAreExact():
                follows_numbers = False
            case SchedulesAreRead():
                performs = False
            case Raised() if not self.shared:
                whole, stable = whole | in_larger_memory(attempt.session), True
            case Raised() | Recorded():
                stable = True
        changes = Changes.of(attempt.outcome.joint) if isinstance(attempt.outcome, Recorded) else Changes()
        plan = plan_memories(attempt.session, changes, whole)
        if len(plan) <= len(self.shared) and stable:
            return None
        memories = plan if len(plan) > len(self.shared) else self.shared
        return Shown(memories, whole, late, with_grads, symbols, follows_numbers, performs)


def retrace_until_stable(record: Callable[[Shown], Attempt]) -> tuple[Recorded, Sequence[SharedMemory]]:
    """Record a program as if its inputs lay apart; once more where the record shows that they do not."""
    shown = Shown()
    last = record(shown)
    for _ in range(_MOST_RECORDINGS + 2 * len(last.session.real_tensors)):
        following = shown.after(last)
        if following is None:
            return _require_recorded(last), shown.shared
        shown = following
        last = record(shown)
    raise UnsupportedError(
        "the program finds other tensors each time that it is recorded, so that no recording is complete. Pass "
        "them as arguments, or compile with fallback='eager'."
    )


def _require_recorded(last: Attempt) -> Recorded:
    """Raise what the program raised, in the user's words where it is known what that means."""
    if isinstance(last.outcome, Raised):
        error = last.outcome.error
        refusal = explained(error)
        if refusal is not None:
            raise refusal from error
        if last.session.finished:
            raise InternalError(
                f"Foregrad failed on a program that it has recorded: {type(error).__name__}: {error}. Please "
                "report it; fallback='eager' runs the program as it is."
            ) from error
        raise error
    assert isinstance(last.outcome, Recorded)
    return last.outcome


class _FreeTensors:
    """The tensors that the program finds by itself, in one recording: each has a slot, and is read from its source."""

    def __init__(self, reachable: Walk) -> None:
        self._reachable = reachable
        self.sources: dict[FreeTensor, Source] = {}
        self._tensors: dict[FreeTensor, Tensor] = {}
        self._alike: dict[str, int] = {}  # how many have a path

    def clear(self) -> None:
        self._alike.clear()
        self.sources.clear()
        self._tensors.clear()

    def slot_of(self, tensor: Tensor) -> FreeTensor:
        """A new slot for a tensor that the program has found."""
        source = self._reachable.source_of(tensor)
        slot, number = FreeTensor(source.path), self._alike.get(source.path, 1)
        while slot in self.sources:
            number += 1
            slot = FreeTensor(f"{source.path} ({number})")
        self._alike[source.path] = number
        self.sources[slot], self._tensors[slot] = source, tensor
        return slot

    def settle(self, free_variables: Walk) -> None:
        """Read each tensor from where the code that ran finds it; the tensors themselves are let go."""
        if free_variables is not self._reachable:
            sources = {slot: free_variables.source_of(tensor) for slot, tensor in self._tensors.items()}
            self.sources.update((slot, source) for slot, source in sources.items() if source.how != "held")
        self._tensors.clear()
        free_variables.lifetime.when_gone(self.sources.clear)


class _BackwardGuards:
    """Guards what code of the user's does in the backwards of one program, those included that are recorded later."""

    def __init__(self, call: ProgramCall, free_tensors: Mapping[FreeTensor, Source], reachable: Walk) -> None:
        self._function = loosely(call.function.module if isinstance(call.function, Forward) else call.function)
        self._state = {argument.slot: source for argument, source in call.state}
        self._free_tensors = free_tensors
        self._reachable: Walk | None = reachable

    def settle(self) -> None:
        """The program is recorded: what is around it is let go, with the arguments that lead there."""
        self._reachable = None

    def read_by(self, code: UserCode) -> ReadInBackward | None:
        """A guard of what code of the user's reads in a backward, if any has run."""
        calls, modules = calls_of_users(code), code.living_modules()
        if not calls and not modules:
            return None
        sources = [(slot, tensor, self._source_of(slot, tensor)) for slot, tensor in code.tensors.items()]
        return ReadInBackward(calls, modules, [(s, tensor, found) for s, tensor, found in sources if found is not None])

    def _source_of(self, slot: Primal, tensor: Tensor) -> Source | None:
        known = self._free_tensors.get(slot) if isinstance(slot, FreeTensor) else self._state.get(slot)
        if known is None and self._reachable is not None:
            known = self._reachable.source_of(tensor)
        return None if known is None or known.how == "held" else known

    def before(self) -> Snapshot | None:
        """The user's objects, before a backward is recorded once more; what the first one changed was refused."""
        function = self._function()
        if function is None or self._reachable is not None:
            return None
        return Snapshot(Walk(function, (), AnyName()).reached)


class _Recordings:
    """The recordings of one call. Each starts from the same objects of the user's, and leaves them as they were."""

    def __init__(self, call: ProgramCall, exact_guards: bool) -> None:
        self._call = call
        self._exact_guards = exact_guards
        self._sessions: list[Session] = []
        self._why_not_performed = ""
        can_repeat = call.given is not None and not call.config.is_export
        self.draws = Draws(can_repeat)
        self._look_around(Schedules(can_repeat))

    def _look_around(self, schedules: Schedules) -> None:
        call = self._call
        self._schedules = schedules
        self._reachable = reachable = _reachable(call, self._exact_guards, schedules)
        self._known_before = frozenset(reachable.seen)
        self._compared = set(self._found_elsewhere())
        self.free_tensors = _FreeTensors(reachable)
        guards = _BackwardGuards(call, self.free_tensors.sources, reachable)
        self._backward_guards = None if call.is_followed else guards

    def until_stable(self) -> tuple[Recorded, Sequence[SharedMemory]]:
        """Record as often as it takes; recordings that are not needed any more are taken apart."""
        try:
            recorded, shared = retrace_until_stable(self._record)
            self._sessions.remove(recorded.joint.recording.session)
        except BaseException as error:
            self._reachable.release()
            if type(error) is StateChangeError and self._why_not_performed:
                raise StateChangeError(f"{error} {self._why_not_performed}") from error
            raise
        finally:
            for unneeded in self._sessions:
                unneeded.abandon()
            self._reachable.recording_ends()
            self._schedules.release()
        if self._backward_guards is not None:
            self._backward_guards.settle()
        return recorded, shared

    def free_variables_read(self) -> Walk:
        """What the program can reach, as each call compares it: of the code that ran, where that is known."""
        call, found, ran = self._call, self._reachable, self._reachable.code_that_ran
        if ran is not None:
            classes = [*call.classes, *self._reachable.kernels]
            found = Walk(call.function, call.named_arguments, ran, classes, self._schedules)
            refuse_inputs_as_keys(found.holders, call.arguments.leaves)
        if ran is not None or found.kernels:
            found.note_state()
        self.free_tensors.settle(found)
        return found

    def _record(self, shown: Shown) -> Attempt:
        """Record the call once; its changes to the user's objects are undone, whatever comes of it."""
        if self._schedules.performed and not shown.performs_schedules:
            self._why_not_performed = self._schedules.why
            self._reachable.release()
            self._look_around(Schedules(performed=False))
        self.free_tensors.clear()
        call = self._call
        arguments, state = call.inputs, [argument for argument, _ in call.state]
        dynamic = call.config.dynamic_shapes and not shown.shared
        symbols: Symbols = "refused" if dynamic else shown.symbols
        engine = engine_for([*state, *arguments], dynamic, symbols == "given", call.config.front_end)
        if call.config.front_end is not None:
            arguments = guarded_where_shared(arguments, shown.shared)
        elif not dynamic:
            arguments, state = _with_fixed_sizes(arguments), _with_fixed_sizes(state)
        beginning, dynamo = Beginning(), DynamoWatch()
        snapshot = Snapshot(self._reachable.reached)
        self._reachable.tell(snapshot.add)
        session = self._new_session(engine, beginning, symbols)
        follows = shown.follows_numbers and call.config.numbers != "constants" and call.given is not None
        numbers = FollowedNumbers(session.follow_numbers)
        try:
            try:
                if follows:
                    session.begin_numbers(late=call.config.numbers == "inputs")
                    numbers.add(self._reachable.reached)
                    self._reachable.tell(lambda reached: _note_and_follow(reached, snapshot, numbers))
                run = self._schedules.around(call.run, session.steps)
                self.draws = self.draws.of_another(session.recorder)
                run = self.draws.around(run)
                session.run(run, arguments, state, shown.shared, shown.late, shown.with_grads)
            finally:
                numbers.put_back()
                session.arguments = call.held
            recorded = replace(self._differentiated(session, snapshot, arguments, numbers), numbers=numbers.places)
            if follows and recorded.joint.is_training:
                raise Retrace(NumbersAreExact())
            if dynamo.ran:
                raise Retrace(DynamoLoaded())
        except Exception as error:
            # No variable here may hold it: its frames, of which this is one, hold what the caller has passed.
            way: Inexact | None = "symbols" if symbols == "given" else "host numbers" if follows else None
            return Attempt(session, self._undone(_reason(error, dynamo, way), session, snapshot))
        refusal = snapshot.undo(session)
        if refusal is not None:
            disown(session)
            raise refusal
        session.end()
        return Attempt(session, recorded)

    def _new_session(self, engine: Engine, beginning: Beginning, symbols: Symbols) -> Session:
        function, config = self._call.function, self._call.config
        kind = AboveAutograd if config.pre_dispatch else Recorder
        program = function.module if isinstance(function, Forward) else function
        recorder = kind(engine, dict(config.decompositions or {}), isinstance(program, fx.GraphModule))
        if isinstance(function, Forward):
            recorder.calls.begin_in(function.module)
        recorder.calls.root = function if isinstance(function, nn.Module) else recorder.calls.root
        recorder.generators.known = self._reachable.generators
        session = Session(
            recorder,
            self.free_tensors.slot_of,
            beginning,
            self._backward_guards,
            frozenset(self._compared),
            self._reachable.noting_code,
            self._reachable.kernel_runs,
        )
        if self._call.given is not None and not config.is_export:
            most = config.options.max_reads if config.options.reads == "checked" else 0
            session.check_reads(symbols, most, config.changing_reads)
        self._sessions.append(session)
        return session

    def _differentiated(
        self, session: Session, snapshot: Snapshot, arguments: Sequence[Argument], numbers: FollowedNumbers
    ) -> Recorded:
        """The joint graph of a program that has run, if each call can do what it did."""
        call = self._call
        if self._reachable.refusal is not None:  # the program has caught it
            raise self._reachable.refusal
        if not self._found_elsewhere() <= self._compared:
            raise Retrace(ArgumentsElsewhere())
        if call.given is not None:
            call.given.taken.require_unknown(self._reachable.seen)
        survivors = snapshot.survivors(session)
        if survivors:
            refused = Refused(show(survivors[0]), escape_error(survivors[0], session))
            raise self._unless_first(refused, session, arguments)
        with session.noting_code():  # classes may bring functions of their own that take them apart
            results = Results(call.given, self._reachable, self._known_before)
            result, changes = results.take(session)
            session.result = None  # which may lead to objects of the user's
        changed = snapshot.changes()
        escapes = [*snapshot.assigned(session, changed), *numbers.written, *self._schedules.steps]
        put = [leaf for escape in escapes for leaf in escape.leaves]
        require_no_drawn_numbers([*result.leaves, *put, *changes.leaves])
        session.adopt_results([*result.leaves, *put, *changes.leaves])
        if call.config.is_export:
            buffers = [source for argument, source in call.state if isinstance(argument.slot, Buffer)]
            escapes = assigned_buffers(escapes, buffers)
        self.draws.require_known()
        snapshot.leave_draws_to_calls(self.draws)
        change = snapshot.refused(session, changed)
        if change is not None:
            if change.in_argument and call.given is not None:
                call.given.taken.require_others()
            raise self._unless_first(change, session, arguments)
        joint = build_joint(Recording.of(session), result.leaves, result.paths, escapes, call.config, changes)
        if session.recorder.has_symbols_of_reads and any(map(is_about_symbols, joint.backward.refused.values())):
            raise Retrace(SizesAreExact())
        if call.given is not None:
            call.given.require_unchanged("in its backward")
        refuse_private_state(joint.hooks, self._reachable, session)
        refuse_sharing_with_arrays(self._reachable.holders, session.real_tensors, Changes.of(joint))
        return Recorded(joint, result, results.around)

    def _unless_first(self, refused: Refused, session: Session, arguments: Sequence[Argument]) -> Exception:
        """The error for a change: whether the next call would make it as well shows where that can be told."""
        call = self._call
        try:
            reachable = _reachable(call, self._exact_guards, self._schedules)
        except ForegradError:
            return refused.error
        run = self._schedules.around(call.run, session.steps)
        return NextCall(session, reachable, lambda: call.held).decide(refused, run, arguments)

    def _undone(self, error: Exception, session: Session, snapshot: Snapshot) -> Raised | Reason:
        """What comes of a recording that did not get to its end; it leaves nothing behind."""
        error = self._reachable.refusal or error
        elsewhere = self._found_elsewhere()
        if not elsewhere <= self._compared:  # the program has taken them for others
            self._compared.update(elsewhere)
            error = Retrace(ArgumentsElsewhere())
        refusal = snapshot.undo(session)
        snapshot.forget_calls()
        session.arguments = self._call.held  # which has noted what they hold now, if the program came to its end
        given_up = isinstance(error, Retrace) and isinstance(error.reason, DynamoLoaded)
        left = [] if given_up else snapshot.survivors(session, error)  # Dynamo may have collected garbage
        disown(session)
        session.end()
        if isinstance(error, FirstCallError):
            left = [survivor for survivor in left if not snapshot.has_forgotten(survivor)]
        if left and not isinstance(error, EscapeError):
            if isinstance(error, (Retrace, FirstCallError)):
                raise escape_error(left[0], session)
            error.add_note(f"A tensor without data, of no use to anybody, is left in {show(left[0])}.")
        match error:
            case Retrace(reason=GradientBefore(tensors)):
                return GradientBefore(self._with_companions(tensors))
            case Retrace():
                return error.reason
            case EscapeError() if isinstance(refusal, EscapeError):  # which knows the user's name for the place
                raise refusal
            case ForegradError() | OpenOtherwise():
                raise error
            case _:
                return Raised(error)

    def _with_companions(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors whose gradients are inputs: a program that looks at one of a parameter looks at those of others."""
        reached = self._reachable.reached
        groups = [parts.module._parameters.values() for parts in (*reached.modules, *reached.modules_in_arguments)]
        others: dict[int, Tensor] = {id(tensor): tensor for group in groups for tensor in group if tensor is not None}
        others |= {id(tensor): tensor for tensor in parameters_of_optimizers(reached.holders)}
        if not any(id(tensor) in others for tensor in tensors):
            return tensors
        held = [tensor for tensor in others.values() if tensor.is_leaf and tensor.grad is not None]
        return tuple({id(tensor): tensor for tensor in (*tensors, *held)}.values())

    def _found_elsewhere(self) -> frozenset[int]:
        """The ids of arguments that the program also finds by itself, if it may ask which object is which."""
        found = self._reachable
        if not found.compares_objects:
            return frozenset()
        given = [leaf for leaf in self._call.arguments.leaves if isinstance(leaf, Tensor)]
        return frozenset(id(tensor) for tensor in given if found.sources.of_argument(tensor))


def _note_and_follow(reached: Reached, snapshot: Snapshot, numbers: FollowedNumbers) -> None:
    """Note what else was reached, and then let host numbers stand in it."""
    snapshot.add(reached)
    numbers.add(reached)


def _reason(error: Exception, dynamo: DynamoWatch, way: Inexact | None) -> Exception:
    """Why a recording did not get to its end; `way` is what it had in the place of exact numbers."""
    reason = Retrace(DynamoLoaded()) if dynamo.loaded else error
    if way is None or isinstance(reason, (Retrace, FirstCallError, OpenOtherwise)):
        return reason
    log.debug("recording with %s failed, exact ones are tried: %s", way, error)
    exactly = Retrace(NumbersAreExact() if way == "host numbers" else SizesAreExact())
    exactly.__cause__ = error  # the program's own comes again; its frames hold recorded tensors
    return exactly


def _with_fixed_sizes(arguments: Sequence[Argument]) -> list[Argument]:
    return [argument._replace(dynamic=False) if argument.dynamic else argument for argument in arguments]


def _symbols(name: str, config: AOTConfig) -> bool | frozenset[int]:
    """What of an input becomes symbols: everything, or what was seen to change."""
    return True if config.changing is None else config.changing.get(name, False)


def state_of(module: nn.Module, dynamic: bool) -> list[tuple[Argument, Source]]:
    """Parameters, then buffers, each under every name that it has."""
    found: list[tuple[Argument, Source]] = []
    kinds: tuple[tuple[str, type[Param] | type[Buffer]], ...] = (("_parameters", Param), ("_buffers", Buffer))
    modules = [*module.named_modules(remove_duplicate=False)]
    for table_name, slot_type in kinds:
        for prefix, child in modules:
            table = getattr(child, table_name)  # of TorchScript's, no dict
            for key, tensor in list(table.items()):
                if tensor is not None and not is_lazy(tensor):  # a lazy one is refused where it is met
                    path = f"{prefix}.{key}" if prefix else key
                    found.append((Argument(slot_type(path), tensor, dynamic), Source(table, "item", key, path)))
    return found


@starts_programs
def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the program; a graph is interpreted, so that its nodes tell which line of the user they come from."""
    graph = function.module if isinstance(function, Forward) and function.patched is None else function
    if isinstance(graph, fx.GraphModule) and not kwargs:
        return run_graph_program(graph, *args)
    return function(*args, **kwargs)
