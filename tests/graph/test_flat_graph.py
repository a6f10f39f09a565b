"""The flat graph: names, dead code, symbolic numbers."""

import functools
import operator

import torch

import foregrad
from foregrad.graph.graph import GraphBuilder, Node, live_nodes, name_nodes, nodes_in
from foregrad.slots import Input
from helpers import grab, leaf, plain

aten = torch.ops.aten


def test_nodes_are_found_in_nested_arguments():
    a, b = Node(None, (), {}, None), Node(None, (), {}, None)
    assert list(nodes_in([a, [1, (b, [a])], "text"])) == [a, b, a]
    assert list(Node(aten.add.Tensor, (a, 2), {"alpha": b}, None).inputs()) == [a, b]


def test_names_follow_the_operators_and_are_all_different():
    graph = GraphBuilder()
    x = graph.placeholder(Input("args[0]"), plain(2))
    nodes = [graph.call(op, (x,), {}, None) for op in (aten.sin.default, aten.cos.default, aten.sin.default)]
    name_nodes(nodes, ["cos"])
    assert [node.name for node in nodes] == ["sin", "cos_1", "sin_1"]


def test_dead_code_goes_and_what_must_run_stays():
    graph = GraphBuilder()
    x = graph.placeholder(Input("args[0]"), plain(2))
    dead = graph.call(aten.sin.default, (x,), {}, None)
    draw = graph.call(aten.rand.default, ([2],), {}, None)
    draw.impure = True
    wanted = graph.call(aten.cos.default, (x,), {}, None)
    assert live_nodes(graph, [wanted, None]) == [draw, wanted] and dead in graph.nodes


def test_dead_operators_of_a_program_do_not_reach_a_compiler():
    """V-8"""
    compiled, graphs = grab(lambda x: (x.exp(), x.cos(), x.sin())[2])
    compiled(plain(2))
    assert graphs.ops("inference") == ["sin.default"]


def test_arithmetic_on_sizes_is_part_of_the_graph():
    """F-11"""

    def program(x):
        n, m = x.shape
        return x.new_ones(n * 2 + 1, max(n, m), (n + m) // 2)

    compiled, graphs = grab(program, dynamic=True)
    assert compiled(plain(3, 4)).shape == (7, 4, 3)
    assert compiled(plain(2, 6)).shape == (5, 6, 4)
    assert len(compiled.specializations) == 1
    assert {"add", "mul", "floordiv"} & {
        n.target.__name__ for n in graphs.modules["inference"].graph.nodes if n.op == "call_function"
    }


def test_a_size_that_is_returned_is_a_number():
    """F-11"""
    compiled, _ = grab(lambda x: (x * 2, x.shape[0] * 3), dynamic=True)
    assert compiled(plain(4))[1] == 12
    result = compiled(plain(5))[1]
    assert result == 15 and type(result) is int and len(compiled.specializations) == 1


def test_operators_are_counted_without_the_taking_apart_of_results():
    captured = foregrad.capture(lambda x: x.max(0), leaf(3))
    forward = [n for n in captured.joint.graph.nodes if n.op is not operator.getitem]
    assert captured.joint.op_count == len(forward)


def test_a_node_prints_without_what_it_is_computed_from():
    """A debugger prints arguments of functions: a graph in which each node is read twice would never end."""
    captured = foregrad.capture(lambda x: functools.reduce(lambda y, _: y + y, range(64), x), leaf(2))
    assert len(repr(captured.joint.graph)) < 20_000 and repr(captured.joint.recording.steps[0]) == "<aten.add.Tensor>"
