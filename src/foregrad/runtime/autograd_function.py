"""The innermost part of a call in training: the graphs as one differentiable operator, all that autograd sees."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from functools import partial

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
from ..codegen.writer import FEW, PackedArgs, Value, Writer, pack_if_many, spread, tuple_of
from ..graph.graph import Node
from ..joint.build import Joint
from ..joint.outputs import Differentiable, Plain
from ..ops import aten
from ..record.refusals import once_more
from ..slots import Base, Output, Primal, Returned, Updated
from ..subclasses.layout import Wrapped, is_wrapper
from .backward import Backward
from .call import gives_geometry, repeated_results, values_needed, write_graph_call
from .saved_tensors import anchor, anchor_of_any, give_back, is_view
from .stages import refusing_whole_gradients
from .tangents import plain_tangent


class TrainingCore:
    """One differentiable operator: its forward runs the forward graph, its backward the backward graph."""

    def __init__(self, joint: Joint, backward: Backward, guarded: bool, autocast: bool) -> None:
        self._joint = joint
        self._saved = backward.saved
        self._live = backward.saved.live
        self._backward = backward
        self._guarded = guarded
        self._autocast = autocast
        self._through = backward.saved.through
        self._anchors = backward.saved.anchors
        self._alone = not self._through  # the outputs require grad, but no input gets any
        through = set(self._through)
        self._beside = [i for i in range(len(joint.primals)) if i not in through]
        self._tangents = [tangent.of for tangent in joint.signature.tangents]
        tracked = set(self._tangents)
        self._nondiff_args = [slot for slot in values_needed(joint) if slot not in tracked]
        slots = [facts.recorded.slot for facts in joint.primals]
        state = backward.state
        self._found = [] if state is None else [slots.index(slot) for slot in state.tensors if slot in slots]

    def define(self, writer: Writer) -> None:
        """The class of the operator."""
        writer.bind(torch.autograd.Function, "Function")
        with writer.block("class Program(Function):"):
            writer.line("@staticmethod")
            self._forward(writer)
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
    def _all_through(self) -> bool:
        return not self._beside and not self._nondiff_args and not self._alone

    def _forward(self, writer: Writer) -> None:
        joint = self._joint
        returned = {slot: f"o{n}" for n, slot in enumerate(joint.signature.returned)}
        parameters, through = pack_if_many("i", "through", len(self._through))
        rest, beside = pack_if_many("j", "nondiff_args", len(self._beside))
        places = dict(zip((*self._through, *self._beside), (*through, *beside), strict=True))
        inputs = [places[i] for i in range(len(joint.primals))]
        names = [str(value) for value in inputs]
        dummy_leaf = ["spark"] if self._alone else []
        head = ", ".join(["ctx", *(() if self._all_through() else ("nondiff_args",)), *parameters, *dummy_leaf])
        with writer.block(f"def forward({head}):"):
            if 0 < len(self._beside) <= FEW:  # many are read where they are
                writer.take_apart(rest, "nondiff_args")
            kept, saved = pack_if_many("s", "saved", len(self._saved.tensors))
            sizes = [f"n{n}" for n in range(len(self._saved.sizes))]
            used = {*self._tangents, *self._nondiff_args}
            heads = [returned[slot] if slot in used else "_" for slot in joint.signature.returned]
            call = f"forward_graph([{', '.join(spread(inputs))}])"
            write_graph_call(writer, [*heads, *kept, *sizes], call, self._autocast)
            self._note_versions(writer, names)
            self._count_changes(writer, names)
            anchors = [f"a{n}" for n in range(len(self._anchors))]
            for name, edge in zip(anchors, self._anchors, strict=True):
                is_plain = isinstance(joint.primal_nodes[self._through[edge]], Node)
                make = writer.bind(anchor if is_plain else anchor_of_any, "anchor")
                writer.line(f"{name} = {make}({through[edge]})")
            wrappers = [names[n] for n in self._saved.wrapped_inputs]
            wrappers += [returned[slot] for slot in self._saved.wrapped_results]
            self._save(writer, names, saved, sizes, [*anchors, *wrappers])
            if self._found:
                writer.line(f"ctx.found = {tuple_of([names[n] for n in self._found])}")
            if joint.recording.session.borrowed:
                borrowed = joint.recording.session.borrowed
                writer.line(f"ctx.borrowed = {writer.bind(borrowed.for_results, 'borrowed')}()")
                writer.line(f"ctx.checkpointed = {writer.bind(borrowed.for_backward, 'checkpointed')}()")
            writer.line("ctx.set_materialize_grads(False)")
            if joint.backward_errors:
                writer.line(f"ctx.hooked = {writer.bind(saved_hooks_are_on, 'saved_hooks_are_on')}()")
            if not self._all_through():
                writer.line(f"nondiff_args[:] = [{', '.join(self._nondiff_values(returned))}]")
            results = [self._differentiable(writer, slot, returned[slot]) for slot in self._tangents]
            writer.line(f"return {', '.join([*results, *anchors])}")

    def _note_versions(self, writer: Writer, names: list[str]) -> None:
        """Before anything else changes them: how they will be is known."""
        reread = self._saved.reread
        if reread.again or reread.updated:
            again, updated = (tuple_of([names[n] for n in places]) for places in (reread.again, reread.updated))
            writer.line(f"ctx.noted = {writer.bind(self._saved.noted, 'noted')}({again}, {updated})")

    def _count_changes(self, writer: Writer, names: list[str]) -> None:
        """Autograd notes the versions of what is saved: what is done to an input behind the graph counts already."""
        for name, facts in zip(names, self._joint.primals, strict=True):
            change = self._saved.counted.get(facts.recorded.slot)
            if change:
                writer.line(f"{writer.bind(set_version, 'set_version')}({name}, {name}._version + {change})")

    def _save(
        self, writer: Writer, inputs: list[str], tensors: Sequence[Value], sizes: list[str], anchors: list[str]
    ) -> None:
        """All saved tensors go through autograd's own store: version checks, hooks and freeing work as in eager."""
        primals = zip(self._joint.primal_nodes, self._joint.primals, strict=True)
        moving = {node.name for node, facts in primals if facts.recorded.slot in self._saved.counted}  # type: ignore[union-attr]
        if self._joint.backward_writes:
            places = {facts.recorded.slot: name for name, facts in zip(inputs, self._joint.primals, strict=True)}
            held = [places.get(write.of, "None") for write in self._joint.backward_writes]  # type: ignore[arg-type]
            writer.line(f"ctx.live = {tuple_of(held)}")
        nodes = enumerate(self._saved.tensors)
        apart = {i for i, node in nodes if i not in self._live and (is_view(node) or node.name in moving)}
        if len(apart) > FEW:
            indices = writer.bind(tuple(sorted(apart)), "views")
            writer.line(f"for i in {indices}: saved[i] = saved[i].detach()")
            apart = set()
        self._detach_results(writer, {i: v for i, v in enumerate(tensors) if i not in apart and i not in self._live})
        values = [f"{v}.detach()" if i in apart else v for i, v in enumerate(tensors) if i not in self._live]
        detached = spread(values)
        if self._saved.keeps:
            writer.line(f"ctx.kept = {tuple_of(detached)}")
            detached = []
        elif not detached and not anchors and self._is_spent:
            with torch.inference_mode(False):
                detached = [writer.bind(torch.empty(0), "nothing")]
        if detached or anchors:
            writer.line(f"ctx.save_for_backward({', '.join([*detached, *anchors])})")
        if sizes:
            writer.line(f"ctx.sizes = {tuple_of(sizes)}")

    def _detach_results(self, writer: Writer, tensors: dict[int, Value]) -> None:
        """Hooks get what is saved as in eager, detached: a result that a hook keeps would keep its own node alive."""
        returned = {node.name for node in self._joint.returned_nodes if isinstance(node, Node)}
        results = [str(value) for i, value in tensors.items() if self._saved.tensors[i].name in returned]
        if results:
            with writer.block(f"if {writer.bind(saved_hooks_are_on, 'saved_hooks_are_on')}():"):
                for value in results:
                    writer.line(f"{value} = {value}.detach()")

    @property
    def _is_spent(self) -> bool:
        """Whether eager would refuse a second backward although nothing is saved here: a tensor of no size tells."""
        return not self._saved.tensors and self._joint.tape.frees_anything

    def _differentiable(self, writer: Writer, slot: Returned, name: str) -> str:
        """Autograd must not take a result for a view of something inside the graph.

        It lets nobody write to views that an operator of the user's makes, such as this one: what it is to lock is one.
        """
        if self._is_locked(slot):
            return f"{writer.bind(aten.alias.default, 'alias')}({name})"
        return f"{name}.detach()" if self._is_view(slot) or isinstance(slot, Updated) else name

    def _nondiff_values(self, returned: dict[Returned, str]) -> list[str]:
        """A result that autograd does not track must be a tensor of its own beside one that it does."""
        alike = repeated_results(self._joint)
        node = dict(zip(self._joint.signature.returned, self._joint.returned_nodes, strict=True))
        tracked = {id(node[slot]) for slot in self._tangents}
        results = self._joint.outputs.results
        shapes = {Output(i) for i, result in enumerate(results) if gives_geometry(result)}
        apart = [s in alike or s in shapes or id(node[s]) in tracked or self._is_view(s) for s in self._nondiff_args]
        return [f"{returned[s]}.detach()" if a else returned[s] for s, a in zip(self._nondiff_args, apart, strict=True)]

    def _is_view(self, slot: Returned) -> bool:
        if isinstance(slot, Base):
            node = self._joint.returned_nodes[self._joint.signature.returned.index(slot)]
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
        joint = self._joint
        tangents = [f"t{n}" for n in range(len(self._tangents))]
        anchors = [f"a{n}" for n in range(len(self._anchors))]
        with writer.block(f"def backward(ctx, {', '.join([*tangents, *anchors])}):"):
            for name, slot in zip(tangents, self._tangents, strict=True):
                if slot in joint.backward_errors:
                    error = writer.bind(partial(self._backward.refused, slot), "autograd_refused")
                    again = writer.bind(once_more, "once_more")
                    writer.line(f"if {name} is not None: raise {again}({error}(ctx))")
            if all(slot in joint.backward_errors for slot in self._tangents):
                writer.line(f"return (None,) * {len(self._through) + (not self._all_through())}")
                return
            if joint.inner_results:
                refuse = writer.bind(refusing_whole_gradients(joint.inner_results), "refuse_whole_gradients")
                writer.line(f"if ctx.watched: {refuse}(ctx.watched, {tuple_of(tangents)})")
            lead = "" if self._all_through() else "None, "
            gradients = PackedArgs("g", len(joint.primals) + len(joint.backward_writes)).items()
            picked = ", ".join(spread([gradients[i] for i in self._through])) or "None"
            if not self._backward.deterministic:
                check = writer.bind(deterministic_enabled, "deterministic_algorithms_enabled")
                with writer.block(f"if {check}():"):
                    writer.line(f"{writer.bind(self._backward.refuse_nondeterminism, 'refuse_nondeterminism')}()")
            if joint.tape.holds_checkpoints:
                asked = writer.bind(single_gradients_asked, "single_gradients_asked")
                refuse = writer.bind(self._backward.refuse_single_gradients, "refuse_single_gradients")
                writer.line(f"if {asked}(): {refuse}(ctx, {tuple_of(tangents)})")
            if self._found:
                assert self._backward.state is not None
                writer.line(f"{writer.bind(self._backward.state.require_same, 'require_same')}(ctx.found)")
            with writer.block(f"if {' or '.join(self._unusual(writer, tangents, anchors))}:"):
                slow_backward = writer.bind(self._backward.slow_backward, "slow_backward")
                dummy_leaf = "None, " if self._alone else ""
                writer.line(
                    f"return ({lead}*{slow_backward}(ctx, {tuple_of(tangents)}, {tuple_of(anchors)}), {dummy_leaf})"
                )
            if joint.backward_writes:
                writer.line(f"given = {tuple_of(tangents)}")
            for name, (slot, value) in zip(tangents, joint.tape.tangents.items(), strict=True):
                if not is_wrapper(value):  # those are looked at where they are taken apart
                    self._coerce(writer, name, slot, value)
            self._take_saved(writer, tangents)
            if self._saved.tensors and not self._saved.keeps:
                writer.line(
                    "ctx.maybe_clear_saved_tensors()  # only the list holds them now, and the graph may empty it"
                )
            writer.line(f"del {', '.join(tangents)}")
            if joint.emptied:
                writer.line(f"{writer.bind(self._backward.run_once, 'run_once')}(ctx)")
            writer.line("g = backward_graph(graph_inputs)")
            if joint.recording.session.borrowed:
                writer.line(f"{writer.bind(give_back, 'give_back')}(ctx)")
            if joint.tape.holds_checkpoints:
                only = writer.bind(self._backward.without_added, "without_added")
                writer.line(f"if single_gradients_asked(): g = {only}(g)")
            if joint.backward_writes:
                write = writer.bind(self._backward.writing.carry_out, "carry_out_writes")
                writer.line(f"{write}(ctx, g, given)")
            whole = self._all_through() and not joint.backward_writes and len(self._through) == len(joint.primals)
            writer.line("return tuple(g)" if whole else f"return ({lead}{picked},)")

    def _unusual(self, writer: Writer, tangents: list[str], anchors: list[str]) -> Iterator[str]:
        """When the backward is not just one call of its graph."""
        yield from (f"{name} is None" for name in tangents)
        yield from (f"{name} is not None" for name in anchors)
        if len(tangents) > 1:
            yield "ctx.stash is not None"
        for function in (torch.is_grad_enabled, any_autocast_enabled, under_vmap, torch.is_anomaly_enabled):
            yield f"{writer.bind(function, function.__name__)}()"
        if self._backward.state is not None:
            yield f"not {writer.bind(self._backward.state.holds, 'state_is_as_it_was')}()"

    def _take_saved(self, writer: Writer, tangents: list[str]) -> None:
        lines = [f"graph_inputs = [{', '.join([*self._saved_values(writer), *tangents])}]"]
        if self._is_spent and not self._live:
            lines.insert(0, "ctx.saved_tensors  # autograd refuses where they are gone")
        if self._saved.reread.checks:
            check = writer.bind(self._saved.require_unwritten, "require_unwritten")
            writer.line(f"if ctx.noted is not None: {check}(ctx)")
        if not self._saved.tensors and not self._is_spent:  # there is nothing that autograd could refuse
            writer.line(*lines)
            return
        with writer.block("try:"):
            for line in lines:
                writer.line(line)
        with writer.block("except RuntimeError as error:"):
            writer.line(f"raise {writer.bind(self._saved.refusal, 'refusal')}(error) from None")

    def _saved_values(self, writer: Writer) -> list[str]:
        sizes = ["*ctx.sizes"] if self._saved.sizes else []
        if self._live:
            return [f"*{writer.bind(self._saved.values, 'saved_values')}(ctx)"]
        if not self._saved.tensors:
            return sizes
        if self._saved.keeps:
            return [*sizes, "*ctx.kept"]
        behind = f"[:{len(self._saved.tensors)}]" if self._anchors or self._saved.in_wrappers else ""
        return [*sizes, f"*ctx.saved_tensors{behind}"]

    def _coerce(self, writer: Writer, name: str, slot: Returned, tangent: Tensor) -> None:
        size, stride = tuple(tangent.shape), tuple(tangent.stride())
        fix = writer.bind(plain_tangent(str(slot), size, stride), "restride")
        if any(isinstance(n, SymInt) for n in (*size, *stride)):
            writer.line(f"{name} = {fix}({name})")
        else:
            plain = writer.bind(Tensor, "Tensor")
            with writer.block(f"if {name}.stride() != {stride} or type({name}) is not {plain}:"):
                writer.line(f"{name} = {fix}({name})")

    # ---------------------------------------------------------------------------------------------- call
    def write(self, writer: Writer, inputs: Sequence[Primal]) -> None:
        """The call of the operator, or of the bare forward graph where nobody asks for gradients."""
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
            needed = {*self._tangents, *self._nondiff_args}
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

    def _apply(self, writer: Writer, inputs: Sequence[Primal]) -> None:
        through = writer.listed(inputs[i] for i in self._through)
        results = [writer.variable(slot) for slot in self._tangents] + ["_"] * len(self._anchors)
        left = ", ".join(results)
        if self._all_through():
            writer.line(f"{left} = apply({', '.join(through)})")
            return
        rest = writer.listed(inputs[i] for i in self._beside)
        nondiff_args = writer.fresh("nondiff_args")
        writer.line(f"{nondiff_args} = [{', '.join(rest)}]")
        # Autograd makes a node only if some input requires grad.
        dummy_leaf = [writer.bind(torch.empty(0, requires_grad=True), "spark")] if self._alone else []
        writer.line(f"{left} = apply({', '.join([nondiff_args, *through, *dummy_leaf])})")
        if self._nondiff_args:
            writer.take_apart([writer.variable(slot) for slot in self._nondiff_args], nondiff_args)
