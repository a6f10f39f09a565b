"""From a captured program to one flat graph whose inputs and outputs are named in a signature."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from .._torch import OpOverload, disable_modes, is_traceable_wrapper_subclass, pytree
from ..abstract.engine import geometry_of
from ..capturing.capture import Capture
from ..errors import ExportError
from ..graph.fx import to_fx
from ..graph.graph import Graph, Node, get_constant, name_nodes, nodes_in
from ..graph.verify import verify
from ..joint.inputs import InputFacts
from ..joint.side_effects import Assigned, GradAssigned, Moved
from ..ops import Kind, aten, op_info
from ..options import config
from ..record.fakify import has_hooks
from ..slots import (
    Buffer,
    FreeTensor,
    Grad,
    GradOf,
    Inner,
    Input,
    Output,
    Param,
    Primal,
    RandomState,
    Token,
    Updated,
    outermost,
)
from ..subclasses.layout import Wrapped, leaves_of, spread
from .calling_convention import Inputs, Names, Outputs, argument_names, signature_of, structure_of
from .signature import GraphSignature
from .subclasses import Named, new_values, path_of, plain_slots, seed_of


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be exported, said before a graph is made of it.
def refuse_subclasses(values: Iterable[tuple[str, Any]], where: str) -> None:
    """Inputs whose tensors are made of others, where a graph must be called as the program is."""
    for name, value in values:
        if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
            raise ExportError(
                f"{where} is not supported with traceable tensor subclass inputs: {name} is a {type(value).__name__}. "
                "Pass its inner tensors, and rebuild it in the program."
            )


def refuse_what_is_lost(capture: Capture, joint: bool) -> None:
    """What a program does that a graph without side effects, and a signature of names, cannot tell."""
    program = capture.joint
    for facts in (*program.memories, *program.inputs):
        _refuse_reshapes(facts)
    if capture.shared:
        _refuse_shared_memory(capture)
    for slot in program.signature.primals:
        if isinstance(slot, GradOf):
            raise ExportError(
                f"the program reads {slot}, a gradient from before the call, which an exported graph does not have. "
                "Pass it as an argument."
            )
    _refuse_effects(capture)
    for attribute in program.attributes:
        raise ExportError(
            f"the program puts the attribute {attribute.name!r} on {attribute.of}: an exported graph returns plain "
            "tensors. Return the value beside the result."
        )
    for facts in program.inputs:
        if isinstance(outermost(facts.recorded.slot), FreeTensor):
            _refuse_hidden(facts, joint)
    for name, error in program.backward.refused.items():
        assert isinstance(name, Output)
        raise error
    if joint:
        _refuse_gradients_without_a_name(capture)


def _refuse_reshapes(facts: InputFacts) -> None:
    if facts.place is not None:
        raise ExportError(
            f"Found an input that received a metadata mutation, {facts.recorded.slot}: an exported graph can return "
            "new data for an input but cannot change its shape or move it. Work on a view or a copy of it."
        )


def _refuse_shared_memory(capture: Capture) -> None:
    members = [t for memory in capture.shared for t in memory.members]
    slots = [s for s, t in capture.joint.recording.real_tensors.items() if any(t is m for m in members)]
    names = ", ".join(map(str, slots))
    first = members[0]
    duplicated = all((t.data_ptr(), geometry_of(t)) == (first.data_ptr(), geometry_of(first)) for t in members)
    if len(members) > 1:
        raise ExportError(
            f"Encountered {'duplicated' if duplicated else 'aliased'} inputs that are mutated in the graph you are "
            f"trying to export: {names} share memory. Pass copies, or one of them."
        )
    raise ExportError(
        f"the program reaches memory beside {names}, or writes to elements that it shows twice. Pass a contiguous copy."
    )


def _refuse_effects(capture: Capture) -> None:
    program = capture.joint
    for effect in program.effects:
        if isinstance(effect, GradAssigned):
            raise ExportError(
                f"the program sets the gradient of {effect.of}, which an exported graph cannot. Return it instead."
            )
        if isinstance(effect, Moved):
            raise ExportError(f"Found an input that received a metadata mutation, {effect.input}, by set_.")
    for write in program.backward.writes:
        if write.reshapes or not isinstance(write.of, (Param, Buffer, Input)):
            raise ExportError(f"the backward changes {write.of}, which an exported graph cannot tell.")
    if program.hooks:
        raise ExportError("the program registers hooks on its inputs or results, which an exported graph would lose.")


def _refuse_hidden(facts: InputFacts, joint: bool) -> None:
    slot = facts.recorded.slot
    if facts.data_changed:
        raise ExportError(
            f"the program writes to {slot}, which is neither an argument nor a buffer: an exported graph would lose "
            "it. Register it with register_buffer."
        )
    if joint and facts.requires_grad:
        raise ExportError(
            f"{slot} requires grad and is neither an argument nor a parameter, so that its gradient has no name. "
            "Register it as a parameter, or detach it."
        )


def _refuse_gradients_without_a_name(capture: Capture) -> None:
    program = capture.joint
    for slot, gradient in zip(program.signature.primals, program.signature.grads, strict=True):
        if gradient is not None and not isinstance(slot, (Param, Input)):
            raise ExportError(f"{slot} requires grad and gets a gradient that has no name. Make it a parameter.")
    for slot, tensor in program.recording.real_tensors.items():
        if tensor.requires_grad and has_hooks(tensor):
            raise ExportError(f"{slot} has hooks on its gradient, which an exported graph would lose. Remove them.")


def refuse_unnamed_gradient(places: Iterable[Named], inputs: Container[Named]) -> None:
    """The gradient of an argument is named by the argument's node."""
    for place in places:
        slot = outermost(place)
        if isinstance(slot, Input) and place not in inputs:
            raise ExportError(
                f"the gradient of {slot} is put together otherwise than {slot} itself (one of them is a tensor "
                "subclass), so that it has no name. Make it a parameter."
            )


def refuse_written_shape(slot: Primal, new: Tensor | None, old: Tensor) -> None:
    """A buffer that the program assigns takes the place of the old one only if it is like it."""
    assert new is not None
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ExportError(
            f"the program assigns {slot}, which has shape {tuple(old.shape)} and dtype {old.dtype}, a tensor of shape "
            f"{tuple(new.shape)} and dtype {new.dtype}: the new value of a buffer must be like the old one."
        )


# ---------------------------------------------------------------------------------------------------------------------
# From a captured program to one flat graph that runs anywhere: every input and output has its name in a signature.
#
# The capture's joint graph takes what the run time finds convenient. Here its inputs are put into the order of export,
# tensors that the program found by itself become constants, the tangent of the loss becomes a one, and what the
# backward does comes right after the forward.
S = TypeVar("S", bound=Named)


def export_graph(
    capture: Capture, function: Callable[..., Any], loss: int | None
) -> tuple[fx.GraphModule, GraphSignature]:
    """The graph of a capture and what its inputs and outputs are; `function` gives names to the inputs."""
    refuse_what_is_lost(capture, joint=loss is not None)
    lowering = _Lowering(capture, function, loss)
    module = lowering.graph_module()
    return module, signature_of(lowering.inputs, lowering.outputs, structure_of(capture), lowering.ties())


class _Lowering:
    """Copies the nodes of a joint graph with some of them replaced."""

    def __init__(self, capture: Capture, function: Callable[..., Any], loss: int | None) -> None:
        joint = capture.joint
        self._capture = capture
        self._joint = joint
        self._loss = loss
        self._new: dict[int, Any] = {}  # by id of the old node
        self._nodes: list[Node] = []
        self._recorded = {recorded.slot: recorded for recorded in joint.recording.inputs}
        self.inputs = Inputs()
        # Gradients are told apart by names of parameters and of input nodes: no input is called like a parameter.
        self._names = Names({node.name for node in joint.graph.nodes} | {str(place.path) for _, place in capture.state})
        self._above = joint.recording.above_autograd
        self._add_placeholders(function)
        if self._above:
            self._keep_old_values()
        self._copy_nodes()
        self.outputs = self._collect()
        self._keep_live()
        name_nodes(self._nodes, self._names.taken)
        self.graph = Graph(self.inputs.flat(), self._nodes, self.outputs.flat())
        if config.verify:
            verify(self.graph)

    # ------------------------------------------------------------------------------------------- inputs
    def _add_placeholders(self, function: Callable[..., Any]) -> None:
        joint, capture = self._joint, self._capture
        by_slot = {node.slot: node for node in joint.graph.inputs}
        for token in joint.signature.tokens:
            self.inputs.tokens.append(self._placeholder(by_slot[token], token, f"token_{token.effect}", None))
        for slot, _ in capture.state:
            prefix = "p" if isinstance(slot, Param) else "b"
            for place, item in plain_slots(self._recorded[slot]):
                self.inputs.state[place] = self._placeholder(
                    by_slot.get(place), place, f"{prefix}_{path_of(place)}", item.seen
                )
        for slot, name in argument_names(function, [s for s in self._recorded if isinstance(s, Input)]):
            for place, item in plain_slots(self._recorded[slot]):
                wanted = name + path_of(place).removeprefix(slot.path)
                self.inputs.arguments[place] = self._placeholder(by_slot.get(place), place, wanted, item.seen)
        for side in (joint.random.forward, joint.random.backward):
            if side is not None and (side.draws or side is joint.random.forward):
                for node in (side.seed, side.base):
                    self.inputs.random[str(node.slot)] = self._placeholder(node, node.slot, str(node.slot), None)
        for hidden in capture.free_tensors:
            lifted = leaves_of(joint.recording.real_tensors[hidden])
            for (place, _), real in zip(plain_slots(self._recorded[hidden]), lifted, strict=True):
                if place in by_slot:
                    self._new[id(by_slot[place])] = self._constant(real.detach(), by_slot[place].value)
        for token in joint.signature.backward_tokens:
            self._new[id(by_slot[token])] = self._token_of_backward(by_slot[token], token)

    def _keep_old_values(self) -> None:
        """The graph will be differentiated, after its runner has given written inputs their new values."""
        by_slot = {node.slot: node for node in self._joint.graph.inputs}
        inputs = self.inputs.named
        for slot in self._new_values():
            if slot in by_slot:
                self._new[id(by_slot[slot])] = self._call(aten.clone.default, inputs[slot])

    def _token_of_backward(self, head: Node, slot: Token) -> Any:
        """The backward goes on where the forward's effects of the same kind ended, or takes a token of its own."""
        for end, value in self._joint.graph.forward_outputs:
            if end == Token(slot.effect):
                return value
        self.inputs.tokens.append(self._placeholder(head, slot, f"token_{slot.effect}", None))
        return self.inputs.tokens[-1]

    def _placeholder(self, old: Node | None, slot: Any, name: str, seen: Any) -> Node:
        new = Node(None, (), {}, old.value if old is not None else seen)
        new.slot, new.name = slot, self._names.fresh(name)
        if old is not None:
            self._new[id(old)] = new
        return new

    # -------------------------------------------------------------------------------------------- nodes
    def _value(self, item: Any) -> Any:
        if item.__class__ is Node:
            new = self._new[id(item)]
            return new if new is not None and id(new) not in self._new else self._value(new)
        if item.__class__ is list or item.__class__ is tuple:
            return item.__class__([self._value(x) for x in item])
        return item

    def _constant(self, held: Tensor, value: Any) -> Node:
        node = Node(get_constant, (held,), {}, value)
        self._nodes.append(node)
        return node

    def _copy_nodes(self) -> None:
        joint = self._joint
        tangents = joint.tape.tangent_nodes
        loss = None if self._loss is None else self._returned(Output(self._loss))
        if isinstance(loss, Wrapped):
            self._add_seed_of_wrapper(tangents)
        elif loss is not None and id(loss) in self._new:  # it is an input
            self._add_seed(tangents, loss)
        for node in joint.graph.nodes:
            # Above autograd, composite operators choose their kernels, and so their strides, when the graph is run.
            op = aten.reshape.default if self._above and node.op is aten.view.default else node.op
            new = Node(op, self._value(node.args), {k: self._value(v) for k, v in node.kwargs.items()}, node.value)
            new.name, new.meta, new.backward, new.impure = node.name, node.meta, node.backward, node.impure
            new.stack, new.origin = node.stack, node.origin
            self._new[id(node)] = new
            self._nodes.append(new)
            if node is loss:
                self._add_seed(tangents, node)

    def _add_seed(self, tangents: Sequence[Node], loss: Node) -> None:
        """The gradient of the loss with respect to itself."""
        seed = self._call(aten.ones_like.default, self._value(loss))
        seed.backward = True
        for tangent in tangents:
            self._new[id(tangent)] = seed

    def _add_seed_of_wrapper(self, tangents: Sequence[Node]) -> None:
        """The same where the loss is made of several tensors."""
        assert self._loss is not None
        tape, slot = self._joint.tape, Output(self._loss)
        seeds = seed_of(tape.targets[slot], tape.tangents[slot], self._loss)
        for tangent, seed in zip(tangents, seeds, strict=True):
            self._new[id(tangent)] = self._constant(seed, tangent.value)

    def _call(self, op: Any, *args: Any) -> Node:
        node = Node(op, args, {}, args[0].value)
        self._nodes.append(node)
        return node

    # ------------------------------------------------------------------------------------------ outputs
    def _returned(self, slot: Any) -> Any:
        return self._joint.returned_nodes[self._joint.signature.returned.index(slot)]

    def _collect(self) -> Outputs:
        joint, found = self._joint, Outputs()
        for token, node in joint.graph.outputs_of(Token):
            found.tokens[token.effect] = self._value(node)  # type: ignore[union-attr]
        new = self._new_values()
        old = self.inputs.named
        found.updates = [(slot, self._value(new[slot])) for slot in old if slot in new]
        # A tensor subclass may be written as a whole although some of its tensors stay as they are.
        found.updates = [(s, node) for s, node in found.updates if not isinstance(s, Inner) or node is not old[s]]
        results = [self._returned(Output(i)) for i in range(joint.visible)]
        found.results = [self._value(value) for value in spread(results)]
        found.loss = len(spread(results[: self._loss])) if self._loss is not None else None
        found.offsets = [(slot, self._value(node)) for slot, node in joint.graph.outputs_of(RandomState)]
        found.gradients = [(slot, self._value(node)) for slot, node in self._gradients()]
        self._copy_what_is_overwritten(found)
        self._separate(found)
        return found

    def _copy_what_is_overwritten(self, outputs: Outputs) -> None:
        """What the graph returns must not lie in an input that the runner then gives another value."""
        inputs = self.inputs.named
        written = {id(inputs.get(slot)) for slot, _ in outputs.updates}

        def safe(value: Any) -> Any:
            overwritten = isinstance(value, Node) and id(_memory_of(value)) in written
            return self._call(aten.clone.default, value) if overwritten else value

        if written:
            outputs.updates = [(slot, safe(node)) for slot, node in outputs.updates]
            outputs.results = [safe(node) for node in outputs.results]
            outputs.gradients = [(slot, safe(node)) for slot, node in outputs.gradients]

    def _new_values(self) -> dict[Any, Any]:
        """What the program leaves in its inputs: by writing, by assigning a buffer, by writing in its backward."""
        joint = self._joint
        new: dict[Any, Any] = {}
        for returned in joint.signature.returned:
            if isinstance(returned, Updated) and returned.of in self._recorded:
                new |= new_values(self._recorded[returned.of], self._returned(returned))
        for effect in joint.effects:
            if isinstance(effect, Assigned):
                owner = effect.owner.find()
                slot = next(s for s, p in self._capture.state if p.owner is owner and p.key == effect.key)
                (output,) = effect.outputs  # a buffer
                refuse_written_shape(slot, joint.outputs.tensors[output], self._recorded[slot].seen)
                new |= new_values(self._recorded[slot], self._returned(Output(output)))
        new |= {write.of: write.new for write in joint.backward.writes if isinstance(write.of, (Param, Buffer, Input))}
        return new

    def _gradients(self) -> Iterable[tuple[Named, Node]]:
        """Parameters first."""
        joint = self._joint
        if self._loss is None:
            return []
        gradients: dict[Any, list[tuple[Any, Node]]] = {}
        for slot, node in joint.graph.outputs_of(Grad):
            if node is not None:
                gradients.setdefault(outermost(slot.of), []).append((slot.of, node))  # type: ignore[union-attr]
        owners = dict.fromkeys(outermost(place) for place in self.inputs.named)
        found = [pair for owner in owners for pair in gradients.get(owner, ())]
        refuse_unnamed_gradient([place for place, _ in found], self.inputs.arguments)
        return found

    def _separate(self, outputs: Outputs) -> None:
        """Signatures map names of nodes to what they belong to: no two updates, and no two gradients, share a node."""
        outputs.updates = self._with_own_nodes(outputs.updates, backward=False)
        outputs.gradients = self._with_own_nodes(outputs.gradients, backward=True)

    def _with_own_nodes(self, pairs: list[tuple[S, Any]], backward: bool) -> list[tuple[S, Any]]:
        used: set[int] = set()
        separate = []
        for slot, node in pairs:
            if id(node) in used:
                node = self._call(aten.clone.default, node)
                node.backward = backward
            used.add(id(node))
            separate.append((slot, node))
        return separate

    def _keep_live(self) -> None:
        live: set[int] = set()
        pending = [*nodes_in(value for _, value in self.outputs.flat()), *(node for node in self._nodes if node.impure)]
        while pending:
            node = pending.pop()
            if id(node) not in live:
                live.add(id(node))
                pending.extend(node.inputs())
        self._nodes = [node for node in self._nodes if id(node) in live]

    # ------------------------------------------------------------------------------------------- results
    def graph_module(self) -> fx.GraphModule:
        """The graph in `torch.fx`."""
        module = to_fx(self.graph)
        arguments = self.inputs.arguments.values()
        constants = {node.name: node.value for node in arguments if not isinstance(node.value, Tensor)}
        for node in module.graph.find_nodes(op="placeholder"):
            if node.name in constants:
                node.meta["val"] = constants[node.name]
        for node in module.graph.nodes:  # the graph must not keep the recording's tape alive
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map_only(Tensor, _without_history, node.meta["val"])
        return module

    def ties(self) -> dict[str, str]:
        """Further names of tensors of the state, and their first names."""
        ties: dict[str, str] = {}
        for slot, _ in self._capture.state:
            recorded = self._recorded[slot]
            first = recorded.same_as or recorded
            for (place, _), (original, item) in zip(plain_slots(recorded), plain_slots(first), strict=True):
                original = item.same_as.slot if item.same_as is not None else original
                if original != place:
                    ties[path_of(place)] = path_of(original)
        return ties


def _memory_of(node: Node) -> Node:
    """The node whose memory a view looks at."""
    while node.op is operator.getitem or (isinstance(node.op, OpOverload) and op_info(node.op).kind is Kind.VIEW):
        if not isinstance(node.args[0], Node):
            break
        node = node.args[0]
    return node


def _without_history(value: Tensor) -> Tensor:
    if not value.requires_grad:
        return value
    with disable_modes(), torch.no_grad():
        return value.detach().requires_grad_(value.is_leaf)
