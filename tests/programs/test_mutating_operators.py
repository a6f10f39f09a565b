"""Operators that write to their arguments: custom ones, lists, optimizers, `out=`, random ones, running statistics."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.library import custom_op
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import foregrad
from checking import check_core
from foregrad.errors import BackwardError, DataDependentError, UnsupportedError
from helpers import leaf, nop, plain

# The kernels write through `.data`, as those in C++ write to memory: the operator then counts once in the version of
# what it writes to. Torch 2.13 also counts what a kernel in Python writes, which is a documented difference.


@custom_op("foregrad_tests::scale_", mutates_args={"x"})
def scale_(x: Tensor, factor: float) -> None:
    x.data.mul_(factor)


@custom_op("foregrad_tests::exchange_", mutates_args={"a", "b"})
def exchange_(a: Tensor, b: Tensor) -> None:
    old = a.clone()
    a.data.copy_(b)
    b.data.copy_(old)


@custom_op("foregrad_tests::scale_all_", mutates_args={"xs"})
def scale_all_(xs: Sequence[Tensor], factor: float) -> None:
    for x in xs:
        x.data.mul_(factor)


@custom_op("foregrad_tests::counted", mutates_args={"count"})
def counted(x: Tensor, count: Tensor | None) -> Tensor:
    if count is not None:
        count.data.add_(1)
    return x * 2


@custom_op("foregrad_tests::pop_", mutates_args={"x"})
def pop_(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.max(0)
    x.data.sub_(1)
    return largest.values.clone(), largest.indices.clone()


@custom_op("foregrad_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


counted.register_fake(lambda x, count: torch.empty_like(x))
cube.register_fake(lambda x: torch.empty_like(x))
pop_.register_fake(lambda x: (x.new_empty(x.shape[1:]), x.new_empty(x.shape[1:], dtype=torch.long)))


def cube_backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    result = 3 * x**2
    exchange_(result, gradient * result)
    scale_(result, 2.0)
    return result


cube.register_autograd(cube_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Scaled(Function):
    """A gradient around an operator that has none."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        result = x.clone()
        scale_(result, factor)
        return result

    @staticmethod
    def backward(ctx, gradient):
        result = gradient.clone()
        scale_(result, ctx.factor)
        return result, None


def one(a, b):
    scale_(a, 3.0)
    return a + b


def twice_in_a_row(a, b):
    scale_(a, 3.0)
    a.add_(1)
    scale_(a, 2.0)
    return a


def on_a_view(a, b):
    scale_(a[1:], 3.0)
    scale_(a.t()[0], 2.0)
    return a * 1


def on_an_intermediate(a, b):
    t = a * 1
    v = t.t()
    scale_(v[1:], 3.0)
    return t, v


def several(a, b):
    exchange_(a, b)
    return a - 2 * b


def several_views_of_one(a, b):
    exchange_(a[0], a[1])
    return a


def a_list(a, b):
    scale_all_([a, b[1:], t := b.clone()], 2.0)
    return t + a


def a_list_with_one_tensor_twice(a, b):
    scale_all_([a, a, a[1:]], 2.0)
    return a * b


def optional(a, b):
    return counted(a, None) + counted(a, b), b * 1


def returning_too(a, b):
    values, indices = pop_(a)
    return values, indices, a


ONE_ARGUMENT = [one, twice_in_a_row, on_a_view, on_an_intermediate, returning_too]
SEVERAL_ARGUMENTS = [several, a_list, optional]


@pytest.mark.parametrize("program", ONE_ARGUMENT + SEVERAL_ARGUMENTS, ids=lambda p: p.__name__)
def test_a_custom_operator_that_writes(program):
    """M-1, M-8, M-13: `check` passes one tensor twice where it can, which the operators of several do not take yet."""
    dtype = torch.float64 if program in SEVERAL_ARGUMENTS else torch.float32
    a, b = plain(2, 2), plain(2, 2).to(dtype) * 10
    check_core(program, a, b)
    check_core(program, leaf(2, 2), b.clone().requires_grad_(), training=False)
    check_core(lambda a, b, w: tree_map(lambda t: t * w, program(a, b)), a, b, leaf(2, 2))


OF_ONE_MEMORY = [several_views_of_one, a_list_with_one_tensor_twice, *SEVERAL_ARGUMENTS]


@pytest.mark.parametrize("program", OF_ONE_MEMORY, ids=lambda p: p.__name__)
def test_a_custom_operator_whose_arguments_share_memory_is_refused_for_now(program):
    """M-13: one argument looks at memory that the operator writes to through another."""
    a = plain(2, 2)
    with pytest.raises(UnsupportedError, match="writes to memory that"):
        foregrad.aot_function(program, nop)(a, a)
    assert torch.equal(a, plain(2, 2)) and a._version == 0


def test_a_custom_operator_writes_to_what_requires_grad():
    """M-2, M-7: eager's autograd does not see it, not even on a leaf."""
    check_core(lambda x: (scale_(x, 2.0), x * x)[1], leaf(3))
    check_core(lambda x: (scale_(x, 2.0), x * x)[1], leaf(3) * 1)
    check_core(lambda x, w: ((h := x * w), scale_(h, 2.0), h + 1)[2], leaf(3), leaf(3))
    check_core(lambda x, c: counted(x.detach(), c) * x, leaf(3), plain(2))


def test_a_custom_operator_without_a_gradient_says_so_in_backward():
    """J-1"""
    check_core(counted, leaf(3), plain(2))
    y = foregrad.aot_function(counted, nop)(leaf(3), plain(3))
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        y.sum().backward()


def test_gradients_around_custom_operators():
    """M-13, J-10"""
    check_core(lambda x: cube(x) * 2, leaf(3))
    check_core(lambda x, b: (Scaled.apply(x, 3.0), scale_(b, 2.0), x * b)[::2], leaf(3), plain(3))


FOREACH = [
    lambda xs, ys: torch._foreach_add_(xs, 1.0),
    lambda xs, ys: torch._foreach_add_(xs, [1.0, 2.0]),
    lambda xs, ys: torch._foreach_add_(xs, ys, alpha=2),
    lambda xs, ys: torch._foreach_addcmul_(xs, ys, ys, value=0.5),
    lambda xs, ys: torch._foreach_addcdiv_(xs, ys, ys, [0.5, 2.0]),
    lambda xs, ys: torch._foreach_lerp_(xs, ys, 0.25),
    lambda xs, ys: torch._foreach_mul_(xs, torch.full((), 3.0)),
    lambda xs, ys: torch._foreach_copy_(xs, ys),
    lambda xs, ys: (torch._foreach_sqrt_(xs), torch._foreach_clamp_max_(xs, 1.5)),
    lambda xs, ys: torch._foreach_zero_(xs),
]


@pytest.mark.parametrize("program", FOREACH)
def test_lists_of_tensors(program):
    """M-1, M-2, B-2"""

    def whole(xs, ys):
        program(xs, ys)
        return xs, [x * y for x, y in zip(xs, ys, strict=True)]

    ys = [plain(2), plain(3)]
    check_core(whole, [plain(2), plain(3)], ys)
    check_core(whole, [leaf(2) * 1, leaf(3) * 1], ys)
    check_core(whole, [leaf(2), leaf(3)], ys, training=False)
    flat = plain(5)
    check_core(whole, [flat[:2], flat[2:]], ys)
    check_core(lambda x, ys: (program([t := x * 1, t.view(-1)], [ys[0], ys[0]]), t)[1], plain(2), ys)


LISTS_THAT_LIE_OTHERWISE = {
    "with gaps": lambda: [plain(3), plain(4, 3)[::2]],
    "ones": lambda: [plain(3), plain(2, 3).as_strided((2, 1, 3), (3, 1, 1)), plain(4, 3)[::4]],
    "empty": lambda: [torch.zeros(2, 0), torch.empty_strided((0, 2), (1, 1))],
    "large": lambda: [plain(300, 301)[:, ::2], plain(300, 301).t()],
}


@pytest.mark.parametrize("make", LISTS_THAT_LIE_OTHERWISE.values(), ids=LISTS_THAT_LIE_OTHERWISE)
def test_lists_are_written_where_their_tensors_lie(make):
    """M-1: the functional twin gives other strides, which show in what is made like them."""

    def whole(xs):
        made = [torch.zeros_like(x.transpose(0, -1)).transpose(0, -1) for x in xs]
        for several in (xs, made):
            torch._foreach_add_(several, xs)
            torch._foreach_mul_(several, torch.full((), 2.0))
        return [torch.zeros_like(t) for t in (*xs, *made)], made

    check_core(whole, make())


@pytest.mark.parametrize("make", [lambda: plain(2, 2)[0], lambda: (leaf(2, 2) * 1)[0], lambda: plain(2)])
def test_a_list_that_holds_a_tensor_twice(make):
    """M-1: autograd follows the writes to a view one by one, and takes the last one to any other tensor."""
    check_core(lambda x, w: (torch._foreach_add_([x, x], [w, w * 2]), x * 1)[1], make(), leaf(2))


def test_gradients_that_autograd_gives_only_together_are_refused_by_name():
    def program(x, w):
        torch._foreach_mul_([x[0], x[1]], [w, w * 2])
        return x * 1

    w = leaf(2)
    y = program(plain(2, 2), w)
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT FAILED"):
        torch.autograd.grad(y.sum(), w)
    y = foregrad.aot_function(program, nop)(plain(2, 2), leaf(2))
    with pytest.raises(BackwardError, match="asked for single gradients"):
        y.sum().backward()


def test_lists_of_other_dtypes_keep_theirs():
    """M-1"""
    check_core(lambda xs, ys: (torch._foreach_add_(xs, ys), xs[0] * 2)[1], [plain(2).half()], [plain(2)])


def a_fused_step(parameters, gradients, first, second, steps):
    with torch.no_grad():
        torch._foreach_add_(steps, 1)
        rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
        torch._fused_adam_(parameters, gradients, first, second, [], steps, amsgrad=False, maximize=False, **rates)
    return parameters[0] * 2


def test_a_fused_step_on_arguments():
    """M-6"""
    state = [[torch.zeros(2), torch.zeros(3)] for _ in range(2)]
    steps = [torch.zeros(()), torch.zeros(())]
    check_core(a_fused_step, [leaf(2), leaf(3)], [plain(2), plain(3)], *state, steps)


def test_a_fused_step_that_depends_on_how_tensors_lie_is_refused():
    """B-2: its kernel goes through memory from where a tensor starts."""
    compiled = foregrad.aot_function(a_fused_step, nop)
    whole, part = plain(4, 3), plain(8, 3)[::2]
    with pytest.raises(UnsupportedError, match="has gaps"):
        compiled([part], [whole], [whole * 0], [whole * 0], [torch.zeros(())])
    with pytest.raises(UnsupportedError, match="share memory"):
        compiled([whole], [whole], [state := whole * 0], [state], [torch.zeros(())])


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, foreach=False),
    "sgd, foreach": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "sgd, fused": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, fused=True),
    "adam, fused": lambda ps: torch.optim.Adam(ps, 0.1, fused=True),
    "adamw, fused": lambda ps: torch.optim.AdamW(ps, 0.1, amsgrad=True, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("whole", [False, True], ids=["step", "loss, backward and step"])
def test_a_step_of_an_optimizer(make, whole):
    """M-6, F-14: the state of the optimizer is there from a first step in eager."""

    def play(compile):
        weights = [nn.Parameter(plain(2)), nn.Parameter(plain(2) / 2)]
        optimizer, seen = make(weights), []

        def loss(x):
            return ((x * weights[0]).sin() + weights[1]).sum()

        def step(x):
            if whole:
                optimizer.zero_grad()
                loss(x).backward()
            optimizer.step()
            return weights[0] * 2

        loss(plain(2)).backward()
        optimizer.step()
        call = compile(step)
        for number in range(1, 5):
            seen.append(call(plain(2) / number).tolist())
            seen.append([w.tolist() for w in weights] + [w._version for w in weights])
            tensors = [s for w in weights for s in optimizer.state[w].values() if isinstance(s, Tensor)]
            seen.append([s.tolist() for s in tensors])
        return seen

    assert play(lambda step: foregrad.aot_function(step, nop)) == play(lambda step: step)


OUT = [
    lambda x, out: torch.add(x, x, alpha=2, out=out),
    lambda x, out: (torch.mm(x + 0, x + 1, out=out), out.mul_(2), out + 1)[2],
    lambda x, out: torch.cat([x[:1], x[1:]], out=out),
    lambda x, out: (torch.sin(x, out=out.t()), out)[1],
    lambda x, out: (torch.add(x[0], 1, out=out[1]), out)[1],
    lambda x, out: torch.max(x, 0, out=(out[0], torch.empty(2, dtype=torch.long))),
    lambda x, out: (torch.mul(x, 2, out=x), x - 1)[1],
    lambda x, out: (torch.cumsum(x + 0, 0, out=out), torch.sum(out + 0, 0, out=out[0]))[1],
    lambda x, out: torch.mul(x, 2, out=out.double()).float(),
    lambda x, out: torch.randn(2, 2, out=out) + x,
]


@pytest.mark.parametrize("program", OUT)
def test_out_is_written(program):
    """M-1, M-12"""
    check_core(program, plain(2, 2), torch.zeros(2, 2))
    check_core(program, plain(2, 2), torch.zeros(2, 4)[:, ::2])
    check_core(program, leaf(2, 2), torch.zeros(2, 2), training=False)
    check_core(lambda x, out, w: (program(x, out), out * w)[1], plain(2, 2), torch.zeros(2, 2), leaf(2, 2))


RANDOM = [
    lambda x: x.normal_(1, 2),
    lambda x: x.uniform_(-1, 1),
    lambda x: x[1:].bernoulli_(0.5),
    lambda x: x.exponential_().geometric_(0.3),
    lambda x: x.t()[0].random_(0, 10),
    lambda x: x.log_normal_().cauchy_(),
    lambda x: torch.dropout_(x, 0.5, True),
    lambda x: torch.rrelu_(x.neg_(), training=True),
    lambda x: F.alpha_dropout(x, 0.5, training=True, inplace=True),
    lambda x: nn.init.xavier_uniform_(x),
]


@pytest.mark.parametrize("program", RANDOM)
def test_random_numbers_are_written(program):
    """M-1, P-4"""
    for x in (plain(3, 4), leaf(3, 4) * 1):
        check_core(lambda x: (program(x), x * 2, torch.rand(2)), x)
    check_core(lambda x, w: ((t := x * 1), program(t), t * w)[2], plain(3, 4), leaf(3, 4))


def test_drawing_for_a_tensor_without_elements_gives_another_tensor():
    for x in (plain(2, 0), leaf(2, 0)):
        check_core(lambda x: F.rrelu(x, training=True), x)
        check_core(lambda x: F.rrelu(x * 2, training=True, inplace=True), x)


NORMS = {
    "plain": {},
    "momentum 0.3": {"momentum": 0.3},
    "momentum 0": {"momentum": 0.0},
    "not affine": {"affine": False},
    "no statistics": {"track_running_stats": False},
}


@pytest.mark.parametrize("options", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d], ids=["batch", "instance"])
def test_running_statistics(kind, training, options):
    """M-6, F-9"""
    options = {"affine": True, "track_running_stats": True, **options}
    norm = kind(3, **options).train(training)
    check_core(norm, torch.randn(4, 3, 5, requires_grad=True))
    check_core(norm.requires_grad_(False), torch.randn(4, 3, 5))
    check_core(norm, torch.randn(4, 3, 5), training=False)


def test_statistics_that_are_arguments():
    """M-1, B-2"""

    def program(x, mean, variance):
        return F.batch_norm(x, mean, variance, training=True, momentum=0.2), mean * 1

    both = torch.stack([torch.zeros(3), torch.ones(3)])
    check_core(program, torch.randn(4, 3), both[0], both[1])
    check_core(program, torch.randn(4, 3, requires_grad=True), both[0], both[1])
    check_core(lambda x, both: program(x, *both), torch.randn(4, 3, requires_grad=True), both)


def test_a_norm_twice_in_one_program():
    """M-1"""
    norm = nn.BatchNorm1d(3)
    check_core(nn.Sequential(norm, nn.ReLU(inplace=True), norm), torch.randn(4, 3, requires_grad=True))


def test_an_average_that_depends_on_a_counter():
    """M-1: `momentum=None` reads the number of batches, which each call compares; without training it does not."""
    norm = nn.BatchNorm1d(3, momentum=None)
    with foregrad.config.patch(reads="refused"), pytest.raises(DataDependentError):
        foregrad.aot_module(norm, nop)(torch.randn(4, 3))
    assert norm.num_batches_tracked == 0
    check_core(norm.eval(), torch.randn(4, 3, requires_grad=True))


@pytest.mark.parametrize(
    "write",
    [
        lambda n: n.mul_(2.0),
        lambda n: n.div_(2),
        lambda n: n[:0].mul_(2.0),
        lambda n: n.mul_(torch.ones(3)),
        lambda n: torch._foreach_mul_([n], 2.5),
        lambda n: n.float().mul_(1j),
    ],
)
def test_a_result_that_cannot_be_cast_to_what_it_is_written_to_raises_eagers_error(write):
    """Shape inference lets it pass, and nobody may read what is written."""
    n = torch.ones(3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type") as raised:
        foregrad.aot_function(write, nop)(n)
    assert not isinstance(raised.value, foregrad.ForegradError)
