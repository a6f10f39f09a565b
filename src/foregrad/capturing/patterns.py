"""Arguments that are objects: what the object of every call must look like, and where the tensors in it lie.

An object is compared part by part with the one that the program was recorded on: the same types, equal plain values,
the same functions and classes, and tensors in the same places, which are read from the call's own object. Nothing of
the first call's objects is kept alive.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..values import Change, frozen, is_plain, shown, shown_frozen, weakly
from .kinds import CLASS, FUNCTION, NAMESPACE, OBJECT, Kind, is_a, kinds_of


@dataclass(frozen=True, slots=True)
class Value:
    """A plain value."""

    value: Any


@dataclass(frozen=True, slots=True)
class TensorAt:
    """A tensor: an input of the program."""


@dataclass(frozen=True, slots=True)
class Again:
    """A part that was met before."""

    index: int


@dataclass(frozen=True, slots=True)
class Is:
    """A part that must be the very same object."""

    find: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Parts:
    """An object that is looked into: for each kind that it is of, its keys and what is there."""

    kind: Callable[[], Any]  # the class, which may have been made for this object
    parts: tuple[tuple[Kind, tuple[tuple[Pattern, Pattern], ...]], ...]
    find: Callable[[], Any] | None = None  # where it must be the very same object as well


Pattern = Value | TensorAt | Again | Is | Parts


class ObjectPattern:
    """What an argument that is an object must look like; `known` are ids of objects that the program also finds itself.

    >>> import torch
    >>> pattern = ObjectPattern(types.SimpleNamespace(n=2, w=torch.ones(1)))
    >>> pattern.match(types.SimpleNamespace(n=2, w=torch.zeros(1)))
    [tensor([0.])]
    >>> pattern.match(types.SimpleNamespace(n=3, w=torch.zeros(1))) is None
    True
    """

    def __init__(self, value: Any, known: Container[int] = frozenset()) -> None:
        self._known = known
        self._value = value
        taking = _Taking(known)
        self._pattern = taking.take(value)
        self.tensors: Sequence[Tensor] = taking.tensors
        self.unknown = taking.unknown  # types of parts that nothing is known about
        self.name = type(value).__name__

    def require(self, fixed: Container[int]) -> None:
        """Let the parts with these ids be the very same objects at each call."""
        self._pattern = _Taking(self._known, fixed).take(self._value)

    def release(self) -> None:
        """Let go of what the pattern was made from."""
        self.tensors, self._value = (), None

    def match(self, value: Any) -> list[Tensor] | None:
        """The tensors in an object, in the order of `tensors`; None if it looks different."""
        matching = _Matching(self._known)
        return matching.tensors if matching.match(self._pattern, value) else None

    def explain(self, value: Any) -> Change | None:
        """The first part of an object that looks different."""
        explaining = _Explaining(self._known)
        explaining.match(self._pattern, value)
        return explaining.change


_CELLS = Kind("closure", lambda owner: dict(enumerate(owner.__closure__ or ())))


def _kinds(value: Any) -> tuple[Kind, ...] | None:
    """How an object is looked into; a function also by its variables."""
    if type(value) is types.FunctionType:
        return (FUNCTION, _CELLS)
    if is_a(value, enum.Enum):
        return ()
    kinds = kinds_of(value)
    return () if kinds in ((CLASS,), (NAMESPACE,)) else kinds


class _Taking:
    """Makes a pattern of an object."""

    def __init__(self, known: Container[int], fixed: Container[int] = frozenset()) -> None:
        self._fixed = fixed
        self.tensors: list[Tensor] = []
        self.unknown: list[type] = []
        self._known = known
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # so that ids stay their own

    def take(self, value: Any) -> Pattern:
        if id(value) in self._seen:
            return Again(self._seen[id(value)])
        if is_plain(value) and not is_a(value, (list, dict, set)):
            return Value(frozen(value))
        self._seen[id(value)] = len(self._alive)
        self._alive.append(value)
        if is_a(value, Tensor):
            self.tensors.append(value)
            return TensorAt()
        if id(value) in self._known:
            return Is(weakly(value))
        kinds = _kinds(value)
        if kinds is None:
            self.unknown.append(type(value))
        if not kinds:
            return Is(weakly(value))
        parts = tuple((kind, self._items(kind, value)) for kind in kinds)
        return Parts(weakly(type(value)), parts, weakly(value) if id(value) in self._fixed else None)

    def _items(self, kind: Kind, value: Any) -> tuple[tuple[Pattern, Pattern], ...]:
        return tuple((self.take(key), self.take(item)) for key, item in _items(kind, value))


class _Matching:
    """Compares an object with a pattern, in the order in which that was made."""

    def __init__(self, known: Container[int]) -> None:
        self.tensors: list[Tensor] = []
        self._known = known
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []

    def match(self, pattern: Pattern, value: Any) -> bool:
        match pattern:
            case Value(expected):
                return type(value) is expected[0] and bool(frozen(value) == expected)
            case Again(index):
                return self._alive[index] is value
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = len(self._alive)
        self._alive.append(value)
        match pattern:
            case TensorAt():
                if is_a(value, Tensor):
                    self.tensors.append(value)
                    return True
                return False
            case Is(find):
                return find() is value
            case Parts(kind, parts, find):
                if type(value) is not kind() or id(value) in self._known or (find is not None and find() is not value):
                    return False
                return all(self._match_items(of, items, value) for of, items in parts)
        return False

    def _match_items(self, kind: Kind, items: Sequence[tuple[Pattern, Pattern]], value: Any) -> bool:
        now = _items(kind, value)
        return len(now) == len(items) and all(
            self.match(key, found_key) and self.match(item, found)
            for (key, item), (found_key, found) in zip(items, now, strict=True)
        )


class _Explaining(_Matching):
    """Notes the innermost part that is different."""

    def __init__(self, known: Container[int]) -> None:
        super().__init__(known)
        self.change: Change | None = None
        self._path = ""

    def match(self, pattern: Pattern, value: Any) -> bool:
        path = self._path
        holds = super().match(pattern, value)
        if not holds and self.change is None:
            self.change = Change(path, _shown(pattern), shown(value))
        self._path = path
        return holds

    def _match_items(self, kind: Kind, items: Sequence[tuple[Pattern, Pattern]], value: Any) -> bool:
        now, path = _items(kind, value), self._path
        if len(now) != len(items):
            self.change = self.change or Change(f"{path}, what it holds,", f"{len(items)} items", f"{len(now)} items")
            return False
        for (key, item), (found_key, found) in zip(items, now, strict=True):
            self._path = f"{path}.{found_key}" if kind.is_attribute else kind.path(path, found_key)
            if not (self.match(key, found_key) and self.match(item, found)):
                return False
        self._path = path
        return True


def _shown(pattern: Pattern) -> str:
    match pattern:
        case Value(value):
            return shown_frozen(value)
        case TensorAt():
            return "a tensor"
        case Parts(kind):
            return f"a {kind().__name__}"
        case Again() | Is():
            return "another object"


def _items(kind: Kind, value: Any) -> list[tuple[Any, Any]]:
    """What an object holds; its class has been compared already."""
    items = list(kind.read(value).items())
    return items[1:] if kind is OBJECT else items
