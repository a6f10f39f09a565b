"""Backward passes that the program itself runs.

Torch takes function modes off while it handles a call. What a backward calls back (custom functions, the recomputation
of a checkpoint) is the user's code, which must be seen like the rest of it: so these calls go to autograd's engine with
the modes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._torch import run_engine
from .determinants import follow_determinants
from .tape import nodes_behind


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    given = grad_tensors if grad_variables is None else grad_variables
    leaves = () if inputs is None else _as_tuple(inputs)
    if inputs is not None and not leaves:
        raise RuntimeError("`inputs` argument to `backward()` cannot be empty.")
    if create_graph:
        follow_determinants(nodes_behind(_as_tuple(tensors)))
    run_engine(_as_tuple(tensors), given, retain_graph, create_graph, leaves, allow_unreachable=True, accumulate=True)


def _method(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    _backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    if is_grads_batched:  # through vmap, where there is no code of the user's to see
        return NotImplemented
    leaves = _as_tuple(inputs)
    if create_graph:
        follow_determinants(nodes_behind(_as_tuple(outputs)))
    unused = materialize_grads if allow_unused is None else allow_unused
    found = run_engine(
        _as_tuple(outputs), grad_outputs, retain_graph, create_graph, leaves, allow_unreachable=unused, accumulate=False
    )
    if materialize_grads:
        found = tuple(torch.zeros_like(i) if g is None else g for g, i in zip(found, leaves, strict=True))
    return found


def _as_tuple(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, (Tensor, GradientEdge)) else tuple(tensors)


# By the function of torch that is called.
INNER_BACKWARDS: dict[Any, Callable[..., Any]] = {
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
    Tensor.backward: _method,
}
