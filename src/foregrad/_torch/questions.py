"""What a program hears when it asks whether it is being traced: what it hears in eager.

Libraries choose masks, kernels and branches by the answer. They ask for a name in one of torch's modules, and call it
or compare with it. While a program is recorded these modules look at who asks: torch's own code, which infers shapes
and calls modes, is told the truth, and all other code what is true without the recording.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch._guards
import torch._subclasses.fake_tensor
import torch.utils._python_dispatch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .guards import _overrides_functions, dispatch_mode_depth, function_mode_depth, recordings_lock

_dispatch, _overrides = torch.utils._python_dispatch, torch.overrides
_real_has_torch_function = torch.overrides.has_torch_function


class _Recording(NamedTuple):
    """What a recording has put around the program in one thread."""

    function_modes: int
    dispatch_modes: int
    fake_mode: FakeTensorMode | None  # None if the tensors would be fake without it


_recordings: dict[int, _Recording] = {}  # by thread
_NONE = _Recording(0, 0, None)


def _here() -> _Recording:
    return _recordings.get(threading.get_ident(), _NONE)


@contextlib.contextmanager
def questions_answered_as_in_eager(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Nobody but torch hears of the modes that are active now, and of tensors of the given one."""
    thread = threading.get_ident()
    with recordings_lock:
        before = _recordings.get(thread)
        _recordings[thread] = _Recording(function_mode_depth(), dispatch_mode_depth(), fake_mode)
        for module, kind in _ANSWERING.items():
            module.__class__ = kind
    try:
        yield
    finally:
        with recordings_lock:
            if before is None:
                del _recordings[thread]
            else:
                _recordings[thread] = before
            if not _recordings:
                for module, kind in _PLAIN.items():
                    module.__class__ = kind


# ------------------------------------------------------------------------------------------------------ answers
def _is_recorded(value: object) -> bool:
    """Whether a tensor is fake for no other reason than that the program is recorded."""
    mode = _here().fake_mode
    return mode is not None and isinstance(value, FakeTensor) and value.fake_mode is mode


class _AsInEager(type(FakeTensor)):  # type: ignore[misc]
    """What the class of fake tensors looks like to a program that is recorded on such tensors."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, FakeTensor) and not _is_recorded(value)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, FakeTensor)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return FakeTensor(*args, **kwargs)


class _FakeTensorAsInEager(FakeTensor, metaclass=_AsInEager):
    pass


_FakeTensorAsInEager.__name__ = _FakeTensorAsInEager.__qualname__ = FakeTensor.__name__


def _dispatch_stack_length() -> int:
    return max(dispatch_mode_depth() - _here().dispatch_modes, 0)


def _function_stack_length() -> int:
    return max(function_mode_depth() - _here().function_modes, 0)


def _current_dispatch_mode() -> Any:
    return _GENUINE["_get_current_dispatch_mode"]() if _dispatch_stack_length() else None


def _dispatch_mode_stack() -> list[Any]:
    stack: list[Any] = _GENUINE["_get_current_dispatch_mode_stack"]()
    return stack[len(stack) - _dispatch_stack_length() :] if _here().dispatch_modes else stack


def _in_dispatch_mode(*args: Any, **kwargs: Any) -> bool:
    recorded = _here().dispatch_modes and not _dispatch_stack_length()
    return not recorded and _GENUINE["is_in_torch_dispatch_mode"](*args, **kwargs)


def _in_any_mode(*args: Any, **kwargs: Any) -> bool:
    recorded = _here().dispatch_modes and not _dispatch_stack_length()
    return not recorded and _GENUINE["is_in_any_mode_without_ignore_compile_internals"](*args, **kwargs)


def _current_function_mode() -> Any:
    return _GENUINE["_get_current_function_mode"]() if _function_stack_length() else None


def _function_mode_stack() -> list[Any]:
    stack: list[Any] = _GENUINE["_get_current_function_mode_stack"]()
    return stack[len(stack) - _function_stack_length() :] if _here().function_modes else stack


def _function_mode_enabled() -> bool:
    return bool(_function_stack_length()) and _GENUINE["_is_torch_function_mode_enabled"]()


def _has_torch_function(args: Iterable[Any]) -> bool:
    if not _here().function_modes or _function_stack_length():
        return _real_has_torch_function(args)
    return any(_overrides_functions(type(value)) for value in args if not _is_recorded(value))


def _any_has_torch_function(*args: Any) -> bool:
    return _has_torch_function(args)


def _is_fake(value: object) -> bool:
    return not _is_recorded(value) and _GENUINE["is_fake"](value)


def _detect_fake_mode(inputs: Any = None) -> Any:
    found = _GENUINE["detect_fake_mode"](inputs)
    return None if found is not None and found is _here().fake_mode else found


# By module: names, and what is found there by all code but torch's own.
_ANSWERS: dict[types.ModuleType, dict[str, Any]] = {
    torch._C: {
        "_len_torch_dispatch_stack": _dispatch_stack_length,
        "_len_torch_function_stack": _function_stack_length,
        "_is_torch_function_mode_enabled": _function_mode_enabled,
    },
    _dispatch: {
        "_len_torch_dispatch_stack": _dispatch_stack_length,
        "_get_current_dispatch_mode": _current_dispatch_mode,
        "_get_current_dispatch_mode_stack": _dispatch_mode_stack,
        "is_in_torch_dispatch_mode": _in_dispatch_mode,
        "is_in_any_mode_without_ignore_compile_internals": _in_any_mode,
    },
    _overrides: {
        "_len_torch_function_stack": _function_stack_length,
        "_get_current_function_mode": _current_function_mode,
        "_get_current_function_mode_stack": _function_mode_stack,
        "has_torch_function": _has_torch_function,
        "has_torch_function_unary": _any_has_torch_function,
        "has_torch_function_variadic": _any_has_torch_function,
    },
    torch._subclasses: {"FakeTensor": _FakeTensorAsInEager},
    torch._subclasses.fake_tensor: {"FakeTensor": _FakeTensorAsInEager, "is_fake": _is_fake},
    torch._guards: {"detect_fake_mode": _detect_fake_mode},
}

_GENUINE: dict[str, Callable[..., Any]] = {
    name: vars(module)[name] for module, answers in _ANSWERS.items() for name in answers if name in vars(module)
}


def _asks_for_torch(frame: types.FrameType) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return name == "torch" or name.startswith(("torch.", "foregrad."))


def _answer(name: str, answer: Any) -> property:
    def found(module: types.ModuleType) -> Any:
        if not _here().dispatch_modes or _asks_for_torch(sys._getframe(1)):
            return vars(module)[name]
        return answer

    def assign(module: types.ModuleType, value: Any) -> None:
        vars(module)[name] = value

    def delete(module: types.ModuleType) -> None:
        del vars(module)[name]

    return property(found, assign, delete)


_ANSWERING: dict[types.ModuleType, type[types.ModuleType]] = {
    module: type(
        "module",
        (type(module),),
        {name: _answer(name, answer) for name, answer in answers.items() if name in vars(module)},
    )
    for module, answers in _ANSWERS.items()
}
_PLAIN = {module: type(module) for module in _ANSWERS}
