"""What errors of torch are about, where nothing but their text tells: control flow asks here, by name."""

from __future__ import annotations

from enum import Enum

from .fake import NO_DATA

# Packages of torch that trace a part of a program by themselves, and whose errors say so by where they come from.
DYNAMO = "torch._dynamo"
SCRIPT_TRACING = "torch.jit._trace"
FX_TRACING = "torch.fx.experimental.proxy_tensor"
HIGHER_ORDER_OPERATORS = "torch._higher_order_ops"


class AboutFakes(Enum):
    """What torch says to tensors without data, and would not say to real ones."""

    DATA = (NO_DATA, "its data is not allocated yet", "is not supported for tensor subclasses")
    REAL_TENSOR = ("Please convert all Tensors to FakeTensors",)
    SCRIPT = ("<--- HERE\nRuntimeError: \n",)  # TorchScript loses what a mode says
    NO_INFERENCE = ("There was no fake impl registered",)
    INTERNAL = ("INTERNAL ASSERT FAILED",)
    OTHER_CLASS = ("already associated to a python object of type FakeTensor",)
    NESTED = ("_nested_int_memo", "should only be called while FakeTensorMode is active")
    SWAPPED = ("because it has weakref associated with it",)


def said_of_fakes(error: BaseException) -> AboutFakes | None:
    """What an error says that real tensors would not cause; None if it may be eager's own."""
    text = str(error)
    return next((about for about in AboutFakes if any(words in text for words in about.value)), None)


def is_internal_assertion(error: BaseException) -> bool:
    """Whether torch itself fails."""
    return any(words in str(error) for words in AboutFakes.INTERNAL.value)


def is_version_error(error: BaseException) -> bool:
    """Whether autograd refuses because something that it saved was written to."""
    return any(words in str(error) for words in ("modified by an inplace operation", "has been modified inplace"))


def is_second_backward(error: BaseException) -> bool:
    """Whether autograd refuses because something that it saved was freed."""
    return "backward through the graph a second time" in str(error)


def is_about_symbols(error: BaseException) -> bool:
    """Whether an error is about symbolic numbers rather than about the program."""
    words = ("SymInt", "SymFloat", "SymBool", "symbolic", "the size ", "aten::size", "customized tensor")
    return any(word in str(error) for word in words)


def is_about_inference_tensors(error: BaseException) -> bool:
    """Whether an inference tensor is used as only others may be."""
    return "inference tensor" in str(error).lower()


def is_not_differentiable(error: BaseException) -> bool:
    """Whether a backward was asked for that leads nowhere."""
    return "does not require grad and does not have a grad_fn" in str(error)


def is_refused_cast(error: BaseException) -> bool:
    """Whether a result has a dtype that cannot be cast to that of the tensor which it is written to."""
    return "can't be cast" in str(error)


def is_without_kernel(error: BaseException) -> bool:
    """Whether an operator has no kernel for what it was given."""
    return "Could not run 'aten::" in str(error)
