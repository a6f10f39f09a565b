"""Gradients that are differentiated themselves: which orders there are above a backward, and which of them serves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._torch import any_autocast_enabled, autocast_off, autocast_state, under_vmap, will_run
from ..errors import UnsupportedError
from ..joint.orders import next_order
from ..joint.tape import Tape
from ..locks import Lock
from ..options import AOTConfig
from .saved import SavedValue
from .store import Store, run_once

if TYPE_CHECKING:
    from .running_order import RunningOrder


class Orders:
    """The orders right above a backward, each made when it is first asked for."""

    def __init__(
        self, tape: Tape, store: Store, recorded_tangents: Sequence[Tensor], config: AOTConfig, lock: Lock
    ) -> None:
        self._tape = tape
        self._store = store
        self._recorded_tangents = recorded_tangents
        self._config = config
        self._lock = lock  # of all who ask the tape
        self._running: dict[Any, list[RunningOrder]] = {}

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
        for slot in self._store.edges.made_late:
            raise UnsupportedError(
                f"the program makes {slot} require grad after it has computed with it: a gradient of a gradient, which "
                "eager then has for it, cannot be compiled yet. Call requires_grad_() before, or outside."
            )
        edges = self._store.edges.through
        nodes = [node for node, _ in ctx.next_functions[: len(edges)]]
        wanted = [False] * self._tape.gradients
        for position, node in zip(edges, nodes, strict=True):
            wanted[position] = node is not None and will_run(node)
        links = self._store.links(ctx, nodes, values, wrappers)
        running = self._for(tangents, wanted, [link is not None for link in links])
        run_once(ctx, running.emptied)
        with autocast_off():
            return running.gradients(values, tangents, [link for link in links if link is not None], wrappers)

    def _for(
        self, tangents: Sequence[Tensor | None], wanted: Sequence[bool], is_linked: Sequence[bool]
    ) -> RunningOrder:
        """The order for these tangents, those gradients, and the edges that lead somewhere."""
        mask = tuple(t is not None for t in tangents)
        with_grad = tuple(t.requires_grad for t in tangents if t is not None)
        autocast = autocast_state() if any_autocast_enabled() else None
        key = mask, with_grad, tuple(wanted), tuple(is_linked), autocast
        with self._lock:
            known = self._running.setdefault(key, [])
            running = next((running for running in known if running.state is None or running.state.holds()), None)
            if running is None:
                from .running_order import RunningOrder  # which has a backward, and so orders, of its own

                store = self._store
                order = next_order(self._tape, self._tape.chosen(mask), with_grad, wanted, store.saved.names)
                through = tuple(p for p, linked in zip(store.edges.through, is_linked, strict=True) if linked)
                running = RunningOrder(
                    order, self._tape.gradients, self._recorded_tangents, store.in_wrappers, through, self._config
                )
                del known[: -self._config.options.max_specializations]
                known.append(running)
        return running
