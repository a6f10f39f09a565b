"""Script objects that a program calls, or hands to operators: state in C++ that recording must not touch.

Each is replaced by an instance of the fake class that is registered for it (`torch._library.register_fake_class`), made
from its state when the recording first meets it. What is recorded is the object itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._torch import disable_modes, fake_script_object, fake_script_state, is_script_object, script_object_identity
from ..abstract.engine import Engine
from ..abstract.lean_tensors import kept_by_objects
from ..errors import CaptureError
from ..graph.graph import Step
from ..ops import tensors_in
from ..slots import FreeTensor
from ..stack_traces import Stack, where


class ScriptObjects:
    """The script objects of one recording, and what stands for them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._objects: dict[int, Any] = {}  # the real ones, by identity
        self._states: dict[int, Any] = {}  # the fake ones
        self._after_forward: dict[int, Any] | None = None
        self._held: list[Tensor] = []  # what stands for the tensors that the real ones held

    def replaced(self, values: Any, stack: Stack) -> Any:
        """Arguments of an operator, with fake objects in place of real ones."""
        if isinstance(values, (list, tuple)):
            return type(values)(self.replaced(value, stack) for value in values)
        if isinstance(values, dict):
            return {key: self.replaced(value, stack) for key, value in values.items()}
        return fake_script_object(values, self._state(values, stack)) if is_script_object(values) else values

    def _state(self, real: Any, stack: Stack) -> Any:
        key = script_object_identity(real)
        if key not in self._states:
            try:
                self._states[key] = fake_script_state(real, self._tensor)
            except (AttributeError, RuntimeError) as error:
                raise CaptureError(
                    f"the script object at {where(stack)} has no fake class to record with: {error} Register one "
                    "(torch._library.register_fake_class), or compile with fallback='eager'."
                ) from error
            self._objects[key] = real
        return self._states[key]

    def _tensor(self, real: Tensor) -> Tensor:
        self._held.append(self._engine.fake(real, FreeTensor("state of a script object"), dynamic=False))
        return self._held[-1]

    def rewind(self, steps: Sequence[Step]) -> None:
        """Every backward starts from the state that the forward left behind; `steps` are all so far."""
        if not self._states:
            return
        if self._after_forward is None:
            self._after_forward = self._states
        # Tensors are what they are; only what holds them is copied.
        known = list(tensors_in([(step.args, list(step.kwargs.values()), step.out) for step in steps]))
        same = {id(tensor): tensor for tensor in [*known, *kept_by_objects(known), *self._held]}
        with disable_modes():
            self._states = copy.deepcopy(self._after_forward, same)

    def fresh(self, out: Any) -> Any:
        """Results as tensors of their own: a fake object may give back the very tensor that it was given."""
        if isinstance(out, Tensor):
            return self._engine.like(out, dense=False)
        if isinstance(out, (list, tuple)):
            return type(out)(self.fresh(item) for item in out)
        return out
