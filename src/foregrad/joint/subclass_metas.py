"""The public records about wrapper subclasses of a program (T-2, T-3, V-7)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..slots import Base, Inner, Output, Returned, Updated
from ..subclasses.helpers import create_subclass_meta
from ..subclasses.layout import is_wrapper, layout_of
from .build import Joint


def metas_of(values: Iterable[Any]) -> list[Any]:
    """For each value its position in the flat list, or the record of a wrapper."""
    values = list(values)
    if not any(map(is_wrapper, values)):
        return list(range(len(values)))
    return create_subclass_meta(values)


def input_metas(joint: Joint) -> list[Any]:
    """Of the user's inputs."""
    return metas_of(facts.recorded.seen for facts in joint.inputs if not isinstance(facts.recorded.slot, Inner))


def output_metas(joint: Joint) -> list[Any]:
    """Of what the forward graph returns, before saved values."""
    updated: dict[Returned, Any] = {Updated(facts.recorded.slot): facts.recorded.seen for facts in joint.inputs}
    values: list[Any] = []
    for slot in joint.signature.returned:
        match slot:
            case Output(index):
                values.append(joint.outputs.tensors[index])
            case Base(index):
                values.append(joint.outputs.bases[index])
            case _:
                values.append(updated.get(slot))
    return metas_of(values)


def tangent_metas(joint: Joint) -> list[Any]:
    """Of the tangents."""
    return metas_of(joint.tape.tangents.values())


def tangent_contexts(joint: Joint) -> list[tuple[list[str], Any] | None]:
    """Attribute names and context of each tangent that is a wrapper."""

    def context(tangent: Tensor) -> tuple[list[str], Any] | None:
        return layout_of(tangent).metadata if is_wrapper(tangent) else None

    return [context(tangent) for tangent in joint.tape.tangents.values()]
