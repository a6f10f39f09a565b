"""Notice when Python state that a program reads is no longer what it was.

Every holder of state (see `kinds`) is compared shallowly: plain values by equality, tensors only by being there (they
are inputs, and checked as such), anything else by identity; what an object leads to is a holder of its own. Objects are
not kept alive by being compared (see `Lifetime`). Python numbers the versions of a dict: as long as none has changed,
items of dicts are not looked at. A namespace of a large library costs one comparison at each call, however many of its
names a program may read.
"""

from __future__ import annotations

import collections
import functools
import operator
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

from torch import Generator, Tensor

from .._torch import dict_version, settings_modules
from ..values import PLAIN, Change, is_plain, is_unchanged, shown, weakly
from .code import found_where_it_says
from .kinds import ACCESSOR, DICT, Kind, Lifetime, attributes_of, class_dict, has_attributes, has_slots, is_a, slots_of
from .settings import properties_named, settings_that_are_read
from .sources import Source

ABSENT = object()


class _ATensor(NamedTuple):
    """Any tensor of one class, on which nothing was put: it is an input if the program looks at it."""

    kind: type


class _TheVery(NamedTuple):
    """An object that must be the very same one, and is not kept alive."""

    find: Callable[[], Any]


class _Known:
    """An object that is known by its id, and not kept alive."""

    __slots__ = ("id",)

    def __init__(self, value: Any) -> None:
        self.id = id(value)


class _Made:
    """An object that never changes, and is known by what it was made of."""

    __slots__ = ("kind", "parts")

    def __init__(self, value: Any, lifetime: Lifetime) -> None:
        lifetime.hold(type(value))
        self.kind = id(type(value))
        self.parts = [_note_held(part, lifetime) for part in _parts_of(value)]

    def equals(self, value: Any) -> bool:
        """Whether another object is made in the same way of the same."""
        if id(type(value)) != self.kind:
            return False
        parts = _parts_of(value)
        return len(parts) == len(self.parts) and all(map(still, parts, self.parts))


_ACCESSORS = (staticmethod, classmethod, property)
_OF_A_CLASS = (types.GetSetDescriptorType, types.MemberDescriptorType)  # which lead to the class that they are in


def _parts_of(value: Any) -> list[Any]:
    """What an object was made of that never changes."""
    if is_a(value, tuple):
        return list(tuple.__iter__(value))
    if type(value) is types.MethodType:  # which may be made anew whenever it is asked for
        return [value.__self__, value.__func__]
    return [value.__name__] if is_a(value, _OF_A_CLASS) else list(ACCESSOR.read(value).values())


def _never_changes(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, tuple):
        return not has_attributes(kind)
    return kind in _ACCESSORS or kind in _OF_A_CLASS or kind is types.MethodType


def note(value: Any, lifetime: Lifetime) -> Any:
    """What is kept of an item of a holder; neither tensors nor other objects are kept alive, if that can be."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is types.FunctionType:  # nearly all that classes hold
        return _Known(value) if lifetime.knows(value) else value
    if issubclass(kind, Tensor):
        return (
            _TheVery(weakly(value)) if vars(value) else _ATensor(type(value))
        )  # what is on another one may be different
    if is_plain(value):
        return value
    if _never_changes(value):
        return _Made(value, lifetime)
    return _Known(value) if lifetime.knows(value) else value


def _note_held(value: Any, lifetime: Lifetime) -> Any:
    """The same, where a call cannot ask the holder for a certain item: any tensor in it is known by its identity."""
    return _TheVery(weakly(value)) if is_a(value, Tensor) else note(value, lifetime)


def still(now: Any, before: Any) -> bool:
    """Whether an item is what it was."""
    if now is before:
        return True
    kind = type(before)
    if kind is _Known:
        return id(now) == before.id
    if kind is _Made:
        return bool(before.equals(now))
    if kind is _TheVery:
        return before.find() is now
    if kind is _ATensor:
        return type(now) is before.kind and not vars(now)
    return is_unchanged(now, before)


def shown_noted(before: Any) -> str:
    """What is kept of an item, as short text."""
    match before:
        case _ if before is ABSENT:
            return "absent"
        case _ATensor():
            return "a tensor"
        case _TheVery() | _Known() | _Made():
            return "another object"
    return shown(before)


def change_in(path: str, now: Any, before: Any, owner: Any = None) -> Change:
    """An item that is not what it was."""
    return Change(path, shown_noted(before), "absent" if now is ABSENT else shown(now), owner)


def _key(key: Any, attribute: bool) -> str:
    return f".{key}" if attribute else f"[{shown(key)}]"


def change_in_items(
    now: Mapping[Any, Any], before: Mapping[Any, Any], owner: Any, attribute: bool = False
) -> Change | None:
    """The first item that is not what it was, is new or gone, or lies in another place."""
    for key in before:
        if not still(now.get(key, ABSENT), before[key]):
            return change_in(_key(key, attribute), now.get(key, ABSENT), before[key], owner)
    for key in now:
        if key not in before:
            return change_in(_key(key, attribute), now[key], ABSENT, owner)
    return None if [*now] == [*before] else Change(", the order of its items,", shown([*before]), shown([*now]), owner)


class StateGuard:
    """State that a program reads, as it was when the program was recorded."""

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        self._tables: dict[int, _Table] = {}  # by the id of the dict
        self._objects: list[Callable[[], Any]] = []
        self._functions: list[Callable[[], Any]] = []
        # An owner, how it is read, what it held.
        self._sequences: list[tuple[Callable[[], Any], Callable[[Any], Iterator[Any]], tuple[Any, ...]]] = []
        self._others: list[tuple[Callable[[], Any], Any, dict[Any, Any]]] = []
        self._empty: list[dict[Any, Any]] = []  # of functions, mostly: no attribute was ever given to them
        self._settings: list[tuple[Callable[[], Any], Any]] = []
        self._identities: list[tuple[Callable[[], Any], Any]] = []
        self._same: list[tuple[Callable[[], Any], Callable[[], Any]]] = []
        self._classes: dict[int, type] = {}  # of the user's, by id
        self._loose: dict[int, _LooseClass] = {}
        self._dicts: list[dict[Any, Any]] = []
        self._versions: list[int] = []
        self._types: list[int] = []  # ids
        self._attributes: list[Any] = []
        self._made_of: list[Any] = []
        self._derived: list[Any] = []
        self.holds: Callable[[], bool]  # once everything was added
        lifetime.when_gone(self._release)

    def _release(self) -> None:
        """Let go of everything: nothing is as it was."""
        self._tables.clear()
        self._loose.clear()
        for held in (self._dicts, self._objects, self._functions, self._attributes, self._made_of, self._derived):
            held.clear()
        self._sequences.clear()
        self._others.clear()
        self._identities.clear()
        self._same.clear()

    # ------------------------------------------------------------------------------------------ collecting
    def add_item(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """An item of a dict, or ABSENT."""
        self._table(table).items[key] = note(value, self._lifetime)

    def leave_out(self, table: dict[Any, Any], key: Any) -> None:
        """An item of a dict is not compared after all; that it is there still is."""
        known = self._tables.get(id(table))
        if known is not None:
            known.items.pop(key, None)

    def add_absent(self, table: dict[Any, Any], names: frozenset[str]) -> None:
        """Names that a program may look up in a dict and would not find."""
        self._table(table).absent |= names

    def add_table(self, table: dict[Any, Any], by_itself: bool = False) -> None:
        """A whole dict, in its order; containers of plain values in it are compared one by one, by what is in them."""
        skipped = () if by_itself else [k for k, v in table.items() if type(v) not in PLAIN and is_plain(v)]
        self._table(table).note_all(frozenset(skipped), self._lifetime)

    def add_library(self, table: dict[Any, Any]) -> None:
        """A namespace or a class of torch's, which holds no tensors; what was noted of it once serves all programs."""
        noted = _LIBRARIES.get(id(table))
        if noted is None or noted.version != dict_version(table):
            noted = _LIBRARIES[id(table)] = _Table(table)
            noted.items = dict(table)
            noted.keys = list(noted.items)
        self._tables[id(table)] = noted  # in place of the names in it that the program reads by itself

    def _table(self, table: dict[Any, Any]) -> _Table:
        return self._tables.setdefault(id(table), _Table(table))

    def add_sequence(self, owner: Any) -> None:
        """A list, deque or set, item by item; whatever methods a subclass has, none of them is called."""
        noting = note if is_a(owner, (list, collections.deque)) else _note_held
        base = next(base for base in type(owner).__mro__ if base in _ITERABLE)
        iterate: Callable[[Any], Iterator[Any]] = vars(base)["__iter__"]
        items = tuple([noting(item, self._lifetime) for item in iterate(owner)])
        self._sequences.append((self._lifetime.hold(owner), iterate, items))

    def add_object(self, owner: Any) -> None:
        """An object of a class of Python's: its class and its attributes."""
        slots = slots_of(owner)
        self._lifetime.hold(type(owner))
        self._objects.append(self._lifetime.hold(owner))
        if has_attributes(type(owner)):
            self.add_table(attributes_of(owner))
        if slots or has_slots(type(owner)):
            self._others.append((self._lifetime.hold(owner), slots_of, self._noted(slots)))

    def add_other(self, owner: Any, kind: Kind) -> None:
        """Anything else that can be read."""
        items = {key: _note_held(value, self._lifetime) for key, value in kind.read(owner).items()}
        self._others.append((self._lifetime.hold(owner), kind.read, items))

    def add_holder(self, owner: Any, kind: Kind) -> None:
        """An object, as one of the kinds that it is of."""
        match kind.compared:
            case "table":
                self.add_table(owner)
                if (
                    is_a(owner, collections.OrderedDict) and len(owner) > 1
                ):  # which does not count a new order as a change
                    self.add_sequence(owner)
            case "object":
                self.add_object(owner)
            case "sequence":
                self.add_sequence(owner)
            case "as read" | "numbers":
                self.add_other(owner, kind)

    def add_function(self, function: types.FunctionType) -> None:
        """Code, defaults and attributes of a function."""
        if is_plain(function.__defaults__) and is_plain(function.__kwdefaults__):
            self._functions.append(self._lifetime.hold(function))
            if function.__kwdefaults__:
                self.add_table(function.__kwdefaults__, by_itself=True)
        else:
            self._others.append((self._lifetime.hold(function), _parts_in_code, self._noted(_parts_in_code(function))))
        if vars(function):
            self.add_table(vars(function), by_itself=True)
        else:
            self._empty.append(vars(function))

    def _noted(self, items: dict[Any, Any]) -> dict[Any, Any]:
        return {key: note(value, self._lifetime) for key, value in items.items()}

    def add_class(self, kind: type) -> None:
        """What a class itself defines."""
        if id(kind) in self._classes or id(kind) in self._loose:
            return
        if found_where_it_says(kind):
            self._classes[id(kind)] = kind
            self.add_table(class_dict(kind), by_itself=True)
        else:
            self._loose[id(kind)] = _LooseClass(kind, self._lifetime)

    def add_hooks(self, tables: Iterable[dict[Any, Any]]) -> None:
        """Dicts of functions that are called in order; nearly always there are none."""
        for table in tables:
            if table:
                self.add_table(table, by_itself=True)
                self.add_sequence(table)  # a new order does not count as a change of an OrderedDict
            else:
                self._empty.append(table)

    def add_bare(self, tensor: Tensor) -> None:
        """A tensor without attributes."""
        self._empty.append(vars(tensor))

    def add_identity(self, read: Callable[[], Any], value: Any) -> None:
        """A place in which there must be the very same object."""
        self._identities.append((read, value))

    def add_same(self, one: Callable[[], Any], other: Callable[[], Any]) -> None:
        """Two places that held the same tensor."""
        self._same.append((one, other))

    def add_setting(self, read: Callable[[], Any], value: Any) -> None:
        """Something of torch's that is asked for by a call."""
        self._settings.append((read, value))

    def add_variables(self, names: Set[str]) -> None:
        """Environment variables of these names; `os.environ` holds them in a dict, encoded."""
        table = vars(os.environ)["_data"]
        keys = {os.environ.encodekey(name) for name in names}
        for key in keys & table.keys():
            self.add_item(table, key, table[key])
        self.add_absent(table, frozenset(keys - table.keys()))

    def add_seed(self, generator: Generator) -> None:
        """What a random generator was seeded with."""
        find = self._lifetime.hold(generator)

        def initial_seed() -> int:
            return int(find().initial_seed())

        self.add_setting(initial_seed, initial_seed())

    def add_settings(self, names: Set[str], namespaces: Iterable[types.ModuleType]) -> None:
        """Settings of torch that a program may ask for by these names: functions and properties with plain values."""
        for name in sorted(names):
            if name.startswith(("is_", "are_", "get_")) or name.endswith("_enabled"):
                for module in settings_modules():
                    self._add_if_plain(vars(module).get(name))
        for setting in (*settings_that_are_read(names), *properties_named(names, namespaces)):
            self._add_if_plain(setting.read)

    def _add_if_plain(self, read: Any) -> None:
        try:
            value = read()
        except (TypeError, RuntimeError, AssertionError, AttributeError):  # takes arguments, or asks a device not here
            return
        if is_plain(value):
            self.add_setting(read, value)

    def finish(self) -> bool:
        """Everything was added; gives whether there is anything to compare."""
        self._dicts = [table.table for table in self._tables.values()]
        self._versions = [table.version for table in self._tables.values()]
        objects = list(map(_find, self._objects))
        self._types = list(map(id, map(type, objects)))
        self._attributes = list(map(_attributes, objects))
        self._made_of = [part for function in map(_find, self._functions) for part in _made_of(function)]
        self._derived = list(map(_derived, self._classes.values()))
        held = (self._objects, self._loose, self._sequences, self._others)
        self._holds_more = any((*held, self._settings, self._identities, self._same))
        self.holds = self._comparison()
        return bool(self._dicts or self._functions or self._empty or self._holds_more)

    # ------------------------------------------------------------------------------------------- comparing
    def _comparison(self) -> Callable[[], bool]:
        """What every call asks: whether everything is as it was."""
        dicts, versions, empty = self._dicts, self._versions, self._empty
        functions, made_of, holds_more = self._functions, self._made_of, self._holds_more
        classes, derived, lifetime = list(self._classes.values()), self._derived, self._lifetime

        def holds() -> bool:
            if lifetime.is_gone:
                return False
            if list(map(dict_version, dicts)) != versions and not self._look_at_tables():
                return False
            if any(empty):
                return False
            if functions:  # by identity: defaults that are equal may be of another type
                parts = chain.from_iterable(map(_made_of, map(_find, functions)))
                if not all(map(operator.is_, parts, made_of)):
                    return False
            if classes and list(map(_derived, classes)) != derived:
                return False
            return not holds_more or self._others_hold()

        holds.explain = self.explain  # type: ignore[attr-defined]
        return holds

    def _others_hold(self) -> bool:
        objects = list(map(_find, self._objects))
        if list(map(id, map(type, objects))) != self._types:
            return False
        if not all(map(operator.is_, map(_attributes, objects), self._attributes)):
            return False
        if not all(kind.holds() for kind in self._loose.values()):
            return False
        for find, iterate, before in self._sequences:
            now = list(iterate(find()))
            if len(now) != len(before) or not all(map(still, now, before)):
                return False
        for find, read, items in self._others:
            if not _same_items(read(find()), items):
                return False
        if not all(read() is value for read, value in self._identities):
            return False
        if self._same and not all(one() is other() for one, other in self._same):
            return False
        return all(is_unchanged(ask(), answer) for ask, answer in self._settings)

    def explain(self) -> Change | None:
        """The first thing that is not as it was, by the same comparisons."""
        return next(self._changes(), None)

    def _changes(self) -> Iterator[Change]:
        if self._lifetime.is_gone:
            yield Change("an object that the program depends on", "there", "gone")
        for table in self._tables.values():
            yield from table.changes()
        for found in self._empty:
            yield from (Change(_key(key, False), "absent", shown(value), found) for key, value in found.items())
        for i, find in enumerate(self._functions):
            parts = zip(_MADE_OF, _made_of(find()), self._made_of[3 * i : 3 * i + 3], strict=True)
            yield from (
                Change(f".{name}", shown(was), shown(now), find()) for name, now, was in parts if now is not was
            )
        for kind, (bases, *was) in zip(self._classes.values(), self._derived, strict=True):
            if _derived(kind) != (bases, *was):
                yield Change(", what it is derived from,", str(bases), str(kind.__mro__), kind)
        yield from self._other_changes()

    def _other_changes(self) -> Iterator[Change]:
        for find, before, attributes in zip(self._objects, self._types, self._attributes, strict=True):
            if id(type(find())) != before:
                yield Change(", its class,", "another one", shown(type(find())), find())
            elif _attributes(find()) is not attributes:
                yield Change(".__dict__", "another dict", "a dict", find())
        yield from (loose.change() for loose in self._loose.values() if not loose.holds())
        for find, iterate, noted in self._sequences:
            now = dict(enumerate(iterate(find())))
            change = change_in_items(now, dict(enumerate(noted)), find())
            yield from () if change is None else (change,)
        for find, read, items in self._others:
            change = change_in_items(read(find()), items, find(), has_slots(type(find())))
            yield from () if change is None else (change,)
        for look, value in self._identities:
            if look() is not value:
                yield Change(place_of(look), "another object", shown(look()))
        for one, other in self._same:
            if one() is not other():
                yield Change(place_of(other), f"the tensor of {place_of(one)}", "another one")
        for ask, answer in self._settings:
            if not is_unchanged(ask(), answer):
                yield Change(place_of(ask), shown(answer), shown(ask()))

    def _look_at_tables(self) -> bool:
        """Look into the dicts whose version has changed; those that hold the same are not looked at again."""
        for i, table in enumerate(list(self._tables.values())):
            version = dict_version(table.table)  # first: what another thread changes from now on shows
            if version != self._versions[i]:
                if not table.holds():
                    return False
                self._versions[i] = version
        return True


_MADE_OF = ("__code__", "__defaults__", "__kwdefaults__")
_ITERABLE = frozenset({list, collections.deque, set, frozenset, collections.OrderedDict, dict})
_find = operator.call
_made_of = operator.attrgetter(*_MADE_OF)
_derived = operator.attrgetter("__mro__", "__qualname__", "__name__")  # no dict tells when these are assigned


def _parts_in_code(function: types.FunctionType) -> dict[Any, Any]:
    """What a function is made of, where its defaults hold objects."""
    return {"": function.__code__, "()": function.__defaults__, **(function.__kwdefaults__ or {})}


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

    def note_all(self, without: frozenset[Any], lifetime: Lifetime) -> None:
        items = _copied(self.table)
        self.keys = list(items)
        self.items.update((key, note(value, lifetime)) for key, value in items.items() if key not in without)

    def holds(self, table: dict[Any, Any] | None = None) -> bool:
        now = _copied(self.table if table is None else table)
        if self.keys is not None and not (len(now) == len(self.keys) and all(map(is_unchanged, now, self.keys))):
            return False
        if not self.absent.isdisjoint(now):
            return False
        return all(still(now.get(key, ABSENT), before) for key, before in self.items.items())

    def changes(self, table: dict[Any, Any] | None = None, owner: Any = None) -> Iterator[Change]:
        """What is not as it was."""
        now, owner = _copied(self.table if table is None else table), self.table if owner is None else owner
        for key, before in self.items.items():
            if not still(now.get(key, ABSENT), before):
                yield change_in(_key(key, False), now.get(key, ABSENT), before, owner)
        for key in self.absent & now.keys():
            yield Change(_key(key, False), "absent", shown(now[key]), owner)
        if self.keys is not None and not (len(now) == len(self.keys) and all(map(is_unchanged, now, self.keys))):
            yield Change(", its keys,", shown([*self.keys]), shown([*now]), owner)


def place_of(read: Callable[[], Any]) -> str:
    """What reads a place, in the user's words."""
    if isinstance(read, functools.partial):
        owner, key = read.args
        name = getattr(owner, "__name__", "") if isinstance(owner, types.ModuleType) else f"a {type(owner).__name__}"
        return f"{name}{_key(key, read.func is getattr)}"
    source = getattr(read, "__self__", None)
    if isinstance(source, Source):
        return source.path
    return f"{getattr(read, '__module__', '')}.{getattr(read, '__name__', '')}()"


class _LooseClass:
    """A class that no Python module holds, made for one object perhaps: its dict would keep it alive, and so is
    looked up at each call."""

    __slots__ = ("_derived", "_find", "_noted", "_version")

    def __init__(self, kind: type, lifetime: Lifetime) -> None:
        self._find = lifetime.hold(kind)
        self._derived = _made_derived(kind)
        for base in kind.__mro__:
            lifetime.hold(base)
        self._noted = _Table(class_dict(kind))
        self._version = self._noted.version
        self._noted.note_all(frozenset(), lifetime)
        self._noted.table = {}

    def change(self) -> Change:
        """What is not as it was."""
        kind = self._find()
        derived = Change(", what it is derived from,", "other classes", shown(kind), kind)
        return next(self._noted.changes(class_dict(kind), kind), derived)

    def holds(self) -> bool:
        kind = self._find()
        if _made_derived(kind) != self._derived:
            return False
        table = class_dict(kind)
        version = dict_version(table)
        if version == self._version:
            return True
        if not self._noted.holds(table):
            return False
        self._version = version
        return True


def _made_derived(kind: type) -> tuple[str, str, list[int]]:
    """What a class is derived from, by ids."""
    return kind.__qualname__, kind.__name__, [*map(id, kind.__mro__)]
