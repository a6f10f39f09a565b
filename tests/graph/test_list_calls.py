"""Graphs that run as they are: operators on lists, as optimizers call them."""

import pytest
import torch

import foregrad
from foregrad._torch import direct_call

aten = torch.ops.aten
X, Y = torch.ones(3, 3), torch.ones(())


def test_operators_that_update_lists():
    state = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.9,
        "weight_decay": 0.1,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    found = direct_call(aten._fused_adamw_.default, ([X], [X], [X], [X], [], [Y]), state)
    assert found is torch._C._VariableFunctions._fused_adamw_


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", ["add", "mul", "div"])
def test_a_number_for_a_list_of_tensors(name, dtype):
    """A tensor of the number gives the same bits, in types that kernels calculate with; others take the number."""
    update = getattr(torch, f"_foreach_{name}" if dtype is torch.int64 else f"_foreach_{name}_")

    def program(*tensors):
        result = update(tensors, 0.1 if dtype.is_floating_point else 3)
        return result if dtype is torch.int64 else [t + 0 for t in tensors]

    torch.manual_seed(0)
    given = [torch.randn(200).mul(100).to(dtype), torch.tensor(7, dtype=dtype), torch.randn(3, 3).to(dtype)]
    expected = program(*[t.clone() for t in given])
    for _ in range(2):
        found = foregrad.compile(program, "eager", inplace=True)(*[t.clone() for t in given])
    torch.testing.assert_close(expected, found, rtol=0, atol=0)
