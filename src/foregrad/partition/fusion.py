"""What a compiler fuses: values that are worked out where they are read, and never are memory.

A backend says so in the `meta["lowered"]` of the nodes of a joint graph: "inlined" for what is worked out wherever it
is read, "loops" for what is worked out once, from what it reads. Of all other operators nothing is known: they are
kernels, which read and write memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from ..graph.graph import Node
from .memory import Numbers

Lowered = Literal["inlined", "loops"]
READS = 4  # of memory: what is read in several places and takes more is worked out once


def lowered(node: Node) -> Lowered | None:
    """What the compiler makes of a node, as far as it was asked."""
    return node.meta.get("lowered") if node.meta is not None else None


class Fusion:
    """Which values of a graph are fused, in the order in which a plan runs it.

    Args:
        kinds: what becomes of each node.
        inputs: what each reads.
        base: whose value a view looks at; a node itself if it is none.
    """

    def __init__(self, kinds: Sequence[Lowered | None], inputs: Sequence[Numbers], base: Sequence[int]) -> None:
        self.kinds = kinds
        self.inputs = inputs
        self.base = base

    def applied(
        self, order: Sequence[int], holds: Sequence[Numbers], makes: Sequence[Numbers], returned: Iterable[int]
    ) -> tuple[Sequence[Numbers], Sequence[Numbers]]:
        """What values hold and make, once those that are fused are no memory and keep alive what they are made of."""
        kinds, inputs, base = self.kinds, self.inputs, self.base
        in_memory = {base[i] for i in returned}
        users: Counter[int] = Counter()
        for i in order:
            if base[i] == i:
                read = {base[item] for item in inputs[i]}
                users.update(read)
                if kinds[i] is None:
                    in_memory |= read
        new_holds, new_makes = list(holds), list(makes)
        takes: dict[int, int] = {}  # reads of memory that go into a value that is fused
        instead: dict[int, Numbers] = {}  # of a storage that is not there
        for i in order:
            if base[i] == i and kinds[i] == "inlined" and i not in in_memory and len(makes[i]) == 1:
                reads = sum(takes.get(base[item], 1) for item in inputs[i])
                if users[i] <= 1 or reads <= READS:
                    takes[i] = reads
                    new_makes[i] = ()
                    instead[makes[i][0]] = tuple(dict.fromkeys([s for item in inputs[i] for s in new_holds[item]]))
            if instead and not instead.keys().isdisjoint(new_holds[i]):
                new_holds[i] = tuple(dict.fromkeys([t for s in new_holds[i] for t in instead.get(s, (s,))]))
        return new_holds, new_makes
