"""Other orders for the backward's own operators, in which what frees memory runs early.

Autograd's order is the first candidate; a simulation says which is best. Draws and effects never change places.
"""

from __future__ import annotations

from collections.abc import Iterator

from .model import Model


def orders(model: Model) -> Iterator[list[int]]:
    """Orders of the nodes that belong to the backward, autograd's own first."""
    yield model.late_needed
    if len(model.late_needed) > 2:
        yield _greedy(model, eager=True)
        yield _greedy(model, eager=False)


def _greedy(model: Model, eager: bool) -> list[int]:
    """One operator after another, as little memory as possible added by each.

    Args:
        model: the graph.
        eager: keep to autograd's order where nothing frees memory.
    """
    own = model.late_needed
    inside = set(own)
    sizes, holds, makes, free = model.sizes, model.holds, model.makes, model.free
    returned = {s for i in model.numbers(model.backward_outputs) for s in holds[i]}
    waits = {i: {item for item in model.inputs[i] if item in inside} for i in own}
    followers: dict[int, list[int]] = {i: [user for user in model.users[i] if user in inside] for i in own}
    previous = None
    for i in own:
        if model.nodes[i].impure:
            if previous is not None:
                waits[i].add(previous)
                followers[previous].append(i)
            previous = i
    left: dict[int, int] = {}  # uses of a storage that are still to come
    reads: dict[int, list[int]] = {}
    for i in own:
        reads[i] = list(dict.fromkeys(s for item in model.inputs[i] for s in holds[item] if s not in free))
        for s in reads[i]:
            left[s] = left.get(s, 0) + 1
    missing = {i: len(items) for i, items in waits.items()}
    made = {i: sum(sizes[s] for s in makes[i] if s not in free) for i in own}
    ready = [i for i in own if not missing[i]]
    order: list[int] = []
    while ready:
        best, best_key = -1, (1 << 62, 0)
        for i in ready:
            grows = made[i]
            for s in reads[i]:
                if left[s] == 1 and s not in returned:
                    grows -= sizes[s]
            key = (int(grows > 0) if eager else grows, i)
            if key < best_key:
                best, best_key = i, key
        ready.remove(best)
        order.append(best)
        for s in reads[best]:
            left[s] -= 1
        for user in followers[best]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return order
