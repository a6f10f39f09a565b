"""How well a joint graph is cut: torch's partitioner and Foregrad's are given the same graph, and one simulator judges.

The joint graph comes from torch's own AOTAutograd with inductor's decompositions, so that both sides see what torch's
partitioner was made for. Saved bytes, peaks and recomputed FLOPs are those of the two graphs that each side emits.
Every plan of Foregrad's is also run, node by node: its gradients are compared with eager's, and the storages that are
alive with the simulation. Seconds are those of the processor, for both sides work in one thread.
"""

from __future__ import annotations

import copy
import cProfile
import gc
import importlib
import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .executing import run_step
from .partition_models import FAMILIES, Built, gpt
from .table import Mark, Table

MiB = 1 << 20
BUDGETS = tuple(k / 10 for k in range(10, -1, -1))
DEPTHS = (12, 24, 48, 96)
LINEAR_WORK, LINEAR_TIME = 1.1, 1.5
"""What a node of the deepest graph may cost, of one in the shallowest: calls are counted, which is exact; time grows a
little more, for a larger graph leaves the processor's caches."""
FIRST_MARKS = {"GPT-12": (41.9, 0.25), "ResNet-18 at 224": (70.2, 0.0)}
"""The backward's peak in MiB, and GFLOP that may be spent for it."""
SLACK = 1e-6


# -------------------------------------------------------------------------------------------------- joint graphs
@dataclass(frozen=True)
class Joint:
    """A joint graph as torch's own AOTAutograd makes it, and the values that its forward is called with."""

    module: fx.GraphModule
    inputs: Any
    outputs: int
    keywords: dict[str, Any]
    primals: list[Any]


def joint_of(build: Callable[[], Built]) -> Joint:
    """Trace a model."""
    from torch._functorch.aot_autograd import aot_module, make_boxed_func
    from torch._functorch.partitioners import default_partition
    from torch._inductor.decomposition import select_decomp_table

    importlib.import_module("torch._inductor.lowering")  # the decompositions look into it

    seen: list[tuple[Any, ...]] = []
    calls: list[list[Any]] = []

    def partition(module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> Any:
        seen.append((copy.deepcopy(module), inputs, num_fwd_outputs, keywords))
        return default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **keywords)

    def nop(graph: fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append([value.detach().clone() if isinstance(value, Tensor) else value for value in args])
            return graph(*args)

        return make_boxed_func(run)

    model, inputs = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        aot_module(model, nop, partition_fn=partition, decompositions=select_decomp_table())(*inputs)
    return Joint(*seen[0], calls[0])


def eager_gradients(build: Callable[[], Built], dtype: torch.dtype) -> list[Tensor]:
    """What eager computes for all parameters."""
    model, inputs = build()
    model.to(dtype)(*(x.to(dtype) if x.is_floating_point() else x for x in inputs)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# ------------------------------------------------------------------------------------------------------- judging
@dataclass(frozen=True)
class Cut:
    """What a partitioner made of a joint graph: MiB, GFLOP, seconds, and the two graphs."""

    saved: float
    forward: float
    backward: float
    gflop: float
    seconds: float
    graphs: tuple[fx.GraphModule, fx.GraphModule]

    @property
    def peak(self) -> float:
        return max(self.forward, self.backward)

    def __str__(self) -> str:
        return f"{self.saved:.2f} / {self.forward:.2f} / {self.backward:.2f} / {self.gflop:.2f}"


def flops(graph: fx.GraphModule) -> int:
    """Of the products and convolutions of a graph."""
    from foregrad.graph.fx import joint_from_fx
    from foregrad.partition.costs import flops_of

    return sum(flops_of(node.op, node.args, node.value) for node in joint_from_fx(graph, 0).nodes)


def judged(joint: Joint, partition: Callable[..., Any], repeats: int = 1) -> Cut:
    """Run a partitioner, and simulate what it emits; the best time of several counts."""
    from foregrad.graph.fx import from_fx, joint_from_fx
    from foregrad.partition.memory import simulate
    from foregrad.slots import Output

    seconds = float("inf")
    for _ in range(repeats):
        module = copy.deepcopy(joint.module)
        gc.collect()
        start = time.process_time()
        with torch.no_grad():
            forward, backward = partition(module, joint.inputs, num_fwd_outputs=joint.outputs, **joint.keywords)
        seconds = min(seconds, time.process_time() - start)
    found = simulate(from_fx(forward, [*map(Output, range(joint.outputs))]), joint_from_fx(backward, 0))
    gflop = (flops(forward) + flops(backward) - flops(joint.module)) / 1e9
    peaks = found.forward.peak / MiB, found.backward.peak / MiB
    return Cut(found.saved / MiB, *peaks, gflop, seconds, (forward, backward))


def calls_of(joint: Joint, partition: Callable[..., Any]) -> int:
    """How many functions a partitioner calls, built-in ones included."""
    module = copy.deepcopy(joint.module)
    profile = cProfile.Profile()
    with torch.no_grad(), profile:
        partition(module, joint.inputs, num_fwd_outputs=joint.outputs, **joint.keywords)
    return sum(entry.callcount for entry in profile.getstats())


def budgeted(joint: Joint) -> Callable[[float], Cut]:
    """Foregrad's cut for any memory budget; what all budgets choose from is computed once."""
    from foregrad.graph.fx import joint_from_fx, to_fx
    from foregrad.partition.model import Model
    from foregrad.partition.rematerialize import within, without_common_subexpressions
    from foregrad.partition.search import Frontier

    frontier = Frontier(Model(without_common_subexpressions(joint_from_fx(joint.module, joint.outputs))))
    known: dict[int, Cut] = {}

    def cut(budget: float) -> Cut:
        plan = within(frontier, budget)
        if id(plan) not in known:
            known[id(plan)] = judged(joint, lambda *_, **__: tuple(map(to_fx, plan.emit())))
        return known[id(plan)]

    return cut


# ------------------------------------------------------------------------------------------------------ real runs
@dataclass(frozen=True)
class Truth:
    """Gradients in double precision, and how far eager's own are from them."""

    gradients: list[Tensor]
    eager: float


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """How far gradients are from others, as a part of their norm."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, wanted, strict=True)]
    off = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((off / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)


def truth_of(build: Callable[[], Built]) -> Truth:
    """Differentiate a model twice, once in double precision."""
    exact = eager_gradients(build, torch.float64)
    return Truth(exact, distance(eager_gradients(build, torch.float32), exact))


@dataclass(frozen=True)
class Run:
    """How the graphs of some cuts behave: the largest error of gradients, of a simulated peak, and how far gradients
    are from those of the plain cut, which computes nothing twice."""

    plans: int
    error: float
    differs: float
    off: float  # MiB


def really_run(joint: Joint, cuts: Sequence[Cut], truth: Truth) -> Run:
    """Run every cut that differs from those before it."""
    from foregrad import default_partition

    different = list({id(cut.graphs[0]): cut for cut in cuts}.values())
    errors, offs, differences = [], [], []
    plainly: list[Tensor] = []
    for cut in (judged(joint, default_partition), *different):
        primals = [value.clone() if isinstance(value, Tensor) else value for value in joint.primals]
        _, found, forward, backward = run_step(*cut.graphs, joint.outputs, primals, [torch.ones(())])
        gradients = [g for g in found if g is not None]
        plainly = plainly or gradients
        errors.append(distance(gradients, truth.gradients))
        differences.append(distance(gradients, plainly))
        offs += [abs(forward / MiB - cut.forward), abs(backward / MiB - cut.backward)]
    return Run(len(different), max(errors), max(differences), max(offs))


# --------------------------------------------------------------------------------------------------------- tables
class Tables:
    """What is printed, and the marks that it is held to."""

    def __init__(self) -> None:
        self.plain = Table(
            "Without a budget: saved / forward peak / backward peak MiB / recomputed GFLOP",
            ["", "torch", "foregrad", "torch s", "foregrad s"],
        )
        self.curve = Table(
            "With a budget: peak MiB / recomputed GFLOP; Foregrad is asked for torch's peak, then for that fraction",
            ["", "torch's budget", "torch", "foregrad at that peak", "foregrad at that fraction", "torch s"],
        )
        self.runs = Table(
            "Every plan of Foregrad's, really run: gradients, and live storages beside the simulation",
            ["", "plans", "error of eager", "largest error", "off the plain cut", "peaks off by MiB", "all budgets, s"],
            note="Errors are those of all gradients against double precision, as a part of their norm; the plain cut "
            "computes nothing twice. The last column is the time for the plans of all budgets together.",
        )
        self.depth = Table(
            "Processor seconds by depth of a GPT, without a budget",
            ["layers", "nodes", "torch s", "foregrad s", "foregrad us/node", "foregrad calls/node"],
        )
        self.marks: list[Mark] = []
        self.lower = 0

    def mark(self, name: str, wanted: str, got: str, holds: bool) -> None:
        self.marks.append(Mark(name, wanted, got, holds))

    def family(self, name: str) -> None:
        """Both sides on one family."""
        from torch._functorch.partitioners import min_cut_rematerialization_partition as theirs

        from foregrad import min_cut_rematerialization_partition as ours

        joint = joint_of(FAMILIES[name])
        peer, own = judged(joint, theirs, 2), judged(joint, ours, 3)
        self.plain.add(name, str(peer), str(own), f"{peer.seconds:.2f}", f"{own.seconds:.2f}")
        worst = max(own.saved - peer.saved, own.forward - peer.forward, own.backward - peer.backward)
        self.lower += own.saved < peer.saved and own.forward < peer.forward and own.backward < peer.backward
        self.mark(f"{name}: saved and peaks, above torch's", "at most 0", f"{worst:.2f} MiB", worst <= SLACK)
        self.mark(f"{name}: products done twice", "0", f"{own.gflop:.3f} GFLOP", own.gflop <= SLACK)
        ratio = own.seconds / peer.seconds
        self.mark(f"{name}: time, of torch's", "at most 0.5", f"{ratio:.2f}", ratio <= 0.5)
        start = time.process_time()
        cut = budgeted(joint)
        cut(0.0)
        seconds = time.process_time() - start
        cuts = [own, *self._curve(name, joint, theirs, cut)]
        if name in FIRST_MARKS:
            peak, gflop = FIRST_MARKS[name]
            found = cut(int(peak * MiB))
            got = f"{found.backward:.2f} MiB, {found.gflop:.2f} GFLOP"
            holds = found.backward <= peak and found.gflop <= gflop + SLACK
            self.mark(f"{name}: backward peak", f"{peak} MiB at {gflop} GFLOP", got, holds)
        truth = truth_of(FAMILIES[name])
        run = really_run(joint, cuts, truth)
        errors = f"{truth.eager:.1e}", f"{run.error:.1e}", f"{run.differs:.1e}"
        self.runs.add(name, f"{run.plans}", *errors, f"{run.off:.4f}", f"{seconds:.2f}")
        equal = run.error <= 2 * truth.eager
        self.mark(f"{name}: gradients, error of eager's own", "at most 2", f"{run.error / truth.eager:.2f}", equal)
        self.mark(f"{name}: gradients, off the plain cut's", "at most 1e-6", f"{run.differs:.1e}", run.differs <= 1e-6)
        self.mark(f"{name}: simulated peaks, off by", "below 0.1 MiB", f"{run.off:.4f} MiB", run.off < 0.1)

    def _curve(self, name: str, joint: Joint, theirs: Callable[..., Any], cut: Callable[[float], Cut]) -> list[Cut]:
        import torch._functorch.config as torchs

        above, peaks, cuts = 0, [], []
        for budget in BUDGETS:
            with torchs.patch(activation_memory_budget=budget):
                peer = judged(joint, theirs)
            own, same = cut(int(peer.peak * MiB)), cut(budget)
            above += own.gflop > peer.gflop + SLACK or own.peak > peer.peak + SLACK
            peaks.append(same.peak)
            cuts += [own, same]
            figures = [f"{found.peak:.2f} / {found.gflop:.2f}" for found in (peer, own, same)]
            self.curve.add(name, f"{budget}", *figures, f"{peer.seconds:.2f}")
        self.mark(f"{name}: points of torch's curve below Foregrad's", "0", f"{above}", not above)
        rises = sum(b > a for a, b in itertools.pairwise(peaks))
        self.mark(f"{name}: lower budgets with a higher peak", "0", f"{rises}", not rises)
        return cuts

    def depths(self, depths: Sequence[int]) -> None:
        """How long a partition takes as a GPT grows."""
        from torch._functorch.partitioners import min_cut_rematerialization_partition as theirs

        from foregrad import min_cut_rematerialization_partition as ours

        times, calls = [], []
        for layers in depths:
            joint = joint_of(gpt(layers))
            nodes = len(joint.module.graph.nodes)
            peer, own = judged(joint, theirs), judged(joint, ours, 5)
            times.append(own.seconds / nodes)
            calls.append(calls_of(joint, ours) / nodes)
            costs = f"{times[-1] * 1e6:.1f}", f"{calls[-1]:.1f}"
            self.depth.add(f"{layers}", f"{nodes}", f"{peer.seconds:.2f}", f"{own.seconds:.2f}", *costs)
            ratio = own.seconds / peer.seconds
            self.mark(f"{layers} layers: time, of torch's", "at most 0.5", f"{ratio:.2f}", ratio <= 0.5)
        if len(depths) > 1:
            for what, figures, limit in (("work", calls, LINEAR_WORK), ("time", times, LINEAR_TIME)):
                growth = figures[-1] / figures[0]
                name = f"{what} per node, {depths[-1]} layers over {depths[0]}"
                self.mark(name, f"at most {limit}", f"{growth:.2f}", growth <= limit)


def run(families: Sequence[str], depths: Sequence[int] = DEPTHS) -> tuple[list[Table], list[Mark]]:
    """Both sides on each family: without a budget, over torch's budgets, for real, and over depth."""
    tables = Tables()
    for name in families:
        tables.family(name)
    if len(families) == len(FAMILIES):
        tables.mark("families with less saved and lower peaks", "at least 5", f"{tables.lower}", tables.lower >= 5)
    if depths:
        tables.depths(depths)
    shown = [tables.plain, tables.curve, tables.runs, tables.depth]
    return [table for table in shown if table.rows], tables.marks
