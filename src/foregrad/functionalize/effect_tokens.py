"""Operators with side effects: printing, calls of script objects, whatever is registered so.

Each is called through torch's `with_effects`, which takes a token and returns a new one beside the results. Every call
takes the token of the call before it, so a graph without side effects keeps them in order, and the last token is a
result of the graph, so none is dropped. Forward and backward have a chain of their own.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import HigherOrderOperator, is_script_object, with_effects
from ..errors import UnsupportedError
from ..graph.graph import Node, Step
from ..ops import aten, tensors_in
from ..slots import Token
from ..stack_traces import where
from .state import Walk


@dataclass(frozen=True, slots=True)
class Chain:
    """The tokens that one direction of a graph takes, and those that it returns, for each kind of effect."""

    slots: tuple[Token, ...] = ()
    heads: tuple[Node, ...] = ()
    ends: tuple[Node, ...] = ()


class Tokens:
    """Keeps the operators with side effects of one kind in a chain."""

    def __init__(self) -> None:
        self._heads: dict[Token, Node] = {}  # placeholders
        self._chains: dict[Token, tuple[Node, Node]] = {}  # of this walk: first and latest token

    def begin(self) -> None:
        """A walk over the forward, or over a backward, begins."""
        self._chains = {}

    def begin_order(self) -> None:
        """A backward that is differentiated is itself a forward: what follows has tokens of its own."""
        self._heads = {slot: head for slot, head in self._heads.items() if not slot.backward}

    def chain(self) -> Chain:
        """What the last walk has taken and left."""
        ends = self._chains.values()
        return Chain(tuple(self._chains), tuple(head for head, _ in ends), tuple(end for _, end in ends))

    def call(self, walk: Walk, step: Step, effect: str) -> None:
        """Run a step after those of the same effect."""
        _refuse_plain_results(step)
        slot = Token(effect, walk.graph.backward)
        head, token = self._chains.get(slot) or (self._head(walk, slot),) * 2
        several = isinstance(step.out, tuple)
        outs = tuple(walk.shape_now(out) for out in step.out) if several else (walk.shape_now(step.out),)
        args, kwargs = walk.args(step.args), walk.kwargs(step.kwargs)
        args, kwargs = _as_in_eager(walk, (step.args, step.kwargs), (args, kwargs))
        node = walk.graph.call(with_effects, (token, step.op, *args), kwargs, (token.value, *outs))
        # In the backward the chain alone keeps it: an attempt that was given up leaves nothing behind.
        node.impure = not walk.graph.backward
        self._chains[slot] = head, walk.graph.call(operator.getitem, (node, 0), {}, token.value)
        for i, out in enumerate(step.out if several else (step.out,), 1):
            if isinstance(out, (Tensor, list, tuple)):
                walk.results(walk.graph.call(operator.getitem, (node, i), {}, out), out)
        if any(map(is_script_object, (*step.args, *step.kwargs.values()))):
            for out in tensors_in([step.out]):
                _require_geometry(walk, out)

    def _head(self, walk: Walk, slot: Token) -> Node:
        """The placeholder of a token; it is no primal and no tangent, so the graph does not count it among them."""
        head = self._heads.get(slot)
        if head is None:
            value = walk.engine.run(aten.empty.memory_format, (), ([0],), {"device": torch.device("cpu")})
            head = self._heads[slot] = Node(None, (), {}, value)
            head.slot = slot
            if slot.backward:
                count = sum(known.backward for known in self._heads)
                head.name = "tangents_token" if count == 1 else f"tangents_token_{count - 1}"
        return head


def _as_in_eager(walk: Walk, recorded: Any, value: Any) -> Any:
    """Detach again what the program has detached: the operator may look at `requires_grad` of an input."""
    if isinstance(recorded, Tensor):
        is_input = value.op is None and value.value.requires_grad
        detach = is_input and not recorded.requires_grad
        return walk.graph.call(aten.detach.default, (value,), {}, recorded) if detach else value
    if isinstance(recorded, (list, tuple)):
        items = [_as_in_eager(walk, r, v) for r, v in zip(recorded, value, strict=True)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(recorded, dict):
        return {key: _as_in_eager(walk, recorded[key], value[key]) for key in recorded}
    return value


def _require_geometry(walk: Walk, out: Tensor) -> None:
    """What a script object returns depends on its state, which may be another one when the program runs."""
    size, stride = walk.args([list(out.shape), list(out.stride())])
    args = (walk.node_of(out), size, stride, out.dtype)
    walk.graph.call(aten._assert_tensor_metadata.default, args, {}, None).impure = True


def _refuse_plain_results(step: Step) -> None:
    """A number would be that of the recording for ever, and random values cannot be drawn again for a checkpoint."""
    name = step.op.name() if isinstance(step.op, HigherOrderOperator) else str(step.op)
    results: list[Any] = list(step.out) if isinstance(step.out, (tuple, list)) else [step.out]
    for result in results:
        if result is not None and not isinstance(result, (Tensor, list, tuple)):
            raise UnsupportedError(
                f"{name}, at {where(step.stack)}, has side effects and returns a plain {type(result).__name__}: a "
                "compiled program cannot follow it. Return a tensor, or compile with fallback='eager'."
            )
    if step.repeats is not None:
        raise UnsupportedError(
            f"{name}, at {where(step.stack)}, is random, has side effects, and runs again under a checkpoint: this "
            "cannot be compiled."
        )
