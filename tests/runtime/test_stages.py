"""What happens around the graphs: write-back, aliases, grad mode, assumptions, autocast."""

import pytest
import torch

import foregrad
from helpers import grab, leaf, nop, plain


def source_of(fn, *args):
    compiled = foregrad.aot_function(fn, nop)
    compiled(*args)
    return compiled.specializations[0].source


def test_a_write_to_an_input_reaches_the_caller():
    """M-1"""
    x = plain(3, 2).t()
    y = grab(lambda x: x.sub_(5).abs())[0](x)
    assert x.tolist() == [[-4, -2, 0], [-3, -1, 1]] and x.stride() == (1, 2) and y[0, 0] == 4


def test_writes_come_back_in_input_order_and_only_where_there_were_any():
    """M-1"""
    source = source_of(lambda a, b, c: (c.add_(1), a.mul_(2), b * 2)[2], plain(2), plain(2), plain(2))
    assert source.index("args_0.copy_") < source.index("args_2.copy_") and "args_1.copy_" not in source


def test_a_program_without_a_concern_has_no_line_for_it():
    """Stages that are absent add nothing."""
    source = source_of(lambda x: x * 2, plain(2))
    assert "copy_" not in source and "_version" not in source and "requires_grad_" not in source


def test_the_callers_tensor_continues_the_tape():
    """M-2"""
    compiled, graphs = grab(lambda x: (x.neg_(), x.exp())[1])
    x0 = leaf(2)
    x = x0 * 1
    compiled(x)
    x.sum().backward()
    assert x0.grad.tolist() == [-1, -1] and graphs.inputs("backward")[-2:] == ["tangents_1", "tangents_2"]


def test_a_leaf_written_outside_the_tape_stays_a_leaf():
    """M-6"""
    x = leaf(2)
    grab(lambda x: (x.detach().add_(4), x**2)[1])[0](x).sum().backward()
    assert x.is_leaf and x.tolist() == [5, 6] and x.grad.tolist() == [10, 12]


def test_a_visible_write_to_a_leaf_raises_eagers_error():
    """M-7 (Z)"""
    x = leaf(2)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        grab(lambda x: x.neg_())[0](x)
    assert x.tolist() == [1, 2]


@pytest.mark.parametrize("times", [1, 3])
def test_version_counters_advance_as_in_eager(times):
    """Z"""

    def program(x):
        for _ in range(times):
            x.add_(1)
        return x * 2

    ours, eager = plain(2), plain(2)
    grab(program)[0](ours)
    program(eager)
    assert ours._version == eager._version == times


def test_a_program_that_leaves_gradients_off_leaves_them_off_at_each_call():
    """J-12"""

    def program(x):
        y = x * 2
        torch.set_grad_enabled(False)
        return y, x * 3

    compiled, _ = grab(program)
    for _ in range(2):
        try:
            a, b = compiled(leaf(2))
            assert not torch.is_grad_enabled() and a.requires_grad and not b.requires_grad
        finally:
            torch.set_grad_enabled(True)


def test_a_program_that_switches_gradients_on_inside():
    """F-6, J-12"""

    def program(x):
        with torch.enable_grad():
            y = x * 3
        return y, x * 2

    compiled, _ = grab(program)
    x = leaf(2)
    with torch.no_grad():
        a, b = compiled(x)
        assert not torch.is_grad_enabled()
    assert a.requires_grad and not b.requires_grad
    a.sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_a_view_of_an_output_that_stands_later():
    """A-5"""

    def program(x):
        t = x * 2
        return t.view(2, 2), t

    v, t = grab(program)[0](leaf(4))
    assert v._base is t and v.data_ptr() == t.data_ptr()


def test_pieces_are_taken_by_one_split():
    """A-7"""
    source = source_of(lambda x: x.unbind(0), leaf(3, 2))
    assert source.count("unbind_int(") == 1


def test_an_output_that_is_there_twice_is_one_object():
    """F-3"""

    def program(x):
        y = x * 2
        return y, {"again": y}, x, x

    a, again, b, c = grab(program)[0](leaf(2))
    assert again["again"] is a and b is c


def test_a_view_of_a_result_can_be_written_to():
    """A-4, F-7: a view taken with gradients off could not."""
    for argument in (plain(4), leaf(4)):
        y = grab(lambda x: (x.detach() * 2).view(2, 2)[0])[0](argument)
        y.mul_(2)
        assert y.tolist() == [4, 8]


def test_a_program_may_return_what_it_was_given_beside_a_gradient():
    """A-2"""
    k, x = plain(2), leaf(2)
    same, y = grab(lambda k, x: (k, k * x))[0](k, x)
    y.sum().backward()
    assert same is k and x.grad.tolist() == [1, 2]


def test_symbolic_outputs_carry_a_mark_for_front_ends():
    """A-12"""
    y = grab(lambda x: x.view(x.shape[0] // 2, 2) * 2, dynamic=True)[0](plain(4))
    assert y._dynamo_weak_dynamic_indices == {0} or y._dynamo_propagated_dynamic_indices == {0}


def test_a_write_that_eager_does_not_count_is_never_counted():
    """M-7: not for a moment, in which a backward in another thread could find that its buffer was written."""
    module = torch.nn.BatchNorm1d(2)
    compiled, before = foregrad.aot_module(module, nop), module.running_mean._version
    compiled(leaf(3, 2)).sum().backward()
    source = compiled.specializations[0].source
    assert "buffer_running_mean.data.copy_(" in source and "set_version(buffer_running_mean" not in source
    assert module.running_mean._version == before
