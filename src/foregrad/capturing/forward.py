"""The forward of a module as a program: torch calls the module's own hooks around it, at each call."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

# What torch calls around a forward, in the attributes of a module.
OWN_HOOKS = frozenset(
    {
        *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
        *("_backward_hooks", "_backward_pre_hooks"),
    }
)


@dataclass(frozen=True, eq=False)
class Forward:
    """The forward of a module's class, or the one that was in the module's `__dict__` when it was compiled."""

    module: nn.Module
    patched: Callable[..., Any] | None
    calls_itself: bool = False  # the module is called in its own forward: its hooks belong to the program then

    @classmethod
    def of(cls, module: nn.Module) -> Forward:
        """The forward that a module has now."""
        return cls(module, vars(module).get("forward"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.patched is not None:
            return self.patched(*args, **kwargs)
        found = forward_in(type(self.module))
        if isinstance(found, types.FunctionType):
            return found(self.module, *args, **kwargs)
        return self.module.forward(*args, **kwargs)


def forward_in(kind: type) -> Any:
    """What stands for the forward in a class of modules: of TorchScript's that is no function.

    >>> forward_in(nn.ReLU) is nn.ReLU.forward
    True
    """
    return next(vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))
