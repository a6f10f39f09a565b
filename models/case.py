"""A model of the table, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """A module or function, and what makes the arguments of one call."""

    program: Callable[..., Any]
    inputs: Callable[[], Call]


@dataclass(frozen=True)
class Case:
    """A model of the table; it is made in the process that tries it."""

    library: str
    name: str
    make: Callable[[], Trial]
