"""The cases of what happens to an input, and of how an output is regenerated: each of them by a program that is one."""

import pytest
import torch

import foregrad
from foregrad.joint.inputs import (
    Autograd,
    Reshaped,
    Resized,
    StorageReplaced,
    WrittenBack,
    WrittenElsewhere,
    WrittenInGraph,
)
from foregrad.joint.outputs import ByGeometry, ByViews, History, ViewOfInput, When
from helpers import leaf, nop, plain


def first_input(fn, *args):
    return foregrad.capture(fn, *args).joint.inputs[0]


def write_without_grad(x):
    with torch.no_grad():
        x.add_(1)


@pytest.mark.parametrize(
    ("fn", "arg", "data"),
    [
        (lambda x: x.sin(), plain(3), None),
        (lambda x: x.t_(), plain(2, 3), None),
        (lambda x: x.add_(1), plain(3), WrittenBack(Autograd.IGNORED)),
        (write_without_grad, plain(3), WrittenBack(Autograd.OFF)),
        (lambda x: x.add_(1), leaf(3) * 1, WrittenBack(Autograd.FOLLOWED)),
        (lambda x: x.detach().add_(1), leaf(3), WrittenBack(Autograd.IGNORED)),
    ],
)
def test_what_happens_to_the_data_of_an_input(fn, arg, data):
    """M-1"""
    facts = first_input(fn, arg)
    assert facts.data == data and facts.data_changed is (data is not None)
    assert facts.followed is (data == WrittenBack(Autograd.FOLLOWED))


def test_the_graph_itself_writes_where_it_may():
    """M-8"""
    compiled = foregrad.aot_function(lambda x: x.add_(1), nop, keep_inference_input_mutations=True)
    compiled(plain(3))
    facts = compiled.specializations[0]._program.joint.inputs[0]
    assert facts.data == WrittenInGraph(Autograd.IGNORED) and facts.is_acted_on


def test_memory_that_inputs_share_is_written_as_a_whole():
    """B-1"""
    base = plain(4)
    joint = foregrad.capture(lambda x, y: (x.add_(1), y.sin())[1], base[:3], base[1:]).joint
    assert [facts.data for facts in joint.memories] == [WrittenBack(Autograd.IGNORED)]
    assert [facts.data for facts in joint.inputs] == [
        WrittenElsewhere(Autograd.IGNORED, through=True),
        WrittenElsewhere(Autograd.IGNORED, through=False),
    ]
    assert [facts.data_changed for facts in joint.inputs] == [True, False]


def assign_data(x):
    x.data = x.detach() * 2


@pytest.mark.parametrize(
    ("fn", "place"),
    [
        (lambda x: x.add_(1), type(None)),
        (lambda x: x.t_().t_(), type(None)),
        (lambda x: x.t_(), Reshaped),
        (lambda x: x.resize_(4, 4), Resized),
        (lambda x: x.set_(torch.ones(2)), StorageReplaced),
        (assign_data, StorageReplaced),
    ],
)
def test_what_happens_to_the_place_of_an_input(fn, place):
    """M-3"""
    facts = first_input(fn, plain(2, 3))
    assert type(facts.place) is place
    if place is StorageReplaced:
        assert facts.place.counted is (fn is not assign_data)


def view_without_grad(x):
    with torch.no_grad():
        return x.view(-1)


def stale_view(x, w):
    view = x.unbind(0)[0]
    x.mul_(w)
    return view


@pytest.mark.parametrize(
    ("fn", "args", "history"),
    [
        (lambda x: x.t(), (leaf(2, 3),), History.FOLLOWED),
        (lambda x: x.t(), (plain(2, 3),), History.FOLLOWED),
        (view_without_grad, (leaf(2, 3),), History.WITHOUT_GRAD),
        (lambda x: x.detach(), (leaf(2, 3),), History.DETACHED),
        (lambda x: x.view(-1).requires_grad_(), (plain(2, 3),), History.LEAF),
        (lambda x: x.detach().requires_grad_(), (leaf(2, 3),), History.DETACHED_LEAF),
        (stale_view, (leaf(2, 3) * 1, leaf(3)), History.GOES_STALE),
    ],
)
def test_what_autograd_makes_of_a_view_of_an_input(fn, args, history):
    """A-3, A-9"""
    result = foregrad.capture(fn, *args).joint.outputs.results[0]
    assert isinstance(result, ViewOfInput) and result.replay.history is history
    assert result.when is (When.BEFORE_WRITES if history is History.GOES_STALE else When.AFTER_WRITES)


def test_a_view_of_an_input_that_was_moved_is_taken_last():
    """M-10"""

    def program(x, y):
        x.set_(y * 2)
        return x.view(-1)

    result = foregrad.capture(program, plain(2, 3), plain(2, 3)).joint.outputs.results[0]
    assert isinstance(result, ViewOfInput) and result.when is When.AFTER_MOVES


@pytest.mark.parametrize(("replay", "how"), [(True, ByViews), (False, ByGeometry)])
def test_a_view_is_taken_by_its_operators_or_by_its_geometry(replay, how):
    """A-10"""
    with foregrad.config.patch(view_replay_for_aliased_outputs=replay):
        result = foregrad.capture(lambda x: x.t(), leaf(2, 3)).joint.outputs.results[0]
    assert type(result.replay.how) is how
