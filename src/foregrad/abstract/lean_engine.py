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
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    UnsupportedOperatorException,
    backend_settings,
    deterministic_enabled,
    put_gate,
    without_own_cache,
)
from ..ops import Kind, op_info, tensors_in
from .engine import Engine, EngineReport
from .lean_tensors import LeanTensorFactory, gate, is_lean, null_storage, run_mirrored, to_fake_tensors
from .shape_rules import LOOSE_RULES, RULES, results_by_rule
from .tensor_meta import (
    NOTHING_KNOWN,
    RESULTS,
    Fresh,
    Part,
    Result,
    Same,
    Several,
    Shared,
    TensorMeta,
    can_be_tried,
    contiguous,
    described,
    intern,
    interned,
    may_be_tried,
    mixture,
    table_for,
    why_unkept,
)
from .trials import Case, settle, tried_twice


class Kept:
    """What the engine knows about an operator, and what stands for it in keys: to hash an operator takes longer."""

    __slots__ = ("chosen", "confirmed", "name", "op", "reads_backends", "ruled", "triable", "why_not")

    def __init__(self, op: OpOverload) -> None:
        self.op = op  # kept, so that its id stays its own
        self.name = str(op)
        self.why_not = why_not(op)
        self.reads_backends = reads_backends(op)
        self.chosen = self.reads_backends and not op._schema.name.endswith("mm")
        self.ruled = op in RULES or op in LOOSE_RULES
        self.triable = may_be_tried(op)
        self.confirmed: set[tuple[Any, ...]] = set()  # mixtures for which its kernel did as inferred

    def believed(self, metas: Sequence[TensorMeta]) -> bool:
        """Whether shape inference is known to be right for such arguments, or there is no kernel to ask."""
        if not self.triable or not can_be_tried(self.op, metas):
            return True
        row = table_for(metas[0].device.type).get(self.name, NOTHING_KNOWN)
        if not row.covers([meta.layout_class for meta in metas], [meta.dtype for meta in metas]):
            return False
        # The table says nothing of mixtures: shape inference may let pass what raises, give results another dtype, or
        # let them lie as the wrong one of its arguments does.
        return not self._mixes(metas) or _dtypes_and_layouts(metas) in self.confirmed

    def confirm(self, metas: Sequence[TensorMeta]) -> None:
        """The kernel has done with such arguments what shape inference says."""
        if self._mixes(metas):
            self.confirmed.add(_dtypes_and_layouts(metas))

    def _mixes(self, metas: Sequence[TensorMeta]) -> bool:
        """Whether arguments of different dtypes, or that lie in different orders, come together."""
        if mixture(self.op, metas) is not None:
            return True
        return len(metas) > 1 and self.op not in LOOSE_RULES and lie_in_different_orders(metas)


def _no_view(op: OpOverload, entry: Any) -> str | None:
    """Why nothing is kept of a view whose result was seen in other memory: of the next one, writes would be lost."""
    return "a view in other memory" if op_info(op).kind is Kind.VIEW and isinstance(entry, (Fresh, Part)) else None


def _dtypes_and_layouts(metas: Sequence[TensorMeta]) -> tuple[Any, ...]:
    return tuple((meta.dtype, meta.layout_class, order_of(meta)) for meta in metas)


def order_of(meta: TensorMeta) -> tuple[int, ...]:
    """The dimensions of a tensor as they follow each other in memory, but for those of size one."""
    dims = [d for d, n in enumerate(meta.size) if n > 1]
    return tuple(sorted(dims, key=lambda d: -meta.stride[d]))


def lie_in_different_orders(metas: Sequence[TensorMeta]) -> bool:
    """Whether two dimensions follow each other in one tensor, and the other way round in another of the same rank.

    >>> cpu = torch.device("cpu")
    >>> one, other = (interned((2, 3), stride, 0, torch.float32, cpu) for stride in ((3, 1), (1, 2)))
    >>> lie_in_different_orders([one, other]), lie_in_different_orders([one, one])
    (True, False)
    """
    if len({(meta.size, meta.stride) for meta in metas}) == 1:
        return False
    orders = {(len(meta.size), order) for meta in metas if len(order := order_of(meta)) > 1}
    return any(
        rank == other_rank and [d for d in order if d in other] != [d for d in other if d in order]
        for rank, order in orders
        for other_rank, other in orders
    )


_KEPT: dict[int, Kept] = {}  # by id of the operator


def kept(op: OpOverload) -> Kept:
    """What the engine knows about an operator."""
    return _KEPT.get(id(op)) or _KEPT.setdefault(id(op), Kept(op))


def why_not(op: OpOverload) -> str | None:
    """Why the results of an operator are not kept, if they are not."""
    info = op_info(op)
    if op.namespace not in ("aten", "prims"):
        return "its shape inference is not torch's own"
    if info.kind is Kind.RESHAPE or "out" in info.traits:
        return "it may change the shape of its arguments"
    if "objects" in info.traits:
        return "it takes script objects"
    if op._schema.name.startswith("aten::as_strided_"):
        return "what it may do depends on the size of a storage"
    return None


def reads_backends(op: OpOverload) -> bool:
    """Whether the layout of the results may depend on which libraries are switched on."""
    name = op._schema.name
    return any(part in name for part in ("conv", "norm", "rnn", "lstm", "gru", "attention", "cudnn", "mkldnn", "mm"))


def chosen_by_backends(op: Any) -> bool:
    """Whether an operator runs in one library or another; those that multiply matrices lie the same in each."""
    kept = _KEPT.get(id(op))
    return (kept.chosen if kept is not None else reads_backends(op)) if isinstance(op, OpOverload) else False


_BY_VALUE = frozenset({int, str, type(None), torch.dtype, torch.layout, torch.memory_format})
_BY_TYPE_AND_VALUE = frozenset({float, bool, complex})  # 1.0 and True are equal to 1, and give other dtypes
_UNKNOWN = object()
NO_SHAPES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@dataclass
class Counts:
    """How often the table was asked, and which operators it was not asked about, with the reason."""

    hits: int = 0
    misses: int = 0
    by_operator: dict[str, str] = field(default_factory=dict)


class LeanEngine(Engine):
    """The fake engine behind a table of what it has answered before."""

    name = "lean"
    results = RESULTS

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__(without_own_cache(mode), own=True)
        put_gate(mode, gate)
        self.counts = Counts()
        self._maker = LeanTensorFactory(mode, self.withheld)

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
        return [
            self.shown([t])[0] if is_lean(t) else to_fake_tensors(super(LeanEngine, self).shown([t])[0])
            for t in tensors
        ]

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
        tensors: list[FakeTensor] = []
        key = self._key(op, args, kwargs, tensors)
        if isinstance(key, str):
            return self._run_unknown(op, types, args, kwargs, key)
        entry = self.results.get(key, _UNKNOWN)
        if entry is _UNKNOWN:
            return self._fill(key, op, types, args, kwargs, tensors)
        self.counts.hits += 1
        return self._build(entry, tensors)

    def strides(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Sequence[int] | None]:
        key = self._key(op, args, kwargs, [])
        entry: Any = _UNKNOWN if isinstance(key, str) else self.results.get(key, _UNKNOWN)
        words: Sequence[Any] = entry.results if type(entry) is Several else (entry,)
        if all(type(word) in (Fresh, Part, Shared) for word in words):
            return [word.meta.stride for word in words]
        return super().strides(op, args, kwargs)

    # --------------------------------------------------------------------------------------------- asking
    def _key(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[FakeTensor]
    ) -> tuple[Any, ...] | str:
        """What a call has in the table, or why it has nothing there. Notes its tensors."""
        known_of = _KEPT.get(id(op)) or kept(op)
        if known_of.why_not is not None:
            return known_of.why_not
        key: list[Any] = [known_of, torch.get_default_dtype(), deterministic_enabled(), torch.is_grad_enabled()]
        known = self._describe(args, key, tensors)
        if known and kwargs:
            key.append(len(kwargs))
            key.extend(kwargs)
            known = self._describe(kwargs.values(), key, tensors)
        if not known:
            return "an argument with a value, or of an unknown kind"
        if torch.is_inference_mode_enabled():
            return "inference mode"
        if known_of.reads_backends:
            key.append(backend_settings())
        return tuple(key)

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

    def _meta_of(self, tensor: FakeTensor) -> TensorMeta | None:
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
            storages: dict[int, torch.UntypedStorage] = {}
            return entry.kind([self._build_part(result, tensors, storages) for result in entry.results])
        return None if entry is None else self._build_part(entry, tensors, {})

    def _build_part(self, entry: Any, tensors: Sequence[FakeTensor], storages: dict[int, torch.UntypedStorage]) -> Any:
        if type(entry) is not Part:
            return self._build(entry, tensors)
        if entry.number not in storages:
            storages[entry.number] = null_storage(entry.nbytes, entry.meta.device)
        return self._maker.at(storages[entry.number], entry.meta)

    # ---------------------------------------------------------------------------------------------- learning
    def _direct(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return run_mirrored(self._maker, self.infer, op, types, args, kwargs)

    def _run_unknown(self, op: Any, types: Any, args: Any, kwargs: Any, reason: str) -> Any:
        self.counts.by_operator.setdefault(str(op), reason)
        out = self._direct(op, types, args, kwargs)
        if op_info(op).written:
            for tensor in _fakes_in(args, kwargs):
                self.forget(tensor)
        return self._as_in_reality(op, args, kwargs, out)

    def _as_in_reality(self, op: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """What an operator gives whose results are not kept, where shape inference has said `out`."""
        if not kept(op).triable:
            return out
        tensors = _fakes_in(args, kwargs)
        if any(tensor.layout is not torch.strided for tensor in tensors):  # nothing lies in strides there
            return out
        case = _case(op, args, kwargs)
        if not case.is_plain or self._believes(kept(op), case.metas):
            return out
        inferred = described(out, tensors, intern)
        entry = settle(case, inferred, self._inferred)
        if entry != inferred:
            return self._corrected(out, inferred, entry, tensors)
        kept(op).confirm(case.metas)
        return out

    def _fill(
        self, key: tuple[Any, ...], op: Any, types: Any, args: Any, kwargs: Any, tensors: Sequence[FakeTensor]
    ) -> Any:
        self.counts.misses += 1
        metas: list[TensorMeta] = [tensor._foregrad_meta for tensor in tensors]  # type: ignore[attr-defined]
        believed = self._believes(key[0], metas)
        plain = key[0].ruled and not any(meta.has_bits for meta in metas)
        ruled = _by_rule(op, args, kwargs, tensors) if plain and believed else None
        if ruled is not None:
            return self._build(self.results.add(key, ruled), tensors)
        try:
            out = self._direct(op, types, args, kwargs)
        except NO_SHAPES:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError):
            entry = self._despite_error(_case(op, args, kwargs))
            if entry is None:
                raise
            return self._build(self.results.add(key, entry), tensors)
        if op_info(op).written and not all(m.describes(t) for m, t in zip(metas, tensors, strict=True)):
            for tensor in tensors:
                self.forget(tensor)
            return out
        inferred = entry = described(out, tensors, intern)
        if not believed:
            entry = settle(_case(op, args, kwargs), inferred, self._inferred)
            if entry == inferred:
                key[0].confirm(metas)
        reason = _no_view(op, entry) or why_unkept(entry)
        if reason is None:
            self.results.add(key, entry)
        else:
            self.counts.by_operator.setdefault(str(op), reason)
        return out if entry == inferred else self._corrected(out, inferred, entry, tensors)

    def _believes(self, kept: Kept, metas: Sequence[TensorMeta]) -> bool:
        """Whether what shape inference says needs no trial."""
        return kept.believed(metas)

    def _despite_error(self, case: Case) -> Any:
        """What an operator gives that shape inference refuses, if its kernel does not."""
        entry = tried_twice(case)
        return entry if entry is not None and why_unkept(entry) is None else None

    def at(self, meta: TensorMeta) -> FakeTensor:
        """A fresh tensor with this metadata."""
        return self._maker.at(null_storage(meta.reach * meta.dtype.itemsize, meta.device), meta)

    def _inferred(self, case: Case) -> Any:
        """What shape inference says to a case."""
        tensors: list[FakeTensor] = []

        def lean(value: Any) -> Any:
            if isinstance(value, TensorMeta):
                tensors.append(self.at(value))
                return tensors[-1]
            return value

        args, kwargs = case.mapped(lean)
        return described(self._direct(case.op, (FakeTensor,), tuple(args), kwargs), tensors, intern)

    def _corrected(self, out: Any, inferred: Any, entry: Any, tensors: Sequence[FakeTensor]) -> Any:
        """What an operator gave, with the results that lie otherwise in reality made anew."""
        storages: dict[int, torch.UntypedStorage] = {}

        def anew(item: Any, guess: Result, fact: Result) -> Any:
            if guess == fact:
                return item
            if torch.is_inference_mode_enabled():
                return self._genuine(fact, tensors)
            return self._build_part(fact, tensors, storages)

        if isinstance(entry, Several):
            return entry.kind([anew(*each) for each in zip(out, inferred.results, entry.results, strict=True)])
        return anew(out, inferred, entry)

    def _genuine(self, fact: Any, tensors: Sequence[FakeTensor]) -> Any:
        """A result that is an inference tensor, as those that are made in inference mode are."""
        if isinstance(fact, Same):
            return tensors[fact.argument]
        if fact is None:
            return None
        meta = fact.meta
        if isinstance(fact, Shared):
            given = tensors[fact.argument], list(meta.size), list(meta.stride), meta.offset
            return self._direct(torch.ops.aten.as_strided.default, (FakeTensor,), given, {})
        return self._strided(meta.size, meta.stride, meta.offset, meta.dtype, meta.device)


def _case(op: OpOverload, args: Any, kwargs: Any) -> Case:
    """A call, with metadata in the places of its tensors."""

    def replaced(value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return vars(value).get("_foregrad_meta") or intern(value)
        return [replaced(item) for item in value] if isinstance(value, (list, tuple)) else value

    return Case(op, [replaced(a) for a in args], {name: replaced(a) for name, a in kwargs.items()})


def _by_rule(op: OpOverload, args: Sequence[Any], kwargs: Any, tensors: Sequence[FakeTensor]) -> Fresh | Several | None:
    """What an operator gives by its own rule, if the case is plain."""
    metas: list[TensorMeta] = [tensor._foregrad_meta for tensor in tensors]  # type: ignore[attr-defined]
    given = [arg._foregrad_meta if type(arg) is FakeTensor else arg for arg in args]  # type: ignore[attr-defined]
    sizes = results_by_rule(op, given, kwargs, metas) if metas else None
    if sizes is None:
        return None

    def fresh(size: tuple[int, ...]) -> Fresh:
        return Fresh(interned(size, contiguous(size), 0, metas[0].dtype, metas[0].device, False, False))

    if isinstance(sizes, list):
        return Several(tuple, tuple(None if size is None else fresh(size) for size in sizes))
    return fresh(sizes)


def _fakes_in(args: Any, kwargs: Any) -> list[FakeTensor]:
    return [tensor for tensor in tensors_in((args, list(kwargs.values()))) if type(tensor) is FakeTensor]
