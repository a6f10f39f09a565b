"""From lean tensors to torch's genuine FakeTensors and back.

FakeTensorMode runs kernels, which must not see lean tensors: genuine ones take their places. Tensors of one storage
are mirrored into one meta storage, so that an operator finds and leaves its arguments and results lying as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import FakeTensor, put_into
from ..ops import op_info
from .metas import intern
from .tensors import Maker, is_lean, mirrored, null_storage

Run = Callable[..., Any]


def genuine(value: Any) -> Any:
    """A value of a graph as compilers see it: nothing in it is lean, and there is no tape behind it."""
    if is_lean(value):
        shown = vars(value)["_foregrad_maker"].genuine(value)
        leaf = value.requires_grad and not value._is_view() and value.is_leaf  # to ask a view for its node may raise
        return shown.requires_grad_() if leaf else shown
    if type(value) is list or type(value) is tuple:
        return type(value)(map(genuine, value))
    return value


def run_mirrored(maker: Maker, run: Run, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator gives to whoever knows genuine tensors only, as lean tensors where they can be."""
    crossing = Crossing(maker)
    given, named = crossing.over(args), crossing.over(kwargs)
    out = run(op, types, given, named)
    info = op_info(op)
    if info.written:
        crossing.carry_changes()
    results = crossing.back(out)
    if info.takes_objects:
        crossing.remember()
    return results


def kept_by_objects(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Genuine tensors that script objects may hold for some lean ones."""
    return [vars(tensor)["_foregrad_mirror"] for tensor in tensors if "_foregrad_mirror" in vars(tensor)]


def gate(dispatch: Run, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In front of a fake mode: it may be called by anybody who has a tensor of it."""
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

    def __init__(self, maker: Maker) -> None:
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
            found = self._mirrors[id(tensor)] = self._maker.genuine(tensor)
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
