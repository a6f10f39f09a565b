"""Programs that seed random generators, put them back, or make their own, each as in eager over ten calls."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad.errors import UnsupportedError
from helpers import nop, plain
from programs.test_checked_reads import aot, compare, values

PROGRAMS = {}


def program(arguments, most=1):
    """Put a function, or what makes a module, into the table, with how many programs may be made for it."""

    def register(fn):
        assert fn.__name__ not in PROGRAMS
        PROGRAMS[fn.__name__] = fn, arguments, most
        return fn

    return register


GENERATOR = torch.Generator()


@program(lambda n: (values(n, 3),), 2)  # Dynamo replaces torch.manual_seed where it is first imported
def seeded(x):
    torch.manual_seed(0)
    a = torch.rand(3)
    return x * a + torch.randn(3)


@program(lambda n: (values(n, 3),))
def seeded_in_the_middle(x):
    a = torch.rand(3)
    torch.manual_seed(5)
    return x * a + torch.randn(3) * torch.rand(3)


@program(lambda n: (values(n, 3),))
def seeded_at_the_end(x):
    a = torch.rand(3)
    torch.manual_seed(5)
    return x * a


@program(lambda n: (values(n, 3),))
def fork_in_the_middle(x):
    a = torch.rand(3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        b = torch.randn(3)
    return x * a * b + torch.rand(3)


@program(lambda n: (values(n, 3),))
def two_forks(x):
    y = x
    for i in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(i)
            y = y * torch.randn(3)
        y = F.dropout(y, 0.5)
    return y


@program(lambda n: (values(n, 3),))
def back_to_start(x):
    s = torch.get_rng_state()
    a = torch.rand(3)
    torch.set_rng_state(s)
    return x * a + torch.randn(3)


@program(lambda n: (values(n, 3),))
def seeded_twice_alike(x):
    torch.manual_seed(0)
    a = torch.rand(3)
    b = torch.rand(3)
    torch.manual_seed(0)
    c = torch.rand(3)
    return x * a * b + c


@program(lambda n: (values(n, 3),))
def seeded_twice_then_other(x):
    torch.manual_seed(0)
    a = torch.rand(3)
    b = torch.rand(3)
    torch.manual_seed(0)
    c = torch.rand(3)
    return x * a * b + c + torch.randn(3)


@program(lambda n: (values(n, 3),))
def made_inside(x):
    g = torch.Generator()
    g.manual_seed(3)
    return x * torch.rand(3, generator=g) + torch.rand(3, generator=g)


@program(lambda n: (values(n, 3),))
def made_inside_unseeded(x):
    g = torch.Generator()
    return x * torch.rand(3, generator=g)


@program(lambda n: (values(n, 3),))
def made_and_seeded_twice(x):
    g = torch.Generator().manual_seed(3)
    a = torch.rand(3, generator=g)
    g.manual_seed(4)
    return x * torch.rand(3, generator=g) + a


@program(lambda n: (values(n, 3),))
def users_seeded_inside(x):
    GENERATOR.manual_seed(2)
    return x * torch.rand(3, generator=GENERATOR)


@program(lambda n: (values(n, 3), n % 3), 3)
def seeded_by_argument(x, seed):
    torch.manual_seed(seed)
    return x * torch.rand(3)


@program(lambda n: (values(n, 3), torch.tensor(n % 3)), 3)
def seeded_by_data(x, seed):
    torch.manual_seed(int(seed))
    return x * torch.rand(3)


@program(lambda n: (values(n, 3),), 4)
def seeded_and_read(x):
    torch.manual_seed(4)
    a = torch.rand(3)
    if (x.detach() * a).sum() > 0:
        return x * torch.rand(3)
    torch.manual_seed(5)
    if x[0] > 0:
        return x * 2 * torch.rand(3)
    return x * torch.randn(3)


@program(lambda n: (values(n, 3),), 4)
def checkpoint_and_seed(x):
    torch.manual_seed(4)
    return checkpoint(lambda y: F.dropout(y.sin(), 0.5), x, use_reentrant=False) * torch.rand(3)


@program(lambda n: (values(n, 3, 4),), 4)
class SeededDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.noise = torch.Generator()

    def forward(self, x):
        self.noise.manual_seed(7)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            y = F.dropout(self.layer(x), 0.5)
        return y * torch.rand(4, generator=self.noise) + F.dropout(x, 0.2)


@program(lambda n: (values(n, 3),))
def seeded_without_draw(x):
    torch.manual_seed(3)
    return x * 2


@program(lambda n: (values(n, 3),))
def users_seeded_without_draw(x):
    GENERATOR.manual_seed(3)
    return x * 2


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_as_in_eager(name):
    compare(*PROGRAMS[name], aot)


def between_two_draws(x):
    first = torch.rand(3)
    state = torch.get_rng_state()
    torch.rand(3)
    torch.set_rng_state(state)
    return x * first * torch.randn(3)


def test_a_state_between_two_draws_is_refused():
    with pytest.raises(UnsupportedError, match="where it was between two draws"):
        foregrad.aot_function(between_two_draws, nop)(plain(3))


@pytest.mark.parametrize("options", [{"functionalize_rng_ops": True}, {"reads": "refused"}])
def test_where_a_call_has_no_parts_it_is_refused(options):
    with foregrad.config.patch(**options), pytest.raises(UnsupportedError, match="Seed outside"):
        foregrad.aot_function(PROGRAMS["seeded"][0], nop)(plain(3))


def test_the_generated_code_tells():
    compiled = foregrad.aot_function(PROGRAMS["fork_in_the_middle"][0], nop)
    compiled(plain(3))
    source = compiled.specializations[0].source
    assert "# the program seeds a generator, at " in source and "# the program puts a generator back, at " in source
