"""Graphs with the function's own calling convention."""

import pytest
import torch

import foregrad
from foregrad import ForegradError, aot_export_joint_simple
from foregrad.export.api import _aot_export_function


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


def test_joint_keeps_tangents_and_none():
    """X-9"""
    graph = aot_export_joint_simple(lambda x, y: (x * y, y + 1), (leaf(1.0, 2.0), torch.ones(2)), trace_joint=True)
    assert [n.name for n in graph.graph.find_nodes(op="placeholder")] == ["primals_1", "primals_2", "tangents_1"]
    product, _, dx, dy = graph(torch.tensor([1.0, 2.0]), torch.full((2,), 3.0), torch.ones(2))
    assert product.tolist() == [3, 6] and dx.tolist() == [3, 3] and dy is None


def test_inference():
    """X-9"""
    graph = aot_export_joint_simple(lambda x: (x * 2,), (leaf(1.0),), trace_joint=False)
    assert graph(torch.ones(1))[0].tolist() == [2]


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (lambda x: (x.neg_(), (x + 1,))[1], (torch.ones(2),), "does not support input mutations"),
        (lambda x: (x.view(-1),), (torch.ones(2),), "does not support outputs that alias inputs"),
        (lambda x: (x,), (torch.ones(2),), "does not support outputs that alias inputs"),
        (lambda x: (x + 1,), torch.ones(2), "requires inputs to be a single list/tuple"),
        (lambda x: (x[0] + 1,), ([torch.ones(2)],), "requires individual inputs not to be pytrees"),
        (lambda x: x + 1, (torch.ones(2),), "requires outputs to be a single list/tuple"),
        (lambda x: ((x + 1,),), (torch.ones(2),), "requires individual outputs not to be pytrees"),
    ],
)
def test_bans(function, args, words):
    """X-10"""
    with pytest.raises(RuntimeError, match=f"aot_export_joint_simple {words}") as raised:
        aot_export_joint_simple(function, args, trace_joint=False)
    assert isinstance(raised.value, ForegradError)


def test_the_forward_can_be_checked():
    """X-10"""
    with foregrad.config.patch(debug_assert=True):
        graph = aot_export_joint_simple(lambda x: (x.sin(),), (leaf(1.0),), trace_joint=True)
    assert graph(torch.zeros(1), torch.ones(1))[1].tolist() == [1]


def test_tensors_of_its_own_are_refused():
    """X-9"""
    table = torch.ones(2)
    with pytest.raises(ForegradError, match="Pass it"):
        aot_export_joint_simple(lambda x: (x + table,), (torch.ones(2),), trace_joint=False)


def test_the_shared_base():
    """X-11"""
    kwargs = {"y": torch.ones(2)}
    graph, facts, in_spec, out_spec = _aot_export_function(lambda x, y=None: (x + y,), (torch.ones(2),), kwargs=kwargs)
    assert len(facts.input_info) == 2 and in_spec.num_leaves == 2 and out_spec.num_leaves == 1
    graph, *_ = _aot_export_function(lambda x: ((x * x).sum(),), (leaf(1.0, 3.0),), no_tangents=True)
    assert graph(torch.tensor([1.0, 3.0]))[1].tolist() == [2, 6]
    with pytest.raises(AssertionError, match="exactly one result"):
        _aot_export_function(lambda x: (x.sum(), x * 2), (leaf(1.0, 3.0),), no_tangents=True)
