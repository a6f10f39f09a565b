"""F-2: what a program changes at its first call only, that call changes, and the next one is recorded from there."""

import collections
import functools
import logging
import os
import random
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import (
    DataDependentError,
    EagerFallbackWarning,
    EscapeError,
    FirstCallError,
    ForegradError,
    StateChangeError,
)
from helpers import leaf, nop, plain


class Box:
    """Something that holds a value and that no call can make again."""

    def __init__(self, value):
        self.value = value


class Model(nn.Module):
    """Calls a function with itself. Some state to change."""

    def __init__(self, body):
        super().__init__()
        self.layer, self.body = nn.Linear(3, 3), body
        self.ready, self.calls, self.kept, self.table = False, 0, [], {}
        self.order = collections.OrderedDict(a=1, b=2)

    def forward(self, x):
        return self.body(self, x)


def a_flag(m, x):
    if not m.ready:
        m.ready = True
    return m.layer(x)


def hooks_that_a_library_installs(m, x):
    if not m.ready:
        m.ready = True
        m.layer.register_forward_hook(lambda module, args, output: output * 2)
    return m.layer(x)


def a_buffer_that_is_not_saved(m, x):
    if not hasattr(m, "mask"):
        m.register_buffer("mask", torch.rand(x.shape[-1]), persistent=False)
    return m.layer(x) * m.mask


def a_parameter(m, x):
    if not hasattr(m, "scale"):
        m.scale = nn.Parameter(torch.rand(x.shape[-1]))
    return m.layer(x) * m.scale


def a_module(m, x):
    if not hasattr(m, "head"):
        m.head = nn.Linear(x.shape[-1], 2)
    return m.head(m.layer(x))


def an_object_with_a_tensor(m, x):
    if not m.kept:
        m.kept.append(Box(torch.rand(3)))
    return m.layer(x) * m.kept[0].value


def a_number_that_is_drawn(m, x):
    if not m.ready:
        m.calls, m.ready = random.randrange(5), True
    return m.layer(x) * m.calls


def an_order(m, x):
    m.order.move_to_end("a")
    return m.layer(x) * next(iter(m.order.values()))


def modes_of_modules(m, x):
    m.layer.eval()
    return m.layer(x)


def a_parametrization(m, x):
    if not m.ready:
        nn.utils.parametrizations.weight_norm(m.layer)
        m.ready = True
    return m.layer(x)


def a_module_that_writes_to_its_buffers(m, x):
    if not hasattr(m, "norm"):
        m.norm = nn.BatchNorm1d(3)
    return m.norm(m.layer(x)) * m.norm.num_batches_tracked


def hooks_on_gradients(m, x):
    if not m.ready:
        m.layer.weight.register_hook(lambda gradient: gradient * 2)
        m.layer.register_full_backward_hook(lambda module, before, after: None)
        m.ready = True
    return m.layer(x * m.layer.bias)  # what it is given requires grad


def weights_that_are_frozen(m, x):
    m.layer.bias.requires_grad_(False)
    m.ready = True
    return m.layer(x)


def a_registry_of_a_class(m, x):
    kind = type(m.kept)  # of no interest: the class below is
    if "kind" not in Registry.known:
        Registry.known["kind"] = kind
        Registry.filled = True
    return m.layer(x)


class Registry:
    known, filled = {}, False


ONCE = [
    a_flag,
    hooks_that_a_library_installs,
    a_buffer_that_is_not_saved,
    a_parameter,
    a_module,
    an_object_with_a_tensor,
]
ONCE += [a_parametrization, a_module_that_writes_to_its_buffers, hooks_on_gradients, weights_that_are_frozen]
ONCE += [a_number_that_is_drawn, an_order, modes_of_modules, a_registry_of_a_class]


def three_steps(model, program):
    """What three steps of training show: results, gradients, random states."""
    seen = []
    for step in range(3):
        torch.manual_seed(step)
        random.seed(step)
        result = program(plain(2, 3) * (step + 1))
        result.square().sum().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        seen.append((result.detach(), grads, dict(model.named_buffers()), torch.get_rng_state(), random.getstate()))
    return seen


@pytest.mark.parametrize("body", ONCE, ids=lambda body: body.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_the_first_call_makes_the_change_and_the_next_ones_are_compiled(body, dynamic):
    seen = []
    for side in ("eager", "compiled"):
        Registry.known, Registry.filled = {}, False
        torch.manual_seed(0)
        model = Model(body)
        program = foregrad.aot_module(model, nop, dynamic=dynamic) if side == "compiled" else model
        seen.append(three_steps(model, program))
        state = {name: value for name, value in vars(model).items() if type(value) in (bool, int, dict)}
        seen[-1].append({name: v for name, v in state.items() if not name.startswith("_")})
    torch.testing.assert_close(*seen, rtol=0, atol=0)
    assert len(program.specializations) == 1


def lazy_layers():
    return nn.Sequential(
        nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2), nn.Dropout()
    )


class WithAnUnusedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 2), nn.LazyLinear(3)

    def forward(self, x):
        return self.used(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [lazy_layers, WithAnUnusedLayer], ids=["used", "unused"])
@pytest.mark.parametrize("as_function", [False, True])
def test_lazy_modules_get_their_shapes_at_the_first_call(make, as_function):
    seen, texts = [], []
    for side in ("eager", "compiled"):
        torch.manual_seed(0)
        module = program = make()
        if side == "compiled":
            program = foregrad.aot_function(lambda x, m=module: m(x), nop) if as_function else None
            program = program or foregrad.aot_module(module, nop)
        seen.append([])
        for step in range(3):
            torch.manual_seed(step)
            result = program(plain(2, 3, 8) * (step + 1))
            result.sum().backward()
            known = [p for p in module.parameters() if not nn.parameter.is_lazy(p)]
            seen[-1].append((result.detach(), [p.grad.clone() for p in known], torch.get_rng_state()))
        texts.append(str(module))
    torch.testing.assert_close(*seen, rtol=0, atol=0)
    assert texts[0] == texts[1]
    assert len(program.specializations) == 1


def test_a_cache_of_masks_is_filled_for_each_size_by_the_call_that_first_has_it():
    made = []

    @functools.lru_cache
    def mask(size):
        made.append(size)
        return torch.arange(size) * 2.0

    compiled = foregrad.aot_function(lambda x: x * mask(x.shape[0]), nop)
    for size in (3, 3, 4, 3, 4, 4, 3):
        torch.testing.assert_close(compiled(plain(size)), plain(size) * torch.arange(size) * 2.0)
    assert mask.cache_info().currsize == 2 and made == [3] * made.count(3) + [4] * made.count(4)
    assert type(mask(3)) is torch.Tensor and mask(3).tolist() == [0, 2, 4]


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_grows_with_the_largest_size_so_far(dynamic):
    def body(m, x):
        size = x.shape[0]
        if size > m.calls:
            m.calls = size
            m.kept[:] = [Box(torch.arange(float(size)).cos())]
        return m.layer(x) * m.kept[0].value[:size, None]

    torch.manual_seed(0)
    model, other = Model(body), Model(body)
    other.load_state_dict(model.state_dict())
    compiled = foregrad.aot_module(model, nop, dynamic=dynamic)
    for size in (2, 2, 4, 4, 3, 3, 2, 5, 5, 4):
        torch.testing.assert_close(compiled(plain(size, 3)), other(plain(size, 3)), rtol=0, atol=0)
        assert model.calls == other.calls


# ----------------------------------------------------------------------------------------- what stays refused
def counts(m, x):
    m.ready = True
    m.calls += 1
    return x.sin()


def counts_in_what_it_has_made(m, x):
    if "box" not in m.table:
        m.table["box"] = Box(0)
    m.table["box"].value += 1
    return x.sin()


def toggles(m, x):
    m.ready = not m.ready
    return x.sin()


def logs(m, x):
    m.kept.append(Box(x.shape))
    return x.sin()


def keeps_the_last_argument(m, x):
    if not m.kept or m.kept[0].value is not x:
        m.kept[:] = [Box(x)]
    return x.sin()


def keeps_a_new_object_at_each_call(m, x):
    m.table["last"] = Box(x * 2)
    return x.sin()


def draws(m, x):
    m.ready = True
    return x * random.random()


def exchanges_a_class(m, x):
    m.layer.__class__ = Other if type(m.layer) is nn.Linear else nn.Linear
    return m.layer(x)


class Other(nn.Linear):
    pass


EVERY = [
    exchanges_a_class,
    counts,
    counts_in_what_it_has_made,
    toggles,
    logs,
    keeps_the_last_argument,
    keeps_a_new_object_at_each_call,
    draws,
]


@pytest.mark.parametrize("body", EVERY, ids=lambda body: body.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_what_changes_at_every_call_is_refused_at_the_first_one(body, dynamic):
    model, before = Model(body), random.getstate()
    for _ in range(2):
        with pytest.raises(ForegradError, match="fallback='eager'"):
            foregrad.aot_module(model, nop, dynamic=dynamic)(plain(2, 3))
        assert (model.ready, model.calls, model.kept, model.table) == (False, 0, [], {})
        assert random.getstate() == before and type(model.layer) is nn.Linear


def test_what_a_backward_changes_is_refused():
    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, held):
            ctx.held = held
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            ctx.held.ready = True
            return gradient * 2, None

    def body(m, x):
        m.calls = 3
        return Counting.apply(x, m)

    model = Model(body)
    model.calls = 3
    with pytest.raises(StateChangeError, match="changes ready"):
        foregrad.aot_module(model, nop)(leaf(2))
    assert not model.ready


@pytest.mark.usefixtures("reads_refused")
def test_the_last_error_is_that_of_the_next_call():
    """A program that reads data once it is set up is refused for that."""

    def body(m, x):
        if m.ready:
            return x * x.sum().item()
        m.ready = True
        return x

    model = Model(body)
    with pytest.raises(DataDependentError, match="item"):
        foregrad.aot_module(model, nop)(plain(2))
    assert not model.ready


def test_calls_that_are_all_first_ones_end():
    def body(m, x):
        if not m.ready:
            m.ready = True
        return x.sin()

    model = Model(body)
    compiled = foregrad.aot_module(model, nop)
    limit = foregrad.config.max_specializations
    for _ in range(limit):
        model.ready = False
        compiled(plain(2))
        assert model.ready
    model.ready = False
    with pytest.raises(StateChangeError, match=rf"{limit} calls in a row .*changes ready at its first call"):
        compiled(plain(2))
    assert not model.ready and not compiled.specializations


def test_first_calls_between_compiled_ones_do_not_end():
    """A model that is set up anew for each sequence."""

    def body(m, x):
        if not m.ready:
            m.ready = True
        return x.sin()

    model = Model(body)
    compiled = foregrad.aot_module(model, nop)
    for _ in range(2 * foregrad.config.max_specializations):
        model.ready = False
        for _ in range(3):
            torch.testing.assert_close(compiled(plain(2)), plain(2).sin())
    assert len(compiled.specializations) == 1


def test_with_a_fallback_the_program_is_compiled_all_the_same():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = foregrad.aot_module(Model(a_flag), nop, fallback="eager")
        for _ in range(2):
            compiled(plain(2, 3))
    assert len(compiled.specializations) == 1
    with pytest.warns(EagerFallbackWarning, match="changes calls"):
        foregrad.aot_module(Model(counts), nop, fallback="eager")(plain(2))


@pytest.mark.parametrize("body", [a_flag, a_parameter, an_object_with_a_tensor], ids=lambda body: body.__name__)
def test_where_nothing_can_run_the_program_is_to_be_called_before(body):
    model = Model(body)
    for _ in range(2):
        with pytest.raises(FirstCallError, match=r"at its first call, and not again.*call it once before"):
            foregrad.capture(model, plain(2, 3))
    with pytest.raises(StateChangeError, match="call it once before"):
        foregrad.export.aot_export_module(model, (plain(2, 3),), trace_joint=False)
    assert not model.ready and not model.kept and not hasattr(model, "scale")
    model(plain(2, 3))
    assert foregrad.capture(model, plain(2, 3)).joint.is_training


# -------------------------------------------------------------------------------------------------- as in eager
def test_an_error_of_the_first_call_is_eagers_and_leaves_what_eager_leaves():
    def body(m, x):
        m.ready = True
        return m.layer.weight[x]

    model = Model(body)
    compiled = foregrad.aot_module(model, nop)
    with pytest.raises(IndexError, match="out of bounds") as caught:
        compiled(torch.tensor([7]))
    assert model.ready and caught.value.__context__ is None
    torch.testing.assert_close(compiled(torch.tensor([1])), model.layer.weight[[1]])


def test_an_error_of_the_second_call_is_raised_by_the_second_call():
    def body(m, x):
        if m.ready:
            raise KeyError("again")
        m.ready = True
        return x.sin()

    compiled = foregrad.aot_module(Model(body), nop)
    torch.testing.assert_close(compiled(plain(2)), plain(2).sin())
    with pytest.raises(KeyError, match="again"):
        compiled(plain(2))


def test_a_tensor_that_nothing_can_take_away_again_is_refused():
    import queue

    held = queue.SimpleQueue()
    put = held.put  # a function of Python's: nobody sees what is behind it

    def body(m, x):
        if not m.ready:
            m.ready = True
            put(x * 2)
        return x.sin()

    model = Model(body)
    with pytest.raises(EscapeError):
        foregrad.aot_module(model, nop)(plain(2))
    assert not model.ready


def test_threads_that_call_for_the_first_time_make_the_change_once():
    def body(m, x):
        if not m.ready:
            m.calls += 1
            started.wait(0.05)
            m.ready = True
        return m.layer(x)

    started = threading.Event()
    model = Model(body)
    compiled, results = foregrad.aot_module(model, nop), []
    threads = [threading.Thread(target=lambda: results.append(compiled(plain(2, 3)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (model.calls, model.ready, len(compiled.specializations)) == (1, True, 1)
    for result in results:
        torch.testing.assert_close(result, model.layer(plain(2, 3)))


def test_a_module_that_is_an_argument():
    def step(model, x):
        return model(x).sum()

    compiled, model = foregrad.aot_function(step, nop), Model(hooks_that_a_library_installs)
    for _ in range(3):
        torch.testing.assert_close(compiled(model, plain(2, 3)), (model.layer(plain(2, 3))).sum())
    assert len(model.layer._forward_hooks) == len(compiled.specializations) == 1


def test_nothing_of_the_trial_stays_alive():
    made = []

    def body(m, x):
        if not m.kept:
            m.kept.append(Box(x * 2))
            made.append(weakref.ref(m.kept[0]))
        return m.layer(x) * m.kept[0].value

    model = Model(body)
    compiled = foregrad.aot_module(model, nop)
    x = plain(2, 3)
    gone = weakref.ref(x)
    compiled(x)
    assert [find() is None for find in made] == [True] * (len(made) - 1) + [False] or len(made) == 1
    del x
    assert gone() is None
    assert type(model.kept[0].value) is torch.Tensor


def test_a_warning_that_is_logged_once(caplog):
    log = logging.getLogger("of the model")

    @functools.lru_cache
    def once(text):
        log.warning(text)

    def body(m, x):
        once("deprecated")
        if not m.ready:
            m.ready = True
        return m.layer(x)

    compiled = foregrad.aot_module(Model(body), nop)
    for _ in range(3):
        compiled(plain(2, 3))
    assert "deprecated" in caplog.text and once.cache_info().currsize == 1


def test_an_environment_variable_that_is_set(monkeypatch):
    """M-1: a call sets it if it is not what the program sets it to."""

    def body(m, x):
        os.environ["OF_THE_MODEL"] = "1"
        return m.layer(x)

    compiled = foregrad.aot_module(Model(body), nop)
    for _ in range(3):
        monkeypatch.delenv("OF_THE_MODEL", raising=False)
        for _ in range(2):
            compiled(plain(2, 3))
            assert os.environ["OF_THE_MODEL"] == "1"


def test_a_handler_that_is_added():
    log = logging.getLogger("that gets a handler")

    def body(m, x):
        if not log.handlers:
            log.addHandler(logging.NullHandler())
        return m.layer(x)

    compiled = foregrad.aot_module(Model(body), nop)
    for _ in range(3):
        log.handlers.clear()
        for _ in range(2):
            compiled(plain(2, 3))
            assert len(log.handlers) == 1


def test_one_compiled_program_calls_another_one_at_its_first_call():
    inner = foregrad.aot_function(torch.sin, nop)

    def body(m, x):
        if not m.ready:
            m.ready = True
        return inner(x) * 2

    compiled = foregrad.aot_module(Model(body), nop)
    for _ in range(3):
        torch.testing.assert_close(compiled(plain(2)), plain(2).sin() * 2)
    assert len(compiled.specializations) == 1


def test_the_first_call_may_be_made_without_gradients():
    model = Model(a_flag)
    compiled = foregrad.aot_module(model, nop)
    with torch.no_grad():
        assert not compiled(plain(2, 3)).requires_grad
    assert compiled(plain(2, 3)).requires_grad and len(compiled.specializations) == 1
