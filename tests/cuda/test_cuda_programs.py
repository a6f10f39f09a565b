"""Programs whose operators differ on a CUDA device: cuDNN batch norm, dropout, attention, autocast."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foregrad
from checking import check_core
from helpers import nop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def randn(*shape, **options):
    return torch.randn(*shape, device="cuda", **options)


def leaf(*shape, **options):
    return randn(*shape, **options).requires_grad_()


MODULES = {
    "conv, batch norm and relu": lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True)),
    "batch norm in eval": lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)).eval(),
    "group norm": lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutional_modules(name, layout):
    images = randn(4, 3, 8, 8).contiguous(memory_format=layout).requires_grad_()
    check_core(MODULES[name]().cuda(), images)


def test_a_transformer_layer():
    check_core(nn.TransformerEncoderLayer(4, 2, 8).cuda(), leaf(2, 3, 4))


def test_cudnn_recurrent_layers_are_refused():
    """cuDNN packs the weights into one storage with `set_`."""
    with pytest.raises(foregrad.errors.UnsupportedError, match="set_"):
        foregrad.aot_module(nn.LSTM(4, 5).cuda(), nop)(leaf(2, 3, 4))


def half_precision(x, w):
    with torch.autocast("cuda", torch.bfloat16):
        return (x @ w).relu()


FUNCTIONS = {
    "dropout": (lambda x: F.dropout(x, 0.5), lambda: (leaf(4, 6),)),
    "dropout of a transposed tensor": (lambda x: F.dropout(x.transpose(0, 1), 0.5), lambda: (leaf(4, 6),)),
    "random numbers": (lambda x: x * torch.rand_like(x) + torch.randn(4, 6, device="cuda"), lambda: (leaf(4, 6),)),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), lambda: (leaf(2, 4, 16, 8),)),
    "attention with dropout": (
        lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.2),
        lambda: (leaf(2, 4, 16, 64, dtype=torch.bfloat16),),
    ),
    "a written input": (lambda x, y: (x.mul_(2), x + y)[1], lambda: (randn(3, 4), leaf(4))),
    "copies between devices": (lambda x: x.cpu().sin().cuda() + torch.ones(4).cuda(), lambda: (leaf(3, 4),)),
    "a number on the host": (lambda x: x * torch.tensor(3.0), lambda: (leaf(3, 4),)),
    "autocast inside": (half_precision, lambda: (leaf(4, 4), leaf(4, 4))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    function, arguments = FUNCTIONS[name]
    check_core(function, *arguments())


def test_graphs_of_cuda_programs_hold_cuda_tensors():
    captured = foregrad.capture(lambda x: x.sin(), leaf(3))
    assert all(n.meta["val"].device.type == "cuda" for n in captured.joint_graph.graph.nodes if "val" in n.meta)
