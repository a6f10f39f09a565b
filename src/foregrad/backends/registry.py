"""Backends by their names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

from .._torch import registered_backend, registered_backends
from ..errors import ConfigError, did_you_mean
from ..options import Compiler
from ..runtime.compilers import make_boxed_func
from . import cudagraphs, eager, inductor
from .backend import Backend, of_compiler

_OWN = ("inductor", "eager", "cudagraphs")


def names() -> list[str]:
    """The names that `backend` may have: Foregrad's own, then those that torch knows."""
    return [*_OWN, *(name for name in registered_backends() if name not in _OWN)]


def named(
    backend: str | Compiler,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fallback: Literal["error", "eager"] = "error",
) -> Backend:
    """A backend by its name, or one that compiles graphs with a function.

    >>> named("eager").name
    'eager'
    >>> named("inducto")
    Traceback (most recent call last):
    foregrad.errors.ConfigError: There is no backend 'inducto'. Did you mean 'inductor'? There are: inductor, ...
    """
    if backend == "inductor":
        return inductor.backend(mode, options)
    if backend == "cudagraphs":
        return cudagraphs.backend(mode, options, named, fallback)
    if mode is not None or options:
        given = "mode" if mode is not None else "options"
        raise ConfigError(f"{given} is for the backend 'inductor'; backend={backend!r} has none.")
    if backend == "eager":
        return eager.backend()
    if callable(backend):
        return of_compiler(getattr(backend, "__name__", type(backend).__name__), backend)
    if not isinstance(backend, str):
        raise ConfigError(f"backend must be a name or a function that compiles a graph, not {backend!r}.")
    known = names()
    if backend not in known:
        raise ConfigError(
            f"There is no backend {backend!r}.{did_you_mean(backend, known)} There are: {', '.join(known)}."
        )
    compiler = registered_backend(backend)  # by torch's contract, what it returns takes separate arguments
    return of_compiler(backend, functools.partial(_compile_boxed, compiler))


def _compile_boxed(compiler: Compiler, graph: Any, examples: Any) -> Any:
    return make_boxed_func(compiler(graph, examples))
