"""What a forward hands to its backward, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import hint_of


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

    tensors: tuple[fx.Node, ...]
    sizes: tuple[fx.Node, ...]

    @property
    def names(self) -> list[str]:
        """In the order in which the backward takes them."""
        return [node.name for node in (*self.sizes, *self.tensors)]

    def described(self, order: int) -> list[SavedValue]:
        """The tensors, for somebody who asks."""
        return [_described(node, order) for node in self.tensors]


def saved_between(forward: fx.GraphModule, returned: int) -> Saved:
    """Read off a partitioned forward what it saves behind its own outputs."""
    outputs: Sequence[Any] = forward.graph.output_node().args[0][returned:]  # type: ignore[index, assignment]
    tensors = tuple(node for node in outputs if isinstance(node.meta.get("val"), Tensor))
    sizes = tuple(node for node in outputs if not isinstance(node.meta.get("val"), Tensor))
    return Saved(tensors, sizes)


def _described(node: fx.Node, order: int) -> SavedValue:
    value: Tensor = node.meta["val"]
    shape = tuple(hint_of(n) for n in value.shape)
    is_input = node.op == "placeholder"
    nbytes = 0 if is_input else torch.Size(shape).numel() * value.element_size()
    lines = str(node.meta.get("stack_trace") or "").strip().splitlines()
    return SavedValue(order, node.name, shape, value.dtype, nbytes, is_input, lines[-1].strip() if lines else "")
