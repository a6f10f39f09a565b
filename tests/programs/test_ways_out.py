"""The way out that an error names was taken: the program that comes of it does what eager does."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn.utils import parametrize

import foregrad
from checking import check_core
from foregrad.errors import ForegradError
from helpers import leaf, nop, plain

numpy = pytest.importorskip("numpy")


@dataclass(frozen=True)
class Way:
    """A program that is refused with some words of advice, and the one that follows the advice."""

    refused: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    words: str
    followed: Callable[..., Any]
    others: Callable[[], tuple[Any, ...]] | None = None  # arguments of the second program, where they differ


def of(*shape):
    return lambda: (leaf(*shape),)


def result(*shape):
    return leaf(*shape) * 1


class Doubled(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Flat(Function):
    """A view with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view(2, 2)


class Counting(nn.Module):
    def __init__(self, in_a_buffer):
        super().__init__()
        if in_a_buffer:
            self.register_buffer("count", torch.zeros(()))
        else:
            self.count = 0

    def forward(self, x):
        self.count += 1
        return x * 2


class Box:
    """An object without a meaning of its own."""


class OtherBox:
    """Another one."""


class Named(torch.Tensor):
    """A subclass with torch's default for functions."""


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).mT


PARAMETRIZED = parametrize.register_parametrization(nn.Linear(3, 3), "weight", Symmetric())
NUMBERS = numpy.ones(3, dtype="float32")
NEXT = iter(range(1000))
FOUND = []
CACHE = functools.lru_cache(lambda key, tensor: tensor)


def encoder(nested):
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    made = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested).eval().requires_grad_(False)
    made.layers[0].register_forward_hook(lambda *_: None)  # torch has no kernel for a whole layer with hooks
    return made


ENCODER = encoder(True)
ENCODER_OF_DENSE = encoder(False)


def padded():
    return torch.randn(2, 3, 4), torch.tensor([[False, False, True], [False, False, False]])


@torch.no_grad()
def without_grad(function, *args):
    return function(*args)


def with_attribute(y, name, value):
    setattr(y, name, value)
    return y


def boxed(value):
    return with_attribute(Box(), "value", value)


def keyed(x):
    return x, {x: 2.0}


def under_another_default(function):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return function()
    finally:
        torch.set_default_dtype(before)


def leaf_with_another_gradient():
    x = leaf(4)
    x.grad = torch.ones(4)
    x.data = torch.ones(2, 2)
    return (x,)


def view_then_shape(x):
    y = x * 1
    view = y.view(-1)
    y.t_()
    return y * 2, view


def shape_then_view(x):
    y = x * 1
    y.t_()
    return y * 2, y.mT.view(-1)


def view_then_write(x):
    row = without_grad(lambda: x[0])
    x.add_(1)
    return row


def write_then_view(x):
    x.add_(1)
    return without_grad(lambda: x.detach()[0])


def detached_after_its_view(x):
    y = x * 1
    view = without_grad(y.view, -1)
    y.detach_()
    return y.add_(1), view


def shape_after_a_custom_function(x):
    y = Doubled.apply(x)
    without_grad(x.t_)
    return y


def hooked_between_writes(x):
    x.add_(1)
    x.register_hook(lambda g: g * 2)
    return x.mul_(3)


WAYS_OUT = {
    # what is read
    "an array": Way(
        lambda x: x * float(x.detach().numpy().sum()), of(3), "Compute with the tensor", lambda x: x * x.detach().sum()
    ),
    "an array, as an argument": Way(
        lambda x: x * float(x.detach().numpy().sum()),
        of(3),
        "pass the value as a plain Python argument",
        lambda x, n: x * n,
        lambda: (leaf(3), 6.0),
    ),
    "many elements": Way(
        lambda x: x * sum(x.tolist()), lambda: (plain(5000),), "Compute with the tensor", lambda x: x * x.sum()
    ),
    "a count of versions": Way(
        lambda x: x * x._version,
        of(3),
        "Read it outside and pass it as an argument",
        lambda x, n: x * n,
        lambda: (leaf(3), 1),
    ),
    # what a kernel would do in an order of its own
    "a result that is read": Way(
        lambda x: torch.cumsum(x, 0, out=x),
        lambda: (plain(3),),
        "Pass a clone",
        lambda x: torch.cumsum(x.clone(), 0, out=x),
    ),
    "a result that is resized": Way(
        lambda x, y: torch.mm(x.t(), x, out=y),
        lambda: (plain(2, 3), plain(0)),
        "Give it a tensor of the right shape",
        lambda x, y: torch.mm(x.t(), x, out=y),
        lambda: (plain(2, 3), plain(3, 3)),
    ),
    "an array that is written": Way(
        lambda x: torch.from_numpy(NUMBERS).mul_(2) + x,
        of(3),
        "Write to a clone",
        lambda x: torch.from_numpy(NUMBERS).clone().mul_(2) + x,
    ),
    # shapes and storages
    "the shape of a leaf": Way(lambda x: without_grad(x.unsqueeze_, 0), of(3), "Use a view", lambda x: x.unsqueeze(0)),
    "a shape after a view": Way(view_then_shape, of(2, 3), "Change the shape first", shape_then_view),
    "set_ with gradients": Way(
        lambda x: (x * 1).set_(plain(3)),
        of(3),
        r"Do it under torch\.no_grad\(\)",
        lambda x: without_grad((x * 1).set_, plain(3)),
    ),
    "set_ to a conjugate": Way(
        lambda x, y: x.set_(y.conj()),
        lambda: (plain(2) + 1j, plain(2) * 1j),
        "Resolve it first",
        lambda x, y: x.set_(y.conj().resolve_conj()),
    ),
    "detach_ of an input": Way(
        lambda x: x.detach_() * 2, lambda: (result(3),), r"Use detach\(\)", lambda x: x.detach() * 2
    ),
    "detach_ after a view": Way(
        detached_after_its_view,
        of(2, 2),
        r"Use detach\(\)",
        lambda x: (lambda y: (y.add_(1), y.view(-1)))((x * 1).detach()),
    ),
    "a gradient of another shape": Way(
        lambda x: x * x.grad.sum(), leaf_with_another_gradient, r"Set \.grad to None first", lambda x: x * 2, of(2, 2)
    ),
    "a shape after a custom function": Way(
        shape_after_a_custom_function, of(2, 3), "Do so outside the program", Doubled.apply, of(3, 2)
    ),
    # flags and views
    "a written input that is to require grad": Way(
        lambda x: x.add_(1).requires_grad_() * 2,
        lambda: (plain(3),),
        r"Call requires_grad_\(\) before",
        lambda x: x.add_(1) * 2,
        lambda: (result(3),),
    ),
    "a leaf that is made and returned": Way(
        lambda x: (lambda y: (y, y * 2))(x.clone().requires_grad_()),
        lambda: (plain(3),),
        "Pass that tensor as an argument",
        lambda x: (x, x * 2),
        of(3),
    ),
    "a view without gradients": Way(
        lambda x: (lambda y: (y, without_grad(lambda: y[0])))(x * 2),
        of(2, 2),
        "Return a detached tensor",
        lambda x: (lambda y: (y, y[0].detach()))(x * 2),
    ),
    "a stale view": Way(
        lambda x: view_then_write(x * 1),
        of(2, 2),
        "Take the view after the write",
        write_then_view,
        lambda: (result(2, 2),),
    ),
    "a custom view of what is written": Way(
        lambda x: Flat.apply(x.add_(1)),
        lambda: (result(2, 2),),
        "Return a clone",
        lambda x: Flat.apply(x.add_(1)).clone(),
    ),
    "a hook between writes": Way(hooked_between_writes, lambda: (result(3),), "outside", lambda x: x.add_(1).mul_(3)),
    # Python's objects
    "an iterator": Way(
        lambda x: x * next(NEXT),
        of(3),
        "Pass what the program needs of it as an argument",
        lambda x, n: x * n,
        lambda: (leaf(3), next(NEXT)),
    ),
    "Python's random numbers": Way(
        lambda x: x * random.random(), of(3), "Draw with torch", lambda x: x * torch.rand(())
    ),
    "Python's random numbers, as an argument": Way(
        lambda x: x * random.random(),
        of(3),
        "pass the number as an argument",
        lambda x, n: x * n,
        lambda: (leaf(3), random.random()),
    ),
    "a count": Way(Counting(in_a_buffer=False), of(3), "Keep a count in a buffer", Counting(in_a_buffer=True)),
    "a set that is given": Way(
        lambda x, seen: seen.add(len(seen)) or x * 2,
        lambda: (leaf(3), {5}),
        r"changes args\[1\], a set: .* return the new value",
        lambda x, seen: (x * 2, seen | {len(seen)}),
    ),
    "the class of an object": Way(
        lambda x, box: with_attribute(box, "__class__", OtherBox) and x * box.value,
        lambda: (leaf(3), boxed(plain(3))),
        "Make a new object",
        lambda x, box: (x * box.value, with_attribute(OtherBox(), "value", box.value)),
    ),
    "a generator": Way(
        lambda x: (y * 2 for y in [x]), of(3), "Return the tensors in it", lambda x: [y * 2 for y in [x]]
    ),
    "a cache": Way(lambda x: CACHE("key", x * 2), of(3), "return the tensor|as an argument", lambda x: x * 2),
    "an attribute of a result": Way(
        lambda x: with_attribute(x * 2, "box", Box()),
        of(3),
        "Return it beside the result",
        lambda x: (x * 2, Box()),
    ),
    "a list that is given and found": Way(
        lambda x, found=FOUND: (lambda given: given.append(x * 2))(found) or FOUND.append(x) or x * 2,
        lambda: (leaf(3), FOUND),
        "Pass it, or let the program find it",
        lambda x, given: given.append(x * 2) or x * 3,
        lambda: (leaf(3), []),
    ),
    "an attribute of an argument": Way(
        lambda x: with_attribute(x, "seen", True) * 2,
        of(3),
        "Set it outside the program",
        lambda x: x * 2,
        lambda: (with_attribute(leaf(3), "seen", True),),
    ),
    "a tensor as a key": Way(
        lambda x, table: x * table[x],
        lambda: keyed(leaf(3)),
        "Keep tensors in a list",
        lambda x, table: x * table[0][1],
        lambda: (lambda x: (x, [(x, 2.0)]))(leaf(3)),
    ),
    "another default dtype": Way(
        lambda x: torch.set_default_dtype(torch.float64) or x * 2, of(3), "Set it outside", lambda x: x * 2
    ),
    "numbers under another default dtype": Way(
        lambda n: under_another_default(lambda: n / 2),
        lambda: (torch.arange(3),),
        "Convert its argument to a dtype first",
        lambda n: under_another_default(lambda: n.double() / 2),
    ),
    # tensors of other kinds
    "a write to a sparse tensor": Way(
        lambda a: a.mul_(2).to_dense(),
        lambda: (plain(3, 3).to_sparse(),),
        r"Use the operator that gives a new tensor \(mul for mul_\)",
        lambda a: a.mul(2).to_dense(),
    ),
    "a sparse result": Way(
        lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), x, (3,), is_coalesced=True),
        of(2),
        r"to_dense\(\)",
        lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), x, (3,), is_coalesced=True).to_dense(),
    ),
    "a nested tensor": Way(
        lambda x: torch.nested.as_nested_tensor([x, x * 2]).to_padded_tensor(0.0),
        lambda: (plain(2, 3),),
        r"Make one with layout=torch\.jagged",
        lambda x: torch.nested.as_nested_tensor([x, x * 2], layout=torch.jagged).to_padded_tensor(0.0),
    ),
    "an encoder that nests": Way(
        lambda x, mask: ENCODER(x, src_key_padding_mask=mask),
        padded,
        "of a TransformerEncoder, set enable_nested_tensor=False",
        lambda x, mask: ENCODER_OF_DENSE(x, src_key_padding_mask=mask),
    ),
    "a subclass that decides about functions": Way(
        lambda x: x * 2,
        lambda: (plain(3).as_subclass(Named),),
        r"Pass x\.as_subclass\(torch\.Tensor\)",
        lambda x: x * 2,
        lambda: (plain(3).as_subclass(Named).as_subclass(torch.Tensor),),
    ),
    # transformations
    "a linearization": Way(
        lambda x: torch.func.linearize(torch.sin, x)[1](torch.ones(3)),
        lambda: (plain(3),),
        r"torch\.func\.jvp gives what torch\.func\.linearize does",
        lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones(3),))[1],
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("name", WAYS_OUT)
def test_the_way_out(name):
    way = WAYS_OUT[name]
    with pytest.raises(ForegradError, match=way.words):
        compiled_and_called(way.refused, *way.arguments())
    check_core(way.followed, *(way.others or way.arguments)())


def compiled_and_called(program, *args):
    compiled = foregrad.aot_module if isinstance(program, nn.Module) else foregrad.aot_function
    return compiled(program, nop)(*args)


# ------------------------------------------------------------------------------- what is refused around the program
@torch.library.custom_op("ways_out::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@torch.library.custom_op("ways_out::halved_with_shapes", mutates_args=())
def halved_with_shapes(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved_with_shapes.register_fake(torch.empty_like)


@torch.library.custom_op("ways_out::shift", mutates_args=("x",))
def shift(x: torch.Tensor, by: torch.Tensor) -> None:
    x.add_(by)


shift.register_fake(lambda x, by: None)


class Writes(Function):
    """Writes to a tensor in its backward."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.add_(gradient.detach())
        return gradient * 2, None


def second_gradient(function, x, **options):
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


class Loop(nn.Module):
    def forward(self, x):
        n = 0
        while x.sum() < 20:
            x, n = x + 1, n + 1
        return x * n


SCENARIOS = {
    "no shape inference": (
        lambda call: call(lambda x: torch.ops.ways_out.halved(x))(plain(3)),
        r"Register one \(torch\.library\.register_fake\)",
        lambda call: call(lambda x: torch.ops.ways_out.halved_with_shapes(x))(plain(3)),
    ),
    "an operator that writes to what it reads": (
        lambda call: call(lambda x: torch.ops.ways_out.shift(x, x[:1]) or x * 1)(plain(3)),
        "Pass a clone",
        lambda call: call(lambda x: torch.ops.ways_out.shift(x, x[:1].clone()) or x * 1)(plain(3)),
    ),
    "a backward that writes to what the forward made": (
        lambda call: second_of(call(lambda x: with_log(x, torch.zeros(3)))),
        "Pass it as an argument",
        lambda call: second_of(call(Writes.apply), torch.zeros(3)),
    ),
    "reads without an end": (
        lambda call: reading(3, lambda: call(Loop().forward)(torch.ones(3))),
        r"Raise foregrad\.config\.max_reads",
        lambda call: reading(30, lambda: call(Loop().forward)(torch.ones(3))),
    ),
    "a seed": (
        lambda call: reads_refused(lambda: call(lambda x: torch.manual_seed(3) and x * torch.rand(3))(plain(3))),
        "Seed outside",
        lambda call: reads_refused(lambda: call(lambda x: x * torch.rand(3))(plain(3))),
    ),
    "a batched second gradient": (
        lambda call: batched_second(call(torch.sin), leaf(3)),
        "compute the gradients one after another",
        lambda call: second_in_turn(call(torch.sin), leaf(3)),
    ),
    "cached parametrizations": (
        lambda call: under_cache(lambda: call(PARAMETRIZED.forward)(plain(2, 3))),
        "open that block in the program",
        lambda call: call(lambda x: under_cache(lambda: PARAMETRIZED(x)))(plain(2, 3)),
    ),
    "cached parametrizations, outside": (
        lambda call: under_cache(lambda: call(PARAMETRIZED.forward)(plain(2, 3))),
        "Call it outside of that block",
        lambda call: call(PARAMETRIZED.forward)(plain(2, 3)),
    ),
    "a random backward that is differentiated": (
        lambda call: functional_draws(lambda: second_gradient(call(Noisy.apply), leaf(3))),
        "switch the option off",
        lambda call: second_gradient(call(Noisy.apply), leaf(3)),
    ),
    "a hook on a result, outside": (
        lambda call: gradient_of(call(two_results), lambda y, z: y.register_hook(lambda g: g * 3)),
        "Do so with what is computed from it outside",
        lambda call: gradient_of(call(two_results), lambda y, z: (y * 1).register_hook(lambda g: g * 3)),
    ),
    "a view of what is nested": (
        lambda call: call(lambda n: n.values())(jagged()),
        "Return a clone",
        lambda call: call(lambda n: n.values().clone())(jagged()),
    ),
    "one after another": (
        lambda call: one_after_another(call(two_results)),
        r"Pass retain_graph=True to the first backward",
        lambda call: one_after_another(call(two_results), retain_graph=True),
    ),
    "together": (
        lambda call: one_after_another(call(two_results)),
        "differentiate the results together",
        lambda call: gradient_of(call(two_results), lambda y, z: None),
    ),
    "a write before the backward": (
        lambda call: written_before(call(two_results), lambda y: y),
        "write to a copy",
        lambda call: written_before(call(two_results), torch.clone),
    ),
    "a program that must be called once": (
        lambda call: foregrad.capture(Lazily(), plain(3)).joint_graph,
        "call it once before it is recorded",
        lambda call: called_once_and_captured(Lazily(), plain(3)),
    ),
}


def with_log(x, log):
    return Writes.apply(x, log * 1)


def second_of(function, *others):
    x = leaf(3)
    function(x, *others).sum().backward()
    return (x.grad, *others)


def reading(most, run):
    with foregrad.config.patch(max_reads=most):
        return run()


def reads_refused(run):
    with foregrad.config.patch(reads="refused"):
        return run()


def batched_second(function, x):
    return torch.autograd.grad(function(x), x, torch.eye(3), is_grads_batched=True, create_graph=True)[0]


def second_in_turn(function, x):
    return torch.stack([torch.autograd.grad(function(x), x, row, create_graph=True)[0] for row in torch.eye(3)])


def under_cache(run):
    with parametrize.cached():
        return run()


def functional_draws(run):
    with foregrad.config.patch(functionalize_rng_ops=True):
        return run()


class Noisy(Function):
    """Draws in its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * torch.rand(3)


def jagged():
    return torch.nested.as_nested_tensor([plain(2, 3), plain(1, 3)], layout=torch.jagged)


def two_results(x):
    y = (x * 2).sin()
    return y, y.exp()


def gradient_of(function, change):
    x = leaf(3)
    y, z = function(x)
    change(y, z)
    (y.sum() + z.sum()).backward()
    return x.grad


def one_after_another(function, **options):
    x = leaf(3)
    y, z = function(x)
    z.sum().backward(**options)
    y.sum().backward()
    return x.grad


def written_before(function, of):
    x = leaf(3)
    _, z = function(x)
    with torch.no_grad():
        of(z).zero_()
    z.sum().backward()
    return x.grad


class Lazily(nn.Module):
    """Changes its state at its first call."""

    def __init__(self):
        super().__init__()
        self.state = "new"

    def forward(self, x):
        if self.state == "new":
            self.state = "used"
        return x * 2


def called_once_and_captured(module, x):
    module(x)
    return foregrad.capture(module, x).joint_graph(x)[0]


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_way_out_around_the_program(name):
    refused, words, followed = SCENARIOS[name]
    compiled = functools.partial(foregrad.aot_function, fw_compiler=nop)
    with pytest.raises(ForegradError, match=words):
        refused(compiled)
    torch.manual_seed(0)
    ours = followed(compiled)
    torch.manual_seed(0)
    theirs = followed(lambda program: program)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
