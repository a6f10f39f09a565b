"""The lean engine's tensors: torch's FakeTensors in storages that have a device, a size, and no data.

Autograd's C++ asks every tensor for its device, about three times for each operator. A FakeTensor as torch makes it is
a meta tensor that pretends, so that each of these questions comes back to Python. A lean one truly is on its device:
nothing is asked. For the same reason no kernel may ever see it, FakeTensorMode's own included: its storage refuses
whoever asks for data. Where kernels are needed a genuine FakeTensor, around a meta tensor, takes its place (see
`mirror`).

Some tensors are genuine from the start: those with a known value, of another layout, made in inference mode, or on a
device that this machine lacks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import (
    FakeTensor,
    FakeTensorMode,
    Withheld,
    below_autograd,
    disable_modes,
    dispatch_mode_depth,
    fake_attributes,
    fake_shell,
    looking_at,
    null_alias,
    null_tensor,
    null_view,
    put_into,
    set_lazy_bits,
    without_function_modes,
)
from .metas import Meta


class Memory:
    """A storage without data, and the meta storage of the genuine tensors that take the places of those in it."""

    __slots__ = ("__weakref__", "_mirror", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self._mirror: torch.UntypedStorage | None = None

    @property
    def mirror(self) -> torch.UntypedStorage:
        """The meta storage."""
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


def mirrored(storage: torch.UntypedStorage) -> Memory | None:
    """The memory whose mirror a meta storage is, if it is one."""
    found = getattr(storage, "_foregrad_memory", None)
    return None if found is None else found()


def is_lean(value: object) -> bool:
    """Whether a value is a lean tensor."""
    return type(value) is FakeTensor and "_foregrad_maker" in vars(value)


def lies_alone(tensor: Tensor) -> bool:
    """Whether a tensor is known to fill memory that no other tensor looks at."""
    known = vars(tensor)
    return "_foregrad_maker" in known and "_foregrad_shares" not in known


class Maker:
    """Makes the tensors of one recording."""

    def __init__(self, mode: FakeTensorMode, withheld: Withheld) -> None:
        self._mode = mode
        self.withheld = withheld
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of genuine tensors
        self._lean_attributes: dict[torch.device, dict[str, Any]] = {}
        self._made: list[weakref.ref[FakeTensor]] = []
        self._memories: dict[int, Memory] = {}  # that somebody has asked for, by the address of the storage
        self._left: list[torch.UntypedStorage] = []  # kept, so that their addresses stay their own

    def __deepcopy__(self, memo: Any) -> Maker:
        return self

    # --------------------------------------------------------------------------------------------- lean tensors
    def fresh(self, meta: Meta) -> FakeTensor:
        """A tensor in memory of its own, which it fills."""
        if meta.has_bits or not meta.native:
            made = self._apart(meta)
            self.withheld.add(made)
            return made
        return self._lean(null_tensor(meta.size, meta.stride, meta.dtype, meta.device), meta)

    def view(self, base: FakeTensor, meta: Meta) -> FakeTensor:
        """A tensor that looks at the memory of another one, and is as lean as that."""
        known = vars(base)
        if "_foregrad_maker" not in known:
            with below_autograd():
                return self._around(_looking_at(base.untyped_storage(), meta), meta)
        known["_foregrad_shares"] = True
        before = known["_foregrad_meta"]
        if before.dtype is not meta.dtype or before.has_bits or meta.has_bits:
            return self.at(base.untyped_storage(), meta)
        return self._sharing(null_view(base, meta.size, meta.stride, meta.offset), meta)

    def at(self, storage: torch.UntypedStorage, meta: Meta) -> FakeTensor:
        """A lean tensor that looks at a storage without data."""
        with _unseen(), below_autograd():  # views of plain tensors must not share a version counter
            return self._sharing(null_alias(_looking_at(storage, meta)), meta)

    def _sharing(self, tensor: FakeTensor, meta: Meta) -> FakeTensor:
        vars(tensor)["_foregrad_shares"] = True
        return self._lean(tensor, meta)

    def _lean(self, tensor: FakeTensor, meta: Meta) -> FakeTensor:
        attributes = self._lean_attributes.get(meta.device)
        if attributes is None:
            known = self._genuine_attributes(meta.device)  # what kernels remember is for those that they see
            attributes = {name: value for name, value in known.items() if "_memo" not in name}
            attributes["_foregrad_maker"] = self
            self._lean_attributes[meta.device] = attributes
        own = vars(tensor)
        own.update(attributes)
        own["_foregrad_meta"] = meta
        self._made.append(weakref.ref(tensor))
        return tensor

    # ------------------------------------------------------------------------------------------ genuine tensors
    def memory_of(self, tensor: FakeTensor) -> Memory:
        """Where a lean tensor lies."""
        return self.memory(tensor.untyped_storage())

    def memory(self, storage: torch.UntypedStorage) -> Memory:
        """The memory that a storage without data is."""
        found = self._memories.get(storage._cdata)
        if found is None:
            found = self._memories[storage._cdata] = Memory(storage)
        return found

    def genuine(self, tensor: FakeTensor) -> FakeTensor:
        """A genuine tensor that takes the place of a lean one; those of one memory share one too."""
        meta = vars(tensor)["_foregrad_meta"]
        with _unseen(), without_function_modes(), below_autograd():
            return self._around(_looking_at(self.memory_of(tensor).mirror, meta), meta)

    def shown(self, tensors: Sequence[FakeTensor]) -> list[Tensor]:
        """Genuine tensors for many at once: one that nobody here shares its memory with needs no mirror.

        An input that the backward takes as well is shown as the same tensor there.
        """
        storages = {id(tensor): tensor.untyped_storage() for tensor in tensors if not lies_alone(tensor)}
        count = Counter([storage._cdata for storage in storages.values()])
        shown: list[Tensor] = []
        for tensor in tensors:
            known, storage = vars(tensor), storages.get(id(tensor))
            meta = known["_foregrad_meta"]
            if storage is None:
                if "_foregrad_shown" not in known:
                    known["_foregrad_shown"] = self._apart(meta)
                shown.append(known["_foregrad_shown"])
            elif count[storage._cdata] == 1 and meta.fills(storage.nbytes()):
                shown.append(self._apart(meta))
            else:
                shown.append(self.genuine(tensor))
        return shown

    def _apart(self, meta: Meta) -> FakeTensor:
        """A genuine tensor in memory of its own."""
        plain = torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="meta")
        return self._around(set_lazy_bits(plain, meta.conj, meta.neg), meta)

    def grow(self, memory: Memory) -> None:
        """Let memory become as large as its mirror is now: a storage without data cannot, so there is another."""
        old = memory.storage
        self._left.append(old)
        del self._memories[old._cdata]
        memory.storage = null_storage(memory.mirror.nbytes(), old.device)
        self._memories[memory.storage._cdata] = memory
        for ref in self._made:
            tensor = ref()
            if tensor is not None and tensor.untyped_storage()._cdata == old._cdata:
                put_into(tensor, memory.storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _around(self, plain: Tensor, meta: Meta) -> FakeTensor:
        tensor: FakeTensor = fake_shell(plain, meta.device)
        own = vars(tensor)
        own.update(self._genuine_attributes(meta.device))
        own["_foregrad_meta"] = meta
        return tensor

    def _genuine_attributes(self, device: torch.device) -> dict[str, Any]:
        found = self._attributes.get(device)
        if found is None:
            found = self._attributes[device] = fake_attributes(self._mode, device)
        return found


def null_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage without data."""
    storage: torch.UntypedStorage = null_tensor((nbytes,), (1,), torch.uint8, device).untyped_storage()
    return storage


def _looking_at(storage: torch.UntypedStorage, meta: Meta) -> Tensor:
    with _normal_tensors():
        plain = looking_at(storage, meta.dtype, meta.offset, meta.size, meta.stride)
    return set_lazy_bits(plain, meta.conj, meta.neg)


def _unseen() -> contextlib.AbstractContextManager[Any]:
    """No mode sees what is made: DTensor works out shapes under modes of its own."""
    return disable_modes() if dispatch_mode_depth() else contextlib.nullcontext()


def _normal_tensors() -> contextlib.AbstractContextManager[Any]:
    """Tensors that are no inference tensors, wherever they are made."""
    inference = torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inference else contextlib.nullcontext()
