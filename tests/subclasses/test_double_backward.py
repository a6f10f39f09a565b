"""Gradients of gradients through wrapper subclasses."""

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import foregrad
from foregrad.subclasses.layout import leaves_of
from helpers import leaf, nop, plain
from subclass_pairs import Pair, look, ones_like


def pair(*shape, grad=False):
    return Pair(plain(*shape) / 5, plain(*shape) / 3).requires_grad_(grad)


def two(*shape, grad=False):
    return TwoTensor(plain(*shape) / 5, plain(*shape) / 3).requires_grad_(grad)


class Single(Pair):
    """Around one tensor."""

    @staticmethod
    def __new__(cls, p, q=None, tag="std"):
        return Pair.__new__(cls, p, p, tag)

    def __init__(self, p, q=None, tag="std"):
        super().__init__(p, p, tag)

    def __tensor_flatten__(self):
        return ["p"], self.tag

    @classmethod
    def __tensor_unflatten__(cls, inner, tag, outer_size, outer_stride):
        return cls(inner["p"], tag=tag)


def single(*shape, grad=False):
    return Single(plain(*shape) / 5).requires_grad_(grad)


PROGRAMS = {
    "sin": (lambda x: x.sin(), lambda m: [m(3, grad=True)]),
    "exp": (lambda x: x.exp(), lambda m: [m(3, grad=True)]),
    "linear": (lambda x: x * 3, lambda m: [m(3, grad=True)]),
    "cube": (lambda x: x * x * x, lambda m: [m(2, 3, grad=True)]),
    "two": (lambda x, w: (x @ w).tanh(), lambda m: [m(2, 3, grad=True), m(3, 2, grad=True)]),
    "mixed": (lambda x, w: x * w.sin(), lambda m: [m(3, grad=True), leaf(3)]),
    "output only": (lambda w: Pair(w.sin(), w * w) * w, lambda m: [leaf(3)]),
    "no leaf": (lambda x, w: (x * w).sin(), lambda m: [m(3, grad=True) * 1, m(3, grad=True)]),
    "no leaf, and not saved": (lambda x, w: x.exp() * w, lambda m: [m(3, grad=True) * 1, m(3, grad=True)]),
    "view": (lambda x: (x * x).t(), lambda m: [m(2, 3, grad=True)]),
    "nested": (lambda x: x * x.cos(), lambda m: [Pair(m(3), m(3)).requires_grad_()]),
    "in place": (lambda x: (x * x).mul_(x), lambda m: [m(3, grad=True)]),
}


def of_all_orders(function, arguments, with_tangent):
    """Gradients to the third order, for the arguments and perhaps for the first tangent."""
    given = [a for a in arguments if a.requires_grad]
    y = function(*arguments)
    tangent = (ones_like(y) * 2).requires_grad_(with_tangent)
    ends = [*given, tangent] if with_tangent else given
    found, results, tangents = [y], [y], [tangent]
    for order in range(3):
        wanted = given if order == 0 else ends
        gradients = torch.autograd.grad(results, wanted, tangents, create_graph=True, allow_unused=True)
        found += gradients
        results = [g for g in gradients if g is not None and g.requires_grad]
        tangents = [ones_like(g) for g in results]
        if not results:
            break
    return found


def require_same(got, expected):
    assert (got is None) == (expected is None)
    if got is not None:
        assert type(got) is type(expected) and got.requires_grad == expected.requires_grad
        for a, b in zip(leaves_of(got), leaves_of(expected), strict=True):
            torch.testing.assert_close(a.detach(), b.detach())


@pytest.mark.parametrize("with_tangent", [False, True], ids=["inputs", "tangents too"])
@pytest.mark.parametrize("make", [pair, two, single])
@pytest.mark.parametrize("name", PROGRAMS)
def test_three_orders(name, make, with_tangent):
    """J-10, T-5: gradients of gradients of gradients"""
    function, arguments = PROGRAMS[name]
    compiled = foregrad.aot_function(function, nop)
    expected = of_all_orders(function, arguments(make), with_tangent)
    for _ in range(2):
        found = of_all_orders(compiled, arguments(make), with_tangent)
        for got, wanted in zip(found, expected, strict=True):
            require_same(got, wanted)


def written_input(x, y, tangent, gradient):
    return x


def written_result(x, y, tangent, gradient):
    return y


def written_tangent(x, y, tangent, gradient):
    return tangent


@pytest.mark.parametrize("make", [pair, single])
@pytest.mark.parametrize("target", [written_input, written_result, written_tangent])
@pytest.mark.parametrize("program", [torch.exp, lambda x: x * x * x, lambda x: x * 2], ids=["exp", "cube", "linear"])
def test_writes_between_two_orders(program, target, make):
    """J-10: what is written after the first gradients were taken, and is needed for the second, is found out"""

    def run(function):
        w = make(3, grad=True)
        x = w * 1
        y = function(x)
        tangent = ones_like(y).requires_grad_()
        (gradient,) = torch.autograd.grad(y, w, tangent, create_graph=True)
        with torch.no_grad():
            target(x, y, tangent, gradient).mul_(2)
        try:
            return torch.autograd.grad(gradient, (w, tangent), ones_like(gradient), allow_unused=True)
        except RuntimeError as error:
            return str(error).split(":")[0]

    expected, got = run(program), run(foregrad.aot_function(program, nop))
    if isinstance(expected, str):
        assert got == expected and "modified by an inplace operation" in got
    else:
        assert [look(g, versions=False) for g in got] == [look(g, versions=False) for g in expected]


def test_a_tangent_in_another_layout_keeps_its_history():
    """J-9, J-10"""
    x, source = pair(2, 3, grad=True), pair(3, 2, grad=True)
    found = []
    for function in (lambda x: x * x, foregrad.aot_function(lambda x: x * x, nop)):
        y = function(x)
        (gradient,) = torch.autograd.grad(y, x, (source * 2).t(), create_graph=True)
        found.append([gradient, *torch.autograd.grad(gradient, (x, source), ones_like(gradient))])
    for got, wanted in zip(*found, strict=True):
        require_same(got, wanted)


def test_outputs_one_after_another():
    """J-8, J-10: the first backward frees what it alone needs; the second is differentiated"""

    def program(x, w):
        return x * w, x.sin()

    found = []
    for function in (program, foregrad.aot_function(program, nop)):
        source, w = pair(3, grad=True), pair(3, grad=True)
        x = source * 1
        y, z = function(x, w)
        first = torch.autograd.grad(y, x, ones_like(y))
        second = torch.autograd.grad(z, x, ones_like(z), create_graph=True)
        found.append([*first, *second, *torch.autograd.grad(second, x, [ones_like(second[0])])])
    for got, wanted in zip(*found, strict=True):
        require_same(got, wanted)


def test_a_write_after_outputs_were_freed():
    """J-8: a wrapper that is left for another output is looked at too"""

    def run(function):
        x = pair(3, grad=True) * 1
        y, z = function(x)
        torch.autograd.grad(y, x, ones_like(y))
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(z, x, ones_like(z))

    def program(x):
        return x * 2, x.sin()

    run(program), run(foregrad.aot_function(program, nop))


def test_parameters():
    """F-9, J-10: a module whose parameters are subclasses"""

    def run(transform):
        module = torch.nn.Linear(3, 2)
        module.weight, module.bias = torch.nn.Parameter(pair(2, 3)), torch.nn.Parameter(pair(2))
        x = leaf(4, 3)
        y = transform(module)(x).tanh()
        ends = [module.weight, module.bias, x]
        first = torch.autograd.grad(y, ends, ones_like(y), create_graph=True)
        return [*first, *torch.autograd.grad(first[0], ends, ones_like(first[0]), allow_unused=True)]

    for got, wanted in zip(run(lambda m: foregrad.aot_module(m, nop)), run(lambda m: m), strict=True):
        require_same(got, wanted)


def test_graphs_hold_plain_tensors():
    """T-1: also those of higher orders"""
    modules = []

    def keep(graph, example_inputs):
        modules.append(graph)
        return nop(graph, example_inputs)

    x = pair(3, grad=True)
    of_all_orders(foregrad.aot_function(lambda x: x * x * x, keep), [x], with_tangent=True)
    values = [node.meta.get("val") for module in modules for node in module.graph.nodes]
    assert len(modules) > 3
    assert {type(value).__name__ for value in values if isinstance(value, Tensor)} == {"FakeTensor"}
