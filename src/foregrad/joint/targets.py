"""What is differentiated of a program's results: all that can be, and in export the loss (X-5), or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import ExportError
from ..options import AOTConfig, Loss
from ..slots import Base, Output, Returned, Updated
from .inputs import InputFacts, is_stale
from .outputs import OutputFacts, Plain


def targets_of(
    config: AOTConfig, facts: Sequence[InputFacts], outputs: OutputFacts, visible: int
) -> dict[Returned, Tensor]:
    """What is differentiated, as the options ask for it; the first `visible` results are the user's."""
    match config.differentiate:
        case Loss(index):
            return _loss_target(index, outputs, visible)
        case False:
            return {}
        case _:
            return _all_targets(facts, outputs)


def _all_targets(facts: Sequence[InputFacts], outputs: OutputFacts) -> dict[Returned, Tensor]:
    """Everything that can be differentiated."""
    targets: dict[Returned, Tensor] = {}
    for item in facts:
        if item.written and item.write_seen_by_autograd and not item.written_in_graph:
            targets[Updated(item.recorded.slot)] = item.recorded.seen
    for i, result in enumerate(outputs.results):
        if isinstance(result, Plain) and result.differentiable:
            targets[Output(i)] = result.tensor
    for i, base in enumerate(outputs.bases):
        targets[Base(i)] = base
    return targets


def _loss_target(index: int, outputs: OutputFacts, visible: int) -> dict[Returned, Tensor]:
    """The loss among the first `visible` results, which must be the only one that requires grad."""
    if not 0 <= index < visible:
        raise ExportError(f"output_loss_index={index}, but the program returns {visible} values.")
    loss = outputs.tensors[index]
    if loss is None:
        raise ExportError(f"output {index} was marked as the loss, but it does not require gradients: it is no tensor.")
    if is_stale(loss) or not loss.requires_grad:
        raise ExportError(
            f"output {index} was marked as the loss, but it does not require gradients. Mark another output, or let a "
            "parameter or an input that it is computed from require grad."
        )
    if loss.numel() != 1:
        raise ExportError(
            f"We require the output marked as the loss (at index {index}) to be a scalar, but it has shape "
            f"{tuple(loss.shape)}. Reduce it, as with sum() or mean()."
        )
    if loss.is_complex():
        raise ExportError(f"the loss (at index {index}) is complex. Take a real number of it, as with abs().")
    for i, tensor in enumerate(outputs.tensors[:visible]):
        if i != index and tensor is not None and tensor is not loss and not is_stale(tensor) and tensor.requires_grad:
            raise ExportError(
                "Found an output of the forward that requires gradients, that was not the scalar loss: it stands at "
                f"index {i}, has shape {tuple(tensor.shape)}, and the loss is at {index}. A backward exists for the "
                "loss alone: detach() the other outputs."
            )
    return {Output(index): loss}
