"""What the tests share: compilers that keep the graphs they are given, and tensors with plain values."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

import foregrad

FORKS = hasattr(os, "fork") and not torch.cuda.is_available()  # CUDA cannot be used in a forked process


def plain(*shape: int) -> Tensor:
    """1, 2, 3, ... in a given shape."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).clone()


def leaf(*shape: int) -> Tensor:
    """The same, to be differentiated."""
    return plain(*shape).requires_grad_()


def nop(graph: fx.GraphModule, example_inputs: Any) -> Any:
    """A compiler that runs the graph as it is."""
    return foregrad.make_boxed_func(graph.forward)


class Graphs:
    """The graphs that compilers were given, by kind: "forward", "backward", "inference"."""

    def __init__(self) -> None:
        self.modules: dict[str, fx.GraphModule] = {}
        self.examples: dict[str, list[Any]] = {}
        self.order: list[str] = []

    def compiler(self, kind: str) -> Callable[..., Any]:
        """A compiler that keeps its graph and runs it as it is."""

        def compile(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
            self.modules[kind], self.examples[kind] = graph, example_inputs
            self.order.append(kind)
            return foregrad.make_boxed_func(graph.forward)

        return compile

    def ops(self, kind: str) -> list[str]:
        """The names of the operators of a graph, in order."""
        return [n.target.__name__ for n in self.modules[kind].graph.nodes if n.op == "call_function"]

    def inputs(self, kind: str) -> list[str]:
        """The names of a graph's placeholders."""
        return [n.name for n in self.modules[kind].graph.find_nodes(op="placeholder")]

    def outputs(self, kind: str) -> list[Any]:
        """A graph's outputs: nodes, or constants."""
        return list(self.modules[kind].graph.output_node().args[0])


def grab(fn: Callable[..., Any], **options: Any) -> tuple[Any, Graphs]:
    """Compile a function or a module with compilers that keep their graphs."""
    graphs = Graphs()
    transform = foregrad.aot_module if isinstance(fn, torch.nn.Module) else foregrad.aot_function
    compiled = transform(
        fn,
        graphs.compiler("forward"),
        graphs.compiler("backward"),
        inference_compiler=graphs.compiler("inference"),
        **options,
    )
    return compiled, graphs


def metadata_of(fn: Callable[..., Any], *args: Any, **options: Any) -> foregrad.ViewAndMutationMeta:
    """The record of facts about a program."""
    compiled = foregrad.aot_function(fn, nop, **options)
    compiled(*args)
    return compiled.specializations[0].metadata


def run_alone(module: fx.GraphModule, *args: Any) -> Any:
    """Call a graph with gradients off, as a compiled program does."""
    with torch.no_grad():
        return module(*args)
