"""Graphs that run as they are: eager's kernels, and no more than eager's memory."""

import collections
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foregrad


class Network(nn.Module):
    """Layers with everything that a network saves for its backward; the loss and the logits are returned."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        )

    def forward(self, x, target):
        logits = F.dropout(self.layers(x), 0.1)
        return F.cross_entropy(logits, target), logits


def step(program, x, target):
    torch.manual_seed(1)
    program(x, target)[0].backward()


def profiled(program, x, target):
    """How often each kernel runs in a step, and the most bytes that are alive in it."""
    step(program, x, target)
    for parameter in program.parameters():
        parameter.grad = None
    gc.collect()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        step(program, x, target)
    names = [event.name for event in profile.events()]
    kernels = collections.Counter(name for name in names if name.startswith("aten::") and name != "aten::detach")
    alive, peak = 0, 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return kernels, peak


@pytest.mark.filterwarnings("ignore")  # of the profiler, about itself
def test_a_step_takes_eagers_kernels_and_memory():
    """Also where one of two results is differentiated, as the losses of models are."""
    x, target = torch.randn(512, 64), torch.randint(64, (512,))
    model = Network()
    kernels, peak = profiled(model, x, target)
    compiled = foregrad.compile(Network(), "eager")
    own_kernels, own_peak = profiled(compiled, x, target)
    assert own_peak <= peak
    for name in ("addmm", "mm", "gelu", "native_layer_norm", "native_layer_norm_backward", "_log_softmax"):
        assert own_kernels[f"aten::{name}"] == kernels[f"aten::{name}"]
    assert sum(own_kernels.values()) <= sum(kernels.values())
    assert all(map(torch.equal, *([p.grad for p in m.parameters()] for m in (model, compiled))))
    _, least = profiled(foregrad.compile(Network(), "eager", partition="min_cut"), x, target)
    assert least < 0.9 * peak
