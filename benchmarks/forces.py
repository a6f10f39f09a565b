"""Training a potential on forces: a step that differentiates a gradient, eager and behind each backend.

The model is that of `examples/train_potential.py`, with 512 atoms and 16,384 pairs. A step is forward, forces, loss and
backward. `torch.compile` is asked as well, and what it answers is printed: it refuses double backward.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import foregrad
from examples.train_potential import ForceLoss, Potential

from .capture import progress
from .compile import MiB, difference, peak_of, timed
from .table import Mark, Table, at_least, at_most

ATOMS, PAIRS = {"cuda": 512, "cpu": 64}, {"cuda": 16_384, "cpu": 2_048}
WARM_STEPS = 4
INDUCTOR, CUDAGRAPHS = "foregrad inductor", "foregrad cudagraphs"
FASTER_WANTED = {INDUCTOR: 2.0, CUDAGRAPHS: 8.0}
GRADIENTS_WANTED = {torch.float32: 1e-5, torch.float64: 1e-10}
LENGTHS, PROGRAMS_WANTED = 20, 3

Inputs = tuple[Tensor, ...]


def sides(device: torch.device) -> dict[str, Callable[[Any], Any]]:
    """What is done to the program, by the name of the side."""
    found: dict[str, Callable[[Any], Any]] = {
        "eager": lambda program: program,
        "foregrad eager": lambda program: foregrad.compile(program, "eager"),
        INDUCTOR: lambda program: foregrad.compile(program, "inductor"),
    }
    if device.type == "cuda":
        options = {"backend": "inductor"}
        found[CUDAGRAPHS] = lambda program: foregrad.compile(program, "cudagraphs", options=options)
    return found


def inputs_of(device: torch.device, dtype: torch.dtype, pairs: int | None = None) -> Inputs:
    """Atoms in a box, and random pairs of different ones: the same on every call."""
    torch.manual_seed(1)
    atoms, pairs = ATOMS[device.type], pairs or PAIRS[device.type]
    source = torch.randint(atoms, (pairs,))
    target = (source + torch.randint(1, atoms, (pairs,))) % atoms
    numbers = torch.rand(atoms, 3) * 2, torch.randn(atoms), torch.randn(atoms, 3)
    positions, energies, forces = (x.to(device, dtype) for x in numbers)
    pair_list = torch.stack([source, target]).to(device)
    return torch.randint(4, (atoms,)).to(device), positions, pair_list, energies, forces


def model(device: torch.device, dtype: torch.dtype) -> ForceLoss:
    torch.manual_seed(0)
    return ForceLoss(Potential()).to(device, dtype)


def gradients(program: Callable[..., Tensor], module: ForceLoss, inputs: Inputs) -> Mapping[str, Tensor]:
    module.zero_grad()
    program(*inputs).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def what_torch_says(device: torch.device) -> str:
    """What `torch.compile` answers, in its first line; it may trace `autograd.grad`, where it has a switch for that."""
    import torch._dynamo as dynamo

    module, inputs = model(device, torch.float32), inputs_of(device, torch.float32)
    switch = {"trace_autograd_ops": True} if hasattr(dynamo.config, "trace_autograd_ops") else {}
    try:
        with dynamo.config.patch(switch) if switch else contextlib.nullcontext():
            torch.compile(module, fullgraph=True)(*inputs).backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return "it compiles"


def steps(device: torch.device, rounds: int) -> tuple[Table, list[Mark]]:
    """Times and peaks in one process, all sides in turn, and how far gradients are from eager's."""
    table = Table("Force training", ["side", "step ms", "eager / side", "peak MiB", "float32", "float64"])
    table.note = (
        f"{ATOMS[device.type]} atoms, {PAIRS[device.type]:,} pairs; forward, forces, loss, backward; the smallest of "
        f"{rounds}, all sides in turn. Gradients: how far from eager's, of the largest number in any. "
        f"torch.compile(fullgraph=True): {what_torch_says(device)}"
    )
    running: dict[str, Callable[[], object]] = {}
    apart: dict[str, dict[torch.dtype, float]] = {}
    peaks, times = {}, {}
    inputs = inputs_of(device, torch.float32)
    expected = {dtype: gradients(m := model(device, dtype), m, inputs_of(device, dtype)) for dtype in GRADIENTS_WANTED}
    for name, make in sides(device).items():
        progress(f"force training, {name}")
        apart[name] = {}
        for dtype in GRADIENTS_WANTED:
            module = model(device, dtype)
            program = make(module)
            for _ in range(WARM_STEPS):
                found = gradients(program, module, inputs_of(device, dtype))
            apart[name][dtype] = difference(found, expected[dtype])
            if dtype == torch.float32:
                running[name] = _step(program, module, inputs)
        peaks[name], times[name] = peak_of(running[name], device), []
    for _ in range(rounds):
        for name, step in running.items():
            times[name].append(timed(step, device))
    best = {name: min(found) for name, found in times.items()}
    marks = []
    for name, found in apart.items():
        ratio = best["eager"] / best[name]
        errors = [f"{found[dtype]:.1e}" for dtype in GRADIENTS_WANTED]
        table.add(name, f"{best[name]:.2f}", f"{ratio:.2f}×", f"{peaks[name] / MiB:,.1f}", *errors)
        if device.type == "cuda" and name in FASTER_WANTED:
            marks.append(at_least(f"force training, {name}", ratio, FASTER_WANTED[name]))
        marks += [
            Mark(f"gradients, {name}, {str(dtype)[6:]}", f"≤ {wanted:g}", f"{found[dtype]:.1e}", found[dtype] <= wanted)
            for dtype, wanted in GRADIENTS_WANTED.items()
            if name != "eager"
        ]
    del running
    gc.collect()
    progress("")
    return table, marks


def _step(program: Callable[..., Tensor], module: ForceLoss, inputs: Inputs) -> Callable[[], object]:
    parameters = [*module.parameters()]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        program(*inputs).backward()

    return step


def lengths(device: torch.device) -> tuple[Table, list[Mark]]:
    """Neighbour lists that change: how many programs serve them, and whether they are right."""
    table = Table("Neighbour lists that change", ["side", "lengths", "programs", "gradients"])
    marks = []
    for name, make in sides(device).items():
        if name == "eager":
            continue
        progress(f"neighbour lists, {name}")
        module = model(device, torch.float32)
        program, reference = make(module), copy.deepcopy(module)
        worst = 0.0
        for n in range(LENGTHS):
            inputs = inputs_of(device, torch.float32, PAIRS[device.type] - 7 * n)
            found = gradients(program, module, inputs)
            worst = max(worst, difference(found, gradients(reference, reference, inputs)))
        count = len(program.specializations)
        table.add(name, str(LENGTHS), str(count), f"{worst:.1e}")
        marks.append(at_most(f"programs for {LENGTHS} neighbour lists, {name}", count, PROGRAMS_WANTED))
    progress("")
    return table, marks


def run(rounds: int, device: torch.device) -> tuple[list[Table], list[Mark]]:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Inductor says about itself
        table, marks = steps(device, rounds)
        more, others = lengths(device)
    return [table, more], [*marks, *others]
