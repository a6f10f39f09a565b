"""Whole numbers that a program reads: exact at first, and symbols once a call has read another one there."""

import pytest
import torch
from torch.nn import functional as F

import foregrad
from foregrad.capturing import same_program
from helpers import leaf, nop

CALLS = 8
PROGRAMS = {}


def program(most, numbers=lambda n: torch.tensor(n + 1)):
    """Put a function into the table, how many programs it may be, and the numbers that it reads in its nth call."""

    def register(fn):
        PROGRAMS[fn.__name__] = fn, most, numbers
        return fn

    return register


def three(n):
    return torch.tensor([n % 5, 3, 7 - n % 5])


@program(2)
def a_slice(x, i):
    return x[: i.item()].cumsum(0)


@program(2)
def a_range_of_positions(x, i):
    n = i.item()
    return (torch.arange(n) * 2).sum() + x, torch.zeros(n, 2).sum(0), torch.rand(n).mean()


@program(2, three)
def the_sizes_of_a_split(x, i):
    return [part.sum() for part in x.split(i.tolist())]


@program(2, three)
def a_loop_over_lengths(x, i):
    return torch.stack([x[: n + 1].mean() for n in i.tolist()])


@program(2, lambda n: torch.tensor([n, 9 - n, 4]))
def a_loop_over_items(x, i):
    return torch.stack([x[: n.item()].sum() + x[n.item()] for n in i])


@program(2)
def an_index(x, i):
    y = x.view(2, 5)
    return x[i.item()] * 2, y[:, i.item() // 2], y[0, 1 : i.item() % 3 + 2]


@program(2)
def arithmetic(x, i):
    n = i.item()
    return x * n, x / n, x + n // 2, x * (n / 3), n, n + 1, {"n": -n}


@program(2)
def a_count_of_what_is_positive(x, i):
    n = (x > i / 10).sum().item()
    return x.topk(n).values, x[:n].sum() / max(n, 1)


@program(3)
def a_comparison(x, i):
    n = i.item()
    return x * n if n > 4 else x[n:] - n


@program(3)
def a_padding(x, i):
    return F.pad(x, (0, i.item())), x.repeat(i.item()), x.expand(i.item(), 10).sum(0)


@program(CALLS)
def a_loop_as_long(x, i):
    for _ in range(i.item()):
        x = x * 2
    return x


@program(CALLS)
def text(x, i):
    n = i.item()
    return x * len(f"{'a' * n}"), f"{n}", str(n), f"{n:d}"


@program(CALLS)
def the_type(x, i):
    return x * (2 if type(i.item()) is int else 3)


@program(CALLS)
def a_key(x, i):
    return x * dict.fromkeys(range(20), 3)[i.item()]


@program(CALLS)
def a_number_made_whole(x, i):
    return x[: int(i)]


class ByTypeInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.factor_of = lambda: 10.0 if type(n) is int else 1.0
        return x[:n].clone()

    @staticmethod
    def backward(ctx, grad):
        return F.pad(grad, (0, 10 - grad.shape[0])) * ctx.factor_of(), None


@program(CALLS)
def a_backward_that_asks_for_the_type(x, i):
    return ByTypeInBackward.apply(x, i.item())


@program(3, lambda n: torch.tensor(n + 6))
def an_index_out_of_range(x, i):
    return x[i.item()] * 2


def observed(call, numbers, n):
    torch.manual_seed(n)
    x = leaf(10).detach().add_(n).requires_grad_()
    try:
        results = call(x, numbers(n))
    except IndexError as error:
        return str(error), torch.get_rng_state().tolist()
    leaves = torch.utils._pytree.tree_leaves(results)
    sum(r.sum() for r in leaves if isinstance(r, torch.Tensor) and r.requires_grad).backward()
    shown = [(r.tolist(), r.stride()) if isinstance(r, torch.Tensor) else (type(r), r) for r in leaves]
    return shown, x.grad.tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("backend", ["eager", nop])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_that_are_read_are_as_in_eager(name, backend):
    fn, most, numbers = PROGRAMS[name]
    compiled = foregrad.compile(fn, backend=backend)
    for n in range(CALLS):
        assert observed(compiled, numbers, n) == observed(fn, numbers, n)
    assert len(compiled.specializations) <= most, compiled.recompiles


def test_a_program_shows_the_symbol_and_its_condition():
    compiled = foregrad.aot_function(PROGRAMS["a_comparison"][0], nop)
    for n in range(3):
        compiled(leaf(10), torch.tensor(n + 1))
    [read] = compiled.specializations[-1].reads
    assert read.symbol in read.condition and str(read).startswith(f"item() is {read.symbol} where ")


def test_what_is_no_symbol_is_cheap(monkeypatch):
    """A program whose numbers stay the same is not recorded with symbols."""
    monkeypatch.setattr(same_program, "does_the_same", None)
    compiled = foregrad.aot_function(PROGRAMS["a_slice"][0], nop)
    for _ in range(3):
        compiled(leaf(10), torch.tensor(4))
    assert len(compiled.specializations) == 1 and compiled.specializations[0].reads == ()
