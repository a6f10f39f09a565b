"""Objects of Python, part by part: what they hold, and how another one is made without running any of their code.

An object holds what its class has from a builtin container, a dict of attributes, and slots. One whose class shows all
of its state in this way can be taken apart and made again: neither `__init__` nor `__setattr__` runs.
"""

from __future__ import annotations

import collections
import enum
import threading
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor, nn

from ..values import PLAIN

OPAQUE_MODULES = (
    *("torch._", "torch.cuda.", "torch.distributed.", "torch.fx.", "torch.jit.", "torch.library.", "torch.utils."),
    *("foregrad.", "typing."),
)
"""Objects of the classes in these are not looked into, on purpose."""


def is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether a value is of a type, whatever it says of itself: to ask an object for its class may run its code."""
    return issubclass(type(value), kind)


# ---------------------------------------------------------------------------------------------------------------------
# What an object holds.
def slot_members(kind: type) -> tuple[tuple[str, Any], ...]:
    """The slots that a class and its bases name, and what reads and sets each."""
    return tuple(
        (name, member)
        for base in kind.__mro__
        for name, member in vars(base).items()
        if type(member) is types.MemberDescriptorType and "__slots__" in vars(base)
    )


def has_attributes(kind: type) -> bool:
    """Whether objects of a type have a dict of attributes."""
    return kind.__dictoffset__ != 0 or issubclass(kind, threading.local)


def attributes_of(owner: Any) -> dict[str, Any]:
    """The dict of an object's attributes, an empty one if it has none; none of its code runs."""
    if not has_attributes(type(owner)):
        return {}
    try:
        found = owner.__dict__ if is_a(owner, threading.local) else object.__getattribute__(owner, "__dict__")
    except AttributeError:  # type variables have a dict, and show it to no one since Python 3.12
        return {}
    return found if type(found) is dict else {}


def filled_slots(members: Iterable[tuple[str, Any]], owner: Any) -> dict[str, Any]:
    """The slots of an object that have a value."""
    found = {}
    for name, member in members:
        try:
            found[name] = member.__get__(owner)
        except AttributeError:
            continue
    return found


def _dict_methods(owner: dict[Any, Any]) -> Any:
    """The class whose methods store plainly, whatever a subclass of the user's does beside that."""
    return collections.OrderedDict if isinstance(owner, collections.OrderedDict) else dict


def read_dict(owner: dict[Any, Any]) -> dict[Any, Any]:
    """What a dict, or an object of a subclass, has stored."""
    return dict(_dict_methods(owner).items(owner))


def put_dict(owner: dict[Any, Any], key: Any, value: Any) -> None:
    """Store one item."""
    _dict_methods(owner).__setitem__(owner, key, value)


def delete_dict(owner: dict[Any, Any], key: Any) -> None:
    """Remove one item."""
    _dict_methods(owner).__delitem__(owner, key)


def restore_dict(owner: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Make a dict hold just these items, in this order."""
    methods = _dict_methods(owner)
    for key in [key for key in methods.keys(owner) if key not in items]:
        methods.__delitem__(owner, key)
    for key, value in items.items():  # another thread that looks at the dict finds nothing missing
        methods.__setitem__(owner, key, value)
    if list(methods.keys(owner)) != list(items):
        methods.clear(owner)
        for key, value in items.items():
            methods.__setitem__(owner, key, value)


def has_lasting_keys(owner: dict[Any, Any]) -> bool:
    """Whether all keys of a dict are the same at each call: plain values, members of enums, classes.

    >>> has_lasting_keys({"a": 1, (2, enum.Enum): 3}), has_lasting_keys({object(): 1})
    (True, False)
    """
    return all(map(_lasts, _dict_methods(owner).keys(owner)))


def _lasts(key: Any) -> bool:
    return all(map(_lasts, key)) if type(key) is tuple else type(key) in PLAIN or is_a(key, (enum.Enum, type))


def hides_state(kind: type, base: type, seen: int) -> bool:
    """Whether instances are larger than what Python can see of them: a class in C keeps something to itself."""
    pointer = object.__basicsize__ // 2
    seen += (kind.__dictoffset__ != 0) + (kind.__weakrefoffset__ > 0)
    return kind is not base and kind.__basicsize__ - base.__basicsize__ > seen * pointer


# ---------------------------------------------------------------------------------------------------------------------
# Classes whose objects can be taken apart.
_BASES: tuple[type, ...] = (
    *(collections.OrderedDict, collections.defaultdict, dict, list, tuple),
    *(types.SimpleNamespace, object),
)
_LEAVES = (type, types.ModuleType, enum.Enum, nn.Module, Tensor, SymInt, SymFloat, SymBool)  # by identity, or numbers
_FACTORY = vars(collections.defaultdict)["default_factory"]


@dataclass(frozen=True, slots=True)
class Shape:
    """How the objects of a class are put together."""

    kind: type
    base: type  # the builtin class that it has its contents from
    has_attributes: bool
    slots: tuple[tuple[str, Any], ...]

    @property
    def is_mapping(self) -> bool:
        """Whether there are items by key in it."""
        return issubclass(self.base, dict)

    @property
    def is_sequence(self) -> bool:
        """Whether there are items in order in it."""
        return self.base is list or self.base is tuple

    def can_open(self, value: Any) -> bool:
        """Whether an object holds nothing that would have to be another one in the place of a key."""
        return not self.is_mapping or has_lasting_keys(value)

    def contents(self, value: Any) -> Any:
        """A plain list or dict of what is in an object beside its attributes; None if nothing can be."""
        if self.is_mapping:
            return read_dict(value)
        return [*self.base.__iter__(value)] if self.is_sequence else None  # type: ignore[attr-defined]

    def attributes(self, value: Any) -> dict[str, Any]:
        """The attributes of an object."""
        return attributes_of(value)

    def filled(self, value: Any) -> dict[str, Any]:
        """The slots of an object that have a value."""
        return filled_slots(self.slots, value)

    def make(self, items: Iterable[Any] = ()) -> Any:
        """An object without attributes; that of a tuple class has its items from the start."""
        if self.base is tuple:
            return tuple.__new__(self.kind, items)
        new: Any = self.base.__new__
        return new(self.kind)

    def fill(self, value: Any, contents: Any, attributes: dict[str, Any] | None, slots: dict[str, Any] | None) -> Any:
        """Give a new object what it holds; what a tuple has in it, it has already."""
        if self.base is list:
            list.extend(value, contents)
        elif self.is_mapping:
            for key, item in contents.items():
                put_dict(value, key, item)
        if attributes:
            attributes_of(value).update(attributes)
        for name, item in slots.items() if slots else ():
            self.slot(name).__set__(value, item)
        return value

    def build(self, contents: Any, attributes: dict[str, Any] | None, slots: dict[str, Any] | None) -> Any:
        """A new object that holds all this."""
        return self.fill(self.make(contents if self.base is tuple else ()), contents, attributes, slots)

    def slot(self, name: str) -> Any:
        """What reads and sets a slot."""
        return dict(self.slots)[name]


def shape_of(kind: type) -> Shape | None:
    """How the objects of a class are put together; None if that cannot be seen, or if each is one of its kind.

    >>> shape_of(collections.UserDict).has_attributes, shape_of(type(iter([]))), shape_of(nn.Linear)
    (True, None, None)
    """
    if kind in PLAIN or kind in _BASES[2:5] or issubclass(kind, _LEAVES):
        return None
    if f"{kind.__module__}.".startswith(OPAQUE_MODULES):
        return None
    if hasattr(kind, "__del__"):  # which would run for every object that is made here
        return None
    base = next(base for base in kind.__mro__ if base in _BASES)
    inner = kind.__mro__[: kind.__mro__.index(base)]
    if any(isinstance(vars(one).get("__new__"), types.BuiltinFunctionType) for one in inner):
        return None  # a class in C
    slots = slot_members(kind)
    if hides_state(kind, base, len(slots)) or len(dict(slots)) < len(slots):
        return None
    if base is collections.defaultdict:
        slots = (("default_factory", _FACTORY), *slots)
    with_attributes = has_attributes(kind)
    if kind is object or not (with_attributes or slots or base is not object):  # known by identity alone
        return None
    return Shape(kind, base, with_attributes, slots)
