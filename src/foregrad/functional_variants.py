"""The functional variant of an operator that writes."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._torch import OpOverload
from .errors import UnsupportedError
from .host_numbers import host_number
from .ops import aten, op_info, written_arguments

# Operators whose variant is not found by name.
_BY_HAND: dict[OpOverload, OpOverload] = {
    aten.normal_.default: aten.normal_functional.default,
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten.native_batch_norm.default: aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update.default: aten._batch_norm_with_update_functional.default,
    aten.cudnn_batch_norm.default: aten._batch_norm_with_update_functional.default,
    aten.rrelu_with_noise_.default: aten.rrelu_with_noise_functional.default,
    aten.rrelu_with_noise.default: aten.rrelu_with_noise_functional.default,
    aten.__ilshift__.Scalar: aten.__lshift__.Scalar,
    aten.__ilshift__.Tensor: aten.__lshift__.Tensor,
    aten.__irshift__.Scalar: aten.__rshift__.Scalar,
    aten.__irshift__.Tensor: aten.__rshift__.Tensor,
    aten.polygamma_.default: aten.polygamma.default,
}
# Where the variant takes its arguments in another order: positions of the writer's.
REORDERED = {aten.polygamma_.default: (1, 0)}
# Operators that compute in the dtype of the written tensor, where the variant would widen integers.
IN_OWN_DTYPE = frozenset({aten.cumsum_.default, aten.cumprod_.default})
# Operators that read a number in the dtype of the written tensor, if that has 16 bits and is on the CPU; their variants
# read it in more.
ROUNDING = frozenset({aten.mul_.Scalar, aten._foreach_mul_.Scalar, aten._foreach_mul_.ScalarList})
NARROW = (torch.bfloat16, torch.float16)
# Arguments that the functional operator takes for granted.
_TAKEN_FOR_GRANTED = {aten.cudnn_batch_norm.default: frozenset({"training"})}
# Batch norm writes to its running statistics only if it has them and trains: position of the flag.
TRAINING_FLAG = {
    aten.native_batch_norm.default: 5,
    aten._native_batch_norm_legit.default: 5,
    aten.cudnn_batch_norm.default: 5,
    aten.miopen_batch_norm.default: 5,
}
# What such an operator is where it does not train, if its schema says that it writes all the same: the flag goes.
IDLE_VARIANTS = {aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_no_training.default}


@dataclass(frozen=True, slots=True)
class Variant:
    """A functional operator: it returns the writer's own results first, then each written argument's new value."""

    op: OpOverload
    written: tuple[int, ...]  # positions of the written arguments in the writer's schema
    dropped: frozenset[str]  # arguments of the writer that the functional operator does not take (`out=`)
    makes_tensor: bool  # `out=` of a factory: the variant must be told dtype and device
    defaults: tuple[tuple[int, Any], ...]  # positional defaults of the writer that the functional operator lacks
    returns: int  # how many values the functional operator gives
    pointwise: bool  # it computes each element from those at its place


_OPTIONS = ("dtype", "layout", "device", "pin_memory")  # of a factory


def _fits(candidate: OpOverload, wanted: list[tuple[str, str]], beside: Sequence[str] = ()) -> bool:
    arguments = candidate._schema.arguments
    if any(a.alias_info is not None for a in arguments):
        return False
    return [(a.name, str(a.type)) for a in arguments if a.name not in beside] == wanted


@functools.cache
def functional_variant(op: OpOverload) -> Variant | None:
    """The functional operator for one that writes, or None.

    >>> functional_variant(torch.ops.aten.add_.Tensor).op
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    schema = op._schema
    outs = frozenset(a.name for a in schema.arguments if a.is_out)
    found = _BY_HAND.get(op)
    if found is None:
        namespace, name = schema.name.split("::")
        plain = name.removesuffix("_")
        packets = [getattr(getattr(torch.ops, namespace), known, None) for known in (plain, f"{plain}_functional")]
        wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name not in outs]
        overloads = [getattr(packet, name) for packet in packets if packet is not None for name in packet.overloads()]
        overloads.sort(key=lambda o: o._overloadname != op._overloadname)
        found = next((o for o in overloads if _fits(o, wanted)), None)
        if found is None:
            found = next((o for o in overloads if _same_types(o, wanted)), None)
        if found is None and outs:
            found = next((o for o in overloads if _fits(o, wanted, _OPTIONS)), None)
        if found is None:
            return None
    dropped = outs | _TAKEN_FOR_GRANTED.get(op, frozenset())
    names = {a.name for a in found._schema.arguments}
    makes_tensor = bool(outs) and names.issuperset(_OPTIONS)
    defaults = _missing_defaults(op, found, dropped)
    returns, pointwise = len(found._schema.returns), torch.Tag.pointwise in found.tags
    return Variant(found, op_info(op).written, dropped, makes_tensor, defaults, returns, pointwise)


def _same_types(candidate: OpOverload, wanted: list[tuple[str, str]]) -> bool:
    arguments = candidate._schema.arguments
    if any(a.alias_info is not None for a in arguments) or len(arguments) != len(wanted):
        return False
    return [str(a.type) for a in arguments] == [kind for _, kind in wanted]


def _missing_defaults(op: OpOverload, functional: OpOverload, dropped: frozenset[str]) -> tuple[tuple[int, Any], ...]:
    """The dispatcher drops arguments that equal the writer's defaults; the functional operator may have none."""
    if dropped:
        return ()
    missing = []
    for i, (own, other) in enumerate(zip(op._schema.arguments, functional._schema.arguments, strict=False)):
        if own.has_default_value() and not own.kwarg_only and not other.has_default_value():
            missing.append((i, own.default_value))
    return tuple(missing)


def is_idle_batch_norm(op: OpOverload, args: Sequence[Any]) -> bool:
    """Whether a batch norm has, or updates, no running statistics."""
    flag = TRAINING_FLAG.get(op)
    return flag is not None and (args[op_info(op).written[0]] is None or not args[flag])


def idle_arguments(op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the variant of an idle batch norm is called with."""
    flag = TRAINING_FLAG[op]
    return (*args[:flag], *args[flag + 1 :])


def really_written(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a call writes to; a fused optimizer says that it writes to the gradients, and does so if it scales them.

    None stands in the place of what is not written: by batch norm, too, which only reads its averages in evaluation.
    """
    written = written_arguments(op, args, kwargs)
    names = op_info(op).names
    if "running_mean" in names and "training" in names and args[names.index("training")] is False:
        return [None for _ in written]
    if "grad_scale" not in op_info(op).names or kwargs.get("grad_scale") is not None:
        return written
    return [None if argument is args[1] else argument for argument in written]


Call = tuple[OpOverload, Sequence[Any], dict[str, Any]]


def call_of_variant(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], device_of: Callable[[Tensor], torch.device]
) -> Call | None:
    """The functional operator that stands for a call of one that writes, and what it is called with."""
    if is_idle_batch_norm(op, args):
        idle = IDLE_VARIANTS.get(op)
        return None if idle is None else (idle, idle_arguments(op, args), kwargs)
    variant = functional_variant(op)
    return None if variant is None else (variant.op, *variant_arguments(op, variant, args, kwargs, device_of))


def variant_arguments(
    op: OpOverload,
    variant: Variant,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device_of: Callable[[Tensor], torch.device],
) -> tuple[list[Any], dict[str, Any]]:
    """What the functional variant is called with, for a call of the operator that writes."""
    names = op_info(op).names
    given = [a for name, a in zip(names, args, strict=False) if name not in variant.dropped]
    named = {name: a for name, a in kwargs.items() if name not in variant.dropped}
    for position, default in variant.defaults:
        if position >= len(given) and names[position] not in named:
            given.append(default)
    if op in IN_OWN_DTYPE and named.get("dtype") is None and not _is_inexact(given[0]):
        named["dtype"] = given[0].dtype
    if op in ROUNDING:
        given[1] = as_written(given[0], given[1], device_of)
    if variant.makes_tensor:
        target = written_arguments(op, args, kwargs)[0]
        named |= {"dtype": target.dtype, "device": device_of(target)}
    order = REORDERED.get(op)
    return (given if order is None else [given[i] for i in order]), named


def as_written(tensors: Any, numbers: Any, device_of: Callable[[Tensor], torch.device]) -> Any:
    """Numbers as an operator that writes reads them, beside the tensors to which it writes."""
    if isinstance(numbers, (list, tuple)):
        return [as_written(tensor, number, device_of) for tensor, number in zip(tensors, numbers, strict=True)]
    written = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    dtypes = {t.dtype if t.dtype in NARROW and device_of(t).type == "cpu" else None for t in written}
    if len(dtypes) > 1:
        raise UnsupportedError(
            "torch._foreach_mul_ by one number, of a list with tensors of 16 bits and others: torch rounds it for "
            "some of them, which cannot be compiled yet. Give it tensors of one dtype at a time."
        )
    [dtype] = dtypes or {None}
    number = host_number(numbers)
    if dtype is None:
        return numbers
    if number is not None:
        return number.follow(rounded, (number.expression, dtype), rounded(number.value, dtype))
    return rounded(numbers, dtype) if type(numbers) in (int, float) else numbers


def rounded(number: float, dtype: torch.dtype) -> float:
    """A number as tensors of 16 bits hold it.

    >>> rounded(0.1, torch.bfloat16), rounded(1e5, torch.float16)
    (0.10009765625, inf)
    """
    try:
        single = struct.pack("<f", number)
        if dtype is torch.float16:
            return float(struct.unpack("<e", struct.pack("<e", *struct.unpack("<f", single)))[0])
    except OverflowError:
        return math.copysign(math.inf, number)
    bits = int.from_bytes(single, "little")
    if math.isfinite(number):
        bits += 0x7FFF + (bits >> 16 & 1)  # to the nearest, or the even one
    return float(struct.unpack("<f", (bits >> 16 << 16).to_bytes(4, "little"))[0])


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
