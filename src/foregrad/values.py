"""Python values that a program depends on: which are plain, and when two of them are the same to it."""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import re
import types
import uuid
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ._torch import dict_version

SETTLED = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Plain values of Python itself that cannot change as long as they stay where they are."""


def are_settled(values: Iterable[Any]) -> bool:
    """Whether all values are such, as nearly always.

    >>> are_settled((1, "a")), are_settled((1, []))
    (True, False)
    """
    return SETTLED.issuperset(map(type, values))


_BY_EQUALITY: frozenset[type] = frozenset(
    {
        *(int, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme, torch.Size),
        *(fractions.Fraction, uuid.UUID, re.Pattern, datetime.date, datetime.timedelta, datetime.timezone),
        *(pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
    }
)

# Types whose equality says too little, and what tells their values apart: the sign of a zero, the bits of a nan.
_EXACT: dict[type, Callable[[Any], Any]] = {
    float: float.hex,
    complex: lambda value: (value.real.hex(), value.imag.hex()),
    decimal.Decimal: decimal.Decimal.as_tuple,
    datetime.datetime: repr,
    datetime.time: repr,
    range: lambda value: frozen((value.start, value.stop, value.step)),
    slice: lambda value: frozen((value.start, value.stop, value.step)),
    torch.finfo: repr,
    torch.iinfo: repr,
}
PLAIN: frozenset[type] = _BY_EQUALITY | _EXACT.keys()
"""Types whose values are fully described by comparing them."""

_CONTAINERS = frozenset({list, tuple, set, frozenset})
_LONGEST = 256  # containers with more items are looked at one item at a time


def is_plain(value: Any) -> bool:
    """Whether a value is fully described by comparing it.

    >>> is_plain([1, {"k": "v"}]), is_plain(object())
    (True, False)
    """
    kind = type(value)
    if kind in PLAIN:
        return kind is not slice or is_plain((value.start, value.stop, value.step))
    if kind in _CONTAINERS:
        return len(value) <= _LONGEST and all(map(is_plain, value))
    if kind is dict:
        return len(value) <= _LONGEST and all(is_plain(k) and is_plain(v) for k, v in value.items())
    return _is_numpy_value(kind)


def _is_numpy_value(kind: type) -> bool:
    """Whether a type is one of numpy's scalars that hold no Python object, or describes them."""
    module = getattr(kind, "__module__", None)
    if module == "numpy":
        return any(base.__name__ == "generic" for base in kind.__mro__[1:]) and kind.__name__ not in ("object_", "void")
    return module == "numpy.dtypes"


def frozen(value: Any) -> Any:
    """What a plain value is to a program, as a value that does not change: equal only for values of the same type.

    >>> frozen(0.0) == frozen(-0.0), frozen(1) == frozen(True), frozen({2, 1}) == frozen({1, 2})
    (False, False, True)
    >>> frozen([1, {"k": float("nan")}]) == frozen([1, {"k": float("nan")}])
    True
    """
    kind = type(value)
    exact = _EXACT.get(kind)
    if exact is not None:
        return kind, exact(value)
    if kind in _CONTAINERS:  # sets too: a program may see the order of their elements
        return kind, tuple(map(frozen, value))
    if kind is dict:
        return kind, tuple([(frozen(k), frozen(v)) for k, v in value.items()])
    if kind not in _BY_EQUALITY and _is_numpy_value(kind) and hasattr(value, "tobytes"):
        return kind, str(value.dtype), value.tobytes()
    return kind, value


def same_value(a: Any, b: Any) -> bool:
    """Equality that tells 0 from False and 0.0 from -0.0, takes nan for nan, and looks into containers.

    >>> same_value([0, {"k": float("nan")}], [0, {"k": float("nan")}])
    True
    >>> same_value(0, False), same_value((0.0,), (-0.0,)), same_value({1}, {True})
    (False, False, False)
    """
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in (list, tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    if kind is dict:
        return len(a) == len(b) and all(map(same_value, a.items(), b.items()))
    try:
        return bool(frozen(a) == frozen(b))
    except Exception:  # an equality that raises tells nothing: the values count as different
        return False


def is_unchanged(now: Any, before: Any) -> bool:
    """Whether a place still holds what it held: the same object, an equal plain value, or the same method of an object.

    >>> is_unchanged(1000, int("1000")), is_unchanged(object(), object())
    (True, False)
    """
    if now is before:
        return True
    if type(before) is types.MethodType:  # which Python makes anew each time that it is asked for
        return type(now) is types.MethodType and now.__self__ is before.__self__ and now.__func__ is before.__func__
    return is_plain(before) and same_value(now, before)


def _is_settled(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(map(_is_settled, value)))


class Remembered:
    """A value as it was while recording: compared by equality if it is plain, and by identity if not.

    An object is not kept alive by being remembered, where Python allows to refer to it weakly.
    """

    __slots__ = ("_is", "_value", "_version")

    def __init__(self, value: Any) -> None:
        self._is: Callable[[], Any] | None = None if is_plain(value) else weakly(value)
        self._value: Any = frozen(value) if self._is is None else None
        self._version = 0  # of a dict that was seen to be equal, whose items cannot change; no other one has it

    def equals(self, value: Any) -> bool:
        """Whether a value is the remembered one."""
        if self._is is not None:
            return value is self._is()
        if type(value) is not self._value[0]:
            return False
        if type(value) is not dict:
            return bool(frozen(value) == self._value)
        version = dict_version(value)  # first: what another thread changes from now on shows
        if version == self._version and version > 0:
            return True
        same = bool(frozen(value) == self._value)
        self._version = version if same and all(map(_is_settled, value.values())) else 0
        return same

    def explain(self, value: Any) -> Change:
        """Say how a value is not the remembered one."""
        return Change("", "another object" if self._is is not None else shown_frozen(self._value), shown(value))


# ---------------------------------------------------------------------------------------------------------------------
# What a place held, and what it holds: to be read.
@dataclass(frozen=True, slots=True)
class Change:
    """A place that no longer is what it was; it lies at a path below its owner, or below what was compared.

    >>> str(Change("scale", "2", "3"))
    'scale was 2, is 3'
    """

    path: str
    was: str
    now: str
    owner: Any = field(default=None, compare=False, repr=False)  # whose name is looked up, if there is one
    argument: int = field(default=0, repr=False)  # which of the things that were compared
    place: str = field(default="", compare=False, repr=False)  # in the user's code, where a whole number was read

    def __str__(self) -> str:
        return f"{self.path} was {self.was}, is {self.now}"


_LONGEST_SHOWN = 60


def shown(value: Any) -> str:
    """A value as short text; none of the user's code runs.

    >>> shown(2.5), shown(int), shown(torch.ones(2)), shown(types.SimpleNamespace())
    ('2.5', 'int', 'a tensor', 'a SimpleNamespace')
    """
    if is_plain(value):
        text = repr(value)
        return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
    if issubclass(type(value), type):
        return str(value.__qualname__)
    if type(value) is types.FunctionType:
        return f"the function {value.__qualname__}"
    return "a tensor" if issubclass(type(value), torch.Tensor) else f"a {type(value).__name__}"


_THAW: dict[type, Callable[[Any], Any]] = {
    float: float.fromhex,
    complex: lambda parts: complex(*map(float.fromhex, parts)),
    decimal.Decimal: decimal.Decimal,
}


def shown_frozen(value: Any) -> str:
    """What `frozen` was made of, as short text.

    >>> shown_frozen(frozen([1, 2.5])), shown_frozen(frozen({"k": (True,)}))
    ('[1, 2.5]', "{'k': (True,)}")
    """
    text = _shown_frozen(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _shown_frozen(value: Any) -> str:
    kind, *parts = value
    if kind in _THAW:
        return repr(_THAW[kind](parts[0]))
    if kind is dict:
        return f"{{{', '.join(f'{_shown_frozen(k)}: {_shown_frozen(v)}' for k, v in parts[0])}}}"
    if kind in _CONTAINERS:
        items = ", ".join(map(_shown_frozen, parts[0]))
        brackets = {list: "[{}]", set: "{{{}}}", frozenset: "frozenset({{{}}})"}
        return brackets.get(kind, "({},)" if len(parts[0]) == 1 else "({})").format(items)
    return repr(parts[-1]) if kind in PLAIN else f"a {kind.__name__}"


def loosely(value: Any) -> Callable[[], Any]:
    """Leads to an object without keeping it alive, where Python has a way to; to None when the object is gone.

    >>> loosely((1, 2))()
    (1, 2)
    """
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


class UserObject:
    """An object of the user's, as long as the program can run."""

    __slots__ = ("_find",)

    def __init__(self, value: Any) -> None:
        self._find = loosely(value)

    def find(self) -> Any:
        """The object; None if it is gone, and nothing that is done to it can be seen."""
        return self._find()

    def release(self) -> None:
        """Let go of an object that cannot be referred to weakly."""
        self._find = lambda: None


def weakly(value: Any) -> Callable[[], Any]:
    """A way to an object that does not keep it alive, if there is one; it leads to nothing when the object is gone.

    >>> weakly(len)() is len
    True
    """
    if value is None:
        return lambda: None
    try:
        found = weakref.ref(value)
    except TypeError:
        return lambda: value
    return lambda: _GONE if (now := found()) is None else now


_GONE = types.SimpleNamespace()
