"""A clone must be a tensor that a program cannot tell from its original."""

import re
import threading

import pytest
import torch
from torch import Tensor, nn

from foregrad.testing import Arguments, Cloner, Contents, Program
from testing.faults import leaf, plain


def clones(*tensors: Tensor) -> list[Tensor]:
    cloner = Cloner(Contents.of(tensors))
    return [cloner.tensor(tensor) for tensor in tensors]


ORIGINALS = {
    "plain": lambda: plain(2, 3),
    "transposed": lambda: plain(2, 3).t(),
    "offset": lambda: plain(6)[2:],
    "gaps": lambda: plain(8)[::3],
    "expanded": lambda: plain(3).expand(2, 3),
    "overlapping": lambda: plain(6).as_strided((3, 3), (1, 1)),
    "leaf": lambda: leaf(3),
    "parameter": lambda: nn.Parameter(plain(3)),
    "frozen parameter": lambda: nn.Parameter(plain(3), requires_grad=False),
    "non-leaf": lambda: leaf(2, 3) * 2,
    "transposed non-leaf": lambda: (leaf(2, 3) * 2).t().sin(),
    "view of a leaf": lambda: leaf(2, 3)[1],
    "view of a non-leaf": lambda: (leaf(2, 3) * 2)[1],
    "one of several views": lambda: (leaf(2, 3) * 2).unbind(0)[1],
    "leaf that is a view": lambda: plain(2, 3)[1].requires_grad_(),
    "detached view": lambda: leaf(2, 3)[1].detach(),
    "view with another dtype": lambda: plain(4).view(torch.int32),
    "conj": lambda: torch.tensor([1 + 2j]).conj(),
    "neg": lambda: torch.tensor([1 + 2j]).conj().imag,
    "detached conj": lambda: torch.tensor([1 + 2j]).conj().detach(),
    "empty": lambda: torch.empty(0, 3),
    "zero-dimensional": lambda: torch.tensor(3),
    "boolean": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: plain(3).bfloat16(),
    "float8": lambda: plain(3).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_clone_is_like_its_original(name):
    original = ORIGINALS[name]()
    (clone,) = clones(original)
    assert clone is not original
    assert clone.untyped_storage().data_ptr() != original.untyped_storage().data_ptr() or not original.numel()
    assert type(clone) is type(original) and clone.dtype == original.dtype
    assert clone.shape == original.shape and clone.stride() == original.stride()
    assert clone.storage_offset() == original.storage_offset()
    assert clone.requires_grad == original.requires_grad and clone.is_leaf == original.is_leaf
    assert clone.is_conj() == original.is_conj() and clone.is_neg() == original.is_neg()
    assert clone._is_view() == original._is_view()
    assert torch.equal(clone.detach(), original.detach())


@pytest.mark.parametrize("name", ["view of a leaf", "leaf", "one of several views", "non-leaf", "view of a non-leaf"])
def test_autograd_refuses_the_same_writes(name):
    original = ORIGINALS[name]()
    (clone,) = clones(original)
    outcomes = []
    for tensor in (original, clone):
        try:
            tensor.add_(1)
            outcomes.append("written")
        except RuntimeError as error:
            outcomes.append(re.sub(r"Output \d", "Output", str(error)))
    assert outcomes[0] == outcomes[1]


def test_a_view_made_without_grad_stays_one():
    base = leaf(2, 3) * 1
    with torch.no_grad():
        view = base[0]
    clone, _ = clones(view, base)
    assert clone.requires_grad == view.requires_grad and clone.grad_fn is None
    with pytest.raises(RuntimeError, match="no_grad mode"):
        clone.add_(leaf(3))


def test_what_is_shared_stays_shared():
    x = leaf(6) * 1
    first, second, third = clones(x, x[2:], x.detach()[1:3])
    assert second._base is first
    with torch.no_grad():
        first.zero_()
    assert not second.any() and not third.any()


def test_gradients_of_a_non_leaf_arrive_at_the_leaf_behind_it():
    x = leaf(3) * 2
    cloner = Cloner(Contents.of([x]))
    clone = cloner.tensor(x)
    (clone * 3).sum().backward()
    assert torch.equal(cloner.leaf_behind(clone).grad, torch.full((3,), 3.0))


def test_existing_gradients_and_retained_ones_are_kept():
    x, y = leaf(3), leaf(3) * 2
    x.grad = plain(3)
    y.retain_grad()
    a, b = clones(x, y)
    assert torch.equal(a.grad, plain(3)) and a.grad is not x.grad and b.retains_grad


def test_arguments_apart_share_nothing():
    x = plain(3)
    arguments = Arguments.of(torch.add, (x, x), {})
    together = arguments.clone(Cloner(Contents.of([x]))).args
    apart = arguments.with_values(arguments.values, apart=True).clone(Cloner(Contents.of([x]))).args
    assert together[0] is together[1]
    assert apart[0].data_ptr() != apart[1].data_ptr()


def test_what_python_cannot_copy_is_passed_on():
    lock = threading.Lock()
    assert Cloner(Contents({})).value(lock) is lock


def test_tied_weights_and_buffers_that_are_views_survive_the_copy_of_a_module():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    module.register_buffer("row", module[0].weight.detach()[0])
    side = Program.of(module, (plain(3),), {}).side(lambda fn: fn)
    copied = side.target
    assert copied[0].weight is copied[1].weight is not module[0].weight
    assert copied.row.data_ptr() == copied[0].weight.data_ptr()


def test_state_is_put_back_in_place():
    module = nn.BatchNorm1d(3)
    program = Program.of(module, (plain(2, 3),), {})
    side = program.side(lambda fn: fn)
    weight = side.target.weight
    version = weight._version
    weight.data = torch.zeros(5)
    side.target.running_mean = torch.ones(3)
    side.target.extra = torch.ones(1)
    weight.requires_grad_(False)
    side.prepare(program.arguments, program.contents)
    assert side.target.weight is weight and weight.requires_grad and weight._version == version
    assert torch.equal(weight, module.weight) and torch.equal(side.target.running_mean, module.running_mean)
    assert not hasattr(side.target, "extra")


def test_new_data_keeps_integers_and_the_range_of_the_rest():
    index, rate, zeros = torch.arange(3), torch.tensor([0.25, 1.0]), torch.zeros(2)
    tensors = [index, rate, zeros]
    cloner = Cloner(Contents.of(tensors).redrawn(tensors, seed=1))
    assert torch.equal(cloner.tensor(index), index)
    assert not torch.equal(cloner.tensor(rate), rate) and bool((cloner.tensor(rate) <= rate).all())
    assert bool(cloner.tensor(zeros).all())
