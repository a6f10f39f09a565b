"""Graphs that are launched as CUDA graphs: what is copied in, what is copied out, and which capture serves a call.

A capture works on addresses. Parameters, and what a captured forward keeps for its backward, stay where they are; any
other input is copied to a place of the capture's own, and results are copied out of it, so that they are the caller's.
What is kept for a backward is handed out in place: until nobody holds it any more, the capture is not launched again,
and another one serves calls that come meanwhile. A call that no capture fits runs as it is, which is always right.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._torch import (
    GraphMemory,
    being_captured,
    captured,
    copy_all,
    current_stream_of,
    kernel_settings,
    new_memory,
    set_lazy_bits,
    storage_of,
    storage_users,
    unowned,
    wait_for,
)
from ..errors import UnsupportedError
from ..locks import Lock
from ..runtime.compilers import Boxed

CAPTURES = 16  # of one graph, for sizes and addresses that change
WASTED = 8  # captures that were launched once and never again, after which no more are made


# ---------------------------------------------------------------------------------------------------------------------
# Memory, element by element.
def in_full(tensor: Tensor) -> Tensor:
    """All elements of a tensor, each once: those that it shows several times, as expanded tensors do, are one."""
    return tensor.as_strided((_extent(tensor),), (1,)) if _repeats(tensor) else tensor


def place_like(tensor: Tensor) -> Tensor:
    """Memory of its own for what a tensor shows, in the same layout."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _extent(tensor: Tensor) -> int:
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))


def _repeats(tensor: Tensor) -> bool:
    """Whether elements may lie at the same place: each dimension must step over all smaller ones."""
    reach = 1
    for stride, n in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if n == 1:
            continue
        if stride < reach:
            return tensor.numel() > 0
        reach = stride * (n - 1) + reach
    return False


# ---------------------------------------------------------------------------------------------------------------------
# What becomes of a result of a capture.
@dataclass(frozen=True, slots=True)
class _Number:
    """No tensor: the same at each call."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument, or a view of one: the caller's own, whose versions autograd counts."""

    index: int
    size: Sequence[int]
    stride: Sequence[int]
    shift: int  # of its first element, from that of the argument

    def of(self, args: Sequence[Any]) -> Tensor:
        given: Tensor = args[self.index]
        if given.size() == self.size and given.stride() == self.stride and not self.shift:
            return given
        return given.as_strided(self.size, self.stride, given.storage_offset() + self.shift)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a backward will read where it is, and results that share its memory."""

    index: int
    bits: tuple[bool, bool] | None  # whether it is read conjugated, and negated, if it is either


@dataclass(frozen=True, slots=True)
class _Copied:
    """A result, as the caller gets it: a copy."""

    index: int
    bits: tuple[bool, bool] | None


@dataclass(eq=False)
class Capture:
    """One capture of a graph: the places that it works on, and what launches it."""

    in_place: Sequence[int]  # inputs that must lie at
    addresses: Sequence[int]
    copied: Sequence[int]  # inputs that are copied to
    places: Sequence[Tensor]
    numbers: Sequence[Any]
    settings: tuple[Any, ...]
    launch: Callable[[], None]
    results: Sequence[_Number | _Argument | _Kept | _Copied]
    kept: Sequence[Tensor]
    copies: Sequence[Tensor]
    launches: int = 0

    def __post_init__(self) -> None:
        self._into = [in_full(place) for place in self.places]
        self._out_of = [in_full(copy) for copy in self.copies]
        self._layouts = [(place.size(), place.stride()) for place in self.places]
        self._repeated = [_repeats(place) for place in self.places]
        self._shows_again = any(map(_repeats, self.copies))
        alone = torch.empty(1)
        own = collections.Counter(map(storage_of, self.kept))
        self._memories = [*own]
        self._own_users = [storage_users(storage_of(alone)) - 1 + count for count in own.values()]

    @property
    def is_free(self) -> bool:
        """Whether nobody else holds what the last launch left for a backward."""
        return all(map(operator.le, map(storage_users, self._memories), self._own_users))

    def fits(self, args: Sequence[Any], numbers: Sequence[Any], settings: tuple[Any, ...]) -> bool:
        """Whether it computes what the graph would compute with these arguments."""
        return (
            [args[i].data_ptr() for i in self.in_place] == self.addresses
            and [(args[i].size(), args[i].stride()) for i in self.copied] == self._layouts
            and numbers == self.numbers
            and settings == self.settings
        )

    def run(self, args: list[Any]) -> list[Any]:
        """Copy in, launch, copy out."""
        if self.places:
            sources = [args[i] for i in self.copied]
            if any(self._repeated):
                sources = [in_full(s) if again else s for s, again in zip(sources, self._repeated, strict=True)]
            copy_all(self._into, sources)
        self.launch()
        self.launches += 1
        copies = [place_like(copy) for copy in self.copies]
        if copies:
            copy_all([in_full(copy) for copy in copies] if self._shows_again else copies, self._out_of)
        kept = [tensor.data for tensor in self.kept]  # each a tensor of its own, at version zero
        return [self._result(result, args, kept, copies) for result in self.results]

    def _result(self, result: Any, args: Sequence[Any], kept: Sequence[Tensor], copies: Sequence[Tensor]) -> Any:
        match result:
            case _Copied(index, bits):
                return set_lazy_bits(copies[index], *bits) if bits else copies[index]
            case _Kept(index, bits):
                return set_lazy_bits(kept[index], *bits) if bits else kept[index]
            case _Argument():
                return result.of(args)
            case _:
                return result.value


# ---------------------------------------------------------------------------------------------------------------------
# One graph, and its captures.
@dataclass(eq=False)
class SharedPlaces:
    """What the graphs of one program know of each other: memory that stays where it is, by its address."""

    addresses: set[int] = field(default_factory=set)

    def add(self, tensor: Tensor) -> None:
        self.addresses.add(tensor.untyped_storage().data_ptr())

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.addresses


_memories: dict[tuple[torch.device, int], tuple[GraphMemory, Lock]] = {}  # by device and stream
_memories_lock = Lock()
_failures: list[str] = []  # after each, generators have other states than those that earlier captures know


def _memory_of(device: torch.device) -> tuple[GraphMemory, Lock]:
    key = device, current_stream_of(device)
    found = _memories.get(key)
    if found is None:
        with _memories_lock:
            found = _memories.setdefault(key, (new_memory(device), Lock()))
    return found


@dataclass(eq=False)
class ReplayedGraph:
    """A compiled graph that is captured when it is called a second time in the same way, and launched from then on."""

    run: Boxed
    phase: str
    device: torch.device
    fixed: frozenset[int]  # inputs that stay where they are
    saved: frozenset[int]  # outputs that a backward reads
    generators: Sequence[torch.Generator]
    shared: SharedPlaces
    on_failure: Callable[[UnsupportedError], None]  # raises it, or tells the user
    _boxed_call: bool = True
    _captures: dict[int, list[Capture]] = field(default_factory=dict)  # by stream, the latest used first
    _seen: set[Any] = field(default_factory=set)
    _wasted: int = 0

    def __call__(self, args: list[Any]) -> Any:
        if being_captured() or self._wasted > WASTED:
            return self.run(args)
        memory, lock = _memory_of(self.device)
        with lock:  # of all graphs that work in this memory
            numbers = [arg for arg in args if not isinstance(arg, Tensor)]
            settings = len(_failures), *kernel_settings()
            captures = self._captures.setdefault(id(memory), [])
            capture = next((c for c in captures if c.fits(args, numbers, settings) and c.is_free), None)
            if capture is None and self._comes_again(args, numbers, settings, id(memory)):
                capture = self._capture(args, numbers, settings, memory)
                if capture is not None:
                    self._make_room(captures)
                    captures.insert(0, capture)
            elif capture is not None and captures[0] is not capture:
                captures.remove(capture)
                captures.insert(0, capture)
            if capture is not None:
                results = capture.run(args)
                args.clear()
                return results
        return self.run(args)

    def _comes_again(self, args: Sequence[Any], numbers: Sequence[Any], settings: Any, stream: int) -> bool:
        """Whether such a call was seen before: the first one sets up what a capture may not."""
        tensors = [(i, arg) for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        layouts = tuple([arg.data_ptr() if i in self.fixed else (arg.size(), arg.stride()) for i, arg in tensors])
        call = layouts, tuple(numbers), settings, stream
        if call in self._seen:
            return True
        if len(self._seen) >= 4 * CAPTURES:
            self._seen.clear()
        self._seen.add(call)
        return False

    def _make_room(self, captures: list[Capture]) -> None:
        if len(captures) < CAPTURES:
            return
        idle = [capture for capture in captures if capture.is_free] or captures
        wait_for(self.device)  # it may still run
        self._wasted += idle[-1].launches < 2
        captures.remove(idle[-1])

    def _capture(
        self, args: Sequence[Any], numbers: Sequence[Any], settings: tuple[Any, ...], memory: GraphMemory
    ) -> Capture | None:
        tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        in_place = [i for i in tensors if i in self.fixed or self.shared.holds(args[i])]
        copied = [i for i in tensors if i not in {*in_place}]
        places = {i: place_like(args[i]) for i in copied}
        given = [places.get(i, arg) for i, arg in enumerate(args)]
        try:
            launch, outputs = captured(lambda: self.run(list(given)), memory, self.generators)
        except Exception as error:
            self._wasted = WASTED + 1  # it would fail again
            _failures.append(self.phase)
            self.on_failure(
                UnsupportedError(
                    f"the {self.phase} graph cannot be captured in a CUDA graph: {type(error).__name__}: {error} It "
                    "waits for the device, or works on the CPU. Leave such a part outside of what is compiled, or "
                    "compile with another backend."
                )
            )
            return None
        results, kept, copies = self._sorted(list(outputs), given, tensors)
        for tensor in (*kept, *(args[i] for i in self.fixed)):
            self.shared.add(tensor)
        addresses = [args[i].data_ptr() for i in in_place]
        every = [places[i] for i in copied]
        return Capture(in_place, addresses, copied, every, numbers, settings, launch, results, kept, copies)

    def _sorted(
        self, outputs: Sequence[Any], given: Sequence[Any], tensors: Sequence[int]
    ) -> tuple[list[Any], list[Tensor], list[Tensor]]:
        """What each output is, those that stay in place, and those that are copied out."""
        memories = {(_address(given[i]), given[i].dtype): i for i in reversed(tensors) if given[i].numel()}
        saved = {_address(outputs[i]) for i in self.saved if isinstance(outputs[i], Tensor)}
        results: list[Any] = []
        kept: dict[int, Tensor] = {}
        copies: dict[int, Tensor] = {}
        for output in outputs:
            if not isinstance(output, Tensor):
                results.append(_Number(output))
                continue
            bits = output.is_conj(), output.is_neg()
            index = memories.get((_address(output), output.dtype)) if output.numel() and not any(bits) else None
            if index is not None:
                shift = output.storage_offset() - given[index].storage_offset()
                results.append(_Argument(index, output.size(), output.stride(), shift))
                continue
            case, group = (_Kept, kept) if _address(output) in saved else (_Copied, copies)
            if id(output) not in group:
                group[id(output)] = set_lazy_bits(output, *bits)  # once more takes them away
            results.append(case(list(group).index(id(output)), bits if any(bits) else None))
        alone = [tensor.data for tensor in kept.values()]  # a view keeps what it was taken from
        return results, alone, [unowned(copy) for copy in copies.values()]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
