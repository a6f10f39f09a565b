"""V-8, V-9, V-10: what stands where in the graphs, and that they are runnable."""

import pytest
import torch
from torch import fx, nn
from torch.fx.traceback import annotate

import foregrad
from foregrad.graph.fx import joint_from_fx, to_fx
from helpers import grab, leaf, nop, plain, run_alone


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
    again = to_fx(joint_from_fx(joint, 2))
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


class Scale(nn.Module):
    def forward(self, x):
        with annotate({"stage": 1}):
            x = x * 2
        x[0].add_(1)
        return x.sin()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Scale(), Scale()])
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.last(x)


def called_in(node):
    return [path for path, _ in node.meta["nn_module_stack"].values()]


def test_nodes_tell_where_they_come_from():
    """V-10: the line, modules, annotations and autograd's number; those of the backward tell it of their forward"""
    compiled = foregrad.aot_module(Two(), nop)
    compiled(torch.ones(2, 3, requires_grad=True)).sum().backward()
    program = compiled.specializations[0]
    numbers = {}
    for module in (program.forward_graph, program.backward_graph):
        calls = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        assert calls
        for node in (node for node in module.graph.nodes if node.op == "call_function"):
            backward = module is program.backward_graph
            assert __file__ in node.meta["stack_trace"]
            assert called_in(node)[0] == "" and node.meta["tensor_meta"].shape == node.meta["val"].shape
            assert node.meta.get("autograd_backward", False) is backward
            if "is_gradient_acc" in node.meta:
                continue
            assert ("custom" in node.meta) is ("x = x * 2" in node.meta["stack_trace"])
            key = node.meta["seq_nr"]
            if backward and key in numbers:
                assert called_in(node) == numbers[key] == list(node.meta["fwd_nn_module_stack"])
            elif not backward:
                numbers[key] = called_in(node)
    paths = list(numbers.values())
    assert ["", "parts.0"] in paths and ["", "parts.1"] in paths and ["", "last"] in paths


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_write_that_was_functionalized_has_its_line(requires_grad):
    """V-10: also where it is carried back behind the program, and in its derivative"""

    def program(x):
        y = x * 1 if requires_grad else x
        view = y.t()
        view[0].mul_(3)
        return y.sum(), view

    compiled = foregrad.aot_function(program, nop, keep_inference_input_mutations=True)
    compiled(torch.ones(2, 3, requires_grad=requires_grad))
    nodes = compiled.specializations[0].joint_graph.graph.nodes
    assert all(node.meta.get("stack_trace") for node in nodes if node.op == "call_function")


def test_what_the_nodes_of_a_graph_know_is_passed_on():
    """V-10: a front end's own module stacks and annotations"""
    graph = fx.symbolic_trace(lambda x: (torch.sin(x),))
    (call,) = graph.graph.find_nodes(op="call_function", target=torch.sin)
    call.meta = {"nn_module_stack": {"a": ("a", nn.Linear)}, "custom": {"stage": 2}, "stack_trace": "a line"}
    kept = []

    def keep(module, inputs):
        kept.append(module)
        return nop(module, inputs)

    step = foregrad.aot_module_simplified(graph, (torch.ones(3, requires_grad=True),), keep)
    step(torch.ones(3, requires_grad=True))[0].sum().backward()
    for module in kept:
        node = next(node for node in module.graph.nodes if node.op == "call_function")
        assert {key: node.meta[key] for key in call.meta} == call.meta
