"""FakeTensorMode with a witness: the lean engine, which knows how results lie in reality, sees every operator too.

Symbolic sizes, and the fake modes of front ends, leave no choice of the engine. But each symbol has a number behind it:
for these numbers the lean engine says, from its table or by trial, what an operator gives. Where FakeTensorMode says
something else, its result is made anew, with strides that are computed from the symbols in the same order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

from .._torch import FakeTensor, OpOverload, hint_of, new_fake_mode, sizes_told_apart
from ..errors import ForegradError, UnsupportedError
from ..ops import aten
from .engine import WORKSPACE, Engine
from .lean_engine import LeanEngine, kept
from .symbolic_results import SymbolicResults
from .tensor_meta import Fresh, Other, Part, Result, Several, Shared, TensorMeta, described, interned, mixture
from .trials import reconciled, strides_in_order

# Whose results have sizes of no number, where nothing may be decided by the size of what they take a part of.
_DECIDED = frozenset({aten.slice.Tensor, aten.slice_scatter.default, aten.select.int})


class SymbolicEngine(Engine):
    """FakeTensorMode, whose results lie as they do in reality."""

    @functools.cached_property
    def _stand_ins(self) -> dict[TensorMeta, FakeTensor]:
        return {}  # what the witness has seen, by what it knows of it

    @functools.cached_property
    def _results(self) -> SymbolicResults:
        return SymbolicResults(self.mode)

    @functools.cached_property
    def _witness(self) -> LeanEngine:
        return LeanEngine(new_fake_mode(None))

    def _answer(self, op: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        question = None if self.own_mode is None else self._results.question(kept(op), args, kwargs)
        if question is not None:
            known = self._results.answer(question, functools.partial(self._seen_by_witness, op, args, kwargs))
            if known is not NotImplemented:
                return known
        with sizes_told_apart() if op in _DECIDED else contextlib.nullcontext():
            out = self.infer(op, types, args, kwargs)
        if kept(op).triable:
            out = self._witnessed(op, args, kwargs, out)
        if question is not None:
            with contextlib.suppress(NoNumber):  # behind a size of the result
                self._results.keep(question, out, described(out, question.tensors, _meta_of))
        return out

    def _seen_by_witness(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the witness says for the numbers behind symbols."""
        try:
            given, named = _numbers((list(args), kwargs), [], [])
        except NoNumber:
            return None
        return self._testimony(op, given, named)

    def _witnessed(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        tensors: list[FakeTensor] = []
        metas: list[TensorMeta] = []
        try:
            given, named = _numbers((list(args), kwargs), tensors, metas)
        except NoNumber:
            return out
        if self._static and kept(op).believed(metas):
            return out
        real = self._testimony(op, given, named)
        if real is None:
            return out
        inferred = described(out, tensors, _meta_of)
        real = reconciled(inferred, real)
        if real == inferred:
            return out
        return self._made_anew(op, out, inferred, real, tensors)

    def _testimony(self, op: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Result | Several | None:
        """What an operator gives to tensors of these sizes, if the witness can tell."""
        witness = self._witness
        fakes: list[FakeTensor] = []

        def fake(value: Any) -> Any:
            if isinstance(value, TensorMeta):
                known = self._stand_ins.get(value)
                if known is None or any(known is other for other in fakes):
                    known = self._stand_ins[value] = witness.at(value)
                fakes.append(known)
                return known
            if isinstance(value, dict):
                return {name: fake(item) for name, item in value.items()}
            return [fake(item) for item in value] if isinstance(value, list) else value

        try:
            seen = witness.run(op, (FakeTensor,), tuple(fake(args)), fake(kwargs))
        except ForegradError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError):
            if mixture(op, [fake._foregrad_meta for fake in fakes]) is not None:  # type: ignore[attr-defined]
                raise  # FakeTensorMode did not
            return None  # the recorder asks eager about errors
        return described(seen, fakes, _meta_of)

    def _made_anew(self, op: Any, out: Any, inferred: Any, real: Any, tensors: Sequence[FakeTensor]) -> Any:
        """What FakeTensorMode gave, with the results that lie otherwise in reality made anew."""

        def anew(item: Any, guess: Result, fact: Result) -> Any:
            if guess == fact or isinstance(fact, Other) or isinstance(guess, Other):
                return item
            made = None
            match guess, fact:
                case (Fresh() | Part(), Fresh() | Part()) if guess.meta.size == fact.meta.size:
                    made = self._relaid(item, fact.meta, tensors)
                case (Shared(), Shared()) if guess.meta.size == fact.meta.size:
                    made = self._viewed(item, guess, fact, tensors)
                case (Fresh() | Part() | Shared(), Fresh() | Part() | Shared()) if type(guess) is type(fact):
                    made = _workspace(item, guess.meta, fact.meta)
            if made is None:
                raise UnsupportedError(
                    f"{op}: its results lie otherwise in memory than torch's shape inference says, and how they do for "
                    "other sizes is not known. Compile with dynamic=False."
                )
            return made

        if isinstance(real, Several) and isinstance(inferred, Several) and len(real.results) == len(inferred.results):
            return real.kind([anew(*each) for each in zip(out, inferred.results, real.results, strict=True)])
        return anew(out, inferred, real)

    def _relaid(self, item: Any, fact: TensorMeta, tensors: Sequence[FakeTensor]) -> Tensor | None:
        """A result with the strides, and the dtype, that it really has."""
        if fact.offset or fact.has_bits:
            return None
        stride = strides_in_order(fact, item.shape, _known_steps(tensors))
        return None if stride is None else self._strided(item.shape, stride, 0, fact.dtype, self.device_of(item))

    def _viewed(self, item: Any, guess: Shared, fact: Shared, tensors: Sequence[FakeTensor]) -> Tensor | None:
        """A view with the strides that it really has: only those of dimensions of size one can differ."""
        if guess.argument != fact.argument or guess.meta.offset != fact.meta.offset:
            return None
        steps = _known_steps([tensors[fact.argument], item])
        stride = list(item.stride())
        for d, (said, real) in enumerate(zip(guess.meta.stride, fact.meta.stride, strict=True)):
            if said != real:
                if guess.meta.size[d] != 1 or real not in steps:
                    return None
                stride[d] = steps[real]
        given = tensors[fact.argument], list(item.shape), stride, item.storage_offset()
        return self.infer(aten.as_strided.default, (FakeTensor,), given, {})


def _workspace(item: Any, guess: TensorMeta, fact: TensorMeta) -> Tensor | None:
    """A result that is a library's own bytes, how many only the library knows: shape inference says none.

    Nothing follows from their number but what the library makes of them. What really is there is noted, so that a
    tensor whose size does follow from it is found out.
    """
    bytes_only = guess.dtype is fact.dtype is torch.uint8
    if not bytes_only or guess.size != (0,) or len(fact.size) != 1:
        return None
    vars(item)[WORKSPACE] = fact
    return item


class NoNumber(Exception):
    """There is no number behind a symbol, or no metadata for a tensor."""


def _numbers(value: Any, tensors: list[FakeTensor], metas: list[TensorMeta]) -> Any:
    """Arguments with metadata for tensors and numbers for symbols."""
    if isinstance(value, Tensor):
        if type(value) is not FakeTensor or value.layout is not torch.strided:
            raise NoNumber
        tensors.append(value)
        metas.append(_meta_of(value))
        return metas[-1]
    if isinstance(value, SymInt):
        return _number(value)
    if isinstance(value, (SymFloat, SymBool)):
        if not value.node.has_hint():
            raise NoNumber
        return value.node.hint
    if isinstance(value, dict):
        return {name: _numbers(item, tensors, metas) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_numbers(item, tensors, metas) for item in value]
    return value


def _number(value: Any) -> int:
    if isinstance(value, SymInt) and not value.node.has_hint():
        raise NoNumber
    return hint_of(value)


def _meta_of(tensor: Any) -> TensorMeta:
    workspace: TensorMeta | None = vars(tensor).get(WORKSPACE)
    if workspace is not None:
        return workspace
    size, stride = (tuple(map(_number, numbers)) for numbers in (tensor.shape, tensor.stride()))
    bits = tensor.is_conj(), tensor.is_neg()
    return interned(size, stride, _number(tensor.storage_offset()), tensor.dtype, tensor.fake_device, *bits)


def _known_steps(tensors: Sequence[Any]) -> Mapping[int, Any]:
    """Strides, and the extents of dimensions, by the numbers behind them."""
    steps: dict[int, Any] = {1: 1}
    for tensor in tensors:
        for n, step in zip(tensor.shape, tensor.stride(), strict=True):
            steps.setdefault(_number(step), step)
            steps.setdefault(_number(n * step), n * step)
    return steps
