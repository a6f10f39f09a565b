"""Inductor, torch's own compiler, given Foregrad's graphs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    inductor_option_type,
)
from ..errors import CompilerError, ConfigError, UnsupportedError, did_you_mean
from ..ops import Kind, aten, op_info
from ..options import Compilers
from ..record.fakify import Object
from ..runtime.compilers import through_fx
from ..slots import Saved, Size
from .backend import Backend, at_line_of, stays_in_place


def backend(mode: str | None, options: Mapping[str, Any] | None) -> Backend:
    """The backend "inductor", with the modes and options that `torch.compile` has for it."""
    settings: dict[str, Any] = {}
    if mode is not None and mode != "default":
        _require_known("mode", mode, inductor_modes())
        settings.update(inductor_mode_options(mode))
    for given, value in _items(options):
        name = str(given).replace("-", "_")
        _require_known("options", name, inductor_option_names())
        expected = inductor_option_type(name)
        if expected is not None and not isinstance(value, expected):
            raise ConfigError(f"Inductor's option {name!r} is a {expected.__name__}, and cannot be {value!r}.")
        settings[name] = value
    compilers = functools.partial(_compilers, settings)
    return Backend("inductor", compilers, _decompositions, "in a tensor", writes="to inputs", draws_in_order=False)


def _items(options: Mapping[str, Any] | None) -> Iterable[tuple[str, Any]]:
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"options is a dict of Inductor's settings, by their names, and not {options!r}.")
    return (options or {}).items()


def _decompositions() -> dict[Any, Callable[..., Any]]:
    return {**inductor_decompositions(), aten._foreach_add.Tensor: _add_one_by_one}


def _add_one_by_one(tensors: Sequence[Any], other: Any, alpha: Any = 1) -> list[Any]:
    """Counters of an optimizer that are counted on; Inductor fails for lists of values that it knows."""
    return [torch.add(tensor, other, alpha=alpha) for tensor in tensors]


def _require_known(what: str, name: object, known: Sequence[str]) -> None:
    if name not in known:
        choices = f" There are: {', '.join(known)}." if len(known) < 20 else ""
        raise ConfigError(f"Inductor has no {name!r} for {what}.{did_you_mean(str(name), known)}{choices}")


def _compilers(settings: Mapping[str, Any]) -> Compilers:
    """The compilers of one program."""
    program = InductorProgram(settings)

    def compiler(phase: str) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
        def compile_graph(graph: fx.GraphModule, examples: Sequence[Any]) -> Any:
            slots = graph.meta["slots"]
            fixed = [i for i, slot in enumerate(slots.inputs) if stays_in_place(slot)]
            visible = [i for i, slot in enumerate(slots.outputs) if not isinstance(slot, (Saved, Size))]
            # Objects among the arguments are inputs that no graph reads, and of no kind that Inductor knows.
            known = [0 if isinstance(example, Object) else example for example in examples]
            if phase == "inference":
                _refuse_crosswise_writes(graph)
                if program.freezes:
                    return FrozenGraph(program, graph, known, _never_written(graph, fixed), visible)
            return program.compile(graph, known, phase, fixed, visible)

        return compile_graph

    joint_pass = through_fx(program.joint_passes)  # which also says what it fuses
    return Compilers(compiler("forward"), compiler("backward"), compiler("inference"), joint_pass)


# ---------------------------------------------------------------------------------------------------------------------
# Freezing: parameters are constants, so that what follows from them alone is worked out once.
class FrozenGraph:
    """An inference graph, compiled for the parameters that it is first called with, and again for others.

    Torch compiles it once, whatever becomes of the parameters. Here each call compares them with those that it was
    compiled for: the objects, where they lie, and their versions. Inference tensors have no versions, and stay inputs.
    """

    _boxed_call = True

    def __init__(
        self,
        program: InductorProgram,
        graph: fx.GraphModule,
        examples: Sequence[Any],
        frozen: Sequence[int],
        visible: Sequence[int],
    ) -> None:
        self._program = program
        self._graph = graph
        self._examples = examples
        self._may_be_frozen = frozen
        self._visible = visible
        self._frozen: dict[int, torch.Tensor] = {}
        self._seen: dict[int, tuple[int, int, int]] | None = None
        self._run: Callable[[list[Any]], Any] | None = None

    def __call__(self, args: list[Any]) -> Any:
        frozen = {i: args[i] for i in self._may_be_frozen if not args[i].is_inference()}
        seen = {i: (id(t), t.data_ptr(), t._version) for i, t in frozen.items()}
        if self._run is None or seen != self._seen:
            self._compile(frozen)
            self._frozen, self._seen = frozen, seen
        assert self._run is not None
        rest = [arg for i, arg in enumerate(args) if i not in frozen]
        args.clear()
        return self._run(rest)

    def _compile(self, tensors: Mapping[int, torch.Tensor]) -> None:
        frozen = {i: tensor.detach() for i, tensor in tensors.items()}
        try:
            graph = copy.deepcopy(self._graph)
            self._run = self._program.compile_frozen(graph, self._examples, frozen, self._visible)
        except Exception as error:
            raise CompilerError(f"Inductor's freezing raised {type(error).__name__}: {error}") from error


def _never_written(graph: fx.GraphModule, fixed: Sequence[int]) -> list[int]:
    """Those of some inputs that a graph neither writes nor returns."""
    inputs = graph.graph.find_nodes(op="placeholder")
    return [i for i in fixed if not any(_writes_or_returns(user, inputs[i]) for user in inputs[i].users)]


def _writes_or_returns(user: fx.Node, node: fx.Node) -> bool:
    if not isinstance(user.target, OpOverload):
        return True
    written = [user.args[i] for i in op_info(user.target).written if i < len(user.args)]
    return node in written


# ---------------------------------------------------------------------------------------------------------------------
# Lists that are updated from each other. Where the results of an operator on lists are copied to inputs, Inductor lets
# it write there, and works its other arguments out while it runs: what follows pointwise from the old value of one
# item, and updates another, would follow from the new one. Torch's own layer gives the same wrong numbers.
def _refuse_crosswise_writes(graph: fx.GraphModule) -> None:
    """Refuse a graph in which an item of a list is updated by what follows pointwise from another one."""
    nodes = graph.graph.nodes
    updates = [node for node in nodes if _works_on_lists(node)]
    written = {node.args[0] for node in nodes if node.target is aten.copy_.default} if updates else set()
    follows: dict[fx.Node, set[fx.Node]] = {node: {node} for node in written}
    for node in nodes if written else ():
        if node not in written and _is_inlined(node):
            follows[node] = set().union(*(follows.get(item, ()) for item in node.all_input_nodes))
    for update in updates:
        if any(follows.get(other, set()) & targets for targets, other in _crosswise(update)):
            name = update.target._schema.name.removeprefix("aten::")
            raise UnsupportedError(
                f"{name} updates tensors of a list from each other{at_line_of(update)}, and Inductor gives wrong "
                "numbers for that. Update them one by one, or compile with backend='eager'."
            )


def _crosswise(update: fx.Node) -> Iterator[tuple[set[Any], fx.Node]]:
    """What is read for each item of a list, with the inputs that the results for the other items are copied to."""
    copies = [(item, user) for item in update.users for user in item.users if user.target is aten.copy_.default]
    copied = [(item.args[1], copy.args[0]) for item, copy in copies if copy.args[1] is item]
    for others in update.args[1:]:
        for i, other in enumerate(others if isinstance(others, (list, tuple)) else ()):
            if isinstance(other, fx.Node):
                yield {target for place, target in copied if place != i}, other


def _works_on_lists(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.name.startswith("aten::_foreach_")


def _is_inlined(node: fx.Node) -> bool:
    """Whether Inductor may work a value out where it is read."""
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"  # an item of a list
    is_view = op_info(node.target).kind is Kind.VIEW
    return is_view or torch.Tag.pointwise in node.target.tags or _works_on_lists(node)
