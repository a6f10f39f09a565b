"""`foregrad.compile`: a function or a module behind a backend, in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn

from ._torch import core_aten_decompositions, inductor_decompositions
from .api import module_with, resolve
from .backends import Backend, named
from .backends.backend import Decompositions
from .capturing.compiled import Compiled
from .errors import ConfigError
from .options import Compiler, Partitioner, config
from .partition import default_partition, min_cut_rematerialization_partition

Asked = Literal["core_aten", "inductor"] | Decompositions | None
"""Decompositions by name, or a table of them."""

_TABLES: dict[str, Callable[[], Decompositions]] = {
    "core_aten": core_aten_decompositions,
    "inductor": inductor_decompositions,
}
_PARTITIONS: dict[str, Partitioner] = {"default": default_partition, "min_cut": min_cut_rematerialization_partition}


def compile(
    fn_or_module: Callable[..., Any] | nn.Module,
    backend: str | Compiler = "inductor",
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    partition: str | Partitioner | None = None,
    memory_budget: float | None = None,
    decompositions: Asked = None,
    fallback: Literal["error", "eager"] | None = None,
    inplace: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a function or a module: it runs faster, and behaves as before.

    >>> import torch, foregrad
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    >>> compiled = foregrad.compile(model, backend="eager")
    >>> compiled(torch.ones(2, 3)).sum().backward()
    >>> model[0].weight.grad.shape
    torch.Size([4, 3])

    Args:
        fn_or_module: what to compile.
        backend: "inductor", "eager" (the graphs as they are, freeing as they go), "cudagraphs" (those of another
            backend, launched in one piece), another name of `foregrad.backends.names()`, or a function
            `compiler(graph_module, example_inputs)`.
        mode: as for `torch.compile`, for Inductor: "reduce-overhead", "max-autotune", ...
        dynamic: True makes sizes and ints symbols from the start, False never; None, once they have changed.
        partition: what is saved for backward: "min_cut" (the default, but for "eager"), "default", or a partitioner.
        memory_budget: what a training step may have alive at its peak, see `min_cut_rematerialization_partition`.
        decompositions: what to record in the place of operators: a table, or torch's own, "core_aten" or "inductor".
        fallback: "eager" runs what cannot be compiled as it is, with one warning.
        inplace: let the graph of a program that writes, and is not differentiated, write in place as soon as the old
            value is dead. It takes less memory; a program that fails half-way has written some of it, as in eager.
        options: settings of Inductor, by the names that `torch.compile` takes; for "cudagraphs", "backend" as well.
    """
    _require_program(fn_or_module, dynamic)
    found = named(backend, mode, options, fallback or config.fallback)
    resolved = resolve(
        None,
        None,
        None,
        fallback,
        memory_budget,
        partition_fn=found.partition if partition is None else partitioner(partition),
        decompositions=decomposition_table(found, decompositions),
        num_params_buffers=0,
        keep_inference_input_mutations=inplace or found.writes == "to inputs",
        draws_in_order=found.draws_in_order,
        numbers=found.numbers,
        inplace=inplace and found.writes == "asked for",
        dynamic_shapes=bool(dynamic),
        symbols_once_changed=dynamic is None,
        new_compilers=found.new_compilers,
    )
    if isinstance(fn_or_module, nn.Module):
        return module_with(fn_or_module, resolved)
    return Compiled(fn_or_module, None, resolved)


def _require_program(fn_or_module: object, dynamic: object) -> None:
    if not callable(fn_or_module):
        raise ConfigError(f"foregrad.compile compiles a function or a module, not {fn_or_module!r}.")
    if dynamic not in (None, True, False):
        raise ConfigError(f"dynamic must be True, False or None, not {dynamic!r}.")


def decomposition_table(backend: Backend, asked: Asked) -> Decompositions | None:
    """What is taken apart: on the backend's wish and on the user's, who has the last word."""
    wanted = backend.decompositions() if backend.decompositions is not None else {}
    if asked is not None and not isinstance(asked, Mapping):
        if not isinstance(asked, str) or asked not in _TABLES:
            raise ConfigError(f"decompositions must be {' or '.join(map(repr, _TABLES))}, or a table, not {asked!r}.")
        asked = _TABLES[asked]()
    return {**wanted, **(asked or {})} or None


def partitioner(partition: str | Partitioner) -> Partitioner:
    """A partitioner by its name."""
    if callable(partition):
        return partition
    if not isinstance(partition, str) or partition not in _PARTITIONS:
        raise ConfigError(f"partition must be {' or '.join(map(repr, _PARTITIONS))}, or a function, not {partition!r}.")
    return _PARTITIONS[partition]
