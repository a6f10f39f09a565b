"""How an exported program is called and what it returns, as trees."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import Any

from .._torch import pytree
from ..frontend.capturing import Capture
from ..frontend.tree import unflatten
from ..slots import Input, Output
from ..subclasses.layout import Layout, Wrapped
from .wrappers import Wrappers, in_parts


@dataclass(frozen=True)
class Structure:
    """The trees of a program's arguments and of its result."""

    in_spec: Any  # of ((*parameters, *buffers, *args), kwargs)
    out_spec: Any


def structure_of(capture: Capture) -> Structure:
    """The trees of a program's arguments, its state in front of them, and of its result."""
    arguments, results = _layouts(capture)
    args, kwargs = unflatten(capture.arguments.tree, [in_parts(layout, repeat(0)) for layout in arguments])
    result = unflatten(capture.result.tree, [in_parts(layout, repeat(0)) for layout in results])
    state = sum(1 if layout is None else layout.leaves for layout in _state_layouts(capture))
    in_spec = pytree.tree_structure(((*[0] * state, *args), kwargs))
    return Structure(in_spec, pytree.tree_structure(result))


def wrappers_of(capture: Capture) -> Wrappers | None:
    """How arguments and results are put together, if any of them is a wrapper subclass."""
    arguments, results = _layouts(capture)
    if not any((*arguments, *results)):
        return None
    call = unflatten(capture.arguments.tree, [0] * len(arguments))
    result = unflatten(capture.result.tree, [0] * len(results))
    return Wrappers(arguments, results, pytree.tree_structure(call), pytree.tree_structure(result))


def _layouts(capture: Capture) -> tuple[tuple[Layout | None, ...], tuple[Layout | None, ...]]:
    """Of the arguments and of the results, leaf by leaf: None for what is plain."""
    joint = capture.joint
    arguments = tuple(r.layout for r in joint.recording.inputs if isinstance(r.slot, Input))
    returned = dict(zip(joint.signature.returned, joint.returned_nodes, strict=True))
    found = (returned[Output(i)] for i in range(joint.visible))
    return arguments, tuple(value.layout if isinstance(value, Wrapped) else None for value in found)


def _state_layouts(capture: Capture) -> list[Layout | None]:
    slots = {slot for slot, _ in capture.state}
    return [recorded.layout for recorded in capture.joint.recording.inputs if recorded.slot in slots]
