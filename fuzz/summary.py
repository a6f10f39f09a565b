"""What a run covered and what it found."""

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from .grammars import Program
from .inputs import relations
from .oracle import Outcome
from .program import FuzzProgram
from .rows import ROWS

_WIDTH = 110
_MOST_NAMES = 80


@dataclass(frozen=True)
class Failure:
    """A program that fails, and the smallest one that fails in the same way.

    >>> from .generate import generate
    >>> failure = Failure(Outcome("0/2", broken="killed by signal 11"), generate(0, 2))
    >>> str(failure).splitlines()[0]
    'program 0/2: killed by signal 11'

    Args:
        outcome: What came of the program, or of the smaller one.
        program: What to show; None where generating it killed its process.
    """

    outcome: Outcome
    program: Program | None

    def __str__(self) -> str:
        lines = [f"program {self.outcome.name}: {self.outcome.signature}"]
        lines += [f"    {difference}" for difference in self.outcome.differences[:3]]
        if self.program is not None:
            lines += ["", *(f"    {line}" for line in self.program.script().splitlines()), ""]
        return "\n".join(line.rstrip() for line in lines)


@dataclass
class Summary:
    """Counts over all programs of a run.

    >>> from .generate import generate
    >>> summary = Summary()
    >>> summary.add(generate(0, 2), Outcome("0/2"))
    >>> summary.programs, summary.verdicts["agrees"]
    (1, 1)
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    of_grammars: dict[str, Counter[str]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    eager_errors: Counter[str] = field(default_factory=Counter)
    covered: dict[str, Counter[str]] = field(default_factory=dict)
    signatures: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    @property
    def programs(self) -> int:
        """How many programs ran.

        >>> Summary().programs
        0
        """
        return self.verdicts.total()

    def add(self, program: Program | None, outcome: Outcome) -> None:
        """Count one program.

        >>> summary = Summary()
        >>> summary.add(None, Outcome("0/5", broken="killed by signal 11"))
        >>> [failure.outcome.name for failure in summary.failures]
        ['0/5']

        Args:
            program: The program.
            outcome: What came of it.
        """
        self.verdicts[outcome.verdict] += 1
        self.of_grammars.setdefault(_grammar(outcome.name), Counter())[outcome.verdict] += 1
        self.refusals.update(outcome.refusals)
        if outcome.eager_error:
            self.eager_errors[outcome.eager_error] += 1
        if outcome.failed:
            self.signatures[outcome.signature] += 1
            self.failures.append(Failure(outcome, program))
        if program is None:
            return
        for kind, name in program.covered():
            self.covered.setdefault(kind, Counter())[name] += 1
        if isinstance(program, FuzzProgram):
            self.covered.setdefault("inputs", Counter()).update(relations(program.inputs))

    def __str__(self) -> str:
        blocks = [[f"{self.programs} programs: {_listed(self.verdicts)}"]]
        blocks[0] += [f"  {grammar}: {_listed(counts)}" for grammar, counts in self.of_grammars.items()]
        blocks.append(["Covered", *self._coverage()])
        if self.eager_errors:
            blocks.append(["Refused by eager itself", *_table(self.eager_errors)])
        if self.refusals:
            blocks.append(["Refused by Foregrad", *_table(self.refusals)])
        if self.signatures:
            blocks.append(["Different from eager", *_table(self.signatures)])
        return "\n\n".join("\n".join(block) for block in blocks)

    def _coverage(self) -> Iterator[str]:
        for kind, counts in self.covered.items():
            every = f" of {len({row.operator for row in ROWS[kind]})}" if kind in ROWS else ""
            listed = ", ".join(f"{name} {count}" for name, count in counts.most_common(_MOST_NAMES))
            rest = f", and {len(counts) - _MOST_NAMES} more" if len(counts) > _MOST_NAMES else ""
            yield from _wrapped(f"{kind}: {len(counts)}{every}, {counts.total()} times: {listed}{rest}")


def _grammar(name: str) -> str:
    """The grammar of a program, by its name."""
    return name.split("/")[0] if name.count("/") > 1 else "tensors"


def _listed(verdicts: Counter[str]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()) or "none"


def _table(counts: Counter[str]) -> list[str]:
    return [line for text, count in counts.most_common() for line in _wrapped(f"{count:6}  {text}")]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="          ")
