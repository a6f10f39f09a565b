"""What may be computed twice."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch  # noqa: F401 (the doctest uses it)
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from .._torch import HigherOrderOperator, OpOverload
from ..graph.graph import Node, get_constant
from ..ops import COLLECTIVES, Kind, draws, op_info

# ---------------------------------------------------------------------------------------------------------------------
# What may be computed twice: one predicate, which no budget and no option lifts.
#
# The forward runs an operator once. If the backward runs it again, it must see the same values, unnoticed.
MARKED = "marked to be saved"
_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def why_not_again(node: Node, reads_written: bool = False) -> str | None:
    """Why the backward must not compute a node of the forward again; None if it may.

    >>> node = Node(torch.ops.aten.rand.default, ([2],), {}, None)
    >>> why_not_again(node)
    'random'

    Args:
        node: a node that does not depend on tangents.
        reads_written: whether it reads memory that is overwritten once the forward has run.
    """
    op = node.op
    if op is None:
        return "an input"
    for reason, holds in _RULES:
        if holds(op, node):
            return reason
    return "reads an input that is written later" if reads_written and not node.backward else None


def _is_random(op: Any, node: Node) -> bool:
    return isinstance(op, OpOverload) and draws(op, node.args, node.kwargs)


def _is_collective(op: Any, node: Node) -> bool:
    return isinstance(op, OpOverload) and op.namespace in COLLECTIVES


def _writes(op: Any, node: Node) -> bool:
    return isinstance(op, OpOverload) and bool(op_info(op).written) and node.impure


def _has_effects(op: Any, node: Node) -> bool:
    if isinstance(op, HigherOrderOperator):
        return True
    by_its_tag = isinstance(op, OpOverload) and "random" in op_info(op).traits and not _is_random(op, node)
    return node.impure and not by_its_tag


def _is_unknown(op: Any, node: Node) -> bool:
    """Plain Python in a graph may do anything, but for arithmetic on sizes and taking an element."""
    if isinstance(op, (OpOverload, HigherOrderOperator)) or op in (operator.getitem, get_constant):
        return False
    return getattr(op, "__module__", "").split(".")[0] not in ("_operator", "math", "torch", "builtins", "foregrad")


def _takes_default_dtype(op: Any, node: Node) -> bool:
    """Integers become floating point of the default dtype, which may be another when the backward runs."""
    if not isinstance(op, OpOverload) or op_info(op).kind is not Kind.PURE or node.kwargs.get("dtype") is not None:
        return False
    given = [item.value for item in node.inputs() if isinstance(item.value, Tensor)]
    made = node.value
    return isinstance(made, Tensor) and _is_inexact(made) and bool(given) and not any(map(_is_inexact, given))


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_marked(op: Any, node: Node) -> bool:
    return mark_of(node) in _SAVE


_RULES: tuple[tuple[str, Callable[[Any, Node], bool]], ...] = (
    ("random", _is_random),
    ("a collective", _is_collective),
    ("a write", _writes),
    ("a side effect", _has_effects),
    ("unknown to Foregrad", _is_unknown),
    ("of the default dtype", _takes_default_dtype),
    (MARKED, _is_marked),
)


def mark_of(node: Node) -> CheckpointPolicy | None:
    """The user's policy for a node, which `torch.utils.checkpoint` and compilers leave in its metadata."""
    found = node.meta.get("recompute") if node.meta is not None else None
    if isinstance(found, bool):  # as older front ends wrote it
        return CheckpointPolicy.MUST_RECOMPUTE if found else CheckpointPolicy.MUST_SAVE
    return found if isinstance(found, CheckpointPolicy) else None


def is_marked_for_recomputation(node: Node) -> bool:
    """Whether the user wants the backward to compute a node again."""
    return mark_of(node) in _RECOMPUTE
