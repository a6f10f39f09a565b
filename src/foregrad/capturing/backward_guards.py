"""Python state that code of the user's reads in a backward: compared when the compiled backward runs.

The functions that ran are known from the recording (`record.backward_code`). Everything that they can reach is walked
as it is for the program itself; only what these functions read counts.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from .._torch import PythonNode, Settings, custom_function_of, referrers_of
from ..errors import BackwardError
from ..record.hooks import Call, UserCode
from ..slots import Primal
from ..values import PLAIN, Remembered
from .code import KnownCode, in_a_library
from .free_variables import FreeVariables, refuse_unknown
from .sources import Source
from .walk import Walk

_GONE = (KeyError, IndexError, AttributeError, ValueError, TypeError)  # what a place that is no longer there raises


def calls_of_users(code: UserCode) -> list[Call]:
    """The calls of functions that are neither torch's nor of what torch is built on."""
    return [call for call in code.living_calls() if not _is_torchs_own(str(call.namespace.get("__name__")))]


class ReadInBackward:
    """What the functions that ran in a backward have read, as it was then."""

    def __init__(
        self, calls: Sequence[Call], modules: Sequence[nn.Module], found: Iterable[tuple[Primal, Tensor, Source]]
    ) -> None:
        self._settings = Settings.now()
        alive, self._made = _functions_of(calls)
        functions = [*alive, *self._made]
        root = _holding(*functions, *_objects_of(calls), *modules)
        code = {id(c): c for c in (root.__code__, *(f.__code__ for f in functions))}
        around = Walk(root, (), KnownCode(code))
        around.note_state()
        refuse_unknown(around.unknown)
        self._sources = {slot: around.source_of(t) if source.how == "argument" else source for slot, t, source in found}
        self._checks = list(_checks(around, root))
        self._lifetime = around.lifetime
        self._lifetime.when_gone(self._checks.clear)
        self._lifetime.when_gone(self._sources.clear)

    @property
    def tensors(self) -> Sequence[Primal]:
        """Inputs that the functions found by themselves."""
        return list(self._sources)

    def holds(self) -> bool:
        """Whether everything is as it was."""
        try:
            same = Settings.now() == self._settings and all(check() for check in self._checks)
            return same and not self._lifetime.is_gone
        except _GONE:
            return False

    def require_same(self, tensors: Sequence[Tensor]) -> None:
        """Raise if the places of the inputs hold other tensors than the forward has found there."""
        for tensor, source in zip(tensors, self._sources.values(), strict=not self._lifetime.is_gone):
            if _read_if_there(source) is not tensor:
                raise BackwardError(
                    f"The backward of a compiled program reads {source.path}, in which the tensor that was there in "
                    "the forward is no more. Pass the tensor as an argument, or call the original function."
                )


def _is_torchs_own(module: str) -> bool:
    """Whether a function is torch's, or belongs to what torch is built on: symbolic sizes it computes with sympy."""
    return in_a_library(module) or module.partition(".")[0] in _beneath_torch()


@functools.cache
def _beneath_torch() -> frozenset[str]:
    """The packages that torch requires, and those that they require."""
    found: set[str] = set()
    pending = ["torch"]
    while pending:
        try:
            required = importlib.metadata.requires(pending.pop()) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        names = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in required if "extra ==" not in line}
        pending += names - found
        found |= names
    return frozenset(name.lower().replace("-", "_") for name in found)


def _holding(*held: Any) -> types.FunctionType:
    """A function that leads to some objects."""

    def root() -> Any:
        return held

    assert isinstance(root, types.FunctionType)
    return root


def _functions_of(calls: Iterable[Call]) -> tuple[list[types.FunctionType], list[types.FunctionType]]:
    """The functions that were called: those that live on, whose variables others may assign, and those made here.

    For one that was made and dropped in the backward stands a function of its code, which leads to the same globals;
    what its variables held is looked at by itself.
    """
    living: list[types.FunctionType] = []
    made: list[types.FunctionType] = []
    by_code: dict[tuple[int, int], list[Call]] = {}
    for call in calls:
        by_code.setdefault((id(call.code), id(call.namespace)), []).append(call)
    enclosed = [several[0].code for several in by_code.values() if several[0].code.co_freevars]
    alive: dict[tuple[int, int], list[types.FunctionType]] = {}
    for holder in referrers_of(enclosed) if enclosed else ():
        if type(holder) is types.FunctionType:
            alive.setdefault((id(holder.__code__), id(holder.__globals__)), []).append(holder)
    for key, several in by_code.items():
        held = {_variables_of(call) for call in several} if key in alive else ()
        found = [f for f in alive.get(key, ()) if tuple(map(_identity_in, f.__closure__ or ())) in held]
        living += found
        made += [] if found else [_like(several[0])]
    return living, made


def _variables_of(call: Call) -> tuple[int, ...]:
    """The identities of what a function has found in the enclosing ones."""
    return tuple(id(call.values.get(name)) for name in call.code.co_freevars)


def _identity_in(cell: types.CellType) -> int:
    try:
        return id(cell.cell_contents)
    except ValueError:  # it is empty
        return id(None)


def _like(call: Call) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in call.code.co_freevars)
    return types.FunctionType(call.code, call.namespace, call.code.co_name, None, cells)


def _objects_of(calls: Iterable[Call]) -> Iterator[Any]:
    """What functions were given and may look into; of custom functions, what the forward has left in `ctx`."""
    seen: set[int] = set()
    for name, value in itertools.chain.from_iterable(call.values.items() for call in calls):
        if name.startswith("."):  # what a comprehension goes over
            continue
        parts = (custom_function_of(value), *vars(value).values()) if isinstance(value, PythonNode) else (value,)
        for part in parts:
            if id(part) not in seen and not isinstance(part, Tensor) and type(part) not in PLAIN:
                seen.add(id(part))
                yield part


def _checks(around: FreeVariables, root: types.FunctionType) -> Iterator[Callable[[], bool]]:
    own = set(map(id, root.__closure__ or ()))  # which hold everything, and are never assigned
    for source, value in around.plain:
        if id(source.owner) not in own:
            yield _comparing(source, Remembered(value).equals)
    for source, value in around.fixed:
        if id(source.owner) not in own:
            yield _comparing(source, partial(operator.is_, value))
    if around.guards_state:
        yield around.state.holds
    if around.modules_guard is not None:
        yield around.modules_guard.holds


def _comparing(source: Source, equals: Callable[[Any], bool]) -> Callable[[], bool]:
    return lambda: equals(source.read())


def _read_if_there(source: Source) -> Any:
    try:
        return source.read()
    except _GONE:
        return None
