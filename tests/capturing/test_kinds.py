"""The table of kinds of Python objects that hold state."""

import argparse
import array
import collections
import contextvars
import dataclasses
import enum
import functools
import io
import itertools
import logging
import operator
import os
import random
import sys
import threading
import types
import weakref

import numpy as np
import pytest
import torch

from foregrad.capturing.kinds import KINDS, kinds_of


@dataclasses.dataclass(slots=True)
class Slotted:
    n: int = 1


class Rows(list):
    pass


class Attributed:
    def __getattr__(self, name):
        raise KeyError(name)  # code of the user's does not run


class Wrong(ValueError):
    pass


class Text(str):
    pass


class Row(tuple):
    pass


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")

CASES = {
    "list": ([1], ["list"]),
    "dict": ({}, ["dict"]),
    "ordered dict": (collections.OrderedDict(), ["dict"]),
    "default dict": (collections.defaultdict(list), ["dict", "default factory"]),
    "counter": (collections.Counter(), ["dict", "object"]),
    "user dict": (collections.UserDict(), ["object"]),
    "set": ({1}, ["set"]),
    "frozen set": (frozenset({1}), ["frozenset"]),
    "tuple": ((1,), ["tuple"]),
    "named tuple": (Point(1, 2), ["tuple"]),
    "deque": (collections.deque(), ["deque"]),
    "mapping proxy": (types.MappingProxyType({}), ["mappingproxy"]),
    "bytes": (bytearray(b"a"), ["bytearray"]),
    "array": (array.array("d"), ["array"]),
    "numpy array": (np.ones(2), ["numpy array"]),
    "object": (Attributed(), ["object"]),
    "slots": (Slotted(), ["object"]),
    "subclass of list": (Rows(), ["list", "object"]),
    "simple namespace": (types.SimpleNamespace(), ["object"]),
    "namespace": (argparse.Namespace(), ["object"]),
    "thread local": (threading.local(), ["object"]),
    "function": (lambda: None, ["function"]),
    "method": (Slotted().__repr__, ["method"]),
    "partial": (functools.partial(print), ["partial"]),
    "class": (Slotted, ["class"]),
    "module": (types.ModuleType("m"), ["Python module"]),
    "cell": (types.CellType(1), ["variable"]),
    "property": (property(len), ["descriptor"]),
    "weak reference": (weakref.ref(Slotted), ["weak reference"]),
    "cached function": (functools.lru_cache(len), ["cached function"]),
    "context variable": (contextvars.ContextVar("v"), ["context variable"]),
    "random": (random.Random(), ["random generator"]),
    "numpy random state": (np.random.RandomState(0), ["numpy random state"]),
    "numpy generator": (np.random.default_rng(), ["numpy generator"]),
    "optimizer": (torch.optim.SGD([torch.ones(1)], lr=1.0), ["object"]),
    "function in C": (len, []),
    "numpy function": (np.add, []),
    "environment": (os.environ, ["environment"]),
    "numpy array of objects": (np.array([None]), ["numpy array of objects"]),
    "lock": (threading.Lock(), []),
    "logger": (logging.Logger("a"), ["logger"]),
    "root of all loggers": (logging.getLogger(), ["logger"]),
    "handler of logs": (logging.NullHandler(), ["object"]),
    "thread": (threading.Thread(), ["thread"]),
    "exception": (BaseException(1), ["exception"]),
    "exception of the user's": (Wrong(1), ["exception", "object"]),
    "item getter": (operator.itemgetter(1), ["getter"]),
    "attribute getter": (operator.attrgetter("a"), ["getter"]),
    "method caller": (operator.methodcaller("a"), ["getter"]),
    "kind of text": (Text("a"), ["plain value", "object"]),
    "kind of tuple": (Row((1,)), ["tuple", "object"]),
    "member of an enum": (Color.RED, ["object"]),
    **{f"value {value!r}": (value, ["plain value"]) for value in (1, 0.5, 1j, "a", b"a")},
    "memoryview": (memoryview(b"a"), ["memoryview"]),
    "text in memory": (io.StringIO(), ["file in memory"]),
    "bytes in memory": (io.BytesIO(), ["file in memory"]),
    "file": (sys.stdout, []),
    "generator of torch": (torch.Generator(), []),
    "operator": (torch.ops.aten.add, []),
    "TorchScript module": (torch.jit.script(torch.nn.Tanh())._c, ["TorchScript module"]),
    "iterator": (iter([1]), None),
    "generator": ((i for i in ()), None),
    "counting": (itertools.count(), None),
    "zip": (zip(()), None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kinds_of_an_object(name):
    value, expected = CASES[name]
    kinds = kinds_of(value)
    assert (None if kinds is None else [kind.name for kind in kinds]) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: [1, [2]],
        lambda: {"a": 1, "b": 2},
        lambda: collections.OrderedDict(a=1, b=2),
        lambda: {1, 2},
        lambda: collections.deque([1, 2]),
        lambda: bytearray(b"ab"),
        lambda: memoryview(bytearray(b"ab")),
        lambda: memoryview(bytearray(b"abcd"))[::2],
        lambda: memoryview(array.array("d", [1.0, 2.0])),
        lambda: io.StringIO("text"),
        lambda: io.BytesIO(b"bytes"),
        lambda: array.array("d", [1.0, 2.0]),
        lambda: np.arange(4.0).reshape(2, 2),
        lambda: np.array([1, "a", None], dtype=object),
        lambda: np.array([[1, [2]], [None, {}]], dtype=object).T,
        lambda: np.array([(1, [2])], dtype=[("a", "i4"), ("b", object)]),
        lambda: Slotted(3),
        lambda: types.SimpleNamespace(a=1, b=2),
        lambda: types.CellType(5),
        lambda: random.Random(0),
        lambda: np.random.RandomState(0),
        lambda: np.random.default_rng(0),
        lambda: np.random.Generator(np.random.MT19937(0)),
        lambda: logging.Logger("a", 10),
        lambda: threading.Thread(name="a"),
        lambda: Wrong(1),
    ],
)
def test_what_was_read_can_be_put_back(make):
    value, untouched = make(), make()
    kinds = kinds_of(value)
    before = [kind.read(value) for kind in kinds]
    _disturb(value)
    for kind, items in zip(kinds, before, strict=True):
        kind.restore(value, items)
    for kind in kinds:
        assert repr(kind.read(value)) == repr(kind.read(untouched))


def _disturb(value):
    match value:
        case list() | collections.deque() | array.array():
            value.append(7)
            value[0] = 9
        case dict():
            value["c"] = value.pop("a")
        case set():
            value.add(9)
        case bytearray() | memoryview() | np.ndarray():
            value[0] = 0
        case io.StringIO() | io.BytesIO():
            value.write(value.read(3) * 3)
        case types.CellType():
            value.cell_contents = 6
        case random.Random() | np.random.RandomState() | np.random.Generator():
            value.random()
        case _:
            setattr(value, "n" if isinstance(value, Slotted) else "c", 9)


def test_every_builtin_kind_is_tried_above():
    assert {type(value) for value, _ in CASES.values()} >= KINDS.keys() - {type, staticmethod, classmethod}
