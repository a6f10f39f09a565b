"""What a backward of the backward needs of the forward beside what the backward itself reads."""

from __future__ import annotations

import operator

from ..joint.graph import Part
from ..joint.ir import Node
from ..ops import SAVED_FOR_HIGHER_ORDERS


def saved_for_higher_orders(joint: Part, read: set[Node]) -> set[Node]:
    """What a backward of the backward may read beside, of operators of which the backward reads something."""
    elements: dict[Node, list[Node]] = {node: [] for node in joint.nodes if node.op in SAVED_FOR_HIGHER_ORDERS}
    if not elements:
        return set()
    for node in joint.nodes:
        if node.op is operator.getitem and node.args[0] in elements:
            elements[node.args[0]].append(node)
    found: set[Node] = set()
    for node, items in elements.items():
        if any(item in read for item in items):
            arguments, results = SAVED_FOR_HIGHER_ORDERS[node.op]
            found.update(item for item in items if item.args[1] in results)
            found.update(node.args[i] for i in arguments)
    return found
