"""Plans from which a memory budget chooses: minimum cuts at many prices, segments, local search, other orders."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from .min_cut import BYTE, Prices, minimum_cut, relevant
from .model import Model
from .plan import Plan


# ---------------------------------------------------------------------------------------------------------------------
# Local search: where the memory peaks, what would be computed again there is saved instead, or the other way round.
def lower_peak(plan: Plan, evaluations: int) -> Plan:
    """A plan with a lower peak that computes no more again than the given one.

    Args:
        plan: where to start.
        evaluations: how many other plans may be looked at.
    """
    while evaluations > 0:
        candidates = _worth_saving(plan)[:evaluations]
        if not candidates:
            break
        evaluations -= len(candidates)
        found = _best(plan, (frozenset({*plan.kept, i}) for i in candidates))
        if found is None:
            break
        plan = found
    return plan


def _best(plan: Plan, kept: Iterable[frozenset[int]]) -> Plan | None:
    """The best of some plans, if it is better than a given one."""
    threshold = plan.peak - plan.peak // 50
    best, best_score = None, (plan.peak, excess(plan, threshold), plan.saved_bytes)
    for item in kept:
        other = replace(plan, kept=item)
        if other.backward_memory.peak > best_score[0]:
            continue
        score = (other.peak, excess(other, threshold), other.saved_bytes)
        if score < best_score:
            best, best_score = other, score
    return best


def excess(plan: Plan, threshold: int) -> int:
    """How much memory is alive above a threshold, summed over time: it falls before the peak itself does."""
    return sum(a - threshold for a in plan.backward_memory.alive if a > threshold)


def _worth_saving(plan: Plan) -> list[int]:
    """Values that are computed again around the peak of the backward, smallest first."""
    model, order = plan.model, plan.backward_order
    alive = plan.backward_memory.alive
    if not alive:
        return []
    at = max(range(len(alive)), key=alive.__getitem__)
    again = plan.again
    first = at
    while first and order[first] in again:
        first -= 1
    last = at
    while last + 1 < len(order) and order[last] in again:
        last += 1
    stretch = [i for i in order[first : last + 1] if i in again]
    used = [item for i in order[at : last + 1] for item in model.inputs[i] if item in again]
    found = {model.base[i] for i in (*stretch, *used)}
    savable = [i for i in found if i >= model.placeholders and model.savable[i] and i not in plan.kept]
    before = max(alive[:first], default=0)
    worth = [i for i in savable if before + model.bytes(i) < alive[at]]
    return sorted(worth, key=lambda i: (model.bytes(i), i))


def with_less_work(plan: Plan) -> Plan:
    """The plan, with what kernels read in the backward saved where the peak does not rise for it.

    What a compiler fuses is worked out again where it is read; what a kernel reads has to be written again.
    """
    model = plan.model
    if model.fusion is None:
        return plan
    kernels = [i for i in plan.backward_order if model.lowered[i] is None and model.base[i] == i]
    read = {model.base[item] for i in kernels for item in model.inputs[i]}
    worth = [i for i in sorted(plan.again & read, reverse=True) if model.savable[i] and model.lowered[i] is not None]
    return _saving_too(plan, worth, plan.peak)


def _saving_too(plan: Plan, more: Sequence[int], peak: int) -> Plan:
    """A plan that saves as many of some values as stay within a peak, looked for by halves."""
    other = replace(plan, kept=frozenset({*plan.kept, *more}))
    if not more or other.peak <= peak:
        return other
    if len(more) == 1:
        return plan
    middle = len(more) // 2
    return _saving_too(_saving_too(plan, more[:middle], peak), more[middle:], peak)


# ---------------------------------------------------------------------------------------------------------------------
# Other orders for the backward's own operators, in which what frees memory runs early.
#
# Autograd's order is the first candidate; a simulation says which is best. Draws and effects never change places.
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
    own, sizes = model.late_needed, model.sizes
    followers, missing = _dependencies(model)
    reads = {i: {s for item in model.inputs[i] for s in model.holds[item] if s not in model.free} for i in own}
    made = {i: sum(sizes[s] for s in model.makes[i] if s not in model.free) for i in own}
    left = Counter(s for storages in reads.values() for s in storages)  # uses of a storage that are still to come
    left.update(s for i in model.backward_results for s in model.holds[i])  # a result keeps its storages
    ready = [i for i in own if not missing[i]]
    order: list[int] = []
    while ready:
        best, best_key = -1, (1 << 62, 0)
        for i in ready:
            grows = made[i]
            for s in reads[i]:
                if left[s] == 1:
                    grows -= sizes[s]
            key = (int(grows > 0) if eager else grows, i)
            if key < best_key:
                best, best_key = i, key
        ready.remove(best)
        order.append(best)
        left.subtract(reads[best])
        for user in followers[best]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return order


def _dependencies(model: Model) -> tuple[dict[int, list[int]], dict[int, int]]:
    """For each operator of the backward, those that wait for it, and for how many it waits: impure ones in order."""
    own, inside = model.late_needed, set(model.late_needed)
    waits = {i: {item for item in model.inputs[i] if item in inside} for i in own}
    for first, second in itertools.pairwise(i for i in own if model.nodes[i].impure):
        waits[second].add(first)
    followers: dict[int, list[int]] = {i: [] for i in own}
    for i, items in waits.items():
        for item in items:
            followers[item].append(i)
    return followers, {i: len(items) for i, items in waits.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Plans from which a memory budget chooses: the plain one, minimum cuts at many prices, square-root segments.
_ROUNDS = 3
_MIXTURES = 10
_WORK = (None, *(2**k for k in range(13, 3, -1)), 0)
"""Floating-point operations that a byte at the peak is worth; None where no product may be done twice."""


class Frontier:
    """The plans of a joint graph that no other plan beats in both peak and work.

    Args:
        model: the graph.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._known: dict[tuple[tuple[int, ...], int], Plan] = {}

    def _plan(self, plan: Plan) -> Plan:
        """The plan, or one that was looked at before and saves the same in the same order."""
        return self._known.setdefault((tuple(plan.saved), id(plan.order)), plan)

    @cached_property
    def plain(self) -> Plan:
        """Saves what the backward reads of the forward's own nodes, and computes nothing twice."""
        model = self.model
        decided = relevant(model)
        keep = {i for i in decided.nodes if model.savable[i] and not model.nodes[i].backward}
        return Plan(model, frozenset(keep))

    @cached_property
    def smallest(self) -> Plan:
        """Saves the fewest bytes that can be saved without doing products twice, in the best order."""
        model = self.model
        kept = frozenset(minimum_cut(model, lambda i: None if model.flops_again[i] else model.moved_again[i]))
        return min((Plan(model, kept, order) for order in orders(model)), key=lambda plan: plan.peak)

    @cached_property
    def balanced(self) -> Plan:
        """The lowest peak that was found without doing products twice, where it is worth the bytes saved for it."""
        rounds = self._rounds(self.smallest, None, _ROUNDS)
        best = min((self.smallest, *rounds), key=lambda plan: (plan.peak + plan.saved_bytes, plan.saved_bytes))
        found = lower_peak(best, 24)
        return with_less_work(found if found.peak + found.saved_bytes < best.peak + best.saved_bytes else best)

    @cached_property
    def plans(self) -> list[Plan]:
        """All of them, from the highest peak to the lowest; work grows on the way."""
        found = [self.plain, self.smallest, self.balanced]
        starts = [self.smallest]
        if self._order is not self.model.late_needed:
            starts.append(replace(self.smallest, order=self.model.late_needed))
        for start, work in itertools.product(starts, _WORK):
            price = None if work is None else BYTE / work if work else 0.0
            found += self._rounds(start, price, _ROUNDS)
        found += self._segments()
        tried: set[tuple[int, int]] = set()
        for _ in range(3):
            for first, second in itertools.pairwise(_undominated(found)):
                pair = id(first), id(second)
                if first.peak - second.peak > first.peak // 100 and pair not in tried:  # a gap worth closing
                    tried.add(pair)
                    found += self._mixed(first, second)
        return _undominated(found)

    def _mixed(self, first: Plan, second: Plan) -> Iterator[Plan]:
        """Plans that follow one plan in the first part of the forward, and another in the rest."""
        model = self.model
        differing = sorted(first.again ^ second.again)
        if len(differing) < 2:
            return
        places = {differing[len(differing) * k // _MIXTURES] for k in range(1, _MIXTURES)}
        for place in sorted(places):
            for a, b in ((first, second), (second, first)):
                kept = {*(i for i in a.saved if i < place), *(i for i in b.saved if i >= place)}
                yield self._plan(Plan(model, frozenset(kept), a.order))

    def saving(self, fraction: float) -> Plan:
        """The least work for a part of the bytes that `smallest` saves: P-7's budget, which 0 brings down to inputs."""
        limit = fraction * self.smallest.saved_bytes
        found = [self.smallest]
        for work in (*_WORK[1:-1], 0):
            price = BYTE / work if work else 0.0
            found.append(self._cheapest(price))
            if found[-1].saved_bytes <= limit:
                break
        for plan in self._mixed(found[-2], found[-1]) if fraction else ():
            found.append(plan)
        fitting = [plan for plan in found if plan.saved_bytes <= limit]
        return min(fitting, key=lambda plan: (plan.flops, plan.peak)) if fitting else found[-1]

    def _cheapest(self, price: float) -> Plan:
        model = self.model
        free = not price
        kept = minimum_cut(model, lambda i: 0 if free else model.moved_again[i] + int(model.flops_again[i] * price))
        return Plan(model, frozenset(kept), self._order)

    @property
    def _order(self) -> Sequence[int]:
        order = self.smallest.order
        assert order is not None
        return order

    def _rounds(self, plan: Plan, price: float | None, rounds: int) -> Iterator[Plan]:
        assert plan.order is not None
        prices = Prices(self.model, plan.order)
        for _ in range(rounds):
            prices.note(plan)
            plan = self._plan(prices.cut(plan, price))
            yield plan

    def _segments(self) -> Iterator[Plan]:
        """Save about the square root of the forward's values, evenly spaced where little is alive."""
        model = self.model
        decided = relevant(model)
        savable = [i for i in decided.nodes if model.savable[i]]
        if len(savable) < 9:
            return
        narrow = _bottlenecks(model, savable)
        for count in {round(math.sqrt(len(narrow))), 2 * round(math.sqrt(len(narrow)))}:
            step = max(1, len(narrow) // max(1, count))
            yield self._plan(Plan(model, frozenset(narrow[::step]), self._order))


def _bottlenecks(model: Model, savable: list[int]) -> list[int]:
    """Values at which the forward could be interrupted with little else alive."""
    last = {i: max((user for user in model.users[i] if not model.nodes[user].backward), default=i) for i in savable}
    order = sorted(savable)
    found: list[int] = []
    reach: list[int] = []
    for i in order:
        reach = [end for end in reach if end > i]
        if len(reach) <= 1:
            found.append(i)
        reach.append(last[i])
    return found or order


def _undominated(plans: list[Plan]) -> list[Plan]:
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.flops, plan.peak, plan.moved)):
        if not found or plan.peak < found[-1].peak:
            found.append(plan)
    return found
