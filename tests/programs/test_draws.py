"""Programs that draw from Python's and numpy's own generators: each call draws as eager does."""

import pickle
import random
import threading
from random import getstate, setstate, uniform

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad.capturing.draws import Draws
from foregrad.errors import EagerFallbackWarning, StateChangeError
from helpers import leaf, nop

numpy = pytest.importorskip("numpy")

CALLS = 10
PROGRAMS = {}


def program(most):
    """Put a function into the table, and how many programs it may be."""

    def register(fn):
        PROGRAMS[fn.__name__] = fn, most
        return fn

    return register


@program(4)
def layers_are_dropped(x):
    for _ in range(2):
        if random.random() < 0.5:
            x = x * 2
    return x


@program(2)
def a_method_that_was_imported(x):
    return x.sin() if uniform(0, 1) > 0.3 else x.cos()


@program(3)
def a_choice(x):
    return random.choice([torch.sin, torch.cos, torch.exp])(x)


@program(3)
def a_whole_number(x):
    return x[: random.randint(1, 3)]


@program(4)
def a_sample(x):
    return x[random.sample(range(4), 1)[0]]


@program(6)
def a_list_in_another_order(x):
    order = [0, 1, 2]
    random.shuffle(order)
    return x[order]


@program(3)
def what_is_made_whole(x):
    return x * int(random.random() * 3)


@program(6)
def arithmetic_and_comparisons(x):
    low, high = sorted([random.gauss(0, 1), -random.triangular()])
    return x * 2 if high - low / 2 > 0.7 else x / 3 if min(high, 0.5) < 0.2 else x


@program(1)
def a_seed(x):
    random.seed(3)
    numpy.random.seed(4)
    return x * random.randint(1, 9) + numpy.random.randint(9)


@program(1)
def a_state_that_is_put_back(x):
    state, other = random.getstate(), numpy.random.get_state()
    random.seed(1)
    numpy.random.seed(1)
    y = x if random.random() < numpy.random.random() else -x
    random.setstate(state)
    numpy.random.set_state(other)
    return y


STATE = random.Random(5).getstate()


@program(1)
def a_state_from_outside(x):
    random.setstate(STATE)
    return x * 2 if random.random() < 0.5 else x


@program(2)
def a_number_of_numpys(x):
    return x * 2 if numpy.random.rand() < 0.5 else x * 3


@program(6)
def an_array_of_whole_numbers(x):
    return x[torch.from_numpy(numpy.random.permutation(3))]


@program(4)
def a_draw_between_reads(x):
    number = random.random()
    if x.sum() > 0:
        return x * 2 if number < 0.5 else x * 3
    return x if random.random() < 0.5 else -x


@program(2)
def torchs_own_numbers_as_well(x):
    return nn.functional.dropout(x) if random.random() < 0.5 else x + torch.rand(4)


@program(1)
def a_draw_that_nothing_is_decided_by(x):
    random.random()
    return x * 2


def states():
    return random.getstate(), pickle.dumps(numpy.random.get_state()), torch.get_rng_state().tolist()


@pytest.mark.parametrize("backend", ["eager", nop])
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_draw_as_in_eager(name, backend):
    fn, most = PROGRAMS[name]
    compiled = foregrad.compile(fn, backend=backend)
    for n in range(CALLS):
        found = []
        for call in (fn, compiled):
            random.seed(n), numpy.random.seed(n), torch.manual_seed(n)
            x = leaf(4).detach().sub_(3 * (n % 2)).requires_grad_()
            y = call(x)
            y.sum().backward()
            found.append((y.tolist(), x.grad.tolist(), states()))
        assert found[0] == found[1]
    assert len(compiled.specializations) <= most, compiled.recompiles


REFUSED = {
    "in an operator": lambda x: x * random.random(),
    "in a tensor": lambda x: x + torch.tensor([random.random()] * 4),
    "in a filled tensor": lambda x: x + torch.full((4,), numpy.random.beta(1.0, 1.0)),
    "as a probability": lambda x: nn.functional.dropout(x, random.random()),
    "compared with a tensor": lambda x: x * 2 if x.max() > random.random() else x,
    "as text": lambda x: x * len(f"{random.random():.3f}"),
    "as a result": lambda x: (x, random.random()),
    "in a function of numpy's": lambda x: x * float(numpy.sqrt(random.random())),
    "of an array of numbers": lambda x: x * float(numpy.random.rand(2)[0]),
    "of a list that is written": lambda x: x * 2 if numpy.random.shuffle([1, 2]) is None else x,
    "of a state that is looked at": lambda x: x * random.getstate()[1][0],
    "in what a checkpoint runs again": lambda x: checkpoint(
        lambda y: y.sin() if random.random() < 2 else y, x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_call_could_draw_again_is_refused(name):
    before = states()
    with pytest.raises(StateChangeError, match=r"draws .*Draw with torch, pass the number as an argument"):
        foregrad.aot_function(REFUSED[name], nop)(leaf(4))
    assert states() == before


def test_a_program_that_catches_the_refusal_is_refused():
    def program(x):
        try:
            return x * random.random()
        except Exception:
            return x

    with pytest.raises(StateChangeError):
        foregrad.aot_function(program, nop)(leaf(4))


def test_another_thread_draws_by_itself():
    def program(seen):
        thread = threading.Thread(target=lambda: drawn.append(random.random()))
        thread.start()
        thread.join()
        return random.getrandbits(3)

    drawn, draws = [], Draws(True)
    draws.around(program)([])
    assert type(drawn[0]) is float and [draw.name for draw in draws.taken] == ["getrandbits"]


def test_a_warning_names_the_draw_that_keeps_changing():
    with foregrad.config.patch(max_specializations=2):
        compiled = foregrad.aot_function(lambda x: x * random.randint(0, 1000), nop)
    random.seed(0)
    compiled(leaf(4)), compiled(leaf(4))
    with pytest.warns(EagerFallbackWarning, match=r"What keeps changing is random.randrange\(\) at .*randint"):
        compiled(leaf(4))


def test_draws_without_a_trace_are_refused():
    """A name for a method in C tells of nothing, and where the generator is put back nothing seems to have happened."""

    def by_names_of_the_module(x):
        state, number = random.getstate(), uniform_in_c()
        random.setstate(state)
        return x * number

    def by_names_of_its_own(x):
        state, number = getstate(), uniform_in_c()
        setstate(state)
        return x * number

    def seeded(x):
        number = uniform_in_c()
        random.seed(3)
        return x * number

    before = random.getstate()
    for fn in (by_names_of_the_module, by_names_of_its_own, seeded):
        with pytest.raises(StateChangeError, match="from a generator that it changes"):
            foregrad.aot_function(fn, nop)(leaf(2))
        assert random.getstate() == before


uniform_in_c = super(random.Random, uniform.__self__).random
