"""The predictable baseline: the forward holds what its outputs need, and what the backward uses of it is saved.

Of a few operators (`SAVED_FOR_HIGHER_ORDERS`) more is saved, as autograd does: a backward of the backward reads it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..graph.fx import joint_from_fx, to_fx
from ..graph.graph import Graph
from ..options import Config, config
from .rematerialize import rematerialized
from .rules import is_marked_for_recomputation
from .sides import cut_plainly


def default_partition(
    joint_module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph so that nothing is computed twice.

    >>> import foregrad, torch
    >>> joint = foregrad.capture(lambda x: x.sin(), torch.ones(2, requires_grad=True))
    >>> forward, backward = default_partition(joint.joint_graph, joint.example_inputs, num_fwd_outputs=1)
    >>> [node.name for node in backward.graph.nodes]
    ['primals_1', 'tangents_1', 'cos', 'mul', 'output']

    Args:
        joint_module: a graph of forward and backward; placeholders whose name contains `tangents` are tangents.
        joint_inputs: example values, as (primals, tangents).
        num_fwd_outputs: how many of the flat outputs belong to the forward.
    """
    forward, backward = cut(joint_from_fx(joint_module, num_fwd_outputs))
    return to_fx(forward), to_fx(backward)


def cut(joint: Graph, options: Config = config, keeps_sides: bool = False) -> tuple[Graph, Graph]:
    """The same for a graph with slots; marks of the user's send it to the other partitioner (P-4)."""
    if any(node.meta is not None and is_marked_for_recomputation(node) for node in joint.nodes):
        return rematerialized(joint, options, keeps_sides)
    return cut_plainly(joint)
