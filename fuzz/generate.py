"""Programs from a seed and a number.

A program is made by running it: each statement is tried on real tensors, and one that raises is thrown away. Most
programs are therefore legal, and the tables of statements need not know when.
"""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foregrad import partition

from . import custom
from .draws import Draw, NothingFits
from .inputs import draw_inputs
from .overlap import is_unclear
from .program import (
    ENABLE_GRAD,
    FORMS,
    NO_GRAD,
    PASSING,
    PLAIN,
    FuzzProgram,
    Input,
    Options,
    Statement,
    Storage,
    loaded,
)
from .rows import ROWS, WEIGHTS

LONGEST = 12
MOST_ELEMENTS = 64
# Writes whose outcome is clear even where two elements of a tensor are one in memory.
WRITES_OF_ONE_VALUE = frozenset({"fill_", "zero_", "[] ="})
KEPT_ERRORS = 0.02
IN_OBJECTS = 0.2  # programs that take or return objects, or change what they are given
KEPT_BACKWARD_ERRORS = 0.2
# Results that give an `out` argument another shape are deprecated, and few programs rely on it.
KEPT_RESIZED_OUT = 0.1
_TRIES = 8


def partitioners() -> list[str]:
    """The names of all partitioners that there are.

    >>> "default_partition" in partitioners()
    True
    """
    return sorted(name for name in partition.__all__ if name.endswith("_partition") and not name.startswith("explain"))


def generate(seed: int | str, number: int) -> FuzzProgram:
    """Make the program of a seed and a number, always the same.

    >>> generate(0, 1) == generate(0, 1)
    True

    Args:
        seed: The seed of the run.
        number: The program's place in it.
    """
    name = f"{seed}/{number}"
    rng = random.Random(name)
    with _undisturbed():
        options = _draw_options(rng, name)
        for _ in range(_TRIES):
            program = _draw_program(rng, name, options)
            if rng.random() < KEPT_BACKWARD_ERRORS or not _backward_fails(program):
                break
    return program


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave the random generator, the grad mode and the warnings of the caller alone."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.set_grad_enabled(True):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        yield


def _draw_options(rng: random.Random, name: str) -> Options:
    training = rng.random() < 0.8
    keep, dynamic = rng.random() < 0.4, rng.random() < 0.05
    # Drawn apart, so that a new partitioner does not change the programs.
    partitioner = random.Random(f"{name}/partitioner").choice(partitioners())
    return Options(training, keep and not training, dynamic, partitioner)


def _draw_program(rng: random.Random, name: str, options: Options) -> FuzzProgram:
    storages, inputs = _legal_inputs(rng)
    empty = FuzzProgram(name, storages, inputs, (), (), "tuple", options)
    with loaded(empty) as script:
        given = dict(zip((i.name for i in inputs), script.make_inputs(), strict=True))
    with torch.set_grad_enabled(options.training):
        body = _Body(rng, given)
        body.draw(rng.randint(1, LONGEST))
    results, form = _draw_results(rng, list(body.tensors))
    # Drawn apart, so that the programs themselves stay what they were.
    objects = random.Random(f"{name}/objects")
    if objects.random() < IN_OBJECTS:
        form, passing = objects.choice([form, "object"]), objects.choice(PASSING)
    else:
        passing = "apart"
    return replace(empty, statements=tuple(body.statements), results=results, form=form, passing=passing)


def _legal_inputs(rng: random.Random) -> tuple[tuple[Storage, ...], tuple[Input, ...]]:
    """Draw until the inputs can be made."""
    while True:
        storages, inputs = draw_inputs(rng)
        with loaded(FuzzProgram("inputs", storages, inputs, (), ())) as script:
            try:
                made = script.make_inputs()
            except (RuntimeError, IndexError, TypeError):
                continue
        coarse = any(tensor.requires_grad and tensor.dtype == torch.bfloat16 for tensor in made)
        if not coarse and all(tensor.numel() <= MOST_ELEMENTS for tensor in made):
            return storages, inputs


class _Body:
    """The statements so far, and the tensors that they have made."""

    def __init__(self, rng: random.Random, given: dict[str, Tensor]) -> None:
        self._rng = rng
        self._scope: dict[str, Any] = {"torch": torch, **{name: getattr(custom, name) for name in custom.NAMES}}
        self.tensors = dict(given)
        self.statements: list[Statement] = []
        self._made = 0

    def draw(self, length: int) -> None:
        """Add statements until there are enough, or until one raises and is kept all the same."""
        block, left = PLAIN, 0
        for _ in range(_TRIES * length):
            if len(self.statements) >= length:
                return
            if left == 0:
                block, left = self._draw_block()
            statement = self._draw_statement(block)
            if statement is None:
                continue
            shapes = self._shapes()
            try:
                self._run(statement)
            except Exception as error:
                kept = not isinstance(error, NothingFits) and _can_agree(error) and self._rng.random() < KEPT_ERRORS
                if kept:
                    self.statements.append(statement)
                # What was thrown away may have resized something: the next statements would not fit.
                if kept or self._shapes() != shapes:
                    return
            else:
                self.statements.append(statement)
                left -= 1

    def _shapes(self) -> list[torch.Size]:
        return [tensor.shape for tensor in self.tensors.values()]

    def _draw_block(self) -> tuple[str, int]:
        chance = self._rng.random()
        if chance < 0.1:
            return NO_GRAD, self._rng.randint(1, 3)
        return (ENABLE_GRAD if chance < 0.12 else PLAIN), self._rng.randint(1, 3)

    def _draw_statement(self, block: str) -> Statement | None:
        (kind,) = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        try:
            return Draw(self._rng, self.tensors, self._made).statement(self._rng.choice(ROWS[kind]), block)
        except NothingFits:
            return None

    def _run(self, statement: Statement) -> None:
        """Run a statement and keep what it made, unless that is too much."""
        read = [self.tensors[name] for name in statement.reads]
        # Gradients of few bits show in which order they were added up, which nobody promises.
        if "requires_grad_" in statement.source and any(t.dtype == torch.bfloat16 for t in read):
            raise NothingFits
        scope = {**self._scope, **self.tensors}
        block: Any = torch.set_grad_enabled(statement.block != NO_GRAD) if statement.block else nullcontext()
        before = {name: (t._version, t.shape) for name, t in self.tensors.items()}
        with block:
            exec(statement.source, scope)
        made = {name: scope[name] for name in statement.makes}
        if any(not isinstance(t, Tensor) or t.numel() > MOST_ELEMENTS for t in made.values()):
            raise NothingFits
        written = [t for name, t in zip(statement.reads, read, strict=True) if t._version != before[name][0]]
        if statement.operator not in WRITES_OF_ONE_VALUE and is_unclear(written, read):
            raise NothingFits
        resized = any(self.tensors[name].shape != before[name][1] for name in statement.reads)
        if statement.kind == "out" and resized and self._rng.random() > KEPT_RESIZED_OUT:
            raise NothingFits
        self.tensors.update(made)
        self._made += len(made)


def _can_agree(error: Exception) -> bool:
    """Whether shape inference, which sees neither data nor memory nor kernels, can be asked for the same error."""
    unseen = ("out of bounds", "out of range in self", "single memory location", "split expects")
    return type(error) in (RuntimeError, IndexError, ValueError) and not any(text in str(error) for text in unseen)


def _draw_results(rng: random.Random, names: list[str]) -> tuple[tuple[str, ...], str]:
    """Some of the variables, mostly late ones, now and then the same one twice."""
    count = rng.choice([1, 1, 2, 2, 3, 4])
    results = [rng.choice(names[-3:] if rng.random() < 0.5 else names) for _ in range(count)]
    form = rng.choice(["one", "tuple"]) if count == 1 else rng.choice(FORMS)
    return tuple(results), form


def _backward_fails(program: FuzzProgram) -> bool:
    """Whether eager itself cannot differentiate the program."""
    with loaded(program) as script, torch.set_grad_enabled(program.options.training):
        try:
            results = tensors_of(script.program(*script.make_inputs()))
            able = [tensor for tensor in results if tensor.requires_grad]
            torch.autograd.backward(able, [torch.ones_like(tensor) for tensor in able])
        except Exception:
            return True
    return False


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in what a program returns.

    >>> len(tensors_of((torch.ones(1), {"rest": [torch.ones(1)]})))
    2

    Args:
        value: What it returned.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, SimpleNamespace):
        value = {name: held for name, held in vars(value).items() if name != "box"}
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value or () for tensor in tensors_of(part)]
