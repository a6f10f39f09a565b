"""Sizes that may change, as `torch.export` spells them."""

from __future__ import annotations

from typing import Any


def with_symbolic_sizes(mod: Any, args: Any, kwargs: Any, dynamic_shapes: Any) -> Any:
    raise NotImplementedError
