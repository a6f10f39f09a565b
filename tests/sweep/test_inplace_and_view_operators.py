"""Every in-place and view operator of torch's own database, compared with eager in everything that a user can observe.

Each operator is called in several ways (`operators`) in several programs (`programs`). A call that raises in eager
must raise the same compiled; one call at least must not raise.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import foregrad
from foregrad.testing import Difference
from sweep import programs
from sweep.exceptions import EXCEPTIONS
from sweep.operators import (
    Call,
    Operator,
    in_place_operators,
    out_operators,
    overlaps_itself,
    tensors_in,
    view_operators,
)
from sweep.others import other_in_place_operators

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.filterwarnings("ignore"),  # the operators warn about themselves, in eager too
]

Arguments = tuple[Any, ...]
Case = tuple[str, Callable[..., Any], Arguments]  # what it is, the program, what it is called with


def leaf_input(call: Call) -> Arguments:
    return call.input, call.args, call.kwargs


def plain_input(call: Call) -> Arguments:
    """The first argument needs no gradient; the others may."""
    return call.input.detach(), call.args, call.kwargs


def computed_input(call: Call) -> Arguments:
    """The first argument has a past of its own."""
    return call.input.clone(), call.args, call.kwargs


WRITERS = [
    (programs.writes_to_an_intermediate, leaf_input),
    (programs.writes_to_a_part_of_an_intermediate, leaf_input),
    (programs.writes_to_its_input, plain_input),
    (programs.writes_to_its_input, computed_input),
]
VIEWS = [
    (programs.returns_a_view, leaf_input),
    (programs.returns_a_view, computed_input),
    (programs.returns_a_view_of_an_intermediate, leaf_input),
    (programs.returns_an_intermediate_and_its_view, leaf_input),
    (programs.writes_to_what_was_viewed, leaf_input),
]
WRITTEN_VIEWS = [
    (programs.writes_through_a_view_of_an_intermediate, leaf_input),
    (programs.writes_through_a_view_of_an_intermediate, plain_input),
    (programs.writes_through_a_view_of_its_input, plain_input),
    (programs.writes_through_a_view_of_its_input, computed_input),
]
OUTS = [programs.writes_to_out, programs.writes_to_an_intermediate_out]


def each(operators: list[Operator]) -> Any:
    return pytest.mark.parametrize("operator", operators, ids=lambda operator: operator.name)


def cases_of(operator: Operator, calls: list[Call], table: list[tuple[Any, Any]]) -> list[Case]:
    return [
        (f"{build.__name__}, {pass_in.__name__}, called with {call}", build(operator.function), pass_in(call))
        for build, pass_in in table
        for call in calls
        if call.dense
    ]


def compare(operator: Operator, cases: list[Case], defined: Callable[[str], bool] = lambda run: True) -> None:
    """Check all cases but the runs that torch leaves undefined, and say what differs."""
    excepted = EXCEPTIONS.get(operator.name)
    texts = [f"{name}: {d}" for name, program, arguments in cases for d in differences(program, arguments, defined)]
    different = [text for text in texts if excepted is None or not re.search(excepted.where, text)]
    if different:
        pytest.fail("\n".join(different), pytrace=False)
    if excepted is not None and not texts:
        pytest.fail("differs from eager no more: take it off the list of exceptions", pytrace=False)


def differences(program: Callable[..., Any], arguments: Arguments, defined: Callable[[str], bool]) -> list[Difference]:
    report = foregrad.check(program, *arguments, raise_on_difference=False)
    return [d for d in report.differences if defined(d.run)]


def one_runs(cases: list[Case]) -> bool:
    """Whether eager does not raise in all cases."""

    def copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    for _, program, arguments in cases:
        with contextlib.suppress(Exception):
            program(*tree_map(copied, arguments))
            return True
    return False


@each([*in_place_operators(), *other_in_place_operators()])
def test_an_in_place_operator(operator):
    cases = cases_of(operator, operator.calls(), WRITERS)
    compare(operator, cases)
    assert one_runs(cases)


@each(view_operators())
def test_a_view_operator(operator):
    """Returned, written to and seen after a write to what it was taken from."""
    cases = cases_of(operator, operator.calls(), VIEWS)
    cases += cases_of(operator, [call for call in operator.calls() if may_be_written(operator, call)], WRITTEN_VIEWS)
    compare(operator, cases)
    assert one_runs(cases)


def may_be_written(operator: Operator, call: Call) -> bool:
    """Eager refuses a write to an expanded tensor; to one that overlaps itself otherwise, it does what comes."""
    written = tensors_in(call.made_by(operator.function))[-1]
    return 0 in written.stride() or not overlaps_itself(written)


@each(out_operators())
def test_an_operator_with_out(operator):
    """Not where `out` is also another argument: torch leaves undefined what happens then."""
    cases: list[Case] = []
    for call in operator.calls(gradients=False, limit=2):
        out = tree_map(lambda result: torch.zeros(result.shape, dtype=result.dtype), call.made_by(operator.function))
        arguments = call.input, call.args, call.kwargs, out
        cases += [(f"{build.__name__}, called with {call}", build(operator.function), arguments) for build in OUTS]
    compare(operator, cases, defined=lambda run: " is argument" not in run)
    assert one_runs(cases)
