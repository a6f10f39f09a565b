"""Memory that Python can write to behind torch's back: arrays of numpy and buffers that a program makes tensors of.

What an operator reads of it becomes a constant of the graph, so it is copied at that moment. A tensor that shares such
memory (`torch.from_numpy`) would show later writes as well: a program that makes them is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload, disable_modes, pytree, without_function_modes
from ..errors import UnsupportedError
from ..ops import aten, tensors_in
from .lines import Stack, where
from .overlap import storage_of
from .step import Step


class ForeignMemory:
    """The tensors over such memory that a recording has met, with what they held."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps  # so far
        self._shared: list[tuple[Tensor, Tensor, int]] = []  # a tensor, a copy, the step that took it, while code runs
        self._lifted: list[int] = []  # all such steps

    def copied(self, op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of an operator that reads no recorded tensor, with copies of those over such memory."""
        with disable_modes(), without_function_modes():
            copies = [_copy(arg) if isinstance(arg, Tensor) and _is_foreign(arg) else arg for arg in args]
        if copies[0] is not args[0] and op is aten.lift_fresh.default:  # what it gives shares the memory
            self._shared.append((args[0], copies[0], len(self._steps)))
            self._lifted.append(len(self._steps))
        return tuple(copies)

    def refuse_write(self, written: Sequence[Any], stack: Stack) -> None:
        """A write to a tensor that shares such memory: the array would not see it."""
        shared = {storage_of(self._steps[position].out) for position in self._lifted if position < len(self._steps)}
        if shared and any(storage_of(tensor) in shared for tensor in tensors_in(written)):
            raise UnsupportedError(
                f"a tensor that shares the memory of an array, or a buffer, is written, at {where(stack)}: this cannot "
                "be compiled. Write to a clone."
            )

    def require_unchanged(self, result: Any) -> None:
        """Refuse a program, with this result, that wrote to memory of which it has made a tensor.

        It has run: the memory is let go, for a tensor keeps the array alive that it lies in.
        """
        shared, self._shared = self._shared, []
        for tensor, copy, position in shared:
            with disable_modes(), without_function_modes():
                same = torch.equal(_bytes_of(tensor), _bytes_of(copy))
            if not same and self._shows_writes(position, result):
                raise UnsupportedError(
                    f"the array, or buffer, that became a tensor at {where(self._steps[position].stack)} is written "
                    "afterwards: the tensor shares its memory, which cannot be compiled. Use torch.tensor(), which "
                    "makes a copy."
                )

    def release(self) -> None:
        """Let go of the memory."""
        self._shared.clear()

    def _shows_writes(self, position: int, result: Any) -> bool:
        """Whether a tensor that shares memory may have been looked at after a write: not if it was copied at once."""
        lifted = self._steps[position].out
        users = [step for step in self._steps[position + 1 :] if any(t is lifted for t in tensors_in(step.args))]
        copied = len(users) == 1 and users[0] is self._steps[position + 1] and users[0].op in _COPIES
        return not copied or any(leaf is lifted for leaf in pytree.tree_leaves(result))


_COPIES = (aten._to_copy.default, aten.clone.default)


def _is_foreign(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    return plain and not tensor.untyped_storage().resizable()


def _copy(tensor: Tensor) -> Tensor:
    """A tensor that lies in a copy of the memory as the other does in the original."""
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().clone(), *place)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
