"""A plan: what is saved, what is recomputed, and in which order both halves run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import PartitionError
from ..graph.graph import Graph
from .memory import Memory, Numbers, alive_over
from .model import Model
from .sides import complete, if_used, saved_outputs, saved_sizes


@dataclass(frozen=True)
class Plan:
    """One way to cut a joint graph.

    Args:
        model: the graph.
        kept: the nodes whose values may be saved; those that the backward does not reach are not.
        order: of the backward's own nodes; as recorded if not given.
    """

    model: Model
    kept: Collection[int]
    order: Sequence[int] | None = None

    @cached_property
    def _needs(self) -> tuple[list[int], set[int]]:
        """What crosses from forward to backward, and what of the forward the backward computes again."""
        model, kept, must_keep = self.model, self.kept, self.model.must_keep
        crossing: set[int] = set()
        again: set[int] = set()
        pending = list(model.read)
        while pending:
            i = pending.pop()
            if i in crossing or i in again:
                continue
            if i in kept or i in must_keep or model.crosses_anyway(i):
                crossing.add(i)
            elif model.banned[i] is not None:
                raise PartitionError(
                    f"{model.nodes[i].name} cannot be computed in the backward: it is {model.banned[i]}, and not saved."
                )
            else:
                again.add(i)
                pending.extend(model.inputs[i])
        return sorted(crossing), again

    @property
    def crossing(self) -> list[int]:
        """What is saved, sizes included."""
        return self._needs[0]

    @property
    def again(self) -> set[int]:
        """What the backward computes again."""
        return self._needs[1]

    @property
    def saved(self) -> list[int]:
        """Tensors that are saved."""
        return [i for i in self.crossing if not self.model.symbolic[i]]

    @cached_property
    def saved_bytes(self) -> int:
        """The memory of what is saved, beyond what the caller holds."""
        model = self.model
        return sum(model.sizes[s] for s in {s for i in self.saved for s in model.holds[i]} - model.free)

    @cached_property
    def recomputed(self) -> list[int]:
        """What runs in both halves, in order; what only the backward needs is not computed twice."""
        ran, again = set(self.forward_order), self.again
        if self.model.within_reach:  # of which the backward need not compute anything
            again = again.intersection(self.backward_order)
        return sorted(i for i in again if i in ran and not self.model.is_constant[i])

    @cached_property
    def flops(self) -> int:
        """Floating-point operations that are done twice."""
        return sum(self.model.flops[i] for i in self.recomputed)

    @cached_property
    def moved(self) -> int:
        """Bytes that are moved twice, weighed."""
        return sum(self.model.moved[i] for i in self.recomputed)

    # -------------------------------------------------------------------------------------------------- orders
    @cached_property
    def forward_order(self) -> list[int]:
        """As recorded; what the backward would have done comes right after what it reads."""
        return self._in_order(self.model.ancestors([*self.model.early, *self.crossing]))

    def _in_order(self, wanted: set[int]) -> list[int]:
        model = self.model
        if not any(model.nodes[i].backward for i in wanted):
            return sorted(i for i in wanted if i >= model.placeholders)
        place: dict[int, int] = {}
        for i in sorted(wanted):
            node = model.nodes[i]
            place[i] = max((place[item] for item in model.inputs[i]), default=0) if node.backward else i
        return sorted((i for i in wanted if i >= model.placeholders), key=lambda i: (place[i], i))

    @cached_property
    def backward_order(self) -> list[int]:
        """The backward's own nodes in their order; what is computed again comes just before its first use."""
        inputs = self.model.inputs
        operands = self._operands
        done: set[int] = set()
        order: list[int] = []
        own = self.model.late_needed if self.order is None else self.order
        for i in (*own, -1):
            wanted = inputs[i] if i >= 0 else self.model.wanted
            pending = [item for item in reversed(wanted) if item in operands and item not in done]
            while pending:
                item = pending[-1]
                missing = [x for x in operands[item] if x not in done] if item not in done else ()
                if missing:
                    pending += missing
                    continue
                pending.pop()
                if item not in done:
                    done.add(item)
                    order.append(item)
            if i >= 0:
                order.append(i)
        return order

    @cached_property
    def _operands(self) -> dict[int, list[int]]:
        """For each node that is computed again, which of its inputs are too: the first to compute comes last.

        What takes most memory on its way is computed first, while nothing else is held beside it.
        """
        model, again = self.model, self.again
        inputs, sizes = model.inputs, model.sizes
        found: dict[int, list[int]] = {}
        takes: dict[int, int] = {}  # at most, on the way
        keeps: dict[int, int] = {}  # afterwards
        for i in sorted(again):
            operands = [item for item in inputs[i] if item in again]
            if len(operands) > 1:
                operands.sort(key=lambda item: takes[item] - keeps[item])
            made = 0
            for s in model.makes[i]:
                made += sizes[s]
            most = held = 0
            for item in reversed(operands):
                most = max(most, held + takes[item])
                held += keeps[item]
            found[i] = operands
            takes[i] = max(most, held + made)
            keeps[i] = made if model.base[i] == i else (keeps[operands[0]] if operands else 0)
        return found

    # -------------------------------------------------------------------------------------------------- memory
    @cached_property
    def forward_memory(self) -> Memory:
        """Of the forward as it is emitted."""
        model = self.model
        returned = [*model.forward_results, *self.crossing]
        order = self.forward_order
        holds, makes = self._fused(order, model.holds, model.makes, returned)
        tables = model.inputs, holds, makes, model.sizes
        return alive_over(order, *tables, given=model.primals, returned=returned, free=model.pinned)

    @cached_property
    def backward_memory(self) -> Memory:
        """Of the backward as it is emitted."""
        model = self.model
        order = self.backward_order
        holds, makes, sizes = self._backward_storages()
        holds, makes = self._fused(order, holds, makes, model.backward_results)
        given = [*self.crossing, *model.tangents]
        return alive_over(
            order, model.inputs, holds, makes, sizes, given=given, returned=model.backward_results, free=model.free
        )

    def _fused(
        self, order: Sequence[int], holds: Sequence[Numbers], makes: Sequence[Numbers], returned: Sequence[int]
    ) -> tuple[Sequence[Numbers], Sequence[Numbers]]:
        """What values hold and make, where the compiler has said what it fuses."""
        fusion = self.model.fusion
        return (holds, makes) if fusion is None else fusion.applied(order, holds, makes, returned)

    def _backward_storages(self) -> tuple[Sequence[Numbers], Sequence[Numbers], Sequence[int]]:
        """What the values of the backward hold and make, and all sizes.

        A result that is computed again, or one that is saved while another of its operator is computed again, is there
        twice: the second copy is memory of its own.
        """
        model, again = self.model, self.again
        there = model.free | {s for i in self.crossing for s in model.holds[i]}
        makers = [i for i in again if not there.isdisjoint(model.makes[i])]
        if not makers:
            return model.holds, model.makes, model.sizes
        twice = sorted(there & {s for i in makers for s in model.makes[i]})
        copies = {s: len(model.sizes) + k for k, s in enumerate(twice)}
        holds, makes = list(model.holds), list(model.makes)
        for i in self.backward_order:
            if model.base[i] in again and not copies.keys().isdisjoint(holds[i]):
                holds[i] = tuple([copies.get(s, s) for s in holds[i]])
                makes[i] = tuple([copies.get(s, s) for s in makes[i]])
        return holds, makes, [*model.sizes, *(model.sizes[s] for s in twice)]

    @property
    def peak(self) -> int:
        """The most memory at any moment of a training step, beyond what the caller holds."""
        return max(self.forward_memory.peak, self.backward_memory.peak)

    # ------------------------------------------------------------------------------------------------ emission
    def emit(self) -> tuple[Graph, Graph]:
        """The two graphs."""
        model = self.model
        nodes = model.nodes
        in_forward = {nodes[i] for i in (*model.primals, *self.forward_order)}
        tensors = [nodes[i] for i in self.saved]
        tangents = [nodes[i] for i in model.tangents]
        read = [nodes[i] for i in self.crossing if model.symbolic[i]]
        in_forward |= {node for i, node in enumerate(nodes) if model.symbolic[i] and not model.late[i]}
        sizes = saved_sizes(model.joint, in_forward, read, [*tensors, *tangents])
        forward_order = self.forward_order
        if missing := {model.index[node] for node in sizes} - {*forward_order, *range(model.placeholders)}:
            forward_order = self._in_order(model.ancestors([*forward_order, *missing]))
        backward_nodes = [nodes[i] for i in self.backward_order]
        used = {item for node in backward_nodes for item in node.inputs()} | {nodes[i] for i in model.backward_results}
        random = if_used([nodes[i] for i in model.backward_random], used)
        forward = Graph(
            [nodes[i] for i in model.primals],
            [nodes[i] for i in forward_order],
            [*model.joint.forward_outputs, *saved_outputs([*tensors, *sizes])],
        )
        backward = Graph([*sizes, *tensors, *tangents, *random], backward_nodes, model.joint.backward_outputs)
        return complete(forward), complete(backward)
