"""Double backward, to any order."""

import weakref

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import foregrad
from foregrad.errors import BackwardError, UnsupportedError
from helpers import leaf, nop, plain


def compiled(fn, **options):
    return foregrad.aot_function(fn, nop, **options)


class SavesAnIntermediate(torch.autograd.Function):
    """Its backward uses a value that it computed itself, of which autograd knows nothing."""

    @staticmethod
    def forward(ctx, x):
        e = x.exp()
        ctx.save_for_backward(e)
        return e.sin()

    @staticmethod
    def backward(ctx, g):
        (e,) = ctx.saved_tensors
        return g * e.cos() * e


class NoGradientForItsSecond(torch.autograd.Function):
    """The gradient of the first argument depends on the second, which gets none of the first order."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(p)
        return x * p.detach()

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return g * p * p, None


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


PROGRAMS = {
    "power": lambda x: (x**4).sum(),
    "saved result": lambda x: x.exp(),
    "linear": lambda x: x * 3 + 1,
    "detached factor": lambda x: x * x.detach(),
    "detached twice": lambda x: (x * x).detach() * x.sin(),
    "under no_grad": lambda x: x.tanh() * torch.no_grad()(torch.sin)(x),
    "two outputs": lambda x: (x.sin(), x.cos() * x),
    "a view": lambda x: x.view(-1)[1:] * x.view(-1)[:-1],
    "in place": lambda x: (x * 2).mul_(x).add_(1),
    "through a view": lambda x: (lambda y: (y[0].sin_(), y * y)[1])(x * 1),
    "saves an intermediate": SavesAnIntermediate.apply,
    "matrix": lambda x: torch.linalg.inv(x @ x.t() + 3 * torch.eye(2)),
    "softmax": lambda x: F.log_softmax(x, 1)[:, 0],
    "gelu": F.gelu,
    "norm": lambda x: F.layer_norm(x, [3]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_gradients_agree(name):
    """J-10"""
    foregrad.check(PROGRAMS[name], leaf(2, 3))
    foregrad.check(PROGRAMS[name], leaf(2, 3) * 1)  # not a leaf: its history is reached without its data


def third_order(fn, x):
    y = sum(part.sum() for part in (fn(x) if isinstance(fn(x), tuple) else (fn(x),)))
    found = []
    for _ in range(3):
        if not y.requires_grad:
            break
        (g,) = torch.autograd.grad(y, x, create_graph=True, allow_unused=True)
        if g is None:
            break
        found.append((g.detach(), g.requires_grad))
        y = (g * g).sum()
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_three_orders(name):
    """J-10"""
    eager, other = (third_order(f, leaf(2, 3)) for f in (PROGRAMS[name], compiled(PROGRAMS[name])))
    assert len(eager) == len(other)
    for (a, a_flag), (b, b_flag) in zip(eager, other, strict=True):
        torch.testing.assert_close(b, a)
        assert a_flag == b_flag


def test_an_input_without_a_first_gradient():
    """J-10: the edge of the tape is there all the same."""

    def second(fn):
        x, p = leaf(3), leaf(3)
        (g,) = torch.autograd.grad(fn(x, p).sum(), x, create_graph=True)
        return torch.autograd.grad(g.sum(), p)[0]

    assert torch.equal(second(compiled(NoGradientForItsSecond.apply)), second(NoGradientForItsSecond.apply))


def test_tangents_that_require_grad():
    """J-10: gradients with respect to a tangent."""

    def run(fn):
        x, t = leaf(3), leaf(3)
        (g,) = torch.autograd.grad(fn(x), x, t, create_graph=True)
        return torch.autograd.grad(g.square().sum(), (x, t))

    for a, b in zip(run(torch.exp), run(compiled(torch.exp)), strict=True):
        torch.testing.assert_close(b, a)


def test_only_what_is_asked_for_is_computed():
    """J-10: the gradients of the weights are no part of the graph for forces."""
    graphs = []

    def show(graph, inputs):
        graphs.append(graph)
        return foregrad.make_boxed_func(graph.forward)

    x, w = leaf(2, 3), leaf(3, 4)
    energy = foregrad.aot_function(lambda x, w: (x @ w).tanh().sum(), nop, show)(x, w)
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    assert str(graphs[0].graph).count("aten.mm") == 1
    force.square().sum().backward()
    assert w.grad is not None and x.grad is not None


def test_a_gradient_penalty_trains_as_in_eager():
    """J-10"""

    def train(wrap):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        call = wrap(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step)).requires_grad_()
            (g,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
            loss = (g.norm(dim=1) - 1).square().mean() + call(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    for a, b in zip(train(lambda net: net), train(lambda net: foregrad.aot_module(net, nop)), strict=True):
        torch.testing.assert_close(b, a)


def test_gradcheck_and_gradgradcheck():
    """J-10, J-5: undefined and batched gradients too."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.double, requires_grad=True)
    call = foregrad.aot_module(net, nop)
    assert gradcheck(call, (x,), check_batched_grad=True)
    assert gradgradcheck(call, (x,), check_batched_grad=True)


@pytest.mark.parametrize("vectorize", [False, True])
def test_hessian(vectorize):
    """J-10: `torch.autograd.functional`, one row after another or all at once under vmap."""
    fn = compiled(lambda x: x.tanh().pow(3).sum())
    expected = torch.autograd.functional.hessian(lambda x: x.tanh().pow(3).sum(), plain(4))
    torch.testing.assert_close(torch.autograd.functional.hessian(fn, plain(4), vectorize=vectorize), expected)


def test_batched_gradients():
    """J-10"""
    x, rows = leaf(3), torch.eye(3)
    (found,) = torch.autograd.grad(compiled(torch.exp)(x), x, rows, is_grads_batched=True)
    assert torch.equal(found, torch.diag(plain(3).exp()))


def test_vmap_over_a_backward():
    """J-10: the graph runs uncompiled, operator by operator."""
    ran = []

    def compiler(graph, inputs):
        ran.append(graph)
        return foregrad.make_boxed_func(lambda *args: pytest.fail("a compiled graph knows nothing of batches"))

    x = leaf(3)
    y = foregrad.aot_function(torch.exp, nop, compiler)(x)
    (found,) = torch.func.vmap(lambda row: torch.autograd.grad(y, x, row, retain_graph=True))(torch.eye(3))
    assert torch.equal(found, torch.diag(plain(3).exp()))
    (found,) = torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
    assert torch.equal(found, torch.diag(plain(3).exp()))


def test_a_batched_backward_that_is_to_be_differentiated_is_refused():
    """J-10"""
    x = leaf(3)
    with pytest.raises(UnsupportedError, match="batched backward with create_graph=True"):
        torch.autograd.grad(compiled(torch.exp)(x), x, torch.eye(3), is_grads_batched=True, create_graph=True)


@pytest.mark.parametrize("fn", [torch.exp, lambda x: x * x.detach()])
def test_functions_of_torch_func(fn):
    """J-10: the original function is run there."""
    call, x = compiled(fn), plain(3)
    call(x)

    def total(f):
        return lambda x: f(x).sum()

    assert torch.equal(torch.func.grad(total(call))(x), torch.func.grad(total(fn))(x))
    assert torch.equal(torch.func.jacrev(call)(x), torch.func.jacrev(fn)(x))
    assert torch.equal(torch.func.vmap(call)(x), torch.func.vmap(fn)(x))
    assert torch.equal(torch.func.hessian(total(call))(x), torch.func.hessian(total(fn))(x))
    for a, b in zip(torch.func.jvp(call, (x,), (x,)), torch.func.jvp(fn, (x,), (x,)), strict=True):
        assert torch.equal(a, b)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert torch.equal(
            torch.autograd.forward_ad.unpack_dual(call(dual)).tangent,
            torch.autograd.forward_ad.unpack_dual(fn(dual)).tangent,
        )


def test_what_has_no_second_derivative_says_so():
    """J-10: eager's own error, and only when it is asked for."""

    def run(fn):
        x = leaf(3)
        (g,) = torch.autograd.grad(fn(x), x, leaf(3), create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            g.sum().backward()

    run(OnceDifferentiable.apply)
    run(compiled(OnceDifferentiable.apply))


def test_an_input_that_became_a_result_is_refused_clearly():
    """J-10: one program by contract, compiled for a leaf that it does not save."""

    class Net(nn.Module):
        def forward(self, x):
            return (x.exp(),)

    call = foregrad.aot_module_simplified(Net(), (leaf(3),), nop)
    x = leaf(3)
    with pytest.raises(BackwardError, match="was a leaf when the program was compiled"):
        torch.autograd.grad(call(x * 1)[0].sum(), x, create_graph=True)


def test_an_input_that_is_not_saved_is_not_kept_alive():
    """J-13, J-10: higher orders need its history, not its data."""
    x = leaf(3) * 1
    there = weakref.ref(x)
    y = compiled(torch.exp)(x)
    del x
    assert there() is None and y.requires_grad


class HoldsItsInput(torch.autograd.Function):
    """Autograd frees nothing of it, however often backward is called."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.x


def test_an_anchor_beside_what_the_program_keeps_itself():
    """J-10"""
    foregrad.check(lambda x, w: HoldsItsInput.apply(x) + w, leaf(3) * 1, leaf(3) * 1)


MATRICES = {
    "of one singular value": torch.eye(3),
    "regular": plain(3, 3) + 2 * torch.eye(3),
    "singular": torch.diag(torch.tensor([3.0, 1, 0])),
    "of both kinds": torch.stack([plain(2, 2), torch.eye(2), torch.diag(torch.tensor([0.0, 2]))]),
}


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_determinants_to_the_third_order(matrix):
    """J-10: autograd looks at the determinant to choose a formula."""

    def gradients(determinant):
        x = matrix.double().requires_grad_()
        target, found = determinant(x).sum(), []
        for order in (1, 2, 3):
            found += torch.autograd.grad(target, x, create_graph=order < 3)
            target = (found[-1] * plain(*matrix.shape).sin()).sum()
        return found

    torch.testing.assert_close(gradients(compiled(torch.linalg.det)), gradients(torch.linalg.det))


def test_the_gradient_of_a_determinant_is_differentiated_inside():
    """J-10"""

    def program(x):
        (gradient,) = torch.autograd.grad(x.det(), x, create_graph=True)
        return gradient.square().sum()

    x = torch.eye(3, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(program)(x), x), torch.autograd.grad(program(x), x))


class SavesAResult(torch.autograd.Function):
    """Saves what it returns, which is not differentiable."""

    @staticmethod
    def forward(ctx, x):
        sine, cosine = x.sin(), x.cos()
        ctx.save_for_backward(cosine)
        ctx.mark_non_differentiable(cosine)
        return sine, cosine

    @staticmethod
    def backward(ctx, g, _):
        return g * ctx.saved_tensors[0]


def test_gradients_that_depend_on_a_returned_leaf_are_not_differentiated():
    """J-10: eager's second gradient goes to the leaf, which the caller has."""

    def program(x):
        sine, cosine = SavesAResult.apply(x)
        return sine * 2, cosine.requires_grad_()

    x = leaf(3)
    y, cosine = compiled(program)(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones(3), retain_graph=True)
    assert torch.equal(gradient, 2 * cosine)
    with pytest.raises(UnsupportedError, match="made require grad and returned"):
        torch.autograd.grad(y, x, torch.ones(3), create_graph=True)
