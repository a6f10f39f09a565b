"""Whether a program changes the user's objects at every call, or at its first one only.

A flag that says that something was set up, hooks that a library installs when it is first called, a cache that is
filled: what was changed once is not changed again. So a program that has changed what a compiled call cannot change is
run once more, on abstract tensors as before, from what it has left. If that changes nothing, one call of the original
makes the change, and the program can be recorded from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import FirstCallError, ForegradError
from ..record.fakify import Argument
from ..record.retrace import Retrace
from ..record.session import Session
from ..record.survivors import escape_error
from .snapshot import Refused, Snapshot
from .walk import Walk


class NextCall:
    """What the next call of a program would do to the user's objects, after what the first one has done."""

    def __init__(self, session: Session, reachable: Walk, given: Callable[[], tuple[Any, ...]]) -> None:
        self._session = session
        self._reachable = reachable  # as the first call has left it
        self._given = given  # what the program was called with

    def decide(self, refused: Refused, run: Callable[[list[Any]], Any], arguments: Sequence[Argument]) -> Exception:
        """What is to be said about a change: that the first call only makes it, or what the next one is refused for."""
        try:
            error = self._refusal(run, arguments)
        except ForegradError as another:
            return another
        except Retrace:
            return refused.error
        except Exception:  # the next call raises an error of its own, and the first one does not
            error = None
        return error or FirstCallError(
            f"the program changes {refused.path} at its first call, and not again at the next"
        )

    def _refusal(self, run: Callable[[list[Any]], Any], arguments: Sequence[Argument]) -> Exception | None:
        """The error for what the next call changes and a compiled call would not; what it changes is undone."""
        session, reachable = self._session, self._reachable
        snapshot = Snapshot(reachable.reached)
        reachable.tell(snapshot.add)
        session.recorder.generators.known = reachable.generators
        session.noting_code, session.kernel_runs = reachable.noting_code, reachable.kernel_runs
        try:
            try:
                again = session.run_again(run, arguments)
            finally:
                session.arguments = self._given()
            survivors = snapshot.survivors(session, again=again)
            if survivors:
                return escape_error(survivors[0], again)
            changed = snapshot.changes()
            snapshot.assigned(session, changed)
            refused = snapshot.refused(session, changed)
            return None if refused is None else refused.error
        finally:
            snapshot.undo(session)
            snapshot.forget_calls()
            reachable.recording_ends()
