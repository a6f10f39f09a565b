"""A failing program made as small as it can be while it fails in the same way."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from .program import PLAIN, FuzzProgram, Input, Options, Statement, Storage

T = TypeVar("T")
Fails = Callable[[FuzzProgram], bool]


def shrink(program: FuzzProgram, fails: Fails) -> FuzzProgram:
    """Take away what the failure does not need, until every further step would lose it.

    >>> from .generate import generate
    >>> small = shrink(generate(0, 2), lambda program: len(program.statements) > 0)
    >>> len(small.statements), small.results
    (1, ())

    Args:
        program: A program that fails.
        fails: Says whether a smaller one still fails in the same way.
    """
    tried: set[FuzzProgram] = set()
    while True:
        for smaller in _smaller(program):
            if smaller not in tried and smaller != program:
                tried.add(smaller)
                if fails(smaller):
                    program = smaller
                    break
        else:
            return program


def _smaller(program: FuzzProgram) -> Iterator[FuzzProgram]:
    """Programs that are one step smaller, the largest steps first."""
    yield from _without_statements(program)
    yield from _with_fewer_results(program)
    yield from _without_inputs(program)
    yield from _with_variables_joined(program)
    yield from _without_blocks(program)
    yield from _with_simpler_inputs(program)
    yield from _with_simpler_options(program)


def _without_statements(program: FuzzProgram) -> Iterator[FuzzProgram]:
    count = len(program.statements)
    width = count
    while width:
        for start in range(0, count, width):
            left = program.statements[:start] + program.statements[start + width :]
            yield _legal(replace(program, statements=left))
        width //= 2


def _legal(program: FuzzProgram) -> FuzzProgram:
    """Drop every statement and result that uses a variable which nothing makes any more."""
    known = {given.name for given in program.inputs}
    kept: list[Statement] = []
    for statement in program.statements:
        if known.issuperset(statement.reads):
            kept.append(statement)
            known.update(statement.makes)
    return replace(program, statements=tuple(kept), results=tuple(r for r in program.results if r in known))


def _with_fewer_results(program: FuzzProgram) -> Iterator[FuzzProgram]:
    for position in range(len(program.results)):
        yield replace(program, results=program.results[:position] + program.results[position + 1 :])
    yield replace(program, passing="apart")
    simpler = "one" if len(program.results) == 1 else "tuple"
    yield replace(program, form=simpler)


def _without_inputs(program: FuzzProgram) -> Iterator[FuzzProgram]:
    for given in program.inputs:
        inputs = tuple(other for other in program.inputs if other is not given)
        if inputs:
            yield _legal(_with_inputs(program, inputs))


def _with_inputs(program: FuzzProgram, inputs: tuple[Input, ...]) -> FuzzProgram:
    """Other inputs, and only the storages that they need."""
    storages = tuple(s for s in program.storages if s.name in {given.of for given in inputs})
    return replace(program, inputs=inputs, storages=storages)


def _with_variables_joined(program: FuzzProgram) -> Iterator[FuzzProgram]:
    """Without one statement, with what it read in the place of what it made; and with one input for two."""
    for position, statement in enumerate(program.statements):
        left = (*program.statements[:position], *program.statements[position + 1 :])
        for read in statement.reads if statement.makes else ():
            yield _legal(_renamed(replace(program, statements=left), dict.fromkeys(statement.makes, read)))
    for first, second in zip(program.inputs, program.inputs[1:], strict=False):
        inputs = tuple(given for given in program.inputs if given is not second)
        yield _legal(_renamed(_with_inputs(program, inputs), {second.name: first.name}))


def _renamed(program: FuzzProgram, names: dict[str, str]) -> FuzzProgram:
    statements = tuple(statement.with_names(names) for statement in program.statements)
    return replace(program, statements=statements, results=tuple(names.get(name, name) for name in program.results))


def _without_blocks(program: FuzzProgram) -> Iterator[FuzzProgram]:
    for position, statement in enumerate(program.statements):
        if statement.block != PLAIN:
            yield replace(program, statements=_put(program.statements, position, replace(statement, block=PLAIN)))


def _with_simpler_inputs(program: FuzzProgram) -> Iterator[FuzzProgram]:
    for position, given in enumerate(program.inputs):
        if given.how != "{}":
            yield replace(program, inputs=_put(program.inputs, position, replace(given, how="{}")))
    # A resize to a fixed size would reach past a smaller storage, into memory that nobody wrote.
    keeps_shape = any(statement.kind == "storage change" for statement in program.statements)
    for position, storage in enumerate(program.storages):
        for simpler in _simpler_storages(storage):
            if simpler.shape == storage.shape or not keeps_shape:
                yield replace(program, storages=_put(program.storages, position, simpler))


def _put(items: tuple[T, ...], position: int, item: T) -> tuple[T, ...]:
    return (*items[:position], item, *items[position + 1 :])


def _simpler_storages(storage: Storage) -> Iterator[Storage]:
    """Storages that come earlier in each of three orders, so that a simpler one is never made harder again."""
    for grad in _before(storage.grad, ("none", "leaf", "non-leaf")):
        yield replace(storage, grad=grad)
    for dtype in _before(storage.dtype, ("float32", "float64", "complex64")):
        yield replace(storage, dtype=dtype)
    for shape in _before(storage.shape, ((3,), (2, 3), (2, 2, 2))):
        if _size(shape) <= _size(storage.shape):
            yield replace(storage, shape=shape)


def _before(item: T, order: tuple[T, ...]) -> tuple[T, ...]:
    return order[: order.index(item)] if item in order else order


def _size(shape: tuple[int, ...]) -> int:
    return sum(shape) + len(shape)


def _with_simpler_options(program: FuzzProgram) -> Iterator[FuzzProgram]:
    plain = Options()
    for name in ("keep_inference_input_mutations", "dynamic", "partitioner"):
        yield replace(program, options=replace(program.options, **{name: getattr(plain, name)}))
    if not program.options.training:
        yield replace(program, options=plain)
