"""A program fuzzer: random programs through the oracle, and the failing ones made small.

`make fuzz N=10000 SEED=0`, or `python -m foregrad.testing.fuzz --programs 10000 --seed 0`. Every program can be made
again from its seed and its number:

>>> print(generate(0, 7).function())
def program(...):
    ...

The files in the order in which a program flows through them: `rows` (what statements there are), `custom` (operators of
our own), `program` (a program as data and as a script), `inputs`, `draws` and `generate` (drawing one), `oracle`
(comparing it with eager), `shrink`, `workers` (processes), `summary`.
"""

from .generate import generate, partitioners
from .oracle import Outcome, examine
from .program import FuzzProgram, Input, Options, Statement, Storage
from .shrink import shrink
from .summary import Failure, Summary
from .workers import fails_with

__all__ = [
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
