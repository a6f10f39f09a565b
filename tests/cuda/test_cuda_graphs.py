"""The backend "cudagraphs" on a device; tests/backends/test_cudagraphs.py has the bookkeeping."""

import copy
import gc

import pytest
import torch
from torch import nn

import foregrad
from foregrad.backends.replay import ReplayedGraph

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def launches():
    """How often each capture was launched."""
    graphs = [item for item in gc.get_objects() if type(item) is ReplayedGraph]
    return [capture.launches for graph in graphs for found in graph._captures.values() for capture in found]


def spread(x):
    """What is saved are views of a result that nobody keeps."""
    return (x.exp()[:, None].expand(3, 2).sin() ** 2).sum()


def test_what_is_kept_may_be_a_view():
    """A view leads to the tensor that it was taken from, which holds the memory too."""
    gc.collect()
    program = foregrad.compile(spread, "cudagraphs")
    for step in range(6):
        x = torch.full((3,), 0.1 * step, device="cuda", requires_grad=True)
        y = x.detach().requires_grad_()
        spread(y).backward()
        program(x).backward()
        torch.testing.assert_close(x.grad, y.grad)
    assert sorted(launches()) == [5, 5]


def test_a_module_trains_as_in_eager():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).cuda()
    other = copy.deepcopy(model)
    program = foregrad.compile(other, "cudagraphs")
    for step in range(5):
        x = torch.randn(6, 4, device="cuda")
        for run in (model, program):
            torch.manual_seed(step)
            run(x).square().sum().backward()
        for ours, eager in zip(other.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, eager.grad)
        for ours, eager in zip(other.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(ours, eager)
