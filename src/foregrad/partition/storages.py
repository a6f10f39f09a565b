"""Which memory the value of each node keeps alive: a view holds what it looks at, an operator makes memory anew."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .._torch import OpOverload
from ..joint.ir import Node, get_constant
from ..ops import Kind, op_info
from .costs import bytes_of

Numbers = tuple[int, ...]


class Storages:
    """Storages are numbered as they are made.

    Args:
        nodes: in their order, placeholders first.
        inputs: for each, the numbers of the nodes that it reads.
        given: memory that placeholders hold, by their numbers, and its sizes, where it is known from elsewhere.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        inputs: Sequence[Numbers],
        given: Mapping[int, Numbers] | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self.sizes = list(sizes)
        self.holds: list[Numbers] = []  # what a node's value keeps alive
        self.makes: list[Numbers] = []  # what of it is new
        self.base: list[int] = []  # whose value a view looks at; a node itself if it is none
        elements: dict[int, tuple[Numbers, ...]] = {}
        for i, node in enumerate(nodes):
            base, op = i, node.op
            made: Numbers = ()
            if given is not None and i in given:
                held = given[i]
            elif op is operator.getitem and inputs[i]:
                container = inputs[i][0]
                known, index = elements.get(container), node.args[1]
                held = known[index] if known is not None and index.__class__ is int else self.holds[container]
                if self.base[container] != container:
                    base = self.base[container]
            elif op.__class__ is OpOverload and inputs[i] and _looks_at_argument(op, node):
                source = inputs[i][0]
                base, held = self.base[source], self.holds[source]
                if isinstance(node.value, (tuple, list)):
                    elements[i] = (held,) * len(node.value)
            elif op is get_constant:
                held = ()
            elif isinstance(node.value, (tuple, list)):
                elements[i] = tuple(self._new(item) for item in node.value)
                made = held = tuple([s for element in elements[i] for s in element])
            else:
                made = held = self._new(node.value)
            self.holds.append(held)
            self.makes.append(made)
            self.base.append(base)

    def _new(self, value: Any) -> Numbers:
        if isinstance(value, Tensor):
            self.sizes.append(bytes_of(value))
            return (len(self.sizes) - 1,)
        if isinstance(value, (tuple, list)):
            return tuple([s for item in value for s in self._new(item)])
        return ()


def _looks_at_argument(op: OpOverload, node: Node) -> bool:
    info = op_info(op)
    return info.kind is Kind.VIEW or (bool(info.written) and node.impure)
