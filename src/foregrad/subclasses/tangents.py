"""Gradients that arrive for results which are wrapper subclasses, or plain tensors.

The backward was recorded for a guess of what they look like. One that differs is converted, if its class knows how;
otherwise the mismatch is an error that says which result, what was expected, and what came.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import BackwardError
from ..values import same_value
from .layout import Fixed, Layout, flatten_once, is_wrapper, leaves_of

Restride = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ExpectedTangent:
    """What the backward was recorded for, for one result."""

    name: str  # of the result, in the user's words
    layout: Layout | None
    strides: tuple[tuple[int, ...] | None, ...]  # of the leaves, where they are not symbolic
    restrides: tuple[Restride, ...]

    def fit(self, tangent: Tensor) -> Tensor:
        """The gradient as the backward takes it."""
        return self._fit(tangent, self.layout, iter(zip(self.strides, self.restrides, strict=True)))

    def _fit(self, given: Tensor, layout: Layout | None, leaves: Iterator[tuple[Any, Restride]]) -> Tensor:
        if layout is None:
            stride, restride = next(leaves)
            given = self._converted(given, None) if is_wrapper(given) else given
            return given if given.stride() == stride else restride(given)
        if not self._is_like(given, layout):
            detached = given.detach() if given.requires_grad else given  # a context may tell whether it does
            given = detached if self._is_like(detached, layout) else self._converted(given, layout)
        fitted: list[Any] = []
        changed = False
        for attr, inner in layout.attrs:
            if isinstance(inner, Fixed):
                fitted.append(inner.value)
                continue
            before = getattr(given, attr)
            fitted.append(self._fit(before, inner, leaves))
            changed = changed or fitted[-1] is not before
        if not changed:
            return given
        parts = {attr: part for (attr, _), part in zip(layout.attrs, fitted, strict=True)}
        tensors = [part for part in fitted if isinstance(part, Tensor)]
        built: Tensor = layout.around(parts, [leaf for part in tensors for leaf in leaves_of(part)])
        return built

    def _is_like(self, given: Any, layout: Layout) -> bool:
        if type(given) is not layout.kind:
            return False
        names, context = flatten_once(given)
        return list(names) == layout.metadata[0] and same_value(context, layout.context)

    def _is_converted(self, converted: Tensor, layout: Layout | None) -> bool:
        """Whether it has the right form; the class itself answers for the context."""
        if layout is None:
            return not is_wrapper(converted)
        return type(converted) is layout.kind and flatten_once(converted)[0] == layout.metadata[0]

    def _converted(self, given: Any, layout: Layout | None) -> Tensor:
        """The gradient in the expected form, by its own method."""
        expected: type = Tensor if layout is None else layout.kind
        convert = getattr(given, "__coerce_same_metadata_as_tangent__", None)
        if convert is not None:
            context = None if layout is None else layout.context
            other = None if type(given) is expected else expected
            converted = convert(context, other) if _takes_type(convert) else convert(context)
            if isinstance(converted, Tensor) and self._is_converted(converted, layout):
                return converted
        raise BackwardError(
            f"During the backward, we encountered a tensor subclass where we guessed its metadata incorrectly: the "
            f"gradient of {self.name} was expected to be {_describe(expected, layout)}, and {_describe_given(given)} "
            "came. Pass a gradient like the result itself, or give the class a method "
            "__coerce_same_metadata_as_tangent__(expected_context, expected_type) that converts it."
        )


def _takes_type(convert: Callable[..., Any]) -> bool:
    """Whether the method has the newer form, with the expected type after the context."""
    try:
        parameters: Sequence[inspect.Parameter] = list(inspect.signature(convert).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _describe(kind: type, layout: Layout | None) -> str:
    return "a plain tensor" if layout is None else f"a {kind.__name__} {_structure(*layout.metadata)}"


def _describe_given(given: Any) -> str:
    if not is_wrapper(given):
        return f"a {type(given).__name__}"
    return f"a {type(given).__name__} {_structure(*flatten_once(given))}"


def _structure(names: Sequence[str], context: Any) -> str:
    return f"of {' and '.join(names)} with context {context!r}"
