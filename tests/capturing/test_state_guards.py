"""F-2: whatever Python state a program reads, a change of it between two calls shows."""

import abc
import argparse
import array
import builtins
import collections
import contextlib
import contextvars
import copy
import decimal
import enum
import functools
import gc
import importlib
import itertools
import logging
import math
import operator
import os
import queue
import sys
import threading
import types
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import foregrad
from foregrad.errors import UnsupportedError
from helpers import grab, nop, plain

CASES = {}


def case(function):
    """A case is a generator: it yields a program (and arguments), then changes something at each further `yield`."""
    CASES[function.__name__] = function
    return function


class Plain:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def scaled(self, x):
        return x * self.n


class Slotted:
    __slots__ = ("n", "other")

    def __init__(self, n):
        self.n = n


@case
def attribute_of_an_object():
    o = Plain(n=2)
    yield lambda x: x * o.n
    o.n = 3
    yield


@case
def attribute_deep_inside():
    o = Plain(a=Plain(b=[{"c": Plain(d=(Plain(n=2),))}]))
    yield lambda x: x * o.a.b[0]["c"].d[0].n
    o.a.b[0]["c"].d[0].n = 5
    yield


@case
def slot():
    o = Slotted(2)
    yield lambda x: x * o.n
    o.n = 3
    yield
    o.other = 1
    yield


@case
def dict_of_an_object_replaced():
    o = Plain(n=2)
    yield lambda x: x * o.n
    o.__dict__ = {"n": 7}
    yield


@case
def class_of_an_object_replaced():
    class Other(Plain):
        @property
        def m(self):
            return 5

    class First(Plain):
        m = 2

    o = First()
    yield lambda x: x * o.m
    o.__class__ = Other
    yield


@case
def class_attribute():
    class A:
        scale = 2

    class B(A):
        pass

    o = B()
    yield lambda x: x * o.scale
    A.scale = 3
    yield
    B.scale = 4
    yield
    del B.scale
    yield


@case
def class_attribute_that_is_a_list():
    class A:
        table = [[1], object()]

    yield lambda x: x * A.table[0][0]
    A.table[0][0] = 4
    yield


@case
def method_replaced_on_a_class():
    class A:
        def f(self, x):
            return x * 2

    o = A()
    yield lambda x: o.f(x)
    A.f = lambda self, x: x * 3
    yield


@case
def forward_replaced_on_a_class():
    class Net(nn.Module):
        def forward(self, x):
            return x * 2

    net = Net()
    yield lambda x: net(x)
    Net.forward = lambda self, x: x * 3
    yield


@case
def forward_replaced_on_a_class_of_torch():
    net = nn.Sequential(nn.ReLU())
    yield lambda x: net(x)
    before = nn.ReLU.forward
    nn.ReLU.forward = lambda self, x: x * 3
    try:
        yield
    finally:
        nn.ReLU.forward = before
    yield


@case
def function_of_torch_replaced():
    yield lambda x: torch.exp(x)
    before = torch.exp
    torch.exp = lambda x: x * 3
    try:
        yield
    finally:
        torch.exp = before


@case
def functional_replaced():
    net = nn.Sequential(nn.ReLU())
    yield lambda x: net(x) + F.gelu(x)
    before = F.relu, F.gelu
    F.relu = lambda x, inplace=False: x * 3
    try:
        yield
        F.gelu = F.relu
        yield
    finally:
        F.relu, F.gelu = before
    yield


@case
def method_of_tensors_replaced():
    yield lambda x: x.sin()
    torch.Tensor.sin = lambda x: x * 3
    try:
        yield
    finally:
        del torch.Tensor.sin
    yield


@case
def code_defaults_and_keyword_defaults():
    def f(x, n=2, *, m=3):
        return x * n + m

    yield lambda x: f(x)
    f.__defaults__ = (5,)
    yield
    f.__kwdefaults__ = {"m": 9}
    yield
    f.__kwdefaults__["m"] = 10
    yield
    f.__code__ = (lambda x, n=2, *, m=3: x - n - m).__code__
    yield


@case
def attribute_of_a_function():
    def f(x):
        return x * getattr(f, "n", 1)

    yield f
    f.n = 4
    yield
    f.n = 5
    yield


@case
def mutable_default():
    first = [Plain(n=1)]

    def f(x, table=first):
        return x * table[0].n

    yield f
    f.__defaults__[0][0].n = 4
    yield


@case
def namespaces():
    a, b = types.SimpleNamespace(n=2), argparse.Namespace(n=2)
    yield lambda x: x * a.n + b.n
    a.n = 3
    yield
    b.n = 7
    yield
    b.other = 1
    yield


@case
def deque_and_set():
    queue, names = collections.deque([1, 2, Plain(n=3)]), {"a"}
    yield lambda x: x * queue[0] + queue[-1].n + len(names)
    queue.appendleft(5)
    yield
    names.add("b")
    yield
    queue[-1].n = 9
    yield


@case
def set_of_objects():
    a, b = Plain(n=1), Plain(n=2)
    chosen = {a}
    yield lambda x: x * sum(o.n for o in chosen)
    chosen.add(b)
    yield
    b.n = 5
    yield


@case
def arrays():
    nd, raw, numbers = np.array([1.0, 2.0]), bytearray(b"ab"), array.array("d", [1.0])
    yield lambda x: x * float(nd[0]) + raw[0] + numbers[0]
    nd[0] = 7
    yield
    raw[0] = 0
    yield
    numbers[0] = 4.0
    yield


@case
def long_list():
    numbers = list(range(10_000))
    yield lambda x: x * numbers[9_000]
    numbers[9_000] = 1
    yield


@case
def long_list_of_objects():
    many = [Plain(n=i) for i in range(6_000)]
    yield lambda x: x * many[5_000].n
    many[5_000].n = 1
    yield


@case
def dict_with_an_object_among_plain_values():
    table = {"n": 2, "o": object(), "sub": [1]}
    yield lambda x: x * table["n"] * table["sub"][0]
    table["n"] = 3
    yield
    table["sub"][0] = 6
    yield
    table["sub"] = [7]
    yield


@case
def dict_keys_of_another_type():
    table = {1: 2.0, "o": object()}
    yield lambda x: x * (2 if any(k is True for k in table) else 3)
    table.clear()
    table.update({True: 2.0, "o": object()})
    yield


@case
def subclasses_of_containers():
    class Table(dict):
        pass

    class Row(list):
        pass

    table, row = Table(n=2), Row([3])
    table.extra, row.extra = 1, 1
    yield lambda x: x * table["n"] + row[0] + table.extra + row.extra
    table["n"] = 5
    yield
    table.extra = 7
    yield
    row[0] = 8
    yield
    row.extra = 9
    yield


@case
def counters():
    counter, order, default = collections.Counter(a=1), collections.OrderedDict(a=2), collections.defaultdict(int, a=3)
    user = collections.UserDict(a=4)
    yield lambda x: x * counter["a"] + order["a"] + default["a"] + user["a"]
    for table in (counter, order, default, user):
        table["a"] += 10
        yield


@case
def order_of_a_dict():
    order = collections.OrderedDict([("a", 2), ("b", 3), ("o", object())])
    yield lambda x: x * next(iter(order.values()))
    order.move_to_end("a")
    yield


@case
def signed_zeros():
    box = Plain(n=np.float64(0.0), d=decimal.Decimal("0.0"), s={0.0}, f=0.0, c=complex(0, 0.0))
    yield (
        lambda x: (
            x * math.copysign(1, box.n)
            + math.copysign(2, float(box.d))
            + math.copysign(3, next(iter(box.s)))
            + math.copysign(4, box.f)
            + math.copysign(5, box.c.imag)
        )
    )
    box.n = np.float64(-0.0)
    yield
    box.d = decimal.Decimal("-0.0")
    yield
    box.s = {-0.0}
    yield
    box.f = -0.0
    yield
    box.c = complex(0, -0.0)
    yield


@case
def user_module():
    module = types.ModuleType("a_module_of_the_user")
    exec("LIMIT = 2\nTABLE = {'n': [3]}\ndef scale(x):\n    return x * LIMIT + TABLE['n'][0]\n", vars(module))
    yield lambda x: module.scale(x) + module.LIMIT
    module.LIMIT = 5
    yield
    module.TABLE["n"][0] = 7
    yield
    module.scale = lambda x: x
    yield


@case
def module_imported_inside():
    module = types.ModuleType("another_module_of_the_user")
    module.N = 2
    sys.modules[module.__name__] = module

    def program(x):
        import another_module_of_the_user
        from another_module_of_the_user import N

        return x * another_module_of_the_user.N + N

    yield program
    module.N = 3
    yield
    another = sys.modules[module.__name__] = types.ModuleType(module.__name__)
    another.N = 4
    yield
    another.N = 5
    yield
    del sys.modules[module.__name__]


@case
def builtin_shadowed():
    space = {}
    exec("def program(x):\n    return x * len([1, 2])\n", space)
    yield space["program"]
    space["len"] = lambda values: 7
    yield


@case
def enum_and_partial_and_method():
    class Mode(enum.Enum):
        A = 1
        B = 2

    o = Plain(mode=Mode.A, k=2)

    class Caller:
        def __init__(self):
            self.n = 3

        def run(self, x, k=1):
            return x * self.n * k

    caller = Caller()
    run, times = caller.run, functools.partial(caller.run, k=2)
    yield lambda x: run(x) + times(x) + o.mode.value
    caller.n = 4
    yield
    o.mode = Mode.B
    yield
    times.keywords["k"] = 5
    yield


@case
def hooks_of_a_module_and_what_they_read():
    net, box = nn.Linear(2, 2), Plain(n=2)
    handle = net.register_forward_hook(lambda module, args, out: out * box.n)
    yield lambda x: net(x)
    box.n = 3
    yield
    net.register_forward_pre_hook(lambda module, args: (args[0] * box.n,))
    yield
    box.n = 4
    yield
    handle.remove()
    yield


@case
def hooks_of_all_modules():
    net, box = nn.Linear(2, 2), Plain(n=2)

    def hook(module, args, out):
        return out * box.n if isinstance(module, nn.Linear) else out

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield lambda x: net(x)
        box.n = 3
        yield
    finally:
        handle.remove()
    yield


@case
def dict_of_a_module_replaced():
    class Net(nn.Module):
        def forward(self, x):
            return x * self.n

    net = Net()
    net.n = 2
    yield lambda x: net(x)
    net.__dict__ = {**vars(net), "n": 5}
    yield


@case
def objects_in_attributes_of_modules():
    class Net(nn.Module):
        def forward(self, x):
            return x * self.config.layers[0].width

    net = Net()
    net.config = types.SimpleNamespace(layers=[argparse.Namespace(width=2)])
    yield lambda x: net(x)
    net.config.layers[0].width = 5
    yield


@case
def context_variable_and_thread_local():
    variable, local = contextvars.ContextVar("variable", default=1), threading.local()
    local.n = 2
    yield lambda x: x * variable.get() + local.n
    variable.set(5)
    yield
    local.n = 7
    yield


@case
def cached_function():
    box = Plain(n=2)

    @functools.lru_cache
    def scale(k):
        return box.n * k

    yield lambda x: x * scale(3)
    box.n = 5
    yield
    scale.cache_clear()
    yield


@case
def weak_reference():
    one, two = Plain(n=1), Plain(n=2)
    box = Plain(ref=weakref.ref(one))
    yield lambda x: x * box.ref().n
    one.n = 4
    yield
    box.ref = weakref.ref(two)
    yield


@case
def optimizer_and_scheduler():
    w = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    yield lambda x: x * optimizer.param_groups[0]["lr"] + scheduler.last_epoch
    optimizer.param_groups[0]["lr"] = 0.25
    yield
    optimizer.step()
    scheduler.step()
    yield
    optimizer.load_state_dict({"state": {}, "param_groups": [{**optimizer.state_dict()["param_groups"][0], "lr": 2.0}]})
    yield


@case
def shape_of_a_tensor_that_is_not_computed_with():
    box = Plain(w=torch.ones(3))
    yield lambda x: x * box.w.shape[0]
    box.w = torch.ones(5)
    yield
    box.w = torch.ones(5, dtype=torch.float64)
    yield


@case
def computed_names():
    class A:
        def do_one(self, x):
            return x * N[0]

        def do_two(self, x):
            return x * N[1]

    o, kind = A(), Plain(name="one")
    yield lambda x: getattr(o, "do_" + kind.name)(x)
    N[0] = 5
    yield
    kind.name = "two"
    yield
    N[1] = 6
    yield
    N[:] = [1, 2]


N = [1, 2]


@case
def flag_of_an_event():
    event = threading.Event()
    yield lambda x: x * 2 if event.is_set() else x
    event.set()
    yield


@case
def level_of_a_logger():
    parent, logger = logging.Logger("parent", 10), logging.Logger("child")
    logger.parent, logger.gain = parent, 2.0
    yield lambda x: x * logger.gain if logger.isEnabledFor(20) else x + logger.level
    parent.setLevel(30)
    yield
    logger.setLevel(20)
    yield
    logger.gain = 3.0
    yield


@case
def attributes_of_a_thread():
    class Worker(threading.Thread):
        factor = 2.0

    worker = Worker(name="a")
    worker.shift = 1.0
    yield lambda x: x * worker.factor + worker.shift + len(worker.name)
    worker.shift = 2.0
    yield
    Worker.factor = 3.0
    yield
    worker.name = "long"
    yield


@case
def attributes_of_a_member_of_an_enum():
    class Planet(enum.Enum):
        EARTH = 2.0

        def __init__(self, mass):
            self.mass, self.moons = mass, [1]

    yield lambda x: x * Planet.EARTH.mass + len(Planet.EARTH.moons)
    Planet.EARTH.mass = 3.0
    yield
    Planet.EARTH.moons.append(2)
    yield


@case
def text_of_an_object():
    names = {"plain": "sin", "full": "a", "written": "b"}

    class Named:
        def __str__(self):
            return names["plain"]

        def __repr__(self):
            return names["full"]

        def __format__(self, spec):
            return names["written"]

    named = Named()
    yield lambda x: (x.sin() if str(named) == "sin" else x) * len(repr(named)) + len(f"{named:s}")
    for key in names:
        names[key] = "other"
        yield


@case
def methods_that_modules_have_too():
    held = {"n": 2.0}

    class Block(nn.Module):
        def half(self, x):
            return x * held["n"]

        def named_children(self):
            return [("a", held["n"])]

        def forward(self, x):
            return self.half(x) + sum(1 for _ in self.children()) if held else x

        def children(self):
            return range(int(held["n"]))

    yield Block()
    held["n"] = 3.0
    yield


@case
def python_modules_found_by_name():
    module = types.ModuleType("found_by_name")
    module.n, sys.modules["found_by_name"] = 2.0, module
    name = "found_by_" + "name"

    def program(x):
        found = __import__("found_by_name").n + importlib.import_module("found_by_name").n
        return x * found + sys.modules["found_by_name"].n

    yield program
    module.n = 3.0
    yield
    del sys.modules[name]


@case
def python_module_with_attributes_of_its_own_making():
    module = types.ModuleType("making")
    exec("held = {'n': 2.0}\ndef __getattr__(name): return held[name]", vars(module))
    yield lambda x: x * module.n
    module.held["n"] = 3.0
    yield


@case
def globals_by_any_name():
    space = {"SCALE": 2.0, "NAME": "SCALE"}
    exec("def program(x): return x * globals()[NAME] + eval('SHIFT' if 'SHIFT' in globals() else '1')", space)
    yield space["program"]
    space["SCALE"] = 3.0
    yield
    space["SHIFT"] = 2.0
    yield


@case
def bases_of_a_class():
    class A:
        n = 2

    class B:
        n = 3

    class C(A):
        pass

    yield lambda x: x * C().n
    C.__bases__ = (B,)
    yield


LIBRARY = torch.library.Library("foregrad_state_guards", "FRAGMENT")


def operator_of_kernels(name, **kernels):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    for key, kernel in kernels.items():
        LIBRARY.impl(name, kernel, key)
    return getattr(getattr(torch.ops, LIBRARY.ns), name)


@case
def kernel_in_python():
    held = {"n": 2.0}
    scale = operator_of_kernels("scale", CompositeImplicitAutograd=lambda x: x * held["n"])
    yield lambda x: scale(x) + 1
    held["n"] = 3.0
    yield


@case
def kernel_in_python_of_a_program_that_puts_names_together():
    o, name = Plain(n=2.0, m=1.0, scale=operator_of_kernels("named", CompositeImplicitAutograd=lambda x: x * o.m)), "n"
    yield lambda x: o.scale(x) * getattr(o, name)
    o.m = 3.0
    yield


@case
def method_as_a_kernel():
    o = Plain(n=2.0)
    scale = operator_of_kernels("scaled", CompositeImplicitAutograd=o.scaled)
    yield lambda x: scale(x) + 1
    o.n = 3.0
    yield


@case
def custom_function_in_a_kernel():
    held = {"n": 2.0}

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * held["n"]

        @staticmethod
        def backward(ctx, gradient):
            return gradient * held["n"]

    kernels = {"CPU": torch.clone, "Autograd": lambda x: Scale.apply(x)}
    scale = operator_of_kernels("applied", **kernels)
    yield lambda x: scale.default(x) + 1
    held["n"] = 3.0
    yield


@case
def what_pytree_calls():
    class Box:
        def __init__(self, t):
            self.t = t

    o = Plain(n=2.0)
    torch.utils._pytree.register_pytree_node(Box, lambda box: ([box.t * o.n], None), lambda parts, _: Box(*parts))
    yield lambda x: torch.utils._pytree.tree_leaves([Box(x)])[0] + 1
    o.n = 3.0
    yield


@case
def what_counts_as_a_subclass():
    class Interface(abc.ABC):  # noqa: B024
        pass

    class Plug:
        pass

    plug = Plug()
    yield lambda x: x * 2 if isinstance(plug, Interface) else x
    Interface.register(Plug)
    yield


@case
def subclasses_of_a_class():
    class Base:
        n = 1

    kept = [type("A", (Base,), {"n": 2})]
    yield lambda x: x * sum(kind.n for kind in Base.__subclasses__())
    kept.append(type("B", (Base,), {"n": 5}))
    yield
    kept[-1].n = 7
    yield


@case
def arguments_of_an_exception():
    error = ValueError(2.0)
    yield lambda x: x * error.args[0]
    error.args = (3.0,)
    yield


@case
def tensors_where_no_call_can_look_for_them():
    inside, variable = {torch.ones(2)}, contextvars.ContextVar("variable")
    shown = types.MappingProxyType(table := {"t": torch.ones(2)})
    objects = np.array([torch.ones(2), None], dtype=object)
    variable.set(torch.ones(2))
    yield lambda x: sum(inside, x) + variable.get() + shown["t"] + objects[0]
    inside.clear()
    inside.add(torch.full((2,), 3.0))
    yield
    variable.set(torch.full((2,), 5.0))
    yield
    table["t"] = torch.full((2,), 7.0)
    yield
    objects[0] = torch.full((2,), 9.0)
    yield


@case
def objects_in_an_array():
    objects = np.array([1, [2.0], Plain(n=2)], dtype=object)
    yield lambda x: x * objects[1][0] + objects[2].n
    objects[1][0] = 3.0
    yield
    objects[2].n = 5
    yield


@case
def entry_of_the_python_modules_that_is_none():
    sys.modules["no_module"] = types.SimpleNamespace(n=2.0)

    def program(x):
        import no_module

        return x * no_module.n + sys.modules["no_module"].n

    yield program
    sys.modules["no_module"].n = 3.0
    yield
    sys.modules["no_module"] = types.SimpleNamespace(n=5.0)
    yield
    del sys.modules["no_module"]


@case
def environment_variables():
    os.environ.update(SCALE_OF_A_TEST="2")
    yield lambda x: x * float(os.environ["SCALE_OF_A_TEST"]) + float(os.getenv("SHIFT_OF_A_TEST", "1"))
    os.environ.update(SCALE_OF_A_TEST="3")
    yield
    os.environ.update(SHIFT_OF_A_TEST="3")
    yield
    del os.environ["SCALE_OF_A_TEST"], os.environ["SHIFT_OF_A_TEST"]


@case
def handlers_of_a_logger():
    log = logging.getLogger("with_handlers")
    yield lambda x: x * (2 if log.handlers else 3)
    log.addHandler(handler := logging.NullHandler())
    yield
    log.removeHandler(handler)


@case
def weakly_held_method():
    o = Plain(n=2)
    method = weakref.WeakMethod(o.scaled)
    yield lambda x: method()(x)
    o.n = 3
    yield


@case
def how_modules_are_called():
    before = nn.Module._call_impl
    yield nn.ReLU()
    nn.Module._call_impl = lambda self, x: x * 5
    yield
    nn.Module._call_impl = before
    yield


@case
def what_getters_of_operator_lead_to():
    o = Plain(a=Plain(n=2), rows={"k": 3})
    get, item, call = operator.attrgetter("a.n"), operator.itemgetter("k"), operator.methodcaller("scaled", 2)
    yield lambda x: x * get(o) * item(o.rows) + call(o.a)
    o.a.n = 4
    yield
    o.rows["k"] = 5
    yield
    o.a.n = 6  # the code that runs is noted by now, and does not name it
    yield


@case
def numpy_values_among_objects():
    steps = [nn.Identity(), np.float32(2.0), np.dtype("float32"), lambda x: x + 1]
    yield lambda x: steps[-1](x) * float(steps[1])
    steps[1] = np.float32(3.0)
    yield


@case
def kinds_of_plain_values():
    class Text(str):
        pass

    class Pair(tuple):
        pass

    text, pair = Text("sin"), Pair((1, 2))
    text.gain = pair.gain = 2.0
    yield lambda x: getattr(torch, text)(x) * text.gain + pair[1] * pair.gain
    text.gain = 3.0
    yield
    pair.gain = 3.0
    yield


@pytest.mark.parametrize("name", CASES)
def test_a_change_of_what_the_program_reads_shows(name):
    with contextlib.closing(CASES[name]()) as steps:
        compare_at_each_step(steps)


def compare_at_each_step(steps):
    program = next(steps)
    compiled, _ = grab(program)
    x = plain(1, 2) + 1
    assert torch.equal(compiled(x), program(x))
    count = 0
    for _ in steps:
        count += 1
        assert torch.equal(compiled(x), program(x)), f"change {count}"
        before = len(compiled.specializations)
        assert torch.equal(compiled(x), program(x)), f"change {count}, again"
        assert len(compiled.specializations) == before, f"change {count}: compiled again for nothing"
    assert count


def test_a_function_of_torch_is_compared_where_the_program_names_its_neighbours(monkeypatch):
    compiled, _ = grab(lambda x, nets: torch.nn.functional.gelu(nets[1][0](x)))
    nets = [0, (nn.ReLU(),)]
    assert torch.equal(compiled(plain(2), nets), F.gelu(plain(2).relu()))
    monkeypatch.setattr(F, "relu", lambda x, inplace=False: x * 3)
    assert torch.equal(compiled(plain(2), nets), F.gelu(plain(2) * 3))


def test_what_a_metaclass_gives_to_a_class_is_guarded():
    class Meta(type):
        factor = 2

    class Kind(metaclass=Meta):
        pass

    inside, _ = grab(lambda x: x * Kind.factor)
    given, _ = grab(lambda x, kind: x * kind.factor)
    assert inside(plain(1)).item() == given(plain(1), Kind).item() == 2
    Meta.factor = 5
    assert inside(plain(1)).item() == given(plain(1), Kind).item() == 5


def test_an_empty_list_of_a_module_is_compared_as_well():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = []

        def forward(self, x):
            self.seen[:] = [x]
            return x * 2

    module = Keeping()
    compiled = foregrad.aot_module(module, nop)
    for _ in range(3):
        x = plain(2)
        compiled(x)
        assert len(module.seen) == 1 and module.seen[0] is x


@pytest.mark.parametrize("nested", [False, True])
def test_a_list_that_is_like_the_one_that_was_written_to_is_another_one(nested):
    first, second = [], []
    held = {"seen": [first] if nested else first}

    def program(x):
        seen = held["seen"][0] if nested else held["seen"]
        seen.append(x)
        return x * 2

    compiled = foregrad.aot_function(program, nop)
    compiled(plain(2))
    held["seen"] = [second] if nested else second
    compiled(plain(2))
    assert len(first) == len(second) == 1


@pytest.mark.parametrize("where", ["in an argument", "made inside"])
def test_hooks_on_all_modules_are_noticed_wherever_the_module_is(where):
    given = nn.Identity()

    def program(x, module):
        return (module if where == "in an argument" else nn.Identity())(x) + 1

    compiled, x = foregrad.aot_function(program, nop), plain(2)
    torch.testing.assert_close(compiled(x, given), x + 1)
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)
    try:
        torch.testing.assert_close(compiled(x, given), x * 2 + 1)
    finally:
        handle.remove()
    torch.testing.assert_close(compiled(x, given), x + 1)


def test_what_a_library_keeps_for_itself_does_not_count():
    class Mode(enum.Flag):
        A = enum.auto()
        B = enum.auto()

    @functools.singledispatch
    def scaled(x, mode):
        return x

    @scaled.register
    def _(x: torch.Tensor, mode):
        return x * 2 if mode & Mode.A | Mode.B else x

    compiled, x = foregrad.aot_function(scaled, nop), plain(2)
    for mode in (Mode.A, Mode.B, Mode.A | Mode.B):
        for _ in range(2):
            torch.testing.assert_close(compiled(x, mode), scaled(x, mode))
    assert len(compiled.specializations) == 3


def test_a_guard_keeps_nothing_alive_that_the_program_holds_weakly():
    held = Plain(n=2)
    found, table = weakref.ref(held), weakref.WeakValueDictionary(a=held)
    compiled, x = foregrad.aot_function(lambda x: x * found().n if found() else x * len(table), nop), plain(2)
    torch.testing.assert_close(compiled(x), x * 2)
    held.n = 3
    torch.testing.assert_close(compiled(x), x * 3)
    del held
    gc.collect()
    assert found() is None
    torch.testing.assert_close(compiled(x), x * 0)


def test_methods_of_containers_are_not_called_to_compare_them():
    class Rows(list):
        def __iter__(self):
            raise RuntimeError

        def __len__(self):
            return 99

    class Some(set):
        def __iter__(self):
            return iter([1])

    rows, some = Rows([2.0]), Some([1, 2])
    compiled, x = foregrad.aot_function(lambda x: x * rows[0] + (2 in some), nop), plain(2)
    torch.testing.assert_close(compiled(x), x * 2 + 1)
    some.discard(2)
    torch.testing.assert_close(compiled(x), x * 2)
    rows[0] = 3.0
    torch.testing.assert_close(compiled(x), x * 3)


@pytest.mark.parametrize("attribute", [iter(range(3)), np.zeros((2000, 200)), memoryview(b"a"), queue.SimpleQueue()])
def test_attributes_that_no_code_of_the_program_reads_may_be_anything(attribute):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.data, self.held = nn.Linear(2, 2), attribute, {"n": Plain(m=attribute)}

        def forward(self, x):
            return self.linear(x)

    model = Model()
    compiled, x = foregrad.aot_module(model, nop), plain(1, 2)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
    if isinstance(attribute, range):
        assert list(attribute) == [0, 1, 2]


def test_what_python_reads_for_the_program_counts_without_a_name():
    class Reading:
        def __init__(self):
            self.unnamed, self.it = 2.0, iter("a")

    held, user = Reading(), collections.UserDict(unnamed=2.0)
    compiled = foregrad.aot_function(lambda x: x * vars(copy.copy(held)).get("un" + "named") + user["unnamed"], nop)
    with pytest.raises(foregrad.ForegradError, match=r"str_\w+iterator"):
        compiled(plain(2))
    held.it, x = None, plain(2)
    torch.testing.assert_close(compiled(x), x * 2 + 2)
    held.unnamed = user["unnamed"] = 3.0
    torch.testing.assert_close(compiled(x), x * 3 + 3)


@pytest.mark.parametrize(
    ("place", "name", "program"),
    [
        (F, "relu", lambda x: F.relu(x)),
        (F, "silu", lambda x: F.silu(x)),
        (torch.functional, "einsum", lambda x: torch.functional.einsum("i,i->i", x, x)),
        (torch.Tensor, "norm", lambda x: x.norm()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_function_of_torch_that_the_users_own_takes_the_place_of(monkeypatch, place, name, program):
    """It hands itself over to function modes by its name, which is now that of the other."""
    original = getattr(place, name)
    x = plain(3)
    monkeypatch.setattr(place, name, lambda *args, **kwargs: original(*args, **kwargs) * 5)
    torch.testing.assert_close(foregrad.aot_function(program, nop)(x), program(x))
    monkeypatch.setattr(place, name, torch.tanh)
    call = foregrad.aot_function(lambda x: original(*(("i,i->i", x, x) if name == "einsum" else (x,))), nop)
    torch.testing.assert_close(call(x), call._function(x))


NUMBERS = types.SimpleNamespace(all=itertools.cycle([1.0, 2.0]))


def next_number():
    return next(NUMBERS.all)


def test_an_iterator_is_not_used_up_where_other_names_are_put_together():
    """The program's own code leads to it by plain names; what it calls may lead anywhere."""
    layer = torch.nn.TransformerEncoderLayer(4, 2, 4)

    def program(x):
        layer.eval()
        return x * next_number()

    with pytest.raises(UnsupportedError, match=r"NUMBERS.*itertools.cycle"):
        foregrad.aot_function(program, nop)(plain(2))
    assert layer.training and next_number() == 1.0


def test_objects_that_cannot_be_looked_at_are_refused():
    class Kind(type):
        def __getattribute__(cls, name):
            if name == "__mro__":
                raise RuntimeError("no bases")
            return super().__getattribute__(name)

    chain = last = []
    for _ in range(2 * sys.getrecursionlimit()):
        last.append([])
        last = last[0]

    for reached, words in ((Kind("Other", (), {}), "no bases"), (chain, "so many times in a row")):
        compiled = foregrad.aot_function(lambda x, reached=reached: x * 2 if reached else x, nop)
        with pytest.raises(UnsupportedError, match=words):
            compiled(plain(2))


def tagged(factor, **attributes):
    tensor = torch.full((2,), factor)
    vars(tensor).update(attributes)
    return tensor


def test_attributes_of_a_tensor_count_wherever_it_stands():
    held = Plain(t=tagged(1.0))
    compiled, x = foregrad.aot_function(lambda x: x * getattr(held.t, "note", 7.0), nop), plain(2)
    torch.testing.assert_close(compiled(x), x * 7)
    held.t.note = 3.0
    torch.testing.assert_close(compiled(x), x * 3)
    held.t = tagged(1.0, note=5.0)
    torch.testing.assert_close(compiled(x), x * 5)
    held.t = tagged(1.0)
    torch.testing.assert_close(compiled(x), x * 7)


class Noting(TwoTensor):
    """A wrapper of the user's, which can have attributes beside its tensors."""


def noting(note, factor=1.0):
    wrapper = Noting(torch.full((2,), factor), torch.full((2,), factor))
    wrapper.note = note
    return wrapper


@pytest.mark.parametrize("where", ["found", "given"])
def test_attributes_of_a_wrapper_count_beside_its_tensors(where):
    held = Plain(w=noting(2.0))

    def program(x, given):
        wrapper = held.w if where == "found" else given
        return x * wrapper.note + wrapper.a

    compiled, x = foregrad.aot_function(program, nop), plain(2)
    for note, factor in ((2.0, 1.0), (3.0, 1.0), (3.0, 4.0)):
        held.w = noting(note, factor)
        torch.testing.assert_close(compiled(x, held.w), x * note + factor)
    if where == "found":
        held.w.a = torch.full((2,), 9.0)
        torch.testing.assert_close(compiled(x, None), x * 3 + 9)


@pytest.mark.parametrize("held", [{"t": None}, [None], Plain(t=None)], ids=["dict", "list", "object"])
def test_attributes_of_a_tensor_that_the_program_only_looks_at(held):
    """No operator takes it, so it is no input."""
    place, key = (vars(held), "t") if isinstance(held, Plain) else (held, next(iter(held)) or 0)

    def program(x):
        return x * getattr(held.t if isinstance(held, Plain) else held[key], "tag", 0.5)

    def put(**attributes):
        place[key] = plain(2)
        vars(place[key]).update(attributes)

    compiled, x = foregrad.aot_function(program, nop), plain(3)
    changes = [put, lambda: vars(place[key]).update(tag=2.0), lambda: put(tag=3.0), lambda: put(tag=4.0), put, put]
    for change in changes:
        change()
        assert torch.equal(compiled(x), program(x))
    assert len(compiled.specializations) == 5  # the last two are alike


def test_a_tensor_that_is_found_by_a_name_put_together():
    """Which namespaces such code looks into is known once it has run."""
    namespace = {"first": plain(2), "torch": torch}
    exec("def program(x, name):\n    return x * globals()['fi' + name]", namespace)
    compiled, x = foregrad.aot_function(namespace["program"], nop), plain(2)
    for value in (namespace["first"], plain(2) + 5, plain(2) - 3):
        namespace["first"] = value
        assert torch.equal(compiled(x, "rst"), x * value)
    assert len(compiled.specializations) == 1


def test_a_program_in_a_large_library_may_hold_what_it_does_not_read():
    """Code that puts names together does not make everything a part of the program that they could lead to."""
    library = types.ModuleType("a_large_library")
    library.numbers = itertools.count()
    exec("def unused():\n    return next(numbers)", vars(library))
    tools = {"double": lambda x: x * 2, "draw": library.unused}

    def program(x, name, asked):
        return tools[name](x) * getattr(x, asked)

    x = plain(2)
    assert torch.equal(foregrad.aot_function(program, nop)(x, "double", "ndim"), x * 2)
    assert next(library.numbers) == 0


@pytest.mark.parametrize(
    ("before", "after"), [((2,), (2.0,)), ((1,), (True,)), ((frozenset({2}),), (frozenset({2.0}),))]
)
def test_defaults_that_are_equal_and_of_another_type(before, after):
    def given(value=0):
        return value if not isinstance(value, frozenset) else next(iter(value))

    def program(x):
        return x * (2 if type(given()) is int else 3)

    compiled, x = foregrad.aot_function(program, nop), plain(2)
    for defaults in (before, after, before):
        given.__defaults__ = defaults
        assert torch.equal(compiled(x), program(x))


def test_a_cache_that_was_emptied_and_filled_again():
    def calls(compile):
        table = {"n": 2.0}

        @functools.lru_cache
        def looked_up(key):
            return table["n"] * key

        compiled, x = compile(lambda x: x * looked_up(1)), plain(2)
        yield compiled(x).tolist()
        table["n"] = 3.0
        looked_up.cache_clear()
        yield compiled(x).tolist()
        looked_up.cache_clear()  # and the next call fills it again, as a first one would
        yield compiled(x).tolist()
        table["n"] = -1.0  # which nobody asks for: the cache knows the call
        yield compiled(x).tolist()

    assert [*calls(lambda f: foregrad.aot_function(f, nop))] == [*calls(lambda f: f)]


@pytest.mark.parametrize("look_up", ["read('fac' + 'tor')", "builtins.eval('fac' + 'tor')"])
@pytest.mark.parametrize("traced", [False, True])
def test_globals_that_are_read_by_other_names_of_eval(look_up, traced):
    names = {"read": eval, "builtins": builtins, "factor": 2.0, "__name__": "elsewhere"}
    exec(f"def program(x): return x * {look_up}", names)
    tracer = sys.gettrace()
    sys.settrace((lambda *event: None) if traced else None)
    try:
        compiled, x = foregrad.aot_function(names["program"], nop), plain(2)
        torch.testing.assert_close(compiled(x), x * 2)
        names["factor"] = 3.0
        torch.testing.assert_close(compiled(x), x * 3)
    finally:
        sys.settrace(tracer)


def in_a_list_and_a_dict(tensor):
    held, table = [tensor], {"k": tensor}
    return lambda x: x * held[0] + table["k"], lambda other: table.update(k=other)


def in_two_attributes(tensor):
    held = Plain(a=tensor, b=tensor)
    return lambda x: x * held.a + held.b, lambda other: setattr(held, "a", other)


def in_two_variables(tensor):
    def change(other):
        nonlocal second
        second = other

    first, second = tensor, tensor
    return lambda x: x * first + second, change


def in_two_modules(tensor):
    one, other = nn.Module(), nn.Module()
    one.w = other.w = nn.Parameter(tensor)
    return lambda x: x * one.w + other.w, lambda new: setattr(other, "w", nn.Parameter(new))


TWO_PLACES = [in_a_list_and_a_dict, in_two_attributes, in_two_variables, in_two_modules]


@pytest.mark.parametrize("make", TWO_PLACES, ids=lambda m: m.__name__)
def test_a_tensor_that_was_in_two_places_and_no_longer_is(make):
    program, change = make(plain(2))
    compiled, x = foregrad.aot_function(program, nop), plain(2) + 1
    for other in (None, plain(2) * 5, plain(2) * 7):
        if other is not None:
            change(other)
        torch.testing.assert_close(compiled(x), program(x))
    assert len(compiled.specializations) == 2


def test_an_argument_that_the_program_also_finds_by_itself():
    x = plain(2)
    held, table = [x], Plain(t=x)

    def program(x, table):
        return x * held[0] + table.t

    compiled = foregrad.aot_function(program, nop)
    for a, b, c in [(x, x, x), (x + 1, x, x), (x, x + 2, x), (x, x, x + 3), (x, x, x)]:
        held[0], table.t = b, c
        torch.testing.assert_close(compiled(a, table), program(a, table))


@pytest.mark.parametrize("first", [0, 1])
def test_whether_an_argument_is_a_tensor_that_the_program_finds(first):
    x = plain(2)
    held, table = [x], Plain(t=x)

    def program(y):
        return y.mul_(3) if held[0] is y else y.add_(1) if any(t is not y for t in [table.t]) else y

    compiled = foregrad.aot_function(program, nop)
    for step in range(4):
        given = x if (step + first) % 2 else plain(2) + step
        ours, theirs = given.clone(), given.clone()
        if given is x:
            held[0] = table.t = ours
        result = compiled(ours)
        if given is x:
            held[0] = table.t = theirs
        torch.testing.assert_close(result, program(theirs))
        torch.testing.assert_close(ours, theirs)
        assert result is ours
        held[0] = table.t = x


def a_list_in_a_tuple_of_a_module(held):
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.options = (0, (1, held))

        def forward(self, x):
            return x * self.options[1][1][0]

    return Scaling()


def a_list_in_a_tuple_of_a_closure(held):
    options = (0, held)
    return lambda x: x * options[1][0]


def a_list_in_a_tuple_of_a_slot(held):
    class Options:
        __slots__ = ("values",)

    options = Options()
    options.values = (0, held)
    return lambda x: x * options.values[1][0]


@pytest.mark.parametrize(
    "make", [a_list_in_a_tuple_of_a_module, a_list_in_a_tuple_of_a_closure, a_list_in_a_tuple_of_a_slot]
)
def test_a_list_in_a_tuple_that_changes(make):
    held = [2.0]
    program = make(held)
    compiled = (
        foregrad.aot_module(program, nop) if isinstance(program, nn.Module) else foregrad.aot_function(program, nop)
    )
    for _ in range(3):
        assert compiled(plain(2)).tolist() == program(plain(2)).tolist()
        held[0] += 1


def test_a_set_that_the_program_puts_a_tensor_into():
    held = {1, 2}

    def program(x, held):
        held.add(x)
        held.discard(1)
        return x

    with pytest.raises(foregrad.ForegradError):
        foregrad.aot_function(program, nop)(plain(2), held)
    assert held == {1, 2}
