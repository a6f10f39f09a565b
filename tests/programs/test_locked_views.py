"""Results that autograd lets nobody write to: one of several views, and views that custom functions and hooks make."""

import pytest
import torch
from torch import nn

import foregrad
from checking import check_core
from foregrad.errors import UnsupportedError
from helpers import leaf, nop, plain


class Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, g):
        return g.view(2, 2)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


def pieces_and_whole(x):
    y = x * 2
    return *y.unbind(), y


def pieces_of_a_view(x):
    return (x * 2).t().split(1)


def a_view_of_a_piece(x):
    first, second = (x * 2).chunk(2)
    return first.view(-1), second


def by_a_custom_function(x):
    return Flat.apply(x * 2)


def of_an_input_by_a_custom_function(x):
    return Flat.apply(x)


def as_it_was_given(x):
    y = x * 2
    return Same.apply(y), y


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.register_full_backward_hook(lambda module, given, got: None)

    def forward(self, x):
        return self.inner(x)


PROGRAMS = [
    lambda x: (x * 2).unbind(),
    lambda x: (x * 2).unbind()[1],
    lambda x: x.split(1),
    pieces_and_whole,
    pieces_of_a_view,
    a_view_of_a_piece,
    by_a_custom_function,
    of_an_input_by_a_custom_function,
    as_it_was_given,
    Hooked(),
]


def after_writing(results, training):
    """For each result: whether it can be written, and whether autograd still knows where it comes from."""
    shown = []
    for i, result in enumerate(results):
        try:
            with torch.set_grad_enabled(training):
                result.mul_(2 + i)
            shown.append(result.tolist())
        except RuntimeError as error:
            shown.append("being modified inplace" in str(error) or str(error))
        for other in results:
            try:
                shown.append(other.grad_fn is None)
            except RuntimeError as error:
                shown.append("has been modified inplace" in str(error) or str(error))
    return shown


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_writing_to_a_result_is_allowed_and_forbidden_as_in_eager(program, training, dynamic):
    transform = foregrad.aot_module if isinstance(program, nn.Module) else foregrad.aot_function
    seen = []
    for fn in (program, transform(program, nop, dynamic=dynamic)):
        results = fn(leaf(2, 2))
        seen.append(after_writing(results if isinstance(results, (tuple, list)) else [results], training))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_under_no_grad_require_grad_as_their_base_does(dynamic):
    def program(x):
        return x.view(-1), x.unbind()[0]

    compiled = foregrad.aot_function(program, nop, dynamic=dynamic)
    for x in (leaf(2, 2), leaf(4).detach().view(2, 2).requires_grad_()):
        with torch.no_grad():
            expected, got = program(x), compiled(x)
        assert [t.requires_grad for t in got] == [t.requires_grad for t in expected]
        assert [t.is_leaf for t in got] == [t.is_leaf for t in expected]


def test_a_base_that_is_a_view_in_the_graph_does_not_lock_its_views():
    def program(x):
        y = (x * 2).view(-1)
        y.data[:1].add_(1)
        return y, y.data

    for fn in (program, foregrad.aot_function(program, nop)):
        y, _ = fn(leaf(2, 2))
        y.mul_(2).sum().backward()


@pytest.mark.parametrize("view", [lambda t: t.view(-1), lambda t: t.unbind(-1)[0], lambda t: t.mT])
@pytest.mark.parametrize("leaf_of", [lambda x: x.detach(), lambda x: x.detach().clone(), lambda x: x.data])
def test_a_view_of_a_leaf_that_the_program_made_is_one_for_the_caller_too(leaf_of, view):
    """A-1: its memory may be written, by another name or under no_grad, and it does not go stale."""

    def program(x):
        fresh = leaf_of(x).requires_grad_()
        return view(fresh), fresh.data, fresh.detach()

    check_core(program, plain(2, 3))
    for fn in (program, foregrad.aot_function(program, nop)):
        shown, *_ = fn(plain(2, 3))
        assert shown._base.is_leaf
        (shown * 3).sum().backward()
        assert shown._base.grad.max() == 3


def test_a_view_of_a_leaf_that_the_program_made_of_an_input_that_is_resized():
    def program(x):
        fresh = x.detach().requires_grad_()
        x.resize_((5,))
        return fresh.flatten()

    check_core(program, plain(3, 3))


def test_a_view_of_a_view_that_was_taken_without_grad_cannot_be_written():
    def program(x):
        y = x * 2
        with torch.no_grad():
            view = y.view(-1)
        return view.unsqueeze(-1)

    check_core(program, leaf(2, 2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_a_write_to_a_view_in_another_dtype_counts_for_what_it_is_a_view_of(dtype):
    """Autograd does not follow such a view, but counts its writes."""
    check_core(lambda x: (x.view(dtype), x.unbind()[0]), leaf(2, 2))
    check_core(lambda x: (x.data.view(dtype), x.view(dtype).data, x.unbind()[0]), leaf(2, 2))
    x = leaf(4)
    _, whole = foregrad.aot_function(lambda x: (x.exp(), x.view(dtype)), nop)(x)
    assert whole._version == x._version
    whole.zero_()
    assert whole._version == x._version == 1


def test_one_of_several_views_of_what_a_custom_function_made_of_a_written_input_is_refused():
    def program(x):
        x.neg_()
        return x, Flat.apply(x).unbind()[0]

    with pytest.raises(UnsupportedError, match="with a history of its own"):
        foregrad.aot_function(program, nop)(leaf(2, 2) * 1)
