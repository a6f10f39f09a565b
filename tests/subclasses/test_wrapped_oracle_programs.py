"""The table of programs of every kind, called with wrapper subclasses in the place of its tensors."""

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from checking import check_core
from programs.test_oracle_programs import PROGRAMS
from subclass_pairs import Pair


def wrapped(arguments):
    """Floating point tensors as pairs; a tensor that is there twice is one pair."""
    known = {}

    def pair_of(t):
        if not isinstance(t, Tensor) or not t.dtype.is_floating_point or t.layout is not torch.strided:
            return t
        if id(t) not in known:
            data = t.detach().clone(memory_format=torch.preserve_format)
            new = Pair(data, data * 2).requires_grad_(t.requires_grad)
            known[id(t)] = new if t.is_leaf else new * 1
        return known[id(t)]

    return pytree.tree_map(pair_of, arguments)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_with_pairs(name):
    """T-1 to T-10, J-10: values, memory, gradients and their gradients are eager's"""
    function, arguments, keywords = PROGRAMS[name]
    args, kwargs = wrapped((arguments(), keywords()))
    check_core(function, *args, kwargs=kwargs)


def test_the_oracle_looks_into_pairs():
    """What only one tensor inside shows is found, in results and in gradients"""

    def other(fn):
        return lambda x: Pair(fn(x.p), fn(x.q) + 1)

    x = wrapped(torch.ones(2))
    report = check_core(torch.sin, x, compile=other, raise_on_difference=False)
    assert {difference.aspect for difference in report.differences} == {"value"}
