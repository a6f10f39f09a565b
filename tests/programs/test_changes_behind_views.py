"""Changes that autograd notices in another tensor: versions that inputs share, views that it takes again."""

import pytest
import torch
from torch.autograd import Function

import foregrad
from checking import check_core
from foregrad.errors import UnsupportedError
from helpers import leaf, nop, plain


def result(*shape):
    return leaf(*shape) * 1


def shift_(x):
    """A write that autograd knows nothing of, and that counts."""
    with torch.no_grad():
        x.add_(1)


class Scaled(Function):
    """Writes to its input, and says so."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.mul_(2))
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Tripled(Function):
    """Has a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Flat(Function):
    """A view with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.view(-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view(ctx.shape)


class Counted(Function):
    """Writes to a tensor that it was given, in backward."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.count.add_(1)
        return gradient * 2, None


# ----------------------------------------------------------------------------------------------- version counters
def moved_beside_an_empty_view(x, y):
    x.set_(x.detach())
    y.add_(1)
    x.add_(1)


def moved_beside_a_resized_view(x, y):
    y.resize_((0,))
    x.set_(x.detach())


def reshaped_in_turn(x, y):
    x.unsqueeze_(0)
    y.unsqueeze_(0)
    x.unsqueeze_(0)
    return x * y.sum()


@pytest.mark.parametrize("program", [moved_beside_an_empty_view, moved_beside_a_resized_view])
def test_inputs_that_lie_apart_may_share_a_version_counter(program):
    """M-10: the counter moves by what was done to all of them."""
    x = plain(2, 3)
    check_core(program, x, x.view(-1)[:0])


@pytest.mark.parametrize("make", [plain, result])
def test_inputs_side_by_side_change_their_shape(make):
    """M-3, M-10"""
    x = make(4)
    check_core(reshaped_in_turn, x[:2], x[2:])


def test_a_program_for_inputs_of_one_family_is_not_for_others():
    """F-2, B-8: the version of the other input moves only if it is a view of the one that changes."""
    program = torch.no_grad()(lambda y, z: z.view(1, -1).unsqueeze_(-1) is None)
    compiled = foregrad.aot_function(program, nop)
    z = leaf(3)
    together, apart = (z[..., :1].expand(3), z), (leaf(3)[..., :1].expand(3), leaf(3))
    for _ in range(2):
        compiled(*together)
        compiled(*apart)
    assert [t._version for t in (*together, *apart)] == [2, 2, 0, 2]


def test_a_detached_input_that_moves_counts_for_itself():
    """M-7, M-10: `.data` has a counter of its own."""

    def program(x, y):
        negative = y * -1
        y[1:] *= 0.5
        y.set_(negative)

    x = leaf(3)
    check_core(program, x, x.data[1:])


def test_detached_data_that_is_differentiated_has_a_tangent_of_its_own():
    """J-5: one value to the graph, and two results to autograd."""

    def program(x):
        y = x.sin()
        data = y.data
        data.lerp_(y, 0.25)
        return data[1:], y

    check_core(program, leaf(3))


def test_what_is_saved_may_lie_in_memory_whose_view_changes_its_shape():
    """M-3, J-9: the change counts before anything is saved, as it does in eager."""

    def program(x):
        x.as_strided_((1,), (3,), 0)
        return x * x

    check_core(program, result(3)[::2])


# ------------------------------------------------------------------------------------ views that are taken again
def viewed_then_written(y):
    view = y.as_strided((1, 3), (2, 1), 0)
    shift_(y)
    return view


def viewed_then_reshaped(x, y):
    x.squeeze_()
    y.as_strided_((1, 1), (3, 3), 0)
    return y


def written_view_unsqueezed_without_grad(x, y):
    view = y.view(-1)
    view.sub_(x)
    with torch.no_grad():
        view.unsqueeze_(-1)
    return view


def test_a_view_reaches_beyond_its_base_once_its_memory_was_written():
    """A-3: autograd then takes it for a view of all the memory."""
    check_core(viewed_then_written, leaf(3)[1:])


def test_a_change_of_shape_that_changes_nothing_is_still_seen_by_views():
    """M-3, A-3"""
    x = result(3)
    check_core(viewed_then_reshaped, x, x[1:])


def test_a_returned_view_whose_shape_was_changed_without_grad():
    """M-3, A-3"""
    check_core(written_view_unsqueezed_without_grad, leaf(3), plain(3))


# --------------------------------------------------------------------------------------------- views that go stale
def part_of_written(x):
    part = x[..., :1]
    with torch.no_grad():
        x.zero_()
    return part


def alias_beside_an_empty_write(x, y):
    alias = torch.ops.aten.alias(x)
    y.cumsum_(-1)
    return alias


@torch.no_grad()
def transposed_in_place(x):
    view = x.unflatten(0, (1, -1))
    view.t_()
    return view


def diagonal_beside_a_transposed_base(x, y):
    diagonal = y.diagonal()
    x.swapdims_(2, 1)
    return diagonal


def test_one_of_several_views_goes_stale():
    """A-3, M-9"""
    check_core(part_of_written, leaf(2, 3).chunk(2)[0])


def test_a_view_taken_without_grad_goes_stale_by_its_own_change_of_shape():
    """A-3, M-3"""
    check_core(transposed_in_place, leaf(3), training=False)


def test_views_go_stale_when_another_input_of_the_family_changes():
    """A-3, B-1: without gradients, as in eager."""
    x = leaf(3)
    check_core(alias_beside_an_empty_write, x, x.view(-1)[:0], training=False)
    x = result(2, 2, 2)
    check_core(diagonal_beside_a_transposed_base, x, x[..., 1], training=False)


# -------------------------------------------------------------------------------------------- requires_grad_()
def flagged_base(x, y):
    x.requires_grad_()
    return y.flip(0), y, y[:1]


def flagged_view(x):
    view = x.hsplit(2)[1]
    view.requires_grad_()
    return torch.ops.aten.alias(view)


def test_views_require_grad_with_what_they_are_views_of():
    """J-3, B-1"""
    x = plain(3)
    check_core(flagged_base, x, x[2:])


def test_a_view_of_an_input_that_the_program_makes_require_grad_by_a_write():
    """A-1, B-4: beside it, the memory that they share is looked at under no_grad."""

    def program(y, z):
        y.cumsum_(0)
        v = z.view(3, 2)
        z.add_(y)
        return v

    y = result(6)
    check_core(program, y, y.detach())


def test_a_detached_view_of_one_of_several_is_taken_before_the_write():
    """A-1: afterwards autograd lets nobody take a view of it."""

    def program(x):
        v = x[0].detach()
        v.add_(1)
        return v

    check_core(program, leaf(4, 2).chunk(2)[1])


def test_two_names_of_one_alias_that_was_written_are_refused():
    """A-1: they would be one object."""

    def program(x):
        v = x.detach()
        w = torch.ops.aten.alias(v)
        w.add_(x)
        return w, v

    with pytest.raises(UnsupportedError, match="share memory and have histories of their own"):
        foregrad.aot_function(program, nop)(leaf(3))


def test_a_view_whose_history_autograd_loses_is_refused():
    """A-1: eager follows it by its geometry, from a base that does not require grad."""

    def program(x):
        v = x[..., None].requires_grad_()
        w = v.mT
        x.detach().mul_(2)
        return w

    x = plain(3)
    with pytest.raises(UnsupportedError, match="autograd cannot follow the program"):
        foregrad.aot_function(program, nop)(x)
    assert x.tolist() == [1, 2, 3]


def test_a_view_of_a_view_that_the_program_made_require_grad():
    """A-2, J-3"""
    check_core(flagged_view, plain(2, 2, 2))


# -------------------------------------------------------------------------------------------------- grad modes
def test_a_write_with_gradients_on_in_a_call_without():
    """M-2: the caller's tensor continues the tape."""

    @torch.enable_grad()
    def program(x, z):
        x.add_(z)

    check_core(program, plain(3), leaf(3), training=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_taken_without_grad_in_part(dynamic):
    """A-3: nothing flows back through it."""

    def program(x):
        with torch.no_grad():
            rows = x.chunk(2)
        return rows[1].chunk(2, -1)[1]

    check_core(program, leaf(4, 4), compile=lambda fn: foregrad.aot_function(fn, nop, dynamic=dynamic))


# --------------------------------------------------------------------------------------------- writes in backward
def test_a_backward_writes_to_memory_that_another_input_looks_at():
    """J-6, B-1: what was saved of the other one has changed."""
    x = leaf(3)
    report = check_core(lambda x, y: (Counted.apply(y, y), x.abs()), x, x[::2], raise_on_difference=False)
    first = [d for d in report.differences if "tangent for" not in d.run and "one output after" not in d.run]
    assert not first


# ------------------------------------------------------------------------------------------------ results, dtypes
@pytest.mark.parametrize("name", ["cumsum_", "cumprod_"])
def test_cumulative_operators_keep_the_dtype_of_what_they_write(name):
    """M-1: with eager's own error where its kernel has none for bool."""

    def program(x):
        positive = x > 2
        getattr(positive, name)(0)
        return positive

    check_core(program, torch.tensor(3.0))
    check_core(lambda x: getattr(x, name)(0), torch.tensor([3, 200], dtype=torch.uint8))
    compiled = foregrad.aot_function(program, nop)
    with pytest.raises(NotImplementedError, match="not implemented for 'Bool'"):
        compiled(plain(3))


def test_strides_of_single_rows_do_not_depend_on_earlier_programs():
    """M-1: a part of nothing shows the stride of its base."""

    def program(y):
        y.mul_(-1)
        return y[0:0].sort(0)[1]

    check_core(lambda y: y.mul_(-1), plain(2, 3))
    check_core(program, plain(2, 3)[1::2])


def test_a_number_that_does_not_fit_is_refused_whatever_ran_before():
    """M-1"""
    check_core(lambda x: x.mul_(2), torch.ones(3, dtype=torch.int64))
    check_core(lambda x: x.mul_(0.5), torch.ones(3, dtype=torch.int64))


def test_the_error_is_that_of_eagers_kernel():
    """F-7: abstract kernels look at other things first."""
    check_core(lambda x: x[0:0].argmax(0), plain(3) * 1j)
    with pytest.raises((RuntimeError, TypeError), match="does not support complex input"):  # the latter from 2.15 on
        foregrad.aot_function(lambda x: x[0:0].argmax(0), nop)(plain(3) * 1j)


def test_what_is_added_to_a_product_must_expand_to_it():
    """F-7: also where nobody uses the result."""
    check_core(lambda x: torch.addmm(x, x, x.t()) is None, plain(1, 3))
    check_core(lambda x, y: torch.addmv(x, y, y[0]) is None, plain(4), plain(1, 2))


def test_a_view_is_not_detached_in_place():
    """M-7"""
    check_core(lambda x: x.detach_() is None, plain(4).chunk(2)[1])


def test_the_same_piece_of_two_splits_is_two_tensors():
    """A-5"""
    check_core(lambda x: (x.unbind(0)[1], x.unbind(0)[-1], x.unbind(0)[0]), plain(2, 3))
    check_core(lambda x: (x.unbind(0)[1], x.unbind(0)[-1], x.unbind(0)[0]), result(2, 3))


def test_a_result_that_is_an_argument_too_is_not_resized():
    """M-4"""
    check_core(lambda x: torch.mul(t := x.norm(), x, out=t), plain(3))


# ------------------------------------------------------------------------------------------------------ not yet
@torch.no_grad()
def transpose_(x):
    x.t_()


def stale_view_of_a_fresh_leaf(x):
    fresh = x.detach().requires_grad_()
    view = fresh.t()
    with torch.no_grad():
        fresh.add_(1)
    return view


def two_histories(x):
    copy = x.clone()
    alias = copy.detach()
    alias[0] = x[1]
    return alias, copy


def piece_of_reshaped(x):
    x.squeeze_(0)
    return x.chunk(2)[1].amax(0)


@torch.no_grad()
def stale_view_of_moved(x):
    x.set_(x.detach())
    view = x.expand(2, 3)
    x.fill_(1.5)
    return view


def view_of_a_fresh_leaf(x):
    fresh = x.detach().requires_grad_()
    with torch.no_grad():
        return fresh.unbind(0)[1]


def reshaped_and_scaled(x):
    v = x.mT
    with torch.no_grad():
        v.transpose_(0, 1)
    return Tripled.apply(v)


def beyond(x, write):
    y = x * 1 if x.is_leaf else x
    v = y[1:3].as_strided((3,), (1,), 1)
    write(y, v)
    return v


REFUSED = {
    "a view without grad of a leaf that the program made": (view_of_a_fresh_leaf, plain(2, 3)),
    "a stale view of an input that was moved": (stale_view_of_moved, leaf(2, 3)),
    "two results in one memory, each with its history": (two_histories, leaf(3)),
    "a piece, saved for backward, of an input that changes its shape": (piece_of_reshaped, result(1, 3)),
    "a view of an input, transposed without grad, then used": (lambda x: (transpose_(x), x * 2)[1], result(3, 2)[1:]),
    "a view, transposed without grad, then used": (
        lambda x: (v := (x * 2)[1:], transpose_(v), v * 2)[2],
        result(3, 2),
    ),
    "a view, transposed without grad, then returned": (
        lambda x: (v := (x * 2)[1:], transpose_(v), v)[2],
        result(3, 2),
    ),
    "written by a custom function, then restrided": (
        lambda x: (Scaled.apply(x), x.as_strided_((2,), (1,), 0))[0],
        result(3),
    ),
    "written after a view of it was taken and it was detached in place": (
        lambda x: (y := x.exp(), v := y.view(-1), y.detach_(), y.abs_(), v)[4],
        leaf(3),
    ),
    "a view reshaped under no_grad, in a custom function": (reshaped_and_scaled, leaf(3, 1)),
    "a view by a custom function, of what was written": (lambda x: (x.mul_(2), Flat.apply(x)), result(2, 3)),
    "a view beyond its base, after a write": (lambda x: beyond(x, lambda y, v: y.mul_(2)) * 3, leaf(5)),
    "a view beyond its base, after a write under no_grad": (
        lambda x: beyond(x, lambda y, v: torch.no_grad()(y.mul_)(2)) * 3,
        leaf(5),
    ),
    "a view beyond its base, written": (lambda x: beyond(x, lambda y, v: v.mul_(2)), leaf(5)),
    "a view beyond its base, returned": (lambda x: beyond(x, lambda y, v: y.detach().mul_(2)), leaf(5)),
    "a view of a view beyond its base": (lambda x: beyond(x, lambda y, v: y.detach().mul_(2)).view(-1), result(5)),
    "a stale view of a fresh leaf": (torch.no_grad()(stale_view_of_a_fresh_leaf), plain(2, 3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_autograd_would_take_otherwise_on_abstract_tensors_is_refused(name):
    """M-3, A-3: never wrong."""
    program, x = REFUSED[name]
    with pytest.raises(UnsupportedError, match="cannot be"):
        foregrad.aot_function(program, nop)(x)


def test_a_view_beyond_its_base_that_is_written_itself():
    """A-2: autograd takes it again, by its geometry, from all the memory."""

    def program(y):
        v = y.as_strided((2, 2), (2, 1), 1)
        with torch.no_grad():
            v *= v
        return v

    check_core(program, leaf(2, 3)[..., 0])


@pytest.mark.parametrize("write", [lambda y, v: None, lambda y, v: y.data.mul_(2)])
def test_a_view_beyond_its_base_that_no_write_counted_for(write):
    """A-2: autograd differentiates `as_strided` itself, which says less than the view shows."""
    check_core(lambda x: beyond(x, write) * 3, leaf(5))
    check_core(lambda x: (beyond(x, write), x), result(5))


# -------------------------------------------------------------- changes of shape of views whose base was written, too
def squeezed(x, y, w):
    x.squeeze_()
    y.mul_(w)


def transposed(x, y, w):
    x.transpose_(0, 1)
    y.add_(w)
    x.unsqueeze_(0)


@pytest.mark.parametrize("program", [squeezed, transposed])
def test_a_view_changes_its_shape_after_its_base_got_a_history(program):
    """M-3: each call writes first, after which torch takes the view for a leaf unless it is asked for its node."""
    base = plain(2, 3, 2)
    check_core(program, base[..., ::2], base, leaf(2, 3, 2))
    check_core(program, base[0, :1], base, leaf(2, 3, 2))


def one_of_many(x):
    with torch.enable_grad():
        return x.unbind(0)[0]


@pytest.mark.parametrize(
    "program",
    [
        lambda y: (y.swapdims_(0, 1), y.detach())[1],
        lambda y: (y.t_(), y.detach().requires_grad_())[1],
        lambda y: (y.unsqueeze_(0), y.detach()[..., 1:])[1],
        lambda y: (y.detach(), y.t_())[0],
    ],
)
def test_a_detached_alias_of_one_of_several_views_has_the_shape_that_it_was_given(program):
    """A-3: such a view may not be used after a write, so that its alias is taken before it."""
    y, other = one_of_many(leaf(2, 2, 4)), one_of_many(leaf(2, 2, 4))
    with torch.no_grad():
        expected, found = program(y), foregrad.aot_function(program, nop)(other)
    assert found.shape == expected.shape and found.stride() == expected.stride() and torch.equal(found, expected)
    assert other.shape == y.shape


def through_an_alias(x):
    alias = x.view(-1).requires_grad_()
    view = alias.unbind(0)[1]
    shift_(alias)
    return view


def through_a_detached_alias(x):
    alias = x.detach().requires_grad_()
    view = alias.unbind(0)[1]
    shift_(alias)
    return view


@pytest.mark.parametrize("program", [through_an_alias, through_a_detached_alias])
def test_a_stale_view_of_an_alias_that_the_program_made_require_grad_is_refused(program):
    """A-3: taken from the input again, it would have lost that it requires grad."""
    with pytest.raises(UnsupportedError, match="may not be used any more"):
        foregrad.aot_function(program, nop)(plain(3))


def filled_in_its_own_dtype(x):
    x.unfold(1, 1, 1).permute(3, 0, 1, 2).view(torch.float32).zero_()


def test_a_part_of_an_expanded_tensor_is_filled_through_a_view_of_its_own_dtype():
    """M-14"""
    base = plain(2, 2, 2)
    check_core(filled_in_its_own_dtype, base[:1].expand_as(base))
    check_core(lambda x: (x.view(torch.float32)[1:].fill_(3), x)[1], base[:1].expand_as(base))
