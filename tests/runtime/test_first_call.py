"""A first call without data, and hooks for a backward that is captured whole."""

import pytest
import torch
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental._backward_state import BackwardState

import foregrad
from foregrad.errors import BackwardStateError
from helpers import grab, leaf, nop, plain


class Affine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(plain(2, 3))

    def forward(self, x):
        return x * self.w, x, 7


def compiled(module, args, compiler=nop):
    context = TracingContext(FakeTensorMode())
    context.fakify_first_call = True
    with tracing(context):
        return foregrad.aot_module_simplified(module, args, compiler)


def test_the_first_call_gives_shapes_and_later_ones_data():
    """J-14"""
    ran = []

    def compiler(graph, inputs):
        return foregrad.make_boxed_func(lambda *args: (ran.append(1), graph(*args))[1])

    f, x = compiled(Affine(), (plain(2, 3),), compiler), plain(2, 3)
    y, same, seven = f(x)
    assert is_fake(y) and y.shape == (2, 3) and y.requires_grad and same is x and seven == 7 and not ran
    y, _, _ = f(x)
    assert not is_fake(y) and torch.equal(y, plain(2, 3) ** 2) and ran
    y.sum().backward()


def test_the_first_call_has_the_strides_that_the_compiler_reported():
    """J-14"""

    def compiler(graph, inputs):
        reported = TracingContext.try_get().output_strides
        if reported is not None:
            outputs = graph.graph.output_node().args[0]
            reported += [(1, 2) if n.meta["val"].dim() == 2 else None for n in outputs if hasattr(n, "meta")]
        return foregrad.make_boxed_func(graph.forward)

    class Double(torch.nn.Module):
        def forward(self, x):
            return (x * 2,)

    f = compiled(Double(), (plain(2, 3),), compiler)
    assert f(plain(2, 3))[0].stride() == (1, 2)


def test_without_the_wish_of_a_front_end_the_first_call_runs():
    """J-14"""
    f = foregrad.aot_module_simplified(Affine(), (plain(2, 3),), nop)
    assert not is_fake(f(plain(2, 3))[0])


def test_a_backward_state_is_for_a_backward_that_is_captured_whole():
    """J-15"""
    f, graphs = grab(lambda x, s: x.sin())
    y = f(leaf(2), BackwardState())
    assert graphs.order == ["forward"] and torch.equal(y, plain(2).sin())
    with pytest.raises(BackwardStateError, match="BackwardState requires CompiledAutograd"):
        y.sum().backward()
    with pytest.raises(AssertionError, match=r"At most one BackwardState.*args\[1\] and args\[2\]"):
        grab(lambda x, s, t: x.sin())[0](leaf(2), BackwardState(), BackwardState())
