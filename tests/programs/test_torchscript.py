"""Modules and functions of TorchScript inside a program: what they hold in C++ is an input like any other."""

import io

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import DataDependentError, StateChangeError, UnsupportedError
from helpers import nop

pytestmark = pytest.mark.filterwarnings("ignore")


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.factor = 3
        self.shift = torch.ones(4)  # neither a parameter nor a buffer

    def forward(self, x, times: int = 2):
        x = self.norm(self.linear(x)) * self.factor + self.shift
        if self.training:
            x = x + 1
        return self.drop(x) * times

    @torch.jit.export
    def other(self, x):
        return self.linear(x) * self.factor


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.lstm = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)]), nn.LSTM(4, 4)

    def forward(self, x, times: int = 2):
        for _ in range(times):
            for layer in self.layers:
                x = torch.relu(layer(x))
        return self.lstm(x)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen.add_(x.detach().sum(0))
        y = self.linear(x)
        y += 1
        return y, self.seen


def scripted(kind):
    return lambda: torch.jit.script(kind())


def traced():
    return torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.ones(3, 4))


def loaded():
    written = io.BytesIO()
    torch.jit.save(torch.jit.script(Scripted()), written)
    written.seek(0)
    return torch.jit.load(written)


def frozen():
    return torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()))


def outcome(make, compile, changes):
    """What each call gives and does, with a change of the module before each; and how many programs there are."""
    torch.manual_seed(0)
    module = make()
    called, found = compile(module), []
    for change in changes:
        change(module)
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        result = called(x)
        results = [t for t in torch.utils._pytree.tree_leaves(result) if t.requires_grad]
        gradients = torch.autograd.grad(
            sum(t.sum() for t in results), [x, *module.parameters()], allow_unused=True
        )  # TorchScript itself rounds gradients otherwise from its second run on
        found.append(([t.detach().clone() for t in results], gradients, [b.clone() for b in module.buffers()]))
    return found, len(getattr(called, "specializations", ()))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    return a is b if a is None else len(a) == len(b) and all(map(same, a, b))


def again(module):
    """Nothing changes."""


MODULES = {
    "scripted": scripted(Scripted),
    "with lists of tensors": scripted(Recurrent),
    "that writes": scripted(Counting),
    "traced": traced,
    "loaded": loaded,
    "frozen": frozen,
    "inside another": lambda: nn.Sequential(nn.Linear(4, 4), torch.jit.script(Scripted())),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_modules_of_torchscript_are_recorded(make):
    expected, _ = outcome(make, lambda module: module, [again, again])
    for compile in (lambda m: foregrad.aot_module(m, nop), lambda m: foregrad.aot_function(lambda x: m(x), nop)):
        found, programs = outcome(make, compile, [again, again])
        assert same(found, expected) and programs == 1
        assert torch.equal(found[0][0][0], expected[0][0][0])


def halve(module):
    module.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in module.state_dict().items()})


CHANGES = {
    "evaluation": (lambda m: m.eval(), 2),
    "an attribute": (lambda m: setattr(m, "factor", 7), 2),
    "a tensor": (lambda m: setattr(m, "shift", torch.full((4,), 9.0)), 2),
    "its state": (halve, 1),
}


@pytest.mark.parametrize(("change", "programs"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_module_is_seen(change, programs):
    expected, _ = outcome(scripted(Scripted), lambda module: module, [again, change])
    for compile in (lambda m: foregrad.aot_module(m, nop), lambda m: foregrad.aot_function(lambda x: m(x), nop)):
        found, count = outcome(scripted(Scripted), compile, [again, change])
        assert same(found, expected) and count == programs


def test_other_methods_and_children_are_called():
    module = torch.jit.script(Scripted())
    x = torch.ones(3, 4)
    program = foregrad.aot_function(lambda x: (module.other(x), module.linear(x), module(x, times=5).shape), nop)
    found = program(x)
    assert torch.equal(found[0], module.other(x)) and torch.equal(found[1], module.linear(x))


def test_a_wrong_call_has_the_error_of_eager():
    module = torch.jit.script(Scripted())
    x = torch.ones(3, 4)
    for args, kwargs in (((x, 1, 2), {}), ((x,), {"unknown": 1}), ((), {})):
        with pytest.raises(RuntimeError) as eager:
            module(*args, **kwargs)
        with pytest.raises(RuntimeError) as compiled:
            foregrad.aot_module(module, nop)(*args, **kwargs)
        assert str(compiled.value) == str(eager.value)


def test_a_traced_function_may_hold_tensors():
    table = torch.arange(4.0)
    function = torch.jit.trace(lambda x: x * table, torch.ones(4))
    compiled = foregrad.aot_function(lambda x: function(x) + 1, nop)
    x = torch.ones(4, requires_grad=True)
    compiled(x).sum().backward()
    assert torch.equal(compiled(x), table + 1) and torch.equal(x.grad, table)


class Assigning(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.linear = 0, nn.Linear(4, 4)

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if bool(x.sum() > 0):
            return self.linear(x)
        return x


@pytest.mark.usefixtures("reads_refused")
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [(Assigning, UnsupportedError, "'calls'"), (Branching, DataDependentError, "depends on the data")],
)
def test_what_cannot_be_is_refused_and_changes_nothing(kind, error, words):
    module = torch.jit.script(kind())
    with pytest.raises(error, match=words):
        foregrad.aot_module(module, nop)(torch.ones(3, 4))
    assert getattr(module, "calls", 0) == 0
    assert module(torch.ones(3, 4)).requires_grad


@pytest.mark.parametrize(("name", "value"), [("factor", 5), ("shift", torch.zeros(4))])
def test_what_python_assigns_to_it_once_is_assigned(name, value):
    module = torch.jit.script(Scripted()).eval()

    def program(x):
        setattr(module, name, value)
        return module(x, times=1)

    compiled, x = foregrad.aot_function(program, nop), torch.ones(3, 4)
    for _ in range(3):
        assert torch.equal(compiled(x), program(x))
        assert getattr(module, name) is value
    assert len(compiled.specializations) == 1


def test_what_python_assigns_to_it_at_every_call_is_refused_and_put_back():
    module = torch.jit.script(Scripted())

    def program(x):
        module.factor += 1
        return module(x)

    with pytest.raises(StateChangeError, match="factor"):
        foregrad.aot_function(program, nop)(torch.ones(3, 4))
    assert module.factor == 3


def twice_and_one(x):
    return x * 2 + 1


@pytest.mark.parametrize("inside", [False, True])
def test_numbers_in_what_is_traced(inside):
    """TorchScript compares them as tensors, among its own operators."""
    program = (
        (lambda x: torch.jit.trace(twice_and_one, x)(x)) if inside else torch.jit.trace(twice_and_one, torch.ones(3))
    )
    x = torch.randn(3, requires_grad=True)
    compiled = foregrad.aot_function(program, nop)
    assert torch.equal(compiled(x), twice_and_one(x))
    assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], torch.full((3,), 2.0))


@torch.jit._script_if_tracing
def read_where_nothing_is_traced(x):
    return x * float(x.detach().numpy().sum())


def test_a_refusal_where_torchscript_may_trace_is_the_refusal():
    with pytest.raises(DataDependentError, match=r"numpy\(\) of a recorded tensor"):
        foregrad.aot_function(read_where_nothing_is_traced, nop)(torch.ones(3))
