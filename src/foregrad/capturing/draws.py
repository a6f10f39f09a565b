"""Random numbers that a program draws from Python's and numpy's own generators: each call draws them again.

A layer is dropped where `random.random() < 0.1`, an image is turned by `random.choice`. What is decided by a number is
noted while the program is recorded. A call draws as the program did, in its order, before anything else runs; where it
would decide otherwise it is for another program, and the generators go back to where they were. The numbers of a float
distribution are followed through arithmetic to what is decided by them; whole numbers and choices are compared.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import StateChangeError
from ..host_numbers import Expression, HostNumber, HostNumbers
from ..record.recorder import Recorder
from ..stack_traces import user_stack, where
from ..values import is_plain, same_value
from .kinds import PYTHONS_GENERATOR, RANDOM, RANDOM_STATE, Kind

# Methods that are drawn as a whole. Others (`choice`, `shuffle`, `sample`) are Python code over these.
_WHOLE = frozenset(
    {
        *("random", "uniform", "triangular", "getrandbits", "_randbelow", "gauss", "normalvariate", "lognormvariate"),
        *("expovariate", "vonmisesvariate", "gammavariate", "betavariate", "paretovariate", "weibullvariate"),
    }
)
_STATES = frozenset({"getstate", "get_state"})
_OVERWRITES = frozenset({"seed", "setstate", "set_state"})  # where the generator was is lost
_IN_PLACE = frozenset({"shuffle"})  # of numpy's: what it writes to is not drawn
_MOST_NUMBERS = 4096  # in an array


@dataclass(frozen=True, slots=True)
class Draw:
    """A method of a generator, and what it was given: expressions stand for what was drawn before."""

    generator: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Expression

    def again(self, known: dict[Expression, Any]) -> None:
        """Note what it gives now."""
        args = [_worked_out(arg, known) for arg in self.args]
        kwargs = {name: _worked_out(arg, known) for name, arg in self.kwargs.items()}
        known[self.result] = getattr(self.generator, self.name)(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided by numbers that were drawn."""

    asked: Expression
    answer: bool
    what: str  # was drawn last, in the user's words

    def among(self, known: dict[Expression, Any]) -> Otherwise | None:
        """Whether it is decided otherwise by these numbers."""
        found = _worked_out(self.asked, known)
        if found is self.answer:
            return None
        if self.asked.op is not _same:
            return Otherwise(f"what is decided by {self.what}", self.answer, found)
        drawn, was = self.asked.args
        return Otherwise(self.what, was, _as_plain(_worked_out(drawn, known)))


StandIn = tuple[types.ModuleType, str, Callable[..., Any]]  # for a function of a module


class Otherwise(NamedTuple):
    """Why a call is for another program."""

    what: str
    was: Any
    now: Any


class _DrawnNumbers(HostNumbers):
    """The numbers that a program has drawn. No graph takes one: a call that needs the number itself is refused."""

    in_graphs = False

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def decide(self, op: Callable[..., Any], args: tuple[Any, ...], answer: Any) -> Any:
        asked = self.expression(op, args, answer)
        self._draws.decisions.setdefault(asked, Decision(asked, answer, self._draws.last))
        return super().decide(op, args, answer)

    def require(self, number: HostNumber) -> None:
        raise self._draws.refused()


class Draws:
    """What a program draws while it is recorded."""

    def __init__(self, performed: bool, recorder: Recorder | None = None) -> None:
        """Whether calls can draw again; what records the program."""
        self._performed = performed
        self._recorder = recorder
        self._thread = 0  # that records, where it is not in a method that is drawn as a whole
        self._numbers = _DrawnNumbers(self)
        self._before: dict[int, tuple[Any, Any]] = {}  # generators, and where they were
        self.last = ""  # what was drawn last
        self._unknown = ""  # what no call can draw again
        self.taken: list[Draw] = []
        self.decisions: dict[Expression, Decision] = {}

    def of_another(self, recorder: Recorder) -> Draws:
        """Those of another recording, of which nothing is known yet."""
        return Draws(self._performed, recorder)

    def around(self, run: Callable[[list[Any]], Any]) -> Callable[..., Any]:
        """A program whose draws are noted."""
        return functools.partial(self._run, run) if self._performed else run

    def _run(self, run: Callable[[list[Any]], Any], seen: list[Any]) -> Any:
        with self._standing():
            return run(seen)

    @contextlib.contextmanager
    def _standing(self) -> Iterator[None]:
        self._thread, kind = threading.get_ident(), type(PYTHONS_GENERATOR)
        self._before = {id(owner): (owner, state_of(owner)) for _, owner in global_generators()}
        try:
            with _replaced(list(self._stand_ins())):
                object.__setattr__(PYTHONS_GENERATOR, "__class__", self._kind(kind))
                try:
                    yield
                finally:
                    object.__setattr__(PYTHONS_GENERATOR, "__class__", kind)
        finally:
            self._thread = 0

    def _kind(self, kind: type) -> type:
        """Of a generator whose methods tell of themselves: those that are bound already look others up in it."""

        def method(name: str) -> Callable[..., Any]:
            return lambda owner, *args, **kwargs: self._draw(owner, name, getattr(kind, name), args, kwargs)

        def set_attribute(owner: Any, name: str, value: Any) -> None:
            if threading.get_ident() == self._thread:  # in a method that was bound before, such as `setstate`
                self._require_explained(owner)
            object.__setattr__(owner, name, value)

        methods: dict[str, Any] = {name: method(name) for name in (*_WHOLE, "seed", "getstate", "setstate")}
        methods["__setattr__"] = set_attribute
        return type(kind.__name__, (kind,), {"__slots__": (), "__module__": kind.__module__, **methods})

    def _stand_ins(self) -> Iterator[StandIn]:
        for name, value in list(vars(random).items()):
            if getattr(value, "__self__", None) is PYTHONS_GENERATOR:
                yield (
                    random,
                    name,
                    lambda *args, _name=name, **kwargs: getattr(PYTHONS_GENERATOR, _name)(*args, **kwargs),
                )
        numpy, owner = sys.modules.get("numpy.random"), _numpys()
        if numpy is None or owner is None:
            return
        yield numpy, "seed", functools.partial(self._draw_from_numpy, owner.seed, "seed")
        for name, value in list(vars(numpy).items()):
            if getattr(value, "__self__", None) is owner:
                yield numpy, name, functools.partial(self._draw_from_numpy, value, name)

    def _draw_from_numpy(self, method: Callable[..., Any], name: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._draw(_numpys(), name, lambda owner, *given, **named: method(*given, **named), args, kwargs)

    def _draw(self, owner: Any, name: str, method: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Draw, and note what came of it: a number that is followed, or a value that is compared."""
        if threading.get_ident() != self._thread:
            return method(owner, *args, **kwargs)
        if name in _OVERWRITES:
            self._require_explained(owner)
        thread, self._thread = self._thread, 0
        try:
            value = method(owner, *map(_itself, args), **{key: _itself(arg) for key, arg in kwargs.items()})
        finally:
            self._thread = thread
        given, named = tuple(map(_part, args)), {key: _part(arg) for key, arg in kwargs.items()}
        result = Expression()
        module = "random" if owner is PYTHONS_GENERATOR else "numpy.random"
        self.last = f"{module}.{'randrange' if name == '_randbelow' else name}() at {_users_line()}"
        repeats = all(map(_is_noted, (*given, *named.values()))) and name not in _IN_PLACE
        if not repeats or not (name in _STATES or _can_be_compared(value)):
            self._unknown = self._unknown or self.last
            return value
        self.taken.append(Draw(owner, name, given, named, result))
        if name in _STATES:
            return State(self, value, result)
        if type(value) is float:
            assert self._recorder is not None
            self._recorder.meets_numbers = True
            return HostNumber(self._numbers, value, result)
        self._numbers.decide(_same, (result, _as_plain(value)), True)
        return value

    def refused(self) -> Exception:
        """The error for a number that is needed itself."""
        return self._refused(f"{self.last}, and needs the number itself: a compiled call would have another one.")

    def require_known(self) -> None:
        """Refuse draws that no call can repeat."""
        if self._unknown:
            raise self._refused(f"{self._unknown}: a compiled call would not draw again.")

    def _refused(self, what: str) -> Exception:
        assert self._recorder is not None
        way_out = "Draw with torch, pass the number as an argument, or compile with fallback='eager'."
        return self._recorder.refuse(StateChangeError(f"the program draws {what} {way_out}"))

    def _require_explained(self, owner: Any) -> None:
        """Note a draw that nobody has told of, as by a name for it in C, before there is no trace of it."""
        thread, self._thread = self._thread, 0
        try:
            if not self._explains(owner):
                self._unknown = self._unknown or f"a number from a generator that it changes at {_users_line()}"
        finally:
            self._thread = thread

    def explain(self, owner: Any) -> bool:
        """Whether a generator that has moved is where the draws have brought it that are known."""
        return id(owner) in self._before and bool(self.taken) and self._explains(owner)

    def _explains(self, owner: Any) -> bool:
        now, known = {key: state_of(generator) for key, (generator, _) in self._before.items()}, dict[Expression, Any]()
        try:
            for generator, before in self._before.values():
                put_back(generator, before)
            for draw in self.taken:
                draw.again(known)
            return same_value(state_of(owner), now[id(owner)])
        finally:
            for key, (generator, _) in self._before.items():
                put_back(generator, now[key])

    def drawn(self) -> DrawnAgain | None:
        """What each call does."""
        if not self.taken:
            return None
        if all(draw.name in _STATES for draw in self.taken) and not self.decisions:
            return None
        owners = {id(draw.generator): draw.generator for draw in self.taken}
        return DrawnAgain(tuple(owners.values()), tuple(self.taken), tuple(self.decisions.values()))


@contextlib.contextmanager
def _replaced(stand_ins: Sequence[StandIn]) -> Iterator[None]:
    """They stand for functions that draw; at most one thread records."""
    before = [(module, name, vars(module)[name]) for module, name, _ in stand_ins]
    try:
        for module, name, stand_in in stand_ins:
            setattr(module, name, stand_in)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def global_generators() -> list[tuple[str, Any]]:
    """What draws for Python's and numpy's own functions."""
    return [
        (name, owner)
        for name, owner in (("random", PYTHONS_GENERATOR), ("numpy.random", _numpys()))
        if owner is not None
    ]


def _users_line() -> str:
    """The line that draws, past Python's own methods."""
    depth = 2
    while any(sys._getframe(depth).f_globals is names for names in (vars(random), globals())):
        depth += 1
    return where(user_stack(depth))


def _numpys() -> Any:
    numpy = sys.modules.get("numpy.random.mtrand")
    return None if numpy is None else getattr(numpy, "_rand", None)


def kind_of_generator(owner: Any) -> Kind:
    """How its state is read and put back."""
    return RANDOM if owner is PYTHONS_GENERATOR else RANDOM_STATE


def state_of(owner: Any) -> Any:
    """Where a generator is."""
    return kind_of_generator(owner).read(owner)["state"]


def put_back(owner: Any, state: Any) -> None:
    """Let a generator be where it was."""
    restore = kind_of_generator(owner).restore
    assert restore is not None
    restore(owner, {"state": state})


class State:
    """Stands for the state of a generator, which a program may put back: what it is is not known."""

    __slots__ = ("_draws", "result", "value")

    def __init__(self, draws: Draws, value: Any, result: Expression) -> None:
        self._draws, self.value, self.result = draws, value, result

    def _ask(self, *args: Any) -> Any:
        raise self._draws.refused()

    exact = _ask
    __iter__ = __getitem__ = __len__ = __eq__ = __hash__ = __str__ = __repr__ = __reduce_ex__ = _ask


def require_no_drawn_numbers(leaves: Iterable[Any]) -> None:
    """Refuse numbers that were drawn in what a call gives back, or keeps: it would have to be another one each time."""
    for leaf in leaves:
        if isinstance(leaf, State) or (type(leaf) is HostNumber and not leaf.is_in_graphs):
            leaf.exact()


def _itself(value: Any) -> Any:
    return value.value if isinstance(value, State) or type(value) is HostNumber else value


def _part(value: Any) -> Any:
    if isinstance(value, State):
        return value.result
    if type(value) is HostNumber:
        return value.expression if not value.is_in_graphs else value.exact()
    return copy.deepcopy(value) if is_plain(value) else value


def _is_noted(value: Any) -> bool:
    """Whether each call can be given this again; a state is longer than plain values are."""
    is_long = type(value) is tuple and all(type(item) is tuple or is_plain(item) for item in value)
    return isinstance(value, Expression) or is_plain(value) or (is_long and all(map(_is_of_ints, value)))


def _is_of_ints(value: Any) -> bool:
    return type(value) is not tuple or all(type(item) is int for item in value)


def _can_be_compared(value: Any) -> bool:
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return value.dtype.kind in "iub" and value.size <= _MOST_NUMBERS
    return value is None or is_plain(value)


def _as_plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _same(value: Any, known: Any) -> bool:
    return same_value(_as_plain(value), known)


@dataclass(frozen=True, slots=True)
class DrawnAgain:
    """Draws as the recorded program did, and tells whether the call is for it."""

    generators: tuple[Any, ...]
    draws: tuple[Draw, ...]
    decisions: tuple[Decision, ...]

    def __call__(self) -> list[Any] | Otherwise:
        """Where the generators were; or what would be decided otherwise, and nothing was drawn then."""
        before = [*map(state_of, self.generators)]
        known: dict[Expression, Any] = {}
        for draw in self.draws:
            draw.again(known)
        for decision in self.decisions:
            otherwise = decision.among(known)
            if otherwise is not None:
                self.undo(before)
                return otherwise
        return before

    def undo(self, before: Sequence[Any]) -> None:
        """Put the generators back."""
        for owner, state in zip(self.generators, before, strict=True):
            put_back(owner, state)


def _worked_out(value: Any, known: dict[Expression, Any]) -> Any:
    if not isinstance(value, Expression):
        return value
    if value not in known:
        assert value.op is not None
        try:
            known[value] = value.op(*[_worked_out(arg, known) for arg in value.args])
        except (ArithmeticError, ValueError):  # where the program has raised none
            known[value] = None
    return known[value]
