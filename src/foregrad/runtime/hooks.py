"""Hooks that a program registers on inputs and results, and gradients that it asks autograd to keep there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._torch import saved_hooks_are_on
from ..errors import UnsupportedError
from ..joint.hooks import GradRetained, HookAdded, HookEffect, with_values
from ..joint.inner_results import InnerResult
from ..slots import Output, Primal, Returned
from .stage import Stage
from .store import Noted
from .writer import Writer, tuple_of


@dataclass(frozen=True)
class RegisterHooks(Stage):
    """Each call registers them again, as eager does: on inputs that are written later right at the start."""

    effects: tuple[HookEffect, ...]

    def enter(self, writer: Writer) -> None:
        for effect in self.effects:
            if isinstance(effect, HookAdded) and effect.early:
                self._register(writer, effect)

    def leave(self, writer: Writer) -> None:
        for effect in self.effects:
            match effect:
                case GradRetained(of):
                    self._bring_up_to_date(writer, of)
                    writer.line(f"{writer.variable(of)}.retain_grad()")
                case HookAdded(early=False):
                    self._register(writer, effect)

    def _register(self, writer: Writer, effect: HookAdded) -> None:
        hook = writer.bind(effect.hook, "hook")
        if effect.captured:
            tensors = [writer.variable(Output(output)) for _, output in effect.captured]
            ids = tuple(old for old, _ in effect.captured)
            hook = f"{writer.bind(_over(effect.hook, ids), 'hook_over')}({', '.join(tensors)})"
        self._bring_up_to_date(writer, effect.of)
        writer.line(f"{writer.variable(effect.of)}.{effect.how}({hook})")

    def _bring_up_to_date(self, writer: Writer, of: Primal | Output) -> None:
        """Torch 2.13 crashes where a hook is given to a view whose base was written and that nobody looked at since."""
        writer.line(f"{writer.variable(of)}.grad_fn")


@dataclass(frozen=True)
class WatchResults(Stage):
    """Let the backward find results whose gradients are not whole outside, as long as the caller holds them."""

    inner: tuple[InnerResult, ...]
    tracked: Returned  # something that the program's node gives

    def leave(self, writer: Writer) -> None:
        results = tuple_of([writer.variable(result.of) for result in self.inner])
        writer.line(f"{writer.bind(_watch, 'watch')}({writer.variable(self.tracked)}, {results})")


@dataclass(frozen=True)
class NoteResults(Stage):
    """Let the backward see that the caller has written to a result which it computes again, where eager saves it."""

    results: tuple[Returned, ...]
    tracked: Returned  # something that the program's node gives

    def leave(self, writer: Writer) -> None:
        results = tuple_of([writer.variable(slot) for slot in self.results])
        writer.line(f"{writer.bind(_note, 'note_results')}({writer.variable(self.tracked)}, {results})")


def _note(tracked: Tensor, results: tuple[Tensor, ...]) -> None:
    node = tracked.grad_fn
    if node is not None:  # gradients are on
        known = () if node.noted is None else node.noted.versions  # type: ignore[attr-defined]
        versions = [(weakref.ref(tensor), tensor._version) for tensor in results if not tensor.is_inference()]
        node.noted = Noted(saved_hooks_are_on(), known, versions)  # type: ignore[attr-defined]


def _watch(tracked: Tensor, results: tuple[Tensor, ...]) -> None:
    node = tracked.grad_fn
    if node is not None:  # gradients are on
        node.watched = tuple(map(weakref.ref, results))  # type: ignore[attr-defined]


def refusing_whole_gradients(inner: tuple[InnerResult, ...]) -> Callable[..., None]:
    """A function that refuses a backward in which somebody waits for more of a gradient than comes from outside."""

    def refuse(watched: Sequence[weakref.ref[Tensor]], tangents: Sequence[Tensor | None]) -> None:
        for reference, result in zip(watched, inner, strict=True):
            tensor = reference()
            if tensor is None or all(tangents[k] is None for k in result.tangents):
                continue
            if tensor.retains_grad or tensor._backward_hooks:
                raise UnsupportedError(
                    f"{result.name} has a hook, or retain_grad() was called on it, and {result.why}. Do so with what "
                    "is computed from it outside, or compile with fallback='eager'."
                )

    return refuse


def _over(hook: Callable[..., Any], ids: tuple[int, ...]) -> Callable[..., Callable[..., Any]]:
    """A function that makes the hook for the tensors of a call."""
    return lambda *tensors: with_values(hook, dict(zip(ids, tensors, strict=True)))
