"""Anomaly mode: find the operator, and the user's line, that put NaN into a gradient.

`torch.autograd.detect_anomaly()` looks at what each autograd node returns. A compiled backward is one node, so under
anomaly mode its graph is run operator by operator instead, and looked at wherever one of the recorded nodes ends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .compilers import Boxed


def watched(module: fx.GraphModule) -> Boxed:
    """A backward graph that is run operator by operator."""

    def run(args: list[Any]) -> Any:
        if not torch.is_anomaly_check_nan_enabled():
            return module.forward(*args)  # hooks of the user's on all modules are none of its own
        return _Watching(module).run(*args)

    return run


class _Watching(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.name = "the backward graph"  # the interpreter names it in what it adds to errors
        self.extra_traceback = False

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if _is_gradient(node) and isinstance(value, Tensor) and _has_nan(value):
            raise _found(node)
        return value


def _is_gradient(node: fx.Node) -> bool:
    """Whether a value is what an autograd node returns: what others take of the operators that it runs."""
    owner = node.meta.get("autograd_node")
    return owner is not None and any(user.meta.get("autograd_node") != owner for user in node.users)


def _has_nan(value: Tensor) -> bool:
    return (value.is_floating_point() or value.is_complex()) and bool(torch.isnan(value).any())


def _found(node: fx.Node) -> RuntimeError:
    line = node.meta.get("stack_trace")
    forward = f" It differentiates:\n{line}" if line else " No line of the program is known for it."
    return RuntimeError(
        f"Function '{node.meta['autograd_node'][1]}' returned nan values: {node.name} = {node.target}, in the compiled "
        f"backward.{forward}"
    )
