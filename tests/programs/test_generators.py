"""Random generators that a program finds or is given, and what it may do with them."""

import types

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import UnsupportedError
from helpers import nop, plain


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def drawing(generator):
    def program(x):
        first, second = torch.rand(3, generator=generator), torch.randn(3, generator=generator)
        return x + first, second, torch.rand(3, generator=torch.default_generator), torch.rand(3)

    return program


def drawing_what_it_reads(generator):
    def program(x):
        first, second = torch.rand(3, generator=generator), torch.rand(3, generator=generator)
        if (first + second).sum() > 3:
            return x + torch.rand(3, generator=generator)
        return x - first - torch.rand(3)

    return program


def drawing_again(generator):
    def program(x):
        state = generator.get_state()
        first = torch.rand(3, generator=generator)
        generator.set_state(state)
        return x + first, torch.rand(3, generator=generator)

    return program


class Drawing(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.of, self.name = {"it": generator}, "it"
        self.direct = generator

    def forward(self, x):
        found = getattr(self, "dir" + "ect")
        return x + torch.rand(3, generator=self.of[self.name]) + torch.rand(3, generator=found)


@pytest.mark.parametrize("make", [drawing, drawing_what_it_reads, drawing_again, Drawing])
def test_each_call_draws_on_from_where_the_generator_is(make):
    generators = seeded(3), seeded(3)
    eager, compiled = make(generators[0]), foregrad.compile(make(generators[1]), "eager")
    for _ in range(8):
        torch.manual_seed(5)
        expected = eager(plain(3))
        state = torch.get_rng_state()
        torch.manual_seed(5)
        torch.testing.assert_close(compiled(plain(3)), expected, rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(*(generator.get_state() for generator in generators))


def test_generators_in_an_object_that_is_given():
    def program(o):
        return torch.rand(2, generator=o.own) * o.t + torch.rand(2, generator=o.others[0])

    compiled = foregrad.aot_function(program, nop)
    sides = [types.SimpleNamespace(own=seeded(1), others=[seeded(2)], t=torch.ones(2)) for _ in range(2)]
    for call in range(4):
        assert torch.equal(program(sides[0]), compiled(sides[1]))
        if call == 1:
            sides[0].own, sides[1].own = seeded(9), seeded(9)


def makes_one(x):
    return x + torch.rand(3, generator=torch.Generator().manual_seed(1))


def draws_from_a_copy(x, generator=seeded(1)):  # noqa: B008
    return x + torch.rand(3, generator=generator.clone_state())


def sets_one_to_another(x, one=seeded(1), other=seeded(2)):  # noqa: B008
    first = torch.rand(3, generator=one)
    other.set_state(one.get_state())
    return x + first + torch.rand(3, generator=other)


def seeds(x, generator=seeded(1)):  # noqa: B008
    return x + torch.rand(3, generator=generator.manual_seed(3))


def seeds_only(x, generator=seeded(1)):  # noqa: B008
    generator.manual_seed(3)
    return x * 2


def reads_the_state(x, generator=seeded(1)):  # noqa: B008
    return x * generator.get_state().sum()


def reads_the_default_state(x):
    return x, torch.get_rng_state()


REFUSED = {
    draws_from_a_copy: "draws from a random generator that it makes of the state of another",
    sets_one_to_another: "puts a random generator",
    reads_the_state: "reads the state of a random generator",
    reads_the_default_state: "reads the state of a random generator",
}


@pytest.mark.parametrize("program", [makes_one, seeds, seeds_only])
def test_each_call_seeds_as_eager_does(program):
    compiled = foregrad.aot_function(program, nop)
    for _ in range(3):
        found = []
        for f in (program, compiled):
            torch.manual_seed(5)
            states = [generator.get_state() for generator in program.__defaults__ or ()]
            found.append((f(plain(3)), torch.get_rng_state(), [g.get_state() for g in program.__defaults__ or ()]))
            for generator, state in zip(program.__defaults__ or (), states, strict=True):
                generator.set_state(state)
        torch.testing.assert_close(*found, rtol=0, atol=0)
    assert len(compiled.specializations) == 1


@pytest.mark.parametrize("program", REFUSED)
def test_what_no_call_could_do_again_is_refused(program):
    states = [generator.get_state() for generator in (torch.default_generator, *(program.__defaults__ or ()))]
    with pytest.raises(UnsupportedError, match=REFUSED[program]):
        foregrad.aot_function(program, nop)(plain(3))
    now = [generator.get_state() for generator in (torch.default_generator, *(program.__defaults__ or ()))]
    assert all(map(torch.equal, states, now))


def test_what_a_generator_was_seeded_with_is_compared():
    generator = seeded(3)
    compiled = foregrad.aot_function(lambda x: x * generator.initial_seed() + torch.initial_seed() % 7, nop)
    for seed in (3, 4, 4, 5):
        generator.manual_seed(seed)
        torch.manual_seed(seed)
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), seed + seed % 7.0))
    assert len(compiled.specializations) == 3
