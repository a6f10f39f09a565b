"""Learn the forces between atoms, eagerly and with Foregrad, and compare what a user can see.

The atoms attract and repel each other as Morse's potential says; the example makes clusters of them and computes their
energies and forces itself. A model is trained on both. Its forces are the gradient of its energy, so its training step
differentiates a gradient: `torch.compile` refuses that, and Foregrad compiles it in one line. Each batch has another
number of neighbouring pairs, which becomes a symbol.

    python examples/train_potential.py --steps 200 --backend inductor
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import foregrad

CUTOFF = 3.0
"""How far an atom sees."""


# The model: atoms pass messages along pairs, filtered by distance ---------------------------------


class Interaction(nn.Module):
    """Each atom collects what its neighbours send."""

    def __init__(self, width: int, shells: int) -> None:
        super().__init__()
        self.filters = nn.Sequential(nn.Linear(shells, width), nn.SiLU(), nn.Linear(width, width))
        self.sent = nn.Linear(width, width, bias=False)
        self.update = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, atoms: Tensor, shells: Tensor, source: Tensor, target: Tensor) -> Tensor:
        messages = self.sent(atoms)[source] * self.filters(shells)
        return atoms + self.update(torch.zeros_like(atoms).index_add(0, target, messages))


class Potential(nn.Module):
    """The energy of each atom, as SchNet computes it: from the kinds of atoms and the distances of pairs."""

    def __init__(self, width: int = 64, layers: int = 3, shells: int = 32, kinds: int = 4) -> None:
        super().__init__()
        self.kinds = nn.Embedding(kinds, width)
        self.register_buffer("centres", torch.linspace(0, CUTOFF, shells))
        self.layers = nn.ModuleList(Interaction(width, shells) for _ in range(layers))
        self.energy = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, kinds: Tensor, positions: Tensor, pairs: Tensor) -> Tensor:
        source, target = pairs
        distances = (positions[source] - positions[target]).norm(dim=-1, keepdim=True)
        fade = 0.5 * (torch.cos(torch.pi * distances / CUTOFF) + 1)
        shells = torch.exp(-8 * (distances - self.centres) ** 2) * fade
        atoms = self.kinds(kinds)
        for layer in self.layers:
            atoms = layer(atoms, shells, source, target)
        return self.energy(atoms).squeeze(-1)


class ForceLoss(nn.Module):
    """A model and its loss: the program that is trained."""

    def __init__(self, potential: Potential) -> None:
        super().__init__()
        self.potential = potential

    def forward(self, kinds: Tensor, positions: Tensor, pairs: Tensor, energies: Tensor, forces: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        found = self.potential(kinds, positions, pairs)
        (gradient,) = torch.autograd.grad(found.sum(), positions, create_graph=True)
        return F.mse_loss(found, energies) + F.mse_loss(-gradient, forces)


# What is learnt -----------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Clusters of atoms, one after another."""

    kinds: Tensor
    positions: Tensor
    pairs: Tensor  # of atoms of the same cluster that see each other, in both directions
    energies: Tensor
    forces: Tensor


def clusters(count: int, atoms: int, generator: torch.Generator) -> Batch:
    """Random clusters, with the energies and forces of a Morse potential."""
    kinds = torch.randint(4, (count * atoms,), generator=generator)
    grid = torch.cartesian_prod(*(torch.arange(3.0),) * 3)[:atoms]
    positions = (grid.repeat(count, 1) + 0.25 * torch.randn(count * atoms, 3, generator=generator)).requires_grad_()
    cluster = torch.arange(count).repeat_interleave(atoms)
    near = (
        (torch.cdist(positions, positions) < CUTOFF) & (cluster[:, None] == cluster) & ~torch.eye(len(cluster)).bool()
    )
    pairs = near.nonzero().t().contiguous()
    source, target = pairs
    depth = 0.2 + 0.1 * (kinds[source] + kinds[target])
    stretch = torch.exp(-1.5 * ((positions[source] - positions[target]).norm(dim=-1) - 1.0))
    energies = torch.zeros(len(cluster)).index_add(0, target, 0.5 * depth * (stretch**2 - 2 * stretch))
    (gradient,) = torch.autograd.grad(energies.sum(), positions)
    return Batch(kinds, positions.detach(), pairs, energies.detach(), -gradient)


def batches(count: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield clusters(8, 16, generator)


# Training -----------------------------------------------------------------------------------------


@dataclass
class Trainee:
    """One of the two runs: what is called, what is updated, and what was seen."""

    program: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        start = time.perf_counter()
        loss = self.program(*batch)
        loss.backward()
        self.seconds.append(time.perf_counter() - start)
        self.optimizer.step()
        self.losses.append(loss.item())

    @property
    def warm_step(self) -> float:
        return statistics.median(self.seconds[len(self.seconds) // 2 :])


def trainee(program: Callable[..., Tensor], module: nn.Module) -> Trainee:
    return Trainee(program, torch.optim.Adam(module.parameters(), lr=2e-3))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a potential on forces, eagerly and with Foregrad.")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    parser.add_argument("--backend", default="eager", help="for foregrad.compile (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 4:
        parser.error("--steps: four at least, the first two compile")

    torch.manual_seed(0)
    module = ForceLoss(Potential())
    other = copy.deepcopy(module)
    compiled_module = foregrad.compile(other, backend=options.backend)
    eager, compiled = trainee(module, module), trainee(compiled_module, other)
    lengths = set()
    for done, batch in enumerate(batches(options.steps), start=1):
        eager.step(batch)
        compiled.step(batch)
        lengths.add(batch.pairs.shape[1])
        if done % max(1, options.steps // 10) == 0:
            losses = f"loss {eager.losses[-1]:.5f} eager, {compiled.losses[-1]:.5f} Foregrad"
            print(f"step {done:4d} of {options.steps}   {losses}", flush=True)

    apart = max(abs(a - b) / (1 + abs(a)) for a, b in zip(eager.losses, compiled.losses, strict=True))
    print(f"\nneighbour lists of {len(lengths)} lengths, {len(compiled_module.specializations)} programs")
    print(f"losses differ by {apart:.1e} at most")
    print(
        f"forward, forces, backward: {eager.warm_step * 1e3:.1f} ms eager, {compiled.warm_step * 1e3:.1f} ms Foregrad"
    )
    if apart > 1e-2:
        raise SystemExit("The losses are not the same.")


if __name__ == "__main__":
    main()
