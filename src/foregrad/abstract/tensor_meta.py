"""Metadata of tensors as the lean engine keeps it, and what is known about layouts that kernels choose."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._torch import FakeTensor, OpOverload, hint_of
from ..ops import Kind, op_info

# ---------------------------------------------------------------------------------------------------------------------
# Classes of layout, and the table that says for which of them torch's shape inference tells the truth.
#
# A kernel chooses the strides of its results by itself, and shape inference describes kernels from memory. A sweep
# over torch's operators compares the two for each torch version and type of device (see CONTRIBUTING.md). For each
# operator the table names the layouts and dtypes of arguments with which they agreed throughout. What it does not name
# is tried on real tensors (see `trials`).
TABLES = Path(__file__).parent / "layout_tables"

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "half",
    torch.bfloat16: "half",
    torch.complex64: "complex",
    torch.complex128: "complex",
    torch.int64: "integer",
    torch.int32: "integer",
    torch.int16: "integer",
    torch.int8: "integer",
    torch.uint8: "integer",
    torch.bool: "bool",
}


def contiguous(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return in_order(size, range(len(size)))


def in_order(size: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dimensions lie in this order, the last of them innermost."""
    stride, step = [0] * len(size), 1
    for d in reversed(order):
        stride[d] = step
        step *= size[d] or 1
    return tuple(stride)


def layout_class(size: Sequence[int], stride: Sequence[int], lazy: bool = False) -> str:
    """The class of layout of a dense tensor, in words.

    >>> layout_class((2, 3), (3, 1)), layout_class((2, 3), (1, 2)), layout_class((2, 1), (1, 7))
    ('contiguous', 'permuted', 'as contiguous with ones')

    Args:
        size: Its sizes.
        stride: Its strides.
        lazy: Whether its conj or neg bit is set.
    """
    rank = f" {len(size)}d" if len(size) in (4, 5) else ""  # torch has memory formats for these
    ones = " with ones" if 1 in size else ""
    return f"{_way(tuple(size), tuple(stride), lazy)}{rank}{ones}"


def _way(size: tuple[int, ...], stride: tuple[int, ...], lazy: bool) -> str:
    if lazy:
        return "lazy"
    if 0 in size:
        return "empty"
    if stride == contiguous(size):
        return "contiguous"
    steps = [(step, n) for n, step in zip(size, stride, strict=True) if n > 1]
    ordered = sorted(steps, key=lambda s: -s[0])
    in_turn = steps == ordered
    if fills_memory(size, stride):  # which of several orders dimensions of size one belong to, kernels see differently
        by_channels = len(size) in (4, 5) and stride == in_order(size, (0, *range(2, len(size)), 1))
        return "as contiguous" if in_turn else "channels last" if by_channels else "permuted"
    shown = [(step, n) for step, n in ordered if step]
    if any(outer < inner * n for (outer, _), (inner, n) in itertools.pairwise(shown)):
        return "overlapping"
    in_turn = in_turn or [s for s in steps if s[0]] == shown
    return f"{'with gaps' if len(shown) == len(steps) else 'expanded'}{'' if in_turn else ' and permuted'}"


def fills_memory(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements fill a stretch of memory one by one, in some order of the dimensions.

    The stride of a dimension of size one leads nowhere, nor does one of size zero.
    """
    expected = 1
    for d in sorted((d for d in range(len(size)) if size[d] > 1), key=lambda d: (stride[d], size[d])):
        if stride[d] != expected:
            return False
        expected *= size[d]
    return True


@dataclass(frozen=True, slots=True)
class Row:
    """With which arguments shape inference is known to be right about an operator."""

    layouts: frozenset[str]
    dtypes: frozenset[str]

    def covers(self, layouts: Iterable[str], dtypes: Iterable[torch.dtype]) -> bool:
        """Whether it is with arguments like these."""
        return self.layouts.issuperset(layouts) and all(DTYPES.get(dtype) in self.dtypes for dtype in dtypes)


NOTHING_KNOWN = Row(frozenset(), frozenset())


def torch_version() -> str:
    """The version that a table belongs to: major.minor."""
    return ".".join(torch.__version__.split(".")[:2])


def table_file(version: str, device: str) -> Path:
    """Where the table for a torch version and a type of device is, if there is one."""
    return TABLES / f"torch-{version}-{device}.json"


@functools.cache
def table_for(device: str) -> Mapping[str, Row]:
    """The table for this torch and a type of device, by name of the operator. No table, and nothing is known."""
    file = table_file(torch_version(), device)
    if not file.exists():
        return {}
    return rows_in(json.loads(file.read_text()))


def rows_in(table: Mapping[str, Any]) -> dict[str, Row]:
    """The rows of a table as the sweep writes it: operators that agree with the same arguments stand together."""
    rows: dict[str, Row] = {}
    for group in table["agree"]:
        row = Row(frozenset(group["layouts"]), frozenset(group["dtypes"]))
        rows |= dict.fromkeys(group["operators"], row)
    return rows


# Operators that make a fresh, contiguous result, and whose kernels take no offsets but those that fit their sizes.
_OF_OFFSETS = ("aten::_padded_dense_to_jagged_forward", "aten::_jagged_to_padded_dense_forward")


# What the table does not name is tried, where there is a kernel to ask.
def may_be_tried(op: OpOverload) -> bool:
    """Whether an operator can be run on tensors that stand in for its arguments: torch's own, without side effects.

    The fake kernel of a custom operator is its author's contract.
    """
    info = op_info(op)
    makes_something = any(result.alias_info is None for result in op._schema.returns)
    computes = info.kind is Kind.VIEW or (info.kind in (Kind.PURE, Kind.WRITE) and makes_something)
    # Results of as_strided and its like depend on the size of a storage, and on nothing that a kernel decides.
    special = info.traits & {"out", "identity", "objects"} or op._schema.name.startswith("aten::as_strided")
    return op.namespace == "aten" and computes and not special and op._schema.name not in _OF_OFFSETS


def can_be_tried(op: OpOverload, metas: Sequence[TensorMeta]) -> bool:
    """Whether there is a kernel to ask about tensors like these, for an operator that may be tried.

    Not every kernel of torch survives tensors without elements: some divide by their number.
    """
    if not metas or not all(meta.native for meta in metas):
        return False
    if is_internal(op) and any(meta.device.type == "cuda" and meta.dtype not in FLOATS for meta in metas):
        return False  # seeds, indices and the like that another kernel has left for it
    return not any(0 in meta.size for meta in metas) or survives_emptiness(op)


FLOATS = frozenset(dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex)


def mixture(op: OpOverload, metas: Sequence[TensorMeta]) -> frozenset[torch.dtype] | None:
    """The different floating-point dtypes that an operator is given at once, if it is to look after them itself."""
    found = frozenset(meta.dtype for meta in metas if meta.dtype in FLOATS)
    return found if len(found) > 1 and "pointwise" not in op_info(op).traits else None


def is_internal(op: OpOverload) -> bool:
    """Whether only torch itself calls an operator: its kernel relies on what it is given, sizes above all.

    Operators on lists of tensors have no other name, and check what they are given.
    """
    name = op._schema.name.removeprefix("aten::")
    return (name.startswith("_") and not name.startswith("_foreach_")) or "backward" in name


def survives_emptiness(op: OpOverload) -> bool:
    """Whether an operator can be tried on tensors without elements; some reductions refuse them.

    One that takes a memory format makes a tensor, or copies one, and computes nothing.
    """
    info = op_info(op)
    computes = "pointwise" in info.traits or torch.Tag.reduction in op.tags
    return computes or info.kind is Kind.VIEW or any(a.name == "memory_format" for a in op._schema.arguments)


# ---------------------------------------------------------------------------------------------------------------------
# The words of the lean engine's table: metadata of tensors, of which equal ones are one object, and results.
LIMIT = 1 << 16  # entries; a GPT of any depth needs some hundred


def is_native(device: torch.device) -> bool:
    """Whether C++ can hold tensors of a device here."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


class TensorMeta:
    """All that there is to know about a dense tensor. Equal ones are one object."""

    __slots__ = (
        *("conj", "device", "dtype", "has_bits", "native", "neg", "offset", "own_bytes", "size", "stride"),
        "layout_class",
    )

    def __init__(
        self,
        size: Any,
        stride: Any,
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
        conj: bool = False,
        neg: bool = False,
    ) -> None:
        self.size = size
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.device = device
        self.conj = conj
        self.neg = neg
        self.has_bits = conj or neg
        self.native = is_native(device)
        self.own_bytes = -1 if offset or self.has_bits else self.reach * dtype.itemsize
        self.layout_class = layout_class(size, stride, self.has_bits)

    def describes(self, tensor: FakeTensor) -> bool:
        """Whether a tensor still looks like this."""
        return (
            self.size == tensor.shape
            and self.stride == tensor.stride()
            and self.offset == tensor.storage_offset()
            and self.dtype is tensor.dtype
            and self.device == tensor.fake_device
            and self.conj is tensor.is_conj()
            and self.neg is tensor.is_neg()
        )

    @property
    def reach(self) -> int:
        """How many elements a storage must have room for."""
        if 0 in self.size:
            return self.offset
        return self.offset + 1 + sum([(n - 1) * s for n, s in zip(self.size, self.stride, strict=True)])

    def fills(self, nbytes: int) -> bool:
        """Whether a storage of this many bytes is the one that such a tensor has if it has one for itself."""
        return self.own_bytes == nbytes

    def __deepcopy__(self, memo: Any) -> TensorMeta:
        return self


@dataclass(frozen=True, slots=True)
class Fresh:
    """A result in memory of its own."""

    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class Shared:
    """A result that looks at the memory of a tensor among the arguments."""

    argument: int
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class Same:
    """A result that is a tensor among the arguments."""

    argument: int


@dataclass(frozen=True, slots=True)
class Part:
    """A result in new memory that it does not fill, or that other results look at: those with the same number."""

    number: int
    nbytes: int
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class Other:
    """A result that there is no word for, and why. Nothing is said about it."""

    reason: str = field(compare=False)


Result = Fresh | Shared | Same | Part | Other | None


@dataclass(frozen=True, slots=True)
class Several:
    """Several results."""

    kind: type
    results: tuple[Result, ...]


class Table:
    """A dictionary of limited size that threads may share: the oldest half goes when it is full.

    Reading takes no lock: entries are immutable, and a reader that meets a table which is being emptied misses.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._entries: dict[Any, Any] = {}
        self.get = self._entries.get

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: Any, value: Any) -> Any:
        """The value under a key: one that another thread has put there first stays."""
        with self._lock:
            if len(self._entries) >= self._limit:
                for old in list(self._entries)[: self._limit // 2]:
                    del self._entries[old]
            return self._entries.setdefault(key, value)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()


METAS = Table(LIMIT)
RESULTS = Table(LIMIT)


def intern(tensor: FakeTensor) -> TensorMeta:
    """The one object for the metadata of a tensor."""
    size, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return interned(size, stride, offset, tensor.dtype, tensor.fake_device, tensor.is_conj(), tensor.is_neg())


def interned(*key: Any) -> TensorMeta:
    """The one object for size, stride, offset, dtype, device, and conj and neg bits."""
    found = METAS.get(key)
    return found if found is not None else METAS.add(key, TensorMeta(*key))


def metas_in(value: Any) -> Iterator[TensorMeta]:
    """Metadata among arguments or results."""
    if isinstance(value, TensorMeta):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from metas_in(item)
    elif isinstance(value, Several):
        yield from metas_in(value.results)
    elif isinstance(value, (Fresh, Shared, Part)):
        yield value.meta


def described(out: Any, tensors: Sequence[Tensor], meta_of: Callable[[Any], TensorMeta]) -> Result | Several:
    """What an operator gave to tensors, in the words of the table."""
    given = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(tensors)))}
    several = isinstance(out, (tuple, list))  # a decomposition gives a named tuple
    items = list(out) if several else [out]
    memories = [_memory(item) for item in items]
    numbers = {memory: number for number, memory in enumerate(dict.fromkeys(memories))}

    def word(item: Any, memory: int | None) -> Result:
        if item is None:
            return None
        if not isinstance(item, Tensor):
            return Other("it gives a value that is no tensor")
        for i, tensor in enumerate(tensors):
            if tensor is item:
                return Same(i)
        if memory is None:
            return Other("it gives a tensor with a value, or of another layout")
        meta, base = meta_of(item), given.get(memory)
        if base is not None:
            return Shared(base, meta)
        if item.requires_grad:
            return Other("it gives a leaf")
        nbytes = hint_of(item.untyped_storage().nbytes())  # a symbol may not be compared: that would be a guard
        if memories.count(memory) == 1 and meta.fills(nbytes):
            return Fresh(meta)
        return Part(numbers[memory], nbytes, meta)

    results = tuple(map(word, items, memories))
    return Several(list if isinstance(out, list) else tuple, results) if several else results[0]


def _memory(value: Any) -> int | None:
    if (
        not isinstance(value, Tensor)
        or value.layout is not torch.strided
        or getattr(value, "constant", None) is not None
    ):
        return None
    return int(value.untyped_storage()._cdata)


def why_unkept(entry: Result | Several) -> str | None:
    """Why an answer cannot be kept, if it cannot."""
    for result in entry.results if isinstance(entry, Several) else (entry,):
        if isinstance(result, Other):
            return result.reason
        if isinstance(result, Part) and not result.meta.native:
            return "its result lies in more memory than it needs"
    return None
