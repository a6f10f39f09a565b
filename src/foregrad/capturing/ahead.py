"""What a program comes to reach while it runs, found before it gets there.

Where a program puts names together, the names in its code do not tell which functions it calls. So each function is
looked at when it is about to run for the first time: what it can reach is noted then, so that it can be put back, and
what nothing could put back is refused before anything is taken out of it.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Container, Sequence
from typing import Any

from torch import nn

from .._torch import without_function_modes
from ..errors import UnsupportedError
from .code import AboutToRun, CodeThatRan, KnownCode, is_library_function, names_in
from .free_variables import Holder, looked_at, refuse_unknown
from .kinds import FUNCTION, is_a
from .schedules import Schedules
from .state_guards import StateGuard
from .walk import Ts, Walk


class Ahead(Walk):
    """What the functions of a program lead to, each looked at before it first runs."""

    def __init__(
        self,
        root: Callable[..., Any],
        arguments: Sequence[tuple[str, Any]],
        classes: Sequence[type | types.FunctionType | types.MethodType] = (),
        schedules: Schedules | None = None,
    ) -> None:
        self._code: dict[int, types.CodeType] = {}  # of the user's functions that have run, or are about to, by id
        self._waiting: dict[int, list[types.FunctionType]] = {}  # by the id of their code
        self._ran = CodeThatRan(self._look)
        super().__init__(root, arguments, AboutToRun(), classes, schedules)

    @property
    def code_that_ran(self) -> CodeThatRan:
        """Which code ran in the recordings."""
        return self._ran

    def note_state(self) -> None:
        """Nothing is compared with what is found here: which code runs will tell what counts."""

    def noting_code(self) -> contextlib.AbstractContextManager[None]:
        """Notes which code runs; what it leads to is looked at before."""
        return self._ran.noting()

    def recording_ends(self) -> None:
        """Let go of everything but the code."""
        self._ran.named_beside |= self._named_by_getters
        kernels = [*self.kernels]
        self.release()
        self.kernels = kernels

    def release(self) -> None:
        """Let go of everything that only a recording needs."""
        super().release()
        self._waiting.clear()

    def _look(self, frame: types.FrameType) -> None:
        """A function is about to run for the first time."""
        code = frame.f_code
        known = self._waiting.pop(id(code), [])
        if not known and id(frame.f_globals) not in self._seen_globals:  # what torch itself calls is its own matter
            return
        with looked_at(), without_function_modes():
            self._functions += known
            self._look_at_functions()
            with self._outside_arguments():  # also one that the program has made itself
                self._look_at_globals(frame.f_globals, names_in(code))
            self._look_for(names_in(code).attributes)
            self._look_at_functions()
        self._code[id(code)] = code
        self._tell_new()

    def _refuse_what_is_used_up(self) -> None:
        """Refuse what the functions that have run lead to by names that stand in them, as far as these tell."""
        with looked_at(), without_function_modes():
            named = Walk(self._root, self._arguments, _NamedInCode(self._code), self._classes)
        try:
            refuse_unknown(named._used_up)
        except UnsupportedError as error:
            self.refusal = error
            raise

    def _enter_function(self, function: Any) -> None:
        if is_a(function, types.FunctionType) and id(function) not in self._seen:
            self._seen[id(function)] = function
            self._waiting.setdefault(id(function.__code__), []).append(function)
            if not is_library_function(function):  # it may be given attributes without being called
                self.holders.append(Holder(function.__name__, function, FUNCTION, self._in_argument))
            if self._in_argument:
                self._private.add(id(function))

    def _enter_registered(self, function: Any, path: str) -> None:
        self._enter_function(function.func if is_a(function, functools.partial) else function)

    def _guard(self, add: Callable[[StateGuard, *Ts], None], *args: *Ts) -> None:
        """Nothing is compared with what is found here."""


class _NamedInCode(KnownCode):
    """What known code calls, and reads by the names in it, of modules as well."""

    def reads(self, kind: type) -> Container[str] | None:
        return self._names.attributes if issubclass(kind, nn.Module) else super().reads(kind)
