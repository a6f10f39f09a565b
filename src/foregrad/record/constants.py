"""Tensors that no input determines: positions, masks of ones, and what is computed from them.

They have no data while a program is recorded, like all others. But at each call that passes the guards they have the
same values as now, so that these can be worked out when the program reads them, by running on real tensors the few
operators that led there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload, autocast_off, disable_modes, without_function_modes
from ..abstract.engine import Engine
from ..graph.graph import Step
from ..ops import Kind, aten, op_info, tensors_in, written_arguments

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


def known_value(tensor: Tensor, steps: Sequence[Step], engine: Engine) -> Tensor | None:
    """The value of a tensor at each call, if no input determines it and nothing has written to its memory.

    Args:
        tensor: A tensor of the recording.
        steps: All operators so far.
        engine: That the recording is made on.
    """
    if engine.value_of(tensor) is not None:
        return engine.value_of(tensor)
    with disable_modes(), without_function_modes(), torch.no_grad(), autocast_off():
        behind = _Behind(steps, engine)
        if not behind.leads_to_numbers_alone(tensor) or behind.was_written:
            return None
        return behind.value(tensor)


class _Behind:
    """The operators behind a tensor."""

    def __init__(self, steps: Sequence[Step], engine: Engine) -> None:
        self._steps, self._engine = steps, engine
        self._maker = {id(out): step for step in steps for out in _results(step)}
        self._order: dict[int, Step] = {}  # by id, each after those that it needs
        self._tensors: list[Tensor] = []

    def leads_to_numbers_alone(self, tensor: Tensor) -> bool:
        """Whether everything behind it was made of numbers."""
        self._tensors.append(tensor)
        if self._engine.value_of(tensor) is not None:
            return True
        step = self._maker.get(id(tensor))
        if step is None or not _is_small(tensor):
            return False
        if id(step) not in self._order:
            if len(self._order) >= _MOST_STEPS or not _can_be_repeated(step):
                return False
            needed = (
                []
                if step.op in _LIKE or step.op in _LIKE_BY_ARGUMENT
                else tensors_in([step.args, list(step.kwargs.values())])
            )
            if not all(map(self.leads_to_numbers_alone, needed)):
                return False
            self._order[id(step)] = step
        return True

    @property
    def was_written(self) -> bool:
        """Whether an operator has written to memory of any of these tensors."""
        memory = set(map(_memory_of, self._tensors))
        return any(
            _memory_of(written) in memory
            for step in self._steps
            if op_info(step.op).written
            for written in tensors_in(written_arguments(step.op, step.args, step.kwargs))
        )

    def value(self, tensor: Tensor) -> Tensor:
        """Run the operators."""
        known: dict[int, Any] = {}
        made: Sequence[Any]

        def real(value: Any) -> Any:
            if isinstance(value, Tensor):
                constant = self._engine.value_of(value)
                return known[id(value)] if constant is None else constant
            return type(value)(map(real, value)) if isinstance(value, (list, tuple)) else value

        for step in self._order.values():
            if step.op in _LIKE or step.op in _LIKE_BY_ARGUMENT:
                fill = _LIKE[step.op] if step.op in _LIKE else step.args[_LIKE_BY_ARGUMENT[step.op]]
                made = [torch.full(step.out.shape, fill, dtype=step.out.dtype, device=step.out.device)]
            else:
                made = _listed(step.op(*real(step.args), **{name: real(v) for name, v in step.kwargs.items()}))
            known.update((id(out), value) for out, value in zip(_results(step), made, strict=True))
        found: Tensor = real(tensor)
        return found


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
