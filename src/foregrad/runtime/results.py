"""What a graph returns: which of it the code around the graph reads, and the line that names it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from .._torch import autocast_off
from ..joint.build import Joint
from ..joint.outputs import Number, Plain, Result, ViewOfBase, ViewOfInput, ViewOfOutput
from ..slots import Output, Returned, Updated
from .writer import Writer


def values_needed(joint: Joint) -> list[Returned]:
    """Which of the graph's results the stages around it read."""
    needed: list[Returned] = []
    written = {facts.recorded.slot for facts in joint.touched if facts.written}
    for slot in joint.signature.returned:
        match slot:
            case Output(index):
                result = joint.outputs.results[index]
                if isinstance(result, (Plain, Number)) or gives_geometry(result):
                    needed.append(slot)
            case Updated(of) if of not in written:  # its shape is set without looking at the graph's result
                continue
            case _:
                needed.append(slot)
    return needed


def gives_geometry(result: Result) -> bool:
    """Whether the graph's own result only says where a view lies; it may be an input that changes its shape later."""
    match result:
        case ViewOfInput(rebuild=r) | ViewOfBase(rebuild=r) | ViewOfOutput(rebuild=r):
            return r.steps is None and not r.early
        case _:
            return False


def repeated_results(joint: Joint) -> set[Returned]:
    """Outputs that are tensors of their own to the user, but one value to the graph."""
    seen: set[int] = set()
    repeated: set[Returned] = set()
    for slot, node in zip(joint.signature.returned, joint.returned_nodes, strict=True):
        if isinstance(slot, Output) and isinstance(joint.outputs.results[slot.index], Plain) and id(node) in seen:
            repeated.add(slot)
        seen.add(id(node))
    return repeated


def write_graph_call(writer: Writer, names: Sequence[str], call: str, autocast: bool) -> None:
    """Call a graph and name its results; without autocast if it was on while recording: its casts are in the graph."""
    with writer.block(f"with {writer.bind(autocast_off, 'autocast_off')}():") if autocast else contextlib.nullcontext():
        if names:
            writer.take_apart(names, call)
        else:
            writer.line(call)
