"""The partitioner that saves little: `min_cut_rematerialization_partition`."""

from __future__ import annotations

import logging
import operator
from typing import Any

from torch import fx

from .._torch import OpOverload, garbage_collection_paused
from ..errors import BudgetError, ConfigError, InfeasibleBudgetError
from ..graph.fx import joint_from_fx, to_fx
from ..graph.graph import Graph, GraphOutput, Node, map_nodes, nodes_in
from ..graph.subgraph import computation_of
from ..ops import Kind, op_info
from ..options import Config, config
from .model import NOWHERE, Model
from .plan import Plan
from .report import report_of
from .rules import mark_of, why_not_again
from .search import Frontier
from .sides import cut_plainly


# ---------------------------------------------------------------------------------------------------------------------
# Common subexpressions: what two nodes of one side would compute alike is computed once.
#
# A backward that computes something of the forward again does so because a checkpoint asked for it, or because
# autograd did: nothing is merged across the two sides. Results keep memory of their own, and draws and effects stay as
# they are.
def without_common_subexpressions(graph: Graph) -> Graph:
    """The same graph with fewer nodes; those that are left are copies with the same names where an argument changed."""
    kept = set(nodes_in(graph.results))
    for node in reversed(graph.nodes):  # results, and what they are views of, have memory of their own
        if node in kept and _is_view(node):
            kept.update(node.inputs())
    replaced: dict[Node, Node] = {}
    known: dict[Any, Node] = {}
    nodes: list[Node] = []

    def now(item: Any) -> Any:
        return map_nodes(item, lambda node: replaced.get(node, node))

    for node in graph.nodes:
        new = node
        if any(item in replaced for item in node.inputs()):
            new = replaced[node] = node.copy(now(node.args), {key: now(item) for key, item in node.kwargs.items()})
        key = None if node in kept else _key(new)
        if key is not None:
            first = known.setdefault(key, new)
            if first is not new:
                replaced[node] = first
                continue
        nodes.append(new)
    if not replaced:
        return graph
    outputs = [GraphOutput(slot, now(value)) for slot, value in graph.outputs]
    return Graph(graph.inputs, nodes, outputs, {now(node) for node in graph.overwritten})


def _is_view(node: Node) -> bool:
    if node.op is operator.getitem:
        return True
    return isinstance(node.op, OpOverload) and op_info(node.op).kind is Kind.VIEW


def _key(node: Node) -> Any:
    """Equal for nodes of one side that compute the same; None for one that stays as it is."""
    computation = computation_of(node)
    if computation is None or why_not_again(node) is not None:
        return None
    return node.backward, node.recomputed, mark_of(node), computation


# ---------------------------------------------------------------------------------------------------------------------
# The partitioner that saves little: `min_cut_rematerialization_partition`.
_log = logging.getLogger(__name__)
_SOLVERS = ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg")
_ESTIMATORS = ("flops", "profile", "testing")


def min_cut_rematerialization_partition(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    compiler: str = "inductor",
    *,
    num_fwd_outputs: int,
    memory_budget: float | None = None,
    **_: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph so that little memory is alive at any moment, and cheap operators are computed again.

    >>> import torch, foregrad
    >>> joint = foregrad.capture(lambda x: (x.cos() * 3).sinh().cos(), torch.ones(2, requires_grad=True))
    >>> forward, backward = min_cut_rematerialization_partition(
    ...     joint.joint_graph, joint.example_inputs, num_fwd_outputs=1
    ... )
    >>> [node.name for node in forward.graph.output_node().args[0]]
    ['cos_1', 'primals_1']

    Without a budget no matrix product and no convolution is computed twice. Random operators, effects, collectives and
    reads of inputs that are written later never are.

    Args:
        joint_module: a graph of forward and backward; placeholders whose name contains `tangents` are tangents.
        joint_inputs: example values, as (primals, tangents).
        compiler: for which compiler; all are treated alike.
        num_fwd_outputs: how many of the flat outputs belong to the forward.
        memory_budget: bytes at the peak of a training step beyond its inputs (int), or a fraction between the lowest
            and the highest peak that can be reached (float). Default: `foregrad.config.memory_budget`.
    """
    options = config.copy()
    if memory_budget is not None:
        options.memory_budget = memory_budget
    with garbage_collection_paused():
        forward, backward = rematerialized(joint_from_fx(joint_module, num_fwd_outputs), options)
        return to_fx(forward), to_fx(backward)


def rematerialized(joint: Graph, options: Config, keeps_sides: bool = False) -> tuple[Graph, Graph]:
    """The same for a graph with slots; `keeps_sides` as for `Model`."""
    with garbage_collection_paused():
        plan = plan_of(joint, options, keeps_sides)
        return cut_plainly(joint) if plan is None else plan.emit()


def plan_of(joint: Graph, options: Config, keeps_sides: bool = False) -> Plan | None:
    """What to save; None where there is nothing to decide, for nothing belongs to the backward."""
    check_budgets(options)
    fraction = _marked_fraction(joint, options.activation_memory_budget)
    if options.memory_budget is not None and fraction != 1:
        raise ConfigError("Give either memory_budget or activation_memory_budget, not both.")
    if options.cse:
        joint = without_common_subexpressions(joint)
    farthest = options.max_dist_from_bw if options.max_dist_from_bw < NOWHERE else None
    model = Model(joint, keeps_sides, farthest)
    if not model.late_needed:
        return None
    plan = _chosen(Frontier(model), fraction, options)
    if options.debug_partitioner:
        _log.info("%s", report_of(plan))
    return plan


def _chosen(frontier: Frontier, fraction: float, options: Config) -> Plan:
    if options.memory_budget is not None:
        return within(frontier, options.memory_budget)
    if fraction != 1:
        return frontier.saving(fraction)
    return frontier.smallest if options.aggressive_recomputation else frontier.balanced


def within(frontier: Frontier, budget: float) -> Plan:
    """The plan that computes least again and whose peak stays within a budget."""
    plans = frontier.plans
    lowest, highest = plans[-1].peak, max(plans[0].peak, frontier.plain.peak)
    limit = budget if isinstance(budget, int) else lowest + round(budget * (highest - lowest))
    for plan in plans:
        if plan.peak <= limit:
            return plan
    raise InfeasibleBudgetError(
        f"The memory budget of {budget} bytes cannot be met: the best plan that was found has {lowest} bytes alive at "
        f"its peak beyond the inputs. Give a budget of at least {lowest}, or a fraction between 0.0 and 1.0."
    )


def check_budgets(options: Config) -> None:
    """Refuse budgets out of range, and unknown names."""
    budget, fraction = options.memory_budget, options.activation_memory_budget
    if budget is not None:
        wrong = isinstance(budget, bool) or not isinstance(budget, (int, float)) or budget < 0
        if wrong or (isinstance(budget, float) and not budget <= 1):
            raise BudgetError(
                "memory_budget is a number of bytes (an int), or a fraction between 0.0 and 1.0 (a float), "
                f"not {budget!r}."
            )
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise BudgetError(f"The valid ranges for memory budget are 0 <= m <= 1. The provided value is {fraction}.")
    if budget is not None and fraction != 1:
        raise ConfigError("Give either memory_budget or activation_memory_budget, not both.")
    if options.activation_memory_budget_solver not in _SOLVERS and not callable(
        options.activation_memory_budget_solver
    ):
        raise BudgetError(f"Not aware of memory budget knapsack solver: {options.activation_memory_budget_solver}.")
    estimator = options.activation_memory_budget_runtime_estimator
    if estimator not in _ESTIMATORS:
        raise BudgetError(f"Not aware of runtime estimator: {estimator}.")


def _marked_fraction(joint: Graph, default: float) -> float:
    """The fraction that a node's mark asks for (P-7), or the option's."""
    for node in joint.nodes:
        found = node.meta.get("memory_budget") if node.meta is not None else None
        if isinstance(found, float):
            if not 0 <= found <= 1:
                raise BudgetError(f"The valid ranges for memory budget are 0 <= m <= 1. {node.name} is marked {found}.")
            return found
    return default
