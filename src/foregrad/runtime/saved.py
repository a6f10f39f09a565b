"""What a forward hands to its backward, and how much memory that takes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import OpOverload, hint_of
from ..joint.build import Joint
from ..joint.inputs import has_version
from ..joint.ir import Node, nodes_in
from ..joint.lazy import is_placeholder, operator_of, outputs_of, stack_of, unread, value_of
from ..ops import Kind, op_info
from ..slots import Returned, Updated


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A tensor that is kept between a forward and its backward.

    Args:
        order: 1 for what the program keeps for its gradients, 2 for what these keep for theirs, and so on.
        name: Its node in the graphs.
        shape: By the sizes of the recording.
        dtype: Of its elements.
        nbytes: What it takes; an input that is kept takes no memory of its own.
        is_input: Whether it is an input of that forward.
        line: The user's line that made it, if it is known.
    """

    order: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    is_input: bool
    line: str

    def __str__(self) -> str:
        kind = "an input" if self.is_input else f"{self.nbytes:,} bytes"
        return f"order {self.order}: {self.name}, {str(self.dtype).removeprefix('torch.')}{list(self.shape)}, {kind}"


@dataclass(frozen=True, slots=True)
class Saved:
    """What the forward hands to the backward: names of the nodes, tensors first in the forward's outputs."""

    tensors: tuple[Any, ...]  # of either form
    sizes: tuple[Any, ...]

    @property
    def names(self) -> list[str]:
        """In the order in which the backward takes them."""
        return [node.name for node in (*self.sizes, *self.tensors)]

    def described(self, order: int) -> list[SavedValue]:
        """The tensors, for somebody who asks."""
        return [_described(node, order) for node in self.tensors]


def saved_between(forward: fx.GraphModule, returned: int) -> Saved:
    """Read off a partitioned forward what it saves behind its own outputs."""
    outputs = outputs_of(forward)[returned:]
    tensors = tuple(node for node in outputs if isinstance(value_of(node), Tensor))
    sizes = tuple(node for node in outputs if not isinstance(value_of(node), Tensor))
    return Saved(tensors, sizes)


def saved_origin(node: Any) -> Any:
    """What a saved view, or a view of a view, was taken from."""
    while is_view(node):
        node = node.args[0]
    return node


def is_view(node: Any) -> bool:
    """Whether a node, of either form, takes a view."""
    op = operator_of(node)
    return hasattr(op, "_schema") and op_info(op).kind is Kind.VIEW


def origin_of(node: Any) -> Any:
    """What a view, or a view of a view, was taken from; a piece of a split is a view too."""
    while True:
        source = node.args[0] if operator_of(node) is operator.getitem else node
        op = operator_of(source)
        if not isinstance(op, OpOverload) or op_info(op).kind is not Kind.VIEW:
            return node
        node = source.args[0]


@dataclass(frozen=True, slots=True)
class Reread:
    """What versions matter to a backward beyond what autograd checks by itself; primals by their places.

    Args:
        only_again: Those that are saved only because something is computed from them again: eager saves that instead.
        again: Those from which anything is computed again, eager reads them or not.
        updated: Those that the program writes to and whose new value is saved: by how much their versions grow.
        returned: Results that are computed again where eager saves them.
    """

    only_again: Mapping[int, str] = field(default_factory=dict)  # with their names
    again: Sequence[int] = ()
    updated: Mapping[int, int] = field(default_factory=dict)
    returned: Sequence[Returned] = ()

    def __bool__(self) -> bool:
        return bool(self.only_again or self.checks)

    @property
    def checks(self) -> bool:
        """Whether the backward looks at versions itself."""
        return bool(self.again or self.updated or self.returned)


def reread_by(joint: Joint, saved: Saved, backward: fx.GraphModule, gradients: Sequence[Any]) -> Reread:
    """What a backward graph reads otherwise than eager does."""
    nodes = joint.part.nodes
    kept = {origin_of(node).name for node in saved.tensors}
    of_primals = _views_of([node for node in joint.primal_nodes if isinstance(node, Node) and node.name in kept], nodes)
    recorded = {item for node in nodes if node.backward for item in node.inputs()} | {*nodes_in(gradients)}
    read = {of_primals[node] for node in recorded if node in of_primals}
    computed = dict(_computed_by(backward))
    again = [node for node in nodes if not node.backward and node.name in computed]
    repeated = [computed[node.name] for node in again if not is_view(node)]
    sources = {origin_of(item).name for items in repeated for item in items}
    plain = {i: node.name for i, node in enumerate(joint.primal_nodes) if isinstance(node, Node)}
    return Reread(
        {i: str(joint.primals[i].recorded.slot) for i, name in plain.items() if name in kept - read},
        [i for i, name in plain.items() if name in sources],
        {} if joint.backward_writes else _updated(joint, kept),
        _returned(joint, recorded, {node.name for node in again}) if again else (),
    )


def _returned(joint: Joint, read: set[Node], again: set[str]) -> list[Returned]:
    """Results that the recorded backward reads, and that are computed again, not saved."""
    origins = {origin_of(node).name for node in read} & again
    results = zip(joint.signature.returned, joint.returned_nodes, strict=True)
    return [
        slot
        for slot, node in results
        if not isinstance(slot, Updated) and isinstance(node, Node) and origin_of(node).name in origins
    ]


def _views_of(origins: Sequence[Node], nodes: Sequence[Node]) -> dict[Any, str]:
    """Some nodes and all views of them, with the names of those that they were taken from."""
    found = {node: node.name for node in origins}
    for node in nodes:
        name = found.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if name is not None and (operator_of(node) is operator.getitem or is_view(node)):
            found[node] = name
    return found


def _computed_by(module: fx.GraphModule) -> list[tuple[str, Sequence[Any]]]:
    """The names of what a graph computes, each with what it is computed from."""
    part = unread(module)
    if part is not None:
        return [(node.name, node.inputs()) for node in part.nodes]
    return [(node.name, node.all_input_nodes) for node in module.graph.nodes if node.op == "call_function"]


def _updated(joint: Joint, kept: set[str]) -> dict[int, int]:
    """Eager saves the tensor that was written to, and checks it; the graph saves the value."""
    returned = zip(joint.signature.returned, joint.returned_nodes, strict=True)
    new = {slot.of: node for slot, node in returned if isinstance(slot, Updated) and isinstance(node, Node)}
    found = [(i, facts, new.get(facts.recorded.slot)) for i, facts in enumerate(joint.primals)]
    return {
        i: facts.version_change
        for i, facts, node in found
        if node is not None and has_version(facts) and origin_of(node).name in kept
    }


def _described(node: Any, order: int) -> SavedValue:
    value: Tensor = value_of(node)
    shape = tuple(hint_of(n) for n in value.shape)
    is_input = is_placeholder(node)
    nbytes = 0 if is_input else torch.Size(shape).numel() * value.element_size()
    lines = stack_of(node).strip().splitlines()
    return SavedValue(order, node.name, shape, value.dtype, nbytes, is_input, lines[-1].strip() if lines else "")
