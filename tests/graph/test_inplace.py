"""Graphs that write where the old value is dead (`foregrad.compile(..., inplace=True)`)."""

import dataclasses

import pytest
import torch
from torch import nn

import foregrad
from foregrad.backends.eager import run_graph
from foregrad.errors import VerificationError
from foregrad.graph.fx import joint_from_fx
from foregrad.graph.verify import verify_in_place

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def verified(monkeypatch):
    monkeypatch.setattr(foregrad.config, "verify", True)


def writes_of(fn, *makers):
    """Compare three calls with eager, and give the operators of the graph that write, with the number of the rest."""
    graphs = []

    def compiler(graph, examples):
        graphs.append(graph)
        return run_graph(graph, examples)

    compiled = foregrad.compile(fn, compiler, inplace=True)
    own, others = [make() for make in makers], [make() for make in makers]
    for _ in range(3):
        expected, got = fn(*others), compiled(*own)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        torch.testing.assert_close(own, others, rtol=0, atol=0)
        for one, other in zip(own, others, strict=True):
            assert (one._version > 0) == (other._version > 0)
    calls = [node.target for node in graphs[-1].graph.nodes if node.op == "call_function"]
    return [
        op._schema.name.removeprefix("aten::") for op in calls if getattr(op, "_schema", None) and op._schema.is_mutable
    ]


def ones(*shape):
    return lambda: torch.ones(*shape)


def test_a_chain_of_updates_is_written_to_the_input():
    def fn(x):
        x.mul_(2).add_(1)
        x.div_(3)

    assert writes_of(fn, ones(4)) == ["mul_", "add_", "div_"]


def test_values_of_the_graph_are_written_over():
    assert writes_of(lambda x: (x + 1).sin().mul(2), ones(4)) == ["sin_", "mul_"]


def test_a_value_that_is_read_later_is_not_written_over():
    def fn(x):
        y = x + 1
        z = y.sin()
        return z * y.sum()

    assert writes_of(fn, ones(4)) == ["mul_"]


def test_a_view_of_the_old_value_that_is_read_later_counts():
    def fn(x):
        y = x + 1
        row = y[0]
        return y.sin(), row

    assert writes_of(fn, ones(2, 3)) == []


def test_the_old_value_of_an_input_may_be_returned():
    def fn(x):
        old = x.clone()
        x.add_(1)
        return old

    assert writes_of(fn, ones(3)) == ["add_"]


def test_the_new_value_may_be_returned_beside_the_input():
    def fn(x):
        new = x + 1
        x.copy_(new)
        return new

    assert writes_of(fn, ones(3)) == ["copy_"]


def test_an_input_that_is_returned_is_the_input():
    def fn(x):
        return x.add_(1)

    x = torch.ones(2)
    assert foregrad.compile(fn, "eager", inplace=True)(x) is x and x.tolist() == [2, 2]


def test_two_inputs_that_take_each_others_values():
    def fn(x, y):
        new_x, new_y = y + 1, x * 2
        x.copy_(new_x)
        y.copy_(new_y)

    assert "copy_" in writes_of(fn, ones(3), lambda: torch.arange(3.0))


def test_a_transposed_value_goes_to_the_input_by_a_copy():
    def fn(x):
        x.copy_((x.t() * 2) + x.t())

    assert "copy_" in writes_of(fn, lambda: torch.arange(9.0).reshape(3, 3))


def test_an_operand_twice():
    def fn(x):
        x.mul_(x)
        x.copy_(x @ x)

    assert writes_of(fn, ones(2, 2)) == ["mul_", "copy_"]


def test_an_overlapping_operand_is_no_target():
    def fn(x):
        y = x * 1
        return y + y.t()

    assert writes_of(fn, lambda: torch.arange(4.0).reshape(2, 2)) == []


def test_caches_are_written_in_part():
    def fn(cache, new, position):
        cache[:, 2:4] = new
        cache[0] = 1
        cache.index_copy_(1, position, new)
        cache.diagonal().zero_()

    cache = lambda: torch.zeros(4, 6)  # noqa: E731
    assert writes_of(fn, cache, ones(4, 2), lambda: torch.tensor([0, 5])) == ["copy_", "copy_", "index_copy_", "copy_"]


def test_lists_of_tensors():
    def fn(x, y, z):
        torch._foreach_mul_([x, y], 2)
        torch._foreach_add_([x, y], [z, z])
        return torch._foreach_sqrt([x, y])

    assert writes_of(fn, ones(2), ones(3, 3), ones(())) == ["_foreach_mul_", "_foreach_add_"]


def test_a_list_whose_members_read_each_other_is_copied():
    def fn(x, y):
        new = torch._foreach_add([x, y], [y, x])
        torch._foreach_copy_([x, y], new)

    assert "_foreach_add_" not in writes_of(fn, ones(2), lambda: torch.arange(2.0))


def test_constants_and_unwritten_inputs_stay():
    held = torch.ones(3)

    def fn(x):
        return torch.tensor([1.0, 2.0, 3.0]).add(x), held.mul(2), x.sin()

    assert writes_of(fn, ones(3)) == []
    assert held.tolist() == [1, 1, 1]


def test_results_have_memory_to_themselves():
    def fn(x):
        wide = x + 1
        return wide[:2].sin(), (x * 2).t().cos()

    compiled = foregrad.compile(fn, "eager", inplace=True)
    for result, expected in zip(compiled(torch.ones(4, 4)), fn(torch.ones(4, 4)), strict=True):
        assert torch.equal(result, expected) and not result._is_view()
        assert result.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


def test_custom_operators_are_left_alone():
    @torch.library.custom_op("foregrad_test::same_memory", mutates_args=())
    def same_memory(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    same_memory.register_fake(lambda x: torch.empty_like(x))

    def fn(x):
        y = x + 1
        return same_memory(y).mul(y)

    assert writes_of(fn, ones(3)) == []


@pytest.mark.parametrize("fused", [False, True])
def test_a_training_step(fused):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = (
            torch.optim.AdamW(model.parameters(), fused=True)
            if fused
            else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        )

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, optimizer, step

    (model, optimizer, step), (expected, reference, eager) = build(), build()
    copies = []

    def compiler(graph, examples):
        copies.append([node for node in graph.graph.nodes if node.target in (aten.copy_.default, aten.clone.default)])
        return run_graph(graph, examples)

    compiled = foregrad.compile(step, compiler, inplace=True)
    for i in range(4):
        x = torch.full((3, 4), float(i)) + torch.arange(4)
        assert torch.equal(compiled(x), eager(x))
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other) and torch.equal(one.grad, other.grad)
        assert one.grad._is_view() == other.grad._is_view()
    states = zip(optimizer.state.values(), reference.state.values(), strict=True)
    assert all(torch.equal(mine[key], theirs[key]) for mine, theirs in states for key in theirs)
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), expected.buffers(), strict=True))
    assert len(copies[-1]) <= 3  # the running statistics of batch norm


def graph_of(build):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    build(graph, x)
    for node in graph.nodes:
        node.meta.setdefault("val", torch.ones(2))
    return joint_from_fx(torch.fx.GraphModule(nn.Module(), graph), 1)


def test_the_verifier_finds_what_is_read_too_late():
    def build(graph, x):
        view = graph.call_function(aten.view.default, (x, [2]))
        graph.call_function(aten.add_.Tensor, (x, 1))
        graph.output((graph.call_function(aten.neg.default, (view,)),))

    graph = graph_of(build)
    with pytest.raises(VerificationError, match="neg_default reads view_default, which add__tensor has written over"):
        verify_in_place(graph, graph.inputs)


def test_the_verifier_finds_writes_that_the_program_does_not_make():
    def build(graph, x):
        graph.output((graph.call_function(aten.add_.Tensor, (x, 1)),))

    with pytest.raises(VerificationError, match="add__tensor writes to x"):
        verify_in_place(graph_of(build), ())


def test_updates_follow_their_gradients():
    """Each gradient is let go before the next one comes, where that saves memory; otherwise one operator does all."""

    def peak_and_updates(release, **options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
        optimizer = torch.optim.AdamW(model.parameters(), **options)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        compiled = foregrad.compile(step, "eager", inplace=True)
        compiled.config = dataclasses.replace(compiled.config, release_gradients=release)
        losses = [compiled(torch.ones(1, 256)).item() for _ in range(3)]
        graph = compiled.specializations[-1].forward_graph.graph
        names = [str(node.target) for node in graph.nodes]
        return losses, sum(name.startswith("aten._fused_adamw_") for name in names)

    whole, updates = peak_and_updates(False, fused=True)
    assert updates == 1
    assert peak_and_updates("auto", fused=True) == (whole, 12)
    assert peak_and_updates(True, fused=True) == (whole, 12)
    assert peak_and_updates(True, foreach=True)[0] == peak_and_updates(False, foreach=True)[0]
