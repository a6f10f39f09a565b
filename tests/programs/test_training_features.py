"""What training steps are made of beside a loss and an optimizer: scalers, clipping, averages, several optimizers.

Each is a whole step as one program, against the same in eager, bit by bit: results, and all that the step writes.
"""

import copy

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad.errors import DataDependentError, StateChangeError, UnsupportedError

CALLS = 8


def mlp(*inside):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), *inside, nn.Linear(5, 2))


def batches():
    torch.manual_seed(3)
    return [torch.randn(3, 4) for _ in range(CALLS)]


def adamw(model):
    return optim.AdamW(model.parameters(), lr=0.01)


def simple(*inside, at_last=None, more=()):
    """A step over an MLP, with something at its end."""
    model = mlp(*inside)
    optimizer = adamw(model)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        found = None if at_last is None else at_last(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), found

    return step, [model, optimizer, *more], batches()


def scaled(overflow):
    model = mlp()
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    given = batches()
    if overflow:
        given[5] = given[5] * 1e30
    return step, [model, optimizer, scaler], given


def accumulating():
    model = mlp()
    optimizer = adamw(model)

    def step(x, last):
        loss = model(x).square().mean() / 2
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step, [model, optimizer], [(x, i % 2 == 1) for i, x in enumerate(batches())]


def cast():
    model = mlp()
    optimizer = adamw(model)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, [model, optimizer], batches()


def averaged(**options):
    model = mlp()
    optimizer, average = adamw(model), swa_utils.AveragedModel(model, **options)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        return loss.detach()

    return step, [model, optimizer, average], batches()


def moving_average():
    model = mlp()
    optimizer, slow = adamw(model), copy.deepcopy(model)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, parameter in zip(slow.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter, 0.1)
        return loss.detach()

    return step, [model, optimizer, slow], batches()


def two_optimizers():
    model = mlp()
    groups = [{"params": [model[2].weight], "lr": 0.1}, {"params": [model[2].bias]}]
    optimizers = optim.AdamW(model[0].parameters(), lr=0.01), optim.SGD(groups, lr=0.2, momentum=0.9)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step, [model, *optimizers], batches()


def with_step_hooks():
    model = mlp()
    optimizer, count = adamw(model), torch.zeros(())
    optimizer.register_step_pre_hook(lambda *_: [p.grad.mul_(0.5) for p in model.parameters()] and None)
    optimizer.register_step_post_hook(lambda *_: count.add_(1) and None)
    step, state, given = simple_with(model, optimizer)
    return step, [*state, count], given


def simple_with(model, optimizer, set_to_none=True, inputs=None):
    def step(x):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [model, optimizer], inputs or batches()


def kept_gradients():
    model = mlp()
    return simple_with(model, adamw(model), set_to_none=False)


def frozen():
    model = mlp()
    model[0].weight.requires_grad_(False)
    return simple_with(model, adamw(model))


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    optimizer = adamw(model)

    def step(x):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(3)
    return step, [model, optimizer], [torch.randint(0, 6, (5,)) for _ in range(CALLS)]


def with_closure():
    model = mlp()
    optimizer = adamw(model)

    def step(x):
        def loss_again():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(loss_again).detach()

    return step, [model, optimizer], batches()


def never_used():
    model, other = mlp(), nn.Linear(2, 2)
    return simple_with(model, optim.AdamW([*model.parameters(), *other.parameters()], lr=0.01))


def checkpointed():
    model = mlp()
    optimizer = adamw(model)

    def step(x):
        optimizer.zero_grad()
        loss = model[2](checkpoint(model[:2], x, use_reentrant=False)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [model, optimizer], batches()


def gives_numbers():
    model = mlp()
    optimizer = adamw(model)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item(), loss.item() * 2 + optimizer.param_groups[0]["lr"], f"{optimizer.param_groups[0]['lr']}"

    return step, [model, optimizer], batches()


def decides_by_loss():
    model = mlp()
    optimizer = adamw(model)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        value = loss.item()
        if value / 2 > 0.05:
            loss.backward()
            optimizer.step()
        return value, max(value, 0.1)

    return step, [model, optimizer], batches()


def with_nan_rate():
    model = mlp()
    optimizer = adamw(model)
    optimizer.param_groups[0]["lr"] = float("nan")
    return simple_with(model, optimizer)


STEPS = {  # and how many programs each has: that of the first call, and others
    "scaler": (lambda: scaled(overflow=False), 2),
    "scaler, overflow": (lambda: scaled(overflow=True), 3),
    "accumulation": (accumulating, 4),
    "clip by norm": (lambda: simple(at_last=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)), 2),
    "clip by norm, for-loop": (
        lambda: simple(at_last=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=False)),
        2,
    ),
    "clip by norm, or raise": (
        lambda: simple(at_last=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1, error_if_nonfinite=True)),
        2,
    ),
    "clip by value": (lambda: simple(at_last=lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01)), 2),
    "autocast": (cast, 2),
    "averaged model": (averaged, 2),
    "averaged model, at once": (lambda: averaged(multi_avg_fn=swa_utils.get_swa_multi_avg_fn()), 2),
    "averaged model, moving": (lambda: averaged(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)), 2),
    "moving average by hand": (moving_average, 2),
    "batch norm": (lambda: simple(nn.BatchNorm1d(5)), 2),
    "dropout": (lambda: simple(nn.Dropout(0.5)), 2),
    "two optimizers, groups": (two_optimizers, 2),
    "step hooks": (with_step_hooks, 2),
    "set_to_none=False": (kept_gradients, 2),
    "frozen": (frozen, 2),
    "tied": (tied, 2),
    "closure": (with_closure, 2),
    "never used": (never_used, 2),
    "checkpoint": (checkpointed, 2),
    "numbers": (gives_numbers, 2),
    "a decision": (decides_by_loss, 6),
    "a rate that is no number": (with_nan_rate, 2),
}


def same(one, other):
    """Bit by bit, in type too."""
    if isinstance(one, Tensor):
        assert type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        assert bool(((one == other) | ((one != one) & (other != other))).all())
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert type(one) is type(other) and (one == other or one != one)


def play(make, compile):
    torch.manual_seed(7)
    step, state, inputs = make()
    call = compile(step)
    torch.manual_seed(3)
    seen = []
    for given in inputs:
        found = call(*given) if type(given) is tuple else call(given)
        seen.append(
            copy.deepcopy([found, *(part if isinstance(part, Tensor) else part.state_dict() for part in state)])
        )
    return seen, call


@pytest.mark.parametrize(("make", "programs"), STEPS.values(), ids=STEPS)
def test_a_step(make, programs):
    """M-6: results and state after each call."""
    expected, _ = play(make, lambda step: step)
    found, call = play(make, lambda step: foregrad.compile(step, "eager", inplace=True))
    same(expected, found)
    assert 0 < len(call.specializations) <= programs


def scheduled():
    model = mlp()
    optimizer = adamw(model)
    schedule = lr_scheduler.StepLR(optimizer, 2)

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        schedule.step()
        return schedule.get_last_lr()

    return step, [model, optimizer, schedule], batches()


def in_backward():
    model = mlp()
    optimizers = {parameter: optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())

    def step(x):
        model(x).sum().backward()

    return step, [model, *optimizers.values()], batches()


def sparse_gradients():
    torch.manual_seed(0)
    model = nn.Embedding(6, 4, sparse=True)
    optimizer = optim.SparseAdam(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, [model, optimizer], [torch.tensor([1, 2, 2])]


REFUSED = {
    "schedule": (scheduled, StateChangeError, "changes .*param_groups"),
    "in backward": (in_backward, UnsupportedError, "has a hook"),
    "sparse gradients": (sparse_gradients, DataDependentError, "sparse tensor"),
}


@pytest.mark.parametrize(("make", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_changes_nothing(make, error, text):
    """A failure while recording leaves parameters, optimizers and schedules as they were."""
    step, state, inputs = make()
    before = copy.deepcopy([part.state_dict() for part in state])
    random = torch.get_rng_state()
    with pytest.raises(error, match=text):
        foregrad.compile(step, "eager", inplace=True)(inputs[0])
    same(before, [part.state_dict() for part in state])
    assert torch.equal(random, torch.get_rng_state())
