"""The simulator says what happens: live storages, measured while graphs run."""

import pytest
import torch
from families import SMALL, build, joint_of, simulated

import foregrad
from benchmarks.executing import run_step
from foregrad import default_partition, min_cut_rematerialization_partition
from foregrad.graph.fx import joint_from_fx, to_fx
from foregrad.partition.model import Model
from foregrad.partition.rematerialize import within
from foregrad.partition.search import Frontier
from helpers import leaf, nop

MiB = 1 << 20


@pytest.mark.parametrize("name", SMALL)
def test_simulated_peaks_are_real_ones_and_gradients_eagers(name):
    """P-5, P-7: at every budget"""
    model, inputs = build(name)
    joint, primals = joint_of(model, inputs)
    expected = [parameter.grad for parameter in model.parameters()]
    frontier = Frontier(Model(joint_from_fx(joint.graph, joint.outputs)))
    peaks = []
    for budget in (None, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0):
        plan = frontier.balanced if budget is None else within(frontier, budget)
        forward, backward = map(to_fx, plan.emit())
        found = simulated(forward, backward, joint.outputs)
        assert (found.forward, found.backward, found.saved) == (
            plan.forward_memory,
            plan.backward_memory,
            plan.saved_bytes,
        )
        _, gradients, first, second = run_step(
            forward, backward, joint.outputs, primals, [torch.ones((), dtype=torch.float64)]
        )
        for real, expected_peak in ((first, found.forward.peak), (second, found.backward.peak)):
            assert abs(real - expected_peak) < min(0.1 * MiB, 0.01 * real)
        grads = [g for g in gradients[: len(primals)] if g is not None]
        assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(grads, expected, strict=True))
        if budget is not None:
            peaks.append(plan.peak)
    assert peaks == sorted(peaks, reverse=True)


def test_views_cost_nothing_and_results_are_the_callers():
    """P-5"""
    captured = foregrad.capture(lambda x, w: (x @ w).t().exp().t().view(-1), leaf(64, 64), leaf(64, 64))
    forward, backward = default_partition(captured.joint_graph, captured.example_inputs, num_fwd_outputs=1)
    found = simulated(forward, backward, 1)
    size = 64 * 64 * 4
    assert found.saved == 0 and found.forward.peak == 2 * size and found.backward.after == 2 * size


def test_unused_results_of_an_operator_die_with_it():
    """P-5"""
    captured = foregrad.capture(lambda x: x.max(1)[0].exp(), leaf(8, 64))
    forward, backward = default_partition(captured.joint_graph, captured.example_inputs, num_fwd_outputs=1)
    found = simulated(forward, backward, 1)
    assert found.saved == 8 * 8 and found.forward.alive[0] == 8 * 4 + 8 * 8


def test_symbolic_sizes_are_weighed_by_what_they_were():
    """P-3"""
    compiled = foregrad.aot_function(
        lambda x: (x.cos() * 3).sinh().cos(), nop, partition_fn=min_cut_rematerialization_partition, dynamic=True
    )
    x = leaf(6)
    compiled(x).sum().backward()
    y = leaf(6)
    (y.cos() * 3).sinh().cos().sum().backward()
    assert torch.allclose(x.grad, y.grad)
