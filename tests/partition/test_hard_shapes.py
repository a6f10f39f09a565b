"""P-1 to P-7 where there is little to cut, or where what is cut is unusual."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad import check, min_cut_rematerialization_partition
from helpers import grab, leaf, nop, plain

BUDGETS = [None, 1.0, 0.5, 0.0, 10**9]


def _written_twice(x, b):
    b.mul_(2)
    y = (x * b.cos()).sin()
    b.add_(1)
    return y * b


def _written_in_between(x):
    y = x * 1
    y[0].mul_(2)
    return y.sin()


PROGRAMS = {
    "no backward": (lambda x: x.sin(), [plain(4)]),
    "identity": (lambda x: x, [leaf(4)]),
    "one operator": (lambda x: x.sin(), [leaf(4)]),
    "nothing saved": (lambda x: x * 3, [leaf(4)]),
    "only sizes": (lambda x: x.sum(), [leaf(4)]),
    "a view": (lambda x: x.view(-1), [leaf(2, 2)]),
    "tangents that nobody reads": (lambda x, y: (x.sin(), y.detach() * 2, y * 0), [leaf(4), leaf(4)]),
    "a result without gradient": (lambda x: (x.sin(), x > 0), [leaf(4)]),
    "a buffer": (lambda x, b: (b.add_(x.detach()), (x * b).sin())[1], [leaf(4), plain(4)]),
    "a buffer that is written twice": (_written_twice, [leaf(4), plain(4)]),
    "an intermediate that is written": (_written_in_between, [leaf(4)]),
    "a written buffer is returned": (lambda x, b: (b.add_(1), x * b, b.view(-1))[1:], [leaf(4), plain(4)]),
    "empty": (lambda x: x.sin().sum(), [torch.empty(0, 3, requires_grad=True)]),
    "a draw": (lambda x: F.dropout(x.sin(), 0.5).cos(), [leaf(16)]),
    "complex": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j).sin(), [leaf(4, 2)]),
    "several results": (lambda x: x.topk(2)[0].exp(), [leaf(4)]),
    "a constant": (lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]), [leaf(4)]),
    "a checkpoint": (lambda x: checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False), [leaf(4)]),
}


def fresh(arguments):
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in arguments]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_behaves_as_eager_at_every_budget(name, dynamic):
    """P-1 to P-7"""
    program, arguments = PROGRAMS[name]
    for budget in BUDGETS:
        check(
            program,
            *fresh(arguments),
            compile=lambda fn, budget=budget: foregrad.aot_function(
                fn, nop, partition_fn=min_cut_rematerialization_partition, memory_budget=budget, dynamic=dynamic
            ),
        )


@pytest.mark.parametrize("budget", BUDGETS)
def test_subclasses(budget):
    """T, P-5"""

    def run(fn):
        x = TwoTensor(plain(4), plain(4) * 2).requires_grad_()
        w = leaf(4)
        y = fn(x, w)
        y.sum().backward()
        return y.detach(), x.grad, w.grad

    def program(x, w):
        return ((x * w).sin() * w).cos()

    compiled = foregrad.aot_function(
        program, nop, partition_fn=min_cut_rematerialization_partition, memory_budget=budget
    )
    for mine, eager in zip(run(compiled), run(program), strict=True):
        assert type(mine) is type(eager)
        parts = [(mine.a, eager.a), (mine.b, eager.b)] if isinstance(eager, TwoTensor) else [(mine, eager)]
        for a, b in parts:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("budget", BUDGETS)
def test_functional_random_numbers(budget):
    """R-1, P-6: seeds and offsets are inputs of both graphs, and the backward sees the forward's mask"""
    with foregrad.config.patch(functionalize_rng_ops=True):
        compiled, graphs = grab(
            lambda x: F.dropout(x.sin() + 2, 0.5).exp() - 1,
            partition_fn=min_cut_rematerialization_partition,
            memory_budget=budget,
        )
        x = leaf(64)
        y = compiled(x)
        y.sum().backward()
    assert torch.equal(y != 0, x.grad != 0)
    assert any("seed" in name for name in graphs.inputs("forward"))
