"""Double backward, to any order: a backward that was recorded to be differentiated runs as one operator of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import boundary_apply, deterministic_enabled, garbage_collection_paused
from ..errors import UnsupportedError
from ..joint.lazy import placeholders_of, value_of
from ..joint.tape import Order
from ..options import AOTConfig
from .backward import Backward, Edges, anchor
from .compilers import compile_graph, example_values
from .partitioning import partitioned
from .saved import saved_between
from .tokens import count_tokens, unlift_first_tokens, unlift_last_tokens, without_first_tokens


class RunningOrder:
    """An order, compiled: gradients from saved values and tangents, and the backward of these gradients."""

    def __init__(self, order: Order, lower_gradients: int, through: Sequence[int], config: AOTConfig) -> None:
        """`through` are the gradients of the lower order that autograd has edges for."""
        forward, backward = _graphs(order, config)
        values = [value_of(node) for node in placeholders_of(forward)]
        examples = example_values(order.tape.recording.engine, values)
        with garbage_collection_paused():
            compiled, _ = compile_graph(config.bw_compiler, forward, examples, "backward", config)
        tokens = count_tokens(forward)
        self._forward = without_first_tokens(compiled, tokens)
        tangents = range(lower_gradients, order.tape.gradients)
        edges = Edges((*tangents, *through), anchors=tuple(range(len(tangents) + len(through))))
        self.saved = saved_between(forward, tokens + len(order.results))
        self.backward = Backward(
            order.tape, backward, self.saved, edges, config, deterministic_enabled(), refused=order.refused
        )
        self._order = order
        self._lower_gradients = lower_gradients
        tracked = {slot.index for slot in order.tape.targets}  # type: ignore[union-attr]
        self._is_tracked = [position in tracked for position in order.results]

    def gradients(
        self, values: Sequence[Any], tangents: Sequence[Tensor | None], links: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Gradients of the lower order; those that require grad in eager do so here."""
        order = self._order
        if any(values[i] is None for i in order.saved):
            raise UnsupportedError(
                "gradients that are differentiated need a value that an earlier backward through another output has "
                "freed. Call that one with retain_graph=True."
            )
        arguments = [*(values[i] for i in order.saved), *(tangents[i] for i in order.tangents)]
        if any(self._is_tracked):
            through = [*(t for t in tangents if t is not None and t.requires_grad), *links]
            box: list[Any] = [arguments]
            found = iter(_apply(self, box, *through))
            plain = iter(box)
            results: list[Tensor] = [next(found) if tracked else next(plain) for tracked in self._is_tracked]
        else:
            with torch.no_grad():
                results = [g.detach() for g in self._forward(arguments)[: len(order.results)]]
        by_position = dict(zip(order.results, results, strict=True))
        return [by_position.get(i) for i in range(self._lower_gradients)]

    def run(self, ctx: Any, box: list[Any], through: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The forward of the operator: results that autograd does not track are left in the box."""
        outputs = list(self._forward(box.pop()))
        count, tensors = len(self._is_tracked), len(self.saved.tensors)
        results, saved, sizes = outputs[:count], outputs[count : count + tensors], outputs[count + tensors :]
        anchors = [anchor(tensor) for tensor in through]
        ctx.save_for_backward(*(value.detach() for value in saved), *anchors)
        ctx.sizes, ctx.order, ctx.stash = sizes, self, None
        box[:] = [g.detach() for g, tracked in zip(results, self._is_tracked, strict=True) if not tracked]
        return (*(g.detach() for g, tracked in zip(results, self._is_tracked, strict=True) if tracked), *anchors)


def _graphs(order: Order, config: AOTConfig) -> tuple[fx.GraphModule, fx.GraphModule]:
    ends = len(order.part.outputs) - order.tokens - len(order.results)
    forward, backward = partitioned(order.part, order.tokens + len(order.results), ends, config, higher=True)
    if config.options.unlift_effect_tokens:
        unlift_first_tokens(forward, order.tokens)
        unlift_last_tokens(backward, count_tokens(backward))
    return forward, backward


class Gradients(torch.autograd.Function):
    """The gradients of a compiled program, as autograd sees them."""

    @staticmethod
    def forward(ctx: Any, order: RunningOrder, box: list[Any], *through: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return order.run(ctx, box, through)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        backward = ctx.order.backward
        if deterministic_enabled() and not backward.deterministic:
            backward.refuse_nondeterminism()
        count = len(tangents) - len(backward.edges.anchors)
        return None, None, *backward.rare(ctx, tangents[:count], tangents[count:])


_apply = boundary_apply(Gradients)
