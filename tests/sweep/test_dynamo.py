"""Programs and models behind `torch.compile`, with sizes that change: as in eager, or refused by name."""

import pytest

from dynamo_comparison import MODES, difference
from dynamo_programs import MODELS, PROGRAMS

pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore")]  # programs warn about themselves


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*PROGRAMS, *MODELS])
def test_as_in_eager_or_refused_by_name(name, mode, compiler, record_property):
    said = difference(name, mode, compiler)
    record_property("refused", said if said.startswith("refused") else "")
    assert said == "equal" or said.startswith("refused by name"), said
