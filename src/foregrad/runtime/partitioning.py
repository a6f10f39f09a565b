"""Cut a joint graph by the partitioner that was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import fx

from ..errors import CompilerError
from ..joint.graph import Part, to_fx
from ..joint.lazy import outputs_of
from ..joint.verify import verify_module
from ..options import AOTConfig
from ..partition import cut, default_partition, min_cut_rematerialization_partition, rematerialized
from ..record.mirror import genuine
from ..slots import RandomState


def partitioned(
    part: Part,
    returned: int,
    gradients: int,
    config: AOTConfig,
    module: Callable[[], fx.GraphModule] | None = None,
    higher: bool = False,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward, with so many results returned, and the backward, with so many gradients.

    `module` gives the graph as `torch.fx`, where it is wanted elsewhere too. `higher` says that the graph is that of a
    gradient to be differentiated: a budget in bytes is about the first order, and what the next one may need stays
    within its reach.
    """
    partition_fn, options = config.partition_fn, config.options
    if options.memory_budget is not None and partition_fn in (None, default_partition):
        partition_fn = min_cut_rematerialization_partition
    if higher and isinstance(options.memory_budget, int):
        options = dataclasses.replace(options, memory_budget=None)
    if partition_fn in (None, default_partition):
        forward, backward = map(to_fx, cut(part, returned, options, higher))
    elif partition_fn is min_cut_rematerialization_partition:
        forward, backward = map(to_fx, rematerialized(part, returned, options, higher))
    else:
        random = [node.value for node in part.placeholders if isinstance(node.slot, RandomState)]
        rest = [node for node in part.placeholders if not isinstance(node.slot, RandomState)]
        tangents = [node.value for node in rest if "tangents" in node.name]
        primals = [node.value for node in rest if "tangents" not in node.name]
        with torch.no_grad():
            joint = module() if module is not None else to_fx(part)
            examples = genuine((primals, tangents, *random))
            forward, backward = partition_fn(joint, examples, num_fwd_outputs=returned)
    if len(outputs_of(backward)) != gradients:
        raise CompilerError("The partitioner returned a backward that does not give one gradient for each input.")
    if options.verify:
        verify_module(forward)
        verify_module(backward)
    return forward, backward
