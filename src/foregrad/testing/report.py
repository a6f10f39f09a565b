"""What a check found, as plain values that print as tables."""

from collections.abc import Iterable
from dataclasses import dataclass

_WIDEST_CELL = 64


@dataclass(frozen=True)
class Difference:
    """One thing that a user can observe and that the compiled callable does differently.

    >>> print(Difference("same data", "dtype", "output", "torch.float32", "torch.float64"))
    same data: dtype of output: eager torch.float32, compiled torch.float64

    Args:
        run: The run and the scenario in which it was seen.
        aspect: What differs; a name from `ASPECTS`.
        where: The tensor in the user's words, such as `output["a"][0]` or `parameter fc.weight`.
        eager: What eager PyTorch did.
        compiled: What the compiled callable did.
    """

    run: str
    aspect: str
    where: str
    eager: str
    compiled: str

    def __str__(self) -> str:
        return f"{self.run}: {self.aspect} of {self.where}: eager {self.eager}, compiled {self.compiled}"


@dataclass(frozen=True)
class Run:
    """One run that was made, or was skipped for a reason.

    >>> Run("other aliasing", skipped="no two arguments could be the same tensor").skipped
    'no two arguments could be the same tensor'

    Args:
        name: What was run.
        skipped: Why it was not run; empty for a run that was made.
        eager_raised: Whether eager raised an error in the forward.
    """

    name: str
    skipped: str = ""
    eager_raised: bool = False


@dataclass(frozen=True)
class CheckReport:
    """All differences, and all runs that looked for them.

    >>> print(CheckReport((), (Run("same data, no backward"),)))
    check: no difference in 1 run
    ran: same data, no backward

    Args:
        differences: What differs, in the order in which it was found.
        runs: What was run, and what was skipped.
    """

    differences: tuple[Difference, ...]
    runs: tuple[Run, ...]

    @property
    def ok(self) -> bool:
        """True when the two sides cannot be told apart.

        >>> CheckReport((), ()).ok
        True
        """
        return not self.differences

    def __str__(self) -> str:
        made = [run.name for run in self.runs if not run.skipped]
        lines = [_headline(_repeats(self.differences), len(made))]
        if self.differences:
            lines += ["", *_table(self.differences), ""]
        lines += [f"ran: {name}" for name in made]
        lines += [f"skipped: {run.name} ({run.skipped})" for run in self.runs if run.skipped]
        return "\n".join(lines)


class CheckFailed(AssertionError):
    """The compiled callable differs from eager PyTorch; the message is the report.

    >>> CheckFailed(CheckReport((), (Run("same data"),))).report.ok
    True

    Args:
        report: What was found.
    """

    def __init__(self, report: CheckReport) -> None:
        super().__init__(str(report))
        self.report = report


_Finding = tuple[str, str, str, str]


def _repeats(differences: Iterable[Difference]) -> dict[_Finding, list[str]]:
    """Which runs showed each finding: most faults show in every run, and one row is enough."""
    runs: dict[_Finding, list[str]] = {}
    for d in differences:
        runs.setdefault((d.aspect, d.where, d.eager, d.compiled), []).append(d.run)
    return runs


def _headline(findings: dict[_Finding, list[str]], made: int) -> str:
    runs = f"{made} run" if made == 1 else f"{made} runs"
    match len(findings):
        case 0:
            return f"check: no difference in {runs}"
        case 1:
            return f"check: 1 difference in {runs}"
        case count:
            return f"check: {count} differences in {runs}"


def _table(differences: Iterable[Difference]) -> list[str]:
    rows = [("aspect", "where", "eager", "compiled", "seen in")]
    for finding, runs in _repeats(differences).items():
        aspect, where, eager, compiled = (_short(cell) for cell in finding)
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        rows.append((aspect, where, eager, compiled, runs[0] + more))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    header, *body = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [header, "  ".join("-" * width for width in widths), *body]


def _short(cell: str) -> str:
    line = " ".join(cell.split())
    return line if len(line) <= _WIDEST_CELL else line[: _WIDEST_CELL - 1] + "…"
