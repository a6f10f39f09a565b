"""Torch's functions in C++ that call one operator, where a graph runs as it is.

An operator object matches its arguments against a schema at each call, and a function that torch generates for Python
reads them directly: it takes a quarter of the time less. Which operator it calls depends on its arguments, so it is
asked, once for each kind of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_MODULES = ("_VariableFunctions", "TensorBase", "_nn", "_linalg", "_fft", "_special")  # that bindings are in
_known: dict[Any, Callable[..., Any]] = {}


def direct_call(op: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """What calls an operator with the least work in between, for arguments of the same kinds as these.

    >>> direct_call(torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2))).__name__
    'mm'
    """
    kwargs = kwargs or {}
    if type(op) is not OpOverload:
        return op
    if op.namespace != "aten" or not args or not _works_on_tensors(args[0]) or not _returns_tensors(op):
        return op._op
    key = op, _kind(args), tuple([(name, _kind(value)) for name, value in kwargs.items()])
    found = _known.get(key)
    if found is None:
        found = _known[key] = _binding(op, args, kwargs) or op._op
    return found


def _returns_tensors(op: OpOverload) -> bool:
    """Whether it gives tensors, a fixed number of them: bindings give lists as tuples."""
    return all(isinstance(value.type, torch.TensorType) for value in op._schema.returns)


def _works_on_tensors(first: Any) -> bool:
    """Whether an operator is given a tensor, or tensors: others are asked for a default device."""
    if isinstance(first, (list, tuple)):
        return len(first) > 0 and isinstance(first[0], Tensor)
    return isinstance(first, Tensor)


def _kind(value: Any) -> Any:
    """All that a binding goes by: a tensor of one element may be taken for a number."""
    if isinstance(value, Tensor):
        return (Tensor, value.dtype) if not value.dim() else Tensor
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_kind, value))
    return type(value)


def _binding(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The function that calls the same operator with the same arguments, if there is one."""
    name = op._schema.name.removeprefix("aten::")
    owners = [getattr(torch._C, module) for module in _MODULES]
    candidates = [getattr(owner, name) for owner in owners if hasattr(owner, name)]
    if not candidates:
        return None
    wanted = _called(op._op, args, kwargs)
    if wanted is None or wanted[0] is not op:
        return None
    return next((binding for binding in candidates if _same(_called(binding, args, kwargs), wanted)), None)


class _Called(Exception):
    """An operator was called with these arguments."""


class _NotCalled(TorchDispatchMode):
    """Operators say with what they are called, and are not."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would load Dynamo, half a second, at the first call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Called(func, args, kwargs or {})


def _called(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The operator that a function comes to first, and its arguments; None if it does not take such arguments."""
    try:
        with torch.no_grad(), _NotCalled():
            function(*args, **kwargs)
    except _Called as call:
        return call.args
    except (TypeError, RuntimeError):  # it is called in another way
        return None
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (_is_number(one) and _is_number(other) and one.dtype is other.dtype)
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return bool(one == other)


def _is_number(tensor: Tensor) -> bool:
    """Whether it was made of a number just now, as the operator and the binding both do."""
    return type(tensor) is Tensor and not tensor.dim()
