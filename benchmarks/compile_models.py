"""The models that are compiled: small ones for a CPU, and those of the size that a GPU is bought for.

Each returns its loss. Nothing draws random numbers, so that all sides can be compared with eager.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .models import GPT, Loss, ResNet

Built = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Subject:
    """A model to compile: how to build it, and whether it needs a GPU."""

    build: Callable[[torch.device], Built]
    cuda_only: bool = False


def gpt(layers: int, width: int, heads: int, vocabulary: int, batch: int, length: int, device: torch.device) -> Built:
    model = GPT(layers, width, heads, vocabulary, length)
    tokens, targets = (torch.randint(vocabulary, (batch, length)) for _ in range(2))
    return model, (tokens, targets)


class Classified(nn.Module):
    """A classifier with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), classes)


def resnet(device: torch.device) -> Built:
    """ResNet-50 of torchvision on a GPU; elsewhere a small one of our own."""
    if device.type == "cuda" and importlib.util.find_spec("torchvision"):
        from torchvision.models import resnet50

        return Classified(resnet50()), (torch.randn(32, 3, 224, 224), torch.randint(1000, (32,)))
    return ResNet(), (torch.randn(8, 3, 64, 64), torch.randint(10, (8,)))


def hugging_face(name: str, device: torch.device) -> Built:
    """A model of `transformers`, from its configuration alone."""
    import transformers

    tokens = torch.randint(512, (4, 128))
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    if name == "llama":
        config = transformers.LlamaConfig(vocab_size=512, use_cache=False, **sizes)
        # The model's own mask looks at values to find packed sequences, which torch's capture refuses.
        causal = torch.full((128, 128), float("-inf")).triu(1).expand(4, 1, -1, -1)
        return Loss(transformers.LlamaForCausalLM(config)), (tokens, tokens, causal)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=512, **sizes, **still)
    return Loss(transformers.BertForMaskedLM(config)), (tokens, tokens)


SUBJECTS: dict[str, Subject] = {
    "gpt-small": Subject(functools.partial(gpt, 6, 256, 4, 512, 4, 128)),
    "gpt-2": Subject(functools.partial(gpt, 12, 768, 12, 50304, 8, 1024), cuda_only=True),
    "resnet": Subject(resnet),
    **(
        {name: Subject(functools.partial(hugging_face, name)) for name in ("bert", "llama")}
        if importlib.util.find_spec("transformers")
        else {}
    ),
}


def built(name: str, device: torch.device) -> Built:
    """A model on a device with a batch for it: bfloat16 on a GPU, float32 elsewhere; the same ones on every call."""
    torch.manual_seed(0)
    model, inputs = SUBJECTS[name].build(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = model.to(device, dtype).train()
    return model, tuple(x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in inputs)
