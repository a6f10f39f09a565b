"""The graphs of another backend as CUDA graphs: one launch for a forward, one for a backward."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx

from .._torch import OpOverload, identity_of
from ..errors import ConfigError, EagerFallbackWarning, UnsupportedError
from ..ops import Kind, op_info, written_arguments
from ..options import Compiler, Compilers
from ..runtime.compilers import GraphSlots
from ..slots import Saved, Token
from .backend import Backend, at_line_of, stays_in_place
from .replay import ReplayedGraph, SharedPlaces

Named = Callable[[Any, str | None, Mapping[str, Any] | None], Backend]


def backend(
    mode: str | None, options: Mapping[str, Any] | None, named: Named, fallback: Literal["error", "eager"]
) -> Backend:
    """The backend "cudagraphs": `options["backend"]` says what compiles the graphs, and has the other options."""
    if not torch.cuda.is_available():
        raise ConfigError("backend='cudagraphs' needs a CUDA device, and torch finds none on this machine.")
    rest = dict(options or {})
    inner = named(rest.pop("backend", "eager"), mode, rest or None)
    if inner.name == "cudagraphs":
        raise ConfigError("options={'backend': 'cudagraphs'} for the backend 'cudagraphs' is one too many.")
    return Backend(
        "cudagraphs",
        functools.partial(_new_compilers, inner.new_compilers, fallback),
        inner.decompositions,
        "constants" if inner.numbers == "constants" else "in a tensor",
        writes="asked for" if inner.writes == "asked for" else "by the compiler",
        draws_in_order=inner.draws_in_order,
        partition=inner.partition,
    )


def _new_compilers(inner: Callable[[], Compilers], fallback: Literal["error", "eager"]) -> Compilers:
    return _compilers(inner(), fallback)


def _compilers(inner: Compilers, fallback: Literal["error", "eager"]) -> Compilers:
    """The compilers of one program."""
    shared = SharedPlaces()

    def on_failure(error: UnsupportedError) -> None:
        if fallback != "eager":
            raise error
        warnings.warn(f"no CUDA graph is used: {error}", EagerFallbackWarning, stacklevel=2)

    def compiler(compile_graph: Compiler, phase: str) -> Compiler:
        def compile_and_replay(graph: fx.GraphModule, examples: Any) -> Any:
            slots = graph.meta["slots"]
            device = only_device(graph, slots, phase)
            _refuse_lost_writes(graph, slots, phase)
            generators = _generators(graph)
            return ReplayedGraph(
                compile_graph(graph, examples),
                phase,
                device,
                frozenset(i for i, slot in enumerate(slots.inputs) if stays_in_place(slot)),
                frozenset(i for i, slot in enumerate(slots.outputs) if isinstance(slot, Saved)),
                generators,
                shared,
                on_failure,
            )

        return compile_and_replay

    return Compilers(
        compiler(inner.forward, "forward"),
        compiler(inner.backward, "backward"),
        compiler(inner.inference, "inference"),
        inner.joint_pass,
    )


def _generators(graph: fx.GraphModule) -> list[torch.Generator]:
    """Generators of the user's that a graph draws from."""
    given = [value for node in graph.graph.nodes for value in (*node.args, *node.kwargs.values())]
    return list({identity_of(value): value for value in given if isinstance(value, torch.Generator)}.values())


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be captured: work of the host, which a launch does not do again.
_WAY_OUT = "Leave that part outside of what is compiled, or compile with another backend."


def only_device(graph: fx.GraphModule, slots: GraphSlots, phase: str) -> torch.device:
    """The CUDA device that a graph works on; what works elsewhere is refused by name."""
    if any(isinstance(slot, Token) for slot in slots.inputs):
        raise UnsupportedError(
            f"the {phase} graph has operators with side effects, which a CUDA graph does not run again. {_WAY_OUT}"
        )
    constant: set[fx.Node] = set()  # what the host knows before any call
    devices: dict[torch.device, None] = {}
    inputs = iter(slots.inputs)
    for node in graph.graph.nodes:
        slot = next(inputs) if node.op == "placeholder" else None
        tensors = _tensors(node)
        devices |= dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type != "cpu")
        on_host = _on_host(node)
        if node.op == "get_attr" or (not tensors and node.op == "placeholder"):
            constant.add(node)  # a number is the same whenever a capture is launched
        elif node.op == "placeholder":
            if on_host and node.users:
                raise UnsupportedError(
                    f"{slot} is a tensor on the CPU, which a CUDA graph cannot read. Move it to the device before the "
                    "call, or compile with another backend."
                )
        elif node.op == "call_function":
            _note_or_refuse(node, on_host, constant)
    if len(devices) > 1:
        found = ", ".join(map(str, devices))
        raise UnsupportedError(f"the {phase} graph works on {found}, and a CUDA graph on one device. {_WAY_OUT}")
    if not devices:
        raise UnsupportedError(
            f"nothing in the {phase} graph is on a CUDA device. Move the model and its inputs there, or compile with "
            "another backend."
        )
    return next(iter(devices))


def _refuse_lost_writes(graph: fx.GraphModule, slots: GraphSlots, phase: str) -> None:
    """Refuse a graph that itself writes to an input of which a capture has a copy: the caller would not see it."""
    inputs = iter(slots.inputs)
    shows: dict[fx.Node, Any] = {}  # the input that a node shows, as it is or by a view
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            shows[node] = next(inputs)
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        info = op_info(node.target)
        if info.kind is Kind.VIEW and node.all_input_nodes[0] in shows:
            shows[node] = shows[node.all_input_nodes[0]]
        targets = written_arguments(node.target, node.args, dict(node.kwargs)) if info.written else ()
        for target in _nodes_among(targets):
            slot = shows.get(target)
            if slot is not None and not stays_in_place(slot):
                raise UnsupportedError(
                    f"the {phase} graph writes to {slot} in place, of which a CUDA graph has a copy. Keep what is "
                    "written in a buffer of a module, pass a clone, or compile without inplace=True."
                )


def _nodes_among(values: Any) -> list[fx.Node]:
    if isinstance(values, fx.Node):
        return [values]
    return [node for value in values for node in _nodes_among(value)] if isinstance(values, (list, tuple)) else []


def _note_or_refuse(node: fx.Node, on_host: bool, constant: set[fx.Node]) -> None:
    known = all(source in constant for source in node.all_input_nodes) and not _draws(node)
    from_host = any(map(_on_host, node.all_input_nodes))
    if (on_host and not known) or (from_host and not on_host and _does_not_wait(node)):
        raise UnsupportedError(
            f"{node.target} works on the CPU{at_line_of(node)}: a CUDA graph would do it once, and not at each call. "
            f"{_WAY_OUT}"
        )
    if known:
        constant.add(node)


def _on_host(node: fx.Node) -> bool:
    return any(tensor.device.type == "cpu" for tensor in _tensors(node))


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _does_not_wait(node: fx.Node) -> bool:
    """Whether an operator may copy from memory of the host that is gone when the graph is launched."""
    schema = getattr(node.target, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(given.get("non_blocking"))


def _tensors(node: fx.Node) -> list[Tensor]:
    values = node.meta.get("val")
    values = values if isinstance(values, (list, tuple)) else [values]
    return [value for value in values if isinstance(value, Tensor)]
