"""How well a joint graph is cut: torch's partitioner and Foregrad's are given the same graph, and one simulator judges.

The joint graph comes from torch's own AOTAutograd with inductor's decompositions, so that both sides see what torch's
partitioner was made for. Saved bytes, peaks and recomputed FLOPs are those of the two graphs that each side emits.
"""

from __future__ import annotations

import copy
import importlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from .partition_models import FAMILIES, Built, gpt
from .table import Mark, Table

MiB = 1 << 20
BUDGETS = (1.0, 0.8, 0.5, 0.3, 0.1, 0.0)
DEPTHS = (12, 24, 48, 96)


@dataclass(frozen=True)
class Joint:
    """A joint graph as torch's own AOTAutograd makes it."""

    module: fx.GraphModule
    inputs: Any
    outputs: int
    keywords: dict[str, Any]


def joint_of(build: Callable[[], Built]) -> Joint:
    """Trace a model."""
    from torch._functorch.aot_autograd import aot_module, make_boxed_func
    from torch._functorch.partitioners import default_partition
    from torch._inductor.decomposition import select_decomp_table

    importlib.import_module("torch._inductor.lowering")  # the decompositions look into it

    seen: list[Joint] = []

    def partition(module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> Any:
        seen.append(Joint(copy.deepcopy(module), inputs, num_fwd_outputs, keywords))
        return default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **keywords)

    def nop(graph: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    model, inputs = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        aot_module(model, nop, partition_fn=partition, decompositions=select_decomp_table())(*inputs)
    return seen[0]


@dataclass(frozen=True)
class Cut:
    """What a partitioner made of a joint graph: MiB, GFLOP, seconds."""

    saved: float
    forward: float
    backward: float
    gflop: float
    seconds: float

    @property
    def peak(self) -> float:
        return max(self.forward, self.backward)

    def __str__(self) -> str:
        return f"{self.saved:.2f} / {self.forward:.2f} / {self.backward:.2f} / {self.gflop:.2f}"


def flops(graph: fx.GraphModule) -> int:
    """Of the products and convolutions of a graph."""
    from foregrad.joint.graph import from_fx
    from foregrad.partition.costs import flops_of

    return sum(flops_of(node.op, node.args, node.value) for node in from_fx(graph).nodes)


def judged(joint: Joint, partition: Callable[..., Any], repeats: int = 1) -> Cut:
    """Run a partitioner, and simulate what it emits; the best time of several counts."""
    from foregrad.joint.graph import from_fx
    from foregrad.partition.simulate import simulate

    seconds = float("inf")
    for _ in range(repeats):
        module = copy.deepcopy(joint.module)
        start = time.perf_counter()
        with torch.no_grad():
            forward, backward = partition(module, joint.inputs, num_fwd_outputs=joint.outputs, **joint.keywords)
        seconds = min(seconds, time.perf_counter() - start)
    found = simulate(from_fx(forward), from_fx(backward), joint.outputs)
    gflop = (flops(forward) + flops(backward) - flops(joint.module)) / 1e9
    return Cut(found.saved / MiB, found.forward.peak / MiB, found.backward.peak / MiB, gflop, seconds)


def run(families: Sequence[str], depths: Sequence[int] = DEPTHS) -> tuple[list[Table], list[Mark]]:
    """Both sides on each family: without a budget, over torch's budgets, and over depth."""
    import torch._functorch.config as torchs
    from torch._functorch.partitioners import min_cut_rematerialization_partition as theirs

    from foregrad import min_cut_rematerialization_partition as ours

    plain = Table(
        "Without a budget: saved / forward peak / backward peak MiB / recomputed GFLOP",
        ["", "torch", "foregrad", "torch s", "foregrad s"],
    )
    curve = Table(
        "With a budget: peak MiB / recomputed GFLOP; Foregrad is asked for torch's peak",
        ["", "torch's budget", "torch", "foregrad"],
    )
    marks: list[Mark] = []
    lower = 0
    for name in families:
        joint = joint_of(FAMILIES[name])
        peer, own = judged(joint, theirs, 2), judged(joint, ours, 2)
        plain.add(name, str(peer), str(own), f"{peer.seconds:.2f}", f"{own.seconds:.2f}")
        slack = 1e-6
        worst = max(own.saved - peer.saved, own.forward - peer.forward, own.backward - peer.backward)
        lower += own.saved < peer.saved and own.peak < peer.peak
        marks.append(Mark(f"{name}: saved and peaks, above torch's", "at most 0", f"{worst:.2f} MiB", worst <= slack))
        marks.append(Mark(f"{name}: products done twice", "0", f"{own.gflop:.3f} GFLOP", own.gflop <= slack))
        ratio = own.seconds / peer.seconds
        marks.append(Mark(f"{name}: time, of torch's", "at most 0.5", f"{ratio:.2f}", ratio <= 0.5))
        holds, peaks = True, []
        for budget in BUDGETS:
            with torchs.patch(activation_memory_budget=budget):
                peer = judged(joint, theirs)
            own = judged(joint, partial(ours, memory_budget=int(peer.peak * MiB)))
            holds = holds and own.gflop <= peer.gflop + slack and own.peak <= peer.peak + slack
            curve.add(name, f"{budget}", f"{peer.peak:.2f} / {peer.gflop:.2f}", f"{own.peak:.2f} / {own.gflop:.2f}")
        for budget in BUDGETS:
            peaks.append(judged(joint, partial(ours, memory_budget=budget)).peak)
        marks.append(Mark(f"{name}: on or below torch's curve", "yes", "yes" if holds else "no", holds))
        monotone = peaks == sorted(peaks, reverse=True)
        marks.append(Mark(f"{name}: monotone", "yes", "yes" if monotone else "no", monotone))
    if len(families) == len(FAMILIES):
        marks.append(Mark("families with less saved and a lower peak", "at least 5", f"{lower}", lower >= 5))
    depth = Table("Seconds by depth of a GPT", ["layers", "torch", "foregrad"])
    times = []
    for layers in depths:
        joint = joint_of(gpt(layers))
        own = judged(joint, ours, 2)
        times.append(own.seconds)
        depth.add(f"{layers}", f"{judged(joint, theirs).seconds:.2f}" if layers <= 24 else "", f"{own.seconds:.2f}")
    if len(depths) > 1:
        growth = times[-1] / times[0] / (depths[-1] / depths[0])
        marks.append(Mark("time per layer, deepest over shallowest", "at most 1.5", f"{growth:.2f}", growth <= 1.5))
    return [plain, curve, depth], marks
