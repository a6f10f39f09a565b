"""Cut a joint graph by the partitioner that was asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ..errors import CompilerError
from ..joint.graph import Part, to_fx
from ..joint.lazy import outputs_of
from ..joint.verify import verify_module
from ..options import AOTConfig
from ..partition import cut, default_partition, min_cut_rematerialization_partition, rematerialized
from ..slots import RandomState


def partitioned(
    part: Part,
    returned: int,
    gradients: int,
    config: AOTConfig,
    module: Callable[[], fx.GraphModule] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward, with so many results returned, and the backward, with so many gradients.

    `module` gives the graph as `torch.fx`, where it is wanted elsewhere too.
    """
    partition_fn = config.partition_fn
    if config.options.memory_budget is not None and partition_fn in (None, default_partition):
        partition_fn = min_cut_rematerialization_partition
    if partition_fn in (None, default_partition):
        forward, backward = map(to_fx, cut(part, returned))
    elif partition_fn is min_cut_rematerialization_partition:
        forward, backward = map(to_fx, rematerialized(part, returned, config.options))
    else:
        random = [node.value for node in part.placeholders if isinstance(node.slot, RandomState)]
        rest = [node for node in part.placeholders if not isinstance(node.slot, RandomState)]
        tangents = [node.value for node in rest if "tangents" in node.name]
        primals = [node.value for node in rest if "tangents" not in node.name]
        with torch.no_grad():
            joint = module() if module is not None else to_fx(part)
            forward, backward = partition_fn(joint, (primals, tangents, *random), num_fwd_outputs=returned)
    if len(outputs_of(backward)) != gradients:
        raise CompilerError("The partitioner returned a backward that does not give one gradient for each input.")
    if config.options.verify:
        verify_module(forward)
        verify_module(backward)
    return forward, backward
