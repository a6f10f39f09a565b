"""Say what a partition saves and computes again, why, and how much memory is alive over time."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

from .plan import Plan


@dataclass(frozen=True, slots=True)
class Row:
    """One value of the forward that the backward needs."""

    name: str
    operator: str
    saved: bool  # or else computed again
    bytes: int  # that its memory takes, beyond what the caller holds
    flops: int  # that computing it once more costs
    line: str  # of the user's program
    reason: str


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What a partition does; all of it is plain data.

    Args:
        rows: values that are saved, then those that are computed again.
        saved_bytes: unique memory between forward and backward, beyond the inputs.
        flops: floating-point operations that are done twice.
        forward_memory: bytes alive while each operator of the forward runs, with the operator's name.
        backward_memory: the same for the backward.
    """

    rows: tuple[Row, ...]
    saved_bytes: int
    flops: int
    forward_memory: tuple[tuple[str, int], ...]
    backward_memory: tuple[tuple[str, int], ...]

    @property
    def peak(self) -> int:
        """The most bytes alive at any moment, beyond the inputs."""
        return max((alive for _, alive in (*self.forward_memory, *self.backward_memory)), default=0)

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        """The rows as text, those that differ in their names only as one, under `HEAD`; at most 40."""
        groups = sorted(_grouped(self.rows), key=lambda group: (not group[0].saved, -sum(r.bytes for r in group)))
        return tuple(map(_cells, groups[:_SHOWN]))

    @property
    def summary(self) -> tuple[str, ...]:
        """What the table does not show, and the sums."""
        hidden = len(_grouped(self.rows)) - _SHOWN
        inputs = sum(row.saved and row.operator == "input" for row in self.rows)
        views = sum(row.reason == _VIEW for row in self.rows)
        more = (f"... and {hidden} more; `rows` has all of them",) if hidden > 0 else ()
        return (
            *more,
            f"beside them {inputs} inputs, which the caller holds; {views} views and elements, which take no memory",
            f"saved {self.saved_bytes / 1024:.1f} KiB, computed again {self.flops / 1e6:.1f} MFLOP, "
            f"peak {self.peak / 1024:.1f} KiB beyond the inputs",
        )

    def __str__(self) -> str:
        return "\n".join((*columns((HEAD, *self.table), NUMBERS), *self.summary))


def columns(rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> list[str]:
    """Rows of cells as lines of text; columns of numbers are aligned to the right.

    >>> columns((("a", "12", "x"), ("long", "3", "")), numbers=(1,))
    ['a     12  x', 'long   3']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def aligned(k: int, cell: str) -> str:
        return cell.rjust(widths[k]) if k in numbers else cell.ljust(widths[k])

    return ["  ".join(aligned(k, cell) for k, cell in enumerate(row)).rstrip() for row in rows]


HEAD = ("", "values", "operator", "KiB", "MFLOP", "why", "where")
NUMBERS = (3, 4)  # columns of numbers
_VIEW = "a view or an element"
_SHOWN = 40


def _grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in their names only stand together; inputs and views of the program say little."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.operator != "input" and row.reason != _VIEW:
            groups.setdefault((row.saved, row.operator, row.reason, row.line), []).append(row)
    return list(groups.values())


def _cells(group: Sequence[Row]) -> tuple[str, ...]:
    first = group[0]
    values = first.name if len(group) == 1 else f"{len(group)}: {first.name}, ..."
    sizes = f"{sum(row.bytes for row in group) / 1024:.1f}", f"{sum(row.flops for row in group) / 1e6:.1f}"
    return "saved" if first.saved else "again", values, first.operator, *sizes, first.reason, _short(first.line)


def _short(line: str) -> str:
    """Where a line of the program is, as `file.py:12 in name`.

    >>> _short('File "/home/user/model.py", line 12, in forward')
    'model.py:12 in forward'
    """
    found = re.match(r'File "(?:.*[/\\])?([^"]*)", line (\d+), in (.*)', line)
    return f"{found[1]}:{found[2]} in {found[3]}" if found else line


def report_of(plan: Plan) -> PartitionReport:
    """The report about a plan."""
    model = plan.model
    rows = [_row(plan, i, saved=True) for i in plan.saved] + [_row(plan, i, saved=False) for i in plan.recomputed]
    names = [node.name for node in model.nodes]
    return PartitionReport(
        tuple(rows),
        plan.saved_bytes,
        plan.flops,
        tuple(zip([names[i] for i in plan.forward_order], plan.forward_memory.alive, strict=True)),
        tuple(zip([names[i] for i in plan.backward_order], plan.backward_memory.alive, strict=True)),
    )


def _row(plan: Plan, i: int, saved: bool) -> Row:
    model = plan.model
    node = model.nodes[i]
    held = sum(model.sizes[s] for s in model.holds[i] if s not in model.free)
    operator = getattr(node.op, "__name__", "") if node.op is not None else "input"
    lines = [line.strip() for line in node.stack_trace.splitlines() if line.strip().startswith("File ")]
    return Row(node.name, operator, saved, held, model.flops[i], lines[-1] if lines else "", _reason(plan, i, saved))


def _reason(plan: Plan, i: int, saved: bool) -> str:
    model = plan.model
    if not saved:
        if model.marked[i]:
            return "marked to be recomputed"
        if model.base[i] != i or model.nodes[i].op is getitem:
            return _VIEW
        return "cheaper to compute than to keep" if not model.flops[i] else "to stay within the budget"
    if i < model.placeholders:
        return "an input"
    if i in model.must_keep:
        return model.banned[i] or "computed from what cannot be computed again"
    if all(s in model.free for s in model.holds[i]):
        return "a result, which the caller holds"
    of_product = model.flops[i] or (model.nodes[i].op is getitem and model.flops[model.inputs[i][0]])
    return "a product or convolution" if of_product else "smaller than what it is computed from"
