"""The functionalization pass: one walk over a recording.

Every tensor object of the recording has a state: which storage it looks at, through which view of which other tensor,
and the graph node that holds its current value. A write gives its storage a new generation and is carried back
through the views to the tensor at the root; any other view of that storage is brought up to date when it is next
read. A program that writes nothing pays for nothing but the table.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import disable_modes, effect_of, shares_version_counter
from ..abstract.engine import has_gaps
from ..errors import UnsupportedError
from ..graph.graph import Node, Step, ancestors
from ..graph.reads import READ, Read, Reseed
from ..host_numbers import host_number
from ..ops import Kind, ViewStep, aten, does_more, draws, op_info, tensors_in
from ..record.fakify import RecordedInput
from ..slots import SyntheticBase, ViewRoot
from .effect_tokens import Chain, Tokens
from .mutation import write
from .operators import IN_GRAPHS
from .rng import Draws, RandomInputs
from .state import Storage, TensorState, Walk
from .storage import (
    by_absolute_offset,
    memory_of,
    refuse_reaching_beside,
    require_whole_memory,
    reshape,
)
from .view_inverses import Carry, carry_back, carry_past_repetition, takes_any_layout


class Functionalizer(Walk):
    """Walks over the steps of a recording and writes a graph without side effects."""

    draws_in_order = True  # the compiler leaves random operators as they come

    # What few programs need is made on first use.
    @functools.cached_property
    def draws(self) -> Draws:
        return Draws(self, self.draws_in_order)

    @functools.cached_property
    def tokens(self) -> Tokens:
        return Tokens()

    @property
    def random(self) -> tuple[RandomInputs | None, RandomInputs | None]:
        """What forward and backward draw from, under `functionalize_rng_ops`."""
        return (self.draws.forward, self.draws.backward) if "draws" in vars(self) else (None, None)

    def restart_backward(self) -> None:
        """Another backward begins, from what the forward has left."""
        if "draws" in vars(self):
            self.draws.restart_backward()

    def chain(self) -> Chain:
        """The tokens that the last walk has taken and left."""
        return self.tokens.chain() if "tokens" in vars(self) else Chain()

    def add_input(self, recorded: RecordedInput) -> None:
        """Give an input of the recording its placeholder, or its place in memory that inputs share."""
        shape = self.shape_now(recorded.seen)
        if recorded.parent is None or (isinstance(recorded.slot, ViewRoot) and recorded.differentiated is not None):
            self.graph.placeholder(recorded.slot, shape)
        if not isinstance(recorded.seen, Tensor) or recorded.same_as is not None:
            return
        if recorded.parent is None:
            state = TensorState(Storage(), self.graph.placeholders[-1], shape)
        else:
            state = self.state_of(recorded.parent.seen)
            for step, tensor in recorded.views:
                state = self.add_view(state, tensor, step)
        if state.input is None or isinstance(
            state.input.slot, (SyntheticBase, ViewRoot)
        ):  # the user's own name is better
            state.input = recorded
        self._before[recorded.slot] = state
        self._states[id(recorded.seen)] = state
        if recorded.leaf is not None and recorded.leaf is not recorded.seen:
            self._states[id(recorded.leaf)] = state

    def run(self, steps: Sequence[Step], start: int) -> None:
        """Walk over steps, the first of which is number `start` of the recording."""
        graph = self.graph
        if "tokens" in vars(self):
            self.tokens.begin()
        for position, step in enumerate(steps, start):
            self._position = position
            graph.stack, graph.backward, graph.origin = step.stack, step.backward, step.origin
            graph.recomputed = step.backward and step.grad_enabled
            if step.read is not None:
                self._read_data(step, step.read)
                continue
            kind = op_info(step.op).kind
            if kind is Kind.PURE or kind is Kind.HIGHER_ORDER:
                effect = effect_of(step.op)
                if effect is None:
                    self.pure(step)
                else:
                    self.tokens.call(self, step, effect)
            elif kind is Kind.VIEW:
                self._view(step)
            elif kind is Kind.WRITE:
                write(self, step)
            elif kind is Kind.SWITCH:
                graph.call(step.op, step.args, {}, None).impure = True
            else:
                reshape(self, step)

    def _read_data(self, step: Step, read: Read | Reseed) -> None:
        """A read runs in the forward, a backward's too: that one is of values which the forward determines."""
        graph = self.graph
        if isinstance(read, Reseed) and self.random[0] is not None:
            raise UnsupportedError(
                f"{read}: under functionalize_rng_ops this cannot be compiled. Seed outside, or switch it off."
            )
        graph.backward = False
        node = graph.read(step.op, self.args(step.args), self.kwargs(step.kwargs), step.out, read)
        self._bind_number(step.out, node)
        self.results(node, step.out)
        for tensor in tensors_in([step.out] if read.symbols else []):
            graph.bind_sizes(self.node_of(tensor), tensor)
        if read.symbols and step.op is READ and isinstance(step.out, list):
            for i, number in enumerate(step.out):
                graph.bind_number(graph.call(operator.getitem, (node, i), {}, number), number)
        if step.backward:
            graph.backward = True
            behind = ancestors([node])
            used = dict.fromkeys(item for at in behind if at is node or at.backward for item in at.inputs())
            from_forward = [item for item in used if not item.backward and isinstance(item.value, Tensor)]
            graph.call(READ, (from_forward,), {}, None).impure = True

    def put_back(self, tensor: Tensor, state: TensorState, start: int) -> None:
        """Undo what steps from number `start` on did to the geometry of a tensor."""
        self._states[id(tensor)] = state
        changes = [before for position, before in self._shapes_before.get(id(tensor), ()) if position >= start]
        if changes:
            with disable_modes(), torch.no_grad():
                aten.set_.source_Tensor(tensor, changes[0])
            self.engine.forget(tensor)

    def pure(self, step: Step) -> None:
        shape = self.shape_now(step.out)
        if draws(step.op, step.args, step.kwargs):
            node = self.draw(step, step.op, step.args, step.kwargs, shape)
        else:
            op = IN_GRAPHS.get(step.op, step.op)
            kwargs = self.kwargs(step.kwargs)
            if not step.backward and _takes_default_dtype(step):  # which may be another when the backward runs it again
                kwargs = {**kwargs, "dtype": shape.dtype}
            node = self.graph.call(op, self.args(step.args), kwargs, shape)
            node.impure = does_more(step.op, step.args, step.kwargs)
        self._bind_number(step.out, node)
        self.results(node, step.out)

    def _bind_number(self, out: Any, node: Node) -> None:
        number = host_number(out)
        if number is not None:
            self.graph.bind_host_number(number.expression, node)

    def draw(self, step: Step, op: Any, args: Sequence[Any], kwargs: dict[str, Any], value: Any) -> Node:
        return self.draws.call(step, self._position, op, self.args(args), self.kwargs(kwargs), value)

    def _view(self, step: Step) -> None:
        base, *rest = step.args
        parent = self.state_of(base)
        if step.out is base:
            return
        if step.op is aten.as_strided.default:
            require_whole_memory(self, parent.root, always=False, view=self.shape_now(step.out))
        if isinstance(step.out, Tensor):
            alone = step.op is aten.detach.default and _counts_alone(step.out, base, parent)
            view = ViewStep(step.op, tuple(rest), step.kwargs, None, step.grad_enabled, counts_alone=alone)
            source = parent
            if step.op is aten.as_strided.default:
                parent, view = memory_of(parent), by_absolute_offset(view, self.shape_now(step.out))
                refuse_reaching_beside(parent, self.shape_now(step.out), step)
            self.add_view(parent, step.out, view).source = source
            return
        node = self.graph.call(step.op, (self.read(parent), *self.args(rest)), self.kwargs(step.kwargs), step.out)
        for i, item in enumerate(step.out):
            view = ViewStep(step.op, tuple(rest), step.kwargs, i, step.grad_enabled)
            element = self.graph.call(operator.getitem, (node, i), {}, item)
            self._states[id(item)] = TensorState(parent.storage, element, self.shape_now(item), parent, view)

    def store(self, step: Step, state: TensorState, node: Node, exact: bool) -> None:
        if not exact and (not takes_any_layout(state) or node.value.dtype != state.tensor.dtype):
            node = self.with_layout(node, state.tensor)
        path: Sequence[TensorState] = state.path_to_root()
        for parent in path[1:]:
            self.read(parent)  # its value before the write
        path, node = carry_past_repetition(self, step, path, node)
        for child, parent in itertools.pairwise(path):
            node = self._carry(child, parent, node)
        self.note_write(step, state)
        path[-1].node, path[-1].generation = node, state.storage.generation

    def _carry(self, child: TensorState, parent: TensorState, node: Node) -> Node:
        assert child.step is not None
        if child.step.op is aten.as_strided.default and has_gaps(parent.tensor):
            raise UnsupportedError(
                "a write through as_strided may reach memory beside the tensor that it was taken from, which cannot be "
                "compiled yet."
            )
        args = self.args(child.step.args)
        return carry_back(Carry(self, child.step, args, parent.node, node, parent.tensor, child.tensor))


def _counts_alone(detached: Tensor, base: Tensor, parent: TensorState) -> bool:
    """Whether writes to a detached tensor do not count for what it was taken from, as with `.data`.

    Autograd detaches a view in another dtype by itself, and gives it the counter of the tensor that it is a view of.
    """
    sources = (base, *(state.tensor for state in parent.path_to_root()))
    return not any(shares_version_counter(detached, tensor) for tensor in sources)


def _takes_default_dtype(step: Step) -> bool:
    """Whether a step makes a tensor of the default dtype, of none that it is given."""
    if "dtype" not in op_info(step.op).names or step.kwargs.get("dtype") is not None:
        return False
    given = any(True for _ in tensors_in((*step.args, *step.kwargs.values())))
    return not given and isinstance(step.out, Tensor) and step.out.is_floating_point()
