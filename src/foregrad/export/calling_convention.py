"""How an exported program is called and what it returns: trees, places, names."""

from __future__ import annotations

import builtins
import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from .._torch import pytree
from ..capturing.capture import Capture
from ..codegen.pytree import unflatten
from ..graph.graph import GraphOutput, Node
from ..slots import Buffer, Grad, Input, Output, Param, Slot, Token, Updated, outermost
from ..subclasses.layout import Layout, Wrapped
from .signature import BackwardSignature, GraphSignature
from .subclasses import Named, Wrappers, in_parts, path_of


# ---------------------------------------------------------------------------------------------------------------------
# How an exported program is called and what it returns, as trees.
@dataclass(frozen=True)
class Structure:
    """The trees of a program's arguments and of its result."""

    in_spec: Any  # of ((*parameters, *buffers, *args), kwargs)
    out_spec: Any


def structure_of(capture: Capture) -> Structure:
    """The trees of a program's arguments, its state in front of them, and of its result."""
    arguments, results = _layouts(capture)
    args, kwargs = unflatten(capture.arguments.tree, [in_parts(layout, repeat(0)) for layout in arguments])
    result = unflatten(capture.result.tree, [in_parts(layout, repeat(0)) for layout in results])
    state = sum(1 if layout is None else layout.leaves for layout in _state_layouts(capture))
    in_spec = pytree.tree_structure(((*[0] * state, *args), kwargs))
    return Structure(in_spec, pytree.tree_structure(result))


def wrappers_of(capture: Capture) -> Wrappers | None:
    """How arguments and results are put together, if any of them is a wrapper subclass."""
    arguments, results = _layouts(capture)
    if not any((*arguments, *results)):
        return None
    call = unflatten(capture.arguments.tree, [0] * len(arguments))
    result = unflatten(capture.result.tree, [0] * len(results))
    return Wrappers(arguments, results, pytree.tree_structure(call), pytree.tree_structure(result))


def _layouts(capture: Capture) -> tuple[tuple[Layout | None, ...], tuple[Layout | None, ...]]:
    """Of the arguments and of the results, leaf by leaf: None for what is plain."""
    joint = capture.joint
    arguments = tuple(r.layout for r in joint.recording.inputs if isinstance(r.slot, Input))
    returned = dict(zip(joint.signature.returned, joint.returned_nodes, strict=True))
    found = (returned[Output(i)] for i in range(joint.visible))
    return arguments, tuple(value.layout if isinstance(value, Wrapped) else None for value in found)


def _state_layouts(capture: Capture) -> list[Layout | None]:
    slots = {slot for slot, _ in capture.state}
    return [recorded.layout for recorded in capture.joint.recording.inputs if recorded.slot in slots]


# ---------------------------------------------------------------------------------------------------------------------
# The inputs and outputs of an exported graph by what they are, and the signature that gives each its name.
@dataclass
class Inputs:
    """The placeholders of the graph, in their order."""

    tokens: list[Node] = field(default_factory=list)
    state: dict[Named, Node] = field(default_factory=dict)  # parameters, then buffers
    arguments: dict[Named, Node] = field(default_factory=dict)
    random: dict[str, Node] = field(default_factory=dict)  # seeds and offsets, by their roles

    @property
    def named(self) -> dict[Named, Node]:
        """What the module or its caller has a name for."""
        return {**self.state, **self.arguments}

    def flat(self) -> list[Node]:
        """All of them."""
        return [*self.tokens, *self.state.values(), *self.arguments.values(), *self.random.values()]


@dataclass
class Outputs:
    """What the graph returns, in its order."""

    tokens: dict[str, Node] = field(default_factory=dict)  # by their effects
    updates: list[tuple[Named, Any]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    loss: int | None = None  # which of them, if the graph has a backward
    offsets: list[tuple[Slot, Node]] = field(default_factory=list)
    gradients: list[tuple[Named, Node]] = field(default_factory=list)

    def flat(self) -> list[GraphOutput]:
        """All of it."""
        return [
            *(GraphOutput(Token(effect), node) for effect, node in self.tokens.items()),
            *(GraphOutput(Updated(slot), node) for slot, node in self.updates),
            *(GraphOutput(Output(i), value) for i, value in enumerate(self.results)),
            *(GraphOutput(slot, node) for slot, node in self.offsets),
            *(GraphOutput(Grad(slot), node) for slot, node in self.gradients),
        ]


def signature_of(inputs: Inputs, outputs: Outputs, structure: Structure, ties: Mapping[str, str]) -> GraphSignature:
    """Names for every place of the graph; `ties` are further names of tensors of the state, and their first names."""
    state, arguments = inputs.state, inputs.arguments
    params = {node.name: path_of(slot) for slot, node in state.items() if _is(slot, Param)}
    buffers = {node.name: path_of(slot) for slot, node in state.items() if _is(slot, Buffer)}
    return GraphSignature(
        parameters=list(params.values()),
        buffers=list(buffers.values()),
        user_inputs=[node.name for node in arguments.values()],
        user_outputs=[getattr(node, "name", None) for node in outputs.results],
        inputs_to_parameters=params,
        inputs_to_buffers=buffers,
        buffers_to_mutate={n.name: path_of(s) for s, n in outputs.updates if _is(s, Buffer)},
        parameters_to_mutate={n.name: path_of(s) for s, n in outputs.updates if _is(s, Param)},
        user_inputs_to_mutate={n.name: arguments[s].name for s, n in outputs.updates if _is(s, Input)},
        in_spec=structure.in_spec,
        out_spec=structure.out_spec,
        backward_signature=_backward_signature(inputs, outputs),
        input_tokens=[node.name for node in inputs.tokens],
        output_tokens=[node.name for node in outputs.tokens.values()],
        ties=dict(ties),
        random_inputs={node.name: role for role, node in inputs.random.items()},
        random_outputs={node.name: str(slot) for slot, node in outputs.offsets},
    )


def _backward_signature(inputs: Inputs, outputs: Outputs) -> BackwardSignature | None:
    if outputs.loss is None:
        return None
    return BackwardSignature(
        {node.name: path_of(slot) for slot, node in outputs.gradients if _is(slot, Param)},
        {node.name: inputs.arguments[slot].name for slot, node in outputs.gradients if _is(slot, Input)},
        outputs.results[outputs.loss].name,
    )


def _is(slot: Named, kind: type) -> bool:
    """Whether a slot is a parameter, a buffer or an argument, or lies in one."""
    return isinstance(outermost(slot), kind)


# ---------------------------------------------------------------------------------------------------------------------
# Names for the inputs of an exported graph: those of the function's parameters, made fit to be names of nodes.
class Names:
    """Gives out names, each of them once."""

    def __init__(self, taken: Iterable[str]) -> None:
        self.taken = set(taken)

    def fresh(self, wanted: str) -> str:
        """A name that can stand in Python code, as near as possible to the wanted one.

        >>> names = Names(["x"])
        >>> names.fresh("x"), names.fresh("layers.0['w']"), names.fresh("print")
        ('x_1', 'layers_0_w', 'print_1')
        """
        stem = re.sub(r"\W+|__+", "_", re.sub(r"\W+", "_", wanted)).strip("_") or "arg"
        stem = f"_{stem}" if stem[0].isdigit() else stem
        name, count = stem, 0
        while name in self.taken or not name.isidentifier() or _is_reserved(name):
            count += 1
            name = f"{stem}_{count}"
        self.taken.add(name)
        return name


def _is_reserved(name: str) -> bool:
    return keyword.iskeyword(name) or hasattr(builtins, name) or name in ("torch", "device", "inf", "nan", "self")


def argument_names(function: Callable[..., Any], slots: Sequence[Input]) -> list[tuple[Input, str]]:
    """A name for each leaf of the arguments: that of the parameter of `forward`, and the way down from there."""
    names = _parameter_names(function)
    found = []
    for slot in slots:
        kind, rest = re.fullmatch(r"(args|kwargs)\[(.*)", slot.path).groups()  # type: ignore[union-attr]
        first, _, below = rest.partition("]")
        if kind == "args":
            index = int(first)
            name = names[index] if index < len(names) else f"args_{index}"
        else:
            name = first.strip("'\"")
        found.append((slot, f"{name}_{below}" if below else name))
    return found


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]
