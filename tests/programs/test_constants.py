"""Tensors that a program makes from Python values: every call gets its own."""

import array

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import foregrad
from checking import check_core
from foregrad.errors import UnsupportedError
from helpers import grab, leaf, nop, plain


def made():
    return torch.tensor([1.0, 2.0])


def with_its_views(x):
    t = made()
    return t, t.view(2, 1), t[0], x * t


def written(x):
    t = made()
    t[0].add_(1)
    return t, t.detach()


def beside_a_result(x):
    return x * 2, made()


def a_leaf(x):
    return torch.tensor([1.0, 2.0], requires_grad=True), x * 2


def from_arrays(x):
    return torch.from_numpy(np.arange(2.0)), torch.as_tensor(np.arange(4.0)[::2]), torch.asarray([1]), x * 2


def of_other_kinds(x):
    return torch.tensor(3.0), torch.tensor([1j]).conj(), x.new_tensor([True]), torch.tensor([[1], [2]]).t(), x + 1


def pieces(x):
    return [*made().unbind(), *made().split(1), made().expand(2, 2), made().contiguous().to(torch.float32), x]


def a_gradient(x):
    x.grad = made()
    return x.detach() + 1, x.grad


PROGRAMS = [with_its_views, written, beside_a_result, a_leaf, from_arrays, of_other_kinds, pieces]


def results_of_three_calls(fn, training):
    """What each call returned, where the caller writes to all of it before the next."""
    shown = []
    for _ in range(3):
        x = leaf(2)
        with torch.set_grad_enabled(training):
            results = pytree.tree_leaves(fn(x))
        shown += [t.detach().resolve_conj().tolist() for t in results] + [x.grad and x.grad.tolist()]
        shown += [(t.stride(), t.requires_grad, t.is_leaf) for t in results]
        for t in (*results, *([] if x.grad is None else [x.grad])):
            if t.data_ptr() != x.data_ptr():
                t.data.zero_()
    return shown


@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=["static", "dynamic"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_call_gets_its_own(program, training, options):
    compiled = foregrad.aot_function(program, nop, **options)
    assert results_of_three_calls(compiled, training) == results_of_three_calls(program, training)


class ConstantGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(torch.tensor([7.0, 8.0]))
        return x + y

    @staticmethod
    def backward(ctx, g):
        return torch.tensor([[5.0, 6.0]]).view(2), ctx.saved_tensors[0]


@pytest.mark.parametrize("partition", [foregrad.default_partition, foregrad.min_cut_rematerialization_partition])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("count", [1, 2])  # a backward of some of the results is a graph of its own
def test_every_backward_gets_its_own(partition, create_graph, count):
    compiled = foregrad.aot_function(lambda x, y: (ConstantGradient.apply(x, y), y * 2), nop, partition_fn=partition)
    for _ in range(3):
        x, y = leaf(2), leaf(2)
        results = [result.sum() for result in compiled(x, y)[:count]]
        of_x, of_y = torch.autograd.grad(results, (x, y), create_graph=create_graph)
        assert of_x.tolist() == [5.0, 6.0]
        assert of_y.tolist() == ([7.0, 8.0] if count == 1 else [9.0, 10.0])
        of_x.data.zero_()
        of_y.data.zero_()


def test_a_write_to_a_constant_that_backward_needs_is_noticed():
    def program(x):
        t = made()
        return x * t, t

    for fn in (program, foregrad.aot_function(program, nop)):
        y, t = fn(leaf(2))
        t.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_constant_that_nobody_sees_is_not_copied():
    compiled, graphs = grab(lambda x: x * made() + torch.tensor(3.0))
    compiled(leaf(2)).sum().backward()
    assert graphs.ops("forward") == ["mul.Tensor", "add.Tensor"]
    assert graphs.ops("backward") == ["mul.Tensor"]


def test_a_constant_that_is_only_copied_into_an_input_is_not_copied_before():
    compiled, graphs = grab(lambda x: x.copy_(made()) * 2)
    with torch.no_grad():
        compiled(leaf(2).detach())
    assert "lift_fresh_copy.default" not in graphs.ops("inference")


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = None
        self.register_buffer("state", torch.zeros(2))

    def forward(self, x):
        self.last = made()
        self.state = made() + 0
        return x * 2, self.last


def test_attributes_are_fresh():
    module = Keeps()
    compiled = foregrad.aot_module(module, nop)
    for _ in range(3):
        compiled(leaf(2))
        assert module.last.tolist() == module.state.tolist() == [1.0, 2.0]
        module.last.zero_()
        module.state.zero_()


def test_gradients_that_the_program_assigns_are_fresh():
    compiled = foregrad.aot_function(a_gradient, nop)
    for _ in range(3):
        x = leaf(2)
        assert compiled(x)[1] is x.grad
        assert x.grad.tolist() == [1.0, 2.0]
        x.grad.zero_()


class Flat(nn.Module):
    def forward(self, x):
        return x * 2, made()


@pytest.mark.parametrize("training", [True, False])
def test_flat_entries_and_exported_programs(training):
    x = leaf(2) if training else leaf(2).detach()
    flat = foregrad.aot_module_simplified(Flat(), [x], nop)
    exported = foregrad.aot_export_module(Flat(), [x.detach()], trace_joint=False)[0]
    for fn in (lambda: flat(x), lambda: exported(x.detach())):
        for _ in range(3):
            constant = fn()[1]
            assert constant.tolist() == [1.0, 2.0]
            constant.zero_()


def from_an_array(use):
    def program(x):
        array = np.ones(3, dtype=np.float32)
        return use(x, array)

    return program


def read_then_written(x, array):
    y = x + torch.from_numpy(array)
    array[0] = 5
    return y, x + torch.from_numpy(array)


def read_written_read(x, array):
    t = torch.as_tensor(array)
    array *= 2
    return x + t


def written_as_a_tensor(x, array):
    torch.from_numpy(array).add_(1)
    return x + torch.tensor(array)


def copied_then_written(x, array):
    y = x + torch.tensor(array)
    array *= 2
    return y, x + torch.tensor(array)


@pytest.mark.parametrize("use", [read_then_written, read_written_read, written_as_a_tensor])
def test_an_array_that_shares_its_memory_with_a_tensor_may_not_be_written(use):
    """Python writes to it behind torch's back."""
    with pytest.raises(UnsupportedError, match="array, or"):
        foregrad.aot_function(from_an_array(use), nop)(plain(3))


def over_numpy(memory):
    return memory, torch.from_numpy(memory)


def over_buffer(memory):
    return memory, torch.frombuffer(memory, dtype=torch.float32)


@pytest.mark.parametrize(
    ("array", "tensor"),
    [
        over_numpy(np.ones(3, dtype=np.float32)),
        over_numpy(np.ones(6, dtype=np.float32)[::2]),
        over_buffer(array.array("f", [1, 1, 1])),
        (memory := bytearray(12), torch.frombuffer(memory, dtype=torch.float32)),
        (memoryview(memory := bytearray(12)).cast("f"), torch.frombuffer(memory, dtype=torch.float32)),
    ],
    ids=["numpy", "view of numpy", "array", "bytes", "view of bytes"],
)
def test_a_tensor_whose_array_the_program_can_reach_may_not_be_written(array, tensor):
    """What it reads of the array afterwards would not show the write."""

    def program(x):
        tensor.add_(x)
        return x * float(array[0])

    with pytest.raises(UnsupportedError, match=r"writes to tensor .*, which shares its memory with array"):
        foregrad.aot_function(program, nop)(plain(3))
    check_core(lambda x: (x * float(array[0]), tensor + 1), leaf(3))


def test_an_array_that_is_copied_may_be_written():
    check_core(from_an_array(copied_then_written), leaf(3))
    check_core(from_an_array(lambda x, array: x * torch.from_numpy(array)), leaf(3))


def added_by_foreach(x, constant, other):
    torch._foreach_add_([constant, other], 1.0)


def by_another_constant(x, constant, other):
    torch._foreach_add_([other, constant], torch.tensor(1.0), alpha=2.0)


def through_a_view(x, constant, other):
    torch._foreach_sub_([constant.view(1), other.view(1)], [other.view(1), other.view(1)])


@pytest.mark.parametrize("write", [added_by_foreach, by_another_constant, through_a_view])
def test_a_constant_that_is_written_in_a_list_with_others_is_read_as_it_is(write):
    def program(x):
        constant, other = torch.tensor(0.0), x.detach().sum()
        write(x, constant, other)
        return x * constant.item()

    compiled = foregrad.aot_function(program, nop)
    for x in (plain(2), plain(2) + 1):
        assert torch.equal(compiled(x), program(x))
