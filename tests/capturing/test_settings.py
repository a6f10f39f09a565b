"""Settings of the process: a program that sets one, and one that reads it."""

import decimal
import os
import sys
import warnings

import numpy as np
import pytest
import torch

import foregrad
from helpers import nop, plain


def assigns_stdout():
    sys.stdout = sys.stderr


def assigns_benchmark():
    torch.backends.cudnn.benchmark = True


def sets_precision():
    decimal.getcontext().prec = 5


def sets_variable():
    os.environ["OF_A_TEST"] = "1"


# What sets it, what reads it, what puts it back.
SETTINGS = {
    "filters of warnings": (
        lambda: warnings.simplefilter("error", BytesWarning),
        lambda: any(one[2] is BytesWarning for one in warnings.filters),
        warnings.resetwarnings,
    ),
    "standard output": (
        assigns_stdout,
        lambda: sys.stdout is sys.stderr,
        lambda: setattr(sys, "stdout", sys.__stdout__),
    ),
    "recursion": (lambda: sys.setrecursionlimit(2345), sys.getrecursionlimit, lambda: sys.setrecursionlimit(1234)),
    "decimals": (sets_precision, lambda: decimal.getcontext().prec, lambda: setattr(decimal.getcontext(), "prec", 28)),
    "directory": (lambda: os.chdir("/"), lambda: len(os.getcwd()), lambda: os.chdir("/tmp")),
    "environment": (sets_variable, lambda: os.environ.get("OF_A_TEST"), lambda: os.environ.pop("OF_A_TEST", None)),
    "errors of numpy": (
        lambda: np.seterr(over="ignore"),
        lambda: np.geterr()["over"] == "ignore",
        lambda: np.seterr(over="warn"),
    ),
    "anomaly mode": (
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
        torch.is_anomaly_enabled,
        lambda: torch.autograd.set_detect_anomaly(False),
    ),
    "cudnn": (
        assigns_benchmark,
        lambda: torch.backends.cudnn.benchmark,
        lambda: setattr(torch.backends.cudnn, "benchmark", False),
    ),
    "attention": (
        lambda: torch.backends.cuda.enable_math_sdp(False),
        torch.backends.cuda.math_sdp_enabled,
        lambda: torch.backends.cuda.enable_math_sdp(True),
    ),
    "attention in evaluation": (
        lambda: torch.backends.mha.set_fastpath_enabled(False),
        torch.backends.mha.get_fastpath_enabled,
        lambda: torch.backends.mha.set_fastpath_enabled(True),
    ),
    "conversion of parameters": (
        lambda: torch.__future__.set_overwrite_module_params_on_conversion(True),
        torch.__future__.get_overwrite_module_params_on_conversion,
        lambda: torch.__future__.set_overwrite_module_params_on_conversion(False),
    ),
    "autocast": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu") is torch.float16,
        lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
    ),
}


@pytest.fixture(autouse=True)
def everything_is_put_back(monkeypatch, request):
    monkeypatch.chdir("/tmp")
    limit, output = sys.getrecursionlimit(), sys.stdout
    reset = SETTINGS[request.node.callspec.params["name"]][2] if "name" in request.fixturenames else int
    with warnings.catch_warnings(), decimal.localcontext():
        yield
        reset()
    sys.setrecursionlimit(limit)
    sys.stdout = output


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_a_program_sets(name):
    """M-1: each call sets it, or the program is refused and has changed nothing."""
    sets, reads, reset = SETTINGS[name]

    def program(x):
        sets()
        return x * 2

    compiled = foregrad.aot_function(program, nop)
    for _ in range(3):
        reset()
        before = reads()
        try:
            compiled(plain(2))
        except foregrad.errors.StateChangeError:
            assert reads() == before
        else:
            assert reads() != before


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "filters of warnings"])
def test_a_setting_that_a_program_reads(name):
    """F-3: another value is another program."""
    sets, reads, reset = SETTINGS[name]
    reset()
    before = reads()

    def program(x):
        return x * (2 if reads() == before else 3)

    compiled = foregrad.aot_function(program, nop)
    x = plain(2)
    for _ in range(2):
        assert torch.equal(compiled(x), x * 2)
        sets()
        assert torch.equal(compiled(x), x * 3)
        reset()


def test_hooks_of_all_modules_that_a_program_registers():
    """M-1: hooks that only a recording registers would stay there."""

    def program(x):
        torch.nn.modules.module.register_module_forward_hook(print)
        return x * 2

    hooks = torch.nn.modules.module._global_forward_hooks
    with pytest.raises(foregrad.errors.StateChangeError, match="hooks of all modules"):
        foregrad.aot_function(program, nop)(plain(2))
    assert not hooks
