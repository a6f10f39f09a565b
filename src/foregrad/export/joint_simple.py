"""Graphs of plain functions, for what splices them in place: `aot_export_joint_simple`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import deterministic_enabled, pytree
from ..errors import ExportError, SignatureError
from ..frontend.capturing import Capture
from ..frontend.tree import Items, Leaf, Tree, flatten
from ..joint.metadata import describe
from ..joint.outputs import SameAsInput, SameAsOutput, ViewOfBase, ViewOfInput, ViewOfOutput
from ..options import Loss, config
from ..partition import default_partition
from ..schemas import ViewAndMutationMeta
from ..slots import Output
from .api import Decompositions, capture_for_export, export_config, without_duplicates
from .graph import export_graph
from .refusals import refuse_subclasses, refuse_what_is_lost
from .structure import structure_of


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
    capture = _captured(func, tuple(args), {}, trace_joint, decompositions)
    for facts in (*capture.joint.memories, *capture.joint.inputs):
        if facts.data_changed or facts.reshapes or facts.moved:
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
    count = len(joint.signature.tokens) + len(joint.signature.returned)
    forward, _ = default_partition(joint.module, (primals, tangents), num_fwd_outputs=count)
    with torch.no_grad():
        forward(*primals)


def _captured(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: bool | Loss,
    decompositions: Decompositions | None,
    pre_dispatch: bool = False,
) -> Capture:
    """Record a function of which everything comes in as an argument."""
    if not callable(func):
        raise ExportError(f"a function can be exported, not {func!r}.")
    flat = flatten((args, kwargs), "")
    refuse_subclasses(zip(flat.paths, flat.leaves, strict=True), "aot_export_joint_simple")
    args, kwargs = without_duplicates(flat, ())
    capture = capture_for_export(func, args, kwargs, wanted, decompositions, pre_dispatch)
    for slot in capture.hidden:
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
    """The graph of a function, the facts about it, and the trees of (args, kwargs) and of its result (X-11).

    With `no_tangents` the one result that requires grad, a single number, is differentiated with seed 1.
    """
    named = dict(kwargs or {})
    wanted: bool | Loss = not pre_dispatch
    capture = _captured(func, tuple(args), named, wanted, decompositions, pre_dispatch)
    if no_tangents:
        wanted = Loss(_only_loss(capture))
        capture = _captured(func, tuple(args), named, wanted, decompositions)
        graph, _ = export_graph(capture, func, wanted.index)
    else:
        refuse_what_is_lost(capture, joint=False)
        graph = capture.joint.module
    facts = describe(capture.joint, export_config(wanted), None, deterministic_enabled())
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
