"""Make the tables that say with which layouts torch's shape inference is right (see CONTRIBUTING.md).

    PYTHONPATH=src:tests python -m sweep.tables --device cpu

compares shape inference with the kernels of the installed torch over its database of operators, and writes
`src/foregrad/abstract/layout_tables/torch-<version>-<device>.json`. The work is done by processes that are
replaced when a kernel ends one: the operator is then left out, and named.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Observation = tuple[str, frozenset[str], frozenset[str], bool]  # operator, layouts, dtypes, whether they agree


# ------------------------------------------------------------------------------------------------- one process
def work(device: str, share: slice, file: Path, verify: bool) -> None:
    """Observe a share of the database, one line of text for each operator of it.

    Shape inference is compared with the kernels; to `verify`, what Foregrad records is compared with them as well.
    """
    logging.disable(logging.ERROR)  # fake kernels log what they refuse
    warnings.simplefilter("ignore")
    import torch

    from fidelity import Believing
    from foregrad._torch import new_fake_mode
    from foregrad.abstract.lean_engine import LeanEngine
    from sweep.reality import Observer, Seen, functional_twins, observe, ordinary, part_of_database

    torch.set_num_threads(1)
    seen: set[Observation] = set()
    examples: list[str] = []
    wrong: set[str] = set()

    def note(one: Seen) -> None:
        agrees = one.agrees
        if agrees is not None:
            observation = str(one.op), one.layouts, one.dtypes, agrees
            if not agrees and observation not in seen:
                examples.append(str(one))
            seen.add(observation)

    def note_wrong(one: Seen) -> None:
        if one.agrees is False and not one.is_left_to_inference:
            wrong.add(str(one))

    asked = [(lambda: Believing(new_fake_mode(None)), note)]
    if verify:
        asked.append((lambda: LeanEngine(new_fake_mode(None)), note_wrong))
    with file.open("a") as lines:
        for program in (*functional_twins(device), *ordinary(device)) if not share.start else ():
            program.run(Observer(asked))
        for info in part_of_database(device)[share]:
            observe([info], device, asked)
            if device == "cuda":
                torch.cuda.synchronize()  # raises if a kernel has failed: nothing that follows would run
            found = [[op, sorted(layouts), sorted(dtypes), agrees] for op, layouts, dtypes, agrees in seen]
            lines.write(json.dumps([info.name, found, examples, sorted(wrong)]) + "\n")
            lines.flush()
            for collected in (seen, examples, wrong):
                collected.clear()


# ------------------------------------------------------------------------------------------------- all of them
def gather(device: str, number: int, of: int, size: int, until: float, *flags: str) -> Iterator[list[Any]]:
    """What one share of the database shows; a process that was ended is followed by another, while there is time."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "observed"
        file.touch()
        start, done = number, 0
        while start < size and time.time() < until:
            command = [sys.executable, "-m", "sweep.tables", "--device", device, "--work", f"{start}:{of}", *flags]
            try:
                left = until - time.time()
                code = subprocess.run([*command, "--into", str(file)], check=False, timeout=left).returncode
            except subprocess.TimeoutExpired:
                break
            done_before, done = done, len(file.read_text().splitlines())
            if not code:
                break
            start += (done - done_before + 1) * of
            print(f"ended by signal or error {code}, one operator is left out: number {start - of}", file=sys.stderr)
        yield from map(json.loads, file.read_text().splitlines())


def table(seen: Iterable[Observation], version: str, device: str) -> dict[str, Any]:
    """The table of what was observed."""
    by_operator: dict[str, list[Observation]] = defaultdict(list)
    for one in seen:
        by_operator[one[0]].append(one)
    groups: dict[tuple[Any, Any], list[str]] = defaultdict(list)
    differ: dict[str, list[str]] = {}
    for op, of_op in sorted(by_operator.items()):
        layouts, dtypes = agreeing(of_op)
        if layouts:
            groups[tuple(sorted(layouts)), tuple(sorted(dtypes))].append(op)
        wrong = sorted({" + ".join(sorted(layouts)) for _, layouts, _, agrees in of_op if not agrees})
        if wrong:
            differ[op] = wrong
    agree = [{"layouts": k[0], "dtypes": k[1], "operators": ops} for k, ops in sorted(groups.items())]
    return {"torch": version, "device": device, "agree": agree, "differ": differ}


def agreeing(seen: Iterable[Observation]) -> tuple[set[str], set[str]]:
    """Layouts and dtypes such that all that was observed with them, and nothing else, agrees.

    Of what takes part in disagreements the least usual goes first and, among equals, what takes part in most.
    """
    seen = list(seen)
    layouts = {layout for one in seen for layout in one[1]}
    dtypes = {dtype for one in seen for dtype in one[2]}
    phases = ((1, layouts, {"float32"}), (2, dtypes, set()), (1, layouts, set()))  # float32 decides about layouts first
    for column, kept, needed in phases:
        while True:
            within = [one for one in seen if one[1] <= layouts and one[2] <= dtypes and one[2] >= needed]
            taking_part = Counter(name for one in within if not one[3] for name in one[column] if name != "float32")
            if not taking_part:
                break
            kept.remove(min(taking_part, key=lambda name: (usual(name), -taking_part[name], name)))
    within = [one for one in seen if one[1] <= layouts and one[2] <= dtypes]
    return {name for one in within for name in one[1]}, {name for one in within for name in one[2]}


def add_ordinary(device: str, file: Path) -> None:
    """Add what ordinary programs show to a table, without the time that torch's database takes."""
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    from fidelity import Believing
    from foregrad._torch import new_fake_mode
    from sweep.reality import Observer, Seen, ordinary

    seen: dict[str, set[Observation]] = defaultdict(set)

    def note(one: Seen) -> None:
        if one.agrees is not None:
            seen[str(one.op)].add((str(one.op), one.layouts, one.dtypes, one.agrees))

    for program in ordinary(device):
        program.run(Observer([(lambda: Believing(new_fake_mode(None)), note)]))
    made = json.loads(file.read_text())
    rows = {op: (set(g["layouts"]), set(g["dtypes"])) for g in made["agree"] for op in g["operators"]}
    for op, of_op in seen.items():
        differ = {frozenset(text.split(" + ")) for text in made["differ"].get(op, ())}
        rows[op] = extended(rows.get(op, (set(), set())), differ, of_op)
        differ |= {layouts for _, layouts, _, agrees in of_op if not agrees}
        if differ:
            made["differ"][op] = sorted({" + ".join(sorted(layouts)) for layouts in differ})
    groups: dict[tuple[Any, Any], list[str]] = defaultdict(list)
    for op, (layouts, dtypes) in sorted(rows.items()):
        if layouts:
            groups[tuple(sorted(layouts)), tuple(sorted(dtypes))].append(op)
    made["agree"] = [{"layouts": k[0], "dtypes": k[1], "operators": ops} for k, ops in sorted(groups.items())]
    made["differ"] = dict(sorted(made["differ"].items()))
    file.write_text(text_of(made))


def extended(
    row: tuple[set[str], set[str]], differ: Iterable[frozenset[str]], seen: Iterable[Observation]
) -> tuple[set[str], set[str]]:
    """A row, and as much of what was observed beside it as takes in no disagreement, of now or of before."""
    layouts, dtypes = set(row[0]), set(row[1])
    wrong = [(one[1], one[2]) for one in seen if not one[3]]
    for these, of in wrong:
        if these <= layouts and of <= dtypes:
            layouts.discard(min(these, key=lambda name: (usual(name), name)))
    by_dtype = any(these <= layouts for these in differ)  # which dtype it was is not known any more
    wrong += [(these, frozenset()) for these in differ if not these <= layouts]
    right = [one for one in seen if one[3] and (one[2] <= dtypes or not by_dtype)]
    for _, these, of, _ in sorted(right, key=lambda one: (len(one[1]), sorted(one[1]), sorted(one[2]))):
        more, among = layouts | these, dtypes | of
        if not any(a <= more and b <= among for a, b in wrong):
            layouts, dtypes = more, among
    return layouts, dtypes


def usual(layout: str) -> tuple[bool, bool]:
    """How usual a layout is, for comparison."""
    return layout.startswith("contiguous"), "ones" not in layout


def text_of(made: dict[str, Any]) -> str:
    """A table as text, with a line for each group of operators and for each operator that differs."""
    agree = ",\n".join(f"  {json.dumps(group)}" for group in made["agree"])
    differ = ",\n".join(f"  {json.dumps(op)}: {json.dumps(layouts)}" for op, layouts in made["differ"].items())
    head = f'"torch": {json.dumps(made["torch"])}, "device": {json.dumps(made["device"])}'
    return f'{{{head},\n "agree": [\n{agree}\n ],\n "differ": {{\n{differ}\n }}}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--first", type=int, help="only that many shares of a hundred, for a quick look")
    parser.add_argument("--seconds", type=float, default=7200, help="stop then, with what was seen")
    parser.add_argument("--into", type=Path, help="the folder for the table")
    parser.add_argument("--examples", type=Path, help="where to write what differs, at length")
    parser.add_argument("--observed", type=Path, help="where to write all that was seen")
    parser.add_argument(
        "--verify", action="store_true", help="compare what is recorded as well, and print what is wrong"
    )
    parser.add_argument("--ordinary", action="store_true", help="only add what ordinary programs show to the table")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        start, step = map(int, options.work.split(":"))
        work(options.device, slice(start, None, step), options.into, options.verify)
        return
    from foregrad.abstract.tensor_meta import table_file, torch_version

    if options.ordinary:
        add_ordinary(options.device, table_file(torch_version(), options.device))
        return
    from sweep.reality import part_of_database

    started, size = time.time(), len(part_of_database(options.device))
    shares = 100 if options.first else options.jobs
    with ThreadPoolExecutor(options.jobs) as pool:
        numbers = range(options.first or shares)
        until = started + options.seconds
        flags = ["--verify"] if options.verify else []
        lines = list(pool.map(lambda n: list(gather(options.device, n, shares, size, until, *flags)), numbers))
    found = [line for some in lines for line in some]
    seen = {(op, frozenset(a), frozenset(b), agrees) for line in found for op, a, b, agrees in line[1]}
    if options.examples:
        options.examples.write_text("\n".join(sorted(text for line in found for text in line[2])))
    if options.verify:
        print("\n".join(["recorded wrongly:", *sorted(text for line in found for text in line[3])]))
    if options.observed:
        options.observed.write_text("\n".join(json.dumps(line[:2]) for line in found))
    made = table(seen, torch_version(), options.device)
    file = table_file(torch_version(), options.device)
    file = options.into / file.name if options.into else file
    file.parent.mkdir(exist_ok=True)
    file.write_text(text_of(made))
    operators = len({one[0] for one in seen})
    print(
        f"{len(found)} of {size} entries of the database, {operators} operators, {len(made['differ'])} differ "
        f"somewhere, {time.time() - started:.0f} s: {file}"
    )


if __name__ == "__main__":
    main()
