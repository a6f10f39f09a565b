"""State that code in a backward reads is read when backward runs, and not when the program was recorded."""

import collections
import gc
import importlib
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad.errors import BackwardError, StateChangeError
from helpers import nop

SCALE = 2.0
SETTINGS = {"scales": [2.0]}
WEIGHT = torch.full((3,), 2.0)


class Config:
    def __init__(self):
        self.scale = 2.0


def compiled_by(function):
    return foregrad.aot_function(function, nop)


def gradients_of(make, transform):
    """Gradients of calls before which nothing changes, and between whose forward and backward something does."""
    call, change, put_back = make(transform)
    found = []
    for changes in (False, True, False, True):
        x = torch.ones(3, requires_grad=True)
        loss = call(x).sum()
        if changes:
            change()
        try:
            loss.backward()
        finally:
            put_back()
        found.append(x.grad)
    return found


def scaling(scale):
    """A custom function that scales gradients by what a function says."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * scale()

    return Scaled.apply


def a_global(transform):
    def assign(value):
        globals()["SCALE"] = value

    return transform(scaling(lambda: SCALE)), lambda: assign(5.0), lambda: assign(2.0)


def items(transform):
    scales = SETTINGS["scales"]
    call = transform(scaling(lambda: SETTINGS["scales"][0]))
    return call, lambda: scales.__setitem__(0, 5.0), lambda: scales.__setitem__(0, 2.0)


def an_object(transform):
    config = Config()
    call = transform(scaling(lambda: config.scale))
    return call, lambda: setattr(config, "scale", 5.0), lambda: setattr(config, "scale", 2.0)


def a_variable(transform):
    scale = 2.0

    def assign(value):
        nonlocal scale
        scale = value

    return transform(scaling(lambda: scale)), lambda: assign(5.0), lambda: assign(2.0)


def the_default_dtype(transform):
    call = transform(scaling(lambda: 2.0 if torch.get_default_dtype() is torch.float32 else 5.0))
    return call, lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)


class Kept(torch.autograd.Function):
    """Keeps an object for its backward."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        scale = ctx.kept.scale if isinstance(ctx.kept, Config) else 2.0 if ctx.kept.training else 5.0
        return gradient * scale, None


def an_object_in_ctx(transform):
    config = Config()
    call = transform(lambda x: Kept.apply(x, config))
    return call, lambda: setattr(config, "scale", 5.0), lambda: setattr(config, "scale", 2.0)


def an_argument_in_ctx(transform):
    config = Config()
    call = transform(Kept.apply)
    return lambda x: call(x, config), lambda: setattr(config, "scale", 5.0), lambda: setattr(config, "scale", 2.0)


def a_module_in_ctx(transform):
    module = nn.Linear(2, 2)
    return transform(lambda x: Kept.apply(x, module)), module.eval, module.train


def hooked(register):
    """A program that gives a hook, which scales what it gets, to something."""

    def make(transform):
        state = {"scale": 2.0}
        call = transform(register(lambda gradient: gradient * state["scale"]))
        return call, lambda: state.update(scale=5.0), lambda: state.update(scale=2.0)

    return make


def of_a_tensor(hook):
    def program(x):
        y = x * 3
        y.register_hook(hook)
        return y * 1

    return program


def of_a_module(hook):
    module = nn.Linear(3, 3)
    nn.init.ones_(module.weight)
    module.register_full_backward_hook(lambda module, given, out: tuple(map(hook, given)))
    return lambda x: module(x)


def of_a_node(hook):
    def program(x):
        y = x * 3
        y.grad_fn.register_hook(lambda given, out: (hook(given[0]), *given[1:]))
        return y * 1

    return program


def of_saved_tensors(hook):
    def program(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, hook):
            return x.exp() * 1

    return program


def in_a_checkpoint(use_reentrant):
    def make(transform):
        state = {"scale": 2.0}
        call = transform(lambda x: checkpoint(lambda x: (x * state["scale"]).sin(), x, use_reentrant=use_reentrant))
        return call, lambda: state.update(scale=5.0), lambda: state.update(scale=2.0)

    return make


def a_module_in_a_checkpoint(transform):
    """Of torch's own classes: no code of the user's runs before there is a hook."""
    layer, handles = nn.SiLU(), []

    def change():
        handles.append(layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,)))

    return (
        transform(lambda x: checkpoint(layer, x, use_reentrant=False)),
        change,
        lambda: [handle.remove() for handle in handles],
    )


PROGRAMS = {
    "a global": a_global,
    "items": items,
    "an object": an_object,
    "a variable": a_variable,
    "the default dtype": the_default_dtype,
    "an object in ctx": an_object_in_ctx,
    "an argument in ctx": an_argument_in_ctx,
    "a module in ctx": a_module_in_ctx,
    "a hook of a tensor": hooked(of_a_tensor),
    "a hook of a module": hooked(of_a_module),
    "a hook of a node": hooked(of_a_node),
    "hooks of saved tensors": hooked(of_saved_tensors),
    "a checkpoint": in_a_checkpoint(use_reentrant=False),
    "a module in a checkpoint": a_module_in_a_checkpoint,
    "a reentrant checkpoint": in_a_checkpoint(use_reentrant=True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_state_is_read_when_backward_runs(name):
    expected = gradients_of(PROGRAMS[name], lambda function: function)
    assert not torch.equal(expected[0], expected[1])
    for wanted, got in zip(expected, gradients_of(PROGRAMS[name], compiled_by), strict=True):
        assert torch.equal(wanted, got)


def test_each_state_is_recorded_once():
    compiled = []

    def backward_compiler(graph, inputs):
        compiled.append(graph)
        return nop(graph, inputs)

    calls = gradients_of(a_global, lambda f: foregrad.aot_function(f, nop, backward_compiler))
    assert len(calls) == 4 and len(compiled) == 2


def test_state_is_read_where_gradients_are_differentiated():
    config = Config()

    def second(function):
        found = []
        for scale in (2.0, 3.0, 2.0):
            config.scale = 2.0
            x = torch.full((3,), 0.5, requires_grad=True)
            y = function(x).sum()
            config.scale = scale
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            found += [first, *torch.autograd.grad(first.sum(), x)]
        return found

    apply = scaling(lambda: config.scale)

    def program(x):
        return apply(x.sin()).exp()

    for wanted, got in zip(second(program), second(compiled_by(program)), strict=True):
        assert torch.allclose(wanted, got)


def test_a_tensor_that_only_the_backward_finds_may_not_be_replaced_in_between(monkeypatch):
    call = compiled_by(scaling(lambda: WEIGHT.exp()))
    x = torch.ones(3, requires_grad=True)
    call(x).sum().backward()
    assert torch.equal(x.grad, WEIGHT.exp())
    loss = call(x).sum()
    monkeypatch.setattr(sys.modules[__name__], "WEIGHT", torch.full((3,), 5.0))
    with pytest.raises(BackwardError, match="WEIGHT"):
        loss.backward()
    x.grad = None
    call(x).sum().backward()  # forward and backward find the new one
    assert torch.equal(x.grad, WEIGHT.exp())


def test_a_tensor_that_the_backward_no_longer_finds_is_named():
    """Parametrizing a module takes the parameter out of it."""
    layer = torch.nn.Linear(3, 3)
    call = compiled_by(lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False))
    loss = call(torch.ones(2, 3)).sum()
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    with pytest.raises(BackwardError, match=r"layer.weight, in which the tensor that was there"):
        loss.backward()


def test_a_parameter_that_is_frozen_before_a_backward_of_some_results():
    """That backward is recorded when it is first asked for."""
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def program(x):
        return first(x), second(x)

    def gradients(call):
        x = torch.ones(2, 3, requires_grad=True)
        results = call(x)
        first.weight.requires_grad_(False)
        results[1].sum().backward()
        results[0].sum().backward()
        first.weight.requires_grad_(True)
        found = [x.grad, first.weight.grad, first.bias.grad, second.weight.grad]
        first.zero_grad(), second.zero_grad()
        return found

    for wanted, got in zip(gradients(program), gradients(compiled_by(program)), strict=True):
        assert (wanted is None and got is None) or torch.equal(wanted, got)


def test_a_list_that_the_backward_changes_is_refused():
    class Appending(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, log):
            ctx.log = log
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            ctx.log.append(1)
            return gradient, None

    with pytest.raises(StateChangeError):
        compiled_by(Appending.apply)(torch.ones(3, requires_grad=True), [])


def test_what_only_a_later_recording_of_the_backward_changes_is_refused():
    config, calls = Config(), 0

    def scale():
        nonlocal calls
        if config.scale != 2.0:
            calls += 1
        return config.scale

    call = compiled_by(scaling(scale))
    x = torch.ones(3, requires_grad=True)
    call(x).sum().backward()
    loss = call(x).sum()
    config.scale = 5.0
    with pytest.raises(StateChangeError, match="calls"):
        loss.backward()
    assert calls == 0


def test_a_program_lets_go_of_its_arguments_and_of_its_module():
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x, config):
            return Kept.apply(x * self.weight, config)

    module, config = Scaling(), Config()
    compiled = foregrad.aot_module(module, nop)
    y = compiled(torch.ones(3, requires_grad=True), config)
    y.sum().backward()
    kept = weakref.ref(module), weakref.ref(module.weight)
    del module, compiled, y
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_a_program_that_runs_while_a_module_is_imported(tmp_path, monkeypatch):
    """What the program reads is compared all the same."""
    (tmp_path / "script_to_import.py").write_text(
        "import test_state_in_backward as tests\n"
        "FOUND = tests.gradients_of(tests.an_object, tests.compiled_by)\n"
        "WANTED = tests.gradients_of(tests.an_object, lambda function: function)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "test_state_in_backward", sys.modules[__name__])
    script = importlib.import_module("script_to_import")
    assert all(map(torch.equal, script.FOUND, script.WANTED))


def test_a_program_without_code_in_its_backward_has_nothing_to_compare():
    compiled = compiled_by(lambda x: x.sin())
    compiled(torch.ones(3, requires_grad=True)).sum().backward()
    assert "state_is_as_it_was" not in compiled.specializations[0].source


def test_a_named_tuple_that_is_made_in_a_backward_is_nothing_to_compare():
    """Its class lives until a collection; without it, each backward would be recorded anew."""

    class Packed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            pair = collections.namedtuple("pair", ["first", "second"])(g, g)
            return pair.first + pair.second

    graphs = []
    compiled = foregrad.aot_function(Packed.apply, lambda graph, inputs: graphs.append(graph) or nop(graph, inputs))
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        y = compiled(x)
        gc.collect()
        y.sum().backward()
        assert x.grad.tolist() == [2.0] * 3
    assert len(graphs) == 2


def test_a_gradient_from_before_the_call_that_only_the_backward_reads_is_an_input():
    weight = torch.ones(3, requires_grad=True)
    (3 * weight).sum().backward()
    run = compiled_by(lambda x: scaling(lambda: weight.grad)(x) + weight)
    x = torch.ones(3, requires_grad=True)
    run(x).sum().backward()
    assert x.grad.tolist() == [3, 3, 3]
