"""What kernels refuse and shape inference does not, or the other way round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload, disable_modes, hint_of, without_function_modes
from ..ops import aten, tensors_in
from .engine import geometry_of
from .lean_tensors import lies_alone


# ---------------------------------------------------------------------------------------------------------------------
# Writes that eager may refuse because of how their arguments lie in memory.
#
# Abstract kernels do not look at memory as the real ones do. Where a written tensor shows an element twice, or
# overlaps another argument in part, eager itself is asked: the operator runs on zeros that lie exactly as the
# arguments do.
def may_self_overlap(written: Sequence[Any], arguments: Sequence[Any], pointwise: bool) -> bool:
    """Whether a written tensor shows an element twice, or shares memory with an argument that lies otherwise.

    Only pointwise operators may take what they write to as another argument as well.
    """
    tensors = list(tensors_in(arguments))
    targets = list(tensors_in(written))
    times = Counter(map(id, tensors))
    if not pointwise and any(times[id(target)] > 1 for target in targets):
        return True
    for target in targets:
        if any(stride == 0 and size != 1 for size, stride in zip(target.shape, target.stride(), strict=True)):
            return True
    if all(map(lies_alone, targets)):
        return False
    by_storage: dict[int, list[Tensor]] = {}
    with without_function_modes():
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        groups = [by_storage.get(target.untyped_storage()._cdata, []) for target in targets]
    pairs = ((target, other) for target, group in zip(targets, groups, strict=True) for other in group)
    return any(other is not target and geometry_of(other) != geometry_of(target) for target, other in pairs)


def reads_what_it_writes(written: Sequence[Any], arguments: Sequence[Any]) -> bool:
    """Whether a written tensor is also another argument, itself or by another name."""
    return any(
        sum(
            storage_of(other) == storage_of(target) and geometry_of(other) == geometry_of(target)
            for other in tensors_in(arguments)
        )
        > 1
        for target in tensors_in(written)
        if target.numel()
    )


def storage_of(tensor: Tensor) -> int:
    """An identity of the memory of a tensor, asked for while a program is recorded."""
    if tensor.layout is not torch.strided:  # it has no storage of its own
        return -id(tensor)
    with without_function_modes():
        return int(tensor.untyped_storage()._cdata)


def ask_eager(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise eager's error if it refuses such a call."""
    storages: dict[int, torch.UntypedStorage] = {}
    known: dict[int, Tensor] = {}  # the same tensor, given twice, is the same there too

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = lie_like(tensor)
        return known[id(tensor)]

    def lie_like(tensor: Tensor) -> Tensor:
        key = storage_of(tensor)
        if key not in storages:
            count = hint_of(tensor.untyped_storage().nbytes())
            storages[key] = torch.zeros(count, dtype=torch.uint8).untyped_storage()
        size, stride, offset = _numbers(tensor)
        return torch.empty(0, dtype=tensor.dtype).set_(storages[key], offset, size, stride)

    with disable_modes(), without_function_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        op(*_map(real, args), **_map(real, kwargs))


_SMALL = 1 << 24  # bytes; more are not made only to ask for an error
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def can_be_asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether eager can be asked about a call: its tensors are strided, and not too large to be made for that."""
    given = list(tensors_in((*args, *kwargs.values())))
    if any(tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype in _QUANTIZED for tensor in given):
        return False
    with without_function_modes():
        return sum(hint_of(tensor.untyped_storage().nbytes()) for tensor in given) <= _SMALL


def error_of_eager(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """What eager says to a call that an abstract kernel refuses: kernels do not all look at the same things first."""
    if not can_be_asked(args, kwargs):
        return None
    try:
        ask_eager(op, args, kwargs)
    except Exception as error:
        return error
    return None


def overlap_in_part(written: Sequence[Any], arguments: Sequence[Any]) -> bool:
    """Whether a written tensor and another argument, which lies otherwise, have elements in common."""
    pairs = ((target, other) for target in tensors_in(written) for other in tensors_in(arguments))
    return any(
        _have_elements_in_common(target, other)
        for target, other in pairs
        if other is not target and storage_of(other) == storage_of(target) and geometry_of(other) != geometry_of(target)
    )


def reaches_beyond(view: Tensor, source: Tensor) -> bool:
    """Whether a tensor shows elements, of the memory that both lie in, that another does not show."""
    count = max(_reach(view), _reach(source))
    if count > 1 << 24:
        return True
    with disable_modes(), without_function_modes():
        shown = torch.zeros(count, dtype=torch.bool)
        shown.as_strided(*_numbers(source)).fill_(True)
        return not bool(shown.as_strided(*_numbers(view)).all())


def _have_elements_in_common(a: Tensor, b: Tensor) -> bool:
    count = max(_reach(a), _reach(b))
    if a.itemsize != b.itemsize or count > 1 << 24:
        return True
    with disable_modes(), without_function_modes():
        marks = torch.zeros(count, dtype=torch.bool)
        marks.as_strided(*_numbers(a)).fill_(True)
        return bool(marks.as_strided(*_numbers(b)).any())


def _numbers(tensor: Tensor) -> tuple[list[int], list[int], int]:
    return [hint_of(n) for n in tensor.shape], [hint_of(n) for n in tensor.stride()], hint_of(tensor.storage_offset())


def _reach(tensor: Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return hint_of(tensor.storage_offset()) + 1 + sum((hint_of(n) - 1) * hint_of(s) for n, s in sizes if n)


def _map(real: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return real(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(real, item) for item in value)
    if isinstance(value, dict):
        return {key: _map(real, item) for key, item in value.items() if key not in ("device", "generator")}
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Operators whose abstract kernels accept what the real ones refuse, or refuse what those accept.
def _is_broadcast(out: Any, *sizes: Any) -> bool:
    """What is added must expand to the product; abstract kernels broadcast it the other way round as well."""
    return isinstance(out, Tensor) and [hint_of(n) for n in out.shape] != [hint_of(n) for n in sizes]


# Calls that the real kernel may refuse where the abstract one does not. By id: to hash an operator takes longer.
DOUBTFUL: dict[int, Callable[[tuple[Any, ...], Any], bool]] = {
    id(aten.addmm.default): lambda args, out: _is_broadcast(out, args[1].shape[0], args[2].shape[1]),
    id(aten.addmv.default): lambda args, out: _is_broadcast(out, args[1].shape[0]),
    id(aten.index_select.default): lambda args, out: args[0].dim() == 0,
}


def error_missed(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Exception | None:
    """Eager's error for a call of a doubtful operator that its abstract kernel has let pass."""
    return error_of_eager(op, args, kwargs) if DOUBTFUL[id(op)](args, out) else None


def _check_classes(index: Tensor, num_classes: int = -1) -> None:
    if index.device.type == "cpu" and num_classes > 0:
        aten._assert_async.msg((index >= 0).all(), "Class values must be non-negative.")
        aten._assert_async.msg((index < num_classes).all(), "Class values must be smaller than num_classes.")


# Functions of torch that look at values, except at those of recorded tensors: the graph looks at them.
VALUE_CHECKS: dict[Any, Callable[..., None]] = {
    torch.nn.functional.one_hot: _check_classes,
}


def _split_of_nothing(tensor: Tensor, size: Any, dim: int = 0) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """Torch 2.11 finds no piece in an empty dimension; there is one, as empty."""
    return (aten.split_with_sizes.default, (tensor, [0], dim)) if hint_of(tensor.shape[dim]) == 0 else None


_TWINS: dict[int, Callable[..., tuple[OpOverload, tuple[Any, ...]] | None]] = {
    id(aten.split.Tensor): _split_of_nothing,
}


def twin_of_refused(op: OpOverload, args: tuple[Any, ...]) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """A call with the same result, for one that an abstract kernel refuses although the real one takes it."""
    find = _TWINS.get(id(op))
    return None if find is None else find(*args)
