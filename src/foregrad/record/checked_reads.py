"""Reads that each call compares: their values are worked out on the call's real tensors while it is recorded."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._torch import OpOverload, expression_of, hint_of, read_symbol
from ..abstract.engine import Engine
from ..errors import DataDependentError
from ..graph.reads import Read, sizes_of
from ..ops import aten
from ..stack_traces import Stack, where
from .refusals import WAY_OUT
from .replay import Replay, Unknown
from .retrace import Retrace, SizesAreExact, SizesAreRead

MOST_ELEMENTS = 4096
"""Of a list that is read, or an array."""

_COMPARED = frozenset({aten.linalg_lstsq.default})  # whose sizes are numbers of each program, and no symbols

SIZED_BY_DATA = frozenset(
    {
        *(aten.nonzero.default, aten.masked_select.default, aten.index.Tensor, aten.repeat_interleave.Tensor),
        *(aten._unique.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
        *(aten.unique_dim_consecutive.default, aten.bincount.default),
        *(aten._ctc_loss.Tensor, *_COMPARED),
    }
)
"""Operators whose results have sizes that depend on data: a call runs them between two parts."""

WRITES_BY_MASK = frozenset(
    {
        *(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default),
        *(aten.masked_scatter.default, aten.masked_scatter_.default),
    }
)
"""Operators that write where a mask, or one of several indices, says, and whose gradient is selected by it."""

MASKS = (torch.bool, torch.uint8)


Symbols = Literal["wanted", "given", "refused"]
"""Whether sizes that are read are symbols: they are to be, from the next recording on; they are; they cannot be."""


def _given(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, defaults included."""
    arguments = op._schema.arguments
    found = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return found | dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs


def _dims_of_data(op: OpOverload, given: dict[str, Any]) -> dict[int, int]:
    """For each result whose size depends on data, in which dimension it does: in all the same size."""
    if op is aten._ctc_loss.Tensor:
        return {1: 2}
    dim = given.get("dim")
    dims = {0: 0 if dim is None else dim % given["self"].dim()}
    return dims | {2: 0} if given.get("return_counts") else dims


def _strides(shape: Sequence[Any], columns: bool) -> list[Any]:
    """Of a result without gaps; in `columns`, its first dimension is the innermost."""
    stride: list[Any] = [1] * len(shape)
    order = list(range(len(shape))) if columns else list(reversed(range(len(shape))))
    for inner, outer in itertools.pairwise(order):
        stride[outer] = stride[inner] * shape[inner]
    return stride


def require_fitting_masks(tensor: Tensor, masks: Sequence[Tensor | None]) -> None:
    """Raise eager's error for a mask of another shape than what it selects from: places in it would not tell."""
    dim = 0
    for mask in masks:
        if mask is None or mask.dtype not in MASKS:
            dim += 1
            continue
        for i, size in enumerate(mask.shape):
            if hint_of(size) != hint_of(tensor.shape[dim + i]):
                raise IndexError(
                    f"The shape of the mask {[*map(hint_of, mask.shape)]} at index {i} does not match the shape of the "
                    f"indexed tensor {[*map(hint_of, tensor.shape)]} at index {dim + i}"
                )
        dim += mask.dim()


def _refused_later(what: str, stack: Stack) -> DataDependentError:
    return DataDependentError(
        f"{what} of a recorded tensor, at {where(stack)}, in a backward that is recorded later: it follows from a "
        f"gradient, or the first backward has not read it. {WAY_OUT}"
    )


class CheckedReads:
    """What a program has read so far."""

    def __init__(
        self, replay: Replay, engine: Engine, symbols: Symbols, most: int, changing: frozenset[str] = frozenset()
    ) -> None:
        """Nothing was read yet.

        Args:
            replay: Gives the values of recorded tensors.
            engine: That the recording is made on.
            symbols: Whether sizes are symbols.
            most: So many reads.
            changing: Places where other calls have read other whole numbers.
        """
        self.changing = changing
        self._replay, self._engine, self._symbols, self._most = replay, engine, symbols, most
        self.reads: list[Read] = []
        self._known: dict[Any, Any] = {}  # values that were read, by what was read of which tensors
        self._of_backward: dict[Any, Any] = {}  # the same for backwards, by how tensors follow from the forward's
        self._writes = 0  # when they were
        self.follow: Callable[[float], Any] | None = None  # gives what stands for a float that is not compared

    @property
    def are_symbols(self) -> bool:
        """Whether sizes are symbols."""
        return self._symbols == "given"

    @property
    def is_over(self) -> bool:
        """Whether the real tensors are gone: what is recorded now is a backward that was not asked for before."""
        return self._replay.is_over

    def release(self) -> None:
        """Let go of all tensors."""
        self._replay.release()
        self._known.clear()

    def number(
        self, what: str, look: Callable[..., Any], tensors: Sequence[Tensor], stack: Stack, backward: bool
    ) -> tuple[Any, Read | None]:
        """The value that `look` gives for recorded tensors, and the read; None if it was read before.

        What a backward reads of values that the forward determines is read at the end of the forward. Other backwards
        of the same recording read the same.
        """
        origins = (what, *map(self._replay.origin, tensors)) if backward else None
        if self._replay.is_over and origins in self._of_backward:
            return self._of_backward[origins], None
        found = self._number(what, look, tensors, stack, None if backward else self.follow, backward)
        if origins is not None:
            self._of_backward[origins] = found[0]
        return found

    def _number(
        self,
        what: str,
        look: Callable[..., Any],
        tensors: Sequence[Tensor],
        stack: Stack,
        follow: Callable[[float], Any] | None,
        backward: bool,
    ) -> tuple[Any, Read | None]:
        if what == "tolist()" and tensors[0].numel() > MOST_ELEMENTS:
            raise DataDependentError(
                f"tolist() of {tensors[0].numel()} elements, at {where(stack)}: this is too many to compare. {WAY_OUT}"
            )
        with self._caught_up(what, stack):
            known_by = look.args if isinstance(look, functools.partial) else ()
            key = what, repr(known_by), *map(id, tensors)  # the recording holds them
            if self._replay.writes == self._writes and key in self._known:
                return self._known[key], None
            value = look(*map(self._replay.value, tensors))
        if self._replay.writes != self._writes:
            self._known.clear()
        self._writes = self._replay.writes
        is_number = what == "item()" and type(value) is float and follow is not None
        found, symbols = value, ()
        if is_number and follow is not None:
            found = follow(value)
        elif not backward and self._become_symbols(what, value, stack):
            found, symbols = self._in_symbols(value)
        read = self._add(what, look, value, stack, is_number=is_number, symbols=symbols)
        self._known[key] = found
        return found, read

    def changes(self, stack: Stack) -> bool:
        """Whether whole numbers that are read there are to be symbols."""
        return bool(self.changing) and self._symbols != "refused" and where(stack) in self.changing

    def _become_symbols(self, what: str, value: Any, stack: Stack) -> bool:
        """Whether a value consists of whole numbers for which other calls have read others."""
        numbers = value if what == "tolist()" and type(value) is list else [value] if what == "item()" else []
        if not numbers or any(type(number) is not int for number in numbers) or not self.changes(stack):
            return False
        if self._symbols == "wanted":
            raise Retrace(SizesAreRead())
        return True

    def _in_symbols(self, value: Any) -> tuple[Any, Any]:
        """Symbols for whole numbers, and how each is found in what is read."""
        assert self._engine.shape_env is not None
        name, several = f"read {len(self.reads)}", type(value) is list
        made = [
            read_symbol(self._engine.shape_env, f"{name}[{i}]" if several else name, number, is_size=False)
            for i, number in enumerate(value if several else [value])
        ]
        places = [f"[{i}]" if several else "" for i in range(len(made))]
        found = tuple((str(expression_of(number)), place) for number, place in zip(made, places, strict=True))
        return (made if several else made[0]), found

    def results(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], stack: Stack, backward: bool
    ) -> tuple[Any, Read | None]:
        """Abstract results of an operator, of the sizes that they have in this call, and the read."""
        origins = (op, self._replay.origin((*args, *kwargs.items()))) if backward else None
        if self._replay.is_over and origins in self._of_backward:
            return self._of_backward[origins], None
        if self.is_over:
            raise _refused_later(str(op), stack)
        found = self._results(op, args, kwargs, stack)
        if origins is not None:
            self._of_backward[origins] = found[0]
        return found

    def _results(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], stack: Stack) -> tuple[Any, Read]:
        exact = self._symbols == "refused" or op in _COMPARED
        if self._symbols == "wanted" and not exact:
            raise Retrace(SizesAreRead())
        with self._caught_up(str(op), stack):
            named = {name: self._replay.value(item) for name, item in kwargs.items()}
            real = op(*self._replay.value(args), **named)
        if exact:
            out, symbols = self._like(real), ()
        else:
            out, symbols = self._like_with_symbol(op, args, kwargs, real)
        self._replay.bind(out, real)
        return out, self._add(str(op), op, sizes_of(real), stack, sized=True, symbols=symbols)

    def _like(self, real: Any) -> Any:
        if isinstance(real, Tensor):
            return self._engine.strided(real, real.stride(), real.device)
        return tuple(map(self._like, real))

    def _like_with_symbol(self, op: OpOverload, args: Any, kwargs: Any, real: Any) -> tuple[Any, Any]:
        """Abstract results with one symbol for the size that is data, and how that is found in the results."""
        several = not isinstance(real, Tensor)
        dims = _dims_of_data(op, _given(op, args, kwargs))
        shown = list(real) if several else [real]
        first, dim = next(iter(dims.items()))
        number = shown[first].shape[dim]
        assert self._engine.shape_env is not None
        size = read_symbol(self._engine.shape_env, f"read {len(self.reads)}", number, is_size=True)
        results = []
        for i, tensor in enumerate(shown):
            shape: list[Any] = list(tensor.shape)
            if i in dims:
                shape[dims[i]] = size
            stride = _strides(shape, columns=op is aten.nonzero.default)
            if number > 1 and tensor.numel() and tuple(map(hint_of, stride)) != tensor.stride():
                raise Retrace(SizesAreExact())
            results.append(self._engine.laid_out(shape, stride, tensor.dtype, tensor.device))
        found = f"{f'[{first}]' if several else ''}.size({dim})"
        return (tuple(results) if several else results[0]), ((str(expression_of(size)), found),)

    @contextlib.contextmanager
    def _caught_up(self, what: str, stack: Stack) -> Iterator[None]:
        try:
            with self._replay.real_tensors():
                self._replay.catch_up()
                yield
        except Unknown:
            raise DataDependentError(
                f"{what} of a recorded tensor that follows from no input of the call, but from a gradient, at "
                f"{where(stack)}. {WAY_OUT}"
            ) from None

    def _add(self, what: str, look: Callable[..., Any], value: Any, stack: Stack, **more: Any) -> Read:
        if len(self.reads) >= self._most:
            raise DataDependentError(
                f"the program reads data more than {self._most} times, at last at {where(stack)}: a loop there may not "
                "end. Raise foregrad.config.max_reads, or compile with fallback='eager'."
            )
        self.reads.append(Read(len(self.reads), what, look, value, where(stack), **more))
        return self.reads[-1]
