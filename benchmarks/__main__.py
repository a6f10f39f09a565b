"""`python -m benchmarks`: print the tables, keep them in benchmarks/results, end with the marks."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import capture, compile, forces, partition, runtime, step, subclasses
from .compile_models import SUBJECTS
from .models import MODELS
from .partition_models import FAMILIES
from .sides import setting
from .table import Mark, Table, marks_table

PARTS = ("capture", "runtime", "subclasses", "partition", "compile", "forces", "step")
RESULTS = Path(__file__).resolve().parent / "results"


def publish(name: str, *tables: Table) -> None:
    """Print tables and keep them in a file that says what was compared."""
    text = "\n\n".join(map(str, tables)) + "\n"
    print(text, flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"{setting()}\n\n{text}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Foregrad against torch's AOTAutograd.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--families", default=",".join(FAMILIES), help="models to partition (default: %(default)s)")
    parser.add_argument("--depths", default="12,24,48,96", help="layers of a GPT to partition (default: %(default)s)")
    parser.add_argument("--models", default=",".join(MODELS), help="models to capture (default: %(default)s)")
    parser.add_argument("--compiled", default=",".join(SUBJECTS), help="models to compile (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="processes a side (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of the run time (default: %(default)s)")
    parser.add_argument("--strict", action="store_true", help="fail if a mark is missed")
    options = parser.parse_args()
    parts = options.parts or [*PARTS]
    families = [name for name in options.families.split(",") if name]
    models = options.models.split(",")
    compiled = options.compiled.split(",")
    names = {*models} - {*MODELS} | {*families} - {*FAMILIES} | {*compiled} - {*SUBJECTS}
    if unknown := sorted({*parts} - {*PARTS}) + sorted(names):
        parser.error(f"unknown: {', '.join(unknown)}")

    print(setting(), end="\n\n", flush=True)
    marks: list[Mark] = []
    same = True
    if "runtime" in parts:
        tables, found = runtime.run(options.rounds)
        publish("runtime", *tables)
        marks += found
    if "subclasses" in parts:
        tables, found = subclasses.run(options.rounds)
        publish("subclasses", *tables)
        marks += found
    if "capture" in parts:
        captured, found, same = capture.run(models, options.repeats)
        publish("capture", *captured)
        marks = found + marks
    if "partition" in parts:
        tables, found = partition.run(families, [int(depth) for depth in options.depths.split(",") if depth])
        publish("partition", *tables)
        marks += found
    if "compile" in parts:
        tables, found = compile.run(compiled, options.rounds, compile.default_device())
        publish("compile", *tables)
        marks += found
    if "step" in parts:
        tables, found = step.run(options.rounds, options.repeats, compile.default_device())
        publish("step", *tables)
        marks += found
    if "forces" in parts:
        tables, found = forces.run(options.rounds, compile.default_device())
        publish("forces", *tables)
        marks += found
    if len({*parts}) == len(PARTS) and len(models) == len(MODELS):
        publish("marks", marks_table(marks))
    else:
        print(marks_table(marks))
    if not same:
        raise SystemExit("The two sides did not compute the same losses, gradients and buffers.")
    if options.strict and not all(mark.holds for mark in marks):
        raise SystemExit("Not every mark holds.")


if __name__ == "__main__":
    main()
