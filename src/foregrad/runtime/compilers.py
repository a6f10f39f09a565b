"""Call the user's compilers, and hold them to their contract."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import FakeTensor, TracingContext, ambient_state_kept, autocast_off, garbage_collection_paused
from ..errors import CompilerError
from ..joint.lazy import outputs_of, value_of
from ..locks import recording_lock
from ..logs import Phase, compiling, show_graph
from ..options import AOTConfig, Compiler
from ..record.engine import Engine

Boxed = Callable[[list[Any]], Any]


def make_boxed_func(f: Callable[..., Any]) -> Boxed:
    """A function of one list, which it may empty, from a function of separate arguments.

    >>> make_boxed_func(lambda a, b: a + b)([1, 2])
    3
    """

    def boxed(args: list[Any]) -> Any:
        return f(*args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def make_boxed_compiler(compiler: Compiler) -> Compiler:
    """A compiler whose result takes one list, from a compiler whose result takes separate arguments.

    >>> make_boxed_compiler(lambda graph, inputs: lambda a, b: a + b)(None, ())([1, 2])
    3
    """

    def boxed_compiler(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        return make_boxed_func(compiler(graph, example_inputs))

    return boxed_compiler


@contextlib.contextmanager
def _ambient_state_kept() -> Iterator[None]:
    """Put back what a compiler may change, and not while another thread records: that would be its program's doing."""
    kept = ambient_state_kept()
    kept.__enter__()
    try:
        yield
    finally:
        with recording_lock:
            kept.__exit__(None, None, None)


def compile_graph(
    compiler: Compiler | None, module: fx.GraphModule, examples: Sequence[Any], phase: Phase, config: AOTConfig
) -> tuple[Boxed, list[Any] | None]:
    """Compile one graph; also gives the strides of its outputs, if the compiler reported them."""
    if not callable(compiler):
        raise CompilerError(f"The compiler for the {phase} graph is {compiler!r}; it must be a function.")
    if config.enable_log:
        show_graph(lambda: module, phase, config.aot_id)
    with (
        compiling(config.aot_id, phase),
        _ambient_state_kept(),
        autocast_off(),
        torch.no_grad(),
        TracingContext.report_output_strides() as strides,
    ):
        try:
            compiled = compiler(module, list(examples))
        except Exception as error:
            raise CompilerError(
                f"The compiler of the {phase} graph raised {type(error).__name__}: {error}\n"
                "Nothing was compiled. Run the graph as it is with lambda graph, inputs: "
                "make_boxed_func(graph.forward) to see whether the graph is at fault."
            ) from error
    if not callable(compiled):
        raise CompilerError(
            f"The compiler of the {phase} graph returned a {type(compiled).__name__}; it must return a function."
        )
    return _boxed(compiled, phase), list(strides) if strides else None


def _boxed(compiled: Callable[..., Any], phase: Phase) -> Boxed:
    if getattr(compiled, "_boxed_call", False):
        return compiled
    if phase == "backward":
        warnings.warn(
            "Your compiler for AOTAutograd is returning a function that doesn't take boxed arguments. Please wrap it "
            "with foregrad.make_boxed_func or handle the boxed arguments yourself: memory is freed later than it "
            "could be.",
            stacklevel=2,
        )
    return make_boxed_func(compiled)


def checked(compiled: Boxed, phase: Phase, module: fx.GraphModule, install: Callable[[Boxed], None]) -> Boxed:
    """Check the number of outputs in the first call, then get out of the way."""
    outputs = outputs_of(module)
    expected = len(outputs)

    def single(args: list[Any]) -> Any:
        return (compiled(args),)

    def first(args: list[Any]) -> Any:
        with garbage_collection_paused():  # compilers finish their work in the first call
            result = compiled(args)
        bare = not isinstance(result, (list, tuple))
        count = 1 if bare else len(result)
        if count != expected:
            raise CompilerError(
                f"The compiled {phase} graph returned {count} values where the graph has {expected} outputs. The "
                "compiler must return a function that gives one value for each output of the graph, in order."
            )
        for i, value in enumerate((result,) if bare else result):
            node = outputs[i]
            if not isinstance(value, torch.Tensor) and isinstance(value_of(node), torch.Tensor):
                raise CompilerError(
                    f"The compiled {phase} graph returned a {type(value).__name__} as its output {i}, where the graph "
                    f"has the tensor {node.name}. The compiler must return a function that gives what the graph gives."
                )
        install(single if bare else compiled)
        return (result,) if bare else result

    return first


def example_values(engine: Engine, values: Sequence[Any], strides: Sequence[Any] | None = None) -> list[Any]:
    """What a compiler is shown for the inputs of a graph: abstract tensors that autograd does not know.

    Strides, where a compiler reported them, replace those of the recording.
    """
    tensors = iter(engine.shown([value for value in values if isinstance(value, FakeTensor)]))
    shown = [next(tensors) if isinstance(value, FakeTensor) else value for value in values]
    for i, wanted in enumerate(strides or ()):
        value = shown[i]
        if wanted is not None and isinstance(value, FakeTensor) and tuple(wanted) != tuple(value.stride()):
            shown[i] = engine.strided(value, wanted, engine.device_of(value))
    return shown
