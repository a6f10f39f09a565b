"""Values that a program reads: those that no input determines, and those that whole numbers and masks determine.

Tensors have no data while a program is recorded. What no input determines (positions, masks of ones) has the same value
at each call that passes the guards; it is worked out by running on real tensors the few operators that led there. What
follows by few operators from inputs that are whole numbers or bools (the padding mask of a batch) is worked out on the
call's own inputs, and becomes a guard: each call works it out again, before anything else runs, and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload, autocast_off, disable_modes, without_function_modes
from ..abstract.engine import Engine
from ..graph.graph import Step
from ..ops import Kind, aten, op_info, tensors_in, written_arguments
from ..slots import Primal

_MOST_ELEMENTS = 1 << 20
_MOST_STEPS = 200

# Operators that take a tensor for its shape, dtype and device only, and the position of the number that they fill with.
_LIKE: dict[OpOverload, int | float] = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
}
_LIKE_BY_ARGUMENT: dict[OpOverload, int] = {aten.full_like.default: 1, aten.new_full.default: 2}


@dataclass(frozen=True, slots=True)
class Read:
    """A value that inputs determine, and that the program has read."""

    inputs: tuple[Primal, ...]
    value: Tensor
    place: str  # in the user's code
    _steps: tuple[_Replayed, ...]
    _result: int  # which value of a replay it is

    def holds(self, *inputs: Tensor) -> bool:
        """Whether the operators give the same for the inputs of another call."""
        try:
            found = self.work_out(inputs)
        except Exception:  # it is the program's own, and comes again where it is recorded
            return False
        return found.shape == self.value.shape and torch.equal(found, self.value)

    def work_out(self, inputs: Sequence[Tensor]) -> Tensor:
        """Run the operators."""
        values: list[Any] = list(inputs)
        with torch.no_grad(), autocast_off():
            for step in self._steps:
                values.extend(step.run(values))
        found: Tensor = values[self._result]
        return found


@dataclass(frozen=True, slots=True)
class _At:
    """Stands for a tensor among the arguments of an operator that is run again: a value by its number."""

    index: int


@dataclass(frozen=True, slots=True)
class _Replayed:
    """An operator that is run again."""

    call: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]

    def run(self, values: Sequence[Any]) -> Sequence[Any]:
        """Its results."""

        def found(value: Any) -> Any:
            if isinstance(value, _At):
                return values[value.index]
            return type(value)(map(found, value)) if isinstance(value, (list, tuple)) else value

        return _listed(self.call(*found(self.args), **{name: found(value) for name, value in self.kwargs.items()}))


class Reads:
    """The values that a program reads while it is recorded."""

    def __init__(self, steps: Sequence[Step], engine: Engine) -> None:
        """Nothing is known about inputs yet.

        Args:
            steps: All operators so far, as they come.
            engine: That the recording is made on.
        """
        self._steps, self._engine = steps, engine
        self._inputs: Callable[[], Mapping[int, tuple[Primal, Tensor]]] | None = None
        self.count = 0  # of the values that were given
        self.checked: list[Read] = []  # by each call
        self._known: set[int] = set()  # ids of the tensors that were read

    @property
    def can_be_checked(self) -> bool:
        """Whether calls can check what is read of inputs."""
        return self._inputs is not None

    def check(self, inputs: Callable[[], Mapping[int, tuple[Primal, Tensor]]]) -> None:
        """Calls can check what is read of these inputs: real tensors, by the ids of what stands for them."""
        self._inputs = inputs

    def constant(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor at each call, if no input determines it and nothing has written to its memory."""
        if self._engine.value_of(tensor) is not None:
            return self._engine.value_of(tensor)
        with disable_modes(), without_function_modes(), torch.no_grad(), autocast_off():
            behind = _Behind(self._steps, self._engine, {})
            return behind.worked_out(tensor) if behind.determines(tensor) else None

    def value(self, tensor: Tensor, place: Callable[[], str]) -> Tensor | None:
        """The value of a tensor, if it is the same at each call, or if each call can check whether it is."""
        found = self.constant(tensor)
        if found is not None or self._inputs is None:
            self.count += found is not None
            return found
        with disable_modes(), without_function_modes(), torch.no_grad(), autocast_off():
            behind = _Behind(self._steps, self._engine, self._inputs())
            if not behind.determines(tensor):
                return None
            found = behind.worked_out(tensor).clone()  # it may be an input of the caller's
        self.count += 1
        if id(tensor) not in self._known:  # the steps hold it
            self._known.add(id(tensor))
            result = behind.places[id(tensor)]
            self.checked.append(Read(tuple(behind.found), found, place(), behind.replayed(), result))
        return found


class _Behind:
    """The operators behind a tensor."""

    def __init__(self, steps: Sequence[Step], engine: Engine, inputs: Mapping[int, tuple[Primal, Tensor]]) -> None:
        self._steps, self._engine, self._inputs = steps, engine, inputs
        self._maker = {id(out): step for step in steps for out in _results(step)}
        self._order: dict[int, Step] = {}  # by id, each after those that it needs
        self._tensors: list[Tensor] = []
        self.found: dict[Primal, Tensor] = {}  # inputs that it depends on
        self.places: dict[int, int] = {}  # of tensors, by id, among the values of a replay

    def determines(self, tensor: Tensor) -> bool:
        """Whether numbers, and inputs that are whole numbers or bools, determine it; nothing has written to them."""
        return self._leads_there(tensor) and not self._was_written

    def _leads_there(self, tensor: Tensor) -> bool:
        self._tensors.append(tensor)
        if self._engine.value_of(tensor) is not None:
            return True
        if not _is_small(tensor):
            return False
        known = self._inputs.get(id(tensor))
        if known is not None:
            self.found[known[0]] = known[1]
            return not tensor.is_floating_point() and not tensor.is_complex() and type(known[1]) is Tensor
        step = self._maker.get(id(tensor))
        if step is None:
            return False
        if id(step) not in self._order:
            if len(self._order) >= _MOST_STEPS or not _can_be_repeated(step):
                return False
            if not all(map(self._leads_there, self._needed(step))):
                return False
            self._order[id(step)] = step
        return True

    def _needed(self, step: Step) -> list[Tensor]:
        """The tensors whose values decide about its result; a literal (`torch.tensor([0, 1])`) is always the same."""
        if step.op in _LIKE or step.op in _LIKE_BY_ARGUMENT or self._is_literal(step):
            return []
        return list(tensors_in([step.args, list(step.kwargs.values())]))

    def _is_literal(self, step: Step) -> bool:
        return step.op is aten.lift_fresh.default and not self._engine.is_abstract(step.args[0])

    @property
    def _was_written(self) -> bool:
        """Whether an operator has written to memory of any of these tensors."""
        memory = set(map(_memory_of, self._tensors))
        return any(
            _memory_of(written) in memory
            for step in self._steps
            if op_info(step.op).written
            for written in tensors_in(written_arguments(step.op, step.args, step.kwargs))
        )

    def worked_out(self, tensor: Tensor) -> Tensor:
        """Run the operators."""
        slots = list(self.found)
        self.places = {key: slots.index(slot) for key, (slot, _) in self._inputs.items() if slot in self.found}
        values: list[Any] = list(self.found.values())
        for step in self._order.values():
            made = self._replay(step).run(values)
            self.places.update((id(out), len(values) + i) for i, out in enumerate(_results(step)))
            values.extend(made)
        constant = self._engine.value_of(tensor)
        found: Tensor = values[self.places[id(tensor)]] if constant is None else constant
        return found

    def replayed(self) -> tuple[_Replayed, ...]:
        """The operators, to be run again on other inputs."""
        return tuple(map(self._replay, self._order.values()))

    def _replay(self, step: Step) -> _Replayed:
        if step.op in _LIKE or step.op in _LIKE_BY_ARGUMENT:
            fill = _LIKE[step.op] if step.op in _LIKE else step.args[_LIKE_BY_ARGUMENT[step.op]]
            like = {"dtype": step.out.dtype, "device": step.out.device}
            return _Replayed(torch.full, (tuple(step.out.shape), fill), like)
        if self._is_literal(step):
            return _Replayed(torch.clone, step.args, {})
        return _Replayed(step.op, self._placed(step.args), {name: self._placed(v) for name, v in step.kwargs.items()})

    def _placed(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            constant = self._engine.value_of(value)
            return _At(self.places[id(value)]) if constant is None else constant
        return type(value)(map(self._placed, value)) if isinstance(value, (list, tuple)) else value


def _is_small(tensor: Tensor) -> bool:
    """Whether a tensor is dense, of a size that is known."""
    size = tensor.numel()
    return type(size) is int and size <= _MOST_ELEMENTS and tensor.layout is torch.strided


def _memory_of(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _listed(out: Any) -> Sequence[Any]:
    return out if isinstance(out, (list, tuple)) else [out]


def _results(step: Step) -> Sequence[Any]:
    return _listed(step.out)


def _can_be_repeated(step: Step) -> bool:
    """Whether an operator gives the same at each call, from arguments that are the same."""
    info = op_info(step.op)
    if info.kind not in (Kind.PURE, Kind.VIEW) or info.traits & {"random", "objects"}:
        return False
    if step.op.namespace != "aten" or "empty" in step.op._schema.name:  # memory as it is found
        return False
    numbers = [*step.args, *step.kwargs.values()]
    inside = [item for value in numbers for item in (value if isinstance(value, (list, tuple)) else [value])]
    return not any(isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) for number in inside)
