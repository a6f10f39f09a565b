"""How much memory a graph keeps alive while it runs: every storage, from the operator that makes it to its last use.

A graph is run as compilers run it: a value is dropped behind its last use, inputs included (they come in a list that
the callee empties), and what is returned lives to the end. What the caller holds anyway (parameters, other inputs of
the program) counts as nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ..joint.graph import Part
from ..joint.ir import Node, nodes_in
from .storages import Numbers, Storages


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
    """Run a graph in thought.

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


def simulate(forward: Part, backward: Part, num_fwd_outputs: int) -> Simulation:
    """The memory of two graphs as a partitioner emitted them; what is saved has the same name on both sides.

    Args:
        forward: returns its own results, then what is saved.
        backward: takes what is saved, then tangents.
        num_fwd_outputs: how many results are the forward's own.
    """
    nodes, inputs, index = _numbered(forward)
    storages = Storages(nodes, inputs)
    count = len(forward.placeholders)
    pinned = {s for held in storages.holds[:count] for s in held}
    own = [index[id(node)] for node in nodes_in(forward.outputs[:num_fwd_outputs])]
    saved = [index[id(node)] for node in nodes_in(forward.outputs[num_fwd_outputs:])]
    order = range(count, len(nodes))
    first = alive_over(
        order, inputs, storages.holds, storages.makes, storages.sizes, range(count), [*own, *saved], pinned
    )
    free = pinned | {s for i in own for s in storages.holds[i]}
    by_name = {nodes[i].name: storages.holds[i] for i in saved}
    nodes, inputs, index = _numbered(backward)
    given = {i: by_name[node.name] for i, node in enumerate(backward.placeholders) if node.name in by_name}
    later = Storages(nodes, inputs, given, storages.sizes)
    count = len(backward.placeholders)
    returned = [index[id(node)] for node in nodes_in(backward.outputs)]
    order = range(count, len(nodes))
    second = alive_over(order, inputs, later.holds, later.makes, later.sizes, range(count), returned, free)
    unique = {s for held in by_name.values() for s in held} - free
    return Simulation(sum(storages.sizes[s] for s in unique), first, second)


def _numbered(part: Part) -> tuple[list[Node], list[Numbers], dict[int, int]]:
    nodes = [*part.placeholders, *part.nodes]
    index = {id(node): i for i, node in enumerate(nodes)}
    return nodes, [tuple(dict.fromkeys([index[id(item)] for item in node.inputs()])) for node in nodes], index
