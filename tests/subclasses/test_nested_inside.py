"""Nested tensors, of the jagged layout, that a program makes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foregrad
from foregrad.errors import UnsupportedError
from helpers import nop

OFFSETS = torch.tensor([0, 5, 8, 10])
WEIGHT = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def of_offsets(x):
    return torch.nested.nested_tensor_from_jagged(x, OFFSETS)


def of_list(x):
    return torch.nested.as_nested_tensor([x[:5], x[5:8], x[8:]], layout=torch.jagged)


PROGRAMS = {
    "pointwise": lambda x: of_offsets(x).sin().values(),
    "linear": lambda x: F.linear(of_offsets(x), WEIGHT).values(),
    "norm": lambda x: F.layer_norm(of_offsets(x), (4,)).values(),
    "softmax": lambda x: of_offsets(x).softmax(-1).values(),
    "two": lambda x: (of_offsets(x) * of_offsets(x).sin()).values(),
    "padded": lambda x: of_list(x).sin().to_padded_tensor(0.0),
    "nested result": lambda x: of_offsets(x).sin(),
    "nested view of an argument": of_offsets,
    "nested result of a list": lambda x: of_list(x).sin(),
    "values of an argument": lambda x: of_offsets(x).values(),
    "several": lambda x: (lambda n: (n.values(), n.values() * 2))(of_offsets(x).sin()),
}


def parts(result):
    results = result if isinstance(result, tuple) else (result,)
    return [tensor.values() if tensor.is_nested else tensor for tensor in results]


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_nested_tensors_that_a_program_makes(program, requires_grad):
    compiled = foregrad.aot_function(program, nop)
    for seed in range(2):
        x = torch.randn(10, 4, generator=torch.Generator().manual_seed(seed))
        a, b = (x.clone().requires_grad_(requires_grad) for _ in range(2))
        found, wanted = parts(compiled(a)), parts(program(b))
        assert [t.requires_grad for t in found] == [t.requires_grad for t in wanted]
        assert all(map(torch.equal, found, wanted))
        if requires_grad:
            for results in (found, wanted):
                sum(t.square().sum() for t in results).backward()
            assert torch.equal(a.grad, b.grad)
    assert len(compiled.specializations) == 1


def test_a_view_of_an_argument_stays_one():
    x = torch.zeros(10, 4)
    foregrad.aot_function(PROGRAMS["values of an argument"], nop)(x).add_(1)
    assert torch.equal(x, torch.ones(10, 4))


def test_torch_keeps_none_of_them():
    from torch.nested._internal import nested_tensor

    nested_tensor._dummy_instance = None
    foregrad.aot_function(PROGRAMS["pointwise"], nop)(torch.zeros(10, 4))
    assert torch.equal(of_offsets(torch.ones(10, 4)).values(), torch.ones(10, 4))
    assert type(nested_tensor._nt_view_dummy()._values) is torch.Tensor


def test_offsets_that_are_written_in_the_program_can_be_read():
    parts = foregrad.aot_function(lambda x: of_offsets(x).unbind(), nop)(torch.arange(40.0).view(10, 4))
    assert all(map(torch.equal, parts, of_offsets(torch.arange(40.0).view(10, 4)).unbind()))


def test_what_cannot_be_is_refused():
    given = of_offsets(torch.ones(10, 4)).detach().requires_grad_()
    with pytest.raises(UnsupportedError, match="Return a clone of it"):
        foregrad.aot_function(lambda n: n.values(), nop)(given)
    assert torch.equal(foregrad.aot_function(lambda n: n.values().clone(), nop)(given), torch.ones(10, 4))


def encoder(enable_nested_tensor):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=enable_nested_tensor).eval().requires_grad_(False)


def test_strided_ones_are_refused_with_what_to_use_instead():
    with pytest.raises(UnsupportedError, match=r"layout=torch\.jagged"):
        foregrad.aot_function(lambda x: torch.nested.as_nested_tensor([x[:5], x[5:]]), nop)(torch.zeros(10, 4))
    x, hidden = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with pytest.raises(UnsupportedError, match="enable_nested_tensor=False"):
        foregrad.aot_module(encoder(True), nop)(x, src_key_padding_mask=hidden)
    plain = encoder(False)
    compiled = foregrad.aot_module(plain, nop)
    assert torch.equal(compiled(x, src_key_padding_mask=hidden), plain(x, src_key_padding_mask=hidden))
