"""Programs that differentiate a gradient: potentials trained on forces."""

import copy

import pytest
import torch

import foregrad
from examples.train_potential import CUTOFF, ForceLoss, Potential, clusters


def gradients(program, module, batch):
    module.zero_grad()
    loss = program(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def outside(model):
    """The force is taken outside of what is compiled."""

    def loss(kinds, positions, pairs, energies, forces):
        positions = positions.detach().requires_grad_()
        found = model(kinds, positions, pairs)
        (gradient,) = torch.autograd.grad(found.sum(), positions, create_graph=True)
        return (found - energies).square().mean() + (gradient + forces).square().mean()

    return loss


@pytest.mark.parametrize("inside", [True, False])
def test_neighbour_lists_of_many_lengths_take_two_programs(inside):
    torch.manual_seed(0)
    module = ForceLoss(Potential(width=8, layers=2, shells=6))
    reference = copy.deepcopy(module)
    compiled = foregrad.compile(module if inside else module.potential, "eager")
    program = compiled if inside else outside(compiled)
    lengths = set()
    for seed in range(5):
        batch = clusters(2, 16, torch.Generator().manual_seed(seed))
        lengths.add(batch.pairs.shape[1])
        expected = gradients(reference if inside else outside(reference.potential), reference, batch)
        for found, wanted in zip(gradients(program, module, batch), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert len(lengths) > 3 and len(compiled.specializations) == 2


def test_the_data_of_the_example_is_what_it_says():
    """Pairs lie within the cutoff, and forces of a cluster sum to nothing."""
    batch = clusters(2, 8, torch.Generator().manual_seed(0))
    source, target = batch.pairs
    assert (batch.positions[source] - batch.positions[target]).norm(dim=-1).max() < CUTOFF
    torch.testing.assert_close(batch.forces.view(2, 8, 3).sum(1), torch.zeros(2, 3), rtol=0, atol=1e-4)
