"""F-3: nested values are taken apart and put together again."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from foregrad.codegen.pytree import flatten, unflatten
from helpers import grab, plain

Point = namedtuple("Point", "x y")

NESTED = {
    "a leaf": 1,
    "nothing": None,
    "an empty tuple": (),
    "a list in a tuple": (1, [2, (3,)]),
    "a dict": {"b": 1, "a": {"c": [2]}},
    "a named tuple": Point(1, [2]),
    "an ordered dict": OrderedDict(b=1, a=2),
    "a size": torch.Size([2, 3]),
    "a size in an ordered dict": OrderedDict(k=torch.Size([2, 3])),
    "a mix": [{"p": Point((1,), {})}, OrderedDict(k=[None])],
}


@pytest.mark.parametrize("name", NESTED)
def test_what_is_taken_apart_can_be_put_together(name):
    flat = flatten(NESTED[name], "x")
    again = unflatten(flat.tree, flat.leaves)
    assert again == NESTED[name] and type(again) is type(NESTED[name])
    assert len(flat.paths) == len(flat.leaves) == len(set(flat.paths))


def test_a_size_in_another_container_stays_one():
    """F-3: pytree alone would make a tuple of it."""
    compiled, _ = grab(lambda x, nested: (x * nested["k"].numel(), nested))
    for _ in range(2):
        out, nested = compiled(plain(1), OrderedDict(k=torch.Size([2, 3])))
        assert out.item() == 6 and type(nested["k"]) is torch.Size


def test_paths_are_in_the_words_of_python():
    assert flatten({"a": [1, (2,)], 3: None}, "x").paths == ["x['a'][0]", "x['a'][1][0]", "x[3]"]


@pytest.mark.parametrize("name", [name for name in NESTED if name not in ("a leaf", "nothing")])
def test_a_nested_argument_comes_back_as_it_was(name):
    """F-3"""
    given = NESTED[name]
    compiled, _ = grab(lambda x, nested: (x * 2, nested))
    for _ in range(2):
        _, result = compiled(plain(1), given)
        assert result == given and type(result) is type(given)
    assert len(compiled.specializations) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 2], [1, 2, 3]),
        ([1], (1,)),
        ({"a": 1}, {"b": 1}),
        (Point(1, 2), (1, 2)),
        ([[]], [{}]),
        ({"a": [1]}, {"a": (1,)}),
    ],
)
def test_another_structure_gets_another_program(first, second):
    """F-2, F-3"""
    compiled, _ = grab(lambda x, nested: (x * 2, nested))
    assert compiled(plain(1), first)[1] == first
    assert compiled(plain(1), second)[1] == second
    assert len(compiled.specializations) == 2
    assert compiled(plain(1), first)[1] == first and len(compiled.specializations) == 2
