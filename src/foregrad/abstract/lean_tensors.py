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
from collections.abc import Callable, Iterator, Sequence
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
from ..ops import op_info
from .tensor_meta import TensorMeta, intern


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


class LeanTensorFactory:
    """Makes the tensors of one recording."""

    def __init__(self, mode: FakeTensorMode, withheld: Withheld) -> None:
        self._mode = mode
        self.withheld = withheld
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of genuine tensors
        self._lean_attributes: dict[torch.device, dict[str, Any]] = {}
        self._made: list[weakref.ref[FakeTensor]] = []
        self._memories: dict[int, Memory] = {}  # that were asked for, by the address of the storage
        self._left: list[torch.UntypedStorage] = []  # kept, so that their addresses stay their own

    def __deepcopy__(self, memo: Any) -> LeanTensorFactory:
        return self

    # --------------------------------------------------------------------------------------------- lean tensors
    def fresh(self, meta: TensorMeta) -> FakeTensor:
        """A tensor in memory of its own, which it fills."""
        if meta.has_bits or not meta.native:
            made = self._apart(meta)
            self.withheld.add(made)
            return made
        return self._lean(null_tensor(meta.size, meta.stride, meta.dtype, meta.device), meta)

    def view(self, base: FakeTensor, meta: TensorMeta) -> FakeTensor:
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

    def at(self, storage: torch.UntypedStorage, meta: TensorMeta) -> FakeTensor:
        """A lean tensor that looks at a storage without data."""
        with _unseen(), below_autograd():  # views of plain tensors must not share a version counter
            return self._sharing(null_alias(_looking_at(storage, meta)), meta)

    def _sharing(self, tensor: FakeTensor, meta: TensorMeta) -> FakeTensor:
        vars(tensor)["_foregrad_shares"] = True
        return self._lean(tensor, meta)

    def _lean(self, tensor: FakeTensor, meta: TensorMeta) -> FakeTensor:
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

    def to_fake_tensors(self, tensor: FakeTensor) -> FakeTensor:
        """A genuine tensor that takes the place of a lean one; those of one memory share one too."""
        meta = vars(tensor)["_foregrad_meta"]
        with _unseen(), without_function_modes(), below_autograd():
            return self._around(_looking_at(self.memory_of(tensor).mirror, meta), meta)

    def shown(self, tensors: Sequence[FakeTensor]) -> list[Tensor]:
        """Genuine tensors for many at once: one that shares its memory with none of them needs no mirror.

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
                shown.append(self.to_fake_tensors(tensor))
        return shown

    def _apart(self, meta: TensorMeta) -> FakeTensor:
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

    def _around(self, plain: Tensor, meta: TensorMeta) -> FakeTensor:
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


def _looking_at(storage: torch.UntypedStorage, meta: TensorMeta) -> Tensor:
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


# ---------------------------------------------------------------------------------------------------------------------
# From lean tensors to torch's genuine FakeTensors and back.
#
# FakeTensorMode runs kernels, which must not see lean tensors: genuine ones take their places. Tensors of one storage
# are mirrored into one meta storage, so that an operator finds and leaves its arguments and results lying as they do.
Run = Callable[..., Any]


def to_fake_tensors(value: Any) -> Any:
    """A value of a graph as compilers see it: nothing in it is lean, and there is no tape behind it."""
    if is_lean(value):
        shown = vars(value)["_foregrad_maker"].to_fake_tensors(value)
        leaf = value.requires_grad and not value._is_view() and value.is_leaf  # to ask a view for its node may raise
        return shown.requires_grad_() if leaf else shown
    if type(value) is list or type(value) is tuple:
        return type(value)(map(to_fake_tensors, value))
    return value


def run_mirrored(
    maker: LeanTensorFactory, run: Run, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What an operator gives to whoever knows genuine tensors only, as lean tensors where they can be."""
    crossing = Crossing(maker)
    given, named = crossing.over(args), crossing.over(kwargs)
    out = run(op, types, given, named)
    info = op_info(op)
    if info.written:
        crossing.carry_changes()
    results = crossing.back(out)
    if "objects" in info.traits:
        crossing.remember()
    return results


def kept_by_objects(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Genuine tensors that script objects may hold for some lean ones."""
    return [vars(tensor)["_foregrad_mirror"] for tensor in tensors if "_foregrad_mirror" in vars(tensor)]


def gate(dispatch: Run, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In front of a fake mode: whatever has a tensor of it may call it."""
    lean = next(_lean_in((args, kwargs)), None)
    if lean is None:
        return dispatch(op, types, args, kwargs)
    return run_mirrored(vars(lean)["_foregrad_maker"], dispatch, op, types, args, kwargs)


def _lean_in(value: Any) -> Iterator[FakeTensor]:
    if is_lean(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _lean_in(item)
    elif type(value) is dict:
        yield from _lean_in(list(value.values()))


class Crossing:
    """One operator's way over, with its arguments, and back with its results."""

    def __init__(self, maker: LeanTensorFactory) -> None:
        self._maker = maker
        self._mirrors: dict[int, FakeTensor] = {}  # of arguments, by id of the lean tensor
        self._pairs: dict[int, tuple[FakeTensor, FakeTensor]] = {}  # by id of the genuine one: it, and the lean one
        self._stay: set[int] = set()  # storages of arguments that are genuine themselves
        self._made: dict[int, FakeTensor] = {}  # results, by their genuine storage

    def over(self, value: Any) -> Any:
        """Arguments, with genuine tensors only."""
        kind = type(value)
        if kind is FakeTensor:
            return self._mirror(value)
        if kind is list or kind is tuple:
            return kind([self.over(item) for item in value])
        if kind is dict:
            return {key: self.over(item) for key, item in value.items()}
        return value

    def _mirror(self, tensor: FakeTensor) -> FakeTensor:
        if not is_lean(tensor):
            self._pairs[id(tensor)] = tensor, tensor
            if tensor.layout is torch.strided:
                self._stay.add(tensor.untyped_storage()._cdata)
            return tensor
        found = self._mirrors.get(id(tensor))
        if found is None:
            found = self._mirrors[id(tensor)] = self._maker.to_fake_tensors(tensor)
            self._pairs[id(found)] = found, tensor
            if tensor.requires_grad:
                found.requires_grad_()
        return found

    def carry_changes(self) -> None:
        """Let arguments lie as the operator has left their mirrors."""
        maker = self._maker
        for mirror, tensor in self._pairs.values():
            if mirror is tensor:
                continue
            before, own, storage = maker.memory_of(tensor), vars(tensor), mirror.untyped_storage()
            memory = before
            if storage._cdata != memory.mirror._cdata:
                memory = mirrored(storage) or maker.memory(null_storage(storage.nbytes(), tensor.fake_device))
                memory.mirror = storage
            if storage.nbytes() > memory.storage.nbytes():
                maker.grow(memory)
            if memory is not before or not own["_foregrad_meta"].describes(mirror):
                meta = own["_foregrad_meta"] = intern(mirror)
                own["_foregrad_shares"] = True
                put_into(tensor, memory.storage, meta.offset, meta.size, meta.stride)

    def back(self, value: Any) -> Any:
        """Results, lean where they can be."""
        if type(value) is FakeTensor:
            if id(value) not in self._pairs:
                self._pairs[id(value)] = value, self._result(value)
            return self._pairs[id(value)][1]
        if isinstance(value, (list, tuple)):  # a decomposition gives a named tuple
            return (list if isinstance(value, list) else tuple)(map(self.back, value))
        return value

    def remember(self) -> None:
        """Note what stood for arguments and results: a script object may have kept it."""
        for mirror, tensor in self._pairs.values():
            if mirror is not tensor:
                vars(tensor)["_foregrad_mirror"] = mirror

    def _result(self, out: FakeTensor) -> FakeTensor:
        maker = self._maker
        if is_lean(out) or out.layout is not torch.strided:
            return out
        storage, meta = out.untyped_storage(), intern(out)
        memory = mirrored(storage)
        if memory is not None:
            return maker.at(memory.storage, meta)
        stays = out.constant is not None or out.is_inference() or not meta.native
        if stays or storage._cdata in self._stay:
            maker.withheld.add(out)
            return out
        first = self._made.get(storage._cdata)
        if first is not None:
            return maker.view(first, meta)
        if meta.fills(storage.nbytes()):
            made = maker.fresh(meta)
        else:
            made = maker.at(null_storage(storage.nbytes(), meta.device), meta)
        self._made[storage._cdata] = made
        return made
