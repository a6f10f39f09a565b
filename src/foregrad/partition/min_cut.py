"""What to save, as minimum cuts: saved bytes against the cost of computing things again."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from ..errors import PartitionError
from .model import Model
from .plan import Plan

# ---------------------------------------------------------------------------------------------------------------------
# Maximum flow on integers, by Dinic's algorithm: exact whatever the capacities are.
INFINITE = 1 << 200


class Network:
    """A flow network over numbered nodes.

    >>> network = Network(4)
    >>> for tail, head, capacity in ((0, 1, 3), (0, 2, 2), (1, 3, 2), (2, 3, 3)):
    ...     network.edge(tail, head, capacity)
    >>> network.maximum_flow(0, 3), sorted(network.reached_from(0))
    (4, [0, 1])

    Args:
        count: how many nodes there are.
    """

    def __init__(self, count: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(count)]
        self._heads: list[int] = []
        self._left: list[int] = []

    def edge(self, tail: int, head: int, capacity: int) -> None:
        """Add an edge; its reverse has the next number."""
        self._edges[tail].append(len(self._heads))
        self._edges[head].append(len(self._heads) + 1)
        self._heads += (head, tail)
        self._left += (capacity, 0)

    def maximum_flow(self, source: int, sink: int) -> int:
        """The value of a maximum flow, which stays in the network; `INFINITE` or more if nothing bounds it."""
        total = 0
        while (levels := self._levels(source, sink)) is not None:
            total += self._blocking_flow(source, sink, levels)
            if total >= INFINITE:
                break
        return total

    def reached_from(self, source: int) -> set[int]:
        """The source's side of the minimum cut that lies nearest to the source."""
        return self._reached(source, 0)

    def reaching(self, sink: int) -> set[int]:
        """The sink's side of the minimum cut that lies nearest to the sink."""
        return self._reached(sink, 1)

    def _reached(self, start: int, reverse: int) -> set[int]:
        heads, left, edges = self._heads, self._left, self._edges
        found = {start}
        pending = [start]
        while pending:
            for number in edges[pending.pop()]:
                head = heads[number]
                if left[number ^ reverse] and head not in found:
                    found.add(head)
                    pending.append(head)
        return found

    def _levels(self, source: int, sink: int) -> list[int] | None:
        """How far each node is from the sink in what is left; None if the source is cut off."""
        heads, left, edges = self._heads, self._left, self._edges
        levels = [-1] * len(edges)
        levels[sink] = 0
        pending = deque([sink])
        while pending:
            node = pending.popleft()
            if node == source:
                return levels
            following = levels[node] + 1
            for number in edges[node]:
                tail = heads[number]
                if levels[tail] < 0 and left[number ^ 1]:
                    levels[tail] = following
                    pending.append(tail)
        return None

    def _blocking_flow(self, source: int, sink: int, levels: list[int]) -> int:
        heads, left, edges = self._heads, self._left, self._edges
        place = [0] * len(edges)
        total = 0
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                pushed = min([left[number] for number in path])
                total += pushed
                if total >= INFINITE:
                    return total
                keep = len(path)
                for i in range(len(path) - 1, -1, -1):
                    number = path[i]
                    left[number ^ 1] += pushed
                    if left[number] < INFINITE:  # which stays what it is
                        left[number] -= pushed
                        if not left[number]:
                            keep = i
                node = heads[path[keep] ^ 1]
                del path[keep:]
                continue
            own, wanted = edges[node], levels[node] - 1
            i = place[node]
            while i < len(own):
                number = own[i]
                if left[number] and levels[heads[number]] == wanted:
                    break
                i += 1
            place[node] = i
            if i < len(own):
                path.append(own[i])
                node = heads[own[i]]
            elif path:
                levels[node] = -1
                node = heads[path.pop() ^ 1]
            else:
                return total


# ---------------------------------------------------------------------------------------------------------------------
# What to save, as a minimum cut: saved bytes against the cost of computing things again.
#
# Every value of the forward has an edge whose capacity is its size: if it is cut, the value is saved. A value on the
# sink's side is computed again, from values that are there too or saved, and what that costs is the capacity of an
# edge from the source. What must not be computed again hangs on the source for good.
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


# ---------------------------------------------------------------------------------------------------------------------
# A sequence of minimum cuts, each of which pays for memory at the moments at which the plans before it peaked.
#
# A saved value is alive from the start of the backward to its last use; one that is computed again, from its first use
# to its last. If a byte has a price at each moment, both cost their size times the prices of the moments at which they
# are alive, and the cheapest plan is a minimum cut. Prices go where memory peaks, as in a game that is played
# repeatedly: moments against plans.
NEVER = 1 << 60


class Prices:
    """Prices of the moments of a backward, by the number of its own operators that have run.

    Args:
        model: the graph.
        order: of the backward's own operators.
    """

    def __init__(self, model: Model, order: Sequence[int]) -> None:
        self.model = model
        self.order = order
        self.time = {i: t for t, i in enumerate(order)}
        self.moments = len(model.late_needed) + 1
        self._counts: dict[int, int] = {0: 1}
        self._everyone = self._intervals(frozenset())

    def note(self, plan: Plan) -> None:
        """A plan has peaked: its moment becomes dearer."""
        moment = self.moment_of_peak(plan)
        self._counts[moment] = self._counts.get(moment, 0) + 1

    def moment_of_peak(self, plan: Plan) -> int:
        """When a plan has most memory alive; the end of the forward is the start of the backward."""
        alive = plan.backward_memory.alive
        if not alive or plan.forward_memory.peak >= plan.backward_memory.peak:
            return 0
        at = max(range(len(alive)), key=alive.__getitem__)
        for i in itertools.islice(plan.backward_order, at, None):
            if i in self.time:
                return self.time[i]
        return self.moments - 1

    def cut(self, plan: Plan, flop: float | None) -> Plan:
        """The cheapest plan at these prices, judged by the uses that values have in an earlier plan.

        Args:
            plan: the earlier one.
            flop: the price of a floating-point operation; None where none may be done twice.
        """
        model = self.model
        kept = frozenset(plan.saved)
        first, last = self._intervals(kept)
        all_last = self._everyone[1]
        total = sum(self._counts.values())
        before = [0] * (self.moments + 1)
        for moment, count in self._counts.items():
            before[moment + 1] += BYTE * count // total
        for t in range(self.moments):
            before[t + 1] += before[t]

        def weight(i: int) -> int:
            end = last.get(i, -1)
            if end < 0:
                end = all_last.get(i, 0)
            return model.bytes(i) * max(before[end + 1], 1)

        def price(i: int) -> int | None:
            flops = model.flops_again[i]
            if flops and flop is None:
                return None
            cost = model.moved_again[i]
            if flops:
                cost += int(flops * flop)  # type: ignore[operator]
            start = first.get(i, NEVER)
            if start != NEVER:
                made = sum([model.sizes[s] for s in model.makes[i]])
                cost += made * (before[last[i] + 1] - before[start])
            return cost

        return Plan(model, frozenset(minimum_cut(model, price, weight)), self.order)

    def _intervals(self, saved: frozenset[int]) -> tuple[dict[int, int], dict[int, int]]:
        """First and last use of each value that a cut decides about, where the saved ones need nothing."""
        model, time = self.model, self.time
        base, users = model.base, model.users
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        decided = set(relevant(model).nodes)
        end = self.moments - 1
        direct = set(model.wanted)
        for i in range(len(model.nodes) - 1, model.placeholders - 1, -1):
            if model.late[i] or (base[i] == i and i not in decided):
                continue
            start, stop = first.get(i, NEVER), last.get(i, -1)
            if i in direct:
                start, stop = min(start, end), end
            for user in users[i]:
                if user in time:
                    at = time[user]
                    start, stop = min(start, at), max(stop, at)
                elif base[user] != user:
                    if user in first:
                        start, stop = min(start, first[user]), max(stop, last[user])
                elif user in first and user not in saved:
                    start, stop = min(start, first[user]), max(stop, first[user])
            if start != NEVER:
                first[i], last[i] = start, stop
        return first, last
