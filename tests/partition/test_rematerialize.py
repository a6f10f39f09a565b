"""P-5 to P-7: the minimum cut, memory budgets, marks."""

import networkx
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import foregrad
from foregrad import check, default_partition, explain_partition, min_cut_rematerialization_partition
from foregrad.errors import BudgetError, ConfigError, InfeasibleBudgetError, PartitionError
from foregrad.graph.fx import joint_from_fx
from foregrad.partition.min_cut import BYTE, minimum_cut, relevant
from foregrad.partition.model import Model
from foregrad.partition.rematerialize import without_common_subexpressions
from helpers import grab, leaf, nop, plain

BUDGETS = [None, 1.0, 0.5, 0.0]


def rematerializing(budget=None):
    return lambda fn: foregrad.aot_function(
        fn, nop, partition_fn=min_cut_rematerialization_partition, memory_budget=budget
    )


def layers(x, w):
    for _ in range(4):
        x = torch.tanh(torch.relu(x @ w) * 2 + x.sin())
    return x, x.exp().sum()


def square(n=16):
    return torch.linspace(-1, 1, n * n).reshape(n, n).requires_grad_()


def test_cheap_operators_are_computed_again():
    """P-5"""
    compiled, graphs = grab(lambda x: (x.cos() * 3).sinh().cos(), partition_fn=min_cut_rematerialization_partition)
    compiled(leaf(4)).sum().backward()
    assert [node.name for node in graphs.outputs("forward")] == ["cos_1", "primals_1"]
    assert graphs.ops("backward")[0] == "cos.default"


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_program_behaves_as_in_eager(budget):
    """P-5, P-7, J-5, J-10, J-16"""
    check(layers, square(4), square(4), compile=rematerializing(budget))


@pytest.mark.parametrize("budget", BUDGETS)
def test_symbolic_sizes_written_inputs_and_several_results(budget):
    """P-3, P-5"""

    def program(x, b, n):
        b.mul_(2)
        y = torch.split(x.sin().expand(n, x.shape[0]), 1)[0]
        return (y * b).cos(), x.max(0)[0] * b.sum()

    def compile(fn):
        return foregrad.aot_function(
            fn, nop, partition_fn=min_cut_rematerialization_partition, memory_budget=budget, dynamic=True
        )

    check(program, leaf(5), plain(5), 3, compile=compile)


def test_products_are_computed_once_without_a_budget():
    """P-5"""
    compiled, graphs = grab(layers, partition_fn=min_cut_rematerialization_partition)
    compiled(square(), square())[1].backward()
    backward = graphs.ops("backward")
    plainly, other = grab(layers)
    plainly(square(), square())[1].backward()
    assert backward.count("mm.default") == other.ops("backward").count("mm.default")
    assert len(graphs.outputs("forward")) < len(other.outputs("forward"))


def test_the_cut_is_minimal():
    """P-5, by networkx"""
    captured = foregrad.capture(layers, square(), square())
    model = Model(joint_from_fx(captured.joint_graph, 2))

    def price(i):
        return None if model.flops[i] else model.moved[i]

    kept = minimum_cut(model, price)
    decided = relevant(model)
    graph = networkx.DiGraph()
    for i in decided.nodes:
        cost = None if model.banned[i] is not None else price(i)
        graph.add_edge("source", ("in", i), **({} if cost is None else {"capacity": cost}))
        graph.add_edge(("in", i), ("out", i), **({"capacity": BYTE * model.bytes(i)} if model.savable[i] else {}))
        if cost is not None:
            for item in decided.inputs(i):
                graph.add_edge(("out", item), ("in", i))
    for i in decided.read:
        graph.add_edge(("out", i), "sink")
    recomputed: set[int] = set()
    pending = list(decided.read)
    while pending:
        i = pending.pop()
        if i not in kept and i not in recomputed:
            recomputed.add(i)
            pending.extend(decided.inputs(i))
    found = sum(BYTE * model.bytes(i) for i in kept) + sum(model.moved[i] for i in recomputed)
    assert found == networkx.minimum_cut_value(graph, "source", "sink")


def test_a_result_is_saved_only_where_eager_saves_it_too():
    """J-16: the caller may write to a result"""

    def run(fn):
        x = leaf(64)
        y, z = fn(x)
        y.add_(1)
        z.sum().backward()
        return x.grad

    def program(x):
        y = torch.cumsum(x, 0)
        return y, (y + 1).tanh()

    assert torch.equal(run(rematerializing()(program)), run(program))


def test_common_subexpressions_are_computed_once():
    """P-5: config.cse"""

    def program(x):
        return (x.sin() + x.sin()) * torch.rand_like(x) + torch.rand_like(x), x + 1, x + 1

    graph = joint_from_fx(foregrad.capture(program, leaf(4)).joint_graph, 3)
    names = [node.name for node in without_common_subexpressions(graph).nodes]
    assert "sin" in names and "sin_1" not in names
    assert len([name for name in names if "rand" in name]) == 2
    check(program, leaf(4), compile=rematerializing())
    with foregrad.config.patch(cse=False):
        compiled, graphs = grab(program, partition_fn=min_cut_rematerialization_partition)
        compiled(leaf(4))
    assert graphs.ops("forward").count("sin.default") == 2


def test_a_checkpoint_stays_one():
    """P-5: what the user wants computed again is neither saved nor merged with the forward"""

    def program(x, w):
        return checkpoint(lambda x: torch.relu(x @ w).sin() @ w, x, use_reentrant=False).cos()

    compiled, graphs = grab(program, partition_fn=min_cut_rematerialization_partition)
    compiled(square(), square()).sum().backward()
    assert graphs.ops("backward").count("mm.default") == 5
    check(program, square(4), square(4), compile=rematerializing(), bitwise=False)


def test_a_selective_checkpoint_is_obeyed():
    """P-5"""

    def policy(ctx, op, *args, **kwargs):
        keep = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def program(x, w):
        return checkpoint(
            lambda x: torch.relu(x @ w).sin() @ w,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        ).cos()

    compiled, graphs = grab(program, partition_fn=min_cut_rematerialization_partition)
    compiled(square(), square()).sum().backward()
    assert graphs.ops("backward").count("mm.default") == 4 and "relu.default" in graphs.ops("backward")


def _marked(mark, stem):
    captured = foregrad.capture(lambda x, w: (x @ w).sin().sum(), square(), square())
    for node in captured.joint_graph.graph.nodes:
        if node.name == stem:
            node.meta["recompute"] = mark
    return captured


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_a_mark_to_recompute_is_obeyed(partition):
    """P-4, P-5"""
    captured = _marked(CheckpointPolicy.MUST_RECOMPUTE, "mm")
    forward, backward = partition(captured.joint_graph, captured.example_inputs, num_fwd_outputs=1)
    assert [node.name for node in forward.graph.output_node().args[0]] == ["sum_1", "primals_1", "primals_2"]
    assert "mm" in [node.name for node in backward.graph.nodes]


def test_a_mark_to_save_is_obeyed():
    """P-5"""
    captured = foregrad.capture(lambda x: (x.cos() * 3).sinh().cos(), leaf(64))
    for node in captured.joint_graph.graph.nodes:
        if node.name == "sinh":
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    forward, _ = min_cut_rematerialization_partition(captured.joint_graph, captured.example_inputs, num_fwd_outputs=1)
    assert "sinh" in [node.name for node in forward.graph.output_node().args[0]]


def test_without_a_backward_it_is_the_plain_partition():
    """P-5"""
    captured = foregrad.capture(lambda x: x * 1, leaf(4))
    graph = captured.joint_graph
    output = graph.graph.output_node()
    output.args = ((output.args[0][0], None),)
    forward, backward = min_cut_rematerialization_partition(graph, captured.example_inputs, num_fwd_outputs=1)
    assert len(forward.graph.output_node().args[0]) == 1
    assert [node.op for node in backward.graph.nodes if node.op == "call_function"] == []


def test_an_output_that_needs_a_tangent_cannot_be_the_forwards():
    """P-3"""
    captured = foregrad.capture(lambda x: x.sin(), leaf(2))
    with pytest.raises(PartitionError, match="was invalid, but is output"):
        min_cut_rematerialization_partition(captured.joint_graph, captured.example_inputs, num_fwd_outputs=2)


def test_torchs_budget():
    """P-7"""
    saved = []
    for fraction in (1.0, 0.5, 0.0):
        with foregrad.config.patch(activation_memory_budget=fraction):
            compiled, graphs = grab(layers, partition_fn=min_cut_rematerialization_partition)
            x, w = square(), square()
            compiled(x, w)[1].backward()
        saved.append(sum(node.meta["val"].numel() for node in graphs.outputs("forward")[2:]))
    assert saved == sorted(saved, reverse=True) and saved[-1] == 2 * 16 * 16
    mine = x.grad
    x, w = square(), square()
    layers(x, w)[1].backward()
    assert torch.allclose(mine, x.grad)


@pytest.mark.filterwarnings("ignore::foregrad.errors.IgnoredOptionWarning")  # one of the options has no effect
def test_budgets_that_make_no_sense():
    """P-7"""
    for budget in (-1, 1.5, -0.5, float("nan"), True, "1"):
        with pytest.raises(BudgetError, match="memory_budget is a number of bytes"):
            foregrad.aot_function(layers, nop, memory_budget=budget)
    for option, value, message in (
        ("activation_memory_budget", 1.5, "The valid ranges for memory budget are 0 <= m <= 1"),
        ("activation_memory_budget_solver", "magic", "Not aware of memory budget knapsack solver"),
        ("activation_memory_budget_runtime_estimator", "magic", "Not aware of runtime estimator"),
    ):
        with foregrad.config.patch(**{option: value}), pytest.raises(RuntimeError, match=message):
            foregrad.aot_function(layers, nop)
    with foregrad.config.patch(activation_memory_budget=0.5), pytest.raises(ConfigError, match="not both"):
        foregrad.aot_function(layers, nop, memory_budget=0.5)(square(), square())


def test_a_budget_that_cannot_be_met_says_what_can():
    """P-7"""
    with pytest.raises(InfeasibleBudgetError, match="at least") as caught:
        foregrad.aot_function(layers, nop, memory_budget=10)(square(), square())
    best = int(str(caught.value).split("at least ")[1].split(",")[0])
    assert explain_partition(layers, square(), square(), memory_budget=best).peak == best


def test_the_report():
    """P-5: what is saved, what is computed again, and why"""
    report = explain_partition(layers, square(), square(), memory_budget=0.0)
    again = [row for row in report.rows if not row.saved]
    assert again and {row.name for row in report.rows if row.saved} >= {"primals_1", "primals_2"}
    assert report.flops == sum(row.flops for row in again)
    assert "test_rematerialize.py" in next(row.line for row in again if row.operator.startswith("relu"))
    assert report.peak == max(alive for _, alive in (*report.forward_memory, *report.backward_memory))
    assert "beyond the inputs" in str(report) and "relu" in str(report)
    with pytest.raises(PartitionError, match="no gradients"):
        explain_partition(layers, plain(4, 4), plain(4, 4))


def test_the_report_is_about_the_graphs_that_are_compiled_where_a_tensor_subclass_takes_part():
    """P-5: what the forward returns of a wrapper is as many tensors as lie in it"""

    def program(x):
        return x.sin().exp()

    x = TwoTensor(plain(32, 64), plain(32, 64)).requires_grad_()
    report = explain_partition(program, x)
    compiled, graphs = grab(program, partition_fn=min_cut_rematerialization_partition)
    compiled(x).sum().backward()
    for kind, alive in (("forward", report.forward_memory), ("backward", report.backward_memory)):
        run = [node.name for node in graphs.modules[kind].graph.nodes if node.op == "call_function"]
        assert [name for name, _ in alive] == run
    assert [name for name, _ in report.forward_memory] == ["sin", "sin_1", "exp", "exp_1"]
    assert (report.saved_bytes, report.peak) == (0, 4 * 32 * 64 * 4)


@pytest.mark.parametrize(
    "weights",
    [
        lambda: torch.ones(100) * 3,
        lambda: torch.full((100,), 3.0),
        lambda: torch.arange(0.0, 100.0),
        lambda: torch.arange(100) / 7,
        lambda: torch.arange(100).sqrt(),
    ],
)
@pytest.mark.parametrize("budget", [None, 0.0])
def test_what_is_computed_again_has_the_default_dtype_of_the_forward(weights, budget):
    def program(x):
        return (x.sum() * weights()).sin()

    def gradient(call):
        x = leaf(3)
        y = call(x).sum()
        torch.set_default_dtype(torch.float64)
        try:
            y.backward()
        finally:
            torch.set_default_dtype(torch.float32)
        return x.grad

    compiled = rematerializing(budget)(program)
    assert torch.equal(gradient(compiled), gradient(program))
