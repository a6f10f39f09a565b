"""Train a small character-level GPT twice, eagerly and with Foregrad, and compare what a user can see.

Both copies start from the same weights and see the same batches, so their losses must be the same at every
step. The table at the end also tells what Foregrad recorded, and the program that it generated is written to
a file.

    python examples/train_gpt.py --steps 350
"""

from __future__ import annotations

import argparse
import copy
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
TOLERANCE = 1e-4
"""The largest difference of two losses that rounding may make."""


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
    """One of the two runs: what is called, what is updated, and what was seen."""

    program: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, text: Tensor, following: Tensor) -> None:
        """A training step; the clock runs over forward and backward, which is what Foregrad compiles."""
        self.optimizer.zero_grad()
        start = time.perf_counter()
        loss = self.program(text, following)
        loss.backward()
        self.seconds.append(time.perf_counter() - start)
        self.optimizer.step()
        self.losses.append(loss.item())

    @property
    def warm_step(self) -> float:
        return statistics.median(self.seconds[1:])


def trainee(program: Callable[[Tensor, Tensor], Tensor], module: nn.Module) -> Trainee:
    return Trainee(program, torch.optim.AdamW(module.parameters(), lr=3e-3))


def graph_as_it_is(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The least of compilers: run the graph operator by operator."""
    return foregrad.make_boxed_func(graph.forward)


# What there is to see -----------------------------------------------------------------------------


def operators(graph: torch.fx.GraphModule) -> int:
    return sum(node.op == "call_function" for node in graph.graph.nodes)


def saved_values(specialization: Any) -> int:
    """How many values the forward graph returns for the backward graph, behind those for the caller."""
    (output,) = specialization.forward_graph.graph.find_nodes(op="output")
    return len(output.args[0]) - specialization.metadata.num_forward


def saved_bytes(program: Callable[[Tensor, Tensor], Tensor], module: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    """Memory that autograd holds between forward and backward: each storage once, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages: dict[int, int] = {}

    def seen(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        loss = program(*batch)
    total = sum(storages.values())
    del loss  # alive until here, so that no storage was freed and its address used twice
    return total


def report(
    eager: Trainee, compiled: Trainee, specialization: Any, saved: tuple[int, int], path: Path
) -> list[tuple[str, str, str]]:
    """Rows of the last table: what, in eager, with Foregrad."""
    difference = largest_difference(eager, compiled)
    agree = "equal" if difference == 0 else f"differ by {difference:.1e} at most"
    capture = compiled.seconds[0] - compiled.warm_step
    in_eager, in_compiled = (f"{count / 2**20:.2f} MiB" for count in saved)
    return [
        ("first loss", f"{eager.losses[0]:.6f}", f"{compiled.losses[0]:.6f}"),
        ("last loss", f"{eager.losses[-1]:.6f}", f"{compiled.losses[-1]:.6f}"),
        (f"all {len(eager.losses)} losses", "", agree),
        ("operators in the joint graph", "", f"{operators(specialization.joint_graph):,}"),
        ("capture", "", f"{capture * 1e3:.0f} ms"),
        ("captured", "", "once" if len(compiled.program.specializations) == 1 else "more than once"),
        ("values saved for backward", "", f"{saved_values(specialization):,}"),
        ("memory saved for backward", in_eager, in_compiled),
        ("forward + backward", f"{eager.warm_step * 1e3:.1f} ms", f"{compiled.warm_step * 1e3:.1f} ms"),
        ("generated program", "", str(path.relative_to(HERE.parent))),
    ]


def largest_difference(eager: Trainee, compiled: Trainee) -> float:
    return max(abs(a - b) for a, b in zip(eager.losses, compiled.losses, strict=True))


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


def show(rows: Sequence[tuple[str, str, str]]) -> None:
    header = ("", "eager", "Foregrad")
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
    parser = argparse.ArgumentParser(description="Train a small GPT eagerly and with Foregrad, side by side.")
    parser.add_argument("--steps", type=int, default=350, help="training steps (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps: two at least, the first one captures")

    torch.manual_seed(0)
    text = Text(TEXT)
    module = Loss(CharGPT(len(text.alphabet)))
    twin = copy.deepcopy(module)
    compiled_module = foregrad.aot_module(twin, graph_as_it_is)
    eager, compiled = trainee(module, module), trainee(compiled_module, twin)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    print(f"A GPT of {parameters:,} parameters learns {TEXT.name}, {len(text.codes):,} characters.\n")

    def status() -> str:
        return f"loss {eager.losses[-1]:.4f} eager, {compiled.losses[-1]:.4f} Foregrad"

    for batch in with_progress(text.batches(options.steps), options.steps, status):
        eager.step(*batch)
        compiled.step(*batch)

    specialization = compiled_module.specializations[-1]
    GENERATED.parent.mkdir(parents=True, exist_ok=True)
    GENERATED.write_text(specialization.source, encoding="utf-8")
    saved = saved_bytes(module, module, batch), saved_bytes(compiled_module, twin, batch)

    print("\nWhat the copy that Foregrad trained has learnt to write:\n")
    print(text.sample(twin.model, "The river ", 200), end="\n\n")
    show(report(eager, compiled, specialization, saved, GENERATED))
    if largest_difference(eager, compiled) > TOLERANCE:
        raise SystemExit("The losses are not the same.")


if __name__ == "__main__":
    main()
