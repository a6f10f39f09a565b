"""Code of the user's that runs in a backward: custom functions, hooks, what a checkpoint runs again.

Eager runs it when backward is called, and it finds Python's state as it is then. It is recorded behind the forward, so
what it reads is noted, and compared when the compiled backward runs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from .._torch import CALL_OF_A_MODULE
from ..slots import Primal
from ..values import loosely
from .lines import is_users_code

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Call(NamedTuple):
    """A function that ran: its code, its namespace, and what it was given or found in enclosing functions."""

    code: CodeType
    namespace: dict[str, Any]
    values: dict[str, Any]


class UserCode:
    """What ran while a backward was recorded."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.tensors: dict[Primal, Tensor] = {}  # real ones that it found by itself
        self._modules: dict[int, weakref.ref[nn.Module]] = {}  # by id
        self._seen: set[tuple[int, ...]] = set()

    def note(self, frame: FrameType) -> None:
        """A function is called."""
        code = frame.f_code
        if is_users_code(code) and frame.f_builtins:  # without them it reads its arguments alone: a named tuple's
            values = frame.f_locals
            key = id(code), *map(id, values.values())
            if key not in self._seen and not _is_imported(frame):
                self._seen.add(key)
                self.calls.append(Call(code, frame.f_globals, dict(values)))
        elif code is CALL_OF_A_MODULE:
            module = frame.f_locals["self"]
            self._modules[id(module)] = weakref.ref(module)

    def living_calls(self) -> list[Call]:
        """The calls, with those of their values that live on without them; the calls are forgotten.

        What the backward itself has made and dropped is nothing that anybody could change.
        """
        loose = [(c.code, c.namespace, {name: loosely(v) for name, v in c.values.items()}) for c in self.calls]
        self.calls.clear()
        calls = []
        for code, namespace, references in loose:
            values = {name: reference() for name, reference in references.items()}
            alive = {name: value for name, value in values.items() if value is not None}
            calls.append(Call(code, namespace, alive))
        return calls

    def living_modules(self) -> list[nn.Module]:
        """The modules that were called, torch's own too: their hooks and their attributes are the user's to change."""
        found = [reference() for reference in self._modules.values()]
        return [module for module in found if module is not None]


def _is_imported(frame: FrameType) -> bool:
    """Whether a function runs because the backward imports a module, which happens once."""
    back: FrameType | None = frame
    while back is not None and not back.f_code.co_filename.startswith(_OURS):
        if back.f_code.co_filename.startswith("<frozen importlib"):
            return True
        back = back.f_back
    return False


class BackwardState(Protocol):
    """Python state that a recorded backward has read."""

    @property
    def tensors(self) -> Sequence[Primal]:
        """Inputs that it found by itself."""

    def holds(self) -> bool:
        """Whether it is as it was."""

    def require_same(self, tensors: Sequence[Tensor]) -> None:
        """Raise if the inputs that it found are not those that the forward has taken."""


class Changes(Protocol):
    """The user's objects, as they were."""

    def undo(self, recording: Any) -> Exception | None:
        """Put back what a recording changed; gives the error for it."""


class BackwardGuards(Protocol):
    """Guards what code of the user's does in backwards."""

    def read_by(self, code: UserCode) -> BackwardState | None:
        """What it has read."""

    def before(self) -> Changes | None:
        """The user's objects before it runs once more; None while the program is recorded, when others look at them."""


@contextlib.contextmanager
def user_code_seen() -> Iterator[UserCode]:
    """Collects the functions that are called; a debugger, or whoever else traces the thread, goes on."""
    found, before = UserCode(), sys.gettrace()

    def note(frame: FrameType, event: Any, argument: Any) -> Any:
        if event == "call":
            found.note(frame)
        return None if before is None else before(frame, event, argument)

    sys.settrace(note)
    try:
        yield found
    finally:
        sys.settrace(before)
