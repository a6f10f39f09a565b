"""The functionalization pass: one walk over a recording.

Every tensor object of the recording has a state: which storage it looks at, through which view of which other tensor,
and the graph node that holds its current value. A write gives its storage a new generation and is carried back
through the views to the tensor at the root; any other view of that storage is brought up to date when it is next
read. A program that writes nothing pays for nothing but the table.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

from .._torch import disable_modes, effect_of, is_script_object, shares_version_counter
from ..errors import CaptureError, UnsupportedError
from ..joint.ir import FlatGraph, Node
from ..ops import IDENTITIES, Kind, ViewStep, aten, op_info, tensors_in
from ..record.engine import has_gaps
from ..record.recording import Recording
from ..record.stand_ins import RecordedInput
from ..record.step import Step
from ..slots import Memory, Primal, Root
from ..values import PLAIN
from .draws import Draws
from .effects import Tokens
from .operators import IN_GRAPHS
from .state import Storage, TensorState, Write
from .storages import (
    ALIGNED,
    by_absolute_offset,
    memory_of,
    refuse_reaching_beside,
    require_same_alignment,
    require_whole_memory,
    reshape,
)
from .views import Carry, carry_back, carry_past_repetition
from .writes import takes_any_layout, write


class Functionalizer:
    """Walks over the steps of a recording and writes a graph without side effects."""

    def __init__(self, recording: Recording, graph: FlatGraph) -> None:
        self.graph = graph
        self._shapes_before = recording.recorder.changes.shapes_before
        self.written_together = recording.recorder.changes.written_together
        self.engine = recording.engine
        self.real_tensors = recording.real_tensors
        self._steps = recording.steps
        self.moves_uncounted = recording.moves_uncounted
        self._states: dict[int, TensorState] = {}
        self.draws = Draws(self)
        self._position = 0
        self._before: dict[Primal, TensorState] = {}  # the states that inputs started with
        self.backward_writes: list[Write] = []
        self.reshapes: dict[int, list[Step]] = {}  # in-place changes of shape, by id of the tensor
        self.tokens = Tokens()
        # A graph that autograd will see must tell where the program detached something.
        self._elided = IDENTITIES - {aten.detach.default} if recording.above_autograd else IDENTITIES

    # ------------------------------------------------------------------------------------------- reading
    def state_of(self, tensor: Tensor) -> TensorState:
        """The state of a tensor of the recording; a tensor that was never recorded is a constant."""
        state = self._states.get(id(tensor))
        if state is None:
            if self.engine.is_abstract(tensor):
                raise CaptureError(
                    "A recorded tensor came from outside the recorder's sight: it was computed in another thread, or "
                    "with torch's modes switched off. Compute it in the program's own thread, or compile with "
                    "fallback='eager'."
                )
            node = self.graph.constant(tensor, tensor)
            state = self._states[id(tensor)] = TensorState(Storage(), node, tensor)
        return state

    def read(self, state: TensorState) -> Node:
        """The node that holds the current value of a tensor."""
        stale = []
        while state.generation != state.storage.generation and state.parent is not None:
            stale.append(state)
            state = state.parent
        node = state.node
        for state in reversed(stale):
            node = state.node = self._replay(node, state)
            state.generation = state.storage.generation
        return node

    def node_of(self, tensor: Tensor) -> Node:
        """The current value of a tensor of the recording."""
        return self.read(self.state_of(tensor))

    def _replay(self, parent: Node, state: TensorState) -> Node:
        step = state.step
        assert step is not None
        if step.op in self._elided:
            return parent
        if step.op in ALIGNED:
            require_same_alignment(state)
        args, kwargs = self.args(step.args), self.kwargs(step.kwargs)
        node = self.graph.call(step.op, (parent, *args), kwargs, state.tensor)
        return node if step.index is None else self.graph.call(operator.getitem, (node, step.index), {}, state.tensor)

    def _arg(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, Tensor):
            return self.node_of(value)
        if kind is list or kind is tuple:
            return kind([self._arg(item) for item in value])
        if isinstance(value, (SymInt, SymFloat, SymBool)):
            return self.graph.number(value)
        if kind is torch.Size:
            return [self._arg(item) for item in value]
        if kind is torch.Generator:  # an object, not text: graphs hold it as a constant
            return self.graph.constant(value, value)
        if is_script_object(value):
            return self.tokens.constant(self.graph, value)
        return value

    def args(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([self._arg(value) for value in values])

    def kwargs(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: self._arg(value) for name, value in values.items()} if values else {}

    # ------------------------------------------------------------------------------------------- walking
    def add_input(self, recorded: RecordedInput) -> None:
        """Give an input of the recording its placeholder, or its place in memory that inputs share."""
        shape = self.shape_now(recorded.seen)
        if recorded.parent is None or (isinstance(recorded.slot, Root) and recorded.differentiated is not None):
            self.graph.placeholder(recorded.slot, shape)
        if not isinstance(recorded.seen, Tensor) or recorded.same_as is not None:
            return
        if recorded.parent is None:
            state = TensorState(Storage(), self.graph.placeholders[-1], shape)
        else:
            state = self.state_of(recorded.parent.seen)
            for step, tensor in recorded.views:
                state = self.add_view(state, tensor, step)
        if state.input is None or isinstance(state.input.slot, (Memory, Root)):  # the user's own name is better
            state.input = recorded
        self._before[recorded.slot] = state
        self._states[id(recorded.seen)] = state
        if recorded.leaf is not None and recorded.leaf is not recorded.seen:
            self._states[id(recorded.leaf)] = state

    def state_before(self, recorded: RecordedInput) -> TensorState:
        """The state that an input started with."""
        return self._before[recorded.slot]

    def add_fresh(self, tensor: Tensor, node: Node) -> None:
        """A tensor that starts with the value of a node."""
        self._states[id(tensor)] = TensorState(Storage(self.graph.backward), node, self.shape_now(tensor))

    def lies_alone(self, state: TensorState) -> bool:
        """Whether nobody else can look at the memory of a tensor: no input does, nor another tensor of the program."""
        others = (other for other in self._states.values() if other.storage is state.storage)
        return state.owner is None and all(other is state for other in others)

    def run(self, steps: Sequence[Step], start: int) -> None:
        """Walk over steps, the first of which is number `start` of the recording."""
        graph = self.graph
        self.tokens.begin()
        for position, step in enumerate(steps, start):
            self._position = position
            graph.stack, graph.backward, graph.origin = step.stack, step.backward, step.origin
            graph.recomputed = step.backward and step.grad_enabled
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

    def is_used_before(self, tensor: Tensor) -> bool:
        """Whether an operator that autograd saw has taken a tensor before the current step."""
        earlier = [step for step in self._steps[: self._position - 1] if step.op not in IDENTITIES]
        return any(step.grad_enabled and any(arg is tensor for arg in tensors_in(step.args)) for step in earlier)

    def put_back(self, tensor: Tensor, state: TensorState, start: int) -> None:
        """Undo what steps from number `start` on did to the geometry of a tensor."""
        self._states[id(tensor)] = state
        changes = [before for position, before in self._shapes_before.get(id(tensor), ()) if position >= start]
        if changes:
            with disable_modes(), torch.no_grad():
                aten.set_.source_Tensor(tensor, changes[0])
            self.engine.forget(tensor)

    def step_over(self) -> None:
        """From here on tensors have the shapes that the current step leaves behind."""
        self._position += 1

    def shape_now(self, value: Any) -> Any:
        """The tensor itself, or a copy of its metadata from before an operator like `t_` changed it."""
        for position, before in self._shapes_before.get(id(value), ()):
            if position >= self._position:
                return before
        return value

    def pure(self, step: Step) -> None:
        shape = self.shape_now(step.out)
        if op_info(step.op).random:
            node = self.draw(step, step.op, step.args, step.kwargs, shape)
        else:
            op = IN_GRAPHS.get(step.op, step.op)
            kwargs = self.kwargs(step.kwargs)
            if not step.backward and _takes_default_dtype(step):  # which may be another when the backward runs it again
                kwargs = {**kwargs, "dtype": shape.dtype}
            node = self.graph.call(op, self.args(step.args), kwargs, shape)
            node.impure = op_info(step.op).impure
        self.results(node, step.out)

    def draw(self, step: Step, op: Any, args: Sequence[Any], kwargs: dict[str, Any], value: Any) -> Node:
        """The node of a random operator that a step runs."""
        return self.draws.call(step, self._position, op, self.args(args), self.kwargs(kwargs), value)

    def device_of_draw(self, step: Step) -> torch.device:
        """Where a random operator draws."""
        tensors = list(tensors_in(step.args))
        return self.device(tensors[0]) if tensors else torch.device(step.kwargs.get("device") or "cpu")

    def results(self, node: Node, out: Any) -> None:
        """States for the fresh results of an operator."""
        if isinstance(out, Tensor):
            self.add_fresh(out, node)
        elif isinstance(out, (list, tuple)):
            for i, item in enumerate(out):
                if isinstance(item, (Tensor, list, tuple)):
                    self.results(self.graph.call(operator.getitem, (node, i), {}, item), item)

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

    def add_view(self, parent: TensorState, tensor: Tensor, view: ViewStep) -> TensorState:
        state = TensorState(parent.storage, parent.node, self.shape_now(tensor), parent, view)
        state.node = self._replay(self.read(parent), state)
        self._states[id(tensor)] = state
        return state

    # ------------------------------------------------------------------------------------------- writing
    def store(self, step: Step, state: TensorState, node: Node, exact: bool) -> None:
        """Make `node` the value of a tensor by carrying it back to the tensor at the root.

        Every view of the storage, the written one included, is read from the root again: it shares its memory.
        """
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

    def note_write(self, step: Step, state: TensorState) -> None:
        """The storage has new contents."""
        state.storage.generation += 1
        state.storage.writes.append(Write(step, state))
        if step.backward:
            self.backward_writes.append(state.storage.writes[-1])

    def _carry(self, child: TensorState, parent: TensorState, node: Node) -> Node:
        assert child.step is not None
        if child.step.op is aten.as_strided.default and has_gaps(parent.tensor):
            raise UnsupportedError(
                "a write through as_strided may reach memory beside the tensor that it was taken from, which cannot be "
                "compiled yet."
            )
        args = self.args(child.step.args)
        return carry_back(Carry(self, child.step, args, parent.node, node, parent.tensor, child.tensor))

    def device(self, tensor: Tensor) -> torch.device:
        """Where a tensor of the recording pretends to be."""
        return self.engine.device_of(tensor) if self.engine.is_abstract(tensor) else tensor.device

    def with_layout(self, node: Node, tensor: Tensor) -> Node:
        """The value of a node in the layout and dtype of a tensor."""
        size, stride = self.args([list(tensor.shape), list(tensor.stride())])
        options = {"dtype": tensor.dtype, "device": self.device(tensor)}
        empty = self.graph.call(aten.empty_strided.default, (size, stride), options, tensor)
        return self.graph.call(aten.copy.default, (empty, node), {}, tensor)

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """A node whose abstract value is found by running the operator on the abstract values of its arguments."""
        values = self._values_of(args)
        if op is operator.getitem:
            value = values[0][values[1]]
        else:
            with torch.no_grad():
                value = self.engine.run(op, (), values, self._values_of(kwargs))
        return self.graph.call(op, args, kwargs, value)

    def _values_of(self, value: Any) -> Any:
        """Nodes, nested in containers, replaced by their abstract values."""
        if isinstance(value, Node):
            return self._values_of(value.value)
        if isinstance(value, Tensor) and not self.engine.is_abstract(value):  # a constant
            return self.engine.strided(value, value.stride(), value.device)
        if isinstance(value, (list, tuple)):
            return type(value)(self._values_of(item) for item in value)
        if isinstance(value, dict):
            return {key: self._values_of(item) for key, item in value.items()}
        return value


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
