"""M-13: checks on graphs."""

import operator

import pytest
import torch
from torch import fx

import foregrad
from foregrad.errors import NotFunctionalError, VerificationError
from foregrad.graph.fx import joint_from_fx
from foregrad.graph.verify import verify
from helpers import grab, leaf, nop

aten = torch.ops.aten


def graph_of(build):
    graph = fx.Graph()
    graph.output(build(graph))
    return graph


def test_a_pure_graph_has_no_writes():
    """M-13"""
    graph = graph_of(lambda g: (g.call_function(aten.neg.default, (g.placeholder("a"),)),))
    assert foregrad.assert_functional_graph(graph) == 0


def test_a_write_is_refused():
    """M-13"""
    graph = graph_of(lambda g: g.call_function(aten.add_.Tensor, (g.placeholder("a"), 1)))
    with pytest.raises(NotFunctionalError, match="entirely functional graph, but found"):
        foregrad.assert_functional_graph(graph)


def test_one_final_copy_into_a_placeholder_is_allowed():
    """M-13"""

    def build(g):
        a = g.placeholder("a")
        return g.call_function(aten.copy_.default, (a, g.call_function(aten.neg.default, (a,))))

    assert foregrad.assert_functional_graph(graph_of(build)) == 1


def test_a_second_copy_into_the_same_placeholder_is_refused():
    """M-13"""

    def build(g):
        a = g.placeholder("a")
        g.call_function(aten.copy_.default, (a, a))
        return g.call_function(aten.copy_.default, (a, a))

    with pytest.raises(NotFunctionalError):
        foregrad.assert_functional_graph(graph_of(build))


def test_a_copy_into_an_intermediate_is_refused():
    """M-13"""

    def build(g):
        a = g.placeholder("a")
        return g.call_function(aten.copy_.default, (g.call_function(aten.neg.default, (a,)), a))

    with pytest.raises(NotFunctionalError):
        foregrad.assert_functional_graph(graph_of(build))


def module_of(build):
    graph = graph_of(build)
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta.setdefault("val", torch.empty(2, device="meta"))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_node_without_an_abstract_value_is_found():
    module = module_of(lambda g: (g.call_function(aten.neg.default, (g.placeholder("a"),)),))
    verify(joint_from_fx(module, 1))
    next(n for n in module.graph.nodes if n.op == "call_function").meta.clear()
    with pytest.raises(VerificationError, match="no abstract value"):
        verify(joint_from_fx(module, 1))


def test_a_result_that_does_not_exist_is_found():
    def build(g):
        pair = g.call_function(aten.max.dim, (g.placeholder("a"), 0))
        pair.meta["val"] = (torch.empty(2, device="meta"), torch.empty(2, device="meta"))
        return (g.call_function(operator.getitem, (pair, 2)),)

    with pytest.raises(VerificationError, match="does not have"):
        verify(joint_from_fx(module_of(build), 1))


def test_a_node_read_before_it_is_made_is_found():
    def build(g):
        a = g.placeholder("a")
        first = g.call_function(aten.neg.default, (a,))
        second = g.call_function(aten.sin.default, (a,))
        first.args = (second,)
        return (first,)

    with pytest.raises(VerificationError, match="before it is made"):
        verify(joint_from_fx(module_of(build), 1))


def test_what_a_partitioner_returns_is_verified():
    """P-1: verification is on in the tests, and it looks at foreign graphs too."""

    def partition(graph, inputs, *, num_fwd_outputs):
        forward, backward = foregrad.default_partition(graph, inputs, num_fwd_outputs=num_fwd_outputs)
        for node in forward.graph.nodes:
            if node.op == "call_function":
                node.meta.pop("val")
        return forward, backward

    with pytest.raises(VerificationError):
        foregrad.aot_function(lambda x: x.sin(), nop, partition_fn=partition)(leaf(2))
    with foregrad.config.patch(verify=False):
        foregrad.aot_function(lambda x: x.sin(), nop, partition_fn=partition)(leaf(2))


def test_graphs_of_a_program_that_writes_are_functional():
    """M-13"""

    def program(x, b):
        b.mul_(2)
        y = x * b
        y[0].exp_()
        return y

    compiled, graphs = grab(program)
    compiled(leaf(2), torch.ones(2)).sum().backward()
    for module in graphs.modules.values():
        assert foregrad.assert_functional_graph(module.graph) == 0
