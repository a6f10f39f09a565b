"""The lean engine: what it says is what FakeTensorMode says, and it knows what it does not know."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foregrad
from fidelity import CheckedEngine, Unfaithful, run_twice
from foregrad._torch import FakeTensor, new_fake_mode
from foregrad.abstract import lean_engine as lean
from foregrad.abstract.lean_engine import LeanEngine
from foregrad.abstract.shape_rules import LOOSE_RULES, RULES
from foregrad.abstract.tensor_meta import Table
from foregrad.capturing import capture as capturing
from foregrad.slots import Input
from helpers import leaf, plain


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (part.view(2, 4, 2, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).split(8, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.gelu(x + self.out(attended.transpose(1, 2).reshape(2, 4, 8)))


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())


def loss(logits, classes):
    return F.cross_entropy(logits, classes)


def in_place(x, y):
    z = x * 2
    z.t_()
    z.add_(y)[1:].mul_(3)
    return z @ y


def complex_numbers(x):
    z = torch.view_as_complex(x.view(-1, 2))
    return (z.conj() * z).real + z.imag


def made_inside(x):
    table = torch.tensor([1.0, 2.0, 3.0])
    return x * table + torch.arange(3) + torch.ones_like(x).to(memory_format=torch.contiguous_format)


class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.table = nn.Embedding(10, 4)

    def forward(self, tokens):
        return self.lstm(self.table(tokens))[0].softmax(-1).sum(1)


ZOO = {
    "attention": lambda: (Attention(), [leaf(2, 4, 8)]),
    "convolutions": lambda: (convolutions(), [leaf(2, 3, 16, 16)]),
    "convolutions, channels last": lambda: (
        convolutions().to(memory_format=torch.channels_last),
        [plain(2, 3, 16, 16).to(memory_format=torch.channels_last)],
    ),
    "loss": lambda: (loss, [leaf(5, 7), torch.randint(7, (5,))]),
    "in place": lambda: (in_place, [leaf(3, 3), leaf(3, 3)]),
    "complex": lambda: (complex_numbers, [leaf(4, 4)]),
    "made inside": lambda: (made_inside, [leaf(2, 3)]),
    "recurrent": lambda: (Numbers(), [torch.randint(10, (3, 5))]),
    "double precision": lambda: (Attention().double(), [leaf(2, 4, 8).detach().double()]),
    "half precision": lambda: (Attention().bfloat16(), [plain(2, 4, 8).bfloat16()]),
}


@pytest.mark.parametrize("name", ZOO)
def test_every_node_is_what_fake_tensor_mode_says(name, monkeypatch):
    """F-12"""
    engines = []

    def checked(*given):
        engines.append(CheckedEngine())
        return engines[-1]

    monkeypatch.setattr(capturing, "engine_for", checked)
    program, inputs = ZOO[name]()
    for _ in range(2):
        foregrad.capture(program, *inputs)
    assert engines[-1].checked and engines[-1].counts.hits


CALLS = {
    "relu": lambda: (torch.ops.aten.relu, plain(2, 3)),
    "gelu, approximate": lambda: (F.gelu, plain(2, 3), {"approximate": "tanh"}),
    "add": lambda: (torch.add, plain(2, 3), plain(2, 3)),
    "add, alpha": lambda: (torch.add, plain(2, 3), plain(2, 3), {"alpha": 2}),
    "add, broadcast": lambda: (torch.add, plain(2, 3), plain(3)),
    "add, transposed": lambda: (torch.add, plain(2, 3), plain(3, 2).t()),
    "add, empty": lambda: (torch.add, plain(0, 3), plain(0, 3)),
    "add, other dtype": lambda: (torch.add, plain(2, 3), plain(2, 3).double()),
    "add, number": lambda: (torch.add, plain(2, 3), 1),
    "sizes of one": lambda: (torch.mul, plain(1, 3), plain(1, 3)),
    "softmax": lambda: (torch.softmax, plain(2, 3), 1),
    "log_softmax": lambda: (torch.log_softmax, plain(2, 3), 0),
    "linear": lambda: (F.linear, plain(2, 3), plain(4, 3), plain(4)),
    "mm": lambda: (torch.mm, plain(2, 3), plain(3, 4)),
    "mm, transposed": lambda: (torch.mm, plain(3, 2).t(), plain(4, 3).t()),
    "mm, integers": lambda: (torch.mm, torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 4, dtype=torch.int64)),
    "sum": lambda: (torch.sum, plain(2, 3)),
    "sum, of a number": lambda: (torch.sum, plain(), 0),
    "sum, one dimension": lambda: (torch.sum, plain(2, 3, 4), 1),
    "sum, kept": lambda: (torch.sum, plain(2, 3, 4), (0, -1), True),
    "sum, no dimensions": lambda: (torch.sum, plain(2, 3), (), True),
    "sum, dtype": lambda: (torch.sum, plain(2, 3), {"dtype": torch.float64}),
    "sum, transposed": lambda: (torch.sum, plain(2, 3, 4).transpose(0, 2), (1,)),
    "mean": lambda: (torch.mean, plain(2, 3)),
    "mean, last": lambda: (torch.mean, plain(2, 3, 4), -1, True),
    "embedding": lambda: (F.embedding, torch.tensor([[0, 1], [2, 3]]), plain(5, 3)),
    "embedding, padded": lambda: (F.embedding, torch.tensor([0, 1]), plain(5, 3), 2),
    "embedding, one": lambda: (F.embedding, torch.tensor(1), plain(5, 3)),
    "embedding, transposed": lambda: (F.embedding, torch.tensor([[0, 1], [2, 3]]).t(), plain(5, 3)),
    "addmm": lambda: (torch.addmm, plain(2, 4), plain(2, 3), plain(3, 4)),
    "addmm, column": lambda: (torch.addmm, plain(2, 1), plain(2, 3), plain(3, 4)),
    "batch_norm": lambda: (F.batch_norm, plain(2, 3, 4), plain(3), plain(3), plain(3), plain(3), True),
    "batch_norm, no statistics": lambda: (F.batch_norm, plain(2, 3, 4), None, None, None, None, True),
    "batch_norm, evaluating": lambda: (F.batch_norm, plain(2, 3, 4), plain(3), plain(3), plain(3), plain(3), False),
    "layer_norm": lambda: (F.layer_norm, plain(2, 3, 4), (3, 4), plain(3, 4), plain(3, 4)),
    "layer_norm, bare": lambda: (F.layer_norm, plain(2, 3, 4), (4,)),
    "nll_loss": lambda: (F.nll_loss, plain(5, 3), torch.tensor([0, 1, 2, 0, 1])),
    "nll_loss, weights": lambda: (F.nll_loss, plain(5, 3), torch.tensor([0, 1, 2, 0, 1]), plain(3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_rules_say_what_fake_tensor_mode_says(name):
    function, *args = CALLS[name]()
    keywords = args.pop() if isinstance(args[-1], dict) else {}
    CheckedEngine.results.clear()
    engine, reason = run_twice(function, tuple(args), keywords)
    assert engine.checked and reason is None


@pytest.mark.parametrize(
    "call",
    [
        (torch.addmm, plain(2, 4), plain(2, 3), plain(2, 4)),
        (torch.mm, plain(2, 4), plain(2, 3)),
        (torch.sum, plain(2, 3), (1, 1)),
        (torch.sum, plain(2, 3), 2),
        (torch.mean, plain(2, 3), (0, -2)),
        (F.embedding, torch.tensor([0, 1]), plain(2)),
        (F.layer_norm, plain(2, 3), (2,)),
        (torch.add, plain(2, 3), plain(4)),
        (F.nll_loss, plain(5, 3), torch.tensor([0, 1])),
    ],
)
def test_what_torch_refuses_is_refused(call):
    function, *args = call
    _, reason = run_twice(function, tuple(args), {})
    assert reason is not None


def test_the_check_can_fail(monkeypatch):
    """A rule that is wrong is found."""
    monkeypatch.setitem(RULES, torch.ops.aten.relu.default, lambda x: (1, *x.size))
    CheckedEngine.results.clear()
    with pytest.raises(Unfaithful):
        run_twice(torch.ops.aten.relu, (plain(2, 3),), {})
    CheckedEngine.results.clear()


def test_every_rule_is_for_an_operator():
    assert RULES.keys().isdisjoint(LOOSE_RULES)
    assert all(isinstance(op, torch._ops.OpOverload) for op in (*RULES, *LOOSE_RULES))


def test_the_second_capture_finds_what_the_first_worked_out():
    lean.RESULTS.clear()
    x = leaf(3, 5)
    first, again = (foregrad.capture(lambda x: (x.sin() * x).sum(), x).engine for _ in range(2))
    assert first.name == again.name == "lean"
    assert first.worked_out and not again.worked_out and again.found
    assert "results known" in str(again)


def test_settings_that_operators_read_are_part_of_the_question():
    x = torch.arange(3)
    dtypes = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            graph = foregrad.capture(lambda x: x / 2, x).joint_graph.graph
        finally:
            torch.set_default_dtype(torch.float32)
        dtypes.append(next(node.meta["val"].dtype for node in graph.nodes if node.op == "call_function"))
    assert dtypes == [torch.float32, torch.float64, torch.float32]


def test_numbers_of_other_types_are_other_questions():
    x = torch.arange(3)
    for number, dtype in ((1, torch.int64), (1.0, torch.float32), (True, torch.int64), (1j, torch.complex64)):
        for _ in range(2):
            graph = foregrad.capture(lambda x, n=number: x + n, x).joint_graph.graph
            assert [node.meta["val"].dtype for node in graph.nodes if node.op == "call_function"] == [dtype]


def test_a_tensor_that_changes_its_shape_is_described_anew():
    def program(x):
        y = x.clone()
        before = y.sum(0)
        y.t_()
        return before, y.sum(0)

    graph = foregrad.capture(program, plain(2, 3)).joint_graph.graph
    shapes = [tuple(node.meta["val"].shape) for node in graph.nodes if node.target is torch.ops.aten.sum.dim_IntList]
    assert shapes == [(3,), (2,)]


def test_views_share_the_memory_and_not_the_counter_of_what_they_view():
    engine = LeanEngine(torch._subclasses.FakeTensorMode())
    base = engine.fake(plain(4), Input("x"), dynamic=False)
    for _ in range(2):
        view = engine.run(torch.ops.aten.slice.Tensor, (), (base, 0, 1, 3), {})
        assert view.untyped_storage()._cdata == base.untyped_storage()._cdata and view.storage_offset() == 1
        torch.autograd.graph.increment_version(view)
        assert base._version == 0


def test_what_is_left_to_fake_tensor_mode_is_reported():
    report = foregrad.capture(lambda x: x.clone().t_(), plain(2, 3)).engine
    assert report.name == "lean" and "shape" in report.by_operator["aten.t_.default"]
    assert "aten.t_.default" in str(report)


def test_fake_inputs_are_recorded_under_their_own_mode():
    mode = torch._subclasses.FakeTensorMode()
    report = foregrad.capture(lambda x: x.sin(), mode.from_tensor(plain(2))).engine
    assert report.name == "fake" and "mode of their own" in report.reason and report.reason in str(report)


def test_the_table_is_bounded():
    table = Table(8)
    for i in range(100):
        table.add(i, i)
        assert len(table) <= 8
    assert table.get(99) == 99 and table.add(99, "another") == 99


def test_threads_share_the_table():
    table, seen = Table(64), []

    def work():
        for i in range(3000):
            key = i % 97
            if table.add(key, key) != key or table.get(key, key) != key:
                seen.append(key)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not seen and len(table) <= 64


@pytest.mark.parametrize("function", [torch.add, torch.sub, torch.mul, torch.div])
def test_a_number_before_a_tensor(function):
    """A shape rule looks at what it is given: decompositions call operators so."""
    foregrad.check(lambda x: function(2.0, x).sin(), leaf(3))
    foregrad.check(lambda x: torch.ops.aten.rsub.Scalar(x, 1).exp(), leaf(3))


def views_of_complex(z):
    z = z.conj()[1:].imag + z.resolve_conj().real[1:]
    return torch.view_as_complex(torch.stack((z, -z), -1)).view(torch.int64).conj()


@pytest.mark.parametrize("program", [complex_numbers, views_of_complex])
def test_lazy_bits_and_memory_seen_as_another_dtype_are_known(program):
    """F-12: and eager gives the same."""
    x = plain(4, 4).requires_grad_() if program is complex_numbers else torch.randn(5, dtype=torch.complex64)
    foregrad.capture(program, x)
    report = foregrad.capture(program, x).engine
    assert report.by_operator == {} and report.worked_out == 0
    assert foregrad.check(program, x).ok


@pytest.mark.parametrize("second", [torch.contiguous_format, torch.channels_last])
def test_a_kernel_is_asked_about_each_layout_of_mixed_dtypes(second):
    """Shape inference gives statistics of the input's dtype, and the kernel gives those of the parameters'."""
    statistics = [torch.zeros(4), torch.ones(4)]
    for layout, batch in ((torch.channels_last, 1), (second, 2)):
        x = torch.randn(batch, 4, 3, 5).to(torch.bfloat16).to(memory_format=layout)
        arguments = [x, torch.ones(4), torch.zeros(4), *statistics]
        expected = torch.ops.aten.native_batch_norm(*arguments, True, 0.1, 1e-5)
        engine = LeanEngine(torch._subclasses.FakeTensorMode())
        recorded = [engine.fake(tensor, Input("x"), False) for tensor in arguments]
        found = engine.run(torch.ops.aten.native_batch_norm.default, (), (*recorded, True, 0.1, 1e-5), {})
        assert [(t.dtype, t.stride()) for t in found] == [(t.dtype, t.stride()) for t in expected]


@pytest.mark.parametrize("large", [False, True])
def test_a_kernel_is_asked_about_arguments_that_lie_in_different_orders(large):
    """Shape inference lets the gradient lie as the input does, and the kernel as the gradient that it is given."""
    rows = 4096 if large else 2
    gradient, x = torch.randn(rows, 2, 8).transpose(1, 2), torch.randn(rows, 8, 2)
    backward = torch.ops.aten.softplus_backward.default
    engine = LeanEngine(torch._subclasses.FakeTensorMode())
    recorded = [engine.fake(tensor, Input("x"), False) for tensor in (gradient, x)]
    found = engine.run(backward, (), (*recorded, 1, 20), {})
    assert found.stride() == backward(gradient, x, 1, 20).stride() == gradient.stride()


def test_a_view_that_was_seen_in_other_memory_is_not_kept(monkeypatch):
    """What is known of an operator serves the whole process: a write to the next view would be lost."""
    engine, op = LeanEngine(new_fake_mode(None)), torch.ops.aten.detach.default
    tensor = engine.laid_out((3, 1, 57), (57, 57, 1), torch.float32, torch.device("cpu"))

    def elsewhere(self, op, types, args, kwargs):
        return engine.like(args[0], dense=True)

    with monkeypatch.context() as patched:
        patched.setattr(LeanEngine, "_direct", elsewhere)
        engine.run(op, (FakeTensor,), (tensor,), {})
    result = engine.run(op, (FakeTensor,), (tensor,), {})
    assert result.untyped_storage()._cdata == tensor.untyped_storage()._cdata
