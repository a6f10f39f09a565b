"""The callable that users get: it keeps one program for each set of facts, and finds the right one for a call."""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn

from .._torch import (
    FakeTensor,
    dispatch_mode_depth,
    forward_ad_level,
    garbage_collection_paused,
    is_functorch_wrapped,
    under_functorch_transform,
)
from ..errors import EagerFallbackWarning, ForegradError, StateChangeError, UnsupportedError
from ..joint.build import Joint, build_joint
from ..options import AOTConfig
from ..record.engine import engine_for
from ..record.lines import user_stack, where
from ..record.recording import Argument, Recording
from ..runtime.program import Program, assemble
from ..schemas import ViewAndMutationMeta
from ..slots import Buffer, Hidden, Input, Param, Primal
from .escapes import Snapshot
from .guards import MISS, GuardedEntry, sharing_pattern
from .places import Place, Surroundings
from .tree import Flat, flatten, unflatten


@dataclass(frozen=True)
class Capture:
    """A program recorded and differentiated, before anything is compiled."""

    joint: Joint
    arguments: Flat
    result: Flat
    state: tuple[tuple[Primal, Place], ...]
    hidden: dict[Hidden, Place]
    surroundings: Surroundings

    @property
    def joint_graph(self) -> fx.GraphModule:
        """Forward and backward as one graph; a program without gradients has its forward only."""
        return self.joint.module

    @property
    def example_inputs(self) -> tuple[list[Any], list[Any]]:
        """Abstract values for the graph's primals and tangents."""
        return list(self.joint.primal_values), list(self.joint.tangent_values)

    @property
    def engine(self) -> str:
        """Which abstract tensors the program was recorded on."""
        return self.joint.recording.engine.name

    def __str__(self) -> str:
        return show_joint(self.joint)


def show_joint(joint: Joint) -> str:
    """The facts about a program as a person wants to read them."""
    signature = joint.signature
    lines = [f"{'training' if joint.is_training else 'inference'} program, {joint.op_count} operators"]
    lines += [f"  input   {slot}{_about_input(joint, i)}" for i, slot in enumerate(signature.primals)]
    lines += [f"  returns {slot}" for slot in signature.returned]
    lines += [f"  takes   {slot}" for slot in signature.tangents]
    lines += [f"  gives   {slot}" for slot in signature.grads if slot is not None]
    return "\n".join(lines)


def _about_input(joint: Joint, index: int) -> str:
    facts = joint.inputs[index]
    seen = facts.recorded.seen
    if not isinstance(seen, Tensor):
        return f" = {seen!r}"
    words = [str(seen.dtype).removeprefix("torch."), str(tuple(seen.shape))]
    words += ["written"] if facts.written else []
    words += ["requires grad"] if facts.requires_grad else []
    return ": " + ", ".join(words)


class Specialization:
    """One compiled program of a callable, for one set of facts about its arguments."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.call = program.call

    @property
    def metadata(self) -> ViewAndMutationMeta:
        """The facts about inputs and outputs."""
        return self._program.metadata

    @property
    def joint_graph(self) -> fx.GraphModule:
        """Forward and backward as one graph."""
        return self._program.joint.module

    @property
    def forward_graph(self) -> fx.GraphModule:
        """What the forward compiler was given."""
        return self._program.forward_graph

    @property
    def backward_graph(self) -> fx.GraphModule | None:
        """What the backward compiler is given, if the program has a backward."""
        return self._program.backward_graph

    @property
    def source(self) -> str:
        """The generated Python: exactly what runs."""
        return self._program.source

    def __str__(self) -> str:
        return f"{show_joint(self._program.joint)}\n\n{self.source}"

    def __repr__(self) -> str:
        joint = self._program.joint
        kind = "training" if joint.is_training else "inference"
        return f"<{kind} program: {joint.op_count} operators, {len(joint.inputs)} inputs>"


def record_program(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: nn.Module | None,
    config: AOTConfig,
) -> Capture:
    """Record a function on its arguments and build its joint graph."""
    flat = flatten((args, kwargs), "args")
    surroundings = Surroundings(function, zip(flat.paths, flat.leaves, strict=True))
    inputs = [_argument(path, leaf, config) for path, leaf in zip(flat.paths, flat.leaves, strict=True)]
    inputs = [
        Argument(
            a.slot, a.value, a.dynamic and not (i < config.num_params_buffers and config.options.static_weight_shapes)
        )
        for i, a in enumerate(inputs)
    ]
    state = (
        state_of(module, config.dynamic_shapes and not config.options.static_weight_shapes)
        if module is not None
        else []
    )
    given = [(a.slot, a.value) for a in (*(argument for argument, _ in state), *inputs)]
    engine = engine_for(given, config.dynamic_shapes)
    hidden: dict[Hidden, Place] = {}

    def place_of(tensor: Tensor) -> Hidden:
        place = surroundings.place_of(tensor)
        slot = Hidden(place.path)
        while slot in hidden:
            slot = Hidden(f"{slot.path}'")
        hidden[slot] = place
        return slot

    snapshot = Snapshot(surroundings)
    recording = Recording(engine, dict(config.decompositions or {}), from_nodes=isinstance(function, fx.GraphModule))

    def program(seen: list[Any]) -> Any:
        given = unflatten(flat.tree, seen)
        result = interpreted(function, *given)
        after = flatten(given, "args")
        if after.tree != flat.tree or any(a is not b for a, b in zip(after.leaves, seen, strict=True)):
            raise StateChangeError(
                "the program changes a list or dict that it was given: a compiled call would not change it again. "
                "Return the new container instead, or compile with fallback='eager'."
            )
        return result

    try:
        recording.run(program, inputs, [argument for argument, _ in state], place_of)
        result = flatten(recording.result, "output")
        joint = build_joint(recording, result.leaves, result.paths, config.options.view_replay_for_aliased_outputs)
    finally:
        refusal = snapshot.undo(recording)
    if refusal is not None:
        raise refusal
    _refuse_shared_writes(joint)
    return Capture(joint, flat, result, tuple((a.slot, place) for a, place in state), hidden, surroundings)


def _argument(path: str, leaf: Any, config: AOTConfig) -> Argument:
    slot = Input(path.removeprefix("args[0]").removeprefix("args[1]") or path)
    name = f"args{slot.path}" if path.startswith("args[0]") else f"kwargs{slot.path}"
    return Argument(Input(name), leaf, dynamic=config.dynamic_shapes)


def state_of(module: nn.Module, dynamic: bool) -> list[tuple[Argument, Place]]:
    """Parameters, then buffers, each under every name that it has."""
    found: list[tuple[Argument, Place]] = []
    kinds: tuple[tuple[str, type[Param] | type[Buffer]], ...] = (("_parameters", Param), ("_buffers", Buffer))
    for table_name, slot_type in kinds:
        for prefix, child in module.named_modules(remove_duplicate=False):
            table = getattr(child, table_name)
            for key, tensor in table.items():
                if tensor is not None:
                    path = f"{prefix}.{key}" if prefix else key
                    found.append((Argument(slot_type(path), tensor, dynamic), Place(table, "item", key, path)))
    return found


def interpreted(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the program; a graph is interpreted, so that its nodes tell which line of the user they come from."""
    if isinstance(function, fx.GraphModule) and not kwargs:
        with fx_traceback.preserve_node_meta():
            return fx.Interpreter(function).run(*args)
    return function(*args, **kwargs)


def _refuse_shared_writes(joint: Joint) -> None:
    """An input that is written while another input looks at the same storage."""
    reals = {slot: t for slot, t in joint.recording.real_tensors.items() if not isinstance(t, FakeTensor)}
    if not any(facts.written for facts in joint.inputs):
        return
    slots = list(reals)
    pattern = dict(zip(slots, sharing_pattern(list(reals.values())), strict=True))
    for facts in joint.inputs:
        slot = facts.recorded.slot
        if facts.written and slot in reals:
            shared = [s for s in slots if pattern[s] == pattern[slot] and reals[s] is not reals[slot]]
            if shared:
                raise UnsupportedError(
                    f"{slot} is written and shares its storage with {shared[0]}, which cannot be compiled yet. Pass a "
                    "clone of one of them, or compile with fallback='eager'."
                )


class Compiled:
    """A function compiled for every set of facts that it was called with.

    `specializations` lists its programs, in the order in which they were compiled.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module | None, config: AOTConfig) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._module = module
        self.config = config
        self._lock = threading.RLock()
        self._eager = False
        self.specializations: list[Specialization] = []
        self._calls: tuple[Callable[..., Any], ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for call in self._calls:
            result = call(args, kwargs)
            if result is not MISS:
                return result
        return self._new_facts(args, kwargs)

    def __repr__(self) -> str:
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        return f"<compiled {name}, {len(self.specializations)} programs>"

    def _new_facts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that no program is for: compile one, or run the original where that is the only right thing."""
        if self._eager or _inside_another_transform(args, kwargs):
            return self._function(*args, **kwargs)
        with self._lock:
            for call in self._calls:  # another thread may have compiled it meanwhile
                result = call(args, kwargs)
                if result is not MISS:
                    return result
            if len(self.specializations) >= self.config.options.max_specializations:
                return self._give_up(
                    f"was compiled {len(self.specializations)} times for different arguments; from now on it runs "
                    "eagerly where no program fits. Raise foregrad.config.max_specializations, or compile with "
                    "dynamic=True.",
                    args,
                    kwargs,
                )
            try:
                call = self._specialize(args, kwargs)
            except ForegradError as error:
                if self.config.options.fallback != "eager":
                    raise
                self._eager = True
                return self._give_up(f"cannot be compiled and runs eagerly: {error}", args, kwargs)
        result = call(args, kwargs)
        if result is MISS:
            raise ForegradError(
                f"The guards of the program for {self!r} refuse the very call that it was compiled for: an argument or "
                f"something that the function reads changes while it is recorded, at {where(user_stack(2))}."
            )
        return result

    def _specialize(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        with garbage_collection_paused():
            capture = self._capture(args, kwargs)
            program = assemble(capture.joint, self.config, guarded_entry(capture))
            capture.joint.recording.release_arguments()
        self.specializations.append(Specialization(program))
        self._calls = (program.call, *self._calls)
        return program.call

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
        """Record the program; where symbols lead into what torch cannot do with them, with fixed numbers instead."""
        if not self.config.dynamic_shapes:
            return record_program(self._function, args, kwargs, self._module, self.config)
        try:
            capture = record_program(self._function, args, kwargs, self._module, self.config)
            if not _blames_symbols(capture.joint.backward_error):
                return capture
        except Exception as error:
            if not _blames_symbols(error):
                raise
        fixed = dataclasses.replace(self.config, dynamic_shapes=False)
        return record_program(self._function, args, kwargs, self._module, fixed)

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without programs: it compiles its own."""
        return {"_function": self._function, "_module": self._module, "config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**{name.removeprefix("_"): value for name, value in state.items()})  # type: ignore[misc]

    def _give_up(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not getattr(self, "_warned", False):
            self._warned = True
            warnings.warn(f"{self!r} {why}", EagerFallbackWarning, stacklevel=4)
        return self._function(*args, **kwargs)


def _blames_symbols(error: Exception | None) -> bool:
    """Whether an error is about symbolic numbers rather than about the program."""
    words = ("SymInt", "SymFloat", "SymBool", "symbolic", "the size ", "aten::size")
    return error is not None and any(word in str(error) for word in words)


def guarded_entry(capture: Capture) -> GuardedEntry:
    """The entry of a program that is called with the user's own arguments."""
    inputs = [f.recorded.slot for f in capture.joint.inputs if isinstance(f.recorded.slot, Input)]
    return GuardedEntry(
        joint=capture.joint,
        arguments=capture.arguments.tree,
        inputs=inputs,
        result=capture.result.tree,
        state=capture.state,
        hidden=capture.hidden,
        surroundings=capture.surroundings,
    )


def _inside_another_transform(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call happens inside another recording or a transform, which must see the original operators."""
    if dispatch_mode_depth() or under_functorch_transform() or forward_ad_level() >= 0:
        return True
    leaves = flatten((args, kwargs), "").leaves
    return any(
        isinstance(leaf, Tensor) and (is_functorch_wrapped(leaf) or isinstance(leaf, FakeTensor)) for leaf in leaves
    )
