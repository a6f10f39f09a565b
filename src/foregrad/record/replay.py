"""What the recorded operators give for the real tensors of the call: they are run when the program reads data.

Nothing of the caller's is written or moved. Inputs enter without their history and with version counters of their own;
memory of the caller's is copied before an operator writes to it, and never otherwise; draws come from states of their
own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Generator, SymInt, Tensor

from .._torch import FakeTensor, autocast_off, disable_modes, effect_of, hint_of, identity_of, without_function_modes
from ..abstract.engine import Engine
from ..abstract.kernel_checks import storage_of
from ..errors import DataDependentError
from ..graph.graph import Step
from ..graph.reads import START, Reseed
from ..host_numbers import host_number
from ..ops import COLLECTIVES, Kind, draws, op_info, tensors_in, written_arguments
from ..stack_traces import where
from .fakify import RecordedInput
from .rng import Generators

# The inputs so far, and their real tensors.
Inputs = Callable[[], Iterable[tuple[RecordedInput, Tensor]]]


class Unknown(Exception):
    """A tensor that follows from no input of the call: from the gradient of a result, for one."""


class Replay:
    """The values of recorded tensors, as far as anybody asked."""

    def __init__(
        self,
        steps: Sequence[Step],
        engine: Engine,
        inputs: Inputs,
        generators: Generators,
        generator_of: Callable[[Step], Generator],
    ) -> None:
        """Nothing has run yet.

        Args:
            steps: All operators so far, as they come.
            engine: That the recording is made on.
            inputs: Gives those that the recording has so far.
            generators: From which the program draws.
            generator_of: Gives the one that a step draws from.
        """
        self._steps, self._engine, self._inputs = steps, engine, inputs
        self._generators, self._generator_of = generators, generator_of
        self._dtype = torch.get_default_dtype()
        self._done = 0  # so many steps
        self.is_over = False  # the real tensors are gone
        self.writes = 0  # among them
        self._values: dict[int, Tensor] = {}  # by id of what stands for them, which the recording holds
        self._callers: set[int] = set()  # storages that must not be written
        self._states: dict[int, Tensor] = {}  # of generators, by their numbers
        self._states_before: dict[int, Tensor] = {}  # of draws, by their positions
        self._states_left: list[Tensor] = []  # before each reseeding
        self._copies: list[Any] = []  # of storages

    def release(self) -> None:
        """Let go of all tensors."""
        self._inputs, self.is_over = (lambda: ()), True
        for held in (self._values, self._callers, self._states, self._states_before, self._states_left, self._copies):
            held.clear()

    @contextlib.contextmanager
    def real_tensors(self) -> Iterator[None]:
        """Operators run as they do in a compiled graph."""
        inside = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with disable_modes(), without_function_modes(), torch.no_grad(), autocast_off():
                yield
        finally:
            torch.set_default_dtype(inside)

    def catch_up(self) -> None:
        """Run the operators that have been recorded since."""
        self._adopt_inputs()
        while self._done < len(self._steps):
            step = self._steps[self._done]
            try:
                self._run(self._done, step)
            except Unknown:
                self._forget_written(step)
            self._done += 1

    def value(self, given: Any) -> Any:
        """The real tensors for recorded ones, nested in lists; raises `Unknown` where there are none."""
        if isinstance(given, Tensor):
            return self._tensor(given)
        if isinstance(given, (list, tuple)):
            return type(given)(map(self.value, given)) if type(given) in (list, tuple) else [*map(self.value, given)]
        number = host_number(given)
        if number is not None:
            return number.value
        return hint_of(given) if isinstance(given, SymInt) else given

    def origin(self, given: Any) -> Any:
        """How tensors of a backward follow from those of the forward: the same in each backward of a recording."""
        backward = [step for step in self._steps if step.backward]
        makers = {id(out): (step, i) for step in backward for i, out in _numbered(step.out)}
        written = [written_arguments(step.op, step.args, step.kwargs) for step in backward if op_info(step.op).written]
        changed = {storage_of(tensor) for tensor in tensors_in(written)}

        def found(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return tuple(map(found, value))
            if not isinstance(value, Tensor):
                return repr(value)
            if changed and storage_of(value) in changed:
                return object()  # nothing else is equal to it
            step, i = makers.get(id(value), (None, 0))
            if step is None:
                return id(value)  # the steps of the forward hold it
            return str(step.op), i, found(step.args), found(list(step.kwargs.items()))

        return found(given)

    def bind(self, recorded: Any, real: Any) -> None:
        """From now on `recorded`, a tensor or several, has this value."""
        if isinstance(recorded, Tensor):
            if real is not None:  # a gradient that a kernel was not asked for
                self._values[id(recorded)] = real
        elif isinstance(recorded, (list, tuple)):
            for one, other in zip(recorded, real, strict=True):
                self.bind(one, other)

    def _tensor(self, tensor: Tensor) -> Tensor:
        known = self._values.get(id(tensor))
        if known is not None:
            return known
        constant = self._engine.value_of(tensor) if self._engine.is_abstract(tensor) else tensor
        if constant is None:
            raise Unknown
        self._note_callers(constant)
        self._values[id(tensor)] = constant.data
        return self._values[id(tensor)]

    def _note_callers(self, real: Tensor) -> None:
        if real.layout is torch.strided:
            self._callers.add(real.untyped_storage()._cdata)

    def _adopt_inputs(self) -> None:
        for recorded, real in self._inputs():
            if id(recorded.seen) in self._values or recorded.layout is not None:
                continue
            if isinstance(real, FakeTensor):
                raise Unknown
            self._note_callers(real)
            self._values[id(recorded.seen)] = real.data
            if recorded.leaf is not None:
                self._values[id(recorded.leaf)] = self._values[id(recorded.seen)]

    def _run(self, position: int, step: Step) -> None:
        if isinstance(step.read, Reseed):
            self._reseed(step.read)
        if step.read is not None:
            return  # what it gave is known
        args, kwargs = self.value(step.args), {name: self.value(item) for name, item in step.kwargs.items()}
        _refuse_effects(step)
        info = op_info(step.op)
        if info.written or info.kind is Kind.RESHAPE:
            self.writes += 1
            written = written_arguments(step.op, args, kwargs) if info.written else args[:1]
            for tensor in tensors_in(written):
                self._copy_memory(tensor)
        run = self._draw if draws(step.op, step.args, step.kwargs) else _call
        self.bind(step.out, run(position, step, args, kwargs))

    def _forget_written(self, step: Step) -> None:
        """What a step has written is not known, nor is anything that looks at the same memory."""
        for tensor in tensors_in(written_arguments(step.op, step.args, step.kwargs)):
            self.writes += 1
            known = self._values.get(id(tensor))
            if known is not None:
                memory = known.untyped_storage()._cdata
                aliases = [key for key, value in self._values.items() if value.untyped_storage()._cdata == memory]
                for key in aliases:
                    del self._values[key]

    def _copy_memory(self, tensor: Tensor) -> None:
        """Let everything that looks at memory of the caller's look at a copy."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._callers:
            return
        copy = storage.clone()
        self._copies.append(copy)
        for other in {id(value): value for value in self._values.values()}.values():
            if other.layout is torch.strided and other.untyped_storage()._cdata == storage._cdata:
                other.set_(copy, other.storage_offset(), other.shape, other.stride())

    def _reseed(self, reseed: Reseed) -> None:
        """Put a generator where the program has put it."""
        known, first = identity_of(reseed.generator), self._generators.first_state(reseed.generator)
        self._states_left.append(self._states.get(known, first))
        if isinstance(reseed.to, Tensor):
            self._states[known] = reseed.to
        else:
            self._states[known] = first if reseed.to == START else self._states_left[reseed.to]

    def _draw(self, position: int, step: Step, args: Any, kwargs: dict[str, Any]) -> Any:
        generator = self._generator_of(step)
        recordings = generator.get_state()
        mine = self._states.get(identity_of(generator))
        if mine is None:
            mine = self._generators.first_state(generator)
        again = None if step.repeats is None else self._states_before.get(step.repeats)
        before = mine if again is None else again
        self._states_before[position] = before
        try:
            generator.set_state(before)
            out = step.op(*args, **kwargs)
            self._states[identity_of(generator)] = generator.get_state() if again is None else mine
        finally:
            generator.set_state(recordings)
        return out


def _numbered(out: Any) -> Iterable[tuple[int, Any]]:
    return enumerate(out if isinstance(out, (list, tuple)) else [out])


def _call(position: int, step: Step, args: Any, kwargs: dict[str, Any]) -> Any:
    return step.op(*args, **kwargs)


def _refuse_effects(step: Step) -> None:
    info = op_info(step.op)
    if info.kind is Kind.HIGHER_ORDER or "objects" in info.traits or effect_of(step.op) is not None:
        what = "an operator with side effects"
    elif step.op.namespace in COLLECTIVES:
        what = "a collective"
    else:
        return
    raise DataDependentError(
        f"{step.op}, at {where(step.stack)}, is {what}, and the program reads data after it: a call that finds other "
        "data would run it twice. Read first, or compile with fallback='eager'."
    )
