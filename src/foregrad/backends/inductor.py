"""Inductor, torch's own compiler, given Foregrad's graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import (
    InductorProgram,
    OpOverload,
    inductor_decompositions,
    inductor_mode_options,
    inductor_modes,
    inductor_option_names,
)
from ..errors import ConfigError, UnsupportedError, did_you_mean
from ..ops import Kind, aten, op_info
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
            if phase == "inference":
                _refuse_crosswise_writes(graph)
            return program.compile(graph, examples, phase, fixed, visible)

        return compile_graph

    return Compilers(compiler("forward"), compiler("backward"), compiler("inference"), program.joint_passes)


# ---------------------------------------------------------------------------------------------------------------------
# Lists that are updated from each other. Where the results of an operator on lists are copied to inputs, Inductor lets
# it write there, and works its other arguments out while it runs: what follows pointwise from the old value of one
# item, and updates another, would follow from the new one. Torch's own layer gives the same wrong numbers.
def _refuse_crosswise_writes(graph: fx.GraphModule) -> None:
    """Refuse a graph in which an item of a list is updated by what follows pointwise from another one."""
    updates = [node for node in graph.graph.nodes if _name_of(node).startswith("aten::_foreach_")]
    if not updates:
        return
    copied_to = {node.args[1]: node.args[0] for node in graph.graph.nodes if node.target is aten.copy_.default}
    follows: dict[fx.Node, frozenset[fx.Node]] = {node: frozenset([node]) for node in copied_to.values()}
    for node in graph.graph.nodes:
        if node not in follows and _is_inlined(node):
            follows[node] = frozenset().union(*(follows.get(item, ()) for item in node.all_input_nodes))
    for update in updates:
        written = {user.args[1]: copied_to[user] for user in update.users if user in copied_to}
        for others in update.args[1:]:
            for i, other in enumerate(others if isinstance(others, (list, tuple)) else ()):
                elsewhere = {target for place, target in written.items() if place != i}
                if isinstance(other, fx.Node) and not elsewhere.isdisjoint(follows.get(other, ())):
                    line = (update.meta.get("stack_trace") or "").strip().splitlines()
                    raise UnsupportedError(
                        f"{_name_of(update)[6:]} updates tensors of a list from each other"
                        f"{f', at {line[-1].strip()!r}' if line else ''}, and Inductor gives wrong numbers for that. "
                        "Update them one by one, or compile with backend='eager'."
                    )


def _name_of(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""


def _is_inlined(node: fx.Node) -> bool:
    """Whether Inductor may work a value out where it is read."""
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"  # an item of a list
    is_view = op_info(node.target).kind is Kind.VIEW
    return is_view or torch.Tag.pointwise in node.target.tags or _name_of(node).startswith("aten::_foreach_")
