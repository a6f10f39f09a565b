"""Torch's own compilers: Inductor driven graph by graph, and the names of Dynamo's registry.

Inductor's entry for whole programs brings torch's own layer with it. What stands here are the steps that it takes for
single graphs, which are the same functions on all versions. They are loaded when they are first used: Inductor takes
seconds to import.
"""

from __future__ import annotations

import contextlib
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
from torch import fx
from torch._guards import TracingContext  # compilers report the strides of their outputs in it
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .dynamo import tracing_in
from .guards import autocast_off
from .symbols import new_shape_env


@contextlib.contextmanager
def output_strides_reported(examples: Sequence[Any]) -> Iterator[list[Any] | None]:
    """What a compiler says about the strides of its outputs: torch's contract, in a context of the front end's.

    Where no front end has made one, it is made here: Inductor chooses other strides and says so nowhere else.
    """
    with tracing_in(_mode_of(examples)), TracingContext.report_output_strides() as strides:
        yield strides


def _mode_of(examples: Sequence[Any]) -> FakeTensorMode:
    return next((value.fake_mode for value in examples if isinstance(value, FakeTensor)), None) or FakeTensorMode()


@functools.cache
def _inductor() -> types.ModuleType:
    from torch._inductor import compile_fx  # the functions that compile single graphs have no public name

    return compile_fx


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """What `torch.compile(mode=...)` sets."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def inductor_modes() -> list[str]:
    """The names that `mode` may have."""
    from torch._inductor import list_mode_options

    return list(list_mode_options())


def inductor_option_names() -> list[str]:
    """The names that `options` may have."""
    from torch._inductor import list_options

    return list(list_options())


def inductor_option_type(name: str) -> type | None:
    """The class that the value of an option has; None where it has several, or none that `isinstance` knows."""
    from torch._inductor import config

    found = config.get_type(name)  # type: ignore[attr-defined]
    return found if isinstance(found, type) and typing.get_origin(found) is None else None


def inductor_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The operators that Inductor wants to see taken apart."""
    from torch._inductor import lowering  # noqa: F401 (decompositions look into it, and leave the import to others)
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


@dataclass
class InductorProgram:
    """What the graphs of one program share, for Inductor: whether CUDA graphs can be used, and on which device."""

    options: Mapping[str, Any]
    graph_id: int = field(default_factory=lambda: next(_inductor()._graph_counter))

    def __post_init__(self) -> None:
        inductor = _inductor()
        with self._configured():
            self._cudagraphs = inductor.BoxedBool(inductor.config.triton.cudagraphs)
        self._device = inductor.BoxedDeviceIndex(None)

    def joint_passes(self, graph: fx.GraphModule, examples: Sequence[Any]) -> fx.GraphModule:
        """What Inductor does to a graph before it is cut."""
        with self._around(examples):
            graph = self._joint_passes(graph, examples)
        self.note_lowerings(graph, examples)
        return graph

    def note_lowerings(self, graph: fx.GraphModule, examples: Sequence[Any]) -> None:
        """Note in `meta["lowered"]` of each node what Inductor makes of its operator, if that is loops."""
        inductor = _inductor()
        with self._around(examples), inductor.config.patch(max_autotune=False, max_autotune_gemm=False):
            asked = _Lowerings(_mode_of(examples).shape_env)
            for node in graph.graph.nodes:
                found = asked.of(node) if isinstance(node.target, OpOverload) else None
                if found is not None:
                    node.meta["lowered"] = found

    def compile(
        self,
        graph: fx.GraphModule,
        examples: Sequence[Any],
        phase: str,
        fixed: Sequence[int],
        visible: Sequence[int],
    ) -> Callable[..., Any]:
        """Compile one graph: these inputs keep their addresses, and these outputs must lie as they were recorded."""
        with self._around(examples), _strides_for_all_sizes():
            if phase == "inference":
                graph = self._joint_passes(graph, examples)
            return self._compiled(graph, examples, phase, fixed, visible)

    @property
    def freezes(self) -> bool:
        """Whether parameters are to be constants of graphs that are not differentiated."""
        with self._configured():
            return bool(_inductor().config.freezing)

    def compile_frozen(
        self, graph: fx.GraphModule, examples: Sequence[Any], frozen: Mapping[int, torch.Tensor], visible: Sequence[int]
    ) -> Callable[..., Any]:
        """Compile an inference graph of which some inputs are these tensors; the result takes the others."""
        from torch._guards import tracing
        from torch._inductor import constant_folding, freezing
        from torch._inductor.graph import GraphLowering

        inductor = _inductor()
        rest = [example for i, example in enumerate(examples) if i not in frozen]
        with torch.no_grad(), autocast_off(), self._around(examples), _strides_for_all_sizes():
            graph = self._joint_passes(graph, examples)
            is_laid_out = GraphLowering.decide_layout_opt(graph, is_inference=True)
            if is_laid_out:
                inductor.fake_tensor_prop(graph, list(examples), True)
                freezing.convert_conv_weights_to_channels_last(graph)
            inputs = graph.graph.find_nodes(op="placeholder")
            for i, tensor in frozen.items():
                constant_folding.replace_node_with_constant(graph, inputs[i], tensor)
            with tracing(None):  # it would look there for parameters
                graph, _ = freezing.freeze(graph, graph, rest)
            return self._compiled(graph, rest, "inference", (), visible, layout_opt=is_laid_out)

    def _compiled(
        self,
        graph: fx.GraphModule,
        examples: Sequence[Any],
        phase: str,
        fixed: Sequence[int],
        visible: Sequence[int],
        **more: Any,
    ) -> Callable[..., Any]:
        output = graph.graph.output_node()
        values: Any = output.args[0]  # an input without a gradient has None there
        output.meta["user_visible_output_idxs"] = [i for i in visible if isinstance(values[i], fx.Node)]
        compiled: Callable[..., Any] = _inductor().compile_fx_inner(
            graph,
            list(examples),
            static_input_idxs=list(fixed),
            cudagraphs=self._cudagraphs,
            graph_id=self.graph_id,
            is_inference=phase == "inference",
            is_backward=phase == "backward",
            boxed_forward_device_index=self._device,
            **more,
        )
        return compiled

    def _joint_passes(self, graph: fx.GraphModule, examples: Sequence[Any]) -> fx.GraphModule:
        devices = [value.device for value in examples if isinstance(value, torch.Tensor)]
        before = _memory_of_outputs(graph)
        passed: fx.GraphModule = _inductor()._recursive_joint_graph_passes(
            graph, skip_invoke_subgraph=True, input_device=next(iter(devices), torch.device("cpu"))
        )
        _keep_outputs_apart(passed, before)
        return passed

    @contextlib.contextmanager
    def _around(self, examples: Sequence[Any]) -> Iterator[None]:
        """The state that Inductor expects around it."""
        from torch._dispatch.python import enable_python_dispatcher  # shape inference under symbols
        from torch._dynamo import compiled_autograd  # it would record what Inductor runs
        from torch._inductor.virtualized import V  # where Inductor looks for the fake mode

        mode = _mode_of(examples)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._configured())
            if mode.shape_env is not None:
                stack.enter_context(enable_python_dispatcher())
            stack.enter_context(_as_inductor_expects(mode))
            stack.enter_context(tracing_in(mode))
            stack.enter_context(V.set_fake_mode(mode))
            stack.enter_context(_draws_out_of_place())
            stack.enter_context(compiled_autograd._disable())
            yield

    def _configured(self) -> Any:
        return _inductor().config.patch(dict(self.options)) if self.options else contextlib.nullcontext()


Lowered = Literal["inlined", "loops"]
"""Loops over elements: worked out wherever the result is read, or once, into memory. Either takes in what it reads."""


class _Lowerings:
    """What Inductor lowers operators to: its lowerings are asked, each for inputs that are memory."""

    def __init__(self, shape_env: Any) -> None:
        from torch._inductor.graph import GraphLowering  # where lowerings find everything else

        nothing = fx.Graph()  # it leaves notes on the nodes of the graph that it is given
        nothing.output(())
        self._graph = GraphLowering(fx.GraphModule(torch.nn.Module(), nothing), shape_env=shape_env)
        self._known: dict[Any, Lowered | None] = {}

    def of(self, node: fx.Node) -> Lowered | None:
        """What becomes of a node; None for a kernel of its own, for a view, and for what Inductor does not know."""
        key = node.target, _metadata(node.args), _metadata(tuple(node.kwargs.items()))
        if key not in self._known:
            try:
                self._known[key] = self._ask(node)
            except Exception:  # it will be said when the graph is compiled, if it is
                self._known[key] = None
        return self._known[key]

    def _ask(self, node: fx.Node) -> Lowered | None:
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        def given(item: fx.Node) -> Any:
            value = item.meta["val"]
            if not isinstance(value, torch.Tensor):
                return value.node.expr if isinstance(value, torch.SymInt) else value
            size, stride = map(ir.convert_shape_to_inductor, (value.size(), value.stride()))
            layout = ir.FixedLayout(value.device, value.dtype, size, stride)
            return ir.TensorBox.create(ir.InputBuffer(name=item.name, layout=layout))

        assert isinstance(node.target, OpOverload)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), given)
        with V.set_graph_handler(self._graph), self._graph.set_current_node(node), V.set_current_node(node):
            made = self._graph.call_function(node.target, args, dict(kwargs))
        kinds = {self._kind(value) for value in (made if isinstance(made, (list, tuple)) else [made])}
        return kinds.pop() if len(kinds) == 1 else "loops" if None not in kinds else None

    @staticmethod
    def _kind(value: Any) -> Lowered | None:
        from torch._inductor import ir

        while isinstance(value, ir.MutableBox):
            value = value.data
        if isinstance(value, ir.Pointwise):
            return "inlined"
        return "loops" if isinstance(value, (ir.Loops, ir.ComputedBuffer)) else None


def _metadata(value: Any) -> Any:
    """All of an argument that a lowering looks at, to be looked up."""
    if isinstance(value, fx.Node):
        return _metadata(value.meta.get("val"))
    if isinstance(value, (list, tuple)):
        return tuple(map(_metadata, value))
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, str(value.size()), str(value.stride())
    return type(value), str(value)


def _memory_of_outputs(graph: fx.GraphModule) -> list[int | None]:
    values: Any = graph.graph.output_node().args[0]
    tensors = [value.meta.get("val") if isinstance(value, fx.Node) else None for value in values]
    return [
        t.untyped_storage()._cdata if isinstance(t, torch.Tensor) and t.layout is torch.strided else None
        for t in tensors
    ]


def _keep_outputs_apart(graph: fx.GraphModule, before: Sequence[int | None]) -> None:
    """Copy outputs that have come to share memory: of copies of copies, Inductor's passes leave out all.

    What is written to one of them would show in the other.
    """
    output = graph.graph.output_node()
    values: list[Any] = [*output.args[0]]  # type: ignore[misc]
    now, first = _memory_of_outputs(graph), dict[int, int]()
    for i, memory in enumerate(now):
        if memory is None or before[i] is None or first.setdefault(memory, i) == i:
            continue
        if before[i] != before[first[memory]]:
            with graph.graph.inserting_before(output):
                copied = graph.graph.call_function(torch.ops.aten.clone.default, (values[i],))
            copied.meta = {**values[i].meta, "val": values[i].meta["val"].clone()}
            values[i] = copied
    output.args = (tuple(values),)


@contextlib.contextmanager
def _strides_for_all_sizes() -> Iterator[None]:
    """Inductor reports strides as numbers, unless it is told that the first call's results are abstract."""
    context: Any = TracingContext.get()
    before, context.fakify_first_call = context.fakify_first_call, True
    try:
        yield
    finally:
        context.fakify_first_call = before


def _draws_out_of_place() -> contextlib.AbstractContextManager[Any]:
    """Inductor draws masks in place, into a copy, and may fuse what reads the copy with what made it."""
    from torch._inductor.lowering import fallback_handler, lowerings

    op = torch.ops.aten.bernoulli.p
    return mock.patch.dict(lowerings, {op: fallback_handler(op, add_to_fallback_set=False)})


@contextlib.contextmanager
def _as_inductor_expects(mode: FakeTensorMode) -> Iterator[None]:
    """A constant of the program is a real tensor in its graph, which Inductor runs on fake ones.

    A program without symbols has no place for them, without which Inductor does not use its cache of graphs.
    """
    before = mode.allow_non_fake_inputs, mode.shape_env
    mode.allow_non_fake_inputs = True
    if mode.shape_env is None:
        mode.shape_env = new_shape_env()
    try:
        yield
    finally:
        mode.allow_non_fake_inputs, mode.shape_env = before


def registered_backends() -> list[str]:
    """The names of the compilers that Dynamo knows, those of packages included."""
    from torch._dynamo.backends.registry import list_backends

    return list(list_backends(exclude_tags=()))


def registered_backend(name: str) -> Callable[..., Any]:
    """A compiler by the name that it has for `torch.compile`."""
    from torch._dynamo.backends.registry import lookup_backend

    found: Callable[..., Any] = lookup_backend(name)
    return found
