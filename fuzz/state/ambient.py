"""What a process has only once, and each of two worlds shall have for itself.

Random generators, modes, flags of backends, hooks on all modules, and functions of torch that a program replaced: a
world puts its own in place when it acts and takes them along when it stops. So two worlds can act in turns, and nothing
that a program does outlives it.
"""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.utils.hooks import RemovableHandle

from foregrad._torch import global_module_hooks


@dataclass(frozen=True)
class Setting:
    """One thing that a process has once.

    Args:
        name: What it is, in a reader's words.
        get: Reads it.
        put: Sets it to what `get` gave.
        is_random: Whether it is the state of a generator: always put back, never looked at.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    is_random: bool = False


# The number that the next hook gets.
HOOKS = "count of hooks"

_ABSENT = object()


def _attribute(owner: Any, name: str) -> Setting:
    """An attribute of torch's that programs replace."""

    def put(value: Any) -> None:
        if value is not _ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)

    return Setting(f"{owner.__name__}.{name}", lambda: vars(owner).get(name, _ABSENT), put)


def _hook_table(position: int) -> Setting:
    def table() -> Any:
        return global_module_hooks()[position]

    def put(entries: Any) -> None:
        table().clear()
        table().update(entries)

    return Setting(f"hooks on all modules ({position})", lambda: table().copy(), put)


def _set_anomaly(state: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(*state)


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


def _set_autocast(state: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled("cpu", state[0])
    torch.set_autocast_dtype("cpu", state[1])
    torch.clear_autocast_cache()


SETTINGS: tuple[Setting, ...] = (
    Setting("torch's random state", torch.get_rng_state, torch.set_rng_state, True),
    Setting("the state of random", random.getstate, random.setstate, True),
    Setting("the state of numpy.random", numpy.random.get_state, numpy.random.set_state, True),
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting(
        "deterministic mode",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    Setting("anomaly mode", lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), _set_anomaly),
    Setting("autocast", lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")), _set_autocast),
    Setting("matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Setting("math SDPA", torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    Setting("flash SDPA", torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    Setting("fast path of attention", torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    Setting("mkldnn", lambda: torch.backends.mkldnn.enabled, lambda on: torch.backends.mkldnn.set_flags(on)),
    Setting(
        "cudnn.benchmark",
        lambda: torch.backends.cudnn.benchmark,
        lambda on: setattr(torch.backends.cudnn, "benchmark", on),
    ),
    # Keys of tables of hooks: counted for each world, so that they can be compared.
    Setting(HOOKS, lambda: RemovableHandle.next_id, lambda count: setattr(RemovableHandle, "next_id", count)),
    *(_hook_table(position) for position in range(len(global_module_hooks()))),
    _attribute(torch, "sin"),
    _attribute(torch, "add"),
    _attribute(torch.Tensor, "cos"),
    _attribute(torch.Tensor, "mul"),
    _attribute(torch.nn.functional, "relu"),
    _attribute(torch.nn.functional, "linear"),
    _attribute(torch.nn.Linear, "forward"),
    _attribute(torch.nn.Module, "__call__"),
)


@dataclass
class Ambient:
    """What one world has of all this.

    >>> first, second = Ambient(), Ambient()
    >>> with first.in_place():
    ...     torch.set_default_dtype(torch.float64)
    >>> with second.in_place():
    ...     torch.ones(1).dtype
    torch.float32
    >>> first.values["default dtype"]
    torch.float64
    """

    values: dict[str, Any] = field(default_factory=lambda: {setting.name: setting.get() for setting in SETTINGS})

    def compared(self) -> dict[str, Any]:
        """The values in a form that is quick to compare: the state of a generator is long."""
        random_ones = {setting.name for setting in SETTINGS if setting.is_random}
        return {name: _bytes(value) if name in random_ones else value for name, value in self.values.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put everything in place, and take along what it has become."""
        outside = {setting.name: setting.get() for setting in SETTINGS}
        try:
            _put(self.values, outside)
            yield
        finally:
            self.values = {setting.name: setting.get() for setting in SETTINGS}
            _put(outside, self.values)


def _put(values: dict[str, Any], current: dict[str, Any]) -> None:
    for setting in SETTINGS:
        value, now = values[setting.name], current[setting.name]
        if value is not now and (setting.is_random or value != now):
            setting.put(value)


def _bytes(state: Any) -> bytes:
    match state:
        case torch.Tensor():
            return state.numpy().tobytes()
        case ("MT19937", numpy.ndarray() as key, *rest):
            return key.tobytes() + repr(rest).encode()
        case _:
            return pickle.dumps(state)
