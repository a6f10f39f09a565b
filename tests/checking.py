"""`foregrad.check` for what is there so far."""

from typing import Any

import foregrad
from foregrad.testing import CheckFailed, CheckReport, Difference

# Differentiating outputs one after another without `retain_graph` needs the stash of saved tensors, which is not
# there yet; every other scenario must agree with eager.
LATER = "one output after another"

# J-3: a tangent is laid out as the backward was compiled for, so a backward that sums a tangent up adds in another
# order than eager does when the tangent arrived in another layout.
RELAID = ("transposed tangents", "expanded tangents")


def check_core(
    fn: Any, *args: Any, raise_on_difference: bool = True, sums_tangents: bool = False, **options: Any
) -> CheckReport:
    """Compare with eager in every scenario but the one that is for later.

    `sums_tangents` is for programs whose backward sums tangents up: their gradients may differ in the last bits where
    a tangent was laid out anew, and nowhere else.
    """
    report = foregrad.check(fn, *args, raise_on_difference=False, **options)
    found = [d for d in report.differences if LATER not in d.run]
    if sums_tangents:
        near = foregrad.check(fn, *args, raise_on_difference=False, bitwise=False, **options)
        found = [d for d in found if not _may_round(d)]
        found += [d for d in near.differences if _may_round(d)]
    core = CheckReport(tuple(found), report.runs)
    if raise_on_difference and not core.ok:
        raise CheckFailed(core)
    return core


def _may_round(difference: Difference) -> bool:
    return difference.aspect == "gradient value" and difference.run.endswith(RELAID)
