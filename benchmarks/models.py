"""The models that are captured: a GPT of any depth, and an 18-layer ResNet.

They are plain PyTorch. Both return their loss, so that one call and one `backward()` make a training step.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A transformer block: causal attention, then a four times wider MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and a cross-entropy loss."""

    def __init__(self, layers: int, width: int = 256, heads: int = 4, vocabulary: int = 512, length: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of two residual blocks, narrow enough for one core; batch norm writes to its buffers."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        stages: list[nn.Module] = []
        inputs = 16
        for outputs, stride in ((16, 1), (32, 2), (64, 2), (128, 2)):
            stages += [Residual(inputs, outputs, stride), Residual(outputs, outputs)]
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.stages(self.stem(images)).mean((2, 3))), classes)


def gpt(layers: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A GPT and a batch for it; the same ones on every call."""
    torch.manual_seed(0)
    model = GPT(layers)
    return model, (torch.randint(512, (2, 128)), torch.randint(512, (2, 128)))


def resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A ResNet and a batch of 64x64 images for it; the same ones on every call."""
    torch.manual_seed(0)
    model = ResNet()
    return model, (torch.randn(4, 3, 64, 64), torch.randint(10, (4,)))


def transformer(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A small model of four layers from `transformers`, an optional extra, made from its configuration alone."""
    import transformers

    torch.manual_seed(0)
    tokens = torch.randint(512, (2, 64))
    if name == "llama":
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = transformers.LlamaConfig(vocab_size=512, use_cache=False, **sizes)
        # The model's own mask looks at values to find packed sequences, which torch's capture refuses.
        causal = torch.full((64, 64), float("-inf")).triu(1).expand(2, 1, -1, -1)
        return Loss(transformers.LlamaForCausalLM(config)), (tokens, tokens, causal)
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=512, use_cache=False, decoder_start_token_id=0, **sizes)
    model = transformers.T5ForConditionalGeneration(config)
    # Torch's aot_module refuses tied weights: here the two embeddings and the head have weights of their own.
    for part in (model.encoder, model.decoder):
        part.embed_tokens = copy.deepcopy(model.shared)
    model.lm_head = copy.deepcopy(model.lm_head)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return Loss(model), (tokens, tokens)


class Loss(nn.Module):
    """The loss of a language model from `transformers`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=labels, attention_mask=mask).loss
        return loss


TINY: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    f"gpt{layers}": (lambda layers=layers: (GPT(layers, 8, 2, 16, 4), (torch.zeros(1, 4, dtype=torch.int64),) * 2))
    for layers in (12, 48)
}
"""The same programs on so little data that kernels take no time."""

MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "gpt12": lambda: gpt(12),
    "gpt48": lambda: gpt(48),
    "resnet": resnet,
    **(
        {name: functools.partial(transformer, name) for name in ("llama", "t5")}
        if importlib.util.find_spec("transformers")
        else {}
    ),
}
DEEPER: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {"gpt96": lambda: gpt(96)}
