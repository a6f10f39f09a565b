"""What holds for every test: graphs are verified after each pass, and no test leaves torch's state changed."""

import logging
import random

import pytest
import torch

import foregrad

# Pytest listens to loggers that pass nothing on, and whoever listens to this one is shown every graph: the way without
# torch.fx, which users take, would not be tested.
logging.getLogger("torch.__trace").propagate = True


def _ambient():
    return {
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        "inference mode": torch.is_inference_mode_enabled(),
    }


@pytest.fixture(autouse=True)
def _verified():
    with foregrad.config.patch(verify=True):
        yield


@pytest.fixture(autouse=True)
def _undisturbed():
    before = _ambient()
    yield
    assert _ambient() == before


@pytest.fixture
def reads_refused():
    """Programs must not look at their data."""
    with foregrad.config.patch(reads="refused"):
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    random.seed(0)
