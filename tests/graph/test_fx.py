"""Graph modules that become `torch.fx` when they are looked at."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import foregrad
from foregrad.graph.fx import WORTH_COMPILING, LazyModule
from helpers import plain


def captured(program, *args):
    """A graph module that nobody has looked at."""
    module = foregrad.capture(program, *args).joint_graph
    assert isinstance(module, LazyModule) and "_foregrad_flat" in vars(module)
    return module


def program(x, y):
    first, second = (x @ y).split(2)
    return torch.cat([first * 2, second.relu()]), x.sum((0, 1), keepdim=True)


def test_it_runs_without_being_looked_at():
    """Interpreted first, compiled once that is worth it: always the same results."""
    x, y = plain(4, 3), plain(3, 5)
    module = captured(program, x, y)
    for _ in range(WORTH_COMPILING + 3):
        torch.testing.assert_close(module.forward(x, y), program(x, y), rtol=0, atol=0)
    assert "_foregrad_flat" in vars(module) and vars(module)["_foregrad_code"] is not None
    assert len(module.graph.find_nodes(op="placeholder")) == 2
    torch.testing.assert_close(module(x, y), program(x, y), rtol=0, atol=0)


@pytest.mark.parametrize("calls", [1, WORTH_COMPILING + 1])
def test_values_are_dropped_after_their_last_use(calls):
    seen = []

    @torch.library.custom_op("foregrad_tests::watch_drop", mutates_args=())
    def watch(x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        seen.append([ref() is None for ref in refs])
        refs.append(weakref.ref(x))
        return x + 1

    @watch.register_fake
    def _(x):
        return torch.empty_like(x)

    refs = []
    x = plain(3)
    module = captured(lambda x: watch(watch(watch(x + 1)) * 2), x)
    for _ in range(calls):
        refs.clear()
        seen.clear()
        module.forward(x)
    assert seen == [[], [True], [True, True]]


def test_constants_are_attributes():
    table = torch.tensor([1.0, 2.0, 3.0])
    module = captured(lambda x: x * torch.tensor([1.0, 2.0, 3.0]), plain(3))
    x = plain(3)
    torch.testing.assert_close(module.forward(x), (x * table,))
    module.double()
    assert module.forward(x.double())[0].dtype is torch.float64


def test_an_edited_graph_is_what_runs():
    x = plain(3)
    module = captured(lambda x: x.sin(), x)
    assert torch.equal(module.forward(x)[0], x.sin())
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.sin.default:
            node.target = torch.ops.aten.cos.default
    module.recompile()
    assert torch.equal(module.forward(x)[0], x.cos()) and "_foregrad_flat" not in vars(module)


def test_it_can_be_copied_pickled_and_printed():
    x, y = plain(4, 3), plain(3, 5)
    for copied in (copy.deepcopy, copy.copy, lambda module: pickle.loads(pickle.dumps(module))):
        module = copied(captured(program, x, y))
        torch.testing.assert_close(module(x, y), program(x, y), rtol=0, atol=0)
    module = captured(program, x, y)
    assert "torch.ops.aten.mm.default" in module.code and "def forward" in str(module)


def test_a_call_by_name_is_left_to_torch():
    x = plain(3)
    module = captured(lambda x: x.sin(), x)
    assert torch.equal(module.forward(arg0_1=x)[0], x.sin())
