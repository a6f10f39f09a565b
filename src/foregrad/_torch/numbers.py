"""Numbers that a recording follows: what torch's C++ code asks of one, where an operator is given it as a float."""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable
from typing import Any


class NumberNode(abc.ABC):
    """What stands behind a `torch.SymFloat`: C++ knows it by the names of these methods, and of no others.

    An operator takes such a number as it is, wherever its schema says `Scalar`. Code that needs the number itself asks
    for it by `guard_float`, and a comparison gives a node for a bool, which is asked for by `guard_bool`.
    """

    @abc.abstractmethod
    def guard_float(self, file: str, line: int) -> float:
        """The number itself, for good."""

    @abc.abstractmethod
    def decide(self, compare: Callable[[Any, Any], Any], other: float) -> bool:
        """How the number compares with another one."""

    def is_float(self) -> bool:
        return True

    def _is_not(self) -> bool:
        return False

    is_int = is_bool = is_nested_int = is_constant = _is_not

    def is_symbolic(self) -> bool:
        return True

    def has_hint(self) -> bool:
        return True

    def wrap_float(self, value: float) -> _Plain:
        return _Plain(value)

    wrap_int = wrap_float

    def _compare(self, other: Any, *, compare: Callable[[Any, Any], Any]) -> _Decided:
        return _Decided(functools.partial(self.decide, compare, other.guard_float("", 0)))

    eq = functools.partialmethod(_compare, compare=operator.eq)
    ne = functools.partialmethod(_compare, compare=operator.ne)
    lt = functools.partialmethod(_compare, compare=operator.lt)
    le = functools.partialmethod(_compare, compare=operator.le)
    gt = functools.partialmethod(_compare, compare=operator.gt)
    ge = functools.partialmethod(_compare, compare=operator.ge)


class _Plain:
    """A plain number beside one that is followed."""

    def __init__(self, value: float) -> None:
        self._value = value

    def guard_float(self, file: str, line: int) -> float:
        return float(self._value)

    def is_float(self) -> bool:
        return True

    def _is_not(self) -> bool:
        return False

    is_int = is_bool = is_nested_int = is_symbolic = _is_not


class _Decided:
    """The outcome of a comparison, which is decided when it is asked for."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask

    def guard_bool(self, file: str, line: int) -> bool:
        return self._ask()

    expect_true = guard_size_oblivious = guard_bool

    def is_bool(self) -> bool:
        return True

    def _is_not(self) -> bool:
        return False

    is_int = is_float = is_nested_int = is_constant = _is_not
