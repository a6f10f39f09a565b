"""Hooks that the program registers while it is recorded.

A hook on an intermediate is part of the recorded backward. One on an input belongs to the caller's tensor: it stays
there, and sees the gradient from everywhere. It is on the abstract tensor while the program runs, for a backward inside
the program must meet it, and is taken off before the program itself is differentiated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..errors import UnsupportedError
from .lines import Stack, user_stack, where
from .stand_ins import RecordedInput

Registering = Literal["register_hook", "register_post_accumulate_grad_hook"]
REGISTERING: dict[Any, Registering] = {
    Tensor.register_hook: "register_hook",
    Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
}


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """A hook that the program gave to a tensor."""

    tensor: Tensor
    how: Registering
    hook: Callable[..., Any]
    handle: RemovableHandle
    node: Any  # of autograd, that the tensor had then
    stack: Stack

    @property
    def is_there(self) -> bool:
        """Whether nobody has taken it off since."""
        return self.handle.id in (self.handle.hooks_dict_ref() or {})

    @property
    def serves_several(self) -> bool:
        """Whether it is a part of `register_multi_grad_hook`, which keeps account of several tensors."""
        code = getattr(self.hook, "__code__", None)
        return code is not None and code.co_filename == torch.autograd.graph.__file__


class Hooks:
    """What a recording knows about hooks."""

    def __init__(self) -> None:
        self._registered: list[Registered] = []
        self._guards: list[RemovableHandle] = []
        self.on_inputs: list[Registered] = []
        self.inside: list[Registered] = []

    def register(self, method: Any, tensor: Tensor, hook: Callable[..., Any]) -> RemovableHandle:
        """Do what the program asks for, and remember it."""
        node = tensor.grad_fn  # first: it brings a view up to date, without which torch 2.13 crashes on the next line
        handle: RemovableHandle = method(tensor, hook)
        self._registered.append(Registered(tensor, REGISTERING[method], hook, handle, node, user_stack(4)))
        return handle

    @property
    def held(self) -> Iterator[Tensor]:
        """The tensors that are held here."""
        for registered in self._registered:
            yield registered.tensor

    def guard(self, recorded: RecordedInput) -> None:
        """The caller's own hooks on an input: a backward inside the program would have to run them."""

        def refuse(gradient: Tensor) -> None:
            raise UnsupportedError(
                f"the program differentiates {recorded.slot}, which has a hook or retains its gradient, at "
                f"{where(user_stack(2))}: this cannot be compiled yet. Compile with fallback='eager'."
            )

        self._guards.append(recorded.seen.register_hook(refuse))

    def without_guards(self, hooks: dict[int, Any] | None) -> dict[int, Any] | None:
        """The hooks of a tensor, as the program would find them in eager."""
        ours = {guard.id for guard in self._guards}
        if not hooks or ours.isdisjoint(hooks):
            return hooks
        return OrderedDict((key, hook) for key, hook in hooks.items() if key not in ours) or None

    def finish(self, inputs: Container[int]) -> None:
        """The program has run: keep what it left. `inputs` are the ids of what stands for them."""
        for handle in self._guards:
            handle.remove()
        left = [hook for hook in self._registered if hook.is_there]
        self.on_inputs = [hook for hook in left if id(hook.tensor) in inputs]
        self.inside = [hook for hook in left if id(hook.tensor) not in inputs]
        for hook in self.on_inputs:
            hook.handle.remove()


def has_hooks(tensor: Tensor) -> bool:
    """Whether anything happens when a gradient of a tensor is computed."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks or tensor.retains_grad)
