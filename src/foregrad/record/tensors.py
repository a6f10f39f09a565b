"""The lean engine's tensors: torch's FakeTensors in storages that have a device, a size, and no data.

Autograd's C++ asks every tensor for its device, about three times for each operator. A FakeTensor as torch makes it is
a meta tensor that pretends, so that each of these questions comes back to Python. A lean one truly is on its device:
nothing is asked. For the same reason no kernel may ever see it, FakeTensorMode's own included. Where those are needed a
genuine FakeTensor, around a meta tensor, takes its place (see `mirror`).

Some tensors are genuine from the start: those with a known value, of another layout, made in inference mode, or on a
device that this machine lacks.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor

from .._torch import (
    FakeTensor,
    FakeTensorMode,
    below_autograd,
    disable_modes,
    dispatch_mode_depth,
    fake_attributes,
    fake_shell,
    null_alias,
    null_tensor,
    put_into,
    set_lazy_bits,
    without_function_modes,
)
from .metas import Meta


class Memory:
    """A storage, and what the tensors that look at it have in common."""

    __slots__ = ("__weakref__", "_left", "_mirror", "_plain", "_tensors", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self._plain: Tensor | None = None
        self._mirror: torch.UntypedStorage | None = None
        self._tensors: list[weakref.ref[FakeTensor]] = []
        self._left: list[torch.UntypedStorage] = []  # kept, so that their addresses stay their own

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a tensor lies elsewhere."""

    def view(self, meta: Meta) -> Tensor:
        """A plain tensor that looks at the storage."""
        if dispatch_mode_depth():  # somebody works out shapes of their own, as DTensor does
            with disable_modes():
                return self.view(meta)
        plain = self._plain
        with below_autograd():  # views of plain tensors must not share a version counter
            if plain is None or plain.dtype is not meta.dtype:
                plain = self._plain = _looking_at(self.storage, meta)
            plain = plain.as_strided(meta.size, meta.stride, meta.offset)
            return set_lazy_bits(plain, meta.conj, meta.neg) if meta.has_bits else plain

    @property
    def mirror(self) -> torch.UntypedStorage:
        """The meta storage of the genuine tensors that take the places of those that look at this one."""
        if self._mirror is None:
            with _normal_tensors():
                flat = torch.empty(self.storage.nbytes(), dtype=torch.uint8, device="meta")
            self.mirror = flat.untyped_storage()
        assert self._mirror is not None
        return self._mirror

    @mirror.setter
    def mirror(self, storage: torch.UntypedStorage) -> None:
        self._mirror = storage
        storage._foregrad_memory = weakref.ref(self)  # type: ignore[attr-defined]

    def add(self, tensor: FakeTensor) -> None:
        """Note that a tensor looks at the storage."""
        vars(tensor)["_foregrad_memory"] = self
        self._tensors.append(weakref.ref(tensor))

    def grow(self) -> None:
        """Become as large as the mirror is now: a storage without data cannot, so all that look at it get another."""
        self._left.append(self.storage)
        self.storage, self._plain = null_storage(self.mirror.nbytes(), self.storage.device), None
        for ref in self._tensors:
            tensor = ref()
            if tensor is not None and vars(tensor)["_foregrad_memory"] is self:
                put_into(tensor, self.storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def mirrored(storage: torch.UntypedStorage) -> Memory | None:
    """The memory whose mirror a meta storage is, if it is one."""
    found = getattr(storage, "_foregrad_memory", None)
    return None if found is None else found()


def is_lean(value: object) -> bool:
    """Whether a value is a lean tensor."""
    return type(value) is FakeTensor and "_foregrad_maker" in vars(value)


def memory_of(tensor: FakeTensor) -> Memory:
    """Where a tensor lies. A fresh one has nobody to share that with, so that it is noted only when it is asked for."""
    memory = vars(tensor).get("_foregrad_memory")
    if memory is None:
        memory = Memory(tensor.untyped_storage())
        memory.add(tensor)
    return memory


class Maker:
    """Makes the tensors of one recording."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def __deepcopy__(self, memo: Any) -> Maker:
        return self

    def fresh(self, meta: Meta, forbid_data: bool = True) -> FakeTensor:
        """A tensor in memory of its own, which it fills."""
        if meta.has_bits or not meta.native:
            plain = torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="meta")
            return self._around(set_lazy_bits(plain, meta.conj, meta.neg), meta)
        tensor = null_tensor(meta.size, meta.stride, meta.dtype, meta.device, forbid_data)
        self._furnish(tensor, meta)["_foregrad_maker"] = self
        return tensor

    def view(self, base: FakeTensor, meta: Meta) -> FakeTensor:
        """A tensor that looks at the memory of another one, and is as lean as that."""
        if "_foregrad_maker" in vars(base):
            return self.at(memory_of(base), meta)
        return self._around(memory_of(base).view(meta), meta)

    def at(self, memory: Memory, meta: Meta) -> FakeTensor:
        """A lean tensor that looks at some memory."""
        tensor = null_alias(memory.view(meta))
        self._furnish(tensor, meta)["_foregrad_maker"] = self
        memory.add(tensor)
        return tensor

    def genuine(self, tensor: FakeTensor) -> FakeTensor:
        """A genuine tensor that takes the place of a lean one; those of one memory share one too."""
        meta = vars(tensor)["_foregrad_meta"]
        modes = disable_modes() if dispatch_mode_depth() else contextlib.nullcontext()
        with modes, without_function_modes(), below_autograd():
            plain = _looking_at(memory_of(tensor).mirror, meta)
            plain = set_lazy_bits(plain, meta.conj, meta.neg) if meta.has_bits else plain
            return self._around(plain, meta)

    def _around(self, plain: Tensor, meta: Meta) -> FakeTensor:
        tensor = fake_shell(plain, meta.device)
        self._furnish(tensor, meta)
        return tensor

    def _furnish(self, tensor: FakeTensor, meta: Meta) -> dict[str, Any]:
        attributes = self._attributes.get(meta.device)
        if attributes is None:
            attributes = self._attributes[meta.device] = fake_attributes(self._mode, meta.device)
        own = vars(tensor)
        own.update(attributes)
        own["_foregrad_meta"] = meta
        return own


def null_storage(nbytes: int, device: torch.device, forbid_data: bool = True) -> torch.UntypedStorage:
    """A storage without data."""
    storage: torch.UntypedStorage = null_tensor((nbytes,), (1,), torch.uint8, device, forbid_data).untyped_storage()
    return storage


def _looking_at(storage: torch.UntypedStorage, meta: Meta) -> Tensor:
    with _normal_tensors():
        plain = torch.empty(0, dtype=meta.dtype, device=storage.device)
    return plain.set_(storage, meta.offset, meta.size, meta.stride)


def _normal_tensors() -> contextlib.AbstractContextManager[Any]:
    """Tensors that are no inference tensors, wherever they are made."""
    inference = torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inference else contextlib.nullcontext()
