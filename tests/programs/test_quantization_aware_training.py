"""Quantization-aware training: observers write to buffers, and values are quantized and back."""

import pytest
import torch
from torch import nn
from torch.ao import quantization

import foregrad
from helpers import nop

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv, self.norm, self.relu, self.linear = (
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Linear(16, 2),
        )

    def forward(self, x):
        y = self.relu(self.norm(self.conv(self.quant(x))))
        return self.dequant(self.linear(y.flatten(1)))


def prepared(backend, fused):
    torch.manual_seed(0)
    model = Model().train()
    if fused:
        model = quantization.fuse_modules_qat(model, [["conv", "norm", "relu"]])
    model.qconfig = quantization.get_default_qat_qconfig(backend)
    return quantization.prepare_qat(model)


def trained(model, called):
    for step in range(3):
        torch.manual_seed(step)
        called(torch.randn(2, 3, 4, 4)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        if step == 1:
            model.apply(quantization.disable_observer)
    return list(model.state_dict().values())


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize("fused", [True, False])
def test_observers_write_what_they_see(backend, fused):
    """Observers of channels have no size before the first call, which runs as it was written."""
    states = []
    for compile in (lambda module: module, lambda module: foregrad.aot_module(module, nop)):
        model = prepared(backend, fused)
        states.append(trained(model, compile(model)))
    assert all(map(torch.equal, *states))
