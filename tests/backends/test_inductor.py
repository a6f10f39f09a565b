"""Inductor as the backend: few programs, since each takes seconds to compile."""

import copy
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import foregrad
from foregrad._torch import InductorProgram
from foregrad.errors import UnsupportedError

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # what Inductor says about itself
]


def close(one, other):
    """Up to rounding, measured by the largest number."""
    alike = one.shape == other.shape and one.stride() == other.stride()
    return alike and bool((one - other).abs().max() <= 1e-5 * one.abs().max())


def test_a_convolution_with_batch_norm_trains_and_infers():
    """Inductor lays convolutions out in another way: the backward is told, and the caller does not see it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    other = copy.deepcopy(model)
    compiled = foregrad.compile(other)
    for _ in range(2):
        x = torch.randn(2, 3, 8, 8)
        for program in (model, compiled):
            program(x).square().sum().backward()
    assert all(close(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert all(close(b, c) for b, c in zip(model.buffers(), other.buffers(), strict=True))
    with torch.no_grad():
        assert close(model.eval()(x), compiled.eval()(x))
    assert len(compiled.specializations) == 2


def test_a_gradient_that_is_differentiated_again():
    """Double backward, which torch.compile refuses; a write to an input and a constant beside it."""

    def energy(x, w, count):  # nothing is differentiated as to the last, and its place stays empty
        count += 1
        return ((x @ w).tanh() * torch.tensor([1.0, 2.0])).sum()

    compiled = foregrad.compile(energy)
    seen = []
    for program in (energy, compiled):
        torch.manual_seed(0)
        x, w = torch.randn(3, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
        count = torch.zeros(2)
        (force,) = torch.autograd.grad(program(x, w, count), x, create_graph=True)
        force.square().sum().backward()
        seen.append([force.detach(), x.grad, w.grad, count])
    assert all(map(close, *seen))


def test_an_option_reaches_inductor():
    """With `fallback_random` dropout draws eager's numbers."""
    drop = foregrad.compile(lambda x: torch.nn.functional.dropout(x, 0.5), options={"fallback_random": True})
    torch.manual_seed(3)
    found = drop(torch.ones(8))
    torch.manual_seed(3)
    assert torch.equal(found, torch.nn.functional.dropout(torch.ones(8), 0.5))


def test_graphs_are_found_in_inductors_cache(tmp_path, monkeypatch):
    """What one program left there serves the next, with and without symbols for its sizes."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    for dynamic in (False, True):
        for expected in (0, 2):
            counters.clear()
            compiled = foregrad.compile(lambda x: x.sin().sum(0), dynamic=dynamic)
            compiled(torch.ones(3, 2, requires_grad=True)).sum().backward()
            assert counters["inductor"]["fxgraph_cache_hit"] == expected
            assert not counters["inductor"]["fxgraph_cache_bypass"]


def test_lists_that_are_updated_from_each_other_are_refused():
    """Inductor would use the new value of the first one for the second."""

    def crosswise(x, y):
        torch._foreach_add_([x, y], [y * 1, x * 1])

    def each_by_itself(x, y):
        torch._foreach_add_([x, y], [x * 2, y * 3])

    with pytest.raises(UnsupportedError, match="_foreach_add updates tensors of a list from each other"):
        foregrad.compile(crosswise)(torch.ones(3), torch.ones(3))
    x, y = torch.ones(3), torch.ones(3)
    foregrad.compile(each_by_itself)(x, y)
    assert x.tolist() == [3, 3, 3] and y.tolist() == [4, 4, 4]


def test_what_is_saved_has_strides_that_are_symbols():
    """A table of pairs whose length changes: its rows are as far apart as it is long."""

    def program(x, pairs):
        return (x[pairs[0]] * x[pairs[1]]).sum()

    compiled = foregrad.compile(program, dynamic=True)
    for n in (7, 9):
        x, pairs = torch.randn(5, requires_grad=True), torch.arange(2 * n).view(2, n) % 5
        y = x.detach().requires_grad_()
        program(x, pairs).backward()
        compiled(y, pairs).backward()
        torch.testing.assert_close(y.grad, x.grad)
    assert len(compiled.specializations) == 1


def test_a_program_that_pools_is_the_first_that_a_process_compiles():
    """Inductor's decompositions look into modules of Inductor's that nobody may have imported yet."""
    text = (
        "import torch, foregrad; from foregrad._torch import inductor_decompositions as table;"
        "foregrad.aot_function(lambda x: torch.nn.functional.max_pool2d(x, 2), lambda graph, inputs: graph.forward,"
        "decompositions=table())(torch.ones(1, 1, 4, 4, requires_grad=True))"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", text], check=True, timeout=300)


def test_a_mask_is_drawn_before_it_is_read():
    """Inductor's own kernel read the memory into which it was to be drawn."""

    def program(x):
        return torch.nn.functional.dropout(torch.nn.functional.layer_norm(x, (4,)), 0.1)

    compiled = foregrad.compile(program, "inductor", options={"fallback_random": True, "fx_graph_cache": False})
    found = []
    for call in (program, compiled):
        torch.manual_seed(0)
        found.append(call(torch.ones(2, 8, 4).cumsum(2).requires_grad_()))
    assert torch.allclose(*found, atol=1e-5)


def test_freezing_follows_its_parameters():
    """They are constants of the code until one is written or replaced; what is trained is not frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    compiled, x = foregrad.compile(model, options={"freezing": True}), torch.randn(2, 4)
    with torch.no_grad():
        assert close(compiled(x), model(x))
        model[0].weight.mul_(2)
        assert close(compiled(x), model(x))
    assert len(compiled.specializations) == 1


def test_what_is_frozen_is_compiled_again_once_it_has_changed(monkeypatch):
    """The objects, their versions and where they lie; what the graph writes stays an input."""
    compiled_for = []

    def compile_frozen(self, graph, examples, frozen, visible):
        compiled_for.append(sorted(frozen))

        def run(args):
            rest = iter(args)
            args = [frozen[i] if i in frozen else next(rest) for i in range(len(examples))]
            return graph(*args)

        return run

    monkeypatch.setattr(InductorProgram, "compile_frozen", compile_frozen)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    other = copy.deepcopy(model)
    compiled, x = foregrad.compile(other, options={"freezing": True}), torch.randn(2, 4)

    def calls_agree():
        with torch.no_grad():
            return all(close(compiled(x), model(x)) for _ in range(2))

    assert calls_agree() and len(compiled_for) == 1
    assert len(compiled_for[0]) == 4  # and not what batch norm counts and averages
    assert all(map(close, other.buffers(), model.buffers()))
    for m in (model, other):
        m[0].weight.data = m[0].weight.data * 2
    assert calls_agree() and len(compiled_for) == 2
    for m in (model, other):
        m[0].bias = nn.Parameter(torch.ones(3))
    assert calls_agree() and len(compiled_for) == 3
    assert len(compiled.specializations) == 1
    with torch.inference_mode():  # whose tensors do not count what is written to them
        model, other = copy.deepcopy(model), copy.deepcopy(other)
        compiled = foregrad.compile(other, options={"freezing": True})
        for _ in range(2):
            assert close(compiled(x), model(x))
            for m in (model, other):
                m[0].weight.mul_(2)
    assert len(compiled_for) == 4 and not compiled_for[3]


def test_a_rate_that_changes_needs_no_other_program():
    """F-2: Inductor's graphs look the numbers of an optimizer up in a tensor."""

    def play(compile):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step(torch.ones(3, 4))  # the optimizer has state then
        step = compile(step)
        losses = []
        for number in range(100):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            losses.append(step(torch.ones(3, 4) * number))
        return [*losses, *model.parameters()], step

    expected, _ = play(lambda step: step)
    found, step = play(lambda step: foregrad.train_step(step, "inductor"))
    torch.testing.assert_close(expected, found, rtol=1e-4, atol=1e-5)
    assert len(step.specializations) == 1


def test_copies_of_copies_have_memory_of_their_own():
    """M-6: Inductor leaves out both, and what is written to one result showed in the other."""

    def program(x):
        y = (x @ x).t().clone()
        return y, y.clone()

    with torch.no_grad():
        one, other = foregrad.compile(program, "inductor")(torch.eye(3))
    one.zero_()
    assert torch.equal(other, torch.eye(3))
