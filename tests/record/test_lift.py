"""Real tensors that a program finds by itself meet the recording as abstract twins, never as they are."""

import pytest
import torch
from torch import nn

import foregrad
from helpers import grab, leaf, nop, plain


def test_a_write_to_a_closure_tensor_happens_once_per_call():
    """F-12, F-14"""
    buffer = torch.zeros(2)

    def program(x):
        buffer.add_(x)
        return buffer * 2

    captured = foregrad.capture(program, plain(2))
    assert buffer.tolist() == [0, 0] and "written" in str(captured)
    compiled, _ = grab(program)
    assert compiled(plain(2)).tolist() == [2, 4] and buffer.tolist() == [1, 2]


def test_an_augmented_assignment_to_a_buffer_keeps_the_buffer():
    """F-9"""

    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x):
            self.n += 1
            return x * self.n

    module = Count()
    buffer, compiled = module.n, foregrad.aot_module(module, nop)
    assert [compiled(torch.ones(())).item() for _ in range(3)] == [1, 2, 3]
    assert module.n is buffer


def test_properties_of_a_real_tensor_are_its_own(capsys):
    w = nn.Parameter(plain(2, 3))

    def program(x):
        print(*w.shape, w.dtype, w.requires_grad, w.is_leaf, w.ndim, w.device.type, isinstance(w, nn.Parameter))
        return x @ w.T

    assert grab(program)[0](plain(1, 3)).shape == (1, 2)
    assert capsys.readouterr().out == "2 3 torch.float32 True True 2 cpu True\n"


def test_the_tape_behind_a_closure_tensor_is_left_alone():
    """J-4"""
    base = leaf(2)
    w = base.exp()
    compiled, _ = grab(lambda x: x * w.detach())
    compiled(leaf(2)).sum().backward()
    w.sum().backward()
    assert torch.allclose(base.grad, base.detach().exp())


def test_gradients_flow_through_a_closure_tensor_that_is_no_leaf():
    """F-14"""
    base = leaf(2)
    w = base * 3
    compiled, _ = grab(lambda x: x * w)
    compiled(torch.ones(2)).sum().backward()
    assert base.grad.tolist() == [3, 3]


def test_a_custom_function_applied_to_a_parameter_gives_it_a_gradient():
    """A-8"""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    w = nn.Parameter(plain(2))
    compiled, _ = grab(lambda x: Twice.apply(w) * x + w)
    compiled(torch.ones(2)).sum().backward()
    assert w.grad.tolist() == [3, 3]


def test_a_tensor_in_an_index_is_found():
    """F-14"""
    index = torch.tensor([1, 0])
    compiled, graphs = grab(lambda x: x[index])
    assert compiled(plain(2)).tolist() == [2, 1]
    index.fill_(1)
    assert compiled(plain(2)).tolist() == [2, 2] and len(graphs.inputs("inference")) == 2


class Aside(torch.autograd.Function):
    """Its forward calls no operator on the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, gradient.sum().expand(3)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_weight_that_only_a_custom_function_takes_gets_its_gradient(is_leaf):
    """Also where the bound `apply` was kept from before."""
    apply = Aside.apply
    found = []
    for transform in (lambda f: f, lambda f: foregrad.aot_function(f, nop)):
        leaf = torch.ones(3, requires_grad=True)
        weight = leaf if is_leaf else leaf * 1
        transform(lambda x, weight=weight: apply(x, weight).sum())(torch.ones(2, requires_grad=True)).backward()
        found.append(leaf.grad)
    assert torch.equal(*found)
