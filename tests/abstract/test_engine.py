"""Abstract tensors: everything but data."""

import numbers

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import foregrad
from foregrad.abstract.engine import DIRECT, has_gaps
from foregrad.errors import FakeModeError
from foregrad.record.fakify import Argument, engine_for
from foregrad.slots import Input
from helpers import leaf, nop, plain

TENSORS = {
    "contiguous": lambda: plain(2, 3),
    "transposed": lambda: plain(2, 3).t(),
    "with an offset": lambda: plain(8)[2:].view(2, 3),
    "with gaps": lambda: plain(8)[1::2],
    "expanded": lambda: plain(3).expand(2, 3),
    "without dimensions": lambda: plain(),
    "without elements": lambda: torch.empty(0, 3),
    "of integers": lambda: torch.arange(3),
    "conjugated": lambda: torch.tensor([1j]).conj(),
    "negated": lambda: torch.tensor([1j]).conj().imag,
    "on meta": lambda: torch.empty(2, 3, device="meta"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_twin_has_the_metadata_of_the_real_tensor(name):
    """F-12"""
    real = TENSORS[name]()
    twin = engine_for([], dynamic=False).fake(real, Input("args[0]"), dynamic=False)
    for fact in ("shape", "dtype", "device", "layout"):
        assert getattr(twin, fact) == getattr(real, fact)
    assert (twin.stride(), twin.storage_offset()) == (real.stride(), real.storage_offset())
    assert (twin.is_conj(), twin.is_neg()) == (real.is_conj(), real.is_neg())
    assert not twin.requires_grad and twin.is_leaf


def test_autograd_takes_no_twin_for_a_view():
    """Otherwise a write to a view of a leaf would be judged by the twin's base and not by the caller's."""
    twin = engine_for([], dynamic=False).fake(plain(4)[1:], Input("args[0]"), dynamic=False)
    assert not twin._is_view()


def test_twins_of_one_storage_are_apart():
    """D-1, B-1"""
    engine, real = engine_for([], dynamic=False), plain(4)
    one, other = (engine.fake(real, Input("args[0]"), dynamic=False) for _ in range(2))
    assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


def test_symbolic_sizes_are_shared_where_they_are_equal():
    """F-11"""
    engine = engine_for([], dynamic=True)
    twin = engine.fake(plain(4, 4, 5), Input("args[0]"), dynamic=True)
    a, b, c = twin.shape
    assert isinstance(a, torch.SymInt) and a.node.expr == b.node.expr != c.node.expr


def test_the_engine_joins_the_fake_mode_of_the_inputs():
    """F-12"""
    mode = FakeTensorMode()
    inputs = [Argument(Input("args[0]"), mode.from_tensor(plain(2))), Argument(Input("args[1]"), plain(3))]
    assert engine_for(inputs, dynamic=False).mode is mode


def test_two_fake_modes_are_refused():
    """F-12"""
    two = [Argument(Input(f"args[{i}]"), FakeTensorMode().from_tensor(plain(2))) for i in range(2)]
    with pytest.raises(FakeModeError, match=r"args\[0\] and args\[1\] belong to two fake modes.*one FakeTensorMode"):
        engine_for(two, dynamic=False)


@pytest.mark.parametrize(
    ("tensor", "gaps"),
    [
        (plain(2, 3), False),
        (plain(2, 3).t(), False),
        (plain(2, 3, 4).permute(1, 2, 0), False),
        (plain(6)[::2], True),
        (plain(3).expand(2, 3), True),
        (plain(2, 1, 3).expand(2, 1, 3), False),
        (plain(), False),
        (plain(4, 4)[:, :2], True),
    ],
)
def test_gaps_are_seen(tensor, gaps):
    assert has_gaps(tensor) is gaps


aten = torch.ops.aten
SHORT_WAYS = {
    aten._unsafe_view.default: lambda: (plain(2, 3, 4), [6, 4]),
    aten.add.Tensor: lambda: (plain(2, 3, 4).permute(2, 0, 1), plain(2, 1)),
    aten.addmm.default: lambda: (plain(3), plain(2, 4), plain(3, 4).t()),
    aten.alias.default: lambda: (plain(2, 3).t(),),
    aten.bmm.default: lambda: (plain(2, 3, 4), plain(2, 5, 4).transpose(1, 2)),
    aten.clone.default: lambda: (plain(2, 3, 4)[:, 1:].permute(2, 0, 1),),
    aten.detach.default: lambda: (plain(2, 3).t(),),
    aten.div.Scalar: lambda: (torch.arange(6).view(2, 3).t(), 2),
    aten.div.Tensor: lambda: (plain(3, 1).expand(3, 4), torch.arange(3).view(3, 1)),
    aten.expand.default: lambda: (plain(1, 2, 3), [2, 1, 2, 3]),
    aten.lt.Scalar: lambda: (plain(2, 3, 4)[..., ::2], 3.5),
    aten.mean.dim: lambda: (plain(2, 3, 4).permute(2, 0, 1), [-1], True),
    aten.mm.default: lambda: (plain(4, 2).t(), plain(4, 3)),
    aten.mul.Scalar: lambda: (torch.arange(6).view(2, 3).t(), 2.5),
    aten.mul.Tensor: lambda: (plain(1, 3, 1), torch.arange(8).view(4, 1, 2).transpose(0, 2)),
    aten.neg.default: lambda: (plain(4, 4)[1:, ::2],),
    aten.permute.default: lambda: (plain(1, 2, 3), [2, 0, 1]),
    aten.pow.Tensor_Scalar: lambda: (torch.arange(6).view(2, 3).t(), 0.5),
    aten.select.int: lambda: (plain(1, 2, 3), 2, 1),
    aten.slice.Tensor: lambda: (plain(1, 2, 3), 2, 1, 3, 2),
    aten.squeeze.dim: lambda: (plain(1, 2, 3), 0),
    aten.squeeze.dims: lambda: (plain(1, 1, 3), [0, 1]),
    aten.sub.Tensor: lambda: (torch.arange(3.0, dtype=torch.float64), plain()),
    aten.sum.dim_IntList: lambda: (plain(2, 3, 4).permute(2, 0, 1), [1], True),
    aten.t.default: lambda: (plain(2, 3),),
    aten.transpose.int: lambda: (plain(1, 2, 3), 0, 2),
    aten.unsqueeze.default: lambda: (plain(2, 3), 1),
    aten.view.default: lambda: (plain(2, 3), [3, 2]),
    aten.where.self: lambda: (plain(2, 1) > 1, plain(3, 2).t(), torch.arange(3)),
}


def test_every_operator_that_takes_the_short_way_is_tested():
    assert set(DIRECT) <= set(SHORT_WAYS)


@pytest.mark.parametrize("op", SHORT_WAYS, ids=str)
def test_the_short_way_gives_what_the_real_operator_gives(op):
    """Meta kernels without FakeTensorMode's questions: size, stride, offset, dtype and device must be right."""
    engine, real = engine_for([], dynamic=False), SHORT_WAYS[op]()
    twins = [
        engine.fake(value, Input("args[0]"), dynamic=False) if isinstance(value, torch.Tensor) else value
        for value in real
    ]
    ours, expected = engine.run(op, (type(twins[0]),), tuple(twins), {}), op(*real)
    assert (ours.shape, ours.stride()) == (expected.shape, expected.stride())
    assert (ours.storage_offset(), ours.dtype) == (expected.storage_offset(), expected.dtype)
    assert ours.device == expected.device and engine.is_abstract(ours)


def test_the_short_way_refuses_what_the_real_operator_refuses():
    """Z"""
    engine = engine_for([], dynamic=False)
    a, b = (engine.fake(plain(2, 3), Input("args[0]"), dynamic=False) for _ in range(2))
    with pytest.raises(RuntimeError, match=r"2x3|\[2, 3\]"):
        engine.run(aten.mm.default, (type(a),), (a, b), {})


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_decomposition_does_not_say_what_requires_grad(dynamic):
    """It makes a result that requires grad as its argument does, and the program has switched that off."""
    compiled = foregrad.aot_function(torch.no_grad()(lambda x: F.pad(x, (1, 0))), nop, dynamic=dynamic)
    assert not compiled(leaf(3)).requires_grad


def test_an_input_that_requires_grad_keeps_its_kind_of_leaf():
    """V-1"""
    a, b = foregrad.capture(lambda a, b: a * b, leaf(2), leaf(2) * 1).joint.inputs
    assert a.recorded.was_leaf and not b.recorded.was_leaf and a.requires_grad and b.requires_grad


def size_kinds(x):
    n = x.shape[0]
    known = [isinstance(n, int), isinstance(n, (float, int)), isinstance(n, numbers.Integral), n.__class__ is int]
    known += [isinstance(n / 2, float), isinstance(n > 3, bool), not isinstance(n, float), not isinstance(n, str)]
    match n:
        case int():
            known.append(True)
        case _:
            known.append(False)
    return [x * 2 if fact else x * 3 for fact in known]


def test_a_symbolic_size_is_an_int_to_the_program():
    """torch's own code goes on telling them apart."""
    compiled = foregrad.aot_function(size_kinds, nop, dynamic=True)
    for n in (5, 6):
        assert all(torch.equal(result, plain(n) * 2) for result in compiled(plain(n)))
    assert len(compiled.specializations) == 1
    assert "__getattribute__" not in vars(torch.SymInt)
