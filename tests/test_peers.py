"""What torch's own layer does differently from eager, as users meet it; each was seen there (torch 2.13)."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foregrad
from checking import check_core
from foregrad.errors import UnsupportedError
from helpers import leaf, nop, plain


def compiled(fn):
    return foregrad.aot_module(fn, nop) if isinstance(fn, nn.Module) else foregrad.aot_function(fn, nop)


def agree(program, play):
    """Playing with what Foregrad makes of the program shows the same."""
    assert play(compiled(program)) == play(program)


def test_reading_a_slice_after_writing_to_the_whole():
    """B-1, B-11 (item 3)"""
    for whole in (plain(4), leaf(4) * 1):
        check_core(lambda t, part: (t.add_(100), part[0])[1], whole, whole[1:])
        check_core(lambda t, part: (t.add_(100), part.view(-1))[1], whole, whole[1:])
        check_core(lambda t, part: (part.add_(100), t.view(2, 2)[1])[1], whole, whole[1:])
        check_core(lambda t, part: (t.add_(100), part, part[1:] * 2)[1:], whole, whole[1:])


def test_writing_and_then_giving_another_storage():
    """M-10 (item 5)"""

    def play(call):
        x, y = plain(3), plain(4) * 10
        old, row = x.detach(), x[1:]
        out = call(x, y)
        y.add_(1)
        return out.tolist(), x.tolist(), old.tolist(), row.tolist(), x._version, y._version

    agree(lambda x, y: (x.mul_(2), x.set_(y), x + 1)[2], play)
    agree(lambda x, y: (x.mul_(2), x.set_(y), x.mul_(3), y + 1)[3], play)
    agree(lambda x, y: (x.mul_(2), x.set_(y * 2), x.mul_(3), x)[3], play)


def test_growing_an_input():
    """M-3 (item 6)"""
    check_core(lambda x: (x.resize_(10), x[3:].fill_(7), x + 1)[2], plain(3))
    check_core(lambda x: x.resize_(10).zero_(), plain(3))
    check_core(lambda x, w: (x.resize_(2, 5), x.fill_(7), x @ w)[2], plain(3), leaf(5))


def test_calling_again_with_other_sizes_and_numbers():
    """F-2, F-11 (item 7)"""
    agree(lambda x, n=1: x.view(-1)[n] * n, lambda f: [f(plain(k, 2), n).item() for k in (2, 3, 2) for n in (1, 2, 1)])
    agree(lambda x, n: x * n, lambda f: [str(f(plain(2), n).dtype) for n in (1, 1.0, True, 1j)])
    agree(lambda x: x.t().reshape(-1), lambda f: [f(t).tolist() for t in (plain(2, 2), plain(2, 2).t(), plain(2, 2))])


def test_calling_again_with_and_without_grad():
    """F-2, F-5 (item 7)"""

    def play(call):
        seen = []
        for x, w in [(plain(2), plain(2)), (leaf(2), plain(2)), (plain(2), leaf(2)), (leaf(2), leaf(2))] * 2:
            y = call(x, w)
            seen.append(y.requires_grad)
            if y.requires_grad:
                y.sum().backward()
            seen.append([None if t.grad is None else t.grad.tolist() for t in (x, w)])
            with torch.no_grad():
                seen.append(call(x, w).requires_grad)
            with torch.inference_mode():
                seen.append(call(x, w).is_inference())
        return seen

    agree(lambda x, w: x.exp() * w, play)


def test_calling_again_with_other_aliases():
    """B-8, D-2 (item 7)"""

    def play(call):
        seen = []
        for _ in range(2):
            x, base = plain(3), plain(5)
            for a, b in ((x, plain(3)), (x, x), (base[:3], base[2:]), (base[2:], base[:3]), (base[1:4], base[1:4])):
                out = call(a, b)
                seen.append((out.tolist(), a.tolist(), b.tolist(), base.tolist()))
        return seen

    agree(lambda a, b: (a.mul_(2), b.add_(1), a + b)[2], play)


def test_calling_again_after_eval_and_with_another_parameter():
    """F-2, F-9 (item 7)"""

    def play(wrap):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        call, seen = wrap(net), []
        for training in (True, False, True):
            net.train(training)
            seen.append((call(plain(4, 2)).tolist(), net[1].running_mean.tolist()))
        net[0].weight = nn.Parameter(torch.zeros(2, 2))
        call(plain(4, 2)).sum().backward()
        seen.append((net[0].weight.grad.tolist(), net[1].weight.grad.tolist()))
        net[0].bias = None
        seen.append(call(plain(4, 2)).tolist())
        net[0].weight.requires_grad_(False)
        seen.append((call(plain(4, 2)).requires_grad, net[1](plain(4, 2)).requires_grad))
        return seen

    assert play(compiled) == play(lambda net: net)


IN_PLACE = {
    "a leaf": (lambda x: x.neg_(), lambda: leaf(2)),
    "an expanded tensor": (lambda x: x.neg_(), lambda: plain(1, 2).expand(3, 2)),
    "an expanded intermediate": (lambda x: (x * 1).expand(3, 2).neg_(), lambda: plain(2)),
    "an output of unbind": (lambda x: x.unbind(0)[0].neg_(), lambda: leaf(2, 2) * 1),
    "an output of split": (lambda x: x.split(1)[1].neg_(), lambda: leaf(2, 2) * 1),
}


@pytest.mark.parametrize(("program", "make"), IN_PLACE.values(), ids=IN_PLACE)
def test_writing_where_eager_forbids_it(program, make):
    """M-7 (item 8)"""
    with pytest.raises(RuntimeError) as eager:
        program(make())
    x = make()
    with pytest.raises(RuntimeError) as refused:
        compiled(program)(x)
    assert str(refused.value)[:60] == str(eager.value)[:60]
    assert torch.equal(x, make())
    check_core(program, make())


def test_making_an_input_require_grad():
    """M-7 (item 9)"""

    def play(call):
        x = plain(2)
        y = call(x)
        y.sum().backward()
        return x.requires_grad, x.is_leaf, x.grad.tolist(), y.tolist()

    agree(lambda x: x.requires_grad_() * 2, play)
    check_core(lambda x: x.requires_grad_(), plain(2))
    check_core(lambda x: (x.requires_grad_(), x.sin(), x.detach())[1:], plain(2))


def test_making_an_intermediate_require_grad():
    """M-7 (item 9)"""

    check_core(lambda x: x.detach().requires_grad_(), leaf(2))
    check_core(lambda x: (x * 2).detach().requires_grad_() * 3, leaf(2))


FLAGS = {
    "an input that is written": (lambda x: (x.mul_(2), x.requires_grad_(), x * x)[2], "writes to its memory"),
    "a result and its square": (lambda x: ((t := x.detach().requires_grad_()), t * t), "it made require grad"),
    "a result and more": (lambda x: ((t := (x * 2).requires_grad_()), (t * t).sin()), "it made require grad"),
    "a leaf, not any more": (lambda x: x.requires_grad_(False) * 2, "not require grad"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_changing_a_flag_is_refused_for_now(case):
    """M-7 (item 9)"""
    program, words = FLAGS[case]
    requires_grad = case == "a leaf, not any more"
    x = plain(2).requires_grad_(requires_grad)
    with pytest.raises(UnsupportedError, match=words):
        compiled(program)(x)
    assert (x.tolist(), x._version, x.requires_grad) == ([1, 2], 0, requires_grad)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(plain(2))
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x):
        self.k = x * self.weight
        self.last = x.detach() + self.last
        return self.k.sum() + self.last


def test_keeping_a_tensor_on_the_module():
    """F-9 (item 10)"""
    check_core(Remembers(), plain(2))
    check_core(Remembers(), leaf(2))
    module = Remembers()
    call = compiled(module)
    for _ in range(3):
        call(plain(2))
    assert type(module.k) is torch.Tensor
    assert (module.k.tolist(), module.last.tolist()) == ([1, 4], [3, 6])
    module.k.sum().backward()
    assert module.weight.grad.tolist() == [1, 2]


def test_writing_to_a_buffer_that_the_backward_read():
    """M-9 (item 11)"""
    check_core(lambda x, b: ((y := (x * b.sin()).cos()), b.add_(1), y)[2], leaf(3), plain(3))
    check_core(lambda x, b: ((y := (x * b[1:].exp()).exp()), b.zero_(), y)[2], leaf(2), plain(3))
    check_core(lambda x, b: ((y := F.dropout(x, 0.5) * b.cos()), b.copy_(x.detach()), y)[2], leaf(3), plain(3))
    buffer = plain(3)
    check_core(lambda x: ((y := (x * buffer.sin()).cos()), buffer.add_(1), y)[2], leaf(3))


STRIDED = {
    "transposed": lambda: plain(2, 3).t(),
    "with gaps": lambda: plain(4, 6)[::2, 1::2],
    "channels last": lambda: plain(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "permuted": lambda: plain(2, 3, 4).permute(2, 0, 1),
    "row of columns": lambda: plain(3, 4).t()[1:3],
    "one dimension of size 1": lambda: plain(3, 1, 2).transpose(0, 1),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_writing_to_a_strided_input(make):
    """M-1, M-4 (item 13)"""
    for x in (make(), make().requires_grad_() * 1):
        check_core(lambda x: (x.mul_(2), x + 1)[1], x)
        check_core(lambda x: (x.copy_(torch.ones(x.shape)), x.sub_(3))[1], x)
        check_core(lambda x: (x.mul_(2), x.unsqueeze_(0), x * 1)[2], x)


def test_writing_through_what_returns_its_input():
    """A-2, M-1 (item 13)"""
    for x in (plain(3), leaf(3) * 1):
        check_core(lambda x: F.dropout(x, 0.5, training=False).mul_(2), x)
        check_core(lambda x: (F.dropout(x, 0.0).add_(1), x * 2)[1], x)
        check_core(lambda x: (x.contiguous().mul_(2), x.to(torch.float32).add_(1), x.float())[2], x)
        check_core(lambda x: (x.reshape(3).mul_(2), x.expand(3).add_(1), x.view_as(x))[2], x)
        check_core(nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.ReLU(inplace=True)).eval(), x)


def hooked(x):
    h = x * 2
    h.register_hook(lambda g: g * 10)
    return h.sin()


def hooked_output(x):
    y = x.sin()
    y.register_hook(lambda g: g + 1)
    return y, y.view(-1), x.cos()


def kept(x):
    h = x * 2
    h.retain_grad()
    return h.sin()


def kept_output(x):
    h = x * 2
    h.retain_grad()
    return h, h.sin()


def kept_view(x):
    y = x.sin().view(-1)
    y.retain_grad()
    return y


@pytest.mark.parametrize("program", [hooked, hooked_output, kept], ids=lambda p: p.__name__)
def test_hooks_and_kept_gradients_of_intermediates(program):
    """J-1 (item 13)"""
    check_core(program, leaf(3))


def test_a_kept_gradient_of_an_output():
    """J-1 (item 13)"""
    x, y = leaf(3), compiled(kept_view)(leaf(3))
    assert y.retains_grad
    check_core(kept_view, x)


def test_a_kept_gradient_of_an_output_that_is_used_inside_is_refused():
    """J-1 (item 13)"""
    x = leaf(3)
    with pytest.raises(UnsupportedError, match=r"calls retain_grad\(\) on it, and computes other results"):
        compiled(kept_output)(x)
    assert (x.tolist(), x._version, x.grad) == ([1, 2, 3], 0, None)


VERSIONS = [
    lambda x, b: (x.add_(1), x.mul_(2), b.zero_())[1],
    lambda x, b: (x[1:].add_(1), x.view(-1).mul_(2), x * b)[2],
    lambda x, b: (x.detach().add_(1), x.data.mul_(2), x * b)[2],
    lambda x, b: (x.unsqueeze_(0), x.squeeze_(0), x * b)[2],
    lambda x, b: (b.copy_(x.detach()), b.copy_(b), b.fill_(1), x * b)[3],
    lambda x, b: (x.add_(0), x.sub_(0), x[:0].add_(1), b)[3],
    lambda x, b: (torch.add(b, 1, out=b), torch._foreach_mul_([b, b], 2.0), b * 1)[2],
    lambda x, b: (x.clamp_(0, 2), x.requires_grad_(x.requires_grad), x.detach(), x)[3],
]


@pytest.mark.parametrize("program", VERSIONS)
def test_counting_versions(program):
    """M-9 (item 16)"""
    check_core(program, plain(3), plain(3))
    check_core(program, leaf(3) * 1, plain(3))
    check_core(program, leaf(4)[1:] * 1, plain(6)[::2])
    check_core(program, leaf(3), plain(3), training=False)


def test_counting_versions_of_outputs_and_views():
    """M-9, A-3, A-4 (item 16)"""

    def play(call):
        x, b = leaf(3) * 1, plain(3)
        view = x[1:]
        outs = call(x, b)
        seen, before = [x._version, b._version, view._version], [out._version for out in outs]
        outs[0].detach().add_(1)
        return seen, [x._version, b._version], [out._version - v for out, v in zip(outs, before, strict=True)]

    agree(lambda x, b: ((y := x * b), y.add_(1), y[1:], b)[0::2], play)
    agree(lambda x, b: (x.mul_(2), x.view(-1), b)[1:], play)
    agree(lambda x, b: ((y := x.exp()), y.detach(), y.view(3, 1)), play)
