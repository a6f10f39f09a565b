"""V-1 to V-7: the records of facts, made by hand."""

import dataclasses

import pytest

from foregrad import InputAliasInfo, MutationType, OutputAliasInfo, OutputType, ViewAndMutationMeta


def input_info(**facts):
    names = [field.name for field in dataclasses.fields(InputAliasInfo)]
    return InputAliasInfo(**{**dict.fromkeys(names, False), **facts})


def output_info(kind=OutputType.non_alias, **facts):
    defaults = {"raw_type": object, "base_idx": None, "dynamic_dims": set(), "requires_grad": True}
    return OutputAliasInfo(kind, **{**defaults, **facts})


def meta(inputs=(), outputs=(), **facts):
    defaults = {
        "num_intermediate_bases": 0,
        "keep_input_mutations": False,
        "traced_tangents": [],
        "subclass_inp_meta": [],
        "subclass_fw_graph_out_meta": [],
        "subclass_tangent_meta": [],
    }
    return ViewAndMutationMeta(list(inputs), list(outputs), **{**defaults, **facts})


def test_the_facts_about_an_input_are_nine_and_frozen():
    """V-1"""
    info = input_info(mutates_data=True)
    assert len(dataclasses.fields(info)) == 9
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.mutates_data = False


def test_a_swapped_storage_without_changed_metadata_makes_no_sense():
    """V-1"""
    with pytest.raises(AssertionError):
        input_info(mutates_storage_metadata=True)
    input_info(mutates_storage_metadata=True, mutates_metadata=True)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({}, "NOT_MUTATED"),
        ({"mutates_data": True}, "MUTATED_OUT_GRAPH"),
        ({"keep_input_mutations": True}, "NOT_MUTATED"),
        ({"keep_input_mutations": True, "mutates_data": True}, "MUTATED_IN_GRAPH"),
        ({"keep_input_mutations": True, "mutates_data": True, "requires_grad": True}, "MUTATED_OUT_GRAPH"),
        ({"keep_input_mutations": True, "mutates_data": True, "mutates_metadata": True}, "MUTATED_OUT_GRAPH"),
        ({"keep_input_mutations": True, "mutates_metadata": True}, "MUTATED_OUT_GRAPH"),
        (
            {
                "keep_input_mutations": True,
                "mutates_data": True,
                "requires_grad": True,
                "mutations_under_no_grad_or_inference_mode": True,
            },
            "MUTATED_IN_GRAPH",
        ),
        (
            {
                "keep_input_mutations": True,
                "mutates_data": True,
                "requires_grad": True,
                "mutations_hidden_from_autograd": True,
            },
            "MUTATED_IN_GRAPH",
        ),
        ({"mutation_inductor_storage_resize": True}, "MUTATED_OUT_GRAPH"),
    ],
)
def test_who_writes_an_input_back(facts, kind):
    """V-2"""
    assert input_info(**facts).mutation_type is MutationType[kind]


def test_mutation_types_have_the_numbers_of_the_rule():
    """V-2"""
    assert [kind.value for kind in MutationType] == [1, 2, 3]


def test_recorded_view_chains_do_not_make_outputs_unequal():
    """V-3"""
    assert output_info(functional_tensor="a chain") == output_info()
    assert output_info(requires_grad=False) != output_info()


def test_derived_values_follow_the_lists():
    """V-5"""
    record = meta(
        [
            input_info(mutates_data=True),
            input_info(),
            input_info(mutates_data=True, keep_input_mutations=True),
            input_info(mutates_data=True, keep_input_mutations=True, mutations_hidden_from_autograd=True),
        ],
        [
            output_info(OutputType.is_input, base_idx=0),
            output_info(OutputType.alias_of_intermediate_save_as_output, base_idx=0),
            output_info(OutputType.unsafe_view_alias),
            output_info(OutputType.custom_function_view, dynamic_dims={1}),
            output_info(),
        ],
        num_intermediate_bases=1,
    )
    assert record.mutated_inp_runtime_indices == [0] and record.num_mutated_inp_runtime_indices == 1
    assert record.mutated_graph_handled_indices == [2, 3] and record.num_mutated_graph_handled_indices == 2
    assert record.mutated_graph_handled_indices_seen_by_autograd == [2]
    assert record.num_mutated_graph_handled_indices_seen_by_autograd == 1
    assert record.aliased_out_indices == [0, 1] and record.num_outputs_aliased == 2
    assert record.unsafe_view_out_indices == [2] and record.num_unsafe_view_outputs == 1
    assert record.num_outputs == 5 and record.num_outputs_non_aliased == 3 and record.dynamic_outputs
    assert record.num_forward_returns == 1 + 5 + 1 == record.num_forward


def test_a_random_offset_is_one_more_value():
    """V-5, R-2"""
    record = meta(outputs=[output_info()], is_rng_op_functionalized=True)
    assert record.num_outputs_rng_offset == 1 and (record.num_forward_returns, record.num_forward) == (1, 2)


@pytest.mark.parametrize(
    ("sizes", "tensors", "symbols"), [(0, slice(1, None), slice(0, 0)), (2, slice(1, -2), slice(-2, None))]
)
def test_slices_of_saved_values(sizes, tensors, symbols):
    """V-6: a bound of -0 would select everything."""
    record = meta(outputs=[output_info()], num_symints_saved_for_bw=sizes)
    assert record.tensors_saved_for_backwards_slice == tensors
    assert record.symints_saved_for_backwards_slice == symbols


def test_a_program_without_a_backward_has_no_saved_values():
    """V-6"""
    with pytest.raises(AssertionError):
        meta().symints_saved_for_backwards_slice


def test_equal_facts_make_equal_records():
    """V-7"""
    assert meta([input_info()], [output_info()]) == meta([input_info()], [output_info()])
    assert meta([input_info()]) != meta([input_info(is_leaf=True)])
    assert meta(num_intermediate_bases=1) != meta()


def test_a_record_is_made_safe_for_run_time_once_only():
    """V-7"""
    with pytest.raises(AssertionError):
        meta().make_runtime_safe()
