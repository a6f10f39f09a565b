"""Named places of a calling convention.

Graphs take and return flat lists. What stands at which position is said by a list of slots, so that code asks for
`Tangent(Output(0))` and never for `args[num_mutated + 2]`. Slots are plain frozen data: they can be compared,
hashed, printed and stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def _hash_of_path(slot: Any) -> int:
    """Slots are looked up thousands of times in a capture: the hash that a dataclass makes takes twice as long."""
    return hash(slot.path)


@dataclass(frozen=True, slots=True)
class Input:
    """A leaf of the user's arguments, by its place: `args[0]`, `kwargs['mask']`."""

    path: str
    __hash__ = _hash_of_path

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of the compiled module."""

    path: str
    __hash__ = _hash_of_path

    def __str__(self) -> str:
        return f"parameter {self.path}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of the compiled module."""

    path: str
    __hash__ = _hash_of_path

    def __str__(self) -> str:
        return f"buffer {self.path}"


@dataclass(frozen=True, slots=True)
class Hidden:
    """A tensor that the program found in a closure, a global or a module."""

    path: str
    __hash__ = _hash_of_path

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that several inputs look at, where the program writes to it."""

    index: int

    def __str__(self) -> str:
        return f"shared memory {self.index}"


@dataclass(frozen=True, slots=True)
class Root:
    """What some inputs of a shared memory are views of, beside other inputs that autograd does not relate to it."""

    memory: int
    index: int

    def __str__(self) -> str:
        return f"root {self.index} in shared memory {self.memory}"


@dataclass(frozen=True, slots=True)
class GradOf:
    """The gradient that an input holds before the call, where the program looks at it."""

    of: Input | Param | Buffer | Hidden

    def __str__(self) -> str:
        return f"{self.of}.grad"


@dataclass(frozen=True, slots=True)
class Inner:
    """A tensor inside of a wrapper subclass: `args[0].scale`."""

    of: Slot
    attr: str

    def __str__(self) -> str:
        return f"{self.of}.{self.attr}"


Primal = Input | Param | Buffer | Hidden | Memory | Root | GradOf | Inner


@dataclass(frozen=True, slots=True)
class RandomState:
    """The seed or the offset that a graph draws from, under `functionalize_rng_ops`: `fwd_seed`, `bwd_base_offset`."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Updated:
    """The new value of an input that the program wrote to."""

    of: Primal

    def __str__(self) -> str:
        return f"updated {self.of}"


@dataclass(frozen=True, slots=True)
class Grown:
    """The data of a written input in the size that the program gave it."""

    of: Primal

    def __str__(self) -> str:
        return f"grown {self.of}"


@dataclass(frozen=True, slots=True)
class Output:
    """A leaf of the user's result."""

    index: int

    def __str__(self) -> str:
        return f"output {self.index}"


@dataclass(frozen=True, slots=True)
class Base:
    """An intermediate that several outputs are views of; the caller never sees it."""

    index: int

    def __str__(self) -> str:
        return f"base {self.index}"


Returned = Updated | Grown | Output | Base


@dataclass(frozen=True, slots=True)
class Tangent:
    """The gradient that arrives for a returned value."""

    of: Returned

    def __str__(self) -> str:
        return f"tangent of {self.of}"


@dataclass(frozen=True, slots=True)
class Grad:
    """The gradient that leaves for an input."""

    of: Primal

    def __str__(self) -> str:
        return f"gradient of {self.of}"


@dataclass(frozen=True, slots=True)
class Token:
    """What keeps operators with side effects of one kind in order: each takes the token of the one before."""

    effect: str

    def __str__(self) -> str:
        return f"{self.effect} token"


Slot = Primal | RandomState | Returned | Tangent | Grad | Token
