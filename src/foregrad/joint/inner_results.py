"""Results whose gradient is not known outside of the program: others are computed from them, or they have a hook.

The program is one node of autograd's graph, so a result gets, outside of it, only the gradient that comes from outside,
as it is before a hook of the program's has seen it. Who asks for its whole gradient, by a hook or by `retain_grad()`,
is told so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..record.hooks import Registered
from ..record.tape import ends_behind
from ..slots import Output, Primal, Returned, Updated
from .inputs import is_stale
from .outputs import OutputFacts, Plain, SameAsInput, SameAsOutput

_COMPUTED_FROM = "other results are computed from it: their part of its gradient stays inside of the compiled backward"
_HOOKED = "the program gave it a hook, which is a part of the compiled backward: outside, its gradient is as before"


@dataclass(frozen=True, slots=True)
class InnerResult:
    """A tensor that the caller gets, and whose gradient it does not see whole."""

    of: Output | Primal
    name: str  # in the user's words
    tangents: tuple[int, ...]  # when one of them arrives, a part of the gradient stays inside
    why: str


def hooked_results(
    outputs: OutputFacts, paths: Sequence[str], targets: Mapping[Returned, Tensor], hooks: Sequence[Registered]
) -> tuple[InnerResult, ...]:
    """Results that have a hook in the recorded backward."""
    places = {slot: k for k, slot in enumerate(targets)}
    return tuple(
        InnerResult(Output(i), paths[i], (places[Output(i)],), _HOOKED)
        for i, (result, tensor) in enumerate(zip(outputs.results, outputs.tensors, strict=True))
        if isinstance(result, Plain) and Output(i) in places and is_hooked(tensor, hooks)
    )


def is_hooked(result: Tensor | None, hooks: Sequence[Registered]) -> bool:
    """Whether one of the program's hooks may change the gradient of a result, rather than of what it was before."""
    own = [hook for hook in hooks if hook.tensor is result and not hook.serves_several]
    return bool(own) and not is_stale(own[0].tensor) and any(hook.node is hook.tensor.grad_fn for hook in own)


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
        InnerResult(slot, name, tuple(k for k, reached in enumerate(behind) if end in reached), _COMPUTED_FROM)
        for slot, name, end in inner
    )
