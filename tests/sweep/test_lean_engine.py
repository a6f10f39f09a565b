"""Every operator of torch's own database: the lean engine says what FakeTensorMode says."""

from __future__ import annotations

import pytest
import torch

from fidelity import run_twice
from foregrad.errors import UnsupportedError
from sweep.operators import Operator, all_operators, tensors_in

pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("operator", all_operators(), ids=lambda operator: operator.name)
def test_an_operator(operator: Operator) -> None:
    """F-12"""
    checked = 0
    for call in operator.calls(gradients=False):
        tensors = tensors_in((call.input, call.args, call.kwargs))
        if any(t.layout is not torch.strided or t.is_quantized or t.is_nested for t in tensors):
            continue
        try:
            engine, _ = run_twice(operator.function, (call.input, *call.args), call.kwargs)
        except UnsupportedError:
            continue
        checked += engine.checked
    if not checked:
        pytest.skip("nothing that both engines can do")
