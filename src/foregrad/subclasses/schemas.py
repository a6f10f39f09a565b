"""Records about wrapper subclasses, in the words of the behavioural rules (T-2 to T-5).

They describe a compiled program to its users; nothing inside Foregrad reads them to decide anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .._torch import FakeTensor
from ..errors import VerificationError
from ..schemas import ViewAndMutationMeta
from .layout import Fixed, Layout, layout_of, leaves_of


@dataclass(frozen=True)
class SubclassCreationMeta:
    """How one wrapper is built from plain tensors of a flat list."""

    flat_tensor_start_idx: int
    arg_count: int
    attrs: Mapping[str, SubclassCreationMeta | Fixed | None]  # None for a plain tensor
    outer_size: tuple[Any, ...]
    outer_stride: tuple[Any, ...]
    meta: Any
    original_subclass: Tensor = field(compare=False)

    def __post_init__(self) -> None:
        if not all(isinstance(leaf, FakeTensor) for leaf in leaves_of(self.original_subclass)):
            raise VerificationError("the recorded instance of a subclass must hold fake tensors only")

    @property
    def subclass_type(self) -> type:
        """The class of the wrapper."""
        return type(self.original_subclass)

    def creation_fn(self, all_args: Sequence[Any], *, is_runtime: bool) -> Any:
        """The wrapper around its part of a flat list; autograd's state is copied unless it is for run time."""
        inner: dict[str, Any] = {}
        position = self.flat_tensor_start_idx
        for attr, record in self.attrs.items():
            if record is None:
                inner[attr] = all_args[position]
                position += 1
            elif isinstance(record, Fixed):
                inner[attr] = record.value
            else:
                inner[attr] = record.creation_fn(all_args, is_runtime=is_runtime)
                position += record.arg_count
        kind: Any = self.subclass_type
        built = kind.__tensor_unflatten__(inner, self.meta, self.outer_size, self.outer_stride)
        if not is_runtime:
            built.requires_grad_(self.original_subclass.requires_grad)
        return built


@dataclass(frozen=True)
class SubclassMeta:
    """What is known of a program over plain tensors that stands for one over subclasses."""

    fw_metadata: ViewAndMutationMeta
    grad_input_metas: list[int | SubclassCreationMeta] | None = None


@dataclass(frozen=True)
class SubclassTracingInfo:
    """A program over plain tensors, its arguments, and what is known of it where subclasses take part."""

    plain_tensor_trace_fn: Callable[..., Any]
    plain_tensor_args: Any
    maybe_subclass_meta: SubclassMeta | None


def creation_meta(wrapper: Tensor, start: int) -> SubclassCreationMeta:
    """The record of one wrapper whose plain tensors begin at a position."""
    return _creation_meta(wrapper, layout_of(wrapper), start)


def _creation_meta(wrapper: Any, layout: Layout, start: int) -> SubclassCreationMeta:
    attrs: dict[str, SubclassCreationMeta | Fixed | None] = {}
    position = start
    for attr, inner in layout.attrs:
        if isinstance(inner, Fixed):
            attrs[attr] = inner
            continue
        attrs[attr] = None if inner is None else _creation_meta(getattr(wrapper, attr), inner, position)
        position += 1 if inner is None else inner.leaves
    size, stride = tuple(wrapper.shape), tuple(wrapper.stride())
    return SubclassCreationMeta(start, layout.leaves, attrs, size, stride, layout.context, wrapper)
