"""Hooks that a program registers on inputs and results, and gradients that it asks autograd to keep there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..joint.hooks import GradRetained, HookAdded, HookEffect, with_values
from ..slots import Output, Primal
from .stage import Stage
from .writer import Writer


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


def _over(hook: Callable[..., Any], ids: tuple[int, ...]) -> Callable[..., Callable[..., Any]]:
    """A function that makes the hook for the tensors of a call."""
    return lambda *tensors: with_values(hook, dict(zip(ids, tensors, strict=True)))
