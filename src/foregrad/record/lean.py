"""The lean engine: what an operator gives is looked up, not worked out again.

Programs call the same operators on tensors of the same shapes again and again, and so do the programs of one process.
What an operator gives for certain metadata is therefore kept in one table for the process: (operator, metadata of its
tensors, its other arguments, the settings that it may read) -> metadata of its results. A miss asks the fake engine,
which is also the engine for whatever the table cannot describe.

The tensors themselves are torch's FakeTensors, made in another way (see `tensors`): everything that knows them works
on them as ever. FakeTensorMode itself and compilers are given genuine ones in their places (see `mirror`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    backend_settings,
    deterministic_enabled,
    put_gate,
    without_own_cache,
)
from ..ops import Kind, op_info
from .engine import EngineReport, FakeEngine
from .metas import RESULTS, Fresh, Meta, Result, Same, Several, Shared, intern, interned
from .mirror import gate, run_mirrored
from .rules import LOOSE_RULES, RULES, contiguous, results_by_rule
from .tensors import Maker, is_lean, null_storage


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
        put_gate(mode, gate)
        self.counts = Counts()
        self._maker = Maker(mode, self.withheld)

    def report(self) -> EngineReport:
        counts = self.counts
        return EngineReport(self.name, "", dict(counts.by_operator), counts.hits, counts.misses)

    def forget(self, tensor: Tensor) -> None:
        """The metadata of a tensor has changed, or may have. What changes lean ones keeps theirs."""
        if not is_lean(tensor):
            vars(tensor).pop("_foregrad_meta", None)

    def device_of(self, tensor: Tensor) -> torch.device:
        meta = vars(tensor).get("_foregrad_meta")
        return super().device_of(tensor) if meta is None else meta.device

    def shown(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if all(map(is_lean, tensors)):
            return self._maker.shown(tensors)  # type: ignore[arg-type]
        return [self.shown([t])[0] if is_lean(t) else super(LeanEngine, self).shown([t])[0] for t in tensors]

    def strided(self, tensor: Tensor, stride: Sequence[int], device: torch.device) -> Tensor:
        return super()._strided(tensor.shape, tuple(stride), 0, tensor.dtype, device)

    def _strided(self, size: Any, stride: Any, offset: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        meta = interned(tuple(size), tuple(stride), offset, dtype, device, False, False)
        if torch.is_inference_mode_enabled() or not meta.native:
            return super()._strided(size, stride, offset, dtype, device)
        if offset:
            return self._maker.at(null_storage(meta.reach * dtype.itemsize, device), meta)
        return self._maker.fresh(meta)

    def run(self, op: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = _KEPT.get(id(op)) or _kept(op)
        if kept.why_not is not None:
            return self._run_unknown(op, types, args, kwargs, kept.why_not)
        tensors: list[FakeTensor] = []
        key: list[Any] = [kept, torch.get_default_dtype(), deterministic_enabled(), torch.is_grad_enabled()]
        known = self._describe(args, key, tensors)
        if known and kwargs:
            key.append(len(kwargs))
            key.extend(kwargs)
            known = self._describe(kwargs.values(), key, tensors)
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
    def _describe(self, values: Iterable[Any], key: list[Any], tensors: list[FakeTensor]) -> bool:
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
            return self._maker.fresh(entry.meta)
        if kind is Shared:
            return self._maker.view(tensors[entry.argument], entry.meta)
        if kind is Same:
            return tensors[entry.argument]
        if kind is Several:
            return entry.kind([self._build(result, tensors) for result in entry.results])
        return None

    # ---------------------------------------------------------------------------------------------- learning
    def _direct(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return run_mirrored(self._maker, self._answer, op, types, args, kwargs)

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
        metas: list[Meta] = [tensor._foregrad_meta for tensor in tensors]  # type: ignore[attr-defined]
        plain = key[0].ruled and not any(meta.has_bits for meta in metas)
        ruled = _by_rule(op, args, kwargs, tensors) if plain else None
        if ruled is not None:
            return self._build(RESULTS.add(key, ruled), tensors)
        out = self._direct(op, types, args, kwargs)
        if op_info(op).written and not all(m.describes(t) for m, t in zip(metas, tensors, strict=True)):
            for tensor in tensors:
                self.forget(tensor)
            return out
        described, reason = _results(out, tensors)
        if reason is None:
            RESULTS.add(key, described)
        else:
            self.counts.by_operator.setdefault(str(op), reason)
        return out


def _by_rule(op: OpOverload, args: Sequence[Any], kwargs: Any, tensors: Sequence[FakeTensor]) -> Fresh | Several | None:
    """What an operator gives by its own rule, if the case is plain."""
    metas: list[Meta] = [tensor._foregrad_meta for tensor in tensors]  # type: ignore[attr-defined]
    given = [arg._foregrad_meta if type(arg) is FakeTensor else arg for arg in args]  # type: ignore[attr-defined]
    sizes = results_by_rule(op, given, kwargs, metas) if metas else None
    if sizes is None:
        return None

    def fresh(size: tuple[int, ...]) -> Fresh:
        return Fresh(interned(size, contiguous(size), 0, metas[0].dtype, metas[0].device, False, False))

    if isinstance(sizes, list):
        return Several(tuple, tuple(None if size is None else fresh(size) for size in sizes))
    return fresh(sizes)


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
    if not meta.fills(out.untyped_storage().nbytes()) or out.requires_grad:
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
