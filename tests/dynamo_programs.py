"""Programs and models that are compared with eager behind `torch.compile`: each with calls of several sizes."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hugging_face

Calls = Callable[[], list[list[Any]]]


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*size, requires_grad=True)


def sizes(*shapes: Any) -> Calls:
    """Calls with leaves: each shape is a function of a size."""
    return lambda: [[leaf(*shape(n)) for shape in shapes] for n in (4, 4, 6, 8)]


vector: Calls = sizes(lambda n: (n,))
matrix: Calls = sizes(lambda n: (n, 4))
product: Calls = sizes(lambda n: (n, 4), lambda n: (4, 3))


def dropped(x):
    return F.dropout(x.sin(), 0.5).cos()


def keep_products(ctx, op, *args, **kwargs):
    is_product = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(x):
    return checkpoint(dropped, x, use_reentrant=False)


def selective(x, w):
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    return checkpoint(lambda x: dropped((x @ w).sin()), x, use_reentrant=False, context_fn=contexts) * 2


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x**2  # on purpose not the derivative


def writes(x, y):
    x.add_(y.sum())
    return x * 2


def overlapping():
    """The same program on memory that lies apart, then on memory that does not."""
    calls = []
    for n, apart in ((4, True), (4, False), (4, True), (6, False)):
        whole = torch.arange(3.0 * n)
        calls.append([whole[:n].clone(), whole[2 : n + 2].clone()] if apart else [whole[:n], whole[2 : n + 2]])
    return calls


def overlapping_first():
    """On memory that overlaps, then on memory that lies apart, or overlaps otherwise."""
    whole = [torch.arange(12.0) for _ in range(4)]
    return [
        [whole[0][:6], whole[0][3:9]],
        [whole[1][:6].clone(), whole[1][3:9].clone()],
        [whole[2][:6], whole[2][4:10]],
        [whole[3][3:9], whole[3][:6]],
    ]


def same_twice():
    calls = []
    for twice in (False, True, False):
        x, y = torch.arange(4.0), torch.ones(4)
        calls.append([x, x if twice else y])
    return calls


def graph_break(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return (y * x).cos()


@torch.compiler.disable
def left_alone(x):
    return x.exp()


def regions(x, w):
    with torch.no_grad():
        mean = x.mean(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = (x - mean) @ w
    return y.float().relu()


def steps_inside(x, w):
    loss = (x @ w).square().mean()
    (gradient,) = torch.autograd.grad(loss, w)
    return loss.detach(), w.detach() - 0.1 * gradient


def keeps_count(x, state):
    state["calls"] += 1
    state["last"] = x * state["calls"]
    return state["last"].sum()


def in_place_on_view(x):
    y = x.clone()
    y[1:].mul_(2)
    y.t().add_(1)
    return y, y[0]


def offset_calls():
    return [[torch.arange(20.0)[i : i + n].requires_grad_()] for i, n in ((0, 6), (3, 6), (5, 8), (0, 8))]


def strided_calls():
    made = [torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(8, 12)[::2, ::2], torch.randn(1, 6).expand(4, 6)]
    return [[x.requires_grad_()] for x in made]


def non_leaf_calls():
    return [[leaf(n) * 2] for n in (4, 4, 5)]


def int_calls():
    return [[leaf(12), n] for n in (2, 3, 4, 6, 1)]


def float_calls():
    return [[leaf(4), p] for p in (0.5, 0.7, 0.1, 0.0, 1.0)]


def empty_calls():
    return [[leaf(n, 3)] for n in (0, 1, 2, 3)]


def nested_calls():
    return [[{"a": leaf(n), "b": [leaf(n), 2]}, (leaf(n),)] for n in (3, 3, 5)]


def hooked(x):
    y = x.sin()
    y.register_hook(lambda gradient: gradient * 3)
    return y.sum()


def conditional(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def per_sample(x, w):
    return torch.func.vmap(torch.func.grad(lambda row, w: (row @ w).sin().sum()), (0, None))(x, w)


def loops(x):
    for i in range(x.shape[0]):
        if i % 2:
            x = x * i
    return x


def drawn(x):
    noise = torch.randn(x.shape[0], 1) + torch.randint(3, x.shape) + torch.bernoulli(x.sigmoid())
    return x * torch.rand_like(x) + noise


def many_views(x):
    a, b = x.chunk(2)
    return a, b, x, x.view(-1), x[0], x.t(), a.unsqueeze(0)


def written_and_returned(x):
    x.mul_(2)
    return x, x[1:], x.detach()


def written_leaf_view(x):
    with torch.no_grad():
        x[0] = 0
    return x * x


def reshaped(x):
    x.unsqueeze_(0)
    return x * 2


def foreach(x, y):
    torch._foreach_add_([x, y], [y.detach() * 1, x.detach() * 1])
    return x + y


def plain_pair():
    return [[torch.randn(n), torch.randn(n)] for n in (4, 4, 6)]


PROGRAMS: dict[str, tuple[Callable[..., Any], Calls]] = {
    "broadcast": (lambda x, w: (x + w).sum(), sizes(lambda n: (n, 3), lambda n: (3,))),
    "product": (lambda x, w: (x @ w).relu(), product),
    "size in arithmetic": (lambda x: x * x.shape[0] + x.numel(), matrix),
    "size returned": (lambda x: (x.sum(), x.shape[0], x.shape[0] * 2), matrix),
    "arange of a size": (lambda x: x + torch.arange(x.shape[0]).unsqueeze(1), matrix),
    "branch on a size": (lambda x: x.sin() if x.shape[0] > 5 else x.cos(), matrix),
    "loop over a size": (loops, matrix),
    "view by a size": (lambda x: x.view(x.shape[0] // 2, -1).sum(1), matrix),
    "int": (lambda x, n: x.view(n, -1).sum(0) * n, int_calls),
    "float": (lambda x, p: x * p + p, float_calls),
    "float in dropout": (lambda x, p: F.dropout(x, p), float_calls),
    "float in norm": (lambda x, p: F.layer_norm(x, (4,), eps=p + 1e-3), float_calls),
    "empty": (lambda x: (x * 2).sum(0), empty_calls),
    "offset": (lambda x: (x.view(-1)[1:], x * 2), offset_calls),
    "strided": (lambda x: (x.sum(1), x.t() * 2), strided_calls),
    "as_strided": (lambda x: x.as_strided((2, 2), (1, 2)) * 3, offset_calls),
    "not a leaf": (lambda x: x * x, non_leaf_calls),
    "containers": (lambda d, t: {"sum": d["a"] + t[0], "list": [d["b"][0] * d["b"][1]]}, nested_calls),
    "object changed": (keeps_count, lambda: [[leaf(n), {"calls": n, "last": None}] for n in (3, 3, 5)]),
    "views": (many_views, matrix),
    "view in place": (in_place_on_view, sizes(lambda n: (n, n))),
    "input written": (writes, lambda: [[torch.randn(n), leaf(n)] for n in (4, 4, 6)]),
    "input written, no gradient": (writes, plain_pair),
    "input written and returned": (written_and_returned, lambda: [[torch.randn(n, 3)] for n in (4, 4, 6)]),
    "leaf written under no_grad": (written_leaf_view, matrix),
    "input reshaped": (reshaped, lambda: [[torch.randn(n)] for n in (4, 4, 6)]),
    "non-leaf written": (lambda x: x.mul_(2).sin(), non_leaf_calls),
    "inputs that come to overlap": (writes, overlapping),
    "inputs that overlap at first": (writes, overlapping_first),
    "one input twice": (writes, same_twice),
    "foreach": (foreach, plain_pair),
    "dropout": (lambda x: F.dropout(x, 0.3) * 2, matrix),
    "random numbers": (drawn, matrix),
    "checkpoint": (lambda x: checkpoint(lambda x: checkpointed(dropped(x)), x, use_reentrant=False), matrix),
    "checkpoint, reentrant": (lambda x: checkpoint(dropped, x, use_reentrant=True) * 2, matrix),
    "checkpoint, selective": (selective, product),
    "custom function": (lambda x: Cube.apply(x).sin(), matrix),
    "graph break": (graph_break, matrix),
    "function left alone": (lambda x: left_alone(x.sin()).cos(), matrix),
    "data read": (lambda x: x * x.sum().item(), matrix),
    "branch on data": (lambda x: x.sin() if x.sum() > 0 else x.cos(), matrix),
    "mask": (lambda x: x[x > 0].sum(), matrix),
    "regions": (regions, product),
    "gradient inside": (steps_inside, product),
    "hook": (hooked, matrix),
    "cond": (conditional, matrix),
    "gradients per sample": (per_sample, product),
    "scatter": (lambda x: torch.zeros(x.shape[0], 5).index_add(1, torch.tensor([0, 2, 4, 1]), x), matrix),
    "sort": (lambda x: x.sort(0).values * x.topk(2, 1).values.sum(), matrix),
    "complex": (lambda x: torch.view_as_complex(x.view(-1, 2)).conj().abs(), matrix),
    "attention": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        sizes(lambda n: (1, 2, n, 4), lambda n: (1, 2, n, 4)),
    ),
    "interpolation": (
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        sizes(lambda n: (1, 2, n, n)),
    ),
    "padding": (lambda x: F.pad(x, (1, 1), mode="reflect"), sizes(lambda n: (1, 2, n))),
    "cumulative": (lambda x: x.cumsum(0).logsumexp(1), matrix),
    "constant": (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), matrix),
}


# ---------------------------------------------------------------------------------------------------------------------
class Perceptron(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Linear(8, 2)

    def forward(self, x):
        x = F.max_pool2d(self.norm(self.first(x)).relu_(), 2)
        return self.head((x + self.second(x)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width=16, heads=2, rate=0.1):
        super().__init__()
        self.heads, self.rate = heads, rate
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norms[0](x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + F.dropout(self.out(y), self.rate, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.rate, self.training)


class GPT(nn.Module):
    def __init__(self, layers=2, width=16, checkpointed=False, broken=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpointed, self.broken = checkpointed, broken

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            if self.broken:
                torch._dynamo.graph_break()
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, 32), ids.view(-1)), logits


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(4, 6, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0].sum(1)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 6)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 6)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(2, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        mean, scale = self.encode(x).chunk(2, 1)
        self.seen += 1
        z = mean + torch.randn_like(mean) * scale.exp()
        return self.decode(z), mean.square().mean()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        weights = self.gate(x).softmax(1)
        return sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    def forward(self, x):
        return self.layers(x).mean(1)


def rows(*shape: int) -> Calls:
    return lambda: [[torch.randn(n, *shape)] for n in (4, 4, 6, 3)]


def tokens() -> list[list[Any]]:
    return [[torch.randint(32, (n, t))] for n, t in ((2, 8), (2, 8), (3, 8), (3, 12))]


def hugging(name: str) -> Callable[[], nn.Module]:
    return lambda: hugging_face.build(name, dropout=True)[0]


def hugging_calls(name: str) -> Calls:
    def calls():
        args = hugging_face.build(name)[1]
        return [list(args), list(args), [torch.cat([arg, arg]) for arg in args]]

    return calls


MODELS: dict[str, tuple[Callable[[], nn.Module], Calls]] = {
    "perceptron": (Perceptron, rows(8)),
    "convolutions": (Convolutions, rows(3, 8, 8)),
    "GPT": (GPT, tokens),
    "GPT, checkpointed": (lambda: GPT(checkpointed=True), tokens),
    "GPT, in pieces": (lambda: GPT(broken=True), tokens),
    "LSTM": (lambda: Recurrent(nn.LSTM), rows(5, 4)),
    "GRU": (lambda: Recurrent(nn.GRU), rows(5, 4)),
    "GRU cells": (Cells, rows(3, 4)),
    "autoencoder": (Autoencoder, rows(8)),
    "experts": (Experts, rows(8)),
    "transformer": (Transformer, rows(5, 8)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()), rows(8)),
}
if hugging_face.INSTALLED:
    MODELS |= {name: (hugging(name), hugging_calls(name)) for name in ("bert", "hf_llama")}
