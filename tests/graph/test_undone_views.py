"""Views that undo each other are left out of graphs that run as they are."""

import pytest
import torch

import foregrad
from foregrad._torch import direct_call
from foregrad.graph.undone_views import without_undone_views

aten = torch.ops.aten


def nodes_of(graph):
    return [str(node.op).removeprefix("aten.").split(".")[0] for node in graph.nodes]


def joint_graph(program, *args):
    return foregrad.capture(program, *args).joint.graph


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def test_a_linear_layer_has_one_transposed_weight():
    """Autograd transposes it back for one product, and the other product for its gradient."""
    graph = joint_graph(torch.nn.functional.linear, leaf(3, 4), leaf(5, 4), leaf(5))
    found = without_undone_views(graph)
    assert nodes_of(graph).count("t") > nodes_of(found).count("t") == 2
    assert [node.name for node in found.inputs] == [node.name for node in graph.inputs]


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.t().t(),  # a result is a tensor of its own
        lambda x: x.unsqueeze(0).squeeze(0).clone().mT.mT,
        lambda x: (x.t().t() * 2, x.view(-1).view(3, 4).sin()),
        lambda x: x.t().t().expand(2, 3, 4)[0].exp().t().t().t(),
        lambda x: x.split(1)[1].t().t() * x[1:2],
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(3, 2, 2)) * 2).conj().view(3, 4),
        lambda x: x[:, 1:].detach().t().t().mul(x[:, 1:]),
        lambda x: x.clone().t().mul_(2).t().t()[0].add_(1),
    ],
)
def test_programs_give_what_they_give(program):
    foregrad.check(program, leaf(3, 4), compile=lambda fn: foregrad.compile(fn, "eager"))


@pytest.mark.parametrize("verify", [False, True])
def test_inputs_of_a_backward_are_no_views(verify):
    """What a forward has saved is where a backward begins, also for a compiler that has seen no joint graph."""
    given = leaf(3, 4), leaf(5, 4), leaf(5)
    with foregrad.config.patch(verify=verify):
        compiled = foregrad.aot_function(torch.nn.functional.linear, foregrad.backends.run_graph)
        got = torch.autograd.grad(compiled(*given).sum(), given)
    expected = torch.autograd.grad(torch.nn.functional.linear(*given).sum(), given)
    assert all(map(torch.equal, got, expected))


def test_gradients_do_not_become_one():
    """Two inputs whose gradients look at the same memory: each is a tensor of its own, and no input."""
    graph = joint_graph(lambda x, y: x.t().t() + y.t().t(), leaf(3, 4), leaf(3, 4))
    results = [value for _, value in without_undone_views(graph).backward_outputs]
    assert len({*results, *graph.inputs}) == len(results) + len(graph.inputs)


def test_sizes_that_are_symbols():
    compiled = foregrad.compile(lambda x: (x.t().t() * x.unsqueeze(1).squeeze(1)).sum(), "eager", dynamic=True)
    for n in (3, 5):
        x = leaf(n, 4)
        compiled(x).backward()
        torch.testing.assert_close(x.grad, 2 * x)
    assert len(compiled.specializations) == 1


def test_a_weight_that_is_written_before_the_backward_is_noticed():
    """It is saved itself, and no view of it: autograd sees its version as in eager."""
    model = torch.nn.Linear(3, 2)
    loss = foregrad.compile(model, "eager")(leaf(4, 3)).sum()
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---------------------------------------------------------------------------------------------------------------------
x, number = torch.ones(2, 3), torch.tensor(2.0)


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (aten.mm.default, (x, x.t()), {}),
        (aten.mul.Tensor, (x, 2), {}),
        (aten.mul.Tensor, (x, number), {}),
        (aten.add.Tensor, (x, x), {"alpha": 2}),
        (aten.sum.dim_IntList, (x, [0], True), {}),
        (aten.view.default, (x, [6]), {}),
        (aten.gelu.default, (x,), {"approximate": "tanh"}),
        (aten.max.dim, (x, 0), {}),
        (aten.add_.Tensor, (x.clone(), x), {}),
    ],
)
def test_a_function_that_calls_the_operator_takes_its_place(op, args, kwargs):
    """It was asked what it calls; nothing ran meanwhile."""
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    found = direct_call(op, args, kwargs)
    assert found is not op._op
    torch.testing.assert_close(args[0], before[0], rtol=0, atol=0)
    again = direct_call(op, before, kwargs)
    assert again is found
    torch.testing.assert_close(tuple(found(*args, **kwargs)), tuple(op(*before, **kwargs)), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mul.Scalar, (x, 2)),  # the binding calls mul.Tensor
        (aten.linear.default, (x, x)),  # it is made of others
        (aten.split.Tensor, (x, 1)),  # it gives a list, and the binding a tuple
        (aten.threshold_backward.default, (x, x, 0)),  # it has no binding
        (aten.ones.default, ([2],)),  # a default device may be set for the binding
    ],
)
def test_an_operator_that_no_function_stands_for(op, args):
    assert direct_call(op, args) is op._op
