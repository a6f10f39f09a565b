"""The lean engine: what an operator gives is looked up, not worked out again.

Programs call the same operators on tensors of the same shapes again and again, and so do the programs of one process.
What an operator gives for certain metadata is therefore kept in one table for the process: (operator, metadata of its
tensors, its other arguments, the settings that it may read) -> metadata of its results. A miss asks the fake engine,
which is also the engine for whatever the table cannot describe.

The tensors themselves are torch's FakeTensors, made without the questions that their constructor asks (3 us instead
of 10): everything that knows them works on them as ever, and compilers are given them as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    backend_settings,
    below_autograd,
    deterministic_enabled,
    fake_attributes,
    fake_shell,
    set_lazy_bits,
    set_version,
    without_own_cache,
)
from ..ops import Kind, op_info
from .engine import EngineReport, FakeEngine
from .rules import LOOSE_RULES, RULES, contiguous, results_by_rule

LIMIT = 1 << 16  # entries; a GPT of any depth needs some hundred


class Meta:
    """All that there is to know about a dense tensor. Equal ones are one object."""

    __slots__ = ("conj", "device", "dtype", "has_bits", "neg", "offset", "size", "stride")

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


class Kept:
    """What the engine knows about an operator, and what stands for it in keys: to hash an operator takes longer."""

    __slots__ = ("op", "reads_backends", "ruled", "why_not")

    def __init__(self, op: OpOverload) -> None:
        self.op = op  # kept, so that its id stays its own
        self.why_not = why_not(op)
        self.reads_backends = reads_backends(op)
        self.ruled = op in RULES or op in LOOSE_RULES


_KEPT: dict[int, Kept] = {}  # by id of the operator


def _kept(op: OpOverload) -> Kept:
    return _KEPT.setdefault(id(op), Kept(op))


def why_not(op: OpOverload) -> str | None:
    """Why the results of an operator are not kept, if they are not."""
    info = op_info(op)
    if op.namespace not in ("aten", "prims"):
        return "its shape inference is not torch's own"
    if info.kind is Kind.RESHAPE or info.has_out:
        return "it may change the shape of its arguments"
    if info.takes_objects:
        return "it takes script objects"
    if op._schema.name.startswith("aten::as_strided_"):
        return "what it may do depends on the size of a storage"
    return None


def reads_backends(op: OpOverload) -> bool:
    """Whether the layout of the results may depend on which libraries are switched on."""
    name = op._schema.name
    return any(part in name for part in ("conv", "norm", "rnn", "lstm", "gru", "attention", "cudnn", "mkldnn", "mm"))


_BY_VALUE = frozenset({int, str, type(None), torch.dtype, torch.layout, torch.memory_format})
_BY_TYPE_AND_VALUE = frozenset({float, bool, complex})  # 1.0 and True are equal to 1, and give other dtypes
_UNKNOWN = object()


@dataclass
class Counts:
    """How often the table was asked, and which operators it was not asked about, with the reason."""

    hits: int = 0
    misses: int = 0
    by_operator: dict[str, str] = field(default_factory=dict)


class LeanEngine(FakeEngine):
    """The fake engine behind a table of what it has answered before."""

    name = "lean"

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__(without_own_cache(mode))
        self.counts = Counts()
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        self._direct = super().run

    def report(self) -> EngineReport:
        counts = self.counts
        return EngineReport(self.name, "", dict(counts.by_operator), counts.hits, counts.misses)

    def forget(self, tensor: Tensor) -> None:
        """The metadata of a tensor has changed, or may have."""
        vars(tensor).pop("_foregrad_meta", None)
        vars(tensor).pop("_foregrad_memory", None)

    def device_of(self, tensor: Tensor) -> torch.device:
        meta = vars(tensor).get("_foregrad_meta")
        return super().device_of(tensor) if meta is None else meta.device

    def detached(self, tensor: Tensor) -> Tensor:
        meta = vars(tensor).get("_foregrad_meta")
        if meta is None or torch.is_inference_mode_enabled():
            return super().detached(tensor)
        memory = vars(tensor).get("_foregrad_memory")
        return self._shell(_memory_of(tensor) if memory is None else memory, meta)  # type: ignore[arg-type]

    def _strided(self, size: Any, stride: Any, offset: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        if offset or torch.is_inference_mode_enabled():
            return super()._strided(size, stride, offset, dtype, device)
        memory = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        meta = _interned(tuple(size), tuple(stride), 0, dtype, device, False, False)
        return self._shell(memory, meta, forbid_data=False)  # C++ that is given inputs may look, to no avail

    def run(self, op: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = _KEPT.get(id(op)) or _kept(op)
        if kept.why_not is not None:
            return self._run_unknown(op, types, args, kwargs, kept.why_not)
        tensors: list[FakeTensor] = []
        key: list[Any] = [kept, torch.get_default_dtype(), deterministic_enabled(), torch.is_grad_enabled()]
        known = self._describe(args, key, tensors)
        if known and kwargs:
            for name, value in kwargs.items():
                key.append(name)
                known = known and self._describe((value,), key, tensors)
        if not known or torch.is_inference_mode_enabled():
            reason = "inference mode" if known else "an argument with a value, or of an unknown kind"
            return self._run_unknown(op, types, args, kwargs, reason)
        if kept.reads_backends:
            key.append(backend_settings())
        whole = tuple(key)
        entry = RESULTS.get(whole, _UNKNOWN)
        if entry is _UNKNOWN:
            return self._fill(whole, op, types, args, kwargs, tensors)
        self.counts.hits += 1
        return self._build(entry, tensors)

    # --------------------------------------------------------------------------------------------- asking
    def _describe(self, values: Sequence[Any], key: list[Any], tensors: list[FakeTensor]) -> bool:
        """Add arguments to a key: false if that cannot be done."""
        mode = self.mode
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not mode:
                    return False
                try:
                    meta = value._foregrad_meta
                except AttributeError:
                    meta = self._meta_of(value)
                    if meta is None:
                        return False
                key.append(meta)
                tensors.append(value)
            elif kind in _BY_VALUE:
                key.append(value)
            elif kind is list or kind is tuple or kind is torch.Size:
                key.append(list)
                key.append(len(value))
                if not self._describe(value, key, tensors):
                    return False
            elif kind in _BY_TYPE_AND_VALUE:
                key.append(kind)
                key.append(value)
            elif kind is torch.device:
                if value.index is None and value.type != "cpu":  # the current one, which may be another next time
                    return False
                key.append(value)
            elif kind is torch.Generator:
                key.append(value.device)
            else:
                return False
        return True

    def _meta_of(self, tensor: FakeTensor) -> Meta | None:
        """The metadata of a tensor, noted on it, if a `Meta` can hold it."""
        if tensor.constant is not None or tensor.layout is not torch.strided or tensor.is_inference():
            return None
        meta = intern(tensor)
        vars(tensor)["_foregrad_meta"] = meta
        return meta

    # -------------------------------------------------------------------------------------------- answering
    def _build(self, entry: Any, tensors: Sequence[FakeTensor]) -> Any:
        kind = type(entry)
        if kind is Fresh:
            meta = entry.meta
            memory = torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="meta")
            return self._shell(memory, meta)
        if kind is Shared:
            meta = entry.meta
            base = tensors[entry.argument]
            try:
                memory = base._foregrad_memory
            except AttributeError:
                memory = _memory_of(base)
            with below_autograd():
                if meta.dtype is memory.dtype:
                    memory = memory.as_strided(meta.size, meta.stride, meta.offset)
                else:
                    memory = _looking_at(memory.untyped_storage(), meta)
            return self._shell(memory, meta)
        if kind is Same:
            return tensors[entry.argument]
        if kind is Several:
            return entry.kind([self._build(result, tensors) for result in entry.results])
        return None

    def _shell(self, memory: Tensor, meta: Meta, forbid_data: bool = True) -> FakeTensor:
        device = meta.device
        attributes = self._attributes.get(device)
        if attributes is None:
            attributes = self._attributes[device] = fake_attributes(self.mode, device)
        shown = memory
        if meta.has_bits:
            with below_autograd():
                shown = set_lazy_bits(memory, meta.conj, meta.neg)
        tensor = fake_shell(shown, device, forbid_data)
        own = vars(tensor)
        own.update(attributes)
        own["_foregrad_meta"] = meta
        own["_foregrad_memory"] = memory
        return tensor

    # ---------------------------------------------------------------------------------------------- learning
    def _run_unknown(self, op: Any, types: Any, args: Any, kwargs: Any, reason: str) -> Any:
        self.counts.by_operator.setdefault(str(op), reason)
        out = self._direct(op, types, args, kwargs)
        if op_info(op).written:
            for tensor in _tensors_in((args, list(kwargs.values()))):
                self.forget(tensor)
        return out

    def _fill(
        self, key: tuple[Any, ...], op: Any, types: Any, args: Any, kwargs: Any, tensors: Sequence[FakeTensor]
    ) -> Any:
        self.counts.misses += 1
        plain = key[0].ruled and not any(tensor._foregrad_meta.has_bits for tensor in tensors)  # type: ignore[attr-defined]
        ruled = _by_rule(op, args, kwargs, tensors) if plain else None
        if ruled is not None:
            return self._build(RESULTS.add(key, ruled), tensors)
        out = self._direct(op, types, args, kwargs)
        if op_info(op).written and not all(t._foregrad_meta.describes(t) for t in tensors):  # type: ignore[attr-defined]
            for tensor in tensors:
                self.forget(tensor)
            return out
        described, reason = _results(out, tensors)
        if reason is None:
            RESULTS.add(key, described)
        else:
            self.counts.by_operator.setdefault(str(op), reason)
        return out


def intern(tensor: FakeTensor) -> Meta:
    """The one object for the metadata of a tensor."""
    size, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return _interned(size, stride, offset, tensor.dtype, tensor.fake_device, tensor.is_conj(), tensor.is_neg())


def _interned(*key: Any) -> Meta:
    found = METAS.get(key)
    return found if found is not None else METAS.add(key, Meta(*key))


def _by_rule(op: OpOverload, args: Sequence[Any], kwargs: Any, tensors: Sequence[FakeTensor]) -> Fresh | Several | None:
    """What an operator gives by its own rule, if the case is plain."""
    metas: list[Meta] = [tensor._foregrad_meta for tensor in tensors]  # type: ignore[attr-defined]
    given = [arg._foregrad_meta if type(arg) is FakeTensor else arg for arg in args]  # type: ignore[attr-defined]
    sizes = results_by_rule(op, given, kwargs, metas) if metas else None
    if sizes is None:
        return None

    def fresh(size: tuple[int, ...]) -> Fresh:
        return Fresh(_interned(size, contiguous(size), 0, metas[0].dtype, metas[0].device, False, False))

    if isinstance(sizes, list):
        return Several(tuple, tuple(None if size is None else fresh(size) for size in sizes))
    return fresh(sizes)


def _memory_of(tensor: FakeTensor) -> Tensor:
    """A plain meta tensor that is where a fake one is, without its lazy bits."""
    memory = vars(tensor)["_foregrad_memory"] = _looking_at(tensor.untyped_storage(), intern(tensor))
    return memory


def _looking_at(storage: torch.UntypedStorage, meta: Meta) -> Tensor:
    memory = torch.empty(0, dtype=meta.dtype, device="meta")
    memory.set_(storage, meta.offset, meta.size, meta.stride)
    if not memory.is_inference():
        set_version(memory, 0)
    return memory


def _results(out: Any, tensors: Sequence[FakeTensor]) -> tuple[Any, str | None]:
    """What an operator gave, in the words of the table, or why there are none for it."""
    memories = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(tensors)))}
    if isinstance(out, (tuple, list)):  # a decomposition gives a named tuple
        results = [_result(item, tensors, memories) for item in out]
        reason = next((why for _, why in results if why is not None), None)
        fresh = [t.untyped_storage()._cdata for t, (r, _) in zip(out, results, strict=True) if type(r) is Fresh]
        if reason is None and len(set(fresh)) < len(fresh):
            reason = "its results share memory"
        return Several(list if isinstance(out, list) else tuple, tuple(result for result, _ in results)), reason
    return _result(out, tensors, memories)


def _result(out: Any, tensors: Sequence[FakeTensor], memories: dict[int, int]) -> tuple[Result, str | None]:
    if out is None:
        return None, None
    if type(out) is not FakeTensor:
        return None, "it gives a value that is no tensor"
    for i, tensor in enumerate(tensors):
        if tensor is out:
            return Same(i), None
    if out.constant is not None or out.layout is not torch.strided:
        return None, "it gives a tensor with a value, or of another layout"
    meta = intern(out)
    base = memories.get(out.untyped_storage()._cdata)
    if base is not None:
        return Shared(base, meta), None
    expected = torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="meta").untyped_storage().nbytes()
    if meta.offset or out.untyped_storage().nbytes() != expected or out.requires_grad:
        return None, "its result lies in more memory than it needs"
    return Fresh(meta), None


def _tensors_in(values: Any) -> list[FakeTensor]:
    found: list[FakeTensor] = []
    for value in values:
        if type(value) is FakeTensor:
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors_in(value)
    return found
