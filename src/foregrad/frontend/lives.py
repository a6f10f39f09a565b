"""Objects that a compiled program knows and does not keep alive.

A program whose guards have met an object can never run again once that object is gone: nothing else can be it. So
objects are referred to weakly and known by their ids, and when the first of them goes, whatever else was kept for the
program is let go with it: lists and dicts, to which Python knows no weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Lives:
    """The objects that one program depends on, as long as all of them live.

    >>> class Thing: pass
    >>> thing, lives, said = Thing(), Lives(), []
    >>> lives.when_gone(lambda: said.append("gone"))
    >>> find = lives.hold(thing)
    >>> find() is thing, lives.is_gone
    (True, False)
    >>> del thing
    >>> lives.is_gone, said
    (True, ['gone'])
    """

    def __init__(self) -> None:
        self.is_gone = False
        self._references: dict[int, weakref.ref[Any]] = {}  # by the id of the object
        self._actions: list[Callable[[], None]] = []
        this = weakref.ref(self)

        def end(_: Any) -> None:
            lives = this()
            if lives is not None:
                lives.end()

        self._callback = end

    def hold(self, value: Any) -> Callable[[], Any]:
        """A way to an object; one that cannot be referred to weakly is kept alive."""
        return self._reference(value) or (lambda: value)

    def knows(self, value: Any) -> bool:
        """Whether an object can be known by its id from now on: no other one has it while this one lives."""
        return self._reference(value) is not None

    def when_gone(self, action: Callable[[], None]) -> None:
        """What is to be done when the first of the objects is gone."""
        self._actions.append(action)

    def _reference(self, value: Any) -> weakref.ref[Any] | None:
        known = self._references.get(id(value))
        if known is None:
            try:
                known = self._references[id(value)] = weakref.ref(value, self._callback)
            except TypeError:
                return None
        return known

    def join(self, other: Lives) -> None:
        """Let both end when one does."""
        self.when_gone(other.end)
        other.when_gone(self.end)

    def end(self) -> None:
        """Let everything go. May be called by any thread, wherever Python lets go of something."""
        self.is_gone = True
        actions, self._actions = self._actions, []
        for action in actions:
            action()
