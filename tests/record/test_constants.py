"""Values that no input determines can be read while a program is recorded; all others are refused."""

import pytest
import torch

import foregrad
from checking import check_core
from foregrad.errors import DataDependentError
from helpers import leaf, nop, plain


def positions_without_gaps(x):
    positions = torch.arange(x.shape[1])[None]
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return x * 2 if ((steps != 1).cumsum(-1)[:, -1] == 0).all() else x * 3


CONSTANT = {
    "positions": positions_without_gaps,
    "ones": lambda x: x * 2 if torch.ones(3).all() else x * 3,
    "like an input": lambda x: x * 2 if torch.ones_like(x).all() and not x.new_full((2,), 0).any() else x * 3,
    "item": lambda x: x * torch.arange(5).sum().item(),
    "tolist": lambda x: x * sum(torch.arange(5).tolist()),
    "rates of layers": lambda x: x * [rate.item() for rate in torch.linspace(0, 0.3, 5)][2],
    "int": lambda x: x[: int(torch.full((1,), 2))],
    "index": lambda x: sum(x[i] for i in range(torch.tensor(1) + 1)),
    "in": lambda x: x * 2 if 3 in torch.arange(5) else x * 3,
    "equal": lambda x: x * 2 if torch.equal(torch.arange(5), torch.arange(0, 5)) else x * 3,
    "text": lambda x: x * len(str(torch.arange(3) + 1)),
    "one of several": lambda x: x * torch.arange(6).split(2)[1].sum().item(),
    "of a number and a parameter's shape": lambda x: x * torch.zeros(x.shape[0]).numel() * torch.eye(2).sum().item(),
    "that requires grad": lambda x: x * torch.arange(3.0).requires_grad_().sum().item(),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_what_is_made_of_numbers_alone_is_read(name):
    check_core(CONSTANT[name], leaf(2, 3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_in_every_mode(mode):
    def program(x):
        return x * (torch.ones(2, 2) @ torch.ones(2, 2)).sum().item()

    with mode():
        assert torch.equal(foregrad.aot_function(program, nop)(plain(2)), program(plain(2)))


def test_it_is_the_same_at_later_calls():
    compiled = foregrad.aot_function(positions_without_gaps, nop)
    for x in (plain(2, 3), plain(2, 3) * 2, plain(4, 5)):
        torch.testing.assert_close(compiled(x), x * 2)
    assert len(compiled.specializations) == 2


def written(x):
    mask = torch.ones(3)
    mask[0] = 0
    return x * 2 if mask.all() else x * 3


def written_behind_autograds_back(x):
    mask = torch.ones(3)
    mask.data.zero_()
    return x * 2 if mask.all() else x * 3


def written_through_a_view_with_an_input(x):
    mask = torch.ones(2, 3)
    mask.view(-1).copy_(x.detach().view(-1))
    return x * 2 if mask.all() else x * 3


WEIGHT = torch.ones(3)

READ = {
    "of many elements": lambda x: x * 2 if torch.ones(1 << 11, 1 << 10).all() else x,
    "written": written,
    "written behind autograd's back": written_behind_autograds_back,
    "written through a view, with an input": written_through_a_view_with_an_input,
    "random": lambda x: x * 2 if (torch.rand(3) < 2).all() else x,
    "memory as it is found": lambda x: x * 2 if (torch.empty(3) == 0).all() else x,
    "an input": lambda x: x * 2 if (x > 0).all() else x,
    "a global": lambda x: x * 2 if WEIGHT.all() else x,
    "partly an input": lambda x: x * 2 if torch.where(torch.ones(2, 3).bool(), x, 0.0).all() else x,
    "a keyword that is an input": lambda x: x * 2 if torch.clamp(torch.ones(2, 3), max=x).all() else x,
    "an array": lambda x: x * float(torch.arange(3).numpy().sum()),
}


@pytest.mark.parametrize("name", READ)
def test_what_may_be_another_value_at_the_next_call_is_not_read(name):
    with pytest.raises(DataDependentError):
        foregrad.aot_function(READ[name], nop)(leaf(2, 3))
