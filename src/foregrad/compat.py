"""Torch's names for what a program does: records of programs (V-1 to V-7) and of subclasses (T-2 to T-5), and helpers.

The records describe a compiled program to its users. They are derived at the end, frozen and complete; nothing inside
Foregrad reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ._torch import FakeTensor, pytree
from .errors import AssumptionError, VerificationError
from .joint.build import Joint
from .joint.inputs import Autograd, InputFacts, StorageReplaced
from .joint.outputs import (
    Number,
    Plain,
    PlainKind,
    Result,
    SameAsInput,
    SameAsOutput,
    ViewOfBase,
    ViewOfInput,
    ViewOfOutput,
)
from .options import AOTConfig
from .slots import Base, Inner, Input, Output, Returned, Updated
from .subclasses.layout import Fixed, Layout, is_wrapper, layout_of, leaves_of

__all__ = [
    "InputAliasInfo",
    "MutationType",
    "OutputAliasInfo",
    "OutputType",
    "SubclassCreationMeta",
    "SubclassMeta",
    "SubclassTracingInfo",
    "ViewAndMutationMeta",
    "create_subclass_meta",
    "get_types_for_subclass",
    "requires_subclass_dispatch",
    "unwrap_tensor_subclasses",
    "wrap_tensor_subclasses",
    "wrap_tensor_subclasses_maybe_joint",
]


# ---------------------------------------------------------------------------------------------------------------------
# Programs (V-1 to V-7).
class MutationType(Enum):
    """What happened to an input, and who writes it back."""

    NOT_MUTATED = auto()
    MUTATED_IN_GRAPH = auto()
    MUTATED_OUT_GRAPH = auto()


class OutputType(Enum):
    """How an output relates to inputs and to other outputs."""

    non_alias = auto()
    alias_of_input = auto()
    is_input = auto()
    alias_of_intermediate_save_as_output = auto()
    alias_of_intermediate = auto()
    alias_of_intermediate_base_is_user_output = auto()
    unsafe_view_alias = auto()
    custom_function_view = auto()


ALIASES_OF_INPUTS = frozenset({OutputType.alias_of_input, OutputType.is_input})
ALIASES_OF_INTERMEDIATES = frozenset(
    {
        OutputType.alias_of_intermediate,
        OutputType.alias_of_intermediate_save_as_output,
        OutputType.alias_of_intermediate_base_is_user_output,
    }
)
NOT_ALIASED = frozenset({OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view})


@dataclass(frozen=True)
class InputAliasInfo:
    """What the program did to one flat input."""

    is_leaf: bool
    mutates_data: bool
    mutates_metadata: bool
    mutations_hidden_from_autograd: bool
    mutations_under_no_grad_or_inference_mode: bool
    mutation_inductor_storage_resize: bool
    mutates_storage_metadata: bool
    requires_grad: bool
    keep_input_mutations: bool

    def __post_init__(self) -> None:
        if self.mutates_storage_metadata and not self.mutates_metadata:
            raise VerificationError("an input whose storage was swapped has its metadata mutated too")

    @property
    def mutation_type(self) -> MutationType:
        """Whether the input changed, and whether the graph itself may hold the write (V-2)."""
        if not (self.mutates_data or self.mutates_metadata or self.mutation_inductor_storage_resize):
            return MutationType.NOT_MUTATED
        writes = self.mutates_data or self.mutates_storage_metadata or self.mutation_inductor_storage_resize
        unseen_by_autograd = (
            (not self.mutates_metadata and not self.requires_grad)
            or (self.mutations_hidden_from_autograd and not self.mutates_metadata)
            or (self.mutations_under_no_grad_or_inference_mode and not self.mutates_metadata)
        )
        if self.keep_input_mutations and writes and unseen_by_autograd:
            return MutationType.MUTATED_IN_GRAPH
        return MutationType.MUTATED_OUT_GRAPH


@dataclass(frozen=True)
class OutputAliasInfo:
    """How one flat output is rebuilt."""

    output_type: OutputType
    raw_type: type
    base_idx: int | None
    dynamic_dims: set[int] | None
    requires_grad: bool
    functional_tensor: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class ViewAndMutationMeta:
    """All facts about a compiled program, over the user's flat inputs and outputs."""

    input_info: list[InputAliasInfo]
    output_info: list[OutputAliasInfo]
    num_intermediate_bases: int
    keep_input_mutations: bool
    traced_tangents: list[Any]
    subclass_inp_meta: list[Any]
    subclass_fw_graph_out_meta: list[Any]
    subclass_tangent_meta: list[Any]
    is_train: bool = False
    traced_tangent_metas: list[Any] | None = None
    num_symints_saved_for_bw: int | None = None
    grad_enabled_mutation: bool | None = None
    deterministic: bool | None = None
    static_parameter_indices: list[int] = field(default_factory=list)
    tokens: dict[Any, Any] = field(default_factory=dict, compare=False)
    static_input_indices: list[int] = field(default_factory=list)
    bw_donated_idxs: list[int] | None = None  # saved tensors that a compiled backward may overwrite; none is given away
    indices_of_inputs_that_requires_grad_with_mutations_in_bw: list[int] = field(default_factory=list)
    is_rng_op_functionalized: bool = False

    def _inputs_with(self, kind: MutationType) -> list[int]:
        return [i for i, info in enumerate(self.input_info) if info.mutation_type is kind]

    def _outputs_of(self, kinds: frozenset[OutputType]) -> list[int]:
        return [i for i, info in enumerate(self.output_info) if info.output_type in kinds]

    @cached_property
    def mutated_inp_runtime_indices(self) -> list[int]:
        """Inputs that are written back after the compiled call."""
        return self._inputs_with(MutationType.MUTATED_OUT_GRAPH)

    @cached_property
    def mutated_graph_handled_indices(self) -> list[int]:
        """Inputs that the graph itself writes."""
        return self._inputs_with(MutationType.MUTATED_IN_GRAPH)

    @cached_property
    def mutated_graph_handled_indices_seen_by_autograd(self) -> list[int]:
        """Of those, the ones whose version counter autograd watches."""
        hidden = [info.mutations_hidden_from_autograd for info in self.input_info]
        return [i for i in self.mutated_graph_handled_indices if not hidden[i]]

    @property
    def num_mutated_inp_runtime_indices(self) -> int:
        return len(self.mutated_inp_runtime_indices)

    @property
    def num_mutated_graph_handled_indices(self) -> int:
        return len(self.mutated_graph_handled_indices)

    @property
    def num_mutated_graph_handled_indices_seen_by_autograd(self) -> int:
        return len(self.mutated_graph_handled_indices_seen_by_autograd)

    @cached_property
    def aliased_out_indices(self) -> list[int]:
        """Outputs that are rebuilt from something else."""
        return self._outputs_of(ALIASES_OF_INPUTS | ALIASES_OF_INTERMEDIATES)

    @cached_property
    def unsafe_view_out_indices(self) -> list[int]:
        """Outputs that are views of an intermediate which nothing else shows."""
        return self._outputs_of(frozenset({OutputType.unsafe_view_alias}))

    @property
    def num_unsafe_view_outputs(self) -> int:
        return len(self.unsafe_view_out_indices)

    @property
    def num_outputs(self) -> int:
        return len(self.output_info)

    @property
    def num_outputs_non_aliased(self) -> int:
        return len(self._outputs_of(NOT_ALIASED))

    @property
    def num_outputs_aliased_to_inputs(self) -> int:
        return len(self._outputs_of(ALIASES_OF_INPUTS))

    @property
    def num_outputs_aliased_to_intermediates(self) -> int:
        return len(self._outputs_of(ALIASES_OF_INTERMEDIATES))

    @property
    def num_outputs_aliased(self) -> int:
        return self.num_outputs_aliased_to_inputs + self.num_outputs_aliased_to_intermediates

    @property
    def dynamic_outputs(self) -> bool:
        """Whether any output has a symbolic dimension."""
        return any(info.dynamic_dims for info in self.output_info)

    @property
    def output_types(self) -> list[type]:
        """The run-time type of each tangent."""
        return [type(tangent) for tangent in self.traced_tangents]

    @property
    def num_outputs_rng_offset(self) -> int:
        return 1 if self.is_rng_op_functionalized else 0

    @property
    def num_forward_returns(self) -> int:
        """Values that the forward graph returns before what it saves: tokens, updated inputs, outputs, bases."""
        visible = self.num_mutated_inp_runtime_indices + self.num_outputs + self.num_intermediate_bases
        return visible + len(self.tokens)

    @property
    def num_forward(self) -> int:
        return self.num_forward_returns + self.num_outputs_rng_offset

    def _saved_symints(self) -> int:
        if self.num_symints_saved_for_bw is None:
            raise AssumptionError("this program has no backward, so nothing is saved for one")
        return self.num_symints_saved_for_bw

    @property
    def tensors_saved_for_backwards_slice(self) -> slice:
        """Where the saved tensors stand among the outputs of the forward graph."""
        count = self._saved_symints()
        return slice(self.num_forward, -count if count else None)

    @property
    def symints_saved_for_backwards_slice(self) -> slice:
        """Where the saved sizes stand among the outputs of the forward graph."""
        count = self._saved_symints()
        return slice(-count, None) if count else slice(0, 0)

    def make_runtime_safe(self) -> None:
        """Kept for compatibility: a record is safe for run time from the start, so a call is always one too many."""
        raise AssumptionError("this record is already safe for run time")


# ---------------------------------------------------------------------------------------------------------------------
# Wrapper subclasses (T-2 to T-5).
@dataclass(frozen=True)
class SubclassCreationMeta:
    """How one wrapper is built from plain tensors of a flat list."""

    flat_tensor_start_idx: int
    arg_count: int
    attrs: Mapping[str, SubclassCreationMeta | Fixed | None]  # None for a plain tensor
    outer_size: tuple[Any, ...]
    outer_stride: tuple[Any, ...]
    meta: Any
    original_subclass: Tensor = field(compare=False)

    def __post_init__(self) -> None:
        if not all(isinstance(leaf, FakeTensor) for leaf in leaves_of(self.original_subclass)):
            raise VerificationError("the recorded instance of a subclass must hold fake tensors only")

    @property
    def subclass_type(self) -> type:
        """The class of the wrapper."""
        return type(self.original_subclass)

    def creation_fn(self, all_args: Sequence[Any], *, is_runtime: bool) -> Any:
        """The wrapper around its part of a flat list; autograd's state is copied unless it is for run time."""
        inner: dict[str, Any] = {}
        position = self.flat_tensor_start_idx
        for attr, record in self.attrs.items():
            if record is None:
                inner[attr] = all_args[position]
                position += 1
            elif isinstance(record, Fixed):
                inner[attr] = record.value
            else:
                inner[attr] = record.creation_fn(all_args, is_runtime=is_runtime)
                position += record.arg_count
        kind: Any = self.subclass_type
        built = kind.__tensor_unflatten__(inner, self.meta, self.outer_size, self.outer_stride)
        if not is_runtime:
            built.requires_grad_(self.original_subclass.requires_grad)
        return built


@dataclass(frozen=True)
class SubclassMeta:
    """What is known of a program over plain tensors that stands for one over subclasses."""

    fw_metadata: ViewAndMutationMeta
    grad_input_metas: list[int | SubclassCreationMeta] | None = None


@dataclass(frozen=True)
class SubclassTracingInfo:
    """A program over plain tensors, its arguments, and what is known of it where subclasses take part."""

    plain_tensor_trace_fn: Callable[..., Any]
    plain_tensor_args: Any
    maybe_subclass_meta: SubclassMeta | None


def _creation_meta(wrapper: Any, layout: Layout, start: int) -> SubclassCreationMeta:
    """The record of one wrapper whose plain tensors begin at a position."""
    attrs: dict[str, SubclassCreationMeta | Fixed | None] = {}
    position = start
    for attr, inner in layout.attrs:
        if isinstance(inner, Layout):
            attrs[attr] = _creation_meta(getattr(wrapper, attr), inner, position)
            position += inner.leaves
        else:
            attrs[attr] = inner
            position += inner is None
    size, stride = tuple(wrapper.shape), tuple(wrapper.stride())
    return SubclassCreationMeta(start, layout.leaves, attrs, size, stride, layout.context, wrapper)


# ---------------------------------------------------------------------------------------------------------------------
# Take lists of tensors apart and put them together again (T-11).
Metas = Sequence[int | SubclassCreationMeta]


def unwrap_tensor_subclasses(wrapped_args: Any, *, is_joint_structure: bool) -> Any:
    """Lists with the plain tensors of wrappers in their places, depth first.

    >>> import torch
    >>> from torch.testing._internal.two_tensor import TwoTensor
    >>> two = TwoTensor(torch.zeros(1), torch.ones(1))
    >>> unwrap_tensor_subclasses([two, 3], is_joint_structure=False)
    [tensor([0.]), tensor([1.]), 3]

    Args:
        wrapped_args: a list, or with `is_joint_structure` the pair (primals, tangents).
        is_joint_structure: each part of the pair is converted alone.
    """
    if is_joint_structure:
        primals, tangents = _pair(wrapped_args)
        return _unwrap(primals), _unwrap(tangents)
    return _unwrap(wrapped_args)


def _unwrap(args: Sequence[Any]) -> list[Any]:
    return [leaf for arg in args for leaf in (leaves_of(arg) if isinstance(arg, Tensor) else [arg])]


def _pair(args: Any) -> tuple[Any, Any]:
    if not isinstance(args, tuple) or len(args) != 2 or not all(isinstance(part, (list, tuple)) for part in args):
        raise AssumptionError("in joint form the argument is the pair (primals, tangents), each of them a list")
    return args


def wrap_tensor_subclasses(
    unwrapped_args: Sequence[Any],
    *,
    subclass_metas: Metas,
    num_fw_outs_saved_for_bw: int | None = None,
    is_runtime: bool = False,
) -> tuple[Any, ...]:
    """Wrappers, and plain values, from a flat list; what is saved for a backward follows them and stays plain.

    Args:
        unwrapped_args: the flat list.
        subclass_metas: for each result its position in the list, or the record of a wrapper.
        num_fw_outs_saved_for_bw: how many further values there are at the end.
        is_runtime: autograd's state is not copied from the recorded instances.
    """
    taken = sum(meta.arg_count if isinstance(meta, SubclassCreationMeta) else 1 for meta in subclass_metas)
    saved = num_fw_outs_saved_for_bw or 0
    if len(unwrapped_args) != taken + saved:
        raise AssumptionError(
            f"Expected the number actual unwrapped-subclass outputs to be {taken} and {saved} saved values, not "
            f"{len(unwrapped_args)} in all"
        )
    wrapped = [
        meta.creation_fn(unwrapped_args, is_runtime=is_runtime)
        if isinstance(meta, SubclassCreationMeta)
        else unwrapped_args[meta]
        for meta in subclass_metas
    ]
    return (*wrapped, *unwrapped_args[taken:])


def wrap_tensor_subclasses_maybe_joint(
    unwrapped_args: Any, *, is_joint_structure: bool, meta: ViewAndMutationMeta
) -> tuple[Any, ...]:
    """The same for the inputs of a program, or with `is_joint_structure` for the pair (primals, tangents)."""
    if is_joint_structure:
        primals, tangents = _pair(unwrapped_args)
        return (
            wrap_tensor_subclasses(primals, subclass_metas=meta.subclass_inp_meta),
            wrap_tensor_subclasses(tangents, subclass_metas=meta.subclass_tangent_meta),
        )
    return wrap_tensor_subclasses(unwrapped_args, subclass_metas=meta.subclass_inp_meta)


def requires_subclass_dispatch(args: Any, fw_metadata: ViewAndMutationMeta) -> bool:
    """Whether any leaf of the arguments, or any output of the forward graph, is a wrapper subclass."""
    given = any(is_wrapper(leaf) for leaf in pytree.tree_leaves(args))
    return given or any(isinstance(meta, SubclassCreationMeta) for meta in fw_metadata.subclass_fw_graph_out_meta)


def create_subclass_meta(args: Sequence[Any]) -> list[int | SubclassCreationMeta]:
    """For each value its position in the flat list, or the record of a wrapper, which must hold fake tensors.

    >>> create_subclass_meta([5, 6])
    [0, 1]
    """
    metas: list[int | SubclassCreationMeta] = []
    position = 0
    for arg in args:
        metas.append(_creation_meta(arg, layout_of(arg), position) if is_wrapper(arg) else position)
        position += len(leaves_of(arg)) if is_wrapper(arg) else 1
    return metas


def get_types_for_subclass(tensor: Any) -> list[str]:
    """The word "Tensor" for each plain tensor in a tensor.

    >>> import torch
    >>> get_types_for_subclass(torch.ones(1))
    ['Tensor']
    """
    return ["Tensor"] * len(leaves_of(tensor))


# ---------------------------------------------------------------------------------------------------------------------
# The records of a program.
def describe(joint: Joint, config: AOTConfig, saved_sizes: int | None, deterministic: bool) -> ViewAndMutationMeta:
    """The facts about a program, over the user's flat inputs and outputs; as torch's settings were at its capture."""
    keep = config.keep_inference_input_mutations
    inputs = [facts for facts in joint.inputs if not isinstance(facts.recorded.slot, Inner)]
    order = {facts.recorded.slot: i for i, facts in enumerate(inputs)}
    results = list(zip(joint.outputs.results, joint.outputs.tensors, strict=True))[: joint.visible]
    tangents = list(joint.tape.tangents.values())
    return ViewAndMutationMeta(
        input_info=[_input(facts, keep) for facts in inputs],
        output_info=[_output(result, tensor, order) for result, tensor in results],
        num_intermediate_bases=len(joint.outputs.bases),
        keep_input_mutations=keep,
        traced_tangents=[],
        subclass_inp_meta=create_subclass_meta([facts.recorded.seen for facts in inputs]),
        subclass_fw_graph_out_meta=create_subclass_meta(_returned(joint)),
        subclass_tangent_meta=create_subclass_meta(tangents),
        is_train=joint.is_training,
        static_input_indices=[
            i for i, facts in enumerate(inputs) if isinstance(facts.recorded.slot, Input) and facts.recorded.slot.stays
        ],
        traced_tangent_metas=[layout_of(tangent).metadata if is_wrapper(tangent) else None for tangent in tangents],
        num_symints_saved_for_bw=saved_sizes,
        grad_enabled_mutation=joint.grad_mode_after,
        is_rng_op_functionalized=joint.random.forward is not None,
        deterministic=deterministic,
        tokens={} if config.options.unlift_effect_tokens else joint.tokens,
    )


def _returned(joint: Joint) -> list[Any]:
    """What the forward graph returns before what it saves."""
    updated: dict[Returned, Any] = {Updated(facts.recorded.slot): facts.recorded.seen for facts in joint.inputs}
    shown: dict[Returned, Any] = {Output(i): tensor for i, tensor in enumerate(joint.outputs.tensors)}
    bases: dict[Returned, Any] = {Base(i): tensor for i, tensor in enumerate(joint.outputs.bases)}
    values = updated | shown | bases
    return [values.get(slot) for slot in joint.signature.returned]


def _input(facts: InputFacts, keep: bool) -> InputAliasInfo:
    replaced = isinstance(facts.place, StorageReplaced)
    without_grad = facts.data is not None and facts.data.autograd is Autograd.OFF
    return InputAliasInfo(
        is_leaf=facts.recorded.was_leaf,
        mutates_data=facts.data_changed and not replaced,
        mutates_metadata=bool(facts.reshapes) or replaced,
        mutations_hidden_from_autograd=facts.recorded.is_tensor and not facts.data_changed,
        mutations_under_no_grad_or_inference_mode=without_grad,
        mutation_inductor_storage_resize=False,
        mutates_storage_metadata=replaced,
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
        case ViewOfInput(recorded, one_of_many=one_of_many):
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
