"""P-5 to P-7 over random programs: never a wrong gradient, whatever the budget, and peaks as simulated."""

import dataclasses

import pytest
import torch
from families import simulated
from random_programs import N, random_program
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import foregrad
from benchmarks.executing import run_step
from foregrad import min_cut_rematerialization_partition
from foregrad.graph.fx import joint_from_fx
from foregrad.partition.rematerialize import plan_of
from foregrad.partition.rules import why_not_again

BUDGETS = [None, 1.0, 0.6, 0.3, 0.0]
noted: list[float] = []
library = torch.library.Library("foregrad_random_programs", "DEF")
library.define("note(Tensor x) -> Tensor")
library.impl("note", lambda x: (noted.append(float(x.sum())), x * 2)[1], "CompositeExplicitAutograd")
torch.library.register_fake("foregrad_random_programs::note", torch.empty_like)
_register_effectful_op("foregrad_random_programs::note", _EffectType.ORDERED)


def arguments():
    values = torch.linspace(-1, 1, 3 * N * N, dtype=torch.float64).sin().view(3, N, N)
    x, w, buffer = (value.clone() for value in values)
    return x.requires_grad_(), w.requires_grad_(), buffer


def step(fn):
    """Everything that a training step shows."""
    torch.manual_seed(5)
    noted.clear()
    x, w, buffer = arguments()
    results = fn(x, w, buffer)
    differentiable = [y for y in results if y.requires_grad]
    torch.autograd.backward(differentiable, [torch.cos(y.detach()) for y in differentiable])
    return [*(y.detach() for y in results), buffer, x.grad, w.grad, torch.tensor(list(noted)), torch.rand(())]


def compiled(program, budget, dynamic):
    """A compiled program, the graphs and inputs of its calls, and for each partition how many results are the forward's
    own, and what the plan says about memory."""
    calls, plans = [], []

    def compiler(graph, examples):
        def run(args):
            calls.append((graph, [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in args]))
            return graph(*args)

        return foregrad.make_boxed_func(lambda *args: run(args))

    def partition(module, inputs, *, num_fwd_outputs, **keywords):
        options = dataclasses.replace(foregrad.config, memory_budget=budget)
        plan = plan_of(joint_from_fx(module, num_fwd_outputs), options)
        figures = plan and (plan.saved_bytes, plan.forward_memory.peak, plan.backward_memory.peak)
        plans.append((num_fwd_outputs, figures))
        return min_cut_rematerialization_partition(
            module, inputs, num_fwd_outputs=num_fwd_outputs, memory_budget=budget, **keywords
        )

    return foregrad.aot_function(program, compiler, partition_fn=partition, dynamic=dynamic), calls, plans


@pytest.mark.parametrize("seed", range(40))
def test_gradients_and_peaks(seed):
    """P-5, P-6, P-7, peers.md 11 and 12"""
    program, steps = random_program(seed)
    expected = step(program)
    peaks = []
    for budget in BUDGETS:
        fn, calls, plans = compiled(program, budget, dynamic=seed % 5 == 0)
        for mine, eager in zip(step(fn), expected, strict=True):
            if eager is None or mine is None:
                assert mine is eager, steps
            else:
                torch.testing.assert_close(mine, eager, msg=lambda m, b=budget: f"{m}\nbudget {b}: {steps}")
        if len(calls) < 2:
            continue
        (forward, primals), (backward, given) = calls[0], calls[1]
        again = [node for node in joint_from_fx(backward, 0).nodes if not node.backward]
        drawn = [node.name for node in again if why_not_again(node) == "random"]
        assert drawn == [], steps
        own, planned = plans[0]
        found = simulated(forward, backward, own)
        assert planned in ((found.saved, found.forward.peak, found.backward.peak), None), (budget, steps)
        saved = len(forward.graph.output_node().args[0]) - own
        tangents = given[saved:]
        calls.clear()
        del given
        _, _, first, second = run_step(forward, backward, own, primals, tangents)
        assert (first, second) == (found.forward.peak, found.backward.peak), (budget, steps)
        if budget is not None:
            peaks.append(found.peak)
    assert peaks == sorted(peaks, reverse=True), steps
