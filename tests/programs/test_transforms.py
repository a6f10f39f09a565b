"""Transforms of `torch.func` inside a program, over tensors that the program finds by itself."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.nn import functional as F

import foregrad
from foregrad import check
from foregrad._torch import autograd_watched
from foregrad.errors import UnsupportedError
from helpers import nop, plain


class Cubed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


MODEL, NORM = layers(), nn.BatchNorm1d(4)
PARAMETERS = dict(MODEL.named_parameters())
WEIGHT = nn.Parameter(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
STACKED = nn.Parameter(torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0)))


def loss(parameters, x, y):
    return F.mse_loss(functional_call(MODEL, parameters, (x,)), y)


def learned(x, y):
    parameters = PARAMETERS
    for _ in range(2):
        slopes = grad(loss)(parameters, x, y)
        parameters = {name: value - 0.1 * slopes[name] for name, value in parameters.items()}
    return loss(parameters, x, y)


def with_tangents(x, y):
    tangents = {name: torch.ones_like(value) for name, value in PARAMETERS.items()}
    return jvp(lambda p: functional_call(MODEL, p, (x,)), (PARAMETERS,), (tangents,))


def dual(x, y):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(x @ forward_ad.make_dual(WEIGHT, torch.ones_like(WEIGHT))).tangent


def stepped(x, y):
    slope = grad(lambda w: (x @ w).sin().sum())(WEIGHT)
    with torch.no_grad():
        WEIGHT.sub_(slope, alpha=0.1)
    return x @ WEIGHT


PROGRAMS = {
    "grad": lambda x, y: grad(loss)(PARAMETERS, x, y),
    "value and aux": lambda x, y: grad_and_value(lambda p: (loss(p, x, y), p["0.bias"] * 2), has_aux=True)(PARAMETERS),
    "vjp": lambda x, y: vjp(lambda p: functional_call(MODEL, p, (x,)), PARAMETERS)[1](y),
    "jvp": with_tangents,
    "jacrev": lambda x, y: jacrev(lambda p: functional_call(MODEL, p, (x,)))(PARAMETERS),
    "jacfwd": lambda x, y: jacfwd(lambda p: functional_call(MODEL, p, (x,)))(PARAMETERS),
    "hessian": lambda x, y: hessian(lambda w: loss({**PARAMETERS, "0.weight": w}, x, y))(PARAMETERS["0.weight"]),
    "per sample": lambda x, y: vmap(grad(loss), (None, 0, 0))(PARAMETERS, x, y),
    "learned": learned,
    "batched": lambda x, y: vmap(lambda w: (x @ w).sin())(STACKED),
    "batched slopes": lambda x, y: vmap(grad(lambda w: (x @ w).sin().sum()))(STACKED),
    "batched noise": lambda x, y: vmap(lambda w: F.dropout(x @ w), randomness="different")(STACKED),
    "in chunks": lambda x, y: vmap(lambda w: F.dropout(x @ w), randomness="same", chunk_size=2)(STACKED),
    "custom function": lambda x, y: grad(lambda w: (x @ Cubed.apply(w)).sum())(WEIGHT),
    "custom function, closed over": lambda x, y: grad(lambda x: (x @ Cubed.apply(WEIGHT)).sum())(x),
    "custom function, twice": lambda x, y: grad(lambda w: grad(lambda v: (x @ Cubed.apply(v)).sum())(w).sum())(WEIGHT),
    "custom function, batched": lambda x, y: vmap(lambda w: Cubed.apply(w))(WEIGHT),
    "dual": dual,
    "step": stepped,
    "buffer written inside: eager's error": lambda x, y: grad(lambda x: NORM(x).sum())(x),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_that_a_transform_finds(program, requires_grad):
    if program is PROGRAMS["jacfwd"] and torch.__version__ < "2.13":
        pytest.skip("reads sizes from a tensor that it makes")
    x = torch.linspace(-1, 1, 20).reshape(5, 4).requires_grad_(requires_grad)
    check(program, x, torch.linspace(0, 1, 10).reshape(5, 2))


class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(layers() for _ in range(3))

    def forward(self, x):
        state = stack_module_state(list(self.members))
        return vmap(lambda p, b: functional_call(self.members[0], (p, b), (x,)))(*state)


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = layers()

    def forward(self, x):
        parameters = dict(self.model.named_parameters())
        slopes = grad(lambda p: functional_call(self.model, p, (x,)).square().mean())(parameters)
        moved = {name: value - 0.1 * slopes[name] for name, value in parameters.items()}
        return functional_call(self.model, moved, (x,))


@pytest.mark.parametrize("kind", [Ensemble, Learner])
def test_a_module_trains_through_transforms_of_its_own_parameters(kind):
    x = torch.linspace(-1, 1, 20).reshape(5, 4)
    trained = []
    for compile in (lambda module: module, lambda module: foregrad.aot_module(module, nop)):
        torch.manual_seed(0)
        module = kind()
        called = compile(module)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            called(x).square().sum().backward()
            optimizer.step()
        trained.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(map(torch.equal, *trained))


def test_a_transform_on_another_thread_keeps_its_tensors():
    found = []

    def elsewhere():
        found.append(grad(lambda w: w.square().sum())(WEIGHT))

    recording = SimpleNamespace(stand_in=lambda tensor: tensor * 0)  # of this thread
    with autograd_watched(recording):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert torch.equal(found[0], 2 * WEIGHT)


def test_what_torch_traces_itself_is_refused_with_what_gives_the_same():
    def program(x):
        return linearize(lambda w: (w * x).sin(), x)[1](x)

    with pytest.raises(UnsupportedError, match=r"linearize, at .*torch.func.jvp"):
        foregrad.aot_function(program, nop)(plain(3))
    check(lambda x: jvp(lambda w: (w * x).sin(), (x,), (x,))[1], plain(3))
