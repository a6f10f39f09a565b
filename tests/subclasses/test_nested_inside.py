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


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), **options).eval().requires_grad_(False)


def batch(*lengths):
    """A padded batch, and where it is padding."""
    return torch.randn(len(lengths), 5, 8), torch.arange(5) >= torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_transformer_encoder_leaves_padding_out(dynamic):
    """As by default in eval; its rows are counted by each call, and no program is made for each length."""
    eager = encoder()
    compiled = foregrad.aot_module(eager, nop, dynamic=dynamic)
    for lengths in [(5, 3), (2, 4), (1, 5), (3, 3), (5, 0)]:
        x, padding = batch(*lengths)
        found = compiled(x, src_key_padding_mask=padding)
        assert torch.equal(found, eager(x, src_key_padding_mask=padding)), lengths
    assert len(compiled.specializations) == 1
    x, padding = batch(5, 3)
    padding[1] = torch.tensor([True, False, False, False, True])  # not on the right: nothing is left out
    found = compiled(x, src_key_padding_mask=padding)
    assert torch.equal(found, eager(x, src_key_padding_mask=padding)) and found[1].all()
    assert len(compiled.specializations) == 2


def test_a_transformer_encoder_between_training_and_evaluation():
    """With gradients nothing is left out; without them the same module leaves padding out."""
    eager = encoder().requires_grad_()
    compiled = foregrad.aot_module(eager, nop)
    x, padding = batch(5, 3)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(compiled(x, src_key_padding_mask=padding), eager(x, src_key_padding_mask=padding)), mode


def made_by_a_mask(x):
    return torch._nested_tensor_from_mask(x, torch.ones(2, 5, dtype=torch.bool), mask_check=False)


STRIDED = {
    "of a list": lambda x: torch.nested.as_nested_tensor([x[0], x[1, :3]]),
    "as a result": made_by_a_mask,
    "its size": lambda x: x * made_by_a_mask(x).size(1),
    "another operator": lambda x: (made_by_a_mask(x) * 2).to_padded_tensor(0.0, x.shape),
    "padded to the longest": lambda x: made_by_a_mask(x).to_padded_tensor(0.0),
    "with a gradient": lambda x: made_by_a_mask(x.requires_grad_()).to_padded_tensor(0.0, x.shape),
}


@pytest.mark.parametrize("program", STRIDED.values(), ids=STRIDED)
def test_other_strided_ones_are_refused_with_what_to_use_instead(program):
    with pytest.raises(UnsupportedError, match=r"layout=torch\.jagged"):
        foregrad.aot_function(program, nop)(torch.zeros(2, 5, 8))


def test_a_transformer_encoder_whose_layers_compute_on_nested_tensors():
    """Torch has no kernel for a whole layer that has hooks."""
    x, padding = batch(5, 3)
    hooked, other = encoder(), encoder(enable_nested_tensor=False)
    hooked.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="enable_nested_tensor=False"):
        foregrad.aot_module(hooked, nop)(x, src_key_padding_mask=padding)
    compiled = foregrad.aot_module(other, nop)
    assert torch.equal(compiled(x, src_key_padding_mask=padding), other(x, src_key_padding_mask=padding))
