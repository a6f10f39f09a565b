"""Take nested values apart and put them together again.

Tuples, lists and dicts are taken apart by generated code; other containers go through pytree, as one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._torch import pytree
from ..values import same_value
from .writer import Writer, literal


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is not taken apart."""

    index: int


@dataclass(frozen=True, slots=True)
class Items:
    """A tuple, list or torch.Size."""

    kind: type
    items: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    """A dict."""

    keys: tuple[Any, ...]
    items: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Registered:
    """Any other container that pytree knows, with all leaves below it."""

    spec: Any
    leaves: tuple[int, ...]


Tree = Leaf | Items | Entries | Registered


@dataclass(frozen=True, slots=True)
class Flat:
    """A nested value taken apart: its structure, its leaves, and the place of each in the user's words."""

    tree: Tree
    leaves: list[Any]
    paths: list[str]


def flatten(value: Any, path: str) -> Flat:
    """Take a nested value apart.

    >>> flat = flatten({"a": 1, "b": [2, 3]}, "x")
    >>> flat.leaves, flat.paths
    ([1, 2, 3], ["x['a']", "x['b'][0]", "x['b'][1]"])
    """
    leaves: list[Any] = []
    paths: list[str] = []
    return Flat(_take_apart(value, path, leaves, paths), leaves, paths)


def _take_apart(value: Any, path: str, leaves: list[Any], paths: list[str]) -> Tree:
    kind = type(value)
    if kind is tuple or kind is list or kind is torch.Size:
        parts = [_take_apart(item, f"{path}[{i}]", leaves, paths) for i, item in enumerate(value)]
        return Items(kind, tuple(parts))
    if kind is dict:
        parts = [_take_apart(item, f"{path}[{key!r}]", leaves, paths) for key, item in value.items()]
        return Entries(tuple(value), tuple(parts))
    if pytree.tree_is_leaf(value):
        leaves.append(value)
        paths.append(path)
        return Leaf(len(leaves) - 1)
    below, spec = _flatten_registered(value)
    first = len(leaves)
    leaves.extend(below)
    paths.extend(f"{path}.leaf{i}" for i in range(len(below)))
    return Registered(spec, tuple(range(first, len(leaves))))


def _flatten_registered(value: Any) -> tuple[list[Any], Any]:
    """What pytree makes of a container, but for a torch.Size in it, which would come back as a tuple."""
    return pytree.tree_flatten(value, is_leaf=_is_known_size)


def _is_known_size(value: Any) -> bool:
    return type(value) is torch.Size and all(type(length) is int for length in value)


def unflatten(tree: Tree, leaves: Sequence[Any]) -> Any:
    """Put a nested value together.

    >>> unflatten(flatten((1, [2]), "x").tree, [10, 20])
    (10, [20])
    """
    match tree:
        case Leaf(index):
            return leaves[index]
        case Items(kind, items):
            return kind([unflatten(item, leaves) for item in items])
        case Entries(keys, items):
            return {key: unflatten(item, leaves) for key, item in zip(keys, items, strict=True)}
        case Registered(spec, indices):
            return pytree.tree_unflatten([leaves[i] for i in indices], spec)


def build_expression(writer: Writer, tree: Tree, names: Sequence[str]) -> str:
    """Python text that puts a nested value together from variables."""
    match tree:
        case Leaf(index):
            return names[index]
        case Items(kind, items):
            parts = ", ".join(build_expression(writer, item, names) for item in items)
            if kind is tuple:
                return f"({parts},)" if items else "()"
            return f"[{parts}]" if kind is list else f"{writer.bind(kind, 'Size')}([{parts}])"
        case Entries(keys, items):
            pairs = [
                f"{literal(writer, k)}: {build_expression(writer, i, names)}" for k, i in zip(keys, items, strict=True)
            ]
            return f"{{{', '.join(pairs)}}}"
        case Registered(spec, indices):
            unflatten_name = writer.bind(pytree.tree_unflatten, "tree_unflatten")
            return f"{unflatten_name}([{', '.join(names[i] for i in indices)}], {writer.bind(spec, 'spec')})"


def write_take_apart(writer: Writer, tree: Tree, source: str, names: Sequence[str], miss: str) -> None:
    """Write the lines that check a nested value's structure and give its leaves names."""
    match tree:
        case Leaf(index):
            if names[index] != source:
                writer.line(f"{names[index]} = {source}")
        case Items(kind, items):
            kind_name = writer.bind(kind, kind.__name__)
            writer.line(f"if type({source}) is not {kind_name} or len({source}) != {len(items)}: {miss}")
            _take_items(writer, items, source, [f"{source}[{i}]" for i in range(len(items))], names, miss)
        case Entries(keys, items):
            wanted = writer.bind(keys, "keys")
            plain = f"tuple({source}) != {wanted}"
            if not all(type(key) is str for key in keys):  # keys may be equal and of another type
                plain = f"not {writer.bind(same_value, 'same_value')}(tuple({source}), {wanted})"
            writer.line(f"if type({source}) is not dict or {plain}: {miss}")
            reads = [f"{source}[{literal(writer, key)}]" for key in keys]
            _take_items(writer, items, source, reads, names, miss)
        case Registered(spec, indices):
            flatten_name = writer.bind(_flatten_registered, "flatten_registered")
            leaves, found = writer.fresh("leaves"), writer.fresh("structure")
            writer.line(f"{leaves}, {found} = {flatten_name}({source})")
            same = writer.bind(same_structure, "same_structure")
            writer.line(f"if not {same}({found}, {writer.bind(spec, 'spec')}): {miss}")
            if indices:
                writer.line(f"{', '.join(names[i] for i in indices)}, = {leaves}")


def same_structure(spec: Any, other: Any) -> bool:
    """Whether two structures of pytree are the same, with contexts that are equal and of the same types."""
    if spec.type is not other.type or not same_value(spec.context, other.context):
        return False
    return len(spec.children()) == len(other.children()) and all(map(same_structure, spec.children(), other.children()))


def _take_items(
    writer: Writer, items: Sequence[Tree], source: str, reads: Sequence[str], names: Sequence[str], miss: str
) -> None:
    if items and all(isinstance(item, Leaf) for item in items) and reads[0] == f"{source}[0]":
        targets = ", ".join(names[item.index] for item in items if isinstance(item, Leaf))
        writer.line(f"{targets}, = {source}")
        return
    for item, read in zip(items, reads, strict=True):
        if isinstance(item, Leaf):
            writer.line(f"{names[item.index]} = {read}")
        else:
            inner = writer.fresh("inner")
            writer.line(f"{inner} = {read}")
            write_take_apart(writer, item, inner, names, miss)
