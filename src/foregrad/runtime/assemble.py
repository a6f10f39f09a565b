"""Put a program together: partition, compile, write the code of its call."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, fx

from .._torch import any_autocast_enabled, deterministic_enabled, passes_through
from ..codegen.writer import Stage, Writer
from ..compat import ViewAndMutationMeta, describe
from ..errors import ForegradError, InternalError, UnsupportedError
from ..graph.graph import Graph, is_number
from ..graph.host_part import HostPart, without_host_part
from ..graph.inplace import written_in_place
from ..graph.numbers_in_a_tensor import with_numbers_in_a_tensor
from ..graph.reads import DataRead, Read
from ..graph.released import with_gradients_released
from ..graph.verify import verify, verify_in_place
from ..joint.build import Joint
from ..joint.hooks import HookAdded
from ..joint.outputs import Constant, Number, SameAsInput
from ..logs import show_graph
from ..ops import aten
from ..options import AOTConfig, Compiler
from ..partition.memory import simulate_alone
from ..partition.one_graph import within_budget
from ..slots import FreeNumber, Input, Output, Saved, Slot, Token, belongs_to_backward
from . import rng, subclasses
from .autograd_function import TrainingCore
from .backward import Backward
from .call import Entry, InferenceCore
from .compilers import Boxed, CompilerInput, checked, compile_graph, example_values, for_compiler, partitioned
from .double_backward import Orders
from .effect_tokens import unlift_tokens, without_first_tokens
from .host_part import write_host_part, write_numbers_returned
from .parts import (
    Conditions,
    Missed,
    States,
    conditions_of,
    generators_before,
    require_all_reads,
    write_parts,
)
from .saved_tensors import SavedValue, saved_by
from .stages import stages_of

# ---------------------------------------------------------------------------------------------------------------------
# Put a program together: partition, compile, write the code of its call.
_numbers = itertools.count()
_WORTH_RELEASING = 1 << 20  # bytes of the peak: an operator for each tensor takes longer than one for many


@dataclass(frozen=True)
class Program:
    """A compiled program: its graphs, its metadata, its code."""

    joint: Joint
    config: AOTConfig
    deterministic: bool  # torch's algorithms had to be, when it was compiled
    forward_graph: fx.GraphModule
    forward_parts: tuple[fx.GraphModule, ...]  # between which data is read; otherwise the graph itself
    backward_graph: fx.GraphModule | None
    flat_graph: Graph  # the forward, as the run time has it
    source: str
    call: Callable[..., Any]
    strides: Sequence[Any] | None  # of what the forward graph returns, if its compiler reported them
    backward: Backward | None

    @cached_property
    def metadata(self) -> ViewAndMutationMeta:
        """What is known about inputs and outputs, put together when it is asked for."""
        sizes = None if self.backward is None else self.backward.saved_sizes
        return describe(self.joint, self.config, sizes, self.deterministic)

    @cached_property
    def reads(self) -> tuple[DataRead, ...]:
        """Where it reads data, in order."""
        reads, conditions = _reads_of(self.joint)
        return tuple(DataRead.of(read, conditions.get(read.number, (None,))[0]) for read in reads)

    @property
    def saved(self) -> tuple[SavedValue, ...]:
        """What is kept between forward and backward, also for the higher orders that were asked for so far."""
        return () if self.backward is None else tuple(self.backward.described())


@dataclass(frozen=True)
class _Compiled:
    """The graphs of a program, and what runs them."""

    core: InferenceCore | TrainingCore
    forward: CompilerInput
    parts: tuple[fx.GraphModule, ...]
    backward_graph: fx.GraphModule | None
    strides: Sequence[Any] | None
    backward: Backward | None
    host_part: HostPart | None = None


def assemble(joint: Joint, config: AOTConfig, entry: Entry) -> Program:
    """Compile a joint graph and write its call.

    Whatever goes wrong is Foregrad's own fault, unless it is a compiler's: the program itself has run.
    """
    try:
        return _assemble(joint, config, entry)
    except ForegradError:
        raise
    except Exception as error:
        if passes_through(error):
            raise
        raise InternalError(
            f"Foregrad failed to put a program together: {type(error).__name__}: {error}. Please report it; "
            "fallback='eager' runs the program as it is."
        ) from error


def _assemble(joint: Joint, config: AOTConfig, entry: Entry) -> Program:
    if config.enable_log:
        show_graph(lambda: joint.module, "joint", config.aot_id)
    kind = "training" if joint.is_training else "inference"
    writer = Writer(f"Foregrad program: {kind}, {len(joint.inputs)} inputs, {joint.visible} outputs.")
    autocast = any_autocast_enabled()
    made = (_training if joint.is_training else _inference)(joint, config, entry, writer, autocast)
    _write(joint, config, entry, writer, made)
    writer.run(f"<foregrad program {next(_numbers)}>")
    return Program(
        joint=joint,
        config=config,
        deterministic=deterministic_enabled(),
        forward_graph=made.forward.module,
        forward_parts=made.parts,
        backward_graph=made.backward_graph,
        flat_graph=made.forward.graph,
        source=writer.source,
        call=writer.namespace["call"],
        strides=made.strides,
        backward=made.backward,
    )


def _install_forward(graph: Graph, writer: Writer, name: str) -> Callable[[Boxed], None]:
    """What puts a compiled forward in its place; tokens that it takes stand before everything else."""
    tokens = len(graph.inputs_of(Token))
    return lambda compiled: writer.rebind(name, without_first_tokens(compiled, tokens) if tokens else compiled)


def _forward_examples(joint: Joint, graph: Graph) -> list[Any]:
    """What a compiler is shown for the inputs of a forward."""
    tokens = bool(graph.inputs_of(Token))
    inputs = [node for node in graph.inputs if node.slot is None or not belongs_to_backward(node.slot)]
    if not tokens:
        inputs = [node for node in inputs if not isinstance(node.slot, Token)]
    values = [None if is_number(node) else node.value for node in inputs]
    return example_values(joint.recording.engine, values)


def _around_forward(joint: Joint, writer: Writer, name: str, wrappers: bool) -> str:
    """Under which name to install a compiled forward that is called by `name`: seeds and wrappers stand around it."""
    writer.fresh(name)
    if joint.random.forward is not None:
        name = rng.around_forward(writer, name, joint)
    return subclasses.around_forward(writer, name, joint) if wrappers else name


def _around_backward(joint: Joint, writer: Writer, name: str, backward: Graph, saved: int) -> str:
    """The same for a backward, which takes `saved` values before the tangents."""
    writer.fresh(name)
    if joint.random.backward is not None:
        name = rng.around_backward(writer, name, joint, backward)
    return subclasses.around_backward(writer, name, joint, saved) if joint.has_wrappers else name


def _inference(joint: Joint, config: AOTConfig, entry: Entry, writer: Writer, autocast: bool) -> _Compiled:
    edge = subclasses.InferenceEdge(joint) if joint.has_wrappers and joint.random.forward is None else None
    name = _around_forward(joint, writer, "inference_graph", joint.has_wrappers and edge is None)
    host_part, graph = without_host_part(joint.graph)
    if config.numbers == "in a tensor":
        host_part, graph = with_numbers_in_a_tensor(host_part, graph, joint.recording.engine)
    if config.options.verify:
        verify(joint.graph)
    if config.inplace:
        graph = _written_in_place(joint, graph, config)
    else:
        graph = _within_budget(joint, graph, config)
    given = CompilerInput(graph, joint.module) if graph is joint.graph else for_compiler(graph)
    if config.options.unlift_effect_tokens:
        given = unlift_tokens(given)
    compiler = config.inference_compiler or config.fw_compiler
    parts, strides = _compile_forward(joint, given, compiler, "inference", config, writer, name)
    core = InferenceCore(joint, entry.guarded, autocast, entry.frees, edge)
    return _Compiled(core, given, parts, None, strides, None, host_part)


def _written_in_place(joint: Joint, graph: Graph, config: AOTConfig) -> Graph:
    engine = joint.recording.engine
    if graph.has_reads:  # parts run one after the other
        graph = Graph(graph.inputs, sorted(graph.nodes, key=_part), graph.outputs, graph.overwritten)
    release = config.release_gradients if joint.recording.runs_backward and not graph.has_reads else False
    ways = [graph] if release is not True else []
    if release:
        ways.append(with_gradients_released(graph))
    ways = [_within_budget(joint, way, config) for way in ways]
    rewritten = [written_in_place(way, engine) for way in ways]
    if config.options.verify:
        written = {node.args[0] for node in graph.nodes if node.op is aten.copy_.default}
        for way in rewritten:
            verify_in_place(way, written)
    if len(rewritten) > 1:
        peaks = [simulate_alone(way).peak for way in rewritten]
        return rewritten[peaks[0] - peaks[1] > _WORTH_RELEASING]
    return rewritten[0]


_part = operator.attrgetter("part")


def _within_budget(joint: Joint, graph: Graph, config: AOTConfig) -> Graph:
    """What the backward inside of a program computes again, where a memory budget asks for it."""
    if config.options.memory_budget is None or not joint.recording.runs_backward or graph.has_reads:
        return graph
    return within_budget(graph, config.options)


def _training(joint: Joint, config: AOTConfig, entry: Entry, writer: Writer, autocast: bool) -> _Compiled:
    forward, backward = partitioned(joint.graph, config, lambda: joint.module)
    if config.options.unlift_effect_tokens:
        forward, backward = unlift_tokens(forward), unlift_tokens(backward)
    saved = saved_by(joint, forward.graph, backward.graph, config.name)
    name = _around_forward(joint, writer, "forward_graph", joint.has_wrappers)
    parts, strides = _compile_forward(joint, forward, config.fw_compiler, "forward", config, writer, name)
    slots = [output.slot for output in forward.graph.outputs]
    saved_strides = strides and [strides[i] for i, slot in enumerate(slots) if isinstance(slot, Saved)]
    runner = Backward(saved, backward, joint.backward, config, Orders, saved_strides)
    name = _around_backward(joint, writer, "backward_graph", backward.graph, len(saved.names))
    runner.install(lambda compiled: writer.rebind(name, compiled))
    core = TrainingCore(joint, runner, entry.guarded, autocast)
    return _Compiled(core, forward, parts, backward.module, strides, runner)


def _compile_forward(
    joint: Joint,
    given: CompilerInput,
    compiler: Compiler | None,
    phase: Literal["forward", "inference"],
    config: AOTConfig,
    writer: Writer,
    name: str,
) -> tuple[tuple[fx.GraphModule, ...], Sequence[Any] | None]:
    """Compile a forward and install it under a name, in parts if it reads data: its parts, and reported strides."""
    if joint.graph.has_reads:
        require_all_reads(joint.graph, given.graph)
        return _compile_parts(joint, given.graph, compiler, phase, config, writer, name)
    compiled, strides = compile_graph(compiler, given, _forward_examples(joint, given.graph), phase, config)
    install = _install_forward(given.graph, writer, name)
    install(checked(compiled, phase, given.graph, config, install, strides))
    return (given.module,), strides


def _compile_parts(
    joint: Joint,
    graph: Graph,
    compiler: Compiler | None,
    phase: Literal["forward", "inference"],
    config: AOTConfig,
    writer: Writer,
    name: str,
) -> tuple[tuple[fx.GraphModule, ...], Sequence[Any] | None]:
    def compile_part(part: CompilerInput, strides: Sequence[Any], install: Callable[[Boxed], None]) -> Any:
        examples = example_values(
            joint.recording.engine, [None if is_number(node) else node.value for node in part.graph.inputs], strides
        )
        compiled, reported = compile_graph(compiler, part, examples, phase, config)
        install(checked(compiled, phase, part.graph, config, install, reported))
        return reported

    _, conditions = _reads_of(joint)
    parts = write_parts(graph, conditions, writer, name, compile_part)
    return parts.modules, parts.strides


def _reads_of(joint: Joint) -> tuple[list[Read], Conditions]:
    """The reads of a program, and what it relies on about their symbols."""
    reads = [node.read for node in joint.graph.nodes if isinstance(node.read, Read)]
    shape_env = joint.recording.engine.shape_env
    return reads, conditions_of(shape_env, reads) if any(read.symbols for read in reads) else {}


def _write(joint: Joint, config: AOTConfig, entry: Entry, writer: Writer, made: _Compiled) -> None:
    """The text of the program: stages in, the graphs, stages out."""
    debug = config.options.debug_assert and not entry.guarded
    saved = None if made.backward is None else made.backward.saved
    counted, noted = ({}, ()) if saved is None else (saved.counted, saved.reread.returned)
    stages = stages_of(joint, debug, config.num_params_buffers, config.aot_id, counted, noted)
    made.core.define(writer)
    with writer.block(entry.open(writer)):
        entry.enter(writer)
        numbers = () if made.host_part is None else write_host_part(writer, made.host_part, entry)
        for stage in stages:
            stage.enter(writer)
        taken = [facts.recorded.slot for facts in joint.primals]
        if config.numbers == "in a tensor":
            taken = [slot for slot in taken if not isinstance(slot, FreeNumber)]
        inputs: list[Slot] = [*taken, *numbers]
        if joint.graph.has_reads:
            _write_or_miss(joint, made, entry, writer, stages, inputs)
        else:
            made.core.write(writer, inputs)
        if made.host_part is not None:
            write_numbers_returned(writer, made.host_part)
        for stage in reversed(stages):
            stage.leave(writer)
        entry.leave(writer, joint.visible)


def _write_or_miss(
    joint: Joint, made: _Compiled, entry: Entry, writer: Writer, stages: Sequence[Stage], inputs: Sequence[Slot]
) -> None:
    """The graphs of a program that reads data; where it finds other data, everything is put back as it was."""
    for hook in joint.hooks:
        if isinstance(hook, HookAdded) and hook.before_writes:
            raise UnsupportedError(
                f"the program reads data, and registers a hook on {hook.of}, which it writes to: this cannot be "
                "compiled yet. Register the hook outside, or compile with fallback='eager'."
            )
    generators = [*generators_before(made.forward.graph), *rng.generators_of(joint)]
    states = States(tuple(dict.fromkeys(generators)))
    if generators:
        writer.line(f"generators = {writer.bind(states.note, 'note_generators')}()")
    with writer.block("try:"):
        made.core.write(writer, inputs)
    with writer.block(f"except {writer.bind(Missed, 'Missed')} as missed:"):
        if generators:
            writer.line(f"{writer.bind(states.restore, 'restore_generators')}(generators)")
        for stage in reversed(stages):
            stage.undo(writer)
        writer.line(f"return {entry.miss(writer)}(missed)")


# ---------------------------------------------------------------------------------------------------------------------
# A first call that gives shapes and no data, for front ends that compile in stages (J-14).
def fake_at_first(program: Program, boxed: bool) -> Callable[..., list[Any]]:
    """A call that runs nothing the first time: its results are abstract, in the layout that the compiler reported."""
    calls = itertools.count()  # taking the next number is atomic

    def call(*args: Any) -> Any:
        if next(calls):
            return program.call(*args)
        given = list(args[0]) if boxed else args
        if boxed:
            args[0].clear()
        return abstract_results(program, given)

    return call


def abstract_results(program: Program, given: Any) -> list[Any]:
    """What the program would return for these arguments, without data."""
    joint = program.joint
    inputs = {r.slot: n for n, r in enumerate(i for i in joint.recording.inputs if isinstance(i.slot, Input))}
    places = {slot: n for n, slot in enumerate(joint.signature.returned)}
    results: list[Any] = []
    for i in range(joint.visible):
        match joint.outputs.results[i]:
            case Constant(value) | Number(value):
                results.append(value)
            case SameAsInput(recorded) if recorded.slot in inputs:
                results.append(given[inputs[recorded.slot]])
            case _:
                tensor = joint.outputs.tensors[i]
                assert tensor is not None
                reported = program.strides[places[Output(i)]] if program.strides else None
                results.append(_abstract(program, tensor, reported))
    return results


def _abstract(program: Program, tensor: Tensor, strides: Any) -> Tensor:
    [shown] = example_values(program.joint.recording.engine, [tensor], [strides])
    wants_grad = tensor.requires_grad and program.joint.is_training and torch.is_grad_enabled()
    return shown.requires_grad_() if wants_grad else shown
