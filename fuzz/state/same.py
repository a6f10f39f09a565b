"""Whether two worlds are in the same state, object by object.

A walk over pairs: what stands in the same place in both must be of the same kind and have the same parts, and two
places that hold one object here must hold one object there. It knows nothing of how Foregrad compares.
"""

import collections
import contextvars
import decimal
import enum
import functools
import gc
import math
import pathlib
import queue
import random
import re
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

# Not a name of a library: what belongs to one is none of the user's.
MODULE_NAME = "fuzzed_world"

_PLAIN = (str, bytes, int, type(None), type(...), type(NotImplemented), range, slice, decimal.Decimal)
# Python does not say which equal numbers are one object.
_NUMBERS = (float, complex)
_TORCH_FACTS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
# What Python and torch keep for themselves, in classes and in modules.
_CLASS_DETAILS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "_abc_impl", "__annotations__", "__slotnames__", "_backward_cls"}
)
_NAMESPACE_DETAILS = frozenset({"__builtins__", "__warningregistry__"})
# Where the programs' hooks put gradients: a tangent is put into the layout of its output before it is used.
SEEN_BY_HOOKS = "gradients["
# Where the handle of a hook has the table that the hook is in.
_OF_HOOKS = ".hooks_dict_ref"
# Marks for a front end, on results of symbolic size.
_MARKS = "_dynamo_"
_LONGEST = 70
_HEAP_TYPE = 1 << 9
_MISSING = object()


@dataclass(frozen=True)
class Unlike:
    """One place in which two worlds differ.

    Args:
        aspect: What differs.
        where: The place, as Python that leads to it.
        eager: What is there in the eager world.
        compiled: What is there in the other one.
    """

    aspect: str
    where: str
    eager: str
    compiled: str


@dataclass
class Versions:
    """By how much the version counters of two tensors differed when they were first seen.

    A tensor that a call makes may begin with another count; from then on both must grow alike.
    """

    _seen: dict[int, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)

    def at_first(self, eager: Tensor, compiled: Tensor) -> int:
        """The difference of the counters at the first sight of these tensors.

        >>> Versions().at_first(torch.ones(1), torch.ones(1).add_(1))
        -1

        Args:
            eager: The tensor of the eager world.
            compiled: Its partner.
        """
        known = self._seen.get(id(eager))
        if known is None or known[0]() is not eager:
            known = self._seen[id(eager)] = weakref.ref(eager), eager._version - compiled._version
        return known[1]


@dataclass
class Walk:
    """One comparison of two worlds.

    >>> walk = Walk()
    >>> walk.same("o", {"n": [1]}, {"n": [1.0]})
    >>> [(unlike.where, unlike.eager, unlike.compiled) for unlike in walk.found]
    [("o['n'][0]", 'int 1', 'float 1.0')]
    """

    versions: Versions = field(default_factory=Versions)
    found: list[Unlike] = field(default_factory=list)
    sets: list[tuple[str, Any, Any]] = field(default_factory=list)
    _partners: dict[int, Any] = field(default_factory=dict)
    _taken: dict[int, Any] = field(default_factory=dict)
    _storages: dict[int, int] = field(default_factory=dict)

    def same(self, where: str, eager: Any, compiled: Any) -> None:
        """Compare what stands in one place.

        Args:
            where: The place.
            eager: What is there in the eager world.
            compiled: What is there in the other.
        """
        if eager is compiled and not _is_of_the_world(eager):
            return
        if not self._same_type(where, eager, compiled):
            return
        if isinstance(eager, _PLAIN) and not _has_parts(eager):
            if eager != compiled:
                self._unlike("value", where, eager, compiled)
            return
        if isinstance(eager, _NUMBERS):
            _float(self, where, eager, compiled)
            return
        if id(eager) in self._partners or id(compiled) in self._taken:
            if self._partners.get(id(eager), _MISSING) is not compiled:
                self._unlike("identity", where, eager, compiled)
            return
        # Holding both keeps their ids from being given to others while the walk lasts.
        self._partners[id(eager)], self._taken[id(compiled)] = compiled, eager
        _rule_of(eager)(self, where, eager, compiled)

    def _same_type(self, where: str, eager: Any, compiled: Any) -> bool:
        here, there = type(eager), type(compiled)
        if here is there:
            return True
        if here.__qualname__ == there.__qualname__ and is_own_class(here) and is_own_class(there):
            self.same(f"type({where})", here, there)
            return True
        aspect = "abstract tensor" if is_abstract(compiled) else "type"
        self._unlike(aspect, where, eager, compiled)
        return False

    def _unlike(self, aspect: str, where: str, eager: Any, compiled: Any) -> None:
        self.found.append(Unlike(aspect, where, _shown(eager), _shown(compiled)))

    def equal(self, aspect: str, where: str, eager: Any, compiled: Any) -> bool:
        """Compare one fact of two objects."""
        if eager == compiled:
            return True
        self.found.append(Unlike(aspect, where, str(eager), str(compiled)))
        return False

    def parts(self, where: str, eager: Any, compiled: Any) -> None:
        """Compare attributes: those in dicts and those in slots."""
        if (here := getattr(eager, "__dict__", None)) is not None and isinstance(here, dict):
            self.named(where, here, getattr(compiled, "__dict__", {}))
        for name in _slots(type(eager)):
            self._maybe(f"{where}.{name}", getattr(eager, name, _MISSING), getattr(compiled, name, _MISSING))

    def _maybe(self, where: str, eager: Any, compiled: Any) -> None:
        if eager is _MISSING or compiled is _MISSING:
            if eager is not compiled:
                self._unlike("presence", where, eager, compiled)
            return
        self.same(where, eager, compiled)

    def named(self, where: str, eager: Any, compiled: Any, skip: frozenset[str] = frozenset()) -> None:
        """Compare what two namespaces hold, name by name."""
        for name in [*eager, *(name for name in compiled if name not in eager)]:
            if name not in skip and not str(name).startswith(_MARKS):
                place = f"{where}.{name}" if where else str(name)
                self._maybe(place, eager.get(name, _MISSING), compiled.get(name, _MISSING))

    def items(self, where: str, eager: Any, compiled: Any) -> None:
        """Compare sequences, item by item."""
        if self.equal("length", where, len(eager), len(compiled)):
            for position, (here, there) in enumerate(zip(eager, compiled, strict=True)):
                self.same(f"{where}[{position}]", here, there)

    def entries(self, where: str, eager: Any, compiled: Any) -> None:
        """Compare dicts, in the order of their entries."""
        if not self.equal("length", where, len(eager), len(compiled)):
            return
        for (key, here), (other, there) in zip(eager.items(), compiled.items(), strict=True):
            self.same(f"key of {where}", key, other)
            self.same(f"{where}[{_shown(key, plain=True)}]", here, there)

    def members(self) -> None:
        """Compare sets, when all else that can tell which of their members belong together has been seen.

        Objects hash by their addresses: for the rest, only what they look like can put them in order.
        """
        while self.sets:
            where, *both = self.sets.pop()
            eager, compiled = ([_behind(member) for member in members] for members in both)
            known = [(here, self._partners[id(here)]) for here in eager if id(here) in self._partners]
            apart = [pair for pair in known if not any(there is pair[1] for there in compiled)]
            for here, there in apart:
                self._unlike("member", where, here, there)
            rest = (
                [member for member in members if id(member) not in taken]
                for members, taken in ((eager, self._partners), (compiled, self._taken))
            )
            self.items(where, *(sorted(members, key=_order) for members in rest))

    def storage(self, where: str, eager: Tensor, compiled: Tensor) -> None:
        """Compare which tensors share memory."""
        here, there = eager.untyped_storage()._cdata, compiled.untyped_storage()._cdata
        if self._storages.setdefault(here, there) != there:
            self.found.append(Unlike("storage sharing", where, "in the memory of another", "apart"))


Rule = Callable[[Walk, str, Any, Any], None]


def _tensor(walk: Walk, where: str, eager: Tensor, compiled: Tensor) -> None:
    for aspect, fact in _TENSOR_FACTS.items():
        if aspect == "stride" and where.startswith(SEEN_BY_HOOKS):
            continue
        if not walk.equal(aspect, where, _asked(fact, eager), _asked(fact, compiled)):
            return
    # Autograd takes over or copies a gradient as it sees fit.
    if not where.endswith(".grad") and not where.startswith(SEEN_BY_HOOKS):
        _memory(walk, where, eager, compiled)
    if not _close(eager.detach(), compiled.detach()):
        walk._unlike("value", where, eager, compiled)
    if has_gradient(eager):
        walk.same(f"{where}.grad", eager.grad, compiled.grad)
    walk.parts(where, eager, compiled)


def _asked(fact: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """A fact of a tensor; autograd may refuse to tell it, of a view that was written where it must not be."""
    try:
        return fact(tensor)
    except RuntimeError as error:
        return type(error).__name__


def has_gradient(tensor: Tensor) -> bool:
    """Whether a tensor can have a gradient of its own.

    >>> x = torch.ones(2, requires_grad=True)
    >>> has_gradient(x), has_gradient(x * 2)
    (True, False)

    Args:
        tensor: Any tensor.
    """
    return _asked(lambda t: t.is_leaf or t.retains_grad, tensor) is True


def _memory(walk: Walk, where: str, eager: Tensor, compiled: Tensor) -> None:
    if eager.layout is torch.strided:
        walk.equal("storage offset", where, eager.storage_offset(), compiled.storage_offset())
        walk.storage(where, eager, compiled)
    if not (eager.is_inference() or compiled.is_inference()):  # that both are, or none, is compared too
        first = walk.versions.at_first(eager, compiled)
        walk.equal("version counter", where, eager._version, compiled._version + first)


_TENSOR_FACTS: dict[str, Callable[[Tensor], Any]] = {
    "dtype": lambda t: t.dtype,
    "layout": lambda t: t.layout,
    "shape": lambda t: tuple(t.shape),
    "stride": lambda t: _strides(t) if t.layout is torch.strided else (),
    "requires_grad": lambda t: t.requires_grad,
    "leaf or not": lambda t: t.is_leaf,
    "retains_grad": lambda t: t.retains_grad,
    "inference tensor": lambda t: t.is_inference(),
    # A hook that a program gives to something it computes is part of the graph.
    "hooks": lambda t: len(t._backward_hooks or ()) if t.is_leaf else 0,
}


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Without those of dimensions of size one, which lead to no element."""
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def _close(eager: Tensor, compiled: Tensor) -> bool:
    if torch.equal(eager, compiled):
        return True
    try:
        torch.testing.assert_close(compiled, eager, equal_nan=True)
    except AssertionError:
        return False
    return True


def _float(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    here, there = ((n.real, n.imag) if isinstance(n, complex) else (n,) for n in (eager, compiled))
    if _bits(*here) != _bits(*there):
        walk._unlike("value", where, eager, compiled)


def _bits(*numbers: float) -> bytes:
    return b"".join(b"nan" if math.isnan(n) else struct.pack("d", n) for n in numbers)


def _list(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.items(where, eager, compiled)
    walk.parts(where, eager, compiled)


def _deque(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.equal("maxlen", where, eager.maxlen, compiled.maxlen)
    walk.items(where, eager, compiled)


def _dict(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.entries(where, eager, compiled)
    if isinstance(eager, collections.defaultdict):
        walk.same(f"{where}.default_factory", eager.default_factory, compiled.default_factory)
    walk.parts(where, eager, compiled)


def _set(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.sets.append((where, eager, compiled))


def _behind(member: Any) -> Any:
    """What a weak reference leads to: references look all the same."""
    return member() if isinstance(member, weakref.ref) else member


def _order(member: Any) -> tuple[Any, ...]:
    if isinstance(member, Tensor):
        facts = f"{type(member).__name__} {tuple(member.shape)} {member.is_inference()}"
        return f"tensor {facts}", member.requires_grad, str(_values(member))
    return (f"{type(member).__name__} {_shown(member)}",)


def _values(tensor: Tensor) -> list[float]:
    return [] if is_abstract(tensor) else [round(n, 2) for n in tensor.detach().flatten().double().tolist()]


def _ndarray(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    facts = [(a.dtype, a.shape, a.tobytes()) for a in (eager, compiled)]
    if facts[0] != facts[1]:
        walk._unlike("value", where, eager, compiled)


def _function(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    if eager.__code__ != compiled.__code__:
        walk._unlike("code", where, eager, compiled)
        return
    for name in ("__defaults__", "__kwdefaults__", "__dict__"):
        walk.same(f"{where}.{name}", getattr(eager, name), getattr(compiled, name))
    cells = zip(eager.__code__.co_freevars, eager.__closure__ or (), compiled.__closure__ or (), strict=True)
    for name, here, there in cells:
        _cell(walk, f"{where}.<{name}>", here, there)


def _cell(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    contents = []
    for cell in (eager, compiled):
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            contents.append(_MISSING)
    walk._maybe(where, *contents)


def _method(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.same(f"{where}.__func__", eager.__func__, compiled.__func__)
    walk.same(f"{where}.__self__", eager.__self__, compiled.__self__)


def _builtin(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.equal("value", where, eager.__name__, compiled.__name__)
    walk.same(f"{where}.__self__", getattr(eager, "__self__", None), getattr(compiled, "__self__", None))


def _partial(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    for name in ("func", "args", "keywords", "__dict__"):
        walk.same(f"{where}.{name}", getattr(eager, name), getattr(compiled, name))


def _class(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    if eager is compiled:
        return
    if not (is_own_class(eager) and is_own_class(compiled)):
        walk._unlike("identity", where, eager, compiled)
        return
    walk.items(f"{where}.__bases__", eager.__bases__, compiled.__bases__)
    skip = _CLASS_DETAILS | {"_member_map_", "_value2member_map_"} if issubclass(eager, enum.Enum) else _CLASS_DETAILS
    walk.named(where, vars(eager), vars(compiled), frozenset(skip))


def _module(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    if eager is not compiled:
        walk.named(where, vars(eager), vars(compiled), _NAMESPACE_DETAILS)


def _property(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    for name in ("fget", "fset", "fdel"):
        walk.same(f"{where}.{name}", getattr(eager, name), getattr(compiled, name))


def _wrapped_function(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.same(f"{where}.__func__", eager.__func__, compiled.__func__)


def _random(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.equal("random state", where, eager.getstate(), compiled.getstate())


def _numpy_random(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.equal("random state", where, str(eager.bit_generator.state), str(compiled.bit_generator.state))


def _generator(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    if not torch.equal(eager.get_state(), compiled.get_state()):
        walk._unlike("random state", where, eager, compiled)


def _cache(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    # A compiled call asks no cache again, and one that holds abstract tensors is emptied: what is in it is not lost.
    if compiled.cache_info().currsize > eager.cache_info().currsize:
        walk.equal("cache", where, eager.cache_info(), compiled.cache_info())
    walk.same(f"{where}.__wrapped__", eager.__wrapped__, compiled.__wrapped__)


def _context_variable(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.equal("name", where, eager.name, compiled.name)
    walk._maybe(f"{where}.get()", eager.get(_MISSING), compiled.get(_MISSING))


def _thread_local(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.named(where, vars(eager), vars(compiled))


def _weak_reference(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    if eager() is None and compiled() is not None:
        gc.collect()  # a recording leaves cycles; when Python frees them is not determined in eager either
    here, there = eager(), compiled()
    if where.endswith(_OF_HOOKS) and here is not None and there is not None:
        # Numbers of hooks are given once in a process, and a recording takes some: only their order can be the same.
        walk.items(f"{where}()", list(here.values()), list(there.values()))
        return
    walk.same(f"{where}()", here, there)


def _running_generator(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    frames = eager.gi_frame, compiled.gi_frame
    if None in frames:
        walk.equal("value", where, frames[0] is None, frames[1] is None)
        return
    walk.equal("position", where, frames[0].f_lasti, frames[1].f_lasti)
    walk.named(where, frames[0].f_locals, frames[1].f_locals)


def _queue(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.equal("length", where, eager.qsize(), compiled.qsize())


def _memoryview(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.equal("value", where, eager.tobytes(), compiled.tobytes())


def _iterator(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    walk.same(f"{where}.__reduce__()", eager.__reduce__()[1:], compiled.__reduce__()[1:])


def _path(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    # A path keeps what was worked out when it was last compared.
    walk.equal("value", where, eager.parts, compiled.parts)


def _object(walk: Walk, where: str, eager: Any, compiled: Any) -> None:
    if not _has_parts(eager):
        if not walk.equal("value", where, _shown(eager), _shown(compiled)):
            return
    elif isinstance(eager, (int, str, float, bytes)):
        walk.equal("value", where, _shown(eager), _shown(compiled))
    elif isinstance(eager, (dict, list, tuple)):
        (_dict if isinstance(eager, dict) else _list)(walk, where, eager, compiled)
    walk.parts(where, eager, compiled)


_ITERATORS = tuple(type(iter(kind())) for kind in (list, tuple, dict, set, str, bytes, bytearray))
_KINDS: tuple[tuple[Any, Rule], ...] = (
    (Tensor, _tensor),
    (enum.Enum, _object),
    ((list, tuple), _list),
    (collections.deque, _deque),
    (dict, _dict),
    ((set, frozenset), _set),
    ((numpy.ndarray, numpy.generic), _ndarray),
    (types.FunctionType, _function),
    (types.MethodType, _method),
    (types.BuiltinFunctionType, _builtin),
    (functools.partial, _partial),
    (type, _class),
    (types.ModuleType, _module),
    (property, _property),
    ((staticmethod, classmethod), _wrapped_function),
    (types.CellType, _cell),
    (random.Random, _random),
    (numpy.random.Generator, _numpy_random),
    (torch.Generator, _generator),
    (type(functools.lru_cache(len)), _cache),
    (contextvars.ContextVar, _context_variable),
    (threading.local, _thread_local),
    (weakref.ref, _weak_reference),
    (types.GeneratorType, _running_generator),
    (queue.SimpleQueue, _queue),
    (memoryview, _memoryview),
    (pathlib.PurePath, _path),
    (_ITERATORS, _iterator),
)


# Weakly, for classes of a world lead to all of it.
_RULES: weakref.WeakKeyDictionary[type, Rule] = weakref.WeakKeyDictionary()
_SLOTS: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _rule_of(value: Any) -> Rule:
    kind = type(value)
    if kind not in _RULES:
        _RULES[kind] = next((rule for kinds, rule in _KINDS if issubclass(kind, kinds)), _object)
    return _RULES[kind]


def is_own_class(kind: type) -> bool:
    """Whether a class was made by a program, or for it: none that its module has under its name.

    >>> is_own_class(torch.nn.Linear), is_own_class(type("Linear", (), {}))
    (False, True)

    Args:
        kind: The class.
    """
    if kind.__module__ == MODULE_NAME:
        return True
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not kind and "<locals>" not in kind.__qualname__ and bool(kind.__flags__ & _HEAP_TYPE)


def _is_of_the_world(value: Any) -> bool:
    """Whether a class or an object is one that a program made; the very same one in both worlds would be an error."""
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__ == MODULE_NAME


def _has_parts(value: Any) -> bool:
    return hasattr(value, "__dict__") or bool(_slots(type(value)))


def _slots(kind: type) -> tuple[str, ...]:
    """The slots of a class and its bases."""
    if kind not in _SLOTS:
        _SLOTS[kind] = tuple(_declared(kind))
    return _SLOTS[kind]


def _declared(kind: type) -> list[str]:
    names: list[str] = []
    for base in kind.__mro__:
        declared = vars(base).get("__slots__", ())
        names += [declared] if isinstance(declared, str) else list(declared)
    return [name for name in names if not name.startswith("__")]


def is_abstract(value: Any) -> bool:
    """Whether a value is a tensor that has no data, or belongs to a recording.

    >>> is_abstract(torch.ones(1)), is_abstract(torch.ones(1, device="meta"))
    (False, True)

    Args:
        value: Any object.
    """
    if not isinstance(value, Tensor):
        return False
    kind = type(value)
    return kind.__module__.startswith(("foregrad.", "torch._subclasses")) or value.device.type == "meta"


def _shown(value: Any, plain: bool = False) -> str:
    """A short text for an object, without addresses."""
    if value is _MISSING:
        return "nothing"
    if isinstance(value, Tensor):
        if is_abstract(value):
            return type(value).__name__
        return f"tensor {' '.join(str(value.detach().flatten()[:6].tolist()).split())}"[:_LONGEST]
    text = re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"\s+", " ", repr(value)))[:_LONGEST]
    return text if plain or not isinstance(value, (bool, int, float, str)) else f"{type(value).__name__} {text}"


def differences(eager: Any, compiled: Any, versions: Versions, skip: frozenset[str] = frozenset()) -> list[Unlike]:
    """All places in which two namespaces differ.

    >>> [unlike.where for unlike in differences({"a": 1, "b": -0.0}, {"a": 1, "b": 0.0}, Versions())]
    ['b']

    Args:
        eager: The names of the eager world.
        compiled: The names of the other one.
        versions: What is known of version counters.
        skip: Names that are not compared.
    """
    walk = Walk(versions)
    walk.named("", eager, compiled, skip | _NAMESPACE_DETAILS)
    walk.members()
    return walk.found
