"""Signatures as plain data."""

import dataclasses

import pytest

from foregrad import ForegradError
from foregrad.export import (
    ConstantArgument,
    CustomObjArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
    TokenArgument,
)
from foregrad.export.signature import _sig_to_specs

T = TensorArgument


def test_argument_records_are_plain_frozen_data():
    """G-4"""
    assert T("x") == T("x") and ConstantArgument("k", None).value is None
    assert CustomObjArgument("o", "a.B").fake_val is None and SymIntArgument("s").name == "s"
    with pytest.raises(dataclasses.FrozenInstanceError):
        T("x").name = "y"


def test_star_import_leaves_the_token_out():
    """G-4"""
    import foregrad.export

    assert "TokenArgument" not in foregrad.export.__all__ and foregrad.export.TokenArgument is TokenArgument


def test_kinds_have_the_numbers_of_torch():
    """G-5, G-6"""
    from torch.export import graph_signature as theirs

    assert {k.name: k.value for k in OutputKind} == {k.name: k.value for k in theirs.OutputKind}
    assert {k.name: k.value for k in InputKind} == {k.name: k.value for k in theirs.InputKind}


def test_specs_refuse_what_is_no_argument():
    """G-5, G-6"""
    with pytest.raises(AssertionError, match="Failed to specify persistent flag on BUFFER"):
        InputSpec(InputKind.BUFFER, T("b"), "n")
    with pytest.raises(ForegradError, match="got <class 'str'>"):
        InputSpec(InputKind.USER_INPUT, "x", None)
    with pytest.raises(AssertionError):
        OutputSpec(OutputKind.USER_OUTPUT, "y", None)


def test_everything_is_derived_from_two_lists():
    """G-7"""
    signature = ExportGraphSignature(
        [
            InputSpec(InputKind.TOKEN, TokenArgument("t"), None),
            InputSpec(InputKind.PARAMETER, T("p"), "w"),
            InputSpec(InputKind.BUFFER, T("b"), "n", persistent=False),
            InputSpec(InputKind.BUFFER, T("b2"), "m", persistent=True),
            InputSpec(InputKind.CONSTANT_TENSOR, T("c"), "c0"),
            InputSpec(InputKind.CUSTOM_OBJ, CustomObjArgument("o", "a.B"), "o0"),
            InputSpec(InputKind.USER_INPUT, T("x"), None),
            InputSpec(InputKind.USER_INPUT, ConstantArgument("k", 3), None),
        ],
        [
            OutputSpec(OutputKind.TOKEN, TokenArgument("t2"), None),
            OutputSpec(OutputKind.PARAMETER_MUTATION, T("neg"), "w"),
            OutputSpec(OutputKind.BUFFER_MUTATION, T("add"), "n"),
            OutputSpec(OutputKind.USER_INPUT_MUTATION, T("mul"), "x"),
            OutputSpec(OutputKind.USER_OUTPUT, T("y"), None),
            OutputSpec(OutputKind.USER_OUTPUT, ConstantArgument("", None), None),
        ],
    )
    assert signature.parameters == ["w"] and signature.buffers == ["n", "m"]
    assert signature.non_persistent_buffers == ["n"]
    assert signature.lifted_tensor_constants == ["c0"] and signature.lifted_custom_objs == ["o0"]
    assert signature.user_inputs == ("x", 3) and signature.user_outputs == ("y", None)
    assert signature.inputs_to_parameters == {"p": "w"} and signature.inputs_to_buffers == {"b": "n", "b2": "m"}
    assert signature.inputs_to_lifted_tensor_constants == {"c": "c0"}
    assert signature.inputs_to_lifted_custom_objs == {"o": "o0"}
    assert signature.buffers_to_mutate == {"add": "n"} and signature.parameters_to_mutate == {"neg": "w"}
    assert signature.user_inputs_to_mutate == {"mul": "x"}
    assert signature.input_tokens == ["t"] and signature.output_tokens == ["t2"]
    assert signature.backward_signature is None and signature.assertion_dep_token is None


def test_a_token_is_no_user_value():
    """G-7"""
    token = TokenArgument("t")
    with pytest.raises(RuntimeError, match="is not a valid user inputs"):
        ExportGraphSignature([InputSpec(InputKind.USER_INPUT, token, None)], []).user_inputs
    with pytest.raises(RuntimeError, match="is not a valid user output"):
        ExportGraphSignature([], [OutputSpec(OutputKind.USER_OUTPUT, token, None)]).user_outputs


def test_one_loss():
    """G-8"""
    loss = OutputSpec(OutputKind.LOSS_OUTPUT, T("l"), None)
    gradients = [
        OutputSpec(OutputKind.GRADIENT_TO_PARAMETER, T("g"), "w"),
        OutputSpec(OutputKind.GRADIENT_TO_USER_INPUT, T("h"), "x"),
    ]
    backward = ExportGraphSignature([], [loss, *gradients]).backward_signature
    assert backward.loss_output == "l" and backward.gradients_to_parameters == {"g": "w"}
    assert backward.gradients_to_user_inputs == {"h": "x"}
    with pytest.raises(AssertionError, match="one loss, not 2"):
        ExportGraphSignature([], [loss, loss]).backward_signature


def specs(**changes):
    given = {
        "user_inputs": {"x"},
        "inputs_to_parameters": {"p": "w"},
        "inputs_to_buffers": {"b": "n"},
        "user_outputs": {"add"},
        "buffer_mutations": {"add": "n"},
        "user_input_mutations": {},
        "grad_params": {"g": "w"},
        "grad_user_inputs": {"h": "x"},
        "loss_output": "l",
        "inputs": [TokenArgument("t"), T("p"), T("b"), T("x"), ConstantArgument("k", 3)],
        "outputs": [TokenArgument("t2"), T("add"), T("add"), T("l"), T("g"), T("h")],
        "input_tokens": ["t"],
        "output_tokens": ["t2"],
    }
    return _sig_to_specs(**{**given, **changes})


def test_classification_by_name_and_place():
    """G-9"""
    inputs, outputs = specs()
    assert [s.kind.name for s in inputs] == ["TOKEN", "PARAMETER", "BUFFER", "USER_INPUT", "USER_INPUT"]
    assert inputs[2].persistent is True
    kinds = [
        "TOKEN",
        "BUFFER_MUTATION",
        "USER_OUTPUT",
        "LOSS_OUTPUT",
        "GRADIENT_TO_PARAMETER",
        "GRADIENT_TO_USER_INPUT",
    ]
    assert [s.kind.name for s in outputs] == kinds
    with pytest.raises(AssertionError, match="Unknown tensor input kind"):
        specs(inputs=[T("who")])
    with pytest.raises(AssertionError, match="Unknown tensor mutation kind"):
        specs(outputs=[TokenArgument("t2"), T("who")])
    with pytest.raises(AssertionError, match="Unknown tensor output kind"):
        specs(outputs=[TokenArgument("t2"), T("add"), T("who")])


def test_renaming_leaves_targets_and_constants():
    """G-10"""
    signature = ExportGraphSignature(
        [
            InputSpec(InputKind.USER_INPUT, T("x"), None),
            InputSpec(InputKind.USER_INPUT, ConstantArgument("x", 3), None),
        ],
        [OutputSpec(OutputKind.USER_INPUT_MUTATION, T("mul"), "x")],
    )
    signature.replace_all_uses("x", "x2")
    assert signature.user_inputs == ("x2", 3) and signature.user_inputs_to_mutate == {"mul": "x"}
    assert signature.input_specs[1].arg.name == "x"

    def node(**fields):
        return type("Node", (), fields)

    hook = signature.get_replace_hook()
    hook(node(name="mul"), "other", node(op="call_function"))
    assert list(signature.user_inputs_to_mutate) == ["mul"]
    hook(node(name="mul"), "mul2", node(op="output"))
    assert list(signature.user_inputs_to_mutate) == ["mul2"]
    with pytest.raises(AssertionError):
        signature.replace_all_uses("x", 3)
