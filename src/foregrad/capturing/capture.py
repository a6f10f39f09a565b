"""Record a program on its arguments, with everything around it noted before and checked afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn

from .._torch import FakeTensor, garbage_collection_paused
from ..abstract.engine import EngineReport
from ..abstract.lean_tensors import to_fake_tensors
from ..abstract.symbolic_engine import engine_for
from ..codegen.pytree import Flat, Items, Leaf, Tree, flatten, unflatten
from ..errors import EscapeError, ForegradError, GraphOutputError, InternalError, StateChangeError, UnsupportedError
from ..joint.build import Joint, build_joint
from ..joint.side_effects import Assigned
from ..locks import recording_lock
from ..options import AOTConfig
from ..record.alias_groups import (
    SharedMemory,
    groups_by_storage,
    has_views_among,
    lies_in_more,
    overlaps_somewhere,
    related_to,
    share,
)
from ..record.fakify import Argument
from ..record.recording import Recording
from ..record.refusals import explained
from ..record.retrace import ArgumentsElsewhere, GradientBefore, LateInputs, Reason, Retrace, WholeMemory
from ..record.survivors import Beginning, disown, escape_error, show
from ..slots import Buffer, FreeTensor, Input, Param, Primal, Tangent
from ..stack_traces import clear_own_frames, starts_programs
from .ahead import Ahead
from .backward_guards import BackwardGuards
from .code import CodeThatRan, can_see_code_that_runs
from .kinds import Lifetime
from .snapshot import Snapshot, assigned_buffers, refuse_private_state
from .sources import FreeVariables, Source, refuse_inputs_as_keys, refuse_unknown
from .state_guards import ModuleGuard

P = ParamSpec("P")

# A recording that shows something new is made again; each input may show its memory and its gradient.
_MOST_RECORDINGS = 16


@dataclass(frozen=True)
class Capture:
    """A program recorded and differentiated, before anything is compiled."""

    joint: Joint
    arguments: Flat
    result: Flat
    state: tuple[tuple[Primal, Source], ...]
    hidden: dict[FreeTensor, Source]
    free_variables: FreeVariables
    modules: ModuleGuard | None  # as the recording found them
    shared: tuple[SharedMemory, ...]

    @property
    def joint_graph(self) -> fx.GraphModule:
        """Forward and backward as one graph; a program without gradients has its forward only."""
        return self.joint.module

    @property
    def example_inputs(self) -> tuple[Any, ...]:
        """Abstract values for the graph's primals and tangents, and for seeds and offsets behind them."""
        joint = self.joint
        return to_fake_tensors((list(joint.primal_values), list(joint.tangent_values), *joint.random.values))

    @property
    def engine(self) -> EngineReport:
        """Which abstract tensors the program was recorded on, and what the lean ones left to FakeTensorMode."""
        return self.joint.recording.engine.report()

    def return_borrowed(self) -> None:
        """Let no object of the user's live for the tape: the program depends on it, and ends with it."""
        recording = self.joint.recording
        recording.return_borrowed(self.free_variables.knows)
        self.free_variables.require(recording.borrowed.objects)

    def __str__(self) -> str:
        return show_joint(self.joint)


def show_joint(joint: Joint) -> str:
    """The facts about a program as a person wants to read them."""
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
        with recording_lock:
            try:
                return capture(*args, **kwargs)
            except BaseException as error:
                clear_own_frames(error)
                raise

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
    flat = flatten((args, kwargs), "")
    fixed = config.num_params_buffers if config.options.static_weight_shapes else 0
    inputs = [
        Argument(Input(_name(path)), leaf, dynamic=config.dynamic_shapes and i >= fixed)
        for i, (path, leaf) in enumerate(zip(flat.paths, flat.leaves, strict=True))
    ]
    dynamic_state = config.dynamic_shapes and not config.options.static_weight_shapes
    state = state_of(module, dynamic_state) if module is not None else []

    given = Given(flat.tree)

    def program(seen: list[Any]) -> Any:
        result = _run(function, *given.put_together(seen))
        given.require_unchanged()
        return result

    return _capture(function, program, flat, inputs, state, config, once_more, given)


class Given:
    """The arguments that a program was given: the lists and dicts among them are not for it to change."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.held: tuple[Any, ...] = ()  # the leaves, and the arguments

    def put_together(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments and keyword arguments."""
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(self._tree, leaves)
        self.held = leaves, arguments
        return arguments

    def require_unchanged(self) -> None:
        """Refuse a program that has changed them."""
        leaves, arguments = self.held
        after = flatten(arguments, "")
        if after.tree != self._tree or any(a is not b for a, b in zip(after.leaves, leaves, strict=True)):
            raise StateChangeError(
                "the program changes a list or dict that it was given: a compiled call would not change it again. "
                "Return the new container instead, or compile with fallback='eager'."
            )


@_serialized
def capture_flat(module: nn.Module, args: Sequence[Any], config: AOTConfig) -> Capture:
    """Record a module on flat arguments; its result must be flat too."""
    inputs = [Argument(Input(f"args[{i}]"), value, config.dynamic_shapes) for i, value in enumerate(args)]
    tree = Items(tuple, tuple(Leaf(i) for i in range(len(inputs))))
    flat = Flat(tree, list(args), [str(argument.slot) for argument in inputs])

    def program(seen: list[Any]) -> Any:
        result = _run(module, tuple(seen), {})
        if not isinstance(result, (tuple, list)):
            raise GraphOutputError(
                "Graph output must be a tuple() or list(): the module must return its results flat, in one of them."
            )
        return result

    return _capture(module, program, flat, inputs, state_of(module, dynamic=False), config)


def _capture(
    function: Callable[..., Any],
    program: Callable[[list[Any]], Any],
    flat: Flat,
    inputs: Sequence[Argument],
    state: Sequence[tuple[Argument, Source]],
    config: AOTConfig,
    exact_guards: bool = False,
    given: Given | None = None,
) -> Capture:
    arguments = [(str(argument.slot), leaf) for argument, leaf in zip(inputs, flat.leaves, strict=True)]
    free_variables = FreeVariables(function, arguments)
    ahead = None
    # Before anything runs: an iterator would be used up.
    refuse_unknown(free_variables.changed_for_good(function, arguments))
    if exact_guards or free_variables.needs_code_that_runs:
        if can_see_code_that_runs():
            free_variables = ahead = Ahead(function, arguments)
        else:
            free_variables = FreeVariables(function, arguments, follows_all=True)
            refuse_unknown(free_variables.changed_for_good(function, arguments))
    refuse_unknown(free_variables.unknown_arguments)
    refuse_inputs_as_keys(free_variables.holders, flat.leaves)
    ran = None if ahead is None else CodeThatRan(ahead.look)
    lifetime = Lifetime()
    modules = None
    if ran is None:  # before the program changes anything
        free_variables.note_state()
        modules = _guard_of(free_variables, lifetime)
    compared = set(_found_elsewhere(free_variables, flat.leaves))
    found = [argument for argument, _ in state]
    hidden: dict[FreeTensor, Source] = {}
    found_there: dict[FreeTensor, Tensor] = {}
    recordings: list[Recording] = []

    def source_of(tensor: Tensor) -> FreeTensor:
        source = free_variables.source_of(tensor)
        slot = FreeTensor(source.path)
        while slot in hidden:
            slot = FreeTensor(f"{slot.path}'")
        hidden[slot], found_there[slot] = source, tensor
        return slot

    backward = BackwardGuards(function, {argument.slot: source for argument, source in state}, hidden, free_variables)

    def attempt(shared: Sequence[SharedMemory], early: Sequence[Tensor], grads: Sequence[Tensor]) -> Attempt:
        hidden.clear()
        found_there.clear()
        dynamic = config.dynamic_shapes and not shared
        taken, around = (inputs, found) if dynamic else (_with_fixed_sizes(inputs), _with_fixed_sizes(found))
        engine = engine_for([(argument.slot, argument.value) for argument in (*found, *inputs)], dynamic)
        beginning = Beginning()
        snapshot = Snapshot(free_variables)
        if ahead is not None:
            ahead.tell(snapshot.add)
        from_nodes = isinstance(function, fx.GraphModule)
        recording = Recording(engine, dict(config.decompositions or {}), from_nodes, config.pre_dispatch)
        recordings.append(recording)
        recording.backward_guards = backward
        recording.recorder.calls.root = function if isinstance(function, nn.Module) else None
        recording.beginning = beginning
        recording.found_elsewhere = frozenset(compared)
        if ran is not None:
            recording.noting_code = ran.noting
        try:
            recording.run(program, taken, around, source_of, shared, early, grads)
            recording.arguments = () if given is None else given.held
            if ahead is not None:
                ahead.raise_caught()
            if not _found_elsewhere(free_variables, flat.leaves) <= compared:
                raise Retrace(ArgumentsElsewhere())
            survivors = snapshot.survivors(recording)
            if survivors:
                raise escape_error(survivors[0], recording)
            with recording.noting_code():  # classes may bring functions of their own that take them apart
                result = flatten(recording.result, "output")
            escapes = snapshot.assigned(recording)
            recording.adopt_results([*result.leaves, *(leaf for escape in escapes for leaf in escape.leaves)])
            if config.is_export:
                buffers = [source for argument, source in state if isinstance(argument.slot, Buffer)]
                escapes = assigned_buffers(escapes, buffers)
            joint = build_joint(recording, result.leaves, result.paths, escapes, config)
            if given is not None:  # the backward has run as well
                given.require_unchanged()
            refuse_private_state(joint.hooks, free_variables, recording)
        except Exception as error:
            recording.arguments = () if given is None else given.held
            refused: Exception | None = None if ahead is None else ahead.refusal
            elsewhere = _found_elsewhere(free_variables, flat.leaves)
            if not elsewhere <= compared:  # the program has taken them for others
                compared.update(elsewhere)
                refused = Retrace(ArgumentsElsewhere())
            return _failed(refused or error, recording, snapshot)
        refusal = snapshot.undo(recording)
        if refusal is not None:
            disown(recording)
            raise refusal
        recording.beginning, recording.arguments = None, ()
        return Attempt(recording, joint, result)

    with garbage_collection_paused():
        try:
            joint, result, shared = retrace_until_stable(attempt)
            recordings.remove(joint.recording)
        except BaseException:
            free_variables.release()
            raise
        finally:
            for unneeded in recordings:
                unneeded.abandon()
            if ahead is not None:
                ahead.release()
    backward.settle()
    if ran is not None:
        ran.named_beside |= free_variables.named_by_getters
        free_variables = FreeVariables(function, arguments, ran)
        free_variables.note_state()
        modules = _guard_of(free_variables, lifetime)
        refuse_inputs_as_keys(free_variables.holders, flat.leaves)
        sources_of_code = {slot: free_variables.source_of(tensor) for slot, tensor in found_there.items()}
        hidden.update((slot, source) for slot, source in sources_of_code.items() if source.how != "held")
    found_there.clear()
    refuse_unknown(free_variables.unknown)
    free_variables.lifetime.join(lifetime)
    free_variables.lifetime.when_gone(hidden.clear)
    _hold_owners(joint, free_variables)
    sources = tuple((a.slot, source) for a, source in state)
    return Capture(joint, flat, result, sources, hidden, free_variables, modules, tuple(shared))


def _found_elsewhere(free_variables: FreeVariables, arguments: Sequence[Any]) -> frozenset[int]:
    """The ids of arguments that the program also finds by itself, if it may ask which object is which."""
    if not free_variables.compares_objects:
        return frozenset()
    given = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
    return frozenset(id(tensor) for tensor in given if free_variables.sources_of_argument(tensor))


def _guard_of(free_variables: FreeVariables, lifetime: Lifetime) -> ModuleGuard | None:
    return ModuleGuard(list(free_variables.modules.values()), lifetime) if free_variables.modules else None


def _hold_owners(joint: Joint, free_variables: FreeVariables) -> None:
    """The objects that calls write to must be the very same ones, and are let go with the program."""
    owners = [effect.owner for effect in joint.effects if isinstance(effect, Assigned)]
    free_variables.fix(owner.find() for owner in owners)
    for owner in owners:
        free_variables.lifetime.when_gone(owner.release)


def _failed(error: Exception, recording: Recording, snapshot: Snapshot) -> Attempt:
    """What comes of a recording that did not get to its end; it leaves nothing behind."""
    refusal = snapshot.undo(recording)
    snapshot.forget_calls()
    left = snapshot.survivors(recording, error)
    disown(recording)
    recording.beginning, recording.arguments = None, ()
    if left and not isinstance(error, EscapeError):
        if isinstance(error, Retrace):
            raise escape_error(left[0], recording)
        error.add_note(f"A tensor without data, of no use to anybody, is left in {show(left[0])}.")
    match error:
        case Retrace():
            return Attempt(recording, retrace=error.reason)
        case EscapeError() if isinstance(refusal, EscapeError):  # which knows the user's name for the place
            raise refusal
        case ForegradError():
            raise error
        case _:
            return Attempt(recording, error=error)


@dataclass(frozen=True)
class Attempt:
    """One recording of a program: its joint graph, or why there is none."""

    recording: Recording
    joint: Joint | None = None
    result: Flat | None = None
    retrace: Reason | None = None  # what the next one must take into account
    error: Exception | None = None  # what the program raised


def retrace_until_stable(
    attempt: Callable[[Sequence[SharedMemory], Sequence[Tensor], Sequence[Tensor]], Attempt],
) -> tuple[Joint, Flat, Sequence[SharedMemory]]:
    """Record a program as if its inputs lay apart; once more where the record shows that they do not."""
    shared: Sequence[SharedMemory] = ()
    needed: set[Primal] = set()
    early: list[Tensor] = []
    grads: list[Tensor] = []
    last = attempt(shared, early, grads)
    for _ in range(_MOST_RECORDINGS + 2 * len(last.recording.real_tensors)):
        match last.retrace:
            case WholeMemory(slot):
                needed.add(slot)
            case GradientBefore(tensor):
                grads.append(tensor)
            case LateInputs(tensors):
                early += tensors
        if last.error is not None and not shared:
            needed |= _in_larger_memory(last.recording)
        plan = plan_memories(last, needed)
        stable = last.retrace is None or isinstance(last.retrace, WholeMemory)
        if len(plan) <= len(shared) and stable:
            break
        shared = plan if len(plan) > len(shared) else shared
        last = attempt(shared, early, grads)
    else:
        raise UnsupportedError(
            "the program finds other tensors each time that it is recorded, so that no recording is complete. Pass "
            "them as arguments, or compile with fallback='eager'."
        )
    if last.error is not None:
        refusal = explained(last.error)
        if refusal is not None:
            raise refusal from last.error
        if last.recording.finished:
            raise InternalError(
                f"Foregrad failed on a program that it has recorded: {type(last.error).__name__}: {last.error}. Please "
                "report it; fallback='eager' runs the program as it is."
            ) from last.error
        raise last.error
    assert last.joint is not None and last.result is not None
    return last.joint, last.result, shared


def plan_memories(attempt: Attempt, needed: set[Primal]) -> list[SharedMemory]:
    """Storages that the program wrote to and that several inputs look at, where they may overlap (B-1)."""
    inputs = () if attempt.joint is None else attempt.joint.inputs
    written = {facts.recorded.slot for facts in inputs if facts.data_changed}
    if attempt.joint is not None:
        written |= {write.of for write in attempt.joint.backward_writes if not isinstance(write.of, Tangent)}
    counted = {facts.recorded.slot for facts in inputs if facts.version_change}
    flagged = {facts.recorded.slot for facts in inputs if facts.made_to_require_grad}
    refitted = {facts.recorded.slot for facts in inputs if facts.refitted}
    if not (written or needed or counted or flagged):
        return []
    # Autograd takes a write to one view for a change of all of them: it counts versions by families.
    training = attempt.joint is not None and attempt.joint.is_training
    rebased = {f.recorded.slot for f in inputs if f.data_changed and (f.write_seen_by_autograd or training)}
    plan: list[SharedMemory] = []
    for group in groups_by_storage(attempt.recording.real_tensors):
        several = len(group) > 1 and not written.isdisjoint(group)
        # Two that take other elements of one memory may meet there, wherever they came from.
        meet = overlaps_somewhere(group.values()) or len(refitted.intersection(group)) > 1
        shown = several and (meet or related_to(group, rebased))
        # A change of shape, or a write to nothing, shows in the versions of views that autograd follows.
        differentiated = len(group) > 1 and any(tensor.requires_grad for tensor in group.values())
        shown = shown or (differentiated and related_to(group, counted)) or has_views_among(group, flagged)
        if needed.isdisjoint(group) and not shown:
            continue
        if any(isinstance(tensor, FakeTensor) for tensor in group.values()):
            names = ", ".join(map(str, group))
            raise UnsupportedError(f"{names} share memory that is written, and are fake: this cannot be compiled yet.")
        plan.append(share(len(plan), group, flat=not needed.isdisjoint(group)))
    return plan


def _in_larger_memory(recording: Recording) -> set[Primal]:
    """Inputs that are not all of their storage: what lies beside them may explain an error."""
    lifted = {slot: t for slot, t in recording.real_tensors.items() if not isinstance(t, FakeTensor)}
    groups = groups_by_storage({slot: t for slot, t in lifted.items() if t.layout is torch.strided})
    return {slot for group in groups for slot, tensor in group.items() if len(group) > 1 or lies_in_more(tensor)}


def _with_fixed_sizes(arguments: Sequence[Argument]) -> list[Argument]:
    return [argument._replace(dynamic=False) if argument.dynamic else argument for argument in arguments]


def _name(path: str) -> str:
    """The place of a leaf in (args, kwargs), as the user would write it."""
    return f"args{path.removeprefix('[0]')}" if path.startswith("[0]") else f"kwargs{path.removeprefix('[1]')}"


def state_of(module: nn.Module, dynamic: bool) -> list[tuple[Argument, Source]]:
    """Parameters, then buffers, each under every name that it has."""
    found: list[tuple[Argument, Source]] = []
    kinds: tuple[tuple[str, type[Param] | type[Buffer]], ...] = (("_parameters", Param), ("_buffers", Buffer))
    if any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        raise UnsupportedError(
            "a TorchScript module keeps its parameters where recording cannot see them. Compile the module that it was "
            "made of, or use fallback='eager'."
        )
    modules = [(prefix, vars(child)) for prefix, child in module.named_modules(remove_duplicate=False)]
    for table_name, slot_type in kinds:
        for prefix, attributes in modules:
            table = attributes[table_name]
            for key, tensor in list(table.items()):
                if tensor is not None:
                    path = f"{prefix}.{key}" if prefix else key
                    found.append((Argument(slot_type(path), tensor, dynamic), Source(table, "item", key, path)))
    return found


@starts_programs
def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the program; a graph is interpreted, so that its nodes tell which line of the user they come from."""
    if isinstance(function, fx.GraphModule) and not kwargs:
        with fx_traceback.preserve_node_meta():
            return fx.Interpreter(function).run(*args)
    return function(*args, **kwargs)
