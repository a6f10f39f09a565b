"""`foregrad explain` and `foregrad doctor`: exit code 0, 1 where something is refused, 2 for what cannot be used."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import BudgetError
from .doctor import diagnose
from .explain import explain
from .output import doing, show
from .parts import Part
from .targets import BadUsage, Shape, calls_of, program_named

_EXAMPLES = """examples:
  foregrad explain model.py:Net --shape x=2x128:int64
  foregrad explain package.model:make_net --inputs batches.py:small --inputs batches.py:large
  foregrad explain model.py:loss --shape x=8x16 --shape x=32x16 --budget 0.5
"""


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="foregrad", description="Ahead-of-time autograd for PyTorch.")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser(
        "explain",
        help="say whether a program compiles; if not, which line, why, and what to do; what it saves and costs",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument(
        "program",
        metavar="FILE_OR_MODULE:NAME",
        help="a function, a module, a class of modules, or a function without arguments that makes one",
    )
    one.add_argument(
        "--inputs",
        metavar="FILE:FACTORY",
        action="append",
        default=[],
        help="a function that gives the arguments: a tuple, a dict of keyword arguments, a tuple of both, or the only "
        "one; give it again for another call",
    )
    one.add_argument(
        "--shape",
        metavar="NAME=SIZES:DTYPE",
        action="append",
        default=[],
        help="an argument: x=2x128:int64, x=2x128 for float32, x=() for a number; again for another one, or, by the "
        "same name, for another call. Those of a program without weights require grad",
    )
    one.add_argument("--budget", metavar="FRACTION", type=float, help="plan for this memory budget: see memory_budget")
    commands.add_parser(
        "doctor", help="say whether Foregrad can work here: versions, compilers, private names of torch"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command."""
    options = parser().parse_args(arguments)
    try:
        code, parts = diagnose() if options.command == "doctor" else _explain(options)
    except (BadUsage, BudgetError) as error:
        print(f"foregrad: {error}", file=sys.stderr)
        return 2
    show(parts)
    return code


def _explain(options: argparse.Namespace) -> tuple[int, list[Part]]:
    if options.inputs and options.shape:
        raise BadUsage("--inputs and --shape: give one of them.")
    names = [Shape.of(text).name for text in options.shape]
    with doing(f"loading {options.program}"):
        program = program_named(options.program, names)
        calls = calls_of(program, options.inputs, options.shape)
    return explain(options.program, program, calls, options.budget)
