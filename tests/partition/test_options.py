"""L-7, P-7: what the partitioner's options mean, and input that makes no sense."""

import functools
import logging

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import foregrad
from foregrad import default_partition, explain_partition, min_cut_rematerialization_partition
from foregrad.errors import BudgetError, ConfigError, IgnoredOptionWarning, InfeasibleBudgetError, PartitionError
from helpers import grab, leaf, nop

PARTITIONERS = [default_partition, min_cut_rematerialization_partition]


def chain(x):
    for _ in range(6):
        x = x.sin().exp()
    return x.sum()


def saved_names(**options):
    with foregrad.config.patch(**options):
        captured = foregrad.capture(chain, leaf(64))
        forward, _ = min_cut_rematerialization_partition(
            captured.joint_graph, captured.example_inputs, num_fwd_outputs=1
        )
    return [node.name for node in forward.graph.output_node().args[0][1:]]


def test_what_is_far_from_the_backward_is_not_computed_again():
    """L-7: max_dist_from_bw"""
    assert saved_names() == ["primals_1"]
    nearby = saved_names(max_dist_from_bw=0)
    assert len(nearby) > 1 and len(saved_names(max_dist_from_bw=999)) == 1


def test_gradients_with_a_distance():
    """L-7"""
    with foregrad.config.patch(max_dist_from_bw=0):
        foregrad.check(chain, leaf(4), compile=lambda fn: foregrad.aot_function(fn, nop, partition_fn=PARTITIONERS[1]))


def test_aggressive_recomputation_saves_the_fewest_bytes():
    """L-7"""
    w = torch.linspace(-1, 1, 256).reshape(16, 16).requires_grad_()

    def program(x, w):
        for _ in range(4):
            x = torch.tanh(torch.relu(x @ w) * 2 + x.sin()).exp()
        return x.sum()

    found = []
    for flag in (False, True):
        with foregrad.config.patch(aggressive_recomputation=flag):
            found.append(explain_partition(program, w.detach().requires_grad_(), w).saved_bytes)
    assert found[1] <= found[0]


def test_the_report_can_be_logged(caplog):
    """L-7: debug_partitioner"""
    with caplog.at_level(logging.INFO, "foregrad.partition.rematerialize"):
        saved_names()
        assert not caplog.records
        saved_names(debug_partitioner=True)
    assert "beyond the inputs" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"ban_recompute_used_far_apart": False},
        {"ban_recompute_long_fusible_chains": False},
        {"ban_recompute_materialized_backward": False},
        {"ban_recompute_not_in_allowlist": False},
        {"ban_recompute_reductions": False},
        {"recompute_views": True},
        {"activation_memory_budget_solver": "ilp"},
        {"activation_memory_budget_runtime_estimator": "profile"},
    ],
)
def test_options_that_change_nothing(options):
    """L-7: bans that a simulation of the peak makes unnecessary are lifted anyway; who sets one is told so"""
    with pytest.warns(IgnoredOptionWarning, match=f"config.{next(iter(options))} has no effect"):
        found = saved_names(**options)
    assert found == saved_names()


def test_common_subexpressions():
    """P-5: cse"""
    counts = []
    for cse in (True, False):
        with foregrad.config.patch(cse=cse):
            compiled, graphs = grab(lambda x: x.sin() * x.sin().exp(), partition_fn=PARTITIONERS[1])
            compiled(leaf(4)).sum().backward()
        counts.append(graphs.ops("forward").count("sin.default"))
    assert counts == [1, 2]


def test_both_budgets_are_refused_at_once():
    """P-7"""
    with foregrad.config.patch(activation_memory_budget=0.5), pytest.raises(ConfigError, match="not both"):
        foregrad.aot_function(chain, nop, memory_budget=0.5)
    captured = foregrad.capture(chain, leaf(4))
    for node in captured.joint_graph.graph.nodes:
        node.meta["memory_budget"] = 0.5
    with pytest.raises(ConfigError, match="not both"):
        min_cut_rematerialization_partition(
            captured.joint_graph, captured.example_inputs, num_fwd_outputs=1, memory_budget=0.5
        )


def test_a_partitioner_of_ones_own_takes_its_own_budget():
    """P-1, P-7: nothing is ignored"""
    own = functools.partial(min_cut_rematerialization_partition, memory_budget=0.5)
    with pytest.raises(ConfigError, match="give your own its budget"):
        foregrad.aot_function(chain, nop, partition_fn=own, memory_budget=0.5)
    foregrad.check(chain, leaf(4), compile=lambda fn: foregrad.aot_function(fn, nop, partition_fn=own))


@pytest.mark.parametrize("budget", [-1, -0.5, 1.5, float("nan"), float("inf"), True, False, "0.5", [1]])
def test_budgets_out_of_range(budget):
    """P-7"""
    captured = foregrad.capture(chain, leaf(4))
    with pytest.raises(BudgetError, match="memory_budget is a number of bytes"):
        min_cut_rematerialization_partition(
            captured.joint_graph, captured.example_inputs, num_fwd_outputs=1, memory_budget=budget
        )


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), True, "1"])
def test_torchs_budget_out_of_range(fraction):
    """P-7"""
    with (
        foregrad.config.patch(activation_memory_budget=fraction),
        pytest.raises(BudgetError, match="valid ranges for memory budget"),
    ):
        foregrad.aot_function(chain, nop)


def test_the_best_that_can_be_reached_is_said():
    """P-7"""
    with pytest.raises(InfeasibleBudgetError, match="at least") as caught:
        explain_partition(chain, leaf(64), memory_budget=1)
    best = int(str(caught.value).split("at least ")[1].split(",")[0])
    assert explain_partition(chain, leaf(64), memory_budget=best).peak == best
    with pytest.raises(InfeasibleBudgetError):
        explain_partition(chain, leaf(64), memory_budget=best - 1)


@pytest.mark.parametrize("partition", PARTITIONERS)
@pytest.mark.parametrize("count", [-1, 3])
def test_a_number_of_outputs_that_the_graph_does_not_have(partition, count):
    """P-1"""
    captured = foregrad.capture(chain, leaf(4))
    with pytest.raises(PartitionError, match="num_fwd_outputs"):
        partition(captured.joint_graph, captured.example_inputs, num_fwd_outputs=count)


@pytest.mark.parametrize("partition", PARTITIONERS)
def test_an_output_that_needs_a_tangent(partition):
    """P-3"""
    captured = foregrad.capture(chain, leaf(4))
    with pytest.raises(PartitionError, match="was invalid, but is output"):
        partition(captured.joint_graph, captured.example_inputs, num_fwd_outputs=2)


@pytest.mark.parametrize("mark", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
@pytest.mark.parametrize("name", ["mm", "t", "split", "getitem_1", "max_1", "getitem_2", "sin"])
def test_marks_on_views_and_on_operators_with_several_results(name, mark):
    """P-5: a view that is marked to be saved is saved with what it looks at"""

    def program(x, w):
        h = (x @ w).t()
        a, b = h.split(2)
        return h.sin() * a.max(1)[0].sum() + b.cos().sum()

    def marking(module, inputs, **keywords):
        for node in module.graph.nodes:
            if node.name == name:
                node.meta["recompute"] = mark
                found.append(node)
        return min_cut_rematerialization_partition(module, inputs, **keywords)

    found = []
    square = torch.linspace(-1, 1, 16).reshape(4, 4)
    foregrad.check(
        program,
        square.clone().requires_grad_(),
        square.clone().requires_grad_(),
        compile=lambda fn: foregrad.aot_function(fn, nop, partition_fn=marking),
        bitwise=False,
    )
    assert found


def test_a_marked_view_is_saved_with_its_memory():
    """P-5"""
    captured = foregrad.capture(lambda x: (x.cos() * 3).t().sinh().cos(), leaf(8, 8))
    for node in captured.joint_graph.graph.nodes:
        if node.name == "t":
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    forward, _ = min_cut_rematerialization_partition(captured.joint_graph, captured.example_inputs, num_fwd_outputs=1)
    assert "mul" in [node.name for node in forward.graph.output_node().args[0]]


def test_the_report_of_a_deep_program_is_short():
    """P-5: rows that differ in their names only stand together"""

    def program(x, w):
        for _ in range(30):
            x = torch.tanh(x @ w).exp() * 0.1
        return x.sum()

    square = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
    report = explain_partition(program, square, square.detach().requires_grad_())
    assert len(report.rows) > 60 and len(str(report).splitlines()) < 15
    assert "test_options.py:" in str(report) and "30: tanh, ..." in str(report)
    assert all(isinstance(name, str) and isinstance(alive, int) for name, alive in report.backward_memory)
