"""Show a report, as plain text or, on a terminal, with rich; and say what is being done."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from .parts import Part, as_text


def show(parts: Sequence[Part], stream: TextIO | None = None) -> None:
    """Print a report."""
    stream = stream or sys.stdout
    if has_rich(stream):
        from .with_rich import show_with_rich

        show_with_rich(parts, stream)
        return
    for part in parts:
        print(*as_text(part), "", sep="\n", file=stream)


def has_rich(stream: TextIO) -> bool:
    """Whether a stream is a terminal, and rich is installed."""
    return stream.isatty() and importlib.util.find_spec("rich") is not None


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Say on the error stream what is being done, for as long as it takes."""
    if has_rich(sys.stderr):
        import rich.console

        with rich.console.Console(stderr=True).status(what):
            yield
    else:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield
