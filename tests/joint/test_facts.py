"""A-1: what each output is; the first case that fits wins."""

import pytest
import torch

import foregrad
from helpers import grab, leaf, metadata_of, plain


def kinds(fn, *args):
    return [info.output_type.name for info in metadata_of(fn, *args).output_info]


def views_of_everything(x):
    t = x * 2
    return x, x.t(), t.t(), t.view(-1), 3


def test_the_kinds_of_outputs():
    """A-1"""
    assert kinds(views_of_everything, leaf(2, 2)) == [
        "is_input",
        "alias_of_input",
        "alias_of_intermediate_save_as_output",
        "alias_of_intermediate",
        "non_alias",
    ]


def test_a_base_that_is_an_output_itself():
    """A-1, A-5"""

    def program(x):
        t = x * 2
        return t.view(-1), t

    assert kinds(program, leaf(2)) == ["alias_of_intermediate_base_is_user_output", "non_alias"]


def test_a_view_of_an_intermediate_that_nobody_else_sees():
    """A-6"""
    compiled, graphs = grab(lambda x: (x * 2).view(2, 2))
    y = compiled(leaf(4))
    assert y._base is None and len(graphs.outputs("forward")) == 1 and y.requires_grad
    y.mul_(2)
    assert y.tolist() == [[4, 8], [12, 16]]
    assert kinds(lambda x: (x * 2).view(2, 2), leaf(4)) == ["unsafe_view_alias"]


def test_pieces_of_an_input_and_of_an_intermediate():
    """A-7"""

    def with_base(x):
        t = x * 2
        return (t, *t.unbind(0))

    assert kinds(lambda x: x.unbind(0), leaf(2, 2)) == ["non_alias"] * 2
    assert kinds(with_base, leaf(2, 2)) == ["non_alias", "unsafe_view_alias", "unsafe_view_alias"]


def test_a_view_of_a_custom_function():
    """A-8"""

    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view(-1)

        @staticmethod
        def backward(ctx, g):
            return (g * 3).view(2, 2)

    assert kinds(Triple.apply, leaf(2, 2)) == ["custom_function_view"]
    x = leaf(2, 2)
    grab(Triple.apply)[0](x).sum().backward()
    assert x.grad.unique().tolist() == [3]


def test_an_input_that_is_returned_is_the_caller_s_own_object():
    """A-2, M-12"""
    x = leaf(2)
    assert grab(lambda x: x)[0](x) is x
    y = plain(2)
    assert grab(lambda x, w: (x.add_(1), w * 2))[0](y, leaf(2))[0] is y and y.tolist() == [2, 3]


def test_a_view_of_an_input_is_a_live_view():
    """A-3"""
    x = plain(2, 3)
    y = grab(lambda x: x.view(-1))[0](x)
    y.add_(1)
    assert y._base is x and x[0].tolist() == [2, 3, 4]


def test_a_view_of_an_input_has_no_tangent():
    """A-3"""
    compiled, graphs = grab(lambda x: (x.t(), x * 2))
    x = leaf(2, 3)
    y, z = compiled(x)
    z.sum().backward()
    assert y._base is x and "TBackward" in type(y.grad_fn).__name__ and graphs.inputs("backward") == ["tangents_1"]


def test_views_of_one_intermediate_share_memory_and_autograd_knows_it():
    """A-4"""

    def program(x):
        t = x - 1
        return t[:2], t.reshape(2, 2).t()

    compiled, graphs = grab(program)
    x = leaf(4)
    a, b = compiled(x)
    assert len(graphs.outputs("forward")) == 3 and a._base is b._base
    a.mul_(10)
    assert b[:, 0].tolist() == [0, 10]
    b.sum().backward()
    assert x.grad.tolist() == [10, 10, 1, 1]


def test_a_detached_output_beside_the_output_itself():
    """A-5"""

    def program(x):
        t = x * 2
        return t, t.detach()

    compiled, graphs = grab(program)
    y, d = compiled(leaf(4))
    assert d.data_ptr() == y.data_ptr() and not d.requires_grad and len(graphs.outputs("forward")) == 2


@pytest.mark.parametrize("replay", [True, False])
def test_how_a_view_is_rebuilt(replay):
    """A-10"""
    with foregrad.config.patch(view_replay_for_aliased_outputs=replay):
        y = grab(lambda x: x.t()[1:3].unsqueeze(0))[0](leaf(2, 4))
    assert type(y.grad_fn).__name__ == ("UnsqueezeBackward0" if replay else "AsStridedBackward0")
    assert y.tolist() == [[[2, 6], [3, 7]]]


def test_which_base_is_the_one_the_view_was_taken_from():
    """A-11"""
    base = torch.arange(4.0)
    x, y = base[:], base.view(2, 2)
    meta = metadata_of(lambda x, y: (y.view(-1), x.view(2, 2)), x, y)
    assert [info.base_idx for info in meta.output_info] == [1, 0]


def test_outputs_that_require_no_grad_take_no_tangent():
    """A-13"""
    compiled, graphs = grab(lambda x, k: (x * 2, k + 1, x.view(-1)))
    a, b, c = compiled(leaf(2), plain(2))
    assert (a.requires_grad, b.requires_grad, c.requires_grad) == (True, False, True)
    a.sum().backward()
    assert [name for name in graphs.inputs("backward") if "tangents" in name] == ["tangents_1"]


def test_dynamic_sizes_of_outputs_are_marked():
    """A-12"""
    meta = metadata_of(lambda x: x.view(x.shape[0] // 2, 2), leaf(4), dynamic=True)
    assert meta.dynamic_outputs and meta.output_info[0].dynamic_dims == {0}
    assert not metadata_of(lambda x: x * 2, leaf(4)).dynamic_outputs


def test_which_values_get_tangents_and_in_which_order():
    """J-2: written inputs, then outputs, then bases."""

    def program(x):
        x.neg_()
        t = x.sin()
        return t.view(3, 1), t.view(-1), x.sum()

    captured = foregrad.capture(program, leaf(3) * 1)
    assert [str(slot) for slot in captured.joint.signature.tangents] == [
        "tangent of updated args[0]",
        "tangent of output 2",
        "tangent of base 0",
    ]
    assert [tuple(t.shape) for t in captured.joint.tangent_values] == [(3,), (), (3,)]
