"""Hooks that live on after the call must not depend on Python objects of the recording."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..errors import UnsupportedError
from ..joint.hooks import HookAdded, HookEffect
from ..record.recording import Recording
from .places import Surroundings
from .snapshot import find_abstract


def refuse_private_state(effects: Iterable[HookEffect], surroundings: Surroundings, recording: Recording) -> None:
    """Refuse hooks that change or hold what each run of the program makes anew, other than tensors."""
    for effect in effects:
        if isinstance(effect, HookAdded):
            _check(effect.hook, effect, surroundings, recording, set())


def _check(value: Any, effect: HookAdded, around: Surroundings, recording: Recording, seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    reason = None
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if not any(cell is known for _, known in around.cells) and name in _assigned(value.__code__):
                reason = f"assigns {name}, a variable of the program"
        parts = [cell.cell_contents for cell in value.__closure__ or ()] + list(value.__defaults__ or ())
        parts += (value.__kwdefaults__ or {}).values()
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        parts = [value.__self__, value.__func__]
    elif isinstance(value, (list, dict, set, bytearray)):
        parts = []
        if not any(value is holder.owner for holder in around.holders):
            reason = f"holds a {type(value).__name__} of the program"
    else:
        parts = list(value) if type(value) is tuple else []
        if not isinstance(value, nn.Module) and find_abstract(getattr(value, "__dict__", None), recording) is not None:
            reason = f"holds a {type(value).__name__} with tensors of the program"
    if reason is not None:
        raise UnsupportedError(
            f"the program gives {effect.of} a hook that {reason}: this cannot be compiled yet. Register it outside the "
            "program, or compile with fallback='eager'."
        )
    for part in parts:
        _check(part, effect, around, recording, seen)


@functools.cache
def _assigned(code: types.CodeType) -> frozenset[str]:
    """Variables of enclosing functions that a function, or one inside it, assigns."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _assigned(constant) & set(constant.co_freevars)
    return frozenset(found & set(code.co_freevars))
