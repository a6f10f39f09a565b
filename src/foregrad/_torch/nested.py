"""Nested tensors that a program makes: their jagged sizes, and what torch keeps of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nested._internal import nested_tensor

from .fake import _make_wrapper_subclass
from .guards import Replaced, disable_modes
from .operators import without_function_modes

_nested_int_of = FakeTensor.get_nested_int


def _name_jagged_size(offsets: Any, *, coeff: Any = 1) -> Any:
    """The jagged size that belongs to a tensor of offsets without data.

    Torch names one only while its own fake mode is on, and with symbolic sizes. Where sizes are numbers, it is named as
    it is for real tensors.
    """
    if vars(offsets).get("_nested_int_memo") is None and offsets.fake_mode.shape_env is None:
        nested: Any = nested_tensor
        offsets.nested_int_memo = torch.SymInt(nested.NestedIntNode(nested._tensor_id_counter, 1))
        nested._tensor_id_counter += 1
    return _nested_int_of(offsets, coeff=coeff)


_jagged_sizes_named = Replaced(FakeTensor, "get_nested_int", _name_jagged_size)


_make_dummy = nested_tensor._nt_view_dummy


def _make_dummy_with_data() -> torch.Tensor:
    with disable_modes(), without_function_modes():
        return _make_dummy()


_dummy_has_data = Replaced(nested_tensor, "_nt_view_dummy", _make_dummy_with_data)


@contextlib.contextmanager
def nested_tensors_made() -> Iterator[None]:
    """Nested tensors can be made of tensors without data.

    Torch makes one tensor for all of them when it makes the first, which must not be one without data.
    """
    with _dummy_has_data, _jagged_sizes_named:
        yield


class NestedStandIn(torch.Tensor):
    """A tensor class of our own whose sizes its `__torch_dispatch__` tells, and which torch takes for a nested one."""

    is_nested = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Any:
        """One with the dtype and device of a tensor."""
        return _make_wrapper_subclass(
            cls, tensor.shape, dtype=tensor.dtype, device=tensor.device, dispatch_sizes_strides_policy="sizes"
        )


def nested_by_mask(batch: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The nested tensor of the strided layout that a padded batch is; which mask it is is not checked."""
    return torch._nested_tensor_from_mask(batch, rows, mask_check=False)
