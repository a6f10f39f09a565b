"""Facts about a program, in the words of the behavioural rules (V-1 to V-7).

These records describe a compiled program to its users. They are frozen and complete when made; nothing inside
Foregrad reads them to decide anything, they are derived from the program at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any

from .errors import AssumptionError, VerificationError


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
        """Outputs that are views of an intermediate which nobody else can see."""
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
