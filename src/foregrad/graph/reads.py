"""Reads: places where a program looks at its data, which a call looks at again and compares.

A read runs between two parts of a forward and never inside of one, so that nothing that follows it runs before it is
compared: what follows may be wrong for other data, an index out of range for one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload
from ..values import shown

library = torch.library.Library("foregrad", "FRAGMENT")

# In a graph, a read whose value is a constant of the program is an operator without a result, which computes nothing.
library.define("read(Tensor[] tensors) -> ()")
library.impl("read", lambda tensors: None, "CompositeExplicitAutograd")
READ: OpOverload = torch.ops.foregrad.read.default
torch.fx.node.has_side_effect(READ)


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """What a program has read of some tensors, and how: a call that reads anything else is not for this program."""

    number: int  # of the read, in the order of the program
    what: str  # `bool()`, `item()`
    look: Callable[..., Any]  # gives the value, of the tensors; or an operator whose result has a size that is data
    value: Any  # or the sizes of the results
    place: str  # in the user's code
    is_number: bool = False  # what is decided by it is compared, and not the value itself
    sized: bool = False  # only the sizes of the results are compared
    symbols: tuple[tuple[str, str], ...] = ()  # or they are symbols: how each is found in the results

    def __str__(self) -> str:
        return f"read {self.number}: {DataRead.of(self)}"


@dataclass(frozen=True, slots=True)
class DataRead:
    """A place where a program reads data, as its user sees it."""

    operator: str  # `bool()`, `item()`, `aten.nonzero.default`
    place: str  # in the user's code
    value: Any  # what it was while the program was recorded; for sizes, those of the results
    symbol: str | None  # that stands for the size or the number: any is for the program that meets the condition
    condition: str | None  # on this symbol and those before it

    @classmethod
    def of(cls, read: Read, condition: str | None = None) -> DataRead:
        """What a user sees of a read."""
        return cls(read.what, read.place, read.value, ", ".join(name for name, _ in read.symbols) or None, condition)

    def __str__(self) -> str:
        if self.symbol is not None:
            where = "" if self.condition is None else f" where {self.condition}"
            verb = "has the size" if isinstance(self.value, tuple) else "is"
            return f"{self.operator} {verb} {self.symbol}{where}, at {self.place}"
        verb = "has the size" if isinstance(self.value, tuple) else "is"
        return f"{self.operator} {verb} {shown(self.value)}, at {self.place}"


START = -1


@dataclass(frozen=True, slots=True, eq=False)
class Reseed:
    """The program puts a generator somewhere else: between two parts, as a read, so that draws stay in their order."""

    number: int  # of the reseeding, in the order of the program
    generator: torch.Generator
    to: Tensor | int  # a state; or where the generator was before an earlier reseeding, or at the start of the call
    place: str  # in the user's code
    symbols: tuple[tuple[str, str], ...] = ()  # none

    def __str__(self) -> str:
        if isinstance(self.to, Tensor):
            return f"the program seeds a generator, at {self.place}"
        return f"the program puts a generator back, at {self.place}"


def item(tensor: Tensor) -> Any:
    """The number in a tensor, which nothing is decided by: it may be read anywhere in a graph."""
    return tensor.item()


def sizes_of(results: Any) -> Any:
    """The size of a tensor, or of each of several.

    >>> sizes_of(torch.ones(2, 3)), sizes_of((torch.ones(2), torch.ones(())))
    ((2, 3), ((2,), ()))
    """
    return tuple(results.shape) if isinstance(results, Tensor) else tuple(map(sizes_of, results))
