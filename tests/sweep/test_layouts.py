"""Every operator of torch's own database, in every class of layout: what is recorded lies as the real results do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foregrad._torch import new_fake_mode, new_shape_env
from foregrad.abstract.engine import Engine
from foregrad.abstract.lean_engine import LeanEngine
from foregrad.abstract.symbolic_engine import SymbolicEngine
from sweep.reality import Seen, observe, part_of_database

pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore")]


def differences(info: Any, engine: Callable[[], Engine], **options: Any) -> list[str]:
    wrong: list[str] = []

    def note(seen: Seen) -> None:
        if seen.agrees is False and not seen.is_left_to_inference:
            wrong.append(str(seen))

    observe([info], "cpu", [(engine, note)], **options)
    return wrong


@pytest.mark.parametrize("info", part_of_database(), ids=lambda info: info.full_name)
def test_an_operator(info: Any) -> None:
    assert not differences(info, lambda: LeanEngine(new_fake_mode(None)))


@pytest.mark.parametrize("info", part_of_database()[::10], ids=lambda info: info.full_name)
def test_an_operator_of_symbolic_sizes(info: Any) -> None:
    wrong = differences(info, lambda: SymbolicEngine(new_fake_mode(new_shape_env())), dynamic=True, few=True)
    assert not [text for text in wrong if "Error" not in text]  # not every kernel can compute with symbols
