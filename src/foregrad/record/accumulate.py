"""Gradients that arrive by `.grad`.

A reentrant checkpoint runs a backward of its own inside of the backward, which adds to `.grad` of the parameters that
it finds, and it refuses to run where single gradients are asked for. So where the tape holds one, a whole backward is
recorded, and gradients are read from the leaves. Other functions that call `backward` in their backward add to `.grad`
too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from .._torch import gradients_of, has_accumulation_hooks, without_function_modes
from ..errors import UnsupportedError
from .engine import Engine
from .tape import tape_edges


def accumulated(
    engine: Engine,
    targets: Sequence[Tensor],
    tangents: Sequence[Tensor],
    leaves: Sequence[Tensor],
    create_graph: bool,
) -> list[Tensor | None]:
    """What a whole backward adds to `.grad` of the leaves, which is put back."""
    reached = {following for _, following in tape_edges(targets)}
    for leaf in leaves:
        if engine.is_abstract(leaf):
            continue
        if has_accumulation_hooks(leaf) or leaf.grad_fn in reached:
            kind = "parameter with hooks on its gradient" if leaf.is_leaf else "tensor from a closure that is no leaf"
            raise UnsupportedError(
                f"a {kind} is passed to a custom function beside a reentrant checkpoint: this cannot be compiled yet. "
                "Use use_reentrant=False, pass the tensor as an argument, or let the function find it by itself."
            )
    with _without_gradients([leaf for leaf in leaves if leaf.is_leaf]):
        gradients_of(targets, tangents, (), create_graph)
        with without_function_modes():
            return [leaf.grad if leaf.is_leaf else None for leaf in leaves]


@contextlib.contextmanager
def _without_gradients(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Leaves start with no gradient, and get back the one they had."""
    with without_function_modes():
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
    try:
        yield
    finally:
        with without_function_modes():
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient


def with_added(
    engine: Engine,
    targets: Sequence[Tensor],
    tangents: Sequence[Tensor],
    leaves: Sequence[Tensor],
    create_graph: bool,
) -> list[Tensor | None]:
    """Gradients of single leaves, and what the backward itself adds to their `.grad`, which is put back."""
    with without_function_modes():
        before = [leaf.grad if leaf.is_leaf else None for leaf in leaves]
    found = list(gradients_of(targets, tangents, leaves, create_graph))
    with without_function_modes():
        for i, (leaf, gradient) in enumerate(zip(leaves, before, strict=True)):
            added = leaf.grad if leaf.is_leaf else None
            if added is gradient or not (engine.is_abstract(leaf) or engine.is_abstract(added)):
                continue  # the last is another thread's doing, to a tensor that is no twin
            leaf.grad = gradient
            if gradient is not None or not engine.is_abstract(leaf):
                raise UnsupportedError(
                    "a backward that runs inside of the backward replaces a gradient from before the call: this cannot "
                    "be compiled yet."
                )
            known = found[i]
            found[i] = added if known is None or added is None else known + added
    return found
