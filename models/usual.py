"""The patterns of `torch.nn`, as cases of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .case import Call, Case, Trial
from .patterns import PATTERNS, Make


def _maker(make: Make) -> Callable[[], Trial]:
    def made() -> Trial:
        program, arguments = make()
        return Trial(program, lambda: Call(arguments()))

    return made


def cases() -> Iterator[Case]:
    """The patterns of the table."""
    yield from (Case("nn", name, _maker(make)) for name, make in PATTERNS)
