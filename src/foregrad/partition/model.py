"""A joint graph as the partitioners see it: numbered nodes, the storages that their values hold, what each costs."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor

from ..errors import PartitionError
from ..graph.graph import Graph, Node, get_constant, nodes_in
from .costs import flops_of, weight_of
from .fusion import Fusion, lowered
from .memory import Storages
from .rules import MARKED, is_marked_for_recomputation, mark_of, why_not_again
from .sides import saved_for_higher_orders, split_inputs

NOWHERE = 1000
"""A distance from which a limit on distances says nothing."""


class Model:
    """Nodes are numbered in their order, placeholders first; a storage has a number too.

    Args:
        joint: the graph.
        keeps_sides: leave the backward's own operators there, though the forward could save what they make of its
            values: a backward of the backward can then compute all that autograd saves.
        farthest: what is further away from the backward than this, in operators, is not computed again.
    """

    def __init__(self, joint: Graph, keeps_sides: bool = False, farthest: int | None = None) -> None:
        self.joint = joint
        self.keeps_sides = keeps_sides
        self.nodes: list[Node] = [*joint.inputs, *joint.nodes]
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.placeholders = len(joint.inputs)
        index = self.index
        self.forward_results = self.numbers(value for _, value in joint.forward_outputs)
        self.backward_results = self.numbers(value for _, value in joint.backward_outputs)
        self.inputs: list[tuple[int, ...]] = [
            tuple(dict.fromkeys([index[item] for item in node.inputs()])) for node in self.nodes
        ]
        self.users: list[list[int]] = [[] for _ in self.nodes]
        for i, inputs in enumerate(self.inputs):
            for item in inputs:
                self.users[item].append(i)
        self.primals, self.tangents, self.backward_random = map(self.numbers, split_inputs(joint))
        self.is_constant = [node.op is get_constant for node in self.nodes]
        self.symbolic = [isinstance(node.value, (SymInt, SymFloat, SymBool)) for node in self.nodes]
        self._find_storages()
        self._find_sides()
        self._find_reads()
        self._find_costs(farthest)
        self.relevant: Any = None  # what a cut decides about, once it is asked for

    def numbers(self, values: Iterable[Any]) -> list[int]:
        """The numbers of the nodes among values."""
        return [self.index[node] for node in nodes_in(values)]

    # ------------------------------------------------------------------------------------------------ storages
    def _find_storages(self) -> None:
        found = Storages(self.nodes, self.inputs)
        self.sizes, self.holds, self.makes, self.base = found.sizes, found.holds, found.makes, found.base
        self.lowered = [lowered(node) for node in self.nodes]
        self.fusion = Fusion(self.lowered, self.inputs, self.base) if any(self.lowered) else None
        self.pinned = {s for i in self.primals for s in self.holds[i]}  # the caller holds them in any case
        self.returned = {s for i in self.forward_results for s in self.holds[i]}
        self.free = self.pinned | self.returned

    def bytes(self, i: int) -> int:
        """The memory that a node's value keeps alive, beyond what the caller holds anyway."""
        return sum(self.sizes[s] for s in self.holds[i] if s not in self.pinned)

    # --------------------------------------------------------------------------------------------------- sides
    def _find_sides(self) -> None:
        """`early`: must run in the forward. `late`: cannot run there."""
        nodes, operators = self.nodes, range(self.placeholders, len(self.nodes))
        written = {s for node in self.joint.overwritten for s in self.holds[self.index[node]]}
        self.reads_written = [
            bool(written) and any(s in written for item in inputs for s in self.holds[item]) for inputs in self.inputs
        ]
        self.early = self.ancestors(
            [*self.forward_results, *(i for i in operators if nodes[i].impure and not nodes[i].backward)]
        )
        self.late = self._cannot_run_in_forward()
        for i in self.early:
            if self.late[i]:
                raise PartitionError(
                    f"An output of the forward was invalid, but is output: {nodes[i].name} belongs to the backward."
                )

    def _find_reads(self) -> None:
        """`read`: what the backward reads of the forward. `late_needed`: its own operators."""
        nodes, operators = self.nodes, range(self.placeholders, len(self.nodes))
        self.wanted = [*self.backward_results, *(i for i in operators if nodes[i].impure and nodes[i].backward)]
        self.late_needed = sorted(i for i in self.ancestors(self.wanted) if self.late[i] and i >= self.placeholders)
        used = {*self.wanted, *(item for i in self.late_needed for item in self.inputs[i])}
        read = {i for i in used if not self.late[i]}
        more = {self.index[node] for node in saved_for_higher_orders(self.joint, {nodes[i] for i in read})}
        self.within_reach = {i for i in more if not self.late[i]} - read
        self.read = read | self.within_reach

    def _cannot_run_in_forward(self) -> list[bool]:
        """For each node, whether the backward alone can run it, or is meant to."""
        marked = [mark_of(node) is not None for node in self.nodes]
        given = {*self.tangents, *self.backward_random}
        late = [i in given for i in range(self.placeholders)]
        for i in range(self.placeholders, len(self.nodes)):
            node, inputs = self.nodes[i], self.inputs[i]
            # What the backward would compute from a marked value is not saved in its place.
            marked[i] = marked[i] or any(marked[item] for item in inputs)
            stays = self.keeps_sides or node.impure or node.recomputed or marked[i]
            meant = (stays and self._is_backwards_own(i)) or (self.reads_written[i] and node.backward)
            late.append((meant and i not in self.early) or any(late[item] for item in inputs))  # a read needs it early
        return late

    def _is_backwards_own(self, i: int) -> bool:
        """Whether the backward recorded a node, and not just took a result of another one, or a size."""
        node = self.nodes[i]
        return node.backward and node.op is not operator.getitem and not self.symbolic[i] and not self.is_constant[i]

    def ancestors(self, wanted: Iterable[int]) -> set[int]:
        """What nodes are computed from, themselves included."""
        found: set[int] = set()
        pending = list(wanted)
        while pending:
            i = pending.pop()
            if i not in found:
                found.add(i)
                pending.extend(self.inputs[i])
        return found

    # --------------------------------------------------------------------------------------------------- costs
    def _find_costs(self, farthest: int | None) -> None:
        """`flops` and `moved`: what it costs to compute a node. `banned`: why it must not be computed again.

        `flops_again` and `moved_again` are what it costs if the backward computes it: nothing more, where the forward's
        own results do not need it.
        """
        count = len(self.nodes)
        self.flops = [0] * count
        self.moved = [0] * count
        self.banned: list[str | None] = ["an input"] * self.placeholders + [None] * (count - self.placeholders)
        self.marked = [False] * count
        for i in range(self.placeholders, count):
            if not self.late[i]:
                self._find_cost(i)
        self.flops_again = [flops if i in self.early else 0 for i, flops in enumerate(self.flops)]
        self.moved_again = [moved if i in self.early else 0 for i, moved in enumerate(self.moved)]
        self._spread_marks()
        direct = {self.base[i] for i in self.read}
        self.savable = [
            self.can_be_saved(i)
            and not self.marked[i]
            and not self.late[i]
            and (i in direct or not any(s in self.returned for s in self.holds[i]))
            for i in range(count)
        ]
        if farthest is not None:
            self._ban_far_nodes(farthest)
        self._find_what_must_be_kept()

    def _find_cost(self, i: int) -> None:
        node = self.nodes[i]
        self.banned[i] = (
            "written by the backward" if node in self.joint.overwritten else why_not_again(node, self.reads_written[i])
        )
        if is_marked_for_recomputation(node):
            if self.banned[i] is not None:
                raise PartitionError(
                    f"{node.name} is marked to be recomputed, but it must be saved: it is {self.banned[i]}."
                )
            self.marked[i] = True
        made = sum(self.sizes[s] for s in self.makes[i])
        if self.lowered[i] is None:
            self.flops[i] = flops_of(node.op, node.args, node.value)
            read = sum(self.sizes[s] for item in self.inputs[i] for s in self.holds[item])
            self.moved[i] = weight_of(node.op) * (made + read)
        else:  # the compiler has said that it reads what is memory, and writes at most its result
            there = [item for item in self.inputs[i] if self.lowered[self.base[item]] != "inlined"]
            read = sum(self.sizes[s] for item in there for s in self.holds[item])
            self.moved[i] = read + (made if self.lowered[i] == "loops" else 0)

    def _spread_marks(self) -> None:
        """What is marked to be saved: with a node its elements, and with a view what it looks at."""
        for i in range(self.placeholders, len(self.nodes)):
            if self.nodes[i].op is operator.getitem and self.inputs[i] and self.banned[self.inputs[i][0]] == MARKED:
                self.banned[i] = MARKED
        for i in range(self.placeholders, len(self.nodes)):
            base = self.base[i]
            if base != i and self.banned[i] == MARKED:
                self.banned[i] = None
                if base >= self.placeholders and self.banned[base] is None:
                    self.banned[base], self.marked[base] = MARKED, False

    def _find_what_must_be_kept(self) -> None:
        """`must_keep`: what can only be saved, if the backward needs it."""
        lost = [False] * len(self.nodes)  # can neither be computed again nor be saved
        self.must_keep: set[int] = set()
        for i in range(self.placeholders, len(self.nodes)):
            if self.late[i] or not (self.banned[i] is not None or any(lost[item] for item in self.inputs[i])):
                continue
            if self.savable[i]:
                self.must_keep.add(i)
            else:
                lost[i] = not self.crosses_anyway(i)

    def _ban_far_nodes(self, farthest: int) -> None:
        """What is so many steps away from the backward is saved, if it is needed (torch's `max_dist_from_bw`)."""
        distance = [NOWHERE] * len(self.nodes)
        for i in range(len(self.nodes) - 1, self.placeholders - 1, -1):
            distance[i] = 0 if self.late[i] else 1 + min((distance[user] for user in self.users[i]), default=NOWHERE)
            if farthest < distance[i] < NOWHERE and i in self.early and self.savable[i] and self.banned[i] is None:
                self.banned[i] = "further from the backward than max_dist_from_bw"

    def crosses_anyway(self, i: int) -> bool:
        """Whether the backward is given a value for nothing: an input, a size, a view of an input that is written.

        Autograd checks the version of such a view. What the backward writes to is the caller's, as the forward left it.
        """
        if i < self.placeholders or self.symbolic[i] or self.nodes[i] in self.joint.overwritten:
            return True
        return self.banned[i] is not None and self.base[i] < self.placeholders

    def can_be_saved(self, i: int) -> bool:
        """Whether a node's value is a tensor of its own."""
        return self.base[i] == i and isinstance(self.nodes[i].value, Tensor) and self.nodes[i].op is not get_constant
