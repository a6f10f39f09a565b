"""What is loaded before a program runs: nothing that it does not use."""

import subprocess
import sys

import pytest

HEAVY = ("sympy", "networkx", "torch.export", "torch._dynamo", "torch._inductor", "foregrad.export", "foregrad.testing")

MLP = "nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(2, 8)"


def loaded_by(*lines: str) -> set[str]:
    """The modules that a fresh process loads for the lines, beyond those of torch."""
    before = "import sys, torch; from torch import nn; before = set(sys.modules)"
    code = "; ".join((before, *lines, "print(*set(sys.modules) - before)"))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_loads_none_of_the_heavy_parts():
    loaded = loaded_by("import foregrad")
    assert "foregrad.api" in loaded and loaded.isdisjoint(HEAVY)
    assert len([name for name in loaded if name.startswith("torch.")]) < 10


@pytest.mark.parametrize(
    "line",
    [
        f"foregrad.capture({MLP})",
        "foregrad.aot_module(net, lambda graph, inputs: graph)(x).sum().backward()",
        "foregrad.aot_module(net, foregrad.backends.run_graph)(x).sum().backward()",
    ],
)
def test_a_first_capture_loads_none_of_the_heavy_parts(line):
    loaded = loaded_by("import foregrad", f"net, x = {MLP}", "before = set(sys.modules)", line)
    assert loaded.isdisjoint(HEAVY) and len(loaded) < 10


def test_symbolic_sizes_load_what_they_need():
    """Otherwise the tests above could not fail."""
    line = "foregrad.aot_module(net, lambda graph, inputs: graph, dynamic=True)(x)"
    loaded = loaded_by("import foregrad", f"net, x = {MLP}", line)
    assert "sympy" in loaded


def test_names_are_loaded_when_they_are_asked_for():
    loaded = loaded_by("import foregrad", "foregrad.check, foregrad.export.save")
    assert {"foregrad.testing", "foregrad.export"} <= loaded
    loaded = loaded_by("from foregrad import *", "check, aot_export_module")
    assert {"foregrad.testing", "foregrad.export"} <= loaded


def test_a_name_that_is_not_there():
    import foregrad

    with pytest.raises(AttributeError, match="module 'foregrad' has no attribute 'aot_modul'"):
        foregrad.aot_modul
    assert set(foregrad.__all__) <= set(dir(foregrad))


def test_a_mode_made_without_dynamo_is_like_any_other():
    """All but its cache, which a recording never uses."""
    code = (
        "import foregrad; from foregrad._torch import FakeTensorMode, fake; ours = vars(fake._static_mode())",
        "assert 'torch._dynamo' not in sys.modules; theirs = vars(FakeTensorMode())",
        "differ = {name for name in {*ours, *theirs} if ours.get(name, name) != theirs.get(name, name)}",
        "assert differ == {'_stack_trace', 'fake_tensor_converter', 'cache_enabled'}, differ",
    )
    assert "torch._dynamo" in loaded_by(*code)
