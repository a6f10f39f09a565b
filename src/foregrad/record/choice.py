"""Which engine a program is recorded on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._torch import DATA_CAN_BE_FORBIDDEN, FakeTensor, ShapeEnv, new_fake_mode, running_fake_mode
from ..errors import FakeModeError
from ..slots import Primal
from ..subclasses.layout import is_wrapper, leaves_of
from .engine import FakeEngine
from .lean import LeanEngine
from .witnessed import WitnessedEngine


def engine_for(inputs: Sequence[tuple[Primal, Any]], dynamic: bool) -> FakeEngine:
    """The engine for a recording: over the inputs' own fake mode if they have one."""
    plain = [(slot, leaf) for slot, value in inputs for leaf in (leaves_of(value) if is_wrapper(value) else [value])]
    fakes = [(slot, value) for slot, value in plain if isinstance(value, FakeTensor)]
    for slot, value in fakes:
        if value.fake_mode is not fakes[0][1].fake_mode:
            raise FakeModeError(
                f"{fakes[0][0]} and {slot} belong to two fake modes. Make them under one FakeTensorMode and call again."
            )
    if fakes:
        return WitnessedEngine(fakes[0][1].fake_mode, "the inputs are fake tensors of a mode of their own")
    mode = running_fake_mode()
    if mode is not None:
        return WitnessedEngine(mode, "a front end has a fake mode of its own")
    if dynamic:
        return WitnessedEngine(new_fake_mode(ShapeEnv()), "sizes are symbols", own=True)
    if not DATA_CAN_BE_FORBIDDEN:
        return WitnessedEngine(
            new_fake_mode(None), "this build of torch has no storages that refuse to be read", own=True
        )
    return LeanEngine(new_fake_mode(None))
