"""Walk over autograd's graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge


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
    """The node that made a tensor, if there is one; autograd does not speak of views that were written behind it."""
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


def tape_nodes(targets: Sequence[Tensor]) -> Iterator[Any]:
    """Every node that a backward from these tensors would run."""
    found = dict.fromkeys(target.grad_fn for target in targets if target.grad_fn is not None)
    yield from found
    for _, node in tape_edges(targets):
        if node not in found:
            found[node] = None
            yield node


def nodes_behind(ends: Sequence[Tensor | GradientEdge]) -> list[Any]:
    """The same for what a backward may start from."""
    starts = [end.grad_fn if isinstance(end, Tensor) else end.node for end in ends]
    known = [node for node in starts if node is not None]
    return [*known, *(node for _, node in edges_from(list(known)))]
