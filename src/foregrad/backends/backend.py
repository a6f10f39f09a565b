"""What a backend is, and how it is found by its name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .._torch import registered_backend, registered_backends
from ..errors import ConfigError
from ..options import Compiler, Compilers
from ..runtime.compilers import make_boxed_func

Decompositions = Mapping[Any, Callable[..., Any]]

_OWN = ("inductor", "eager")  # each is a file here, with a function `backend(mode, options)`


@dataclass(frozen=True)
class Backend:
    """Compilers for the graphs of a program, and what is recorded for them."""

    name: str
    new_compilers: Callable[[], Compilers]  # called once for each program
    decompositions: Callable[[], Decompositions] | None = None
    writes_inputs: bool = False  # whether its inference graphs may write to inputs themselves


def names() -> list[str]:
    """The names that `backend` may have: Foregrad's own, then those that torch knows."""
    return [*_OWN, *(name for name in registered_backends() if name not in _OWN)]


def named(backend: str | Compiler, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Backend:
    """A backend by its name, or one that compiles graphs with a function.

    >>> named("eager").name
    'eager'
    >>> named("inducto")
    Traceback (most recent call last):
    foregrad.errors.ConfigError: There is no backend 'inducto'. Did you mean 'inductor'? There are: inductor, eager, ...
    """
    if isinstance(backend, str) and backend in _OWN:
        made: Backend = importlib.import_module(f".{backend}", __package__).backend(mode, options)
        return made
    if mode is not None or options:
        given = "mode" if mode is not None else "options"
        raise ConfigError(f"{given} is for the backend 'inductor'; backend={backend!r} has none.")
    if callable(backend):
        return of_compiler(getattr(backend, "__name__", type(backend).__name__), backend)
    if not isinstance(backend, str):
        raise ConfigError(f"backend must be a name or a function that compiles a graph, not {backend!r}.")
    known = names()
    if backend not in known:
        near = difflib.get_close_matches(backend, known, 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"There is no backend {backend!r}.{meant} There are: {', '.join(known)}.")
    compiler = registered_backend(backend)  # by torch's contract, what it returns takes separate arguments
    return of_compiler(backend, lambda graph, examples: make_boxed_func(compiler(graph, examples)))


def of_compiler(name: str, compiler: Compiler) -> Backend:
    """A backend that compiles every graph in the same way."""

    def boxed(graph: Any, examples: Any) -> Any:
        compiled = compiler(graph, examples)
        is_boxed = getattr(compiled, "_boxed_call", False) or not callable(compiled)
        return compiled if is_boxed else make_boxed_func(compiled)

    compilers = Compilers(boxed, boxed, boxed)
    return Backend(name, lambda: compilers)
