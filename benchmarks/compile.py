"""What `foregrad.compile` gives a training step, beside eager and `torch.compile`: time, memory, and the first call.

First calls are measured in fresh processes: once with Inductor's caches empty, and once more with what the first one
left there, while torch's cache of whole programs is off. Steps and peaks are measured in one process, which has all of
these caches, all sides in turn, each with a copy of the model and an optimizer of its own; the smallest time of all
rounds counts. A peak is what a step has alive beyond the model and its optimizer. Gradients are compared with eager's
in the same run.

On a CPU one thread works, and the time that counts is that of the processor: whoever else uses the machine takes none
of it. What Inductor compiles is compiled by one process after another there, and counts with it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from .capture import ROOT, progress
from .compile_models import SUBJECTS, built
from .table import Mark, Table, at_most

MiB = 1 << 20
WARM_STEPS = 3
STEP_WANTED = {"cuda": 1.02, "cpu": 1.05}
COLD_WANTED = {"gpt-small": 0.8, "gpt-2": 0.8, "resnet": 0.95}
WARM_WANTED = 0.5
GRADIENTS_WANTED = {"cuda": 2e-2, "cpu": 1e-4}
"""How far a gradient may be from eager's, of its largest number: bfloat16 has eight bits."""

Step = Callable[[], object]


def _torch_compile(model: nn.Module) -> Any:
    return torch.compile(model)


def _foregrad(backend: str) -> Callable[[nn.Module], Any]:
    def compiled(model: nn.Module) -> Any:
        import foregrad

        return foregrad.compile(model, backend=backend)

    return compiled


PEER, SUBJECT = "torch.compile", "foregrad"
SIDES: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    PEER: _torch_compile,
    SUBJECT: _foregrad("inductor"),
    "foregrad eager": _foregrad("eager"),
}


# ---------------------------------------------------------------------------------------------------- first calls
@dataclass(frozen=True)
class FirstCall:
    """Seconds of the first forward and backward, and how many of them Inductor took for the two graphs."""

    seconds: float
    inductor: float
    cached: int  # graphs that Inductor found in its cache


def now(device: torch.device) -> float:
    """Seconds: of the clock, or of the processor, in this process and those that it has started and waited for."""
    return time.perf_counter() if device.type == "cuda" else sum(os.times()[:4])


def first_call(side: str, subject: str, device: torch.device) -> FirstCall:
    """Measure it in this process, which should be fresh."""
    make = SIDES[side]
    model, inputs = built(subject, device)
    if side.startswith("foregrad"):
        import foregrad  # noqa: F401 (what torch has imported already is not counted either)
    start, clock = now(device), time.perf_counter()
    make(model)(*inputs).backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, passed = now(device) - start, time.perf_counter() - clock
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return FirstCall(seconds, 0.0, 0)
    share = sum(utils.compilation_time_metrics.get("compile_fx_inner", ())) / passed  # torch looks at the clock
    return FirstCall(seconds, seconds * share, utils.counters["inductor"]["fxgraph_cache_hit"])


def in_a_fresh_process(side: str, subject: str, device: torch.device, caches: str) -> FirstCall:
    """Run `first_call` (this file as a program) in a new interpreter, with Inductor's caches in a folder."""
    order = json.dumps({"side": side, "subject": subject, "device": str(device)})
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": caches,
        "TRITON_CACHE_DIR": f"{caches}/triton",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        **({"TORCHINDUCTOR_COMPILE_THREADS": "1"} if device.type == "cpu" else {}),
    }
    command = [sys.executable, "-m", "benchmarks.compile", order]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{side} could not compile {subject}: see the error above")
    return FirstCall(**json.loads(done.stdout.splitlines()[-1]))


def first_calls(subjects: Sequence[str], device: torch.device, kept: str) -> tuple[Table, list[Mark]]:
    """Measure all sides; what they leave in their caches is copied to a folder."""
    table = Table(
        "First call",
        ["model", "side", "cold s", "of it Inductor", "ratio", "warm s", "of it Inductor", "cached graphs", "ratio"],
        note=(
            f"Fresh processes, seconds of the {'clock' if device.type == 'cuda' else 'processor'}. Ratios are of "
            "torch.compile's time; warm is a second process that finds Inductor's caches, with torch's cache of whole "
            "programs off. Inductor's part is the compilation of the two graphs."
        ),
    )
    marks = []
    for subject in subjects:
        found: dict[str, tuple[FirstCall, FirstCall]] = {}
        for side in SIDES:
            with tempfile.TemporaryDirectory() as caches:
                progress(f"first call of {subject}, {side}, cold")
                cold = in_a_fresh_process(side, subject, device, caches)
                progress(f"first call of {subject}, {side}, warm")
                found[side] = cold, in_a_fresh_process(side, subject, device, caches)
                shutil.copytree(caches, kept, dirs_exist_ok=True)
        cold_peer, warm_peer = found[PEER]
        for side, (cold, warm) in found.items():
            table.add(
                subject,
                side,
                f"{cold.seconds:.2f}",
                f"{cold.inductor:.2f}",
                f"{cold.seconds / cold_peer.seconds:.2f}×",
                f"{warm.seconds:.2f}",
                f"{warm.inductor:.2f}",
                str(warm.cached),
                f"{warm.seconds / warm_peer.seconds:.2f}×",
            )
        cold, warm = found[SUBJECT]
        if subject in COLD_WANTED:
            ratio = cold.seconds / cold_peer.seconds
            marks.append(at_most(f"first call of {subject}, cold", ratio, COLD_WANTED[subject]))
        marks.append(at_most(f"first call of {subject}, warm", warm.seconds / warm_peer.seconds, WARM_WANTED))
    progress("")
    return table, marks


# ---------------------------------------------------------------------------------------------- steps and peaks
@dataclass
class Running:
    """One side with its own copy of a model."""

    step: Step
    peak: int
    gradients: Mapping[str, Tensor]
    times: list[float]


def prepared(side: str, subject: str, device: torch.device) -> Running:
    """Compile a side, note its gradients, and measure the peak of a step once it is warm."""
    model, inputs = built(subject, device)
    compiled = SIDES[side](model)
    compiled(*inputs).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        compiled(*inputs).backward()
        optimizer.step()

    for _ in range(WARM_STEPS):
        step()
    optimizer.zero_grad(set_to_none=True)
    return Running(step, peak_of(step, device), gradients, [])


def peak_of(step: Step, device: torch.device) -> int:
    """The most bytes that a step has alive beyond what was there before it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    # The allocator's own events: bytes taken, or given back as a negative number.
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def timed(step: Step, device: torch.device) -> float:
    """Milliseconds of a step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.process_time() if device.type == "cpu" else time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3
    return (time.process_time() - start) * 1e3


def difference(ours: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> float:
    """How far gradients are from eager's, of the largest number of each; infinite where one is missing."""
    if ours.keys() != eager.keys():
        return float("inf")
    largest = max(value.abs().max().item() for value in eager.values())
    return max((ours[name] - value).abs().max().item() for name, value in eager.items()) / largest


def steps(subjects: Sequence[str], device: torch.device, rounds: int) -> tuple[list[Table], list[Mark]]:
    names = list(SIDES)
    times = Table("Step", ["model", *(f"{name} ms" for name in names), "foregrad / torch.compile"])
    times.note = f"Forward, backward and fused AdamW; the smallest of {rounds}, all sides in turn."
    peaks = Table("Peak", ["model", *(f"{name} MiB" for name in names), "foregrad / torch.compile"])
    peaks.note = "The most memory that a step has alive, beyond the model and its optimizer."
    errors = Table("Gradients", ["model", *names[1:]])
    errors.note = "How far gradients are from eager's, of the largest number in any."
    marks = []
    for subject in subjects:
        running = {}
        for name in names:
            progress(f"step of {subject}, {name}")
            running[name] = prepared(name, subject, device)
        for _ in range(rounds):
            for side in running.values():
                side.times.append(timed(side.step, device))
        best = {name: min(side.times) for name, side in running.items()}
        most = {name: side.peak for name, side in running.items()}
        apart = {name: difference(running[name].gradients, running["eager"].gradients) for name in names[1:]}
        ratio, share = best[SUBJECT] / best[PEER], most[SUBJECT] / most[PEER]
        times.add(subject, *(f"{best[name]:.2f}" for name in names), f"{ratio:.3f}×")
        peaks.add(subject, *(f"{most[name] / MiB:,.1f}" for name in names), f"{share:.3f}×")
        errors.add(subject, *(f"{value:.1e}" for value in apart.values()))
        marks += [
            at_most(f"step of {subject}", ratio, STEP_WANTED[device.type]),
            at_most(f"peak of {subject}", share, 1.0),
            _agree(subject, apart, GRADIENTS_WANTED[device.type]),
        ]
        del running
        gc.collect()
    progress("")
    return [times, peaks, errors], marks


def _agree(subject: str, apart: Mapping[str, float], wanted: float) -> Mark:
    worst = max(apart[SUBJECT], apart["foregrad eager"])
    return Mark(f"gradients of {subject}", f"≤ {wanted:g}", f"{worst:.1e}", worst <= wanted)


# ------------------------------------------------------------------------------------------------------------ all
def run(subjects: Sequence[str], rounds: int, device: torch.device) -> tuple[list[Table], list[Mark]]:
    """Measure everything; models that need a GPU are left out where there is none."""
    torch.set_num_threads(1)
    chosen = [name for name in subjects if device.type == "cuda" or not SUBJECTS[name].cuda_only]
    with tempfile.TemporaryDirectory() as caches, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Inductor says about itself
        table, marks = first_calls(chosen, device, caches)
        with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": caches}):
            tables, more = steps(chosen, device, rounds)
    return [*tables, table], [*marks, *more]


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description="One first call in this process, as `python -m benchmarks` orders it.")
    parser.add_argument("order", help="a JSON object: side, subject, device")
    order = json.loads(parser.parse_args().order)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(json.dumps(asdict(first_call(order["side"], order["subject"], torch.device(order["device"])))))


if __name__ == "__main__":
    main()
