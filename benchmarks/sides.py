"""The two libraries that are compared.

They share their public names, so every benchmark is written once and is given a side to run on. The subject
can be set to another module with those names, which shows how much two equal sides differ on a noisy
machine: `FOREGRAD_BENCH_SUBJECT=torch._functorch.aot_autograd python -m benchmarks`.
"""

from __future__ import annotations

import importlib
import os
import platform
from dataclasses import dataclass
from typing import Any, Literal

import torch

SideName = Literal["torch", "foregrad"]


@dataclass(frozen=True)
class Side:
    """A module with the public names of AOTAutograd."""

    name: SideName
    module: str

    def load(self) -> Any:
        return importlib.import_module(self.module)


PEER = Side("torch", "torch._functorch.aot_autograd")
SUBJECT = Side("foregrad", os.environ.get("FOREGRAD_BENCH_SUBJECT", "foregrad"))
SIDES: dict[str, Side] = {side.name: side for side in (PEER, SUBJECT)}


def setting() -> str:
    """One line that says what was compared, and on what."""
    module = SUBJECT.load()
    version = getattr(module, "__version__", None)
    subject = f"{SUBJECT.module} {version}" if version else SUBJECT.module
    return (
        f"{subject} against {PEER.module} of torch {torch.__version__}; "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores, one thread."
    )
