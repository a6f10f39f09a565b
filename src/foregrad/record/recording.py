"""Record a program once.

A `Recording` is the whole of what is known about one run of the program: its inputs and what stood for them, the
operators in order, its result, and autograd's tape over the abstract tensors. The tape is kept: it is the one right
source for every backward that anybody may ask for.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .._torch import (
    AutocastState,
    FakeTensor,
    PythonNode,
    Settings,
    ambient_state_kept,
    autocast_off,
    autocast_state,
    autograd_watched,
    dynamo_aside,
    gradients_of,
    is_reentrant_checkpoint,
    module_calls_seen,
    overrides_told_as_in_eager,
    recording_autograd,
    script_calls_seen,
    shares_version_counter,
    sizes_like_numbers,
    storages_asked_first,
    without_function_modes,
)
from ..abstract.engine import Engine
from ..errors import StateChangeError, UnsupportedError
from ..graph.graph import Step
from ..ops import tensors_in
from ..slots import FreeTensor, GradOf, Inner, Input, Primal
from ..stack_traces import caller_of, is_users_code, passes_through, user_stack, where
from ..subclasses.layout import is_jagged, is_wrapper, layout_of, leaves_of, require_comparable, with_symbols
from .alias_groups import SharedMemory, in_order, root_of
from .borrowed import Borrowed
from .fakify import (
    Argument,
    FoundAttributes,
    Object,
    RecordedInput,
    fakify,
    fakify_member,
    fakify_root,
    fakify_wrapper,
)
from .hooks import BackwardGuards, BackwardState, Hooks, UserCode, has_hooks, user_code_seen
from .lift import LiftedTensors
from .pre_dispatch import AboveAutograd
from .recorder import Recorder
from .retrace import GradientBefore, Retrace
from .survivors import Beginning, References, escape_error
from .tape import accumulated, edges_from, follow_determinants, node_of, tape_edges, with_added


class Recording:
    """One run of a program on abstract tensors, with autograd's tape over it."""

    def __init__(
        self,
        engine: Engine,
        decompositions: Mapping[Any, Callable[..., Any]],
        from_nodes: bool,
        above_autograd: bool = False,
    ) -> None:
        self.engine = engine
        self.above_autograd = above_autograd
        self.beginning: Beginning | None = None  # until it is over
        self.arguments: tuple[Any, ...] = ()  # what the program was called with
        self.inputs: list[RecordedInput] = []
        self.memories: list[RecordedInput] = []  # memory that inputs share, and roots in it
        self._shared: dict[int, SharedMemory] = {}  # by id of the real tensors that look at it
        self._roots: dict[int, RecordedInput] = {}  # by id of the real root
        self.real_tensors: dict[Primal, Tensor] = {}
        self._found: dict[Primal, weakref.ref[Tensor]] = {}  # what is left of them once they are released
        self._by_identity: dict[int, RecordedInput] = {}
        self._wrappers_by_storage: dict[int, list[tuple[Tensor, Tensor]]] = {}  # those met so far, and what stands in
        self._grads_before: dict[Primal, Tensor] = {}
        self._attributes = FoundAttributes()
        self._last_nodes: list[Any] = []  # of autograd, whose edges were asked for last
        self._last_edges: list[tuple[Any, Any]] = []
        self._with_grads: set[int] = set()  # ids of real tensors whose gradients are inputs
        self.result: Any = None
        self.forward_end = 0
        self.finished = False  # the program has run to its end
        self.grad_enabled = torch.is_grad_enabled()
        self.grad_enabled_after = self.grad_enabled
        self.autocast: AutocastState = autocast_state()
        self.autocast_after: AutocastState = self.autocast
        self.emptied: frozenset[int] = frozenset()  # selective checkpoints, by the backward that was recorded last
        self.holds_checkpoints = False  # reentrant ones, on the tape
        self.backward_guards: BackwardGuards | None = None
        # Ids of arguments that the program also finds by itself, and may compare: it is given them as they are.
        self.found_elsewhere: frozenset[int] = frozenset()
        self.noting_code: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # while the user's runs
        self.backward_state: BackwardState | None = None  # of the backward that was recorded last
        kind = AboveAutograd if above_autograd else Recorder
        self.recorder = kind(engine, decompositions, from_nodes)

    @property
    def steps(self) -> list[Step]:
        """Every operator so far, forward first."""
        return self.recorder.steps

    def run(
        self,
        program: Callable[[list[Any]], Any],
        arguments: Sequence[Argument],
        state: Sequence[Argument],
        source_of: Callable[[Tensor], FreeTensor],
        shared: Sequence[SharedMemory] = (),
        early: Sequence[Tensor] = (),
        with_grads: Sequence[Tensor] = (),
    ) -> None:
        """Run the program: `state` is what it finds by itself, `arguments` is what it is called with.

        `early` are further tensors that it is known to find, in backward; `with_grads` are those whose gradients it is
        known to look at.
        """
        self._with_grads = {id(tensor) for tensor in with_grads}
        for memory in shared:
            self._adopt_memory(memory)
        lifted = LiftedTensors(
            self.recorder,
            lambda real: self._adopt(Argument(source_of(real), real)),
            self._need_grad,
            self._refuse_late_requires_grad,
        )
        self._lifted = lifted
        for argument in state:
            lifted.register(argument.value, self._adopt(argument))
        seen = [self._adopt(argument) for argument in arguments]
        for argument, value in zip(arguments, seen, strict=True):
            if isinstance(value, Tensor) and id(argument.value) not in self.found_elsewhere:
                lifted.note_argument(argument.value, value)
            elif isinstance(value, Tensor):
                lifted.register(argument.value, value)
        seen = [a.value if id(a.value) in self.found_elsewhere else s for a, s in zip(arguments, seen, strict=True)]
        for real in early:
            lifted.fake_of(real)
        settings, changed, attributes = Settings.now(), None, None
        with self._modes(lifted):
            self.recorder.generators.begin()
            try:
                with self.recorder.running(), module_calls_seen(self.recorder.calls), self.noting_code():
                    self.result = program(seen)
                self.recorder.calls.root = None  # nothing keeps the user's module alive
                self.recorder.generators.check()
                self.recorder.raise_caught()
                if self.recorder.is_used("foreign"):
                    self.recorder.foreign.require_unchanged(self.result)
            except Exception as error:
                self.recorder.raise_caught(error)
                _refuse_higher_order(error)
                raise
            finally:
                self.grad_enabled_after = torch.is_grad_enabled()
                self.autocast_after = autocast_state()
                changed = settings.restore()
                attributes = self._attributes.put_back()
        if changed is not None:
            raise StateChangeError(
                f"the program leaves another {changed} behind: a compiled call would not change it again. Set it "
                "outside the program, or compile with fallback='eager'."
            )
        if attributes is not None:
            raise attributes
        lifted.hooks.finish({id(recorded.seen) for recorded in self.inputs})
        self.require_known_grads()
        lifted.caches.finish()
        self.forward_end = len(self.steps)
        self.finished = True

    def _adopt(self, argument: Argument) -> Any:
        """An input that is the very tensor of an earlier one is seen as that one."""
        first = self._by_identity.get(id(argument.value)) if isinstance(argument.value, Tensor) else None
        if first is not None:
            recorded = first._replace(slot=argument.slot, leaf=None, same_as=first)
        else:
            memory = self._shared.get(id(argument.value))
            if is_wrapper(argument.value):
                return self._adopt_wrapper(argument)
            if memory is None:
                recorded = fakify(self.engine, argument)
            else:
                base = next(i for i in self.memories if i.slot == memory.slot)
                recorded = fakify_member(base, self._roots[id(root_of(argument.value))], argument, memory)
            self._by_identity[id(argument.value)] = recorded
        self.inputs.append(recorded)
        return self._keep(argument, recorded)

    def _adopt_wrapper(self, argument: Argument) -> Any:
        """A wrapper subclass stands before the plain tensors in it, which are inputs of their own."""
        wrapper, place = argument.value, len(self.inputs)
        layout = layout_of(wrapper)
        require_comparable(wrapper, str(argument.slot))
        for slot, tensor in zip(layout.slots(argument.slot), leaves_of(wrapper), strict=True):
            self._adopt(Argument(slot, tensor, argument.dynamic and not is_jagged(wrapper)))
        inner = [recorded for recorded in self.inputs[place:] if isinstance(recorded.slot, Inner)]
        layout = with_symbols(layout, leaves_of(wrapper), [recorded.seen for recorded in inner])
        recorded = fakify_wrapper(argument, layout, inner)
        self._relate_wrapper(wrapper, recorded.seen)
        self._by_identity[id(wrapper)] = recorded
        self.inputs.insert(place, recorded)
        return self._keep(argument, recorded)

    def _relate_wrapper(self, wrapper: Tensor, seen: Tensor) -> None:
        """Wrappers with one version counter: views, and what was detached, of one that they share their memory with."""
        for leaf in leaves_of(wrapper)[:1]:
            known = self._wrappers_by_storage.setdefault(leaf.untyped_storage()._cdata, [])
            others = [other for real, other in known if shares_version_counter(wrapper, real)]
            if others:
                self.recorder.wrappers.relate(seen, others)
            known.append((wrapper, seen))

    def _keep(self, argument: Argument, recorded: RecordedInput) -> Any:
        """Remember the real tensor of an input, and take its gradient for an input too where that is needed."""
        first = recorded.same_as
        if isinstance(argument.value, Tensor):
            if recorded.required_grad and first is None and has_hooks(argument.value):
                self._lifted.hooks.guard(recorded)
            self.real_tensors[argument.slot] = argument.value
            if recorded.layout is None and first is None:
                self._attributes.note(argument.slot, argument.value, recorded.seen)
            if id(argument.value) in self._with_grads and first is None and argument.value.grad is not None:
                if argument.value.grad.shape != argument.value.shape:
                    raise UnsupportedError(
                        f"{argument.slot} has a gradient of another shape than its own, since it was moved to other "
                        "memory: a program that reads it cannot be compiled. Set .grad to None first."
                    )
                grad = self._adopt(Argument(GradOf(argument.slot), argument.value.grad))  # type: ignore[arg-type]
                recorded.seen.grad = self._grads_before[argument.slot] = grad
        return argument.value if isinstance(recorded.seen, (Object, set, frozenset)) else recorded.seen

    def _need_grad(self, real: Tensor) -> None:
        with warnings.catch_warnings():  # that it is no leaf, and has none: the program gets that warning by itself
            warnings.simplefilter("ignore", UserWarning)
            has_grad = real.grad is not None
        if has_grad and id(real) not in self._with_grads:
            raise self.recorder.refuse(Retrace(GradientBefore(real)))

    def _refuse_late_requires_grad(self, real: Tensor, seen: Tensor) -> None:
        """A view requires grad when its base does, and the base of a view of a view is not the view.

        An input that is a view is recorded as a base, so its own views would begin to require grad with it.
        """
        if not real._is_view() or real.requires_grad:
            return
        if any(t._base is seen for step in self.steps for t in tensors_in([step.out])):
            raise UnsupportedError(
                f"requires_grad_(), at {where(user_stack(4))}, of an input that is a view, after a view of it was "
                "taken: this cannot be compiled yet. Call it first, or before the compiled program."
            )

    @property
    def hooks(self) -> Hooks:
        """What the program did with hooks."""
        return self._lifted.hooks

    @property
    def held_beside(self) -> Iterator[Tensor]:
        """What is held beside steps and inputs, once for each reference."""
        yield from self._grads_before.values()
        if hasattr(self, "_lifted"):  # it has begun
            yield from self._lifted.held

    def grad_before(self, recorded: RecordedInput) -> Tensor | None:
        """What stood for the gradient of an input before the program ran."""
        return self._grads_before.get(recorded.slot)

    def looks_at_grad(self, recorded: RecordedInput) -> bool:
        """Whether the program read or set the gradient of an input."""
        if not recorded.is_tensor or recorded.parent is not None:
            return False
        touched = id(recorded.seen) in self._lifted.grads_looked_at
        return touched or (recorded.seen.is_leaf and recorded.seen.grad is not None)

    @property
    def attends(self) -> bool:
        """Whether a kernel for attention was chosen while recording."""
        return self._lifted.attends

    def properties_read(self, recorded: RecordedInput) -> set[str]:
        """Properties of an input, beside what is always compared, that the program read and found empty."""
        return self._lifted.properties_read.get(id(recorded.seen), set())

    def moves_uncounted(self, recorded: RecordedInput) -> bool:
        """Whether an input was moved to other memory by `.data =`, which does not count as a write."""
        return id(recorded.seen) in self._lifted.data_assigned

    def made_to_require_grad(self, tensor: Tensor) -> bool:
        """Whether the program called `requires_grad_()` on a tensor, and did not take it back."""
        return id(tensor) in self._lifted.made_to_require_grad and tensor.requires_grad

    def require_known_grads(self) -> None:
        """A gradient that the program has added to, or replaced, must have been there when it started."""
        for recorded in self.inputs:
            is_member = recorded.parent is not None and bool(recorded.views)
            if not recorded.was_leaf or recorded.same_as is not None or is_member:
                continue
            if recorded.seen.is_leaf and recorded.seen.grad is not None:
                real = self.real_tensors.get(recorded.slot)
                if real is not None and not isinstance(real, FakeTensor) and real.is_leaf:
                    self._need_grad(real)

    def _adopt_memory(self, memory: SharedMemory) -> None:
        """Memory that inputs share is seen before the inputs are."""
        base = fakify(self.engine, Argument(memory.slot, memory.base))
        self.memories.append(base)
        for alias_group in memory.families:
            root = base if alias_group.is_memory else fakify_root(base, alias_group)
            if root is not base:
                self.memories.append(root)
            self._roots[id(alias_group.root)] = root
        self._shared.update((id(member), memory) for member in memory.members)

    @property
    def all_inputs(self) -> list[RecordedInput]:
        """Shared memory, then everything else in the order in which the graph takes it: plain tensors, and values."""
        plain = [i for i in self.inputs if i.layout is None]
        if not self.memories:
            return plain
        order = in_order([(i.slot, self.real_tensors.get(i.slot, i.seen)) for i in plain])
        by_slot = {i.slot: i for i in self.inputs}
        return [*self.memories, *(by_slot[slot] for slot in order)]

    def release_arguments(self) -> None:
        """Let go of the tensors that the program was recorded on; a compiled program holds no data of its own."""
        self._found = {s: weakref.ref(t) for s, t in self.real_tensors.items() if not isinstance(s, Input)}
        self.real_tensors.clear()
        self._by_identity.clear()
        self._shared.clear()
        self._lifted.release_arguments()

    @property
    def borrowed(self) -> Borrowed:
        """The user's objects that were taken off the tape."""
        return self._lifted.borrowed

    def return_borrowed(self, is_users: Callable[[Any], bool]) -> None:
        """Take the user's own objects off the tape, so that they need not live as long as the program."""
        nodes = []
        if self._lifted.applies_functions:
            ends = [node_of(tensor) for step in self.steps for tensor in tensors_in([step.out])]
            starts = list(dict.fromkeys(node for node in ends if node is not None))
            every = dict.fromkeys([*starts, *(node for _, node in edges_from(list(starts)))])
            nodes = [node for node in every if isinstance(node, PythonNode)]
        self.borrowed.take(is_users, nodes)

    def abandon(self) -> None:
        """Take apart a recording that nobody needs: its parts lead to each other, and to the user's objects."""
        self.recorder.forget_refusal()
        self.real_tensors.clear()  # which the joint graph has as well
        if hasattr(self, "_lifted"):  # it has begun
            vars(self._lifted).clear()
        vars(self).clear()

    def _real(self, slot: Primal) -> Tensor | None:
        """The real tensor that the program found, if it is still there."""
        found = self._found.get(slot)
        return self.real_tensors.get(slot) if found is None else found()

    @contextlib.contextmanager
    def _modes(self, lifted: LiftedTensors) -> Iterator[None]:
        with ambient_state_kept(), contextlib.ExitStack() as symbols:
            if self.engine.symbolic:
                for context in sizes_like_numbers(is_users_code):
                    symbols.enter_context(context)
            try:
                with (
                    recording_autograd(),
                    script_calls_seen,
                    storages_asked_first,
                    self.engine.withheld.while_running(),
                    dynamo_aside(),
                    autograd_watched(lifted),
                    lifted,
                    overrides_told_as_in_eager(),
                    self.recorder,
                ):
                    yield
            finally:
                self.recorder.generators.restore()

    def adopt_results(self, results: Sequence[Any]) -> None:
        """Tensors that the program found and passed through unused are inputs like any other."""
        for value in results:
            if isinstance(value, Tensor):
                self.seen(value)
        self.forward_end = len(self.steps)

    def seen(self, tensor: Tensor) -> Tensor:
        """The abstract tensor for a tensor of the result: itself, or the twin of a real one that was passed through."""
        return tensor if self.engine.is_abstract(tensor) else self._lifted.fake_of(tensor)

    def differentiate(
        self,
        targets: Sequence[Tensor],
        tangents: Sequence[Tensor],
        autocast: bool,
        others: Sequence[Tensor] = (),
        create_graph: bool = False,
    ) -> tuple[dict[Primal, Tensor | None], list[Tensor | None]]:
        """Record a backward behind the forward, and refuse to have it put a tensor where it outlives the recording."""
        if self.beginning is None or not self._may_run_user_code(targets):  # autograd itself puts nothing anywhere
            with self.borrowed.put_back():
                return self._differentiate(targets, tangents, autocast, others, create_graph)
        references = References(self)
        references.results = self._differentiate(targets, tangents, autocast, others, create_graph)
        survivors = self.beginning.survivors(references.suspects)
        if survivors:
            raise escape_error(survivors[0], self)
        return references.results

    def _differentiate(
        self,
        targets: Sequence[Tensor],
        tangents: Sequence[Tensor],
        autocast: bool,
        others: Sequence[Tensor] = (),
        create_graph: bool = False,
    ) -> tuple[dict[Primal, Tensor | None], list[Tensor | None]]:
        """Record a backward behind the forward: a gradient, or None, for each input that has one, and for the others.

        With `autocast` it is recorded under the autocast state of the caller, otherwise without any: what counts in
        eager is the state in which backward is called, not that of the forward. With `create_graph` it can be
        differentiated itself.

        A custom function that was applied to a real parameter has its edge to the real tensor and not to the twin:
        gradients are taken for both, and added.
        """
        self.recorder.backward = True
        self._lifted.caches.refill()
        self._lifted.found_in_backward.clear()
        self.recorder.forget_refusal()
        if self.recorder.is_used("objects"):
            self.recorder.objects.rewind(self.steps)
        self.recorder.watch_gradient_sums(self._edges(targets))
        differentiable = self.differentiable_inputs
        leaves = [i.differentiated for i in differentiable if i.differentiated is not None]
        lifted: dict[Primal, Tensor] = {}
        for i in differentiable:
            real = None if isinstance(i.slot, Input) else self._real(i.slot)
            if real is not None and real.requires_grad:  # the user may have frozen it since the forward
                lifted[i.slot] = real
        hidden = [i for i in differentiable if i.slot in lifted]
        casts = contextlib.nullcontext() if autocast else autocast_off()
        watched = self._watching_code() if self._may_run_user_code(targets) else contextlib.nullcontext()
        with self._modes(self._lifted), torch.set_grad_enabled(create_graph), casts, watched as code:
            self.recorder.generators.resume()
            wanted = [*leaves, *others, *lifted.values()]
            pairs = [(t, g) for t, g in zip(targets, tangents, strict=True) if not _refuse_dead_end(t, g)]
            ends, given = [target for target, _ in pairs], [tangent for _, tangent in pairs]
            # Leaves of the program's own get gradients too: what eager runs on the way to them is run, or refused.
            nodes = [*(t.grad_fn for t in ends), *(node for _, node in self._edges(ends))]
            if create_graph:
                follow_determinants(nodes)
            everything = wanted + self._other_leaves(nodes, wanted)
            reentrant = any(map(is_reentrant_checkpoint, nodes))
            self.holds_checkpoints |= reentrant
            add_up = accumulated if reentrant else with_added
            found = add_up(self.engine, ends, given, everything, create_graph) if ends else [None] * len(everything)
            by_slot = dict(zip((i.slot for i in differentiable), found, strict=False))
            beside = list(found[len(leaves) : len(leaves) + len(others)])
            for item, extra in zip(hidden, found[len(leaves) + len(others) :], strict=False):
                if extra is not None:
                    known = by_slot[item.slot]
                    by_slot[item.slot] = extra if known is None else known + extra
        self.recorder.raise_caught()
        if self.recorder.is_used("foreign"):
            self.recorder.foreign.require_unchanged(None)
        self.backward_state = None if code is None else self._state_read_by(code)
        self.emptied = self._lifted.caches.emptied()
        return by_slot, beside

    @contextlib.contextmanager
    def _watching_code(self) -> Iterator[UserCode]:
        """Collects the user's code that runs; what it changes is put back, and refused."""
        with without_function_modes():  # to ask a tensor for its hash would count as finding it
            before = None if self.backward_guards is None else self.backward_guards.before()
        error = None
        try:
            with self.noting_code(), user_code_seen() as code:  # which passes on what it sees
                yield code
        finally:
            with without_function_modes():
                error = None if before is None else before.undo(self)
        if error is not None:
            raise error

    def _may_run_user_code(self, targets: Sequence[Tensor]) -> bool:
        """Whether a backward may call functions of the user's."""
        subclasses = self.recorder.is_used("wrappers") and self.recorder.wrappers.runs_user_code
        if subclasses or self._lifted.hooks.inside or self._lifted.reaches_into_tape:
            return True
        nodes = [*(target.grad_fn for target in targets), *(node for _, node in self._edges(targets))]
        return any(isinstance(node, PythonNode) for node in nodes)

    def _state_read_by(self, code: UserCode) -> BackwardState | None:
        found = self._lifted.found_in_backward
        code.tensors = {
            i.slot: real
            for i in self.inputs
            if id(i.seen) in found and i.same_as is None and (real := self._real(i.slot)) is not None
        }
        return None if self.backward_guards is None else self.backward_guards.read_by(code)

    def _edges(self, targets: Sequence[Tensor]) -> list[tuple[Any, Any]]:
        """The edges of the tape behind targets; of those that were asked for last they are known."""
        nodes = [target.grad_fn for target in targets]
        if nodes != self._last_nodes:
            self._last_nodes, self._last_edges = nodes, list(tape_edges(targets))
        return self._last_edges

    @property
    def differentiable_inputs(self) -> list[RecordedInput]:
        """Inputs that gradients are taken for."""
        return [i for i in (*self.memories, *self.inputs) if i.differentiated is not None]

    def reached_inputs(self, targets: Sequence[Tensor]) -> set[Primal]:
        """Inputs that autograd has an edge to from some of the targets, whether or not a gradient comes out there."""
        return self._inputs_at(self._edges(targets))

    def inputs_behind_checkpoints(self, targets: Sequence[Tensor]) -> set[Primal]:
        """Inputs that autograd reaches through a reentrant checkpoint."""
        nodes = [*(target.grad_fn for target in targets), *(node for _, node in self._edges(targets))]
        return self._inputs_at(edges_from([node for node in nodes if is_reentrant_checkpoint(node)]))

    def _inputs_at(self, edges: Iterable[tuple[Any, Any]]) -> set[Primal]:
        ends = {id(v) for _, node in edges if (v := getattr(node, "variable", None)) is not None}
        return {
            i.slot for i in self.differentiable_inputs if id(i.differentiated) in ends or id(self._real(i.slot)) in ends
        }

    def _other_leaves(self, nodes: Sequence[Any], known: Sequence[Tensor]) -> list[Tensor]:
        """Leaves on the tape that are no inputs: the program made them."""
        ids = {id(tensor) for tensor in known}
        found = {id(v): v for node in nodes if (v := getattr(node, "variable", None)) is not None}
        return [variable for key, variable in found.items() if key not in ids and variable.requires_grad]

    def leads_to_own_leaves(self, targets: Sequence[Tensor]) -> bool:
        """Whether a backward from these targets reaches leaves that the program itself has made."""
        inputs = [i.differentiated for i in self.differentiable_inputs if i.differentiated is not None]
        return bool(self._other_leaves([node for _, node in self._edges(targets)], inputs))

    def depend_on(self, targets: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
        """Whether any target is differentiable with respect to a leaf that the program made."""
        wanted = {id(leaf) for leaf in leaves}
        return bool(wanted) and any(id(getattr(node, "variable", None)) in wanted for _, node in tape_edges(targets))


def _refuse_higher_order(error: Exception) -> None:
    """Say which operator of the program had a part of it traced by torch itself, where that has failed."""
    refusal = "the higher-order operator {} cannot be compiled yet."
    if type(error).__module__.startswith("torch._dynamo"):
        raise UnsupportedError(refusal.format(caller_of(error, "torch._dynamo"))) from error
    if isinstance(error, RuntimeError) and passes_through(error, "torch.jit._trace"):
        raise UnsupportedError(
            f"TorchScript cannot trace recorded tensors: {caller_of(error, 'torch.jit._trace')} this cannot be "
            "compiled yet. Trace before the program, or compile with fallback='eager'."
        ) from error
    if isinstance(error, AssertionError) and passes_through(error, "torch._higher_order_ops"):
        # Without its cause: frames of that hold tensors without data, and tools may print what frames hold.
        raise UnsupportedError(refusal.format(caller_of(error, "torch._higher_order_ops"))) from None


def _refuse_dead_end(target: Tensor, tangent: Tensor) -> bool:
    """Whether a target leads to no leaf.

    Eager's `backward()` runs it all the same and may fail there, while its `autograd.grad()` does not run it.
    """
    if _leads_to_a_leaf(target):
        return False
    try:
        gradients_of([target], [tangent], (), False)
    except RuntimeError as error:
        raise UnsupportedError(
            f"a result requires grad and leads to no input, and its backward fails, which cannot be compiled: {error}"
        ) from error
    return True


def _leads_to_a_leaf(target: Tensor) -> bool:
    if target.grad_fn is None:
        return True
    return any(hasattr(node, "variable") for _, node in tape_edges([target]))
