"""Values that no input determines, or that a guard can work out, can be read while a program is recorded."""

import pytest
import torch

import foregrad
from checking import check_core
from foregrad.errors import DataDependentError
from helpers import leaf, nop, plain


def positions_without_gaps(x):
    positions = torch.arange(x.shape[1])[None]
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return x * 2 if ((steps != 1).cumsum(-1)[:, -1] == 0).all() else x * 3


CONSTANT = {
    "positions": positions_without_gaps,
    "ones": lambda x: x * 2 if torch.ones(3).all() else x * 3,
    "like an input": lambda x: x * 2 if torch.ones_like(x).all() and not x.new_full((2,), 0).any() else x * 3,
    "item": lambda x: x * torch.arange(5).sum().item(),
    "tolist": lambda x: x * sum(torch.arange(5).tolist()),
    "rates of layers": lambda x: x * [rate.item() for rate in torch.linspace(0, 0.3, 5)][2],
    "int": lambda x: x[: int(torch.full((1,), 2))],
    "index": lambda x: sum(x[i] for i in range(torch.tensor(1) + 1)),
    "in": lambda x: x * 2 if 3 in torch.arange(5) else x * 3,
    "equal": lambda x: x * 2 if torch.equal(torch.arange(5), torch.arange(0, 5)) else x * 3,
    "text": lambda x: x * len(str(torch.arange(3) + 1)),
    "one of several": lambda x: x * torch.arange(6).split(2)[1].sum().item(),
    "of a number and a parameter's shape": lambda x: x * torch.zeros(x.shape[0]).numel() * torch.eye(2).sum().item(),
    "that requires grad": lambda x: x * torch.arange(3.0).requires_grad_().sum().item(),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_what_is_made_of_numbers_alone_is_read(name):
    check_core(CONSTANT[name], leaf(2, 3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_in_every_mode(mode):
    def program(x):
        return x * (torch.ones(2, 2) @ torch.ones(2, 2)).sum().item()

    with mode():
        assert torch.equal(foregrad.aot_function(program, nop)(plain(2)), program(plain(2)))


def test_it_is_the_same_at_later_calls():
    compiled = foregrad.aot_function(positions_without_gaps, nop)
    for x in (plain(2, 3), plain(2, 3) * 2, plain(4, 5)):
        torch.testing.assert_close(compiled(x), x * 2)
    assert len(compiled.specializations) == 2


def written(x):
    mask = torch.ones(3)
    mask[0] = 0
    return x * 2 if mask.all() else x * 3


def written_behind_autograds_back(x):
    mask = torch.ones(3)
    mask.data.zero_()
    return x * 2 if mask.all() else x * 3


def written_through_a_view_with_an_input(x):
    mask = torch.ones(2, 3)
    mask.view(-1).copy_(x.detach().view(-1))
    return x * 2 if mask.all() else x * 3


WEIGHT = torch.ones(3)

READ = {
    "of many elements": lambda x: x * 2 if torch.ones(1 << 11, 1 << 10).all() else x,
    "written": written,
    "written behind autograd's back": written_behind_autograds_back,
    "written through a view, with an input": written_through_a_view_with_an_input,
    "random": lambda x: x * 2 if (torch.rand(3) < 2).all() else x,
    "memory as it is found": lambda x: x * 2 if (torch.empty(3) == 0).all() else x,
    "an input": lambda x: x * 2 if (x > 0).all() else x,
    "a global": lambda x: x * 2 if WEIGHT.all() else x,
    "partly an input": lambda x: x * 2 if torch.where(torch.ones(2, 3).bool(), x, 0.0).all() else x,
    "a keyword that is an input": lambda x: x * 2 if torch.clamp(torch.ones(2, 3), max=x).all() else x,
    "an array": lambda x: x * float(torch.arange(3).numpy().sum()),
}


@pytest.mark.usefixtures("reads_refused")
@pytest.mark.parametrize("name", READ)
def test_what_may_be_another_value_at_the_next_call_is_not_read(name):
    with pytest.raises(DataDependentError):
        foregrad.aot_function(READ[name], nop)(leaf(2, 3))


# --------------------------------------------------------------------------- what whole numbers and masks determine
def masked(x, mask):
    return x * 2 if mask.all() else x.masked_fill(~mask.bool(), 0.0) * 3


@pytest.mark.parametrize("make", [lambda mask: mask, lambda mask: mask.bool()], ids=["ints", "bools"])
def test_a_mask_that_is_read_is_compared_at_each_call(make):
    """Two branches, two programs, whichever comes first; and no compiler is called after the second."""
    program = foregrad.aot_function(masked, nop)
    for mask in ([1, 1, 1], [1, 0, 1], [1, 1, 1], [0, 0, 1], [1, 1, 1]):
        given, x = make(torch.tensor(mask)), leaf(3)
        assert torch.equal(program(x, given), masked(x, given))
    assert len(program.specializations) == 2
    [again] = program.recompiles
    assert "as to what is read of it" in str(again) and "was True, is False" in str(again)


def test_a_number_that_is_read_is_compared_at_each_call():
    def longest(x, lengths):
        return x[:, : int(lengths.max())] * int(lengths[0])

    program = foregrad.aot_function(longest, nop)
    for lengths in ([2, 3], [1, 3], [2, 3], [3, 1]):
        x = leaf(2, 4)
        assert torch.equal(program(x, torch.tensor(lengths)), longest(x, torch.tensor(lengths)))
    assert len(program.specializations) == 3


def test_a_literal_beside_an_input():
    def program(x, tokens):
        return x * 2 if 3 in tokens[:, [-1, 0]] else x * 3

    compiled = foregrad.aot_function(program, nop)
    for tokens in ([[1, 3, 2]], [[3, 1, 2]], [[1, 2, 3]], [[1, 1, 1]]):
        assert torch.equal(compiled(plain(2), torch.tensor(tokens)), program(plain(2), torch.tensor(tokens)))
    assert len(compiled.specializations) == 2


def test_a_mask_that_the_caller_writes_to_is_seen():
    program, mask, x = foregrad.aot_function(masked, nop), torch.ones(3, dtype=torch.long), leaf(3)
    assert torch.equal(program(x, mask), x * 2)
    version = mask._version
    mask[0] = 0
    assert torch.equal(program(x, mask), masked(x, mask))
    assert mask._version == version + 1  # a guard counts no versions


def test_a_buffer_of_whole_numbers_can_be_read():
    class Positions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            return x * 2 if self.steps == 0 else x * 3

    module = Positions()
    compiled = foregrad.aot_module(module, nop)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    module.steps += 1
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))


def written_before(x, mask):
    mask.add_(1)
    return x * 2 if mask.all() else x


def written_through_an_alias(x, mask):
    mask.view(-1)[0] = 0
    return x * 2 if mask.all() else x


UNCHECKED = {
    "written before": written_before,
    "written through a view": written_through_an_alias,
    "floating point": lambda x, mask: x * 2 if (mask.float() * x).sum() > 0 else x,
    "random": lambda x, mask: x * 2 if (torch.rand(3) < mask).all() else x,
    "text": lambda x, mask: (str(mask), x)[1],
}


@pytest.mark.usefixtures("reads_refused")
@pytest.mark.parametrize("name", UNCHECKED)
def test_what_a_guard_cannot_work_out_is_refused(name):
    mask = torch.ones(3, dtype=torch.long)
    with pytest.raises(DataDependentError):
        foregrad.aot_function(UNCHECKED[name], nop)(leaf(3), mask)
    assert torch.equal(mask, torch.ones(3, dtype=torch.long))


def test_two_masks_in_one_memory_of_which_one_is_written():
    """The first recording takes them for two, and reads what eager would not read."""

    def program(x, one, other):
        one.zero_()
        return x * 2 if other.all() else x * 3

    memory = torch.ones(3, dtype=torch.long)
    with foregrad.config.patch(reads="refused"), pytest.raises(DataDependentError):
        foregrad.aot_function(program, nop)(leaf(3), memory[:2], memory[1:])
    assert torch.equal(memory, torch.ones(3, dtype=torch.long))
    x = leaf(3)
    assert torch.equal(foregrad.aot_function(program, nop)(x, memory[:2], memory[1:]), x * 3)
    assert memory.tolist() == [0, 0, 1]


def test_a_front_end_that_guards_calls_itself_has_no_way_to_check():
    class Masked(torch.nn.Module):
        def forward(self, x, mask):
            return (masked(x, mask),)

    with pytest.raises(DataDependentError):
        foregrad.aot_module_simplified(Masked(), [plain(3), torch.ones(3, dtype=torch.long)], nop)
    with pytest.raises(DataDependentError):
        foregrad.aot_export_module(Masked(), [plain(3), torch.ones(3, dtype=torch.long)], trace_joint=False)


def test_a_backward_reads_what_the_forward_had():
    """A write in between is told by its version, as in eager."""

    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mask):
            ctx.save_for_backward(mask)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            (mask,) = ctx.saved_tensors
            return (gradient * 2 if (mask + 0).all() else gradient * 3), None

    compiled = foregrad.aot_function(Reading.apply, nop)
    for mask in torch.ones(3, dtype=torch.long), torch.zeros(3, dtype=torch.long):
        x, y = leaf(3), leaf(3)
        compiled(x, mask).sum().backward()
        Reading.apply(y, mask).sum().backward()
        assert torch.equal(x.grad, y.grad)
        result = compiled(leaf(3), mask).sum()
        mask.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()
    assert len(compiled.specializations) == 2


def test_a_read_of_a_gradient_is_refused():
    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2 if (gradient > 0).all() else gradient * 3

    with pytest.raises(DataDependentError, match="but from a gradient"):
        foregrad.aot_function(Reading.apply, nop)(leaf(3)).sum().backward()
