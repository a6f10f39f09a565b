"""Models of `transformers`, an optional extra, made from their configurations: a program inside a large library."""

import pytest
import torch
from torch import nn

import foregrad
from helpers import nop

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def bert():
    config = transformers.BertConfig(**SIZES, intermediate_size=64, max_position_embeddings=32)
    return transformers.BertForMaskedLM(config), {"attention_mask": torch.ones(2, 8, dtype=torch.int64)}


def llama():
    config = transformers.LlamaConfig(**SIZES, intermediate_size=64, use_cache=False)
    return transformers.LlamaForCausalLM(config), {"attention_mask": torch.zeros(2, 1, 8, 8)}


def t5():
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, use_cache=False, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), {}


class Loss(nn.Module):
    """Tied weights and all: what a training loop calls."""

    def __init__(self, model, extra):
        super().__init__()
        self.model = model
        self.extra = tuple(extra)

    def forward(self, tokens, *extra):
        return self.model(input_ids=tokens, labels=tokens, **dict(zip(self.extra, extra, strict=True))).loss


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("make", [bert, llama, t5])
def test_three_steps_of_training_are_those_of_eager(make):
    """F-1, F-2: the guards of a program that reaches a large library let its own calls in."""
    losses = {}
    for side in ("eager", "compiled"):
        torch.manual_seed(0)
        model, extra = make()
        loss = Loss(model.eval(), extra)  # without dropout
        program = foregrad.aot_module(loss, nop) if side == "compiled" else loss
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.randint(64, (2, 8))
        losses[side] = []
        for _ in range(3):
            optimizer.zero_grad()
            value = program(tokens, *extra.values())
            value.backward()
            optimizer.step()
            losses[side].append(value.item())
        if side == "compiled":
            assert len(program._compiled.specializations) == 1
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=1e-6)
    assert len({*losses["eager"]}) == 3
