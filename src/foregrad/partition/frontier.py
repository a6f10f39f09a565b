"""Plans from which a memory budget chooses: the plain one, minimum cuts at many prices, square-root segments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from .mincut import BYTE, minimum_cut, relevant
from .model import Model
from .plan import Plan
from .reweigh import Prices
from .schedule import orders
from .search import lower_peak

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
        return found if found.peak + found.saved_bytes < best.peak + best.saved_bytes else best

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
