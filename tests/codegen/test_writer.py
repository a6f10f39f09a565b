"""The writer: names that never clash, text that runs as it reads."""

import pytest

from foregrad.codegen.writer import Writer, tuple_of, unpack
from foregrad.slots import Input, Output, Updated
from helpers import grab, plain


def test_names_are_made_from_words_and_never_twice():
    writer = Writer("a program")
    names = [writer.fresh(hint) for hint in ("x", "x", "args[0]['a b']", "class", "1st", "", "tuple")]
    assert names == ["x", "x_2", "args_0_a_b", "_class", "_1st", "value", "tuple_2"]


def test_a_slot_keeps_its_variable():
    writer = Writer("a program")
    assert writer.variable(Input("args[0]")) == writer.variable(Input("args[0]")) == "args_0"
    assert writer.variable(Updated(Input("args[0]"))) == "updated_args_0"
    assert writer.variable(Output(1)) == "output_1"


def test_an_object_is_bound_once():
    writer, thing = Writer("a program"), object()
    assert writer.bind(thing, "thing") == writer.bind(thing, "another") == "thing"
    assert writer.bind(object(), "thing") == "thing_2" and writer.namespace["thing"] is thing
    assert writer.bind(tuple, "tuple") == "tuple" and writer.bind((1, 2), "tuple") == "tuple_2"


def test_blocks_are_indented_and_the_text_runs():
    writer = Writer("a program")
    with writer.block("def call(x):"):
        with writer.block("if x:"):
            writer.line("return 1")
        writer.line("return 2")
    writer.run("<a test>")
    assert writer.namespace["call"](True) == 1 and writer.namespace["call"](False) == 2
    assert writer.source.startswith('"""a program"""\ndef call(x):\n    if x:\n        return 1\n')


def test_a_variable_that_nobody_reads_has_no_line():
    writer = Writer("a program")
    with writer.block("def call(x):"):
        for n in range(2):
            writer.line_if_read(Output(n), f"x[{n}]")
        writer.line(f"return {writer.variable(Output(1))}")
    writer.run("<a test>")
    assert "output_0" not in writer.source and writer.namespace["call"]("ab") == "b"


def test_a_name_can_be_given_another_object():
    writer = Writer("a program")
    name = writer.bind(len, "size")
    with writer.block("def call(x):"):
        writer.line(f"return {name}(x)")
    writer.run("<a test>")
    writer.rebind(name, lambda x: "rebound")
    assert writer.namespace["call"]([]) == "rebound"


@pytest.mark.parametrize(("names", "text"), [(["a"], "(a,)"), (["a", "b"], "(a, b)")])
def test_tuples_of_names(names, text):
    assert tuple_of(names) == text


def test_taking_one_or_several_values_apart():
    assert unpack(["a"]) == "a," and unpack(["a", "b"]) == "a, b"


@pytest.mark.parametrize("key", ["class", "two words", "args_0", "call", "MISS", "apply", 3, (1, 2)])
def test_keys_of_any_kind_make_a_program(key):
    """F-3: names of arguments are the user's, and never clash with the program's own."""
    compiled, _ = grab(lambda args_0, d: args_0 * d[key])
    assert compiled(plain(2), {key: plain(2)}).tolist() == [1, 4]
    assert compiled(plain(2), {key: plain(2)}).tolist() == [1, 4] and len(compiled.specializations) == 1


@pytest.mark.parametrize("before", [0, 1, 255, 256, 700])
@pytest.mark.parametrize("behind", [0, 2])
def test_any_number_of_names_stands_beside_a_starred_one(before, behind):
    """Python itself allows 255 before it."""
    first, last = [f"a{n}" for n in range(before)], [f"b{n}" for n in range(behind)]
    writer = Writer("names")
    writer.take_apart([*first, "*rest", *last], "iter(given)")
    writer.namespace["given"] = list(range(before + 3 + behind))
    writer.run("<names>")
    found = writer.namespace
    assert [found[name] for name in first] == list(range(before))
    assert found["rest"] == list(range(before, before + 3))
    assert [found[name] for name in last] == list(range(before + 3, before + 3 + behind))
