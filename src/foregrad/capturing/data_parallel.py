"""DistributedDataParallel around a compiled module."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..options import AOTConfig
from .compiled import Compiled, Recompile, Specialization
from .forward import Forward


@dataclass(frozen=True)
class CompiledInside:
    """A DistributedDataParallel module with the module in it compiled.

    It runs as it was written: what it does before and after the module in it happens in C++, and gradients are averaged
    by hooks on the parameters, which the compiled backward reaches as eager's does.
    """

    original: nn.Module
    compiled: Compiled
    module: nn.Module  # compiled, which it finds in the place of its own module

    @property
    def config(self) -> AOTConfig:
        """How the module in it is compiled."""
        return self.compiled.config

    @property
    def specializations(self) -> list[Specialization]:
        """The programs of the module in it."""
        return self.compiled.specializations

    @property
    def recompiles(self) -> list[Recompile]:
        """Why they were compiled."""
        return self.compiled.recompiles

    @property
    def forward(self) -> Forward:
        """Its own forward."""
        return Forward(self.original, None)
