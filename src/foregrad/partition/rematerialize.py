"""The partitioner that saves little: `min_cut_rematerialization_partition`."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..joint.graph import Part, from_fx, to_fx
from .mincut import minimum_cut
from .model import Model
from .plan import Plan
from .search import lower_peak
from .subexpressions import without_common_subexpressions


def min_cut_rematerialization_partition(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    compiler: str = "inductor",
    *,
    num_fwd_outputs: int,
    **_: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    forward, backward = rematerialize(from_fx(joint_module), num_fwd_outputs).emit()
    return to_fx(forward), to_fx(backward)


def rematerialize(joint: Part, num_fwd_outputs: int) -> Plan:
    joint = without_common_subexpressions(joint)
    model = Model(joint, num_fwd_outputs)
    kept = minimum_cut(model, lambda i: None if model.flops[i] else model.moved[i])
    return lower_peak(Plan(model, frozenset(kept)), 64)
