"""Maximum flow on integers, by Dinic's algorithm: exact whatever the capacities are."""

from __future__ import annotations

from collections import deque

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
