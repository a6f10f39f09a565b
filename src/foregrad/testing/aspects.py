"""The table of what is compared: each aspect is a name and a small function over two observations."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .observation import Observation, TensorFacts

T = TypeVar("T")
Mismatch = tuple[str, str, str]
SameTensor = Callable[[Tensor, Tensor], bool]
Find = Callable[[Observation, Observation, SameTensor], Iterator[Mismatch]]


@dataclass(frozen=True)
class Aspect:
    """One thing to compare.

    >>> "version counter" in [aspect.name for aspect in ASPECTS]
    True

    Args:
        name: What it is called in a report.
        find: Yields where the two observations differ, with what each shows.
    """

    name: str
    find: Find


def bits_differ(eager: Tensor, compiled: Tensor) -> Tensor:
    """Where two tensors of one shape and dtype do not hold the same bits, all NaNs taken as one.

    >>> bits_differ(torch.tensor([0.0, math.nan, 1.0]), torch.tensor([-0.0, math.nan, 1.0]))
    tensor([ True, False, False])

    Args:
        eager: A contiguous tensor.
        compiled: Another.
    """
    if eager.device.type == "meta":
        return torch.zeros(eager.shape, dtype=torch.bool, device="cpu")
    if eager.is_complex():
        return bits_differ(torch.view_as_real(eager), torch.view_as_real(compiled)).any(-1)
    if not eager.is_floating_point():
        return eager != compiled
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[eager.itemsize]
    differ = eager.view(bits) != compiled.view(bits)
    if not bool(differ.any()):
        return differ
    # Not every 8-bit format has isnan; double holds all of them exactly.
    return differ & ~(eager.double().isnan() & compiled.double().isnan())


def same_bits(eager: Tensor, compiled: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits, all NaNs taken as one.

    >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    False

    Args:
        eager: A contiguous tensor.
        compiled: Another.
    """
    return not bool(bits_differ(eager, compiled).any())


def close(eager: Tensor, compiled: Tensor) -> bool:
    """Whether two tensors agree within the tolerance that `torch.testing` gives their dtype.

    >>> close(torch.tensor(1.0), torch.tensor(1.0 + 1e-7))
    True

    Args:
        eager: A tensor.
        compiled: Another.
    """
    try:
        torch.testing.assert_close(compiled, eager, equal_nan=True)
    except AssertionError:
        return False
    return True


def compare(
    eager: Observation, compiled: Observation, *, bitwise: bool = True, other_layout: bool = False
) -> Iterator[tuple[str, Mismatch]]:
    """Yield each difference between two observations, as the aspect's name and what it found.

    >>> from foregrad.testing import FORWARD_ONLY, Program, observe
    >>> program = Program.of(torch.sin, (torch.zeros(()),), {})
    >>> eager, compiled = (
    ...     observe(program.side(lambda fn: target), program.arguments, program.contents, FORWARD_ONLY)
    ...     for target in (torch.sin, torch.cos)
    ... )
    >>> list(compare(eager, compiled))
    [('value', ('output', '0.0', '1.0'))]

    Args:
        eager: What eager PyTorch showed.
        compiled: What the compiled callable showed in the same scenario.
        bitwise: Compare values bit by bit, rather than within a tolerance.
        other_layout: The tangents did not lie in memory as their outputs do.
    """
    same = same_bits if bitwise else close
    # A sum of gradients in another order differs in its last bits, and no more is asked of it.
    reordered = other_layout or eager.outputs_share_inputs or not eager.outputs_are_row_major
    for aspect in ASPECTS:
        how = close if aspect.name == "gradient value" and reordered else same
        for mismatch in aspect.find(eager, compiled, how):
            yield aspect.name, mismatch


def _error(of: Callable[[Observation], Exception | None], where: str) -> Find:
    def find(eager: Observation, compiled: Observation, same: SameTensor) -> Iterator[Mismatch]:
        expected, got = of(eager), of(compiled)
        if expected is not eager.forward_error and (eager.forward_error or compiled.forward_error):
            return  # there was no backward to compare
        # A subclass is caught by every handler that catches what eager raises.
        agree = got is None if expected is None else isinstance(got, type(expected))
        if not agree:
            yield where, _describe_error(expected), _describe_error(got)

    return find


def _describe_error(error: Exception | None) -> str:
    if error is None:
        return "no error"
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line}"


def _both(eager: Mapping[str, T], compiled: Mapping[str, T]) -> Iterator[tuple[str, T, T]]:
    """The entries that both sides have."""
    return ((where, a, compiled[where]) for where, a in eager.items() if where in compiled)


def _all_entries(of: Callable[[Observation], Mapping[str, object]]) -> Find:
    """Entries that differ, or that only one side has."""

    def find(eager: Observation, compiled: Observation, same: SameTensor) -> Iterator[Mismatch]:
        if eager.forward_error is not None or compiled.forward_error is not None:
            return
        expected, got = of(eager), of(compiled)
        for where in {**expected, **got}:
            a, b = expected.get(where, "absent"), got.get(where, "absent")
            if a != b:
                yield where, str(a), str(b)

    return find


def _common_entries(of: Callable[[Observation], Mapping[str, object]]) -> Find:
    """Entries that both sides have and that differ."""

    def find(eager: Observation, compiled: Observation, same: SameTensor) -> Iterator[Mismatch]:
        for where, a, b in _both(of(eager), of(compiled)):
            if a != b:
                yield where, str(a), str(b)

    return find


def _non_tensors(eager: Observation, compiled: Observation, same: SameTensor) -> Iterator[Mismatch]:
    for where, a, b in _both(eager.values, compiled.values):
        if not _same_object(a, b):
            yield where, f"{type(a).__qualname__} {a!r}", f"{type(b).__qualname__} {b!r}"


def _same_object(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if type(a).__eq__ is object.__eq__:
        # Equal only to itself, so that its class is all that two runs can have in common.
        return True
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return repr(a) == repr(b)


def _leaf_kinds(seen: Observation) -> dict[str, str]:
    return {**dict.fromkeys(seen.values, "not a tensor"), **dict.fromkeys(seen.outputs, "a tensor")}


def _structure(seen: Observation) -> dict[str, str]:
    return {**seen.containers, **_leaf_kinds(seen)}


def _names_held(seen: Observation) -> dict[str, str]:
    return dict.fromkeys(seen.held, "present")


def _tensors(seen: Observation) -> Mapping[str, TensorFacts | None]:
    return {**seen.held, **seen.outputs}


def _gradients(seen: Observation) -> Mapping[str, TensorFacts | None]:
    return seen.gradients


Facts = Callable[[Observation], Mapping[str, TensorFacts | None]]


def _pairs(of: Facts, eager: Observation, compiled: Observation) -> Iterator[tuple[str, TensorFacts, TensorFacts]]:
    for where, a, b in _both(of(eager), of(compiled)):
        if a is not None and b is not None:
            yield where, a, b


def _fact(of: Facts, read: Callable[[TensorFacts], object]) -> Find:
    def find(eager: Observation, compiled: Observation, same: SameTensor) -> Iterator[Mismatch]:
        for where, a, b in _pairs(of, eager, compiled):
            if read(a) != read(b):
                yield where, str(read(a)), str(read(b))

    return find


def _value(of: Facts) -> Find:
    def find(eager: Observation, compiled: Observation, same: SameTensor) -> Iterator[Mismatch]:
        for where, a, b in _pairs(of, eager, compiled):
            if [_form(part) for part in a.parts] != [_form(part) for part in b.parts]:
                continue
            for x, y in zip(a.parts, b.parts, strict=True):
                if not same(x, y):
                    yield where, *_furthest_elements(x, y)
                    break

    return find


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.device


def _furthest_elements(eager: Tensor, compiled: Tensor) -> tuple[str, str]:
    """The elements that are furthest from each other, and how many differ at all."""
    differ = bits_differ(eager, compiled)
    wide = torch.complex128 if eager.is_complex() else torch.float64
    distance = (eager.to(wide) - compiled.to(wide)).abs().nan_to_num(nan=math.inf)
    furthest = int(torch.where(differ, distance, -1.0).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(furthest, device="cpu"), eager.shape)]
    place = f" at {index} ({int(differ.sum())} of {differ.numel()} differ)" if eager.dim() else ""
    a, b = (str(tensor.reshape(-1)[furthest].item()) for tensor in (eager, compiled))
    return a + place, b


def _presence(eager: Observation, compiled: Observation, same: SameTensor) -> Iterator[Mismatch]:
    for where, a, b in _both(eager.gradients, compiled.gradients):
        if (a is None) != (b is None):
            yield where, _describe_gradient(a), _describe_gradient(b)


def _describe_gradient(facts: TensorFacts | None) -> str:
    if facts is None:
        return "None"
    zeros = all(not bool(part.any()) for part in facts.parts)
    return f"{'zeros' if zeros else 'a tensor'} of shape {facts.shape}"


def _identity(seen: Observation) -> dict[str, str]:
    return {
        where: "an object of its own" if first == where else f"the same object as {first}"
        for where, first in seen.identity.items()
    }


def _sharing(seen: Observation) -> dict[str, str]:
    return {
        where: "a storage of its own" if first == where else f"the storage of {first}, {offset:+d} bytes"
        for where, (first, offset) in seen.sharing.items()
    }


def _random(eager: Observation, compiled: Observation, same: SameTensor) -> Iterator[Mismatch]:
    for where, a, b in _both(eager.random, compiled.random):
        if not torch.equal(a, b):
            yield where, "as eager left it", "another state"


def _counting_strides(facts: TensorFacts) -> object:
    """Autograd takes gradients over as they come, and does not look at the strides of dimensions of size one."""
    if facts.stride is None:
        return None
    return tuple(1 if size == 1 else stride for size, stride in zip(facts.shape, facts.stride, strict=True))


def _gradient_strides(eager: Observation, compiled: Observation, same: SameTensor) -> Iterator[Mismatch]:
    """Strides of gradients; those of an empty sum depend on the order in which it was taken, and say nothing."""
    for where, a, b in _pairs(_gradients, eager, compiled):
        expected, got = _counting_strides(a), _counting_strides(b)
        if expected != got and not (eager.outputs_share_inputs and 0 in a.shape):
            yield where, str(expected), str(got)


_ANY_TENSOR: dict[str, Callable[[TensorFacts], object]] = {
    "type": lambda facts: facts.kind,
    "dtype": lambda facts: facts.dtype,
    "device": lambda facts: facts.device,
    "layout": lambda facts: facts.layout,
    "shape": lambda facts: facts.shape,
    "requires_grad": lambda facts: facts.requires_grad,
}

_ARGUMENT_OR_OUTPUT: dict[str, Callable[[TensorFacts], object]] = {
    **_ANY_TENSOR,
    "stride": lambda facts: facts.stride,
    "storage offset": lambda facts: facts.offset,
    "leaf or not": lambda facts: facts.history,
    "conj bit": lambda facts: "conj" in facts.bits,
    "neg bit": lambda facts: "neg" in facts.bits,
    "inference tensor or not": lambda facts: "inference" in facts.bits,
    "Python attributes": lambda facts: facts.attributes,
}

ASPECTS: tuple[Aspect, ...] = (
    Aspect("error in forward", _error(lambda seen: seen.forward_error, "the call")),
    Aspect("structure", _all_entries(_structure)),
    Aspect("non-tensor value", _non_tensors),
    *(Aspect(name, _fact(_tensors, read)) for name, read in _ARGUMENT_OR_OUTPUT.items()),
    Aspect("value", _value(_tensors)),
    Aspect("names of the state", _all_entries(_names_held)),
    Aspect("identity", _common_entries(_identity)),
    Aspect("storage sharing", _common_entries(_sharing)),
    Aspect("version counter", _common_entries(lambda seen: seen.versions)),
    Aspect("writing to results", _common_entries(lambda seen: seen.writing)),
    Aspect("error in backward", _error(lambda seen: seen.backward_error, "the backward call")),
    Aspect("gradient presence", _presence),
    *(Aspect(f"gradient {name}", _fact(_gradients, read)) for name, read in _ANY_TENSOR.items()),
    Aspect("gradient stride", _gradient_strides),
    Aspect("gradient value", _value(_gradients)),
    Aspect("random state", _random),
    Aspect("global state", _common_entries(lambda seen: seen.modes)),
)
