"""Hooks that a compiled call registers: those that the program gave to inputs, and to results that are rebuilt.

The user's own function is registered each time. Tensors of the program in its closure are hidden results: the function
is made anew with those of the call.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymFloat, SymInt, Tensor

from ..errors import UnsupportedError
from ..record.fakify import RecordedInput
from ..record.hooks import Registered, Registering
from ..record.recording import Recording
from ..record.tape import tape_edges
from ..slots import Output, Primal
from ..stack_traces import where
from .inputs import is_stale
from .outputs import OutputFacts, Plain, SameAsInput, SameAsOutput
from .side_effects import Effects, is_hooked

_WAY_OUT = "Do so outside the program, or compile with fallback='eager'."


@dataclass(frozen=True, slots=True)
class HookAdded:
    """A hook that a call gives to an input or a result."""

    of: Primal | Output
    how: Registering
    hook: Callable[..., Any]
    captured: tuple[tuple[int, int], ...]  # id of what the function holds, and the result that takes its place
    before_writes: bool  # before the input is written: autograd keeps it with the value from before


@dataclass(frozen=True, slots=True)
class GradRetained:
    """An input or a result whose gradient a call asks autograd to keep."""

    of: Primal | Output


HookEffect = HookAdded | GradRetained


class HookEffects:
    """Collects them; what the functions hold must be known before the results are sorted."""

    def __init__(self, recording: Recording, hidden: Effects) -> None:
        self._recording = recording
        self._hidden = hidden
        self._abstract = recording.engine.is_abstract
        self._captured: dict[Registered, tuple[tuple[int, int], ...]] = {}
        hooks = recording.hooks
        results = {id(leaf) for leaf in hidden.leaves if isinstance(leaf, Tensor) and leaf._is_view()}
        for hook in (*hooks.on_inputs, *(h for h in hooks.inside if id(h.tensor) in results)):
            self._capture(hook)

    def _capture(self, hook: Registered) -> None:
        found: dict[int, Any] = {}
        _look_for(hook.hook, lambda value: self._abstract(value) or isinstance(value, (SymInt, SymFloat)), found, set())
        outputs = []
        for value in found.values():
            known = next((i for i, leaf in enumerate(self._hidden.leaves) if leaf is value), None)
            outputs.append((id(value), self._hidden.add(value, "a tensor in a hook") if known is None else known))
        self._captured[hook] = tuple(outputs)

    def effects(self, outputs: OutputFacts, targets: Iterable[Tensor]) -> tuple[HookEffect, ...]:
        """What the program did to inputs, and to results that are rebuilt."""
        inside = {following for _, following in tape_edges(list(targets))}
        return (*self._of_inputs(inside), *self._of_results(outputs, inside))

    def _of_inputs(self, inside: set[Any]) -> Iterator[HookEffect]:
        first: dict[int, RecordedInput] = {}
        for recorded in self._recording.inputs:
            if recorded.is_tensor and not is_stale(recorded.seen):
                first.setdefault(id(recorded.seen), recorded)
        for hook in self._recording.hooks.on_inputs:
            _refuse_several(hook)
            if is_stale(hook.tensor):
                raise UnsupportedError(
                    f"a hook, at {where(hook.stack)}, on a view that may not be used any more, because what it is a "
                    f"view of was written: this cannot be compiled yet. {_WAY_OUT}"
                )
            recorded = first[id(hook.tensor)]
            before_writes = hook.node is not hook.tensor.grad_fn
            if before_writes and (hook.node is not recorded.start_node or self._captured[hook]):
                raise UnsupportedError(
                    f"a hook on {recorded.slot}, at {where(hook.stack)}, between two writes to it, or with tensors of "
                    f"the program in it: this cannot be compiled yet. {_WAY_OUT}"
                )
            if hook.node is not recorded.start_node:
                _refuse_inner_use(hook.tensor, str(recorded.slot), inside)
            yield HookAdded(recorded.slot, hook.how, hook.hook, self._captured[hook], before_writes)
        for recorded in first.values():
            if recorded.seen.retains_grad:
                _refuse_lost_gradient(recorded.seen, str(recorded.slot))
                if recorded.seen.grad_fn is not recorded.start_node:
                    _refuse_inner_use(recorded.seen, str(recorded.slot), inside)
                yield GradRetained(recorded.slot)

    def _of_results(self, outputs: OutputFacts, inside: set[Any]) -> Iterator[HookEffect]:
        """A hook on a plain result is part of the recorded backward."""
        paths = self._hidden.paths
        for i, (result, leaf) in enumerate(zip(outputs.results, outputs.tensors, strict=True)):
            if leaf is None or isinstance(result, (SameAsInput, SameAsOutput)) or is_stale(leaf):
                continue
            hooks = [] if isinstance(result, Plain) else [h for h in self._captured if h.tensor is leaf]
            if not hooks and not leaf.retains_grad:
                continue
            _refuse_inner_use(leaf, paths[i], inside)
            for hook in hooks:
                _refuse_several(hook)
                if hook.node is not leaf.grad_fn:
                    raise UnsupportedError(
                        f"a hook on {paths[i]}, at {where(hook.stack)}, before a write to it: this cannot be compiled "
                        f"yet. {_WAY_OUT}"
                    )
                yield HookAdded(Output(i), hook.how, hook.hook, self._captured[hook], before_writes=False)
            if leaf.retains_grad:
                _refuse_lost_gradient(leaf, paths[i])
                if isinstance(result, Plain) and is_hooked(leaf, self._recording.hooks.inside):
                    raise UnsupportedError(
                        f"the program gives {paths[i]} a hook and calls retain_grad() on it: a compiled call would "
                        f"keep the gradient as it is before the hook. {_WAY_OUT}"
                    )
                yield GradRetained(Output(i))


def _refuse_inner_use(tensor: Tensor, name: str, inside: set[Any]) -> None:
    """A call sees the gradient from outside only; what comes from the program's own results stays in the graph."""
    if tensor.grad_fn in inside:
        raise UnsupportedError(
            f"the program gives {name} a hook or calls retain_grad() on it, and computes other results from it: "
            "a compiled call would see a part of its gradient only. Compile with fallback='eager'."
        )


def _refuse_several(hook: Registered) -> None:
    if hook.serves_several:
        raise UnsupportedError(
            f"register_multi_grad_hook, at {where(hook.stack)}, of an input, or of a view that is a result, cannot "
            f"be compiled yet. {_WAY_OUT}"
        )


def _refuse_lost_gradient(tensor: Tensor, name: str) -> None:
    if tensor.grad is not None:
        raise UnsupportedError(
            f"the program leaves a gradient on {name}, which is no leaf: this cannot be compiled yet. {_WAY_OUT}"
        )


# ------------------------------------------------------------------------------------------------ functions
def _look_for(value: Any, wanted: Callable[[Any], bool], found: dict[int, Any], seen: set[int]) -> None:
    """What a function holds of the program: in its closure and defaults, in tuples and functions there."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if wanted(value):
        found[id(value)] = value
    for part in _parts(value):
        _look_for(part, wanted, found, seen)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(value) if type(value) is tuple else []


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def hook_over(hook: Callable[..., Any], ids: Sequence[int], *values: Any) -> Callable[..., Any]:
    """The same function over other values, given the ids of those that it holds.

    >>> two, three = (2,), (3,)
    >>> hook_over(lambda x, y=two: x * y[0], [id(two)], three)(5)
    15
    """
    function: Callable[..., Any] = _replaced(hook, dict(zip(ids, values, strict=True)))
    return function


def _replaced(old: Any, known: dict[int, Any]) -> Any:
    """What takes the place of a value, by its id: itself, unless something in it is replaced."""
    if id(old) not in known:
        known[id(old)] = old  # a function may hold itself
        parts = _parts(old)
        new = [_replaced(part, known) for part in parts]
        if any(a is not b for a, b in zip(parts, new, strict=True)):
            known[id(old)] = _with_parts(old, new)
    return known[id(old)]


def _with_parts(old: Any, parts: list[Any]) -> Any:
    """A function, partial or tuple with other parts, in the order of `_parts`."""
    if isinstance(old, tuple):
        return tuple(parts)
    rest = iter(parts)
    if isinstance(old, functools.partial):
        function, args = next(rest), [next(rest) for _ in old.args]
        return functools.partial(function, *args, **dict(zip(old.keywords, rest, strict=True)))
    cells = [_holding(cell, next(rest)) if _is_filled(cell) else cell for cell in old.__closure__ or ()]
    defaults = None if old.__defaults__ is None else tuple(next(rest) for _ in old.__defaults__)
    new = types.FunctionType(old.__code__, old.__globals__, old.__name__, defaults, tuple(cells))
    new.__kwdefaults__ = dict(zip(old.__kwdefaults__, rest, strict=True)) if old.__kwdefaults__ else None
    return new


def _holding(cell: types.CellType, value: Any) -> types.CellType:
    return cell if cell.cell_contents is value else types.CellType(value)  # others may share one that stays as it is
