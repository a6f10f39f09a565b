"""`python -m fuzz`: compare many programs with eager, and shrink those that differ."""

import argparse
import os
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

from .grammars import GRAMMARS, Program, grammar_of
from .summary import Failure, Summary
from .workers import TOO_LONG, Examine, Make, Shrink, Workers

_SECONDS_BETWEEN_REPORTS = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fuzzer and return the exit status: 1 where a program differs from eager.

    Args:
        arguments: The command line.
    """
    given = _parse(arguments)
    grammars = list(GRAMMARS) if given.grammar == "all" else [given.grammar]
    if given.show is not None:
        for grammar in grammars:
            print(GRAMMARS[grammar].generate(given.seed, given.show))
        return 0
    summary = Summary()
    with Workers(given.processes, given.limit) as workers, suppress(KeyboardInterrupt):
        numbers = range(given.first, given.first + given.programs)
        # In turns, so that a run that is broken off has seen something of each.
        tasks = [Make(given.seed, number, grammar) for number in numbers for grammar in grammars]
        for failure in _run(workers, summary, tasks):
            print(f"{failure.outcome.name}: {failure.outcome.signature}", file=sys.stderr, flush=True)
            if given.save:
                _save(failure, given.save)  # Its small form takes its place: a run that is broken off loses none.
        print(summary, flush=True)
        for failure in _shrunk(workers, summary, given.shrink):
            print(failure, flush=True)
            if given.save:
                _save(failure, given.save)
    return 1 if summary.failures else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many of each grammar (default: %(default)s)")
    parser.add_argument("--grammar", choices=[*GRAMMARS, "all"], default="all", help="what to draw (default: all)")
    parser.add_argument("--seed", default="0", help="the seed of the run (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="how many at a time (default: all cores)"
    )
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one program (default: %(default)s)")
    parser.add_argument("--shrink", type=int, default=3, help="how many failures of a kind to shrink")
    parser.add_argument("--save", type=pathlib.Path, help="a folder for the scripts of the failures")
    parser.add_argument("--show", type=int, metavar="NUMBER", help="only print the program of this number")
    return parser.parse_args(arguments)


def _run(workers: Workers, summary: Summary, tasks: Sequence[Make]) -> Iterator[Failure]:
    """Examine programs, with a line about the progress now and then; those that fail, as they are found."""
    start = reported = time.monotonic()
    for result in workers.run(tasks):
        found = len(summary.failures)
        summary.add(result.program, result.outcome)
        yield from summary.failures[found:]
        now = time.monotonic()
        if now - reported > _SECONDS_BETWEEN_REPORTS or summary.programs == len(tasks):
            reported = now
            rate, failed = summary.programs / (now - start), len(summary.failures)
            line = f"{summary.programs} of {len(tasks)} programs, {failed} failed, {rate:.1f} per second"
            print(line, file=sys.stderr, flush=True)


def _shrunk(workers: Workers, summary: Summary, at_most: int) -> Iterator[Failure]:
    """The first few failures of each signature, made small."""
    seen: Counter[str] = Counter()
    chosen: list[Failure] = []
    for failure in summary.failures:
        seen[failure.outcome.signature] += 1
        if seen[failure.outcome.signature] <= at_most:
            chosen.append(failure)
    quiet = [failure for failure in chosen if failure.program is not None and failure.outcome.differences]
    whole = {failure.outcome.name: failure for failure in quiet}
    tasks = [Shrink(failure.program, failure.outcome.signature) for failure in quiet if failure.program is not None]
    for result in workers.run(tasks):
        yield Failure(result.outcome, result.program) if result.outcome.differences else whole[result.outcome.name]
    for failure in chosen:
        if failure not in quiet:
            yield _shrunk_apart(workers, failure)


def _shrunk_apart(workers: Workers, failure: Failure) -> Failure:
    """Shrink a program that may kill the process which examines it."""
    program, signature = failure.program, failure.outcome.signature
    if program is None or signature.startswith(TOO_LONG):  # each try would take as long
        return failure

    def fails(smaller: Program) -> bool:
        return all(result.outcome.broken == signature for result in workers.run([Examine(smaller)]))

    return Failure(failure.outcome, grammar_of(program).shrink(program, fails))


def _save(failure: Failure, folder: pathlib.Path) -> None:
    if failure.program is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{failure.outcome.name.replace('/', '_')}.py"
        path.write_text(f"# {failure.outcome.signature}\n{failure.program}\n")


if __name__ == "__main__":
    sys.exit(main())
