"""The user's objects on the tape of a recording: autograd's nodes lead to what a checkpoint runs again, to modules with
hooks, to what custom functions have noted in `ctx`.

The tape is kept as long as the program is, for backwards that may be asked for; the objects are not to live longer
for it. So they are taken off the tape once the program is recorded, and put back while a backward is recorded from it.
Each call keeps them as eager's tape does: what a checkpoint runs again until backward has run, the rest as long as its
results live.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .._torch import BackwardHook, CheckpointFrame, PythonNode, cells_of_checkpoint
from ..errors import BackwardError

Holder = CheckpointFrame | BackwardHook | PythonNode
Find = Callable[[], Any]


class Taken(NamedTuple):
    """A place on the tape, and a way to what was there."""

    put: Callable[[Any], None]
    find: Find


class Borrowed:
    """What of the user's is on the tape of one recording."""

    def __init__(self) -> None:
        self._holders: list[weakref.ref[Any]] = []  # those that were not looked at yet
        self._taken: list[Taken] = []
        self._objects: dict[int, weakref.ref[Any]] = {}  # by id
        self._checkpointed: dict[int, weakref.ref[Any]] = {}
        self._depth = 0  # of those who have put them back

    def note(self, holder: CheckpointFrame | BackwardHook) -> None:
        """Something that may hold objects of the user's goes onto the tape."""
        self._holders.append(weakref.ref(holder))

    def take(self, is_users: Callable[[Any], bool], nodes: Iterable[PythonNode] = ()) -> None:
        """Take objects off the tape that the user holds, too; `nodes` are those of custom functions."""
        holders = [holder for reference in self._holders if (holder := reference()) is not None]
        self._holders.clear()
        for holder in (*holders, *nodes):
            known = self._checkpointed if isinstance(holder, CheckpointFrame) else self._objects
            for value, put in list(_places_in(holder)):
                find = _Loose(is_users, known).way_to(value)
                if find is not None:
                    self._taken.append(Taken(put, find))
                    put(None)

    def __bool__(self) -> bool:
        return bool(self._taken)

    @property
    def objects(self) -> list[Any]:
        """The objects that were taken."""
        return [*self.for_results(), *self.for_backward()]

    def for_results(self) -> list[Any]:
        """Those that eager keeps as long as the results of a call."""
        return [_find(reference) for reference in self._objects.values()]

    def for_backward(self) -> list[Any]:
        """Those that eager keeps until backward has run."""
        return [_find(reference) for reference in self._checkpointed.values()]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """The objects are on the tape again, while a backward is recorded from it."""
        if not self._taken or self._depth:
            yield
            return
        for put, value in [(taken.put, taken.find()) for taken in self._taken]:
            put(value)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            for taken in self._taken:
                taken.put(None)
            self.take(self._is_known)

    def _is_known(self, value: Any) -> bool:
        known = self._objects.get(id(value)) or self._checkpointed.get(id(value))
        return known is not None and known() is value


def _places_in(holder: Holder) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """What a holder holds, and how something else is put there."""
    held = vars(holder)
    for name, value in held.items():
        yield value, functools.partial(operator.setitem, held, name)
    if isinstance(holder, CheckpointFrame):
        for cell in cells_of_checkpoint(holder):
            yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")


class _Loose:
    """Finds ways to values that keep none of the user's objects alive; `objects` are those that were met, by id."""

    def __init__(self, is_users: Callable[[Any], bool], objects: dict[int, weakref.ref[Any]]) -> None:
        self._is_users = is_users
        self._objects = objects

    def way_to(self, value: Any) -> Find | None:
        """A way to a value; None if nothing of the user's is in it."""
        if self._is_users(value):
            reference = self._objects[id(value)] = weakref.ref(value)
            return functools.partial(_find, reference)
        match value:
            case types.MethodType():
                return self._made_of(lambda parts: types.MethodType(*parts), [value.__func__, value.__self__])
            case functools.partial():
                names, count = list(value.keywords), len(value.args)
                return self._made_of(
                    lambda parts: functools.partial(
                        parts[0], *parts[1 : 1 + count], **dict(zip(names, parts[1 + count :], strict=True))
                    ),
                    [value.func, *value.args, *value.keywords.values()],
                )
        if type(value) in (list, tuple):
            return self._made_of(type(value), list(value))
        if type(value) is dict:
            keys = list(value)
            return self._made_of(lambda parts: dict(zip(keys, parts, strict=True)), list(value.values()))
        return None

    def _made_of(self, make: Callable[[list[Any]], Any], parts: Iterable[Any]) -> Find | None:
        """A way to something that is made of parts, if the way to any of them is a loose one."""
        ways = [(part, self.way_to(part)) for part in parts]
        if all(way is None for _, way in ways):
            return None
        finds: list[Find] = [_holding(part) if way is None else way for part, way in ways]
        return lambda: make([find() for find in finds])


def _holding(value: Any) -> Find:
    return lambda: value


def _find(reference: weakref.ref[Any]) -> Any:
    value = reference()
    if value is None:
        raise BackwardError(
            "The backward of a compiled program runs code of an object that is gone. Keep the object until backward "
            "has run, or call the original function."
        )
    return value


# ---------------------------------------------------------------------------------------------------------------------
# What selective checkpoints keep of a region: its recomputation takes the values out, once.
#
# A tape is asked for several backwards, so that the values are put back before each. Which regions a backward has
# emptied is noted: eager refuses to run another one through them.
class Caches:
    """The values that the selective checkpoints of a recording keep."""

    def __init__(self) -> None:
        self._kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # each storage, and what the forward left there
        self._found: list[dict[Any, Any]] = []

    def add(self, storage: dict[Any, Any]) -> None:
        """A region begins."""
        self._found.append(storage)

    def finish(self) -> None:
        """The forward has run."""
        self._kept = [(storage, _copied(storage)) for storage in self._found]

    def refill(self) -> None:
        """Let another backward be recorded."""
        for storage, kept in self._kept:
            storage.clear()
            storage.update(_copied(kept))

    def emptied(self) -> frozenset[int]:
        """The regions that were recomputed since."""
        return frozenset(i for i, (storage, kept) in enumerate(self._kept) if not _same(storage, kept))


def _copied(storage: dict[Any, Any]) -> dict[Any, Any]:
    return {key: copy.copy(values) for key, values in storage.items()}


def _same(storage: dict[Any, Any], kept: dict[Any, Any]) -> bool:
    now, before = list(_values(storage)), list(_values(kept))
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _values(storage: dict[Any, Any]) -> Iterator[Any]:
    for values in storage.values():  # lists of values in torch 2.11, dicts of them in torch 2.13
        yield from values.values() if isinstance(values, dict) else values
