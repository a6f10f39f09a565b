"""What a whole training step as one program takes: time, memory and its first call, beside eager and `make_fx`.

On a CPU the step is interpreted (`backend="eager"`). On a GPU it is one CUDA graph over Inductor, beside a CUDA graph
that was made by hand of a `torch.compile`d model with a fused optimizer. Losses are compared in the same run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .capture import progress
from .compile import MiB, peak_of, timed
from .models import GPT
from .table import Mark, Table, at_least, at_most

Step = Callable[[], Any]
WARM = 14
WAYS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}
STEP_WANTED = 0.55
PEAK_WANTED = 0.2
CAPTURE_WANTED = 5.0
LAYERS = (6, 12, 48)
PER_LAYER_WANTED = 1.2
HAND_MADE_WANTED = {"gpt-small": 0.97, "gpt-2": 1.0}


def mlp(device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Five layers of width 64, for 16 rows."""
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers[:-1], _Mean()).to(device), (torch.randn(16, 64, device=device),)


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def gpt(layers: int, batch: int, length: int, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A GPT of width 256, and a batch."""
    torch.manual_seed(0)
    tokens = torch.randint(512, (batch, length), device=device)
    return GPT(layers).to(device), (tokens, tokens)


def whole_step(model: nn.Module, inputs: Sequence[Tensor], **options: Any) -> Callable[..., Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)

    def step(*given: Tensor) -> Tensor:
        loss: Tensor = model(*given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _sides(build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], options: dict[str, bool]) -> dict[str, Step]:
    import foregrad

    found: dict[str, Step] = {}
    for side in ("eager", "train_step"):
        model, inputs = build()
        step = whole_step(model, inputs, **options)
        call = foregrad.train_step(step) if side == "train_step" else step
        found[side] = lambda call=call, inputs=inputs: call(*inputs)  # type: ignore[misc]
    return found


def steps_and_peaks(rounds: int, device: torch.device) -> tuple[list[Table], list[Mark]]:
    table = Table("Whole steps", ["model", "AdamW", "eager ms", "train_step ms", "ratio", "eager MiB", "MiB", "ratio"])
    table.note = f"The smallest of {rounds} rounds, both in turn; peaks are beyond the model and its optimizer."
    marks = []
    subjects: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
        "mlp-5": lambda: mlp(device),
        "gpt-6, 1 x 16": lambda: gpt(6, 1, 16, device),
    }
    for name, build in subjects.items():
        for way, options in WAYS.items():
            progress(f"{name}, {way}")
            sides = _sides(build, options)
            losses = {side: [step().item() for _ in range(WARM)] for side, step in sides.items()}
            if losses["eager"] != losses["train_step"]:
                raise SystemExit(f"{name}, {way}: the losses of the two sides differ")
            best = dict.fromkeys(sides, float("inf"))
            for _ in range(rounds * (10 if name == "mlp-5" else 1)):
                for side, step in sides.items():
                    best[side] = min(best[side], timed(step, device))
            peaks = {side: peak_of(step, device) for side, step in sides.items()}
            ratio, share = best["train_step"] / best["eager"], peaks["train_step"] / peaks["eager"]
            numbers = (f"{best['eager']:.3f}", f"{best['train_step']:.3f}", f"{ratio:.2f}×")
            sizes = (f"{peaks['eager'] / MiB:.1f}", f"{peaks['train_step'] / MiB:.1f}", f"{share:.2f}×")
            table.add(name, way, *numbers, *sizes)
            if name == "mlp-5" and way == "fused":
                marks.append(at_most("step of mlp-5, fused", ratio, STEP_WANTED))
            marks.append(at_most(f"peak of {name}, {way}", share, PEAK_WANTED if name != "mlp-5" else 1.0))
    progress("")
    return [table], marks


# ---------------------------------------------------------------------------------------------------- first calls
def _captured(layers: int) -> float:
    """Seconds to record a step whose optimizer has state, and to make its graph."""
    import foregrad

    model, inputs = gpt(layers, 2, 128, torch.device("cpu"))
    step = whole_step(model, inputs, fused=True)
    step(*inputs)
    start = time.perf_counter()
    foregrad.capture(step, *inputs)
    return time.perf_counter() - start


def _traced(layers: int) -> float:
    """The same by `make_fx`, over functions of all that the step reads and writes."""
    from torch._subclasses import FakeTensorMode
    from torch.func import functional_call
    from torch.fx.experimental.proxy_tensor import make_fx

    model, inputs = gpt(layers, 2, 128, torch.device("cpu"))
    names = [name for name, _ in model.named_parameters()]
    mode = FakeTensorMode()
    weights = [mode.from_tensor(p.detach()) for p in model.parameters()]
    state = [[mode.from_tensor(torch.zeros_like(p)) for p in model.parameters()] for _ in range(2)]
    counts = [mode.from_tensor(torch.ones(())) for _ in names]
    tokens = [mode.from_tensor(tensor) for tensor in inputs]

    def step(
        weights: list[Tensor], first: list[Tensor], second: list[Tensor], counts: list[Tensor], tokens: Any
    ) -> Any:
        leaves = [weight.detach().requires_grad_() for weight in weights]
        loss = functional_call(model, dict(zip(names, leaves, strict=True)), tuple(tokens))
        gradients = torch.autograd.grad(loss, leaves)
        torch._foreach_add_(counts, 1)
        numbers = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
        kind = {"amsgrad": False, "maximize": False}
        torch._fused_adamw_(weights, list(gradients), first, second, [], counts, **numbers, **kind)
        return loss

    start = time.perf_counter()
    with mode:
        make_fx(step)(weights, *state, counts, tokens)
    return time.perf_counter() - start


def captures(repeats: int) -> tuple[Table, list[Mark]]:
    table = Table("Capture of a whole step", ["layers", "make_fx s", "foregrad s", "times faster", "ms per layer"])
    table.note = f"A GPT of width 256 with fused AdamW; the smallest of {repeats} in one process."
    marks, per_layer = [], {}
    for layers in LAYERS:
        progress(f"capture of {layers} layers")
        theirs = min(_traced(layers) for _ in range(repeats))
        ours = min(_captured(layers) for _ in range(repeats))
        per_layer[layers] = ours / layers
        table.add(str(layers), f"{theirs:.2f}", f"{ours:.3f}", f"{theirs / ours:.1f}×", f"{ours / layers * 1e3:.1f}")
        marks.append(at_least(f"capture of a step of {layers} layers", theirs / ours, CAPTURE_WANTED))
        gc.collect()
    progress("")
    most = at_most("capture per layer, 48 against 6", per_layer[48] / per_layer[6], PER_LAYER_WANTED)
    return table, [*marks, most]


# ------------------------------------------------------------------------------------------------------------ CUDA
def _by_hand(model: nn.Module, inputs: Sequence[Tensor]) -> Step:
    """A CUDA graph, made by hand, of a compiled model and a fused optimizer that counts on the device."""
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)

    def step() -> Tensor:
        loss: Tensor = compiled(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def on_cuda(rounds: int) -> tuple[Table, list[Mark]]:
    import foregrad

    from .compile_models import built

    device = torch.device("cuda")
    table = Table(
        "Whole steps on CUDA", ["model", "by hand ms", "train_step ms", "ratio", "by hand MiB", "MiB", "ratio"]
    )
    table.note = f"bfloat16, fused AdamW; the smallest of {rounds} rounds. By hand: a CUDA graph of a compiled model."
    marks = []
    for name, wanted in HAND_MADE_WANTED.items():
        progress(f"step of {name}")
        sides: dict[str, Step] = {}
        model, inputs = built(name, device)
        sides["by hand"] = _by_hand(model, inputs)
        model, inputs = built(name, device)
        step = foregrad.train_step(whole_step(model, inputs, fused=True, capturable=True), "inductor", cuda_graph=True)
        sides["train_step"] = lambda step=step, inputs=inputs: step(*inputs)  # type: ignore[misc]
        for call in sides.values():
            for _ in range(WARM):
                call()
        best = {side: min(timed(call, device) for _ in range(rounds)) for side, call in sides.items()}
        peaks = {side: peak_of(call, device) for side, call in sides.items()}
        ratio = best["train_step"] / best["by hand"]
        share = peaks["train_step"] / max(peaks["by hand"], 1)
        numbers = (f"{best['by hand']:.3f}", f"{best['train_step']:.3f}", f"{ratio:.2f}×")
        table.add(name, *numbers, f"{peaks['by hand'] / MiB:.1f}", f"{peaks['train_step'] / MiB:.1f}", f"{share:.2f}×")
        marks.append(at_most(f"step of {name} in a CUDA graph", ratio, wanted))
        del sides, step, model
        gc.collect()
    progress("")
    return table, marks


def run(rounds: int, repeats: int, device: torch.device) -> tuple[list[Table], list[Mark]]:
    """Measure what can be measured on a device."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        table, marks = on_cuda(rounds)
        return [table], marks
    tables, marks = steps_and_peaks(rounds, device)
    table, more = captures(repeats)
    return [*tables, table], [*marks, *more]
