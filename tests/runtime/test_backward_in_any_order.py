"""Several backwards, partial ones, and what is left of the saved tensors in between."""

import gc
import weakref

import pytest
import torch

import foregrad
from checking import check_core
from helpers import leaf, nop, plain

SECOND_TIME = "backward through the graph a second time"


def compiled(fn, **options):
    return foregrad.aot_function(fn, nop, **options)


def apart(x, w):
    return x.exp(), w.sin() * 2


def shared(x, w):
    e = x.exp()
    return e.sin(), e * w


def shared_without_saved(x, w):
    s = x + w
    return s + 1, s.sum()


class Keeps(torch.autograd.Function):
    """Holds what it needs by itself: autograd frees nothing."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.x


def outcome(act):
    try:
        act()
    except RuntimeError as error:
        return "second time" if SECOND_TIME in str(error) else str(error)
    return "done"


def scenes():
    yield "one after another", [(0,), (1,)]
    yield "the other first", [(1,), (0,)]
    yield "both, then one", [(0, 1), (0,)]
    yield "both, then the other", [(0, 1), (1,)]
    yield "one, then both", [(0,), (0, 1)]
    yield "one twice", [(0,), (0,)]
    yield "three times", [(1,), (0,), (1,)]


PROGRAMS = {
    "apart": apart,
    "shared": shared,
    "shared without saved": shared_without_saved,
    "spent, but nothing saved": lambda x, w: (x * 2, w * 3),
    "one without saved": lambda x, w: (x + 1, (x * w).exp()),
    "kept by the program": lambda x, w: (Keeps.apply(x), Keeps.apply(x) + w),
    "written input": lambda x, w: (x.exp(), w.sin(), x * w)[1:],
    "three": lambda x, w: (x.sin(), (x.cos() * w).exp(), w.tanh())[:2],
}


def play(fn, masks, retain):
    x, w = leaf(3), leaf(3)
    outputs = fn(x, w)
    seen = []
    for mask in masks:
        chosen = [outputs[i] for i in mask]
        seen.append(
            outcome(
                lambda chosen=chosen: torch.autograd.backward(
                    chosen, [torch.ones_like(y) for y in chosen], retain_graph=retain
                )
            )
        )
    if seen[-1] != "done":  # eager may have got as far as some leaf
        return seen
    return seen, [None if t.grad is None else t.grad.tolist() for t in (x, w)]


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_any_order(name, retain):
    """J-16, J-17, J-5"""
    for scene, masks in scenes():
        eager, other = (play(f, masks, retain) for f in (PROGRAMS[name], compiled(PROGRAMS[name])))
        assert other == eager, scene


@pytest.mark.parametrize("fn", [lambda x, w: ((x + w).view(-1), w + 1), lambda x, w: (x.exp(), (w + 1).expand(2, -1))])
def test_saved_sizes_are_never_freed(fn):
    """J-16, J-17"""
    for scene, masks in scenes():
        assert play(compiled(fn, dynamic=True), masks, False) == play(fn, masks, False), scene


def test_a_size_behind_a_gradient_of_zeros_is_not_freed():
    """J-17: eager has saved nothing, so that the backward can be asked twice."""

    def program(x):
        x.normal_()
        y = (x - x).view(-1)
        return y, y

    def run(call):
        x = leaf(3) + 0
        y, _ = call(x.clone())
        return [outcome(lambda: torch.autograd.grad(y, x, torch.ones(3))) for _ in range(2)]

    assert run(compiled(program, dynamic=True)) == run(program)


@pytest.mark.parametrize("fn", [lambda x: x * 2, lambda x: x + 2, torch.exp, Keeps.apply])
def test_a_second_backward_of_one_output(fn):
    """J-17: refused where eager refuses it, whether or not the program itself saved anything."""

    def run(call):
        y = call(leaf(3))
        return [outcome(lambda: y.backward(torch.ones(3))) for _ in range(2)]

    assert run(compiled(fn)) == run(fn)


def test_the_stash_holds_what_the_other_output_needs_and_no_more():
    """J-16, J-13"""

    def program(x):
        a, b = x.exp(), x.tanh()
        return a, b

    x = leaf(1000)
    first, second = compiled(program)(x)
    storages = [weakref.ref(t.untyped_storage()) for t in (first, second)]
    node = first.grad_fn
    first.sum().backward()
    kept = [value for value in node.stash.values() if value is not None]
    assert len(kept) == 1 and torch.equal(kept[0], plain(1000).tanh())
    del first, kept
    gc.collect()
    assert storages[1]() is not None
    second.sum().backward()
    assert [value for value in node.stash.values() if value is not None] == []
    assert outcome(lambda: second.sum().backward()) == "second time"


def test_a_stashed_tensor_that_was_written_since_is_refused():
    """J-16, J-6"""

    def run(call):
        x = leaf(3)
        a, b = call(x)
        a.sum().backward()
        with torch.no_grad():
            b.add_(1)
        return outcome(lambda: b.sum().backward())

    def program(x):
        return x.sin(), x.exp()

    for call in (program, compiled(program)):
        assert "modified by an inplace operation" in run(call)


def test_no_cycle_keeps_a_program_alive():
    """J-13: the node does not hold a tensor that holds the node."""
    x = leaf(3)
    first, second = compiled(lambda x: (x.exp(), x.tanh()))(x)
    first.sum().backward()
    node = weakref.ref(second.grad_fn)
    gc.disable()
    try:
        del first, second
        assert node() is None
    finally:
        gc.enable()


def test_gradients_that_nobody_asked_for():
    """J-5"""

    def run(call):
        x, w, unused = leaf(3), leaf(3), leaf(3)
        y, z = call(x, w, unused)
        found = torch.autograd.grad(y.sum(), (x, w, unused), allow_unused=True, retain_graph=True)
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(z.sum(), unused)
        return [None if g is None else g.tolist() for g in found]

    def program(x, w, unused):
        return x * 2, w * 3

    assert run(compiled(program)) == run(program) == [[2, 2, 2], None, None]


def two_writes(x):
    x.neg_()
    between = x * 2
    x.triu_()
    return between, x


def writes_of_custom_functions(x):
    Negated.apply(x)
    between = x + 2
    x.triu_()
    return between, x


class Negated(torch.autograd.Function):
    """Writes to its argument, and saves nothing."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.neg_()

    @staticmethod
    def backward(ctx, g):
        return -g


@pytest.mark.parametrize("program", [two_writes, writes_of_custom_functions])
def test_each_write_to_a_view_is_a_node_that_is_freed(program):
    """J-16: eager wraps the node of the write, whatever it saves, and the last one is not the only one."""
    check_core(program, (leaf(4, 3) * 1)[::2])
