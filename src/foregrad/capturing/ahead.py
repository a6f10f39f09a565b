"""What a program comes to reach while it runs, found before it gets there.

Where a program puts names together, the names in its code do not tell which functions it calls. So each function is
looked at when it is about to run for the first time: what it can reach is noted then, so that it can be put back, and
what nobody could put back is refused before anything is taken out of it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Container, Sequence, Sized
from typing import Any

from torch import nn

from .._torch import without_function_modes
from ..errors import UnsupportedError
from .code import CodeThatRan, is_library_function, names_in
from .kinds import FUNCTION
from .sources import FreeVariables, Holder, Reached, Ts, looked_at, refuse_unknown
from .state_guards import StateGuard


class Ahead(FreeVariables):
    """What the functions of a program lead to, each looked at before it first runs."""

    def __init__(self, root: Callable[..., Any], arguments: Sequence[tuple[str, Any]]) -> None:
        self._root, self._arguments = root, arguments
        self._code: dict[int, types.CodeType] = {}  # of the user's functions that have run, or are about to, by id
        self._waiting: dict[int, list[types.FunctionType]] = {}  # by the id of their code
        self._taken = [0] * 5  # how many holders, tensors, globals and modules the last taking had
        self._tell: Callable[[Reached], None] = lambda reached: None
        super().__init__(root, arguments, ran={})
        self.code_that_ran = CodeThatRan(self._look)
        self._take()

    def note_state(self) -> None:
        """Nothing is compared with what is found here: which code runs will tell what counts."""

    def tell(self, note: Callable[[Reached], None]) -> None:
        """Tell from now on what comes to what was reached so far."""
        self._tell = note

    def noting_code(self) -> contextlib.AbstractContextManager[None]:
        """Notes which code runs; what it leads to is looked at before."""
        assert self.code_that_ran is not None
        return self.code_that_ran.noting()

    def recording_ends(self) -> None:
        """Let go of everything but the code."""
        assert self.code_that_ran is not None
        self.code_that_ran.named_beside |= self.named_by_getters
        self.release()

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
        if self._used_up:
            self._refuse_what_is_used_up()
        self._tell(self._take())

    def _refuse_what_is_used_up(self) -> None:
        with looked_at(), without_function_modes():
            named = _Named(self._root, self._arguments, self._code)
        try:
            refuse_unknown(named._used_up)
        except UnsupportedError as error:
            self.refusal = error
            raise

    def release(self) -> None:
        """Let go of everything, when the recording is over."""
        super().release()
        self._waiting.clear()
        self._root, self._arguments = len, ()
        self._tell = lambda reached: None

    def _take(self) -> Reached:
        """What was found since the last time."""
        before, now = self._taken, self._counts()
        self._taken = now
        return Reached(
            self.holders[before[0] :],
            self.tensors[before[1] :],
            self.stored_globals[before[2] :],
            dict([*self.modules.items()][before[3] :]) if now[3] > before[3] else {},  # dicts keep their order
            dict([*self.modules_in_arguments.items()][before[4] :]) if now[4] > before[4] else {},
        )

    def _counts(self) -> list[int]:
        found: list[Sized] = [self.holders, self.tensors, self.stored_globals, self.modules, self.modules_in_arguments]
        return list(map(len, found))

    def _enter_function(self, function: Any, path: str) -> None:
        if issubclass(type(function), types.FunctionType) and id(function) not in self._seen:
            self._seen[id(function)] = function
            self._waiting.setdefault(id(function.__code__), []).append(function)
            if not is_library_function(function):  # it may be given attributes without being called
                self.holders.append(Holder(function.__name__, function, FUNCTION, self._in_argument))
            if self._in_argument:
                self._private.add(id(function))

    def _guard(self, add: Callable[[StateGuard, *Ts], None], *args: *Ts) -> None:
        """Nothing is compared with what is found here."""

    @property
    def _reads_everything(self) -> bool:
        return True


class _Named(FreeVariables):
    """What functions that have run lead to by names that stand in them, as far as these tell."""

    def _may_read(self, kind: type) -> Container[str] | None:
        assert self._reads is not None
        return self._reads.attributes if issubclass(kind, nn.Module) else super()._may_read(kind)
