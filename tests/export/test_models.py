"""Training steps of whole models: saved, loaded in a fresh process, and compared with eager."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch.export import Dim

import foregrad.export
import hugging_face
from export.models import AVAILABLE, MODELS, build

LOAD = """
import sys, torch, foregrad.export
folder = sys.argv[1]
for name in sys.argv[2:]:
    exported = foregrad.export.load(f"{folder}/{name}.pt2")
    args = torch.load(f"{folder}/{name}_args.pt")
    result, gradients = exported(*args)
    torch.save([result, gradients, exported.state], f"{folder}/{name}_mine.pt")
    program = torch.export.load(f"{folder}/{name}.pt2")
    result, gradients = program.module()(*args)
    torch.save([result.detach(), {k: v.detach() for k, v in gradients.items()}], f"{folder}/{name}_theirs.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every model's training step, saved here, and run in a fresh process."""
    folder = tmp_path_factory.mktemp("models")
    for name in AVAILABLE:
        model, args = build(name)
        foregrad.export.export(model, args, loss=0).save(folder / f"{name}.pt2")
        torch.save(args, folder / f"{name}_args.pt")
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(foregrad.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", LOAD, str(folder), *AVAILABLE], check=True, env=environment, timeout=400)
    return folder


def close(a, b):
    return bool((a - b).norm() <= 1e-6 * b.norm() + 1e-15)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_after_save_and_load_in_a_fresh_process(name, folder):
    """X-4, X-1"""
    model, args = build(name)
    mine, gradients, state = torch.load(folder / f"{name}_mine.pt")
    theirs, their_gradients = torch.load(folder / f"{name}_theirs.pt")
    loss = model(*args)
    loss.backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert close(mine, loss.detach()) and close(theirs, loss.detach())
    assert gradients.keys() == wanted.keys() == their_gradients.keys()
    for key, gradient in wanted.items():
        assert close(gradients[key], gradient), key
        assert close(their_gradients[key], gradient), key
    for key, buffer in model.named_buffers():
        assert close(state[key].double(), buffer.detach().double()), key


@pytest.mark.skipif(not hugging_face.INSTALLED, reason="transformers is not installed")
@pytest.mark.parametrize("name", hugging_face.NAMES)
def test_dropout_draws_as_in_eager(name):
    """X-4, R-3"""
    model, args = build(name, dropout=True)
    exported = foregrad.export.export(model, args, loss=0)
    torch.manual_seed(7)
    loss = model(*args)
    loss.backward()
    torch.manual_seed(7)
    found, gradients = exported(*args)
    assert close(found, loss.detach())
    for key, parameter in model.named_parameters():
        assert parameter.grad is None or close(gradients[key], parameter.grad), key


@pytest.mark.skipif(not hugging_face.INSTALLED, reason="transformers is not installed")
@pytest.mark.parametrize("name", ["bert", "hf_gpt2"])
def test_batches_of_other_sizes(name, tmp_path):
    """X-4, F-11"""
    model, args = build(name)
    batch = Dim("batch", min=2, max=64)
    foregrad.export.export(model, args, loss=0, dynamic_shapes={"args": tuple({0: batch} for _ in args)}).save(
        tmp_path / "step.pt2"
    )
    args = tuple(torch.cat([t, t.flip(0), t]) for t in args)
    found, gradients = foregrad.export.load(tmp_path / "step.pt2")(*args)
    loss = model(*args)
    loss.backward()
    assert close(found, loss.detach())
    for key, parameter in model.named_parameters():
        assert parameter.grad is None or close(gradients[key], parameter.grad), key


def test_ties_survive_files(tmp_path):
    """X-1"""
    model, args = build("gpt")
    exported = foregrad.export.export(model, args, loss=0)
    exported.save(tmp_path / "step.pt2")
    again = foregrad.export.load(tmp_path / "step.pt2")
    assert again.signature.ties == exported.signature.ties == {"head.weight": "tokens.weight"}
    assert again.state["head.weight"] is again.state["tokens.weight"]
    assert again.signature == exported.signature


def test_the_example_trains_as_eager():
    """X-4"""
    example = pathlib.Path(__file__).parents[2] / "examples" / "train_exported.py"
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(foregrad.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(example)], check=True, env=environment, timeout=200, capture_output=True, text=True
    )
    assert "gradient of parameter layers.0.weight" in done.stdout and "largest difference over 30 steps" in done.stdout
