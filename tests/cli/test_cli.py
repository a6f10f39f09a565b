"""`foregrad explain` and `foregrad doctor`, called as a user calls them: what is printed, and the exit code."""

import io
import os
import pathlib
import subprocess
import sys

import pytest

import foregrad
from foregrad._torch import missing_names, names, private_names
from foregrad.cli import doctor
from foregrad.cli.main import main

SOURCE = pathlib.Path(foregrad.__file__).parent.parent

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, tokens, scale=1.0):
        return self.head(self.norm(self.table(tokens).mean(1))) * scale


class Gated(Net):
    def forward(self, tokens):
        x = self.table(tokens).mean(1)
        if x.sum() > 0:
            x = -x
        return self.head(x)


class Needs(nn.Module):
    def __init__(self, width):
        super().__init__()


net = Net()


def loss(x, w):
    return (x @ w).relu().mean()


def make(depth=2):
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)])


def small():
    return (torch.randn(4, 8),)


def large():
    return {"input": torch.randn(16, 8)}


def both():
    return (torch.randn(4, 8),), {}


def one():
    return torch.randn(4, 8)


def broken():
    raise KeyError("no such batch")


number = 3
"""

ONCE = """
from torch import nn


class Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.state = 0

    def forward(self, x):
        if self.state == 0:
            self.state = 1
        return x * 2
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "explained.py").write_text(NET)
    (tmp_path / "bad.py").write_text("import torch\nx = torch.ones(2) +\n")
    (tmp_path / "raises.py").write_text("value = {}['missing']\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("explained", "bad", "raises", "leaves"):
        sys.modules.pop(name, None)
    from foregrad.cli.targets import module_at

    module_at.cache_clear()


def run(capsys, *arguments):
    code = main(["explain", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize("name", ["Net", "net"])
def test_a_module_that_compiles(folder, capsys, name):
    code, out, err = run(capsys, f"explained.py:{name}", "--shape", "tokens=4x3:int64")
    assert code == 0 and "compiles: a training program" in out
    assert "kwargs['tokens']: int64[4, 3]" in out and "parameters   5, " in out
    assert "writes to    buffer norm.running_mean" in out
    assert "default_partition" in out and "saved for backward" in out and "explained.py:12 in forward" in out
    assert f"recording explained.py:{name} ..." in err and "Traceback" not in out + err


@pytest.mark.usefixtures("reads_refused")
def test_a_module_that_is_refused(folder, capsys):
    code, out, _ = run(capsys, "explained.py:Gated", "--shape", "tokens=4x3:int64")
    assert code == 1 and "explained.py:Gated does not compile." in out
    assert "DataDependentError: bool() of a recorded tensor" in out and "fallback='eager'" in " ".join(out.split())
    assert ">   18          if x.sum() > 0:" in out and "in Gated" in out and "Traceback" not in out


def test_a_program_that_fails_in_eager(folder, capsys):
    code, out, _ = run(capsys, "explained.py:loss", "--shape", "x=2x3", "--shape", "w=2x3")
    assert code == 1 and "fails, as it does in eager" in out and "RuntimeError: " in out
    assert "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)" in " ".join(out.split())
    assert ">   32      return (x @ w).relu().mean()" in out


def test_a_function_is_differentiated_with_respect_to_its_arguments(folder, capsys):
    code, out, _ = run(capsys, "explained.py:loss", "--shape", "x=2x3", "--shape", "w=3x2:float64")
    assert code == 1 and "same dtype" in out
    code, out, _ = run(capsys, "explained.py:loss", "--shape", "x=2x3", "--shape", "w=3x2", "--budget", "0.5")
    assert code == 0 and "kwargs['w']: float32[3, 2], requires grad" in out and "memory_budget=0.5" in out


def test_a_factory_and_several_calls(folder, capsys):
    inputs = ["--inputs", "explained.py:small", "--inputs", "explained.py:both", "--inputs", "explained.py:large"]
    code, out, _ = run(capsys, "explained.py:make", *inputs)
    assert code == 0 and "4, 576 bytes: 0.weight" in out
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith("  call ")}
    assert "number 1" in rows["1"] and "known" in rows["2"] and "number 2" in rows["3"]
    assert "the first program" in rows["1"] and "len(args) was 1, is 0" in rows["3"]
    code, out, _ = run(capsys, "explained.py:make", "--shape", "input=4x8", "--shape", "input=5x8")
    assert code == 0 and "kwargs['input']: size of dimension 0 was 4, is 5" in out
    assert run(capsys, "explained.py:make", "--inputs", "explained.py:one")[0] == 0


def test_what_a_program_reads_is_told(folder, capsys):
    code, out, _ = run(capsys, "explained.py:Gated", "--shape", "tokens=4x3:int64", "--shape", "tokens=4x3:int64")
    assert code == 0 and "data that it reads, and each call compares" in out
    [row] = [line for line in out.splitlines() if "if x.sum() > 0:" in line]
    assert "explained.py:18: " in row and ("bool(): True" in row or "bool(): False" in row)


def test_a_call_that_runs_as_it_is_written_is_no_program(folder, capsys):
    (folder / "explained.py").write_text(ONCE)
    code, out, _ = run(capsys, "explained.py:Once", "--shape", "x=2", "--shape", "x=2", "--shape", "x=2")
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith("  call ")}
    assert code == 0 and "after a call as it is written, since that changes something once" in out
    assert "as written" in rows["1"] and "the first program" in rows["2"] and "known" in rows["3"]


def test_with_rich(folder):
    """Titles, a table that is no wider than the terminal, and the line that is meant."""
    pytest.importorskip("rich")
    from foregrad.cli.parts import Excerpt, Table, Text, Verdict
    from foregrad.cli.with_rich import show_with_rich

    row = ("saved", "a" * 60 + " " + "b" * 60)
    parts = [
        Verdict("it does not compile.", good=False),
        Text(("[red]is no markup",)),
        Table("memory", ("", "what"), (row,), remarks=("that is all",)),
        Excerpt("model.py", ((7, "if x.sum() > 0:"), (8, "    x = -x")), 7),
    ]
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.setenv("NO_COLOR", "1")
        show_with_rich(parts, stream)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[:5] == ["it does not compile.", "", "[red]is no markup", "", "memory"]
    assert all(len(line) <= 80 for line in lines) and "  that is all" in lines and "model.py:7" in lines
    assert any(line.startswith("❱ 7") and "if x.sum() > 0:" in line for line in lines)


def test_a_name_in_a_module(folder, capsys):
    code, out, _ = run(capsys, "torch:sin", "--shape", "x=3")
    assert code == 0 and "a training program of 3 operators" in out
    code, out, _ = run(capsys, "explained:net.head", "--shape", "input=2x8")
    assert code == 0 and "weight, bias" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["explained.py"], "explained.py: expected FILE:NAME or MODULE:NAME"),
        (["nothing.py:Net"], "there is no file nothing.py"),
        (["no_such_module:Net"], "no_such_module cannot be imported: ModuleNotFoundError"),
        (["bad.py:Net"], "bad.py cannot be imported: SyntaxError: invalid syntax"),
        (["raises.py:Net"], "raises.py cannot be imported: KeyError: 'missing', at "),
        (["leaves.py:Net"], "leaves.py cannot be imported: SystemExit: 3"),
        (["explained.py:Nett"], "explained.py has no Nett. Is it Net?"),
        (["explained.py:number"], "explained.py:number is a int: expected a function, a module"),
        (["explained.py:Needs"], "Needs() raises: TypeError"),
        (["explained.py:broken"], "explained.py:broken() raises: KeyError: 'no such batch', at "),
        (["explained.py:Net"], "takes (tokens, scale=1.0): missing a required argument: 'tokens'"),
        (["explained.py:Net", "--inputs", "explained.py:broken"], "explained.py:broken() raises: KeyError"),
        (["explained.py:Net", "--inputs", "explained.py:large"], "the inputs do not fit the program, which takes"),
        (["explained.py:Net", "--shape", "2x128"], "--shape 2x128: expected NAME=SIZES or NAME=SIZES:DTYPE"),
        (["explained.py:Net", "--shape", "tokens=2x"], "--shape tokens=2x: expected NAME=SIZES"),
        (["explained.py:Net", "--shape", "tokens=2:flota32"], "there is no dtype flota32. Is it float32?"),
        (["explained.py:Net", "--shape", "token=2"], "has no such argument. Is it tokens?"),
        (["explained.py:Net", "--shape", "tokens=2", "--inputs", "explained.py:small"], "give one of them"),
        (["explained.py:loss", "--shape", "x=2x3", "--shape", "w=3x2", "--budget", "7"], "budget"),
    ],
)
def test_what_cannot_be_used(folder, capsys, arguments, text):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and text in err and out == "" and "Traceback" not in err


def test_options_that_are_not_there(capsys):
    with pytest.raises(SystemExit) as left:
        main(["explain"])
    assert left.value.code == 2 and "FILE_OR_MODULE:NAME" in capsys.readouterr().err


def test_it_is_run_as_a_module(folder):
    command = [sys.executable, "-m", "foregrad", "explain", "explained.py:loss", "--shape", "x=2x3"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2 and "missing a required argument: 'w'" in done.stderr and "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------------- doctor
def test_the_doctor_finds_what_is_there(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "Foregrad can work here." in out and f"{len(private_names())} of {len(private_names())} are there" in out
    assert all(word in out for word in ("torch", "Python", "C++ compiler", "Triton", "CUDA"))


def test_the_doctor_names_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(names, "private_names", lambda: ("torch._C._gone", "torch._gone.name", "torch._C"))
    assert missing_names() == ["torch._C._gone", "torch._gone.name"]
    monkeypatch.setattr(doctor, "missing_names", missing_names)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "missing: torch._C._gone, torch._gone.name" in out and "cannot work here: private names of torch" in out


def test_the_names_are_those_of_the_seam():
    assert {"torch._C._autograd._get_sequence_nr", "torch._subclasses.fake_tensor.FakeTensorMode"} <= {*private_names()}
    assert not missing_names()


def test_a_torch_that_lacks_a_name_is_named_when_the_package_is_imported():
    code = "import torch; del torch._C._len_torch_dispatch_stack; import foregrad"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "ImportError: Foregrad works with torch 2.11 to 2.15" in done.stderr
    assert "does not have torch._C._len_torch_dispatch_stack" in done.stderr
