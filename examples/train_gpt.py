"""Train a small character-level GPT eagerly, by `torch.compile` and with Foregrad, and compare what a user can see.

All copies start from the same weights and see the same batches. Behind the backend "eager" Foregrad runs eager's own
kernels, and its losses must be eager's bit by bit. Inductor, behind torch.compile and behind Foregrad, computes in
another order: losses drift apart by rounding. The table at the end shows first steps, steps, peaks, and what Foregrad
recorded; the program that it generated is written to a file. Inductor keeps kernels that it has compiled, so whoever
comes later, or runs the demo again, may find some: `python -m benchmarks compile` measures first steps in fresh
processes.

    python examples/train_gpt.py --steps 200
"""

from __future__ import annotations

import argparse
import copy
import importlib
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import foregrad

try:
    import rich.box
    import rich.console
    import rich.progress
    import rich.table
except ModuleNotFoundError:
    HAVE_RICH = False
else:
    HAVE_RICH = True

HERE = Path(__file__).resolve().parent
TEXT = HERE / "text.txt"
GENERATED = HERE.parent / "build" / "demo" / "train_gpt_generated.py"
CONTEXT = 64
"""How many characters the model sees."""


# The model ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and an MLP, each added to what it read."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.think(x)


class CharGPT(nn.Module):
    """Predicts each next character of a text."""

    def __init__(self, characters: int, width: int = 96, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Parameter(torch.randn(CONTEXT, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.layers(self.characters(text) + self.positions[: text.shape[1]]))


class Loss(nn.Module):
    """A model and its loss: the program that is trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(self.model(text).flatten(0, 1), following.flatten())


# Training -----------------------------------------------------------------------------------------


class Text:
    """A text as numbers, and random pieces of it."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        self.alphabet = sorted(set(text))
        self.codes = torch.tensor([self.alphabet.index(character) for character in text])

    def batches(self, count: int, size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(count):
            starts = torch.randint(len(self.codes) - CONTEXT, (size,), generator=generator)
            pieces = torch.stack([self.codes[start : start + CONTEXT + 1] for start in starts.tolist()])
            yield pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()

    def sample(self, model: nn.Module, start: str, length: int) -> str:
        """Let a model go on from `start`."""
        generator = torch.Generator().manual_seed(0)
        written = [self.alphabet.index(character) for character in start]
        with torch.no_grad():
            for _ in range(length):
                scores = model(torch.tensor([written[-CONTEXT:]]))[0, -1]
                choice = torch.multinomial((scores / 0.7).softmax(0), 1, generator=generator)
                written.append(int(choice))
        return "".join(self.alphabet[code] for code in written)


@dataclass
class Trainee:
    """One of the runs: what is called, what is updated, and what was seen."""

    name: str
    module: nn.Module
    program: Any
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @staticmethod
    def of(name: str, module: nn.Module, compiled: Callable[[nn.Module], Any]) -> Trainee:
        """A run with a copy of the model."""
        twin = copy.deepcopy(module)
        return Trainee(name, twin, compiled(twin), torch.optim.AdamW(twin.parameters(), lr=3e-3))

    def step(self, text: Tensor, following: Tensor) -> None:
        self.optimizer.zero_grad()
        start = time.perf_counter()
        loss = self.program(text, following)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    @property
    def warm_step(self) -> float:
        return statistics.median(self.seconds[1:])


def trainees(module: nn.Module) -> list[Trainee]:
    """Eager first, and last what must be equal to it; Inductor needs a C++ compiler."""
    sides: dict[str, Callable[[nn.Module], Any]] = {"eager": lambda model: model}
    if any(map(shutil.which, ("g++", "clang++", "c++"))):
        importlib.import_module("torch._inductor.compile_fx")  # or whoever comes first would pay for loading it
        sides["torch.compile"] = torch.compile
        sides["Foregrad, Inductor"] = foregrad.compile
    else:
        print("There is no C++ compiler, which Inductor needs: it is left out.\n")
    sides["Foregrad, eager"] = lambda model: foregrad.compile(model, "eager")
    return [Trainee.of(name, module, compiled) for name, compiled in sides.items()]


# What there is to see -----------------------------------------------------------------------------


def operators(graph: torch.fx.GraphModule) -> int:
    return sum(node.op == "call_function" for node in graph.graph.nodes)


def saved_values(specialization: Any) -> int:
    """How many values the forward graph returns for the backward graph, behind those for the caller."""
    (output,) = specialization.forward_graph.graph.find_nodes(op="output")
    return len(output.args[0]) - specialization.metadata.num_forward


def peak_bytes(trainee: Trainee, batch: tuple[Tensor, Tensor]) -> int:
    """The most memory that a step has alive beyond what was there before it, as the allocator reports it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        trainee.step(*batch)
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def report(runs: Sequence[Trainee], peaks: Sequence[int]) -> list[tuple[str, ...]]:
    """Rows of the last table: what, and a column for each run."""
    eager = runs[0]
    apart = ["" if run is eager else difference(eager, run) for run in runs]
    programs = [getattr(run.program, "specializations", None) for run in runs]
    return [
        ("first loss", *(f"{run.losses[0]:.6f}" for run in runs)),
        ("last loss", *(f"{run.losses[-1]:.6f}" for run in runs)),
        (f"all {len(eager.losses)} losses", *apart),
        ("first step", *(f"{run.seconds[0]:.2f} s" for run in runs)),
        ("a step", *(f"{run.warm_step * 1e3:.1f} ms" for run in runs)),
        ("peak of a step", *(f"{peak / 2**20:.1f} MiB" for peak in peaks)),
        ("programs", *("" if found is None else str(len(found)) for found in programs)),
        ("operators", *("" if not found else f"{operators(found[-1].forward_graph):,}" for found in programs)),
        ("values saved", *("" if not found else f"{saved_values(found[-1]):,}" for found in programs)),
    ]


def difference(eager: Trainee, other: Trainee) -> str:
    most = largest_difference(eager, other)
    return "equal" if most == 0 else f"within {most:.0e}"


def largest_difference(eager: Trainee, other: Trainee) -> float:
    return max(abs(a - b) for a, b in zip(eager.losses, other.losses, strict=True))


def with_progress(batches: Iterable[Any], count: int, status: Callable[[], str]) -> Iterator[Any]:
    """Pass batches on under a progress bar; without rich or a terminal, a line for every tenth."""
    if HAVE_RICH and sys.stdout.isatty():
        columns = ("[progress.description]{task.description}", rich.progress.BarColumn())
        columns += (
            "{task.completed}/{task.total}",
            rich.progress.TimeRemainingColumn(),
            "{task.fields[status]}",
        )
        with rich.progress.Progress(*columns) as bar:
            task = bar.add_task("training", total=count, status="")
            for batch in batches:
                yield batch
                bar.update(task, advance=1, status=status())
        return
    for done, batch in enumerate(batches, start=1):
        yield batch
        if done % max(1, count // 10) == 0:
            print(f"step {done:4d} of {count}   {status()}", flush=True)


def show(header: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    if HAVE_RICH:
        table = rich.table.Table(*header, box=rich.box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        rich.console.Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, tuple("-" * width for width in widths), *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT eagerly, by torch.compile and with Foregrad.")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps: two at least, the first one compiles")

    torch.manual_seed(0)
    text = Text(TEXT)
    module = Loss(CharGPT(len(text.alphabet)))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    print(f"A GPT of {parameters:,} parameters learns {TEXT.name}, {len(text.codes):,} characters.\n")
    runs = trainees(module)
    eager, *_, compiled = runs

    for batch in with_progress(text.batches(options.steps), options.steps, lambda: f"loss {eager.losses[-1]:.4f}"):
        for run in runs:
            run.step(*batch)
    peaks = [peak_bytes(run, batch) for run in runs]

    GENERATED.parent.mkdir(parents=True, exist_ok=True)
    GENERATED.write_text(compiled.program.specializations[-1].source, encoding="utf-8")

    print("\nWhat the copy that Foregrad trained has learnt to write:\n")
    print(text.sample(compiled.module.model, "The river ", 200), end="\n\n")
    show(["", *(run.name for run in runs)], report(runs, peaks))
    print(f"The program that Foregrad generated: {GENERATED.relative_to(HERE.parent)}")
    if largest_difference(eager, compiled):
        raise SystemExit('The losses of eager and of Foregrad behind the backend "eager" are not the same.')


if __name__ == "__main__":
    main()
