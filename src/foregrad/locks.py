"""Locks that hold between threads, and that a forked process finds open."""

from __future__ import annotations

import os
import threading
from typing import Any


class Lock:
    """A reentrant lock. In a forked process it starts anew: the thread that held it does not exist there.

    >>> lock = Lock()
    >>> with lock, lock: print("twice by one thread")
    twice by one thread
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._holders: list[int] = []  # the thread that holds it, once for each time

    def __enter__(self) -> None:
        if self._process != os.getpid():
            self._process, self._lock, self._holders = os.getpid(), threading.RLock(), []
        self._lock.acquire()
        self._holders.append(threading.get_ident())

    def __exit__(self, *_: Any) -> None:
        self._holders.pop()
        self._lock.release()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds it."""
        return self._process == os.getpid() and threading.get_ident() in self._holders


# Held while a program runs on abstract tensors, which it may put into modules until that is undone, and while a
# compiled call puts tensors there.
recording_lock = Lock()

# Held while a program is recorded, and while one runs as it was written to change what only its first call changes:
# that must not be taken for what a recording did. It is taken before the other lock, which a backward in another thread
# may need meanwhile.
state_lock = Lock()
