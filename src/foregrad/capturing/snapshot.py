"""What a recording did to the user's Python objects: find it, undo it, and refuse what a compiled call cannot repeat.

Everything that holds state around the program is noted before it runs and compared afterwards. What the program put
there, if it holds tensors, is put there by each call (`Escape`). Any other change is refused: a compiled call would not
make it again. Whatever comes of a recording, its changes are undone: no recording starts from what another one left.
"""

from __future__ import annotations

import collections
import dis
import functools
import gc
import operator
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._torch import dict_version
from ..codegen.pytree import Leaf, flatten, unflatten
from ..errors import AssignedAttributeError, EscapeError, StateChangeError, UnsupportedError
from ..joint.hooks import HookAdded, HookEffect
from ..joint.side_effects import Escape
from ..record.fakify import MARKS
from ..record.session import RunAgain, Session
from ..record.survivors import Survivor, held_by_frames, origin_of, suspects
from ..values import PLAIN, is_plain, is_unchanged, same_value
from . import kinds
from .draws import Draws, global_generators, kind_of_generator, state_of
from .free_variables import FreeVariables, Holder, Reached
from .kinds import (
    CacheBefore,
    Items,
    Kind,
    attributes_of,
    class_dict,
    has_attributes,
    has_slots,
    is_a,
    kinds_of,
    own_attributes,
    restore_dict,
)
from .module_guards import ModuleParts
from .sources import Source

_ABSENT = object()
_MOST_OBJECTS = 10_000  # that are looked at, to say what a change was about
_LEADING_ELSEWHERE = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module)


class _Global(NamedTuple):
    """A global variable that the program assigns."""

    namespace: dict[str, Any]
    name: str


def _restore_global(owner: _Global, items: Items) -> None:
    owner.namespace.pop(owner.name, None)
    owner.namespace.update(items)


def _is_mark(name: Any) -> bool:
    """Whether an attribute of a tensor is none of the user's."""
    return str(name).startswith(MARKS)


def _read_marked(owner: dict[Any, Any]) -> Items:
    return {key: value for key, value in owner.items() if not _is_mark(key)}


def _restore_marked(owner: dict[Any, Any], items: Items) -> None:
    restore_dict(owner, {**items, **{key: value for key, value in owner.items() if _is_mark(key)}})


_MODULE = Kind("module", dict, restore_dict, dict.__setitem__, is_attribute=True)
_MODULE_CLASS = Kind(  # which parametrizations and lazy modules exchange
    "class of a module",
    lambda owner: {"__class__": type(owner)},
    lambda owner, items: object.__setattr__(owner, "__class__", items["__class__"]),
    is_attribute=True,
)
_GLOBAL = Kind(
    "variable",
    lambda owner: {owner.name: owner.namespace[owner.name]} if owner.name in owner.namespace else {},
    _restore_global,
    lambda owner, key, value: owner.namespace.__setitem__(key, value),
)

# No call repeats this: another tensor may be there by then.
_TENSOR = Kind("tensor", _read_marked, _restore_marked, is_attribute=True)

# How one more item comes into an object where it gets no key of its own.
_ADDING: dict[Kind, Callable[[Any, Any, Any], None]] = {
    kinds.LIST: lambda owner, key, value: list.append(owner, value),
    kinds.DEQUE: lambda owner, key, value: collections.deque.append(owner, value),
    kinds.SET: lambda owner, key, value: set.add(owner, value),
}


_NUMBERED = (kinds.LIST, kinds.DEQUE)  # whose keys are positions


def _table_behind(owner: Any, kind: Kind) -> dict[Any, Any] | None:
    """The dict whose version tells whether anything has changed, if there is one."""
    if kind is kinds.NAMESPACE:
        return vars(owner)
    if kind is kinds.CLASS:
        return class_dict(owner)
    if kind is kinds.FUNCTION:
        return vars(owner)
    if kind is kinds.OBJECT and not has_slots(type(owner)) and has_attributes(type(owner)):
        return attributes_of(owner)
    return owner if type(owner) is dict else None  # the order of others may change alone


# What is read of an object beside the dict behind it.
_BESIDE_TABLE: dict[Kind, Callable[[Any], tuple[Any, ...]]] = {
    kinds.FUNCTION: operator.attrgetter("__code__", "__defaults__", "__kwdefaults__"),
    kinds.OBJECT: lambda owner: (type(owner), attributes_of(owner)),
}


def _is_pythons(key: Any, value: Any) -> bool:
    """Whether Python has put something there by itself: warnings that were given, or a module that was imported."""
    return key == "__warningregistry__" or is_a(value, types.ModuleType)


class ObjectSnapshot:
    """An object of the user's that holds values, as it was; the version of a table tells whether it still is."""

    __slots__ = ("_beside", "_read_beside", "_version", "before", "in_argument", "kind", "name", "owner", "table")

    def __init__(self, holder: Holder, before: Items | None = None) -> None:
        self.name, self.owner, self.kind, self.in_argument = holder
        self.table = _table_behind(self.owner, self.kind)
        if self.table is not None:
            self._version = dict_version(self.table)
            self._read_beside = _BESIDE_TABLE.get(self.kind)
            self._beside = () if self._read_beside is None else self._read_beside(self.owner)
        self.before = self.kind.read(self.owner) if before is None else before

    @property
    def is_untouched(self) -> bool:
        """Whether it holds the very same objects in the same order, as far as can be told with little effort."""
        if self.table is not None and self._version == dict_version(self.table):
            return self._read_beside is None or all(map(operator.is_, self._read_beside(self.owner), self._beside))
        now, before = self.kind.read(self.owner), self.before
        if self.kind in kinds.RANDOM_KINDS:
            return now == before
        if len(now) != len(before) or not all(map(operator.is_, now.values(), before.values())):
            return False
        return self.kind in _NUMBERED or all(map(operator.is_, now, before))

    def path(self, key: Any) -> str:
        """An item in the user's words."""
        return self.name if self.kind in (_GLOBAL, kinds.CELL) else self.kind.path(self.name, key)

    def changed(self) -> list[Any]:
        """Keys whose value is another one than before, of a new one, or of one that is gone."""
        now, before = self.kind.read(self.owner), self.before
        if self.dropped:
            return [*now][len(now) - self.dropped :]
        both = {key: (now.get(key, _ABSENT), before.get(key, _ABSENT)) for key in {**before, **now}}
        same = operator.eq if self.kind in kinds.RANDOM_KINDS else is_unchanged
        changed = [key for key, (value, old) in both.items() if not same(value, old) and not _is_pythons(key, value)]
        return changed if changed or self.keeps_order() else [*now]

    @property
    def dropped(self) -> int:
        """How many items a full deque has dropped for as many that came in at its end."""
        if self.kind is not kinds.DEQUE or not len(self.before) == len(self.owner) == self.owner.maxlen:
            return 0
        now, before = [*self.owner], [*self.before.values()]
        shifts = range(1, len(now) + 1)
        return next((k for k in shifts if all(map(operator.is_, now[: len(now) - k], before[k:]))), 0)

    @property
    def holds_the_same(self) -> bool:
        """Whether it holds the very same objects: an equal number in the place of another is none of the user's.

        What is computed when it is read is no object of the user's.
        """
        if self.kind in kinds.RANDOM_KINDS or self.kind.compared == "numbers":
            return True
        now, before = self.kind.read(self.owner), self.before
        items = [key for key in {**before, **now} if not _is_pythons(key, now.get(key))]
        return all(now.get(key, _ABSENT) is before.get(key, _ABSENT) for key in items) and self.keeps_order()

    def keeps_order(self) -> bool:
        """Whether what was there still is, in the same order, and what is new follows it."""
        now = self.kind.read(self.owner)
        return self.kind is kinds.SET or [*now][: len(self.before)] == [*self.before]

    def value(self, key: Any) -> Any:
        """What is there now."""
        return self.kind.read(self.owner).get(key, _ABSENT)

    @property
    def holders(self) -> set[int]:
        """The ids of what holds the values, as the garbage collector sees it: the object, or a dict behind it."""
        owner = self.owner.namespace if isinstance(self.owner, _Global) else self.owner
        inside = gc.get_referents(owner.__dict__) if isinstance(owner, type) else [getattr(owner, "__dict__", None)]
        return {id(owner), *map(id, inside)}

    def restore(self) -> None:
        """Make it hold again what it held."""
        if self.kind.restore is not None:
            self.kind.restore(self.owner, self.before)


@dataclass(frozen=True, slots=True)
class Change:
    """One item of the user's that the recording changed."""

    noted: ObjectSnapshot
    key: Any

    @property
    def path(self) -> str:
        return self.noted.path(self.key)

    @property
    def value(self) -> Any:
        return self.noted.value(self.key)

    @property
    def before(self) -> Any:
        """What was there before."""
        return self.noted.before.get(self.key, _ABSENT)

    def is_of(self, owners: Set[int]) -> bool:
        """Whether it is about one of some objects, by their ids: it was exchanged, or something in it has changed."""
        return id(self.before) in owners or id(self.noted.owner) in owners

    def escape(self, session: Session) -> Escape | None:
        """What a compiled call does to make the same change, if it can."""
        noted, key, put = self.noted, self.key, self._put
        if put is None:
            return None
        value = self.value
        if isinstance(value, Tensor) or (value is None and isinstance(noted.before.get(key), Tensor)):
            made_here = _is_new_parameter(value, session)
            return None if made_here else Escape(noted.owner, put, key, (self.path,), (value,))
        del value
        if not _can_be_made_again(noted.kind.read(noted.owner).pop(key)):
            return None
        flat = flatten(self.value, self.path)
        # A plain value where there was none is worked out once and kept, and one that is appended to a list is appended
        # by each call, which finds the list as the recording found it. Any other change would come with every call.
        kept = noted.kind is kinds.LIST if self._is_added else noted.before.get(key) is None
        if not kept and not any(map(session.engine.is_abstract, flat.leaves)):
            return None
        build = None if isinstance(flat.tree, Leaf) else partial(unflatten, flat.tree)
        return Escape(noted.owner, put, key, tuple(flat.paths), tuple(flat.leaves), build)

    @property
    def _is_added(self) -> bool:
        """Whether it is one more item, in an object whose items have no keys of their own."""
        noted = self.noted
        return (self.key not in noted.before or noted.dropped > 0) and noted.kind in _ADDING

    @property
    def _put(self) -> Callable[[Any, Any, Any], None] | None:
        """How a call puts a value there; None where it would find another object, key or order."""
        noted, key = self.noted, self.key
        if self.value is _ABSENT or noted.in_argument or not noted.keeps_order():
            return None
        if self._is_added:
            return _ADDING[noted.kind]
        if key in noted.before:
            return noted.kind.put
        # A context variable, once set, cannot be made unset again.
        return noted.kind.put if noted.kind is not kinds.VARIABLE and _is_the_same_key(key) else None


class Refused(NamedTuple):
    """A change that a compiled call would not make again."""

    path: str
    error: Exception
    in_argument: bool = False  # of an object in an argument


def _is_the_same_key(key: Any) -> bool:
    """Whether each call would use this key: one that the program has made would be another one."""
    if is_plain(key):
        return True
    if type(key) is tuple:
        return all(map(_is_the_same_key, key))
    return gc.is_tracked(key) and not any(found is key for young in (0, 1) for found in gc.get_objects(young))


def _is_new_parameter(value: Tensor | None, session: Session) -> bool:
    """A parameter that the program made is not assigned by calls: the module would be another one from then on."""
    return isinstance(value, nn.Parameter) and session.engine.is_abstract(value)


def _can_be_made_again(value: Any) -> bool:
    """Whether a value is plain, or consists of new lists, dicts and tuples of tensors and plain values.

    One that something else holds, too, would be another one there after each call.
    """
    pending = [value]
    del value
    while pending:
        part = pending.pop()
        if type(part) in (list, dict) and sys.getrefcount(part) > 3:  # its holder, this function, the count
            return False
        if type(part) is dict:
            pending.extend(dict.values(part))
        elif type(part) in (list, tuple):
            pending.extend(part)
        elif type(part) not in PLAIN and not isinstance(part, Tensor):
            return False
    return True


class Snapshot:
    """The user's objects around a program, before it is recorded."""

    def __init__(self, reached: Reached) -> None:
        self._modules: list[tuple[ModuleParts, bool]] = []
        self._classes: list[tuple[type, ModuleParts, bool]] = []
        self._tables: list[tuple[ModuleParts, str, dict[Any, Any], int, dict[Any, Any], bool]] = []
        self._noted: list[ObjectSnapshot] = []
        self._bare: list[tuple[str, Tensor]] = []
        self._caches: list[CacheBefore] = []
        self._known: set[Any] = set()  # ids of modules and tensors, and of holders with their kinds
        self._performed: dict[tuple[int, Any], int] = {}  # ids of the values that calls put there
        self._drawn: dict[int, Any] = {}  # where the draws of calls lead, by ids of generators
        self.add(reached)

    def add(self, reached: Reached) -> None:
        """Note what is not known yet, each object once, by whatever name."""
        known = self._known
        tables = ((reached.modules, False), (reached.modules_in_arguments, True))
        modules = [(parts, given) for found, given in tables for parts in found if id(parts.module) not in known]
        self._modules += modules
        self._classes += [(type(parts.module), parts, in_argument) for parts, in_argument in modules]
        self._tables += [  # the dicts that modules are made of are many: no more is done than to copy them
            (parts, name, table, dict_version(table), dict(table), in_argument)
            for parts, in_argument in modules
            for name, table, _ in parts.filled
        ]
        found = {(id(holder.owner), holder.kind.name): holder for holder in _holders(reached, modules)}
        holders = {key: holder for key, holder in found.items() if key not in known} if known else found
        self._noted += [ObjectSnapshot(holder) for holder in holders.values()]
        tensors = [(path, tensor) for path, tensor in reached.tensors if id(tensor) not in known]
        self._bare += [(path, tensor) for path, tensor in tensors if not vars(tensor)]  # most are
        self._caches += [CacheBefore(owner) for _, owner, kind, _ in reached.holders if kind is kinds.CACHE]
        known.update(id(parts.module) for parts, _ in modules)
        known.update(holders)
        known.update(id(tensor) for _, tensor in tensors)

    def changes(self) -> list[Change]:
        """Everything that is not what it was, but for containers that were exchanged for others like them."""
        return self._without_renewed(_changes_in(self._perhaps_changed()))

    def _without_renewed(self, found: list[Change]) -> list[Change]:
        renewed = {id(change.before) for change in found if self._is_renewed(change)}
        return [change for change in found if not renewed or not change.is_of(renewed)]

    def _is_renewed(self, change: Change) -> bool:
        """Whether a list or dict, which nothing else holds, was exchanged for one that holds what it has held."""
        before, now = change.before, change.value
        if type(before) is not type(now) or not isinstance(before, (dict, list)):
            return False
        noted = [known for known in self._noted if known.owner is before]
        held = [value for known in self._noted for value in known.before.values() if value is before]
        return bool(noted) and len(held) == 1 and all(_holds_as_much(now, known) for known in noted)

    def _perhaps_changed(self) -> list[ObjectSnapshot]:
        perhaps: list[ObjectSnapshot] = []  # attributes of modules first: what is in them has longer names
        for parts, name, table, version, before, in_argument in self._tables:
            if version != dict_version(table) or type(table) is not dict:  # the order of others may change alone
                perhaps.append(ObjectSnapshot(Holder(_join(parts.path, name), table, _MODULE, in_argument), before))
        perhaps += [noted for noted in self._noted if not noted.is_untouched]
        for was, parts, in_argument in self._classes:
            if type(parts.module) is not was:
                holder = Holder(parts.path, parts.module, _MODULE_CLASS, in_argument)
                perhaps.append(ObjectSnapshot(holder, {"__class__": was}))
        for parts, _ in self._modules:
            if any(parts.empty):
                for filled in [container for container in parts.empty if container]:
                    kind = kinds.SET if isinstance(filled, set) else _MODULE
                    perhaps.append(ObjectSnapshot(Holder(_join(parts.path, parts.name_of(filled)), filled, kind), {}))
        perhaps += [ObjectSnapshot(Holder(path, vars(t), _TENSOR), {}) for path, t in self._bare if vars(t)]
        return perhaps

    def assigned(self, session: Session, changes: Sequence[Change]) -> list[Escape]:
        """What a compiled call puts into the user's objects, as the program did."""
        self._performed = {}
        escapes = []
        for change in changes:
            escape = change.escape(session)
            if escape is not None:
                self._performed[id(change.noted.owner), change.key] = id(change.value)
                escapes.append(escape)
        return escapes

    def survivors(
        self, session: Session, error: Exception | None = None, again: RunAgain | None = None
    ) -> list[Survivor]:
        """Tensors that are held by something that was not noted, and not by the recording or by its error.

        Where the program was run once more, only what it made then is looked at.
        """
        if session.beginning is None:
            return []
        changes = _changes_in(self._perhaps_changed())
        made = session if again is None else again
        found = session.beginning.survivors(
            lambda: [
                tensor
                for tensor in suspects(made, chain((change.value for change in changes), held_by_frames(error)))
                if again is None or again.made(tensor)
            ]
        )
        known = Counter((holder, id(change.value)) for change in changes for holder in change.noted.holders)
        return [survivor for survivor in found if _references(survivor) > known[id(survivor.holder), survivor.held]]

    def leave_draws_to_calls(self, draws: Draws) -> None:
        """Calls draw from generators that are where the draws of the recording lead."""
        moved = [noted.owner for noted in self._noted if noted.kind in kinds.RANDOM_KINDS and noted.changed()]
        self._drawn = {id(owner): state_of(owner) for owner in moved if draws.explain(owner)}

    def refused(self, session: Session, changes: Sequence[Change]) -> Refused | None:
        """What a compiled call would not repeat of what has changed, if there is anything."""
        for change in changes:
            owner = id(change.noted.owner)
            if owner in self._drawn and same_value(change.value, self._drawn[owner]):
                continue
            if self._performed.get((id(change.noted.owner), change.key)) != id(change.value):
                return Refused(change.path, _refusal(change, session), change.noted.in_argument)
        return None

    def undo(self, session: Session) -> Exception | None:
        """Put back what the recording changed; gives the error for what a compiled call would not repeat."""
        perhaps = self._perhaps_changed()
        refused = self.refused(session, self._without_renewed(_changes_in(perhaps)))
        for noted in perhaps:
            if noted.changed() or not noted.holds_the_same:
                noted.restore()
        if refused is None:
            return None
        self.forget_calls()
        return refused.error

    def forget_calls(self) -> None:
        """Take out of caches what the recording has put there."""
        for cache in self._caches:
            cache.forget_later_calls()

    def has_forgotten(self, survivor: Survivor) -> bool:
        """Whether a cache holds a tensor that it does not give to anybody any more."""
        return any(cache.of is survivor.holder for cache in self._caches)


def _changes_in(perhaps: Iterable[ObjectSnapshot]) -> list[Change]:
    return [Change(noted, key) for noted in perhaps for key in noted.changed()]


def _holds_as_much(value: Any, noted: ObjectSnapshot) -> bool:
    """Whether a container holds what another one has held."""
    now, before = noted.kind.read(value), noted.before
    return [*now] == [*before] and all(map(is_unchanged, now.values(), before.values()))


def _references(survivor: Survivor) -> int:
    """How many references a holder has to what leads it to a tensor."""
    return sum(id(item) == survivor.held for item in gc.get_referents(survivor.holder))


def _holders(reached: Reached, modules: Sequence[tuple[ModuleParts, bool]]) -> Iterator[Holder]:
    """Everything around a program that holds state which it can change, but for the dicts of modules."""
    for parts, in_argument in modules:
        for name, container in parts.containers:
            for kind in kinds_of(container) or ():
                yield Holder(_join(parts.path, name), container, kind, in_argument)
    yield from (holder for holder in reached.holders if holder.kind.restore is not None)
    for path, tensor in reached.tensors:
        if vars(tensor) and own_attributes(tensor) is not None:
            yield Holder(path, vars(tensor), _TENSOR)
    for path, namespace, name in reached.stored_globals:
        yield Holder(path, _Global(namespace, name), _GLOBAL)
    yield from (Holder(name, owner, kind_of_generator(owner)) for name, owner in global_generators())


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _refusal(change: Change, session: Session) -> Exception:
    name = change.path
    escaped = find_abstract(change.value, session)
    if escaped is None and change.noted.kind in kinds.RANDOM_KINDS:
        return StateChangeError(
            f"the program draws from {change.noted.name}: a compiled call would not draw again. Draw with torch, pass "
            "the number as an argument, or compile with fallback='eager'."
        )
    if escaped is None:
        return StateChangeError(
            f"the program changes {name}: a compiled call would not change it again. Keep a count in a buffer, return "
            "the new value, change it outside the program, or compile with fallback='eager'."
        )
    if change.noted.kind is _MODULE:
        return UnsupportedError(
            f"the program puts a tensor into {name}, in a way that cannot be compiled yet. Assign the tensor "
            "itself to an attribute, return it instead, or compile with fallback='eager'."
        )
    return EscapeError(
        f"A tensor of the program escapes into {name}; it was made at {origin_of(escaped, session)}. While the "
        "program is recorded its tensors have no data: return the tensor instead, or compile with fallback='eager'."
    )


def assigned_buffers(escapes: Sequence[Escape], buffers: Iterable[Source]) -> list[Escape]:
    """An exported graph returns the new values of buffers; a tensor in any other place would be lost (X-12)."""
    known = {(id(source.owner), source.key) for source in buffers}
    kept = [e for e in escapes if e.leaves != (None,) and (id(e.owner), e.key) in known]
    others = [(path, leaf) for e in escapes if e not in kept for path, leaf in zip(e.paths, e.leaves, strict=True)]
    lost = [f"self.{path.removeprefix('_export_root.')}" for path, leaf in others if isinstance(leaf, Tensor | None)]
    if lost:
        one = len(lost) == 1
        raise AssignedAttributeError(
            f"The tensor attribute{'' if one else 's'} {', '.join(lost)} {'was' if one else 'were'} assigned during "
            f"export: the graph would lose {'it' if one else 'them'}. Register {'it' if one else 'them'} with "
            "register_buffer, or return the value."
        )
    return kept


def find_abstract(value: Any, session: Session) -> Tensor | None:
    """A recorded tensor that a value leads to."""
    pending, seen = [value], {id(value)}
    while pending and len(seen) < _MOST_OBJECTS:
        held = pending.pop()
        if isinstance(held, Tensor) and session.engine.is_abstract(held):
            return held
        inside = [] if isinstance(held, _LEADING_ELSEWHERE) else gc.get_referents(held)
        pending += [item for item in inside if id(item) not in seen]
        seen.update(map(id, inside))
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Hooks that live on after the call must not depend on Python objects of the recording.
def refuse_private_state(effects: Iterable[HookEffect], free_variables: FreeVariables, session: Session) -> None:
    """Refuse hooks that change or hold what each run of the program makes anew, other than tensors."""
    for effect in effects:
        if isinstance(effect, HookAdded):
            _check(effect.hook, effect, free_variables, session, set())


def _check(value: Any, effect: HookAdded, around: FreeVariables, session: Session, seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    reason = _private_state(value, around, session)
    if reason is not None:
        raise UnsupportedError(
            f"the program gives {effect.of} a hook that {reason}: this cannot be compiled yet. Register it outside the "
            "program, or compile with fallback='eager'."
        )
    for part in _parts_of_hook(value):
        _check(part, effect, around, session, seen)


def _private_state(value: Any, around: FreeVariables, session: Session) -> str | None:
    """What of an object each run of the program makes anew, and the hook would share with later calls."""
    if isinstance(value, types.FunctionType):
        known = {id(cell) for _, cell in around.cells}
        variables = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        own = [name for name, cell in variables if id(cell) not in known]
        assigned = [name for name in own if name in _assigned(value.__code__)]
        return f"assigns {assigned[-1]}, a variable of the program" if assigned else None
    if isinstance(value, (functools.partial, types.MethodType, nn.Module)):
        return None
    if isinstance(value, (list, dict, set, bytearray)):
        known = {id(holder.owner) for holder in around.holders}
        return None if id(value) in known else f"holds a {type(value).__name__} of the program"
    if find_abstract(getattr(value, "__dict__", None), session) is not None:
        return f"holds a {type(value).__name__} with tensors of the program"
    return None


def _parts_of_hook(value: Any) -> list[Any]:
    """What a hook consists of."""
    if isinstance(value, types.FunctionType):
        variables = [cell.cell_contents for cell in value.__closure__ or ()]
        return [*variables, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    return list(value) if type(value) is tuple else []


@functools.cache
def _assigned(code: types.CodeType) -> frozenset[str]:
    """Variables of enclosing functions that a function, or one inside it, assigns."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _assigned(constant) & set(constant.co_freevars)
    return frozenset(found & set(code.co_freevars))
