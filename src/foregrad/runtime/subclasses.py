"""Wrapper subclasses at the edges of the graphs.

A graph takes and gives plain tensors. Where autograd stands around it, a function of the generated code reads the
tensors out of wrappers on the way in, and builds wrappers on the way out: everything outside of it, autograd included,
sees the wrappers. With gradients off the same lines stand in the call itself.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from ..codegen.writer import Writer, literal, tuple_of
from ..joint.build import Joint
from ..slots import Inner, RandomState, Returned, Slot, Token, belongs_to_backward
from ..subclasses.layout import Fixed, FromLeaf, Layout, Wrapped, is_wrapper, layout_of, leaves_of
from ..values import is_plain, same_value
from .call import values_needed
from .compilers import Boxed
from .tangents import expected_tangent


def _read(slot: Slot, names: dict[Any, str], writer: Writer) -> str:
    """How an inner tensor is read from the wrapper around it."""
    if isinstance(slot, Inner) and slot not in names:
        return f"{_read(slot.of, names, writer)}.{slot.attr}"
    return names.get(slot) or writer.variable(slot)


def around_forward(writer: Writer, name: str, joint: Joint) -> str:
    """Under which name to install a compiled forward that is called by `name` with wrappers."""
    plain = writer.fresh(f"plain_{name}")
    slots = [facts.recorded.slot for facts in joint.primals]
    names = {slot: f"i{n}" for n, slot in enumerate(slots)}
    with writer.block(f"def {name}(args):"):
        rest = ["*rest"] if joint.random.forward is not None else []
        if names or rest:
            writer.take_apart([*names.values(), *rest], "args")
        writer.line("args.clear()")
        leaves = [_read(slot, names, writer) for slot in _taken(joint)]
        writer.line(f"r = {plain}([{', '.join([*leaves, *rest])}])")
        needed = {*values_needed(joint), *joint.tape.targets}
        shapes = [(layout, slot in needed) for slot, layout in _returned_layouts(joint)]
        _give(writer, shapes, more=joint.is_training or bool(rest))
    writer.line()
    return plain


def _returned_layouts(joint: Joint) -> list[tuple[Returned, Layout | None]]:
    """What the forward returns, and how it is put together where it is a wrapper."""
    pairs = zip(joint.signature.returned, joint.returned_nodes, strict=True)
    return [(slot, node.layout if isinstance(node, Wrapped) else None) for slot, node in pairs]


@dataclass(frozen=True)
class InferenceEdge:
    """Wrappers around a graph that is called with gradients off, in the lines of the call."""

    joint: Joint

    def taken(self) -> list[Any]:
        """What the graph takes; the call has a variable for each."""
        return _taken(self.joint)

    def names(self, writer: Writer, needed: Container[Returned]) -> list[str]:
        """Variables for what the graph returns."""
        names: list[str] = []
        for slot, layout in _returned_layouts(self.joint):
            if slot not in needed:
                names += ["_"] * (1 if layout is None else layout.leaves)
            else:
                names += map(writer.variable, [slot] if layout is None else layout.slots(slot))
        return names

    def build(self, writer: Writer, needed: Container[Returned]) -> None:
        """Lines that put wrappers around what the graph returned."""
        for slot, layout in _returned_layouts(self.joint):
            if layout is not None and slot in needed:
                leaves = [writer.variable(leaf) for leaf in layout.slots(slot)]
                writer.line(f"{writer.variable(slot)} = {_build(writer, layout, leaves)}")


def _taken(joint: Joint) -> list[Any]:
    """The primals that the graph takes."""
    slots = [node.slot for node in joint.graph.inputs if not belongs_to_backward(node.slot)]
    return [slot for slot in slots if not isinstance(slot, (Token, RandomState))]


def around_backward(writer: Writer, name: str, joint: Joint, saved: int) -> str:
    """The same for a backward, which takes `saved` values before the tangents."""
    plain = writer.fresh(f"plain_{name}")
    tangents = [f"t{n}" for n in range(len(joint.signature.tangents))]
    with writer.block(f"def {name}(args):"):
        writer.line(f"{tuple_of(tangents)} = args[{saved}:{saved + len(tangents)}]")
        leaves: list[str] = []
        for text, (slot, tangent) in zip(tangents, joint.tape.tangents.items(), strict=True):
            if is_wrapper(tangent):
                wanted = expected_tangent(slot, tangent)
                conditions = _is_as_wanted(writer, text, layout_of(tangent), iter(wanted.strides))
                with writer.block(f"if not ({' and '.join(conditions)}):"):
                    writer.line(f"{text} = {writer.bind(wanted.fit, 'fit_tangent')}({text})")
                leaves += [_read(s, {slot: text}, writer) for s in layout_of(tangent).slots(slot)]
            else:
                leaves.append(text)
        arguments = [f"*args[:{saved}]", *leaves, f"*args[{saved + len(tangents)}:]"]
        writer.line(f"graph_inputs = [{', '.join(arguments)}]")
        writer.line("args.clear()")
        writer.line(f"del {', '.join(tangents)}")
        writer.line(f"r = {plain}(graph_inputs)")
        more = joint.backward.writes or joint.random.backward_outputs
        _give(writer, [(layout, True) for layout in joint.backward.layouts], bool(more))
    writer.line()
    return plain


def _is_as_wanted(
    writer: Writer, text: str, layout: Layout | None, strides: Iterator[tuple[int, ...] | None]
) -> Iterator[str]:
    """Conditions under which a tangent can be taken apart as it is; one with symbolic strides is always looked at."""
    if layout is None:
        stride = next(strides)
        yield f"type({text}) is {writer.bind(Tensor, 'Tensor')}"
        yield "False" if stride is None else f"{text}.stride() == {stride}"
        return
    yield f"type({text}) is {writer.bind(layout.kind, layout.kind.__name__)}"
    flat, (names, context) = writer.fresh("flat"), layout.metadata
    yield f"[*({flat} := {text}.__tensor_flatten__())[0]] == {names}"
    if context is None:
        yield f"{flat}[1] is None"
    else:
        yield f"{writer.bind(partial(same_value, context), 'same_context')}({flat}[1])"
    for attr, inner in layout.attrs:
        if not isinstance(inner, Fixed):
            yield from _is_as_wanted(writer, f"{text}.{attr}", inner, strides)


def _give(writer: Writer, shapes: Iterable[tuple[Layout | None, bool]], more: bool) -> None:
    """The return of results, some wrapped and some not looked at, and perhaps of what follows."""
    results: list[str] = []
    position = 0
    for layout, needed in shapes:
        count = 1 if layout is None else layout.leaves
        if not needed:
            results.append("None")
        elif layout is None:
            results.append(f"r[{position}]")
        else:
            results.append(_build(writer, layout, [f"r[{position + n}]" for n in range(count)]))
        position += count
    results += [f"*r[{position}:]"] if more else []
    writer.line(f"return [{', '.join(results)}]")


def _build(writer: Writer, layout: Layout, leaves: Sequence[str]) -> str:
    """The text that builds a wrapper from its leaves."""
    parts: list[str] = []
    position = 0
    for attr, inner in layout.attrs:
        if isinstance(inner, Fixed):
            parts.append(f"{attr!r}: {writer.bind(inner.value, attr)}")
            continue
        count = 1 if inner is None else inner.leaves
        own = leaves[position : position + count]
        parts.append(f"{attr!r}: {own[0] if inner is None else _build(writer, inner, own)}")
        position += count
    unflatten = writer.bind(layout.kind.__tensor_unflatten__, f"unflatten_{layout.kind.__name__}")  # type: ignore[attr-defined]
    rest = [literal(writer, layout.context), _numbers(writer, layout.size, leaves)]
    rest.append(_numbers(writer, layout.stride, leaves))
    return f"{unflatten}({{{', '.join(parts)}}}, {', '.join(rest)})"


def _numbers(writer: Writer, numbers: Sequence[Any], leaves: Sequence[str]) -> str:
    """Sizes or strides as text; symbolic ones are read from the leaves."""
    if not any(isinstance(n, FromLeaf) for n in numbers):
        return repr(numbers) if is_plain(numbers) else writer.bind(numbers, "sizes")
    return tuple_of([f"{leaves[n.leaf]}.{n.kind}({n.dim})" if isinstance(n, FromLeaf) else repr(n) for n in numbers])


@dataclass(frozen=True)
class WrapperEdge:
    """The same around backwards that the generated code does not call: for some of the tangents only."""

    saved: int
    tangents: Sequence[Tensor]  # as they were recorded
    gradients: Sequence[Layout | None]

    def around(self, run: Boxed) -> Boxed:
        """A backward of wrappers, from one of plain tensors."""

        def wrapped(args: list[Any]) -> list[Any]:
            count = len(self.tangents)
            given = args[self.saved : self.saved + count]
            leaves = [leaf for tangent in given for leaf in leaves_of(tangent)]
            results = iter(run([*args[: self.saved], *leaves, *args[self.saved + count :]]))
            gradients = [
                next(results) if layout is None else layout.build(islice(results, layout.leaves))
                for layout in self.gradients
            ]
            return [*gradients, *results]

        return wrapped
