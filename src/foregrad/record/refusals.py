"""What cannot be recorded: refusals that a program must not catch, and torch's own errors about recorded tensors."""

from __future__ import annotations

import copy

from .._torch import NO_DATA
from ..errors import CaptureError, DataDependentError, ForegradError, UnsupportedError
from ..stack_traces import errors_behind, source_of

WAY_OUT = (
    "Compute with the tensor instead of reading it (torch.where for a condition), pass the value as a plain Python "
    "argument, or compile with fallback='eager'."
)

_READ = (
    DataDependentError,
    f"the data of a recorded tensor is asked for, at {{place}}. While a program is recorded its tensors have no data. "
    f"{WAY_OUT}",
)

_NESTED = (
    UnsupportedError,
    "a nested tensor is made of recorded ones, at {place}: this cannot be compiled yet. Make it outside and pass it as "
    "an argument, or compile with fallback='eager'.",
)

# What torch says to tensors without data, and would not say to real ones.
_WORDS: dict[str, tuple[type[ForegradError], str]] = {
    NO_DATA: _READ,
    "its data is not allocated yet": _READ,
    "is not supported for tensor subclasses": _READ,
    "Please convert all Tensors to FakeTensors": (
        UnsupportedError,
        "an operator of the program meets a tensor that the program finds by itself where recording cannot see it (a "
        "custom function saves it, and the program differentiates that function; a TorchScript module holds it), at "
        "{place}. Pass the tensor as an argument, or compile with fallback='eager'.",
    ),
    "<--- HERE\nRuntimeError: \n": (  # TorchScript loses what a mode says
        UnsupportedError,
        "TorchScript code meets a tensor that it holds itself, or another that recording cannot see, at {place}. Call "
        "the module that TorchScript was made of, or compile with fallback='eager'.",
    ),
    "There was no fake impl registered": (
        CaptureError,
        "an operator, at {place}, has no shape inference. Register one (register_fake), or compile with "
        "fallback='eager'.",
    ),
    "INTERNAL ASSERT FAILED": (
        UnsupportedError,
        "autograd cannot follow the program on abstract tensors (views of a tensor that was detached in place are one "
        "reason), at {place}. Compile with fallback='eager'.",
    ),
    "already associated to a python object of type FakeTensor": (
        UnsupportedError,
        "a tensor of another class is made of a recorded one, at {place}: this cannot be compiled yet. Compile with "
        "fallback='eager'.",
    ),
    "_nested_int_memo": _NESTED,
    "should only be called while FakeTensorMode is active": _NESTED,
    "because it has weakref associated with it": (
        UnsupportedError,
        "recorded tensors cannot be swapped, at {place}. Write to them in place, or compile with fallback='eager'.",
    ),
}


def explained(error: BaseException) -> ForegradError | None:
    """The refusal behind an error that torch raises about recorded tensors only; none if it may be eager's own."""
    if isinstance(error, ForegradError):
        return None
    text = str(error)
    for words, (kind, message) in _WORDS.items():
        if words in text:
            return kind(message.format(place=source_of(error)))
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
