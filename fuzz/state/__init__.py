"""The second grammar of the fuzzer: stateful programs, and what their callers do between calls.

A world is a script: objects of every kind, a function or module that reads and writes them, and steps: calls, backward
passes, and events between them. Two worlds are made of it. One calls the program, the other what it compiles to; after
each step both must be in the same state.

The files in the order in which a program flows through them: `kinds`, `places`, `layers` and `rows` (the tables),
`program` (one as data and as a script), `generate` (drawing one), `reads` (drawing one that reads data), `steps`
(drawing a training step), `ambient` (what a process has only once), `world`, `same` (comparing two worlds), `alive`
(what recording left behind), `examine`, `shrink`.
"""

from . import reads, steps
from .examine import compare, examine
from .generate import generate
from .program import Part, StateProgram
from .shrink import shrink

__all__ = ["Part", "StateProgram", "compare", "examine", "generate", "reads", "shrink", "steps"]
