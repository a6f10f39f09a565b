"""Lean tensors: on their device without data, and mirrored wherever a kernel could see them."""

import pytest
import torch
from torch import nn

import foregrad
from foregrad.abstract.lean_engine import LeanEngine
from foregrad.abstract.lean_tensors import is_lean, to_fake_tensors
from foregrad.record.recorder import Recorder
from foregrad.slots import Input
from helpers import leaf, plain


def engine():
    return LeanEngine(torch._subclasses.FakeTensorMode())


def twin(of, tensor):
    return of.fake(tensor, Input("x"), dynamic=False)


def storage(tensor):
    return tensor.untyped_storage()._cdata


def test_nobody_asks_for_a_device(monkeypatch):
    """F-12"""
    asked = []
    dispatch = Recorder.__torch_dispatch__

    def counting(self, op, types, args=(), kwargs=None):
        asked.append(op)
        return dispatch(self, op, types, args, kwargs)

    monkeypatch.setattr(Recorder, "__torch_dispatch__", counting)
    for _ in range(2):
        foregrad.capture(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten()), leaf(2, 3))
    assert asked and torch.ops.prim.device.default not in asked


def test_nothing_is_allocated():
    """F-12"""
    huge = torch.zeros(1).expand(1 << 20, 1 << 22)
    graph = foregrad.capture(lambda x: (x * 2).t().contiguous(), huge).joint_graph.graph
    assert [n.meta["val"].numel() for n in graph.nodes if n.op == "call_function"] == [1 << 42] * 3


def test_compilers_are_given_genuine_tensors():
    """F-12: they run operators on them under their mode."""
    seen = []

    def compiler(graph, inputs):
        seen.extend([*inputs, *(n.meta["val"] for n in graph.graph.nodes if n.op != "output")])
        return foregrad.make_boxed_func(graph.forward)

    compiled = foregrad.aot_function(lambda x: (x[1:].sin(), x.sum()), compiler)
    compiled(leaf(3))[0].sum().backward()
    captured = foregrad.capture(lambda x: x[1:].sin(), leaf(3))
    seen += [*captured.example_inputs[0], *captured.example_inputs[1]]
    assert len(seen) > 8 and not any(map(is_lean, seen))
    for value in seen:
        with value.fake_mode:
            assert type(value + 1) is type(value) and (value + 1).device == torch.device("cpu")
        assert torch.empty(0, device="meta").set_(value.untyped_storage()).device.type == "meta"


def test_values_of_a_graph_share_memory_as_they_did():
    """F-12"""
    graph = foregrad.capture(lambda x: (x[1:], x * 2)[0], plain(3)).joint_graph.graph
    values = [n.meta["val"] for n in graph.nodes if n.op != "output"]
    assert storage(values[0]) == storage(values[1]) and len({id(v.fake_mode) for v in values}) == 1


def test_a_tensor_may_be_used_by_anybody_who_has_it():
    """What no recorder sees comes to the fake mode, which must not run kernels on it."""
    base = twin(engine(), plain(2, 3))
    view, result = base.t()[1:], base.matmul(base.t()).cumsum(0)
    assert is_lean(base) and is_lean(view) and is_lean(result) and result.shape == (2, 2)
    assert storage(view) == storage(base) != storage(result) and view.storage_offset() == 1
    with base.fake_mode:
        assert is_lean(base + 1) and not is_lean(torch.ones(2))
    assert to_fake_tensors([view, 3])[1] == 3 and not is_lean(to_fake_tensors(view))


def test_changes_of_shape_and_memory_are_carried_over():
    """M-7"""
    lean = engine()
    x, y = twin(lean, plain(2, 3)), twin(lean, plain(4))
    view = x[0]
    x.t_()
    assert x.shape == (3, 2) and x.stride() == (1, 3) and x._version == 1 and storage(view) == storage(x)
    x.resize_(40)
    assert x.untyped_storage().nbytes() == 160 and storage(view) == storage(x) and is_lean(x)
    assert view.shape == (3,) and x[1:].storage_offset() == 1
    with torch.no_grad():
        x.set_(y)
    assert storage(x) == storage(y) != storage(view) and x.shape == (4,)


def grown_under_a_view(x):
    y = x.clone()
    view = y[1:]
    y.resize_(7).fill_(1)
    view.add_(2)
    return y.clone(), view.clone()


def resized_result(x):
    out = torch.empty(0)
    torch.add(x, x, out=out)
    return out * 2


def moved_to_a_constant(x):
    constant = torch.tensor(3.0)
    y = x.sum()
    y.data = constant
    y.add_(1)
    constant.add_(2)
    return y * constant, x * 2


def written_in_inference_mode(x):
    with torch.inference_mode():
        x.view(-1)[1:].mul_(2)
    return x * 2


@pytest.mark.parametrize(
    "program", [grown_under_a_view, resized_result, moved_to_a_constant, written_in_inference_mode]
)
def test_rare_programs_agree_with_eager(program):
    """M-7"""
    assert foregrad.check(program, plain(3)).ok
