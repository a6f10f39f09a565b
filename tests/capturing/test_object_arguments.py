"""F-2, F-4: arguments that are objects are compared part by part, and their tensors are those of the call."""

import collections
import dataclasses
import functools
import gc
import types
import weakref

import pytest
import torch
from torch import nn

from foregrad.capturing.kinds import own_attributes
from foregrad.errors import CaptureError, UnsupportedError
from helpers import grab, plain


class Box:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class EqualBox(Box):
    """Equal to every other one."""

    def __eq__(self, other):
        return isinstance(other, EqualBox)

    __hash__ = None


@dataclasses.dataclass
class Config:
    scale: float
    weight: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    scale: float


def programs(compiled):
    return len(compiled.specializations)


@pytest.mark.parametrize("kind", [Box, EqualBox, types.SimpleNamespace, Config])
def test_tensors_in_an_argument_are_those_of_the_call(kind):
    compiled, _ = grab(lambda x, box: x * box.weight * box.scale)
    for value in (2.0, 3.0, 5.0):
        assert compiled(plain(1), kind(scale=1.0, weight=torch.full((1,), value))).item() == value
    assert programs(compiled) == 1
    assert compiled(plain(1), kind(scale=10.0, weight=torch.full((1,), 2.0))).item() == 20
    assert programs(compiled) == 2


def test_gradients_of_tensors_in_an_argument():
    compiled, _ = grab(lambda x, box: (x * box.inner["w"][0]).sum())
    for _ in range(2):
        w = torch.ones(3, requires_grad=True)
        compiled(plain(3), Box(inner={"w": [w]})).backward()
        assert w.grad.tolist() == [1, 2, 3]
    assert programs(compiled) == 1


def test_an_object_that_is_changed_between_calls():
    box = EqualBox(n=2, deep=[Box(m=1)])
    compiled, _ = grab(lambda x, box: x * box.n + box.deep[0].m)
    assert compiled(plain(1), box).item() == 3
    box.n = 3
    assert compiled(plain(1), box).item() == 4
    box.deep[0].m = 7
    assert compiled(plain(1), box).item() == 10
    box.__class__ = Box
    assert compiled(plain(1), box).item() == 10 and programs(compiled) == 4


def test_equal_values_of_other_types_are_told_apart():
    compiled, _ = grab(lambda x, box: x * (2 if isinstance(box.n, bool) else 3))
    assert compiled(plain(1), Box(n=True)).item() == 2
    assert compiled(plain(1), Box(n=1)).item() == 3
    assert compiled(plain(1), Box(n=1.0)).item() == 3 and programs(compiled) == 3


def test_keys_of_dicts_and_contexts_that_are_equal_and_of_another_type():
    compiled, _ = grab(lambda x, table: x * (2 if any(k is True for k in table) else 3))
    assert compiled(plain(1), {1: 5}).item() == 3
    assert compiled(plain(1), {True: 5}).item() == 2
    assert compiled(plain(1), {(1, 2): 5}).item() == 3
    assert compiled(plain(1), collections.OrderedDict({1: 5})).item() == 3
    assert compiled(plain(1), collections.OrderedDict({True: 5})).item() == 2


def test_the_same_object_twice_is_not_two_objects():
    compiled, _ = grab(lambda x, pair: x * (2 if pair.a is pair.b else 3))
    one = Box(n=1)
    assert compiled(plain(1), Box(a=one, b=one)).item() == 2
    assert compiled(plain(1), Box(a=Box(n=1), b=Box(n=1))).item() == 3
    assert compiled(plain(1), Box(a=one, b=one)).item() == 2 and programs(compiled) == 2


DEFAULT = Box(n=1)


def test_an_argument_that_the_program_also_finds_by_itself():
    compiled, _ = grab(lambda x, box: x * (2 if box is DEFAULT else 3))
    assert compiled(plain(1), DEFAULT).item() == 2
    assert compiled(plain(1), Box(n=1)).item() == 3
    assert compiled(plain(1), DEFAULT).item() == 2


def test_functions_as_arguments_are_compared_by_code_and_variables():
    def scaled(k):
        return lambda t: t * k

    compiled, _ = grab(lambda x, f: f(x))
    assert compiled(plain(1), scaled(2)).item() == 2
    assert compiled(plain(1), scaled(2)).item() == 2 and programs(compiled) == 1
    assert compiled(plain(1), scaled(3)).item() == 3 and programs(compiled) == 2
    w = torch.full((1,), 5.0)
    assert compiled(plain(1), scaled(w)).item() == 5
    assert compiled(plain(1), scaled(w + 1)).item() == 6 and programs(compiled) == 3
    assert compiled(plain(1), functools.partial(torch.mul, 4)).item() == 4
    assert compiled(plain(1), functools.partial(torch.mul, 5)).item() == 5


def test_modules_as_arguments():
    compiled, _ = grab(lambda x, net: net(x).sum())
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    for net in (first, second, first):
        net.zero_grad()
        assert torch.equal(compiled(plain(1, 2), net), net(plain(1, 2)).sum())
        compiled(plain(1, 2), net).backward()
        assert net.bias.grad.tolist() == [1, 1]
    assert programs(compiled) == 1
    second.register_forward_hook(lambda module, args, out: out * 2)
    assert torch.equal(compiled(plain(1, 2), second), second(plain(1, 2)).sum())
    assert torch.equal(compiled(plain(1, 2), first), first(plain(1, 2)).sum())
    drop = nn.Dropout(1.0)
    assert compiled(plain(1, 2), drop).item() == 0
    assert compiled(plain(1, 2), drop.eval()).item() == 3


def test_arguments_and_code_are_not_kept_alive():
    compiled, _ = grab(lambda x, box, f, net: f(x) * box.w + net(x))
    space = {}
    exec("def f(x):\n    return x * 2\n", space)
    x, box, net = plain(1, 2).requires_grad_(), Box(w=torch.ones(1, 2), more=Box(n=1)), nn.Linear(2, 2)
    compiled(x, box, space["f"], net).sum().backward()
    alive = [weakref.ref(o) for o in (x, box, box.w, box.more, space["f"], space["f"].__code__, net, net.weight)]
    del x, box, space, net
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


@pytest.mark.parametrize("make", [lambda: iter([1, 2]), lambda: (i for i in (1, 2)), lambda: map(int, [1])])
def test_iterators_are_refused_before_they_are_used_up(make):
    compiled, _ = grab(lambda x, numbers: x * next(numbers))
    numbers = make()
    with pytest.raises(UnsupportedError, match=r"iterator|generator|map"):
        compiled(plain(1), numbers)
    assert next(numbers) == 1


def test_attributes_of_tensors():
    compiled, _ = grab(lambda x, w: x * getattr(x, "scale", 1) + getattr(w, "more", 0))
    x, w = plain(1), plain(1)
    assert compiled(x, w).item() == 1
    x.scale = 3
    assert compiled(x, w).item() == 3
    w.more = torch.full((1,), 4.0)
    assert compiled(x, w).item() == 7
    w.more = torch.full((1,), 5.0)
    assert compiled(x, w).item() == 8 and programs(compiled) == 3
    del x.scale
    assert compiled(x, w).item() == 6


def test_attributes_of_tensors_that_the_program_finds():
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(1)
    compiled, _ = grab(lambda x: net(x) * getattr(net.weight, "scale", 1))
    assert compiled(plain(1)).item() == 1
    net.weight.scale = 3
    assert compiled(plain(1)).item() == 3
    net.weight.scale = 4
    assert compiled(plain(1)).item() == 4
    net.weight = nn.Parameter(torch.full((1, 1), 2.0))
    assert compiled(plain(1)).item() == 2
    assert own_attributes(net.weight) is None


@pytest.mark.parametrize("name", ["_version", "_base", "_cdata"])
def test_what_guards_do_not_compare_cannot_be_read(name):
    x = (plain(2).requires_grad_() * 1)[:1]
    compiled, _ = grab(lambda x: x * (2 if getattr(x, name) else 3))
    with pytest.raises(UnsupportedError, match=rf"reads \.{name}"):
        compiled(x)


@pytest.mark.parametrize("name", ["is_shared", "is_pinned"])
def test_functions_whose_answer_guards_do_not_compare_cannot_be_called(name):
    compiled, _ = grab(lambda x: x * (2 if getattr(x, name)() else 3))
    with pytest.raises(CaptureError, match=name):
        compiled(plain(1))


def test_what_was_computed_before_the_call_is_compared_where_it_is_read():
    compiled, _ = grab(lambda x: x * (2 if "Mul" in x.grad_fn.name() else 3))
    w = plain(1).requires_grad_()
    assert compiled(w * 1).item() == 2
    assert compiled(w + 0).item() == 3
    assert compiled(w * 1).item() == 2 and programs(compiled) == 2


def test_hooks_and_retained_gradients_from_before_are_compared_where_they_are_read():
    compiled, _ = grab(lambda x: x * (2 if x.retains_grad else 3))
    x = plain(1).requires_grad_() * 1
    assert compiled(x).item() == 3
    x.retain_grad()
    with pytest.raises(UnsupportedError, match="retains_grad"):
        compiled(x)


def test_a_retained_gradient_is_no_hook():
    compiled, _ = grab(lambda x: x * (2 if x._backward_hooks else 3))
    x = plain(1).requires_grad_() * 1
    x.retain_grad()
    assert compiled(x).item() == 3


def test_settings_of_torch_that_a_program_asks_for():
    compiled, _ = grab(
        lambda x: (
            x
            * (2 if torch.is_anomaly_enabled() else 3)
            * (5 if torch.backends.cuda.flash_sdp_enabled() else 7)
            * (11 if torch.backends.cudnn.benchmark else 13)
        )
    )
    assert compiled(plain(1)).item() == 3 * 5 * 13
    with torch.autograd.set_detect_anomaly(True):
        assert compiled(plain(1)).item() == 2 * 5 * 13
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert compiled(plain(1)).item() == 3 * 7 * 13
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    with torch.backends.cudnn.flags(benchmark=True):
        assert compiled(plain(1)).item() == 3 * 5 * 11


def test_another_kernel_for_attention_gets_another_program():
    attend = torch.nn.functional.scaled_dot_product_attention
    compiled, _ = grab(lambda q: attend(q, q, q))
    q = torch.randn(1, 2, 4, 8)
    compiled(q)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.equal(compiled(q), attend(q, q, q)) and programs(compiled) == 2
    assert torch.equal(compiled(q), attend(q, q, q)) and programs(compiled) == 2


def test_what_is_refused_after_the_program_ran_is_refused_for_its_reason(monkeypatch):
    """The copies of the arguments are noted once more when the program has ended, and hold no survivors."""

    def program(box):
        box.view = box.x.view(-1)
        box.view.set_(box.view.detach())
        return box.view

    monkeypatch.setattr(gc, "get_referrers", lambda *_: pytest.fail("nothing has to be searched among all objects"))
    compiled, _ = grab(program)
    with pytest.raises(UnsupportedError, match=r"aten\.set_\.source_Tensor"):
        compiled(Box(x=plain(3).requires_grad_() * 1))
