"""How random operators are written into the graph.

By default a draw stays as it is, so that the stream is eager's own. Where the recording replays a draw, as
checkpointing does, the first one also returns the state of its generator, and the graph draws again from that: what the
user marked for recomputation is recomputed, and no random values are kept for it. Draws that follow each other in one
recomputation need one state between them, unless the compiler may change their order: then each has a state of its own.

Under `functionalize_rng_ops` each draw takes a seed and an offset and gives the next offset, so that no generator is
touched inside the graph; a replay takes the same seed and offset again.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .._torch import OpOverload
from ..graph.graph import Node, Step
from ..ops import aten
from ..slots import RandomState
from .operators import at_offset, from_state, state_bytes, with_state
from .state import Walk


class RandomInputs:
    """The seed and the offset of one direction, and where its draws have brought the offset."""

    def __init__(self, number: Tensor, direction: Literal["fwd", "bwd"]) -> None:
        self.seed, self.base = (Node(None, (), {}, number) for _ in range(2))
        self.seed.slot, self.base.slot = RandomState(direction, "seed"), RandomState(direction, "base_offset")
        self.offset = self.base
        self.devices: list[torch.device] = []

    @property
    def draws(self) -> bool:
        """Whether anything was drawn."""
        return self.offset is not self.base

    @property
    def device(self) -> torch.device:
        """Whose generator gives the seed and the offset: that of the first accelerator that draws, or the CPU's."""
        return next((device for device in self.devices if device.type != "cpu"), torch.device("cpu"))


@dataclass(slots=True)
class _Draw:
    """A draw that may be replayed."""

    node: Node
    op: OpOverload
    source: tuple[Node, Node] | None  # the seed and the offset that it drew from
    state: Node | None = None  # of its generator before it, once it is needed


class Draws:
    """Writes random operators, and remembers them for replays."""

    def __init__(self, walk: Walk, in_order: bool) -> None:
        self._walk = walk
        self._in_order = in_order  # the compiler leaves them as they come
        self._made: dict[int, _Draw] = {}  # by their step's position
        self._states_after: dict[int, Node] = {}  # after replayed draws, by their step's position
        self._states_used: dict[int, Node] = {}  # by this backward, for replays of the draw at a position
        self.forward: RandomInputs | None = None
        self.backward: RandomInputs | None = None

    def functionalize(self) -> None:
        """From now on draws take a seed and an offset."""
        engine = self._walk.engine
        number = engine.run(aten.empty.memory_format, (), ([],), {"dtype": torch.int64, "device": torch.device("cpu")})
        self.forward, self.backward = RandomInputs(number, "fwd"), RandomInputs(number, "bwd")

    def restart_backward(self) -> None:
        """Another backward begins: with the seed and the offset that it is given, and with what the forward saved."""
        self._states_used.clear()
        if self.backward is not None:
            self.backward.offset = self.backward.base

    def call(
        self, step: Step, position: int, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> Node:
        """The node of a random operator that a step runs; `value` is its abstract result."""
        known = None if step.repeats is None else self._made.get(step.repeats)
        if known is not None:
            return self._replay(step, position, known, op, args, kwargs, value)
        inputs = self.backward if step.backward else self.forward
        if inputs is None or "generator" in kwargs:  # a generator of the user's own is not in the state that is passed
            node = self._walk.graph.call(op, args, kwargs, value)
            node.impure = True
            self._made[position] = _Draw(node, op, None)
            return node
        inputs.devices.append(self._walk.device_of_draw(step))
        source = inputs.seed, inputs.offset
        node, inputs.offset = self._more(at_offset(op), (*source, *args), kwargs, value, inputs.base.value)
        self._made[position] = _Draw(node, op, source)
        return node

    def _replay(
        self,
        step: Step,
        position: int,
        known: _Draw,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        value: Any,
    ) -> Node:
        if known.source is not None:
            return self._more(at_offset(op), (*known.source, *args), kwargs, value, known.source[1].value)[0]
        assert step.repeats is not None
        saved = self._state_before(known, step)  # in any case: no compiler may draw otherwise than the replay does
        state = self._states_used.get(step.repeats) if self._in_order else saved
        if state is None and step.follows is not None:
            state = self._states_after.get(step.follows)
        if state is None:
            state = saved
        if state is None:
            return known.node
        self._states_used[step.repeats] = state
        kwargs = {name: item for name, item in kwargs.items() if name != "generator"}
        node, after = self._more(from_state(op), (state, *args), kwargs, value, state.value)
        self._states_after[position] = after
        return node

    def _state_before(self, draw: _Draw, step: Step) -> Node | None:
        """The state of the generator before a draw, which from now on returns it."""
        if draw.state is None and not self._walk.closed:
            graph, node = self._walk.graph, draw.node
            size = state_bytes(self._walk.device_of_draw(step))
            options = {"dtype": torch.uint8, "device": torch.device("cpu")}
            value = self._walk.engine.run(aten.empty.memory_format, (), ([size],), options)
            several = isinstance(node.value, (list, tuple))
            results = tuple(node.value) if several else (node.value,)
            drawn = node if several else Node(node.op, node.args, node.kwargs, None)
            drawn.op, drawn.value, drawn.impure = with_state(draw.op), (*results, value), True
            draw.state = Node(operator.getitem, (drawn, len(results)), {}, value)
            place = graph.nodes.index(node)
            if several:
                graph.nodes.insert(place + 1, draw.state)
            else:  # who reads the draw reads the first of its results now
                drawn.backward, drawn.stack, drawn.origin = node.backward, node.stack, node.origin
                node.op, node.args, node.kwargs, node.impure = operator.getitem, (drawn, 0), {}, False
                graph.nodes[place : place + 1] = [drawn, draw.state, node]
            draw.state.backward, draw.state.stack, draw.state.origin = node.backward, node.stack, node.origin
            drawn.part = draw.state.part = node.part
        return draw.state

    def _more(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, last: Any
    ) -> tuple[Node, Node]:
        """A call that gives one result more: the node of the others, as if there were no more, and that of the last."""
        graph = self._walk.graph
        several = isinstance(value, (list, tuple))
        results = tuple(value) if several else (value,)
        node = graph.call(op, args, kwargs, (*results, last))
        more = graph.call(operator.getitem, (node, len(results)), {}, last)
        return (node if several else graph.call(operator.getitem, (node, 0), {}, value)), more
