"""The backends of `torch.compile`: "foregrad", "foregrad_eager", and those that `foregrad.backend` makes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx

from .._torch import FrontEnd, counts_aot, never_traced, passes_through, reads_are_captured
from ..api import flat_call, resolve
from ..backends import named
from ..capturing.capture import state_of
from ..capturing.graph_programs import run_graph_program
from ..compiling import Asked, decomposition_table, partitioner
from ..errors import CompilerError, ConfigError, DataDependentError, EagerFallbackWarning, ForegradError
from ..options import AOTConfig, Compiler, Partitioner, config
from .graphs import inputs_of

log = logging.getLogger("foregrad")

_OWN = ("compiler", "partition", "memory_budget", "decompositions", "fallback")


@dataclass(frozen=True)
class Settings:
    """What a backend was asked for."""

    compiler: str | Compiler = "inductor"
    mode: str | None = None
    partition: str | Partitioner | None = None
    memory_budget: float | None = None
    decompositions: Asked = None
    fallback: Literal["error", "eager"] | None = None
    options: Mapping[str, Any] | None = None

    def with_options(self, mode: str | None, options: Mapping[str, Any] | None) -> Settings:
        """With those of a `torch.compile`: some are Foregrad's, the rest is the compiler's."""
        given = dict(options or {})
        own = {name: given.pop(name) for name in _OWN if name in given}
        compilers = {**(self.options or {}), **given} or None
        return replace(self, mode=self.mode if mode is None else mode, options=compilers, **own)

    def resolved(self) -> AOTConfig:
        """As the options of one compilation."""
        found = named(self.compiler, self.mode, self.options, self.fallback or config.fallback)
        return resolve(
            None,
            None,
            None,
            self.fallback,
            self.memory_budget,
            partition_fn=found.partition if self.partition is None else partitioner(self.partition),
            decompositions=decomposition_table(found, self.decompositions),
            num_params_buffers=0,
            keep_inference_input_mutations=found.writes == "to inputs",
            draws_in_order=found.draws_in_order,
            new_compilers=found.new_compilers,
            front_end=FrontEnd.now(),
        )


class DynamoBackend:
    """A backend of `torch.compile`.

    >>> import foregrad
    >>> foregrad.backend("eager", memory_budget=0.5)
    <foregrad backend: compiler='eager', memory_budget=0.5>
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.__name__ = name
        self.settings = settings

    def __repr__(self) -> str:
        said = [f"{name}={value!r}" for name, value in vars(self.settings).items() if value is not None]
        return f"<{self.__name__} backend: {', '.join(said)}>"

    def __call__(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs; `mode` and `options` are those of `torch.compile`."""
        resolved = self.settings.with_options(mode, options).resolved()
        counts_aot("total")
        try:
            call = _compiled(graph, example_inputs, resolved)
        except ForegradError as error:
            counts_aot("not_ok")
            if resolved.options.fallback != "eager" or isinstance(error, ConfigError):
                raise
            warnings.warn(
                f"A graph of torch.compile runs as it is, without Foregrad: {error}", EagerFallbackWarning, stacklevel=2
            )
            return never_traced(lambda *args: run_graph_program(graph, *args))
        counts_aot("ok")
        return call


def _compiled(graph: fx.GraphModule, inputs: Sequence[Any], resolved: AOTConfig) -> Callable[..., Any]:
    slots, given = inputs_of(graph, inputs)
    resolved = replace(resolved, num_params_buffers=len(state_of(graph, dynamic=False)))
    try:
        return never_traced(flat_call(graph, given, resolved.for_program(), slots))
    except DataDependentError as error:
        if not reads_are_captured():
            raise
        raise DataDependentError(
            f"{error} Or leave torch._dynamo.config.capture_scalar_outputs and capture_dynamic_output_shape_ops off: "
            "Dynamo breaks the graph there, and the read runs as it is."
        ) from error
    except Exception as error:
        if isinstance(error, (CompilerError, ConfigError)) or passes_through(error):
            raise
        front_end = resolved.front_end
        if front_end is None or not front_end.give_up_symbols(inputs):
            raise
        log.debug("compiling with symbolic sizes failed, numbers are tried: %s", error)
    return never_traced(flat_call(graph, given, resolved.for_program(), slots))


def backend(
    compiler: str | Compiler = "inductor",
    *,
    mode: str | None = None,
    partition: str | Partitioner | None = None,
    memory_budget: float | None = None,
    decompositions: Asked = None,
    fallback: Literal["error", "eager"] | None = None,
    options: Mapping[str, Any] | None = None,
) -> DynamoBackend:
    """A backend for `torch.compile`: Dynamo in front, Foregrad in the middle, any compiler behind.

    >>> import torch, foregrad
    >>> def compiler(graph, example_inputs):
    ...     print(len(graph.graph.nodes), "nodes")
    ...     return foregrad.backends.run_graph(graph, example_inputs)
    >>> torch.compile(torch.sin, backend=foregrad.backend(compiler))(torch.zeros(2))
    3 nodes
    tensor([0., 0.])

    Where the package is installed, `torch.compile(model, backend="foregrad")` and `"foregrad_eager"` do the same with
    Inductor and with the graphs as they are, and take these arguments, but for `mode`, as `options`.

    Args:
        compiler: as `backend` of `foregrad.compile`: a name, or a function of a graph and its example inputs.
        mode, options: for the compiler; those of `torch.compile` are added to them.
        partition, memory_budget, decompositions, fallback: as for `foregrad.compile`.
    """
    settings = Settings(compiler, mode, partition, memory_budget, decompositions, fallback, options)
    named(compiler, mode, options, fallback or config.fallback)  # a mistake is said here, and not by Dynamo
    partitioner(partition) if partition is not None else None
    return DynamoBackend("foregrad", settings)


foregrad = DynamoBackend("foregrad", Settings("inductor"))
foregrad_eager = DynamoBackend("foregrad_eager", Settings("eager"))
