"""Where a tensor that a program finds by itself is read again: a closure, a global, an item, an attribute."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ..values import Change


class Source(NamedTuple):
    """A place that can be read again: a cell, an item of a container, an attribute, or the object itself.

    "argument" is a tensor in an argument that is an object: the owner is the number of the leaf, the key that of the
    tensor in it. The owner of an attribute is not kept alive.
    """

    held: Any  # the owner, or what leads to it
    how: Literal["cell", "item", "attribute", "held", "argument"]
    key: Any
    path: str  # in the user's words

    @property
    def owner(self) -> Any:
        """What the place belongs to."""
        return self.held() if self.how == "attribute" else self.held

    def expression(self, owner: str, key: str) -> str:
        """Python text that reads the place, in a generated call."""
        match self.how:
            case "cell":
                return f"{owner}.cell_contents"
            case "item" | "argument":
                return f"{owner}[{key}]"
            case "attribute":
                return f"{owner}.{self.key}"
            case "held":
                return owner

    def reader(self) -> Callable[[], Any]:
        """Reads the place, at every call: as fast as can be."""
        match self.how:
            case "item":
                return functools.partial(operator.getitem, self.held, self.key)
            case "cell":
                return functools.partial(getattr, self.held, "cell_contents")
        return self.read

    def read(self) -> Any:
        """What is there now."""
        match self.how:
            case "cell":
                return self.owner.cell_contents
            case "item" | "argument":
                return self.owner[self.key]
            case "attribute":
                return getattr(self.owner, self.key)
            case "held":
                return self.owner


class FoundTensors(NamedTuple):
    """Tensors that a program finds by itself, to be told from arguments."""

    known: frozenset[int]  # ids of those that modules hold, and of those whose place cannot be read
    readers: list[Callable[[], Any]]

    def __bool__(self) -> bool:
        return bool(self.known or self.readers)

    def holds(self, tensor: Tensor) -> bool:
        """Whether one of them is this one."""
        return id(tensor) in self.known or any(read() is tensor for read in self.readers)

    def explain(self, tensor: Tensor) -> Change:
        """An argument is one of them, and was none; or the other way round."""
        words = ("a tensor that the program does not find by itself", "one that it does")
        was, now = words if self.holds(tensor) else reversed(words)
        return Change("", was, now)
