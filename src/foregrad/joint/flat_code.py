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
    dropped = _last_uses(nodes, outputs)
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
        lines.append(f" {node.name}={call}" + (f";{'='.join([item.name for item in gone])}=None" if gone else ""))
    lines.append(f" return {text(tuple(outputs))}")
    exec(compile("\n".join(lines), "<flat graph>", "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    return function


def run_flat(
    module: Any,
    placeholders: Sequence[Node],
    nodes: Sequence[Node],
    outputs: Sequence[Any],
    constants: dict[int, str],
    args: Sequence[Any],
) -> tuple[Any, ...]:
    """Run the graph without any code: for the few calls that would not repay compiling it."""
    env: dict[int, Any] = dict(zip(map(id, placeholders), args, strict=True))
    for node, gone in zip(nodes, _last_uses(nodes, outputs), strict=True):
        op = node.op
        if op is get_constant:
            result = getattr(module, constants[id(node)])
        else:
            assert op is not None
            given = [_value(env, item) for item in node.args]
            named = {name: _value(env, item) for name, item in node.kwargs.items()} if node.kwargs else {}
            result = op(*given, **named)
            del given, named
        env[id(node)] = result
        del result
        for item in gone:
            del env[id(item)]
    return tuple([_value(env, item) for item in outputs])


def _value(env: dict[int, Any], item: Any) -> Any:
    """What an argument of a node is now. (A function inside of another that calls itself would keep `env` alive.)"""
    kind = item.__class__
    if kind is Node:
        return env[id(item)]
    if kind is list or kind is tuple:
        return kind([_value(env, x) for x in item])
    return item


def _last_uses(nodes: Sequence[Node], outputs: Sequence[Any]) -> list[list[Node]]:
    """For each node, the values that nobody reads after it."""
    needed = set(map(id, nodes_in(outputs)))
    dropped = []
    for node in reversed(nodes):
        gone = [] if id(node) in needed else [node]
        for item in node.inputs():
            if id(item) not in needed:
                needed.add(id(item))
                gone.append(item)
        dropped.append(gone)
    dropped.reverse()
    return dropped
