"""Backward graphs under vmap."""

import pytest
import torch

import foregrad
from helpers import leaf, nop


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.as_strided((2, 2), (1, 2), 1),
        lambda x: torch.as_strided_copy(x, (2, 2), (1, 2), 1) * x.sum(),
        lambda x: torch.as_strided_scatter(x.sin(), x[0, :2], (2,), (3,), 1),
    ],
)
def test_gradients_through_strides_are_batched(program):
    """J-10: torch's vmaps have no rule, or a wrong one, for the operator in the graph."""
    x = leaf(3, 3)
    y, expected = foregrad.aot_function(program, nop)(x), program(x)
    tangents = torch.arange(1.0, 1 + 3 * y.numel()).reshape(3, *y.shape)
    (found,) = torch.autograd.grad(y, x, tangents, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(expected, x, tangent.clone(), retain_graph=True)[0] for tangent in tangents]
    assert torch.allclose(found, torch.stack(one_by_one))
