"""What eager PyTorch refuses: the same class, the same words, at the same time, and nothing was written.

Words are compared as far as torch's abstract kernels say the same as those that compute.
"""

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

import foregrad
from checking import check_core
from foregrad.errors import UnsupportedError
from helpers import leaf, nop, plain


class Dirty(Function):
    """Writes to its input, and says so."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.add_(1))
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Flat(Function):
    """A view with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view(2, 2)


def result(*shape):
    return leaf(*shape) * 1


def made_for_inference(*shape):
    with torch.inference_mode():
        return plain(*shape)


@torch.no_grad()
def row_without_grad(x):
    return x[0]


def written_base_then_part(x):
    parts = x.unbind(0)
    x.add_(1)
    return parts[0] * 2


def written_base_then_view_without_grad(x):
    row = row_without_grad(x)
    x.add_(1)
    return row * 2


def negate(x):
    return x.neg_()


def written_behind_its_back(x):
    """What x is a view of requires grad then, and x has no node yet."""
    x[0].mul_(leaf(2).sum())
    return x.cos_()


A_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"
A_VIEW_OF_A_LEAF = "a view of a leaf Variable that requires grad is being used in an in-place operation"
SEVERAL_VIEWS = "This view is the output of a function that returns multiple views"
ONE_PLACE = "more than one element of the written-to tensor refers to a single memory location"
OVERLAP = "some elements of the input tensor and the written-to tensor refer to a single memory location"
WITHOUT_GRAD = "created in no_grad mode"
INFERENCE = "Inplace update to inference tensor outside InferenceMode is not allowed"
NO_OUT = "functions with out=... arguments don't support automatic differentiation"
SIZE = "cannot resize variables that require grad"

REFUSED = {
    "leaf": (negate, lambda: leaf(2), A_LEAF),
    "parameter": (negate, lambda: nn.Parameter(plain(2)), A_LEAF),
    "leaf, shape only": (lambda x: x.t_(), lambda: leaf(2, 3), A_LEAF),
    "leaf, foreach": (lambda x: torch._foreach_add_([x, x.detach()], 1.0), lambda: leaf(2), A_LEAF),
    "leaf, inplace activation": (lambda x: F.relu(x, inplace=True), lambda: leaf(2), A_LEAF),
    "leaf, random": (lambda x: x.normal_(), lambda: leaf(2), A_LEAF),
    "leaf, set_": (lambda x: x.set_(plain(3)), lambda: leaf(2), A_LEAF),
    "leaf, custom function": (Dirty.apply, lambda: leaf(2), "a leaf Variable that requires grad has been used"),
    "leaf made inside": (lambda x: x.clone().requires_grad_().neg_(), lambda: plain(2), A_LEAF),
    "view that is taken for a leaf": (written_behind_its_back, lambda: plain(3, 2)[1:], A_LEAF),
    "view of a leaf": (lambda x: x[0].neg_(), lambda: leaf(2, 2), A_VIEW_OF_A_LEAF),
    "view of a leaf, from outside": (negate, lambda: leaf(2, 2)[0], A_VIEW_OF_A_LEAF),
    "item of a leaf": (lambda x: x.__setitem__(0, 1.0), lambda: leaf(3), A_VIEW_OF_A_LEAF),
    "view of a leaf, custom function": (Dirty.apply, lambda: leaf(2)[:1], A_VIEW_OF_A_LEAF),
    "expanded": (lambda x: x.expand(3, 2).add_(1), lambda: plain(2), ONE_PLACE),
    "expanded, from outside": (negate, lambda: plain(2, 1).expand(2, 3), ONE_PLACE),
    "expanded result": (lambda x: x.expand(3, 2).add_(1), lambda: result(2), ONE_PLACE),
    "shifted onto itself": (lambda x: x[1:].add_(x[:-1]), lambda: plain(4), OVERLAP),
    "unbind": (lambda x: x.unbind(0)[0].add_(1), lambda: result(2, 2), SEVERAL_VIEWS),
    "unbind, from outside": (negate, lambda: result(2, 2).unbind(0)[1], SEVERAL_VIEWS),
    "split": (lambda x: x.split(1)[1].add_(1), lambda: result(4), SEVERAL_VIEWS),
    "split, shape only": (lambda x: x.split(1)[1].unsqueeze_(0), lambda: result(4), SEVERAL_VIEWS),
    "split, custom function": (lambda x: Dirty.apply(x.split(1)[1]), lambda: result(4), SEVERAL_VIEWS),
    "chunk": (lambda x: x.chunk(2)[0].add_(1), lambda: result(4), SEVERAL_VIEWS),
    "unbind, then its base": (written_base_then_part, lambda: result(2, 2), SEVERAL_VIEWS),
    "view without grad": (lambda x: row_without_grad(x).add_(1), lambda: result(2, 2), WITHOUT_GRAD),
    "view without grad, from outside": (negate, lambda: row_without_grad(result(2, 2)), WITHOUT_GRAD),
    "view without grad, then its base": (written_base_then_view_without_grad, lambda: result(2, 2), WITHOUT_GRAD),
    "view of a custom function": (
        lambda x: Flat.apply(x).add_(1),
        lambda: result(2, 2),
        "This view was created inside a custom Function",
    ),
    "inference tensor": (negate, lambda: made_for_inference(2), INFERENCE),
    "view of an inference tensor": (lambda x: x.view(-1).add_(1), lambda: made_for_inference(2), INFERENCE),
    "inference tensor to be saved": (
        lambda x: x * leaf(2),
        lambda: made_for_inference(2),
        "Inference tensors cannot be saved for backward",
    ),
    "resize of a leaf": (lambda x: x.resize_(3), lambda: leaf(2), SIZE),
    "resize of a result": (lambda x: x.resize_(3), lambda: result(2), SIZE),
    "resize without grad": (torch.no_grad()(lambda x: x.resize_(3)), lambda: leaf(2), SIZE),
    "set_ to another dtype": (lambda x: x.set_(x.double()), lambda: plain(2), "Could not set tensor of type double"),
    "out= of what requires grad": (lambda x: torch.add(x, 1, out=x.detach() * 1), lambda: leaf(2), NO_OUT),
    "out= requires grad": (lambda x: torch.add(x.detach(), 1, out=x), lambda: leaf(2), NO_OUT),
    "out= of another kind": (lambda x: torch.mul(x, 0.5, out=x.long()), lambda: plain(2), "can't be cast"),
    "a fraction into integers": (lambda x: x.add_(0.5), lambda: plain(2).long(), ""),  # an abstract kernel's own words
    "a write that would grow": (lambda x: x.add_(torch.ones(3, 2)), lambda: plain(2), "doesn't match the broadcast"),
    "integers that require grad": (lambda x: x.requires_grad_(), lambda: plain(2).long(), "can require gradients"),
    "a result without grad": (lambda x: x.requires_grad_(False), lambda: result(2), "flags of leaf variables"),
    "detaching a view": (lambda x: x[0].detach_(), lambda: result(2, 2), "Can't detach views in-place"),
    ".grad of another shape": (
        lambda x: setattr(x, "grad", x.detach()[:1]),
        lambda: leaf(2),
        "attempting to assign a gradient of size",
    ),
    "backward of several": (lambda x: (x * 2).backward(), lambda: leaf(2), "only for scalar outputs"),
    "backward without a tape": (lambda x: x.sum().backward(), lambda: plain(2), "does not require grad"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_eagers_words(case):
    """M-7: also at the second call."""
    program, make, words = REFUSED[case]
    with pytest.raises(RuntimeError) as eager:
        program(make())
    assert words in str(eager.value)
    compiled = foregrad.aot_function(lambda x: program(x), nop)
    for _ in range(2):
        with pytest.raises(type(eager.value)) as refused:
            compiled(make())
        assert type(refused.value) is type(eager.value)
        assert words in str(refused.value)


# The write to this one is found out when it is made, after others were.
WRITTEN_BEFORE = "view of an inference tensor"


@pytest.mark.parametrize("case", [case for case in REFUSED if case != WRITTEN_BEFORE])
def test_nothing_was_written(case):
    """M-7: what the program did before it was refused is not done."""
    program, make, words = REFUSED[case]

    def logged(log, x):
        log.add_(1)
        log.t_()
        return program(x)

    log, x = plain(2, 3), make()
    before, version = x.detach().clone(), 0 if x.is_inference() else x._version
    with pytest.raises(RuntimeError) as refused:
        foregrad.aot_function(logged, nop)(log, x)
    assert words in str(refused.value)
    assert torch.equal(log, plain(2, 3))
    assert log._version == 0
    assert torch.equal(x, before)
    assert x.is_inference() or x._version == version


def through_exp(x, b):
    y = x.exp()
    y.add_(1)
    return y


def through_a_factor(x, b):
    y = x * b
    b.add_(1)
    return y


def through_a_view_of_it(x, b):
    y = x * b
    b.view(-1)[:1].zero_()
    return y


def through_its_base(x, b):
    row = b[0]
    y = x * row
    b.zero_()
    return y


def through_a_detached_alias(x, b):
    y = x * b
    b.detach().add_(1)
    return y


def under_no_grad(x, b):
    y = x * b
    with torch.no_grad():
        b.mul_(2)
    return y


def by_foreach(x, b):
    y = x * b
    torch._foreach_mul_([b], 2.0)
    return y


def by_a_change_of_shape(x, b):
    y = x * b
    b.unsqueeze_(0)
    return y


def a_leaf_under_no_grad(x, b):
    y = x * x
    with torch.no_grad():
        x.mul_(2)
    return y


SAVED = [through_exp, through_a_factor, through_a_view_of_it, through_its_base, through_a_detached_alias]
SAVED += [under_no_grad, by_foreach, by_a_change_of_shape, a_leaf_under_no_grad]


@pytest.mark.parametrize("program", SAVED, ids=lambda p: p.__name__)
def test_a_saved_tensor_that_was_written(program):
    """M-9: eager says so when backward is called, and the forward has happened."""
    check_core(program, leaf(2, 2), plain(2, 2))
    x, b = leaf(2, 2), plain(2, 2)
    y = foregrad.aot_function(program, nop)(x, b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert x.grad is None


def test_a_saved_tensor_that_was_written_where_eager_does_not_look():
    """M-9: `.data` has a version of its own, and the backward takes what is there then."""
    check_core(lambda x, b: ((y := x * b), b.data.mul_(3), y)[2], leaf(2), plain(2))
    check_core(lambda x, b: ((y := x * x), x.data.mul_(3), y)[2], leaf(2), plain(2))
    check_core(lambda x, b: ((y := x.exp()), y.data.mul_(3), y)[2], leaf(2), plain(2))


def test_a_write_after_the_call_to_what_was_saved():
    """M-9"""
    compiled = foregrad.aot_function(lambda x, b: (x * b, x + b), nop)
    x, b = leaf(2), plain(2)
    product, _ = compiled(x, b)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_program_for_plain_tensors_refuses_leaves_later():
    """M-7, F-2"""
    compiled = foregrad.aot_function(lambda x, b: (x.mul_(2), x + b)[1], nop)
    x = plain(2)
    assert compiled(x, plain(2)).tolist() == [3, 6]
    refused = leaf(2)
    with pytest.raises(RuntimeError, match=A_LEAF):
        compiled(refused, plain(2))
    assert refused.tolist() == [1, 2]
    with torch.no_grad():
        assert compiled(refused, plain(2)).tolist() == [3, 6]
    assert refused.tolist() == [2, 4]
    compiled(leaf(2) * 1, plain(2)).sum().backward()


ALLOWED = {
    "unbind of a plain tensor": (lambda x: x.unbind(0)[0].add_(1), lambda: plain(2, 2)),
    "unbind without grad": (torch.no_grad()(lambda x: x.unbind(0)[0].add_(1)), lambda: result(2, 2)),
    "tensor_split": (lambda x: x.tensor_split(2)[0].add_(1), lambda: result(4)),
    "unsafe_split": (lambda x: x.unsafe_split(2)[0].add_(1), lambda: result(4)),
    "a leaf without grad": (torch.no_grad()(lambda x: x.neg_()), lambda: leaf(2)),
    "a leaf through detach": (lambda x: x.detach().neg_(), lambda: leaf(2)),
    "an expanded size of one": (lambda x: x.expand(1, 2).add_(1), lambda: plain(2)),
    "a leaf into a plain tensor": (lambda x: torch.zeros(2).copy_(x), lambda: leaf(2)),
    "a view made without grad, then read": (lambda x: row_without_grad(x) * 2, lambda: result(2, 2)),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_close_to_it_and_allowed(case):
    """M-6, M-7"""
    program, make = ALLOWED[case]
    check_core(lambda x: program(x), make())


ALLOWED_LATER = {
    "the shape of a leaf without grad": (torch.no_grad()(lambda x: x.t_()), lambda: leaf(2, 3)),
    "detaching a result": (lambda x: x.detach_().mul_(2), lambda: result(2, 3)),
    "detaching a leaf": (lambda x: x.detach_().mul_(2), lambda: leaf(2, 3)),
}


@pytest.mark.parametrize("case", ALLOWED_LATER)
def test_what_eager_allows_is_refused_for_now(case):
    """M-6, M-7: and nothing was written, neither to it nor before it."""
    program, make = ALLOWED_LATER[case]
    log, x = plain(2), make()
    with pytest.raises(UnsupportedError, match=r"changes the shape of the leaf|detach(es|ed) .*in place"):
        foregrad.aot_function(lambda log, x: (log.add_(1), program(x))[1], nop)(log, x)
    assert (log.tolist(), log._version, x.tolist(), x._version) == ([1, 2], 0, plain(2, 3).tolist(), 0)
    assert (x.requires_grad, x.is_leaf) == (True, make().is_leaf)


def view_then_requires_grad(x):
    first = x.view(-1)
    x.requires_grad_()
    return first * 2


def test_requires_grad_after_a_view_of_a_view():
    """A view requires grad when its base begins to; the base of a view of a view is not the view."""
    check_core(view_then_requires_grad, plain(2, 2))
    with pytest.raises(UnsupportedError, match=r"requires_grad_\(\), at .*, of an input that is a view"):
        foregrad.aot_function(view_then_requires_grad, nop)(plain(3, 2)[1:])


class SavesItsResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        cosine = x.cos()
        ctx.save_for_backward(cosine)
        ctx.mark_non_differentiable(cosine)
        return x.sin(), cosine

    @staticmethod
    def backward(ctx, tangent, _):
        return tangent * ctx.saved_tensors[0]


def test_what_leads_to_no_input_and_fails_is_refused():
    """Its argument requires grad and has no tape: a view taken under no_grad."""

    def program(x):
        sine, cosine = SavesItsResult.apply(row_without_grad(x))
        cosine.fill_(0.5)
        return sine, x * 2

    with pytest.raises(UnsupportedError, match=r"leads to no input, and its backward fails.*modified by an inplace"):
        foregrad.aot_function(program, nop)(result(2, 2))


def requires_grad_taken_back(x):
    made = x.detach().requires_grad_()
    made.requires_grad_(False)
    return made


def resized_then_written(x, z):
    x.resize_(2)
    x.mul_(z)


def test_flags_that_change_twice():
    """M-7"""
    check_core(requires_grad_taken_back, plain(2))
    check_core(lambda x: x.detach().requires_grad_().detach_(), plain(2))


def test_a_differentiable_write_after_a_resize():
    """M-3"""
    with pytest.raises(UnsupportedError, match="cannot be differentiated yet"):
        foregrad.aot_function(resized_then_written, nop)(plain(3), leaf(2))


def test_a_view_of_a_view_that_was_taken_before_its_base_requires_grad():
    """A-1: autograd follows the second view, and not the first."""

    def program(x):
        early = x.view(-1)
        x.requires_grad_()
        return early.split(3)[0]

    with pytest.raises(UnsupportedError, match="taken before the program makes it require grad"):
        foregrad.aot_function(program, nop)(plain(2, 4))


@torch.library.custom_op("foregrad_tests::doubled_without_a_derivative", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_input_that_no_result_depends_on_gets_no_error_of_another():
    """J-5: eager does not go to what cannot be differentiated, unless all gradients are asked for."""

    def program(x, unused):
        return doubled(x.detach().clone().requires_grad_())

    def run(call):
        x, unused = leaf(3), leaf(3)
        y = call(x, unused).sum()
        found = torch.autograd.grad(y, [x, unused], allow_unused=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            y.backward()
        return found

    assert run(foregrad.aot_function(program, nop)) == run(program) == (None, None)


UNREAD = {
    "a factorization": (lambda x: (torch.linalg.cholesky(x), x * 2)[1], torch.full((2, 2), -1.0)),
    "an inverse": (lambda x: (torch.linalg.inv(x), x * 2)[1], torch.zeros(2, 2)),
    "an index": (lambda x, i: (x[i], x * 2)[1], plain(3), torch.tensor([7])),
    "a gather": (lambda x, i: (x.gather(0, i), x * 2)[1], plain(3), torch.tensor([7])),
    "a gather that is overwritten": (lambda x, i: (x.gather(0, i).zero_(), x * 2)[1], plain(3), torch.tensor([7])),
    "an embedding": (lambda x, i: (F.embedding(i, x), x * 2)[1], plain(3, 2), torch.tensor([7])),
    "a loss": (lambda x, i: (F.nll_loss(x, i), x * 2)[1], plain(1, 2), torch.tensor([7])),
    "classes": (lambda x, i: (F.one_hot(i, 3), x * 2)[1], plain(3), torch.tensor([7])),
    "a quotient": (lambda x, i: (i // (i - i), x * 2)[1], plain(3), torch.tensor([7])),
    "a power": (lambda i: (i.pow(-1), i * 2)[1], torch.tensor([7])),
    "a write": (lambda x, i: (x.clone().index_add_(0, i, x), x * 2)[1], plain(1), torch.tensor([7])),
    "a mode of nothing": (lambda x: (x.mode(), x * 2)[1], torch.zeros(0)),
    "a sort of nothing complex": (lambda x: (x.sort(), x * 2)[1], torch.zeros(0, dtype=torch.complex64)),
    "a pick from a scalar": (lambda x, i: x.sum().index_select(0, i).unsqueeze(9), plain(3), torch.tensor([0, 0])),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_eager_refuses_is_refused_although_nobody_reads_it(name):
    """G-1: dead code is dropped only if it can refuse nothing."""
    program, *args = UNREAD[name]
    with pytest.raises((RuntimeError, IndexError, TypeError)) as expected:
        program(*args)
    compiled = foregrad.aot_function(program, nop)
    for _ in range(2):
        with pytest.raises(type(expected.value)) as got:
            compiled(*args)
        assert str(got.value) == str(expected.value)


def test_classes_in_range_are_encoded():
    check_core(lambda i: F.one_hot(i, 8), torch.tensor([7, 0]))


def test_a_view_of_a_view_that_was_taken_before_the_root_of_both_requires_grad():
    """A-1: the same where the root is another argument."""

    def program(x, y):
        early = torch.ops.aten.alias(y)
        x.requires_grad_()
        return early

    root = plain(3)
    with pytest.raises(UnsupportedError, match="taken before the program makes it require grad"):
        foregrad.aot_function(program, nop)(root, root[::2])


def test_a_view_of_what_is_then_detached_in_place():
    """A-1: autograd lets its caller write to the memory of both, and follows only the view."""

    def program(x):
        y = x.clone()
        view = y[..., 0]
        y.detach_()
        return y, view

    with pytest.raises(UnsupportedError, match="detached in place after the view was taken"):
        foregrad.aot_function(program, nop)(leaf(3))


def through_all_leaves(x, leaf):
    (x * leaf).sum().backward()


def through_one_leaf(x, leaf):
    (x * leaf).sum().backward(inputs=[leaf])


def a_gradient_for_what_it_was_made_of(x, leaf):
    return torch.autograd.grad((x * x).sum(), leaf, allow_unused=True)


@pytest.mark.parametrize("program", [through_all_leaves, through_one_leaf, a_gradient_for_what_it_was_made_of])
def test_a_backward_that_goes_on_to_what_was_computed_before_the_call(program):
    """In eager it adds to the gradients of the caller's leaves, which the call does not even see."""
    leaf = result(3).detach().requires_grad_()
    x = leaf * 2
    with pytest.raises(UnsupportedError, match="goes on to what was computed before the call"):
        foregrad.aot_function(program, nop)(x, leaf)
    assert leaf.grad is None
    program(x, leaf)


@pytest.mark.parametrize(
    "program",
    [
        lambda x, leaf: torch.autograd.grad((x * x).sum(), x, create_graph=True),
        lambda x, leaf: leaf.square().sum().backward(),
        lambda x, leaf: (x.detach() * leaf).sum().backward(),
    ],
)
def test_a_backward_that_ends_where_the_call_begins(program):
    found = []
    for call in (program, foregrad.aot_function(program, nop)):
        leaf = result(3).detach().requires_grad_()
        found.append((call(leaf * 2, leaf), leaf.grad))
    torch.testing.assert_close(*found)
