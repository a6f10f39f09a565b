"""Jagged nested tensors."""

import pytest
import torch
import torch.nn.functional as F

import foregrad
from helpers import leaf, nop, plain


def jagged(*lengths, grad=False, width=4):
    rows = [plain(n, width) / 10 for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=grad)


def pointwise(x):
    return x.sin() * 2 + x


def cube(x):
    return x * x * x


def linear(x, w):
    return F.linear(x, w).relu()


def norm(x, w):
    return F.layer_norm(F.linear(x, w), (3,))


@pytest.mark.parametrize("program", [pointwise, linear, norm])
def test_programs(program):
    """T-1, T-5: values, gradients and the jagged size are eager's"""

    def run(function):
        x, w = jagged(2, 3, grad=True), leaf(3, 4)
        y = function(x) if program is pointwise else function(x, w)
        assert y.offsets() is x.offsets()
        y.backward(torch.ones_like(y.detach()))
        return y.values(), x.grad.values(), w.grad

    compiled = foregrad.aot_function(program, nop)
    expected, *results = run(program), run(compiled), run(compiled)
    for result in results:
        for a, b in zip(expected, result, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b)
    assert len(compiled.specializations) == 1


@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradients_of_gradients(is_leaf):
    """J-10: to the third order, for the tensor and for the first gradient"""

    def run(function):
        x = jagged(2, 3, grad=True)
        y = function(x if is_leaf else x * 1)
        tangent = torch.ones_like(y.detach()).requires_grad_()
        found, results = [], [y]
        for order in range(3):
            tangents = [tangent] if order == 0 else [torch.ones_like(r.detach()) for r in results]
            ends = [x] if order == 0 else [x, tangent]
            results = list(torch.autograd.grad(results, ends, tangents, create_graph=True))
            found += [r.values().detach() for r in results]
            results = [r for r in results if r.requires_grad]
        return found

    for expected, got in zip(run(cube), run(foregrad.aot_function(cube, nop)), strict=True):
        assert torch.allclose(expected, got)


def test_result_goes_on_as_nested():
    """T-1: the jagged size of the result is that of the argument"""
    x = jagged(2, 3)
    f = foregrad.aot_function(lambda x: x * 2, nop)
    assert torch.equal((f(x) + x).values(), x.values() * 3)
    assert f(jagged(4, 1)).shape[0] == 2


def test_two_arguments():
    """F-2: tensors of one set of offsets, and of two"""
    x = jagged(2, 3)
    y = x * 2
    f = foregrad.aot_function(lambda x, y: x + y, nop)
    assert torch.equal(f(x, y).values(), x.values() * 3)
    with pytest.raises(RuntimeError, match="shape"):
        f(x, jagged(2, 3))


@pytest.mark.usefixtures("reads_refused")
def test_lengths_that_nobody_knows():
    """A program that must look at the lengths of the rows is refused by name"""
    with pytest.raises(foregrad.errors.DataDependentError, match="_local_scalar_dense"):
        foregrad.aot_function(lambda x, w: x @ w, nop)(jagged(2, 3, grad=True), leaf(4, 3))
