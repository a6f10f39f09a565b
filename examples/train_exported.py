"""Train a model from a file, without its Python code: the exported step and its signature are all that is needed.

    python examples/train_exported.py

One half exports a training step (a classifier with batch norm and a batch size that may change) and saves it. The other
loads the file and trains, with a loop that knows names of nodes only. The losses equal those of eager PyTorch.
"""

from __future__ import annotations

import copy
import pathlib
import tempfile
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import foregrad.export

STEPS, RATE = 30, 0.1


class Classifier(nn.Module):
    """Two spirals, told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), target)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Points on two spirals, in batches of several sizes."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        target = torch.randint(2, (32 + step % 5,), generator=generator)
        turn = torch.rand(target.shape, generator=generator) * 6
        angle = turn + target * torch.pi
        yield torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 6, target


def train_from_file(path: pathlib.Path) -> list[float]:
    """Train what a file holds; every name comes from the signature."""
    exported = foregrad.export.load(path)
    graph, signature, state = exported.graph_module, exported.signature, dict(exported.state)
    fed = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    written = {**signature.buffers_to_mutate, **signature.parameters_to_mutate}
    backward = signature.backward_signature
    assert backward is not None
    inputs = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    outputs = [node.name for node in graph.graph.output_node().args[0]]
    losses = []
    with torch.no_grad():
        for batch in batches():
            user = dict(zip(signature.user_inputs, batch, strict=True))
            found = dict(zip(outputs, graph(*(user[n] if n in user else state[fed[n]] for n in inputs)), strict=True))
            losses.append(found[backward.loss_output].item())
            for node, name in written.items():
                state[name].copy_(found[node])
            for node, name in backward.gradients_to_parameters.items():
                state[name].sub_(found[node], alpha=RATE)
    return losses


def train_eagerly(model: nn.Module) -> list[float]:
    """The same with the module itself."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in batches():
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Export, train from the file, and compare."""
    torch.manual_seed(0)
    model = Classifier()
    batch = Dim("batch")
    exported = foregrad.export.export(
        model, next(batches()), loss=0, dynamic_shapes={"x": {0: batch}, "target": {0: batch}}
    )
    print(str(exported).partition("\n\n")[0], end="\n\n")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "step.pt2"
        exported.save(path)
        exported_losses = train_from_file(path)
    eager_losses = train_eagerly(copy.deepcopy(model))
    difference = max(abs(a - b) for a, b in zip(exported_losses, eager_losses, strict=True))
    print(f"loss {exported_losses[0]:.4f} -> {exported_losses[-1]:.4f}, eager {eager_losses[-1]:.4f}")
    print(f"largest difference over {STEPS} steps: {difference:.1e}")
    if difference > 1e-6:
        raise SystemExit("The losses are not the same.")


if __name__ == "__main__":
    main()
