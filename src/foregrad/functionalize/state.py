"""What the functionalization pass knows about each tensor of a recording, and about the memory behind it."""

from __future__ import annotations

import abc
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

from .._torch import FakeTensor, OpOverload, hint_of, is_script_object, script_object_identity
from ..abstract.sparse import SPARSE
from ..errors import CaptureError, UnsupportedError
from ..graph.graph import GraphBuilder, Node, Step
from ..ops import IDENTITIES, ViewStep, aten, tensors_in
from ..record.fakify import RecordedInput
from ..record.recording import Recording
from ..record.retrace import Retrace, WholeMemory
from ..slots import Primal
from ..values import PLAIN


@dataclass(frozen=True, slots=True)
class Write:
    """A write to memory, and the tensor through which it was made."""

    step: Step
    target: TensorState

    def goes_through(self, recorded: RecordedInput) -> bool:
        """Whether the written tensor is an input or a view of it."""
        state: TensorState | None = self.target
        while state is not None and state.input is not recorded:
            state = state.source or state.parent
        return state is not None


class Storage:
    """Memory that tensors of the recording share."""

    __slots__ = ("generation", "made_in_backward", "writes")

    def __init__(self, made_in_backward: bool = False) -> None:
        self.generation = 0
        self.made_in_backward = made_in_backward
        self.writes: list[Write] = []


class TensorState:
    """What is known about one tensor object of the recording."""

    __slots__ = ("generation", "input", "node", "parent", "source", "step", "storage", "tensor")

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
        self.source: TensorState | None = None  # what the view was taken from, where that is only a part of the parent
        self.input: RecordedInput | None = None  # that it is
        self.generation = storage.generation

    def chain_from(self, ancestor: TensorState) -> list[ViewStep] | None:
        """The views that lead from an ancestor to this tensor, or None if it is no ancestor."""
        steps: list[ViewStep] = []
        state: TensorState | None = self
        while state is not None and state is not ancestor:
            if state.step is not None:
                steps.append(state.step)
            state = state.source or state.parent
        return None if state is None else steps[::-1]

    def path_to_root(self) -> list[TensorState]:
        """This tensor, what it is a view of, and so on up to the tensor that owns the storage."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path

    @property
    def root(self) -> TensorState:
        """The tensor that owns the storage."""
        return self.path_to_root()[-1]

    @property
    def owner(self) -> RecordedInput | None:
        """The input that this tensor is, or was taken from."""
        state: TensorState | None = self
        while state is not None and state.input is None:
            state = state.source or state.parent
        return None if state is None else state.input

    def views_of_owner(self) -> list[TensorState]:
        """This tensor, what it was taken from, and so on, without the input at the end."""
        views: list[TensorState] = []
        state: TensorState | None = self
        while state is not None and state.input is None:
            views.append(state)
            state = state.source or state.parent
        return views


class Walk(abc.ABC):
    """The tensors of a recording while a walk over its steps writes a graph: their states and current values."""

    def __init__(self, recording: Recording, graph: GraphBuilder) -> None:
        self.graph = graph
        self._shapes_before = recording.mutations.shapes_before
        self.written_together = recording.mutations.written_together
        self.engine = recording.engine
        self.real_tensors = recording.real_tensors
        self._steps = recording.session.steps  # backwards follow
        self._data_assigned = recording.access.data_assigned
        self._made_to_require_grad = recording.access.made_to_require_grad
        self._states: dict[int, TensorState] = {}
        self._script_objects: dict[int, Node] = {}
        self._position = 0
        self.closed = False  # the forward is compiled: it returns what it returns
        self._before: dict[Primal, TensorState] = {}  # the states that inputs started with
        self.backward_writes: list[Write] = []
        self.reshapes: dict[int, list[Step]] = {}  # in-place changes of shape, by id of the tensor
        # A graph that autograd will see must tell where the program detached something.
        self._elided = IDENTITIES - {aten.detach.default} if recording.above_autograd else IDENTITIES

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
            if (
                isinstance(tensor, Tensor) and tensor.layout in SPARSE
            ):  # torch also gives a number where one was wrapped
                raise UnsupportedError(
                    "a derivative of torch makes a sparse tensor where recording cannot see it (that of values() of a "
                    "compressed one does): this cannot be compiled yet. Detach the sparse tensor, or compile with "
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
        state = self._states.get(id(tensor)) or self.state_of(tensor)
        return state.node if state.generation == state.storage.generation else self.read(state)

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
        if kind is FakeTensor or isinstance(value, Tensor):
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
            return self._script_object(value)
        return value

    def args(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([self._arg(value) for value in values])

    def kwargs(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: self._arg(value) for name, value in values.items()} if values else {}

    def moves_uncounted(self, recorded: RecordedInput) -> bool:
        """Whether an input was moved to other memory by `.data =`, which does not count as a write."""
        return id(recorded.seen) in self._data_assigned

    def is_asked_for(self, recorded: RecordedInput) -> bool:
        """Whether `requires_grad_()` was called on an input itself: a view requires grad where its base does, too."""
        return id(recorded.seen) in self._made_to_require_grad

    def state_before(self, recorded: RecordedInput) -> TensorState:
        """The state that an input started with."""
        return self._before[recorded.slot]

    def add_fresh(self, tensor: Tensor, node: Node) -> None:
        """A tensor that starts with the value of a node."""
        self._states[id(tensor)] = TensorState(Storage(self.graph.backward), node, self.shape_now(tensor))

    def lies_alone(self, state: TensorState) -> bool:
        """Whether nothing else looks at the memory of a tensor: no input does, nor another tensor of the program."""
        others = (other for other in self._states.values() if other.storage is state.storage)
        return state.owner is None and all(other is state for other in others)

    def is_used_before(self, tensor: Tensor) -> bool:
        """Whether an operator that autograd saw has taken a tensor before the current step."""
        earlier = [step for step in self._steps[: self._position - 1] if step.op not in IDENTITIES]
        return any(step.grad_enabled and any(arg is tensor for arg in tensors_in(step.args)) for step in earlier)

    def step_over(self) -> None:
        """From here on tensors have the shapes that the current step leaves behind."""
        self._position += 1

    def shape_now(self, value: Any) -> Any:
        """The tensor itself, or a copy of its metadata from before an operator like `t_` changed it."""
        if not self._shapes_before:
            return value
        for position, before in self._shapes_before.get(id(value), ()):
            if position >= self._position:
                return before
        return value

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

    def add_view(self, parent: TensorState, tensor: Tensor, view: ViewStep) -> TensorState:
        state = TensorState(parent.storage, parent.node, self.shape_now(tensor), parent, view)
        state.node = self._replay(self.read(parent), state)
        self._states[id(tensor)] = state
        return state

    def note_write(self, step: Step, state: TensorState) -> None:
        """The storage has new contents."""
        state.storage.generation += 1
        state.storage.writes.append(Write(step, state))
        if step.backward:
            self.backward_writes.append(state.storage.writes[-1])

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
            value = self.infer(op, values, self._values_of(kwargs))
        return self.graph.call(op, args, kwargs, value)

    def infer(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What an operator gives to abstract tensors."""
        named = {name: value for name, value in kwargs.items() if name != "generator"}
        with torch.no_grad():
            return self.engine.run(op, (), tuple(args), named)

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

    def _script_object(self, value: Any) -> Node:
        """The node of a script object: graphs hold it."""
        key = script_object_identity(value)
        if key not in self._script_objects:
            self._script_objects[key] = self.graph.constant(value, value)
        return self._script_objects[key]

    @abc.abstractmethod
    def pure(self, step: Step) -> None:
        """Run a step that writes to nothing."""

    @abc.abstractmethod
    def draw(self, step: Step, op: Any, args: Sequence[Any], kwargs: dict[str, Any], value: Any) -> Node:
        """The node of a random operator that a step runs."""

    @abc.abstractmethod
    def store(self, step: Step, state: TensorState, node: Node, exact: bool) -> None:
        """Make `node` the value of a tensor by carrying it back to the tensor at the root.

        Every view of the storage, the written one included, is read from the root again: it shares its memory.
        """


# Views whose elements are larger than those of their base.
ALIGNED = frozenset({aten.view.dtype, aten.view_as_complex.default})


def require_same_alignment(view: TensorState) -> None:
    """Ask for the whole memory of a written input, of which a view in larger elements is taken.

    The graph's new value of the input starts where a storage does, and such a view may only start at some places.
    """
    recorded, written = view.root.input, view.storage.generation > 0
    if recorded is not None and written and hint_of(view.root.tensor.storage_offset()):
        raise Retrace(WholeMemory(recorded.slot))
