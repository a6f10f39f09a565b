"""`python -m models`: try every model of the table, and print what became of it.

    python -m models                        all of them
    python -m models transformers           one library
    python -m models transformers:llama     one model

Each library has a process of its own, so that a model which kills its process is a row in the table and not its end.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from .case import Case
from .comparing import Outcome, compare
from .libraries import LIBRARIES, cases_of, missing

_HELP = argparse.RawTextHelpFormatter
_GOOD = ("equal", "reads data", "refused")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m models", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="LIBRARY or LIBRARY:NAME; all if none is given")
    parser.add_argument("--table", type=Path, help="write the table there, as Markdown")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process, one line of JSON each
    options = parser.parse_args()
    try:
        chosen = _chosen(options.names)
    except ValueError as error:
        parser.error(str(error))
    if options.here:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)  # small models; several processes may run side by side
        for case in chosen:
            print(json.dumps({"starts": case.name}), flush=True)
            print(json.dumps(asdict(compare(case))), flush=True)
            gc.collect()  # a model and its compiled programs refer to each other
        return 0
    outcomes = list(_tried(chosen))
    counts = collections.Counter(outcome.verdict for outcome in outcomes)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if options.table is not None:
        options.table.parent.mkdir(parents=True, exist_ok=True)
        options.table.write_text(_table(outcomes))
    return int(any(outcome.verdict not in _GOOD for outcome in outcomes))


def _chosen(names: Sequence[str]) -> list[Case]:
    chosen: list[Case] = []
    for name in names or LIBRARIES:
        library, _, wanted = name.partition(":")
        if library not in LIBRARIES:
            raise ValueError(f"there is no library {library!r} in the table; it has {', '.join(LIBRARIES)}")
        absent = missing(library)
        if absent:
            print(f"{library}: left out, since {absent} is not installed", file=sys.stderr)
            continue
        known = cases_of(library)
        found = [case for case in known if not wanted or case.name == wanted]
        if not found:
            raise ValueError(f"{library} has no model {wanted!r}; it has {', '.join(case.name for case in known)}")
        chosen += found
    return chosen


def _tried(chosen: Sequence[Case]) -> Iterator[Outcome]:
    """The outcomes, printed as they come."""
    waiting = list(chosen)
    while waiting:
        library = waiting[0].library
        batch = [case for case in waiting if case.library == library]
        waiting = [case for case in waiting if case.library != library]
        while batch:
            done = 0
            for outcome in _in_one_process(batch):
                done += 1
                name, took = f"{outcome.library}:{outcome.name}", f"{outcome.seconds:5.1f} s"
                print(f"{name:45} {outcome.verdict:11} {took}  {outcome.reason[:150]}", flush=True)
                yield outcome
            batch = batch[done:]


def _in_one_process(batch: Sequence[Case]) -> Iterator[Outcome]:
    """The outcomes of one process, up to the model that ends it."""
    names = [f"{case.library}:{case.name}" for case in batch]
    process = subprocess.Popen([sys.executable, "-m", "models", "--here", *names], stdout=subprocess.PIPE, text=True)
    running = batch[0].name
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("{"):
            continue
        said = json.loads(line)
        if "starts" in said:
            running = said["starts"]
        else:
            running = ""
            yield Outcome(**said)
    if process.wait() != 0:
        yield Outcome(
            batch[0].library, running or "after the last", "crashes", f"the process ended with {process.returncode}"
        )


def _table(outcomes: Sequence[Outcome]) -> str:

    counts = collections.Counter((outcome.library, outcome.verdict) for outcome in outcomes)
    verdicts = list(dict.fromkeys(outcome.verdict for outcome in outcomes))
    lines = [f"Three steps of training against eager, torch {torch.__version__}.", ""]
    lines += [f"| library | {' | '.join(verdicts)} |", "|---" * (len(verdicts) + 1) + "|"]
    for library in dict.fromkeys(outcome.library for outcome in outcomes):
        lines.append(f"| {library} | {' | '.join(str(counts[library, verdict]) for verdict in verdicts)} |")
    lines += ["", "| model | outcome | programs | reason |", "|---|---|---|---|"]
    for outcome in outcomes:
        reason = outcome.reason.replace("|", "\\|")[:300]
        lines.append(f"| {outcome.library}: {outcome.name} | {outcome.verdict} | {outcome.programs} | {reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
