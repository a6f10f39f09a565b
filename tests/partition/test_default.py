"""P-1 to P-4: how the joint graph is cut."""

import pytest
import torch

import foregrad
from foregrad.errors import CompilerError, PartitionError, UnsupportedError
from foregrad.partition import default_partition
from helpers import grab, leaf, nop, plain


def test_a_partitioner_is_told_how_many_outputs_are_the_forwards():
    """P-1"""
    seen = {}

    def partition(graph, joint_inputs, *, num_fwd_outputs, **_):
        seen.update(
            outputs=num_fwd_outputs,
            grad=torch.is_grad_enabled(),
            sizes=[len(part) for part in joint_inputs],
            names=[n.name for n in graph.graph.find_nodes(op="placeholder")],
        )
        return default_partition(graph, joint_inputs, num_fwd_outputs=num_fwd_outputs)

    def program(x, b):
        b.add_(1)
        return x.sin() * b, x.view(-1)

    x = leaf(2)
    foregrad.aot_function(program, nop, partition_fn=partition)(x, plain(2))[0].sum().backward()
    assert seen == {"outputs": 3, "grad": False, "sizes": [2, 1], "names": ["primals_1", "primals_2", "tangents_1"]}
    assert torch.allclose(x.grad, plain(2).cos() * (plain(2) + 1))


def test_the_forward_holds_what_its_outputs_need():
    """P-4"""
    compiled, graphs = grab(lambda x: x.sin().exp())
    compiled(leaf(3)).sum().backward()
    assert graphs.ops("forward") == ["sin.default", "exp.default"]
    assert set(graphs.ops("backward")) == {"mul.Tensor", "cos.default"}


def test_only_what_the_backward_uses_is_saved():
    """P-4"""
    compiled, graphs = grab(lambda x: x.max(1)[0].sum())
    x = leaf(2, 3)
    compiled(x).backward()
    assert [node.name for node in graphs.outputs("forward")][1:] == ["getitem_1"] and x.grad.sum() == 2


def test_nothing_is_saved_that_the_backward_does_not_use():
    """P-3"""
    compiled, graphs = grab(lambda x: x * 2 + 1)
    compiled(leaf(3)).sum().backward()
    assert len(graphs.outputs("forward")) == 1 and graphs.inputs("backward") == ["tangents_1"]


def test_saved_tensors_come_before_sizes_and_the_backward_takes_sizes_first():
    """P-3"""
    compiled, graphs = grab(lambda x, n: x.sin().expand(n, x.shape[0]), dynamic=True)
    compiled(leaf(3), 2)
    saved = graphs.outputs("forward")[1:]
    sizes = [isinstance(node.meta["val"], torch.SymInt) for node in saved]
    assert sizes == sorted(sizes) and True in sizes
    assert {node.name for node in saved} <= set(graphs.inputs("backward"))


def test_only_sizes_are_saved_where_only_sizes_are_needed():
    """P-4"""
    compiled, graphs = grab(lambda x: x.expand(2, x.shape[0]).sum(0), dynamic=True)
    compiled(leaf(3)).sum().backward()
    assert all(isinstance(node.meta["val"], torch.SymInt) for node in graphs.outputs("forward")[1:])


def test_a_random_operator_stays_in_the_forward():
    """P-4 (Z), P-6"""
    compiled, graphs = grab(lambda x: torch.dropout(x, 0.5, True))
    x = leaf(64)
    y = compiled(x)
    y.sum().backward()
    assert torch.equal(y != 0, x.grad != 0)
    assert not [name for name in graphs.ops("backward") if "bernoulli" in name or "dropout" in name]


def test_a_draw_that_only_the_backward_reads_happens_in_the_forward():
    """P-4 (Z)"""

    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(torch.rand_like(x))
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    def run(fn):
        torch.manual_seed(5)
        x = leaf(4)
        y = fn(x)
        drawn = torch.rand(2)
        y.sum().backward()
        return x.grad, drawn

    ours, eager = run(grab(Noise.apply)[0]), run(Noise.apply)
    assert torch.equal(ours[0], eager[0]) and torch.equal(ours[1], eager[1])


def test_the_two_halves_compute_what_the_whole_did():
    """P-3"""
    captured = foregrad.capture(lambda x, w: torch.relu(x @ w).sum(1), leaf(2, 3), leaf(3, 2))
    forward, backward = default_partition(captured.joint_graph, captured.example_inputs, num_fwd_outputs=1)
    x, w, tangent = plain(2, 3), plain(3, 2), plain(2)
    with torch.no_grad():
        whole = captured.joint_graph(x, w, tangent)
        value, *saved = forward(x, w)
        halves = [value, *backward(*saved, tangent)]
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


def test_an_output_that_needs_a_tangent_cannot_be_the_forwards():
    """P-3"""
    captured = foregrad.capture(lambda x: x.sin(), leaf(2))
    with pytest.raises(PartitionError, match=r"was invalid, but is output.*tangents_1"):
        default_partition(captured.joint_graph, captured.example_inputs, num_fwd_outputs=2)


def test_a_partitioner_that_drops_a_gradient_is_refused():
    """P-1"""

    def partition(graph, inputs, *, num_fwd_outputs):
        forward, backward = default_partition(graph, inputs, num_fwd_outputs=num_fwd_outputs)
        output = backward.graph.output_node()
        output.args = (output.args[0][:-1],)
        return forward, backward

    with pytest.raises(CompilerError, match="one gradient for each input"):
        foregrad.aot_function(lambda x, y: x * y, nop, partition_fn=partition)(leaf(2), leaf(2))


def test_what_only_a_backward_of_the_backward_reads_is_saved_too():
    """P-4, J-10: the first gradient of `solve` takes the factors, that of its gradient takes the matrix."""
    compiled, graphs = grab(lambda a, b: torch.linalg.solve_ex(a, b).result)
    compiled(leaf(2, 2), leaf(2)).sum().backward()
    assert "primals_1" in graphs.inputs("backward")
    compiled, graphs = grab(lambda a, b: torch.linalg.solve_ex(a, b).result.detach() + b)
    compiled(leaf(2, 2), leaf(2)).sum().backward()
    assert "primals_1" not in graphs.inputs("backward")  # it is not differentiated


@pytest.mark.parametrize(
    "program",
    [
        torch.linalg.det,
        torch.logdet,
        torch.linalg.svdvals,
        lambda a: torch.linalg.eigvalsh(a + a.mT),
        lambda a: torch.linalg.eigvals(a).real,
        lambda a: torch.linalg.qr(a).R,
        lambda a: torch.linalg.lu(a.sin()).L,
        lambda a: torch.linalg.solve(a.sin(), a.exp()),
        lambda a: (a * torch.linalg.matrix_norm(a, "nuc"), torch.linalg.det(a))[1],
    ],
)
def test_the_second_gradients_of_matrix_factors(program):
    """J-10"""
    a = torch.tensor([[2.0, 0.3, 0.1], [0.2, 3.0, 0.4], [0.5, 0.1, 4.0]], dtype=torch.float64)

    def second(function):
        x = a.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return torch.autograd.grad((first * first).sum(), x)[0]

    assert torch.allclose(second(foregrad.aot_function(program, nop)), second(program))


def second_gradient_after_another(function, **options):
    x = (torch.eye(3) + plain(3, 3) / 10).requires_grad_()
    y, z = function(x)
    z.sum().backward(**options)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


def test_the_second_gradient_of_one_result_after_a_backward_of_another():
    """J-10, J-16: what was saved for it is left there."""

    def program(x):
        return torch.linalg.solve(x, x.new_ones(3)), x * 2

    found = second_gradient_after_another(foregrad.aot_function(program, nop))
    assert torch.allclose(found, second_gradient_after_another(program))


def test_a_second_gradient_that_needs_what_the_other_result_has_freed():
    """J-10, J-16"""

    def program(x):
        return torch.linalg.solve(x, x.new_ones(3)), x.sin()

    with pytest.raises(UnsupportedError, match="retain_graph=True"):
        second_gradient_after_another(foregrad.aot_function(program, nop))
    found = second_gradient_after_another(foregrad.aot_function(program, nop), retain_graph=True)
    assert torch.allclose(found, second_gradient_after_another(program))
