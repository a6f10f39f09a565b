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
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

from ..errors import CaptureError, UnsupportedError
from ..joint.ir import FlatGraph, Node
from ..ops import IDENTITIES, Kind, ViewStep, aten, op_info
from ..record.engine import has_gaps
from ..record.lines import where
from ..record.recorder import Step
from ..record.recording import RecordedInput, Recording
from ..slots import Memory, Primal, Root
from .operators import IN_GRAPHS, RANDOM_FILL
from .variants import TRAINING_FLAG, Variant, functional_variant
from .views import SCATTERS, Carry, carry_back

# In-place changes of shape whose view has another overload.
_VIEW_FORMS = {aten.transpose_.default: aten.transpose.int}


@dataclass(frozen=True, slots=True)
class Write:
    """A write to memory, and the tensor through which it was made."""

    step: Step
    target: TensorState

    def goes_through(self, state: TensorState) -> bool:
        """Whether the written tensor is this one or a view of it."""
        return self.target.chain_from(state) is not None


class Storage:
    """Memory that tensors of the recording share."""

    __slots__ = ("generation", "writes")

    def __init__(self) -> None:
        self.generation = 0
        self.writes: list[Write] = []


class TensorState:
    """What is known about one tensor object of the recording."""

    __slots__ = ("generation", "input", "node", "parent", "step", "storage", "tensor")

    def __init__(
        self,
        storage: Storage,
        node: Node,
        tensor: Tensor,
        parent: TensorState | None = None,
        step: ViewStep | None = None,
    ) -> None:
        self.storage = storage
        self.node = node
        self.tensor = tensor  # carries size, stride and dtype as they were here
        self.parent = parent
        self.step = step  # how the parent gives this tensor
        self.input: RecordedInput | None = None  # that it is
        self.generation = storage.generation

    def chain_from(self, ancestor: TensorState) -> list[ViewStep] | None:
        """The views that lead from an ancestor to this tensor, or None if it is no ancestor."""
        steps: list[ViewStep] = []
        state: TensorState | None = self
        while state is not None and state is not ancestor:
            if state.step is not None:
                steps.append(state.step)
            state = state.parent
        return None if state is None else steps[::-1]

    @property
    def owner(self) -> RecordedInput | None:
        """The input that this tensor is, or was taken from."""
        state: TensorState | None = self
        while state is not None:
            if state.input is not None:
                return state.input
            state = state.parent
        return None

    @property
    def root(self) -> TensorState:
        """The tensor that owns the storage."""
        state = self
        while state.parent is not None:
            state = state.parent
        return state


class Functionalizer:
    """Walks over the steps of a recording and writes a graph without side effects."""

    def __init__(self, recording: Recording, graph: FlatGraph) -> None:
        self.graph = graph
        self._shapes_before = recording.recorder.shapes_before
        self._engine = recording.engine
        self._states: dict[int, TensorState] = {}
        self._draws: dict[int, Node] = {}
        self._position = 0
        self._before: dict[Primal, TensorState] = {}  # the states that inputs started with
        self.reshapes: dict[int, list[Step]] = {}  # in-place changes of shape, by id of the tensor

    # ------------------------------------------------------------------------------------------- reading
    def state_of(self, tensor: Tensor) -> TensorState:
        """The state of a tensor of the recording; a tensor that was never recorded is a constant."""
        state = self._states.get(id(tensor))
        if state is None:
            if self._engine.is_abstract(tensor):
                raise CaptureError("A recorded tensor came from outside the recorder's sight.")
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
        if step.op in IDENTITIES:
            return parent
        args, kwargs = self._args(step.args), self._kwargs(step.kwargs)
        node = self.graph.call(step.op, (parent, *args), kwargs, state.tensor)
        return node if step.index is None else self.graph.call(operator.getitem, (node, step.index), {}, state.tensor)

    def _arg(self, value: Any) -> Any:
        kind = type(value)
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
        return value

    def _args(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([self._arg(value) for value in values])

    def _kwargs(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: self._arg(value) for name, value in values.items()} if values else {}

    # ------------------------------------------------------------------------------------------- walking
    def add_input(self, recorded: RecordedInput) -> None:
        """Give an input of the recording its placeholder, or its place in memory that inputs share."""
        shape = self._shape_now(recorded.seen)
        if recorded.parent is None or (isinstance(recorded.slot, Root) and recorded.required_grad):
            self.graph.placeholder(recorded.slot, shape)
        if not isinstance(recorded.seen, Tensor) or recorded.same_as is not None:
            return
        if recorded.parent is None:
            state = TensorState(Storage(), self.graph.placeholders[-1], shape)
        else:
            state = self.state_of(recorded.parent.seen)
            for step, tensor in recorded.views:
                state = self._add_view(state, tensor, step)
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
        self._states[id(tensor)] = TensorState(Storage(), node, self._shape_now(tensor))

    def run(self, steps: Sequence[Step], start: int) -> None:
        """Walk over steps, the first of which is number `start` of the recording."""
        graph = self.graph
        for position, step in enumerate(steps, start):
            self._position = position
            graph.stack, graph.backward = step.stack, step.backward
            kind = op_info(step.op).kind
            if kind is Kind.PURE:
                self._pure(step)
            elif kind is Kind.VIEW:
                self._view(step)
            elif kind is Kind.WRITE:
                self._write(step)
            else:
                self._reshape(step)

    def _shape_now(self, value: Any) -> Any:
        """The tensor itself, or a copy of its metadata from before an operator like `t_` changed it."""
        for position, before in self._shapes_before.get(id(value), ()):
            if position >= self._position:
                return before
        return value

    def _pure(self, step: Step) -> None:
        if step.repeats is not None and step.repeats in self._draws:
            node = self._draws[step.repeats]
        else:
            op = IN_GRAPHS.get(step.op, step.op)
            shape = self._shape_now(step.out)
            node = self.graph.call(op, self._args(step.args), self._kwargs(step.kwargs), shape)
            if op_info(step.op).impure:
                node.impure = True
                self._draws[self._position] = node
        self._results(node, step.out)

    def _results(self, node: Node, out: Any) -> None:
        """States for the fresh results of an operator."""
        if isinstance(out, Tensor):
            self.add_fresh(out, node)
        elif isinstance(out, (list, tuple)):
            for i, item in enumerate(out):
                if isinstance(item, (Tensor, list, tuple)):
                    self._results(self.graph.call(operator.getitem, (node, i), {}, item), item)

    def _view(self, step: Step) -> None:
        base, *rest = step.args
        parent = self.state_of(base)
        if step.out is base:
            return
        if isinstance(step.out, Tensor):
            self._add_view(parent, step.out, ViewStep(step.op, tuple(rest), step.kwargs, None))
            return
        node = self.graph.call(step.op, (self.read(parent), *self._args(rest)), self._kwargs(step.kwargs), step.out)
        for i, item in enumerate(step.out):
            view = ViewStep(step.op, tuple(rest), step.kwargs, i)
            element = self.graph.call(operator.getitem, (node, i), {}, item)
            self._states[id(item)] = TensorState(parent.storage, element, self._shape_now(item), parent, view)

    def _add_view(self, parent: TensorState, tensor: Tensor, view: ViewStep) -> TensorState:
        state = TensorState(parent.storage, parent.node, self._shape_now(tensor), parent, view)
        state.node = self._replay(self.read(parent), state)
        self._states[id(tensor)] = state
        return state

    def _reshape(self, step: Step) -> None:
        """`t_` and its like: from here on the tensor is a view of what it was."""
        tensor = step.args[0]
        name = step.op._schema.name.split("::")[1].removesuffix("_")
        functional = _VIEW_FORMS.get(step.op) or getattr(getattr(aten, name, None), step.op._overloadname, None)
        if functional is None or op_info(functional).kind is not Kind.VIEW:
            raise UnsupportedError(f"{step.op}, at {where(step.stack)}, cannot be compiled yet.")
        self.reshapes.setdefault(id(tensor), []).append(step)
        self._position += 1  # the shapes from here on
        self._add_view(self.state_of(tensor), tensor, ViewStep(functional, tuple(step.args[1:]), step.kwargs, None))

    # ------------------------------------------------------------------------------------------- writing
    def _write(self, step: Step) -> None:
        if step.op is aten.copy_.default:
            self._copy(step)
            return
        if self._fills_with_random(step):
            self._random_fill(step)
            return
        flag = TRAINING_FLAG.get(step.op)
        if flag is not None and (step.args[op_info(step.op).written[0]] is None or not step.args[flag]):
            self._pure(step)  # batch norm that has or updates no running statistics
            return
        variant = functional_variant(step.op)
        if variant is None:
            raise UnsupportedError(
                f"{step.op}, at {where(step.stack)}, writes to its arguments and has no functional twin: it cannot be "
                "compiled yet."
            )
        targets = [self._positional(step, i) for i in variant.written]
        node = self._functional_call(step, variant)
        returns = len(variant.op._schema.returns)
        values = (
            [node] if returns == 1 else [self.graph.call(operator.getitem, (node, i), {}, None) for i in range(returns)]
        )
        fresh = len(values) - len(targets)
        outs = step.out if isinstance(step.out, (list, tuple)) else (step.out,)
        for value, out in zip(values[:fresh], outs, strict=False):
            value.value = out
            self.add_fresh(out, value)
        for value, target in zip(values[fresh:], targets, strict=True):
            self._write_targets(step, value, target, self._result(step, variant, target) if returns == 1 else None)

    def _fills_with_random(self, step: Step) -> bool:
        """Whether a random operator overwrites a tensor whose layout decides the order of its draws."""
        if not op_info(step.op).random or step.kwargs or not isinstance(step.args[0], Tensor):
            return False
        return not step.args[0].is_contiguous() and all(isinstance(a, (int, float)) for a in step.args[1:])

    def _random_fill(self, step: Step) -> None:
        state = self.state_of(step.args[0])
        node = self._draws.get(step.repeats) if step.repeats is not None else None
        if node is None:
            name = f"{step.op._schema.name.split('::')[1]}.{step.op._overloadname or 'default'}"
            size, stride = self._args([list(state.tensor.shape), list(state.tensor.stride())])
            options = {"dtype": state.tensor.dtype, "device": self._device(state.tensor)}
            node = self.graph.call(RANDOM_FILL, (name, size, stride, list(step.args[1:])), options, state.tensor)
            node.impure = True
            self._draws[self._position] = node
        self._store(step, state, node, exact=True)

    def _positional(self, step: Step, position: int) -> Any:
        if position < len(step.args):
            return step.args[position]
        return step.kwargs.get(step.op._schema.arguments[position].name)

    def _functional_call(self, step: Step, variant: Variant) -> Node:
        if step.repeats is not None and step.repeats in self._draws:
            return self._draws[step.repeats]
        names = [a.name for a in step.op._schema.arguments]
        args = [self._arg(a) for name, a in zip(names, step.args, strict=False) if name not in variant.dropped]
        kwargs = {name: self._arg(a) for name, a in step.kwargs.items() if name not in variant.dropped}
        for position, default in variant.defaults:
            if position >= len(args) and names[position] not in kwargs:
                args.append(default)
        node = self.graph.call(variant.op, tuple(args), kwargs, None)
        if op_info(step.op).random:
            node.impure = True
            self._draws[self._position] = node
        return node

    def _write_targets(self, step: Step, value: Node, target: Any, result: Tensor | None) -> None:
        """Store new values; `result` has the layout of the functional operator where it is not the target's own."""
        if target is None:
            return
        if isinstance(target, (list, tuple)):
            if len({id(self.state_of(item).storage) for item in target}) < len(target):
                raise UnsupportedError(
                    f"{step.op}, at {where(step.stack)}, writes to tensors that share memory: it cannot be "
                    "compiled yet."
                )
            value.value = list(target)
            for i, item in enumerate(target):
                element = self.graph.call(operator.getitem, (value, i), {}, item)
                self._store(step, self.state_of(item), element, exact=True)
        else:
            value.value = self._shape_now(target) if result is None else result
            self._store(step, self.state_of(target), value, exact=result is None)

    def _result(self, step: Step, variant: Variant, target: Any) -> Tensor | None:
        """The abstract result of the functional operator, if it has other strides than the written tensor."""
        if not isinstance(target, Tensor):
            return None
        tensors = [a for a in step.args if isinstance(a, Tensor)]
        shape = target.shape, target.stride()
        alike = torch.Tag.pointwise in variant.op.tags and all((t.shape, t.stride()) == shape for t in tensors)
        if alike and not has_gaps(target):
            return None
        names = [a.name for a in step.op._schema.arguments]
        args = [a for name, a in zip(names, step.args, strict=False) if name not in variant.dropped]
        for position, default in variant.defaults:
            if position >= len(args) and names[position] not in step.kwargs:
                args.append(default)
        kwargs = {name: a for name, a in step.kwargs.items() if name not in variant.dropped}
        with torch.no_grad():
            result = self._engine.run(variant.op, (type(target),), tuple(args), kwargs)
        return None if result.stride() == target.stride() else result

    def _copy(self, step: Step) -> None:
        target, source = step.args[0], step.args[1]
        state = self.state_of(target)
        same_kind = target.dtype == source.dtype and self._device(target) == self._device(source)
        if same_kind and target.shape == source.shape:
            node = self.node_of(source)
            if not (state.step is not None and state.step.op in SCATTERS):
                # A tensor of its own, as in eager: the source may be an input that is written later.
                node = self.graph.call(aten.clone.default, (node,), {}, state.tensor)
            self._store(step, state, node, exact=target.stride() == source.stride() and not has_gaps(target))
        else:
            node = self.graph.call(aten.copy.default, (self.read(state), self.node_of(source)), {}, state.tensor)
            self._store(step, state, node, exact=not has_gaps(target))

    def _device(self, tensor: Tensor) -> torch.device:
        return self._engine.device_of(tensor) if self._engine.is_abstract(tensor) else tensor.device

    def _store(self, step: Step, state: TensorState, node: Node, exact: bool) -> None:
        """Make `node` the value of a tensor by carrying it back to the tensor at the root.

        Every view of the storage, the written one included, is read from the root again: it shares its memory.
        """
        into_place = state.step is not None and state.step.op in SCATTERS
        if not exact and not into_place:
            node = self._restore_layout(node, state.tensor)
        path = [state]
        while (parent := path[-1].parent) is not None:
            self.read(parent)  # its value before the write
            path.append(parent)
        for child, parent in itertools.pairwise(path):
            node = self._carry(child, parent, node)
        state.storage.generation += 1
        state.storage.writes.append(Write(step, state))
        path[-1].node, path[-1].generation = node, state.storage.generation

    def _carry(self, child: TensorState, parent: TensorState, node: Node) -> Node:
        assert child.step is not None
        if child.step.op is aten.as_strided.default and has_gaps(parent.tensor):
            raise UnsupportedError(
                "a write through as_strided may reach memory beside the tensor that it was taken from, which cannot be "
                "compiled yet."
            )
        args = self._args(child.step.args)
        return carry_back(Carry(self.graph, child.step, args, parent.node, node, parent.tensor, child.tensor))

    def _restore_layout(self, node: Node, tensor: Tensor) -> Node:
        size, stride = self._args([list(tensor.shape), list(tensor.stride())])
        options = {"dtype": tensor.dtype, "device": self._device(tensor)}
        empty = self.graph.call(aten.empty_strided.default, (size, stride), options, tensor)
        return self.graph.call(aten.copy.default, (empty, node), {}, tensor)
