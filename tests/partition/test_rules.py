"""P-6 and peers.md 11 and 12: what is never computed twice, and the predicate that says so."""

import pytest
import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.utils.checkpoint import CheckpointPolicy

import foregrad
from foregrad import check, min_cut_rematerialization_partition
from foregrad.errors import PartitionError
from foregrad.graph.fx import joint_from_fx
from foregrad.graph.graph import Node, get_constant
from foregrad.partition.model import Model
from foregrad.partition.rules import why_not_again
from helpers import grab, leaf, nop, plain

aten = torch.ops.aten
seen = []
library = torch.library.Library("foregrad_partition", "DEF")
library.define("note(Tensor x) -> Tensor")
library.impl("note", lambda x: (seen.append(1), x * 2)[1], "CompositeExplicitAutograd")
torch.library.register_fake("foregrad_partition::note", torch.empty_like)
_register_effectful_op("foregrad_partition::note", _EffectType.ORDERED)
BUDGETS = [None, 1.0, 0.5, 0.0]


def rematerializing(budget):
    return lambda fn: foregrad.aot_function(
        fn, nop, partition_fn=min_cut_rematerialization_partition, memory_budget=budget
    )


def node(op, *args, **kwargs):
    return Node(op, args, kwargs, None)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (node(aten.rand.default, [2]), "random"),
        (node(aten.native_dropout.default, None, 0.5, True), "random"),
        (node(aten._scaled_dot_product_flash_attention_for_cpu.default, None, None, None, 0.5), "random"),
        (node(aten._scaled_dot_product_flash_attention_for_cpu.default, None, None, None, 0.0), None),
        (node(aten._scaled_dot_product_flash_attention_for_cpu.default, None, None, None), None),
        (node(torch.ops._c10d_functional.all_reduce.default, None, "sum", "0"), "a collective"),
        (node(torch.ops.higher_order.with_effects, None), "a side effect"),
        (node(aten.sin.default, None), None),
        (node(get_constant, torch.ones(1)), None),
        (node(print, 1), None),
        (node(pytest.raises, 1), "unknown to Foregrad"),
    ],
)
def test_the_predicate(made, reason):
    """P-6"""
    assert why_not_again(made) == reason


def test_marks_and_flags():
    """P-5, P-6"""
    sin = node(aten.sin.default, None)
    sin.impure = True
    assert why_not_again(sin) == "a side effect"
    sin.impure = False
    assert why_not_again(sin, reads_written=True) == "reads an input that is written later"
    sin.meta = {"recompute": CheckpointPolicy.MUST_SAVE}
    assert why_not_again(sin) == "marked to be saved"


def test_what_reads_a_written_input_directly_or_through_a_view_is_banned():
    """peers.md 11"""

    def program(x, buffer):
        y = (x * buffer.view(-1).sin()).cos()
        buffer.add_(1)
        return y

    captured = foregrad.capture(program, leaf(4), plain(4))
    model = Model(joint_from_fx(captured.joint_graph, 2))
    banned = {made.name: reason for made, reason in zip(model.nodes, model.banned, strict=True)}
    assert banned["sin"] == "reads an input that is written later" and banned["cos"] is None


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_read_of_a_buffer_that_is_written_later(budget):
    """peers.md 11"""

    def program(x, buffer):
        y = (x * buffer.sin()).cos()
        buffer.add_(1)
        return y

    check(program, leaf(64), plain(64), compile=rematerializing(budget))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("options", [{}, {"aggressive_recomputation": True}])
def test_random_numbers_are_not_drawn_again(budget, options):
    """P-6, peers.md 12"""

    def program(x, w):
        for _ in range(3):
            x = torch.dropout(torch.relu(x @ w) + torch.rand_like(x), 0.5, True)
        return x

    def run(fn):
        torch.manual_seed(3)
        x, w = leaf(8, 8), torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
        y = fn(x, w)
        y.sum().backward()
        return y, x.grad, w.grad

    with foregrad.config.patch(**options):
        compiled, graphs = grab(program, partition_fn=min_cut_rematerialization_partition, memory_budget=budget)
        ours = run(compiled)
    assert all(torch.allclose(a, b) for a, b in zip(ours, run(program), strict=True))
    drawn = [name for name in graphs.ops("backward") if "bernoulli" in name or "rand" in name or "dropout" in name]
    assert drawn == []


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7])
def test_torchs_budget_does_not_lift_it(fraction):
    """P-7, peers.md 12"""
    with foregrad.config.patch(activation_memory_budget=fraction):
        compiled, graphs = grab(
            lambda x: torch.dropout(x.sin(), 0.5, True).exp(), partition_fn=min_cut_rematerialization_partition
        )
        x = leaf(64)
        y = compiled(x)
        y.sum().backward()
    assert not [name for name in graphs.ops("backward") if "bernoulli" in name or "dropout" in name]
    assert torch.equal(y != 1, x.grad != 0)


@pytest.mark.parametrize("budget", BUDGETS)
def test_side_effects_happen_once(budget):
    """P-6"""
    seen.clear()
    rematerializing(budget)(lambda x: (torch.ops.foregrad_partition.note(x.detach()) * x).cos())(
        leaf(8)
    ).sum().backward()
    assert seen == [1]


def test_a_mark_to_recompute_what_must_be_saved_is_refused_by_name():
    """P-6"""
    captured = foregrad.capture(lambda x: torch.rand_like(x) * x, leaf(4))
    graph = captured.joint_graph
    for made in graph.graph.nodes:
        if "rand" in made.name:
            made.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    with pytest.raises(PartitionError, match=r"rand_like.* is marked to be recomputed, but .* random"):
        min_cut_rematerialization_partition(graph, captured.example_inputs, num_fwd_outputs=1)
