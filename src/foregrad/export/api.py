"""The entry points of export."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import FakeTensor, garbage_collection_paused, python_kernels_first
from ..errors import ExportError, GraphOutputError
from ..frontend.capturing import Capture, capture_call
from ..frontend.tree import Flat, Items, flatten, unflatten
from ..joint.verify import verify_graph
from ..options import AOTConfig, Loss, config, next_aot_id
from ..subclasses.layout import is_wrapper, leaves_of
from .exported import Exported, state_of_module
from .graph import export_graph
from .shapes import ranges_of_fakes, with_symbolic_sizes
from .signature import GraphSignature
from .structure import wrappers_of
from .wrappers import own_inner_tensors

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
        loss: which of the flat results to differentiate; none if not given.
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
    wanted = Loss(loss) if loss is not None else False
    with contextlib.nullcontext() if symbols is None else python_kernels_first():
        capture = capture_for_export(mod, args, kwargs, wanted, decompositions, pre_dispatch)
    graph, signature = _graph_of(capture, mod, loss)
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

    wanted = Loss(loss) if loss is not None else False
    capture = capture_for_export(mod, args, named, wanted, decompositions, pre_dispatch)
    if not isinstance(capture.result.tree, Items):
        raise GraphOutputError(
            "Graph output must be a tuple() or list(): Expected forward output to be either a tensor or a list/tuple "
            "of tensors, in one of them. Return (result,)."
        )
    return _graph_of(capture, mod, loss)


def _graph_of(capture: Capture, mod: nn.Module, loss: int | None) -> tuple[fx.GraphModule, GraphSignature]:
    graph, signature = export_graph(capture, mod.forward, loss)
    if config.verify:
        verify_graph(graph)
    return graph, signature


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
    return without_duplicates(flat, [tensor for _, tensor in state])


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


def capture_for_export(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: bool | Loss,
    decompositions: Decompositions | None,
    pre_dispatch: bool = False,
) -> Capture:
    """Record a program for export: without gradients where none are wanted."""
    resolved = export_config(wanted, decompositions, pre_dispatch)
    grad_mode: Any = torch.enable_grad() if wanted else torch.no_grad()
    module = function if isinstance(function, nn.Module) else None
    with contextlib.nullcontext() if pre_dispatch else grad_mode, garbage_collection_paused():
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
