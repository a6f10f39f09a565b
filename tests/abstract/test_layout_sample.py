"""A sample of torch's own database of operators, in all layouts; `make sweep` runs all of it."""

import pytest

from foregrad._torch import new_fake_mode
from foregrad.abstract.lean_engine import LeanEngine


@pytest.mark.filterwarnings("ignore")  # the operators warn about themselves, in eager too
def test_a_sample_of_all_operators_in_all_layouts():
    """F-12"""
    from sweep.reality import observe, part_of_database  # torch's database takes seconds to import

    wrong, agreed = [], 0

    def note(seen):
        nonlocal agreed
        if seen.agrees is False and not seen.is_left_to_inference:
            wrong.append(str(seen))
        agreed += seen.agrees is True

    observe(part_of_database()[5::140], "cpu", [(lambda: LeanEngine(new_fake_mode(None)), note)], few=True)
    assert not wrong and agreed > 200
