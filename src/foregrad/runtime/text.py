"""Values and calls as Python text."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from .._torch import (
    OpOverload,
)
from .writer import Writer


def op_name(writer: Writer, op: OpOverload) -> str:
    return writer.bind(op, f"{op._schema.name.split('::')[1]}_{op._overloadname}")


def arguments_text(writer: Writer, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    return [*(literal(writer, a) for a in args), *(f"{key}={literal(writer, a)}" for key, a in kwargs.items())]


def literal(writer: Writer, value: Any) -> str:
    """A value as Python text, bound to a name where text cannot say it."""
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    if type(value) in (list, tuple) and all(type(v) in (bool, int) for v in value):
        return repr(value)
    return writer.bind(value, type(value).__name__)


def grad_mode(writer: Writer, wanted: bool, now: bool) -> contextlib.AbstractContextManager[None]:
    """A block in a grad mode; none if gradients are on, or off, already."""
    if wanted == now:
        return contextlib.nullcontext()
    mode = writer.bind(torch.enable_grad, "enable_grad") if wanted else writer.bind(torch.no_grad, "no_grad")
    return writer.block(f"with {mode}():")
