"""What a program may read of a recorded tensor: what guards compare at each call, and nothing else.

Sizes, dtype, device, flags and the like are checked before a program runs. Where a tensor lies, how often it was
written, what autograd knows about it from before the call: all this may be another thing at the next call, and eager
would see it. A read of it is refused, unless its answer follows from what is checked.
"""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from ..errors import UnsupportedError
from .lines import user_stack, where

CHECKED_PROPERTIES = frozenset(
    {
        *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "names", "name", "volatile"),
        *("requires_grad", "is_leaf", "grad_dtype", "output_nr"),
        *("_has_symbolic_sizes_strides", "_python_dispatch"),
        *(name for name in dir(Tensor) if name.startswith("is_")),
        *("grad", "data", "T", "H", "mT", "mH", "real", "imag"),
    }
)
"""Properties of tensors whose values guards compare, or that are tensors themselves."""

CHECKED_FUNCTIONS = frozenset(
    {
        *("dim", "ndimension", "numel", "nelement", "size", "stride", "storage_offset", "element_size", "get_device"),
        *("dense_dim", "sparse_dim", "type", "has_names", "dim_order", "result_type", "can_cast", "is_tensor"),
        *("is_complex", "is_floating_point", "is_signed", "is_conj", "is_neg", "is_inference", "is_contiguous"),
        *("is_same_size", "_is_view", "_is_zerotensor", "_nested_tensor_size"),
        *("__len__", "__hash__", "__dir__", "__class__"),
    }
)
"""Functions of tensors that give a plain value which follows from what guards compare."""

SIZES = frozenset(
    {
        *(Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel),
        *(Tensor.shape.__get__, Tensor.nbytes.__get__),  # type: ignore[attr-defined]
    }
)
"""How a program reads the size of a tensor."""

WORKSPACE = "_foregrad_workspace"
"""Where a recorded tensor notes that only a library knows its size, and what it is this time."""

_WHY = {
    "_version": "counts the writes from before the call",
    "_base": "is the tensor that it is a view of, outside of the program",
    "_backward_hooks": "holds what was registered before the call",
}


def refuse_size_of_workspace(tensor: Any) -> None:
    """Refuse to read the size of a tensor that only a library knows, if this is one."""
    if isinstance(tensor, Tensor) and WORKSPACE in vars(tensor):
        raise UnsupportedError(
            f"the program reads the size of a library's workspace, at {where(user_stack(4))}, which is not known for "
            "symbolic sizes. Compile with dynamic=False."
        )


def refuse_property(name: str) -> None:
    """Refuse to read a property that guards know nothing about."""
    why = _WHY.get(name, "may be another one at the next call")
    raise UnsupportedError(
        f"the program reads .{name} of a tensor, which {why}, at {where(user_stack(4))}: a compiled call would not "
        "look again. Read it outside and pass it as an argument, or compile with fallback='eager'."
    )


FROM_BEFORE = frozenset({"retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks"})
"""Properties that are compared at each call if a program reads them: there was nothing while it was recorded."""


def is_known(name: str, real: Tensor) -> bool:
    """Whether a property of a tensor from before the call says what the recording says too."""
    if name in FROM_BEFORE:
        return not getattr(real, name)
    return name == "grad_fn" or (name == "_base" and not real._is_view())


def who_asks(func: Any) -> CodeType:
    """The code that calls a function of tensors or reads a property, past what hands the call on to a mode."""
    between = {id(handle_torch_function.__code__), id(getattr(func, "__code__", None))}
    frame = sys._getframe(1)
    while frame.f_back is not None and (id(frame.f_code) in between or frame.f_code.co_filename in _MODES):
        frame = frame.f_back
    return frame.f_code


_MODES = frozenset({__file__, os.path.join(os.path.dirname(__file__), "reals.py")})


def follows_from_guards(func: Any, result: Any) -> bool:
    """Whether what a function gives for recorded tensors is no plain value, or one that guards have an eye on."""
    return type(result) not in (bool, int, float, str) or getattr(func, "__name__", "") in CHECKED_FUNCTIONS


def refuse_plain_result(func: Any, result: Any) -> None:
    """Refuse a plain value that a function gives for recorded tensors."""
    raise UnsupportedError(
        f"{func.__name__}, at {where(user_stack(4))}, gives a {type(result).__name__} that may be another one at the "
        "next call: a compiled call would not look again. Call it outside and pass what it gives as an argument, or "
        "compile with fallback='eager'."
    )
