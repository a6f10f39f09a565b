"""Recorded tensors have no data: whoever asks for it gets an error, and no pointer."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import foregrad
from foregrad._torch import NO_DATA
from foregrad.abstract.lean_engine import LeanEngine
from foregrad.errors import DataDependentError
from foregrad.slots import Input
from helpers import leaf, nop, plain

READERS = Path(__file__).parent.parent / "readers.py"


def crashing(kind, *engines):
    environment = {**os.environ, "PYTHONPATH": str(Path(foregrad.__file__).parent.parent)}
    command = [sys.executable, READERS, kind, *engines]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert not done.returncode, done.stderr
    return done.stdout.split("\n")[:-1]


def test_nothing_that_reads_memory_ends_the_process():
    """In all ways that a program may call it: with function modes and the dispatch to Python on and off."""
    assert crashing("typical", "lean", "symbols", "inference") == []


@pytest.mark.sweep
@pytest.mark.parametrize("engine", ["lean", "symbols", "inference"])
@pytest.mark.parametrize("kind", ["methods", "functions", "operators"])
def test_nothing_of_torch_ends_the_process(kind, engine):
    assert crashing(kind, engine) == []


def abstract(of=None):
    return LeanEngine(torch._subclasses.FakeTensorMode()).fake(plain(4) if of is None else of, Input("x"), False)


@pytest.mark.parametrize(
    "tensor",
    [
        lambda: abstract(),
        lambda: abstract(plain(8)[4:]),
        lambda: abstract()[1:],
        lambda: abstract().view(torch.int32),
        lambda: abstract().clone().resize_(100),
        lambda: abstract().detach().set_(abstract()),
        lambda: abstract() * 2,
    ],
    ids=["an input", "with an offset", "a view", "of another dtype", "resized", "moved", "a result"],
)
def test_the_storage_itself_refuses(tensor):
    with pytest.raises(RuntimeError, match=NO_DATA), torch._C._DisableTorchDispatch():
        tensor().sum()
    with pytest.raises(RuntimeError, match=NO_DATA):
        tensor().untyped_storage()[0]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "read", [str, repr, format, lambda x: f"{x.sum():.2f}"], ids=["str", "repr", "format", "with digits"]
)
def test_the_text_of_a_tensor_is_its_data(read, dynamic):
    def program(x):
        read(x)
        return x * 2

    with pytest.raises(DataDependentError, match=r"the text of a recorded tensor, at .*test_no_data"):
        foregrad.aot_function(program, nop, dynamic=dynamic)(leaf(3))


def test_printing_a_tensor_is_refused(capsys):
    with pytest.raises(DataDependentError, match=r"at .*test_no_data.*print"):
        foregrad.aot_function(lambda x: (print(x), x * 2)[1], nop)(leaf(3))
    assert capsys.readouterr().out == ""


def test_the_text_of_a_parameter_is_data_as_well():
    weight = leaf(3)
    with pytest.raises(DataDependentError, match="text"):
        foregrad.aot_function(lambda x: (str(weight), x * weight)[1], nop)(plain(3))


def test_the_line_is_named_where_torch_itself_refuses():
    with pytest.raises(DataDependentError, match=r"data of a recorded tensor is asked for, at .*test_no_data.*apply_"):
        foregrad.aot_function(lambda x: x.clone().apply_(abs), nop)(plain(3))


def forgiving(x):
    try:
        return x * x.sum().item()
    except Exception:
        return x * 2


@pytest.mark.usefixtures("reads_refused")
@pytest.mark.parametrize("program", [forgiving, lambda x: x * struct.unpack("f", struct.pack("f", x.sum()))[0]])
def test_a_refusal_that_is_caught_is_a_refusal(program):
    """A handler of the program's, or C code that raises another error, would lead to what eager does not do."""
    with pytest.raises(DataDependentError):
        foregrad.aot_function(program, nop)(plain(3))


def test_a_refusal_that_is_caught_in_backward_is_a_refusal():
    class Forgiving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return forgiving(gradient)

    with pytest.raises(DataDependentError):
        foregrad.aot_function(Forgiving.apply, nop)(leaf(3))


def test_the_methods_of_storages_are_torchs_own_afterwards():
    before = torch.UntypedStorage.is_shared
    foregrad.aot_function(lambda x: x * 2, nop)(plain(3))
    assert torch.UntypedStorage.is_shared is before and not plain(3).is_shared()
