"""Wrapper subclasses at the edges of the graphs.

A graph takes and gives plain tensors. Right around it stands a function of the generated code that reads the tensors
out of wrappers on the way in, and builds wrappers on the way out. Everything outside of it, autograd included, sees the
wrappers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import SymInt, Tensor

from ..joint.build import Joint
from ..slots import Inner, Returned, Slot
from ..subclasses.layout import Fixed, FromLeaf, Layout, Wrapped, is_wrapper, layout_of, leaves_of
from ..subclasses.tangents import ExpectedTangent
from ..values import is_plain
from .backward import restride
from .boundary import values_needed
from .compilers import Boxed
from .writer import Writer, tuple_of


def has_wrappers(joint: Joint) -> bool:
    """Whether any wrapper takes part in a program."""
    values = (*joint.primal_nodes, *joint.returned_nodes)
    return any(isinstance(value, Wrapped) for value in values) or any(joint.grad_layouts) or joint.tape.has_wrappers


def _read(slot: Slot, names: dict[Any, str], writer: Writer) -> str:
    """How an inner tensor is read from the wrapper around it."""
    if isinstance(slot, Inner):
        return f"{_read(slot.of, names, writer)}.{slot.attr}"
    return names.get(slot) or writer.variable(slot)


def around_forward(writer: Writer, name: str, joint: Joint) -> str:
    """Under which name to install a compiled forward that is called by `name` with wrappers."""
    if not has_wrappers(joint):
        return name
    plain = writer.fresh(f"plain_{name}")
    slots = [facts.recorded.slot for facts in joint.primals]
    names = {slot: f"i{n}" for n, slot in enumerate(slots)}
    start = len(joint.signature.tokens)
    taken = [node.slot for node in joint.part.placeholders[start : start + _taken(joint)]]
    with writer.block(f"def {name}(args):"):
        rest = ["*rest"] if joint.random.forward is not None else []
        if names or rest:
            writer.line(f"{', '.join([*names.values(), *rest])}, = args")
        writer.line("args.clear()")
        leaves = [_read(slot, names, writer) for slot in taken if slot is not None]
        writer.line(f"r = {plain}([{', '.join([*leaves, *rest])}])")
        needed = {*values_needed(joint), *joint.tape.targets}
        wrapped = zip(joint.signature.returned, joint.returned_nodes, strict=True)
        shapes = [(node.layout if isinstance(node, Wrapped) else None, slot in needed) for slot, node in wrapped]
        _give(writer, shapes, more=joint.is_training or bool(rest))
    writer.line()
    return plain


def _taken(joint: Joint) -> int:
    """How many primals the graph takes."""
    return len(joint.primal_values) - len(joint.signature.tokens)


def around_backward(writer: Writer, name: str, joint: Joint, saved: int) -> str:
    """The same for a backward, which takes `saved` values before the tangents."""
    if not has_wrappers(joint):
        return name
    plain = writer.fresh(f"plain_{name}")
    tangents = [f"t{n}" for n in range(len(joint.signature.tangents))]
    with writer.block(f"def {name}(args):"):
        writer.line(f"{tuple_of(tangents)} = args[{saved}:{saved + len(tangents)}]")
        leaves: list[str] = []
        for text, (slot, tangent) in zip(tangents, joint.tape.tangents.items(), strict=True):
            if is_wrapper(tangent):
                writer.line(f"{text} = {writer.bind(expected(slot, tangent).fit, 'fit_tangent')}({text})")
                leaves += [_read(s, {slot: text}, writer) for s in layout_of(tangent).slots(slot)]
            else:
                leaves.append(text)
        arguments = [f"*args[:{saved}]", *leaves, f"*args[{saved + len(tangents)}:]"]
        writer.line(f"graph_inputs = [{', '.join(arguments)}]")
        writer.line("args.clear()")
        writer.line(f"del {', '.join(tangents)}")
        writer.line(f"r = {plain}(graph_inputs)")
        more = joint.backward_writes or joint.random.backward_outputs
        _give(writer, [(layout, True) for layout in joint.grad_layouts], bool(more))
    writer.line()
    return plain


def _give(writer: Writer, shapes: Iterable[tuple[Layout | None, bool]], more: bool) -> None:
    """The return of results, some of which are wrapped, some of which nobody looks at, and perhaps of what follows."""
    results: list[str] = []
    position = 0
    for layout, needed in shapes:
        count = 1 if layout is None else layout.leaves
        if not needed:
            results.append("None")
        elif layout is None:
            results.append(f"r[{position}]")
        else:
            text, _ = _build(writer, layout, position)
            results.append(text)
        position += count
    results += [f"*r[{position}:]"] if more else []
    writer.line(f"return [{', '.join(results)}]")


def _build(writer: Writer, layout: Layout, position: int) -> tuple[str, int]:
    """The text that builds a wrapper from results, and the position behind its leaves."""
    parts: list[str] = []
    start = position
    for attr, inner in layout.attrs:
        if inner is None:
            parts.append(f"{attr!r}: r[{position}]")
            position += 1
        elif isinstance(inner, Fixed):
            parts.append(f"{attr!r}: {writer.bind(inner.value, attr)}")
        else:
            text, position = _build(writer, inner, position)
            parts.append(f"{attr!r}: {text}")
    unflatten = writer.bind(layout.kind.__tensor_unflatten__, f"unflatten_{layout.kind.__name__}")  # type: ignore[attr-defined]
    context = repr(layout.context) if type(layout.context) is str else writer.bind(layout.context, "context")
    rest = [context, _numbers(writer, layout.size, start), _numbers(writer, layout.stride, start)]
    return f"{unflatten}({{{', '.join(parts)}}}, {', '.join(rest)})", position


def _numbers(writer: Writer, numbers: Sequence[Any], start: int) -> str:
    """Sizes or strides as text; symbolic ones are read from the leaves, which stand from `start` on."""
    if not any(isinstance(n, FromLeaf) for n in numbers):
        return repr(numbers) if is_plain(numbers) else writer.bind(numbers, "sizes")
    texts = [f"r[{start + n.leaf}].{n.kind}({n.dim})" if isinstance(n, FromLeaf) else repr(n) for n in numbers]
    return tuple_of(texts)


def expected(slot: Returned, tangent: Tensor) -> ExpectedTangent:
    """What the backward takes for a result."""
    leaves = leaves_of(tangent)
    layout = layout_of(tangent) if is_wrapper(tangent) else None
    strides = tuple(None if any(isinstance(n, SymInt) for n in leaf.stride()) else leaf.stride() for leaf in leaves)
    return ExpectedTangent(
        str(slot), layout, strides, tuple(restride(tuple(leaf.shape), tuple(leaf.stride())) for leaf in leaves)
    )


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
