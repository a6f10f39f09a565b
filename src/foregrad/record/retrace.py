"""What only a recording can show: it is given up, and the program is recorded again with what it has shown."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..slots import Primal


@dataclass(frozen=True, slots=True)
class WholeMemory:
    """What lies beside an input in memory matters: the whole storage must be an input."""

    slot: Primal


@dataclass(frozen=True, slots=True, eq=False)
class GradientBefore:
    """The program looks at, or adds to, gradients from before the call: they must be inputs."""

    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LateInputs:
    """The backward finds tensors by itself that the forward did not: they must be inputs from the start."""

    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class ArgumentsElsewhere:
    """The program finds arguments by itself, and may compare them: it must be given them as they are."""


@dataclass(frozen=True, slots=True)
class DynamoLoaded:
    """The program has loaded Dynamo, which may have traced a part of it: it must be told to stay aside."""


@dataclass(frozen=True, slots=True)
class SizesAreRead:
    """The program reads sizes or whole numbers: they are to be symbols."""


@dataclass(frozen=True, slots=True)
class SizesAreExact:
    """The program, or torch, cannot do with symbols for what is read: other numbers are for other programs."""


@dataclass(frozen=True, slots=True)
class NumbersAreExact:
    """The program does with host numbers what no call could do again: other numbers are for other programs."""


@dataclass(frozen=True, slots=True)
class SchedulesAreRead:
    """The program looks into a scheduler, or at rates that it has changed: what its code does is recorded."""


Reason = (
    WholeMemory
    | GradientBefore
    | LateInputs
    | ArgumentsElsewhere
    | DynamoLoaded
    | SizesAreRead
    | SizesAreExact
    | NumbersAreExact
    | SchedulesAreRead
)


class Retrace(Exception):
    """A recording is of no use, for a reason that the next one takes into account."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason
