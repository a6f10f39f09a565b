"""Local search: where the memory peaks, what would be computed again there is saved instead, or the other way round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .plan import Plan


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
