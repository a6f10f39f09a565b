"""J-10 over the other partitioner: gradients of gradients work, or are refused by name; they are never wrong."""

import pytest
import torch
from torch.nn import functional as F

import foregrad
from foregrad import check, default_partition, min_cut_rematerialization_partition
from foregrad.errors import UnsupportedError
from foregrad.graph.fx import joint_from_fx
from foregrad.partition.sides import saved_for_higher_orders
from helpers import leaf, nop

BUDGETS = [None, 1.0, 0.5, 0.0]


def symmetric(x):
    return x[:, :2] @ x[:, :2].t() + 3 * torch.eye(2, dtype=x.dtype)


PROGRAMS = {
    "chain": lambda x: (x.cos() * 3).sinh().cos().exp(),
    "product": lambda x: (x @ x.t()).tanh() @ x,
    "under no_grad": lambda x: x.tanh() * torch.no_grad()(torch.sin)(x),
    "through a view": lambda x: (lambda y: (y[0].sin_(), y * y)[1])(x * 1),
    "norm": lambda x: F.layer_norm(x, [3]),
    "maximum": lambda x: x.max(1)[0] * x.sum(),
    "eigenvalues": lambda x: torch.linalg.eigvals(symmetric(x)).real,
    "symmetric eigenvalues": lambda x: torch.linalg.eigh(symmetric(x))[0],
    "singular values": lambda x: torch.linalg.svd(x.sin() * 2, full_matrices=False)[1],
    "solution": lambda x: torch.linalg.solve(symmetric(x), x),
    "determinant": lambda x: torch.linalg.slogdet(symmetric(x))[1],
}


def rematerializing(fn, budget, **options):
    return foregrad.aot_function(
        fn, nop, partition_fn=min_cut_rematerialization_partition, memory_budget=budget, **options
    )


def start():
    return torch.tensor([[0.3, -0.7, 1.1], [0.9, 0.2, -0.4]], dtype=torch.float64, requires_grad=True)


def three_orders(fn):
    x = start()
    y = fn(x).square().sum()
    found = []
    for _ in range(3):
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        found.append(gradient.detach())
        y = (gradient.sin() * gradient).sum()
    return found


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_three_orders(name, budget):
    """J-10"""
    found = three_orders(rematerializing(PROGRAMS[name], budget))
    for mine, eager in zip(found, three_orders(PROGRAMS[name]), strict=True):
        torch.testing.assert_close(mine, eager)


@pytest.mark.parametrize("name", ["chain", "product", "maximum", "symmetric eigenvalues"])
def test_everything_a_user_can_see(name):
    """J-10, P-5"""
    check(PROGRAMS[name], start(), compile=lambda fn: rematerializing(fn, None), bitwise=False)


def test_a_budget_in_bytes_is_about_the_first_order():
    """P-7, J-10"""
    x = leaf(64)
    y = rematerializing(lambda x: x.cos().sinh().cos(), 64 * 4 * 4)(x).sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_what_autograd_saves_of_a_factorization_is_within_reach(partition):
    """J-10: all factors are saved, though the first backward reads some of them"""
    captured = foregrad.capture(lambda x: torch.linalg.svd(x.sin() * 2, full_matrices=False)[1].sum(), leaf(2, 3))
    joint = joint_from_fx(captured.joint_graph, 1)
    forward, _ = partition(captured.joint_graph, captured.example_inputs, num_fwd_outputs=1)
    saved = {node.name for node in forward.graph.output_node().args[0][1:]}
    read = {node for node in joint.nodes if node.name == "getitem"}
    assert read and {node.name for node in saved_for_higher_orders(joint, read)} <= saved


def test_what_cannot_be_computed_any_more_is_refused_by_name():
    """J-10: the mask of a relu is saved and not what it was computed from, which was drawn"""
    aten = torch.ops.aten

    def threshold_backward(gradient, result, threshold):
        return torch.where(result <= threshold, 0.0, gradient)

    def gradient(partition):
        compiled = foregrad.aot_function(
            lambda x: torch.relu(x + torch.rand_like(x)).sum(),
            nop,
            partition_fn=partition,
            decompositions={aten.threshold_backward.default: threshold_backward},
        )
        x = leaf(64)
        tangent = torch.ones((), requires_grad=True)
        return torch.autograd.grad(compiled(x), x, tangent, create_graph=True)[0]

    assert gradient(default_partition).requires_grad
    with pytest.raises(UnsupportedError, match="default_partition saves what autograd does"):
        gradient(min_cut_rematerialization_partition)
