"""Inputs drawn from an alias lattice: how each argument lies in memory, and what it shares with the others."""

import random
from collections.abc import Sequence

from .program import Input, Storage

NAMES = ("x", "y", "z", "w")
SHAPES = ((4,), (6,), (2, 3), (3, 3), (4, 2), (2, 3, 2), (2, 2, 4))
ODD_SHAPES = ((), (1,), (0,), (2, 0), (5,), (1, 3), (3, 1))
DTYPES = ("float32",) * 15 + ("float64",) * 2 + ("bfloat16", "int64") + ("complex64",) * 2

# Gradients of few bits show in which order they were added up, which nobody promises.
_WITHOUT_GRAD = ("int64", "bfloat16")

# Expressions over a storage, by what two inputs have in common that look at it in these ways. An input that is the
# first over its storage is drawn from the same table.
LATTICE: dict[str, tuple[str, ...]] = {
    "same": ("{}",),
    "overlapping": ("{}[:-1]", "{}[1:]", "{}.view(-1)", "{}[:2]", "{}.view(-1)[1:]"),
    "disjoint in one storage": ("{}[:2]", "{}[2:]", "{}[0::2]", "{}[1::2]", "{}[..., 0]", "{}[..., 1]"),
    "expanded": ("{}[:1].expand_as({})", "{}[..., :1].expand(*{}.shape)", "{}.expand(2, *{}.shape)"),
    "detached": ("{}.detach()", "{}.detach()[1:]", "{}.detach().requires_grad_()", "{}.data"),
    "other dtype": ("{}.view(torch.int32)", "{}.detach().view(torch.int16)", "{}.view(torch.int64)"),
    "other layout": ("{}.t()", "{}.transpose(0, -1)", "{}[::2]", "{}[..., ::2]", "{}.unsqueeze(0)", "{}.view_as({})"),
    "several views": ("{}.unbind(0)[0]", "{}.unbind(0)[1]", "{}.chunk(2)[0]", "{}.chunk(2)[1]"),
    "complex": ("torch.view_as_real({})", "{}.conj()", "{}.real", "{}.imag"),
    "element": ("{}.view(-1)[0]", "{}.view(-1)[1:2]", "{}.view(-1)[:0]"),
}
_WEIGHTS = {"same": 5, "overlapping": 4, "disjoint in one storage": 4, "detached": 2, "other layout": 3}


def draw_inputs(rng: random.Random) -> tuple[tuple[Storage, ...], tuple[Input, ...]]:
    """A few storages, and inputs that look at them.

    >>> storages, inputs = draw_inputs(random.Random(1))
    >>> {given.of for given in inputs} == {storage.name for storage in storages}
    True

    Args:
        rng: Decides.
    """
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    storages: list[Storage] = []
    inputs: list[Input] = []
    for name in NAMES[: rng.choice([1, 2, 2, 2, 3, 3, 4])]:
        if storages and rng.random() < 0.5:
            inputs.append(Input(name, rng.choice(storages).name, _draw_view(rng)))
            continue
        storages.append(_draw_storage(rng, f"s{len(storages)}", shape, dtype))
        how = "{}" if rng.random() < 0.7 else _draw_view(rng)
        inputs.append(Input(name, storages[-1].name, how))
    return tuple(storages), tuple(inputs)


def _draw_view(rng: random.Random) -> str:
    relations = list(LATTICE)
    (relation,) = rng.choices(relations, [_WEIGHTS.get(name, 1) for name in relations])
    return rng.choice(LATTICE[relation])


def _draw_storage(rng: random.Random, name: str, shape: tuple[int, ...], dtype: str) -> Storage:
    """A storage that mostly goes together with the others of the program."""
    chance = rng.random()
    if chance < 0.2:
        shape = rng.choice([shape[1:], shape[-1:], shape[1:2], (1, *shape[1:])])
    elif chance < 0.3:
        shape = rng.choice(ODD_SHAPES)
    if rng.random() < 0.15:
        dtype = rng.choice(DTYPES)
    grad = rng.choice(["none", "none", "leaf", "leaf", "non-leaf", "non-leaf"])
    start = round(-1.3 + 0.2 * int(name[1:]), 1)
    return Storage(name, shape, dtype, "none" if dtype in _WITHOUT_GRAD else grad, start)


def relation_of(how: str) -> str:
    """The place of an expression in the lattice.

    >>> relation_of("{}[1:]"), relation_of("{}")
    ('overlapping', 'same')

    Args:
        how: An expression of an input.
    """
    return next(relation for relation, expressions in LATTICE.items() if how in expressions)


def relations(inputs: Sequence[Input]) -> list[str]:
    """What the inputs have in common with each other: what a summary counts.

    >>> relations([Input("x", "s0"), Input("y", "s1")]), relations([Input("x", "s0"), Input("y", "s0", "{}[1:]")])
    (['disjoint', 'disjoint'], ['overlapping'])

    Args:
        inputs: All inputs of a program.
    """
    shared = [given for given in inputs if sum(other.of == given.of for other in inputs) > 1]
    alone = ["disjoint" if given.how == "{}" else f"disjoint, {relation_of(given.how)}" for given in inputs]
    alone = [name for name, given in zip(alone, inputs, strict=True) if given not in shared]
    first = {given.of: given for given in reversed(shared)}
    return alone + [relation_of(given.how) for given in shared if first[given.of] is not given]
