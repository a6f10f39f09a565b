"""An engine that compares every answer of the lean engine with what FakeTensorMode works out by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from foregrad.abstract.lean_engine import Kept, LeanEngine
from foregrad.abstract.tensor_meta import LIMIT, Table
from foregrad.abstract.trials import Case
from foregrad.slots import Input


class Unfaithful(AssertionError):
    """The lean engine says something else than FakeTensorMode."""


def facts(tensor: Any) -> tuple[Any, ...]:
    """Everything that a node's abstract value tells."""
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.untyped_storage().nbytes(),
    )


def shown(values: Any, tensors: list[Any]) -> list[Any]:
    """The facts about results, and which of the arguments each of them is, or shares its memory with."""
    found = []
    for value in tree_leaves(values):
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
            found.append(type(value) if isinstance(value, torch.Tensor) else value)
            continue
        same = [i for i, tensor in enumerate(tensors) if tensor is value]
        memory = value.untyped_storage()._cdata
        shared = [i for i, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == memory]
        found.append((facts(value), same, shared))
    return found


class Believing(LeanEngine):
    """The lean engine without trials: what shape inference says, right or wrong."""

    results = Table(LIMIT)

    def _believes(self, kept: Kept, metas: Any) -> bool:
        return True

    def _despite_error(self, case: Case) -> Any:
        return None


class CheckedEngine(Believing):
    """Runs each operator a second time, on copies of its arguments under a fake mode of its own."""

    def __init__(self) -> None:
        super().__init__(FakeTensorMode())
        self._oracle = FakeTensorMode()
        self._oracle.cache_enabled = False  # it forgets that an in-place operator lets a fake tensor grow
        self.checked = 0

    def run(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if type(leaf) is FakeTensor]
        dense = all(t.layout is torch.strided and t.constant is None for t in tensors)
        if not dense or any(type(leaf) not in (FakeTensor, *PLAIN) for leaf in leaves):
            return super().run(op, types, args, kwargs)
        storages: dict[int, torch.UntypedStorage] = {}
        with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
            copies = {id(t): self._copy(t, storages) for t in tensors}
        given, named = tree_map(lambda leaf: copies.get(id(leaf), leaf), (args, kwargs))
        expected = error = None
        try:
            with torch._C.DisableTorchFunction():
                expected = self._oracle.dispatch(op, (), given, named)
        except Exception as raised:
            error = raised
        try:
            got = super().run(op, types, args, kwargs)
        except Exception as raised:
            if type(raised) is not type(error):
                raise Unfaithful(f"{op}: {raised!r} where FakeTensorMode says {error!r}") from raised
            raise
        if error is not None:
            raise Unfaithful(f"{op}: no error where FakeTensorMode says {error!r}")
        if any(isinstance(t, FakeTensor) and t.constant is not None for t in tree_leaves(expected)):
            return got
        with torch._C.DisableTorchFunction():
            self._compare(op, (args, kwargs), got, expected, tensors, [copies[id(t)] for t in tensors])
        self.checked += 1
        return got

    def _compare(self, op: Any, given: Any, got: Any, expected: Any, tensors: list[Any], copies: list[Any]) -> None:
        ours, theirs = shown(got, tensors), shown(expected, copies)
        if ours != theirs and not _eager_agrees(op, got, *given):
            raise Unfaithful(f"{op}: {ours} where FakeTensorMode says {theirs}")
        after = [facts(t) for t in tensors], [facts(t) for t in copies]
        if after[0] != after[1]:
            raise Unfaithful(f"{op} leaves its arguments as {after[0]} where FakeTensorMode leaves {after[1]}")

    def _copy(self, tensor: Any, storages: dict[int, torch.UntypedStorage]) -> FakeTensor:
        """A fake tensor of the oracle that lies as another one does; tensors of one storage stay together."""
        memory = tensor.untyped_storage()
        storage = storages.get(memory._cdata)
        if storage is None:
            storage = torch.empty(memory.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            storages[memory._cdata] = storage
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        meta.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        copy = FakeTensor(self._oracle, meta, tensor.fake_device)
        with self._oracle:
            copy = torch._conj(copy) if tensor.is_conj() else copy
            return torch._neg_view(copy) if tensor.is_neg() else copy


PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Through(TorchDispatchMode):
    """Sends every operator to an engine."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine = engine

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.prim.device.default:
            return args[0].fake_device
        with torch._C.DisableTorchFunction():
            return self._engine.run(op, types, args, kwargs or {})


def run_twice(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[CheckedEngine, str | None]:
    """Call a function of tensors on abstract ones, twice, so that the second call is answered by the table.

    Gives the engine, and what FakeTensorMode cannot do either, if that ended the call.
    """
    engine = CheckedEngine()
    reason = None
    for _ in range(2):
        given, named = tree_map(
            lambda leaf: engine.fake(leaf, Input("x"), dynamic=False) if isinstance(leaf, torch.Tensor) else leaf,
            (arguments, keywords),
        )
        try:
            with torch.no_grad(), Through(engine):
                function(*given, **named)
        except Unfaithful:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    return engine, reason


def _eager_agrees(op: Any, got: Any, args: Any, kwargs: Any) -> bool:
    """Whether FakeTensorMode is the one that is wrong.

    Its own `view` gives sizes of one, and tensors without elements, other strides than the real kernel does.
    """
    if not isinstance(got, FakeTensor) or op is not torch.ops.aten.view.default:
        return False
    base = args[0]
    with _disable_current_modes():
        real = torch.empty(base.untyped_storage().nbytes() // base.itemsize, dtype=base.dtype)
        real = op(real.as_strided(base.shape, base.stride(), base.storage_offset()), *args[1:], **kwargs)
    return (real.shape, real.stride(), real.storage_offset()) == (got.shape, got.stride(), got.storage_offset())
