"""The words of the lean engine's table: metadata of tensors, of which equal ones are one object, and results."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from .._torch import FakeTensor

LIMIT = 1 << 16  # entries; a GPT of any depth needs some hundred


def is_native(device: torch.device) -> bool:
    """Whether C++ can hold tensors of a device here."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


class Meta:
    """All that there is to know about a dense tensor. Equal ones are one object."""

    __slots__ = ("conj", "device", "dtype", "has_bits", "native", "neg", "offset", "own_bytes", "size", "stride")

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

    def __deepcopy__(self, memo: Any) -> Meta:
        return self


@dataclass(frozen=True, slots=True)
class Fresh:
    """A result in memory of its own."""

    meta: Meta


@dataclass(frozen=True, slots=True)
class Shared:
    """A result that looks at the memory of a tensor among the arguments."""

    argument: int
    meta: Meta


@dataclass(frozen=True, slots=True)
class Same:
    """A result that is a tensor among the arguments."""

    argument: int


Result = Fresh | Shared | Same | None


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


def intern(tensor: FakeTensor) -> Meta:
    """The one object for the metadata of a tensor."""
    size, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return interned(size, stride, offset, tensor.dtype, tensor.fake_device, tensor.is_conj(), tensor.is_neg())


def interned(*key: Any) -> Meta:
    """The one object for size, stride, offset, dtype, device, and conj and neg bits."""
    found = METAS.get(key)
    return found if found is not None else METAS.add(key, Meta(*key))
