"""Wrapper subclasses in export: a graph takes and gives the plain tensors in them, named by the way of attributes.

A parameter `weight` that holds tensors `a` and `b` is two parameters, `weight.a` and `weight.b`. In the trees of the
signature, of arguments and of the result, a dict of attributes stands in the place of a wrapper: this is what a file
can hold. A program that is still in the process in which it was exported takes and gives the wrappers themselves, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import SymInt, Tensor, nn

from .._torch import disable_modes, pytree
from ..errors import ExportError
from ..record.fakify import RecordedInput
from ..runtime.tangents import expected_tangent
from ..slots import Buffer, Inner, Input, Output, Param
from ..subclasses.layout import Fixed, Layout, Wrapped, is_wrapper, layout_of, leaves_of
from ..values import same_value

Named = Param | Buffer | Input | Inner


def path_of(slot: Any) -> str:
    """The name of an input, or of a tensor inside of one: `weight.a`."""
    return f"{path_of(slot.of)}.{slot.attr}" if isinstance(slot, Inner) else slot.path


def plain_slots(recorded: RecordedInput) -> list[tuple[Any, RecordedInput]]:
    """The places of the plain tensors of an input, and what stood there while the program was recorded."""
    if recorded.layout is None:
        return [(recorded.slot, recorded)]
    return list(zip(recorded.layout.slots(recorded.slot), recorded.inner, strict=True))


def plain_state(slot: Param | Buffer, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of a parameter or a buffer, by name; those of a parameter are parameters."""
    if not is_wrapper(tensor):
        yield slot.path, tensor
        return
    for place, leaf in zip(layout_of(tensor).slots(slot), leaves_of(tensor), strict=True):
        grad = tensor.requires_grad and (leaf.is_floating_point() or leaf.is_complex())
        yield path_of(place), nn.Parameter(leaf.detach(), grad) if isinstance(slot, Param) else leaf


def plain_weights(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a state dict that stand for one of a module's."""
    if is_wrapper(value):
        yield from ((path, leaf.detach()) for path, leaf in plain_state(Buffer(name), value))
    else:
        yield name, value


def in_parts(layout: Layout | None, leaves: Iterable[Any]) -> Any:
    """Leaves as a dict of attributes, of dicts where wrappers nest; a plain tensor as it is."""
    rest = iter(leaves)
    if layout is None:
        return next(rest)
    return {attr: in_parts(part, rest) for attr, part in layout.attrs if not isinstance(part, Fixed)}


def new_values(recorded: RecordedInput, new: Any) -> Iterator[tuple[Any, Any]]:
    """The places of an input that is written as a whole, and their new values."""
    if recorded.layout is None and not isinstance(new, Wrapped):
        yield recorded.slot, new
        return
    if not isinstance(new, Wrapped) or recorded.layout is None or not is_alike(recorded.layout, new.layout):
        raise ExportError(
            f"the program puts another kind of tensor into {recorded.slot}: the new value of a tensor subclass must be "
            "made of the same parts, with the same context."
        )
    yield from zip(recorded.layout.slots(recorded.slot), new.leaves, strict=True)


def is_alike(layout: Layout, other: Layout) -> bool:
    """Whether two wrappers are of one class and made of the same parts, whatever the shapes of these."""
    if layout.kind is not other.kind or layout.metadata[0] != other.metadata[0]:
        return False
    if not same_value(layout.context, other.context):
        return False
    for (_, part), (_, their) in zip(layout.attrs, other.attrs, strict=True):
        match part, their:
            case Layout(), Layout():
                alike = is_alike(part, their)
            case Fixed(value), Fixed(held):
                alike = same_value(value, held)
            case _:
                alike = part is None and their is None
        if not alike:
            return False
    return True


def seed_of(loss: Tensor, tangent: Tensor, index: int) -> list[Tensor]:
    """What `loss.backward()` begins with where the loss is a wrapper: its class says what ones are."""
    like = layout_of(loss)
    leaves = leaves_of(loss)
    if any(isinstance(n, SymInt) for leaf in leaves for n in leaf.shape):
        raise ExportError(
            f"the loss is a {like.kind.__name__} with symbolic sizes inside, which cannot be exported. Return a plain "
            "tensor, or leave the sizes as they are."
        )
    with disable_modes(), torch.no_grad():
        zeros = [torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) for leaf in leaves]
        ones = torch.ones_like(like.build(zeros), memory_format=torch.preserve_format)
        return leaves_of(expected_tangent(Output(index), tangent).fit(ones))


def own_inner_tensors(value: Tensor, seen: set[int]) -> Tensor:
    """A wrapper that shares no tensor object with inputs before it: each of its tensors is an input of its own."""
    leaves = leaves_of(value)
    ids = [id(leaf) for leaf in leaves]
    if seen.isdisjoint(ids) and len(set(ids)) == len(ids):
        return value
    with torch.no_grad():
        built: Tensor = layout_of(value).build([leaf.detach() for leaf in leaves])
    return built.detach().requires_grad_(value.requires_grad)


@dataclass(frozen=True)
class Wrappers:
    """How the arguments and the results of a program are put together, one entry for each leaf: None if it is plain."""

    arguments: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]
    in_spec: Any  # of (args, kwargs), with wrappers as leaves
    out_spec: Any

    def take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call with wrappers as one with the tensors in them."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.in_spec:
            return args, kwargs
        parts = [self._parts(leaf, layout) for leaf, layout in zip(leaves, self.arguments, strict=True)]
        args, kwargs = pytree.tree_unflatten(parts, spec)
        return args, kwargs

    def _parts(self, leaf: Any, layout: Layout | None) -> Any:
        if layout is None:
            return leaf
        if not is_wrapper(leaf) or not is_alike(layout, layout_of(leaf)) or not _has_size(leaf, layout):
            found = type(leaf).__name__ + (" with another size, parts or context" if is_wrapper(leaf) else "")
            raise ExportError(f"the program was exported for a {layout.kind.__name__}, and called with a {found}.")
        return in_parts(layout, leaves_of(leaf))

    def put_together(self, values: Sequence[Any]) -> Any:
        """Flat results of the graph as the module's own result."""
        rest = iter(values)
        parts = [
            next(rest) if layout is None else layout.build(list(islice(rest, layout.leaves))) for layout in self.results
        ]
        return pytree.tree_unflatten(parts, self.out_spec)


def _has_size(value: Tensor, layout: Layout) -> bool:
    """Whether a wrapper has the size of another, where that is a matter of numbers."""
    fixed = zip(layout.size, value.shape, strict=False)
    return len(layout.size) == value.dim() and all(n == m for n, m in fixed if type(n) is int and type(m) is int)


def refuse_wrappers(leaves: Iterable[Any]) -> None:
    """A program that came from a file does not know the classes of its arguments."""
    for leaf in leaves:
        if is_wrapper(leaf):
            parts = ", ".join(f"{name!r}: x.{name}" for name in layout_of(leaf).metadata[0])
            raise ExportError(
                f"the program takes plain tensors, not a {type(leaf).__name__}. Pass the tensors in it: {{{parts}}}."
            )
