"""Subclasses and programs that are refused, and how."""

import functools

import pytest
import torch

import foregrad
from foregrad.errors import AssumptionError, BackwardError, ForegradError, UnsupportedError
from helpers import nop, plain
from subclass_pairs import Pair, pair


def compiled(program):
    return foregrad.aot_function(program, nop)


class Opaque(torch.Tensor):
    """Runs operators by itself and cannot be taken apart."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        return func(*(a.inner if isinstance(a, cls) else a for a in args))


class OneWay(Opaque):
    def __tensor_flatten__(self):
        return ["inner"], None


class Copying(Pair):
    """Does not keep the tensors that it is given."""

    @classmethod
    def __tensor_unflatten__(cls, inner, tag, outer_size, outer_stride):
        return cls(inner["p"].clone(), inner["q"], tag)


class Missing(Pair):
    def __tensor_flatten__(self):
        return ["p", "z"], None


class NoContext(Pair):
    """Its context is another object each time, and equal to no other."""

    def __tensor_flatten__(self):
        return ["p", "q"], object()


class Odd(Pair):
    def __tensor_flatten__(self):
        return ["p", "q"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Opaque(plain(2)),
            r"args\[0\] is a Opaque, which has no __tensor_flatten__ and no",
        ),
        (lambda: OneWay(plain(2)), r"args\[0\] is a OneWay, which has no __tensor_unflatten__"),
        (lambda: Copying(plain(2), plain(2)), "must build a tensor around the very tensors"),
        (lambda: Missing(plain(2), plain(2)), "names the attribute 'z', which is not there"),
        (lambda: NoContext(plain(2), plain(2)), "NoContext has a context that is not equal to itself"),
        (lambda: Odd(plain(2), plain(2)), "must return a list of attribute names and a context"),
    ],
)
def test_bad_subclasses(make, words):
    """T-1: which subclasses, and what is missing"""
    with pytest.raises(UnsupportedError, match=words):
        compiled(lambda x: x + 1)(make())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: Opaque(x * 2), "is a Opaque, which has no __tensor_flatten__ and no __tensor_unflatten__"),
        (lambda x: OneWay(x * 2), "is a OneWay, which has no __tensor_unflatten__"),
        (lambda x: Missing(x * 2, x), "names the attribute 'z', which is not there"),
        (lambda x: Odd(x * 2, x), "must return a list of attribute names and a context"),
    ],
)
def test_bad_subclasses_that_a_program_makes(make, words):
    """T-1: the same for results"""
    with pytest.raises(UnsupportedError, match=words):
        compiled(make)(plain(2))


def test_bad_subclass_in_a_closure():
    """T-1: the same for what a program finds by itself"""
    w = OneWay(plain(2))
    with pytest.raises(UnsupportedError, match=r"w \(closure of <lambda>\) is a OneWay, which has no"):
        compiled(lambda x: x * w)(plain(2))


class Optional(Pair):
    """Has one inner tensor or two."""

    def __tensor_flatten__(self):
        return (["p"] if self.q is None else ["p", "q"]), self.tag

    @classmethod
    def __tensor_unflatten__(cls, inner, tag, outer_size, outer_stride):
        return cls(inner["p"], inner.get("q"), tag)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        p = func(*(a.p if isinstance(a, cls) else a for a in args))
        q = args[0].q
        return cls(p, None if q is None else func(*(a.q if isinstance(a, cls) else a for a in args)), args[0].tag)


def test_unequal_number_of_inner_tensors():
    """F-2: it is another program"""
    f = compiled(lambda x: x.sin())
    assert f(Optional(plain(2), None)).q is None
    assert torch.equal(f(Optional(plain(2), plain(2) * 2)).q, (plain(2) * 2).sin())
    assert f(Optional(plain(2), None)).q is None
    assert len(f.specializations) == 2


class Sine(torch.nn.Module):
    def forward(self, x):
        return (x.sin(),)


def test_unequal_number_of_inner_tensors_without_guards():
    """L-3: one program, whatever it is called with; `debug_assert` looks"""
    with foregrad.config.patch(debug_assert=True):
        f = foregrad.aot_module_simplified(Sine(), [Optional(plain(2), None)], nop)
    assert f(Optional(plain(2), None))[0].q is None
    for given in (Optional(plain(2), plain(2)), Optional(plain(2), None, "odd")):
        with pytest.raises(AssumptionError, match="input 0 would be a Optional of p, but"):
            f(given)


def test_unequal_number_of_inner_tensors_in_a_gradient():
    """T-8: what was expected, and what came"""
    y = compiled(lambda x: x.sin())(Optional(plain(2), plain(2)).requires_grad_())
    with pytest.raises(BackwardError, match=r"output 0 .* a Optional of p and q with .*, and a Optional of p with"):
        y.backward(Optional(plain(2), None))


def test_gradient_of_a_subclass_in_a_subclass():
    """T-2: the wrapper around it is the input, and not the subclass inside"""
    x = Pair(pair(2, grad=True), pair(2)).requires_grad_(False)
    with pytest.raises(UnsupportedError, match=r"differentiates a tensor subclass inside of args\[0\]"):
        compiled(lambda x: x.p * 2)(x)
    assert not compiled(lambda x: x * 2)(x).requires_grad


def test_new_wrapper_around_written_memory():
    """An alias that would be lost"""

    def program(t):
        t.mul_(2)
        return Pair(t, t * 2)

    with pytest.raises(UnsupportedError, match=r"a new Pair around memory of args\[0\]"):
        compiled(program)(plain(2))
    t = plain(2)
    got = compiled(lambda t: Pair(t, t * 2))(t)
    assert got.p.untyped_storage()._cdata == t.untyped_storage()._cdata


def test_escape():
    """A subclass of recorded tensors does not outlive the recording: what is kept is what each call makes"""
    kept = []

    def program(x):
        kept.append(x * 2)
        return x + 1

    x = pair(2)
    compiled(program)(x)
    assert [(type(t), t.p.tolist()) for t in kept] == [(Pair, (x.p * 2).tolist())]


def test_an_escape_that_no_call_can_repeat():
    keep = functools.lru_cache(lambda x: x * 2)
    with pytest.raises(UnsupportedError, match="remembers what it gave for tensors"):
        compiled(lambda x: keep(x) + 1)(pair(2))
    assert keep.cache_info().currsize == 0


class Noisy(torch.Tensor):
    """Overrides torch's functions, and holds no other tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result + 1 if func is torch.Tensor.mul else result


class OwnParameter(torch.nn.Parameter):
    """Overrides nothing."""


def test_overrides_of_functions():
    """A subclass with a `__torch_function__` only is refused, wherever the program meets it"""

    class Net(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.register_buffer("weight", weight)

        def forward(self, x):
            return x * self.weight

    noisy = plain(2).as_subclass(Noisy)
    for refused in (
        lambda: compiled(lambda x: x * 2)(noisy),
        lambda: compiled(lambda x: x * noisy)(plain(2)),
        lambda: foregrad.aot_module(Net(noisy), nop)(plain(2)),
    ):
        with pytest.raises(UnsupportedError, match="is a Noisy, a tensor subclass whose __torch_function__"):
            refused()
    with pytest.raises(UnsupportedError, match="a tensor of another class is made of a recorded one"):
        compiled(lambda x: x.as_subclass(Noisy) * 2)(plain(2))


def test_subclasses_that_override_nothing():
    """A parameter of a class of its own is one"""
    weight = OwnParameter(plain(2))
    result, same = compiled(lambda x: (x * weight, weight))(plain(2))
    assert type(result) is torch.Tensor and same is weight and result.tolist() == [1, 4]


def test_module_attribute():
    """X: a subclass that the program assigns to a module is assigned by the compiled call too"""

    class Keeps(torch.nn.Module):
        def forward(self, x):
            self.last = x * 2
            return x + 1

    module = Keeps()
    foregrad.aot_module(module, nop)(pair(2))
    assert type(module.last) is Pair and module.last.q.tolist() == [4, 8]


def test_data_access():
    """Values of a recorded subclass are read as those of other tensors; its memory is not there to be read"""
    scaled = compiled(lambda x: x * x.sum().item())
    for n in (2, 3):
        result, expected = scaled(pair(n)), pair(n) * pair(n).sum().item()
        assert torch.equal(result.p, expected.p) and torch.equal(result.q, expected.q)
    with pytest.raises(ForegradError):
        compiled(lambda x: x * x.data_ptr())(pair(2))


def test_fallback():
    """fallback='eager' runs what is refused"""
    f = foregrad.aot_function(lambda x: x + 1, nop, fallback="eager")
    with pytest.warns(foregrad.errors.EagerFallbackWarning):
        assert f(Opaque(plain(2))).tolist() == [2, 3]
