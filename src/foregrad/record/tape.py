"""Autograd's graph while a program is recorded: walks over it, and backward passes that the program itself runs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._torch import (
    gradients_of,
    has_accumulation_hooks,
    name_of_node,
    run_engine,
    saved_of_determinant,
    without_function_modes,
)
from ..abstract.engine import Engine
from ..errors import UnsupportedError


# ---------------------------------------------------------------------------------------------------------------------
# Walk over autograd's graph.
def tape_edges(targets: Sequence[Tensor]) -> Iterator[tuple[Any, Any]]:
    """Every edge that a backward from these tensors would follow, as (node, following node)."""
    yield from edges_from([target.grad_fn for target in targets if target.grad_fn is not None])


def edges_from(pending: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Every edge that a backward from these nodes would follow; empties the list."""
    seen = set(pending)
    while pending:
        node = pending.pop()
        for following, _ in node.next_functions:
            if following is not None:
                yield node, following
                if following not in seen:
                    seen.add(following)
                    pending.append(following)


def node_of(tensor: Tensor) -> Any:
    """The node that made a tensor, if there is one; autograd does not speak of views whose base was written since."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def ends_behind(targets: Sequence[Tensor]) -> set[tuple[Any, int]]:
    """All results of nodes that a backward from these tensors would reach, but for the tensors themselves."""
    pending = [target.grad_fn for target in targets if target.grad_fn is not None]
    seen = set(pending)
    found: set[tuple[Any, int]] = set()
    while pending:
        for end in pending.pop().next_functions:
            if end[0] is not None:
                found.add(end)
                if end[0] not in seen:
                    seen.add(end[0])
                    pending.append(end[0])
    return found


def tape_nodes(ends: Sequence[Tensor | GradientEdge]) -> Iterator[Any]:
    """Every node that a backward from here would run."""
    starts = [end.grad_fn if isinstance(end, Tensor) else end.node for end in ends]
    found = dict.fromkeys(node for node in starts if node is not None)
    yield from found
    for _, node in edges_from(list(found)):
        if node not in found:
            found[node] = None
            yield node


# ---------------------------------------------------------------------------------------------------------------------
# Gradients that arrive by `.grad`.
#
# A reentrant checkpoint runs a backward of its own inside of the backward, which adds to `.grad` of the parameters
# that it finds, and it refuses to run where single gradients are asked for. So where the tape holds one, a whole
# backward is recorded, and gradients are read from the leaves. Other functions that call `backward` in their backward
# add to `.grad` too.
def accumulated(
    engine: Engine,
    targets: Sequence[Tensor],
    tangents: Sequence[Tensor],
    leaves: Sequence[Tensor],
    create_graph: bool,
) -> list[Tensor | None]:
    """What a whole backward adds to `.grad` of the leaves, which is put back."""
    reached = {following for _, following in tape_edges(targets)}
    for leaf in leaves:
        if engine.is_abstract(leaf):
            continue
        if has_accumulation_hooks(leaf) or leaf.grad_fn in reached:
            kind = "parameter with hooks on its gradient" if leaf.is_leaf else "tensor from a closure that is no leaf"
            raise UnsupportedError(
                f"a {kind} is passed to a custom function beside a reentrant checkpoint: this cannot be compiled yet. "
                "Use use_reentrant=False, pass the tensor as an argument, or let the function find it by itself."
            )
    with _without_gradients([leaf for leaf in leaves if leaf.is_leaf]):
        gradients_of(targets, tangents, (), create_graph)
        with without_function_modes():
            return [leaf.grad if leaf.is_leaf else None for leaf in leaves]


@contextlib.contextmanager
def _without_gradients(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Leaves start with no gradient, and get back the one they had."""
    with without_function_modes():
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
    try:
        yield
    finally:
        with without_function_modes():
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient


def with_added(
    engine: Engine,
    targets: Sequence[Tensor],
    tangents: Sequence[Tensor],
    leaves: Sequence[Tensor],
    create_graph: bool,
) -> list[Tensor | None]:
    """Gradients of single leaves, and what the backward itself adds to their `.grad`, which is put back."""
    with without_function_modes():
        before = [leaf.grad if leaf.is_leaf else None for leaf in leaves]
    found = list(gradients_of(targets, tangents, leaves, create_graph))
    with without_function_modes():
        found = list(map(_with_memory, found, leaves))
        for i, (leaf, gradient) in enumerate(zip(leaves, before, strict=True)):
            added = leaf.grad if leaf.is_leaf else None
            if added is gradient or not (engine.is_abstract(leaf) or engine.is_abstract(added)):
                continue  # the last is another thread's doing, to a tensor that is no fake
            leaf.grad = gradient
            if gradient is not None or not engine.is_abstract(leaf):
                raise UnsupportedError(
                    "a backward that runs inside of the backward replaces a gradient from before the call: this cannot "
                    "be compiled yet."
                )
            known = found[i]
            found[i] = added if known is None or added is None else known + added
    return found


def _with_memory(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """Zeros that autograd makes without memory, in C++, where a tensor of FakeTensorMode is on no device."""
    if gradient is None or not gradient._is_zerotensor() or gradient.device == leaf.device:
        return gradient
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)


# ---------------------------------------------------------------------------------------------------------------------
# Derivatives of derivatives of determinants, which autograd chooses by the data of a matrix.
#
# The gradient of a determinant is found by solving a system, or from the singular values where the matrix is singular.
# If it is to be differentiated again, autograd looks at the determinant first, and cannot for abstract tensors: it
# takes the singular values always, whose derivatives are not finite where two of them are equal. So the gradient is
# computed here in both ways, each for matrices that it is good for, and the determinant chooses in the graph.
_NODE = "LinalgDetBackward0"
_FOLLOWED = "foregrad: its gradient can be differentiated"  # a mark on nodes
_SINGULAR = 100  # determinants below so many times the precision of the dtype: what autograd takes for zero


def follow_determinants(nodes: Iterable[Any]) -> None:
    """Let these nodes of a tape, where they belong to determinants, give gradients that can be differentiated."""
    for node in nodes:
        if node is not None and name_of_node(node) == _NODE and _FOLLOWED not in node.metadata:
            node.metadata[_FOLLOWED] = True
            node.register_hook(_replaced)


def _replaced(gradients: tuple[Tensor | None, ...], tangents: tuple[Tensor | None, ...]) -> Any:
    """A hook of autograd: what stands in place of the gradient that the node has found."""
    (gradient,), tangent = gradients, tangents[0]
    if not torch.is_grad_enabled() or gradient is None or tangent is None or not gradient.numel():
        return None
    return (_gradient(*saved_of_determinant(), tangent),)


def _gradient(matrix: Tensor, determinant: Tensor, tangent: Tensor) -> Tensor:
    """The gradient of a determinant for its tangent, in operators that can be differentiated in turn."""
    zero = _SINGULAR * torch.finfo(matrix.dtype).eps
    singular = (determinant.abs() < zero)[..., None, None]
    size = matrix.shape[-1]
    options: dict[str, Any] = {"dtype": matrix.dtype, "device": matrix.device}
    regular_ones = torch.where(singular, torch.eye(size, **options), matrix)
    scale = (tangent * _determinant(regular_ones).conj()).unsqueeze(-1).expand(matrix.shape[:-1])
    by_solving = torch.linalg.solve_ex(regular_ones.mH, torch.diag_embed(scale))[0]
    distinct = torch.diag(torch.arange(1, size + 1, device=matrix.device).to(matrix.dtype))
    by_values = _by_singular_values(torch.where(singular, matrix, distinct), tangent)
    return torch.where(singular, by_values, by_solving)


def _by_singular_values(matrix: Tensor, tangent: Tensor) -> Tensor:
    """The same from the products of all singular values but one."""
    left, values, right = torch.linalg.svd(matrix)
    one = torch.ones_like(values[..., :1])
    before = torch.cat([one, values[..., :-1]], -1).cumprod(-1)
    behind = torch.cat([one, values[..., 1:].flip(-1)], -1).cumprod(-1).flip(-1)
    weights = ((_determinant(left) * _determinant(right)).conj() * tangent).unsqueeze(-1) * (before * behind)
    return (left * weights.unsqueeze(-2)) @ right


def _determinant(matrix: Tensor) -> Tensor:
    found = torch.linalg.det(matrix)
    follow_determinants([found.grad_fn])
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Backward passes that the program itself runs.
#
# Torch takes function modes off while it handles a call. What a backward calls back (custom functions, the
# recomputation of a checkpoint) is the user's code, which must be seen like the rest of it: so these calls go to
# autograd's engine with the modes on.
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
        follow_determinants(tape_nodes(_as_tuple(tensors)))
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
        follow_determinants(tape_nodes(_as_tuple(outputs)))
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


def differentiated(func: Any, given: Sequence[Any], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Of which tensors such a call takes gradients, and for which; None stands for all leaves."""
    arguments = inspect.signature(INNER_BACKWARDS[func]).bind(*given, **named).arguments
    inputs = arguments.get("inputs")
    return _as_tuple(next(iter(arguments.values()))), None if inputs is None else _as_tuple(inputs)
