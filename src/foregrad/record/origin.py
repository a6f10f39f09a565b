"""Where an operator comes from, besides its line: which modules were being called, and what the program says about it.

Only references are kept while recording; names of modules are found when a graph is shown.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.fx.traceback as fx_traceback
from torch import nn

from .lines import Stack


class Called:
    """A module that is being called, by another one perhaps."""

    __slots__ = ("_class", "_stack", "module", "outer", "path")

    def __init__(self, outer: Called | None, module: nn.Module, path: str | None) -> None:
        self.outer = outer
        self.module = weakref.ref(module)
        self._class = type(module).__module__, type(module).__qualname__  # which may be its own, and go with it
        self.path = path  # in the outermost module, once somebody has asked
        self._stack: dict[str, tuple[str, str]] | None = None

    def stack(self) -> dict[str, tuple[str, str]]:
        """Paths and classes of the modules that are being called, outermost first."""
        if self._stack is None:
            path = self.find_path()
            before = {} if self.outer is None else self.outer.stack()
            self._stack = {**before, path: (path, ".".join(self._class))}
        return dict(self._stack)

    def find_path(self) -> str:
        """Its name in the outermost module; one that is not found in the module that calls it goes by its class."""
        if self.path is None:
            outer, module = None if self.outer is None else self.outer.module(), self.module()
            names = [] if outer is None or module is None else [n for n, m in outer.named_modules() if m is module]
            before = self.outer.find_path() if self.outer is not None and names else ""
            self.path = ".".join(filter(None, (before, *names[:1]))) if names else self._class[1].rpartition(".")[2]
        return self.path


class ModuleCalls:
    """The modules that are being called, innermost first."""

    def __init__(self) -> None:
        self.innermost: Called | None = None
        self.root: nn.Module | None = None  # the program, if it is one

    def enter(self, module: nn.Module) -> Called | None:
        """A module is called; gives what was innermost before."""
        before = self.innermost
        self.innermost = Called(before, module, "" if module is self.root else None)
        return before


Said = Mapping[str, Any]  # what `torch.fx.traceback` knows of an operator: annotations, and fields of a graph's node
# Of an operator: autograd's number of its node; in backward, of the node that runs and its name; modules; what is said.
Origin = tuple[int, str | None, Called | None, Said | None]


def said_now() -> Said | None:
    """What the program says about the operators that it calls now."""
    meta = fx_traceback.current_meta
    if not meta:
        return None
    return {**meta, "custom": dict(meta["custom"])} if "custom" in meta else meta


class Known(NamedTuple):
    """What is remembered of an operator of the forward, for its backward."""

    stack: Stack = ()
    modules: Called | None = None
    said: Said | None = None


_NOTHING = Known()
_NO_NUMBER = 1 << 62  # nodes that add to gradients are numbered from the end


class KnownOrigins:
    """Operators of the forward, by autograd's number of the node that was made last when they ran."""

    def __init__(self) -> None:
        self._by_number: dict[int, Known] = {}
        self._numbers: list[int] = []

    def add(self, number: int, stack: Stack, modules: Called | None, said: Said | None) -> None:
        if number not in self._by_number:
            self._by_number[number] = Known(stack, modules, said)
            self._numbers.append(number)

    def find(self, number: int) -> Known:
        """The operator that a node belongs to; some nodes are made behind it, as that of a write to a view."""
        known = self._by_number.get(number)
        if known is None and number < _NO_NUMBER:
            before = bisect_right(self._numbers, number)
            known = self._by_number[self._numbers[before - 1]] if before else None
        return known or _NOTHING
