"""Call the user's compilers, and hold them to their contract."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import (
    FakeTensor,
    ambient_state_kept,
    autocast_off,
    equal_for_all_sizes,
    garbage_collection_paused,
    output_strides_reported,
    passes_through,
)
from ..abstract.engine import Engine
from ..abstract.lean_tensors import to_fake_tensors
from ..errors import CompilerError, EagerFallbackWarning, ForegradError, UnsupportedError
from ..graph.fx import boxed_code, from_fx, to_fx
from ..graph.graph import Graph, GraphOutput, Node
from ..graph.reads import READ
from ..graph.verify import verify
from ..locks import recording_lock
from ..logs import Phase, compiling, show_graph
from ..ops import aten
from ..options import AOTConfig, Compiler, JointPass, Partitioner
from ..partition.default import cut, default_partition
from ..partition.rematerialize import min_cut_rematerialization_partition, rematerialized
from ..slots import Base, Output, RandomState, Slot, belongs_to_backward, outermost

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

    A result that takes one list already, and says so by its `_boxed_call`, is left as it is.

    >>> make_boxed_compiler(lambda graph, inputs: lambda a, b: a + b)(None, ())([1, 2])
    3
    """

    def boxed_compiler(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        compiled: Any = compiler(graph, example_inputs)
        return compiled if getattr(compiled, "_boxed_call", False) else make_boxed_func(compiled)

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


@dataclasses.dataclass(frozen=True, slots=True)
class CompilerInput:
    """A graph as the run time reads it, and as a compiler gets it, who may edit it."""

    graph: Graph
    module: fx.GraphModule


@dataclasses.dataclass(frozen=True, slots=True)
class GraphSlots:
    """What the inputs and outputs of a graph are, each in the order in which the graph has them."""

    inputs: tuple[Slot | None, ...]
    outputs: tuple[Slot | None, ...]


def for_compiler(graph: Graph) -> CompilerInput:
    """A graph of Foregrad's own for a compiler."""
    return CompilerInput(graph, to_fx(graph))


def compile_graph(
    compiler: Compiler | None, given: CompilerInput, examples: Sequence[Any], phase: Phase, config: AOTConfig
) -> tuple[Boxed, list[Any] | None]:
    """Compile one graph; also gives the strides of its outputs, if the compiler reported them.

    The compiler finds in the module's `meta["slots"]` what each input and output is. With `fallback="eager"` a backward
    that cannot be compiled runs as it is: its forward has run.
    """
    try:
        return _compiled(compiler, given, examples, phase, config)
    except (CompilerError, UnsupportedError) as error:
        if phase != "backward" or config.options.fallback != "eager":
            raise
        return _as_it_is(given.graph, phase, error), None


def _as_it_is(graph: Graph, phase: Phase, error: Exception) -> Boxed:
    """What runs a graph without its compiler, of which the user is told."""
    message = f"the {phase} graph runs as it is, operator by operator: {error}"
    warnings.warn(message, EagerFallbackWarning, stacklevel=2)
    return boxed_code(to_fx(graph))


def _compiled(
    compiler: Compiler | None, given: CompilerInput, examples: Sequence[Any], phase: Phase, config: AOTConfig
) -> tuple[Boxed, list[Any] | None]:
    module = given.module
    module.meta["slots"] = GraphSlots(
        tuple(node.slot for node in given.graph.inputs), tuple(output.slot for output in given.graph.outputs)
    )
    if not callable(compiler):
        raise CompilerError(f"The compiler for the {phase} graph is {compiler!r}; it must be a function.")
    if config.enable_log:
        show_graph(lambda: module, phase, config.aot_id)
    with (
        compiling(config.aot_id, phase),
        config.front_end.entered() if config.front_end is not None else contextlib.nullcontext(),
        _ambient_state_kept(),
        autocast_off(),
        torch.no_grad(),
        output_strides_reported(examples) as strides,
    ):
        try:
            compiled = compiler(module, list(examples))
        except ForegradError:
            raise
        except Exception as error:
            if passes_through(error):
                raise
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


def checked(
    compiled: Boxed,
    phase: Phase,
    graph: Graph,
    config: AOTConfig,
    install: Callable[[Boxed], None],
    reported: Sequence[Any] | None = None,
) -> Boxed:
    """Check the outputs of the first call, then get out of the way.

    `install` puts what is called from then on into its place; `reported` are the strides that the compiler has
    reported. With `fallback="eager"` a graph that may run twice runs as it is where its compiler was wrong.
    """
    runs_again = config.options.fallback == "eager" and not any(node.impure for node in graph.nodes)

    def single(args: list[Any]) -> Any:
        return (compiled(args),)

    def first(args: list[Any]) -> Any:
        kept = list(args) if runs_again else []
        with garbage_collection_paused():  # compilers finish their work in the first call
            result = compiled(args)
        bare = not isinstance(result, (list, tuple))
        results = (result,) if bare else result
        try:
            _require_like(results, phase, graph, reported)
        except CompilerError as error:
            if not runs_again:
                raise
            run = _as_it_is(graph, phase, error)
            install(run)
            return run(kept)
        install(single if bare else compiled)
        return results

    return first


def _require_like(results: Sequence[Any], phase: Phase, graph: Graph, reported: Sequence[Any] | None) -> None:
    """What a compiled graph returns must be what the graph says."""
    if len(results) != len(graph.outputs):
        raise CompilerError(
            f"The compiled {phase} graph returned {len(results)} values where the graph has {len(graph.outputs)} "
            "outputs. The compiler must return a function that gives one value for each output of the graph, in order."
        )
    for i, (value, output) in enumerate(zip(results, graph.outputs, strict=True)):
        if isinstance(output.value, Node) and isinstance(output.value.value, Tensor):
            found = _unlike(value, output, reported[i] if reported else None)
            if found is not None:
                raise CompilerError(
                    f"The compiled {phase} graph returned {found} as its output {i}, where the graph has the tensor "
                    f"{output.value.name}. The compiler must return a function that gives what the graph gives."
                )


def _unlike(value: Any, output: GraphOutput, strides: Any) -> str | None:
    """What was returned in the place of a tensor, if it is not like it. What the user sees lies as it was recorded."""
    wanted: Tensor = output.value.value
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if value.dtype != wanted.dtype:
        return f"a tensor of dtype {value.dtype} (not {wanted.dtype})"
    if not _fits(value.shape, wanted.shape):
        return f"a tensor of shape {tuple(value.shape)} (not {tuple(wanted.shape)})"
    if not isinstance(outermost(output.slot), (Output, Base)) or not value.layout == wanted.layout == torch.strided:
        return None
    places = [i for i, n in enumerate(value.shape) if n > 1] if value.numel() else []
    expected = wanted.stride() if strides is None else strides
    if _fits([value.stride(i) for i in places], [expected[i] for i in places]):
        return None
    return f"a tensor with strides {value.stride()} (not {tuple(expected)})"


def _fits(numbers: Sequence[int], wanted: Sequence[Any]) -> bool:
    """Whether numbers are those that were recorded; symbols may be any."""
    return len(numbers) == len(wanted) and all(
        n == m for n, m in zip(numbers, wanted, strict=True) if isinstance(m, int)
    )


def example_values(engine: Engine, values: Sequence[Any], strides: Sequence[Any] | None = None) -> list[Any]:
    """What a compiler is shown for the inputs of a graph: abstract tensors that autograd does not know.

    Strides, where a compiler reported them, replace those of the recording.
    """
    tensors = iter(engine.shown([value for value in values if isinstance(value, FakeTensor)]))
    shown = [next(tensors) if isinstance(value, FakeTensor) else value for value in values]
    for i, wanted in enumerate(strides or ()):
        value = shown[i]
        if wanted is None or not isinstance(value, FakeTensor):
            continue
        if not equal_for_all_sizes(wanted, value.stride()):
            shown[i] = engine.strided(value, wanted, engine.device_of(value))
    return shown


# ---------------------------------------------------------------------------------------------------------------------
# Anomaly mode: find the operator, and the user's line, that put NaN into a gradient.
#
# `torch.autograd.detect_anomaly()` looks at what each autograd node returns. A compiled backward is one node, so under
# anomaly mode its graph is run operator by operator instead, and looked at wherever one of the recorded nodes ends.
def with_nan_checks(module: fx.GraphModule) -> Boxed:
    """A backward graph that is run operator by operator."""

    def run(args: list[Any]) -> Any:
        if not torch.is_anomaly_check_nan_enabled():
            return module.forward(*args)  # hooks of the user's on all modules are none of its own
        return _Watching(module).run(*args)

    return run


class _Watching(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.name = "the backward graph"  # the interpreter names it in what it adds to errors
        self.extra_traceback = False

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if _is_gradient(node) and isinstance(value, Tensor) and _has_nan(value):
            raise _found(node)
        return value


def _is_gradient(node: fx.Node) -> bool:
    """Whether a value is what an autograd node returns: what others take of the operators that it runs."""
    owner = node.meta.get("autograd_node")
    return owner is not None and any(user.meta.get("autograd_node") != owner for user in node.users)


def _has_nan(value: Tensor) -> bool:
    return (value.is_floating_point() or value.is_complex()) and bool(torch.isnan(value).any())


def _found(node: fx.Node) -> RuntimeError:
    line = node.meta.get("stack_trace")
    forward = f" It differentiates:\n{line}" if line else " No line of the program is known for it."
    return RuntimeError(
        f"Function '{node.meta['autograd_node'][1]}' returned nan values: {node.name} = {node.target}, in the compiled "
        f"backward.{forward}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# A backward under vmap: the graph runs as it is, but for what torch cannot batch.
def batched(module: fx.GraphModule) -> Boxed:
    """A backward graph as a function that may be given batched tangents.

    One of the two vmaps of torch has no rule for `as_strided_scatter`, and the other takes it for an operator on whole
    batches.
    """
    if all(node.target is not aten.as_strided_scatter.default for node in module.graph.nodes):
        return lambda args: module.forward(*args)
    return _Interpreter(module).boxed_run


class _Interpreter(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.as_strided_scatter.default:
            return _scatter(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _scatter(base: Tensor, new: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    """The operator, made of those that can be batched; the copy is batched if one of the two is."""
    if base.storage_offset():
        raise UnsupportedError("a batched backward through as_strided of a part of a storage is not supported yet.")
    one = base.new_zeros(()) + new.new_zeros(())
    copy = one.new_empty_strided(base.shape, base.stride()).copy_(base)
    copy.as_strided(size, stride, storage_offset or 0).copy_(new)
    return copy


# ---------------------------------------------------------------------------------------------------------------------
# Cut a joint graph by the partitioner that was asked for.
def partitioned(
    joint: Graph,
    config: AOTConfig,
    module: Callable[[], fx.GraphModule] | None = None,
    higher: bool = False,
) -> tuple[CompilerInput, CompilerInput]:
    """The forward and the backward.

    `module` gives the graph as `torch.fx`, where it is wanted elsewhere too. `higher` says that the graph is that of a
    gradient to be differentiated: a budget in bytes is about the first order, and what the next one may need stays
    within its reach.
    """
    partition_fn, options = config.partition_fn, config.options
    if config.joint_pass is not None:
        joint, module = config.joint_pass(joint), None
    if options.memory_budget is not None and partition_fn in (None, default_partition):
        partition_fn = min_cut_rematerialization_partition
    if higher and isinstance(options.memory_budget, int):
        options = dataclasses.replace(options, memory_budget=None)
    if partition_fn in (None, default_partition):
        forward, backward = map(for_compiler, cut(joint, options, higher))
    elif partition_fn is min_cut_rematerialization_partition:
        forward, backward = map(for_compiler, rematerialized(joint, options, higher))
    else:
        with torch.no_grad():
            forward, backward = _partitioned_by(partition_fn, joint, module() if module is not None else to_fx(joint))
    backward = _without_read_again(backward)
    if options.verify:
        verify(forward.graph)
        verify(backward.graph)
    return forward, backward


def _without_read_again(backward: CompilerInput) -> CompilerInput:
    """What the forward has read for a backward is saved, so that its version is checked, and that is all."""
    graph = backward.graph
    nodes = [node for node in graph.nodes if node.op is not READ]
    return backward if len(nodes) == len(graph.nodes) else for_compiler(dataclasses.replace(graph, nodes=nodes))


def through_fx(passes: Callable[[fx.GraphModule, Sequence[Any]], fx.GraphModule]) -> JointPass:
    """A pass over joint graphs, from one over graph modules that is shown the values of their inputs."""

    def joint_pass(joint: Graph) -> Graph:
        passed = passes(to_fx(joint), to_fake_tensors([node.value for node in joint.inputs]))
        graph = from_fx(passed, [output.slot for output in joint.outputs])
        for new, old in zip(graph.inputs, joint.inputs, strict=True):
            new.slot, new.value = old.slot, old.value
        return graph

    return joint_pass


def _partitioned_by(
    partition_fn: Partitioner, joint: Graph, module: fx.GraphModule
) -> tuple[CompilerInput, CompilerInput]:
    """The two graphs that a partitioner of the user's makes, with the slots of the joint graph."""
    own, gradients = ([slot for slot, _ in side] for side in (joint.forward_outputs, joint.backward_outputs))
    random = [node.value for node in joint.inputs if isinstance(node.slot, RandomState)]
    rest = [node for node in joint.inputs if not isinstance(node.slot, RandomState)]
    tangents = [node.value for node in rest if belongs_to_backward(node.slot)]
    primals = [node.value for node in rest if not belongs_to_backward(node.slot)]
    forward, backward = partition_fn(module, to_fake_tensors((primals, tangents, *random)), num_fwd_outputs=len(own))
    if len(backward.graph.output_node().args[0]) != len(gradients):
        raise CompilerError("The partitioner returned a backward that does not give one gradient for each input.")
    return CompilerInput(from_fx(forward, own), forward), CompilerInput(from_fx(backward, gradients), backward)
