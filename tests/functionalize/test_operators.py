"""Operators of our own that say where their random numbers come from."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from foregrad.functionalize.operators import RANDOM_FILL, at_offset, from_state, with_state

aten = torch.ops.aten
ONES = torch.ones(100)
DRAWS = {
    "takes a generator": (aten.bernoulli.p, (ONES, 0.5), {}),
    "takes none": (aten.native_dropout.default, (ONES, 0.5, True), {}),
    "has an overload that takes one": (aten.rand.default, ([5],), {}),
    "like another tensor": (aten.randn_like.default, (ONES,), {}),
    "integers": (aten.randint.low, (0, 99, [5]), {}),
    "a permutation": (aten.randperm.default, (99,), {}),
    "samples": (aten.multinomial.default, (ONES, 3), {}),
    "options behind the generator": (aten.normal.float_float, (0.0, 1.0, [3]), {"dtype": torch.float64}),
    "of another layout": (
        RANDOM_FILL,
        ("normal_.default", [3, 3], [1, 3], [0.0, 1.0]),
        {"dtype": torch.float32, "device": torch.device("cpu")},
    ),
}
EACH = pytest.mark.parametrize("name", DRAWS)


def tensors(out):
    return [out] if isinstance(out, torch.Tensor) else list(out)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@EACH
def test_a_draw_that_returns_the_state_before_it_is_the_draw_itself(name):
    """R-4, P-6"""
    op, args, kwargs = DRAWS[name]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    expected = tensors(op(*args, **kwargs))
    after = torch.get_rng_state()
    torch.manual_seed(3)
    *found, state = with_state(op)(*args, **kwargs)
    assert same(found, expected) and torch.equal(state, before) and torch.equal(torch.get_rng_state(), after)


@EACH
def test_a_draw_from_a_state_repeats_it_and_leaves_the_generator_alone(name):
    """P-6"""
    op, args, kwargs = DRAWS[name]
    *expected, state = with_state(op)(*args, **kwargs)
    after = torch.get_rng_state()
    torch.rand(7)
    here = torch.get_rng_state()
    *found, following = from_state(op)(state, *args, **kwargs)
    assert same(found, expected) and torch.equal(following, after) and torch.equal(torch.get_rng_state(), here)


@EACH
def test_a_draw_at_an_offset_is_a_function_of_it(name):
    """R-1 (Z), R-3"""
    op, args, kwargs = DRAWS[name]
    seed, offset = torch.tensor(5), torch.tensor(8)
    here = torch.get_rng_state()
    *once, following = at_offset(op)(seed, offset, *args, **kwargs)
    *again, _ = at_offset(op)(seed, offset, *args, **kwargs)
    *other, _ = at_offset(op)(seed, following, *args, **kwargs)
    assert same(once, again) and not same(once, other) and following == 12
    assert torch.equal(torch.get_rng_state(), here)


@EACH
def test_abstract_results_are_like_real_ones(name):
    """Compilers ask for shapes before anything runs."""
    op, args, kwargs = DRAWS[name]
    state, seed = torch.get_rng_state(), torch.tensor(4)
    mode = FakeTensorMode()
    for own, more in ((with_state(op), ()), (from_state(op), (state,)), (at_offset(op), (seed, seed))):
        real = own(*more, *args, **kwargs)
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in (*more, *args)]
        with mode:
            fake = own(*fakes, **kwargs)
        assert [(t.shape, t.stride(), t.dtype) for t in real] == [(t.shape, t.stride(), t.dtype) for t in fake]


def test_operators_are_defined_once():
    assert with_state(aten.bernoulli.p) is with_state(aten.bernoulli.p)


def test_an_error_in_a_replay_leaves_the_generator_alone():
    here = torch.get_rng_state()
    state = torch.Generator().manual_seed(9).get_state()
    with pytest.raises(RuntimeError, match="expects p to be in"):
        from_state(aten.native_dropout.default)(state, ONES, 1.5, True)
    assert torch.equal(torch.get_rng_state(), here)
