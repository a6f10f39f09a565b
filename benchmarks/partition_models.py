"""The eight families that are partitioned. Each returns its loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .models import GPT, Residual

Built = tuple[nn.Module, tuple[Tensor, ...]]


class ResNet18(nn.Module):
    """The usual widths, for images of 224x224."""

    def __init__(self, classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        stages: list[nn.Module] = []
        inputs = width
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            stages += [Residual(inputs, outputs, stride), Residual(outputs, outputs)]
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.stages(self.stem(images)).mean((2, 3))), classes)


class Encoder(nn.Module):
    """A transformer block without a mask, its attention written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5, -1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer."""

    def __init__(self, layers: int = 6, width: int = 192, heads: int = 3, size: int = 96, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.Sequential(*(Encoder(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return F.cross_entropy(self.head(self.norm(self.blocks(x))[:, 0]), classes)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        layers += [nn.Conv2d(before, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Down, and up again with shortcuts."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(_twice(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        kept = []
        x = images
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for rise, block, beside in zip(self.rise, self.up, reversed(kept[:-1]), strict=True):
            x = block(torch.cat([rise(x), beside], 1))
        return F.cross_entropy(self.head(x), classes)


class LSTM(nn.Module):
    """An LSTM cell, unrolled by hand."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        given = self.tokens(tokens)
        h = c = torch.zeros_like(given[:, 0])
        states = []
        for step in range(tokens.shape[1]):
            i, f, g, o = (self.inner(given[:, step]) + self.outer(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return F.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), targets.flatten())


class Experts(nn.Module):
    """Every token goes to its best experts, weighed by a router; all experts see all tokens, as on small machines."""

    def __init__(self, width: int, experts: int, best: int) -> None:
        super().__init__()
        self.best = best
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.05)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores, chosen = self.router(flat).topk(self.best, -1)
        weights = flat.new_zeros(flat.shape[0], self.up.shape[0]).scatter(1, chosen, scores.softmax(-1))
        inner = F.silu(torch.matmul(flat, self.up))
        return torch.einsum("ten,te->tn", torch.matmul(inner, self.down).transpose(0, 1), weights).view_as(x)


class MoE(nn.Module):
    """Layers of attention and experts."""

    def __init__(self, layers: int = 4, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.mix = nn.ModuleList(Encoder(width, 4) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width, 8, 2) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for mix, experts in zip(self.mix, self.experts, strict=True):
            x = mix(x)
            x = x + experts(F.layer_norm(x, x.shape[-1:]))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Mixer(nn.Module):
    """An MLP-Mixer."""

    def __init__(self, layers: int = 6, width: int = 192, length: int = 144) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.across = nn.ModuleList(
            nn.Sequential(nn.Linear(length, 2 * length), nn.GELU(), nn.Linear(2 * length, length))
            for _ in range(layers)
        )
        self.along = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for i, (across, along) in enumerate(zip(self.across, self.along, strict=True)):
            x = x + across(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + along(self.norms[2 * i + 1](x))
        return F.cross_entropy(self.head(self.norms[-1](x).mean(1)), classes)


def _text(vocabulary: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(vocabulary, (batch, length)), torch.randint(vocabulary, (batch, length))


def _images(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


def _family(build: Callable[[], Built]) -> Callable[[], Built]:
    def seeded() -> Built:
        torch.manual_seed(0)
        return build()

    return seeded


def gpt(layers: int) -> Callable[[], Built]:
    """A GPT of any depth and a batch for it."""
    return _family(lambda: (GPT(layers), _text(512, 2, 128)))


FAMILIES: dict[str, Callable[[], Built]] = {
    "GPT-12": gpt(12),
    "ResNet-18 at 224": _family(lambda: (ResNet18(), _images(2, 224, 1000))),
    "ViT": _family(lambda: (ViT(), _images(4, 96, 10))),
    "U-Net": _family(lambda: (UNet(), (torch.randn(2, 3, 64, 64), torch.randint(2, (2, 64, 64))))),
    "LSTM": _family(lambda: (LSTM(), _text(256, 8, 32))),
    "MoE": _family(lambda: (MoE(), _text(256, 4, 64))),
    "vocabulary LM": _family(lambda: (GPT(2, width=128, vocabulary=8192), _text(8192, 2, 128))),
    "MLP-Mixer": _family(lambda: (Mixer(), _images(4, 96, 10))),
}
