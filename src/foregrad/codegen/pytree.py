"""Take nested values apart and put them together again.

Tuples, lists, dicts and objects that show all of their state are taken apart by generated code; other containers go
through pytree, as one piece. An object, list or dict that is met twice is one: each has a number.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._torch import pytree
from ..errors import UnsupportedError
from ..slots import Input, Part
from ..values import UserObject, is_plain, same_value
from .objects import Shape, filled_slots, has_lasting_keys, is_a, read_dict, shape_of
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
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Entries:
    """A dict."""

    keys: tuple[Any, ...]
    items: tuple[Tree, ...]
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Object:
    """An object: what it has from a builtin container, its attributes, and its slots."""

    shape: Shape
    contents: Items | Entries | None
    attributes: Entries | None
    slots: Entries | None
    number: int


@dataclass(frozen=True, slots=True)
class Weak:
    """A weak reference to what is taken apart too."""

    target: Tree


@dataclass(frozen=True, slots=True)
class Again:
    """A list, dict or object that was met before."""

    number: int


@dataclass(frozen=True, slots=True)
class Registered:
    """Any other container that pytree knows, with all leaves below it."""

    spec: Any
    leaves: tuple[int, ...]
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """In a result: a part of the caller's own arguments."""

    place: Part | Input


class Around(UserObject):
    """In a result: an object that exists around the program."""

    __slots__ = ()


Tree = Leaf | Items | Entries | Object | Weak | Again | Registered | Given | Around
Numbered = Items | Entries | Object | Registered


@dataclass(frozen=True, slots=True)
class Flat:
    """A nested value taken apart: its structure, its leaves, and the place of each in the user's words."""

    tree: Tree
    leaves: list[Any]
    paths: list[str]
    shared: frozenset[int] = frozenset()  # numbers of what is met more than once


@dataclass(frozen=True, slots=True)
class Look:
    """What is taken apart beside tuples, lists, dicts, and what pytree knows."""

    opens: Callable[[Any], bool] = lambda value: False  # whether to look into an object whose state can be seen
    knows: Callable[[Any], Given | Around | None] = lambda value: None  # what is not to be made anew
    same_objects: bool = False  # what is met twice is one
    made_anew: bool = False  # as results are: sets of plain values too, and a tuple that is met twice is one
    subscript: Callable[[Any], str] = lambda key: f"[{key!r}]"  # the place of an item of a dict, in words


_PLAINLY = Look()


def flatten(value: Any, path: str, look: Look = _PLAINLY) -> Flat:
    """Take a nested value apart.

    >>> flat = flatten({"a": 1, "b": [2, 3]}, "x")
    >>> flat.leaves, flat.paths
    ([1, 2, 3], ["x['a']", "x['b'][0]", "x['b'][1]"])
    """
    taking = TakingApart(look)
    return Flat(taking.take(value, path), taking.leaves, taking.paths)


class TakingApart:
    """Takes values apart one after another: what two of them have in common is one object."""

    def __init__(self, look: Look) -> None:
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self.objects: list[tuple[Any, str]] = []  # that have a number, and where they were met first
        self.shared: set[int] = set()  # numbers of what was met again
        self._look = look
        self._numbers: dict[int, int] = {}  # by id
        self._tuples: dict[int, int] = {}  # those of tuples that are whole

    def take(self, value: Any, path: str) -> Tree:
        """The tree of a value; its leaves come to those before."""
        known = self._look.knows(value)
        if known is not None:
            return known
        kind = type(value)
        if kind is tuple or kind is torch.Size:
            return self._take_tuple(value, path)
        if self._look.same_objects and id(value) in self._numbers:
            self.shared.add(self._numbers[id(value)])
            return Again(self._numbers[id(value)])
        if kind is list:
            number = self._number(value, path)
            return Items(kind, self._take_all(value, [f"{path}[{i}]" for i in range(len(value))]), number)
        if kind is dict and (not self._look.same_objects or has_lasting_keys(value)):
            return self._take_dict(value, path, self._number(value, path))
        if self._look.opens(value):
            shape = shape_of(kind)
            assert shape is not None
            return self._take_object(shape, value, path)
        if kind is weakref.ref and value.__callback__ is None and self._look.opens(value()):
            return Weak(self.take(value(), f"{path}()"))
        return self._take_rest(value, path)

    def _take_tuple(self, value: tuple[Any, ...], path: str) -> Tree:
        """A tuple that is made anew is known once it is whole: it may lead to itself."""
        if id(value) in self._tuples:
            self.shared.add(self._tuples[id(value)])
            return Again(self._tuples[id(value)])
        number = self._number(value, path)
        items = self._take_all(value, [f"{path}[{i}]" for i in range(len(value))])
        if self._look.made_anew:
            self._tuples[id(value)] = number
        return Items(type(value), items, number)

    def _take_rest(self, value: Any, path: str) -> Tree:
        """A leaf, or a container that is pytree's own affair."""
        if self._look.made_anew and type(value) in (set, frozenset) and is_plain(value):
            number = self._number(value, path)
            return Items(type(value), self._take_all([*value], [f"{path}{{{item!r}}}" for item in value]), number)
        has_objects_as_keys = self._look.same_objects and is_a(value, dict) and not has_lasting_keys(value)
        if pytree.tree_is_leaf(value) or has_objects_as_keys:
            self.leaves.append(value)
            self.paths.append(path)
            return Leaf(len(self.leaves) - 1)
        number = self._number(value, path)
        below, spec = flatten_registered(value)
        first = len(self.leaves)
        self.leaves.extend(below)
        self.paths.extend(f"{path}.leaf{i}" for i in range(len(below)))
        return Registered(spec, tuple(range(first, len(self.leaves))), number)

    def _take_all(self, values: Sequence[Any], paths: Sequence[str]) -> tuple[Tree, ...]:
        return tuple([self.take(value, path) for value, path in zip(values, paths, strict=True)])

    def _take_dict(self, value: dict[Any, Any], path: str, number: int | None = None) -> Entries:
        paths = [f"{path}{self._look.subscript(key)}" for key in value]
        return Entries(tuple(value), self._take_all([*value.values()], paths), number)

    def take_named(self, values: dict[str, Any], path: str) -> Entries:
        """Attributes or slots of an object."""
        return Entries(tuple(values), self._take_all([*values.values()], [f"{path}.{name}" for name in values]))

    def _take_object(self, shape: Shape, value: Any, path: str) -> Object:
        number = self._number(value, path)
        held = shape.contents(value)
        contents: Items | Entries | None = None
        if shape.is_mapping:
            contents = self._take_dict(held, path)
        elif shape.is_sequence:
            contents = Items(list, self._take_all(held, [f"{path}[{i}]" for i in range(len(held))]))
        attributes = self.take_named(shape.attributes(value), path) if shape.has_attributes else None
        slots = self.take_named(shape.filled(value), path) if shape.slots else None
        return Object(shape, contents, attributes, slots, number)

    def _number(self, value: Any, path: str) -> int:
        """The number of something that is met for the first time."""
        self._numbers[id(value)] = len(self.objects)
        self.objects.append((value, path))
        return len(self.objects) - 1


def flatten_registered(value: Any) -> tuple[list[Any], Any]:
    """What pytree makes of a container, but for a torch.Size in it, which would come back as a tuple."""
    return pytree.tree_flatten(value, is_leaf=_is_known_size)


def _is_known_size(value: Any) -> bool:
    return type(value) is torch.Size and all(type(length) is int for length in value)


def children(tree: Tree) -> tuple[Tree, ...]:
    """What a tree consists of."""
    match tree:
        case Items(_, items) | Entries(_, items):
            return items
        case Object(_, contents, attributes, slots):
            return tuple(part for part in (contents, attributes, slots) if part is not None)
        case Weak(target):
            return (target,)
    return ()


def numbered(tree: Tree) -> Iterator[tuple[int, Numbered]]:
    """All lists, dicts, tuples and objects of a tree that have a number."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, Items | Entries | Object | Registered) and node.number is not None:
            yield node.number, node
        pending.extend(reversed(children(node)))


# ---------------------------------------------------------------------------------------------------------------------
# Put together.
def unflatten(tree: Tree, leaves: Sequence[Any]) -> Any:
    """Put a nested value together.

    >>> unflatten(flatten((1, [2]), "x").tree, [10, 20])
    (10, [20])
    """
    return PuttingTogether(leaves).build(tree)


class PuttingTogether:
    """Makes a nested value, and knows the objects in it by their numbers."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.objects: dict[int, Any] = {}
        self._leaves = leaves

    def build(self, tree: Tree) -> Any:
        """The value that a tree stands for."""
        match tree:
            case Leaf(index):
                return self._leaves[index]
            case Items(kind, items, number):
                made = self._made(number, []) if kind is list else None
                if made is None:
                    return self._made(number, kind(map(self.build, items)))
                made.extend(map(self.build, items))
                return made
            case Entries(keys, items, number):
                made = self._made(number, {})
                made.update(zip(keys, map(self.build, items), strict=True))
                return made
            case Object():
                return self._object(tree)
            case Weak(target):
                return weakref.ref(self.build(target))
            case Again(number):
                if number not in self.objects:
                    raise UnsupportedError("a tuple that leads to itself cannot be put together again.")
                return self.objects[number]
            case Registered(spec, indices, number):
                return self._made(number, pytree.tree_unflatten([self._leaves[i] for i in indices], spec))
            case Around():
                return tree.find()
        raise AssertionError(f"{tree} is in no arguments")

    def _object(self, tree: Object) -> Any:
        shape = tree.shape
        if shape.base is tuple:
            assert tree.contents is not None
            items: Any = [*map(self.build, tree.contents.items)]
            made = self._made(tree.number, shape.make(items))
        else:
            made = self._made(tree.number, shape.make())
            items = None if tree.contents is None else self.build(tree.contents)
        named = [None if part is None else self.build(part) for part in (tree.attributes, tree.slots)]
        return shape.fill(made, items, *named)

    def _made(self, number: int | None, value: Any) -> Any:
        if number is not None:
            self.objects[number] = value
        return value


# ---------------------------------------------------------------------------------------------------------------------
# Put together, as Python text.
def build_expression(
    writer: Writer, tree: Tree, names: Sequence[str], shared: frozenset[int] | set[int] = frozenset()
) -> str:
    """Python text that puts a nested value together from variables; what is `shared` gets one of its own before."""
    match tree:
        case Leaf(index):
            return names[index]
        case Given(place):
            return writer.variable(place)
        case Around():
            return f"{writer.bind(tree.find, 'around')}()"
        case Again(number):
            return writer.variables["built", number]
        case Weak(target):
            return f"{writer.bind(weakref.ref, 'ref')}({build_expression(writer, target, names, shared)})"
        case Items(_, _, number) | Entries(_, _, number) if number in shared:
            if _is_made_at_once(tree):
                return _new(writer, number, _display(writer, tree, names, shared))
            name = _new(writer, number, "[]" if isinstance(tree, Items) else "{}")
            writer.line(f"{name} {'+' if isinstance(tree, Items) else '|'}= {_display(writer, tree, names, shared)}")
            return name
        case Items() | Entries():
            return _display(writer, tree, names, shared)
        case Object():
            return _object_expression(writer, tree, names, shared)
        case Registered(spec, indices, number):
            unflatten_name = writer.bind(pytree.tree_unflatten, "tree_unflatten")
            text = f"{unflatten_name}([{', '.join(names[i] for i in indices)}], {writer.bind(spec, 'spec')})"
            return _new(writer, number, text) if number in shared else text


def _is_made_at_once(tree: Tree) -> bool:
    return isinstance(tree, Items) and tree.kind is not list


def _new(writer: Writer, number: int | None, text: str) -> str:
    name = writer.variables["built", number] = writer.fresh("built")
    writer.line(f"{name} = {text}")
    return name


def _display(
    writer: Writer, tree: Items | Entries | None, names: Sequence[str], shared: frozenset[int] | set[int]
) -> str:
    """The text of a new tuple, list or dict."""
    if tree is None:
        return "None"
    parts = [build_expression(writer, item, names, shared) for item in tree.items]
    if isinstance(tree, Entries):
        pairs = [f"{literal(writer, key)}: {part}" for key, part in zip(tree.keys, parts, strict=True)]
        return f"{{{', '.join(pairs)}}}"
    listed = ", ".join(parts)
    if tree.kind is tuple:
        return f"({listed},)" if parts else "()"
    return f"[{listed}]" if tree.kind is list else f"{writer.bind(tree.kind, tree.kind.__name__)}([{listed}])"


def _object_expression(writer: Writer, tree: Object, names: Sequence[str], shared: frozenset[int] | set[int]) -> str:
    """An object that something else leads to as well is made first, and filled then: it may lead to itself."""
    shape = tree.shape
    parts = (tree.contents, tree.attributes, tree.slots)
    if tree.number not in shared or shape.base is tuple:
        build = _method(writer, shape, "build")
        text = f"{build}({', '.join(_display(writer, part, names, shared) for part in parts)})"
        return _new(writer, tree.number, text) if tree.number in shared else text
    name = _new(writer, tree.number, f"{_method(writer, shape, 'make')}()")
    text = ", ".join(_display(writer, part, names, shared) for part in parts)
    writer.line(f"{_method(writer, shape, 'fill')}({name}, {text})")
    return name


def _method(writer: Writer, shape: Shape, how: str) -> str:
    """A name for what makes, or fills, the objects of a class."""
    known = writer.variables.get((how, shape.kind))
    if known is None:
        known = writer.bind(getattr(shape, how), f"{how}_{shape.kind.__name__}")
        writer.variables[how, shape.kind] = known
    return known


# ---------------------------------------------------------------------------------------------------------------------
# Taken apart, as Python text.
def write_take_apart(writer: Writer, tree: Tree, source: str, names: Sequence[str], miss: str) -> None:
    """Write the lines that check a nested value's structure and give its leaves names."""
    if isinstance(tree, Items | Entries | Object | Registered) and tree.number is not None:
        writer.variables[Part(tree.number)] = source
    match tree:
        case Leaf(index):
            if names[index] != source:
                writer.line(f"{names[index]} = {source}")
        case Again(number):
            writer.line(f"if {source} is not {writer.variable(Part(number))}: {miss}")
        case Items(kind, items):
            kind_name = writer.bind(kind, kind.__name__)
            writer.line(f"if type({source}) is not {kind_name} or len({source}) != {len(items)}: {miss}")
            _take_in_order(writer, items, source, names, miss)
        case Entries():
            _take_entries(writer, tree, source, names, miss, f"type({source}) is not dict or ")
        case Object():
            _take_object(writer, tree, source, names, miss)
        case Weak(target):
            inner = writer.fresh("inner")
            writer.line(f"if type({source}) is not {writer.bind(weakref.ref, 'ref')}: {miss}")
            writer.line(f"{inner} = {source}()")
            write_take_apart(writer, target, inner, names, miss)
        case Registered(spec, indices):
            flatten_name = writer.bind(flatten_registered, "flatten_registered")
            leaves, found = writer.fresh("leaves"), writer.fresh("structure")
            writer.line(f"{leaves}, {found} = {flatten_name}({source})")
            same = writer.bind(same_structure, "same_structure")
            writer.line(f"if not {same}({found}, {writer.bind(spec, 'spec')}): {miss}")
            if indices:
                writer.line(f"{', '.join(names[i] for i in indices)}, = {leaves}")


def _take_entries(
    writer: Writer, tree: Entries, source: str, names: Sequence[str], miss: str, condition: str = ""
) -> None:
    wanted = writer.bind(tree.keys, "keys")
    plain = f"tuple({source}) != {wanted}"
    if not all(type(key) is str for key in tree.keys):  # keys may be equal and of another type
        plain = f"not {writer.bind(same_value, 'same_value')}(tuple({source}), {wanted})"
    writer.line(f"if {condition}{plain}: {miss}")
    _take_items(writer, tree.items, [f"{source}[{literal(writer, key)}]" for key in tree.keys], names, miss)


def _take_object(writer: Writer, tree: Object, source: str, names: Sequence[str], miss: str) -> None:
    """Its class, and then part by part; none of its own code runs."""
    shape = tree.shape
    writer.line(f"if type({source}) is not {writer.bind(shape.kind, shape.kind.__name__)}: {miss}")
    if isinstance(tree.contents, Entries):
        entries = writer.fresh("entries")
        writer.line(f"{entries} = {writer.bind(read_dict, 'read_dict')}({source})")
        _take_entries(writer, tree.contents, entries, names, miss)
    elif tree.contents is not None:
        items = writer.fresh("items")
        iterate = writer.bind(shape.base.__iter__, f"iterate_{shape.base.__name__}")  # type: ignore[attr-defined]
        writer.line(f"{items} = [*{iterate}({source})]")
        writer.line(f"if len({items}) != {len(tree.contents.items)}: {miss}")
        _take_in_order(writer, tree.contents.items, items, names, miss)
    if tree.attributes is not None:
        fields = writer.fresh("fields")
        writer.line(f"{fields} = {read_attributes(writer, source)}")
        _take_entries(writer, tree.attributes, fields, names, miss)
    if tree.slots is not None:
        slots, members = writer.fresh("slots"), writer.bind(shape.slots, "members")
        writer.line(f"{slots} = {writer.bind(filled_slots, 'filled_slots')}({members}, {source})")
        _take_entries(writer, tree.slots, slots, names, miss)


def read_attributes(writer: Writer, source: str) -> str:
    """Text for the dict of an object's attributes."""
    return f"{writer.bind(object.__getattribute__, 'getattribute')}({source}, '__dict__')"


def write_told_apart(writer: Writer, tree: Tree, miss: str) -> None:
    """Write the lines that check that no list, dict or object is given twice unless it was then."""
    alike: dict[Any, list[int]] = {}
    for number, node in numbered(tree):
        if not _is_made_at_once(node):
            alike.setdefault(_kind_of(node), []).append(number)
    for numbers in alike.values():
        if len(numbers) > 1:
            ids = ", ".join(f"id({writer.variable(Part(number))})" for number in numbers)
            writer.line(f"if len({{{ids}}}) != {len(numbers)}: {miss}")


def _kind_of(node: Numbered) -> Any:
    match node:
        case Object(shape):
            return shape.kind
        case Items(kind):
            return kind
        case Registered(spec):
            return spec.type
    return dict


def same_structure(spec: Any, other: Any) -> bool:
    """Whether two structures of pytree are the same, with contexts that are equal and of the same types."""
    if spec.type is not other.type or not same_value(spec.context, other.context):
        return False
    return len(spec.children()) == len(other.children()) and all(map(same_structure, spec.children(), other.children()))


def _take_in_order(writer: Writer, items: Sequence[Tree], source: str, names: Sequence[str], miss: str) -> None:
    if items and all(isinstance(item, Leaf) for item in items):
        targets = ", ".join(names[item.index] for item in items if isinstance(item, Leaf))
        writer.line(f"{targets}, = {source}")
        return
    _take_items(writer, items, [f"{source}[{i}]" for i in range(len(items))], names, miss)


def _take_items(writer: Writer, items: Sequence[Tree], reads: Sequence[str], names: Sequence[str], miss: str) -> None:
    for item, read in zip(items, reads, strict=True):
        if isinstance(item, Leaf):
            writer.line(f"{names[item.index]} = {read}")
        else:
            inner = writer.fresh("inner")
            writer.line(f"{inner} = {read}")
            write_take_apart(writer, item, inner, names, miss)
