"""The oracle itself: eager agrees with eager on every program, and every planted fault is found."""

import functools
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from foregrad.testing import CheckFailed, check
from testing.faults import FAULTS, leaf, plain

PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {}


def program(*arguments: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fn.__name__] = fn, lambda: tuple(make() for make in arguments)
        return fn

    return register


def eager(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


Point = namedtuple("Point", "x y")


@dataclass
class Box:
    inside: Tensor


@program(lambda: leaf(2, 3))
def views(x):
    return x.t(), x[0], x.view(-1), x.expand(2, 2, 3), x


@program(lambda: leaf(3, 3))
def nested_outputs(x):
    return {"a": [x * 2, None, 3], "b": Point(x + 1, math.nan), "c": OrderedDict(d=x.sum())}


@program(lambda: leaf(3))
def dataclass_output(x):
    return Box(x.sin())


@program(lambda: plain(3), lambda: leaf(3))
def mutation(x, y):
    x.add_(1)
    x.mul_(y)
    return x.sum()


@program(lambda: plain(2, 3))
def metadata_mutation(x):
    x.t_()
    return x * 2


@program(lambda: leaf(3))
def mutation_of_a_leaf(x):
    return x.add_(1)


@program(lambda: leaf(4) * 2)
def mutation_of_a_non_leaf(x):
    x.mul_(3)
    return x.cos()


@program(lambda: (leaf(4) * 2)[1:])
def mutation_of_a_view(x):
    x.mul_(3)
    return x.cos(), x


@program(lambda: (leaf(2, 3) * 2).unbind(0)[1])
def mutation_of_one_of_several_views(x):
    return x.mul_(3)


@program(lambda: plain(3).expand(2, 3))
def mutation_of_an_expanded_tensor(x):
    return x.add_(1)


@program(lambda: leaf(3).expand(2, 3))
def expanded_input(x):
    return x * 2


@program(lambda: plain(6).as_strided((3, 3), (1, 1)))
def overlapping_input(x):
    return x + 1


@program(lambda: leaf(64))
def dropout(x):
    return F.dropout(x, 0.5) * torch.rand(64)


@program(lambda: leaf(3), lambda: leaf(3))
def two_alike(x, y):
    return x * y, x + 1


@program(lambda: plain(3), lambda: plain(3))
def two_alike_mutated(x, y):
    x.add_(y)
    return x * y


def _shared() -> list[Tensor]:
    x = plain(6)
    return [x, x[1:4], x]


@program(_shared)
def shared_arguments(tensors):
    tensors[1].add_(10)
    return tensors[0] + tensors[2]


def _shared_with_grad() -> dict[str, Tensor]:
    x = leaf(6) * 1
    return {"whole": x, "part": x[2:]}


@program(_shared_with_grad)
def shared_arguments_with_grad(d):
    d["whole"].mul_(2)
    return d["part"].sin()


@program(lambda: torch.tensor([1 + 2j, 3 - 1j], requires_grad=True))
def complex_numbers(z):
    return z.conj(), z.real, z.conj().imag, (z * z).abs()


@program(lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(), lambda: torch.tensor([1 + 2j]).conj().imag)
def conj_and_neg_inputs(z, n):
    return z * 2, n + 1, z, n


@program(lambda: plain(4).bfloat16().requires_grad_())
def bfloat16(x):
    return x.exp().sum(), x.float()


@program(lambda: torch.tensor(2.0, requires_grad=True))
def zero_dim(x):
    return x * x


@program(lambda: torch.empty(0, 3, requires_grad=True))
def zero_size(x):
    return x * 2, x.sum()


@program(lambda: torch.arange(6), lambda: torch.tensor([True, False]))
def integers(i, b):
    return i + 1, i.float(), ~b, i.sum().item()


@program(lambda: leaf(3), lambda: 2, lambda: "mean")
def python_arguments(x, k, mode):
    return x * k if mode == "mean" else x


@program(lambda: leaf(3))
def no_tensor_output(x):
    return x.shape, "done", None, torch.float32


@program(lambda: plain(3))
def returns_nothing(x):
    x.zero_()


@program(lambda: leaf(3))
def raises(x):
    raise KeyError("missing")


@program(lambda: leaf(3))
def raises_in_backward(x):
    y = x.exp()
    z = y.sin()
    y.add_(1)
    return z


@program(lambda: leaf(2, 3).t(), lambda: plain(8)[2:].as_strided((2, 2), (3, 1)))
def strided_inputs(x, y):
    y.add_(1)
    return x * 2, y


@program(lambda: nn.Parameter(plain(3)))
def parameter_argument(p):
    return p * 2, p


@program(lambda: leaf(3))
def leaves_made_inside(x):
    return x.detach().requires_grad_(), x.detach()


@program(lambda: leaf(3), lambda: leaf(3), lambda: leaf(3))
def unused_input(x, y, z):
    return x.exp(), y.exp()


@program(lambda: leaf(3))
def shared_tape(x):
    y = x.exp()
    return y * 2, y.sin()


@program(lambda: plain(3).requires_grad_(), lambda: torch.Generator().manual_seed(3))
def generator_argument(x, generator):
    return x * torch.rand(3, generator=generator)


@program(lambda: plain(3))
def grad_mode_left_changed(x):
    torch.set_grad_enabled(False)
    return x + 1


@program(lambda: leaf(2, 3))
def autocast_inside(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.t()


@program(lambda: torch.eye(3).to_sparse().requires_grad_(), lambda: leaf(3, 2))
def sparse_input(s, x):
    return torch.sparse.mm(s, x)


@program(lambda: TwoTensor(plain(3), plain(3) * 2).requires_grad_())
def subclass_input(x):
    return x * 2, x


@program(lambda: torch.tensor([math.nan, math.inf, -0.0, 1.0], requires_grad=True))
def special_values(x):
    return x.log(), x * 0


@program(lambda: plain(3))
def set_data(x):
    x.set_(plain(4) * 2)
    return x * 2


@program(lambda: plain(3))
def resize(x):
    return x.resize_(2)


@program(lambda: leaf(3).clone().detach().requires_grad_())
def grad_mode_inside(x):
    with torch.no_grad():
        y = x * 2
    return y, x * y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.fc.weight
        self.register_buffer("count", torch.zeros(()))
        self.last = None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.count = self.count + 1
        self.last = x.detach().sum()
        return self.tied(F.dropout(self.norm(self.fc(x)), 0.5, self.training))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(plain(3), requires_grad=False)
        self.other = nn.Parameter(plain(3))
        self.register_buffer("slot", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.slot.copy_(x * self.other)
        return self.slot.sin() + self.weight


MODULES = {
    "block": (Block, lambda: (leaf(5, 4),)),
    "block in eval": (lambda: Block().eval(), lambda: (leaf(5, 4),)),
    "frozen": (Frozen, lambda: (leaf(3),)),
    "rnn": (lambda: nn.LSTM(3, 4), lambda: (leaf(2, 1, 3),)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True)),
        lambda: (leaf(1, 1, 5, 5),),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), lambda: (leaf(2, 3, 4),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_eager_agrees_with_itself(name):
    fn, arguments = PROGRAMS[name]
    check(fn, *arguments(), compile=eager)


@pytest.mark.parametrize("name", PROGRAMS)
def test_eager_agrees_with_itself_under_no_grad(name):
    fn, arguments = PROGRAMS[name]
    with torch.no_grad():
        check(fn, *arguments(), compile=eager)
    check(fn, *arguments(), compile=eager, training=False)


@pytest.mark.parametrize("name", ["views", "mutation", "shared_arguments", "zero_dim", "dropout"])
def test_eager_agrees_with_itself_in_inference_mode(name):
    fn, arguments = PROGRAMS[name]
    inputs = arguments()
    with torch.inference_mode():
        check(fn, *inputs, compile=eager)
        check(fn, *arguments(), compile=eager)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_agrees_with_itself(name):
    make, arguments = MODULES[name]
    check(make(), *arguments(), compile=eager)


def test_a_module_that_shares_a_parameter_with_an_argument():
    module = nn.Linear(3, 3)
    report = check(module, module.weight, compile=eager)
    assert report.ok


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    fault = FAULTS[name]
    assert check(fault.program, *fault.arguments(), compile=eager).ok
    with pytest.raises(CheckFailed) as failed:
        check(fault.program, *fault.arguments(), compile=fault.plant)
    assert fault.aspect in {difference.aspect for difference in failed.value.report.differences}


def test_a_stale_guard_shows_only_after_the_first_data():
    fault = FAULTS["stale guard: data of the first call"]
    report = check(fault.program, *fault.arguments(), compile=fault.plant, raise_on_difference=False)
    assert {difference.run.split(",")[0] for difference in report.differences} == {"new data"}


def test_a_fault_in_a_module_is_named_after_the_parameter():
    def drop_gradient(module):
        module.bias.requires_grad_(False)
        return module

    report = check(nn.Linear(2, 2), leaf(2), compile=drop_gradient, raise_on_difference=False)
    found = {(difference.aspect, difference.where) for difference in report.differences}
    assert ("requires_grad", "parameter bias") in found


def test_a_lost_buffer_update_is_found():
    class WithoutUpdate(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            kept = {name: buffer.clone() for name, buffer in self.inner.named_buffers()}
            out = self.inner(x)
            self.inner.load_state_dict(kept, strict=False)
            return out

    report = check(nn.BatchNorm1d(4), leaf(5, 4), compile=WithoutUpdate, raise_on_difference=False)
    found = {(difference.aspect, difference.where) for difference in report.differences}
    assert ("value", "buffer running_mean") in found


def test_what_a_function_closes_over_is_compared_and_put_back():
    net, scale = nn.BatchNorm1d(4), torch.ones(4)
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def fn(x):
        scale.add_(1)
        return net(x) * scale

    check(fn, leaf(5, 4), compile=eager)
    assert torch.equal(scale, torch.ones(4)) and net.weight.grad is None
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    def forget(fn):
        def wrong(x):
            y = fn(x)
            scale.sub_(1)
            return y

        return wrong

    report = check(fn, leaf(5, 4), compile=forget, raise_on_difference=False)
    assert ("value", "captured scale") in {(d.aspect, d.where) for d in report.differences}


def test_nothing_of_the_users_is_changed():
    torch.manual_seed(5)
    state, x = torch.get_rng_state(), leaf(3)
    module = nn.Sequential(nn.BatchNorm1d(3))
    torch.set_rng_state(state)
    check(module, x.expand(2, 3), compile=eager)
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None and x._version == 0 and torch.equal(x, plain(3))
    assert module[0].num_batches_tracked == 0 and module[0].weight.grad is None


def test_a_bound_method_and_a_partial():
    module = nn.Linear(3, 3)
    check(module.forward, leaf(2, 3), compile=eager)
    check(functools.partial(torch.add, plain(3)), leaf(3), compile=eager)
    assert module.weight.grad is None


def test_keyword_arguments_are_named():
    report = check(
        lambda x, *, scale: x * scale["by"].mul_(2),
        plain(3),
        kwargs={"scale": {"by": plain(3)}},
        compile=lambda fn: lambda x, scale: x * (scale["by"] * 2),
        raise_on_difference=False,
    )
    assert 'argument scale["by"]' in {difference.where for difference in report.differences}


def test_the_report_says_what_was_skipped_and_prints_as_a_table():
    report = check(lambda x: x * 2, leaf(), compile=lambda fn: lambda x: x * 3, raise_on_difference=False)
    skipped = {run.name: run.skipped for run in report.runs if run.skipped}
    assert skipped["same data, transposed tangents"] == "no differentiable output has a dimension"
    assert "other aliasing" in skipped
    text = str(report)
    assert "aspect" in text and "gradient value" in text and "argument 0 (x)" in text and "skipped:" in text
    assert not report.ok


def test_other_aliasing_is_made_or_undone():
    together = check(two_alike, leaf(3), leaf(3), compile=eager)
    assert any(run.name.startswith("argument 1 (y) is argument 0 (x)") for run in together.runs)
    x = plain(3)
    apart = check(two_alike, x, x, compile=eager)
    assert any(run.name.startswith("arguments apart") for run in apart.runs)


def test_tolerance_instead_of_bits():
    def nearly(fn):
        return lambda x: fn(x) * (1 + 2**-23)

    assert check(torch.exp, plain(3), compile=nearly, bitwise=False).ok
    assert not check(torch.exp, plain(3), compile=nearly, raise_on_difference=False).ok


def test_the_cause_of_a_failure_is_the_error_that_eager_did_not_raise():
    def broken(fn):
        def wrong(x):
            raise NotImplementedError("no kernel")

        return wrong

    with pytest.raises(CheckFailed, match="NotImplementedError: no kernel") as failed:
        check(torch.sin, plain(3), compile=broken)
    assert isinstance(failed.value.__cause__, NotImplementedError)


def test_a_subclass_of_eagers_error_is_the_same_error():
    class Ours(KeyError):
        pass

    def renamed(fn):
        def wrong(x):
            raise Ours("missing")

        return wrong

    assert check(raises, leaf(3), compile=renamed).ok


def test_the_callers_default_device_does_not_reach_into_the_check():
    x, y = leaf(2, 3), leaf(2, 3)
    with torch.device("meta"):
        assert check(two_alike, x, y, compile=eager).ok
        assert not check(torch.sin, x, compile=lambda fn: torch.cos, raise_on_difference=False).ok


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("name", ["views", "mutation", "shared_arguments", "dropout", "complex_numbers", "zero_size"])
def test_eager_agrees_with_itself_on_cuda(name):
    fn, arguments = PROGRAMS[name]
    with torch.device("cuda"):
        check(fn, *arguments(), compile=eager)


@needs_cuda
def test_a_module_agrees_with_itself_on_cuda():
    with torch.device("cuda"):
        check(Block(), leaf(5, 4), compile=eager)


@needs_cuda
def test_a_random_number_drawn_once_more_on_cuda_is_found():
    def draw(fn):
        def wrong(x):
            y = fn(x)
            torch.rand(1, device="cuda")
            return y

        return wrong

    report = check(torch.sin, plain(3).cuda(), compile=draw, raise_on_difference=False)
    assert ("random state", "CUDA generator 0 after forward") in {(d.aspect, d.where) for d in report.differences}


# ------------------------------------------------------------------------------------- what the caller does afterwards
def aspects_of(fn, other, *args):
    report = check(fn, *args, compile=lambda fn: other, raise_on_difference=False)
    return {difference.aspect for difference in report.differences}


def test_a_result_that_outlives_its_call():
    """The caller writes to every result: one that is the program's own is not the same in the next call."""
    held = torch.ones(2)
    assert "value" in aspects_of(lambda x: (x * 2, torch.ones(2)), lambda x: (x * 2, held), torch.ones(2))


def test_a_gradient_that_outlives_its_backward():
    held = torch.ones(2)

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return held if g.sum() == 0 else held.view(2)

    x = torch.ones(2, requires_grad=True)
    fresh = type("Fresh", (Kept,), {"backward": staticmethod(lambda ctx, g: torch.ones(2))})
    assert "gradient value" in aspects_of(fresh.apply, Kept.apply, x)


def test_results_that_may_not_be_written():
    x = torch.ones(2, 2, requires_grad=True)
    found = aspects_of(lambda x: (x * 2).unbind(), lambda x: tuple(x * 2), x)
    assert found == set()
    found = aspects_of(lambda x: (x * 2).unbind(), lambda x: tuple(y.view(-1).clone() for y in x * 2), x)
    assert "writing to results" in found


def test_attributes_and_inference_tensors():
    def marked(x):
        y = x * 2
        y.tag = 1
        return y

    @torch.inference_mode()
    def inference(x):
        return x * 2

    assert aspects_of(marked, lambda x: x * 2, torch.ones(2)) == {"Python attributes"}
    assert aspects_of(inference, lambda x: x * 2, torch.ones(2)) == {"inference tensor or not", "writing to results"}


# ------------------------------------------------------------------------------------------- keyword arguments
def scaled(x, *, by=1.0, seed=0):
    return x * by + seed


def test_keyword_arguments_are_passed_as_they_are():
    seen = []

    def program(x, **keywords):
        seen.append(keywords)
        return x * 2

    check(program, plain(2), by=3.0, kwargs={"seed": 4})
    assert all(keywords == {"by": 3.0, "seed": 4} for keywords in seen) and seen
    assert check(scaled, leaf(3), by=2.0).ok
    assert check(torch.softmax, leaf(3), dim=0).ok
    assert check(nn.Linear(3, 2), input=plain(4, 3)).ok


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        (
            {"bitwize": False},
            "bitwize is neither an argument of scaled nor an option of check, which are kwargs",
        ),
        ({"kwargs": plain(2)}, "kwargs is a Tensor, and must be a dict"),
        ({"by": 2.0, "kwargs": {"by": 3.0}}, "given twice, and in kwargs: by"),
    ],
)
def test_a_keyword_argument_that_is_not_there(keywords, text):
    """Otherwise both sides would refuse it in the same words, and nothing would differ."""
    with pytest.raises(TypeError, match=text):
        check(scaled, plain(2), **keywords)
