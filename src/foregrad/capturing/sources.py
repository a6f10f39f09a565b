"""Where a tensor that a program finds by itself is read again: a closure, a global, an item, an attribute."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from torch import Tensor


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


class TensorSources:
    """All places in which tensors were found; a parameter or buffer belongs to its module, wherever else it is held."""

    def __init__(self) -> None:
        self._in_modules: dict[int, list[Source]] = {}  # by the id of the tensor
        self._elsewhere: dict[int, list[Source]] = {}
        self._tables: list[tuple[str, dict[str, Any], list[tuple[str, int]]]] = []  # of modules, not looked at yet

    def add(self, tensor: Tensor, source: Source) -> None:
        """A tensor was found outside of modules."""
        self._elsewhere.setdefault(id(tensor), []).append(source)

    def add_table(self, path: str, table: dict[str, Any]) -> None:
        """The parameters or buffers of a module, as they are: the program may exchange them."""
        self._tables.append((path, table, [(key, id(tensor)) for key, tensor in table.items()]))

    def of(self, tensor: Tensor) -> list[Source]:
        """Where a tensor was found."""
        return self._of(id(tensor))

    def _of(self, identity: int) -> list[Source]:
        for path, table, before in self._tables:
            for key, found in before:
                source = Source(table, "item", key, f"{path}.{key}" if path else key)
                self._in_modules.setdefault(found, []).append(source)
        self._tables.clear()
        return [*self._in_modules.get(identity, ()), *self._elsewhere.get(identity, ())]

    def of_argument(self, tensor: Tensor) -> list[Source]:
        """Places that must hold the tensor that an argument is; those outside of arguments hold the same one."""
        found = [source for source in self.of(tensor) if source.how != "held"]
        inside = [source for source in found if source.how == "argument"]
        return inside + [source for source in found if source.how != "argument"][:1]

    def outside_arguments(self) -> FoundTensors:
        """All tensors that were found outside of arguments."""
        self._of(0)
        sources = [source for found in self._elsewhere.values() for source in found if source.how != "argument"]
        held = [id(source.held) for source in sources if source.how == "held"]
        readers = [source.reader() for source in sources if source.how != "held"]
        return FoundTensors(frozenset((*self._in_modules, *held)), readers)

    def in_several_places(self) -> Iterator[tuple[Source, Source]]:
        """Of a tensor that is found in several places one is read: the others must hold it too."""
        self._of(0)
        for identity in [*self._in_modules, *self._elsewhere.keys() - self._in_modules.keys()]:
            found = [source for source in self._of(identity) if source.how not in ("held", "argument")]
            for other in found[1:]:
                yield found[0], other

    def clear(self) -> None:
        """Let go of all."""
        for held in (self._in_modules, self._elsewhere, self._tables):
            held.clear()
