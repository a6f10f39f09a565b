"""What is left of the saved values once autograd has freed them, where other outputs still need them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


class Stash:
    """Saved values that a backward of some outputs left for the others.

    Eager frees what belongs to the nodes that ran, and no more. A program is one node to autograd, which frees
    everything at once: so the program keeps what eager would have kept, and refuses what eager would refuse.
    """

    def __init__(self, values: Sequence[Any], kept: Iterable[int], freed: frozenset[Any]) -> None:
        self._count = len(values)
        self._kept: dict[int, Any] = {i: values[i] for i in kept}
        self._versions = {i: value._version for i, value in self._kept.items() if isinstance(value, Tensor)}
        self.freed = freed  # nodes of the recording's tape

    def values(self) -> list[Any]:
        """The values by position, None where nothing is kept; one that was changed since then is refused."""
        for i, version in self._versions.items():
            value = self._kept[i]
            if value._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a {value.dtype} of shape {list(value.shape)} is at version {value._version}; expected version "
                    f"{version} instead."
                )
        return [self._kept.get(i) for i in range(self._count)]
