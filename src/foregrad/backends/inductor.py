"""Inductor, torch's own compiler, given Foregrad's graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from .._torch import (
    InductorProgram,
    inductor_decompositions,
    inductor_mode_options,
    inductor_modes,
    inductor_option_names,
)
from ..errors import ConfigError, did_you_mean
from ..options import Compilers
from ..slots import Saved, Size
from .backend import Backend, stays_in_place


def backend(mode: str | None, options: Mapping[str, Any] | None) -> Backend:
    """The backend "inductor", with the modes and options that `torch.compile` has for it."""
    settings: dict[str, Any] = {}
    if mode is not None and mode != "default":
        _require_known("mode", mode, inductor_modes())
        settings.update(inductor_mode_options(mode))
    for name, value in (options or {}).items():
        _require_known("options", name.replace("-", "_"), inductor_option_names())
        settings[name.replace("-", "_")] = value
    compilers = functools.partial(_compilers, settings)
    return Backend("inductor", compilers, inductor_decompositions, writes="to inputs", draws_in_order=False)


def _require_known(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        choices = f" There are: {', '.join(known)}." if len(known) < 20 else ""
        raise ConfigError(f"Inductor has no {name!r} for {what}.{did_you_mean(name, known)}{choices}")


def _compilers(settings: Mapping[str, Any]) -> Compilers:
    """The compilers of one program."""
    program = InductorProgram(settings)

    def compiler(phase: str) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
        def compile_graph(graph: fx.GraphModule, examples: Sequence[Any]) -> Any:
            slots = graph.meta["slots"]
            fixed = [i for i, slot in enumerate(slots.inputs) if stays_in_place(slot)]
            visible = [i for i, slot in enumerate(slots.outputs) if not isinstance(slot, (Saved, Size))]
            return program.compile(graph, examples, phase, fixed, visible)

        return compile_graph

    return Compilers(compiler("forward"), compiler("backward"), compiler("inference"), program.joint_passes)
