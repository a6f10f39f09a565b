"""Python values that a program depends on: which are plain, and when two of them are the same to it."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

PLAIN: frozenset[type] = frozenset(
    {
        int,
        float,
        complex,
        bool,
        str,
        bytes,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)


def is_plain(value: Any) -> bool:
    """Whether a value is fully described by comparing it.

    >>> is_plain([1, {"k": "v"}]), is_plain(object())
    (True, False)
    """
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        return len(value) <= 256 and all(map(is_plain, value))
    if kind is dict:
        return len(value) <= 256 and all(is_plain(k) and is_plain(v) for k, v in value.items())
    return kind in PLAIN


def same_value(a: Any, b: Any) -> bool:
    """Equality that tells 0 from False and 0.0 from -0.0, takes nan for nan, and looks into containers.

    >>> same_value([0, {"k": math.nan}], [0, {"k": math.nan}]), same_value(0, False), same_value((0.0,), (-0.0,))
    (True, False, False)
    """
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is float:
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if kind is complex:
        return same_value(a.real, b.real) and same_value(a.imag, b.imag)
    if kind in (list, tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    if kind is dict:
        return len(a) == len(b) and all(map(same_value, a.items(), b.items()))
    if kind in (set, frozenset):
        return bool(a == b) and {(type(x), x) for x in a} == {(type(x), x) for x in b}
    try:
        return bool(a == b)
    except Exception:  # an equality that raises tells nothing: the values count as different
        return False


def is_unchanged(now: Any, before: Any) -> bool:
    """Whether a place still holds what it held: the same object, or an equal plain value.

    >>> is_unchanged(1000, int("1000")), is_unchanged(object(), object())
    (True, False)
    """
    return now is before or (is_plain(before) and same_value(now, before))


class Remembered:
    """A value as it was while recording: compared by equality, or by identity where that says nothing."""

    def __init__(self, value: Any) -> None:
        by_equality = getattr(type(value), "__eq__", None) is not object.__eq__ and same_value(value, value)
        snapshot = _copy(value) if by_equality else value
        self._by_identity = not by_equality or not same_value(value, snapshot)
        self._value = value if self._by_identity else snapshot

    def equals(self, value: Any) -> bool:
        """Whether a value is the remembered one."""
        return value is self._value if self._by_identity else same_value(value, self._value)


def _copy(value: Any) -> Any:
    """A copy that does not change when the user's object does; what cannot be copied is taken as it is."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value
