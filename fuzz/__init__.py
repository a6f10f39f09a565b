"""A program fuzzer: random programs through the oracle, and the failing ones made small.

`make fuzz N=10000 SEED=0`, or `python -m fuzz --programs 10000 --seed 0`. Every program can be made
again from its seed and its number:

>>> print(generate(0, 7).function())
def program(...):
    ...

There are three grammars: programs over tensors, which this folder draws, and stateful ones and those that read data,
which `state/` draws.

The files in the order in which a program flows through them: `rows` (what statements there are), `custom` (operators of
our own), `program` (a program as data and as a script), `inputs`, `draws` and `generate` (drawing one), `oracle`
(comparing it with eager), `shrink`; `grammars` (all of them), `workers` (processes), `summary`.
"""

from .generate import generate, partitioners
from .grammars import GRAMMARS, fails_with
from .oracle import Outcome, examine
from .program import FuzzProgram, Input, Options, Statement, Storage
from .shrink import shrink
from .summary import Failure, Summary

__all__ = [
    "GRAMMARS",
    "Failure",
    "FuzzProgram",
    "Input",
    "Options",
    "Outcome",
    "Statement",
    "Storage",
    "Summary",
    "examine",
    "fails_with",
    "generate",
    "partitioners",
    "shrink",
]
