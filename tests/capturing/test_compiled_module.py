"""A compiled module is the module: of its class, with its state, its methods and its hooks (F-9)."""

import abc
import copy
import gc
import inspect
import io
import pickle
import weakref

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import parametrizations, parametrize

import foregrad
from helpers import leaf, nop, plain


class Net(nn.Module):
    """A module with a configuration, methods, items and a keyword."""

    def __init__(self, width=2):
        super().__init__()
        self.config = {"width": width}
        self.layer = nn.Linear(width, width)

    def forward(self, x, *, scale: float = 2.0):
        """Scaled."""
        return self.layer(x) * scale

    def generate(self, x, steps):
        for _ in range(steps):
            x = self(x)
        return x

    def __getitem__(self, name):
        return getattr(self, name)

    def __len__(self):
        return len(self.config)

    def __iter__(self):
        return iter(self.config)


class Wider(Net):
    def forward(self, x, *, scale: float = 2.0):
        return super().forward(x, scale=scale) + self.layer.weight.sum()


def compiled_net(kind=Net):
    module = kind()
    return foregrad.aot_module(module, nop), module


def test_it_is_of_the_class_of_its_original():
    compiled, module = compiled_net()
    assert isinstance(compiled, Net) and compiled.__class__ is Net and type(compiled).__name__ == "Net"
    assert isinstance(compiled, nn.Module) and not isinstance(module, type(compiled))
    assert type(compiled) is type(compiled_net()[0])
    assert repr(compiled) == repr(module) and compiled.__doc__ == module.__doc__
    assert inspect.signature(compiled) == inspect.signature(module)
    assert inspect.signature(compiled.forward) == inspect.signature(module.forward)
    assert inspect.signature(type(compiled).forward) == inspect.signature(Net.forward)
    assert compiled.forward.__doc__ == "Scaled."


def test_attributes_and_methods_are_those_of_the_original():
    compiled, module = compiled_net()
    assert compiled.config is module.config and compiled.layer is module.layer is compiled["layer"]
    assert len(compiled) == 1 and list(compiled) == ["width"]
    assert torch.equal(compiled.generate(plain(1, 2), 3), module.generate(plain(1, 2), 3))
    assert len(compiled.specializations) == 2  # the first call is given a leaf


def test_changes_are_seen_from_both_sides():
    compiled, module = compiled_net()
    compiled.training = False
    assert not module.training and module.train() and compiled.training
    compiled.other = nn.Linear(1, 1)
    assert module.other is compiled.other and "other.weight" in module.state_dict()
    module.note = "a"
    assert compiled.note == "a"
    del compiled.note
    assert not hasattr(module, "note")
    with pytest.raises(AttributeError, match="no attribute 'note'"):
        _ = compiled.note
    compiled.eval()
    assert not module.layer.training
    compiled.requires_grad_(False)
    assert not module.layer.weight.requires_grad
    compiled.apply(lambda part: setattr(part, "seen", True))
    assert module.seen and module.layer.seen


def test_parameters_and_state_have_the_names_of_the_original():
    compiled, module = compiled_net()
    assert list(compiled.state_dict()) == ["layer.weight", "layer.bias"]
    assert [name for name, _ in compiled.named_parameters()] == ["layer.weight", "layer.bias"]
    assert [name for name, _ in compiled.named_modules()] == ["", "layer"]
    assert compiled.layer.weight is module.layer.weight
    state = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    compiled.load_state_dict(state)
    assert compiled(plain(1, 2)).tolist() == [[0, 0]]
    assert Net().load_state_dict(compiled.state_dict())


def test_a_change_of_dtype_is_a_program_of_its_own():
    compiled, module = compiled_net()
    compiled(plain(1, 2))
    assert compiled.half() is compiled and module.layer.weight.dtype is torch.float16
    x = plain(1, 2).half()
    assert torch.equal(compiled(x), module(x))
    assert compiled.to(torch.float64)(plain(1, 2).double()).dtype is torch.float64


def test_a_forward_that_calls_that_of_its_base():
    compiled, module = compiled_net(Wider)
    x, y = leaf(1, 2), leaf(1, 2)
    compiled(x).sum().backward()
    module(y).sum().backward()
    assert torch.equal(x.grad, y.grad) and len(compiled.specializations) == 1
    assert torch.equal(compiled.forward(x, scale=3.0), module.forward(x, scale=3.0))
    assert len(compiled.specializations) == 2


HOOKS = {
    "forward": lambda m, seen: m.register_forward_hook(lambda m, args, out: seen.append("after") or out * 2),
    "before": lambda m, seen: m.register_forward_pre_hook(lambda m, args: seen.append("before") or (args[0] + 1,)),
    "with keywords": lambda m, seen: m.register_forward_hook(
        lambda m, args, kwargs, out: seen.append(sorted(kwargs)) or out * kwargs["scale"], with_kwargs=True
    ),
    "before, with keywords": lambda m, seen: m.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(sorted(kwargs)) or (args, {"scale": 5.0}), with_kwargs=True
    ),
    "always": lambda m, seen: m.register_forward_hook(lambda m, args, out: seen.append(type(out)), always_call=True),
    "backward": lambda m, seen: m.register_full_backward_hook(lambda m, i, o: seen.append(o[0].sum().item())),
    "before backward": lambda m, seen: m.register_full_backward_pre_hook(
        lambda m, o: seen.append(o[0].sum().item()) or (o[0] * 3,)
    ),
    "reads data": lambda m, seen: m.register_forward_hook(lambda m, args, out: seen.append(out.sum().item())),
    "of all modules": lambda m, seen: nn.modules.module.register_module_forward_hook(
        lambda part, args, out: seen.append("all") if isinstance(part, Net) else None
    ),
}


@pytest.mark.parametrize("side", ["original", "compiled"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_run_once_a_call_as_in_eager(kind, when, side):
    outcomes = []
    for transform in (lambda m: m, lambda m: foregrad.aot_module(m, nop)):
        torch.manual_seed(0)
        module, seen = Net(), []
        if when == "before":
            compiled, handle = None, HOOKS[kind](module, seen)
        compiled = transform(module)
        if when == "after":
            compiled(leaf(3, 2), scale=2.0).sum().backward()
            handle = HOOKS[kind](compiled if side == "compiled" else module, seen)
        for _ in range(2):
            x = leaf(3, 2)
            result = compiled(x, scale=2.0)
            result.sum().backward()
            seen.append((result.tolist(), x.grad.tolist()))
        handle.remove()
        seen.append(compiled(plain(3, 2), scale=2.0).tolist())
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]
    assert len(compiled.specializations) <= 4


def test_a_new_hook_at_each_call_compiles_nothing_again():
    compiled, _ = compiled_net()
    for step in range(4):
        found = []
        handle = compiled.register_forward_hook(lambda m, args, out, step=step, found=found: found.append(step))
        compiled(plain(1, 2))
        handle.remove()
        assert found == [step]
    assert len(compiled.specializations) == 1


def test_a_hook_looks_the_module_up():
    """A compiled module and its original are equal, so that either is found where the other was put."""
    compiled, module = compiled_net()
    names = {part: name for name, part in module.named_modules()}
    found = []
    module.register_forward_hook(lambda part, args, out: found.append(names[part]))
    assert compiled == module and module == compiled and hash(compiled) == hash(module)
    assert compiled != Net() and compiled != 3 and compiled in [module]
    compiled(plain(1, 2))
    assert found == [""]


def test_a_module_that_calls_itself_runs_its_hooks_inside_too():
    class Countdown(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x, n):
            return x if n == 0 else self(x * self.w, n - 1)

    module = Countdown()
    compiled = foregrad.aot_module(module, nop)
    assert torch.equal(compiled(plain(2), 2), plain(2))
    handle = module.register_forward_hook(lambda m, args, out: out * 2)
    assert torch.equal(compiled(plain(2), 2), module(plain(2), 2)) and compiled(plain(2), 2)[0] == 8
    handle.remove()
    assert torch.equal(compiled(plain(2), 2), plain(2)) and len(compiled.specializations) == 2


def test_a_forward_that_was_put_on_the_module_before_is_compiled():
    module = Net()
    module.forward = lambda x: module.layer(x) - 1
    compiled = foregrad.aot_module(module, nop)
    assert torch.equal(compiled(plain(1, 2)), module(plain(1, 2))) and len(compiled.specializations) == 1
    wrapped = compiled.forward
    compiled.forward = lambda x: wrapped(x) * 2
    assert torch.equal(compiled(plain(1, 2)), (module.layer(plain(1, 2)) - 1) * 2)
    bare = nn.Module()
    bare.forward = lambda x: x + 1
    assert foregrad.aot_module(bare, nop)(plain(2)).tolist() == [2, 3]
    del compiled.forward
    assert torch.equal(Net.forward(module, plain(1, 2)), module(plain(1, 2)))


def test_a_forward_that_is_put_around_it_afterwards_calls_the_compiled_one():
    compiled, module = compiled_net()
    inner = compiled.forward
    compiled.forward = lambda x: inner(x) + 1
    x = plain(1, 2)
    assert torch.equal(compiled(x), module.layer(x) * 2 + 1) and len(compiled.specializations) == 1
    compiled.forward = inner
    assert torch.equal(compiled(x), module.layer(x) * 2)


@pytest.mark.parametrize("side", ["original", "compiled"])
def test_parametrizations_give_both_another_class(side):
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

    module = nn.Linear(2, 2)
    compiled = foregrad.aot_module(module, nop)
    compiled(plain(1, 2))
    parametrize.register_parametrization(compiled if side == "compiled" else module, "weight", Symmetric())
    assert torch.equal(compiled.weight, compiled.weight.T) and parametrize.is_parametrized(compiled)
    assert torch.equal(compiled(plain(1, 2)), module(plain(1, 2)))
    parametrizations.weight_norm(compiled, "bias", dim=None)
    assert torch.equal(compiled(plain(1, 2)), module(plain(1, 2)))
    assert compiled.__class__ is type(module)


def test_a_lazy_module_becomes_what_it_is_to_become():
    module = nn.LazyLinear(3)
    compiled = foregrad.aot_module(module, nop)
    assert compiled(plain(1, 2)).shape == (1, 3) and type(module) is nn.Linear
    assert isinstance(compiled, nn.Linear) and not isinstance(compiled, nn.LazyLinear)
    assert torch.equal(compiled(plain(4, 2)), module(plain(4, 2)))


def test_classes_of_every_kind():
    made = []

    class Registry(abc.ABCMeta):
        def __init__(cls, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(cls)

    class Slotted(nn.Module, metaclass=Registry):
        __slots__ = ("factor",)

        def __init_subclass__(cls, **kwargs):
            raise TypeError("no subclasses")

        def forward(self, x):
            return x * self.factor

        def __eq__(self, other):
            return isinstance(other, Slotted)

        __hash__ = nn.Module.__hash__

    module = Slotted()
    module.factor = 3
    compiled = foregrad.aot_module(module, nop)
    assert compiled(plain(2)).tolist() == [3, 6] and made == [Slotted] and compiled == Slotted()
    compiled.factor = 4
    assert module.factor == 4 and compiled(plain(2)).tolist() == [4, 8]
    del compiled.factor
    assert not hasattr(module, "factor")
    traced = fx.symbolic_trace(Net())
    compiled = foregrad.aot_module(traced, nop)
    assert torch.equal(compiled(plain(1, 2)), traced(plain(1, 2))) and compiled.graph is traced.graph
    assert torch.equal(copy.deepcopy(compiled)(plain(1, 2)), traced(plain(1, 2)))


def test_another_one_of_its_class_is_a_plain_module():
    compiled, _ = compiled_net()
    other = type(compiled)(3)
    assert other(plain(1, 3)).shape == (1, 3) and other.specializations == [] and other.config["width"] == 3
    assert type(pickle.loads(pickle.dumps(other)).orig_module) is Net
    assert type(compiled.__class__(3)) is Net


def test_a_class_that_has_a_call_of_its_own():
    class Called(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) + 1

    module = Called(2, 2)
    compiled = foregrad.aot_module(module, nop)
    assert torch.equal(compiled(plain(1, 2)), module(plain(1, 2))) and len(compiled.specializations) == 1


@pytest.mark.parametrize("outer", [lambda m: m, lambda m: foregrad.aot_module(m, nop)])
def test_a_compiled_module_in_a_module(outer):
    inner, module = compiled_net()
    holder = outer(nn.Sequential(inner, nn.ReLU()))
    expected = nn.Sequential(module, nn.ReLU())
    assert list(holder.state_dict()) == list(expected.state_dict())
    x, y = leaf(1, 2), leaf(1, 2)
    holder(x).sum().backward()
    expected(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert [name for name, _ in holder.named_modules()] == [name for name, _ in expected.named_modules()]


def test_a_compiled_module_is_compiled_anew_from_its_original():
    compiled, module = compiled_net()
    again = foregrad.aot_module(compiled, nop, dynamic=True)
    assert again.orig_module is module and torch.equal(again(plain(1, 2)), compiled(plain(1, 2)))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)), saved])
def test_copies(copied):
    compiled, module = compiled_net()
    compiled(plain(1, 2))
    again, other = copied((compiled, module))
    assert again.orig_module is other and type(again) is type(compiled) and again.specializations == []
    assert torch.equal(again(plain(1, 2)), compiled(plain(1, 2))) and again.layer.weight is not module.layer.weight
    compiled.inner = compiled.forward  # leads back to itself
    assert copied(compiled).inner.__self__.orig_module.config == module.config


def test_a_shallow_copy_shares_tensors_and_not_attributes():
    compiled, module = compiled_net()
    again = copy.copy(compiled)
    again.note = 1
    assert again.layer is module.layer and not hasattr(module, "note")
    assert torch.equal(again(plain(1, 2)), compiled(plain(1, 2)))


def test_it_can_be_referred_to_weakly_and_goes_with_its_class():
    class Local(nn.Linear):
        pass

    compiled = foregrad.aot_module(Local(2, 2), nop)
    compiled(leaf(1, 2)).sum().backward()
    found = weakref.ref(compiled), weakref.ref(type(compiled)), weakref.ref(Local)
    assert found[0]() is compiled
    del compiled, Local
    gc.collect()
    assert [reference() for reference in found] == [None, None, None]


def test_an_optimizer_and_a_data_parallel_replica():
    compiled, module = compiled_net()
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    compiled(plain(1, 2)).sum().backward()
    before = module.layer.weight.clone()
    optimizer.step()
    compiled.zero_grad()
    assert not torch.equal(before, module.layer.weight) and module.layer.weight.grad is None
    replica = compiled._replicate_for_data_parallel()
    assert replica.layer is module.layer or replica.config is module.config
