"""Record a program once.

A `Recording` is the whole of what is known about one run of the program: its inputs and what stood for them, the
operators in order, its result, and autograd's tape over the abstract tensors. The tape is kept: it is the one right
source for every backward that anybody may ask for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import (
    AutocastState,
    FakeTensor,
    ambient_state_kept,
    autocast_off,
    autocast_state,
    disable_modes,
    gradients_of,
    recording_autograd,
)
from ..slots import Hidden, Input, Primal
from .engine import Engine
from .reals import RealTensors
from .recorder import Recorder, Step
from .tape import tape_edges


@dataclass(frozen=True, slots=True)
class Argument:
    """A value that goes into a recording: a tensor, or any Python object, which is a constant of the program."""

    slot: Primal
    value: Any
    dynamic: bool = False  # sizes of a tensor, or an int, become symbols


@dataclass(frozen=True, slots=True)
class RecordedInput:
    """What stood for an argument while the program ran."""

    slot: Primal
    seen: Any  # what the program saw: an abstract tensor, a symbolic int, or the constant itself
    leaf: Tensor | None = None  # what gradients are taken for
    start_node: Any = None  # the autograd node of `seen` before the program ran
    was_leaf: bool = False
    was_inference: bool = False
    same_as: RecordedInput | None = None  # an earlier input that is the same tensor

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.seen, Tensor)

    @property
    def differentiated(self) -> Tensor | None:
        """What gradients are taken for: also an input that the program itself made require grad."""
        if self.leaf is None and self.is_tensor and self.seen.requires_grad and self.seen.is_leaf and not self.same_as:
            return self.seen
        return self.leaf


class _NonLeaf(torch.autograd.Function):
    """Makes a tensor that is no leaf out of one that is, without recording an operator."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, box: list[Tensor]) -> Tensor:
        return box[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _as_inference_tensor(real: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A twin is an inference tensor exactly if the real tensor is one."""
    if real.is_inference() == torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    return torch.inference_mode(real.is_inference())


def stand_in(engine: Engine, argument: Argument) -> RecordedInput:
    """Make what stands for an argument: not a view, and a leaf exactly if the argument is one."""
    value = argument.value
    if type(value) is int and argument.dynamic:
        return RecordedInput(argument.slot, engine.symbol(value, argument.slot))
    if not isinstance(value, Tensor):
        return RecordedInput(argument.slot, value)
    with disable_modes(), _as_inference_tensor(value):
        seen = engine.twin(value, argument.slot, argument.dynamic)
    leaf = None
    if value.requires_grad:
        leaf = seen.requires_grad_()
        if not value.is_leaf:
            with disable_modes(), torch.enable_grad():
                seen = _NonLeaf.apply(leaf, [engine.twin(value, argument.slot, argument.dynamic)])
    if not isinstance(value, FakeTensor):
        vars(seen).update(vars(value))  # attributes that the user has put on the tensor
    if isinstance(value, torch.nn.Parameter):
        seen._is_param = True
    return RecordedInput(argument.slot, seen, leaf, seen.grad_fn, value.is_leaf, value.is_inference())


class Recording:
    """One run of a program on abstract tensors, with autograd's tape over it."""

    def __init__(self, engine: Engine, decompositions: Mapping[Any, Callable[..., Any]], from_nodes: bool) -> None:
        self.engine = engine
        self.inputs: list[RecordedInput] = []
        self.real_tensors: dict[Primal, Tensor] = {}
        self._found: dict[Primal, weakref.ref[Tensor]] = {}  # what is left of them once they are released
        self._by_identity: dict[int, RecordedInput] = {}
        self.result: Any = None
        self.forward_end = 0
        self.grad_enabled = torch.is_grad_enabled()
        self.grad_enabled_after = self.grad_enabled
        self.autocast: AutocastState = autocast_state()
        self.autocast_after: AutocastState = self.autocast
        self.recorder = Recorder(engine, decompositions, from_nodes)

    @property
    def steps(self) -> list[Step]:
        """Every operator so far, forward first."""
        return self.recorder.steps

    def run(
        self,
        program: Callable[[list[Any]], Any],
        arguments: Sequence[Argument],
        state: Sequence[Argument],
        place_of: Callable[[Tensor], Hidden],
    ) -> None:
        """Run the program: `state` is what it finds by itself, `arguments` is what it is called with."""
        reals = RealTensors(self.engine, lambda real: self._adopt(Argument(place_of(real), real)))
        for argument in state:
            reals.register(argument.value, self._adopt(argument))
        seen = [self._adopt(argument) for argument in arguments]
        for argument, value in zip(arguments, seen, strict=True):
            if isinstance(value, Tensor):
                reals.note_argument(argument.value, value)
        self._reals = reals
        with self._modes(reals):
            self.recorder.generators.begin()
            try:
                self.result = program(seen)
                self.recorder.generators.check()
            finally:
                self.grad_enabled_after = torch.is_grad_enabled()
                self.autocast_after = autocast_state()
        self.forward_end = len(self.steps)

    def _adopt(self, argument: Argument) -> Any:
        """An input that is the very tensor of an earlier one is seen as that one."""
        first = self._by_identity.get(id(argument.value)) if isinstance(argument.value, Tensor) else None
        if first is not None:
            recorded = dataclasses.replace(first, slot=argument.slot, leaf=None, same_as=first)
        else:
            recorded = stand_in(self.engine, argument)
            self._by_identity[id(argument.value)] = recorded
        self.inputs.append(recorded)
        if isinstance(argument.value, Tensor):
            self.real_tensors[argument.slot] = argument.value
        return recorded.seen

    def release_arguments(self) -> None:
        """Let go of the tensors that the program was recorded on; a compiled program holds no data of its own."""
        self._found = {s: weakref.ref(t) for s, t in self.real_tensors.items() if not isinstance(s, Input)}
        self.real_tensors.clear()
        self._by_identity.clear()
        self._reals.release_arguments()

    def _real(self, slot: Primal) -> Tensor | None:
        """The real tensor that the program found, if it is still there."""
        found = self._found.get(slot)
        return self.real_tensors.get(slot) if found is None else found()

    @contextlib.contextmanager
    def _modes(self, reals: RealTensors) -> Iterator[None]:
        with ambient_state_kept():
            try:
                with recording_autograd(), reals, self.recorder:
                    yield
            finally:
                self.recorder.generators.restore()

    def seen(self, tensor: Tensor) -> Tensor:
        """The abstract tensor for a tensor of the result: itself, or the twin of a real one that was passed through."""
        return tensor if self.engine.is_abstract(tensor) else self._reals.twin_of(tensor)

    def differentiate(
        self, targets: Sequence[Tensor], tangents: Sequence[Tensor], autocast: bool
    ) -> list[Tensor | None]:
        """Record a backward behind the forward: a gradient, or None, for each input.

        With `autocast` it is recorded under the autocast state of the caller, otherwise without any: what counts in
        eager is the state in which backward is called, not that of the forward.

        A custom function that was applied to a real parameter has its edge to the real tensor and not to the twin:
        gradients are taken for both, and added.
        """
        self.recorder.backward = True
        self.recorder.watch_gradient_sums(targets)
        differentiable = [i for i in self.inputs if i.differentiated is not None]
        leaves = [i.differentiated for i in differentiable if i.differentiated is not None]
        reals: dict[Primal, Tensor | None] = {}
        for i in differentiable:
            if not isinstance(i.slot, Input):
                reals[i.slot] = self._real(i.slot)
        hidden = [i for i in differentiable if reals.get(i.slot) is not None]
        casts = contextlib.nullcontext() if autocast else autocast_off()
        with self._modes(self._reals), torch.no_grad(), casts:
            self.recorder.generators.resume()
            found = gradients_of(targets, tangents, leaves + [real for real in reals.values() if real is not None])
            by_slot = dict(zip((i.slot for i in differentiable), found, strict=False))
            for item, extra in zip(hidden, found[len(leaves) :], strict=True):
                if extra is not None:
                    known = by_slot[item.slot]
                    by_slot[item.slot] = extra if known is None else known + extra
        return [by_slot.get(i.slot) for i in self.inputs]

    def depend_on(self, targets: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
        """Whether any target is differentiable with respect to a leaf that the program made."""
        wanted = {id(leaf) for leaf in leaves}
        return bool(wanted) and any(id(getattr(node, "variable", None)) in wanted for _, node in tape_edges(targets))
