"""What to save, as a minimum cut: saved bytes against the cost of computing things again.

Every value of the forward has an edge whose capacity is its size: if it is cut, the value is saved. A value on the
sink's side is computed again, from values that are there too or saved, and what that costs is the capacity of an edge
from the source. What must not be computed again hangs on the source for good.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import PartitionError
from .flow import INFINITE, Network
from .model import Model

BYTE = 1024
"""How many bytes moved a byte saved is worth."""


def minimum_cut(
    model: Model,
    price: Callable[[int], int | None],
    weight: Callable[[int], int] | None = None,
) -> set[int]:
    """The nodes to save.

    Args:
        model: the graph.
        price: what it costs to compute a node again; None if it must not be.
        weight: what it costs to save a node; `BYTE` for each of its bytes if not given.
    """
    effective = relevant(model)
    count = len(effective.nodes)
    place = effective.place
    source, sink = 2 * count, 2 * count + 1
    network = Network(2 * count + 2)
    for i, k in place.items():
        cost = None if model.banned[i] is not None else 0 if model.marked[i] else price(i)
        tail = 2 * k
        if cost is None:
            tail = source
        elif cost:
            network.edge(source, tail, cost)
        capacity = INFINITE
        if model.savable[i]:
            capacity = BYTE * model.bytes(i) if weight is None else weight(i)
            capacity += i not in model.early  # if all else is equal, the forward does no more than it must
        network.edge(tail, 2 * k + 1, capacity)
        if cost is not None:
            for item in effective.inputs(i):
                network.edge(2 * place[item] + 1, tail, INFINITE)
    for i in effective.read:
        network.edge(2 * place[i] + 1, sink, INFINITE)
    if network.maximum_flow(source, sink) >= INFINITE:
        raise PartitionError("The marks on this graph contradict each other: something must be saved and cannot be.")
    after = network.reaching(sink)
    return {i for i, k in place.items() if 2 * k + 1 in after and 2 * k not in after}


def relevant(model: Model) -> Relevant:
    """What a cut decides about, found once for each model."""
    if model.relevant is None:
        model.relevant = Relevant(model)
    found: Relevant = model.relevant
    return found


class Relevant:
    """The nodes that a cut decides about: views are computed again for nothing, inputs and sizes are there anyway."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.read = self._bases(model.read)
        found: set[int] = set()
        pending = list(self.read)
        while pending:
            i = pending.pop()
            if i not in found:
                found.add(i)
                pending.extend(self._bases(model.inputs[i]))
        self.nodes = sorted(found)
        self.place = {i: k for k, i in enumerate(self.nodes)}
        self._inputs = {i: self._bases(model.inputs[i]) for i in self.nodes}

    def _bases(self, numbers: set[int] | tuple[int, ...]) -> list[int]:
        model = self._model
        bases = dict.fromkeys([model.base[i] for i in numbers])
        return [i for i in bases if i >= model.placeholders and not model.symbolic[i] and not model.is_constant[i]]

    def inputs(self, i: int) -> list[int]:
        """What a node is computed from."""
        return self._inputs[i]
