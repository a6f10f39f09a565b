"""Nested tensors that a program makes: their jagged sizes, and what torch keeps of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .guards import Replaced, disable_modes

_NESTED = "torch.nested._internal.nested_tensor"

_nested_int_of = FakeTensor.get_nested_int


def _name_jagged_size(offsets: Any, *, coeff: Any = 1) -> Any:
    """The jagged size that belongs to a tensor of offsets without data.

    Torch names one only while its own fake mode is on, and with symbolic sizes. Where sizes are numbers, it is named as
    it is for real tensors.
    """
    if vars(offsets).get("_nested_int_memo") is None and offsets.fake_mode.shape_env is None:
        nested: Any = sys.modules[_NESTED]
        offsets.nested_int_memo = torch.SymInt(nested.NestedIntNode(nested._tensor_id_counter, 1))
        nested._tensor_id_counter += 1
    return _nested_int_of(offsets, coeff=coeff)


_jagged_sizes_named = Replaced(FakeTensor, "get_nested_int", _name_jagged_size)


@contextlib.contextmanager
def nested_tensors_made() -> Iterator[None]:
    """Nested tensors can be made of tensors without data.

    Torch makes one tensor for all of them when it makes the first, which must not be one without data: it is made
    before, or not kept.
    """
    module: Any = sys.modules.get(_NESTED)
    if module is not None and module._dummy_instance is None:
        with disable_modes():
            module._nt_view_dummy()
    try:
        with _jagged_sizes_named:
            yield
    finally:
        if module is None and _NESTED in sys.modules:
            sys.modules[_NESTED]._dummy_instance = None  # type: ignore[attr-defined]
