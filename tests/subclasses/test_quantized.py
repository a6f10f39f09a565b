"""Weights that are kept in eight bits by a subclass of their own."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import foregrad
from foregrad.subclasses.layout import leaves_of
from helpers import Graphs, nop

aten = torch.ops.aten


class Quantized(torch.Tensor):
    """Integers, and a scale for each row."""

    @staticmethod
    def __new__(cls, data, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, data, scale, dtype):
        self.data_int8, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_int8", "scale"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        return cls(inner["data_int8"], inner["scale"], context[0])

    @classmethod
    def of(cls, tensor):
        scale = tensor.detach().abs().amax(1, keepdim=True) / 127
        return cls((tensor.detach() / scale).round().to(torch.int8), scale, tensor.dtype)

    def dequantize(self):
        return self.data_int8.to(self.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, *bias = args
            return Linear.apply(x, weight, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            new = cls(func(args[0].data_int8), func(args[0].scale), args[0].dtype)
            return return_and_correct_aliasing(func, args, kwargs, new)
        if func is aten.copy_.default:
            target, source = args[:2]
            target.data_int8.copy_(source.data_int8)
            target.scale.copy_(source.scale)
            return target
        raise NotImplementedError(f"{func} of quantized tensors")


class Linear(torch.autograd.Function):
    """The weight is not trained; gradients reach the input."""

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.weight = weight
        return (x @ weight.dequantize().t()) + (0 if bias is None else bias)

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.dequantize(), None, gradient.sum(0)


def quantized_mlp():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    for layer in (mlp[0], mlp[2]):
        layer.weight = nn.Parameter(Quantized.of(layer.weight), requires_grad=False)
    return mlp


def test_inference():
    """T-1: the graph takes integers and scales"""
    mlp, graphs = quantized_mlp(), Graphs()
    x = torch.randn(5, 6)
    with torch.no_grad():
        expected = mlp(x)
        compiled = foregrad.aot_module(mlp, graphs.compiler("inference"))
        assert torch.allclose(compiled(x), expected)
        assert torch.allclose(compiled(x), expected)
    dtypes = [v.dtype for v in graphs.examples["inference"]]
    assert dtypes.count(torch.int8) == 2 and len(compiled.specializations) == 1
    assert len(graphs.inputs("inference")) == 2 * 2 + 2 + 1


def test_training_of_the_rest():
    """T-5: gradients of inputs and biases"""
    mlp = quantized_mlp()
    x = torch.randn(5, 6, requires_grad=True)
    mlp(x).square().sum().backward()
    expected = [x.grad, mlp[0].bias.grad, mlp[2].bias.grad]
    x.grad = None
    mlp.zero_grad()
    foregrad.aot_module(mlp, nop)(x).square().sum().backward()
    for a, b in zip(expected, [x.grad, mlp[0].bias.grad, mlp[2].bias.grad], strict=True):
        assert torch.allclose(a, b)


def test_new_weights():
    """F-9, T-9: weights that were written, and replaced, are read at each call"""
    mlp = quantized_mlp()
    x = torch.randn(5, 6)
    compiled = foregrad.aot_module(mlp, nop)
    compiled(x)
    with torch.no_grad():
        mlp[0].weight.copy_(Quantized.of(torch.randn(8, 6)))
    assert torch.allclose(compiled(x), mlp(x))
    mlp[0].weight = nn.Parameter(Quantized.of(torch.randn(8, 6)), requires_grad=False)
    assert torch.allclose(compiled(x), mlp(x))


def test_a_program_that_quantizes():
    """T-1: a subclass that is a result only"""
    f = foregrad.aot_function(lambda w: Quantized.of(w * 2), nop)
    w = torch.randn(4, 6)
    got, expected = f(w), Quantized.of(w * 2)
    assert type(got) is Quantized and got.dtype is torch.float32
    assert all(map(torch.equal, leaves_of(got), leaves_of(expected)))


def test_operators_that_it_lacks():
    """The subclass's own error is passed on"""
    weight = Quantized.of(torch.randn(4, 6))
    with pytest.raises(NotImplementedError, match="of quantized tensors"):
        foregrad.aot_function(lambda w: w * 2, nop)(weight)
