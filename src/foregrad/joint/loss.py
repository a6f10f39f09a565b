"""What an exported training step differentiates: one scalar result (X-5)."""

from __future__ import annotations

from torch import Tensor

from ..errors import ExportError
from ..slots import Output, Returned
from .inputs import is_stale
from .outputs import OutputFacts


def loss_target(index: int, outputs: OutputFacts, visible: int) -> dict[Returned, Tensor]:
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
