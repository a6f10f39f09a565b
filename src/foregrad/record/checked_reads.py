"""Reads that each call compares: their values are worked out on the call's real tensors while it is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload
from ..abstract.engine import Engine
from ..errors import DataDependentError
from ..graph.reads import Read, sizes_of
from ..ops import aten
from ..stack_traces import Stack, where
from .refusals import WAY_OUT
from .replay import Replay, Unknown

_MOST_ELEMENTS = 4096  # of a list

SIZED_BY_DATA = frozenset(
    {
        *(aten.nonzero.default, aten.masked_select.default, aten.index.Tensor, aten.repeat_interleave.Tensor),
        *(aten._unique.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
        *(aten.unique_dim_consecutive.default, aten.bincount.default),
    }
)
"""Operators whose results have sizes that depend on data: a call runs them between two parts."""

WRITES_BY_MASK = frozenset(
    {
        *(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default),
        *(aten.masked_scatter.default, aten.masked_scatter_.default),
    }
)
"""Operators that write where a mask, or one of several indices, says, and whose gradient is selected by it."""

MASKS = (torch.bool, torch.uint8)


class CheckedReads:
    """What a program has read so far."""

    def __init__(self, replay: Replay, engine: Engine, most: int) -> None:
        self._replay, self._engine, self._most = replay, engine, most
        self.reads: list[Read] = []
        self._known: dict[Any, Any] = {}  # values that were read, by what was read of which tensors
        self._writes = 0  # when they were

    def release(self) -> None:
        """Let go of all tensors."""
        self._replay.release()
        self._known.clear()

    def number(
        self, what: str, look: Callable[..., Any], tensors: Sequence[Tensor], stack: Stack
    ) -> tuple[Any, Read | None]:
        """The value that `look` gives for recorded tensors, and the read; None if it was read before."""
        if what == "tolist()" and tensors[0].numel() > _MOST_ELEMENTS:
            raise DataDependentError(
                f"tolist() of {tensors[0].numel()} elements, at {where(stack)}: this is too many to compare. {WAY_OUT}"
            )
        with self._caught_up(what, stack):
            key = what, *map(id, tensors)  # the recording holds them
            if self._replay.writes == self._writes and key in self._known:
                return self._known[key], None
            value = look(*map(self._replay.value, tensors))
        if self._replay.writes != self._writes:
            self._known.clear()
        self._writes = self._replay.writes
        self._known[key] = value
        return value, self._add(what, look, value, stack)

    def results(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], stack: Stack) -> tuple[Any, Read]:
        """Abstract results of an operator, of the sizes that they have in this call, and the read."""
        with self._caught_up(str(op), stack):
            named = {name: self._replay.value(item) for name, item in kwargs.items()}
            real = op(*self._replay.value(args), **named)
        out = self._like(real)
        self._replay.bind(out, real)
        return out, self._add(str(op), op, sizes_of(real), stack, sized=True)

    def _like(self, real: Any) -> Any:
        if isinstance(real, Tensor):
            return self._engine.strided(real, real.stride(), real.device)
        return tuple(map(self._like, real))

    @contextlib.contextmanager
    def _caught_up(self, what: str, stack: Stack) -> Iterator[None]:
        try:
            with self._replay.real_tensors():
                self._replay.catch_up()
                yield
        except Unknown:
            raise DataDependentError(
                f"{what} of a recorded tensor that follows from no input of the call, at {where(stack)}. {WAY_OUT}"
            ) from None

    def _add(self, what: str, look: Callable[..., Any], value: Any, stack: Stack, sized: bool = False) -> Read:
        if len(self.reads) >= self._most:
            raise DataDependentError(
                f"the program reads data more than {self._most} times, at last at {where(stack)}: a loop there may not "
                "end. Raise foregrad.config.max_reads, or compile with fallback='eager'."
            )
        self.reads.append(Read(len(self.reads), what, look, value, where(stack), sized))
        return self.reads[-1]
