"""DistributedDataParallel around a compiled module."""

from __future__ import annotations

from typing import Any

from torch import nn

from .compiled import Compiled, Specialization


class DataParallelCall:
    """Calls a DistributedDataParallel module, with the module in it compiled.

    It runs as it was written: what it does before and after the module in it happens in C++, and gradients are averaged
    by hooks on the parameters, which the compiled backward reaches as eager's does.
    """

    def __init__(self, module: nn.parallel.DistributedDataParallel, inner: Compiled, called: nn.Module) -> None:
        """`called` is what it is to find in the place of its own module: `inner`, as a module."""
        self._inner = inner
        kind = type(module)
        twin = type(kind.__name__, (kind,), {"module": property(lambda self: called)})
        self._twin: Any = object.__new__(twin)
        object.__setattr__(self._twin, "__dict__", vars(module))  # one state for both: `no_sync()` holds for this one

    @property
    def specializations(self) -> list[Specialization]:
        """The programs of the module in it."""
        return self._inner.specializations

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._twin(*args, **kwargs)
