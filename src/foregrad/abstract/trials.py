"""Ask a kernel: run an operator on small real tensors that lie in memory as its arguments do."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload, kernels_only, quiet_inference, set_lazy_bits
from ..errors import UnsupportedError
from ..ops import Kind, aten, op_info
from .tensor_meta import (
    DTYPES,
    Fresh,
    Other,
    Part,
    Result,
    Several,
    TensorMeta,
    can_be_tried,
    described,
    fills_memory,
    interned,
    is_internal,
    may_be_tried,
    metas_in,
    mixture,
)

# ---------------------------------------------------------------------------------------------------------------------
# Smaller tensors that stand in for large ones of the same class of layout, and what they tell about those.
#
# Sizes are replaced consistently: equal ones stay equal, zeros and ones stay what they are. The order of the
# dimensions in memory, gaps between them and expanded dimensions stay too.
_KEPT = 8  # sizes up to this stay: kernel sizes, groups
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)


class NoStandIn(Exception):
    """Nothing smaller can stand in."""


def shrinkings(metas: Sequence[TensorMeta]) -> Iterator[Mapping[int, int]]:
    """Ways to replace large sizes by small ones: by ones without a common factor, or by fractions of themselves."""
    large = sorted({n for meta in metas for n in meta.size if n > _KEPT})
    if large and len(large) <= len(_PRIMES):
        yield {n: min(n, prime) for n, prime in zip(large, _PRIMES, strict=False)}
    yield {n: _halved(n) for n in large}


def _halved(n: int) -> int:
    while n > 2 * _KEPT and n % 2 == 0:
        n //= 2
    return n


def smaller(value: Any, sizes: Mapping[int, int]) -> Any:
    """What takes the place of an argument: a tensor, or a number that is the size of one."""
    if isinstance(value, TensorMeta):
        return _smaller_tensor(value, sizes)
    return sizes.get(value, value) if type(value) is int else value


def _smaller_tensor(meta: TensorMeta, sizes: Mapping[int, int]) -> TensorMeta:
    if meta.dtype is torch.uint8 and len(meta.size) == 1:  # maybe a library's workspace, which it reads as it sees fit
        return meta
    size = tuple(sizes.get(n, n) for n in meta.size)
    stride = list(meta.stride)
    extents = {1: 1}  # of what lies further inside: in the large tensor, and in the small one
    large = small = 1
    for d in sorted((d for d, n in enumerate(size) if n > 1 and meta.stride[d]), key=lambda d: meta.stride[d]):
        if meta.stride[d] < large:
            raise NoStandIn("its elements overlap")
        stride[d] = small if meta.stride[d] == large else 2 * small
        large, small = meta.stride[d] * meta.size[d], stride[d] * size[d]
        extents[large] = small
    for d, n in enumerate(size):
        if n == 1:
            stride[d] = extents.get(meta.stride[d], meta.stride[d])
    return interned(size, tuple(stride), meta.offset % 4, meta.dtype, meta.device, meta.conj, meta.neg)


def alike(small: Any, large: Any) -> bool:
    """Whether two answers are of the same form: the same words for tensors of the same ranks, with the same ones."""
    if isinstance(small, Several) and isinstance(large, Several):
        same = len(small.results) == len(large.results)
        return same and all(alike(a, b) for a, b in zip(small.results, large.results, strict=True))
    if type(small) is not type(large):
        return False
    if not isinstance(small, Fresh):
        return small == large
    return [min(n, 2) for n in small.meta.size] == [min(n, 2) for n in large.meta.size]


def carried_over(
    real: Any, guess: Any, given: Sequence[TensorMeta], inferred: Any, large: Sequence[TensorMeta]
) -> Result | Several | None:
    """What an operator gives to large tensors if it gives `real` to small ones.

    Args:
        real: What it gives to the small ones.
        guess: What shape inference says to the small ones.
        given: The small ones.
        inferred: What shape inference says to the large ones.
        large: The large ones.
    """
    if isinstance(real, Several):
        parts = zip(real.results, guess.results, inferred.results, strict=True)
        results = tuple(carried_over(r, g, given, i, large) for r, g, i in parts)
        known = all(result is not None or r is None for result, r in zip(results, real.results, strict=True))
        return Several(real.kind, results) if known else None  # type: ignore[arg-type]
    if real == guess:
        return inferred
    if not (isinstance(real, Fresh) and isinstance(inferred, Fresh) and alike(real, inferred)):
        return None
    size, meta = inferred.meta.size, real.meta
    stride = strides_in_order(meta, size, _strides_of_ones(given, large))
    if stride is None:
        return None
    return Fresh(interned(size, stride, 0, meta.dtype, meta.device, meta.conj, meta.neg))


def _strides_of_ones(given: Sequence[TensorMeta], large: Sequence[TensorMeta]) -> dict[int, int]:
    """Strides of dimensions of size one: those in small tensors to those in large ones."""
    pairs = zip(given, large, strict=True)
    return {a.stride[d]: b.stride[d] for a, b in pairs for d, n in enumerate(a.size) if n == 1}


def strides_in_order(like: TensorMeta, size: Sequence[Any], ones: Mapping[int, Any]) -> tuple[Any, ...] | None:
    """The strides of a tensor of other sizes that lies as a tensor does, if that fills its memory.

    Args:
        like: The tensor.
        size: The other sizes.
        ones: Further strides that dimensions of size one may have taken over: here, and there.
    """
    if not fills_memory(like.size, like.stride):
        return None
    stride: list[Any] = [0] * len(size)
    step: Any = 1
    steps: dict[int, Any] = {1: 1}
    for d in sorted((d for d, n in enumerate(like.size) if n > 1), key=lambda d: like.stride[d]):
        stride[d] = step
        step = step * size[d]
        steps[like.stride[d] * like.size[d]] = step
    for d, n in enumerate(like.size):
        if n <= 1:
            known = steps.get(like.stride[d], ones.get(like.stride[d]))
            if known is None:
                return None
            stride[d] = known
    return tuple(stride)


# ---------------------------------------------------------------------------------------------------------------------
# What an operator really gives: it is run on real tensors that lie as its arguments do.
#
# Shape inference describes kernels, and not all of it is right: strides above all. Where it is not known to be right
# (see `layouts`) the kernel itself is asked, once for each case, and its answer is what is recorded. Small arguments
# are tried as they are. For large ones smaller tensors of the same class stand in, and the answer is carried over.
#
# A trial touches nothing of the user's: its tensors are its own, and random numbers that it draws are put back.
SMALL = 1 << 16  # elements of arguments and results together that are tried as they are
LARGE = 1 << 25  # and where nothing smaller can stand in
HUGE = 1 << 28  # and where nothing smaller may: as much as the program itself will take

Answer = Result | Several
_PLAIN_ERRORS = (RuntimeError, TypeError, ValueError, NotImplementedError)
Infer = Callable[["Case"], Answer]  # what shape inference says to a case


@dataclass(frozen=True)
class Case:
    """A call of an operator: metadata stands in the places of its tensors."""

    op: OpOverload
    args: Sequence[Any]
    kwargs: dict[str, Any]

    @property
    def metas(self) -> list[TensorMeta]:
        """The metadata of its tensors, in their order; a tensor that is given twice is there twice."""
        return list(metas_in((self.args, list(self.kwargs.values()))))

    @property
    def is_plain(self) -> bool:
        """Whether nothing is among its arguments but metadata and plain values."""
        return all(isinstance(value, _PLAIN) for value in _leaves((self.args, list(self.kwargs.values()))))

    @property
    def elements(self) -> int:
        """How much memory its tensors take."""
        return sum(meta.reach for meta in self.metas)

    def mapped(self, change: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
        """Its arguments, each of them changed."""

        def inside(value: Any) -> Any:
            return [inside(item) for item in value] if isinstance(value, (list, tuple)) else change(value)

        return [inside(a) for a in self.args], {name: inside(a) for name, a in self.kwargs.items()}


_PLAIN: tuple[type, ...] = (
    *(TensorMeta, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def settle(case: Case, inferred: Answer, infer: Infer) -> Answer:
    """What an operator gives, by trial, where shape inference says `inferred`."""
    room = case.elements + sum(meta.reach for meta in metas_in([inferred]))
    answer: Answer | None = None
    if room > SMALL and op_info(case.op).kind is not Kind.VIEW:
        pointwise = "pointwise" in op_info(case.op).traits
        relies = is_internal(case.op) and len(case.metas) > 1 and not pointwise  # on sizes that belong together
        answer = None if relies else _by_stand_ins(case, inferred, infer)
        if answer is None and room > (HUGE if relies else LARGE):
            raise UnsupportedError(_unknown(case.op, "the tensors are too large"))
    return reconciled(inferred, answer if answer is not None else tried(case))


def reconciled(inferred: Answer, real: Answer) -> Answer:
    """What a kernel gives, in the words of shape inference where they mean the same.

    About results that there are no words for, a tensor with a known value among them, shape inference has the last one.
    So it has about the size of the memory in which a result lies alone: kernels reuse memory as they see fit.
    """
    if isinstance(inferred, Several) and isinstance(real, Several):
        if len(inferred.results) != len(real.results):
            return real
        numbers = [result.number for result in real.results if isinstance(result, Part)]
        pairs = zip(inferred.results, real.results, strict=True)
        return Several(inferred.kind, tuple(_reconciled(a, b, numbers) for a, b in pairs))
    return _reconciled(inferred, real, []) if not isinstance(real, Several) else real


def _reconciled(inferred: Any, real: Result, numbers: Sequence[int]) -> Result:
    if isinstance(inferred, Other):
        return inferred
    alone = isinstance(real, Fresh) or (isinstance(real, Part) and numbers.count(real.number) < 2)
    same = isinstance(inferred, (Fresh, Part)) and alone and inferred.meta is real.meta  # type: ignore[union-attr]
    return inferred if same else real


def tried(case: Case) -> Answer:
    """What an operator gives to tensors like these, if it does not refuse all values that come to mind.

    What it says to every mixture of dtypes, whatever the values, it would say to the program too.
    """
    said: list[tuple[type[Exception], str]] = []
    case = _with_one_value(case)
    for fill in fills(case.op, case.metas):
        try:
            return run_for_real(case, fill)
        except Exception as error:  # not kept: its frames lead to the recorded tensors
            said.append((type(error), str(error)))
    kind, text = said[-1]
    if mixture(case.op, case.metas) is not None and len(set(said)) == 1 and kind in _PLAIN_ERRORS:
        raise kind(text)
    same = kind(text) if len(set(said)) == 1 and kind in _PLAIN_ERRORS else None  # it may be what eager says
    raise UnsupportedError(_unknown(case.op, f"{kind.__name__}: {next(iter(text.splitlines()), '')}")) from same


def _with_one_value(case: Case) -> Case:
    """A write by masks, of one value for all places: how many there are is data. The result lies as it does anyway."""
    if case.op is not aten.index_put.default or not any(meta.dtype in _MASKS for meta in metas_in(case.args[1])):
        return case
    values = case.args[2]
    one = interned((), (), 0, values.dtype, values.device, values.conj, values.neg)
    return Case(case.op, [*case.args[:2], one, *case.args[3:]], case.kwargs)


def tried_twice(case: Case) -> Answer | None:
    """What an operator gives where there is no shape inference to compare with: it must not depend on values."""
    metas = case.metas
    if not may_be_tried(case.op) or not can_be_tried(case.op, metas) or case.elements > LARGE:
        return None
    answers: list[Answer] = []
    for fill in fills(case.op, metas):
        with contextlib.suppress(Exception):
            answers.append(run_for_real(case, fill))
    return answers[0] if len(answers) > 1 and all(answer == answers[0] for answer in answers) else None


def _unknown(op: OpOverload, why: str) -> str:
    return (
        f"{op}: torch's shape inference is not known to be right about how its results lie in memory for arguments "
        f"like these, and it could not be tried ({why}). Pass contiguous tensors, or compile with fallback='eager'."
    )


# ------------------------------------------------------------------------------------------------ real tensors
Fill = Callable[[Tensor], Any]


def _ordinary(flat: Tensor) -> Any:
    return flat.fill_(0.5 if flat.is_floating_point() or flat.is_complex() else flat.dtype is torch.bool)


def _alternating(flat: Tensor) -> Any:
    flat.fill_(0)
    if flat.is_floating_point() or flat.is_complex() or flat.dtype is torch.bool:
        flat[::2] = 1


def _ones(flat: Tensor) -> Any:
    return flat.fill_(1)


def _nothing(flat: Tensor) -> Any:
    return flat.fill_(0)


def _first_rows(flat: Tensor) -> Any:
    return flat.fill_(0.5 if flat.is_floating_point() or flat.is_complex() else 1)


_MASKS = (torch.bool, torch.uint8)
_PIVOTS = frozenset(
    {"pivots", "LU_pivots"}
)  # names of arguments that hold the numbers of rows, which LAPACK counts from one


_WRITES_VALUES_BY_MASK = frozenset(
    {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default, aten._unsafe_index_put.default}
)


def _so_many(places: int, flat: Tensor) -> Any:
    """As many places in a mask as there are values to be written there."""
    return flat[:places].fill_(True) if flat.dtype is torch.bool else _ordinary(flat)


def fills(op: OpOverload, metas: Sequence[TensorMeta]) -> list[Fill]:
    """Values to try. Integers may be indices, and a kernel that is given one out of range may end the process."""
    if any(argument.name in _PIVOTS for argument in op._schema.arguments):
        return [_first_rows]
    masks = [meta for meta in metas if meta.dtype is torch.bool]
    if op in _WRITES_VALUES_BY_MASK and len(masks) == 1 and metas[-1].size:
        return [functools.partial(_so_many, metas[-1].size[0])]
    in_range = "pointwise" in op_info(op).traits or all(
        meta.device.type == "cpu" and min(meta.size, default=2) > 1 for meta in metas
    )
    if op is aten.masked_scatter.default:  # how many elements it takes is data, and none are always there
        return [_nothing]
    return [_ordinary, _alternating, *([_ones] if in_range else [])]


def run_for_real(case: Case, fill: Fill) -> Answer:
    """What an operator gives to real tensors."""
    views = op_info(case.op).kind is Kind.VIEW
    tensors: list[Tensor] = []

    def real(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            tensors.append(_untouched(value) if views else _filled(value, fill))
            return tensors[-1]
        return torch.Generator(value.device) if isinstance(value, torch.Generator) else value

    metas = case.metas
    with _unnoticed(metas):
        args, kwargs = case.mapped(real)
        out = case.op(*args, **kwargs)
        return described(out, tensors, lambda tensor: _meta_of(tensor, metas[0].device if views else tensor.device))


def _filled(meta: TensorMeta, fill: Fill) -> Tensor:
    offset = meta.offset % 4  # what a kernel makes anew does not depend on more of it
    flat = torch.zeros(meta.reach - meta.offset + offset, dtype=meta.dtype, device=meta.device)
    if meta.dtype in DTYPES:
        fill(flat)
    return set_lazy_bits(flat.as_strided(meta.size, meta.stride, offset), meta.conj, meta.neg)


def _untouched(meta: TensorMeta) -> Tensor:
    """Views look at no data, and are the same on all devices."""
    device = "cpu" if meta.reach <= LARGE else "meta"
    flat = torch.empty(meta.reach, dtype=meta.dtype, device=device)
    return set_lazy_bits(flat.as_strided(meta.size, meta.stride, meta.offset), meta.conj, meta.neg)


def _meta_of(tensor: Tensor, device: torch.device) -> TensorMeta:
    size, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return interned(size, stride, offset, tensor.dtype, device, tensor.is_conj(), tensor.is_neg())


@contextlib.contextmanager
def _unnoticed(metas: Sequence[TensorMeta]) -> Iterator[None]:
    """No mode, no generator and no reader of warnings sees what is done. The grad mode stays: some kernels read it."""
    with kernels_only(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generators = [torch.default_generator]
        generators += [
            torch.cuda.default_generators[d] for d in {m.device.index or 0 for m in metas if m.device.type == "cuda"}
        ]
        before = [generator.get_state() for generator in generators]
        try:
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                if not torch.equal(generator.get_state(), state):
                    generator.set_state(state)


# -------------------------------------------------------------------------------------------- smaller stand-ins
def _by_stand_ins(case: Case, inferred: Answer, infer: Infer) -> Answer | None:
    """What smaller tensors of the same class tell about large ones."""
    for sizes in shrinkings(case.metas):
        with contextlib.suppress(Exception):
            small = Case(case.op, *case.mapped(functools.partial(smaller, sizes=sizes)))
            with quiet_inference():
                guess = infer(small)
            real = tried(small)
            if alike(guess, inferred):
                found = carried_over(real, guess, small.metas, inferred, case.metas)
                if found is not None:
                    return found
    return None
