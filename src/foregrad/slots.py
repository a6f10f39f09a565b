"""Named places of a calling convention.

Graphs take and return flat lists. What stands at which position is said by a list of slots, so that code asks for
`Tangent(Output(0))` and never for `args[num_mutated + 2]`. Slots are plain frozen data: they can be compared,
hashed, printed and stored. Those of inputs are named tuples: they are looked up thousands of times in a capture, and
Python hashes a tuple faster than any other object of ours. Their kind tells apart those that have the same fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Input(NamedTuple):
    """A leaf of the user's arguments, by its place: `args[0]`, `kwargs['mask']`."""

    path: str
    kind: Literal["input"] = "input"
    stays: bool = False  # where it is, from call to call: a front end hands over parameters as arguments

    def __str__(self) -> str:
        return self.path


class Part(NamedTuple):
    """A list, dict, tuple or object in the user's arguments, by its number among them."""

    number: int
    kind: Literal["part"] = "part"

    def __str__(self) -> str:
        return f"part {self.number}"


class Param(NamedTuple):
    """A parameter of the compiled module."""

    path: str
    kind: Literal["parameter"] = "parameter"

    def __str__(self) -> str:
        return f"parameter {self.path}"


class Buffer(NamedTuple):
    """A buffer of the compiled module."""

    path: str
    kind: Literal["buffer"] = "buffer"

    def __str__(self) -> str:
        return f"buffer {self.path}"


class FreeTensor(NamedTuple):
    """A tensor that the program found in a closure, a global or a module."""

    path: str
    kind: Literal["hidden"] = "hidden"

    def __str__(self) -> str:
        return self.path


class FreeNumber(NamedTuple):
    """A float that the program finds in the parameter groups of an optimizer."""

    path: str
    kind: Literal["number"] = "number"

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class SyntheticBase:
    """Memory that several inputs look at, where the program writes to it."""

    index: int

    def __str__(self) -> str:
        return f"shared memory {self.index}"


@dataclass(frozen=True, slots=True)
class ViewRoot:
    """What some inputs of a shared memory are views of, beside other inputs that autograd does not relate to it."""

    memory: int
    index: int

    def __str__(self) -> str:
        return f"root {self.index} in shared memory {self.memory}"


class GradOf(NamedTuple):
    """The gradient that an input holds before the call, where the program looks at it."""

    of: Input | Param | Buffer | FreeTensor
    kind: Literal["grad of"] = "grad of"

    def __str__(self) -> str:
        return f"{self.of}.grad"


class Inner(NamedTuple):
    """A tensor inside of a wrapper subclass: `args[0].scale`."""

    of: Slot
    attr: str
    kind: Literal["inner"] = "inner"

    def __str__(self) -> str:
        return f"{self.of}.{self.attr}"


Primal = Input | Param | Buffer | FreeTensor | FreeNumber | SyntheticBase | ViewRoot | GradOf | Inner


@dataclass(frozen=True, slots=True)
class RandomState:
    """What a graph draws from, or leaves, under `functionalize_rng_ops`: `fwd_seed`, `bwd_base_offset`, ..."""

    direction: Literal["fwd", "bwd"]
    part: Literal["seed", "base_offset", "offset"]

    def __str__(self) -> str:
        return f"{self.direction}_{self.part}"


class Updated(NamedTuple):
    """The new value of an input that the program wrote to."""

    of: Primal
    kind: Literal["updated"] = "updated"

    def __str__(self) -> str:
        return f"updated {self.of}"


class Grown(NamedTuple):
    """The data of a written input in the size that the program gave it."""

    of: Primal
    kind: Literal["grown"] = "grown"

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


class Tangent(NamedTuple):
    """The gradient that arrives for a returned value."""

    of: Returned
    kind: Literal["tangent"] = "tangent"

    def __str__(self) -> str:
        return f"tangent of {self.of}"


@dataclass(frozen=True, slots=True)
class LowerTangent:
    """A tangent of a lower order, for which gradients are differentiated too."""

    index: int

    def __str__(self) -> str:
        return f"tangent {self.index} of a lower order"


class Grad(NamedTuple):
    """The gradient that leaves for an input."""

    of: Primal | LowerTangent
    kind: Literal["grad"] = "grad"

    def __str__(self) -> str:
        return f"gradient of {self.of}"


class BackwardUpdate(NamedTuple):
    """The new value of an input, or of a tangent, that the backward wrote to."""

    of: Primal | Tangent
    kind: Literal["backward update"] = "backward update"

    def __str__(self) -> str:
        return f"{self.of} as the backward leaves it"


@dataclass(frozen=True, slots=True)
class Token:
    """What keeps operators with side effects of one kind in order: each takes the token of the one before."""

    effect: str
    backward: bool = False

    def __str__(self) -> str:
        return f"{self.effect} token"


class Saved(NamedTuple):
    """A tensor that the forward keeps for its backward, by the name of its node."""

    name: str
    kind: Literal["saved"] = "saved"

    def __str__(self) -> str:
        return f"saved {self.name}"


class Size(NamedTuple):
    """The same for a symbolic size, or another value that is no tensor."""

    name: str
    kind: Literal["size"] = "size"

    def __str__(self) -> str:
        return f"size {self.name}"


class Value(NamedTuple):
    """What a part of a forward gives to later ones, by the name of its node."""

    name: str
    kind: Literal["value"] = "value"

    def __str__(self) -> str:
        return f"value {self.name}"


Slot = (
    Primal
    | Part
    | RandomState
    | Returned
    | Tangent
    | LowerTangent
    | Grad
    | BackwardUpdate
    | Token
    | Saved
    | Size
    | Value
)


def outermost(slot: Slot | None) -> Slot | None:
    """What a place belongs to: the wrapper subclass, where it is a tensor inside of one."""
    while type(slot) is Inner:
        slot = slot.of
    return slot


def belongs_to_backward(slot: Slot | None) -> bool:
    """Whether a joint graph takes or returns something for its backward alone.

    >>> belongs_to_backward(Grad(Input("x"))), belongs_to_backward(Output(0)), belongs_to_backward(Token("print"))
    (True, False, False)
    """
    match outermost(slot) if type(slot) is Inner else slot:
        case Tangent() | Grad() | BackwardUpdate():
            return True
        case Token(backward=backward):
            return backward
        case RandomState(direction=direction):
            return direction == "bwd"
        case _:
            return False
