"""Numbers of the host in a tensor, for compilers whose graphs take no floats.

A graph takes one tensor of all numbers that each call works out, in double precision, and looks them up in it. What an
operator does with a number is written with tensors: `add(x, y, alpha=n)` is `x + y * n`, and lists are taken apart. A
number that an operator cannot take in a tensor stays a constant: a call that has another one is for another program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import FakeTensor, OpOverload
from ..abstract.engine import Engine
from ..host_numbers import decided
from ..ops import aten
from ..slots import Slot, Value
from ..values import same_value
from .graph import Graph, GraphOutput, Node, is_number, map_nodes, name_nodes, nodes_in
from .host_part import HostPart

prims = torch.ops.prims


def with_numbers_in_a_tensor(part: HostPart | None, graph: Graph, engine: Engine) -> tuple[HostPart | None, Graph]:
    """The same two, where the graph takes a tensor in the place of all numbers."""
    if part is None and not any(map(is_number, graph.inputs)):
        return part, graph
    host = Graph([], [], []) if part is None else part.graph
    worked_out: dict[Slot | None, Node] = {output.slot: output.value for output in host.outputs}
    given = {node: worked_out.get(node.slot, node) for node in graph.inputs if is_number(node)}
    returned, graph = _without_returned(graph, given)
    read = set(nodes_in(graph.results)).union(*(node.inputs() for node in graph.nodes))
    constant = _constants(graph, given.keys(), _device(graph))
    moved = [node for node in given if node in read and node not in constant]
    nodes = [*host.nodes, *(node for number in constant for node in _comparison(given[number]))]
    wanted = [*(given[node] for node in given if node in read), *returned.values()]
    inputs = dict.fromkeys((*host.inputs, *(node for node in wanted if node in given)))
    name_nodes(nodes, [node.name for node in (*inputs, *nodes) if node.name])
    numbers = [*(given[node] for node in moved), *returned.values()]
    slots = [Value(f"number {i}") for i, _ in enumerate(numbers)]
    results = dict(zip(returned, slots[len(moved) :], strict=True))
    values = {node: number.value.value for node, number in given.items()}
    graph = _Rewriting(graph, moved, values, engine).run()
    host = Graph([*inputs], nodes, [*map(GraphOutput, slots, numbers)])
    return HostPart(host, graph.inputs[-1] if moved else None, results), graph


def _without_returned(graph: Graph, given: Mapping[Any, Node]) -> tuple[dict[Slot, Node], Graph]:
    """The numbers that the host gives back by itself, and the graph without them."""
    returned = {slot: given[value] for slot, value in graph.outputs if value in given}
    outputs = [GraphOutput(slot, None if slot in returned else value) for slot, value in graph.outputs]
    return returned, Graph(graph.inputs, graph.nodes, outputs, graph.overwritten)


def _comparison(number: Node) -> list[Node]:
    """Nodes that find out whether a call has the number of the recording."""
    same = Node(same_value, (number, number.value.value), {}, None)
    return [same, Node(decided, (same, True), {}, None, impure=True)]


# ---------------------------------------------------------------------------------------------------------------------
# What operators do with numbers, written with tensors: in the order in which kernels calculate.
class _Term:
    """A tensor or a number in what an operator computes."""

    def __init__(self, emit: Callable[..., Any], value: Any) -> None:
        self.emit, self.value = emit, value

    def _with(self, op: OpOverload, *others: Any) -> _Term:
        return _Term(self.emit, self.emit(op, self.value, *[getattr(other, "value", other) for other in others]))

    def __add__(self, other: Any) -> _Term:
        return self._with(aten.add.Tensor, other)

    def __sub__(self, other: Any) -> _Term:
        return self._with(aten.sub.Tensor, other)

    def __mul__(self, other: Any) -> _Term:
        return self if getattr(other, "value", other) == 1 else self._with(aten.mul.Tensor, other)

    def __truediv__(self, other: Any) -> _Term:
        return self._with(aten.div.Tensor, other)

    def __pow__(self, other: _Term) -> _Term:
        if not isinstance(self.value, Node):
            return self._with(aten.pow.Scalar, other)
        return self._with(aten.pow.Tensor_Tensor if isinstance(other.value, Node) else aten.pow.Tensor_Scalar, other)


def _lerp(start: _Term, end: _Term, weight: _Term) -> _Term:
    if not isinstance(weight.value, Node):
        near_start = abs(weight.value) < 0.5
        return start + (end - start) * weight if near_start else end - (end - start) * _Term(end.emit, 1 - weight.value)
    near = weight._with(aten.abs.default)._with(aten.lt.Scalar, 0.5)
    from_start = start + (end - start) * weight
    from_end = end - (end - start) * (weight._with(aten.neg.default) + 1)
    return near._with(aten.where.self, from_start, from_end)


_COMPUTED: dict[str, Callable[..., _Term]] = {
    "add": lambda x, y, alpha=1: x + y * alpha,
    "sub": lambda x, y, alpha=1: x - y * alpha,
    "rsub": lambda x, y, alpha=1: y - x * alpha,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: x**y,
    "lerp": _lerp,
    "addcmul": lambda x, one, other, value=1: x + one * value * other,
    "addcdiv": lambda x, one, other, value=1: x + one * value / other,
}
_BETWEEN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # types that kernels calculate in
_ON_LISTS = "_foreach_"


def _name(op: Any) -> str:
    return op._schema.name.removeprefix("aten::") if isinstance(op, OpOverload) and op.namespace == "aten" else ""


def _with_rate_in_a_tensor(op: Any) -> OpOverload | None:
    """The overload of a fused optimizer that takes its rate in a tensor."""
    packet = getattr(aten, _name(op), None) if _name(op).startswith("_fused_") else None
    found: OpOverload | None = getattr(packet, "tensor_lr", None)
    return found


def _constants(graph: Graph, numbers: Collection[Node], device: torch.device) -> list[Node]:
    """Numbers that some operator cannot take in a tensor."""
    found = dict.fromkeys(node for node in nodes_in(graph.results) if node in numbers)
    for node in graph.nodes:
        taken = [item for item in node.inputs() if item in numbers]
        if not taken:
            continue
        if _with_rate_in_a_tensor(node.op) is not None:
            found |= dict.fromkeys(item for item in taken if item is not node.kwargs.get("lr") or taken.count(item) > 1)
        elif not _can_be_computed(node, numbers, device):
            found |= dict.fromkeys(taken)
    return [*found]


def _can_be_computed(node: Node, numbers: Collection[Node], device: torch.device) -> bool:
    if node.op is aten.scalar_tensor.default:
        return bool(node.value.device == device)
    if _name(node.op).removeprefix(_ON_LISTS) not in _COMPUTED or node.kwargs.keys() - {"alpha", "value"}:
        return False
    if nodes_in(node.kwargs.values()) and not all(isinstance(arg, (Node, list, tuple)) for arg in node.args):
        return False
    values = node.value if isinstance(node.value, (list, tuple)) else [node.value]
    tensors = [*values, *(item.value for item in node.inputs() if item not in numbers)]
    if not all(isinstance(value, FakeTensor) and value.layout is torch.strided for value in tensors):
        return False
    types, devices = {value.dtype for value in tensors}, {value.device for value in tensors}
    return devices == {device} and len(types) == 1 and next(iter(types)).is_floating_point


# ---------------------------------------------------------------------------------------------------------------------
# The rewriting.
class _Rewriting:
    def __init__(self, graph: Graph, moved: Sequence[Node], values: dict[Node, float], engine: Engine) -> None:
        self._graph, self._engine = graph, engine
        self._moved, self._values = frozenset(moved), values
        self._nodes: list[Node] = []
        self._new: dict[Node, Any] = {node: value for node, value in values.items() if node not in self._moved}
        self._lists: dict[Node, list[Node]] = {}
        self._converted: dict[tuple[Node, torch.dtype], Node] = {}
        self._like: Node = graph.nodes[0]  # whose line new nodes come from
        self._inputs = [node for node in graph.inputs if node not in values]
        if moved:
            tensor = self._run(aten.empty.memory_format, [len(moved)], dtype=torch.float64, device=_device(graph))
            numbers = Node(None, (), {}, tensor, Value("host_numbers"), "host_numbers")  # no operator has such a name
            self._inputs.append(numbers)
            self._new |= {node: self._emit(aten.select.int, numbers, 0, i) for i, node in enumerate(moved)}

    def run(self) -> Graph:
        for node in self._graph.nodes:
            self._like = node
            if node.op is operator.getitem and node.args[0] in self._lists:
                self._new[node] = self._lists[node.args[0]][node.args[1]]
            elif self._moved.isdisjoint(node.inputs()):
                if not self._take_apart(node):
                    self._keep(node)
            elif (op := _with_rate_in_a_tensor(node.op)) is not None:
                self._keep(node, op)
            elif node.op is aten.scalar_tensor.default:
                self._new[node] = self._alone(self._mapped(node.args[0]), node.value)
            elif isinstance(node.value, Tensor):
                self._new[node] = self._computed(node.args, node.kwargs, node.value.dtype)
            else:
                self._take_apart(node)
        name_nodes(self._nodes, [node.name for node in (*self._inputs, *self._nodes) if node.name])
        outputs = [GraphOutput(slot, map_nodes(value, self._mapped)) for slot, value in self._graph.outputs]
        return Graph(self._inputs, self._nodes, outputs, {*map(self._mapped, self._graph.overwritten)})

    def _take_apart(self, node: Node) -> bool:
        """One operator for each tensor of a list. If there is one such list, all are: compilers tell items apart."""
        name, values = _name(node.op), node.value
        if not self._moved or not name.startswith(_ON_LISTS) or not isinstance(values, (list, tuple)):
            return False
        single = getattr(getattr(aten, name.removeprefix(_ON_LISTS), None), "default", None)
        given = [[_item(arg, i, len(values)) for arg in node.args] for i in range(len(values))]
        if single is not None and len(node.args) == 1 and not node.kwargs:
            self._lists[node] = [self._emit(single, *map(self._mapped, args)) for args in given]
        elif _can_be_computed(node, self._values, _device(self._graph)):
            types = [value.dtype for value in values]
            self._lists[node] = [self._computed(args, node.kwargs, t) for args, t in zip(given, types, strict=True)]
        return node in self._lists

    def _keep(self, node: Node, op: OpOverload | None = None) -> None:
        if op is None and not any(item in self._new for item in node.inputs()):
            self._nodes.append(node)
            return
        kwargs = {name: map_nodes(value, self._mapped) for name, value in node.kwargs.items()}
        new = self._new[node] = node.copy(map_nodes(node.args, self._mapped), kwargs)
        if op is not None:
            new.op = op
            if kwargs["lr"].value.device.type != "cpu":  # a kernel of a device reads it in single precision
                new.kwargs["lr"] = self._in_type(kwargs["lr"], torch.float32)
        self._nodes.append(new)

    def _alone(self, number: Node, like: Tensor) -> Node:
        """A number as a tensor of its own."""
        return self._emit(aten.clone.default, self._in_type(number, like.dtype))

    def _computed(self, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype) -> Node:
        """One tensor of what an operator gives."""
        between = _BETWEEN.get(dtype, dtype)

        def term(value: Any) -> Any:
            found = self._mapped(value) if isinstance(value, Node) else value
            return _Term(self._emit, self._in_type(found, between) if isinstance(found, Node) else found)

        compute = _COMPUTED[_name(self._like.op).removeprefix(_ON_LISTS)]
        named = {name: term(value) for name, value in kwargs.items()}
        return self._in_type(compute(*map(term, args), **named).value, dtype)

    def _in_type(self, node: Node, dtype: torch.dtype) -> Node:
        if node.value.dtype is dtype:
            return node
        key = node, dtype
        if key not in self._converted:
            self._converted[key] = self._emit(prims.convert_element_type.default, node, dtype)
        return self._converted[key]

    def _emit(self, op: OpOverload, *args: Any) -> Node:
        node = self._like.copy(args, {})
        node.op, node.name, node.slot, node.impure = op, "", None, False
        node.value = self._run(op, *[map_nodes(arg, lambda item: item.value) for arg in args])
        self._nodes.append(node)
        return node

    def _run(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self._engine.run(op, (), args, kwargs)

    def _mapped(self, node: Node) -> Any:
        return self._new.get(node, node)


def _item(value: Any, index: int, count: int) -> Any:
    return value[index] if isinstance(value, (list, tuple)) and len(value) == count else value


def _device(graph: Graph) -> torch.device:
    """Where a graph works: what it looks numbers up in lies there."""
    tensors = [node.value for node in graph.nodes if isinstance(node.value, Tensor)]
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    return next(iter(devices), torch.device("cpu"))
