"""Eager PyTorch as the oracle.

`check` compares a compiled callable with eager in one line. Its parts are here too, for tools that generate
programs: a `Program` gives two `Side`s, `observe` runs one of them, `compare` finds what differs.

The files in the order in which a check flows through them: `naming`, `cloning`, `program`, `variants`,
`scenarios`, `observation`, `aspects`, `report`, `checking`.
"""

from .aspects import ASPECTS, Aspect, compare
from .checking import check
from .cloning import Cloner, Contents
from .observation import Observation, TensorFacts, observe
from .program import Arguments, Program, Side
from .report import CheckFailed, CheckReport, Difference, Run
from .scenarios import FORWARD_ONLY, Scenario, scenarios_for
from .variants import Variant, variants

__all__ = [
    "ASPECTS",
    "FORWARD_ONLY",
    "Arguments",
    "Aspect",
    "CheckFailed",
    "CheckReport",
    "Cloner",
    "Contents",
    "Difference",
    "Observation",
    "Program",
    "Run",
    "Scenario",
    "Side",
    "TensorFacts",
    "Variant",
    "check",
    "compare",
    "observe",
    "scenarios_for",
    "variants",
]
