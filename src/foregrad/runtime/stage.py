"""A run-time concern around the compiled graphs.

A stage writes lines on the way in and on the way out. Stages nest: the first of the list is the outermost. A concern
that a program does not have adds no stage, and so no line.
"""

from __future__ import annotations

from .writer import Writer


class Stage:
    """One concern: what it writes before the inner stages, and what behind them; by default nothing."""

    def enter(self, writer: Writer) -> None:
        """Lines on the way in."""

    def leave(self, writer: Writer) -> None:
        """Lines on the way out."""
