"""`foregrad.train_step`: the front door for whole training steps."""

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import ConfigError, ForegradError


def wide(layers=6, width=256):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def step_over(model, optimizer):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_results_are_detached_and_equal():
    x = torch.ones(2, 256)
    eager, compiled = step_over(*wide()), foregrad.train_step(step_over(*wide()))
    for _ in range(4):
        expected, found = eager(x), compiled(x)
        assert torch.equal(expected, found)
        assert not found.requires_grad
    assert len(compiled.specializations) <= 2
    assert "training step" in repr(compiled)


def test_gradients_are_released_by_themselves():
    memory = {}
    for release in (True, False, "auto"):
        step = foregrad.train_step(step_over(*wide()), release_gradients=release)
        for _ in range(2):
            step(torch.ones(2, 256))
        memory[release] = step.memory
    assert memory["auto"] == memory[True]
    assert memory[False].gradients > 5 * 256 * 256 * 4
    assert memory[True].gradients < 3 * 256 * 256 * 4
    assert memory[True].state == memory[False].state > 18 * 256 * 256 * 4
    assert memory[True].peak == memory[True].activations + memory[True].gradients


class Dropping(nn.Module):
    """Layers that draw, and that write buffers in the forward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.BatchNorm1d(32), nn.Linear(32, 16))
            for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def test_a_budget_computes_again(monkeypatch):
    """P-6: the peak falls with the budget, in one graph; results are the same bits, and nothing is drawn again."""
    monkeypatch.setattr(foregrad.config, "verify", True)

    def play(compile):
        torch.manual_seed(0)
        model = Dropping()
        optimizer = torch.optim.AdamW(model.parameters())
        train = step_over(model, optimizer)

        def step(x):
            return train(x).detach()

        step = compile(step)
        losses = [step(torch.randn(128, 16)) for _ in range(4)]
        return [*losses, *model.state_dict().values(), torch.get_rng_state()], step

    expected, _ = play(lambda step: step)
    peaks, draws = [], set()
    for budget in (None, 0.5, 0.25, 0.0):
        found, step = play(lambda step, budget=budget: foregrad.train_step(step, memory_budget=budget))
        assert all(map(torch.equal, expected, found))
        peaks.append(step.memory.peak)
        draws.add(
            sum("bernoulli" in str(node.target) or "dropout" in str(node.target) for node in step.graph.graph.nodes)
        )
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.7 * peaks[0]
    assert len(draws) == 1 and draws != {0}
    with pytest.raises(foregrad.errors.InfeasibleBudgetError, match="cannot be met"):
        play(lambda step: foregrad.train_step(step, memory_budget=1000))


def test_a_budget_leaves_draws_in_their_order_and_results_that_are_written():
    """R-4: what is drawn after a backward, and does not follow from it, is drawn after what the backward draws."""

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + torch.randn_like(grad)

    def play(compile):
        torch.manual_seed(0)
        model, seen = Dropping(), torch.zeros(8, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            seen.add_(x)
            loss = Noisy.apply(model(x + seen)).square().mean()
            loss.backward()
            noise = torch.randn(3)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), noise, seen

        step = compile(step)
        results = [result.clone() for _ in range(3) for result in step(torch.randn(8, 16))]
        return [*results, *model.state_dict().values(), torch.get_rng_state()]

    expected = play(lambda step: step)
    assert all(map(torch.equal, expected, play(lambda step: foregrad.train_step(step, memory_budget=0.0))))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_looks_at_its_data_writes_in_place_after_it(scaled, monkeypatch):
    """M-6: a call that finds other data than a program is for has written nothing by then."""
    monkeypatch.setattr(foregrad.config, "verify", True)

    def play(compile):
        model, optimizer = wide(layers=2, width=8)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaled)

        def step(x):
            loss = model(x).square().mean()
            if not scaled and loss.isnan():
                return loss.detach()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        step, seen = compile(step), []
        for number in range(8):
            x = torch.full((2, 8), torch.nan if number in (3, 6) else number + 1.0)
            seen += [step(x).nan_to_num(), *(p.detach().clone() for p in model.parameters())]
            seen += [value.clone() for state in optimizer.state.values() for value in state.values()]
        return seen, [p._version for p in model.parameters()], step

    expected, versions, _ = play(lambda step: step)
    found, versions_found, step = play(foregrad.train_step)
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
    assert versions == versions_found
    names = [str(node.op) for program in step.specializations for node in program.flat_graph.nodes]
    assert any(name.startswith("aten._fused_adamw_.") for name in names)
    assert sum(name.startswith("aten.copy_") for name in names) <= 4 * scaled  # of the scaler's own tensors


def train(x, model, optimizer, schedule=None, *, scale=1.0):
    loss = scale * model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if schedule is not None:
        schedule.step()
    return loss.detach()


def test_models_and_optimizers_as_arguments():
    """Each combination of them has programs of its own, and rates are no reason for more."""

    def play(step):
        seen = []
        pairs = [wide(layers=2, width=8) for _ in range(2)]
        schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for _, optimizer in pairs]
        for number in range(8):
            model, optimizer = pairs[number % 2]
            named = {"schedule": schedules[number % 2], "scale": 2.0}
            seen.append(step(torch.ones(2, 8) * number, model, optimizer=optimizer, **named))
        return [*seen, *(p.detach() for model, _ in pairs for p in model.parameters())]

    step = foregrad.train_step(train)
    assert all(map(torch.equal, play(train), play(step)))
    assert len(step.specializations) <= 4
    assert step.memory.peak > 0
    with pytest.raises(TypeError, match="multiple values for argument 'model'"):
        step(torch.ones(2, 8), wide()[0], model=wide()[0])
    with pytest.raises(ConfigError, match="by the names of its parameters"):
        foregrad.train_step(lambda *args: train(*args))(torch.ones(2, 8), *wide(layers=2, width=8))


def test_gradients_are_released_where_there_are_none():
    model, optimizer = wide(layers=1, width=8)

    def step(x):
        optimizer.step()
        return model(x).sum().detach()

    assert torch.equal(foregrad.train_step(step, release_gradients=True)(torch.ones(2, 8)), step(torch.ones(2, 8)))


def test_a_small_step_keeps_one_operator_for_all():
    step = foregrad.train_step(step_over(*wide(layers=3, width=8)))
    for _ in range(2):
        step(torch.ones(2, 8))
    names = [str(node.target) for node in step.graph.graph.nodes]
    assert sum(name.startswith("aten._fused_adamw_") for name in names) == 1


def test_what_it_does_not_take():
    with pytest.raises(ConfigError, match="takes a function"):
        foregrad.train_step(nn.Linear(2, 2))
    with pytest.raises(ForegradError, match="not called yet"):
        _ = foregrad.train_step(step_over(*wide())).memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device for it")
def test_a_cuda_graph_needs_a_device():
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        foregrad.train_step(step_over(*wide()), cuda_graph=True)


def test_an_error_of_the_program_changes_nothing():
    model, optimizer = wide(layers=2, width=8)
    step = foregrad.train_step(step_over(model, optimizer))
    step(torch.ones(2, 8))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(torch.ones(2, 7))
    assert all(map(torch.equal, before, model.parameters()))
    assert all(type(value) is float for value in (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["eps"]))
