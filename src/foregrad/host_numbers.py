"""Host numbers: floats that each call works out before its graphs run, with Python's own arithmetic.

A learning rate is a float in a dict, and Adam's step size follows from a counter that lies in a tensor on the CPU.
While a program is recorded, a `HostNumber` stands for such a float. It takes part in arithmetic, operators take it, and
graphs have a node for it. What Python decides by it (`if weight_decay != 0`) is a decision, and code that needs the
number itself (`math.sqrt`, `format`) decides that it is this one: a call for which any of them goes the other way is
for another program.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import SymFloat

from ._torch import NumberNode
from .values import frozen, same_value


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """How a number follows from others; one without an operator is where numbers come from."""

    op: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()  # expressions, and plain numbers
    value: Any = None  # in the recording


class HostNumbers:
    """The numbers of one recording, and what was decided by them."""

    in_graphs = True  # operators take them

    def __init__(self) -> None:
        self._decisions: dict[Expression, Any] = {}
        self._known: dict[Any, Expression] = {}  # by what they compute

    @property
    def decisions(self) -> Iterator[tuple[Expression, Any]]:
        """What was asked, in order, and the answers."""
        yield from self._decisions.items()

    def new(self, value: float) -> HostNumber:
        """A number that follows from no other."""
        return HostNumber(self, value, Expression(value=value))

    def expression(self, op: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Expression:
        """What an operator gives for expressions and numbers, once for all who compute the same."""
        key = op, tuple([id(arg) if isinstance(arg, Expression) else frozen(arg) for arg in args])
        found = self._known.get(key)
        if found is None:  # its arguments are kept with it, and so are their ids
            found = self._known[key] = Expression(op, args, value)
        return found

    def decide(self, op: Callable[..., Any], args: tuple[Any, ...], answer: Any) -> Any:
        """Note the answer to a question."""
        self._decisions.setdefault(self.expression(op, args, answer), answer)
        return answer

    def require(self, number: HostNumber) -> None:
        """The number itself is needed: calls for which it is another one are for other programs."""
        self.decide(same_value, (number.expression, number.value), True)


class OtherNumbers(Exception):
    """A call has numbers by which the program would have decided otherwise."""


def decided(found: Any, answer: Any) -> None:
    """The operator of a decision: the answer must be the one that the recording heard."""
    if found is not answer:
        raise OtherNumbers


class _Node(NumberNode):
    """What C++ sees of a number."""

    def __init__(self, number: HostNumber) -> None:
        self.number = number

    def guard_float(self, file: str, line: int) -> float:
        return self.number.exact()

    def decide(self, compare: Callable[[Any, Any], Any], other: float) -> bool:
        return self.number.decide(compare, other)


def _binary(op: Callable[[Any, Any], Any], reflected: bool = False) -> Callable[[HostNumber, Any], Any]:
    def method(self: HostNumber, other: Any) -> Any:
        return self.compute(op, other, reflected)

    return method


def _comparison(op: Callable[[Any, Any], Any]) -> Callable[[HostNumber, Any], Any]:
    def method(self: HostNumber, other: Any) -> Any:
        return self.decide(op, other)

    return method


def _unary(op: Callable[[Any], Any]) -> Callable[[HostNumber], Any]:
    def method(self: HostNumber) -> Any:
        return self.follow(op, (self.expression,), op(self.value))

    return method


def _rounding(round_off: Callable[..., Any]) -> Callable[..., Any]:
    """What gives a whole number: that is compared, and not the number itself."""

    def method(self: HostNumber, *args: Any) -> Any:
        return self.follow(round_off, (self.expression, *args), round_off(self.value, *args))

    return method


def _asking(ask: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: HostNumber, *args: Any) -> Any:
        return ask(self.exact(), *args)

    return method


_PLAIN = (int, float, bool)


class HostNumber(SymFloat):
    """Stands for a float while a program is recorded.

    >>> numbers = HostNumbers()
    >>> lr = numbers.new(0.5)
    >>> (1 - lr * 0.5).value, lr > 0.1, isinstance(lr, float)
    (0.75, True, True)
    >>> len([*numbers.decisions])
    1
    """

    __slots__ = ("_numbers", "expression", "value")
    __class__ = property(lambda self: float)  # what `isinstance` asks

    def __init__(self, numbers: HostNumbers, value: float, expression: Expression) -> None:
        node: Any = _Node(self)
        super().__init__(node)
        self._numbers, self.value, self.expression = numbers, value, expression

    def exact(self) -> float:
        """The number itself."""
        self._numbers.require(self)
        return self.value

    @property
    def is_in_graphs(self) -> bool:
        """Whether operators take it as it is."""
        return self._numbers.in_graphs

    def _shared(self, other: Any) -> Any:
        """Another number, itself where it follows from numbers of another kind."""
        return other.exact() if type(other) is HostNumber and other._numbers is not self._numbers else other

    def decide(self, op: Callable[..., Any], *others: Any) -> Any:
        """The answer to a question about the number, and others."""
        if not all(map(_is_number, others)):
            return NotImplemented
        others = tuple(map(self._shared, others))
        answer = bool(op(self.value, *map(_value_of, others)))
        return self._numbers.decide(op, (self.expression, *map(_part_of, others)), answer)

    def compute(self, op: Callable[[Any, Any], Any], other: Any, reflected: bool) -> Any:
        """What an operator of Python's gives for the number and another one."""
        if not _is_number(other):
            return NotImplemented
        other = self._shared(other)
        pair = (other, self) if reflected else (self, other)
        one, two = map(_value_of, pair)
        return self.follow(op, tuple(map(_part_of, pair)), op(one, two))

    def follow(self, op: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
        """A number that follows from this one; where it is no float, it is what it is."""
        expression = self._numbers.expression(op, args, value)
        if type(value) is float:
            return HostNumber(self._numbers, value, expression)
        self._numbers.decide(same_value, (expression, value), True)
        return value

    __add__, __radd__ = _binary(operator.add), _binary(operator.add, reflected=True)
    __sub__, __rsub__ = _binary(operator.sub), _binary(operator.sub, reflected=True)
    __mul__, __rmul__ = _binary(operator.mul), _binary(operator.mul, reflected=True)
    __mod__, __rmod__ = _binary(operator.mod), _binary(operator.mod, reflected=True)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _binary(operator.truediv, reflected=True)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _binary(operator.floordiv, reflected=True)
    __pow__, __rpow__ = _binary(operator.pow), _binary(operator.pow, reflected=True)
    __neg__, __pos__, __abs__ = _unary(operator.neg), _unary(operator.pos), _unary(operator.abs)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)

    def __bool__(self) -> bool:
        return bool(self.decide(bool))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return float, (self.exact(),)

    def __copy__(self) -> HostNumber:
        return self

    def __deepcopy__(self, memo: Any) -> HostNumber:
        return self

    __hash__, __repr__, __str__, __format__ = _asking(hash), _asking(repr), _asking(str), _asking(format)
    __int__, __trunc__, __round__ = _rounding(int), _rounding(int), _rounding(round)
    __floor__, __ceil__ = _rounding(math.floor), _rounding(math.ceil)
    __float__, __divmod__ = _asking(float), _asking(divmod)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:  # numpy asks for it
        import numpy

        return numpy.asarray(self.exact(), *args, **kwargs)

    is_integer, as_integer_ratio = _asking(float.is_integer), _asking(float.as_integer_ratio)
    hex = _asking(float.hex)


def _is_number(value: Any) -> bool:
    return type(value) in _PLAIN or type(value) is HostNumber


def _value_of(value: Any) -> Any:
    return value.value if type(value) is HostNumber else value


def _part_of(value: Any) -> Any:
    return value.expression if type(value) is HostNumber else value


def in_python(value: Any) -> Any:
    """A value, nested in lists, with numbers of a recording as Python code is to see them, whatever C++ gives back."""
    if type(value) in (list, tuple):
        return type(value)(map(in_python, value))
    number = host_number(value)
    return value if number is None else number


def host_number(value: Any) -> HostNumber | None:
    """The number that C++ gives back, if it is one of a recording."""
    node = value.node if type(value) in (SymFloat, HostNumber) else None
    return node.number if isinstance(node, _Node) else None
