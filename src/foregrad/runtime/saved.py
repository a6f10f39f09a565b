"""What a forward hands to its backward, and how much memory that takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import hint_of
from ..joint.lazy import is_placeholder, operator_of, outputs_of, stack_of, value_of
from ..ops import Kind, op_info


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


def _described(node: Any, order: int) -> SavedValue:
    value: Tensor = value_of(node)
    shape = tuple(hint_of(n) for n in value.shape)
    is_input = is_placeholder(node)
    nbytes = 0 if is_input else torch.Size(shape).numel() * value.element_size()
    lines = stack_of(node).strip().splitlines()
    return SavedValue(order, node.name, shape, value.dtype, nbytes, is_input, lines[-1].strip() if lines else "")
