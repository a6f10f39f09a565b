"""The graph that every pass reads: its nodes, the frozen graph over them, and the builder that makes one.

A `Node` is one value. A `Graph` says what it takes, what it runs and what it returns, and has a slot for each place: a
pass asks for `graph.outputs_of(Grad)` and never counts. Passes that write do so through a `GraphBuilder`, or give a new
graph. What a user or a compiler sees is a `torch.fx` graph, made from this one when it is asked for (`fx.py`).
"""

from __future__ import annotations

import builtins
import copy
import keyword
import math
import operator
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor

from .._torch import OpOverload, expression_of, is_static, sympy_functions
from ..abstract.sparse import strides_of
from ..errors import UnsupportedError
from ..host_numbers import Expression, decided, host_number
from ..ops import aten
from ..slots import Inner, Slot, belongs_to_backward, outermost
from ..stack_traces import Origin, Stack, show_stack
from .reads import Read, Reseed

Target = Callable[..., Any]


# ---------------------------------------------------------------------------------------------------------------------
# Nodes.
@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One value of the graph: a placeholder (it has a slot), a constant, or the result of an operator."""

    op: Target | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any  # the abstract result
    slot: Slot | None = None
    name: str = ""
    meta: dict[str, Any] | None = None  # of the `torch.fx` node that this one was read from
    backward: bool = False
    impure: bool = False
    recomputed: bool = False  # the backward runs again what the forward ran, as a checkpoint asked for
    stack: Stack = ()
    origin: Origin | None = None
    part: int = 0  # of the forward: so many reads come before it
    read: Read | Reseed | None = None  # that it is
    _inputs: tuple[Node, ...] | None = None  # found when first asked for

    def __repr__(self) -> str:
        """Without its arguments: these are nodes too, and a debugger would print the graph once for each way to it."""
        return f"<{self.name or self.slot or self.op}>"

    def copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """The same node over other arguments."""
        new = copy.copy(self)
        new.args, new.kwargs, new._inputs = args, kwargs, None
        return new

    def become(self, other: Node) -> None:
        """Compute what another node computes, for all who read this one."""
        self.op, self.args, self.kwargs, self.value = other.op, other.args, other.kwargs, other.value
        self._inputs = None

    def inputs(self) -> tuple[Node, ...]:
        """The nodes that this one reads."""
        found = self._inputs
        if found is None:
            found = self._inputs = tuple(nodes_in((*self.args, *self.kwargs.values()) if self.kwargs else self.args))
        return found

    @property
    def shown_value(self) -> Any:
        """The abstract value that compilers are shown: None for an input that is neither a tensor nor a size."""
        hidden = self.meta is None and self.slot is not None and not isinstance(self.value, (Tensor, SymInt))
        return None if hidden else self.value

    @property
    def stack_trace(self) -> str:
        """The user's lines that it comes from."""
        if self.meta is not None:
            return str(self.meta.get("stack_trace") or "")
        return show_stack(self.stack) if self.stack else ""


def nodes_in(values: Iterable[Any]) -> list[Node]:
    """All nodes among values that may be nested in lists and tuples."""
    found: list[Node] = []
    for value in values:
        kind = value.__class__
        if kind is Node:
            found.append(value)
        elif kind is list or kind is tuple:
            found += nodes_in(value)
    return found


def map_nodes(value: Any, of: Callable[[Node], Any]) -> Any:
    """A value with something else in the place of each node in it."""
    kind = value.__class__
    if kind is Node:
        return of(value)
    if kind is list or kind is tuple:
        return kind([of(item) if item.__class__ is Node else map_nodes(item, of) for item in value])
    return value


def is_number(node: Node) -> bool:
    """Whether a node gives a number that the host works out."""
    return isinstance(node.value, Expression)


def same_number(one: Any, other: Any) -> bool:
    """Whether numbers are equal as they stand: symbols are compared without a guard."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return str(one) == str(other)


# ---------------------------------------------------------------------------------------------------------------------
# The graph.
class GraphOutput(NamedTuple):
    """Something that a graph returns: what it is for, and the node, the constant or None that is returned."""

    slot: Slot
    value: Any


@dataclass(frozen=True, slots=True)
class Graph:
    """What a program takes, runs and returns.

    >>> from foregrad.slots import Grad, Input, Output
    >>> x = Node(None, (), {}, None)
    >>> y = Node(aten.sin.default, (x,), {}, None)
    >>> graph = Graph([x], [y], [GraphOutput(Output(0), y), GraphOutput(Grad(Input("x")), None)])
    >>> [str(slot) for slot, _ in graph.forward_outputs], [str(slot) for slot, _ in graph.outputs_of(Grad)]
    (['output 0'], ['gradient of x'])
    """

    inputs: Sequence[Node]
    nodes: Sequence[Node]
    outputs: Sequence[GraphOutput]
    overwritten: Set[Node] = (
        frozenset()
    )  # the caller's tensors that change once the forward has run, or in the backward

    @property
    def results(self) -> list[Any]:
        """What is returned, without saying what it is for."""
        return [output.value for output in self.outputs]

    def outputs_of(self, *kinds: type) -> list[GraphOutput]:
        """The outputs with a slot of one of these kinds; those in a wrapper subclass are of the kind of the wrapper."""
        return [output for output in self.outputs if _is_of(output.slot, kinds)]

    def inputs_of(self, *kinds: type) -> list[Node]:
        """The same for inputs."""
        return [node for node in self.inputs if _is_of(node.slot, kinds)]

    @property
    def has_reads(self) -> bool:
        """Whether it reads data."""
        return any(node.read is not None for node in self.nodes)

    @property
    def forward_outputs(self) -> list[GraphOutput]:
        """What the forward of a joint graph returns."""
        return [output for output in self.outputs if not belongs_to_backward(output.slot)]

    @property
    def backward_outputs(self) -> list[GraphOutput]:
        """What its backward returns."""
        return [output for output in self.outputs if belongs_to_backward(output.slot)]


def _is_of(slot: Slot | None, kinds: tuple[type, ...]) -> bool:
    return type(slot) in kinds or (type(slot) is Inner and type(outermost(slot)) in kinds)


# ---------------------------------------------------------------------------------------------------------------------
# The builder.
class GraphBuilder:
    """Placeholders, then nodes in the order in which they run: the only form that grows."""

    def __init__(self) -> None:
        self.placeholders: list[Node] = []
        self.nodes: list[Node] = []
        self.backward = False  # nodes made now belong to the backward
        self.recomputed = False  # nodes made now run again what the forward ran
        self.stack: Stack = ()  # the user's line for nodes made now
        self.origin: Origin | None = None  # of nodes made now
        self.part = 0  # of nodes made now
        self._symbols: dict[Any, Node] = {}
        self._host_numbers: dict[Expression, Node] = {}

    def placeholder(self, slot: Slot, value: Any) -> Node:
        """A new input; the symbols in its sizes can be read from it."""
        node = Node(None, (), {}, value)
        node.slot = slot
        self.placeholders.append(node)
        number = host_number(value)
        if number is not None:
            self.bind_host_number(number.expression, node)
        elif isinstance(value, SymInt):
            self._symbols.setdefault(expression_of(value), node)
        elif isinstance(value, Tensor):
            self.bind_sizes(node, value)
        return node

    def bind_sizes(self, node: Node, tensor: Tensor) -> None:
        """Symbols in the size of a tensor can be found in it from now on."""
        if is_static(tensor):
            return
        readings = ((aten.sym_size.int, tensor.shape), (aten.sym_stride.int, strides_of(tensor)))
        for op, numbers in readings:
            for dim, number in enumerate(numbers):
                expression = expression_of(number) if isinstance(number, SymInt) else None
                if expression is not None and expression.is_symbol and expression not in self._symbols:
                    self._symbols[expression] = self.call(op, (node, dim), {}, number)

    def call(self, op: Target, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Node:
        """A new node at the end."""
        node = Node(op, args, kwargs, value)
        node.backward = self.backward
        node.recomputed = self.recomputed
        node.stack = self.stack
        node.origin = self.origin
        node.part = self.part
        self.nodes.append(node)
        return node

    def read(self, op: Target, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, read: Read | Reseed) -> Node:
        """A node that reads data, at which a part of the forward ends."""
        node = self.call(op, args, kwargs, value)
        node.impure, node.read = True, read
        self.part += 1
        if isinstance(value, SymInt):
            self.bind_number(node, value)
        return node

    def bind_number(self, node: Node, number: SymInt) -> None:
        """A node gives a symbolic number."""
        self._symbols[expression_of(number)] = node

    def constant(self, held: Any, value: Any) -> Node:
        """A tensor, or another object, that is part of the program."""
        return self.call(get_constant, (held,), {}, value)

    def write_placeholder(self, placeholder: Node, new: Node) -> Node:
        """Let the graph itself write to one of its inputs, as the last thing that happens to it."""
        node = self.call(aten.copy_.default, (placeholder, new), {}, placeholder.value)
        node.impure = True
        return node

    def number(self, value: Any) -> Any:
        """A node for a symbolic number, or the number itself."""
        followed = host_number(value)
        if followed is not None:
            return self.host_number(followed.expression)
        expression = expression_of(value)
        if expression.is_number:
            return int(expression) if isinstance(value, SymInt) else float(expression)
        known = self._symbols.get(expression)
        if known is None:
            known = self._symbols[expression] = self._arithmetic(expression, value)
        return known

    def bind_host_number(self, expression: Expression, node: Node) -> None:
        """A node gives a number that the host works out."""
        node.value = expression
        self._host_numbers[expression] = node

    def host_number(self, expression: Expression) -> Node:
        """The node of a number that the host works out."""
        known = self._host_numbers.get(expression)
        if known is None:
            assert expression.op is not None
            args = [self.host_number(arg) if isinstance(arg, Expression) else arg for arg in expression.args]
            known = self._host_numbers[expression] = self.call(expression.op, tuple(args), {}, expression)
        return known

    def decide(self, expression: Expression, answer: Any) -> None:
        """A node that compares what was decided by such numbers."""
        self.call(decided, (self.host_number(expression), answer), {}, None).impure = True

    def _arithmetic(self, expression: Any, value: Any) -> Node:
        """Emit the arithmetic that computes a symbolic number from the sizes of the inputs."""
        target = _arithmetic_rules().get(expression.func)
        if target is None:
            raise UnsupportedError(f"the size {expression} is computed in a way that a graph cannot express yet.")
        parts = [self._operand(part, value.node.shape_env) for part in expression.args]
        if len(parts) == 1:
            return self.call(target, (parts[0],), {}, value)
        result: Any = parts[0]
        for part in parts[1:]:
            result = self.call(target, (result, part), {}, value)
        return result

    def _operand(self, part: Any, shape_env: Any) -> Any:
        if part.is_number:
            return int(part) if part.is_integer else float(part)
        make = shape_env.create_symintnode if part.is_integer else shape_env.create_symfloatnode
        return self.number(make(part, hint=None))


def get_constant(tensor: Tensor) -> Tensor:
    """The operator of a constant's node; in `torch.fx` it becomes an attribute."""
    return tensor


def _arithmetic_rules() -> dict[Any, Target]:
    import sympy

    functions = sympy_functions()
    return {
        sympy.Add: operator.add,
        sympy.Mul: operator.mul,
        sympy.Pow: operator.pow,
        functions.PowByNatural: operator.pow,
        functions.FloorDiv: operator.floordiv,
        functions.CleanDiv: operator.floordiv,
        functions.Mod: operator.mod,
        functions.PythonMod: operator.mod,
        sympy.Abs: operator.abs,
        functions.Max: torch.sym_max,
        functions.Min: torch.sym_min,
        functions.ToFloat: torch.sym_float,
        functions.IntTrueDiv: operator.truediv,
        functions.FloatTrueDiv: operator.truediv,
        functions.FloatPow: operator.pow,
        functions.CeilToInt: math.ceil,
        functions.FloorToInt: math.floor,
        functions.TruncToInt: math.trunc,
        functions.RoundToInt: round,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Names, and what is needed of a graph.
_RESERVED = frozenset({*dir(builtins), *keyword.kwlist, "torch", "device", "inf", "nan"})


def name_nodes(nodes: Iterable[Node], taken: Iterable[str]) -> None:
    """Name nodes that have no name after their operators: `mul`, `mul_1`, ...; `sum_1` where Python has a `sum`."""
    used = set(taken)
    counts: dict[str, int] = {}
    for node in nodes:
        if node.name:
            continue
        stem: str = getattr(node.op, "_opname", "") or getattr(node.op, "__name__", "value")
        count = counts.get(stem, 1 if stem in _RESERVED else 0)
        node.name = f"{stem}_{count}" if count else stem
        while node.name in used:
            count += 1
            node.name = f"{stem}_{count}"
        counts[stem] = count + 1
        used.add(node.name)


def ancestors(wanted: Iterable[Node], stop: Set[Node] = frozenset()) -> set[Node]:
    """What the wanted nodes are computed from, themselves included, up to the nodes to stop at."""
    found: set[Node] = set()
    pending = [node for node in wanted if node not in stop]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [item for item in node.inputs() if item not in stop] if stop else node.inputs()
    return found


def live_nodes(
    graph: GraphBuilder, outputs: Iterable[Node | None], may_refuse: Callable[[Node], bool] = lambda node: False
) -> list[Node]:
    """Dead code elimination: what the outputs need, and what must run anyway.

    Sizes of the inputs stay: a partitioner may need to save them. So does what the forward runs although nothing reads
    it, if it `may_refuse` what it is given.
    """
    live: set[Node] = set()
    pending = [node for node in outputs if node is not None]
    pending += [node for node in graph.nodes if node.impure or isinstance(node.value, SymInt)]

    def follow() -> None:
        while pending:
            node = pending.pop()
            if node not in live:
                live.add(node)
                pending.extend(node.inputs())

    follow()
    for node in graph.nodes:
        if node not in live and not node.backward and may_refuse(node):
            node.impure = True
            pending.append(node)
    follow()
    return [node for node in graph.nodes if node in live]


# ---------------------------------------------------------------------------------------------------------------------
# What nodes are made from.
@dataclass(slots=True, eq=False, repr=False)
class Step:
    """One recorded operator call."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    grad_enabled: bool
    backward: bool
    stack: Stack
    repeats: int | None  # the earlier step whose random draw this one replays,
    follows: int | None = None  # and the step after whose draw it draws, in the same recomputation
    computed: Sequence[Any] | None = None  # what a decomposition of its functional variant gave, if it writes
    origin: Origin | None = None
    becomes_grad: bool = False  # autograd's copy for a `.grad`, of what the recording holds too
    read: Read | Reseed | None = None  # that it is

    def __repr__(self) -> str:
        return f"<{self.op}{', in backward' if self.backward else ''}>"
