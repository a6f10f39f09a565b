"""V-1 to V-7: the public record of facts, as a program fills it in."""

import pytest
import torch

from helpers import leaf, metadata_of, plain


def test_facts_about_inputs():
    """V-1"""
    tensor, number = metadata_of(lambda x, k: x * k, leaf(2), 3).input_info
    assert tensor.is_leaf and tensor.requires_grad and tensor.mutations_hidden_from_autograd
    assert not number.is_leaf and not number.mutations_hidden_from_autograd


def test_a_write_through_detach_is_not_hidden():
    """V-1"""
    (info,) = metadata_of(lambda x: (x.detach().neg_(), x * 1)[1], leaf(2)).input_info
    assert info.mutates_data and not info.mutations_hidden_from_autograd
    assert not info.mutations_under_no_grad_or_inference_mode


def test_a_write_under_no_grad_is_noted():
    """V-1"""

    def program(x):
        with torch.no_grad():
            x.neg_()
        return x * 2

    (info,) = metadata_of(program, leaf(2)).input_info
    assert info.mutates_data and info.mutations_under_no_grad_or_inference_mode


def test_facts_about_outputs():
    """V-3"""
    view, value, number = metadata_of(lambda x: (x.t(), x * 2, 7), leaf(2, 3)).output_info
    assert [i.output_type.name for i in (view, value, number)] == ["alias_of_input", "non_alias", "non_alias"]
    assert view.base_idx == 0 and number.dynamic_dims is None and not number.requires_grad
    assert number.raw_type is int and value.requires_grad and value.base_idx is None


def test_the_record_of_a_plain_program():
    """V-4"""
    meta = metadata_of(lambda x: x * 2, leaf(2))
    assert len(meta.input_info) == len(meta.output_info) == 1 and meta.num_intermediate_bases == 0
    assert meta.tokens == {} and meta.deterministic is False and meta.grad_enabled_mutation is None
    assert not meta.keep_input_mutations and meta.is_train


def test_a_program_that_leaves_gradients_off_says_so():
    """V-4, J-12"""

    def program(x):
        y = x * 2
        torch.set_grad_enabled(False)
        return y

    try:
        meta = metadata_of(program, leaf(2))
    finally:
        torch.set_grad_enabled(True)
    assert meta.grad_enabled_mutation is False


def test_derived_values():
    """V-5"""

    def program(x, b):
        b.add_(1)
        t = x * b
        return t.view(-1), t.view(2, 1), x

    meta = metadata_of(program, leaf(2), plain(2))
    assert meta.mutated_inp_runtime_indices == [1] and meta.aliased_out_indices == [0, 1, 2]
    assert meta.num_outputs_aliased_to_inputs == 1 and meta.num_outputs_aliased_to_intermediates == 2
    assert (meta.num_outputs, meta.num_intermediate_bases) == (3, 1)
    assert meta.num_forward_returns == meta.num_forward == 5


def test_slices_of_saved_values():
    """V-6"""
    meta = metadata_of(lambda x: x.sin(), leaf(2))
    assert meta.tensors_saved_for_backwards_slice == slice(1, None)
    assert meta.symints_saved_for_backwards_slice == slice(0, 0)
    with pytest.raises(AssertionError, match="no backward"):
        metadata_of(lambda x: x + 1, plain(2)).tensors_saved_for_backwards_slice


def test_saved_sizes_are_counted():
    """V-6"""
    meta = metadata_of(lambda x: x.sin().expand(3, x.shape[0]), leaf(2), dynamic=True)
    count = meta.num_symints_saved_for_bw
    assert count > 0 and meta.symints_saved_for_backwards_slice == slice(-count, None)
    assert meta.tensors_saved_for_backwards_slice == slice(1, -count)


def test_a_record_is_safe_for_run_time_from_the_start():
    """V-7"""
    meta = metadata_of(lambda x: x * 2, leaf(2))
    assert meta.traced_tangents == [] and meta.traced_tangent_metas == [None]
    with pytest.raises(AssertionError, match="already"):
        meta.make_runtime_safe()
    assert meta == metadata_of(lambda x: x * 2, leaf(2))
    assert meta != metadata_of(lambda x: x, leaf(2))
