"""Functions of torch that read lengths or places in C++, by operators that can be recorded: packed sequences, splits.

They are given the numbers, which the program has read before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.nn import functional as F

from .._torch import PACKS, PADS, RECURRENT, disable_modes, without_function_modes
from ..ops import aten

Read = Callable[[Tensor], Any]  # gives the numbers in a tensor
Known = tuple[Callable[..., Any], tuple[Any, ...]]  # a function, and its arguments with numbers

_MASKS = (torch.bool, torch.uint8)


def _places(sizes: Sequence[int], batch_first: bool) -> tuple[Tensor, Tensor]:
    """Where the rows of a packed sequence lie in the padded one."""
    steps = torch.tensor([step for step, size in enumerate(sizes) for _ in range(size)], dtype=torch.int64)
    entries = torch.tensor([entry for size in sizes for entry in range(size)], dtype=torch.int64)
    return (entries, steps) if batch_first else (steps, entries)


def _pack(read: Read, padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    numbers = read(lengths)
    with disable_modes(), without_function_modes():  # the sizes, or eager's error
        _, sizes = PACKS(torch.empty(padded.shape[:2]), torch.tensor(numbers, dtype=lengths.dtype), batch_first)
    counts = sizes.tolist()
    where = (place.to(padded.device) for place in _places(counts, batch_first))
    return padded[tuple(where)], torch.tensor(counts)


def _pad(
    read: Read, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total_length: int
) -> tuple[Tensor, Tensor]:
    counts = read(batch_sizes)
    with disable_modes(), without_function_modes():
        rows, sizes = torch.empty(data.shape[0]), torch.tensor(counts)
        padded, lengths = PADS(rows, sizes, batch_first, padding, total_length)
    where = tuple(place.to(data.device) for place in _places(counts, batch_first=False))
    steps, entries = padded.shape[::-1] if batch_first else padded.shape
    made = data.new_full((steps, entries, *data.shape[1:]), padding).index_put(where, data)
    return (made.transpose(0, 1) if batch_first else made), torch.tensor(lengths.tolist())


def _recurrent(function: Any) -> Callable[..., Any]:
    def run(read: Read, data: Tensor, second: Any, *others: Any) -> Any:
        if not isinstance(second, Tensor) or second.is_floating_point():  # the sequences are not packed
            return NotImplemented
        counts = read(second)
        with disable_modes(), without_function_modes():
            sizes = torch.tensor(counts)
        return function(data, sizes, *others)

    return run


def _split(read: Read, tensor: Tensor, places: Any, dim: int = 0) -> Any:
    return torch.tensor_split(tensor, read(places), dim) if isinstance(places, Tensor) else NotImplemented


READS_LENGTHS: dict[Any, Callable[..., Any]] = {
    PACKS: _pack,
    PADS: _pad,
    **{function: _recurrent(function) for function in RECURRENT},
    torch.tensor_split: _split,
    Tensor.tensor_split: _split,
}
"""By function: what does the same, given what reads numbers; `NotImplemented` where there are none to read."""


def _mean_ctc_loss(
    scores: Tensor,
    targets: Tensor,
    lengths: Any,
    wanted: Any,
    blank: int = 0,
    reduction: int | str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """The mean of a loss for each entry, by the lengths, with which torch fills a tensor in C++."""
    if reduction not in ("mean", 1) or isinstance(lengths, Tensor) or isinstance(wanted, Tensor):
        return NotImplemented
    losses = torch.ctc_loss(scores, targets, lengths, wanted, blank, 0, zero_infinity)
    counts = torch.tensor(wanted, dtype=losses.dtype, device=losses.device)
    return (losses / counts.clamp_min(1)).mean()


TAKES_LISTS: dict[Any, Callable[..., Any]] = {torch.ctc_loss: _mean_ctc_loss, F.ctc_loss: _mean_ctc_loss}
"""By function that makes a tensor of a list in C++: what does the same; `NotImplemented` where there is no list."""


def select_by_symbols(tensor: Tensor, where: Any) -> Any:
    """`tensor[where]` for symbols among slices and numbers, of which Python's own way would make numbers."""
    items = where if type(where) is tuple else (where,)
    kinds = {type(item) for item in items}
    if SymInt not in kinds or not kinds <= {SymInt, int, slice} or len(items) > tensor.dim():
        return NotImplemented
    dim, found = 0, tensor
    for item in items:
        if type(item) is not slice:
            found = found.select(dim, item)
            continue
        if item != slice(None):
            found = found[(*[slice(None)] * dim, item)]
        dim += 1
    return found


def assign_by_masks(tensor: Tensor, where: Any, value: Any) -> bool:
    """`tensor[where] = value` without a look at how many places there are, which Python's own way takes.

    Gives False where that is not for masks, slices and indices alone.
    """
    items = where if type(where) is tuple else (where,)
    if not isinstance(value, Tensor) or not all(isinstance(item, (Tensor, slice)) for item in items):
        return False
    masks = [item for item in items if isinstance(item, Tensor)]
    if not any(mask.dtype in _MASKS for mask in masks) or any(mask.dim() == 0 for mask in masks):
        return False
    covered = [item.dim() if isinstance(item, Tensor) and item.dtype in _MASKS else 1 for item in items]
    if sum(covered) > tensor.dim() or value.dim() > tensor.dim() - sum(covered) + len(covered) - len(masks) + 1:
        return False
    indices: list[Tensor | None] = []
    for item in items:
        if isinstance(item, slice):
            dim = sum(covered[: len(indices)])
            tensor = tensor[(*[slice(None)] * dim, item)]
            indices.append(None)
        else:
            indices.append(item)
    aten.index_put_.default(tensor, indices, value)
    return True
