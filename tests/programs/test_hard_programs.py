"""Programs that were wrong once, each with what is hard about it."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd import Function
from torch.nn import functional as F

import foregrad
from checking import check_core
from helpers import grab, leaf, nop, plain


class SavesWhatItComputes(Function):
    """Keeps a value for backward that no output needs."""

    @staticmethod
    def forward(ctx, x, a):
        ctx.save_for_backward(a.exp())
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


class DrawsInBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand_like(gradient)


class GivesNoGradient(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return None


def nodes_named_like_builtins(x):
    a, b, c = x.abs(), (x * 3).abs(), (x * 5).sum(0)
    return a.sin(), b.sin(), c.sin()


def a_partial_backward_after_a_write(x):
    y = x * 2
    y[:1].clamp_(0, 1)
    return y, y.sin()


def saved_before_its_source_is_overwritten(x, a):
    y = SavesWhatItComputes.apply(x, a)
    a.data.mul_(5)
    return y


def a_detached_view_beside_its_base(x):
    y = x * 2
    return y.t().detach(), y


def one_value_twice_without_grad(x):
    y = x.detach() * 2
    return y, y.detach(), y.detach()


def a_write_through_a_conjugate(z):
    y = z * 1
    y.conj().mul_(2)
    return y


def views_without_grad(x):
    with torch.no_grad():
        return x[1], x.t()


def writes_of_foreach(xs):
    torch._foreach_add_(xs, 1.0)
    return xs[0] * 2


def a_write_under_many_views(x):
    y = x * 1
    view = y
    for _ in range(1500):
        view = view.view(-1)
    view.mul_(2)
    return y


def a_view_written_after_its_base_changed_shape(x):
    v = x[0]
    x.t_()
    v.mul_(2)
    return x * 1


def a_detached_view_of_the_old_shape(x):
    y = x.detach()
    x.t_()
    return y


def a_view_of_the_old_shape(x):
    v = x.view(-1)
    x.t_()
    return v


PROGRAMS = {
    a_detached_view_of_the_old_shape: lambda: (plain(2, 3),),
    a_view_of_the_old_shape: lambda: (plain(2, 3),),
    nodes_named_like_builtins: lambda: (leaf(2, 3),),
    a_partial_backward_after_a_write: lambda: (leaf(4, 6),),
    saved_before_its_source_is_overwritten: lambda: (leaf(3), plain(3)),
    a_detached_view_beside_its_base: lambda: (leaf(2, 3),),
    one_value_twice_without_grad: lambda: (leaf(3),),
    a_write_through_a_conjugate: lambda: (torch.tensor([1 + 2j, 3 - 1j], requires_grad=True),),
    views_without_grad: lambda: (leaf(3, 4),),
    writes_of_foreach: lambda: ([plain(2), plain(3)],),
    a_write_under_many_views: lambda: (leaf(3),),
    lambda x: F.silu(x, inplace=True): lambda: (leaf(3) * 1,),
    lambda x: DrawsInBackward.apply(x * torch.rand_like(x)): lambda: (leaf(3),),
    lambda x: GivesNoGradient.apply(x): lambda: (leaf(3),),
    lambda x: x.detach().clone().requires_grad_() * 2: lambda: (leaf(3),),
    lambda x: x.clone()[:, 1:].normal_(): lambda: (plain(4, 5, 6),),
    lambda x: F.dropout(x.transpose(0, 1), 0.5): lambda: (leaf(4, 5),),
    lambda x: torch.func.grad(lambda y: (y**2).sum())(x): lambda: (plain(3),),
    lambda x: x.as_strided((2, 2), (1, 2)).fill_diagonal_(3.0): lambda: (plain(4),),
    lambda x: [piece * 2 for piece in x.split(3, -1)]: lambda: (leaf(2, 0),),
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_hard_program_agrees_with_eager(program):
    check_core(program, *PROGRAMS[program]())


def test_autocast_switched_off_inside():
    """J-11"""

    def program(x):
        with torch.autocast("cpu", enabled=False):
            return x @ x

    with torch.autocast("cpu", torch.bfloat16):
        check_core(program, leaf(2, 2))


def test_backward_runs_outside_the_autocast_of_the_forward():
    """J-11"""

    def gradient(fn):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = fn(x)
        y.sum().backward()
        return x.grad

    assert torch.equal(gradient(torch.linalg.inv), gradient(foregrad.aot_function(torch.linalg.inv, nop)))


def test_a_shape_that_changes_for_two_names_of_one_tensor_with_symbolic_sizes():
    x = plain(2, 3)
    total = foregrad.aot_function(lambda a, b: (a.t_(), b.sum())[1], nop, dynamic=True)(x, x)
    assert total == 21
    assert x.shape == (3, 2)


@pytest.mark.parametrize("program", [a_view_of_the_old_shape, a_view_written_after_its_base_changed_shape])
def test_views_of_the_old_shape_of_a_differentiable_tensor_are_refused(program):
    with pytest.raises(
        foregrad.errors.UnsupportedError, match="changes the shape of a tensor of which a view was taken"
    ):
        foregrad.aot_function(program, nop)(leaf(2, 3) * 1)


def turned_before_it_is_saved(x, w):
    with torch.no_grad():
        x.t_()
    return x * w


def test_the_shape_of_a_leaf_that_changes_is_refused():
    with pytest.raises(foregrad.errors.UnsupportedError, match="shape"):
        foregrad.aot_function(turned_before_it_is_saved, nop)(leaf(2, 3), leaf(1))


def test_an_input_that_is_turned_and_then_saved():
    check_core(turned_before_it_is_saved, plain(2, 3), leaf(1))


def test_autocast_is_recorded_and_off_while_graphs_run():
    """J-11"""
    states = []

    def compiler(graph, inputs):
        states.append(torch.is_autocast_enabled("cpu"))
        return foregrad.make_boxed_func(lambda *a: (states.append(torch.is_autocast_enabled("cpu")), graph(*a))[1])

    with torch.autocast("cpu", torch.bfloat16):
        y = foregrad.aot_function(lambda x, w: x @ w, compiler)(leaf(2, 2), leaf(2, 2))
        assert torch.is_autocast_enabled("cpu")
    y.float().sum().backward()
    assert states == [False] * 4
    assert y.dtype is torch.bfloat16


def test_a_program_may_leave_another_autocast_state():
    """J-11 (Z)"""
    before = torch.get_autocast_dtype("cpu")

    def program(x):
        torch.set_autocast_dtype("cpu", torch.float16)
        return x * 2

    compiled = foregrad.aot_function(program, nop)
    try:
        for _ in range(2):
            torch.set_autocast_dtype("cpu", before)
            compiled(leaf(2))
            assert torch.get_autocast_dtype("cpu") is torch.float16
    finally:
        torch.set_autocast_dtype("cpu", before)


def test_a_partial_backward_can_be_differentiated():
    """J-10"""
    x = leaf(2)
    first, _ = foregrad.aot_function(lambda x: (x.sin(), x.cos()), nop)(x)
    (gradient,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    gradient.sum().backward()
    assert torch.equal(x.grad, -leaf(2).detach().sin())


def test_anomaly_mode_does_not_look_into_abstract_tensors():
    with torch.autograd.set_detect_anomaly(True):
        x = leaf(2)
        foregrad.aot_function(lambda x: x.sin(), nop)(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_several_threads_run_their_first_backward_at_once():
    for _ in range(20):
        compiled = foregrad.aot_function(lambda x: (x.sin() * x).sum(), nop)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: compiled(leaf(n)).backward(), [2, 3, 2, 3, 4, 2, 3, 4]))


def test_a_program_does_not_keep_a_replaced_parameter_alive():
    """F-9"""
    linear = torch.nn.Linear(3, 1)
    compiled = foregrad.aot_module(linear, nop)
    compiled(plain(2, 3)).sum().backward()
    old = weakref.ref(linear.weight)
    linear.weight = torch.nn.Parameter(torch.zeros(1, 3))
    gc.collect()
    assert old() is None
    compiled(plain(2, 3)).sum().backward()
    assert linear.weight.grad.tolist() == [[5, 7, 9]]


@pytest.mark.parametrize("around", [lambda m: foregrad.aot_module(m, nop), lambda m: foregrad.aot_function(m.run, nop)])
def test_a_program_does_not_keep_replaced_tensors_of_a_module_alive(around):
    """F-9: plain attributes, buffers and what lies in a list."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.listed = torch.ones(3), [torch.ones(3)]
            self.register_buffer("state", torch.ones(3))

        def forward(self, x):
            return x * self.plain + self.listed[0] + self.state

        def run(self, x):
            return self(x)

    net = Net()
    compiled = around(net)
    compiled(leaf(3)).sum().backward()
    old = [weakref.ref(tensor) for tensor in (net.plain, net.listed[0], net.state)]
    net.plain, net.listed[0], net.state = (torch.full((3,), 2.0) for _ in range(3))
    gc.collect()
    assert [ref() for ref in old] == [None] * 3
    assert compiled(torch.ones(3, requires_grad=True)).tolist() == [6, 6, 6]


def test_abstract_values_have_the_strides_of_the_real_ones():
    def program(x):
        y = x * 1
        y.t()[1].mul_(2)
        return y

    class Compare(torch.fx.Interpreter):
        def run_node(self, node):
            result = super().run_node(node)
            if isinstance(result, torch.Tensor) and "val" in node.meta:
                assert result.stride() == node.meta["val"].stride(), node
            return result

    compiled, graphs = grab(program)
    compiled(plain(2, 2))
    Compare(graphs.modules["inference"]).run(plain(2, 2))
