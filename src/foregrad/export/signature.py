"""The signature of an exported graph: which name of the module, or of the caller, each node belongs to (G-1 to G-3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import SignatureError
from ..schemas import ViewAndMutationMeta


@dataclass(frozen=True)
class BackwardSignature:
    """Where a trainer finds the loss and the gradients: names of nodes, and what each gradient is for."""

    gradients_to_parameters: dict[str, str]
    gradients_to_user_inputs: dict[str, str]
    loss_output: str


@dataclass(frozen=True)
class GraphSignature:
    """What the flat inputs and outputs of an exported graph are.

    Inputs stand in this order: tokens, parameters, buffers, user inputs, random state. Outputs: tokens, new values of
    written parameters, buffers and user inputs, user outputs, random offsets, gradients.
    """

    parameters: list[str]  # qualified names
    buffers: list[str]
    user_inputs: list[str]  # nodes
    user_outputs: list[str | None]  # nodes; None where the program returns a constant
    inputs_to_parameters: dict[str, str]  # node to qualified name
    inputs_to_buffers: dict[str, str]
    buffers_to_mutate: dict[str, str]  # output node to qualified name
    parameters_to_mutate: dict[str, str]
    user_inputs_to_mutate: dict[str, str]  # output node to input node
    in_spec: Any  # of ((*parameters, *buffers, *args), kwargs)
    out_spec: Any
    backward_signature: BackwardSignature | None
    input_tokens: list[str] = field(default_factory=list)
    output_tokens: list[str] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)  # a further name of a tensor, and its first name
    random_inputs: dict[str, str] = field(default_factory=dict)  # node to fwd_seed, fwd_base_offset, ...
    random_outputs: dict[str, str] = field(default_factory=dict)  # node to fwd_offset, bwd_offset

    @classmethod
    def from_tracing_metadata(
        cls,
        *,
        in_spec: Any,
        out_spec: Any,
        graph_input_names: Sequence[str],
        graph_output_names: Sequence[str],
        view_mutation_metadata: ViewAndMutationMeta,
        named_parameters: Sequence[str],
        named_buffers: Sequence[str],
        num_user_inputs: int,
        num_user_outputs: int,
        loss_index: int | None,
        backward_signature: BackwardSignature | None,
    ) -> GraphSignature:
        """The signature of a graph whose inputs and outputs follow the order of this class (G-2)."""
        meta = view_mutation_metadata
        inputs, outputs = list(graph_input_names), list(graph_output_names)
        written = meta.mutated_inp_runtime_indices
        tokens_in, tokens_out = _cut(inputs, len(meta.tokens)), _cut(outputs, len(meta.tokens))
        state = [*named_parameters, *named_buffers]
        places = [*inputs]  # what the indices of the facts count
        parameters, buffers = _cut(inputs, len(named_parameters)), _cut(inputs, len(named_buffers))
        users = _cut(inputs, num_user_inputs)
        updates = _cut(outputs, len(written))
        results = _cut(outputs, num_user_outputs)
        gradients = 0 if backward_signature is None else len(_gradients(backward_signature))
        _cut(outputs, gradients)
        if inputs or outputs:
            raise SignatureError(f"inputs or outputs are left over: {[*inputs, *outputs]}")
        if backward_signature is not None and loss_index is not None:
            loss = results[loss_index]
            if backward_signature.loss_output != loss:
                raise SignatureError(f"the loss is {loss}, not {backward_signature.loss_output}")
        new = dict(zip(updates, written, strict=True))
        if len(new) < len(updates):
            raise SignatureError(f"two written inputs are updated to one node, of {', '.join(updates)}")
        first_buffer, first_user = len(named_parameters), len(state)
        return cls(
            parameters=list(named_parameters),
            buffers=list(named_buffers),
            user_inputs=users,
            user_outputs=list(results),
            inputs_to_parameters=dict(zip(parameters, named_parameters, strict=True)),
            inputs_to_buffers=dict(zip(buffers, named_buffers, strict=True)),
            buffers_to_mutate={n: state[i] for n, i in new.items() if first_buffer <= i < first_user},
            parameters_to_mutate={n: state[i] for n, i in new.items() if i < first_buffer},
            user_inputs_to_mutate={n: places[i] for n, i in new.items() if i >= first_user},
            in_spec=in_spec,
            out_spec=out_spec,
            backward_signature=backward_signature,
            input_tokens=tokens_in,
            output_tokens=tokens_out,
        )


def _cut(names: list[str], count: int) -> list[str]:
    """Take the first names off a list."""
    if len(names) < count:
        raise SignatureError(f"the graph has {count - len(names)} inputs or outputs less than its facts say")
    taken, names[:] = names[:count], names[count:]
    return taken


def _gradients(signature: BackwardSignature) -> list[str]:
    return [*signature.gradients_to_parameters, *signature.gradients_to_user_inputs]
