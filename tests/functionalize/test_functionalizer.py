"""The walk: graphs without side effects that compute what the program computed."""

import pytest
import torch

import foregrad
from helpers import grab, leaf, plain


def functional(fn, *args, **options):
    """Run a program, check that its graphs have no side effects, and compare it with eager."""
    compiled, graphs = grab(fn, **options)
    ours, eagers = [a.clone() for a in args], [a.clone() for a in args]
    result, expected = compiled(*ours), fn(*eagers)
    for module in graphs.modules.values():
        assert foregrad.assert_functional_graph(module.graph) == 0
    assert torch.equal(result, expected) and result.stride() == expected.stride()
    for our, eager in zip(ours, eagers, strict=True):
        assert torch.equal(our, eager) and our.stride() == eager.stride()
    return graphs


def test_a_program_that_writes_nothing_pays_nothing():
    """M-1"""
    graphs = functional(lambda x: (x.t() * 2).sum(0), plain(2, 3))
    assert graphs.ops("inference") == ["t.default", "mul.Tensor", "sum.dim_IntList"]


def test_a_write_becomes_its_functional_twin_and_an_output():
    """M-1"""
    graphs = functional(lambda x: x.sub_(5).abs(), plain(2))
    assert graphs.ops("inference") == ["sub.Tensor", "abs.default"] and len(graphs.outputs("inference")) == 2


def test_a_write_through_a_view_becomes_a_scatter():
    """M-1"""
    graphs = functional(lambda x: (x[0].mul_(3), x * 1)[1], plain(2, 3))
    assert graphs.ops("inference") == ["select.int", "mul.Tensor", "select_scatter.default", "mul.Tensor"]


def test_a_view_taken_before_a_write_is_taken_again():
    """M-1"""
    functional(lambda x: (lambda v: (x.add_(1), v * 2)[1])(x.t()), plain(2, 3))
    functional(lambda x: (lambda v, w: (v.add_(1), w * 2)[1])(x[0], x[:, 1]), plain(2, 3))


def test_views_of_views_see_each_others_writes():
    """M-1"""

    def program(x):
        rows = x.view(2, 6)
        corner = rows[:, 1:4]
        deeper = corner.t()[0]
        deeper.mul_(10)
        rows.add_(1)
        corner[1].zero_()
        return deeper + rows.sum()

    functional(program, plain(3, 4))


def test_a_copy_keeps_the_layout_of_its_target():
    """M-1, trap 1: a whole overwrite through a permuted view."""

    def program(x):
        y = torch.zeros(2, 3)
        y.t().copy_(x)
        return y.view(6) * 2

    functional(program, plain(3, 2))


def test_an_overwritten_source_is_read_before_the_overwrite():
    """M-1"""

    def program(x, y):
        y.copy_(x)
        x.zero_()
        return y + 1

    functional(program, plain(3), torch.zeros(3))


def test_a_copy_that_casts_and_broadcasts():
    """M-1"""

    def program(x, y):
        y.copy_(x)
        return y * 2

    functional(program, plain(3), torch.zeros(2, 3, dtype=torch.float64))


def test_a_write_to_a_tensor_with_gaps():
    """M-1, trap 1"""
    functional(lambda x: (x[:, ::2].mul_(3), x.view(-1) + 1)[1], plain(2, 4))


def test_dropped_defaults_are_filled_in():
    """Trap 4: the dispatcher drops p=0.5 of bernoulli_."""

    def program(x):
        return x + torch.empty(4).bernoulli_(0.5)

    torch.manual_seed(1)
    ours = grab(program)[0](plain(4))
    torch.manual_seed(1)
    assert torch.equal(ours, program(plain(4)))


def test_a_draw_into_a_transposed_tensor_fills_it_in_the_order_of_memory():
    """R-4"""

    def program(x):
        return torch.nn.functional.dropout(x.transpose(0, 1), 0.5)

    torch.manual_seed(1)
    ours = grab(program)[0](plain(4, 3, 3))
    torch.manual_seed(1)
    assert torch.equal(ours, program(plain(4, 3, 3)))


def test_a_tensor_that_is_reshaped_in_place_is_a_view_from_there_on():
    """M-3, for an intermediate"""

    def program(x):
        y = x + 1
        before = y.sum(0)
        y.t_()
        y.unsqueeze_(0)
        y[0, 0].mul_(5)
        return y * before[0]

    functional(program, plain(2, 3))


def test_gradients_go_to_the_value_before_the_write():
    """M-2"""

    def program(x):
        y = x * 3
        x.exp_()
        return y + x

    x, y = leaf(3), leaf(3)
    grab(program)[0](x * 1).sum().backward()
    program(y * 1).sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("dynamic", [False, True])
def test_writes_with_symbolic_sizes(dynamic):
    """F-11, M-1"""

    def program(x):
        x[1:].mul_(x.shape[0])
        x.view(-1)[: x.shape[1]].add_(1)
        return x.t() * 2

    functional(program, plain(3, 4), dynamic=dynamic)


def test_detach_is_elided_and_its_derivative_is_not_forgotten():
    """The tape is the source of derivatives, not the graph, in which `detach` is gone."""
    compiled, graphs = grab(lambda x: x * x.detach())
    x = leaf(3)
    compiled(x).sum().backward()
    assert x.grad.tolist() == [1, 2, 3] and "detach.default" not in graphs.ops("forward")
