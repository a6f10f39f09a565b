"""Find recorded tensors that outlived the recording where the user would meet them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..errors import EscapeError
from ..record.lines import where
from ..record.recording import Recording
from .places import Surroundings


class Containers:
    """Lists and dicts around a program, as they were before it was recorded."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._before = [(path, value, type(value)(value)) for path, value in surroundings.containers]

    def refuse_escapes(self, recording: Recording) -> None:
        """Take recorded tensors out of the user's containers again, and say which line put them there."""
        for path, value, before in self._before:
            escaped = [
                item for item in _items(value) if isinstance(item, Tensor) and recording.engine.is_abstract(item)
            ]
            if escaped:
                _put_back(value, before)
                raise EscapeError(
                    f"A tensor of the program escapes into {path}; it was made at {_line_of(escaped[0], recording)}. "
                    "While the program is recorded its tensors have no data: return the tensor instead, or compile "
                    "with fallback='eager'."
                )


def _items(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def _put_back(value: Any, before: Any) -> None:
    value.clear()
    value.extend(before) if isinstance(value, list) else value.update(before)


def _line_of(tensor: Tensor, recording: Recording) -> str:
    for step in recording.steps:
        if step.out is tensor or (isinstance(step.out, (list, tuple)) and any(item is tensor for item in step.out)):
            return where(step.stack)
    return "an unknown line"
