"""What a tensor subclass adds: one wrapper in, one wrapper out, over a compiler that returns constants.

The subclass's own constructor runs once for each wrapper that is built, on both sides; it is shown by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from .runtime import OfInputs, best_times, simplified
from .sides import PEER, SUBJECT
from .table import Mark, Table

WANTED = 0.6


def two(requires_grad: bool) -> Any:
    """A wrapper of two tensors."""
    return TwoTensor(torch.ones(4, 4), torch.ones(4, 4)).requires_grad_(requires_grad)


def times(rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds by kind of call and by side."""
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    found: dict[str, dict[str, float]] = {}
    for kind in ("inference", "forward", "forward + backward"):
        x, tangent = two(kind != "inference"), two(False)
        calls: dict[str, Callable[[], object]] = {
            "constructor": lambda: TwoTensor.__tensor_unflatten__({"a": a, "b": b}, None, (4, 4), (4, 1))
        }
        for side in (PEER, SUBJECT):
            compiled, _ = simplified(side, OfInputs(), [x])
            calls[side.name] = _call(compiled, x, tangent, kind)
        found[kind] = best_times(calls, rounds)
    return found


def _call(compiled: Callable[..., Any], x: Tensor, tangent: Tensor, kind: str) -> Callable[[], object]:
    if kind == "forward + backward":
        return lambda: torch.autograd.grad(compiled(x)[0], x, tangent)
    return lambda: compiled(x)


def report(rounds: int) -> tuple[Table, Mark]:
    """The table, and the mark."""
    table = Table(
        "One tensor subclass in, one out",
        ["call", "torch µs", "foregrad µs", "foregrad / torch", "its constructor µs"],
        note="`TwoTensor`. The constructor is Python of the subclass's own, which both sides call.",
    )
    measured = times(rounds)
    for kind, time_of in measured.items():
        ratio = f"{time_of['foregrad'] / time_of['torch']:.2f}"
        table.add(kind, f"{time_of['torch']:.1f}", f"{time_of['foregrad']:.1f}", ratio, f"{time_of['constructor']:.1f}")
    ratios = {kind: time_of["foregrad"] / time_of["torch"] for kind, time_of in measured.items()}
    worst = max(ratios, key=ratios.__getitem__)
    return table, Mark("a subclass", f"≤ {WANTED:g}×", f"{ratios[worst]:.2f}× ({worst})", ratios[worst] <= WANTED)
