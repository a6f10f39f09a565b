"""Simulate the memory of a graph: which storage each value keeps alive, and when it is freed."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._torch import OpOverload
from ..graph.graph import Graph, Node, get_constant, nodes_in
from ..graph.released import of_backward
from ..ops import Kind, op_info
from ..slots import Saved, Size
from .costs import bytes_of

# ---------------------------------------------------------------------------------------------------------------------
# Which memory the value of each node keeps alive: a view holds what it looks at, an operator makes memory anew.
Numbers = tuple[int, ...]


class Storages:
    """Storages are numbered as they are made.

    Args:
        nodes: in their order, placeholders first.
        inputs: for each, the numbers of the nodes that it reads.
        given: memory that placeholders hold, by their numbers, and its sizes, where it is known from elsewhere.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        inputs: Sequence[Numbers],
        given: Mapping[int, Numbers] | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self.sizes = list(sizes)
        self.holds: list[Numbers] = []  # what a node's value keeps alive
        self.makes: list[Numbers] = []  # what of it is new
        self.base: list[int] = []  # whose value a view looks at; a node itself if it is none
        elements: dict[int, tuple[Numbers, ...]] = {}
        for i, node in enumerate(nodes):
            base, op = i, node.op
            made: Numbers = ()
            if given is not None and i in given:
                held = given[i]
            elif op is operator.getitem and inputs[i]:
                container = inputs[i][0]
                known, index = elements.get(container), node.args[1]
                held = known[index] if known is not None and index.__class__ is int else self.holds[container]
                if self.base[container] != container:
                    base = self.base[container]
            elif op.__class__ is OpOverload and inputs[i] and _looks_at_argument(op, node):
                source = inputs[i][0]
                base, held = self.base[source], self.holds[source]
                if isinstance(node.value, (tuple, list)):
                    elements[i] = (held,) * len(node.value)
            elif op is get_constant:
                held = ()
            elif isinstance(node.value, (tuple, list)):
                elements[i] = tuple(self._new(item) for item in node.value)
                made = held = tuple([s for element in elements[i] for s in element])
            else:
                made = held = self._new(node.value)
            self.holds.append(held)
            self.makes.append(made)
            self.base.append(base)

    def _new(self, value: Any) -> Numbers:
        if isinstance(value, Tensor):
            self.sizes.append(bytes_of(value))
            return (len(self.sizes) - 1,)
        if isinstance(value, (tuple, list)):
            return tuple([s for item in value for s in self._new(item)])
        return ()


def _looks_at_argument(op: OpOverload, node: Node) -> bool:
    info = op_info(op)
    return info.kind is Kind.VIEW or (bool(info.written) and node.impure)


# ---------------------------------------------------------------------------------------------------------------------
# How much memory a graph keeps alive while it runs: every storage, from the operator that makes it to its last use.
#
# A graph is run as compilers run it: a value is dropped after its last use, inputs included (they come in a list that
# the callee empties), and what is returned lives to the end. What the caller holds anyway (parameters, other inputs of
# the program) counts as nothing.
@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes alive at each step of a graph: while operator number k runs, and at the end.

    >>> Memory((8, 24, 16), 16).peak
    24
    """

    alive: tuple[int, ...]
    after: int

    @property
    def peak(self) -> int:
        """The most at any moment."""
        return max(self.alive, default=self.after)


@dataclass(frozen=True, slots=True)
class Simulation:
    """The memory of a forward and its backward, in bytes beyond what the caller holds."""

    saved: int  # unique storages between the two
    forward: Memory
    backward: Memory

    @property
    def peak(self) -> int:
        """The most at any moment of a training step."""
        return max(self.forward.peak, self.backward.peak)


def alive_over(
    order: Sequence[int],
    inputs: Sequence[Numbers],
    holds: Sequence[Numbers],
    makes: Sequence[Numbers],
    sizes: Sequence[int],
    given: Iterable[int],
    returned: Iterable[int],
    free: Collection[int],
) -> Memory:
    """Simulate the execution of a graph.

    Args:
        order: the numbers of its nodes as they run; `inputs`, `holds` and `makes` are by number.
        inputs: what each node reads.
        holds: the storages that its value keeps alive.
        makes: those of them that are new.
        sizes: of all storages.
        given: the graph's placeholders.
        returned: what lives to the end.
        free: storages that the caller holds in any case.
    """
    end = len(order)
    last: dict[int, int] = dict.fromkeys(given, 0)
    for position, i in enumerate(order):
        last[i] = position
        for item in inputs[i]:
            last[item] = position
    for i in returned:
        last[i] = end
    until: dict[int, int] = {}
    for i, position in last.items():
        for s in holds[i]:
            if until.get(s, -1) < position:
                until[s] = position
    dying = [0] * (end + 1)
    for s, position in until.items():
        if s not in free:
            dying[position] += sizes[s]
    now = sum(sizes[s] for s in {s for i in given for s in holds[i]} if s not in free)
    alive = []
    for position, i in enumerate(order):
        for s in makes[i]:
            if s not in free:
                now += sizes[s]
        alive.append(now)
        now -= dying[position]
    return Memory(tuple(alive), now)


def simulate_alone(graph: Graph) -> Memory:
    """The memory of a graph that has no backward, in bytes beyond what the caller holds."""
    nodes, inputs, index = _numbered(graph)
    storages = Storages(nodes, inputs)
    count = len(graph.inputs)
    pinned = {s for held in storages.holds[:count] for s in held}
    returned = [index[node] for node in nodes_in(graph.results)]
    tables = inputs, storages.holds, storages.makes, storages.sizes
    return alive_over(range(count, len(nodes)), *tables, range(count), returned, pinned)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of a whole training step, by the sizes of the recording: what the caller holds, and what the step adds.

    >>> print(StepMemory(state=8 << 20, activations=2 << 20, gradients=1 << 20))
    state 8.0 MiB; at the peak, activations 2.0 MiB and gradients 1.0 MiB
    """

    state: int  # of what it is given: parameters, optimizer state, buffers, batches
    activations: int  # alive at the peak, and of no update
    gradients: int  # alive at the peak, for updates that follow

    @property
    def peak(self) -> int:
        """The most at any moment, beyond what the caller holds."""
        return self.activations + self.gradients

    def __str__(self) -> str:
        state, activations, gradients = (f"{n / 2**20:.1f} MiB" for n in (self.state, self.activations, self.gradients))
        return f"state {state}; at the peak, activations {activations} and gradients {gradients}"


def _peak(
    storages: Storages, inputs: Sequence[Sequence[int]], order: range, last: Mapping[int, int], state: Set[int]
) -> tuple[int, set[int]]:
    """The most bytes that are alive while nodes run in order, and the storages that are alive then."""
    best: set[int] = set()
    alive: set[int] = set()
    size, most = 0, 0
    for i in order:
        new = {s for s in storages.makes[i] if s not in state}
        alive |= new
        size += sum(storages.sizes[s] for s in new)
        if size > most:
            most, best = size, set(alive)
        dead = {s for item in (i, *inputs[i]) for s in storages.holds[item] if last[s] == i and s in alive}
        alive -= dead
        size -= sum(storages.sizes[s] for s in dead)
    return most, best


def step_memory(graph: Graph) -> StepMemory:
    """Simulate a graph with a backward and updates inside; a gradient is what a backward makes and others read."""
    nodes, inputs, index = _numbered(graph)
    storages = Storages(nodes, inputs)
    count = len(graph.inputs)
    state = {s for held in storages.holds[:count] for s in held}
    uses = [(i, s) for i in range(count, len(nodes)) for item in (i, *inputs[i]) for s in storages.holds[item]]
    last = {s: i for i, s in uses}  # the last one counts
    made_in_backward = {s for i, made in enumerate(storages.makes) if of_backward(nodes[i]) for s in made}
    gradients = {s for i, s in uses if s in made_in_backward and not of_backward(nodes[i])}
    for node in nodes_in(graph.results):
        last.update(dict.fromkeys(storages.holds[index[node]], len(nodes)))
    most, best = _peak(storages, inputs, range(count, len(nodes)), last, state)
    held = sum(storages.sizes[s] for s in best & gradients)
    return StepMemory(sum(storages.sizes[s] for s in state), most - held, held)


def simulate(forward: Graph, backward: Graph) -> Simulation:
    """The memory of two graphs as a partitioner emitted them; what is saved has the same name on both sides."""
    nodes, inputs, index = _numbered(forward)
    storages = Storages(nodes, inputs)
    count = len(forward.inputs)
    pinned = {s for held in storages.holds[:count] for s in held}
    returned = [index[node] for node in nodes_in(forward.results)]
    saved = [index[node] for _, node in forward.outputs_of(Saved, Size)]
    tables = inputs, storages.holds, storages.makes, storages.sizes
    first = alive_over(range(count, len(nodes)), *tables, range(count), returned, pinned)
    own = nodes_in(value for slot, value in forward.outputs if not isinstance(slot, (Saved, Size)))
    free = pinned | {s for node in own for s in storages.holds[index[node]]}
    by_name = {nodes[i].name: storages.holds[i] for i in saved}
    nodes, inputs, index = _numbered(backward)
    given = {i: by_name[node.name] for i, node in enumerate(backward.inputs) if node.name in by_name}
    later = Storages(nodes, inputs, given, storages.sizes)
    count = len(backward.inputs)
    returned = [index[node] for node in nodes_in(backward.results)]
    tables = inputs, later.holds, later.makes, later.sizes
    second = alive_over(range(count, len(nodes)), *tables, range(count), returned, free)
    unique = {s for held in by_name.values() for s in held} - free
    return Simulation(sum(storages.sizes[s] for s in unique), first, second)


def _numbered(graph: Graph) -> tuple[list[Node], list[Numbers], dict[Node, int]]:
    nodes = [*graph.inputs, *graph.nodes]
    index = {node: i for i, node in enumerate(nodes)}
    return nodes, [tuple(dict.fromkeys([index[item] for item in node.inputs()])) for node in nodes], index
