"""The recorder: every operator is written down once, and recording leaves no trace."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foregrad
from foregrad.errors import UnsupportedError
from helpers import grab, leaf, nop, plain


def recorded(fn, *args):
    """The operators of a recording, forward and backward, before any pass."""
    return foregrad.capture(fn, *args).joint.recording.session.steps


def test_views_and_writes_are_written_down_as_they_are():
    """F-12"""

    def program(x):
        y = x * 2
        y[0].add_(1)
        return y

    names = [step.op.__name__ for step in recorded(program, plain(3))]
    assert names == ["mul.Tensor", "select.int", "add_.Tensor"]


def test_the_backward_is_recorded_behind_the_forward():
    """J-1"""
    steps = recorded(lambda x: x.sin() * 3, leaf(3))
    assert [step.backward for step in steps] == sorted(step.backward for step in steps)
    assert {step.op.__name__ for step in steps if step.backward} == {"mul.Tensor", "cos.default"}


def test_grad_mode_is_noted_at_each_write():
    """V-1"""

    def program(x, y):
        x.add_(1)
        with torch.no_grad():
            y.add_(1)
        return x + y

    writes = [step for step in recorded(program, plain(2), plain(2)) if step.op.__name__ == "add_.Tensor"]
    assert [step.grad_enabled for step in writes] == [True, False]


def test_recording_draws_no_random_numbers():
    """F-12, R-4"""
    state = torch.get_rng_state()
    own = torch.Generator().manual_seed(1)
    before = own.get_state()
    foregrad.capture(lambda x, g: F.dropout(x, 0.5) + torch.rand(3, generator=g), leaf(3), own)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(own.get_state(), before)


def test_two_draws_are_two_and_a_replayed_one_is_one():
    """R-4: checkpointing restores the generator and draws again."""

    def program(x):
        y = torch.utils.checkpoint.checkpoint(lambda t: F.dropout(t.sin(), 0.5), x, use_reentrant=False)
        return y + torch.rand(64) * torch.rand(64)

    compiled, graphs = grab(program)
    x, y = torch.linspace(0, 1, 64, requires_grad=True), torch.linspace(0, 1, 64, requires_grad=True)
    torch.manual_seed(3)
    compiled(x).sum().backward()
    torch.manual_seed(3)
    program(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    draws = [name for name in graphs.ops("forward") + graphs.ops("backward") if "bernoulli" in name or "rand" in name]
    assert draws == ["bernoulli_with_state.p", "rand.default", "rand.default", "bernoulli_from_state.p"]


def test_a_random_operator_whose_result_nobody_reads_still_draws():
    """P-4 (Z)"""

    def program(x):
        torch.rand(3)
        return x * torch.rand(2)

    torch.manual_seed(1)
    ours = grab(program)[0](leaf(2))
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(ours, program(leaf(2))) and torch.equal(after, torch.rand(1))


def test_a_failing_program_leaves_the_ambient_state_alone():
    """F-12"""

    def program(x):
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.rand(3)
        raise ValueError("on purpose")

    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="on purpose"):
        grab(program)[0](leaf(2))
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), state)


def test_composite_operators_are_recorded_as_their_parts_in_inference_mode_too():
    """V-8"""
    compiled, graphs = grab(lambda x, w, b: F.linear(x, w, b).reshape(-1))
    with torch.inference_mode():
        compiled(plain(2, 3), plain(4, 3), plain(4))
    assert "linear.default" not in graphs.ops("inference") and "reshape.default" not in graphs.ops("inference")


def test_hooks_and_custom_functions_are_recorded_through():
    """A-8, Z"""

    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g.clamp(max=0.5)

    def program(x):
        y = Clip.apply(x) * 2
        y.register_hook(lambda g: g * 0.1)
        return y

    compiled, graphs = grab(program)
    x, y = leaf(2), leaf(2)
    compiled(x).backward(torch.tensor([1.0, 10.0]))
    program(y).backward(torch.tensor([1.0, 10.0]))
    assert torch.equal(x.grad, y.grad) and "clamp.default" in graphs.ops("backward")


def test_a_higher_order_operator_is_refused_with_its_line():
    """Not yet: E-1"""
    with pytest.raises(UnsupportedError, match=r"higher-order operator .*test_recorder.py:\d+.*cannot be compiled yet"):
        grab(lambda x: torch.ops.higher_order.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)))[0](plain(2))


def test_threads_compile_each_their_own_facts():
    """F-12"""
    from concurrent.futures import ThreadPoolExecutor

    compiled = foregrad.aot_function(lambda x: (x.sin() * x).sum(), nop)

    inputs = [leaf(n) for n in (2, 3, 2, 3, 4, 2, 3, 4)]
    with ThreadPoolExecutor(4) as pool:
        losses = list(pool.map(compiled, inputs))
    assert len(compiled.specializations) == 3
    for x, loss in zip(inputs, losses, strict=True):
        loss.backward()
        assert torch.allclose(x.grad, x.detach().cos() * x.detach() + x.detach().sin())


def test_a_module_is_never_left_with_abstract_parameters():
    """F-12"""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = dict([*module.named_parameters(), *module.named_buffers()])

    def explode(m, args, out):
        raise ValueError("on purpose")

    module[1].register_forward_hook(explode)
    with pytest.raises(ValueError, match="on purpose"):
        foregrad.aot_module(module, nop)(plain(3, 2))
    after = dict([*module.named_parameters(), *module.named_buffers()])
    assert all(
        after[name] is tensor and type(tensor) in (torch.Tensor, nn.Parameter) for name, tensor in before.items()
    )
    assert module[1].num_batches_tracked.item() == 0


def test_views_of_numbers():
    """Derivatives take the conjugate of a number, from torch 2.15 on: a tensor is made of it."""
    conjugate = torch.ops.aten._conj
    x = torch.randn(3, dtype=torch.complex64)
    foregrad.check(lambda x: (x * conjugate(2j), x * conjugate(3j).real), x.requires_grad_())
    foregrad.check(lambda x: torch.view_as_real(x * 2j).sin(), x)
