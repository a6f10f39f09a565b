"""Train a small model by whole steps, eagerly and with `foregrad.train_step`, and compare what a user can see.

python examples/train_step.py --steps 50
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import foregrad

Step = Callable[[Tensor, Tensor], float]


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Everything that happens to a batch."""

    def step(x: Tensor, y: Tensor) -> float:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def train(model: nn.Module, compile: Callable[[Step], Any], steps: int) -> tuple[list[float], float, Any]:
    """The losses, the milliseconds of the fastest step, and the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step = compile(whole_step(model, optimizer))
    torch.manual_seed(1)
    x = torch.randn(64, 16)
    y = x.sin().sum(1, keepdim=True)
    losses, fastest = [], float("inf")
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(step(x, y))
        fastest = min(fastest, time.perf_counter() - start)
        schedule.step()
    return losses, fastest * 1e3, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    eager, eager_time, _ = train(copy.deepcopy(model), lambda step: step, steps)
    losses, own_time, step = train(copy.deepcopy(model), foregrad.train_step, steps)
    print(f"losses {eager[0]:.4f} to {eager[-1]:.4f}, {'the same' if losses == eager else 'NOT the same'} at each step")
    print(f"fastest step: eager {eager_time:.2f} ms, train_step {own_time:.2f} ms")
    print(f"{len(step.specializations)} programs over {steps} learning rates; {step.memory}")


if __name__ == "__main__":
    main()
