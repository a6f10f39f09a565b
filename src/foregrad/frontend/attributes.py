"""Tensors that a program puts into containers of its module's attributes: an exported graph would lose them (X-12)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_STANDARD = frozenset(vars(nn.Module()))
_DEPTH = 8  # a container may hold itself


class HeldTensors:
    """Tensors in lists, tuples and dicts that are attributes of a module or of one inside of it, by path.

    >>> import torch
    >>> module = torch.nn.Module()
    >>> module.d = {"a": [torch.zeros(1)]}
    >>> held = HeldTensors(module)
    >>> module.d["a"][0] = torch.ones(1)
    >>> held.replaced()
    ["d['a'][0]"]
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = dict(self._walk())

    def replaced(self) -> list[str]:
        """Where another tensor is now, or one where there was none."""
        return [path for path, tensor in self._walk() if self._before.get(path) is not tensor]

    def _walk(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, child in self._module.named_modules():
            for name, value in vars(child).items():
                if name not in _STANDARD and isinstance(value, (list, tuple, dict)):
                    yield from _tensors_in(value, f"{prefix}.{name}" if prefix else name, _DEPTH)


def _tensors_in(value: Any, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(item, f"{path}[{key!r}]", depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tensors_in(item, f"{path}[{i}]", depth - 1)
