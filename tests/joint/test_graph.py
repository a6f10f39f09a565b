"""V-8, V-9, V-10: what stands where in the graphs, and that they are runnable."""

import torch

import foregrad
from foregrad.joint.graph import from_fx, to_fx
from helpers import grab, leaf, plain, run_alone


def test_the_forward_graph_returns_updates_outputs_bases_and_saved_values():
    """V-8"""

    def program(x, b):
        b.add_(1)
        t = x.sin() * b
        return t.view(-1), t.view(2, 1)

    compiled, graphs = grab(program)
    compiled(leaf(2), torch.zeros(2))
    names = [node.name for node in graphs.outputs("forward")]
    assert graphs.inputs("forward") == ["primals_1", "primals_2"]
    assert names[:4] == ["add", "view", "view_1", "mul"] and len(names) > 4


def test_an_inference_graph_has_names_of_its_own_and_no_bases():
    """V-8"""
    compiled, graphs = grab(lambda x, b: (lambda t: (t.view(-1), t.t()))(x * b))
    compiled(plain(2, 2), plain(2, 2))
    assert graphs.inputs("inference") == ["arg0_1", "arg1_1"] and len(graphs.outputs("inference")) == 2


def test_the_joint_graph_takes_primals_then_tangents():
    """V-9"""
    captured = foregrad.capture(lambda x, b: x * b, leaf(2), plain(2))
    graph = captured.joint_graph.graph
    assert [n.name for n in graph.find_nodes(op="placeholder")] == ["primals_1", "primals_2", "tangents_1"]
    value, first, second = graph.output_node().args[0]
    assert value.name == "mul" and first is not None and second is None


def test_the_joint_graph_can_be_run():
    """V-9"""
    captured = foregrad.capture(lambda x: x.sin() * 2, leaf(3))
    x, tangent = plain(3), torch.ones(3)
    value, gradient = run_alone(captured.joint_graph, x, tangent)
    assert torch.equal(value, x.sin() * 2) and torch.equal(gradient, 2 * x.cos())


def test_the_backward_graph_takes_sizes_tensors_tangents():
    """V-10"""
    compiled, graphs = grab(lambda x, n: x.sin().expand(n, x.shape[0]), dynamic=True)
    compiled(leaf(2), 3).sum().backward()
    nodes = graphs.modules["backward"].graph.find_nodes(op="placeholder")
    kinds = ["size" if isinstance(n.meta["val"], torch.SymInt) else "tensor" for n in nodes]
    assert kinds == sorted(kinds) and graphs.inputs("backward")[-1] == "tangents_1"
    assert len(graphs.outputs("backward")) == len(graphs.inputs("forward"))


def test_the_backward_gives_none_where_there_is_no_gradient():
    """V-10, J-1"""
    compiled, graphs = grab(lambda x, k, u: x * k)
    x, k, u = leaf(2), plain(2), leaf(2)
    compiled(x, k, u).sum().backward()
    assert [g is None for g in graphs.outputs("backward")] == [False, True, True] and u.grad is None


def test_one_gradient_edge_for_each_input_that_takes_part():
    """V-11"""

    def program(x, w):
        x.exp_()
        return x * w, w.view(-1)

    compiled, graphs = grab(program)
    y, _ = compiled(leaf(2) * 1, leaf(2))
    y.sum().backward()
    assert len([name for name in graphs.inputs("backward") if "tangents" in name]) == 2
    assert len(graphs.outputs("backward")) == 2


def test_every_node_knows_its_abstract_value():
    """V-8"""
    compiled, graphs = grab(lambda x, w: torch.relu(x @ w).max(1))
    compiled(leaf(2, 3), leaf(3, 2))[0].sum().backward()
    for module in graphs.modules.values():
        for node in module.graph.nodes:
            if node.op in ("placeholder", "call_function"):
                assert "val" in node.meta
    example = graphs.examples["forward"][0]
    assert type(example).__name__ == "FakeTensor" and not example.requires_grad and example.shape == (2, 3)


def test_recorded_shapes_are_the_shapes_at_run_time():
    """Trap 1: layout of the node is the layout recorded."""

    def program(x, w):
        y = x @ w
        y.t().mul_(2)
        return y.exp(), (y * 2).t(), y.max(0).values

    compiled, graphs = grab(program)
    args = leaf(2, 3), leaf(3, 2)
    compiled(*args)[0].sum().backward()

    class Compare(torch.fx.Interpreter):
        def run_node(self, node):
            result = super().run_node(node)
            if isinstance(result, torch.Tensor) and isinstance(node.meta.get("val"), torch.Tensor):
                recorded = node.meta["val"]
                assert (result.shape, result.stride()) == (recorded.shape, recorded.stride()), node.format_node()
            return result

    with torch.no_grad():
        Compare(graphs.modules["forward"]).run(*[a.detach() for a in args])


def test_a_graph_goes_to_torch_fx_and_back():
    """One IR: flat while it is rewritten, torch.fx at every edge."""
    joint = foregrad.capture(lambda x: (x.sin() * torch.tensor([1.0, 2.0])).max(0), leaf(2)).joint_graph
    again = to_fx(from_fx(joint))
    assert again.code.split() == joint.code.split()
    x, tangent = plain(2), torch.ones(())
    for ours, theirs in zip(run_alone(again, x, tangent), run_alone(joint, x, tangent), strict=True):
        assert torch.equal(ours, theirs)


def test_constants_are_attributes_of_both_graphs():
    """F-14"""
    compiled, graphs = grab(lambda x: (x * torch.tensor([2.0, 3.0])).sin())
    x = leaf(2)
    compiled(x).sum().backward()
    held = [n for n in graphs.modules["forward"].graph.nodes if n.op == "get_attr"]
    assert len(held) == 1 and torch.allclose(
        x.grad, torch.tensor([2.0, 3.0]) * (plain(2) * torch.tensor([2.0, 3])).cos()
    )
