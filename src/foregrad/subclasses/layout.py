"""How a wrapper subclass is put together: taken apart into plain tensors, and built again.

A traceable wrapper subclass says by `__tensor_flatten__` which tensors it holds, under which attributes, and what else
it must remember; `__tensor_unflatten__` builds it again. Subclasses nest: leaves are found depth first, in the order of
the attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import SymInt, Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from .._torch import FakeTensor, expression_of, is_jagged_size, is_traceable_wrapper_subclass, overrides_functions
from ..errors import UnsupportedError
from ..slots import Inner, Slot
from ..values import same_value

_PLAIN_TYPES = frozenset({Tensor, Parameter, FakeTensor})


def is_wrapper(value: object) -> bool:
    """Whether a value is a tensor that holds other tensors, and can be taken apart.

    >>> import torch
    >>> from torch.testing._internal.two_tensor import TwoTensor
    >>> is_wrapper(torch.ones(1)), is_wrapper(TwoTensor(torch.ones(1), torch.ones(1)))
    (False, True)
    """
    return isinstance(value, Tensor) and type(value) not in _PLAIN_TYPES and is_traceable_wrapper_subclass(value)


def is_jagged(value: Tensor) -> bool:
    """Whether a nested tensor has rows of several lengths: one of its sizes is no number."""
    return is_wrapper(value) and any(map(is_jagged_size, value.shape))


def require_traceable(value: Tensor, name: str) -> None:
    """Refuse a subclass that runs operators by itself and cannot be taken apart, or that overrides functions only.

    What stands for a tensor while a program is recorded is of a class of torch's own: overrides would not be called.
    """
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return
    if getattr(kind, "__torch_dispatch__", None) is Tensor.__torch_dispatch__:
        if overrides_functions(kind) and not is_lazy(value):
            raise UnsupportedError(
                f"{name} is a {kind.__name__}, a tensor subclass whose __torch_function__ decides about types and "
                "functions: it cannot be compiled yet. Pass x.as_subclass(torch.Tensor), or compile with "
                "fallback='eager'."
            )
        return
    missing = [name for name in ("__tensor_flatten__", "__tensor_unflatten__") if not hasattr(kind, name)]
    if missing:
        raise UnsupportedError(
            f"{name} is a {kind.__name__}, which has no {' and no '.join(missing)}: a tensor subclass can be compiled "
            "only if it can be taken apart into plain tensors and built again. Give it these methods, or compile with "
            "fallback='eager'."
        )


@dataclass(frozen=True, slots=True)
class Fixed:
    """An attribute of a wrapper that is no tensor: the device mesh of a distributed tensor."""

    value: Any


@dataclass(frozen=True, slots=True)
class FromLeaf:
    """A size or stride of a wrapper that is symbolic: that of one of its leaves."""

    leaf: int
    kind: Literal["size", "stride"]
    dim: int

    def read(self, leaves: Sequence[Tensor]) -> Any:
        """The number itself."""
        leaf = leaves[self.leaf]
        return leaf.shape[self.dim] if self.kind == "size" else leaf.stride()[self.dim]


@dataclass(frozen=True, slots=True)
class Layout:
    """The structure of one wrapper: everything but the data of its leaves."""

    kind: type
    attrs: tuple[tuple[str, Layout | Fixed | None], ...]  # what is there; None for a plain tensor
    context: Any
    size: tuple[Any, ...]
    stride: tuple[Any, ...]

    @property
    def leaves(self) -> int:
        """How many plain tensors there are in it."""
        return sum(1 if inner is None else inner.leaves for _, inner in self.attrs if not isinstance(inner, Fixed))

    def slots(self, of: Slot) -> Iterator[Inner]:
        """The places of its leaves."""
        for attr, inner in self.attrs:
            place = Inner(of, attr)
            if inner is None:
                yield place
            elif isinstance(inner, Layout):
                yield from inner.slots(place)

    def build(self, leaves: Iterable[Any]) -> Any:
        """The wrapper around other leaves."""
        given = list(leaves)
        inner: dict[str, Any] = {}
        position = 0
        for attr, part in self.attrs:
            match part:
                case None:
                    inner[attr] = given[position]
                    position += 1
                case Fixed(value):
                    inner[attr] = value
                case Layout():
                    inner[attr] = part.build(given[position : position + part.leaves])
                    position += part.leaves
        return self.around(inner, given)

    def around(self, inner: dict[str, Any], leaves: Sequence[Tensor]) -> Any:
        """The wrapper around its parts, whose leaves say what is symbolic in its size."""
        size, stride = (
            tuple([n.read(leaves) if isinstance(n, FromLeaf) else n for n in numbers])
            for numbers in (self.size, self.stride)
        )
        return self.kind.__tensor_unflatten__(inner, self.context, size, stride)  # type: ignore[attr-defined]

    @property
    def metadata(self) -> tuple[list[str], Any]:
        """What `__tensor_flatten__` gave."""
        return [attr for attr, _ in self.attrs], self.context

    def is_that_of(self, value: Any) -> bool:
        """Whether a value is a wrapper of this kind, around as many tensors; sizes are not looked at."""
        if type(value) is not self.kind:
            return False
        names, context = flatten_once(value)
        if names != self.metadata[0] or not same_value(context, self.context):
            return False
        parts = [(getattr(value, name), part) for name, (_, part) in zip(names, self.attrs, strict=True)]
        return all(part.is_that_of(inner) for inner, part in parts if isinstance(part, Layout))


def layout_of(wrapper: Any) -> Layout:
    """The structure of a wrapper."""
    names, context = flatten_once(wrapper)
    attrs: list[tuple[str, Layout | Fixed | None]] = []
    for name in names:
        value = getattr(wrapper, name)
        part = None if isinstance(value, Tensor) else Fixed(value)
        attrs.append((name, layout_of(value) if is_wrapper(value) else part))
    size, stride = tuple(wrapper.shape), tuple(wrapper.stride())
    if any(isinstance(n, SymInt) and not is_jagged_size(n) for n in (*size, *stride)):
        size, stride = _found_in_leaves(wrapper, size, "size"), _found_in_leaves(wrapper, stride, "stride")
    return Layout(type(wrapper), tuple(attrs), context, size, stride)


def _found_in_leaves(wrapper: Tensor, numbers: Sequence[Any], kind: Literal["size", "stride"]) -> tuple[Any, ...]:
    """Symbolic numbers of a wrapper as those of its leaves."""
    known: dict[Any, FromLeaf] = {}
    for i, leaf in enumerate(leaves_of(wrapper)):
        for way, found in (("size", leaf.shape), ("stride", leaf.stride())):
            for dim, number in enumerate(found):
                if isinstance(number, SymInt):
                    known.setdefault(expression_of(number), FromLeaf(i, way, dim))
    places: list[Any] = []
    for number in numbers:
        expression = expression_of(number) if isinstance(number, SymInt) else None
        place = number if expression is None else int(expression) if expression.is_number else known.get(expression)
        if place is None:
            raise UnsupportedError(
                f"the {kind} {tuple(numbers)} of a {type(wrapper).__name__} is symbolic and is that of none of its "
                "inner tensors: this cannot be compiled yet. Compile with dynamic=False."
            )
        places.append(place)
    return tuple(places)


def with_symbols(layout: Layout, lifted: Sequence[Tensor], seen: Sequence[Tensor]) -> Layout:
    """The layout of an input whose leaves have symbolic sizes: its own sizes follow theirs, where they agree."""

    def follow(numbers: tuple[Any, ...], kind: Literal["size", "stride"]) -> tuple[Any, ...]:
        followed = []
        for dim, number in enumerate(numbers):
            places = (FromLeaf(i, kind, dim) for i, real in enumerate(lifted) if dim < real.dim())
            symbols = (p for p in places if isinstance(p.read(seen), SymInt) and p.read(lifted) == number)
            followed.append(next(symbols, number))
        return tuple(followed)

    attrs: list[tuple[str, Layout | Fixed | None]] = []
    position = 0
    for attr, part in layout.attrs:
        count = 0 if isinstance(part, Fixed) else 1 if part is None else part.leaves
        own = slice(position, position + count)
        attrs.append((attr, with_symbols(part, lifted[own], seen[own]) if isinstance(part, Layout) else part))
        position += count
    return replace(layout, attrs=tuple(attrs), size=follow(layout.size, "size"), stride=follow(layout.stride, "stride"))


def require_comparable(wrapper: Any, name: str) -> None:
    """Refuse a wrapper whose context cannot be compared: no call could be told from another."""
    if not same_value(flatten_once(wrapper)[1], flatten_once(wrapper)[1]):
        raise UnsupportedError(
            f"{name}: {type(wrapper).__name__} has a context that is not equal to itself when __tensor_flatten__ is "
            "called twice. Give the context's class an __eq__, or compile with fallback='eager'."
        )


def flatten_once(wrapper: Any) -> tuple[list[str], Any]:
    """What `__tensor_flatten__` gives, checked."""
    flattened = wrapper.__tensor_flatten__()
    if not isinstance(flattened, tuple) or len(flattened) != 2:
        raise UnsupportedError(
            f"__tensor_flatten__ of {type(wrapper).__name__} must return a list of attribute names and a context, not "
            f"{flattened!r}."
        )
    names, context = flattened
    for name in names:
        if getattr(wrapper, name, None) is None:
            raise UnsupportedError(
                f"__tensor_flatten__ of {type(wrapper).__name__} names the attribute {name!r}, which is not there."
            )
    return list(names), context


def leaves_of(value: Any) -> list[Tensor]:
    """The plain tensors in a tensor, depth first."""
    if not is_wrapper(value):
        return [value]
    parts = [getattr(value, name) for name in flatten_once(value)[0]]
    return [leaf for part in parts if isinstance(part, Tensor) for leaf in leaves_of(part)]


def wrappers_in(value: Any) -> list[Tensor]:
    """The wrappers inside of a wrapper, depth first."""
    parts = [getattr(value, name) for name in flatten_once(value)[0]]
    return [inner for part in parts if is_wrapper(part) for inner in (part, *wrappers_in(part))]


@dataclass(frozen=True, slots=True)
class Wrapped:
    """Values, of a graph or of a call, that belong together as one wrapper."""

    layout: Layout
    leaves: tuple[Any, ...]


def spread(values: Iterable[Any]) -> list[Any]:
    """Values with the leaves of wrapped ones in their places."""
    flat: list[Any] = []
    for value in values:
        if isinstance(value, Wrapped):
            flat.extend(value.leaves)
        else:
            flat.append(value)
    return flat
