"""F-2: a call whose facts differ gets a program of its own, and a call whose facts are known gets the old one."""

import contextlib

import pytest
import torch
from torch import nn

import foregrad
from foregrad.capturing.guards import sharing_pattern
from foregrad.errors import EagerFallbackWarning
from helpers import grab, leaf, nop, plain


def programs(compiled):
    return len(compiled.specializations)


def wide(tensor):
    """The same values in a tensor whose rows are not next to each other."""
    big = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] * 2)
    big[..., ::2] = tensor
    return big[..., ::2]


OTHER_FACTS = {
    "shape": lambda: plain(3),
    "number of dimensions": lambda: plain(1, 2),
    "stride": lambda: plain(4)[::2],
    "storage offset": lambda: plain(3)[1:],
    "view": lambda: plain(2).view(2),
    "dtype": lambda: plain(2).double(),
    "requires grad": lambda: leaf(2),
    "no leaf": lambda: leaf(2) * 1,
    "conj bit": lambda: torch.tensor([1j, 2]).conj(),
    "a number": lambda: 2.0,
    "parameter": lambda: nn.Parameter(plain(2)),
}


@pytest.mark.parametrize("name", OTHER_FACTS)
def test_other_facts_about_a_tensor_get_another_program(name):
    compiled, _ = grab(lambda x: x * 2)
    compiled(plain(2))
    other = OTHER_FACTS[name]()
    result = compiled(other)
    assert programs(compiled) == 2
    assert torch.equal(torch.as_tensor(result), torch.as_tensor(other * 2))
    compiled(plain(2)), compiled(OTHER_FACTS[name]())
    assert programs(compiled) == 2


def test_other_data_gets_the_same_program():
    compiled, _ = grab(lambda x: x * 2)
    for i in range(3):
        assert compiled(plain(2) + i).tolist() == [2 + 2 * i, 4 + 2 * i]
    assert programs(compiled) == 1


def test_a_leaf_and_no_leaf_differ_where_a_write_is_refused():
    compiled, _ = grab(lambda x: x.neg_())
    compiled(leaf(2) * 1)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        compiled(leaf(2))


AMBIENT = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: _switched(torch.use_deterministic_algorithms, True, False),
    "default dtype": lambda: _switched(torch.set_default_dtype, torch.float64, torch.float32),
}


@contextlib.contextmanager
def _switched(switch, on, off):
    switch(on)
    try:
        yield
    finally:
        switch(off)


@pytest.mark.parametrize("name", AMBIENT)
def test_another_ambient_state_gets_another_program(name):
    def program(x, w):
        return x @ w + torch.ones(2).sum()

    compiled, _ = grab(program)
    x, w = leaf(2, 2), leaf(2, 2)
    compiled(x, w)
    with AMBIENT[name]():
        ours, eager = compiled(x, w), program(x, w)
        assert programs(compiled) == 2
        assert (ours.dtype, ours.requires_grad) == (eager.dtype, eager.requires_grad) and torch.equal(ours, eager)
    compiled(x, w)
    assert programs(compiled) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (2, 3),
        (2, 2.0),
        (True, 1),
        (0.0, -0.0),
        ("a", "b"),
        ([1, 2], (1, 2)),
        ({"a": 1}, {"a": 2}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (None, 0),
        (torch.float32, torch.float64),
        (slice(0, 1), slice(0, 2)),
        (float("nan"), 1.0),
    ],
    ids=repr,
)
def test_another_python_value_gets_another_program(first, second):
    compiled, _ = grab(lambda x, value: x + 1)
    compiled(plain(2), first)
    compiled(plain(2), first)
    assert programs(compiled) == 1
    compiled(plain(2), second)
    assert programs(compiled) == 2


def test_a_value_that_is_not_equal_to_itself_is_known_again():
    compiled, _ = grab(lambda x, value: x + 1)
    compiled(plain(2), float("nan"))
    compiled(plain(2), float("nan"))
    assert programs(compiled) == 1


def test_a_list_argument_that_changes_is_seen():
    compiled, _ = grab(lambda x, sizes: x * sum(sizes))
    sizes = [1, 2]
    assert compiled(plain(1), sizes).item() == 3
    sizes.append(3)
    assert compiled(plain(1), sizes).item() == 6


def test_an_object_is_guarded_by_its_own_equality_or_else_by_identity():
    """F-4"""

    class ByValue:
        def __init__(self, n):
            self.n = n

        def __eq__(self, other):
            return self.n == other.n

        __hash__ = None

    class ByIdentity:
        def __init__(self, n):
            self.n = n

    compiled, _ = grab(lambda x, value: x * value.n)
    assert compiled(plain(1), ByValue(2)).item() == compiled(plain(1), ByValue(2)).item() == 2
    assert programs(compiled) == 1
    assert compiled(plain(1), ByValue(3)).item() == 3
    one = ByIdentity(5)
    compiled(plain(1), one), compiled(plain(1), one)
    assert programs(compiled) == 3
    assert compiled(plain(1), ByIdentity(6)).item() == 6 and programs(compiled) == 4


def test_the_same_tensor_twice_and_two_tensors_are_different_facts():
    """D-1"""
    compiled, _ = grab(lambda a, b: a * b)
    x, y = leaf(2), leaf(2)
    compiled(x, x).sum().backward()
    assert x.grad.tolist() == [2, 4]
    x.grad = None
    compiled(x, y).sum().backward()
    assert x.grad.tolist() == [1, 2] and y.grad.tolist() == [1, 2]


@pytest.mark.parametrize("program", [lambda a, b: a + a.grad, lambda a, b: a + b.grad, lambda a, b: a.grad + b.grad])
def test_a_tensor_that_is_passed_twice_has_one_gradient(program):
    compiled, _ = grab(program)
    x = leaf(2)
    for _ in range(2):
        x.grad = plain(2)
        assert torch.equal(compiled(x, x), program(x, x))
    assert programs(compiled) == 1


def test_sharing_storage_is_looked_at_only_where_something_is_written():
    """B-8"""
    t = plain(4)
    assert sharing_pattern((t, plain(2), t[1:], t)) == (0, 1, 0, 0)
    reading, _ = grab(lambda a, b: a + b)
    reading(t[:2].clone(), plain(2)), reading(plain(2), plain(2))
    assert programs(reading) == 1 and "lie_apart" not in reading.specializations[0].source
    writing, _ = grab(lambda a, b: a.add_(b))
    writing(plain(2), plain(2))
    assert "lie_apart" in writing.specializations[0].source


def test_a_plain_attribute_of_a_module_is_guarded():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor, self.options = 2, {"shift": 1}

        def forward(self, x):
            return x * self.factor + self.options["shift"]

    module = Scale()
    compiled, _ = grab(module)
    assert compiled(plain(1)).item() == 3
    module.factor = 5
    assert compiled(plain(1)).item() == 6
    module.options["shift"] = 10
    assert compiled(plain(1)).item() == 15
    module.factor, module.options["shift"] = 2, 1
    assert compiled(plain(1)).item() == 3 and programs(compiled) == 3


def test_a_hook_on_a_module_is_guarded():
    module = nn.Linear(2, 2)
    compiled, _ = grab(module)
    before = compiled(plain(1, 2))
    handle = module.register_forward_hook(lambda m, args, out: out * 10)
    assert torch.equal(compiled(plain(1, 2)), before * 10)
    handle.remove()
    assert torch.equal(compiled(plain(1, 2)), before)


def test_a_replaced_submodule_is_seen():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled, _ = grab(module)
    compiled(plain(1, 2))
    module[1] = nn.Tanh()
    assert torch.equal(compiled(plain(1, 2)), module(plain(1, 2)))


def test_a_parameter_that_is_frozen_later_gets_another_program():
    module = nn.Linear(2, 2)
    compiled, graphs = grab(module)
    compiled(plain(1, 2))
    module.requires_grad_(False)
    assert not compiled(plain(1, 2)).requires_grad and graphs.order == ["forward", "inference"]


def test_past_the_limit_the_original_runs_with_one_warning():
    with foregrad.config.patch(max_specializations=2):
        compiled = foregrad.aot_function(lambda x: x * 2, nop)
    compiled(plain(1)), compiled(plain(2))
    with pytest.warns(EagerFallbackWarning, match=r"compiled 2 times.*max_specializations.*dynamic=True"):
        assert compiled(plain(3)).tolist() == [2, 4, 6]
    assert compiled(plain(4)).tolist() == [2, 4, 6, 8]
    assert programs(compiled) == 2


def test_many_programs_of_one_function_are_each_found_again():
    compiled, graphs = grab(lambda x: x.sum() * 2)
    for _ in range(2):
        for n in range(1, 9):
            assert compiled(plain(n)).item() == n * (n + 1)
    assert len(graphs.order) == 8
