"""CUDA graphs on a machine that has none: an imitation that, like them, works on fixed addresses and nothing else.

A capture runs its function once and remembers where the results lie; a launch runs it again on the same memory and
writes there. What is copied in and out, and which capture serves a call, is tested here; tests/cuda has the device.
"""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foregrad
from foregrad.backends import cudagraphs, replay
from foregrad.errors import ConfigError, EagerFallbackWarning, UnsupportedError

CPU = torch.device("cpu")


def owned_by_nobody(outputs, memories):
    """Results over the same memory, which belongs to a graph and not to them."""
    storages, made = {}, {}
    for o in outputs:
        address = o.untyped_storage().data_ptr() if isinstance(o, torch.Tensor) else None
        if address is None or address in memories:
            made[id(o)] = o
        elif id(o) not in made:
            storage = storages.setdefault(address, replay.unowned(o).untyped_storage())
            same = torch.empty(0, dtype=o.dtype).set_(storage, o.storage_offset(), o.size(), o.stride())
            made[id(o)] = replay.set_lazy_bits(same, o.is_conj(), o.is_neg())
    return [made[id(o)] for o in outputs]


class Imitation:
    """Counts what is captured and what is launched."""

    def __init__(self):
        self.captures = self.launches = 0
        self.stream = 0

    def captured(self, run, memory, generators):
        given = run.__closure__[0].cell_contents
        whole = [replay.in_full(arg.data) for arg in given if isinstance(arg, torch.Tensor)]
        before = [(memory_given, memory_given.clone()) for memory_given in whole]
        outputs = list(run())
        for memory_given, held in before:  # a capture runs nothing
            memory_given.copy_(held)
        memories = {arg.untyped_storage().data_ptr() for arg in given if isinstance(arg, torch.Tensor)}
        for output in outputs:
            if isinstance(output, torch.Tensor) and output.untyped_storage().data_ptr() not in memories:
                output.fill_(-777)  # no data yet
        handed = owned_by_nobody(outputs, memories)
        self.captures += 1
        given[:] = [replay.unowned(arg) if isinstance(arg, torch.Tensor) else arg for arg in given]  # addresses alone

        def launch():
            self.launches += 1
            for old, new in zip(outputs, run(), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    replay.in_full(old).copy_(replay.in_full(new))

        return launch, handed


@pytest.fixture
def device(monkeypatch):
    imitation = Imitation()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cudagraphs, "only_device", lambda graph, slots, phase: CPU)
    monkeypatch.setattr(replay, "captured", imitation.captured)
    monkeypatch.setattr(replay, "being_captured", lambda: False)
    monkeypatch.setattr(replay, "current_stream_of", lambda device: imitation.stream)
    monkeypatch.setattr(replay, "new_memory", lambda device: object())
    monkeypatch.setattr(replay, "wait_for", lambda device: None)
    monkeypatch.setattr(replay, "_memories", {})
    gc.collect()
    return imitation


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def trained(model, program, steps=5, **options):
    """Losses, gradients and buffers of some steps."""
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = program(torch.randn(6, 3)).square().sum()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
    return seen


def equal(ones, others):
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


@pytest.mark.parametrize("inner", ["eager", lambda graph, inputs: graph.forward], ids=str)
def test_a_module_trains_as_in_eager(device, inner):
    model, other = network(), network()
    program = foregrad.compile(other, "cudagraphs", options={"backend": inner})
    assert equal(trained(model, model), trained(other, program))
    assert device.captures == 2  # in the second step
    assert device.launches == 2 * 4


def test_results_outlive_the_next_launch(device):
    program = foregrad.compile(lambda x: (x * 2, x.tanh(), x.expand(2, 3), x), "cudagraphs")
    inputs = [torch.full((3,), float(i), requires_grad=True) for i in range(6)]
    kept = [program(x) for x in inputs]
    for x, (double, tanh, expanded, same) in zip(inputs, kept, strict=True):
        assert torch.equal(double, x * 2) and torch.equal(tanh, x.tanh()) and torch.equal(expanded, x.expand(2, 3))
        assert same is x and expanded.stride() == (0, 1)
    for x, (double, tanh, *_) in zip(inputs, kept, strict=True):
        (double + tanh).sum().backward()
        assert torch.allclose(x.grad, 2 + (1 - x.detach().tanh() ** 2))


def test_a_forward_that_runs_before_the_last_backward_has_memory_of_its_own(device):
    model, other = network(), network()
    program = foregrad.compile(other, "cudagraphs")
    for run in (model, program):
        torch.manual_seed(1)
        for _ in range(3):
            losses = [run(torch.randn(6, 3)).exp().sum() for _ in range(3)]
            sum(losses).backward()
    assert equal([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])


def test_what_was_kept_is_free_once_the_backward_has_run(device):
    program = foregrad.compile(lambda x: x.sin().exp().sin(), "cudagraphs")
    x = torch.ones(3, requires_grad=True)
    for _ in range(10):
        program(x).sum().backward()
    assert device.captures == 2
    for _ in range(3):
        program(x)  # dropped without a backward
    assert device.captures == 2


def test_a_parameter_that_moves_is_captured_again(device):
    model = nn.Linear(2, 1, bias=False)
    program = foregrad.compile(model, "cudagraphs")
    x = torch.ones(1, 2)
    for value in (1.0, 2.0, 3.0):
        model.weight.data = torch.full((1, 2), value)
        for _ in range(3):
            assert program(x).item() == 2 * value
    model.weight.data.fill_(5.0)  # in place
    assert program(x).item() == 10


def test_sizes_that_change_have_captures_of_their_own(device):
    program = foregrad.compile(lambda x: (x * x.shape[0]).sum(0), "cudagraphs", dynamic=True)
    for _ in range(3):
        for size in (2, 3, 5):
            x = torch.randn(size, 7)
            assert torch.equal(program(x), (x * size).sum(0))
    assert len(program.specializations) == 1
    assert device.captures == 3


def test_captures_are_bounded(device):
    program = foregrad.compile(lambda x: x.sin().sum(), "cudagraphs", dynamic=True)
    for size in (*range(2, 40), *range(2, 40)):
        x = torch.randn(size, requires_grad=True)
        program(x).backward()
        assert torch.equal(x.grad, x.detach().cos())
    for captures in replay_lists(program):
        assert len(captures) <= replay.CAPTURES


def replay_lists(program):
    [specialization] = program.specializations
    graphs = [specialization._program.call.__globals__["forward_graph"]]
    return [captures for graph in graphs for captures in graph._captures.values()]


def test_gradients_that_are_differentiated_again(device):
    def energy(x, w):
        return (x @ w).tanh().pow(2).sum()

    program = foregrad.compile(energy, "cudagraphs")
    for step in range(4):
        seen = []
        for run in (energy, program):
            torch.manual_seed(step)
            x, w = torch.randn(3, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
            (force,) = torch.autograd.grad(run(x, w), x, create_graph=True)
            force.square().sum().backward()
            seen.append([force.detach(), x.grad, w.grad])
        assert equal(*seen)
    assert device.launches


def test_a_write_after_the_forward_is_refused_as_in_eager(device):
    """The caller's own tensor is saved, whose versions autograd counts."""
    program = foregrad.compile(lambda x, y: (x * y).sum(), "cudagraphs")
    for _ in range(3):
        x, y = torch.ones(2, requires_grad=True), torch.ones(2)
        loss = program(x, y)
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_result_that_is_saved_too_is_one_tensor(device):
    program = foregrad.compile(torch.tanh, "cudagraphs")
    for _ in range(3):
        x = torch.ones(2, requires_grad=True)
        y = program(x)
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    y = program(torch.ones(2, requires_grad=True))
    assert torch.equal(y, torch.ones(2).tanh()) and y._version == 0


def test_writes_views_and_inputs_of_every_kind(device):
    def change(x, table, pair):
        x.add_(1)
        table["sum"] = pair[0] + pair[1]
        return x[1:], pair[0].t(), table["sum"].conj()

    program = foregrad.compile(change, "cudagraphs")
    for _ in range(4):
        seen = []
        for run in (change, program):
            torch.manual_seed(2)
            shared = torch.randn(2, 3, dtype=torch.complex64)
            x, table = torch.ones(4), {}
            results = run(x, table, (shared, shared.conj()))
            seen.append([x, table["sum"], *(result.resolve_conj() for result in results)])
            assert results[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert results[2].is_conj()
        assert equal(*seen)


def test_saved_tensor_hooks_see_and_replace_what_is_saved(device):
    program = foregrad.compile(lambda x: x.exp().sin().sum(), "cudagraphs", partition="default")
    for _ in range(4):
        x = torch.ones(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = program(x)
        loss.backward()
        one = torch.ones(3)
        assert torch.allclose(x.grad, one.exp().cos() * one.exp())


def test_another_stream_has_captures_of_its_own(device):
    program = foregrad.compile(torch.sin, "cudagraphs")
    for device.stream in (0, 1):
        for _ in range(3):
            program(torch.ones(2))
    assert device.captures == 2


def test_settings_of_kernels_are_compared(device):
    program = foregrad.compile(lambda x: x @ x, "cudagraphs")
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            for _ in range(3):
                program(torch.ones(2, 2))
    finally:
        torch.set_float32_matmul_precision(before)
    assert device.captures == 2


def test_what_cannot_be_captured_is_an_error_by_name(device, monkeypatch):
    def fails(run, memory, generators):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "captured", fails)
    program = foregrad.compile(torch.sin, "cudagraphs")
    program(torch.ones(2))
    with pytest.raises(UnsupportedError, match="inference graph cannot be captured in a CUDA graph"):
        program(torch.ones(2))
    program = foregrad.compile(torch.sin, "cudagraphs", fallback="eager")
    program(torch.ones(2))
    with pytest.warns(EagerFallbackWarning, match="no CUDA graph is used"):
        assert torch.equal(program(torch.ones(2)), torch.ones(2).sin())
    assert torch.equal(program(torch.ones(2)), torch.ones(2).sin())


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (torch.sin, r"args\[0\] is a tensor on the CPU"),
        (lambda x: torch.zeros(2) + 1, "nothing in the inference graph is on a CUDA device"),
        (lambda x: torch.rand(2), "works on the CPU"),
    ],
    ids=["input", "constant", "draw"],
)
def test_work_of_the_host_is_refused(function, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match=text):
        foregrad.compile(function, "cudagraphs")(torch.ones(2))
    with pytest.warns(EagerFallbackWarning):
        foregrad.compile(function, "cudagraphs", fallback="eager")(torch.ones(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_machine_without_cuda_is_told():
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        foregrad.compile(F.relu, "cudagraphs")


def test_options_are_those_of_the_backend_inside(device):
    with pytest.raises(ConfigError, match="Inductor has no 'max_autotun'"):
        foregrad.compile(F.relu, "cudagraphs", options={"backend": "inductor", "max_autotun": True})
    with pytest.raises(ConfigError, match="one too many"):
        foregrad.compile(F.relu, "cudagraphs", options={"backend": "cudagraphs"})
    with pytest.raises(ConfigError, match="There is no backend 'eagr'"):
        foregrad.compile(F.relu, "cudagraphs", options={"backend": "eagr"})


def training(device, change=lambda optimizer, number: None):
    """Losses, parameters and state of a whole training step, eager and launched, and the step."""
    seen = []
    for compile in (lambda step: step, lambda step: foregrad.train_step(step, cuda_graph=True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(x, model=model, optimizer=optimizer):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call, losses = compile(step), []
        for number in range(8):
            change(optimizer, number)
            losses.append(call(torch.full((3, 4), 1.0 + number)))
        state = [value for held in optimizer.state.values() for value in held.values()]
        seen.append([*losses, *model.parameters(), *state])
    assert all(map(torch.equal, *seen))
    return call


def test_a_whole_training_step(device):
    """Parameters and optimizer state stay where they are, and are written there."""
    step = training(device)
    assert device.launches > 3
    assert len(step.specializations) <= 2  # that of the first step may be forgotten, with the objects that it had


def test_no_learning_rate_is_part_of_a_capture(device):
    def change(optimizer, number):
        optimizer.param_groups[0]["lr"] = 0.01 if number < 5 else 0.02

    training(device, change)
    assert device.launches > 2


def test_a_write_to_a_copy_is_refused(device):
    state = torch.ones(2)

    def program(x):
        x.mul_(2)
        state.add_(x)

    compiled = foregrad.compile(program, "cudagraphs", inplace=True)
    with pytest.raises(UnsupportedError, match=r"writes to args\[0\] in place"):
        compiled(torch.ones(2))
