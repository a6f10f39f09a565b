"""Notice when Python state that a program reads is no longer what it was.

Every holder of state (see `kinds`) is compared shallowly: plain values by equality, tensors only by being there (they
are inputs, and checked as such), anything else by identity; what an object leads to is a holder of its own. Python
numbers the versions of a dict: as long as none has changed, items of dicts are not looked at. A namespace of a large
library costs one comparison at each call, however many of its names a program may read.
"""

from __future__ import annotations

import collections
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._torch import dict_version
from ..values import is_unchanged, weakly
from .kinds import DICT, WEAK, Kind, attributes_of, class_dict, has_attributes, has_slots, is_a, slots_of

ABSENT = object()
_TENSOR = object()


class _TheVery(NamedTuple):
    """An object that must be the very same one, and is not kept alive."""

    find: Callable[[], Any]


def note(value: Any) -> Any:
    """What is kept of an item of a holder; tensors are not kept alive."""
    if not is_a(value, Tensor):
        return value
    return _TheVery(weakly(value)) if vars(value) else _TENSOR  # what is on another one may be different


def _note_held(value: Any) -> Any:
    """The same, where a call cannot ask the holder for a certain item: any tensor in it is known by its identity."""
    return _TheVery(weakly(value)) if is_a(value, Tensor) else value


def _note_weakly(value: Any) -> Any:
    """What is kept of something that its holder does not keep alive either."""
    if type(value) is not types.MethodType:
        return _TheVery(weakly(value))
    owner, function = weakly(value.__self__), weakly(value.__func__)
    return _TheVery(lambda: types.MethodType(function(), owner()))


def still(now: Any, before: Any) -> bool:
    """Whether an item is what it was."""
    if now is before:
        return True
    if before is _TENSOR:
        return is_a(now, Tensor) and not vars(now)
    return is_unchanged(now, before.find() if type(before) is _TheVery else before)


class StateGuard:
    """State that a program reads, as it was when the program was recorded."""

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}  # by the id of the dict
        self._objects: list[Any] = []
        self._functions: list[types.FunctionType] = []
        self._sequences: list[tuple[Any, Callable[[Any], Iterator[Any]], tuple[Any, ...]]] = []  # how they are read
        self._weak_objects: list[tuple[Callable[[], Any], type, Any]] = []  # with their class and their attributes
        self._others: list[tuple[Any, Any, dict[Any, Any]]] = []  # an owner, how it is read, what it held
        self._empty: list[dict[Any, Any]] = []  # of functions, mostly: no attribute was ever given to them
        self._settings: list[tuple[Callable[[], Any], Any]] = []
        self._identities: list[tuple[Callable[[], Any], Any]] = []
        self._classes: dict[int, type] = {}  # of the user's, by id
        self.holds: Callable[[], bool]  # once everything was added

    # ------------------------------------------------------------------------------------------ collecting
    def add_item(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """An item of a dict, or ABSENT."""
        self._table(table).items[key] = note(value)

    def add_absent(self, table: dict[Any, Any], names: frozenset[str]) -> None:
        """Names that a program may look up in a dict and would not find."""
        self._table(table).absent |= names

    def add_table(self, table: dict[Any, Any], without: Iterable[Any] = ()) -> None:
        """A whole dict, in its order; the values of some keys are compared elsewhere."""
        self._table(table).note_all(frozenset(without))

    def add_library(self, table: dict[Any, Any]) -> None:
        """A namespace or a class of torch's, which holds no tensors; what was noted of it once serves all programs."""
        if id(table) not in self._tables:
            noted = _LIBRARIES.get(id(table))
            if noted is None or noted.version != dict_version(table):
                noted = _LIBRARIES[id(table)] = _Table(table)
                noted.items = dict(table)
                noted.keys = list(noted.items)
            self._tables[id(table)] = noted

    def _table(self, table: dict[Any, Any]) -> _Table:
        return self._tables.setdefault(id(table), _Table(table))

    def add_sequence(self, owner: Any) -> None:
        """A list, deque or set, item by item; whatever methods a subclass has, none of them is called."""
        noting = note if is_a(owner, (list, collections.deque)) else _note_held
        base = next(base for base in type(owner).__mro__ if base in _ITERABLE)
        iterate: Callable[[Any], Iterator[Any]] = vars(base)["__iter__"]
        self._sequences.append((owner, iterate, tuple(map(noting, iterate(owner)))))

    def add_object(self, owner: Any, without: Iterable[Any] = (), kept: bool = True) -> None:
        """An object of a class of Python's, which may be one not to be kept alive: its class and its attributes."""
        slots = slots_of(owner)
        if has_attributes(type(owner)):
            self.add_table(attributes_of(owner), without)
        if kept or slots:
            self._objects.append(owner)
        else:
            self._weak_objects.append((weakly(owner), type(owner), _attributes(owner)))
        if slots or has_slots(type(owner)):
            self._others.append((owner, slots_of, {name: note(value) for name, value in slots.items()}))

    def add_other(self, owner: Any, kind: Kind) -> None:
        """Anything else that can be read."""
        noting = _note_weakly if kind is WEAK else _note_held
        self._others.append((owner, kind.read, {key: noting(value) for key, value in kind.read(owner).items()}))

    def add_function(self, function: types.FunctionType) -> None:
        """Code, defaults and attributes of a function."""
        self._functions.append(function)
        if function.__kwdefaults__:
            self.add_table(function.__kwdefaults__)
        if vars(function):
            self.add_table(vars(function))
        else:
            self._empty.append(vars(function))

    def add_class(self, kind: type) -> None:
        """What a class itself defines."""
        if id(kind) not in self._classes:
            self._classes[id(kind)] = kind
            self.add_table(class_dict(kind))

    def add_hooks(self, tables: Iterable[dict[Any, Any]]) -> None:
        """Dicts of functions that are called in order; nearly always there are none."""
        for table in tables:
            if table:
                self.add_table(table)
                self.add_sequence(table)  # a new order does not count as a change of an OrderedDict
            else:
                self._empty.append(table)

    def add_bare(self, tensor: Tensor) -> None:
        """A tensor without attributes."""
        self._empty.append(vars(tensor))

    def add_identity(self, read: Callable[[], Any], value: Any) -> None:
        """A place in which there must be the very same object."""
        self._identities.append((read, value))

    def add_setting(self, read: Callable[[], Any], value: Any) -> None:
        """Something of torch's that is asked for by a call."""
        self._settings.append((read, value))

    def finish(self) -> bool:
        """Everything was added; gives whether there is anything to compare."""
        self._dicts = [table.table for table in self._tables.values()]
        self._versions = [table.version for table in self._tables.values()]
        self._types = list(map(type, self._objects))
        self._attributes = list(map(_attributes, self._objects))
        self._made_of = list(map(_made_of, self._functions))
        self._derived = list(map(_derived, self._classes.values()))
        objects = (self._objects, self._weak_objects)
        self._holds_more = any((*objects, self._sequences, self._others, self._settings, self._identities))
        self.holds = self._comparison()
        return bool(self._dicts or self._functions or self._empty or self._holds_more)

    # ------------------------------------------------------------------------------------------- comparing
    def _comparison(self) -> Callable[[], bool]:
        """What every call asks: whether everything is as it was."""
        dicts, versions, empty = self._dicts, self._versions, self._empty
        functions, made_of, holds_more = self._functions, self._made_of, self._holds_more
        classes, derived = list(self._classes.values()), self._derived

        def holds() -> bool:
            if list(map(dict_version, dicts)) != versions and not self._look_at_tables():
                return False
            if any(empty):
                return False
            try:  # the very same code, defaults and bases are not looked into
                if list(map(_made_of, functions)) != made_of or list(map(_derived, classes)) != derived:
                    return False
            except Exception:  # defaults that cannot be compared are other ones
                return False
            return not holds_more or self._others_hold()

        return holds

    def _others_hold(self) -> bool:
        same_classes = all(map(operator.is_, map(type, self._objects), self._types))
        if not same_classes or not all(map(operator.is_, map(_attributes, self._objects), self._attributes)):
            return False
        for find, kind, attributes in self._weak_objects:
            weak = find()
            if type(weak) is not kind or _attributes(weak) is not attributes:
                return False
        for owner, iterate, before in self._sequences:
            now = list(iterate(owner))
            if len(now) != len(before) or not all(map(still, now, before)):
                return False
        for owner, read, items in self._others:
            if not _same_items(read(owner), items):
                return False
        if not all(read() is value for read, value in self._identities):
            return False
        return all(is_unchanged(ask(), answer) for ask, answer in self._settings)

    def _look_at_tables(self) -> bool:
        """Look into the dicts whose version has changed; those that hold the same are not looked at again."""
        for i, table in enumerate(self._tables.values()):
            version = dict_version(table.table)  # first: what another thread changes from now on shows
            if version != self._versions[i]:
                if not table.holds():
                    return False
                self._versions[i] = version
        return True


_ITERABLE = frozenset({list, collections.deque, set, frozenset, collections.OrderedDict, dict})
_made_of = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_derived = operator.attrgetter("__mro__", "__qualname__")  # no dict tells when these are assigned


def _attributes(owner: Any) -> Any:
    return attributes_of(owner) if has_attributes(type(owner)) else None


def _same_items(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return len(now) == len(before) and all(still(now.get(key, ABSENT), value) for key, value in before.items())


def _copied(table: dict[Any, Any]) -> dict[Any, Any]:
    """The items of a dict, whatever methods a subclass of the user's has."""
    return dict(table) if type(table) is dict else DICT.read(table)


_LIBRARIES: dict[int, _Table] = {}  # by the id of the dict, which is kept


class _Table:
    """A dict: some of its items, or all of them."""

    __slots__ = ("absent", "items", "keys", "table", "version")

    def __init__(self, table: dict[Any, Any]) -> None:
        self.version = dict_version(table)  # first: what another thread changes from now on shows
        self.table = table
        self.items: dict[Any, Any] = {}
        self.absent: frozenset[str] = frozenset()
        self.keys: Sequence[Any] | None = None  # in order, if the whole dict counts

    def note_all(self, without: frozenset[Any]) -> None:
        items = _copied(self.table)
        self.keys = list(items)
        self.items.update((key, note(value)) for key, value in items.items() if key not in without)

    def holds(self) -> bool:
        now = _copied(self.table)
        if self.keys is not None and not (len(now) == len(self.keys) and all(map(is_unchanged, now, self.keys))):
            return False
        if not self.absent.isdisjoint(now):
            return False
        return all(still(now.get(key, ABSENT), before) for key, before in self.items.items())
