"""Models whose training steps are exported. Each returns its loss."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hugging_face


class Mlp(nn.Module):
    """Linear layers with batch norm; the statistics are written in each step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x, target):
        return F.cross_entropy(self.layers(x), target)

    @staticmethod
    def example():
        return torch.randn(8, 6), torch.randint(4, (8,))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A small GPT whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(17, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList([Block(16, 2) for _ in range(2)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x, target):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), target.flatten())

    @staticmethod
    def example():
        return torch.randint(17, (2, 8)), torch.randint(17, (2, 8))


class Basic(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.short = nn.Identity()
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)), inplace=True)
        h = self.norm2(self.conv2(h))
        h += self.short(x)
        return F.relu(h, inplace=True)


class ResNet18(nn.Module):
    """The layers of a ResNet-18, with an eighth of its width."""

    def __init__(self):
        super().__init__()
        widths = [8, 8, 16, 32, 64]
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Basic(a, b, 1 if i == 0 else 2), Basic(b, b, 1))
                for i, (a, b) in enumerate(itertools.pairwise(widths))
            )
        )
        self.fc = nn.Linear(64, 10)

    def forward(self, x, target):
        h = self.stages(self.pool(self.stem(x)))
        return F.cross_entropy(self.fc(F.adaptive_avg_pool2d(h, 1).flatten(1)), target)

    @staticmethod
    def example():
        return torch.randn(2, 3, 32, 32), torch.randint(10, (2,))


class Lstm(nn.Module):
    """Two layers, with a state that is kept from step to step in buffers."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 7, num_layers=2, batch_first=True)
        self.fc = nn.Linear(7, 3)
        self.register_buffer("h", torch.zeros(2, 4, 7))
        self.register_buffer("c", torch.zeros(2, 4, 7), persistent=False)

    def forward(self, x, target):
        out, (h, c) = self.lstm(x, (self.h, self.c))
        self.h, self.c = h.detach(), c.detach()
        return F.mse_loss(self.fc(out[:, -1]), target)

    @staticmethod
    def example():
        return torch.randn(4, 6, 5), torch.randn(4, 3)


OWN = {"mlp": Mlp, "gpt": Gpt, "resnet18": ResNet18, "lstm": Lstm}
AVAILABLE = (*OWN, *hugging_face.NAMES) if hugging_face.INSTALLED else tuple(OWN)
_SKIPPED = pytest.mark.skipif(not hugging_face.INSTALLED, reason="transformers is not installed")
MODELS = [*OWN, *(pytest.param(name, marks=_SKIPPED) for name in hugging_face.NAMES)]


def build(name, **options):
    """A model in float64, and an example call."""
    torch.manual_seed(0)
    model, args = (OWN[name](), OWN[name].example()) if name in OWN else hugging_face.build(name, **options)
    return model.double(), tuple(t.double() if t.is_floating_point() else t for t in args)
