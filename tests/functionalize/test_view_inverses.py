"""A write through every kind of view reaches the tensor that the view was taken from."""

import pytest
import torch

import foregrad
from foregrad.functionalize.view_inverses import INVERSES, SCATTERS
from helpers import grab, leaf, plain

VIEWS = {
    "select": lambda x: x.select(1, -1),
    "slice": lambda x: x[:, 1:3],
    "slice with a step": lambda x: x[::2, ::3],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "diagonal": lambda x: x.diagonal(1),
    "transpose": lambda x: x.transpose(0, 1),
    "t": lambda x: x.t(),
    "permute": lambda x: x.view(2, 2, 4).permute(2, 0, 1),
    "view": lambda x: x.view(8, 2),
    "view of another dtype": lambda x: x.view(torch.int32),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "squeeze of all": lambda x: x.unsqueeze(0).squeeze(),
    "squeeze of some": lambda x: x[None, :, None].squeeze((0, 2)),
    "split": lambda x: x.split(3, 1)[1],
    "split with sizes": lambda x: x.split([1, 3], 1)[1],
    "chunk": lambda x: x.chunk(2)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "as_strided": lambda x: x.as_strided((2, 3), (4, 1), 2),
    "unfold": lambda x: x.unfold(0, 2, 2),
    "detach": lambda x: x.detach(),
    "alias": lambda x: torch.ops.aten.alias(x),
    "movedim": lambda x: x.movedim(0, 1),
    "a chain": lambda x: x.t()[1:].reshape(-1)[::2] if x.is_complex() else x[1:].t()[1:3].unsqueeze(0),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "swapaxes of a slice": lambda x: x[1:].swapaxes(0, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_a_view_reaches_its_base(name):
    """M-1"""
    take = VIEWS[name]

    def program(x):
        y = x * 1
        take(y).add_(7)
        return y + 0

    assert torch.equal(grab(program)[0](plain(4, 4)), program(plain(4, 4)))


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_a_view_reaches_the_caller(name):
    """M-1"""
    take = VIEWS[name]
    ours, eager = plain(4, 4), plain(4, 4)
    grab(lambda x: take(x).add_(7).sum())[0](ours)
    take(eager).add_(7)
    assert torch.equal(ours, eager)


DIFFERENTIABLE = [name for name in VIEWS if name not in ("view of another dtype", "detach")]
ONE_OF_SEVERAL = {"split", "split with sizes", "chunk", "unbind"}


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name not in ONE_OF_SEVERAL])
def test_a_write_through_a_view_is_differentiated(name):
    """M-2"""
    take = VIEWS[name]

    def program(x):
        y = x * 1
        take(y).mul_(3)
        return y.sin()

    ours, eager = leaf(4, 4), leaf(4, 4)
    grab(program)[0](ours).sum().backward()
    program(eager).sum().backward()
    assert torch.equal(ours.grad, eager.grad)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_view_that_is_returned_is_a_view_of_the_caller_s_tensor(name):
    """A-3"""
    take = VIEWS[name]
    x = leaf(4, 4)
    ours, eager = grab(take)[0](x), take(x)
    assert ours.data_ptr() == eager.data_ptr() and ours._base is x
    assert (ours.shape, ours.stride()) == (eager.shape, eager.stride())
    assert type(ours.grad_fn) is type(eager.grad_fn)


COMPLEX = {
    "real": lambda z: z.real,
    "imag": lambda z: z.imag,
    "conj": lambda z: z.conj(),
    "imag of conj": lambda z: z.conj().imag,
    "view_as_real": torch.view_as_real,
}


@pytest.mark.parametrize("name", COMPLEX)
def test_a_write_through_a_view_of_complex_numbers(name):
    """M-1"""
    take = COMPLEX[name]

    def program(z):
        take(z).mul_(3)
        return z * 1

    ours, eager = torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([1 + 2j, 3 - 1j])
    assert torch.equal(grab(program)[0](ours), program(eager)) and torch.equal(ours, eager)


def test_every_row_that_scatters_has_an_inverse():
    assert set(INVERSES) >= SCATTERS


ODD = {
    "view as itself": ((1, 2, 2), (4, 1, 2), lambda t: t.view_as(t)),
    "squeeze that does nothing": ((1, 2, 2), (4, 1, 2), lambda t: t.squeeze(2)),
    "squeeze": ((1, 2, 2), (9, 1, 2), lambda t: t.squeeze(0)),
    "view": ((2, 1, 2), (2, 7, 1), lambda t: t.view(4)),
    "scalar": ((1,), (5,), lambda t: t.view(())),
    "squeeze and transpose": ((2, 1, 2), (1, 7, 2), lambda t: t.squeeze().t()),
    "expand": ((1, 3), (9, 1), lambda t: t.expand(1, 1, 3)),
}


@pytest.mark.parametrize(("shape", "stride", "view"), ODD.values(), ids=ODD)
def test_a_write_through_a_view_keeps_the_strides_of_dimensions_of_size_one(shape, stride, view):
    def program(x):
        t = torch.empty_strided(shape, stride).fill_(1)
        v = view(t)
        v.mul_(x)
        return t, v

    foregrad.check(program, torch.tensor(3.0, requires_grad=True))
