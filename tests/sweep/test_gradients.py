"""torch's own checks of gradients, and of gradients of gradients, on every compiled operator of its database."""

from __future__ import annotations

import re

import pytest

from sweep.exceptions import REFUSED_GRADIENTS
from sweep.gradients import complaints, differentiable_operators

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.filterwarnings("ignore"),  # the operators warn about themselves, in eager too
]


@pytest.mark.parametrize("operator", differentiable_operators().values(), ids=lambda operator: operator.name)
def test_the_gradients_of_an_operator(operator):
    """J-10: `gradcheck` and `gradgradcheck` pass on the compiled operator where they pass in eager, in float64."""
    found = complaints(operator)
    if found is None:
        pytest.skip("the checks do not pass in eager")
    excepted = REFUSED_GRADIENTS.get(operator.name)
    wrong = [text for text in found if excepted is None or not re.search(excepted.where, text)]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    if excepted is not None and not found and not excepted.in_some_versions:
        pytest.fail("is refused no more: take it off the list of exceptions", pytrace=False)
