"""Python code straight from the flat graph: one line for each operator, and values dropped after their last use.

`torch.fx` writes code that a person can read, and Python takes long to compile it. While nobody has looked at a graph
there is nobody to read its code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from .ir import Node, get_constant, nodes_in

_LITERALS = frozenset({int, bool, type(None), str})


def compile_flat(
    placeholders: Sequence[Node], nodes: Sequence[Node], outputs: Sequence[Any], constants: dict[int, str]
) -> Callable[..., Any]:
    """A function of the module that holds the constants, by these names, and of the placeholders."""
    dropped = _last_uses(placeholders, nodes, outputs)
    prefix = "_"
    while any(node.name.startswith(prefix) for node in (*placeholders, *nodes)):
        prefix += "_"
    known: dict[int, str] = {}
    namespace: dict[str, Any] = {}

    def outside(value: Any) -> str:
        """The name of a function or another object that is no literal."""
        name = known.get(id(value))
        if name is None:
            name = known[id(value)] = f"{prefix}{len(known)}"
            namespace[name] = value
        return name

    def text(value: Any) -> str:
        kind = value.__class__
        if kind is Node:
            name: str = value.name
            return name
        if kind in _LITERALS:
            return repr(value)
        if kind is list:
            return f"[{','.join([text(item) for item in value])}]"
        if kind is tuple:
            return f"({''.join([text(item) + ',' for item in value])})"
        return outside(value)

    lines = [f"def forward({','.join([f'{prefix}self', *(node.name for node in placeholders)])}):"]
    for node, gone in zip(nodes, dropped, strict=True):
        if node.op is operator.getitem:
            call = f"{text(node.args[0])}[{text(node.args[1])}]"
        elif node.op is get_constant:
            call = f"{prefix}self.{constants[id(node)]}"
        else:
            given = [text(item) for item in node.args]
            given += [f"{name}={text(item)}" for name, item in node.kwargs.items()]
            call = f"{outside(node.op)}({','.join(given)})"
        lines.append(f" {node.name}={call};{gone}=None" if gone else f" {node.name}={call}")
    lines.append(f" return {text(tuple(outputs))}")
    exec(compile("\n".join(lines), "<flat graph>", "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    return function


def _last_uses(placeholders: Sequence[Node], nodes: Sequence[Node], outputs: Sequence[Any]) -> list[str]:
    """For each node, the values that nobody reads after it, joined by `=`."""
    needed = set(map(id, nodes_in(outputs)))
    dropped = []
    for node in reversed(nodes):
        gone = [] if id(node) in needed else [node.name]
        for item in node.inputs():
            if id(item) not in needed:
                needed.add(id(item))
                gone.append(item.name)
        dropped.append("=".join(gone))
    dropped.reverse()
    return dropped
