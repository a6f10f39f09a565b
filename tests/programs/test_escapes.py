"""What a program leaves behind: tensors on modules, in `.grad` and anywhere else, and other changes of objects."""

import collections
import contextvars
import functools
import gc
import io
import itertools
import pickle
import queue
import random
import sys
import threading
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import foregrad
from checking import check_core
from foregrad.errors import CaptureError, EscapeError, StateChangeError, UnsupportedError
from helpers import leaf, nop, plain


class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))


class Net(nn.Module):
    """A parameter, a buffer, a plain tensor, a child, and a body given as a function."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(plain(2))
        self.register_buffer("state", plain(2) * 10)
        self.plain = plain(2) * 100
        self.child = Child()

    def forward(self, *args):
        return self.body(self, *args)


def a_result(m, x):
    m.made = x * 2
    return m.made + 1


def what_is_returned(m, x):
    m.made = x * m.weight
    return m.made, m.made.view(-1, 1)


def an_input(m, x):
    m.made = x
    return x * 2


def a_view_of_an_input(m, x):
    m.made = x[1:]
    return x * 2


def a_view_of_a_result(m, x):
    y = x * m.weight
    m.made, m.plain = y[1:], y.detach()
    return y


def a_written_input(m, x):
    m.made = x
    x.add_(1)
    m.made.mul_(2)
    return m.made * m.weight


def the_parameter(m, x):
    m.made = m.weight
    m.plain = m.weight.view(2, 1)
    return x * m.made


def over_a_plain_tensor(m, x):
    m.plain = m.plain + x.detach()
    return m.plain * m.weight


def over_a_buffer(m, x):
    m.state = m.state + x.detach()
    return m.state * m.weight


def over_a_buffer_by_an_input(m, x):
    m.state = x.detach()
    return m.state * m.weight


def over_a_buffer_that_is_written_then(m, x):
    old = m.state
    m.state = old * 2
    old.add_(1)
    m.state.sub_(x.detach())
    return old * m.weight


def over_a_buffer_with_itself(m, x):
    m.state = m.state
    return x * m.state


def twice(m, x):
    m.made = x * 2
    m.made = m.made * 3
    return m.made - x


def set_then_removed(m, x):
    m.made = x * 2
    y = m.made + 1
    del m.made
    return y


def nothing_in_its_place(m, x):
    y = m.plain * x
    m.plain = None
    m.state = None
    return y


def on_a_child(m, x):
    m.child.made = x * 3
    m.child.seen = x.detach()[:2] + m.child.seen
    return m.child.made * m.weight


def on_both(m, x):
    m.made = m.child.made = x * 3
    return m.made


def exchanged(m, x):
    m.state, m.plain = m.plain, m.state
    return m.state * x


def registered(m, x):
    m.register_buffer("made", x.detach() * 2)
    return m.made * m.weight


def without_grad(m, x):
    with torch.no_grad():
        m.made = x * m.weight
    return m.made


def random_numbers(m, x):
    m.made = torch.rand_like(x)
    return m.made * x


BODIES = [a_result, what_is_returned, an_input, a_view_of_an_input, a_view_of_a_result, a_written_input, the_parameter]
BODIES += [over_a_plain_tensor, over_a_buffer, over_a_buffer_by_an_input, over_a_buffer_that_is_written_then, twice]
BODIES += [over_a_buffer_with_itself, set_then_removed, nothing_in_its_place, on_a_child, on_both, exchanged]
BODIES += [registered, without_grad, random_numbers]
ARGUMENTS = {"plain": plain, "leaf": leaf, "result": lambda n: leaf(n) * 1}


@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_attributes_that_a_module_sets(body):
    """F-9: after the call the module holds what it would hold in eager."""
    for name, make in ARGUMENTS.items():
        if not (name == "leaf" and body is a_written_input):
            check_core(Net(body), make(2))
    check_core(Net(body), plain(2), training=False)


@pytest.mark.parametrize("body", [b for b in BODIES if b is not nothing_in_its_place], ids=lambda b: b.__name__)
def test_attributes_call_after_call(body):
    """F-2, F-9: each call goes on from what the last one left, and the programs do not grow without end."""

    def play(wrap):
        module, seen = Net(body), []
        call = wrap(module)
        for step in range(1, 6):
            torch.manual_seed(step)
            seen.append(call(plain(2) / step)[0].tolist())
            held = [getattr(module, name, None) for name in ("made", "plain", "state")]
            seen.append([None if t is None else (t.detach().tolist(), t.requires_grad) for t in held])
        return seen, call

    expected, _ = play(lambda module: module)
    got, compiled = play(lambda module: foregrad.aot_module(module, nop))
    assert got == expected
    assert len(compiled.specializations) <= 2


def test_one_can_differentiate_through_an_attribute():
    """F-9"""

    def play(wrap):
        module = Net(what_is_returned)
        module_call = wrap(module)
        out, _ = module_call(leaf(2))
        (module.made * 3).sum().backward()
        return module.made is out, module.weight.grad.tolist(), module.made.grad_fn is not None

    assert play(lambda module: foregrad.aot_module(module, nop)) == play(lambda module: module)


def test_a_function_sets_an_attribute_of_a_module_that_it_closes_over():
    """F-14"""
    net = Net(None)

    def program(x):
        net.made = x * net.weight
        net.child.seen = net.child.seen + 1
        return net.made.sum()

    check_core(program, plain(2))
    check_core(program, leaf(2))


def test_attributes_do_not_keep_recorded_tensors():
    """F-9: what is held is an ordinary tensor."""
    module = Net(a_view_of_a_result)
    foregrad.aot_module(module, nop)(plain(2))
    assert type(module.made) is type(module.plain) is torch.Tensor
    assert module.made.tolist() == [4]


def assigned(x, w):
    w.grad = x * 2
    return x + w.detach()


def assigned_an_input(x, w):
    w.grad = x
    return w * x


def assigned_then_written(x, w):
    g = x * 2
    w.grad = g
    g.add_(1)
    return w * g


def accumulated_once(x, w):
    loss = (x * w * w).sum()
    loss.backward()
    return loss.detach()


def accumulated_twice(x, w):
    (x * w).sum().backward()
    (w * w).sum().backward()
    return x * 2


def accumulated_and_returned(x, w):
    loss = (x * w * w).sum()
    loss.backward(retain_graph=True)
    return loss


def accumulated_beside_a_result(x, w):
    (w * 3).sum().backward()
    return x * w


def accumulated_for_some(x, w):
    torch.autograd.backward((x * w).sum(), inputs=[w])
    return x + 1


def accumulated_through_a_custom_tangent(x, w):
    (w.sin()).backward(x.detach())
    return w.detach() * 1


def read_back(x, w):
    (x * w).sum().backward()
    return w.grad * 2


def a_step_of_descent(x, w):
    w.grad = None
    loss = (x * w).square().sum()
    loss.backward()
    with torch.no_grad():
        w.sub_(0.1 * w.grad)
    return loss.detach()


def cleared(x, w):
    w.grad = None
    return x * w


def of_a_result(x, w):
    h = w * 2
    h.retain_grad()
    (h * x).sum().backward()
    return h.grad + 1


IN_GRAD = [assigned, assigned_an_input, assigned_then_written, accumulated_once, accumulated_twice, read_back, cleared]
IN_GRAD += [accumulated_and_returned, accumulated_beside_a_result, accumulated_for_some]
IN_GRAD += [accumulated_through_a_custom_tangent, a_step_of_descent, of_a_result]


def with_a_gradient(*shape):
    w = leaf(*shape)
    w.grad = plain(*shape) * 100
    return w


@pytest.mark.parametrize("program", IN_GRAD, ids=lambda p: p.__name__)
def test_gradients_that_a_program_leaves(program):
    """J-5, F-14: on arguments, also where there was one before."""
    for x in (plain(2), leaf(2)):
        if not (x.requires_grad and program is assigned_an_input):
            check_core(program, x, leaf(2))
    check_core(program, plain(2), with_a_gradient(2))
    check_core(program, plain(2), nn.Parameter(plain(2)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_gradient_of_an_argument_that_is_no_leaf():
    def program(x):
        return x * 2 if x.grad is None else x + x.grad

    call = foregrad.aot_function(program, nop)
    x = leaf(3) * 1
    torch.testing.assert_close(call(x), program(x))
    for gradient in (plain(3), plain(3) * 5):
        x.grad = gradient
        torch.testing.assert_close(call(x), program(x))
    assert len(call.specializations) == 2


def test_a_gradient_of_another_shape_is_refused():
    w = with_a_gradient(2)
    w.data = plain(3)
    with pytest.raises(UnsupportedError, match=r"args\[0\] has a gradient of another shape than its own"):
        foregrad.aot_function(lambda w: w * (2 if w.grad is None else 3), nop)(w)


@pytest.mark.parametrize("program", IN_GRAD, ids=lambda p: p.__name__)
def test_gradients_of_parameters(program):
    """F-9"""
    check_core(Net(lambda m, x: program(x, m.weight)), plain(2))


@pytest.mark.parametrize("program", IN_GRAD, ids=lambda p: p.__name__)
def test_gradients_call_after_call(program):
    """F-2: the same object goes on being the gradient where autograd adds to it in place."""

    def play(call):
        w, seen = leaf(2), []
        for step in range(1, 6):
            before = w.grad
            call(plain(2) / step, w)
            seen.append((w.tolist(), None if w.grad is None else w.grad.tolist(), w.grad is before, w._version))
            seen.append(None if before is None else before.tolist())
        return seen

    compiled = foregrad.aot_function(program, nop)
    assert play(compiled) == play(program)
    assert len(compiled.specializations) <= 2


# ------------------------------------------------------------------------------------------------ anywhere else
class Plain:
    """An object of the user's."""


class Slotted:
    __slots__ = ("last",)


KEPT, TABLE = [], {}
LAST = None


def values_in(held):
    """Numbers in the place of tensors, at any depth."""
    if isinstance(held, torch.Tensor):
        return held.detach().tolist()
    if isinstance(held, dict):
        return {key: values_in(value) for key, value in held.items()}
    return type(held)(map(values_in, held)) if isinstance(held, (list, tuple)) else held


def in_a_list_of_a_closure():
    kept = []
    return lambda x: (kept.append(x * 2), x.sin())[1], lambda: kept


def in_a_global_list():
    KEPT.clear()
    return lambda x: (KEPT.append(x * 2), x.sin())[1], lambda: KEPT


def in_a_global_dict():
    TABLE.clear()
    return lambda x: (TABLE.update(last=x * 2), x.sin())[1], lambda: TABLE


def in_a_tuple_in_a_dict():
    cache = {}

    def program(x):
        cache["k"] = (x * 2, [x + 1, "name"])
        return x.sin()

    return program, lambda: cache


def in_an_object():
    state = Plain()

    def program(x):
        state.last = x * 2
        state.both = [x + 1, x + 2]
        return x.sin()

    return program, lambda: vars(state)


def in_a_variable_of_a_closure():
    last = None

    def program(x):
        nonlocal last
        last = x * 2
        return x.sin()

    return program, lambda: last


def in_a_global_variable():
    def program(x):
        global LAST
        LAST = x * 2
        return x.sin()

    return program, lambda: LAST


def in_place_of_another_in_a_list():
    kept = [None, torch.zeros(2)]

    def program(x):
        kept[1] = kept[1] + x
        return kept[1].sin()

    return program, lambda: kept


def in_a_list_of_a_module():
    module = Net(lambda m, x: (m.acts.append(x * 2), x.sin())[1])
    module.acts = [torch.zeros(2)]
    return module, lambda: module.acts


def in_slots():
    state = Slotted()

    def program(x):
        state.last = x * 2
        return x.sin()

    return program, lambda: state.last


def in_a_namespace():
    state = types.SimpleNamespace(last=None)

    def program(x):
        state.last, state.new = x * 2, x * 3
        return x.sin()

    return program, lambda: vars(state)


def in_a_class():
    class Local:
        last = None

    def program(x):
        Local.last = x * 2
        return x.sin()

    return program, lambda: Local.last


def in_an_attribute_of_a_function():
    def program(x):
        program.last = x * 2
        return x.sin()

    return program, lambda: program.last


def in_a_python_module():
    module = types.ModuleType("somewhere")
    module.last = None

    def program(x):
        module.last = x * 2
        return x.sin()

    return program, lambda: module.last


def in_a_deque():
    kept = collections.deque()
    return lambda x: (kept.append(x * 2), x.sin())[1], lambda: list(kept)


def in_a_set():
    kept = set()
    return lambda x: (kept.add(x * 2), x.sin())[1], lambda: sorted(map(values_in, kept))


def in_a_defaultdict():
    kept = collections.defaultdict(list)

    def program(x):
        kept["acts"].append(x * 2)
        return x.sin()

    return program, lambda: dict(kept)


def in_a_context_variable():
    variable = contextvars.ContextVar("variable")
    variable.set(None)
    return lambda x: (variable.set(x * 2), x.sin())[1], variable.get


def in_a_thread_local():
    local = threading.local()
    local.last = None

    def program(x):
        local.last = x * 2
        return x.sin()

    return program, lambda: local.last


def in_a_dict_by_a_forward_hook():
    module, acts = nn.Sequential(nn.Identity(), nn.Tanh()), {}
    module[1].register_forward_hook(lambda m, args, out: acts.__setitem__("tanh", out.detach()))
    return module, lambda: acts


def in_a_list_by_a_forward_hook():
    module, acts = nn.Sequential(nn.Identity(), nn.Tanh()), []

    def keep(module, args, out):
        acts.append(out)

    module[1].register_forward_hook(keep)
    return module, lambda: acts


def in_the_state_of_an_optimizer():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def program(x):
        optimizer.zero_grad()
        loss = (weight * x.detach()).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return program, lambda: {**optimizer.state[weight], "weight": weight}


def beside_what_is_worked_out_once():
    config = Plain()
    config.scale = None

    def program(x):
        if config.scale is None:
            config.scale, config.sizes = 2, [*x.shape]
        return x * config.scale

    return program, lambda: vars(config)


ANYWHERE = [in_a_list_of_a_closure, in_a_global_list, in_a_global_dict, in_a_tuple_in_a_dict, in_an_object]
ANYWHERE += [in_a_variable_of_a_closure, in_a_global_variable, in_place_of_another_in_a_list, in_a_list_of_a_module]


def test_a_full_deque_drops_what_it_holds_longest():
    def calls(compile):
        last = collections.deque(maxlen=2)

        def program(x):
            last.append(x * 2)
            return x.sin()

        compiled = compile(program)
        for i in range(5):
            compiled(torch.full((2,), float(i)))
            yield [item.tolist() for item in last]

    assert [*calls(lambda f: foregrad.aot_function(f, nop))] == [*calls(lambda f: f)]


ANYWHERE += [in_slots, in_a_namespace, in_a_class, in_an_attribute_of_a_function, in_a_python_module, in_a_deque]
ANYWHERE += [in_a_set, in_a_defaultdict, in_a_context_variable, in_a_thread_local, in_a_dict_by_a_forward_hook]
ANYWHERE += [in_a_list_by_a_forward_hook, in_the_state_of_an_optimizer, beside_what_is_worked_out_once]


@pytest.mark.parametrize("make", ANYWHERE, ids=lambda m: m.__name__)
@pytest.mark.parametrize("argument", [plain, leaf], ids=["plain", "leaf"])
def test_tensors_are_put_where_the_program_puts_them(make, argument):
    """F-14: in each call, also where the first one finds nothing there yet."""

    def play(wrap):
        program, look = make()
        call, seen = wrap(program), []
        for step in range(1, 4):
            out = call(argument(2) / step)
            seen.append((values_in(out), values_in(look())))
        return seen

    assert play(lambda f: foregrad.aot_function(f, nop)) == play(lambda f: f)


def into_a_cache():
    @functools.lru_cache
    def doubled(x):
        return x * 2

    return lambda x: doubled(x) + 1, "the cache of .*doubled"


def into_a_queue():
    put = queue.SimpleQueue().put  # a function of Python's: nobody sees what is behind it
    return lambda x: (put(x * 2), x.sin())[1], "a list"


def into_a_context_variable():
    variable = contextvars.ContextVar("variable")
    return lambda x: (variable.set(x * 2), x.sin())[1], "variable"


def into_a_generator():
    def numbers():
        x = yield
        while True:
            x = yield x

    kept = numbers()
    next(kept)
    send = kept.send
    return lambda x: (send(x * 2), x.sin())[1], "a generator"


def into_an_iterator():
    kept = []

    def program(x):
        kept.append(iter([x * 2]))
        return x.sin()

    return program, "kept"


def into_a_list_in_its_backward():
    kept = []

    def program(x):
        y = x * 2
        y.register_hook(lambda g: kept.append(g * 3))
        return y.sin()

    return program, "kept"


ESCAPING = [into_a_cache, into_a_queue, into_a_context_variable, into_a_generator, into_an_iterator]
ESCAPING += [into_a_list_in_its_backward]


@pytest.mark.parametrize("make", ESCAPING, ids=lambda m: m.__name__)
def test_a_tensor_that_escapes_is_refused_by_the_name_of_the_place(make):
    program, place = make()
    with pytest.raises(EscapeError, match=f"escapes into .*{place}.*made at"):
        foregrad.aot_function(program, nop)(leaf(2))


def test_a_tensor_is_put_into_an_argument():
    """Each call has an argument of its own."""
    compiled = foregrad.aot_function(lambda state, x: (setattr(state, "last", x * 2), x.sin())[1], nop)
    for _ in range(2):
        state, x = Plain(), plain(2)
        assert torch.equal(compiled(state, x), x.sin()) and torch.equal(state.last, x * 2)
    assert len(compiled.specializations) == 1


def test_what_a_failed_recording_leaves_behind_cannot_be_used():
    kept = queue.SimpleQueue()
    put = kept.put

    def program(x):
        put(x * 2)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as raised:
        foregrad.aot_function(program, nop)(leaf(2))
    assert "left in a list" in raised.value.__notes__[0]
    left = kept.get()
    for use in (lambda: left + 1, lambda: left.shape, lambda: repr(left), left.sum, lambda: torch.zeros(2).add_(left)):
        with pytest.raises(EscapeError, match="left behind by a recording that has failed"):
            use()


def test_a_recording_that_is_repeated_does_not_find_what_the_first_one_put_elsewhere():
    """The gradient from before the call makes a second recording necessary."""

    @functools.lru_cache
    def doubled(w):
        return w * 2

    def program(w):
        y = doubled(w)
        (w * w).sum().backward()
        return y

    with pytest.raises(EscapeError, match=r"the cache of .*doubled"):
        foregrad.aot_function(program, nop)(with_a_gradient(2))


class KeepsInItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = [x * 2]
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        ctx.more = g * 3
        return g * ctx.kept[0]


def in_a_cycle(x):
    cycle = [x * 2]
    cycle.append(cycle)
    return x.sin()


def in_an_error_that_is_caught(x):
    try:
        y = x * 2
        raise ValueError(y)
    except ValueError as error:
        kept = error
    return x.sin() + kept.args[0]


def in_a_generator_that_is_done(x):
    return sum(y * 2 for y in [x, x + 1])


def in_what_is_packed_for_backward(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda packed: packed[0]):
        return x.sin() * x.cos()


def in_a_checkpoint(x):
    more = {"scale": x * 2}
    return checkpoint(lambda y, m: (y.sin() * m["scale"]).cos(), x, more, use_reentrant=False)


NOT_ESCAPING = [KeepsInItself.apply, in_a_cycle, in_an_error_that_is_caught, in_a_generator_that_is_done]
NOT_ESCAPING += [in_what_is_packed_for_backward, in_a_checkpoint]


@pytest.mark.parametrize("program", NOT_ESCAPING, ids=lambda p: p.__name__)
def test_what_only_the_recording_leads_to_has_not_escaped(program):
    check_core(program, leaf(2))


def test_nothing_that_was_recorded_is_alive_but_for_the_program():
    kept, module = [], Net(a_result)

    def program(x):
        kept.append(module(x))
        return x.sin()

    compiled = foregrad.aot_function(program, nop)
    compiled(leaf(2)).sum().backward()
    assert [type(t) for t in (*kept, module.made)] == [torch.Tensor, torch.Tensor]


# ------------------------------------------------------------------------------------- other changes of objects
def of_an_object():
    counter = Plain()
    counter.n = 0

    def program(x):
        counter.n += 1
        return x * counter.n

    return program, lambda: counter.n


def of_a_list():
    numbers = [1, 2]

    def program(x):
        numbers[0] += 1
        return x * numbers[0]

    return program, lambda: list(numbers)


def of_a_list_that_grows():
    numbers = [1]

    def program(x):
        numbers.append(len(numbers))
        return x * len(numbers)

    return program, lambda: list(numbers)


def of_a_global_dict():
    TABLE.clear()
    TABLE["n"] = 0

    def program(x):
        TABLE["n"] += 1
        return x * TABLE["n"]

    return program, lambda: dict(TABLE)


def of_the_order_of_a_dict():
    table = collections.OrderedDict(a=1, b=2)

    def program(x):
        table.move_to_end(next(iter(table)))
        return x * next(iter(table.values()))

    return program, lambda: list(table)


def of_a_set():
    numbers = {1}

    def program(x):
        numbers.add(len(numbers) + 1)
        return x * len(numbers)

    return program, lambda: set(numbers)


def of_slots():
    counter = Slotted()
    counter.last = 1

    def program(x):
        counter.last += 1
        return x * counter.last

    return program, lambda: counter.last


def of_a_namespace():
    counter = types.SimpleNamespace(n=1)

    def program(x):
        counter.n += 1
        return x * counter.n

    return program, lambda: counter.n


def of_a_class():
    class Local:
        n = 1

    def program(x):
        Local.n += 1
        return x * Local.n

    return program, lambda: Local.n


def of_a_variable():
    n = 1

    def program(x):
        nonlocal n
        n += 1
        return x * n

    return program, lambda: n


def of_a_nested_list():
    table = {"a": [[1]]}

    def program(x):
        table["a"][0].append(2)
        return x * len(table["a"][0])

    return program, lambda: str(table)


def of_a_deque():
    numbers = collections.deque([1, 2], maxlen=2)

    def program(x):
        numbers.append(3)
        return x * numbers[0]

    return program, lambda: list(numbers)


def of_a_bytearray():
    numbers = bytearray(b"ab")

    def program(x):
        numbers[0] += 1
        return x * numbers[0]

    return program, lambda: bytes(numbers)


def of_an_array():
    numbers = pytest.importorskip("numpy").ones(2)

    def program(x):
        numbers[0] += 1
        return x * float(numbers[0])

    return program, numbers.tolist


def of_a_random_generator():
    generator = random.Random(0)
    return lambda x: x * generator.random(), generator.getstate


def of_a_generator_of_numpy():
    generator = pytest.importorskip("numpy").random.default_rng(0)
    return lambda x: x * float(generator.random()), lambda: str(generator.bit_generator.state)


def of_an_argument_that_is_an_object():
    counter = Plain()
    counter.n = 1

    def program(x, counter=counter):
        counter.n += 1
        return x * counter.n

    return program, lambda: counter.n


def of_pythons_random_numbers():
    return lambda x: x * random.random(), random.getstate


def of_numpys_random_numbers():
    numpy = pytest.importorskip("numpy")
    return lambda x: x * float(numpy.random.rand()), lambda: pickle.dumps(numpy.random.get_state())


CHANGES = [of_an_object, of_a_list, of_a_global_dict, of_the_order_of_a_dict, of_a_set]
CHANGES += [of_slots, of_a_namespace, of_a_class, of_a_variable, of_a_deque, of_a_bytearray]
CHANGES += [of_an_array, of_a_random_generator, of_a_generator_of_numpy, of_an_argument_that_is_an_object]
CHANGES += [of_pythons_random_numbers, of_numpys_random_numbers]


@pytest.mark.parametrize("make", [of_a_list_that_grows, of_a_nested_list], ids=lambda m: m.__name__)
def test_plain_values_are_appended_by_each_call(make):
    """F-2: each call finds the list as its recording found it."""
    found = []
    for transform in (lambda f: f, lambda f: foregrad.aot_function(f, nop)):
        program, look = make()
        call = transform(program)
        found.append([(call(plain(2)).tolist(), look()) for _ in range(3)])
    assert found[0] == found[1]


@pytest.mark.parametrize("make", CHANGES, ids=lambda m: m.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_other_changes_are_refused_and_undone(make, dynamic):
    """F-2: a compiled call would not make them again; nor does a second recording start from them."""
    program, look = make()
    before = look()
    for _ in range(2):
        with pytest.raises(StateChangeError, match=r"the program (changes|draws)"):
            foregrad.aot_function(program, nop, dynamic=dynamic)(plain(2))
        assert look() == before


class Held:
    """An object that leads to others by attributes."""


def by_a_variable(iterator):
    return lambda x: x * next(iterator, 0.5)


def by_a_default(iterator):
    def program(x, iterator=iterator):
        return x * next(iterator, 0.5)

    return program


def by_an_attribute(iterator):
    held = Held()
    held.inner = [Held()]
    held.inner[0].numbers = iterator
    return lambda x: x * next(held.inner[0].numbers, 0.5)


def by_a_class(iterator):
    kind = type("Kind", (Held,), {"numbers": iterator})
    return lambda x: x * next(kind.numbers, 0.5)


def by_a_user_dict(iterator):
    held = collections.UserDict(numbers=iterator)
    return lambda x: x * next(held["numbers"], 0.5)


def by_a_chain_map(iterator):
    held = collections.ChainMap({}, {"numbers": [iterator]})
    return lambda x: x * next(held["numbers"][0], 0.5)


def by_a_partial(iterator):
    given = functools.partial(lambda numbers: numbers, iterator)
    return lambda x: x * next(given(), 0.5)


def by_a_second_name(iterator):
    held = Held()
    held.unused = held.numbers = [iterator]
    return lambda x: x * next(held.numbers[0], 0.5)


WAYS = [
    *(by_a_variable, by_a_default, by_an_attribute, by_a_class),
    *(by_a_user_dict, by_a_chain_map, by_a_partial, by_a_second_name),
]


@pytest.mark.parametrize("make", WAYS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("iterate", [iter, itertools.chain, lambda items: (item for item in items)])
def test_an_iterator_is_not_used_up_by_a_program_that_is_refused(make, iterate):
    """F-2: nobody can put back what a recording takes out."""
    iterator = iterate([1.0, 2.0])
    with pytest.raises(UnsupportedError, match=r"the program can reach .*, which is of the type"):
        foregrad.aot_function(make(iterator), nop)(plain(2))
    assert list(iterator) == [1.0, 2.0]


@pytest.mark.usefixtures("reads_refused")
def test_a_refused_program_leaves_no_trace_in_a_cache():
    @functools.lru_cache
    def doubled(x):
        return x * 2

    for program in (lambda x: doubled(x), lambda x: x * doubled(3) * x.sum().item()):
        with pytest.raises(CaptureError):
            foregrad.aot_function(program, nop)(leaf(2))
        assert tuple(doubled.cache_info()) == (0, 0, 128, 0)


def test_a_queue_behind_a_user_dict_is_refused_before_anything_is_put_there():
    held = collections.UserDict(last=queue.SimpleQueue())
    with pytest.raises(UnsupportedError, match=r"which is of the type _queue.SimpleQueue"):
        foregrad.aot_function(lambda x: (held["last"].put(x), x.sin())[1], nop)(plain(2))
    assert held["last"].empty()


def test_a_cache_that_remembers_tensors_is_refused_before_it_remembers_more():
    @functools.lru_cache
    def doubled(x):
        return x * 2

    x = plain(2)
    before = doubled(x)
    with pytest.raises(UnsupportedError, match=r"doubled.*, which remembers what it gave for tensors"):
        foregrad.aot_function(lambda x: doubled(x) + 1, nop)(x)
    assert doubled(x) is before


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.view.__setitem__(0, held.view[0] + 1),
        lambda held: held.text.write("more"),
        lambda held: held.bytes.read(1),
        lambda held: setattr(held.kinds.inner.Inner, "n", held.kinds.inner.Inner.n + 1),
        lambda held: held.kinds.inner.Inner.numbers.pop(),
    ],
)
def test_what_a_refused_program_changed_is_put_back(change):
    class Inner:
        n, numbers = 1, [1, 2, 3]

    class Outer:
        pass

    Outer.Inner = Inner
    held = Held()
    held.view, held.text, held.bytes = memoryview(bytearray(b"ab")), io.StringIO("text"), io.BytesIO(b"bytes")
    held.kinds = type("Kinds", (), {"inner": Outer})
    with pytest.raises(StateChangeError, match="the program changes"):
        foregrad.aot_function(lambda x: (change(held), x.sin())[1], nop)(plain(2))
    assert (bytes(held.view), held.text.getvalue(), held.bytes.tell()) == (b"ab", "text", 0)
    assert Inner.n == 1 and Inner.numbers == [1, 2, 3]


def test_numbers_that_a_refused_program_replaced_by_equal_ones_are_the_old_ones():
    held = Held()
    held.rate, held.calls = float("0.25"), 0
    before = held.rate

    def program(x):
        held.rate = held.rate * 1.0
        held.calls += 1
        return x * held.rate

    with pytest.raises(StateChangeError, match=r"the program changes held.*calls"):
        foregrad.aot_function(program, nop)(plain(2))
    assert held.rate is before


@pytest.mark.parametrize("has_some", [False, True])
def test_a_tensor_that_is_put_on_another_one_is_refused(has_some):
    """At a later call another tensor may be there."""
    other = plain(2)
    if has_some:
        other.given = 1
    before = dict(vars(other))
    with pytest.raises(EscapeError, match=r"escapes into other.*seen"):
        foregrad.aot_function(lambda x: (setattr(other, "seen", x * 2), x.sin())[1], nop)(plain(2))
    assert vars(other) == before


def counting_class():
    class Counting(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            Counting.calls += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    return Counting


@pytest.mark.parametrize("as_argument", [False, True])
def test_a_refused_tensor_of_a_class_of_the_users_has_its_class_as_it_was(as_argument):
    kind = counting_class()
    other = torch.ones(2).as_subclass(kind)
    program = (lambda x, y: x * y) if as_argument else (lambda x, y: x * other)
    with pytest.raises(UnsupportedError, match="__torch_function__"):
        foregrad.aot_function(program, nop)(plain(2), other if as_argument else 1)
    assert kind.calls == 0


def test_hooks_on_all_modules_are_seen_where_modules_are_in_arguments_only():
    totals = {"n": 0}

    def count(module, inputs, output):
        totals["n"] += 1

    handle = nn.modules.module.register_module_forward_hook(count)
    try:
        with pytest.raises(StateChangeError, match="totals"):
            foregrad.aot_function(lambda x, box: box[0](x), nop)(plain(2), [nn.ReLU()])
    finally:
        handle.remove()
    assert totals == {"n": 0}


def test_data_that_makes_an_inference_tensor_is_refused():
    def program(x):
        x.data = x.data * 2
        return x

    x = plain(2)
    with torch.inference_mode(), pytest.raises(UnsupportedError, match="inference tensor"):
        foregrad.aot_function(program, nop)(x)
    assert x.tolist() == [1, 2] and not x.is_inference()


def test_a_key_that_the_program_makes_is_another_one_at_each_call():
    kept, seen = weakref.WeakKeyDictionary(), {}

    def weakly(x):
        y = x * 2
        kept[y] = 1
        return y + 1

    def by_object(x):
        seen[object()] = x * 2
        return x + 1

    for program in (weakly, by_object):
        with pytest.raises(foregrad.ForegradError):
            foregrad.aot_function(program, nop)(plain(2))
    assert not kept and not seen


def test_tensors_are_put_under_objects_that_were_there_before():
    layer, seen = nn.Linear(2, 2), {}
    layer.register_forward_hook(lambda module, inputs, output: seen.update({module: output, (module, 1): output * 2}))
    compiled = foregrad.aot_module(layer, nop)
    for factor in (1, 2):
        result = compiled(plain(1, 2) * factor)
        assert set(seen) == {layer, (layer, 1)}
        torch.testing.assert_close(seen[layer, 1], result * 2)


def _swapped(held):
    def program(x):
        held["a"], held["b"] = held["b"], held["a"]
        return x + held["a"]

    return program


def _pushed(held):
    def program(x):
        held.insert(0, x * 2)
        return x + 1

    return program


def _window(held):
    def program(x):
        held.append(x * 2)
        return sum(held)

    return program


@pytest.mark.parametrize(
    ("make", "start"),
    [
        (_swapped, lambda: {"a": plain(2), "b": plain(2) + 1}),
        (_pushed, lambda: [plain(2), plain(2) * 3]),
        (_window, lambda: collections.deque([plain(2), plain(2) * 3], maxlen=2)),
    ],
)
def test_tensors_that_the_program_found_are_put_elsewhere_unused(make, start):
    compiled_on, eager_on = start(), start()
    compiled, eager = foregrad.aot_function(make(compiled_on), nop), make(eager_on)
    for factor in (1, 2, 3):
        torch.testing.assert_close(compiled(plain(2) * factor), eager(plain(2) * factor))
        held = [[*(kept.values() if isinstance(kept, dict) else kept)] for kept in (compiled_on, eager_on)]
        torch.testing.assert_close(*held)


@pytest.mark.parametrize("make", [lambda x: {x}, lambda x: {x: 1}, lambda x: frozenset([x, 1])])
def test_an_input_that_is_a_key_of_what_the_program_reaches_is_refused(make):
    """What stands for it while recording would be another key."""
    x = plain(2)
    seen = make(x)
    compiled = foregrad.aot_function(lambda x: x * 2 if x in seen else x, nop)
    with pytest.raises(UnsupportedError, match="in which a tensor that it is given is a key"):
        compiled(x)
    torch.testing.assert_close(compiled(plain(3)), plain(3))


def test_a_backward_for_some_results_finds_no_tensor_by_looking_at_a_set():
    kept = set()

    def program(x):
        y = x * 2
        kept.add(y)
        return y + 1

    compiled = foregrad.aot_function(program, nop)
    for _ in range(3):
        x = leaf(2)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((2,), 2.0))
    assert len(kept) == 3


@pytest.mark.parametrize("size", [128, None, 4])
def test_a_cache_that_is_in_use_keeps_what_it_knew(size):
    numbers = {"n": 2.0}

    @functools.lru_cache(maxsize=size)
    def scaled(by):
        return numbers["n"] * by

    before = [scaled(3), scaled(by=4.0)]
    with pytest.raises(EscapeError, match=r"the cache of .*scaled"):
        foregrad.aot_function(lambda x: scaled(x) * scaled(3) * scaled(7), nop)(plain(2))
    assert scaled.cache_info().currsize == 2
    numbers["n"] = 5.0
    assert [scaled(3), scaled(by=4.0)] == before and scaled(7) == 35.0
    assert [scaled(n) for n in range(10, 20)] == [5.0 * n for n in range(10, 20)]


NUMBERS = iter([1.0, 2.0])
FILLED = collections.UserDict(queue=queue.SimpleQueue())
COUNTS = [0]


class Far:
    """Reached through another class."""

    n = 0
    layer = nn.Dropout()

    @classmethod
    def count(cls):
        COUNTS[0] += 1
        return COUNTS[0]


class Near:
    far = Far


def a_count_in_a_class(x):
    Near.far.n += 1
    return getattr(x, "si" + "n")() * Far.n


def a_flag_of_a_module_in_a_class(x):
    Near.far.layer.train(not Near.far.layer.training)
    return getattr(x, "si" + "n")()


def a_count_behind_a_method(x):
    return getattr(x, "si" + "n")() * Near.far.count()


def a_count_behind_a_name_that_is_put_together(x):
    return x * getattr(Near, "fa" + "r").count()


FAR_CHANGES = [
    *(a_count_in_a_class, a_flag_of_a_module_in_a_class),
    *(a_count_behind_a_method, a_count_behind_a_name_that_is_put_together),
]


@pytest.mark.parametrize("program", FAR_CHANGES, ids=lambda p: p.__name__)
@pytest.mark.parametrize("traced", [False, True])
def test_changes_far_from_a_program_that_puts_names_together_are_refused_and_undone(program, traced):
    """F-2: which functions it calls is known when they run, and what they reach is noted just before."""
    tracer = sys.gettrace()
    sys.settrace((lambda *event: None) if traced else None)
    try:
        for _ in range(2):
            with pytest.raises(StateChangeError):
                foregrad.aot_function(program, nop)(plain(2))
            assert (Far.n, Far.layer.training, COUNTS) == (0, True, [0])
    finally:
        sys.settrace(tracer)


def takes_a_number(x):
    return getattr(x, "si" + "n")() * next(NUMBERS)


def takes_a_number_elsewhere(x):
    return getattr(x, "si" + "n")() * takes_a_number(x)


def catches_the_refusal(x):
    try:
        return getattr(x, "si" + "n")() * takes_a_number(x)
    except Exception:
        return x


def fills_a_queue(x):
    FILLED["queue"].put(getattr(x, "si" + "n")())
    return x


USING_UP = [takes_a_number, takes_a_number_elsewhere, catches_the_refusal, fills_a_queue]


@pytest.mark.parametrize("program", USING_UP, ids=lambda p: p.__name__)
def test_what_a_program_that_puts_names_together_would_use_up_is_refused_before(program):
    with pytest.raises(UnsupportedError, match=r"the program can reach .*, which is of the type"):
        foregrad.aot_function(program, nop)(plain(2))
    assert NUMBERS.__reduce__()[-1] == 0 and FILLED["queue"].empty()


def never_called():
    return 1


def test_an_argument_is_kept_on_a_function_that_is_never_called():
    def program(x):
        never_called.last = x
        return getattr(x, "si" + "n")()

    compiled = foregrad.aot_function(program, nop)
    for x in (plain(2), plain(2), plain(3)):
        torch.testing.assert_close(compiled(x), x.sin())
        assert never_called.last is x


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


class Twice(nn.Module):
    """What the parametrization gives is kept in a global dict, which is replaced at the end of the block."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        parametrize.register_parametrization(self.layer, "weight", Symmetric())

    def forward(self, x):
        with parametrize.cached():
            return self.layer(self.layer(x))


def test_what_a_program_keeps_in_a_dict_that_it_drops_is_no_escape():
    gradients = []
    for compile in (lambda module: module, lambda module: foregrad.aot_module(module, nop)):
        torch.manual_seed(0)
        model = Twice()
        called = compile(model)
        for _ in range(3):
            called(plain(3, 4)).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert len(called.specializations) <= 2  # the dict is another one after the first recording


def test_a_parametrization_that_the_caller_caches_is_refused():
    compiled = foregrad.aot_module(Twice(), nop)
    with parametrize.cached(), pytest.raises(UnsupportedError, match="open that block in the program"):
        compiled(plain(3, 4))


def test_what_the_user_has_frozen_is_seen_to_hold_a_tensor():
    """Python's list of what refers to an object leaves frozen objects out."""

    @functools.lru_cache
    def remembered(x):
        return x * 2

    def program(x):
        nn.functional.last = x * 2
        return remembered(x.detach()) + x

    gc.freeze()
    try:
        with pytest.raises(EscapeError, match=r"torch\.nn\.functional\.last|the cache of .*remembered"):
            foregrad.aot_function(program, nop)(plain(2))
    finally:
        gc.unfreeze()
        vars(nn.functional).pop("last", None)
    assert remembered.cache_info().currsize == 0
