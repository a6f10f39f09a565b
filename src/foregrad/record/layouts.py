"""Classes of layout, and the table that says for which of them torch's shape inference tells the truth.

A kernel chooses the strides of its results by itself, and shape inference describes kernels from memory. A sweep over
torch's operators compares the two for each torch version and type of device (see CONTRIBUTING.md). For each operator
the table names the layouts and dtypes of arguments with which they agreed throughout. What it does not name is tried
on real tensors (see `trials`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TABLES = Path(__file__).parent / "layout_tables"

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "half",
    torch.bfloat16: "half",
    torch.complex64: "complex",
    torch.complex128: "complex",
    torch.int64: "integer",
    torch.int32: "integer",
    torch.int16: "integer",
    torch.int8: "integer",
    torch.uint8: "integer",
    torch.bool: "bool",
}


def contiguous(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return in_order(size, range(len(size)))


def in_order(size: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dimensions lie in this order, the last of them innermost."""
    stride, step = [0] * len(size), 1
    for d in reversed(order):
        stride[d] = step
        step *= max(size[d], 1)
    return tuple(stride)


def layout_class(size: Sequence[int], stride: Sequence[int], lazy: bool = False) -> str:
    """The class of layout of a dense tensor, in words.

    >>> layout_class((2, 3), (3, 1)), layout_class((2, 3), (1, 2)), layout_class((2, 1), (1, 7))
    ('contiguous', 'permuted', 'permuted with ones')

    Args:
        size: Its sizes.
        stride: Its strides.
        lazy: Whether its conj or neg bit is set.
    """
    rank = f" {len(size)}d" if len(size) in (4, 5) else ""  # torch has memory formats for these
    ones = " with ones" if 1 in size else ""
    return f"{_way(tuple(size), tuple(stride), lazy)}{rank}{ones}"


def _way(size: tuple[int, ...], stride: tuple[int, ...], lazy: bool) -> str:
    if lazy:
        return "lazy"
    if 0 in size:
        return "empty"
    if stride == contiguous(size):
        return "contiguous"
    if any(step == 0 and n > 1 for n, step in zip(size, stride, strict=True)):
        return "expanded"
    if len(size) in (4, 5) and stride == in_order(size, (0, *range(2, len(size)), 1)):
        return "channels last"
    return "permuted" if fills_memory(size, stride) else "with gaps"


def fills_memory(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements fill a stretch of memory one by one, in some order of the dimensions.

    The stride of a dimension of size one leads nowhere, nor does one of size zero.
    """
    expected = 1
    for d in sorted((d for d in range(len(size)) if size[d] > 1), key=lambda d: (stride[d], size[d])):
        if stride[d] != expected:
            return False
        expected *= size[d]
    return True


@dataclass(frozen=True, slots=True)
class Row:
    """With which arguments shape inference is known to be right about an operator."""

    layouts: frozenset[str]
    dtypes: frozenset[str]

    def covers(self, layouts: Iterable[str], dtypes: Iterable[torch.dtype]) -> bool:
        """Whether it is with arguments like these."""
        return self.layouts.issuperset(layouts) and all(DTYPES.get(dtype) in self.dtypes for dtype in dtypes)


NOTHING_KNOWN = Row(frozenset(), frozenset())


def torch_version() -> str:
    """The version that a table belongs to: major.minor."""
    return ".".join(torch.__version__.split(".")[:2])


def table_file(version: str, device: str) -> Path:
    """Where the table for a torch version and a type of device is, if there is one."""
    return TABLES / f"torch-{version}-{device}.json"


@functools.cache
def table_for(device: str) -> Mapping[str, Row]:
    """The table for this torch and a type of device, by name of the operator. No table, and nothing is known."""
    file = table_file(torch_version(), device)
    if not file.exists():
        return {}
    return rows_in(json.loads(file.read_text()))


def rows_in(table: Mapping[str, Any]) -> dict[str, Row]:
    """The rows of a table as the sweep writes it: operators that agree with the same arguments stand together."""
    rows: dict[str, Row] = {}
    for group in table["agree"]:
        row = Row(frozenset(group["layouts"]), frozenset(group["dtypes"]))
        rows |= dict.fromkeys(group["operators"], row)
    return rows
