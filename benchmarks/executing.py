"""Run a graph as a compiler would, and measure the storages that are alive."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef


class Meter:
    """Counts the bytes of storages that are alive, but for those that it was told to ignore."""

    def __init__(self, ignored: list[Any]) -> None:
        self._ignored = {t.untyped_storage()._cdata for t in ignored if isinstance(t, Tensor)}
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def see(self, value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage._cdata not in self._ignored:
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.see(item)

    def measure(self) -> None:
        self._known = {key: (ref, size) for key, (ref, size) in self._known.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._known.values()))


def run_boxed(graph: fx.GraphModule, inputs: list[Any], meter: Meter) -> list[Any]:
    """Execute a graph node by node: a value is dropped behind its last use, inputs included. The list is emptied."""
    last = {}
    for node in graph.graph.nodes:
        for item in node.all_input_nodes:
            last[item] = node
    values: dict[fx.Node, Any] = {}
    given = iter(list(inputs))
    inputs.clear()
    results: list[Any] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
            meter.see(values[node])
            continue
        if node.op == "output":
            results = list(fx.node.map_arg(node.args[0], values.__getitem__))
            break
        if node.op == "call_function":
            del_given(given)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            del args, kwargs
        else:
            values[node] = getattr(graph, node.target)
        meter.see(values[node])
        meter.measure()
        for item in (*node.all_input_nodes, node):
            if last.get(item, node) is node:
                values.pop(item, None)
    return results


def del_given(given: Any) -> None:
    """An exhausted iterator holds nothing; this makes sure that it is exhausted."""
    assert next(given, None) is None


def run_step(
    forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, primals: list[Any], tangents: list[Any]
) -> tuple[list[Any], list[Any], int, int]:
    """Results, gradients, and the peaks of forward and backward in bytes beyond the primals."""
    with torch.no_grad():
        first = Meter(primals)
        found = run_boxed(forward, list(primals), first)
        own, saved = found[:outputs], found[outputs:]
        del found
        names = [node.name for node in forward.graph.output_node().args[0][outputs:]]
        by_name = dict(zip(names, saved, strict=True))
        del saved
        wanted = [node.name for node in backward.graph.find_nodes(op="placeholder")]
        left = list(tangents)
        tangents.clear()
        given = [by_name.pop(name) if name in by_name else left.pop(0) for name in wanted]
        by_name.clear()
        second = Meter([*primals, *own])
        gradients = run_boxed(backward, given, second)
    return own, gradients, first.peak, second.peak
