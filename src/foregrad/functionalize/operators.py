"""Operators of our own: functional forms that ATen lacks.

They are registered like any custom operator, with shape inference, so that compilers can call them as they are.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload
from ..ops import aten

library = torch.library.Library("foregrad", "DEF")

# The stream of an in-place random operator depends on the memory layout that it fills. ATen's functional forms fill a
# contiguous tensor; this one fills a fresh tensor of any layout, by the in-place operator itself.
library.define(
    "random_fill(str op, SymInt[] size, SymInt[] stride, Scalar[] parameters, *, ScalarType dtype, Device device, "
    "Generator? generator=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)

# oneDNN's recurrent layer keeps its workspace for the backward only while gradients are on; graphs run with them off.
library.define(
    "recurrent_layer(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, Tensor hx_, "
    "Tensor cx_, bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, bool has_biases, "
    "bool bidirectional, bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _random_fill(
    op: str,
    size: Sequence[int],
    stride: Sequence[int],
    parameters: Sequence[Any],
    *,
    dtype: Any,
    device: Any,
    generator: Any = None,
) -> Tensor:
    name, _, overload = op.partition(".")
    target = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return getattr(getattr(aten, name), overload)(target, *parameters, generator=generator)


def _recurrent_layer(*args: Any) -> Any:
    with torch.enable_grad():
        return aten.mkldnn_rnn_layer.default(*args)


library.impl("random_fill", _random_fill, "CompositeExplicitAutograd")
library.impl("recurrent_layer", _recurrent_layer, "CPU")
torch.library.register_fake(
    "foregrad::random_fill",
    lambda op, size, stride, parameters, *, dtype, device, generator=None: torch.empty_strided(
        size, stride, dtype=dtype, device=device
    ),
    lib=library,
)
torch.library.register_fake(
    "foregrad::recurrent_layer", lambda *args: aten.mkldnn_rnn_layer.default(*args), lib=library
)

RANDOM_FILL: OpOverload = torch.ops.foregrad.random_fill.default

# Operators that must be replaced where a graph runs with gradients off.
IN_GRAPHS: dict[OpOverload, OpOverload] = {
    aten.mkldnn_rnn_layer.default: torch.ops.foregrad.recurrent_layer.default,
}


# ---------------------------------------------------------------------------------------------------------------------
# Random operators that say where their numbers come from.
#
# For each random operator there are three of our own, defined when they are first needed, with its arguments and
# results and something more:
#
# - `bernoulli_with_state.p(x, 0.5)` draws as usual, and also returns the state of the generator before it;
# - `bernoulli_from_state.p(state, x, 0.5)` draws the same numbers again, and also returns the state after them;
# - `bernoulli_at.p(seed, offset, x, 0.5)` draws what belongs to a seed and an offset, and also returns the next offset.
#
# The last two touch no generator that can be seen elsewhere, so they may run where and as often as a partition wants.
_STATE_BYTES = {"cpu": torch.default_generator.get_state().numel()}
_PHILOX_STATE_BYTES = 16  # a seed and an offset: every device but the CPU
_WORDS = 624  # of the CPU generator, a Mersenne twister of 32-bit words
_WORDS_AT = 24  # where they begin in its state, each in 8 bytes
_STEP = 4  # offsets are multiples of this
_UNSIGNED = (1 << 64) - 1


def state_bytes(device: torch.device) -> int:
    """How many bytes the state of a generator has."""
    return _STATE_BYTES.get(device.type, _PHILOX_STATE_BYTES)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator from which operators on a device draw unless they are given another."""
    if device.type == "cpu":
        return torch.default_generator
    backend = getattr(torch, device.type)
    index = backend.current_device() if device.index is None else device.index
    generator: torch.Generator = backend.default_generators[index]
    return generator


# ------------------------------------------------------------------------------------------------- definitions
@functools.cache
def with_state(op: OpOverload) -> OpOverload:
    """The operator that also returns the state before its draw."""

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        generator = kwargs.get("generator") or default_generator(_device(args, kwargs))
        state = generator.get_state()
        return *_results(op(*args, **kwargs)), state

    def shape(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        device = _device(args, kwargs)
        return *_results(op(*args, **kwargs)), torch.empty(state_bytes(device), dtype=torch.uint8, device="cpu")

    return _define(op, "with_state", (), run, shape, (torch.Tag.nondeterministic_seeded,))


@functools.cache
def from_state(op: OpOverload) -> OpOverload:
    """The operator that draws again from a state, and also returns the state after the draw."""

    def run(state: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        generator = torch.Generator(_device(args, kwargs))
        generator.set_state(state)
        return *_draw_from(generator, op, args, kwargs), generator.get_state()

    def shape(state: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return *_results(op(*args, **kwargs)), torch.empty_like(state)

    return _define(op, "from_state", ("Tensor rng_state",), run, shape)


@functools.cache
def at_offset(op: OpOverload) -> OpOverload:
    """The operator that draws what belongs to a seed and an offset, and also returns the next offset."""

    def run(seed: Tensor, offset: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        generator = keyed_generator(_device(args, kwargs), int(seed), int(offset))
        results = _draw_from(generator, op, args, kwargs)
        philox = generator.device.type == "cuda"
        following = generator.get_offset() if philox else int(offset) + _STEP
        return *results, torch.tensor(following, dtype=torch.int64)

    def shape(seed: Tensor, offset: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return *_results(op(*args, **kwargs)), torch.empty((), dtype=torch.int64, device="cpu")

    return _define(op, "at", ("Tensor rng_seed", "Tensor rng_offset"), run, shape)


def _define(
    op: OpOverload,
    suffix: str,
    more: Sequence[str],
    run: Callable[..., Any],
    shape: Callable[..., Any],
    tags: tuple[torch.Tag, ...] = (),
) -> OpOverload:
    """Register an operator with the arguments of another after some more, and one more result."""
    text = str(op._schema)
    arguments, returns = text[text.index("(") + 1 :].rsplit(") -> ", 1)
    if more:  # they say where the numbers come from, no generator does
        arguments = re.sub(r"(, \*)?, Generator\? generator(=None)?$", "", arguments)
        arguments = re.sub(r", Generator\? generator(=None)?", "", arguments)
    kinds = [item.strip().split(" ")[0] for item in returns.strip("()").split(",")]
    name = "_".join(part for part in op._schema.name.split("::") if part not in ("aten", "foregrad"))
    overload = f".{op._overloadname}" if op._overloadname != "default" else ""
    qualified = f"{name}_{suffix}{overload}"
    results = ", ".join([*kinds, "Tensor"])
    library.define(f"{qualified}({', '.join([*more, *filter(None, [arguments])])}) -> ({results})", tags=tags)
    library.impl(qualified, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"foregrad::{qualified}", shape, lib=library)
    found: OpOverload = getattr(getattr(torch.ops.foregrad, f"{name}_{suffix}"), op._overloadname)
    return found


# ---------------------------------------------------------------------------------------------------- drawing
def keyed_generator(device: torch.device, seed: int, offset: int) -> torch.Generator:
    """A generator of its own for a seed and an offset.

    >>> a, b = (torch.rand(1, generator=keyed_generator(torch.device("cpu"), 7, offset)) for offset in (0, 4))
    >>> bool(a != b)
    True
    """
    seed &= _UNSIGNED
    generator = torch.Generator(device)
    if device.type == "cuda":
        generator.manual_seed(seed)
        generator.set_offset(offset)
        return generator
    key = random.Random(seed << 64 | offset)
    if device.type != "cpu":
        generator.manual_seed(key.getrandbits(63))
        return generator
    # `manual_seed` looks at 32 bits only, of which two draws of a long training would soon have the same.
    words = torch.frombuffer(bytearray(key.getrandbits(32 * _WORDS).to_bytes(4 * _WORDS, "little")), dtype=torch.int32)
    state = generator.get_state()
    state[_WORDS_AT : _WORDS_AT + 8 * _WORDS].view(torch.int64).copy_(words.to(torch.int64) & 0xFFFFFFFF)
    generator.set_state(state)
    return generator


def _draw_from(
    generator: torch.Generator, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Run a random operator on the numbers of a generator, which is moved on."""
    takes_one = _taking_a_generator(op)
    if takes_one is not None:
        return _results(takes_one(*args, **kwargs, generator=generator))
    with _in_place_of_default(generator):
        return _results(op(*args, **kwargs))


@contextlib.contextmanager
def _in_place_of_default(generator: torch.Generator) -> Iterator[None]:
    """Let the default generator give the numbers of another one: for operators that cannot be told which to use."""
    default = default_generator(generator.device)
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
        generator.set_state(default.get_state())
    finally:
        default.set_state(before)


@functools.cache
def _taking_a_generator(op: OpOverload) -> OpOverload | None:
    """The operator itself, or its overload with the same arguments and a generator."""
    arguments = [(a.name, str(a.type)) for a in op._schema.arguments]
    if ("generator", "Optional[Generator]") in arguments:
        return op
    for name in op.overloadpacket.overloads():
        other: OpOverload = getattr(op.overloadpacket, name)
        theirs = [(a.name, str(a.type)) for a in other._schema.arguments]
        if ("generator", "Optional[Generator]") in theirs:
            theirs.remove(("generator", "Optional[Generator]"))
            if theirs == arguments:
                return other
    return None


def _device(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Where an operator draws."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            return value[0].device
    return torch.device(kwargs.get("device") or "cpu")


def _results(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (list, tuple)) else (out,)
