"""What a program does to the lists, dicts and objects that it is given: each call does it to the caller's own.

Only what is not as it was is written: the end of a list, some items of a dict, some attributes. None of the code of
an object's class runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..slots import Part
from ..values import PLAIN, same_value
from .objects import Shape, delete_dict, put_dict
from .pytree import (
    Entries,
    Items,
    Numbered,
    Object,
    Registered,
    TakingApart,
    build_expression,
    flatten_registered,
    read_attributes,
    same_structure,
)
from .writer import Writer, literal


@dataclass(frozen=True, slots=True)
class Rest:
    """What a list holds from some place on."""

    start: int
    items: Items


@dataclass(frozen=True, slots=True)
class Puts:
    """Keys that are gone, and then values by key, of which those with new keys come last."""

    removed: tuple[Any, ...]
    put: Entries


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one list, dict or object."""

    of: Part
    shape: Shape | None  # None of a plain list or dict
    contents: Rest | Puts | None
    attributes: Puts | None = None
    slots: Puts | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Found by comparing.
@dataclass(frozen=True, slots=True)
class Before:
    """What a list, dict or object holds, at some time."""

    kind: type
    contents: list[Any] | dict[Any, Any] | None
    attributes: dict[str, Any]
    slots: dict[str, Any]
    spec: Any = None

    @classmethod
    def of(cls, node: Numbered, value: Any) -> Before:
        """As it is now."""
        match node:
            case Object(shape) if type(value) is shape.kind:
                return cls(shape.kind, shape.contents(value), dict(shape.attributes(value)), shape.filled(value))
            case Items(kind) if kind is list:
                return cls(kind, [*value], {}, {})
            case Entries():
                return cls(dict, dict(value), {}, {})
            case Registered():
                leaves, spec = flatten_registered(value)
                return cls(type(value), leaves, {}, {}, spec)
        return cls(type(value), None, {}, {})

    def holds_what(self, other: Before) -> bool:
        """Whether a container that is pytree's own affair holds what it held at another time."""
        one, two = self.contents or (), other.contents or ()
        return len(one) == len(two) and all(map(operator.is_, one, two)) and same_structure(self.spec, other.spec)


def change_between(node: Numbered, before: Before, now: Before, path: str, taking: TakingApart) -> Change | None:
    """What turns one into the other, if they differ; new values are taken apart."""
    assert node.number is not None
    shape = node.shape if isinstance(node, Object) else None
    contents: Rest | Puts | None = None
    if isinstance(before.contents, list) and isinstance(now.contents, list):
        contents = _rest(before.contents, now.contents, path, taking) if now.kind is not tuple else None
    elif isinstance(before.contents, dict) and isinstance(now.contents, dict):
        contents = _puts(before.contents, now.contents, lambda key: f"{path}[{key!r}]", taking)

    def named(key: Any) -> str:
        return f"{path}.{key}"

    attributes = _puts(before.attributes, now.attributes, named, taking)
    slots = _puts(before.slots, now.slots, named, taking)
    if contents is attributes is slots is None:
        return None
    return Change(Part(node.number), shape, contents, attributes, slots)


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (type(now) in PLAIN and same_value(now, before))


def _rest(before: list[Any], now: list[Any], path: str, taking: TakingApart) -> Rest | None:
    start = next((i for i, (a, b) in enumerate(zip(now, before, strict=False)) if not _is_same(a, b)), None)
    if start is None:
        start = min(len(now), len(before))
        if len(now) == len(before):
            return None
    items = tuple([taking.take(item, f"{path}[{i}]") for i, item in enumerate(now[start:], start)])
    return Rest(start, Items(list, items))


def _puts(before: dict[Any, Any], now: dict[Any, Any], path: Callable[[Any], str], taking: TakingApart) -> Puts | None:
    """Keys that stay in their place are the first ones, in the order that they had."""
    old = iter(before)
    kept = set()
    for key in now:
        if not any(key == other for other in old):  # which goes on where it has stopped
            break
        kept.add(key)
    changed = [key for key in now if key not in kept or not _is_same(now[key], before[key])]
    removed = tuple(key for key in before if key not in kept)
    if not changed and not removed:
        return None
    items = tuple([taking.take(now[key], path(key)) for key in changed])
    return Puts(removed, Entries(tuple(changed), items))


# ---------------------------------------------------------------------------------------------------------------------
# As Python text.
def write_change(writer: Writer, change: Change, names: Sequence[str], shared: frozenset[int]) -> None:
    """Write the lines that make a change to an object of the caller's."""
    name, shape = writer.variable(change.of), change.shape
    match change.contents:
        case Rest(start, items):
            text = build_expression(writer, items, names, shared)
            if shape is None:
                writer.line(f"{name}[{start}:] = {text}")
            else:
                put = writer.bind(list.__setitem__, "set_items")
                writer.line(f"{put}({name}, slice({start}, None), {text})")
        case Puts() if shape is None:
            _write_puts(writer, change.contents, name, names, shared)
        case Puts():
            put, delete = writer.bind(put_dict, "put_dict"), writer.bind(delete_dict, "delete_dict")
            for key, value in _built(writer, change.contents, names, shared):
                writer.line(f"{delete}({name}, {key})" if value is None else f"{put}({name}, {key}, {value})")
    if change.attributes is not None:
        fields = writer.fresh("fields")
        writer.line(f"{fields} = {read_attributes(writer, name)}")
        _write_puts(writer, change.attributes, fields, names, shared)
    if change.slots is not None and shape is not None:
        for key, item in zip(change.slots.put.keys, change.slots.put.items, strict=True):
            put = writer.bind(shape.slot(key).__set__, f"set_{key}")
            writer.line(f"{put}({name}, {build_expression(writer, item, names, shared)})")
        for key in change.slots.removed:
            if key not in change.slots.put.keys:
                writer.line(f"{writer.bind(shape.slot(key).__delete__, f'delete_{key}')}({name})")


def _write_puts(writer: Writer, puts: Puts, name: str, names: Sequence[str], shared: frozenset[int]) -> None:
    for key, value in _built(writer, puts, names, shared):
        writer.line(f"del {name}[{key}]" if value is None else f"{name}[{key}] = {value}")


def _built(writer: Writer, puts: Puts, names: Sequence[str], shared: frozenset[int]) -> list[tuple[str, str | None]]:
    """Keys and what is put there; None for a key that is removed. New values are made before anything is changed."""
    values = [build_expression(writer, item, names, shared) for item in puts.put.items]
    removed: list[tuple[str, str | None]] = [(literal(writer, key), None) for key in puts.removed]
    return removed + [(literal(writer, k), value) for k, value in zip(puts.put.keys, values, strict=True)]
