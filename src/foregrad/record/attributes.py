"""Python attributes of tensors: what the user, or the program, has put on them.

The program sees an abstract tensor with the attributes of its argument, and the user's own object where it finds a
tensor by itself. Neither may leave a trace: what the program puts there is refused, for a compiled call would not see
what was there before.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._torch import fake_attribute_names
from ..errors import StateChangeError
from ..slots import Primal

MARKS = ("_foregrad_", "_dynamo_", "_is_param")  # also hints for front ends, and what makes a tensor a parameter


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """Attributes that are not the recording's own."""
    held = vars(tensor)
    others = held.keys() - _not_the_users
    if not others:
        return {}
    _not_the_users.update(name for name in others if name.startswith(MARKS) or name in fake_attribute_names())
    return {name: held[name] for name in held if name not in _not_the_users}


_not_the_users: set[str] = set()  # names that were seen on tensors, of what torch or Foregrad has put there


class FoundAttributes:
    """The attributes of the user's own tensors, as the recording found them."""

    def __init__(self) -> None:
        self._before: list[tuple[Primal, Tensor, Tensor, dict[str, Any]]] = []

    def note(self, slot: Primal, real: Tensor, seen: Tensor) -> None:
        """A tensor becomes an input."""
        self._before.append((slot, real, seen, own_attributes(real) if vars(real) else {}))

    def put_back(self) -> StateChangeError | None:
        """Undo what the program did to them; gives what is to be said about that."""
        refusal = None
        for slot, real, seen, before in self._before:
            changed = [*_changed(own_attributes(real), before), *_changed(own_attributes(seen), before)]
            for name in changed:
                vars(real).pop(name, None)
                if name in before:
                    vars(real)[name] = before[name]
                refusal = refusal or StateChangeError(
                    f"the program changes the attribute {name!r} of {slot}: a compiled call would not see what it "
                    "was before. Set it outside the program, or compile with fallback='eager'."
                )
        self._before.clear()
        return refusal


def _changed(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Attributes that are not what they were."""
    return [name for name in {**now, **before} if now.get(name, _ABSENT) is not before.get(name, _ABSENT)]


_ABSENT = object()
