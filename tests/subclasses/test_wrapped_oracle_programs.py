"""The table of programs of every kind, called with wrapper subclasses in the place of its tensors."""

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import foregrad
from helpers import nop
from subclass_pairs import Pair, look, storages
from test_oracle_programs import PROGRAMS


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


def observe(function, arguments, keywords):
    """What a caller sees of one call; version counters of results are not compared, as for plain tensors."""
    args, kwargs = wrapped((arguments(), keywords()))
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    torch.manual_seed(1)
    try:
        outputs = pytree.tree_leaves(function(*args, **kwargs))
        seen = [look(t, versions=False) for t in outputs] + [look(t) for t in given]
        tracked = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad and t.grad_fn is not None]
        if tracked:
            torch.autograd.backward(tracked, [torch.ones_like(t.detach()) for t in tracked])
    except foregrad.ForegradError:
        raise
    except Exception as error:
        return type(error)
    finally:
        torch.set_grad_enabled(True)
    return repr((seen, storages([*outputs, *given]), [look(t.grad, versions=False) for t in given if t.is_leaf]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_with_pairs(name):
    """T-1 to T-10: values, memory and gradients are eager's"""
    function, arguments, keywords = PROGRAMS[name]
    compiled = foregrad.aot_function(function, nop)
    expected = observe(function, arguments, keywords)
    for _ in range(2):
        assert observe(compiled, arguments, keywords) == expected
