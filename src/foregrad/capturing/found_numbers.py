"""Floats in the parameter groups of optimizers: what stands for them in a recording, and how calls read them.

A learning rate is changed at every step, by hand or by a scheduler. It is no fact about the program, but an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ..codegen.writer import Writer
from ..host_numbers import HostNumber
from ..joint.side_effects import Escape
from ..slots import FreeNumber
from .free_variables import FreeVariables, Holder, Reached
from .kinds import attributes_of, is_a
from .sources import Source

_INDICES = range(16)  # of a tuple of numbers, which is short
_FLOATS = (float, HostNumber)


class NumberPlace(NamedTuple):
    """An item of a parameter group that is a float, or a tuple of floats."""

    table: dict[str, Any]
    key: str
    path: str
    value: Any

    @property
    def is_tuple(self) -> bool:
        """Whether there are several."""
        return type(self.value) is tuple

    @property
    def slots(self) -> list[FreeNumber]:
        """A slot for each number."""
        if not self.is_tuple:
            return [FreeNumber(self.path)]
        return [FreeNumber(f"{self.path}[{i}]") for i, _ in enumerate(self.value)]

    @property
    def numbers(self) -> list[float]:
        """The numbers, as they were found."""
        return list(self.value) if self.is_tuple else [self.value]

    @property
    def source(self) -> Source:
        """Where each call finds them."""
        return Source(self.table, "item", self.key, self.path)


def number_places(holders: Sequence[Holder]) -> list[NumberPlace]:
    """The places of all optimizers that a program can reach."""
    found: dict[tuple[int, str], NumberPlace] = {}
    for holder in holders:
        if is_a(holder.owner, Optimizer) and not holder.in_argument:
            for i, group in enumerate(attributes_of(holder.owner).get("param_groups", ())):
                for key, value in group.items() if type(group) is dict else ():
                    if type(key) is str and _are_numbers(value):
                        path = f"{holder.path}.param_groups[{i}][{key!r}]"
                        found.setdefault((id(group), key), NumberPlace(group, key, path, value))
    return [*found.values()]


def parameters_of_optimizers(holders: Sequence[Holder]) -> list[Tensor]:
    """The parameters of all optimizers that a program can reach."""
    owners = [holder.owner for holder in holders if is_a(holder.owner, Optimizer)]
    return [p for owner in owners for group in owner.param_groups for p in group["params"]]


def _are_numbers(value: Any) -> bool:
    if type(value) is tuple:
        return 0 < len(value) <= len(_INDICES) and all(type(item) in _FLOATS for item in value)
    return type(value) in _FLOATS


class FollowedNumbers:
    """Lets host numbers stand in the places of floats while a program is recorded."""

    def __init__(self, follow: Callable[[Sequence[tuple[FreeNumber, float]]], list[HostNumber]]) -> None:
        """`follow` gives what stands for new numbers."""
        self._follow = follow
        self._standing: dict[tuple[int, str], tuple[NumberPlace, Any]] = {}
        self._written: list[tuple[NumberPlace, Any]] = []

    @property
    def places(self) -> tuple[NumberPlace, ...]:
        """All places."""
        return tuple(place for place, _ in self._standing.values())

    def add(self, reached: Reached) -> None:
        """Something more was reached, and is not read yet."""
        for place in number_places(reached.holders):
            if (id(place.table), place.key) not in self._standing:
                numbers = self._follow([*zip(place.slots, place.numbers, strict=True)])
                standing = tuple(numbers) if place.is_tuple else numbers[0]
                self._standing[id(place.table), place.key] = place, standing
                place.table[place.key] = standing

    def put_back(self) -> None:
        """Let the floats stand there again; numbers that the program itself has put there are for calls to put."""
        for place, standing in self._standing.values():
            value = place.table.get(place.key)
            if value is not standing and _are_numbers(value):
                self._written.append((place, value))
            if value is standing or _are_numbers(value):
                place.table[place.key] = place.value

    @property
    def written(self) -> list[Escape]:
        """What the program has put in these places, equal to what was there or not."""
        return [
            Escape(place.table, dict.__setitem__, place.key, tuple(map(str, place.slots)), value, tuple)
            if type(value) is tuple
            else Escape(place.table, dict.__setitem__, place.key, (place.path,), (value,))
            for place, value in self._written
        ]


def leave_to_calls(places: Sequence[NumberPlace], free_variables: FreeVariables) -> None:
    """Calls read these places, and do not compare what is there."""
    for place in places:
        free_variables.state.leave_out(place.table, place.key)
    known = {(id(place.table), place.key) for place in places}
    free_variables.plain[:] = [
        (source, value)
        for source, value in free_variables.plain
        if source.how != "item" or (id(source.held), source.key) not in known
    ]


def write_numbers(writer: Writer, places: Mapping[str, NumberPlace], miss: str) -> None:
    """Lines that give numbers their variables, from text that reads each place; a call with no floats there is for
    another program."""
    conditions = []
    for text, place in places.items():
        names = [writer.variable(slot) for slot in place.slots]
        if place.is_tuple:
            whole = writer.fresh(place.key)
            writer.line(f"{whole} = {text}")
            writer.line(f"if type({whole}) is not tuple or len({whole}) != {len(names)}: {miss}")
            writer.line(f"{', '.join(names)}, = {whole}")
        else:
            writer.line(f"{names[0]} = {text}")
        conditions += [f"type({name}) is float" for name in names]
    for start in range(0, len(conditions), 16):
        writer.line(f"if not ({' and '.join(conditions[start : start + 16])}): {miss}")
