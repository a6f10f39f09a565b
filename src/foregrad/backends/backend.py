"""What a backend is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from ..options import Compiler, Compilers, NumbersAre, Partitioner
from ..partition import min_cut_rematerialization_partition
from ..runtime.compilers import make_boxed_func
from ..slots import Buffer, FreeTensor, Input, Param, Slot, outermost

Decompositions = Mapping[Any, Callable[..., Any]]


@dataclass(frozen=True)
class Backend:
    """Compilers for the graphs of a program, and what is recorded for them."""

    name: str
    new_compilers: Callable[[], Compilers]  # called once for each program
    decompositions: Callable[[], Decompositions] | None = None
    numbers: NumbersAre = "constants"  # what floats of optimizers are to its graphs
    writes: Literal["asked for", "by the compiler", "to inputs"] = "asked for"
    """What graphs write in place: what they were asked to, what the compiler decides, and inputs of inference too."""
    draws_in_order: bool = True  # whether its graphs draw random numbers in the order of the program
    partition: Partitioner = min_cut_rematerialization_partition  # unless another one is asked for


def of_compiler(name: str, compiler: Compiler) -> Backend:
    """A backend that compiles every graph in the same way."""
    boxed = functools.partial(_compile_boxed, compiler)
    return Backend(name, functools.partial(the_same, Compilers(boxed, boxed, boxed)))


# Functions with names, for a compiled callable that is pickled.
def _compile_boxed(compiler: Compiler, graph: Any, examples: Any) -> Any:
    compiled = compiler(graph, examples)
    is_boxed = getattr(compiled, "_boxed_call", False) or not callable(compiled)
    return compiled if is_boxed else make_boxed_func(compiled)


def the_same(compilers: Compilers) -> Compilers:
    """Compilers that all programs share."""
    return compilers


def at_line_of(node: fx.Node) -> str:
    """The user's line that a node comes from, as a part of a sentence."""
    line = (node.meta.get("stack_trace") or "").strip().splitlines()
    return f", at {line[-1].strip()!r}" if line else ""


def stays_in_place(slot: Slot | None) -> bool:
    """Whether an input has the same address at each call, as far as the program can know."""
    place = outermost(slot)
    return isinstance(place, (Param, Buffer, FreeTensor)) or (isinstance(place, Input) and place.stays)
