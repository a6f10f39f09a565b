"""How long a capture takes: from a model to a forward and a backward graph that a compiler has been given.

Every figure comes from a process of its own, so that neither side finds anything warm: one thread, all
imports done, nothing captured before. Timed is the first call with its backward, less a step of the same
callable when warm, with a compiler that returns the graph as it is; then the same again with a fresh
`aot_module` over the same model, as it is when a program is captured once more. The processes of the two
sides alternate, and the medians are reported.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .models import DEEPER, MODELS, TINY
from .sides import PEER, SIDES, SUBJECT, Side
from .table import Mark, Table, at_least, at_most

ROOT = Path(__file__).resolve().parent.parent
WARM_STEPS = 3
SPEEDUP_WANTED = {"gpt12": 10.0, "gpt48": 15.0, "resnet": 5.0, "llama": 6.0, "t5": 6.0}
AGAIN_WANTED = {"gpt12": 20.0, "gpt48": 20.0, "resnet": 20.0, "llama": 15.0, "t5": 15.0}
GROWTH_WANTED = 4.4
"""Four times the layers; the rest is what a linear pass may pay for a larger heap."""


@dataclass(frozen=True)
class Capture:
    """What one process measured, in milliseconds."""

    first: float
    again: float
    step: float
    operators: int


@dataclass(frozen=True)
class Agreement:
    """How far the losses, gradients and buffers of the two sides are apart after one step."""

    exact: bool
    close: bool
    difference: float

    def __str__(self) -> str:
        return "exactly" if self.exact else f"to {self.difference:.1e}" if self.close else "NO"


def measure(side: Side, model_name: str, imports: Sequence[str]) -> tuple[Capture, dict[str, Tensor]]:
    """Capture a model twice in this process, and give what its first step computed."""
    torch.set_num_threads(1)
    aot = side.load()
    for name in imports:
        with suppress(ImportError):
            importlib.import_module(name)
    model, inputs = (MODELS | DEEPER)[model_name]()
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        graphs.append(graph)
        return aot.make_boxed_func(graph.forward)

    def capture() -> tuple[float, float, dict[str, Tensor]]:
        gc.collect()
        start = time.perf_counter()
        compiled = aot.aot_module(model, fw_compiler=compiler, bw_compiler=compiler)
        loss = compiled(*inputs)
        loss.backward()
        first = time.perf_counter() - start
        computed = {"loss": loss.detach(), **state(model)}
        steps = []
        for _ in range(WARM_STEPS):
            model.zero_grad()
            start = time.perf_counter()
            compiled(*inputs).backward()
            steps.append(time.perf_counter() - start)
        model.zero_grad()
        step = statistics.median(steps)
        return (first - step) * 1e3, step * 1e3, computed

    first, step, computed = capture()
    operators = sum(
        node.op == "call_function" and node.target is not getitem for graph in graphs for node in graph.graph.nodes
    )
    again, _, _ = capture()
    return Capture(first, again, step, operators), computed


def state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's gradients and buffers, by name."""
    gradients = {f"grad of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {name: buffer.clone() for name, buffer in model.named_buffers()}


def agreement(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Agreement:
    """Compare two steps; a gradient that only one side has is a disagreement."""
    if ours.keys() != theirs.keys():
        return Agreement(exact=False, close=False, difference=float("inf"))
    pairs = [(value, theirs[name]) for name, value in ours.items()]
    return Agreement(
        exact=all(torch.equal(a, b) for a, b in pairs),
        close=all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs),
        difference=max((a.double() - b.double()).abs().max().item() for a, b in pairs),
    )


def worse(a: Agreement, b: Agreement) -> Agreement:
    return max(a, b, key=lambda one: (not one.close, not one.exact, one.difference))


def in_a_fresh_process(side: Side, model_name: str, imports: Sequence[str], computed: Path) -> dict[str, Any]:
    """Run `measure` (this file as a program) in a new interpreter."""
    order = json.dumps({"side": side.name, "model": model_name, "imports": imports, "computed": str(computed)})
    command = [sys.executable, "-m", "benchmarks.capture", order]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{side.module} could not capture {model_name}: see the error above")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def worker(order: str) -> None:
    """What the new interpreter runs: measure, save what was computed, print the figures as the last line."""
    parsed = json.loads(order)
    side = SIDES[parsed["side"]]
    side.load()
    before = set(sys.modules)
    figures, computed = measure(side, parsed["model"], parsed["imports"])
    torch.save(computed, parsed["computed"])
    print(json.dumps({"figures": asdict(figures), "imported": sorted(set(sys.modules) - before)}))


class Nothing(TorchDispatchMode):
    """Sees every operator and does nothing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return op(*args, **(kwargs or {}))


def floor(model_name: str) -> float:
    """Microseconds an operator that a dispatch mode costs which does nothing, over tensors of next to no data."""
    torch.set_num_threads(1)
    model, inputs = TINY[model_name]()
    best = float("inf")
    for _ in range(5):
        gc.collect()
        gc.disable()
        mode = Nothing()
        start = time.perf_counter()
        with mode:
            torch.autograd.grad(model(*inputs), list(model.parameters()))
        best = min(best, (time.perf_counter() - start) / mode.operators)
        gc.enable()
    return best * 1e6


def cost_table(figures: dict[tuple[str, str], list[Capture]], repeats: int) -> tuple[Table, list[Mark]]:
    """What an operator costs in graphs of any depth, and how far that is from a mode that does nothing."""
    table = Table(
        "Cost per operator",
        ["model", "operators", "first µs", "again µs", "floor µs", "again / floor"],
        note="The floor is a dispatch mode that does nothing, over the same program on tensors of next to no data.",
    )
    again: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in ("gpt12", "gpt48", *DEEPER):
            if (SUBJECT.name, model) not in figures:
                path = Path(folder) / model
                answers = [in_a_fresh_process(SUBJECT, model, [], path) for _ in range(repeats)]
                figures[SUBJECT.name, model] = [Capture(**answer["figures"]) for answer in answers]
            measured = figures[SUBJECT.name, model]
            count = measured[0].operators
            first = statistics.median(one.first for one in measured) * 1e3 / count
            again[model] = statistics.median(one.again for one in measured) * 1e3 / count
            lowest = floor(model) if model in TINY else None
            table.add(
                model,
                f"{count:,}",
                f"{first:.0f}",
                f"{again[model]:.0f}",
                "" if lowest is None else f"{lowest:.1f}",
                "" if lowest is None else f"{again[model] / lowest:.1f}×",
            )
    deepest = next(iter(DEEPER))
    return table, [at_most("cost per operator, 96 layers against 12", again[deepest] / again["gpt12"], 1.05)]


def run(models: Sequence[str], repeats: int) -> tuple[list[Table], list[Mark], bool]:
    """Measure both sides; gives the tables, the marks, and whether the sides computed the same thing."""
    figures: dict[tuple[str, str], list[Capture]] = {}
    agreements: dict[str, Agreement] = {}
    with tempfile.TemporaryDirectory() as folder:
        # An untimed process of each side tells what a capture still imports; the timed ones do it first.
        paths = {side.name: Path(folder) / side.name for side in SIDES.values()}
        imports = {
            side.name: in_a_fresh_process(side, models[0], [], paths[side.name])["imported"] for side in SIDES.values()
        }
        for round_ in range(repeats):
            for model in models:
                sides = [PEER, SUBJECT] if round_ % 2 == 0 else [SUBJECT, PEER]
                for side in sides:
                    progress(f"capture {model}, {side.name}, {round_ + 1} of {repeats}")
                    answer = in_a_fresh_process(side, model, imports[side.name], paths[side.name])
                    figures.setdefault((side.name, model), []).append(Capture(**answer["figures"]))
                found = agreement(*(torch.load(path) for path in paths.values()))
                agreements[model] = worse(agreements.get(model, found), found)
    progress("")
    table, marks = report(models, repeats, figures, agreements)
    tables = [table]
    if {"gpt12", "gpt48"} <= {*models}:
        costs, more = cost_table(figures, repeats)
        tables, marks = [table, costs], marks + more
    return tables, marks, all(found.close for found in agreements.values())


def report(
    models: Sequence[str],
    repeats: int,
    figures: dict[tuple[str, str], list[Capture]],
    agreements: dict[str, Agreement],
) -> tuple[Table, list[Mark]]:
    def median(side: Side, model: str, field: str) -> float:
        return statistics.median(getattr(one, field) for one in figures[side.name, model])

    table = Table(
        "Capture",
        ["model", "ops torch", "ops foregrad", "torch ms", "foregrad ms", "ratio"]
        + ["again torch ms", "again foregrad ms", "again ratio", "same results"],
        note=(
            f"Medians of {repeats} processes a side. A ratio above 1 says that Foregrad is faster; "
            "ops are the operators of the forward and the backward graph; "
            '"again" is a second capture of the model in the same process.'
        ),
    )
    marks = []
    for model in models:
        theirs, ours = median(PEER, model, "first"), median(SUBJECT, model, "first")
        theirs_again, ours_again = median(PEER, model, "again"), median(SUBJECT, model, "again")
        table.add(
            model,
            f"{median(PEER, model, 'operators'):,.0f}",
            f"{median(SUBJECT, model, 'operators'):,.0f}",
            f"{theirs:,.0f}",
            f"{ours:,.0f}",
            f"{theirs / ours:.2f}×",
            f"{theirs_again:,.0f}",
            f"{ours_again:,.0f}",
            f"{theirs_again / ours_again:.2f}×",
            str(agreements[model]),
        )
        marks.append(at_least(f"capture of {model}, against torch", theirs / ours, SPEEDUP_WANTED[model]))
        again = theirs_again / ours_again
        marks.append(at_least(f"capture of {model} again, against torch", again, AGAIN_WANTED[model]))
    if "gpt12" in models and "gpt48" in models:
        theirs, ours = (median(side, "gpt48", "first") / median(side, "gpt12", "first") for side in (PEER, SUBJECT))
        table.note += f" 48 layers take {ours:.2f} times as long as 12 (torch: {theirs:.2f})."
        marks.append(at_most("capture of 48 layers, against 12", ours, GROWTH_WANTED))
    return table, marks


def progress(text: str) -> None:
    """One line that replaces itself on a terminal, or else a line for each thing that begins."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="One capture in this process, as `python -m benchmarks` orders it.")
    parser.add_argument("order", help="a JSON object: side, model, imports, computed")
    worker(parser.parse_args().order)


if __name__ == "__main__":
    main()
