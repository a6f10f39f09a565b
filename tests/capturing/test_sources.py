"""F-14, F-2: what a function finds by itself, in closures, globals, defaults and objects."""

import torch
from torch import nn

from helpers import grab, leaf, plain

SCALE = 2
WEIGHT = plain(2)
TABLE = {"bias": plain(2)}


def test_a_tensor_in_a_closure_is_read_at_each_call_and_differentiated():
    """F-14 (Z)"""
    w = leaf(2)
    compiled, graphs = grab(lambda x: x * w)
    compiled(torch.ones(2)).sum().backward()
    assert w.grad.tolist() == [1, 1]
    with torch.no_grad():
        w.mul_(5)
    assert compiled(torch.ones(2)).tolist() == [5, 10]
    w = leaf(2) + 10
    assert compiled(torch.ones(2)).tolist() == [11, 12]
    assert graphs.order[:2] == ["forward", "backward"]


def test_a_tensor_in_a_closure_may_be_written():
    """F-14, M-1"""
    steps = torch.zeros(())

    def program(x):
        steps.add_(1)
        return x * steps

    compiled, _ = grab(program)
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [1, 2, 3]
    assert steps.item() == 3


def test_a_global_tensor_is_read_at_each_call():
    """F-14"""
    global WEIGHT
    compiled, graphs = grab(lambda x: x * WEIGHT)
    assert compiled(torch.ones(2)).tolist() == [1, 2]
    before, WEIGHT = WEIGHT, torch.full((2,), 7.0)
    try:
        assert compiled(torch.ones(2)).tolist() == [7, 7] and graphs.order == ["inference"]
    finally:
        WEIGHT = before


def test_a_tensor_in_a_global_dict_is_read_at_each_call():
    """F-14"""
    compiled, _ = grab(lambda x: x + TABLE["bias"])
    compiled(torch.ones(2))
    before, TABLE["bias"] = TABLE["bias"], torch.zeros(2)
    try:
        assert compiled(torch.ones(2)).tolist() == [1, 1]
    finally:
        TABLE["bias"] = before


def test_a_plain_global_and_a_closure_cell_are_guarded_by_value():
    """F-2"""
    global SCALE
    shift = 1
    compiled, _ = grab(lambda x: x * SCALE + shift)
    assert compiled(plain(1)).item() == 3
    shift = 5
    assert compiled(plain(1)).item() == 7
    SCALE = 10
    try:
        assert compiled(plain(1)).item() == 15
    finally:
        SCALE = 2
    assert compiled(plain(1)).item() == 7 and len(compiled.specializations) == 3


def test_a_helper_function_is_followed():
    """F-14"""
    w, factor = leaf(2), 3

    def helper(x):
        return x * w * factor

    compiled, _ = grab(lambda x: helper(x))
    compiled(torch.ones(2)).sum().backward()
    assert w.grad.tolist() == [3, 3]
    factor = 4
    assert compiled(torch.ones(2)).tolist() == [4, 8]


def test_a_module_in_a_closure_has_its_parameters_read_by_name():
    """F-14"""
    net = nn.Linear(2, 1, bias=False)
    compiled, _ = grab(lambda x: net(x))
    compiled(torch.ones(1, 2)).sum().backward()
    assert net.weight.grad.tolist() == [[1, 1]]
    assert "net.weight" in str(compiled.specializations[0])
    net.weight = nn.Parameter(torch.full((1, 2), 4.0))
    assert compiled(torch.ones(1, 2)).item() == 8


def test_a_tensor_default_is_a_hidden_input():
    """F-14"""
    w = leaf(2)

    def program(x, weight=w):
        return x * weight

    compiled, _ = grab(program)
    compiled(torch.ones(2)).sum().backward()
    with torch.no_grad():
        w.mul_(2)
    assert w.grad.tolist() == [1, 1] and compiled(torch.ones(2)).tolist() == [2, 4]


def test_tensors_in_a_list_in_a_closure():
    """F-14"""
    layers = [leaf(2), leaf(2)]
    compiled, graphs = grab(lambda x: (x * layers[0]) @ layers[1])
    compiled(torch.ones(2)).backward()
    assert layers[0].grad.tolist() == layers[1].grad.tolist() == [1, 2]
    layers[0] = torch.zeros(2, requires_grad=True)
    assert compiled(torch.ones(2)).item() == 0 and len(graphs.inputs("forward")) == 3


def test_an_argument_that_is_also_in_the_closure():
    """F-14: one tensor under two names."""
    w = leaf(2)
    compiled, _ = grab(lambda x: x * w)
    compiled(w).sum().backward()
    assert w.grad.tolist() == [2, 4]


def test_constants_made_inside_are_part_of_the_program():
    """F-14"""
    compiled, graphs = grab(lambda x: x * torch.tensor([3.0, 4.0]) + torch.full((2,), 1.0))
    assert compiled(torch.ones(2)).tolist() == [4, 5] and compiled(torch.zeros(2)).tolist() == [1, 1]
    assert len(graphs.inputs("inference")) == 1


class Named:
    """A class with a method that has a common name and reads a global, and one that is called by a computed name."""

    def update(self, other):
        return COUNT

    def weigh_it(self, x):
        return x * WEIGHT

    def __matmul__(self, x):
        return x * SCALE


COUNT = 0
NAMED = Named()


def test_state_that_a_program_might_read_but_does_not_costs_one_program_only():
    """F-2: `update` stands in the program, but it is the dict's."""
    global COUNT

    def program(x):
        found = {}
        found.update({"scale": 2})
        return x * found["scale"] if NAMED is not None else x

    compiled, _ = grab(program)
    try:
        for COUNT in range(5):  # noqa: B007
            assert compiled(plain(1)).item() == 2
    finally:
        COUNT = 0
    assert len(compiled.specializations) == 2


def test_a_tensor_is_found_also_where_a_method_is_called_by_a_computed_name():
    """F-14"""
    global WEIGHT
    compiled, _ = grab(lambda x: getattr(NAMED, "weigh_" + "it"[: x.dim() + 1])(x))
    assert compiled(torch.ones(2)).tolist() == [1, 2]
    before, WEIGHT = WEIGHT, torch.full((2,), 7.0)
    try:
        assert compiled(torch.ones(2)).tolist() == [7, 7]
    finally:
        WEIGHT = before


def test_an_operator_that_a_class_defines_is_followed():
    """F-2"""
    global SCALE
    compiled, _ = grab(lambda x: NAMED @ x)
    assert compiled(plain(1)).item() == 2
    SCALE = 10
    try:
        assert compiled(plain(1)).item() == 10
    finally:
        SCALE = 2


def test_what_is_added_to_a_dict_shows():
    """F-2"""
    scales = {"a": 2, "of": len}
    compiled, _ = grab(lambda x: x * sum(v for v in scales.values() if isinstance(v, int)))
    assert compiled(plain(1)).item() == 2
    scales["b"] = 3
    assert compiled(plain(1)).item() == 5
    del scales["b"]
    assert compiled(plain(1)).item() == 2 and len(compiled.specializations) == 2


def test_keys_of_any_type_and_names_of_builtins_do_not_disturb_the_generated_code():
    """F-2: a key that is a class is bound to a name, which must not be that of a builtin."""
    chosen = {type(None): [1], int: [2]}
    compiled, _ = grab(lambda x: x * chosen[int][0])
    assert compiled(plain(1)).item() == 2
    chosen[int][0] = 5
    assert compiled(plain(1)).item() == 5


def test_a_dict_that_was_empty_shows_when_it_is_filled_at_once():
    """F-2"""
    extra = {}
    compiled, _ = grab(lambda x: x * (1 + len(extra)))
    assert compiled(plain(1)).item() == 1
    extra.update({"a": 1, "b": 2})
    assert compiled(plain(1)).item() == 3


def test_hooks_that_arrive_in_an_empty_table_show():
    """F-2"""
    net = nn.Linear(2, 2)
    compiled, _ = grab(lambda x: net(x))
    before = compiled(torch.ones(1, 2))
    net._forward_hooks.update({0: lambda module, args, out: out * 0})
    assert not compiled(torch.ones(1, 2)).any() and before.any()
