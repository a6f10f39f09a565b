"""Planted faults: each makes a compiled callable wrong in one way, and the oracle must find it."""

import pytest

import foregrad
from checking import check_core
from helpers import nop
from testing.faults import FAULTS


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_compiled_callable_is_found(name):
    """Z"""
    fault = FAULTS[name]
    report = check_core(
        fault.program,
        *fault.arguments(),
        compile=lambda fn: fault.plant(foregrad.aot_function(fn, nop)),
        raise_on_difference=False,
    )
    assert fault.aspect in {difference.aspect for difference in report.differences}


@pytest.mark.parametrize("name", FAULTS)
def test_without_the_fault_there_is_no_difference(name):
    """Z"""
    fault = FAULTS[name]
    assert check_core(fault.program, *fault.arguments()).ok
