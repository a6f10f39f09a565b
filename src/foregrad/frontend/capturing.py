"""Record a program on its arguments, with everything around it noted before and checked afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn

from .._torch import FakeTensor
from ..errors import GraphOutputError, StateChangeError, UnsupportedError
from ..joint.build import Joint, build_joint
from ..options import AOTConfig
from ..record.engine import engine_for
from ..record.memory import SharedMemory, groups_by_storage, overlaps_somewhere, related_to, share
from ..record.recording import Argument, Recording
from ..slots import Buffer, Hidden, Input, Param, Primal
from .escapes import Snapshot
from .places import Place, Surroundings
from .tree import Flat, Items, Leaf, flatten, unflatten


@dataclass(frozen=True)
class Capture:
    """A program recorded and differentiated, before anything is compiled."""

    joint: Joint
    arguments: Flat
    result: Flat
    state: tuple[tuple[Primal, Place], ...]
    hidden: dict[Hidden, Place]
    surroundings: Surroundings
    shared: tuple[SharedMemory, ...]

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
    facts = joint.primals[index]
    seen = facts.recorded.seen
    if not isinstance(seen, Tensor):
        return f" = {seen!r}"
    words = [str(seen.dtype).removeprefix("torch."), str(tuple(seen.shape))]
    words += ["written"] if facts.written else []
    words += ["requires grad"] if facts.requires_grad else []
    return ": " + ", ".join(words)


def capture_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: nn.Module | None,
    config: AOTConfig,
) -> Capture:
    """Record a function on the user's own arguments."""
    flat = flatten((args, kwargs), "")
    fixed = config.num_params_buffers if config.options.static_weight_shapes else 0
    inputs = [
        Argument(Input(_name(path)), leaf, dynamic=config.dynamic_shapes and i >= fixed)
        for i, (path, leaf) in enumerate(zip(flat.paths, flat.leaves, strict=True))
    ]
    dynamic_state = config.dynamic_shapes and not config.options.static_weight_shapes
    state = state_of(module, dynamic_state) if module is not None else []

    def program(seen: list[Any]) -> Any:
        given = unflatten(flat.tree, seen)
        result = _run(function, *given)
        after = flatten(given, "")
        if after.tree != flat.tree or any(a is not b for a, b in zip(after.leaves, seen, strict=True)):
            raise StateChangeError(
                "the program changes a list or dict that it was given: a compiled call would not change it again. "
                "Return the new container instead, or compile with fallback='eager'."
            )
        return result

    return _capture(function, program, flat, inputs, state, config)


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
    state: Sequence[tuple[Argument, Place]],
    config: AOTConfig,
) -> Capture:
    surroundings = Surroundings(function, zip(flat.paths, flat.leaves, strict=True))
    found = [argument for argument, _ in state]
    hidden: dict[Hidden, Place] = {}

    def place_of(tensor: Tensor) -> Hidden:
        place = surroundings.place_of(tensor)
        slot = Hidden(place.path)
        while slot in hidden:
            slot = Hidden(f"{slot.path}'")
        hidden[slot] = place
        return slot

    def attempt(shared: Sequence[SharedMemory]) -> tuple[Joint, Flat]:
        hidden.clear()
        dynamic = config.dynamic_shapes and not shared
        given, around = (inputs, found) if dynamic else (_with_fixed_sizes(inputs), _with_fixed_sizes(found))
        engine = engine_for([(argument.slot, argument.value) for argument in (*found, *inputs)], dynamic)
        snapshot = Snapshot(surroundings)
        from_nodes = isinstance(function, fx.GraphModule)
        recording = Recording(engine, dict(config.decompositions or {}), from_nodes)
        try:
            recording.run(program, given, around, place_of, shared)
            result = flatten(recording.result, "output")
            joint = build_joint(recording, result.leaves, result.paths, config)
        finally:
            refusal = snapshot.undo(recording)
        if refusal is not None:
            raise refusal
        return joint, result

    joint, result = attempt(())
    shared = written_memories(joint)
    if shared:  # it was recorded as if its inputs lay apart
        joint, result = attempt(shared)
    places = tuple((a.slot, place) for a, place in state)
    return Capture(joint, flat, result, places, hidden, surroundings, tuple(shared))


def _with_fixed_sizes(arguments: Sequence[Argument]) -> list[Argument]:
    return [replace(argument, dynamic=False) for argument in arguments]


def written_memories(joint: Joint) -> list[SharedMemory]:
    """Storages that the program wrote to and that several inputs look at, where they may overlap (B-1)."""
    written = {facts.recorded.slot for facts in joint.inputs if facts.data_changed}
    if not written:
        return []
    rebased = {facts.recorded.slot for facts in joint.inputs if facts.data_changed and facts.write_seen_by_autograd}
    groups = [g for g in groups_by_storage(joint.recording.real_tensors) if not written.isdisjoint(g)]
    groups = [g for g in groups if overlaps_somewhere(g.values()) or related_to(g, rebased)]
    for group in groups:
        if any(isinstance(tensor, FakeTensor) for tensor in group.values()):
            names = ", ".join(map(str, group))
            raise UnsupportedError(f"{names} share memory that is written, and are fake: this cannot be compiled yet.")
    return [share(index, group) for index, group in enumerate(groups)]


def _name(path: str) -> str:
    """The place of a leaf in (args, kwargs), as the user would write it."""
    return f"args{path.removeprefix('[0]')}" if path.startswith("[0]") else f"kwargs{path.removeprefix('[1]')}"


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


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the program; a graph is interpreted, so that its nodes tell which line of the user they come from."""
    if isinstance(function, fx.GraphModule) and not kwargs:
        with fx_traceback.preserve_node_meta():
            return fx.Interpreter(function).run(*args)
    return function(*args, **kwargs)
