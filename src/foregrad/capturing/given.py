"""The arguments of a program: which objects in them are taken apart, and what the program does to them.

The program is recorded on copies of the lists, dicts and objects that it is given, made from their parts. What it does
to them is seen by comparing, and each call does it to the caller's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ..codegen.changes import Before, Change, change_between
from ..codegen.objects import read_dict, shape_of
from ..codegen.pytree import Flat, Given, Look, PuttingTogether, Registered, TakingApart, numbered
from ..errors import StateChangeError
from ..slots import Input, Part
from ..values import is_plain
from . import kinds
from .free_variables import looked_at
from .kinds import is_a, kinds_of

_VISIBLE = {kinds.OBJECT, kinds.DICT, kinds.LIST, kinds.TUPLE, kinds.FACTORY}


def can_be_opened(value: Any) -> bool:
    """Whether all of an object's state can be seen, so that it can be taken apart and made again.

    An optimizer's will have tensors as keys, for which other tensors cannot stand.
    """
    if is_a(value, Optimizer):
        return False
    shape = shape_of(type(value))
    found = None if shape is None or not shape.can_open(value) else kinds_of(value)
    return bool(found) and _VISIBLE.issuperset(found or ())


# ---------------------------------------------------------------------------------------------------------------------
# Which objects are taken apart.
@dataclass(frozen=True, slots=True)
class Opening:
    """Which objects in the arguments are taken apart: those that lead to tensors, and others if the program changes
    them. One that the program also finds by itself is the very object that it finds."""

    closed: bool = False  # none at all
    others: bool = False  # those without tensors, too
    whole: frozenset[int] = frozenset()  # ids of those that are left as they are

    def take(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> TakenArguments:
        """The arguments and keyword arguments, taken apart."""
        with looked_at():
            taking = TakingApart(Look() if self.closed else self._look(arguments))
            tree = taking.take(arguments, "")
        return TakenArguments(self, Flat(tree, taking.leaves, taking.paths), tuple(taking.objects))

    def _look(self, arguments: Any) -> Look:
        inside = _Inside(arguments)
        whole, leading = self.whole | inside.with_tensors_as_keys(), inside.leading_to_tensors()

        def opens(value: Any) -> bool:
            return (self.others or id(value) in leading) and id(value) not in whole and can_be_opened(value)

        return Look(opens, same_objects=True)


@dataclass(frozen=True, slots=True)
class TakenArguments:
    """Arguments that were taken apart."""

    opening: Opening
    flat: Flat
    objects: Sequence[tuple[Any, str]]  # lists, dicts, tuples and objects, by number, and their paths

    def opened(self) -> Iterator[Any]:
        """The objects of the user's classes, or of a library's, that were taken apart."""
        return (value for value, _ in self.objects if type(value) not in (tuple, list, dict))

    def require_unknown(self, known: Iterable[int]) -> None:
        """Take an object that the program also finds by itself for what it finds."""
        found = {id(value) for value in self.opened()}.intersection(known)
        if found:
            opening = self.opening
            raise OpenOtherwise(Opening(opening.closed, opening.others, opening.whole | found))

    def require_others(self) -> None:
        """Take apart the objects without tensors as well, if that was not done yet."""
        if not (self.opening.others or self.opening.closed):
            raise OpenOtherwise(Opening(others=True, whole=self.opening.whole))


class OpenOtherwise(Exception):
    """The arguments must be taken apart in another way."""

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening)
        self.opening = opening


def holds_tensors(value: Any) -> bool:
    """Whether an object that could be taken apart leads to a tensor.

    >>> import torch, types
    >>> holds_tensors(types.SimpleNamespace(w=[torch.ones(1)])), holds_tensors(torch.ones(1))
    (True, False)
    """
    return can_be_opened(value) and id(value) in _Inside(value).leading_to_tensors()


class _Inside:
    """Everything in a value that may be taken apart, and what holds it."""

    def __init__(self, value: Any) -> None:
        self._values = {id(value): value}
        self._holders: dict[int, list[int]] = {}  # by id
        pending = [value]
        while pending:
            owner = pending.pop()
            for part in _parts(owner):
                self._holders.setdefault(id(part), []).append(id(owner))
                if id(part) not in self._values:
                    self._values[id(part)] = part
                    pending.append(part)

    def leading_to_tensors(self) -> set[int]:
        """The ids of all objects that lead to a tensor."""
        return self._above([key for key, value in self._values.items() if is_a(value, Tensor)], object)

    def with_tensors_as_keys(self) -> set[int]:
        """The ids of objects that hold a dict in which tensors are keys, directly or in containers: an optimizer.

        What stands for a tensor is another one, and no key there.
        """
        keyed = [i for i, value in self._values.items() if is_a(value, dict) and _has_tensors_as_keys(value)]
        return {*keyed, *self._above(keyed, (tuple, list, dict))}

    def _above(self, below: list[int], through: type | tuple[type, ...]) -> set[int]:
        """What leads to some objects, up to holders of other types than some."""
        found: set[int] = set()
        pending = [*below]
        while pending:
            new = [holder for holder in self._holders.get(pending.pop(), ()) if holder not in found]
            found.update(new)
            pending += [holder for holder in new if is_a(self._values[holder], through)]
        return found


def _has_tensors_as_keys(value: dict[Any, Any]) -> bool:
    return any(is_a(key, Tensor) for key in read_dict(value))


def _parts(value: Any) -> list[Any]:
    """What a value consists of that may be taken apart."""
    kind = type(value)
    if kind in (tuple, list):
        return [*value]
    if kind is dict:
        return [*value.values()]
    if kind is weakref.ref:
        return [value()]
    shape = shape_of(kind) if can_be_opened(value) else None
    if shape is None:
        return []
    contents = shape.contents(value)
    items = contents.values() if isinstance(contents, dict) else contents or ()
    return [*items, *shape.attributes(value).values(), *shape.filled(value).values()]


# ---------------------------------------------------------------------------------------------------------------------
# What the program does to them.
class Held(NamedTuple):
    """All that refers to what stands for inputs. Nothing else here does, for references to tensors are counted.

    It has a class of its own, so that a search for tensors that outlive a recording ends here.
    """

    leaves: list[Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    objects: dict[int, Any]  # by number
    noted: dict[int, tuple[Any, Before]]  # by number: what they held before


@dataclass
class Copies:
    """What a program was given in one recording, and what it held then."""

    taken: TakenArguments
    slots: Sequence[Input]  # of the leaves
    held: Held = field(default_factory=lambda: Held([], ((), {}), {}, {}))
    _places: dict[int, Given] = field(default_factory=dict)  # by the id of an object

    def put_together(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments and keyword arguments, of what stands for their leaves."""
        building = PuttingTogether(leaves)
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = building.build(self.taken.flat.tree)
        self.held = Held(leaves, arguments, building.objects, {})
        self.settle()
        own = {id(leaf): Given(slot) for leaf, slot in zip(leaves, self.slots, strict=True) if _is_one_of_a_kind(leaf)}
        self._places = {**own, **{id(value): Given(Part(n)) for n, value in building.objects.items()}}
        return arguments

    def place_of(self, value: Any) -> Given | None:
        """Where the caller has what a value stands for, if it is an object of the arguments."""
        return self._places.get(id(value))

    def changes(self, taking: TakingApart) -> list[Change]:
        """What the program has changed so far; new values are taken apart."""
        found = []
        for number, (node, before) in self.held.noted.items():
            path, now = self._path(number), Before.of(node, self.held.objects[number])
            if now.kind is not before.kind:
                raise StateChangeError(
                    f"the program changes the class of {path}: a compiled call would not change it again. Make a new "
                    "object instead, or compile with fallback='eager'."
                )
            if isinstance(node, Registered):
                if not now.holds_what(before):
                    raise StateChangeError(
                        f"the program changes {path}, a {now.kind.__name__}: a compiled call would not change it "
                        "again. Return a new one instead, or compile with fallback='eager'."
                    )
                continue
            change = change_between(node, before, now, path, taking)
            if change is not None:
                found.append(change)
        return found

    def require_unchanged(self, since: str) -> None:
        """Refuse a program that changes them at a time at which no call would."""
        changes = self.changes(TakingApart(Look(same_objects=True)))
        if changes:
            raise StateChangeError(
                f"the program changes {self._path(changes[0].of.number)} {since}: a compiled call would not change it "
                "again. Return the new object instead, or compile with fallback='eager'."
            )

    def settle(self) -> None:
        """What they hold now is what changes are compared with."""
        nodes = dict(numbered(self.taken.flat.tree))
        noted = {n: (nodes[n], Before.of(nodes[n], value)) for n, value in self.held.objects.items()}
        self.held = self.held._replace(noted=noted)

    def _path(self, number: int) -> str:
        return user_path(self.taken.objects[number][1])


def _is_one_of_a_kind(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) and not (is_plain(leaf) and type(leaf) not in (set, frozenset))


def user_path(path: str) -> str:
    """The place of something in (args, kwargs), as the user would write it."""
    return f"args{path.removeprefix('[0]')}" if path.startswith("[0]") else f"kwargs{path.removeprefix('[1]')}"
