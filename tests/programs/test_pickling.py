"""Copies and pickles of compiled callables: the original comes back, to be compiled again."""

import copy
import io
import multiprocessing
import pickle

import pytest
import torch
from torch import nn

import foregrad
from helpers import FORKS, leaf, nop, plain


def program(x):
    return x.sin() * 2


@lambda function: foregrad.aot_function(function, nop)
def decorated(x):
    return x.cos()


class Scaled:
    def __init__(self):
        self.factor = 3

    @lambda function: foregrad.aot_function(function, nop)
    def by_factor(self, x):
        """Scale it."""
        return x * self.factor

    act = foregrad.aot_module(nn.Tanh(), nop)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.copy, copy.deepcopy, pickled, saved]


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_a_compiled_function_compiles_anew(copied):
    compiled = foregrad.aot_function(program, nop, dynamic=True, fallback="eager")
    compiled(leaf(2)).sum().backward()
    again = copied(compiled)
    assert again is not compiled and again.specializations == [] and len(compiled.specializations) == 1
    assert again.config.dynamic_shapes and again.config.options.fallback == "eager"
    x = leaf(3)
    again(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * plain(3).cos())
    assert len(again.specializations) == 1 and len(compiled.specializations) == 1
    assert again.__name__ == "program" and again.__wrapped__ is program


@pytest.mark.parametrize("backend", ["eager", "aot_eager", nop])
@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_what_a_backend_compiles(copied, backend):
    compiled = foregrad.compile(nn.Linear(2, 2), backend)
    assert torch.equal(copied(compiled)(plain(3, 2)), compiled(plain(3, 2)))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_a_copy_of_a_compiled_module_has_parameters_of_its_own(copied):
    """F-9"""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    compiled = foregrad.aot_module(module, nop)
    compiled(plain(3, 2)).sum().backward()
    again = copied(compiled)
    assert again.specializations == [] and again.orig_module is not module
    with torch.no_grad():
        again.orig_module[0].weight.zero_()
        again.orig_module[0].bias.zero_()
    assert again(plain(3, 2)).abs().sum() == 0 and compiled(plain(3, 2)).abs().sum() > 0
    assert again.orig_module[1].num_batches_tracked == 2 and module[1].num_batches_tracked == 2
    again(plain(3, 2)).sum().backward()
    assert list(again.state_dict()) == list(compiled.state_dict())


def test_a_module_that_holds_a_compiled_function():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.run = foregrad.aot_function(self.inner, nop)

        def forward(self, x):
            return self.run(x)

    holder = Holder()
    holder(plain(1, 2))
    again = copy.deepcopy(holder)
    with torch.no_grad():
        again.inner.weight.zero_()
        again.inner.bias.zero_()
    assert again(plain(1, 2)).abs().sum() == 0 and holder(plain(1, 2)).abs().sum() > 0


def test_a_function_that_was_compiled_under_its_own_name_is_pickled_by_name():
    decorated(leaf(2))
    assert pickled(decorated) is decorated
    again = copy.deepcopy(decorated)
    assert again is not decorated and again.specializations == []
    torch.testing.assert_close(again(plain(2)), plain(2).cos())


def test_what_pickle_cannot_find_by_name_is_refused_by_pickle():
    """As for the function itself."""
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(foregrad.aot_function(lambda x: x * 2, nop))


def test_a_compiled_function_in_a_class_is_a_method():
    scaled = Scaled()
    assert scaled.by_factor(plain(2)).tolist() == [3, 6] and Scaled.by_factor(scaled, plain(2)).tolist() == [3, 6]
    scaled.factor = 5
    assert scaled.by_factor(plain(2)).tolist() == [5, 10]
    assert scaled.by_factor.__doc__ == "Scale it."
    assert torch.equal(scaled.act(plain(2)), plain(2).tanh())


@pytest.mark.skipif(not FORKS, reason="torch itself cannot")
def test_modules_are_sent_to_another_process():
    """A data loader's worker, or a pool: what arrives is compiled there."""
    module = nn.Linear(2, 1)
    compiled = foregrad.aot_module(module, nop)
    expected = compiled(plain(1, 2))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        arrived = pool.apply_async(apply, (compiled, plain(1, 2))).get(timeout=120)
    assert torch.equal(arrived, expected)


def apply(module, x):
    module(x).sum().backward()
    return module(x).detach()
