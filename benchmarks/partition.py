"""How well a joint graph is cut: both sides are given the same graph, and one simulator judges what they emit."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

MiB = 1 << 20


@dataclass(frozen=True)
class Joint:
    """A joint graph as torch's own AOTAutograd makes it, with inductor's decompositions."""

    module: fx.GraphModule
    inputs: Any
    outputs: int
    keywords: dict[str, Any]


def joint_of(build: Callable[[], Any]) -> Joint:
    from torch._functorch.aot_autograd import aot_module, make_boxed_func
    from torch._functorch.partitioners import default_partition
    from torch._inductor.decomposition import select_decomp_table

    seen: list[Joint] = []

    def partition(module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> Any:
        seen.append(Joint(copy.deepcopy(module), inputs, num_fwd_outputs, keywords))
        return default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **keywords)

    model, inputs = build()
    nop = lambda graph, _: make_boxed_func(graph.forward)
    aot_module(model, nop, partition_fn=partition, decompositions=select_decomp_table())(*inputs)
    return seen[0]


@dataclass(frozen=True)
class Cut:
    saved: float
    forward: float
    backward: float
    gflop: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.saved:.2f} / {self.forward:.2f} / {self.backward:.2f} / {self.gflop:.2f} in {self.seconds:.2f} s"


def flops(graph: fx.GraphModule) -> int:
    from foregrad.joint.graph import from_fx
    from foregrad.partition.costs import flops_of

    return sum(flops_of(node.op, node.args, node.value) for node in from_fx(graph).nodes)


def judged(joint: Joint, partition: Callable[..., Any]) -> Cut:
    from foregrad.joint.graph import from_fx
    from foregrad.partition.simulate import simulate

    module = copy.deepcopy(joint.module)
    start = time.perf_counter()
    with torch.no_grad():
        forward, backward = partition(module, joint.inputs, num_fwd_outputs=joint.outputs, **joint.keywords)
    seconds = time.perf_counter() - start
    found = simulate(from_fx(forward), from_fx(backward), joint.outputs)
    gflop = (flops(forward) + flops(backward) - flops(joint.module)) / 1e9
    return Cut(found.saved / MiB, found.forward.peak / MiB, found.backward.peak / MiB, gflop, seconds)
