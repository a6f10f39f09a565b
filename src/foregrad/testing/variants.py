"""The three runs: a callable that is right once may have baked in the data or the aliasing of that call."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from torch import Tensor

from .cloning import Contents, has_storage, plain_parts, storage_key
from .program import Arguments, Program


@dataclass(frozen=True)
class Variant:
    """One run: what is passed, and the bytes it starts with.

    >>> import torch
    >>> [variant.name for variant in variants(Program.of(torch.sin, (torch.zeros(1),), {}), seed=0)]
    ['same data', 'new data', 'other aliasing']

    Args:
        name: What it is called in a report.
        arguments: What is passed.
        contents: The bytes behind arguments and state.
        skipped: Why it makes no sense for this program; empty if it does.
    """

    name: str
    arguments: Arguments
    contents: Contents
    skipped: str = ""


def variants(program: Program, seed: int) -> list[Variant]:
    """The runs for a program.

    >>> import torch
    >>> variants(Program.of(torch.sin, (torch.zeros(1),), {}), seed=0)[2].skipped
    'no two arguments share memory, and no two could be the same tensor'

    Args:
        program: What is checked.
        seed: Decides the new data.
    """
    arguments, contents = program.arguments, program.contents
    new = contents.redrawn(program.tensors(), seed + 1)
    runs = [Variant("same data", arguments, contents), Variant("new data", arguments, new)]
    return [*runs, _other_aliasing(arguments, contents)]


def _other_aliasing(arguments: Arguments, contents: Contents) -> Variant:
    slots = [(i, value) for i, value in enumerate(arguments.values) if isinstance(value, Tensor)]
    pairs = list(combinations(slots, 2))
    if any(_share(a, b) for (_, a), (_, b) in pairs):
        return Variant("arguments apart", arguments.with_values(arguments.values, apart=True), contents)
    alike = [(i, j) for (i, a), (j, b) in pairs if _alike(a, b)]
    # Two tensors that also agree about grad make a call that is more likely to be legal.
    alike.sort(key=lambda pair: _disagree(arguments.values, *pair))
    if not alike:
        reason = "no two arguments share memory, and no two could be the same tensor"
        return Variant("other aliasing", arguments, contents, skipped=reason)
    first, second = alike[0]
    values = list(arguments.values)
    values[second] = values[first]
    name = f"{arguments.names[second]} is {arguments.names[first]}"
    return Variant(name, arguments.with_values(values), contents)


def _share(a: Tensor, b: Tensor) -> bool:
    keys = [{storage_key(part) for part in plain_parts(t) if has_storage(part)} for t in (a, b)]
    return a is b or bool(keys[0] & keys[1])


def _alike(a: Tensor, b: Tensor) -> bool:
    return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _disagree(values: Sequence[object], *positions: int) -> bool:
    """Whether the tensors at these positions disagree about requires_grad."""
    flags = {value.requires_grad for p in positions if isinstance(value := values[p], Tensor)}
    return len(flags) > 1
