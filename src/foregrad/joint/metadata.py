"""Derive the public record of facts from a program."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..options import AOTConfig
from ..schemas import InputAliasInfo, OutputAliasInfo, OutputType, ViewAndMutationMeta
from ..slots import Inner
from .build import Joint
from .inputs import InputFacts
from .outputs import Number, Plain, PlainKind, Result, SameAsInput, SameAsOutput, ViewOfBase, ViewOfInput, ViewOfOutput
from .subclass_metas import input_metas, output_metas, tangent_contexts, tangent_metas


def describe(joint: Joint, config: AOTConfig, saved_sizes: int | None, deterministic: bool) -> ViewAndMutationMeta:
    """The facts about a program, over the user's flat inputs and outputs; as torch's settings were at its capture."""
    keep = config.keep_inference_input_mutations
    inputs = [facts for facts in joint.inputs if not isinstance(facts.recorded.slot, Inner)]
    order = {facts.recorded.slot: i for i, facts in enumerate(inputs)}
    return ViewAndMutationMeta(
        input_info=[_input(facts, keep) for facts in inputs],
        output_info=[
            _output(result, tensor, order)
            for result, tensor in list(zip(joint.outputs.results, joint.outputs.tensors, strict=True))[: joint.visible]
        ],
        num_intermediate_bases=len(joint.outputs.bases),
        keep_input_mutations=keep,
        traced_tangents=[],
        subclass_inp_meta=input_metas(joint),
        subclass_fw_graph_out_meta=output_metas(joint),
        subclass_tangent_meta=tangent_metas(joint),
        is_train=joint.is_training,
        traced_tangent_metas=tangent_contexts(joint),
        num_symints_saved_for_bw=saved_sizes,
        grad_enabled_mutation=joint.grad_mode_after,
        is_rng_op_functionalized=joint.random.forward is not None,
        deterministic=deterministic,
        tokens={} if config.options.unlift_effect_tokens else joint.tokens,
    )


def _input(facts: InputFacts, keep: bool) -> InputAliasInfo:
    return InputAliasInfo(
        is_leaf=facts.is_leaf,
        mutates_data=facts.data_changed and facts.moved is None,
        mutates_metadata=bool(facts.reshapes or facts.moved),
        mutations_hidden_from_autograd=facts.recorded.is_tensor and not facts.data_changed,
        mutations_under_no_grad_or_inference_mode=facts.all_writes_without_grad,
        mutation_inductor_storage_resize=False,
        mutates_storage_metadata=facts.moved is not None,
        requires_grad=facts.requires_grad,
        keep_input_mutations=keep,
    )


_PLAIN = {
    PlainKind.FRESH: OutputType.non_alias,
    PlainKind.UNSAFE_VIEW: OutputType.unsafe_view_alias,
    PlainKind.CUSTOM_FUNCTION_VIEW: OutputType.custom_function_view,
}


def _output(result: Result, tensor: Tensor | None, order: dict[Any, int]) -> OutputAliasInfo:
    kind, base = OutputType.non_alias, None
    match result:
        case SameAsInput(recorded):
            kind, base = OutputType.is_input, order.get(recorded.slot)
        case ViewOfInput(recorded, _, one_of_many):
            kind = OutputType.non_alias if one_of_many else OutputType.alias_of_input
            base = order.get(recorded.slot)
        case ViewOfBase(index, first, _):
            kind = OutputType.alias_of_intermediate_save_as_output if first else OutputType.alias_of_intermediate
            base = index
        case ViewOfOutput(index, _) | SameAsOutput(index):
            kind, base = OutputType.alias_of_intermediate_base_is_user_output, index
        case Plain(kind=plain_kind):
            kind = _PLAIN[plain_kind]
    if tensor is None:
        raw = torch.SymInt if isinstance(result, Number) else type(getattr(result, "value", None))
        return OutputAliasInfo(kind, raw, base, None, False)
    dims = {d for d, n in enumerate(tensor.shape) if isinstance(n, torch.SymInt)}
    return OutputAliasInfo(kind, type(tensor), base, dims, tensor.requires_grad)
