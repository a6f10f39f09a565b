"""Double backward, to any order: a backward that was recorded to be differentiated runs as one operator of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .._torch import (
    any_autocast_enabled,
    autocast_off,
    autocast_state,
    boundary_apply,
    deterministic_enabled,
    garbage_collection_paused,
    under_vmap,
    will_run,
)
from ..errors import UnsupportedError
from ..graph.graph import Graph
from ..joint.double_backward import HigherOrderGraph, next_order
from ..locks import Lock
from ..options import AOTConfig
from ..slots import Inner, Output, Saved, Size, Slot, Token, outermost
from ..subclasses.layout import is_wrapper, leaves_of
from .backward import Backward
from .compilers import compile_graph, example_values, partitioned
from .effect_tokens import count_tokens, unlift_tokens, without_first_tokens
from .saved_tensors import SavedTensors, SavedValue, anchor_of_any, run_once, saved_origin


class CompiledOrder:
    """An order, compiled: gradients from saved values and tangents, and the backward of these gradients."""

    def __init__(
        self,
        order: HigherOrderGraph,
        lower_gradients: int,
        tangents: Sequence[Tensor],
        wrappers: Sequence[frozenset[int]],
        through: Sequence[int],
        config: AOTConfig,
    ) -> None:
        """Of the lower order: how many gradients it gives, its tangents as they were recorded, which of its saved
        values lie in each wrapper subclass that it saved, and the gradients that autograd has edges for."""
        forward, backward = partitioned(order.graph, config, higher=True)
        if config.options.unlift_effect_tokens:
            forward, backward = unlift_tokens(forward), unlift_tokens(backward)
        values = [node.shown_value for node in forward.graph.inputs]
        examples = example_values(order.tape.session.engine, values)
        with garbage_collection_paused():
            compiled, _ = compile_graph(config.bw_compiler, forward, examples, "backward", config)
        self._forward = without_first_tokens(compiled, count_tokens(forward.graph))
        leaves = range(lower_gradients, order.tape.gradients)
        self._tensors, self._sizes = ([node for _, node in forward.graph.outputs_of(kind)] for kind in (Saved, Size))
        self._returned = len(forward.graph.outputs_of(Output))
        self._order = order
        self._lower_gradients = lower_gradients
        self._tangents = [len(leaves_of(tangent)) for tangent in tangents]
        tracked = {slot.index for slot in order.tape.targets}
        self._is_tracked = [position in tracked for position in order.results]
        inside = self._values_in_wrappers(forward.graph, wrappers, list(map(is_wrapper, tangents)))
        self._wrappers = [place for place, positions in inside.items() if positions]
        saved = SavedTensors(
            config.name,
            order.tape,
            backward.graph,
            self._tensors,
            self._sizes,
            through=(*leaves, *through),
            anchors=range(len(leaves) + len(through)),
            in_wrappers=[positions for positions in inside.values() if positions],
        )
        self.backward = Backward(saved, backward, order.backward, config, Orders)
        self.state, self.emptied = order.state, order.emptied

    def _values_in_wrappers(
        self, forward: Graph, wrappers: Sequence[frozenset[int]], is_wrapped: Sequence[bool]
    ) -> dict[tuple[str, int], frozenset[int]]:
        """Which of the values that are saved here lie in a wrapper subclass: a saved one, a tangent, or a result.

        A write to a wrapper does not count for what is inside, so that the wrapper is saved as well.
        """
        order = self._order
        taken = [node.name for node in forward.inputs if not isinstance(node.slot, Token)]
        saved = dict(zip(order.saved, taken, strict=False))
        leaves = dict(zip(order.tangents, taken[len(order.saved) :], strict=False))
        inside: dict[tuple[str, int], set[str]] = {}
        for i, positions in enumerate(wrappers):
            inside["saved", i] = {saved[p] for p in positions if p in saved}
        start = 0
        for i, count in enumerate(self._tangents):
            inside["tangent", i] = {leaves[n] for n in range(start, start + count) if is_wrapped[i] and n in leaves}
            start += count
        for i, position in enumerate(order.results):
            leaves_in = [node.name for slot, node in forward.outputs_of(Output) if _is_inside(slot, position)]
            inside["result", i] = set(leaves_in) if self._is_tracked[i] else set()
        origins = [saved_origin(node).name for node in self._tensors]
        first = len(self._sizes)
        return {
            place: frozenset(first + n for n, name in enumerate(origins) if name in names)
            for place, names in inside.items()
        }

    def gradients(
        self,
        values: Sequence[Any],
        tangents: Sequence[Tensor | None],
        links: Sequence[Tensor],
        wrappers: Sequence[Any],
    ) -> list[Tensor | None]:
        """Gradients of the lower order; those that require grad in eager do so here."""
        order = self._order
        if any(values[i] is None for i in order.saved):
            raise UnsupportedError(
                "gradients that are differentiated need a value that an earlier backward through another output has "
                "freed. Call that one with retain_graph=True."
            )
        given: list[Any] = []
        for tangent, count in zip(tangents, self._tangents, strict=True):
            given += [None] * count if tangent is None else leaves_of(tangent)
        arguments = [*(values[i] for i in order.saved), *(given[i] for i in order.tangents)]
        if any(self._is_tracked):
            through = [*(t for t in tangents if t is not None and t.requires_grad), *links]
            box: list[Any] = [arguments, {"saved": wrappers, "tangent": tangents}]
            found = iter(_apply(self, box, *through))
            plain = iter(box)
            results: list[Tensor] = [next(found) if tracked else next(plain) for tracked in self._is_tracked]
        else:
            with torch.no_grad():
                results = self._results(self._forward(arguments))
        by_position = dict(zip(order.results, results, strict=True))
        return [by_position.get(i) for i in range(self._lower_gradients)]

    def _results(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The gradients, from what the graph returned: tensors of their own."""
        leaves = iter(outputs)
        return [
            next(leaves).detach() if layout is None else layout.build(islice(leaves, layout.leaves))
            for layout in self._order.layouts
        ]

    def run(self, ctx: Any, box: list[Any], through: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The forward of the operator: results that autograd does not track are left in the box."""
        arguments, held = box
        box.clear()
        outputs = list(self._forward(arguments))
        results = self._results(outputs)
        count, tensors = self._returned, len(self._tensors)
        saved, sizes = outputs[count : count + tensors], outputs[count + tensors :]
        anchors = [anchor_of_any(tensor) for tensor in through]
        held["result"] = results
        wrappers = [held[kind][i] for kind, i in self._wrappers]
        ctx.save_for_backward(*(value.detach() for value in saved), *anchors, *wrappers)
        ctx.sizes, ctx.order, ctx.stash, ctx.emptied = sizes, self, None, self.emptied
        box[:] = [g for g, tracked in zip(results, self._is_tracked, strict=True) if not tracked]
        return (*(g for g, tracked in zip(results, self._is_tracked, strict=True) if tracked), *anchors)


def _is_inside(slot: Slot, result: int) -> bool:
    """Whether something that the graph returns lies in a result that is a wrapper subclass."""
    return isinstance(slot, Inner) and outermost(slot) == Output(result)


class Gradients(torch.autograd.Function):
    """The gradients of a compiled program, as autograd sees them."""

    @staticmethod
    def forward(ctx: Any, order: CompiledOrder, box: list[Any], *through: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return order.run(ctx, box, through)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        backward = ctx.order.backward
        if deterministic_enabled() and not backward.deterministic:
            backward.refuse_nondeterminism()
        count = len(tangents) - len(backward.saved.anchors)
        return None, None, *backward.slow_backward(ctx, tangents[:count], tangents[count:])


_apply = boundary_apply(Gradients)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients that are differentiated themselves: which orders there are above a backward, and which of them serves.
class Orders:
    """The orders right above a backward, each made when it is first asked for."""

    def __init__(self, saved: SavedTensors, config: AOTConfig, lock: Lock) -> None:
        self._tape = saved.tape
        self._saved = saved
        self._recorded_tangents = list(saved.tape.tangents.values())
        self._config = config
        self._lock = lock  # of all who ask the tape
        self._running: dict[Any, list[CompiledOrder]] = {}

    def described(self, order: int) -> list[SavedValue]:
        """What is saved for those that were asked for so far, and for the orders above them."""
        every = itertools.chain.from_iterable(self._running.values())
        return [value for running in every for value in running.backward.described(order)]

    def gradients(
        self, ctx: Any, values: Sequence[Any], wrappers: Sequence[Any], tangents: Sequence[Tensor | None]
    ) -> Sequence[Any]:
        """Gradients that can be differentiated themselves, from what was saved and the tangents."""
        if under_vmap():
            raise UnsupportedError(
                "a batched backward with create_graph=True through a compiled program is not supported yet. Call the "
                "original function inside vmap, or compute the gradients one after another."
            )
        for slot in self._saved.made_late:
            raise UnsupportedError(
                f"the program makes {slot} require grad after it has computed with it: a gradient of a gradient, which "
                "eager then has for it, cannot be compiled yet. Call requires_grad_() before, or outside."
            )
        edges = self._saved.through
        nodes = [node for node, _ in ctx.next_functions[: len(edges)]]
        wanted = [False] * self._tape.gradients
        for position, node in zip(edges, nodes, strict=True):
            wanted[position] = node is not None and will_run(node)
        links = self._saved.links(ctx, nodes, values, wrappers)
        running = self._for(tangents, wanted, [link is not None for link in links])
        run_once(ctx, running.emptied)
        with autocast_off():
            return running.gradients(values, tangents, [link for link in links if link is not None], wrappers)

    def _for(
        self, tangents: Sequence[Tensor | None], wanted: Sequence[bool], is_linked: Sequence[bool]
    ) -> CompiledOrder:
        """The order for these tangents, those gradients, and the edges that lead somewhere."""
        mask = tuple(t is not None for t in tangents)
        with_grad = tuple(t.requires_grad for t in tangents if t is not None)
        autocast = autocast_state() if any_autocast_enabled() else None
        key = mask, with_grad, tuple(wanted), tuple(is_linked), autocast
        with self._lock:
            known = self._running.setdefault(key, [])
            running = next((running for running in known if running.state is None or running.state.holds()), None)
            if running is None:
                saved = self._saved
                order = next_order(self._tape, self._tape.chosen(mask), with_grad, wanted, saved.names)
                through = [p for p, linked in zip(saved.through, is_linked, strict=True) if linked]
                running = CompiledOrder(
                    order, self._tape.gradients, self._recorded_tangents, saved.in_wrappers, through, self._config
                )
                del known[: -self._config.options.max_specializations]
                known.append(running)
        return running
