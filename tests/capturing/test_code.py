"""What a function may call, as its code tells."""

import sys
import types

import torch
from torch import nn

import foregrad
from foregrad.capturing.code import CodeThatRan, can_see_code_that_runs, in_a_library, methods_of, names_in

TOTAL = 0


def test_names_of_a_function_and_of_the_functions_inside_it():
    def program(x):
        global TOTAL
        TOTAL = x.size
        return [len(y) for y in getattr(x, "parts")] + [lambda: sys.path]  # noqa: B009

    names = names_in(program.__code__)
    assert {"len", "getattr", "sys"} <= names.loaded and "size" not in names.loaded
    assert names.stored == {"TOTAL"}
    assert {"size", "parts", "path"} <= names.attributes


def test_names_are_found_in_functions_with_more_names_than_a_byte_can_count():
    text = "def program():\n    return [" + ", ".join(f"name_{i}" for i in range(1000)) + "]\n"
    space = {}
    exec(text, space)
    assert names_in(space["program"].__code__).loaded == {f"name_{i}" for i in range(1000)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return self.half_of(x)

    def half_of(self, x):
        return x / 2

    def float(self):
        return self

    def __getitem__(self, i):
        return i


def test_who_calls_a_method():
    assert {name: use for name, _, use in methods_of(Block)} == {
        "__init__": "to make one",
        "forward": "by others",
        "half_of": "by name",
        "float": "to prepare one",
        "__getitem__": "by others",
    }


def test_libraries():
    assert in_a_library("torch.nn") and in_a_library("logging.handlers") and in_a_library("builtins")
    assert not in_a_library("__main__") and not in_a_library("torchvision.models") and not in_a_library(None)


def test_the_code_that_runs():
    def inner():
        return 1

    tracer = sys.gettrace()  # of a debugger or a coverage tool, which would be left alone
    sys.settrace(None)
    try:
        assert can_see_code_that_runs()
        ran = CodeThatRan()
        with ran.noting():
            with ran.noting():
                pass
            inner()
        assert inner.__code__ in ran.code.values() and sys.gettrace() is None
    finally:
        sys.settrace(tracer)


def test_a_debugger_is_left_alone():
    def program(x, options):
        return x * getattr(options, "n" + "")

    def trace(frame, event, argument):
        return None

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        assert not can_see_code_that_runs()
        compiled = foregrad.aot_function(program, lambda graph, inputs: foregrad.make_boxed_func(graph.forward))
        assert compiled(torch.ones(2), types.SimpleNamespace(n=2)).tolist() == [2.0, 2.0]
        assert sys.gettrace() is trace
    finally:
        sys.settrace(tracer)


def test_methods_that_are_called_like_functions_which_look_names_up():
    assert not names_in((lambda m: m.eval()).__code__).computed
    assert names_in((lambda m: eval(m)).__code__).computed
