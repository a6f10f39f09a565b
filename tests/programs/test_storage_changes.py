"""A tensor gets another storage, or its storage another size: what the caller, and every old alias, sees then."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import foregrad
from checking import check_core
from foregrad._torch import shares_version_counter
from foregrad.errors import MissingInputError, UnsupportedError
from helpers import leaf, nop, plain

set_part_ = torch.ops.aten.set_.source_Tensor_storage_offset
resize_bytes_ = torch.ops.inductor.resize_storage_bytes_


def agree(program, scene):
    """A scene shows the same when it is played with what Foregrad makes of the program."""
    assert_close(scene(foregrad.aot_function(program, nop)), scene(program), rtol=0, atol=0)


def written_before(x, y):
    x.mul_(2)
    x.set_(y * 2)
    return x + 1


def written_after(x, y):
    x.set_(y)
    x.mul_(2)
    return y + 1


def to_a_part_of_another(x, y):
    x.set_(y[1:])
    y.add_(1)
    return x * 2


def to_what_is_returned(x, y):
    t = y * 2
    x.set_(t)
    t.add_(1)
    return t, x


def exchanged(x, y):
    old = x.detach()
    x.set_(y)
    y.set_(old)
    x.mul_(2)
    return x - 1, y - 1


def there_and_back(x, y):
    old = x.detach()
    x.set_(y)
    x.set_(old)
    return x + 1


def to_a_view_of_itself(x, y):
    x.set_(x[1:])
    x.mul_(2)
    return x


def views_of_before_and_after(x, y):
    before = x[1:]
    x.set_(y)
    after = x[1:]
    before.add_(10)
    after.add_(20)
    return before, after


def swaps_that_a_trainer_makes(x, y):
    full = torch.cat([x, y])
    with torch.no_grad():
        x.set_(full)
    y.add_(x[: y.shape[0]])
    return x.sum() * y


SWAPS = [written_before, written_after, to_a_part_of_another, to_what_is_returned, exchanged, there_and_back]
SWAPS += [to_a_view_of_itself, views_of_before_and_after]
SWAPS += [swaps_that_a_trainer_makes, lambda x, y: (x.set_(), y * 2)[1], lambda x, y: (x.set_(y * 2), x + 1)[1]]


@pytest.mark.parametrize("program", SWAPS, ids=lambda p: p.__name__)
def test_set_gives_the_caller_another_storage(program):
    """M-5, M-10, A-1, A-11"""
    check_core(program, plain(3), plain(4))
    check_core(program, plain(5)[2:], plain(6)[1:5])
    with torch.inference_mode():
        check_core(program, plain(3), plain(4))


@pytest.mark.parametrize("program", SWAPS, ids=lambda p: p.__name__)
def test_an_old_alias_of_a_tensor_that_was_set(program):
    """M-10"""

    def scene(call):
        x, y = plain(3), plain(4)
        old = x.detach(), x.view(3, 1), x[1:], y.view(2, 2)
        call(x, y)
        y.sub_(1)
        x.add_(100)
        return [x, y, *old, x._version, y._version, x.untyped_storage().nbytes()]

    agree(program, scene)


def a_leaf_without_grad(x, y, w):
    with torch.no_grad():
        w.set_(y * 3)
    return w * w, x + 1


def a_result_without_grad(x, y, w):
    v = w * 2
    with torch.no_grad():
        v.set_(y)
    return v * x


def a_result_through_detach(x, y, w):
    v = w * 2
    v.detach().set_(y)
    return v * x


IN_TRAINING = [lambda x, y, w: (x.set_(y), x * w)[1], lambda x, y, w: ((z := x * w), x.set_(y), z)[2]]
IN_TRAINING += [a_leaf_without_grad, a_result_without_grad, a_result_through_detach]


@pytest.mark.parametrize("program", IN_TRAINING, ids=lambda p: p.__name__)
def test_set_in_training(program):
    """M-10, J-5"""
    check_core(program, plain(3), plain(3) + 0.5, leaf(3))
    check_core(program, plain(3), plain(3) + 0.5, nn.Parameter(plain(3)))


def grow(x, alias):
    x.resize_(6)
    x.fill_(3)
    return x + 1


def grow_and_keep_the_old(x, alias):
    x.mul_(2)
    x.resize_(7)
    x[3:].fill_(5)
    return x * 2


def shrink(x, alias):
    x.resize_(2)
    x.mul_(3)
    return x, alias + 1


def shrink_and_grow(x, alias):
    x.resize_(0)
    alias.add_(1)
    x.resize_(3)
    return x * 2


def a_view_from_before_it_grew(x, alias):
    v = x[1:]
    x.resize_(8)
    x[3:].zero_()
    v.mul_(5)
    return x, v


def an_intermediate(x, alias):
    t = x * 2
    v = t[:2]
    t.resize_(2, 3).view(-1)[3:].fill_(1)
    v.add_(1)
    return t, v


RESIZES = [grow, grow_and_keep_the_old, shrink, shrink_and_grow, a_view_from_before_it_grew]
RESIZES += [an_intermediate, lambda x, alias: x.resize_as_(x[:2, None]), lambda x, alias: x.resize_(3).resize_(3, 1)]
OF_THREE = {
    "beside an alias": lambda: (b.view(-1) for b in [plain(3)] for _ in range(2)),
    "alone": lambda: (plain(3), plain(3)),
    "view": lambda: (b[1:4] for b in [plain(4)] for _ in range(2)),
    "with gaps": lambda: (plain(6)[::2], plain(3)),
}


@pytest.mark.parametrize("program", RESIZES, ids=lambda p: p.__name__)
@pytest.mark.parametrize("kind", OF_THREE)
def test_resize_as_in_eager(program, kind):
    """M-3, M-4, M-5"""
    check_core(program, *OF_THREE[kind]())


def test_resize_in_training():
    """M-3, M-9"""
    check_core(lambda x, w: (x.resize_(4), x[2:].fill_(1), x * w)[2], plain(2), leaf(4))
    check_core(lambda x, w: ((y := x * w), x.resize_(4), x.fill_(1), y)[3], plain(2), leaf(2))
    check_core(lambda w: (w.data.resize_(2).mul_(3), w * w)[1], leaf(3))


def test_resize_takes_a_memory_format():
    """M-3"""

    def program(x):
        x.resize_(1, 2, 2, 2, memory_format=torch.channels_last)
        x.fill_(1)
        return x + 1

    check_core(program, plain(3))
    check_core(lambda x: (x.resize_(2, 2), x * 1)[1], plain(2, 3).t())


def test_the_storage_grows_for_every_alias():
    """M-3"""

    def scene(call):
        x = plain(4)
        front, alias = x[:2], x.detach()
        call(front, alias)
        front.mul_(2)
        return x, front, alias, x.untyped_storage().nbytes(), x._version

    agree(lambda a, b: (a.resize_(6), a.fill_(2), b.add_(1))[2], scene)
    agree(lambda a, b: (a.resize_(3), a.fill_(2), b + 1)[2], scene)


def filled_and_reduced(x, y):
    y.resize_(2).fill_(2)
    torch.sum(x.softmax(0), 0, out=x)


def filled_and_read(x, y):
    x.resize_(2).fill_(2)
    return y.resize_(2) + 1


@pytest.mark.parametrize("program", [filled_and_reduced, filled_and_read])
def test_empty_inputs_of_one_storage_meet_when_it_grows(program):
    """M-3, B-2"""

    def scene(call):
        x = torch.zeros(0)
        y = x.view(-1)
        result = call(x, y)
        return result, x, y, x.untyped_storage()._cdata == y.untyped_storage()._cdata

    agree(program, scene)


@pytest.mark.parametrize("view", [lambda t: t.view(-1), lambda t: t[::2], lambda t: t.detach()])
def test_an_alias_of_what_out_makes_grow(view):
    """M-3"""

    def program(x):
        t = torch.empty(0)
        v = view(t)
        v.resize_(2).fill_(2)
        torch.sum(x, 0, out=t)
        return t, v

    check_core(program, plain(3))
    check_core(lambda x: (v := view(t := torch.empty(0)), torch.sum(x, 0, out=t), v.resize_(1))[1:], plain(3))


def test_bytes_are_freed():
    """M-11"""

    def scene(call):
        x = plain(4)
        try:
            return call(x), x.untyped_storage().nbytes(), x._version, list(x.shape)
        finally:
            x.untyped_storage().resize_(16)

    agree(lambda x: ((y := x * 2), resize_bytes_(x, 0), y)[2], scene)
    check_core(lambda x: (resize_bytes_(x, 0), resize_bytes_(x, 16), x.fill_(3), x + 1)[3], plain(4))
    check_core(lambda x: (resize_bytes_(x, 32), x + 1)[1], plain(4))


def test_an_input_whose_bytes_were_freed_is_missing():
    """M-11: also where the program itself would get them back."""
    x, w = plain(4), leaf(4)
    x.untyped_storage().resize_(0)
    compiled = foregrad.aot_function(lambda x, w: (resize_bytes_(x, 16), x.copy_(w.detach()), x * w)[2], nop)
    with pytest.raises(MissingInputError, match="was freed"):
        compiled(x, w)
    assert (x.untyped_storage().nbytes(), x._version) == (0, 0)


def assign_an_input(x, y, w):
    x.data = y
    return x * w, y


def assign_a_result(x, y, w):
    t = y * 2
    x.data = t
    t.add_(1)
    return t, x * w


def assign_after_it_was_saved(x, y, w):
    z = x * w
    x.data = y
    return z


def assign_a_leaf(x, y, w):
    w.data = w.data - 0.5 * x
    return w * w


def assign_a_result_of_the_program(x, y, w):
    v = w * 2
    v.data = y
    return v * v


def assign_twice(x, y, w):
    old = x.data
    x.data = y
    x.add_(1)
    x.data = old
    return x * w


OF_ANY_INPUT = [assign_an_input, assign_a_result, assign_a_leaf, assign_a_result_of_the_program]
OF_PLAIN_INPUTS = [assign_after_it_was_saved, assign_twice]


@pytest.mark.parametrize("program", OF_ANY_INPUT + OF_PLAIN_INPUTS, ids=lambda p: p.__name__)
def test_assigning_data(program):
    """M-7"""
    check_core(program, plain(3), plain(3) + 0.5, leaf(3))
    check_core(program, plain(5)[2:], plain(3) + 0.5, leaf(3) * 1)
    if program in OF_ANY_INPUT:
        check_core(program, leaf(3) * 1, nn.Parameter(plain(3) + 0.5, requires_grad=False), nn.Parameter(plain(3)))


@torch.no_grad()
def move(x, y):
    x.set_(y)


@pytest.mark.parametrize("go", [lambda x, y: setattr(x, "data", y), move], ids=["data", "set_"])
@pytest.mark.parametrize("y", [plain, leaf], ids=["plain", "leaf"])
def test_a_view_of_what_was_moved_keeps_its_own_history(go, y):
    """A-1, M-7, M-10: its gradient is for the tensor that was moved, whoever owns the memory."""
    check_core(lambda x, y: (go(x, y), x[0])[1], leaf(2, 3), y(2, 3) + 0.5 if y is plain else y(2, 3))
    check_core(lambda x, y: (go(x, y), x.t(), y * 2)[1:], leaf(2, 3), y(2, 3))


def made_to_require_grad_and_moved(x, y):
    x.requires_grad_()
    x.data = y
    return x * x


def moved_and_made_to_require_grad(x, y):
    x.data = y
    x.requires_grad_()
    return x * x


@pytest.mark.parametrize("program", [made_to_require_grad_and_moved, moved_and_made_to_require_grad])
def test_what_the_program_makes_a_leaf_keeps_its_end_of_the_tape(program):
    """M-7"""
    check_core(program, plain(3), plain(3) + 0.5)


def test_what_is_moved_and_made_to_require_grad_keeps_its_shape():
    """Autograd has known the input since the call began, and would refuse gradients of another shape."""
    x = plain(3)
    with pytest.raises(UnsupportedError, match=r"args\[0\] requires grad and takes another shape"):
        foregrad.aot_function(moved_and_made_to_require_grad, nop)(x, plain(2))
    assert x.tolist() == plain(3).tolist() and not x.requires_grad


def test_data_of_another_shape():
    """M-7"""
    check_core(lambda x, y: (setattr(x, "data", y), x * x)[1], plain(3), plain(2, 2))


def assign(x, data):
    x.data = data


def set_(x, data):
    with torch.no_grad():
        x.set_(data)


def widen_(x):
    with torch.no_grad():
        x.unsqueeze_(0)


class Copied(torch.autograd.Function):
    """Inside of its forward gradients are off: no operator shows that autograd has an edge to what it takes."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


# An error quotes the line of the program, so that words must not stand on it.
A_STORAGE, NO_DERIVATIVE = "takes a storage", "has no derivative"
AFTER_A_FUNCTION = "after a custom function took it"
AFTER_USE = "requires grad to other memory after it was used"
NOT_YET = {
    "set_ by offset": (lambda x, y, w, v: (set_part_(x, y, 1, [2], [2]), y * 1)[1], A_STORAGE),
    "set_ to a result": (lambda x, y, w, v: (x.set_(y * w), x * 2)[1], NO_DERIVATIVE),
    "set_ to another shape": (torch.no_grad()(lambda x, y, w, v: (w.set_(y[:2]), w * w)[1]), "takes another shape"),
    ".data of another shape": (lambda x, y, w, v: (assign(w, y[:2]), w * w)[1], "takes another shape"),
    ".data of another dtype": (lambda x, y, w, v: (assign(x, y.double()), x * 2)[1], "another dtype"),
    "a leaf after its use": (lambda x, y, w, v: ((z := w * w), assign(w, y), z), AFTER_USE),
    "a leaf after a custom function": (lambda x, y, w, v: ((z := Copied.apply(w)), assign(w, y), z), AFTER_A_FUNCTION),
    "set_ after a custom function": (lambda x, y, w, v: ((z := Copied.apply(w)), set_(w, y), z), AFTER_A_FUNCTION),
    "a shape after a custom function": (lambda x, y, w, v: ((z := Copied.apply(w)), widen_(w), z), AFTER_A_FUNCTION),
    "a result after its use": (lambda x, y, w, v: ((z := v * w), assign(v, y), z), AFTER_USE),
    "to what was computed from it": (lambda x, y, w, v: ((t := v * 2), assign(v, t), v * w), AFTER_USE),
    "there and back": (lambda x, y, w, v: ((old := v.data), assign(v, y), v.add_(1), assign(v, old), v * w), AFTER_USE),
    "and a view without grad": (
        torch.no_grad()(lambda x, y, w, v: (assign(w, y), w[:1].mul_(2))[1]),
        "after that was moved to other memory",
    ),
    "to a result, and a view without grad": (
        torch.no_grad()(lambda x, y, w, v: (w.set_(y * 2), w[:1])[1]),
        "after that was moved to other memory",
    ),
    "to itself, and written": (lambda x, y, w, v: (assign(v, v), v.mul_(2), v * w)[2], "and moves it to other memory"),
}


@pytest.mark.parametrize(("program", "words"), NOT_YET.values(), ids=NOT_YET)
def test_a_move_is_refused_for_now(program, words):
    """M-7, M-10: and nothing was written or moved."""
    tensors = plain(3), plain(3), leaf(3), leaf(3) * 1
    places = [t.data_ptr() for t in tensors]
    with pytest.raises(UnsupportedError, match=words):
        foregrad.aot_function(program, nop)(*tensors)
    assert [t.data_ptr() for t in tensors] == places
    assert [(t.tolist(), t._version) for t in tensors] == [([1, 2, 3], 0)] * 4


LAZY = {
    "set_ to a conjugate": lambda x, y: (x.set_(y.conj()), x * 2)[1],
    "set_ of a conjugate": lambda x, y: ((z := y.conj()), z.set_(x), z * 2)[2],
    ".data of a conjugate": lambda x, y: (assign(x, y.conj()), x * 2)[1],
}


def test_a_conjugate_that_is_resized_is_refused():
    """M-10: it stays a conjugate of the memory."""
    x = torch.tensor([1 + 2j, 3 - 1j])
    with pytest.raises(UnsupportedError, match="resizes a lazily conjugated"):
        foregrad.aot_function(lambda x: x.conj().resize_(1, 2) * 2, nop)(x)
    check_core(lambda x: x.conj().resolve_conj().resize_(1, 2) * 2, x)


@pytest.mark.parametrize("program", LAZY.values(), ids=LAZY)
def test_a_move_to_memory_that_is_read_otherwise_is_refused(program):
    """M-7, M-10: the lazy conjugate stays with the tensor, or comes with the memory."""
    x, y = torch.tensor([1 + 2j]), torch.tensor([3 - 1j])
    with pytest.raises(UnsupportedError, match="lazily conjugated"):
        foregrad.aot_function(program, nop)(x, y)
    assert (x.tolist(), y.tolist(), x.is_conj()) == ([1 + 2j], [3 - 1j], False)


def test_a_view_from_before_keeps_the_old_data():
    """M-7, A-11"""

    def program(x, y):
        v = x.view(-1)
        x.data = y[1:]
        v.add_(1)
        return v, x[1:], x * 2

    check_core(program, plain(3), plain(4))
    check_core(program, plain(5)[2:], plain(4))


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(plain(3))

    def forward(self, x):
        self.weight.data = self.weight.data.clamp(max=2)
        return x * self.weight


def test_a_module_assigns_the_data_of_its_parameter():
    """M-7, F-9: the parameter stays the caller's object, and the next call needs no new program."""
    check_core(Clamped(), plain(3))
    module = Clamped()
    weight, compiled = module.weight, foregrad.aot_module(module, nop)
    for _ in range(4):
        compiled(plain(3)).sum().backward()
    assert module.weight is weight
    assert (weight.tolist(), weight.grad.tolist()) == ([1, 2, 2], [4, 8, 12])
    assert len(compiled.specializations) == 1


OUTS = {"empty": (0,), "too small": (2,), "too large": (3, 3), "right": (2, 2)}


@pytest.mark.parametrize("shape", OUTS.values(), ids=OUTS)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_takes_the_shape_of_the_result(shape):
    """M-3, M-4"""
    x = plain(2, 2)
    check_core(lambda x, out: torch.add(x, 1, out=out), x, torch.zeros(shape))
    check_core(lambda x, out: (torch.mm(x + 0, x + 1, out=out), out.add_(1), x * 1)[2], x, torch.zeros(shape))
    check_core(lambda x, out: torch.cat([x, x], 1, out=out).t(), x, torch.zeros(shape).unsqueeze(0)[0])
    check_core(lambda x, w: (torch.mul(x, 2, out=(t := x.new_zeros(shape))), t * w)[1], x, leaf(2, 2))


def test_views_of_an_input_that_moves_unnoticed_are_not_taken_again_in_backward():
    """P-5: the product saves a view of y, which stays where it was."""

    def program(x, y):
        product = torch.einsum("i...,j...->ij", y, x)
        y.data = x.detach().clone()
        return product

    def over_min_cut(fn):
        return foregrad.aot_function(fn, nop, partition_fn=foregrad.min_cut_rematerialization_partition)

    foregrad.check(program, leaf(3), plain(3, 3), compile=over_min_cut)


def doubled(x):
    x.data = x.detach() * 2
    return x


MOVED_VIEWS = {
    "one": lambda x: doubled(x)[1:],
    "beside it": lambda x: (doubled(x), x[..., -1]),
    "twice": lambda x: (doubled(x), v := x.view(2, 3), v),
    "pieces": lambda x: (*doubled(x).split(3), x.unbind()[1]),
    "written behind autograd": lambda x: (doubled(x), v := x[1:], x.detach().mul_(2), v * 2)[1::2],
    "and a computed one": lambda x: (doubled(x)[1:], x * 3),
}


@pytest.mark.parametrize("make", [lambda: leaf(6), lambda: leaf(6) * 1], ids=["leaf", "computed"])
@pytest.mark.parametrize("program", MOVED_VIEWS.values(), ids=MOVED_VIEWS)
def test_views_of_a_moved_input_are_views_of_the_callers_tensor(program, make):
    """A-1, M-7: they lie in its new memory, and a write to one is a write to it, for autograd too."""
    foregrad.check(program, make())

    def scene(fn):
        x = make()
        views = [t for t in tree_leaves(fn(x)) if t._is_view()]
        assert views and all(view._base is x for view in views)
        try:
            views[0].mul_(3)
        except RuntimeError as error:
            return str(error)
        return x.tolist(), x._version, x.grad_fn.name()

    assert scene(foregrad.aot_function(program, nop)) == scene(program)


def test_a_view_of_a_moved_input_is_put_elsewhere():
    """A-11: into a gradient, and into an attribute."""
    place = SimpleNamespace(part=None)

    def program(x, y):
        x.data = x.detach() * 2
        place.part = x[1:]
        y.grad = x[:2]
        return x * 1

    def scene(fn):
        x, y = leaf(3), leaf(2)
        out = fn(x, y)
        return out, x, y.grad, place.part, y.grad._base is x, place.part._base is x

    agree(program, scene)


def who_counts_together(fn, x, y):
    """For each pair of results and arguments, whether a write to one counts for the other; and all versions."""
    tensors = [*fn(x, y), x, y]
    versions = [t._version for t in tensors]
    return [[shares_version_counter(a, b) for b in tensors] for a in tensors], versions


def moved_and_detached(x, y):
    before = x.detach()
    x.data = y
    return before, x.detach(), x.data, x.view(-1)


def set_and_detached(x, y):
    before = x.detach()
    move(x, y * 2)
    return before, x.detach(), x.data, x.view(-1)


def aliases_of_intermediates_and_inputs(x, y):
    z = (x * y).detach()
    return z, z.data, z.detach(), y.data, y.data.requires_grad_(), y.data.view(-1), z.view(-1), z.data.view(-1)


def written_aliases(x, y):
    first = y.data
    first.add_(1)
    second = y.data
    return first, second, second.detach()


@pytest.mark.parametrize("make", [plain, leaf])
@pytest.mark.parametrize(
    "program", [moved_and_detached, set_and_detached, aliases_of_intermediates_and_inputs, written_aliases]
)
def test_aliases_count_their_writes_with_those_of_eager(program, make):
    """A-2: `detach()` shares a version counter, `.data` has its own, and a moved tensor keeps what it had."""
    expected = who_counts_together(program, make(3), plain(3) + 0.5)
    assert who_counts_together(foregrad.aot_function(program, nop), make(3), plain(3) + 0.5) == expected


def test_an_alias_from_between_two_moves_is_refused():
    def program(x, y):
        x.data = y
        alias = x.detach()
        x.data = y * 2
        return alias

    with pytest.raises(UnsupportedError, match="moved to other memory, and again"):
        foregrad.aot_function(program, nop)(plain(3), plain(3))


def test_a_view_in_larger_elements_of_a_written_part_of_memory():
    """M-3: where it may start depends on where its memory does."""

    def program(x):
        pieces = x.chunk(2)
        x.lerp_(x, 0.25)
        pieces[1].view(torch.float64).fill_(1.5)
        return torch.view_as_complex(pieces[1].view(1, 2))

    check_core(program, plain(6)[1:])


def test_a_change_of_shape_that_changes_nothing_is_no_write_that_autograd_saw():
    """M-5: what was computed before the call stays what it is."""

    def program(x):
        x.squeeze_(0)
        x.detach().mul_(-1)
        return x, x

    check_core(program, (leaf(3) * 1)[1:])


def test_drawing_nothing_is_a_write_all_the_same():
    check_core(lambda x: (x.uniform_(), x), (leaf(2, 0) * 1).view(-1))


class Doubled(torch.autograd.Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_a_custom_function_that_writes_to_nothing_is_followed_by_autograd():
    """M-9: a second backward finds that its node was freed."""
    check_core(lambda x: (x, Doubled.apply(x)), (leaf(1) * 1)[2:])


@pytest.mark.parametrize(
    "program",
    [
        lambda x, z: (z.resize_((3,)), x.mul_(2), z)[2],
        lambda x, z: (x.resize_as_(z), x.mul_(2), x)[2],
        lambda x, z: (z.resize_((1,)), z.resize_((3,)), x.mul_(2), z)[3],
    ],
)
def test_a_resize_to_the_size_that_is_there_changes_nothing(program):
    """M-10: an expanded tensor stays one, and nothing is written to it in another way than to its memory."""
    base = plain(3)
    check_core(program, base, base[:1].expand_as(base))
