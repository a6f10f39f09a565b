"""The innermost part of a call in training: the graphs as one differentiable operator, all that autograd sees."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import SymInt, Tensor

from .._torch import (
    any_autocast_enabled,
    boundary_apply,
    deterministic_enabled,
    saved_hooks_are_on,
    set_grad_enabled,
    set_version,
    single_gradients_asked,
    under_vmap,
)
from ..codegen.writer import FEW, PackedArgs, Writer, pack_if_many, spread, tuple_of
from ..graph.graph import Node
from ..joint.build import Joint
from ..joint.hooks import GradRetained
from ..joint.inputs import WrittenInGraph, has_version
from ..joint.outputs import Differentiable, Plain
from ..ops import aten
from ..record.refusals import once_more
from ..slots import Base, Output, Returned, Slot, Updated
from ..subclasses.layout import Wrapped, is_wrapper
from .backward import Backward
from .call import gives_geometry, repeated_results, values_needed, write_graph_call
from .saved_tensors import anchor, anchor_of_any, give_back, is_view
from .stages import refusing_whole_gradients
from .tangents import plain_tangent


class TrainingCore:
    """One differentiable operator: its forward runs the forward graph, its backward the backward graph."""

    def __init__(self, joint: Joint, backward: Backward, guarded: bool, autocast: bool) -> None:
        saved = backward.saved
        self._joint = joint
        self._saved = saved
        self._backward = backward
        self._guarded = guarded
        self._autocast = autocast
        self._alone = not saved.through  # the outputs require grad, but no input gets any
        through = set(saved.through)
        self._beside = [i for i in range(len(joint.primals)) if i not in through]
        self._targets = [tangent.of for tangent in joint.signature.tangents]
        tracked = set(self._targets)
        self._nondiff_args = [slot for slot in values_needed(joint) if slot not in tracked]
        self._all_through = not (self._beside or self._nondiff_args or self._alone)
        slots = [facts.recorded.slot for facts in joint.primals]
        state = backward.state
        self._found = [] if state is None else [slots.index(slot) for slot in state.tensors if slot in slots]
        self._name_values()

    def _name_values(self) -> None:
        """What everything is called in the text of the operator."""
        saved, joint = self._saved, self._joint
        self._parameters, through = pack_if_many("i", "through", len(saved.through))
        self._rest, beside = pack_if_many("j", "nondiff_args", len(self._beside))
        places = dict(zip((*saved.through, *self._beside), (*through, *beside), strict=True))
        self._inputs = [places[i] for i in range(len(joint.primals))]
        self._input_names = [str(value) for value in self._inputs]
        self._returned = {slot: f"o{n}" for n, slot in enumerate(joint.signature.returned)}
        self._saved_names, self._saved_values = pack_if_many("s", "saved", len(saved.tensors))
        self._sizes = [f"n{n}" for n in range(len(saved.sizes))]
        self._anchors = [f"a{n}" for n in range(len(saved.anchors))]
        self._tangents = [f"t{n}" for n in range(len(self._targets))]

    def define(self, writer: Writer) -> None:
        """The class of the operator."""
        writer.bind(torch.autograd.Function, "Function")
        with writer.block("class Program(Function):"):
            writer.line("@staticmethod")
            self._write_forward(writer)
            writer.line()
            writer.line("@staticmethod")
            self._write_backward(writer)
        writer.line()
        writer.bind(boundary_apply, "boundary_apply")
        writer.line("apply = boundary_apply(Program)")
        writer.line("Program._backward_cls.stash = None")
        writer.line("Program._backward_cls.noted = None")
        writer.line("Program._backward_cls.emptied = frozenset()")
        if self._joint.inner_results:
            writer.line("Program._backward_cls.watched = ()")
        writer.line()

    # ------------------------------------------------------------------------------------------- forward
    def _write_forward(self, writer: Writer) -> None:
        lead = [] if self._all_through else ["nondiff_args"]
        dummy_leaf = ["dummy_leaf"] if self._alone else []
        with writer.block(f"def forward({', '.join(['ctx', *lead, *self._parameters, *dummy_leaf])}):"):
            if 0 < len(self._beside) <= FEW:  # many are read where they are
                writer.take_apart(self._rest, "nondiff_args")
            used = {*self._targets, *self._nondiff_args}
            heads = [name if slot in used else "_" for slot, name in self._returned.items()]
            call = f"forward_graph([{', '.join(spread(self._inputs))}])"
            with self._writes_counted(writer):
                write_graph_call(writer, [*heads, *self._saved_names, *self._sizes], call, self._autocast)
            self._note_versions(writer)
            self._count_changes(writer)
            self._make_anchors(writer)
            self._save(writer)
            self._keep_what_backward_asks(writer)
            if not self._all_through:
                writer.line(f"nondiff_args[:] = [{', '.join(self._nondiff_values())}]")
            results = [self._differentiable(writer, slot) for slot in self._targets]
            writer.line(f"return {', '.join([*results, *self._anchors])}")

    @contextlib.contextmanager
    def _writes_counted(self, writer: Writer) -> Iterator[None]:
        """Lines that write to inputs: a compiler may save an input for its new value, and count its writes or not."""
        inputs = zip(self._input_names, self._joint.primals, strict=True)
        written = [(name, facts) for name, facts in inputs if isinstance(facts.data, WrittenInGraph)]
        versions = [(name, writer.fresh("version"), facts) for name, facts in written if has_version(facts)]
        for name, version, _ in versions:
            writer.line(f"{version} = {name}._version")
        yield
        for name, version, facts in versions:
            setter = writer.bind(set_version, "set_version")
            writer.line(f"{setter}({name}, {version} + {facts.version_change})")

    def _note_versions(self, writer: Writer) -> None:
        """Before anything else changes them: how they will be is known."""
        reread, names = self._saved.reread, self._input_names
        if reread.again or reread.updated:
            again, updated = (tuple_of([names[n] for n in places]) for places in (reread.again, reread.updated))
            writer.line(f"ctx.noted = {writer.bind(self._saved.noted, 'noted')}({again}, {updated})")

    def _count_changes(self, writer: Writer) -> None:
        """Autograd notes the versions of what is saved: what is done to an input after the graph counts already."""
        for name, facts in zip(self._input_names, self._joint.primals, strict=True):
            change = self._saved.counted.get(facts.recorded.slot)
            if change:
                writer.line(f"{writer.bind(set_version, 'set_version')}({name}, {name}._version + {change})")

    def _make_anchors(self, writer: Writer) -> None:
        for name, edge in zip(self._anchors, self._saved.anchors, strict=True):
            place = self._saved.through[edge]
            is_plain = isinstance(self._joint.primal_nodes[place], Node)
            make = writer.bind(anchor if is_plain else anchor_of_any, "anchor")
            writer.line(f"{name} = {make}({self._inputs[place]})")

    def _save(self, writer: Writer) -> None:
        """All saved tensors go through autograd's own store: version checks, hooks and freeing work as in eager."""
        if self._joint.backward.writes:
            primals = zip(self._input_names, self._joint.primals, strict=True)
            places: dict[Any, str] = {facts.recorded.slot: name for name, facts in primals}
            held = [places.get(write.of, "None") for write in self._joint.backward.writes]
            writer.line(f"ctx.live = {tuple_of(held)}")
        detached = self._detached(writer)
        wrappers = [self._input_names[n] for n in self._saved.wrapped_inputs]
        wrappers += [self._returned[slot] for slot in self._saved.wrapped_results]
        if self._saved.keeps:
            writer.line(f"ctx.kept = {tuple_of(detached)}")
            detached = []
        elif not (detached or self._anchors or wrappers) and self._is_spent:
            with torch.inference_mode(False):
                detached = [writer.bind(torch.empty(0), "nothing")]
        if detached or self._anchors or wrappers:
            writer.line(f"ctx.save_for_backward({', '.join([*detached, *self._anchors, *wrappers])})")
        if self._sizes:
            writer.line(f"ctx.sizes = {tuple_of(self._sizes)}")

    def _detached(self, writer: Writer) -> list[str]:
        """The tensors to save: views without what they look at, results without their history."""
        primals = zip(self._joint.primal_nodes, self._joint.primals, strict=True)
        counted, live = self._saved.counted, self._saved.live
        moving = {node.name for node, facts in primals if isinstance(node, Node) and facts.recorded.slot in counted}
        nodes = [(i, node) for i, node in enumerate(self._saved.tensors) if i not in live]
        apart = {i for i, node in nodes if is_view(node) or node.name in moving}
        if len(apart) > FEW:
            indices = writer.bind(tuple(sorted(apart)), "views")
            writer.line(f"for i in {indices}: saved[i] = saved[i].detach()")
            apart = set()
        values = self._saved_values
        returned = {node.name for node in self._joint.returned_nodes if isinstance(node, Node)}
        results = [str(values[i]) for i, node in nodes if i not in apart and node.name in returned]
        if results:  # hooks get them as in eager: one that keeps a result would keep the result's node alive
            with writer.block(f"if {writer.bind(saved_hooks_are_on, 'saved_hooks_are_on')}():"):
                for value in results:
                    writer.line(f"{value} = {value}.detach()")
        return spread([f"{values[i]}.detach()" if i in apart else values[i] for i, _ in nodes])

    def _keep_what_backward_asks(self, writer: Writer) -> None:
        """What else a backward finds in its `ctx`."""
        if self._found:
            writer.line(f"ctx.found = {tuple_of([self._input_names[n] for n in self._found])}")
        borrowed = self._joint.recording.session.borrowed
        if borrowed:
            writer.line(f"ctx.borrowed = {writer.bind(borrowed.for_results, 'borrowed')}()")
            writer.line(f"ctx.checkpointed = {writer.bind(borrowed.for_backward, 'checkpointed')}()")
        writer.line("ctx.set_materialize_grads(False)")
        if self._joint.backward.refused:
            writer.line(f"ctx.hooked = {writer.bind(saved_hooks_are_on, 'saved_hooks_are_on')}()")

    @property
    def _is_spent(self) -> bool:
        """Whether eager would refuse a second backward although nothing is saved here: a tensor of no size tells."""
        return not self._saved.tensors and self._joint.tape.frees_anything

    def _differentiable(self, writer: Writer, slot: Returned) -> str:
        """Autograd must not take a result for a view of something inside the graph.

        It refuses writes to views that an operator of the user's makes, such as this one: what it is to lock is one.
        """
        name = self._returned[slot]
        if self._is_locked(slot):
            return f"{writer.bind(aten.alias.default, 'alias')}({name})"
        apart = self._is_view(slot) or isinstance(slot, Updated) or slot in self._repeated_targets
        return f"{name}.detach()" if apart else name

    @cached_property
    def _repeated_targets(self) -> set[Returned]:
        """One value to the graph, but two to autograd, with a tangent each: `y.data` that was differentiated too."""
        first = {id(self._nodes[slot]): slot for slot in reversed(self._targets)}
        return {slot for slot in self._targets if first[id(self._nodes[slot])] is not slot}

    @cached_property
    def _nodes(self) -> dict[Returned, Any]:
        """The node of each result."""
        return dict(zip(self._joint.signature.returned, self._joint.returned_nodes, strict=True))

    def _nondiff_values(self) -> list[str]:
        """A result that autograd does not track must be a tensor of its own beside one that it does."""
        alike = repeated_results(self._joint)
        nodes = self._nodes
        tracked = {id(nodes[slot]) for slot in self._targets}
        results = self._joint.outputs.results
        shapes = {Output(i) for i, result in enumerate(results) if gives_geometry(result)}
        apart = [s in alike or s in shapes or id(nodes[s]) in tracked or self._is_view(s) for s in self._nondiff_args]
        names = [self._returned[slot] for slot in self._nondiff_args]
        return [f"{name}.detach()" if is_apart else name for name, is_apart in zip(names, apart, strict=True)]

    def _is_view(self, slot: Returned) -> bool:
        if isinstance(slot, Base):
            node = self._nodes[slot]
            if isinstance(node, Wrapped):
                return False  # a wrapper is made anew, around whatever its leaves are
            return is_view(node) or node.op is operator.getitem
        result = self._joint.outputs.results[slot.index] if isinstance(slot, Output) else None
        return isinstance(result, Plain) and result.is_view

    def _is_locked(self, slot: Returned) -> bool:
        result = self._joint.outputs.results[slot.index] if isinstance(slot, Output) else None
        match result:
            case Plain(history=Differentiable(locked=True)):
                return True
        return False

    # ------------------------------------------------------------------------------------------ backward
    def _write_backward(self, writer: Writer) -> None:
        errors = self._joint.backward.refused
        with writer.block(f"def backward(ctx, {', '.join([*self._tangents, *self._anchors])}):"):
            for name, slot in zip(self._tangents, self._targets, strict=True):
                if slot in errors:
                    error = writer.bind(partial(self._backward.refused, slot), "autograd_refused")
                    again = writer.bind(once_more, "once_more")
                    writer.line(f"if {name} is not None: raise {again}({error}(ctx))")
            if all(slot in errors for slot in self._targets):
                writer.line(f"return (None,) * {len(self._saved.through) + (not self._all_through)}")
                return
            self._refuse_what_has_changed(writer)
            self._leave_to_slow_backward(writer)
            self._take_arguments(writer)
            self._run_graph(writer)

    def _refuse_what_has_changed(self, writer: Writer) -> None:
        """A backward that asks for more than the program knows, or runs under another state than it was made for."""
        joint, tangents = self._joint, tuple_of(self._tangents)
        if joint.inner_results:
            refuse = writer.bind(refusing_whole_gradients(joint.inner_results), "refuse_whole_gradients")
            writer.line(f"if ctx.watched: {refuse}(ctx.watched, {tangents})")
        if not self._backward.deterministic:
            check = writer.bind(deterministic_enabled, "deterministic_algorithms_enabled")
            with writer.block(f"if {check}():"):
                writer.line(f"{writer.bind(self._backward.refuse_nondeterminism, 'refuse_nondeterminism')}()")
        if joint.tape.holds_checkpoints:
            asked = writer.bind(single_gradients_asked, "single_gradients_asked")
            refuse = writer.bind(self._backward.refuse_single_gradients, "refuse_single_gradients")
            writer.line(f"if {asked}(): {refuse}(ctx, {tangents})")
        if self._found:
            assert self._backward.state is not None
            writer.line(f"{writer.bind(self._backward.state.require_same, 'require_same')}(ctx.found)")

    def _leave_to_slow_backward(self, writer: Writer) -> None:
        """Where the backward is not just one call of its graph."""
        conditions = [*(f"{name} is None" for name in self._tangents), *(f"{a} is not None" for a in self._anchors)]
        if len(self._tangents) > 1:
            conditions.append("ctx.stash is not None")
        for function in (torch.is_grad_enabled, any_autocast_enabled, under_vmap, torch.is_anomaly_enabled):
            conditions.append(f"{writer.bind(function, function.__name__)}()")
        if self._backward.state is not None:
            conditions.append(f"not {writer.bind(self._backward.state.holds, 'state_is_as_it_was')}()")
        with writer.block(f"if {' or '.join(conditions)}:"):
            slow_backward = writer.bind(self._backward.slow_backward, "slow_backward")
            call = f"{slow_backward}(ctx, {tuple_of(self._tangents)}, {tuple_of(self._anchors)})"
            writer.line(f"return ({self._lead}*{call}, {'None, ' if self._alone else ''})")

    @property
    def _lead(self) -> str:
        """The gradient of the list of other arguments, where there is one."""
        return "" if self._all_through else "None, "

    def _take_arguments(self, writer: Writer) -> None:
        """Put tangents into the layout of the recording, and saved values into the list that the graph may empty."""
        joint, saved = self._joint, self._saved
        if joint.backward.writes:
            writer.line(f"given = {tuple_of(self._tangents)}")
        for name, (slot, value) in zip(self._tangents, joint.tape.tangents.items(), strict=True):
            if not is_wrapper(value):  # those are looked at where they are taken apart
                self._coerce(writer, name, slot, value)
        if saved.reread.checks:
            check = writer.bind(saved.require_unwritten, "require_unwritten")
            writer.line(f"if ctx.noted is not None: {check}(ctx)")
        lines = [f"graph_inputs = [{', '.join([*self._saved_arguments(writer), *self._tangents])}]"]
        if self._is_spent and not saved.live:
            lines.insert(0, "ctx.saved_tensors  # autograd refuses where they are gone")
        if not saved.tensors and not self._is_spent:  # there is nothing that autograd could refuse
            writer.line(*lines)
        else:
            with writer.block("try:"):
                for line in lines:
                    writer.line(line)
            with writer.block("except RuntimeError as error:"):
                writer.line(f"raise {writer.bind(saved.refusal, 'refusal')}(error) from None")
        if saved.tensors and not saved.keeps:
            writer.line("ctx.maybe_clear_saved_tensors()  # only the list holds them now, and the graph may empty it")
        writer.line(f"del {', '.join(self._tangents)}")

    def _saved_arguments(self, writer: Writer) -> list[str]:
        saved = self._saved
        sizes = ["*ctx.sizes"] if saved.sizes else []
        if saved.live:
            return [f"*{writer.bind(saved.values, 'saved_values')}(ctx)"]
        if not saved.tensors:
            return sizes
        if saved.keeps:
            return [*sizes, "*ctx.kept"]
        before_anchors = f"[:{len(saved.tensors)}]" if saved.anchors or saved.in_wrappers else ""
        return [*sizes, f"*ctx.saved_tensors{before_anchors}"]

    def _run_graph(self, writer: Writer) -> None:
        """Call the backward graph, and return its gradients."""
        joint = self._joint
        if joint.backward.emptied:
            writer.line(f"{writer.bind(self._backward.run_once, 'run_once')}(ctx)")
        writer.line("g = backward_graph(graph_inputs)")
        if joint.recording.session.borrowed:
            writer.line(f"{writer.bind(give_back, 'give_back')}(ctx)")
        if joint.tape.holds_checkpoints:
            only = writer.bind(self._backward.without_added, "without_added")
            writer.line(f"if single_gradients_asked(): g = {only}(g)")
        if joint.backward.writes:
            write = writer.bind(self._backward.writing.carry_out, "carry_out_writes")
            writer.line(f"{write}(ctx, g, given)")
        through, count = self._saved.through, len(joint.primals)
        if self._all_through and not joint.backward.writes and len(through) == count:
            writer.line("return tuple(g)")
            return
        gradients = PackedArgs("g", count + len(joint.backward.writes)).items()
        picked = ", ".join(spread([gradients[i] for i in through])) or "None"
        writer.line(f"return ({self._lead}{picked},)")

    def _coerce(self, writer: Writer, name: str, slot: Returned, tangent: Tensor) -> None:
        size, stride = tuple(tangent.shape), tuple(tangent.stride())
        if any(isinstance(n, SymInt) for n in (*size, *stride)):
            fix = writer.bind(plain_tangent(str(slot), size, stride), "restride")
            writer.line(f"{name} = {fix}({name})")
        else:  # the function is made where a tangent has other strides, which is rare
            fix = writer.bind(lambda given: plain_tangent(str(slot), size, stride)(given), "restride")
            plain = writer.bind(Tensor, "Tensor")
            with writer.block(f"if {name}.stride() != {stride} or type({name}) is not {plain}:"):
                writer.line(f"{name} = {fix}({name})")

    # ---------------------------------------------------------------------------------------------- call
    def write(self, writer: Writer, inputs: Sequence[Slot]) -> None:
        """The call of the operator, or of the bare forward graph where gradients are off."""
        joint = self._joint
        enabled = joint.recording.grad_enabled
        if self._guarded and enabled:
            self._apply(writer, inputs)
            return
        if self._guarded:  # the program itself switches gradients on
            set_grad = writer.bind(set_grad_enabled, "set_grad_enabled")
            writer.line(f"{set_grad}(True)")
            with writer.block("try:"), self._out_of_inference_mode(writer):
                self._apply(writer, inputs)
            with writer.block("finally:"):
                writer.line(f"{set_grad}(False)")
            return
        with writer.block(f"if {writer.bind(torch.is_grad_enabled, 'is_grad_enabled')}():"):
            self._apply(writer, inputs)
        with writer.block("else:"):
            needed = {*self._targets, *self._nondiff_args}
            names = [writer.variable(slot) if slot in needed else "_" for slot in joint.signature.returned]
            saved = len(self._saved.tensors) + len(self._saved.sizes)
            rest = ["*_"] if saved else []
            call = f"forward_graph([{', '.join(writer.listed(inputs))}])"
            write_graph_call(writer, [*names, *rest], call, self._autocast)

    def _out_of_inference_mode(self, writer: Writer) -> contextlib.AbstractContextManager[None]:
        """What can be differentiated is no inference tensor, whoever calls."""
        if not torch.is_inference_mode_enabled():
            return contextlib.nullcontext()
        return writer.block(f"with {writer.bind(torch.inference_mode, 'inference_mode')}(False):")

    def _apply(self, writer: Writer, inputs: Sequence[Slot]) -> None:
        through = writer.listed(inputs[i] for i in self._saved.through)
        results = [writer.variable(slot) for slot in self._targets] + ["_"] * len(self._anchors)
        left = ", ".join(results)
        if self._all_through:
            writer.line(f"{left} = apply({', '.join(through)})")
            self._give_own_nodes(writer)
            return
        rest = writer.listed(inputs[i] for i in self._beside)
        nondiff_args = writer.fresh("nondiff_args")
        writer.line(f"{nondiff_args} = [{', '.join(rest)}]")
        # Autograd makes a node only if some input requires grad.
        dummy_leaf = [writer.bind(torch.empty(0, requires_grad=True), "dummy_leaf")] if self._alone else []
        writer.line(f"{left} = apply({', '.join([nondiff_args, *through, *dummy_leaf])})")
        if self._nondiff_args:
            writer.take_apart([writer.variable(slot) for slot in self._nondiff_args], nondiff_args)
        self._give_own_nodes(writer)

    def _give_own_nodes(self, writer: Writer) -> None:
        """A result that retains its gradient and is written to loses it to the first result of its node: torch looks
        it up by the number that the result has in its new node."""
        retaining = {effect.of for effect in self._joint.hooks if isinstance(effect, GradRetained)}
        for slot in self._targets[1:]:
            if slot in retaining:
                name = writer.variable(slot)
                writer.line(f"{name} = {writer.bind(boundary_apply(_Result), 'with_own_node')}({name})")


class _Result(torch.autograd.Function):
    """One of several results, with a node of its own."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        return tangents
