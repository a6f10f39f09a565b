"""Put a program together: partition, compile, write the code of its call."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload, any_autocast_enabled, deterministic_enabled
from ..errors import CompilerError, UnsupportedError
from ..joint.build import Joint
from ..joint.graph import to_fx
from ..joint.inputs import InputFacts
from ..joint.metadata import describe
from ..joint.verify import verify_graph
from ..logs import show_graph
from ..ops import Kind, op_info
from ..options import AOTConfig
from ..partition import cut, default_partition
from ..schemas import ViewAndMutationMeta
from ..slots import Primal
from .backward import Backward, Saved, saved_between
from .boundary import InferenceCore, TrainingCore
from .compilers import Boxed, checked, compile_graph, example_values
from .entry import Entry
from .stages import stages_of
from .writer import Writer

_numbers = itertools.count()


@dataclass(frozen=True)
class Program:
    """A compiled program: its graphs, its facts, its code."""

    joint: Joint
    metadata: ViewAndMutationMeta
    forward_graph: fx.GraphModule
    backward_graph: fx.GraphModule | None
    source: str
    call: Callable[..., Any]


def assemble(joint: Joint, config: AOTConfig, entry: Entry) -> Program:
    """Compile a joint graph and write its call."""
    if config.enable_log:
        show_graph(lambda: joint.module, "joint", config.aot_id)
    number = next(_numbers)
    kind = "training" if joint.is_training else "inference"
    writer = Writer(f"Foregrad program {number}: {kind}, {len(joint.inputs)} inputs, {joint.visible} outputs.")
    autocast = any_autocast_enabled()
    core: InferenceCore | TrainingCore
    counted: dict[Primal, int] = {}
    if joint.is_training:
        core, parts, counted = _training(joint, config, entry, writer, autocast)
    else:
        core, parts = _inference(joint, config, entry, writer, autocast)
    _write(joint, config, entry, writer, core, counted)
    writer.run(f"<foregrad program {number}>")
    return Program(joint, parts[2], parts[0], parts[1], writer.source, writer.namespace["call"])


Parts = tuple[fx.GraphModule, fx.GraphModule | None, ViewAndMutationMeta]


def _install(writer: Writer, name: str) -> Callable[[Boxed], None]:
    return lambda compiled: writer.rebind(name, compiled)


def _inference(
    joint: Joint, config: AOTConfig, entry: Entry, writer: Writer, autocast: bool
) -> tuple[InferenceCore, Parts]:
    name = writer.fresh("inference_graph")
    if config.options.verify:
        verify_graph(joint.module)
    examples = example_values(joint.recording.engine, joint.primal_values)
    compiled, _ = compile_graph(
        config.inference_compiler or config.fw_compiler, joint.module, examples, "inference", config
    )
    install = _install(writer, name)
    install(checked(compiled, "inference", joint.module, install))
    metadata = describe(joint, config, saved_sizes=None)
    return InferenceCore(joint, entry.guarded, autocast, entry.frees), (joint.module, None, metadata)


def _training(
    joint: Joint, config: AOTConfig, entry: Entry, writer: Writer, autocast: bool
) -> tuple[TrainingCore, Parts, dict[Primal, int]]:
    returned = len(joint.signature.returned)
    forward, backward = partition(joint, config)
    saved = saved_between(forward, returned)
    counted = _changed_after_saving(joint, saved)
    examples = example_values(joint.recording.engine, joint.primal_values)
    name = writer.fresh("forward_graph")
    compiled, strides = compile_graph(config.fw_compiler, forward, examples, "forward", config)
    install = _install(writer, name)
    install(checked(compiled, "forward", forward, install))
    saved_strides = strides[returned : returned + len(saved.tensors)] if strides else None
    runner = Backward(joint, backward, saved, saved_strides, config, deterministic_enabled())
    runner.install(_install(writer, writer.fresh("backward_graph")))
    metadata = describe(joint, config, saved_sizes=len(saved.sizes))
    core = TrainingCore(joint, saved, runner, entry.guarded, autocast, counted)
    return core, (forward, backward, metadata), counted


def _changed_after_saving(joint: Joint, saved: Saved) -> dict[Primal, int]:
    """Inputs that the backward needs as they are, and that change their shape or their place: by how many versions."""
    names = {_origin(node).name for node in saved.tensors}
    counted = {
        facts.recorded.slot: facts.version_change
        for node, facts in zip(joint.part.placeholders, joint.primals, strict=False)
        if node.name in names and facts.version_change and _changes_later(joint, facts)
    }
    moving = {
        n.name for n, f in zip(joint.part.placeholders, joint.primals, strict=False) if f.recorded.slot in counted
    }
    for node in saved.tensors:
        if node.target is operator.getitem and node is not _origin(node) and _origin(node).name in moving:
            raise UnsupportedError(
                "the backward needs one of several views (of a split, an unbind) of an input whose shape the program "
                "changes: this cannot be compiled yet. Take the views one by one, or of a clone."
            )
    return counted


def _changes_later(joint: Joint, facts: InputFacts) -> bool:
    """Whether the shape or place of an input, or of one that looks at its memory, changes once the graph has run."""
    members = [f for f in joint.inputs if f.recorded.parent is facts.recorded]
    return not facts.data_changed and any(f.reshapes or f.refitted or f.moved for f in (facts, *members))


def _origin(node: fx.Node) -> fx.Node:
    """What a view, or a view of a view, was taken from; a piece of a split is a view too."""
    while True:
        source: Any = node.args[0] if node.target is operator.getitem else node
        if not isinstance(source.target, OpOverload) or op_info(source.target).kind is not Kind.VIEW:
            return node
        node = source.args[0]


def partition(joint: Joint, config: AOTConfig) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut the joint graph by the partitioner that was asked for."""
    returned = len(joint.signature.returned)
    if config.partition_fn in (None, default_partition):
        forward, backward = map(to_fx, cut(joint.part, returned))
    else:
        with torch.no_grad():
            values = list(joint.primal_values), list(joint.tangent_values)
            forward, backward = config.partition_fn(joint.module, values, num_fwd_outputs=returned)
    gradients: Any = backward.graph.output_node().args[0]
    if len(gradients) != len(joint.primals) + len(joint.backward_writes):
        raise CompilerError("The partitioner returned a backward that does not give one gradient for each input.")
    if config.options.verify:
        verify_graph(forward)
        verify_graph(backward)
    return forward, backward


def _write(
    joint: Joint,
    config: AOTConfig,
    entry: Entry,
    writer: Writer,
    core: InferenceCore | TrainingCore,
    counted: dict[Primal, int],
) -> None:
    """The text of the program: stages in, the graphs, stages out."""
    debug = config.options.debug_assert and not entry.guarded
    stages = stages_of(joint, debug, config.num_params_buffers, config.aot_id, counted)
    core.define(writer)
    with writer.block(entry.open(writer)):
        entry.enter(writer)
        for stage in stages:
            stage.enter(writer)
        core.write(writer, [writer.variable(facts.recorded.slot) for facts in joint.primals])
        for stage in reversed(stages):
            stage.leave(writer)
        entry.leave(writer, joint.visible)
