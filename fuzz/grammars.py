"""The grammars, each with its own way to draw, examine and shrink a program."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import state
from .generate import generate
from .oracle import Outcome, examine, signatures
from .program import FuzzProgram
from .shrink import shrink

Program = FuzzProgram | state.StateProgram


@dataclass(frozen=True)
class Grammar:
    """A kind of programs.

    Args:
        generate: Makes the program of a seed and a number.
        examine: Compares one with eager.
        shrink: Makes a failing one small.
    """

    generate: Callable[[int | str, int], Any]
    examine: Callable[..., Outcome]
    shrink: Callable[[Any, Callable[[Any], bool]], Any]


GRAMMARS: dict[str, Grammar] = {
    "tensors": Grammar(generate, examine, shrink),
    "state": Grammar(state.generate, state.examine, state.shrink),
    "reads": Grammar(state.reads.generate, state.examine, state.shrink),
    "steps": Grammar(state.steps.generate, state.examine, state.shrink),
}


def grammar_of(program: Program) -> Grammar:
    """The grammar that a program belongs to.

    >>> grammar_of(generate(0, 1)) is GRAMMARS["tensors"]
    True

    Args:
        program: The program.
    """
    return GRAMMARS["tensors" if isinstance(program, FuzzProgram) else "state"]


def fails_with(signature: str, program: Program, **options: Any) -> bool:
    """Whether a failure of a given signature shows in a program.

    >>> fails_with("value", generate(0, 2), compile=lambda fn: fn)
    False

    Args:
        signature: What the failure looks like.
        program: The program.
        **options: As for `examine`.
    """
    outcome = grammar_of(program).examine(program, **options)
    return signature in (outcome.broken, *signatures(outcome.differences))
