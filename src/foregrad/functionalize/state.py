"""What the functionalization pass knows about each tensor of a recording, and about the memory behind it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..joint.ir import Node
from ..ops import ViewStep
from ..record.stand_ins import RecordedInput
from ..record.step import Step


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
