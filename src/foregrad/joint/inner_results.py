"""Results that other results are computed from.

The program is one node of autograd's graph, so such a result gets, outside of it, only the gradient that comes from
outside. Who asks for its whole gradient, by a hook or by `retain_grad()`, is told so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..record.tape import ends_behind
from ..slots import Output, Primal, Returned, Updated
from .inputs import is_stale
from .outputs import OutputFacts, SameAsInput, SameAsOutput


@dataclass(frozen=True, slots=True)
class InnerResult:
    """A tensor that the caller gets, from which the program computes others."""

    of: Output | Primal
    name: str  # in the user's words
    tangents: tuple[int, ...]  # of those others: when one of them arrives, a part of the gradient stays inside


def inner_results(
    outputs: OutputFacts, paths: Sequence[str], targets: Mapping[Returned, Tensor]
) -> tuple[InnerResult, ...]:
    """Results, and inputs that were written, on the way from a target to the inputs."""
    if len(targets) < 2:
        return ()
    shown: list[tuple[Output | Primal, str, Tensor]] = [
        (slot.of, str(slot.of), tensor) for slot, tensor in targets.items() if isinstance(slot, Updated)
    ]
    for i, (result, tensor) in enumerate(zip(outputs.results, outputs.tensors, strict=True)):
        if tensor is not None and not isinstance(result, (SameAsInput, SameAsOutput)) and not is_stale(tensor):
            shown.append((Output(i), paths[i], tensor))
    everything = ends_behind(list(targets.values()))
    inner = [
        (slot, name, (t.grad_fn, t.output_nr)) for slot, name, t in shown if (t.grad_fn, t.output_nr) in everything
    ]
    if not inner:
        return ()
    behind = [ends_behind([tensor]) for tensor in targets.values()]
    return tuple(
        InnerResult(slot, name, tuple(k for k, reached in enumerate(behind) if end in reached))
        for slot, name, end in inner
    )
