"""Random programs: cheap and dear operators, views, draws, writes, effects, checkpoints, several results."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

N = 6

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "exp": lambda a: a.tanh().exp(),
    "square": lambda a: a.tanh().square(),
    "softmax": lambda a: a.softmax(1),
    "norm": lambda a: F.layer_norm(a, [N]),
    "cumsum": lambda a: a.cumsum(0) / N,
    "sort": lambda a: a.sort(1)[0],
    "maximum": lambda a: a.max(1, keepdim=True)[0].expand(N, N),
    "mean": lambda a: a.mean(0).expand(N, N),
    "transposed": lambda a: a.t(),
    "halves": lambda a: torch.cat([a[N // 2 :], a[: N // 2]]),
    "flat": lambda a: a.reshape(-1).roll(1).view(N, N),
    "pieces": lambda a: torch.stack(a.unbind(1)[::-1]),
    "detached": lambda a: a.detach() * a,
    "dropout": lambda a: F.dropout(a, 0.5),
    "noise": lambda a: a + torch.rand_like(a),
    "mask": lambda a: a * torch.bernoulli(torch.full_like(a, 0.5)),
    "effect": lambda a: a * torch.ops.foregrad_random_programs.note(a.detach()).tanh(),
    "written": lambda a: a.clone().mul_(2).tanh_(),
    "written row": lambda a: (lambda c: (c[0].sin_(), c.t()[1].mul_(3), c)[2])(a * 1),
    "eigenvalues": lambda a: torch.linalg.eigh(a @ a.t() + torch.diag(torch.arange(N, dtype=a.dtype)))[0] * a,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b.tanh(),
    "matmul": lambda a, b: a @ b / N,
    "where": lambda a, b: torch.where(a > b, a, b * 0.5),
    "addmm": lambda a, b: torch.addmm(a, b, a) / N,
    "checkpoint": lambda a, b: checkpoint(lambda a, b: (a.sin() @ b).tanh(), a, b, use_reentrant=False),
    "checkpoint with a draw": lambda a, b: checkpoint(
        lambda a, b: F.dropout(a @ b, 0.5).sin(), a, b, use_reentrant=False
    ),
    "selective checkpoint": lambda a, b: checkpoint(
        lambda a, b: (a.sin() @ b).tanh(),
        a,
        b,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(_keeps_products),
    ),
}
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda buffer, a: buffer.add_(1),
    "copy": lambda buffer, a: buffer.copy_(a.detach()),
    "row": lambda buffer, a: buffer[0].mul_(2),
    "decay": lambda buffer, a: buffer.lerp_(a.detach(), 0.1),
}


def _keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def random_program(seed: int) -> tuple[Callable[..., Any], list[str]]:
    """A function of two tensors to be differentiated and a buffer, and the names of what it does."""
    draw = random.Random(seed)
    steps: list[tuple[str, str, int, int]] = []
    values = 2
    for _ in range(draw.randint(3, 16)):
        kind = draw.choices(["unary", "binary", "read", "write"], [6, 4, 1, 1])[0]
        table = {"unary": UNARY, "binary": BINARY, "read": UNARY, "write": WRITES}[kind]
        steps.append(
            (kind, draw.choice(list(table)), draw.randrange(values), draw.randrange(max(0, values - 3), values))
        )
        values += kind != "write"
    results = sorted({values - 1, draw.randrange(values), draw.randrange(2, values)} if values > 2 else {0, 1})

    def program(x: Tensor, w: Tensor, buffer: Tensor) -> Any:
        made = [x, w]
        for kind, name, first, second in steps:
            if kind == "unary":
                made.append(UNARY[name](made[second]))
            elif kind == "binary":
                made.append(BINARY[name](made[first], made[second]))
            elif kind == "read":
                made.append(made[second] * buffer.sin() + buffer.view(-1)[0])
            else:
                WRITES[name](buffer, made[second])
        return tuple(made[i] * 1 if i < 2 else made[i] for i in results)

    return program, [f"{kind} {name} {first} {second}" for kind, name, first, second in steps]
