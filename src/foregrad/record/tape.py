"""Walk over autograd's graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


def tape_edges(targets: Sequence[Tensor]) -> Iterator[tuple[Any, Any]]:
    """Every edge that a backward from these tensors would follow, as (node, following node)."""
    pending = [target.grad_fn for target in targets if target.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        for following, _ in node.next_functions:
            if following is not None:
                yield node, following
                if following not in seen:
                    seen.add(following)
                    pending.append(following)


def tape_nodes(targets: Sequence[Tensor]) -> Iterator[Any]:
    """Every node that a backward from these tensors would run."""
    found = dict.fromkeys(target.grad_fn for target in targets if target.grad_fn is not None)
    yield from found
    for _, node in tape_edges(targets):
        if node not in found:
            found[node] = None
            yield node
