"""Models of `transformers`, an optional extra, made from their configurations: a program inside a large library."""

import pytest
import torch

import foregrad
import hugging_face
from helpers import nop

pytestmark = [
    pytest.mark.skipif(not hugging_face.INSTALLED, reason="transformers is not installed"),
    pytest.mark.filterwarnings("ignore"),  # the library's own
]

PROGRAMS = {"hf_vit": 2}  # its first call notes in its config which kind of loss it takes, and reads that from then on


@pytest.mark.parametrize("name", hugging_face.NAMES)
def test_three_steps_of_training_are_those_of_eager(name):
    """F-1, F-2: the guards of a program that reaches a large library let its own calls in. Tied weights and all."""
    losses = {}
    for side in ("eager", "compiled"):
        torch.manual_seed(0)
        loss, args = hugging_face.build(name)
        program = foregrad.aot_module(loss, nop) if side == "compiled" else loss
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        losses[side] = []
        for _ in range(3):
            optimizer.zero_grad()
            value = program(*args)
            value.backward()
            optimizer.step()
            losses[side].append(value.item())
        if side == "compiled":
            assert len(program._compiled.specializations) == PROGRAMS.get(name, 1)
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=1e-6)
    assert len({*losses["eager"]}) == 3
