"""What leads from the node of a program, in autograd's graph, to the tensors that it was applied to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..joint.build import Joint
from ..joint.ir import Node
from ..slots import Output, Primal, Returned
from ..subclasses.layout import Wrapped, is_jagged
from .saved import Saved, saved_origin


@dataclass(frozen=True, slots=True)
class Edges:
    """The edges of a program's node, and where higher orders find a tensor with the history of each.

    A leaf is known to autograd; a saved input has its history; for any other the program returns an *anchor*, a tensor
    of its shape without data, whose gradient is its gradient. A wrapper subclass is saved itself where a tensor in it
    is.
    """

    through: tuple[int, ...]  # of which gradients autograd's edges are, in their order
    saved: Mapping[int, int] = field(default_factory=dict)  # positions of saved inputs, by edge
    anchors: tuple[int, ...] = ()  # edges with an anchor, in their order
    wrappers: Mapping[int, int] = field(default_factory=dict)  # positions among the wrappers that are saved, by edge
    made_late: tuple[Primal, ...] = ()  # inputs that eager's gradients of gradients reach, and no edge leads to


def anchor(tensor: Tensor) -> Tensor:
    """A tensor of the same shape that takes no memory to speak of."""
    return torch.empty_strided(tensor.shape, (0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)


def anchor_of_any(tensor: Tensor) -> Tensor:
    """The same for what may be a wrapper subclass: nothing else has the shape of a jagged one."""
    return tensor.detach() if is_jagged(tensor) else anchor(tensor)


def edges_of(joint: Joint, saved: Saved, counted: Mapping[Primal, int]) -> Edges:
    """The edges of a program; `counted` are inputs whose changes count before they are made."""
    through = [
        i
        for i, (facts, grad) in enumerate(zip(joint.primals, joint.signature.grads, strict=True))
        if grad is not None or facts.recorded.slot in joint.tape.reached
    ]
    names = [node.name for node in saved.tensors]
    in_place = {write.current.name for write in joint.backward_writes}
    places: dict[int, int] = {}
    anchors = []
    wrappers = {}
    kept, _ = wrappers_saved(joint, saved)
    for edge, i in enumerate(through):
        node, facts = joint.primal_nodes[i], joint.primals[i]
        if i in kept:
            wrappers[edge] = kept.index(i)
            continue
        name = node.name if isinstance(node, Node) else None
        if name in names and facts.recorded.slot not in counted and name not in in_place:
            places[edge] = len(saved.sizes) + names.index(name)
        elif not facts.is_leaf:
            anchors.append(edge)
    return Edges(tuple(through), places, tuple(anchors), wrappers, _made_late(joint, through, names))


def _made_late(joint: Joint, through: Sequence[int], saved: Sequence[str]) -> tuple[Primal, ...]:
    """Inputs that are saved and made to require grad without being differentiated: their use came first."""
    primals = enumerate(zip(joint.primals, joint.primal_nodes, strict=True))
    return tuple(
        facts.recorded.slot
        for i, (facts, node) in primals
        if facts.made_to_require_grad and i not in through and isinstance(node, Node) and node.name in saved
    )


def wrappers_saved(joint: Joint, saved: Saved) -> tuple[list[int], list[Returned]]:
    """Wrappers of which something is saved: inputs, by position, and results.

    They are saved too: a write to a wrapper counts for the wrapper only, and not for the tensors in it.
    """
    names = {saved_origin(node).name for node in saved.tensors}

    def is_saved(value: Any) -> bool:
        return isinstance(value, Wrapped) and any(isinstance(n, Node) and n.name in names for n in value.leaves)

    tracked = {tangent.of for tangent in joint.signature.tangents}
    returned = zip(joint.signature.returned, joint.returned_nodes, strict=True)
    results: list[Returned] = [
        slot for slot, value in returned if slot in tracked and isinstance(slot, Output) and is_saved(value)
    ]
    return [n for n, value in enumerate(joint.primal_nodes) if is_saved(value)], results


def values_in_wrappers(joint: Joint, saved: Saved) -> list[frozenset[int]]:
    """For each wrapper that is saved, which of the saved values lie in it."""
    origins = [saved_origin(node).name for node in saved.tensors]
    node_of = dict(zip(joint.signature.returned, joint.returned_nodes, strict=True))
    positions, results = wrappers_saved(joint, saved)
    found = []
    for value in (*(joint.primal_nodes[i] for i in positions), *(node_of[slot] for slot in results)):
        names = {leaf.name for leaf in value.leaves if isinstance(leaf, Node)}
        found.append(frozenset(len(saved.sizes) + i for i, name in enumerate(origins) if name in names))
    return found
