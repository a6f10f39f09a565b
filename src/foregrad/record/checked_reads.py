"""Reads that each call compares: their values are worked out on the call's real tensors while it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..errors import DataDependentError
from ..graph.reads import Read
from ..stack_traces import Stack, where
from .refusals import WAY_OUT
from .replay import Replay, Unknown

_MOST_ELEMENTS = 4096  # of a list


class CheckedReads:
    """What a program has read so far."""

    def __init__(self, replay: Replay, most: int) -> None:
        self._replay, self._most = replay, most
        self.reads: list[Read] = []
        self._known: dict[Any, Any] = {}  # values that were read, by what was read of which tensors
        self._writes = 0  # when they were

    def release(self) -> None:
        """Let go of all tensors."""
        self._replay.release()
        self._known.clear()

    def read(
        self, what: str, look: Callable[..., Any], tensors: Sequence[Tensor], stack: Stack
    ) -> tuple[Any, Read | None]:
        """The value that `look` gives for recorded tensors, and the read; None if it was read before."""
        if sum(tensor.numel() for tensor in tensors) > _MOST_ELEMENTS and what == "tolist()":
            raise DataDependentError(
                f"tolist() of {tensors[0].numel()} elements, at {where(stack)}: this is too many to compare. {WAY_OUT}"
            )
        try:
            with self._replay.real_tensors():
                self._replay.catch_up()
                key = what, *map(id, tensors)  # the recording holds them
                if self._replay.writes == self._writes and key in self._known:
                    return self._known[key], None
                value = look(*map(self._replay.value, tensors))
        except Unknown:
            raise DataDependentError(
                f"{what} of a recorded tensor that follows from no input of the call, at {where(stack)}. {WAY_OUT}"
            ) from None
        if len(self.reads) >= self._most:
            raise DataDependentError(
                f"the program reads data more than {self._most} times, at last at {where(stack)}: a loop there may not end. "
                "Raise foregrad.config.max_reads, or compile with fallback='eager'."
            )
        if self._replay.writes != self._writes:
            self._known.clear()
        self._writes = self._replay.writes
        self._known[key] = value
        self.reads.append(Read(len(self.reads), what, look, value, where(stack)))
        return value, self.reads[-1]
