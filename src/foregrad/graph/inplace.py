"""Operators that write where the old value is dead: the last pass over a graph whose program is not differentiated.

A functional graph computes new values of the caller's tensors and copies them there at its end. Here updates become
in-place operators again: those of parameters, optimizer state, buffers and caches, and those of values that the graph
made itself. An operator may write over a value if nothing reads that value, or a view of it, any more, and if the
memory belongs to the graph or gets its last value later on.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload
from ..abstract.engine import Engine
from ..functional_variants import NARROW, REORDERED, ROUNDING, functional_variant, really_written, rounded
from ..host_numbers import Expression, decided
from ..ops import Kind, aten, op_info, written_arguments
from .graph import Graph, GraphOutput, Node, map_nodes, name_nodes, nodes_in, same_number

# Functional operators that copy a tensor and write to a view of the copy.
_WRITTEN_VIEW: dict[Any, OpOverload] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}

# Operators that write to some elements and keep the others: the functional one is a copy, and then the one that writes.
# Of those that are neither of these nor pointwise, the two may be different kernels, which round differently.
_KEEP_THE_REST = frozenset(
    {"index_put", "index_copy", "index_add", "index_fill", "scatter", "scatter_add", "masked_scatter", "copy"}
)


def written_in_place(graph: Graph, engine: Engine) -> Graph:
    """The same graph with operators that write, wherever nobody can tell the difference.

    Args:
        graph: of a program that is not differentiated. It writes to inputs by one `copy_` each, at its end. Where it
            reads data, nothing is written before the last read: what comes before may turn out to be for another call.
        engine: that its abstract values come from.
    """
    return _Rewriting(graph, engine).run()


def without_unread_views(nodes: Sequence[Node], results: Sequence[Any]) -> list[Node]:
    """Nodes without the views that nothing reads any more."""
    read = set(nodes_in(results))
    kept = []
    for node in reversed(nodes):
        if node in read or not _is_view(node.op):
            kept.append(node)
            read.update(node.inputs())
    return kept[::-1]


# ---------------------------------------------------------------------------------------------------------------------
# What lies where.
_ALWAYS = 1 << 62


@dataclass(slots=True, eq=False)
class _Memory:
    """Memory that values lie in, one after the other."""

    open_until: int  # the place in the graph where it gets its last value; -1 if the graph must not write to it
    input: Node | None = None  # whose memory it is


@dataclass(slots=True, eq=False)
class _Value:
    """One value, with all the views of it."""

    memory: _Memory
    first: Node  # that shows it
    last_read: int = -1
    returned: bool = False
    same_as: _Value | None = None  # the value that it was a copy of


class _Values:
    """The values of a functional graph, and when they are read."""

    def __init__(self, graph: Graph) -> None:
        self._of: dict[Any, _Value] = {}  # by node, or by the list and the place in it
        last = {node.args[0]: i for i, node in enumerate(graph.nodes) if node.op is aten.copy_.default}
        for node in graph.inputs:
            self._of[node] = _Value(_Memory(last.get(node, -1), node), node)
        for place, node in enumerate(graph.nodes):
            for item in node.inputs() if node.op is not aten.copy_.default else node.args[1:]:
                self.of(item).last_read = place
            self._of[node] = self._shown_by(node)
        for node in nodes_in(graph.results):
            self.of(node).returned = True

    def _shown_by(self, node: Node) -> _Value:
        if node.op is operator.getitem:
            whole, index = node.args
            found = self._of[whole]
            if _is_view(whole.op) or found.memory.open_until < 0:
                return found
            return self._of.setdefault((found, index), _Value(_Memory(_ALWAYS), node))
        if node.op is aten.copy_.default:  # the last value of an input
            return _Value(self.of(node.args[0]).memory, node)
        if _is_view(node.op):
            return self.of(node.args[0])
        if _has_own_results(node.op):
            return _Value(_Memory(_ALWAYS), node)
        for item in node.inputs() if not _gives_numbers(node) else ():  # results may share memory with these
            self.of(item).memory.open_until = -1
        return _Value(_Memory(-1), node)

    def of(self, node: Node) -> _Value:
        """The value that a node shows."""
        value = self._of[node]
        while value.same_as is not None:
            value = value.same_as
        return value

    def written(self, node: Node, arguments: Any) -> Iterator[tuple[Node, _Value]]:
        """Arguments of an operator and the values that it computes in their places, as far as anything takes them."""
        pending = [(self._of[node], arguments)]
        while pending:
            value, item = pending.pop()
            if isinstance(item, Node):
                yield item, value
            elif isinstance(item, (list, tuple)):
                taken = [(self._of.get((value, i)), part) for i, part in enumerate(item)]
                pending += [(found, part) for found, part in taken if found is not None]

    def merge(self, copy: Node, original: Node) -> None:
        """A copy need not be one: from now on it is the value that it was made from."""
        one, other = self.of(copy), self.of(original)
        other.last_read = max(other.last_read, one.last_read)
        other.returned |= one.returned
        one.same_as = other


def _gives_numbers(node: Node) -> bool:
    """Whether a node reads data, or computes with what was read."""
    return node.read is not None or isinstance(node.value, Expression) or node.op is decided


def _is_view(op: Any) -> bool:
    return isinstance(op, OpOverload) and op_info(op).kind is Kind.VIEW


def _has_own_results(op: Any) -> bool:
    """Whether results lie in memory of their own; of operators that are not torch's this is not known."""
    return isinstance(op, OpOverload) and op.namespace == "aten" and op_info(op).kind is Kind.PURE


# ---------------------------------------------------------------------------------------------------------------------
# The pass.
class _Rewriting:
    def __init__(self, graph: Graph, engine: Engine) -> None:
        self._graph, self._engine = graph, engine
        self._values = _Values(graph)
        self._new: dict[Node, Node] = {node: node for node in graph.inputs}
        self._lists: dict[Node, Any] = {}  # what stands for results that are lists
        self._nodes: list[Node] = []
        self._returned = frozenset(nodes_in(graph.results))
        self._last_read = max((place for place, node in enumerate(graph.nodes) if node.read is not None), default=-1)

    def run(self) -> Graph:
        for place, node in enumerate(self._graph.nodes):
            self._rewrite(node, place)
        self._nodes = without_unread_views(self._nodes, self._mapped([value for _, value in self._graph.outputs]))
        name_nodes(self._nodes, [node.name for node in (*self._graph.inputs, *self._nodes) if node.name])
        outputs = [GraphOutput(slot, self._mapped(value)) for slot, value in self._graph.outputs]
        overwritten = {self._new[node] for node in self._graph.overwritten if node in self._new}
        return Graph(self._graph.inputs, self._nodes, outputs, overwritten)

    def _rewrite(self, node: Node, place: int) -> None:
        if (shown := self._shown_again(node)) is not None:
            self._new[node] = shown
        elif node.op is operator.getitem and node.args[0] in self._lists:
            part = self._lists[node.args[0]][node.args[1]]
            (self._new if isinstance(part, Node) else self._lists)[node] = part
        elif node.op is aten.copy_.default and self._new[node.args[1]] is node.args[0]:
            self._new[node] = node.args[0]  # it has its last value already
        elif node.op is aten.clone.default and self._may_be_taken_over(node):
            self._values.merge(node, node.args[0])
            if node in self._returned:  # it is a tensor of its own
                self._emit(node, aten.detach.default, node.args, {})
            else:
                self._new[node] = self._new[node.args[0]]
        elif node.op in _WRITTEN_VIEW and self._may_write(node, place, node.args[0], []):
            self._write_to_view(node)
        elif (twin := _twin(node.op)) is not None:
            self._write(node, place, twin)
        else:
            self._emit(node, node.op, node.args, node.kwargs)

    def _shown_again(self, node: Node) -> Node | None:
        """What a view shows as it is: a detached tensor, or one that was transposed twice. Results are views still."""
        if node in self._returned or not node.inputs():
            return None
        source = node.args[0]
        if node.op is aten.detach.default:
            return self._new[source]
        if node.op is aten.t.default and source.op is aten.t.default:
            return self._new[source.args[0]]
        return None

    def _write(self, node: Node, place: int, twin: OpOverload) -> None:
        """The operator that writes, if it may."""
        written = written_arguments(twin, node.args, node.kwargs)
        results = written if len(written) > 1 else written[0]
        really = really_written(twin, node.args, node.kwargs)
        kept = [item for item, changed in zip(written, really, strict=True) if changed is None]
        if not self._may_write(node, place, results, kept) or (twin in ROUNDING and _rounds(node.args)):
            self._emit(node, node.op, node.args, node.kwargs)
            return
        self._emit(node, twin, node.args, node.kwargs)
        if isinstance(results, Node):
            self._new[node] = self._new[results]
        else:
            self._lists[node] = self._mapped(results)

    def _write_to_view(self, node: Node) -> None:
        """A scatter: the view is taken, and written to."""
        base, source, *rest = node.args
        view = self._emit(node, _WRITTEN_VIEW[node.op], (base, *rest), node.kwargs)
        given = map_nodes(view.args, lambda item: item.value)
        with torch.no_grad():
            view.value = self._engine.run(_WRITTEN_VIEW[node.op], (), given, view.kwargs)
        self._emit(node, aten.copy_.default, (view, source), {}).value = view.value
        self._new[node] = self._new[base]

    def _emit(self, node: Node, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Node:
        """A node in the place of another one."""
        new = node.copy(self._mapped(tuple(args)), {name: self._mapped(item) for name, item in kwargs.items()})
        if op is not node.op:
            new.op, new.name, new.impure = op, "", bool(op_info(op).written)
        self._nodes.append(new)
        self._new[node] = new
        return new

    def _mapped(self, value: Any) -> Any:
        return map_nodes(value, lambda node: self._new.get(node, node))

    # ------------------------------------------------------------------------------------------------- conditions
    def _may_write(self, node: Node, place: int, results: Any, kept: Sequence[Any]) -> bool:
        """Whether an operator may write its results over these arguments, of which it leaves some as they are."""
        untouched = nodes_in(kept)
        targets = [item for item in nodes_in([results]) if item not in untouched and place > self._last_read]
        old = [self._values.of(target) for target in targets]
        read = [self._values.of(item) for item in node.inputs()]
        once = 2 if "pointwise" in op_info(node.op).traits and len(set(node.inputs())) == 1 else 1  # type: ignore[arg-type]
        if not targets or any(read.count(value) > once for value in old):
            return False
        if not all(self._is_over(target, place) for target in targets):
            return False
        pairs = [pair for pair in self._values.written(node, results) if pair[0] not in untouched]
        if not all(self._lie_alike(target, new.first) and self._has_time(target, new) for target, new in pairs):
            return False
        for target, new in pairs:
            new.memory = self._values.of(target).memory
        return True

    def _is_over(self, target: Node, place: int) -> bool:
        """Whether a value is not needed after a place, and its memory may be used for another one."""
        value = self._values.of(target)
        owner = value.memory.input
        return (
            value.last_read == place
            and not value.returned
            and place < value.memory.open_until
            and (owner is None or self._new[target] is owner)  # a view may show its elements in another order
            and same_number(target.value.numel(), value.first.value.numel())  # results have memory to themselves
        )

    def _has_time(self, target: Node, new: _Value) -> bool:
        """Whether a value may lie in the memory of an argument as long as it is needed; what is returned is no view."""
        memory, shown = self._values.of(target).memory, self._new[target]
        if memory.input is not None:
            return not new.returned and new.last_read <= memory.open_until
        return not new.returned or not _is_view(shown.op) or shown.op is aten.detach.default

    def _lie_alike(self, one: Node, other: Node) -> bool:
        """Whether two tensors are of one kind and lie in memory in the same way."""
        a, b = one.value, other.value
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.layout is not torch.strided or a.dtype != b.dtype:
            return False
        if b.layout is not torch.strided or any(t.is_conj() or t.is_neg() or t.is_inference() for t in (a, b)):
            return False
        if a.ndim != b.ndim or self._engine.device_of(a) != self._engine.device_of(b):
            return False
        numbers = zip((*a.shape, *a.stride()), (*b.shape, *b.stride()), strict=True)
        return all(same_number(m, n) for m, n in numbers)

    def _may_be_taken_over(self, node: Node) -> bool:
        """Whether a copy may be the original: nobody else sees that one, and it is all there is in its memory."""
        [original] = node.args
        if node.kwargs.get("memory_format", torch.preserve_format) is not torch.preserve_format:
            return False
        value = self._values.of(original)
        whole = value.first.value
        return (
            value.memory.open_until == _ALWAYS
            and not (value.returned and self._values.of(node).returned)
            and isinstance(whole, Tensor)
            and same_number(whole.numel(), node.value.numel())
            and self._lie_alike(original, node)
        )


def _rounds(args: Sequence[Any]) -> bool:
    """Whether the operator that writes would read other numbers than the functional one does."""
    tensors, numbers = (arg if isinstance(arg, (list, tuple)) else [arg] for arg in args[:2])
    narrow = {node.value.dtype for node in tensors if node.value.dtype in NARROW and node.value.device.type == "cpu"}
    return not all(_is_rounded(number, dtype) for number in numbers for dtype in narrow)


def _is_rounded(number: Any, dtype: torch.dtype) -> bool:
    if isinstance(number, Node):
        return number.op is rounded and number.args[1] is dtype
    return type(number) in (int, float) and rounded(number, dtype) == number


@functools.cache
def _twin(op: Any) -> OpOverload | None:
    """The operator that writes the results of a functional one over its arguments, and gives the same numbers."""
    if not _has_own_results(op) or "random" in op_info(op).traits:
        return None
    name = op._schema.name.removeprefix("aten::")
    if not ("pointwise" in op_info(op).traits or name.startswith(("_foreach_", "_fused_")) or name in _KEEP_THE_REST):
        return None
    packet = getattr(aten, f"{name}_", None)
    twin = getattr(packet, op._overloadname or "default", None)
    variant = None if twin is None or twin in REORDERED else functional_variant(twin)
    if variant is None or variant.op is not op or variant.returns != len(variant.written):
        return None
    assert twin is not None
    return twin if op_info(twin).kind is Kind.WRITE and op_info(twin).names == op_info(op).names else None
