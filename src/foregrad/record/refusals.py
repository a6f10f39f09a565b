"""What cannot be recorded: refusals that a program must not catch, and torch's own errors about recorded tensors."""

from __future__ import annotations

import copy
import sys

from torch import nn

from .._torch import AboutFakes, said_of_fakes
from ..errors import CaptureError, DataDependentError, ForegradError, UnsupportedError
from ..stack_traces import errors_behind, source_of, user_stack, where

WAY_OUT = (
    "Compute with the tensor instead of reading it (torch.where for a condition), pass the value as a plain Python "
    "argument, or compile with fallback='eager'."
)

# By what torch says to tensors without data: the error that says what the user can do.
_REFUSALS: dict[AboutFakes, tuple[type[ForegradError], str]] = {
    AboutFakes.DATA: (
        DataDependentError,
        "the data of a recorded tensor is asked for, at {place}. While a program is recorded its tensors have no data. "
        f"{WAY_OUT}",
    ),
    AboutFakes.REAL_TENSOR: (
        UnsupportedError,
        "an operator of the program meets a tensor that the program finds by itself where recording cannot see it (a "
        "custom function saves it, and the program differentiates that function; a TorchScript module holds it), at "
        "{place}. Pass the tensor as an argument, or compile with fallback='eager'.",
    ),
    AboutFakes.SCRIPT: (
        UnsupportedError,
        "TorchScript code meets a tensor that it holds itself, or another that recording cannot see, at {place}. Call "
        "the module that TorchScript was made of, or compile with fallback='eager'.",
    ),
    AboutFakes.NO_INFERENCE: (
        CaptureError,
        "an operator, at {place}, has no shape inference. Register one (torch.library.register_fake), or compile with "
        "fallback='eager'.",
    ),
    AboutFakes.INTERNAL: (
        UnsupportedError,
        "autograd cannot follow the program on abstract tensors (views of a tensor that was detached in place are one "
        "reason), at {place}. Compile with fallback='eager'.",
    ),
    AboutFakes.OTHER_CLASS: (
        UnsupportedError,
        "a tensor of another class is made of a recorded one, at {place}: this cannot be compiled yet. Compile with "
        "fallback='eager'.",
    ),
    AboutFakes.NESTED: (
        UnsupportedError,
        "a nested tensor is made of recorded ones, at {place}: this cannot be compiled yet. Make it outside and pass "
        "it as an argument, or compile with fallback='eager'.",
    ),
    AboutFakes.SWAPPED: (
        UnsupportedError,
        "recorded tensors cannot be swapped, at {place}. Write to them in place, or compile with fallback='eager'.",
    ),
}


def explained(error: BaseException) -> ForegradError | None:
    """The refusal behind an error that torch raises about recorded tensors only; none if it may be eager's own."""
    about = None if isinstance(error, ForegradError) else said_of_fakes(error)
    if about is None:
        return None
    kind, message = _REFUSALS[about]
    return kind(message.format(place=source_of(error)))


def has_no_inference(error: BaseException) -> bool:
    """Whether an operator of the user's has no shape inference."""
    return said_of_fakes(error) is AboutFakes.NO_INFERENCE


def communicating(module: nn.Module) -> UnsupportedError | None:
    """The refusal of a module that works together with other processes around its call, in hooks and in C++."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return UnsupportedError(
            f"DistributedDataParallel averages gradients in C++, which cannot be recorded, at {where(user_stack(3))}. "
            "Compile it by aot_module, which compiles the module in it, or compile that module first: "
            "DistributedDataParallel(aot_module(model, ...))."
        )
    sharded = sys.modules.get("torch.distributed.fsdp")
    if sharded is not None and isinstance(module, sharded.FSDPModule):
        return UnsupportedError(
            f"a module of fully_shard gathers its parameters around each call, which cannot be recorded, at "
            f"{where(user_stack(3))}. Compile it first: model = aot_module(model, ...); fully_shard(model)."
        )
    if sharded is not None and isinstance(module, sharded.FullyShardedDataParallel):
        return UnsupportedError(
            f"FullyShardedDataParallel gathers parameters around each call, which cannot be recorded, at "
            f"{where(user_stack(3))}. Compile the module in it: FullyShardedDataParallel(aot_module(model, ...))."
        )
    return None


def without_frames(error: Exception) -> Exception:
    """An error that is kept, without the frames that it came through: they hold the caller's tensors."""
    for part in errors_behind(error):
        part.__traceback__ = None
    return error


def once_more(error: Exception) -> Exception:
    """A copy of an error that is kept, to be raised: it has frames of its own, unless it refuses to be copied."""
    try:
        copied: Exception = copy.copy(error)
    except Exception:
        return without_frames(error)
    return copied if type(copied) is type(error) else without_frames(error)
