"""The entry points of export."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import FakeTensor, deterministic_enabled, garbage_collection_paused, python_kernels_first, pytree
from ..capturing.capture import Capture, capture_call
from ..capturing.given import holds_tensors, user_path
from ..codegen.pytree import Flat, Items, Leaf, Tree, flatten, unflatten
from ..compat import ViewAndMutationMeta, describe
from ..errors import ExportError, GraphOutputError, SignatureError
from ..joint.outputs import SameAsInput, SameAsOutput, ViewOfBase, ViewOfInput, ViewOfOutput
from ..options import AOTConfig, Loss, config, next_aot_id
from ..partition import default_partition
from ..slots import Output
from ..subclasses.layout import is_wrapper, leaves_of
from .calling_convention import structure_of, wrappers_of
from .dynamic_shapes import ranges_of_fakes, with_symbolic_sizes
from .lowering import export_graph, refuse_subclasses, refuse_what_is_lost
from .program import Exported, state_of_module
from .signature import GraphSignature
from .subclasses import own_inner_tensors

Decompositions = Mapping[Any, Callable[..., Any]]


def export(
    mod: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: int | None = None,
    dynamic_shapes: Any = None,
    decompositions: Decompositions | None = None,
    pre_dispatch: bool = False,
) -> Exported:
    """Export a module: its forward as one graph, or with `loss` the whole training step, gradients included.

    >>> import torch
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = torch.nn.Parameter(torch.ones(2))
    ...     def forward(self, x): return (x * self.w).sum()
    >>> exported = export(Model(), (torch.ones(2),), loss=0)
    >>> exported.signature.parameters, list(exported.signature.backward_signature.gradients_to_parameters.values())
    (['w'], ['w'])
    >>> loss, gradients = exported(torch.ones(2))
    >>> gradients
    {'w': tensor([1., 1.])}

    Args:
        mod: the module. Its parameters and buffers become inputs of the graph.
        args, kwargs: example arguments.
        loss: which of the flat results to differentiate; none if not given. No gradient is taken for the others.
        dynamic_shapes: sizes that may change, as `torch.export` spells them.
        decompositions: operators and what to record in their place.
        pre_dispatch: record above autograd: composite operators and switches of the grad mode stay in the graph.
    """
    if pre_dispatch and loss is not None:
        raise ExportError("pre_dispatch is not supported when trace_joint is True.")
    args, kwargs = _call_of(mod, args, kwargs)
    given = (args, kwargs)
    symbols = None
    if dynamic_shapes is not None:
        args, kwargs, symbols = with_symbolic_sizes(mod, args, kwargs, dynamic_shapes)
    wanted = Loss(loss, others_may_require_grad=True) if loss is not None else False
    resolved = export_config(wanted, decompositions, pre_dispatch)
    with contextlib.nullcontext() if symbols is None else python_kernels_first():
        capture = _capture(mod, args, kwargs, resolved)
    graph, signature = export_graph(capture, mod.forward, loss)
    ranges = ranges_of_fakes((args, kwargs)) if symbols is None else symbols.ranges()
    state, non_persistent = state_of_module(mod, capture)
    return Exported(graph, signature, state, non_persistent, given, ranges, wrappers_of(capture))


def aot_export_module(
    mod: nn.Module,
    args: Sequence[Any],
    *,
    decompositions: Decompositions | None = None,
    trace_joint: bool,
    output_loss_index: int | None = None,
    pre_dispatch: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[fx.GraphModule, GraphSignature]:
    """A module as one functional graph, with its backward if `trace_joint`, and a signature that names every place.

    >>> import torch
    >>> class Twice(torch.nn.Module):
    ...     def forward(self, x): return (x * 2,)
    >>> graph, signature = aot_export_module(Twice(), (torch.ones(1),), trace_joint=False)
    >>> signature.user_inputs, graph(torch.ones(1))
    (['x'], (tensor([2.]),))

    Inputs of the graph are tokens, parameters, buffers, and the flat arguments. Its outputs are tokens, new values of
    written inputs, the flat results, and gradients.

    Args:
        mod: a module that returns a tuple or a list.
        args: example arguments; fake ones with a shape environment give symbolic sizes.
        decompositions: operators and what to record in their place.
        trace_joint: whether the gradients of a loss are computed as well.
        output_loss_index: which of the flat results is the loss.
        pre_dispatch: record above autograd, with composite operators and switches of the grad mode kept.
        kwargs: example keyword arguments.
    """
    if pre_dispatch and trace_joint:
        raise ExportError("pre_dispatch is not supported when trace_joint is True.")
    if trace_joint and output_loss_index is None:
        raise ExportError(
            "If trace_joint=True, output_loss_index must say which of the outputs is the loss to differentiate."
        )
    loss = output_loss_index if trace_joint else None
    args, named = _call_of(mod, args, kwargs)
    resolved = export_config(Loss(loss) if loss is not None else False, decompositions, pre_dispatch)
    capture = _capture(mod, args, named, resolved)
    if not isinstance(capture.result.tree, Items):
        raise GraphOutputError(
            "Graph output must be a tuple() or list(): Expected forward output to be either a tensor or a list/tuple "
            "of tensors, in one of them. Return (result,)."
        )
    return export_graph(capture, mod.forward, loss)


def _call_of(
    mod: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example call, checked."""
    if not isinstance(mod, nn.Module):
        raise ExportError(f"a torch.nn.Module can be exported, not {mod!r}. Wrap the function in a module's forward.")
    if not isinstance(args, (tuple, list)):
        raise ExportError(f"the example arguments must be a tuple or a list, not {type(args).__name__}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ExportError(f"the example keyword arguments must be a dict, not {type(kwargs).__name__}.")
    state = [*mod.named_parameters(), *mod.named_buffers()]
    for name, tensor in state:
        if nn.parameter.is_lazy(tensor):
            raise ExportError(f"{name} has no shape yet. Run the module once before you export it.")
    flat = flatten((tuple(args), dict(kwargs or {})), "")
    _refuse_objects(flat)
    return without_duplicates(flat, [tensor for _, tensor in state])


def _refuse_objects(flat: Flat) -> None:
    """The graph would hold the tensors of the example for good."""
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if holds_tensors(leaf):
            raise ExportError(
                f"{user_path(path)} is a {type(leaf).__qualname__} that holds tensors, and a graph takes what pytree "
                "can take apart. Pass its tensors, or register its class with "
                "torch.utils._pytree.register_pytree_node."
            )


def without_duplicates(flat: Flat, state: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An argument that comes twice, or is the module's own tensor, is an input of its own (X-8)."""
    seen = {id(part) for tensor in state for part in (tensor, *leaves_of(tensor))}
    leaves = []
    for leaf in flat.leaves:
        if isinstance(leaf, Tensor):
            if is_wrapper(leaf):
                leaf = own_inner_tensors(leaf, seen)
            elif id(leaf) in seen and not isinstance(leaf, FakeTensor):
                leaf = leaf.detach().requires_grad_(leaf.requires_grad)
            seen.update([id(leaf), *map(id, leaves_of(leaf))])
        leaves.append(leaf)
    args, kwargs = unflatten(flat.tree, leaves)
    return args, kwargs


def _capture(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], resolved: AOTConfig
) -> Capture:
    """Record a program for export: without gradients where none are wanted."""
    grad_mode: Any = torch.enable_grad() if resolved.differentiate else torch.no_grad()
    module = function if isinstance(function, nn.Module) else None
    with contextlib.nullcontext() if resolved.pre_dispatch else grad_mode, garbage_collection_paused():
        return capture_call(function, args, kwargs, module, resolved)


def export_config(
    wanted: bool | Loss, decompositions: Decompositions | None = None, pre_dispatch: bool = False
) -> AOTConfig:
    """The options of one export."""
    return AOTConfig(
        fw_compiler=None,
        bw_compiler=None,
        partition_fn=None,
        decompositions=decompositions,
        num_params_buffers=0,
        aot_id=next_aot_id(),
        keep_inference_input_mutations=False,
        is_export=True,
        no_tangents=isinstance(wanted, Loss),
        pre_dispatch=pre_dispatch,
        options=config.copy(),
        differentiate=wanted,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Graphs of plain functions, for what splices them in place: `aot_export_joint_simple`.
def aot_export_joint_simple(
    func: Callable[..., Any],
    args: Sequence[Any],
    *,
    trace_joint: bool,
    num_params_buffers: int = 0,
    decompositions: Decompositions | None = None,
) -> fx.GraphModule:
    """A function as one graph with the function's own calling convention; with `trace_joint` its joint graph.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> graph = aot_export_joint_simple(lambda x: (x * 2,), (x,), trace_joint=True)
    >>> [node.name for node in graph.graph.find_nodes(op="placeholder")]
    ['primals_1', 'tangents_1']

    The joint graph takes the arguments, then the gradients of the results; it returns the results, then the gradients
    of the arguments, None where there is none.

    Args:
        func: takes flat arguments and returns a flat tuple or list, writes to no argument and returns none.
        args: example arguments.
        trace_joint: whether the backward is part of the graph.
        num_params_buffers: so many leading arguments keep fixed shapes where sizes are symbols.
        decompositions: operators and what to record in their place.
    """
    if not isinstance(args, (tuple, list)):
        raise ExportError("aot_export_joint_simple requires inputs to be a single list/tuple.")
    if not all(pytree.tree_is_leaf(arg) for arg in args):
        raise ExportError("aot_export_joint_simple requires individual inputs not to be pytrees.")
    capture = _capture_function(func, tuple(args), {}, export_config(trace_joint, decompositions))
    for facts in (*capture.joint.memories, *capture.joint.inputs):
        if facts.data_changed or facts.is_acted_on:
            raise ExportError(
                f"aot_export_joint_simple does not support input mutations: {facts.recorded.slot} is written to. "
                "Work on a copy, or use aot_export_module."
            )
    for i, result in enumerate(capture.joint.outputs.results):
        if isinstance(result, _ALIASES):
            raise ExportError(
                f"aot_export_joint_simple does not support outputs that alias inputs, or other outputs: output {i} "
                "does. Return a copy."
            )
    _require_flat(capture.result.tree)
    if config.debug_assert and capture.joint.is_training:
        _run_forward(capture)
    return capture.joint.module


_ALIASES = (SameAsInput, ViewOfInput, ViewOfOutput, ViewOfBase, SameAsOutput)


def _require_flat(tree: Tree) -> None:
    if not isinstance(tree, Items):
        raise ExportError("aot_export_joint_simple requires outputs to be a single list/tuple.")
    if not all(isinstance(item, Leaf) for item in tree.items):
        raise ExportError("aot_export_joint_simple requires individual outputs not to be pytrees.")


def _run_forward(capture: Capture) -> None:
    """Partition the joint graph and run its forward on the abstract inputs (X-10)."""
    joint = capture.joint
    primals, tangents, *_ = capture.example_inputs
    count = len(joint.graph.forward_outputs)
    forward, _ = default_partition(joint.module, (primals, tangents), num_fwd_outputs=count)
    with torch.no_grad():
        forward(*primals)


def _capture_function(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], resolved: AOTConfig
) -> Capture:
    """Record a function of which everything comes in as an argument."""
    if not callable(func):
        raise ExportError(f"a function can be exported, not {func!r}.")
    flat = flatten((args, kwargs), "")
    _refuse_objects(flat)
    refuse_subclasses(zip(flat.paths, flat.leaves, strict=True), "aot_export_joint_simple")
    args, kwargs = without_duplicates(flat, ())
    capture = _capture(func, args, kwargs, resolved)
    for slot in capture.free_tensors:
        raise ExportError(f"the function finds {slot} by itself, for which the graph has no input. Pass it.")
    return capture


def _aot_export_function(
    func: Callable[..., Any],
    args: Sequence[Any],
    *,
    num_params_buffers: int = 0,
    decompositions: Decompositions | None = None,
    no_tangents: bool = False,
    pre_dispatch: bool = False,
    kwargs: dict[str, Any] | None = None,
) -> tuple[fx.GraphModule, ViewAndMutationMeta, Any, Any]:
    """The graph of a function, the metadata of it, and the trees of (args, kwargs) and of its result (X-11).

    With `no_tangents` the one result that requires grad, a single number, is differentiated with seed 1.
    """
    named = dict(kwargs or {})
    resolved = export_config(not pre_dispatch, decompositions, pre_dispatch)
    capture = _capture_function(func, tuple(args), named, resolved)
    if no_tangents:
        loss = Loss(_only_loss(capture))
        resolved = export_config(loss, decompositions)
        capture = _capture_function(func, tuple(args), named, resolved)
        graph, _ = export_graph(capture, func, loss.index)
    else:
        refuse_what_is_lost(capture, joint=False)
        graph = capture.joint.module
    facts = describe(capture.joint, resolved, None, deterministic_enabled())
    in_spec = pytree.tree_structure((tuple(args), named))
    return graph, facts, in_spec, structure_of(capture).out_spec


def _only_loss(capture: Capture) -> int:
    """The place of the one result that can be differentiated."""
    slots = [tangent.of for tangent in capture.joint.signature.tangents]
    if len(slots) != 1 or not isinstance(slots[0], Output) or capture.joint.tangent_values[0].numel() != 1:
        raise SignatureError(
            "no_tangents needs exactly one result that requires grad, and of one element; the function has "
            f"{', '.join(map(str, slots)) or 'none'}."
        )
    return slots[0].index
