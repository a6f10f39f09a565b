"""A sequence of minimum cuts, each of which pays for memory at the moments at which the plans before it peaked.

A saved value is alive from the start of the backward to its last use; one that is computed again, from its first use to
its last. If a byte has a price at each moment, both cost their size times the prices of the moments at which they are
alive, and the cheapest plan is a minimum cut. Prices go where memory peaks, as in a game that is played repeatedly:
moments against plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .mincut import BYTE, minimum_cut, relevant
from .model import Model
from .plan import Plan

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
