"""What operators give to tensors with symbols in their sizes, where FakeTensorMode need not be asked.

Its shape inference takes milliseconds for an operator there: a decomposition of dozens of operators, each of which
multiplies and compares symbols. What it has said once it says again for the same symbols, and what it assumed about
them is noted already. For common operators a rule gives the sizes, and the witness the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor

from .._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    backend_settings,
    deterministic_enabled,
    expression_of,
    hint_of,
    make_fake,
    run_on_meta,
)
from ..ops import aten, op_info
from ..values import frozen
from .engine import WORKSPACE
from .lean_engine import Kept
from .shape_rules import LOOSE_RULES, RULES, results_by_rule
from .tensor_meta import Fresh, Part, Result, Same, Several, Shared, TensorMeta, contiguous


class NoQuestion(Exception):
    """There is an argument that no key can describe."""


class SymbolicMeta(NamedTuple):
    """Metadata of a tensor, written out: equal if it is written alike. To compare symbols themselves adds guards."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    conj: bool
    neg: bool

    @property
    def is_contiguous(self) -> bool:
        """Whether it is for any number behind a symbol."""
        return self.stride == contiguous(self.size) and not (self.conj or self.neg)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a result lies, in symbols."""

    size: Sequence[Any]
    stride: Sequence[Any]
    offset: Any
    known: TensorMeta  # for the numbers behind the symbols


@dataclass(frozen=True, slots=True)
class New:
    """A result in memory of its own."""

    geometry: Geometry


@dataclass(frozen=True, slots=True)
class ViewOf:
    """A result that looks at the memory of a tensor among the arguments."""

    argument: int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Question:
    """An operator and what it is given, written out."""

    op: OpOverload
    given: tuple[Any, ...]
    args: list[Any]  # the same, with metadata and expressions in the places of tensors and symbols
    kwargs: dict[str, Any]
    tensors: list[FakeTensor]
    key: Any

    @property
    def is_plain(self) -> bool:
        """Whether there are no symbols."""
        return not _has_symbols((self.args, [*self.kwargs.values()]))

    @property
    def metas(self) -> list[SymbolicMeta]:
        """Of the tensors that are arguments by themselves."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, SymbolicMeta)]


class SymbolicResults:
    """What was said in one recording."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, Any] = {}

    def question(self, kept: Kept, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Question | None:
        """What is asked, if an answer can be kept."""
        if kept.why_not is not None or torch.is_inference_mode_enabled():
            return None
        tensors: list[FakeTensor] = []
        try:
            given: list[Any] = self._written(list(args), tensors)
            named: dict[str, Any] = {name: self._written(value, tensors) for name, value in kwargs.items()}
        except NoQuestion:
            return None
        settings = torch.get_default_dtype(), deterministic_enabled(), torch.is_grad_enabled()
        backends = backend_settings() if kept.reads_backends else ()
        return Question(kept.op, args, given, named, tensors, (kept, settings, backends, frozen(given), frozen(named)))

    def answer(self, question: Question, testimony: Testimony) -> Any:
        """The results, where FakeTensorMode need not be asked."""
        entry = self._known.get(question.key, NotImplemented)
        if entry is NotImplemented:
            entry = _by_witness(question, testimony) if question.is_plain else _by_rule(question, testimony)
            if entry is NotImplemented:
                return NotImplemented
            self._known[question.key] = entry
        return self._built(entry, question.tensors)

    def keep(self, question: Question, out: Any, words: Result | Several) -> None:
        """Note what was said; `words` describe it for the numbers behind the symbols."""
        again: list[FakeTensor] = []
        if op_info(question.op).written and self._written(question.given, again) != question.args:
            return  # an argument has changed its shape
        entry = _in_symbols(words, out, question.tensors)
        if entry is not NotImplemented:
            self._known[question.key] = entry

    def _written(self, value: Any, tensors: list[FakeTensor]) -> Any:
        kind = type(value)
        if kind is FakeTensor:
            other = value.fake_mode is not self._mode or value.layout is not torch.strided
            if other or value.constant is not None or WORKSPACE in vars(value):
                raise NoQuestion
            tensors.append(value)
            return written(value)
        if isinstance(value, (list, tuple)):
            return [self._written(item, tensors) for item in value]
        if kind is SymInt:
            if not value.node.has_hint():
                raise NoQuestion
            return expression_of(value)
        if isinstance(value, (Tensor, torch.SymFloat, torch.SymBool, torch.ScriptObject)):
            raise NoQuestion
        return value

    def _built(self, entry: Any, tensors: Sequence[FakeTensor]) -> Any:
        match entry:
            case Several(kind, results):
                return kind([self._built(result, tensors) for result in results])
            case Same(argument):
                return tensors[argument]
            case New(lies):
                known = lies.known
                memory = torch.empty((known.reach,), dtype=known.dtype, device="meta")
                return make_fake(self._mode, memory.as_strided(lies.size, lies.stride, lies.offset), known.device)
            case ViewOf(argument, lies):
                args = tensors[argument], lies.size, lies.stride, lies.offset
                return make_fake(self._mode, run_on_meta(self._mode, _AS_STRIDED, args, {}), lies.known.device)
        return None


_AS_STRIDED = aten.as_strided.default


def written(tensor: FakeTensor) -> SymbolicMeta:
    """The metadata of a tensor, written out."""
    size, stride = (tuple(map(_expression, numbers)) for numbers in (tensor.shape, tensor.stride()))
    lies = size, stride, _expression(tensor.storage_offset())
    return SymbolicMeta(*lies, tensor.dtype, tensor.fake_device, tensor.is_conj(), tensor.is_neg())


def _expression(number: Any) -> Any:
    return number if type(number) is int else expression_of(number)


def _has_symbols(value: Any) -> bool:
    """Whether there are expressions among arguments that are written out."""
    if isinstance(value, (list, tuple)):
        return any(map(_has_symbols, value))
    return hasattr(value, "free_symbols")


Testimony = Callable[[], Result | Several | None]
"""What the witness says to a question, for the numbers behind the symbols; None if it cannot tell."""


def _in_symbols(result: Result | Several, tensor: Any, arguments: Sequence[Tensor]) -> Any:
    """A result with its geometry in symbols; `NotImplemented` where it lies in a way that there is no word for.

    That of `view_as_real` looks at memory of another dtype.
    """
    if isinstance(tensor, Tensor) and WORKSPACE in vars(tensor):
        return NotImplemented
    match result:
        case Several(kind, results):
            return _several(kind, (_in_symbols(*each, arguments) for each in zip(results, tensor, strict=True)))
        case None | Same():
            return result
        case Fresh(meta) if not meta.has_bits:
            return New(_geometry(tensor, meta))
        case Shared(argument, meta) if not meta.has_bits and meta.dtype is arguments[argument].dtype:
            return ViewOf(argument, _geometry(tensor, meta))
    return NotImplemented


def _several(kind: type, results: Iterable[Any]) -> Any:
    found = tuple(results)
    return NotImplemented if NotImplemented in found else Several(kind, found)


def _geometry(tensor: Tensor, known: TensorMeta) -> Geometry:
    return Geometry(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), known)


def _by_witness(question: Question, testimony: Testimony) -> Any:
    """Results of arguments without symbols, as the witness describes them, who has known them for long."""

    def word(fact: Any, tensors: Sequence[FakeTensor]) -> Any:
        match fact:
            case None | Same():
                return fact
            case Fresh(meta) if not meta.has_bits:
                return New(Geometry(meta.size, meta.stride, 0, meta))
            case Shared(argument, meta) if not meta.has_bits and meta.dtype is tensors[argument].dtype:
                return ViewOf(argument, Geometry(meta.size, meta.stride, meta.offset, meta))
        return NotImplemented

    if not question.tensors or (real := testimony()) is None:
        return NotImplemented
    if not isinstance(real, Several):
        return word(real, question.tensors)
    if any(isinstance(result, (Same, Shared)) for result in real.results):
        return NotImplemented
    return _several(real.kind, (word(result, question.tensors) for result in real.results))


# ---------------------------------------------------------------------------------------------------------------------
# Rules. They see expressions in the places of symbols, which are equal if they are written alike. What is not is left
# to FakeTensorMode, which notes what has to hold of the symbols.
Sizes = list[tuple[Any, ...] | None] | tuple[Any, ...]


def _by_rule(question: Question, testimony: Testimony) -> Any:
    """Results of a common operator: sizes by a rule, and all else as the witness says it is here."""
    if question.op in VIEWS:
        return _viewed(question, testimony)
    sizes = _sizes_by_rule(question)
    return NotImplemented if sizes is None else _computed(question, sizes, testimony())


def _sizes_by_rule(question: Question) -> Sizes | None:
    """The sizes of the results, all contiguous, in a plain case."""
    op, args = question.op, [_as_if_dense(arg) for arg in question.args]
    metas = [_as_if_dense(meta) for meta in question.metas]
    if len(metas) < len(question.tensors) or not metas:
        return None
    if op in RULES or op in LOOSE_RULES:
        try:
            sizes = results_by_rule(op, args, question.kwargs, metas)
        except TypeError:  # which is larger, of two numbers with symbols in them, is no question for a rule
            sizes = None
        if sizes is not None:
            return sizes
    keeps = question.kwargs.get("memory_format") in (None, torch.preserve_format, torch.contiguous_format)
    if "pointwise" in op_info(op).traits and keeps and all(meta.is_contiguous for meta in metas):
        return _broadcast([meta.size for meta in metas])
    return None


def _as_if_dense(value: Any) -> Any:
    """A number in the shape of a tensor, the gradient of a sum for one, has no say in how results lie."""
    expanded = isinstance(value, SymbolicMeta) and value.size and not any(value.stride)
    return value._replace(stride=contiguous(value.size)) if expanded else value


def _broadcast(sizes: Sequence[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """The size of what is computed of tensors element by element, if it is plain to see."""
    rank = max(map(len, sizes))
    found: list[Any] = []
    for dim in range(-rank, 0):
        several = {size[dim] for size in sizes if len(size) >= -dim} - {1}
        if len(several) > 1:
            return None
        found.append(several.pop() if several else 1)
    return tuple(found)


def _symbols_in(tensors: Sequence[Tensor]) -> dict[Any, SymInt]:
    """The symbolic sizes of tensors, by how they are written."""
    sizes: list[Any] = [n for tensor in tensors for n in tensor.shape]
    return {expression_of(n): n for n in sizes if type(n) is SymInt}


def _computed(question: Question, sizes: Sizes, real: Result | Several | None) -> Any:
    """Results of these sizes, all else as the witness says."""
    if real is None or isinstance(real, Several) is not isinstance(sizes, list):
        return NotImplemented
    symbols = _symbols_in(question.tensors)
    if not isinstance(real, Several):
        return _laid_out(sizes, real, symbols, question)
    results = (_laid_out(size, fact, symbols, question) for size, fact in zip(sizes, real.results, strict=True))
    return _several(real.kind, results)


def _laid_out(size: Any, fact: Result, symbols: dict[Any, SymInt], question: Question) -> Any:
    """A result of this size without gaps, if it is that for the numbers behind the symbols."""
    if size is None or fact is None:
        return None if size is fact else NotImplemented
    if isinstance(fact, Same):
        return fact if question.metas[fact.argument].size == size else NotImplemented
    if not isinstance(fact, (Fresh, Part)) or any(n not in symbols for n in size if type(n) is not int):
        return NotImplemented
    shape = [n if type(n) is int else symbols[n] for n in size]
    hints, known = tuple(map(hint_of, shape)), fact.meta
    if known.has_bits or known.offset or known.size != hints or known.stride != contiguous(hints):
        return NotImplemented
    return New(Geometry(shape, contiguous_in_symbols(shape), 0, known))


def contiguous_in_symbols(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a contiguous tensor; sizes may be symbols, of which nothing is asked."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        stride[dim] = step
        if dim:
            step = step * (shape[dim] if type(shape[dim]) is SymInt else max(shape[dim], 1))
    return tuple(stride)


# ---------------------------------------------------------------------------------------------------------------------
# Views: what they look at follows from the size and the strides of what they are taken of, and from nothing else.
Sides = tuple[Sequence[Any], Sequence[Any]]  # a size, and the strides


def _permute(size: Sequence[Any], stride: Sequence[Any], dims: Sequence[int]) -> Sides:
    return [size[dim] for dim in dims], [stride[dim] for dim in dims]


def _transpose(size: Sequence[Any], stride: Sequence[Any], one: int, other: int) -> Sides:
    dims = list(range(len(size)))
    if dims:
        dims[one], dims[other] = dims[other], dims[one]
    return _permute(size, stride, dims)


def _unsqueeze(size: Sequence[Any], stride: Sequence[Any], dim: int) -> Sides:
    dim = dim % (len(size) + 1)
    step = size[dim] * stride[dim] if dim < len(size) else 1
    return [*size[:dim], 1, *size[dim:]], [*stride[:dim], step, *stride[dim:]]


def _expand(size: Sequence[Any], stride: Sequence[Any], wanted: Sequence[Any], implicit: bool = False) -> Sides | None:
    new = len(wanted) - len(size)
    shown, steps = [*wanted[:new]], [0] * new
    for own, step, other in zip(size, stride, wanted[new:], strict=True):
        is_kept = _expression(own) == _expression(other) or (type(other) is int and other == -1)
        if not is_kept and (type(own) is not int or own != 1):
            return None
        shown.append(own if is_kept else other)
        steps.append(step if is_kept else 0)
    return None if any(type(n) is int and n <= 1 for n in wanted[:new]) else (shown, steps)


VIEWS: dict[OpOverload, Callable[..., Sides | None]] = {
    aten.detach.default: lambda size, stride: (size, stride),
    aten.alias.default: lambda size, stride: (size, stride),
    aten.t.default: lambda size, stride: (size[::-1], stride[::-1]),
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
}
"""Each gives the size and the strides of the view; none where it is not plain to see."""


def _viewed(question: Question, testimony: Testimony) -> Any:
    """A view of the first argument, where the witness takes it for one."""
    tensor, real = question.tensors[0], testimony()
    if not isinstance(real, Shared) or real.meta.has_bits or question.kwargs:
        return NotImplemented
    sides = VIEWS[question.op](tuple(tensor.shape), tensor.stride(), *question.given[1:])
    if sides is None or any(
        tuple(map(hint_of, own)) != fact for own, fact in zip(sides, (real.meta.size, real.meta.stride), strict=True)
    ):
        return NotImplemented
    return ViewOf(0, Geometry(*sides, tensor.storage_offset(), real.meta))
