"""The signature of an exported program: by names (G-1 to G-3), and place by place (G-4 to G-10)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import fx

from ..compat import ViewAndMutationMeta
from ..errors import ExportError, SignatureError


# ---------------------------------------------------------------------------------------------------------------------
# What stands at a place of an exported graph: plain data that names a node or holds a constant (G-4).
@dataclass(frozen=True)
class TensorArgument:
    """A tensor, by the name of its node."""

    name: str


@dataclass(frozen=True)
class TokenArgument:
    """A token that orders side effects, by the name of its node."""

    name: str


@dataclass(frozen=True)
class SymIntArgument:
    """A symbolic integer, by the name of its node."""

    name: str


@dataclass(frozen=True)
class CustomObjArgument:
    """A script object, by the name of its node."""

    name: str
    class_fqn: str
    fake_val: Any = None


@dataclass(frozen=True)
class ConstantArgument:
    """A Python value that is part of the program."""

    name: str
    value: int | float | bool | str | None


ArgumentSpec = TensorArgument | SymIntArgument | ConstantArgument | CustomObjArgument | TokenArgument


# ---------------------------------------------------------------------------------------------------------------------
# The signature of an exported graph: which name of the module, or of the caller, each node belongs to (G-1 to G-3).
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

    @property
    def state_count(self) -> int:
        """How many inputs are parameters and buffers."""
        return len(self.parameters) + len(self.buffers)

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
        places = [*inputs]  # what the indices of the metadata count
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


# ---------------------------------------------------------------------------------------------------------------------
# The signature of an exported program, place by place (G-5 to G-10).
#
# Two lists of specs are the truth: one for each input and one for each output of the graph. Everything else is derived
# from them when it is asked for.
_ARGUMENTS = (TensorArgument, SymIntArgument, ConstantArgument, CustomObjArgument, TokenArgument)


class InputKind(Enum):
    """What an input of the graph is."""

    USER_INPUT = auto()
    PARAMETER = auto()
    BUFFER = auto()
    CONSTANT_TENSOR = auto()
    CUSTOM_OBJ = auto()
    TOKEN = auto()


class OutputKind(Enum):
    """What an output of the graph is."""

    USER_OUTPUT = auto()
    LOSS_OUTPUT = auto()
    BUFFER_MUTATION = auto()
    PARAMETER_MUTATION = auto()
    GRADIENT_TO_PARAMETER = auto()
    GRADIENT_TO_USER_INPUT = auto()
    USER_INPUT_MUTATION = auto()
    TOKEN = auto()


@dataclass(frozen=True)
class InputSpec:
    """One input of a graph: what it is, its node, and the qualified name of what is to be fed there."""

    kind: InputKind
    arg: ArgumentSpec
    target: str | None
    persistent: bool | None = None  # for buffers: whether a state dict has them

    def __post_init__(self) -> None:
        if self.kind is InputKind.BUFFER and self.persistent is None:
            raise SignatureError("Failed to specify persistent flag on BUFFER.")
        if not isinstance(self.arg, _ARGUMENTS):
            raise SignatureError(f"the argument of an input must be one of the argument records, got {type(self.arg)}")


@dataclass(frozen=True)
class OutputSpec:
    """One output of a graph: what it is, its node, and what it belongs to.

    `target` is the name of a buffer or a parameter, or the node of a user input.
    """

    kind: OutputKind
    arg: ArgumentSpec
    target: str | None

    def __post_init__(self) -> None:
        if not isinstance(self.arg, _ARGUMENTS):
            raise SignatureError(f"the argument of an output must be one of the argument records, got {self.arg!r}")


ExportBackwardSignature = BackwardSignature


@dataclass
class ExportGraphSignature:
    """What every input and output of a graph is.

    >>> weight = InputSpec(InputKind.PARAMETER, TensorArgument("p_w"), "w")
    >>> loss = OutputSpec(OutputKind.LOSS_OUTPUT, TensorArgument("sum_1"), None)
    >>> gradient = OutputSpec(OutputKind.GRADIENT_TO_PARAMETER, TensorArgument("mul"), "w")
    >>> signature = ExportGraphSignature([weight], [loss, gradient])
    >>> signature.parameters, signature.backward_signature.gradients_to_parameters
    (['w'], {'mul': 'w'})
    """

    input_specs: list[InputSpec]
    output_specs: list[OutputSpec]

    # ------------------------------------------------------------------------------------------- inputs
    def _targets(self, kind: InputKind) -> list[str]:
        return [s.target for s in self.input_specs if s.kind is kind and isinstance(s.target, str)]

    def _fed(self, kind: InputKind) -> dict[str, str]:
        return {s.arg.name: s.target for s in self.input_specs if s.kind is kind and isinstance(s.target, str)}

    @property
    def parameters(self) -> list[str]:
        """Qualified names of the parameters."""
        return self._targets(InputKind.PARAMETER)

    @property
    def buffers(self) -> list[str]:
        """Qualified names of the buffers."""
        return self._targets(InputKind.BUFFER)

    @property
    def non_persistent_buffers(self) -> list[str]:
        """Buffers that a state dict does not have."""
        return [t for s in self.input_specs if s.persistent is False and (t := s.target) is not None]

    @property
    def lifted_tensor_constants(self) -> list[str]:
        """Names of tensors that are part of the program."""
        return self._targets(InputKind.CONSTANT_TENSOR)

    @property
    def lifted_custom_objs(self) -> list[str]:
        """Names of script objects that are part of the program."""
        return self._targets(InputKind.CUSTOM_OBJ)

    @property
    def user_inputs(self) -> tuple[int | float | bool | str | None, ...]:
        """Nodes of the user's inputs; for a constant, its value."""
        return tuple(_shown(s.arg, "inputs") for s in self.input_specs if s.kind is InputKind.USER_INPUT)

    @property
    def inputs_to_parameters(self) -> dict[str, str]:
        """The parameter that each node is fed."""
        return self._fed(InputKind.PARAMETER)

    @property
    def inputs_to_buffers(self) -> dict[str, str]:
        """The buffer that each node is fed."""
        return self._fed(InputKind.BUFFER)

    @property
    def inputs_to_lifted_tensor_constants(self) -> dict[str, str]:
        """The constant that each node is fed."""
        return self._fed(InputKind.CONSTANT_TENSOR)

    @property
    def inputs_to_lifted_custom_objs(self) -> dict[str, str]:
        """The script object that each node is fed."""
        return self._fed(InputKind.CUSTOM_OBJ)

    @property
    def input_tokens(self) -> list[str]:
        """Nodes of the tokens that the graph takes."""
        return [s.arg.name for s in self.input_specs if isinstance(s.arg, TokenArgument)]

    # ------------------------------------------------------------------------------------------ outputs
    def _given(self, kind: OutputKind) -> dict[str, str]:
        return {s.arg.name: s.target for s in self.output_specs if s.kind is kind and isinstance(s.target, str)}

    @property
    def user_outputs(self) -> tuple[int | float | bool | str | None, ...]:
        """Nodes of the user's outputs, the loss among them; for a constant, its value."""
        kinds = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
        return tuple(_shown(s.arg, "output") for s in self.output_specs if s.kind in kinds)

    @property
    def buffers_to_mutate(self) -> dict[str, str]:
        """The buffer that each of these nodes is the new value of."""
        return self._given(OutputKind.BUFFER_MUTATION)

    @property
    def parameters_to_mutate(self) -> dict[str, str]:
        """The parameter that each of these nodes is the new value of."""
        return self._given(OutputKind.PARAMETER_MUTATION)

    @property
    def user_inputs_to_mutate(self) -> dict[str, str]:
        """The input node that each of these nodes is the new value of."""
        return self._given(OutputKind.USER_INPUT_MUTATION)

    @property
    def output_tokens(self) -> list[str]:
        """Nodes of the tokens that the graph returns."""
        return [s.arg.name for s in self.output_specs if isinstance(s.arg, TokenArgument)]

    @property
    def backward_signature(self) -> ExportBackwardSignature | None:
        """The loss and the gradients, where there are any (G-8)."""
        losses = [s.arg.name for s in self.output_specs if s.kind is OutputKind.LOSS_OUTPUT]
        if len(losses) > 1:
            raise SignatureError(f"a signature has one loss, not {len(losses)}: {', '.join(losses)}")
        if not losses:
            return None
        return ExportBackwardSignature(
            self._given(OutputKind.GRADIENT_TO_PARAMETER), self._given(OutputKind.GRADIENT_TO_USER_INPUT), losses[0]
        )

    @property
    def assertion_dep_token(self) -> Mapping[int, str] | None:
        """Always None: assertions are kept in order by effect tokens."""
        return None

    # ----------------------------------------------------------------------------------------- renaming
    def replace_all_uses(self, old: str, new: str) -> None:
        """Follow a node that a pass has renamed; what specs belong to (`target`) stays."""
        if not isinstance(old, str) or not isinstance(new, str):
            raise SignatureError(f"names of nodes are text, not {old!r} and {new!r}")
        self.input_specs[:] = [_renamed(spec, old, new) for spec in self.input_specs]
        self.output_specs[:] = [_renamed(spec, old, new) for spec in self.output_specs]

    def get_replace_hook(self) -> Callable[[Any, str, Any], None]:
        """A hook for a graph module that renames what the graph takes or returns."""

        def rename(old: Any, new: str, user: Any) -> None:
            if user.op in ("output", "input"):
                self.replace_all_uses(old.name, new)

        return rename


def _shown(arg: ArgumentSpec, where: str) -> int | float | bool | str | None:
    if isinstance(arg, TokenArgument):
        raise ExportError(f"{arg} is not a valid user {where}")
    return arg.value if isinstance(arg, ConstantArgument) else arg.name


def _renamed(spec: Any, old: str, new: str) -> Any:
    if isinstance(spec.arg, ConstantArgument) or spec.arg.name != old:
        return spec
    return dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=new))


def _sig_to_specs(
    *,
    user_inputs: Collection[str],
    inputs_to_parameters: Mapping[str, str],
    inputs_to_buffers: Mapping[str, str],
    user_outputs: Collection[str],
    buffer_mutations: Mapping[str, str],
    user_input_mutations: Mapping[str, str],
    grad_params: Mapping[str, str],
    grad_user_inputs: Mapping[str, str],
    loss_output: str | None,
    inputs: Sequence[ArgumentSpec],
    outputs: Sequence[ArgumentSpec],
    input_tokens: Sequence[str],
    output_tokens: Sequence[str],
    parameter_mutations: Mapping[str, str] | None = None,
) -> tuple[list[InputSpec], list[OutputSpec]]:
    """Tell what each input and output is by its name, and for outputs by its place as well (G-9)."""
    params_written = parameter_mutations or {}

    def input_spec(arg: ArgumentSpec) -> InputSpec:
        if isinstance(arg, TokenArgument):
            return InputSpec(InputKind.TOKEN, arg, None)
        if not isinstance(arg, TensorArgument) or arg.name in user_inputs:
            return InputSpec(InputKind.USER_INPUT, arg, None)
        if arg.name in inputs_to_parameters:
            return InputSpec(InputKind.PARAMETER, arg, inputs_to_parameters[arg.name])
        if arg.name in inputs_to_buffers:
            return InputSpec(InputKind.BUFFER, arg, inputs_to_buffers[arg.name], persistent=True)
        raise SignatureError(f"Unknown tensor input kind: {arg.name}")

    written = len(buffer_mutations) + len(params_written) + len(user_input_mutations) + len(output_tokens)

    def output_spec(i: int, arg: ArgumentSpec) -> OutputSpec:
        if isinstance(arg, TokenArgument):
            return OutputSpec(OutputKind.TOKEN, arg, None)
        if not isinstance(arg, TensorArgument):
            return OutputSpec(OutputKind.USER_OUTPUT, arg, None)
        tables: tuple[tuple[OutputKind, Mapping[str, str]], ...]
        if i < written:
            tables = (
                (OutputKind.BUFFER_MUTATION, buffer_mutations),
                (OutputKind.PARAMETER_MUTATION, params_written),
                (OutputKind.USER_INPUT_MUTATION, user_input_mutations),
            )
        elif arg.name in user_outputs:
            return OutputSpec(OutputKind.USER_OUTPUT, arg, None)
        else:
            tables = (
                (OutputKind.GRADIENT_TO_PARAMETER, grad_params),
                (OutputKind.GRADIENT_TO_USER_INPUT, grad_user_inputs),
            )
        for kind, table in tables:
            if arg.name in table:
                return OutputSpec(kind, arg, table[arg.name])
        if i >= written and arg.name == loss_output:
            return OutputSpec(OutputKind.LOSS_OUTPUT, arg, None)
        raise SignatureError(f"Unknown tensor {'mutation' if i < written else 'output'} kind: {arg.name}")

    return [input_spec(arg) for arg in inputs], [output_spec(i, arg) for i, arg in enumerate(outputs)]


# ---------------------------------------------------------------------------------------------------------------------
# The signature of a graph place by place, from its names.
def classify(graph: fx.GraphModule, signature: GraphSignature, non_persistent: frozenset[str]) -> ExportGraphSignature:
    """A spec for each input and output: the order is that of `GraphSignature`."""
    placeholders = list(graph.graph.find_nodes(op="placeholder"))
    inputs = [_input(node, signature, non_persistent) for node in placeholders]
    returned = list(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    return ExportGraphSignature(inputs, _outputs(returned, signature))


def _input(node: fx.Node, signature: GraphSignature, non_persistent: frozenset[str]) -> InputSpec:
    name = node.name
    if name in signature.input_tokens:
        return InputSpec(InputKind.TOKEN, TokenArgument(name), None)
    if name in signature.inputs_to_parameters:
        return InputSpec(InputKind.PARAMETER, TensorArgument(name), signature.inputs_to_parameters[name])
    if name in signature.inputs_to_buffers:
        target = signature.inputs_to_buffers[name]
        return InputSpec(InputKind.BUFFER, TensorArgument(name), target, target not in non_persistent)
    return InputSpec(InputKind.USER_INPUT, argument_of(node), None)


def argument_of(value: Any) -> ArgumentSpec:
    """What stands at a place: a node, by what it holds, or a constant."""
    if not isinstance(value, fx.Node):
        return ConstantArgument("", value)
    held = value.meta.get("val")
    if isinstance(held, torch.Tensor) or "val" not in value.meta:
        return TensorArgument(value.name)
    if isinstance(held, torch.SymInt):
        return SymIntArgument(value.name)
    if isinstance(held, (int, float, bool, str)) or held is None:
        return ConstantArgument(value.name, held)
    return CustomObjArgument(value.name, type(held).__qualname__)


def _outputs(returned: list[Any], signature: GraphSignature) -> list[OutputSpec]:
    """Position tells what an output is, for one node may be an updated buffer and a result."""
    backward = signature.backward_signature
    updates = {
        **{n: (OutputKind.PARAMETER_MUTATION, t) for n, t in signature.parameters_to_mutate.items()},
        **{n: (OutputKind.BUFFER_MUTATION, t) for n, t in signature.buffers_to_mutate.items()},
        **{n: (OutputKind.USER_INPUT_MUTATION, t) for n, t in signature.user_inputs_to_mutate.items()},
    }
    tokens = len(signature.output_tokens)
    results: list[tuple[OutputKind, str | None]] = [(OutputKind.USER_OUTPUT, None)] * len(signature.user_outputs)
    gradients: list[tuple[OutputKind, str | None]] = []
    if backward is not None:
        results[signature.user_outputs.index(backward.loss_output)] = (OutputKind.LOSS_OUTPUT, None)
        gradients += [(OutputKind.GRADIENT_TO_PARAMETER, t) for t in backward.gradients_to_parameters.values()]
        gradients += [(OutputKind.GRADIENT_TO_USER_INPUT, t) for t in backward.gradients_to_user_inputs.values()]
    kinds = [
        *[(OutputKind.TOKEN, None)] * tokens,
        *[updates[node.name] for node in returned[tokens : tokens + len(updates)]],
        *results,
        *[(OutputKind.USER_OUTPUT, None)] * len(signature.random_outputs),
        *gradients,
    ]
    return [
        OutputSpec(kind, TokenArgument(value.name) if kind is OutputKind.TOKEN else argument_of(value), target)
        for value, (kind, target) in zip(returned, kinds, strict=True)
    ]
