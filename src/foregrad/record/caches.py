"""What selective checkpoints keep of a region: its recomputation takes the values out, once.

A tape is asked for several backwards, so that the values are put back before each. Which regions a backward has
emptied is noted: eager refuses to run another one through them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any


class Caches:
    """The values that the selective checkpoints of a recording keep."""

    def __init__(self) -> None:
        self._kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # each storage, and what the forward left there
        self._found: list[dict[Any, Any]] = []

    def add(self, storage: dict[Any, Any]) -> None:
        """A region begins."""
        self._found.append(storage)

    def finish(self) -> None:
        """The forward has run."""
        self._kept = [(storage, _copied(storage)) for storage in self._found]

    def refill(self) -> None:
        """Let another backward be recorded."""
        for storage, kept in self._kept:
            storage.clear()
            storage.update(_copied(kept))

    def emptied(self) -> frozenset[int]:
        """The regions that were recomputed since."""
        return frozenset(i for i, (storage, kept) in enumerate(self._kept) if not _same(storage, kept))


def _copied(storage: dict[Any, Any]) -> dict[Any, Any]:
    return {key: copy.copy(values) for key, values in storage.items()}


def _same(storage: dict[Any, Any], kept: dict[Any, Any]) -> bool:
    now, before = list(_values(storage)), list(_values(kept))
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _values(storage: dict[Any, Any]) -> Iterator[Any]:
    for values in storage.values():  # lists of values in torch 2.11, dicts of them in torch 2.13
        yield from values.values() if isinstance(values, dict) else values
