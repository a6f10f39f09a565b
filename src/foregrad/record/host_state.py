"""Numbers in the memory of the host that follow from nothing but each other: counters of steps, scales, schedules.

An optimizer keeps such state in tensors without dimensions on the CPU, and asks for them by `item()`. What they hold is
worked out beside the recording, on copies; each call works it out again before its graphs run, and nothing is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymFloat, Tensor

from .._torch import FakeTensor, autocast_off, disable_modes, without_function_modes
from ..abstract.engine import Engine
from ..graph.graph import Step
from ..host_numbers import HostNumber, host_number
from ..ops import Kind, aten, op_info, tensors_in, written_arguments
from .fakify import RecordedInput

_RUNS = (Kind.PURE, Kind.VIEW, Kind.WRITE)


class HostState:
    """The values of tensors on the host, as far as they follow from each other and from numbers."""

    def __init__(
        self,
        steps: Sequence[Step],
        engine: Engine,
        inputs: Sequence[RecordedInput],
        real_tensor: Callable[[RecordedInput], Tensor | None],
    ) -> None:
        """Nothing was looked at yet.

        Args:
            steps: All operators so far, as they come.
            engine: That the recording is made on.
            inputs: All inputs so far, as they come.
            real_tensor: Gives the tensor of the call that an input stands for.
        """
        self._steps, self._engine, self._inputs, self._real_tensor = steps, engine, inputs, real_tensor
        self._done = self._adopted = 0
        self._values: dict[int, Tensor] = {}  # by id of what stands for them, which the recording holds
        self._varying: set[int] = set()  # storages whose contents follow from an input
        self._items: dict[int, HostNumber] = {}  # that were given, by id of the tensor

    def release(self) -> None:
        """Let go of all tensors."""
        self._values.clear()
        self._items.clear()

    def value(self, tensor: Tensor) -> float | None:
        """The number that a tensor holds, if it is known."""
        if tensor.dim() or not tensor.is_floating_point():
            return None
        with disable_modes(), without_function_modes(), torch.no_grad(), autocast_off():
            self._adopt_inputs()
            while self._done < len(self._steps):
                self._take(self._steps[self._done])
                self._done += 1
            found = self._values.get(id(tensor))
            return None if found is None else float(found.item())

    def varies(self, tensor: Tensor) -> bool:
        """Whether a tensor whose value is known follows from an input."""
        return _memory_of(self._values[id(tensor)]) in self._varying

    def item_given(self, tensor: Tensor) -> HostNumber | None:
        """The number that was given for a tensor, which nothing has written to since."""
        return self._items.get(id(tensor))

    def note_item(self, tensor: Tensor, number: HostNumber) -> None:
        """It is given now."""
        self._items[id(tensor)] = number

    def _adopt_inputs(self) -> None:
        for recorded in self._inputs[self._adopted :]:
            real = self._real_tensor(recorded)
            plain = recorded.parent is None and recorded.layout is None and id(recorded.seen) not in self._values
            if plain and real is not None and _is_on_host(real):
                copy = self._values[id(recorded.seen)] = real.detach().clone()
                self._varying.add(_memory_of(copy))
        self._adopted = len(self._inputs)

    def _take(self, step: Step) -> None:
        given = list(tensors_in((*step.args, *step.kwargs.values())))
        if step.op is aten.lift_fresh.default and not self._engine.is_abstract(given[0]):
            if _is_on_host(given[0]):  # a literal
                self._values[id(step.out)] = given[0].clone()
        elif all(id(tensor) in self._values for tensor in given) and self._can_run(step, given):
            self._run(step, given)
        elif op_info(step.op).written:
            for tensor in tensors_in(written_arguments(step.op, step.args, step.kwargs)):
                if id(tensor) in self._values:
                    self._forget(_memory_of(self._values[id(tensor)]), self._values)

    def _can_run(self, step: Step, given: Sequence[Tensor]) -> bool:
        info = op_info(step.op)
        if info.kind not in _RUNS or info.traits & {"random", "objects"} or step.read is not None:
            return False
        if step.op.namespace != "aten" or "empty" in step.op._schema.name:  # memory as it is found
            return False
        made = [out for out in tensors_in([step.out]) if id(out) not in self._values]
        return bool(given or made) and all(out.dim() == 0 and self._is_of_host(out) for out in made)

    def _is_of_host(self, tensor: Tensor) -> bool:
        return self._engine.device_of(tensor).type == "cpu" and tensor.layout is torch.strided

    def _run(self, step: Step, given: Sequence[Tensor]) -> None:
        varies = any(self.varies(tensor) for tensor in given) or _has_numbers((step.args, step.kwargs.values()))
        args = self._real(step.args)
        kwargs = {name: self._real(value) for name, value in step.kwargs.items()}
        out = step.op(*args, **kwargs)
        written = list(tensors_in(written_arguments(step.op, args, kwargs))) if op_info(step.op).written else []
        for tensor in written:
            self._forget(_memory_of(tensor), self._items)
        made = list(tensors_in([out]))
        for recorded, real in zip(tensors_in([step.out]), made, strict=True):
            self._values[id(recorded)] = real
        if varies:
            self._varying.update(map(_memory_of, (*written, *made)))

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._values[id(value)]
        if isinstance(value, (list, tuple)):
            return [*map(self._real, value)]
        number = host_number(value)
        return value if number is None else number.value

    def _forget(self, memory: int, held: dict[int, Any]) -> None:
        """Drop what lies in memory that was written."""
        for key in [key for key, value in self._values.items() if _memory_of(value) == memory]:
            held.pop(key, None)


def _is_on_host(real: Tensor) -> bool:
    plain = type(real) in (Tensor, torch.nn.Parameter) and not isinstance(real, FakeTensor)
    if not plain or real.layout is not torch.strided or real.device.type != "cpu" or real.dim():
        return False
    return not real.is_complex() and not real.requires_grad


def _has_numbers(values: Any) -> bool:
    if isinstance(values, (list, tuple, type({}.values()))):
        return any(map(_has_numbers, values))
    return isinstance(values, SymFloat)


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
