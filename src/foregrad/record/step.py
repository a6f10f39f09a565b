"""One recorded operator call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._torch import OpOverload
from .lines import Stack
from .origin import Origin


class Step:
    """One recorded operator call."""

    __slots__ = (
        "args",
        "backward",
        "becomes_grad",
        "computed",
        "follows",
        "grad_enabled",
        "kwargs",
        "op",
        "origin",
        "out",
        "repeats",
        "stack",
    )

    def __init__(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        grad_enabled: bool,
        backward: bool,
        stack: Stack,
        repeats: int | None,
        follows: int | None = None,
    ) -> None:
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.out = out
        self.grad_enabled = grad_enabled
        self.backward = backward
        self.stack = stack
        self.computed: Sequence[Any] | None = None  # what a decomposition of its twin gave, if it writes
        self.origin: Origin | None = None
        self.repeats = repeats  # the earlier step whose random draw this one replays
        self.becomes_grad = False  # autograd's copy for a `.grad`, of what the recording holds too
        self.follows = follows  # then, the step behind whose draw it draws, in the same recomputation
