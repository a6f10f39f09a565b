"""A sample of torch's own database of operators; `make sweep` runs all of it."""

import pytest

from fidelity import run_twice
from foregrad.errors import UnsupportedError


@pytest.mark.filterwarnings("ignore")  # the operators warn about themselves, in eager too
def test_a_sample_of_all_operators():
    """F-12"""
    from sweep.operators import all_operators  # torch's database takes seconds to import

    checked = 0
    for operator in all_operators()[::45]:
        for call in operator.calls(gradients=False, limit=3):
            try:
                engine, _ = run_twice(operator.function, (call.input, *call.args), call.kwargs)
            except UnsupportedError:  # sparse, quantized, nested
                continue
            checked += engine.checked
    assert checked > 100
