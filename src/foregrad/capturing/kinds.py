"""The kinds of Python objects that hold state: how each is read, put back and written to, and how long it lives."""

from __future__ import annotations

import abc
import array
import collections
import contextvars
import functools
import gc
import io
import itertools
import logging
import operator
import os
import pickle
import random
import sys
import threading
import types
import weakref
from _abc import _get_dump  # type: ignore[import-not-found]  # what Python itself prints of an abstract class
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .._torch import (
    ConcreteModuleType,
    FakeTensor,
    ScriptMethod,
    ScriptModule,
    dict_changes,
    restore_script_attributes,
    script_attributes,
)
from ..codegen.objects import (
    OPAQUE_MODULES,
    filled_slots,
    hides_state,
    put_dict,
    read_dict,
    slot_members,
)
from ..codegen.objects import attributes_of as attributes_of
from ..codegen.objects import has_attributes as has_attributes
from ..codegen.objects import is_a as is_a
from ..codegen.objects import restore_dict as restore_dict
from ..subclasses.layout import is_wrapper
from ..values import PLAIN
from .code import is_library_class


# ---------------------------------------------------------------------------------------------------------------------
# Objects that a compiled program knows and does not keep alive.
#
# A program whose guards have met an object can never run again once that object is gone: nothing else can be it. So
# objects are referred to weakly and known by their ids, and when the first of them goes, whatever else was kept for
# the program is let go with it: lists and dicts, to which Python knows no weak references.
class Lifetime:
    """The objects that one program depends on, as long as all of them live.

    >>> class Thing: pass
    >>> thing, lifetime, said = Thing(), Lifetime(), []
    >>> lifetime.when_gone(lambda: said.append("gone"))
    >>> find = lifetime.hold(thing)
    >>> find() is thing, lifetime.is_gone
    (True, False)
    >>> del thing
    >>> lifetime.is_gone, said
    (True, ['gone'])
    """

    def __init__(self) -> None:
        self.is_gone = False
        self.first_gone = ""  # what it was, once it is gone
        self._kinds: dict[int, str] = {}  # by the id of the reference
        self._references: dict[int, weakref.ref[Any]] = {}  # by the id of the object
        self._actions: list[Callable[[], None]] = []
        this = weakref.ref(self)

        def end(reference: Any) -> None:
            lifetime = this()
            if lifetime is not None:
                lifetime.first_gone = lifetime.first_gone or lifetime._kinds.get(id(reference), "")
                lifetime.end()

        self._callback = end

    def hold(self, value: Any) -> Callable[[], Any]:
        """A way to an object; one that cannot be referred to weakly is kept alive."""
        return self._reference(value) or (lambda: value)

    def knows(self, value: Any) -> bool:
        """Whether an object can be known by its id from now on: no other one has it while this one lives."""
        return self._reference(value) is not None

    def when_gone(self, action: Callable[[], None]) -> None:
        """What is to be done when the first of the objects is gone."""
        self._actions.append(action)

    def _reference(self, value: Any) -> weakref.ref[Any] | None:
        known = self._references.get(id(value))
        if known is None:
            try:
                known = self._references[id(value)] = weakref.ref(value, self._callback)
                self._kinds[id(known)] = _in_words(value)
            except TypeError:
                return None
        return known

    def join(self, other: Lifetime) -> None:
        """Let both end when one does."""
        self.when_gone(other.end)
        other.when_gone(self.end)

    def end(self) -> None:
        """Let everything go. May be called by any thread, wherever Python lets go of something."""
        self.is_gone = True
        actions, self._actions = self._actions, []
        for action in actions:
            action()


def _in_words(value: Any) -> str:
    kind = type(value)
    if kind is types.FunctionType:
        return f"the function {value.__name__}"
    return f"the {kind.__name__} {value.__name__}" if issubclass(kind, type) else f"a {kind.__name__}"


# ---------------------------------------------------------------------------------------------------------------------
# The kinds of Python objects that hold state: how each is read, put back, and written to.
#
# One table serves all that deals with the user's objects: the walk over what a program can reach, the guards on
# it, and the snapshot that undoes what a recording did. An object may be of several kinds: a subclass of `list` has
# items and attributes. One that is of no kind cannot be followed, and a program that reaches it is refused.
#
# >>> [kind.name for kind in kinds_of([1])], kinds_of(iter([1]))
# (['list'], None)
Items = dict[Any, Any]


Compared = Literal["table", "object", "sequence", "numbers", "as read", "not at all"]
"""How the state of an object is compared at each call; by what it leads to only, if not at all."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """How objects of one kind hold state."""

    name: str
    read: Callable[[Any], Items]  # what an object holds, by key
    restore: Callable[[Any, Items], None] | None = None  # make it hold just that again; None if it never changes
    put: Callable[[Any, Any, Any], None] | None = None  # one item more, or another one; None where that cannot be
    is_attribute: bool = False  # keys are names
    compared: Compared = "as read"

    def path(self, owner: str, key: Any) -> str:
        """An item in the user's words; the text of an object is its own affair, and may take long to make."""
        if self.is_attribute:
            return f"{owner}.{key}" if owner else str(key)
        if self is SET:
            return f"{owner}, a set"
        return f"{owner}[{key!r}]" if type(key) in PLAIN else f"{owner}[a {type(key).__name__}]"


# ---------------------------------------------------------------------------------------------- containers
def _restore_list(owner: list[Any], items: Items) -> None:
    list.__setitem__(owner, slice(None), items.values())


def _restore_set(owner: set[Any], items: Items) -> None:
    set.clear(owner)
    set.update(owner, items)


def _restore_deque(owner: collections.deque[Any], items: Items) -> None:
    collections.deque.clear(owner)
    collections.deque.extend(owner, items.values())


def _read_in_order(iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Items]:
    return lambda owner: dict(enumerate(iterate(owner)))


LIST = Kind("list", _read_in_order(list.__iter__), _restore_list, list.__setitem__, compared="sequence")
DICT = Kind("dict", read_dict, restore_dict, put_dict, compared="table")
FACTORY = Kind(  # of a defaultdict
    "default factory",
    lambda owner: {"default_factory": owner.default_factory},
    lambda owner, items: setattr(owner, "default_factory", items["default_factory"]),
    is_attribute=True,
)
SET = Kind("set", lambda owner: {item: item for item in set.__iter__(owner)}, _restore_set, compared="sequence")
_DEQUE = collections.deque
DEQUE = Kind("deque", _read_in_order(_DEQUE.__iter__), _restore_deque, _DEQUE.__setitem__, compared="sequence")
TUPLE = Kind("tuple", _read_in_order(tuple.__iter__), compared="not at all")
FROZENSET = Kind("frozenset", lambda owner: {item: item for item in owner}, compared="sequence")
MAPPING = Kind("mappingproxy", dict)


# ------------------------------------------------------------------------------------------- arrays of numbers
def _restore_bytes(owner: bytearray, items: Items) -> None:
    owner[:] = items["bytes"]


def _restore_array(owner: array.array[Any], items: Items) -> None:
    owner[:] = array.array(owner.typecode, items["bytes"])


def _form(owner: Any) -> Items:
    return {"shape": owner.shape, "strides": owner.strides, "dtype": owner.dtype}


def _read_ndarray(owner: Any) -> Items:
    return {**_form(owner), "bytes": owner.tobytes()}


def _restore_ndarray(owner: Any, items: Items) -> None:
    if _read_ndarray(owner) != items:
        numpy = sys.modules["numpy"]
        owner[...] = numpy.frombuffer(items["bytes"], dtype=items["dtype"]).reshape(items["shape"])


def _read_objects(owner: Any) -> Items:
    return {**_form(owner), **dict(enumerate(owner.ravel().tolist()))}


def _restore_objects(owner: Any, items: Items) -> None:
    for i, place in enumerate(sys.modules["numpy"].ndindex(owner.shape)):
        owner[place] = items[i]


def _read_view(owner: memoryview) -> Items:
    try:
        return {"format": owner.format, "shape": owner.shape, "bytes": owner.tobytes()}
    except ValueError:  # it was released
        return {}


def _restore_view(owner: memoryview, items: Items) -> None:
    if not items or owner.readonly or _read_view(owner) == items:
        return
    before = memoryview(items["bytes"])
    if owner.c_contiguous:
        owner.cast("B")[:] = before
    else:  # of one dimension: Python makes no others
        owner[:] = before.cast(owner.format)  # type: ignore[call-overload]


def _read_stream(owner: io.StringIO | io.BytesIO) -> Items:
    return {} if owner.closed else {"text": owner.getvalue(), "position": owner.tell()}


def _restore_stream(owner: io.StringIO | io.BytesIO, items: Items) -> None:
    if not items or _read_stream(owner) == items:
        return
    owner.seek(0)
    owner.truncate()
    owner.write(items["text"])
    owner.seek(items["position"])


BYTES = Kind("bytearray", lambda owner: {"bytes": bytes(owner)}, _restore_bytes, compared="numbers")
ARRAY = Kind("array", lambda owner: {"bytes": owner.tobytes()}, _restore_array, compared="numbers")
NDARRAY = Kind("numpy array", _read_ndarray, _restore_ndarray, compared="numbers")
OBJECTS = Kind("numpy array of objects", _read_objects, _restore_objects)
VIEW = Kind("memoryview", _read_view, _restore_view, compared="numbers")
STREAM = Kind("file in memory", _read_stream, _restore_stream, compared="numbers")


def size_of(owner: Any, kind: Kind) -> int:
    """How many bytes or characters an object has in it."""
    if kind is NDARRAY:
        return int(owner.nbytes)
    if kind in (VIEW, STREAM):
        return max((len(value) for value in kind.read(owner).values() if isinstance(value, (bytes, str))), default=0)
    return memoryview(owner).nbytes


def memory_of(owner: Any) -> range:
    """The addresses of an array of numbers, which a tensor may share.

    >>> len(memory_of(array.array("d", [1, 2, 3]))), len(memory_of(memoryview(bytearray(6))[::2]))
    (24, 6)
    """
    if is_a(owner, memoryview):
        try:
            owner = owner.obj
        except ValueError:  # it was released
            return range(0)
    if is_a(owner, array.array):
        start, length = owner.buffer_info()
        return range(start, start + length * owner.itemsize)
    if is_a(owner, bytearray) and owner:
        start = torch.frombuffer(owner, dtype=torch.uint8).data_ptr()
        return range(start, start + len(owner))
    interface = getattr(owner, "__array_interface__", None)
    if interface is None or not owner.size:
        return range(0)
    start, reach = interface["data"][0], [(n - 1) * step for n, step in zip(owner.shape, owner.strides, strict=True)]
    return range(start + sum(min(n, 0) for n in reach), start + sum(max(n, 0) for n in reach) + owner.itemsize)


# --------------------------------------------------------------------------------------------------- objects
def has_slots(kind: type) -> bool:
    """Whether a class or a base of it names its attributes."""
    if type(kind) is type and not hasattr(kind, "__slots__"):  # to ask another kind of class may run its code
        return False
    return any("__slots__" in vars(base) for base in kind.__mro__)


def slots_of(owner: Any) -> Items:
    """The filled slots of an object."""
    return filled_slots(slot_members(type(owner)), owner)


def _read_object(owner: Any) -> Items:
    return {"__class__": type(owner), **slots_of(owner), **attributes_of(owner)}


def _restore_object(owner: Any, items: Items) -> None:
    if type(owner) is not items["__class__"]:
        object.__setattr__(owner, "__class__", items["__class__"])
    slots = dict(slot_members(type(owner)))
    for name in slots_of(owner).keys() - items.keys():
        slots[name].__delete__(owner)
    for name in slots.keys() & items.keys():
        slots[name].__set__(owner, items[name])
    if has_attributes(type(owner)):
        plain = {name: value for name, value in items.items() if name not in slots and name != "__class__"}
        restore_dict(attributes_of(owner), plain)


def _put_attribute(owner: Any, name: str, value: Any) -> None:
    slot = dict(slot_members(type(owner))).get(name)
    if slot is not None:
        slot.__set__(owner, value)
    else:
        attributes_of(owner)[name] = value


def _restore_slots(owner: Any, items: Items) -> None:
    for name, member in slot_members(type(owner)):
        if name in items:
            member.__set__(owner, items[name])
        elif name in slots_of(owner):
            member.__delete__(owner)


SLOTS = Kind("slots", slots_of, _restore_slots, _put_attribute, is_attribute=True)
"""Of a module, whose other attributes are compared apart."""
OBJECT = Kind("object", _read_object, _restore_object, _put_attribute, is_attribute=True, compared="object")


# ------------------------------------------------------------------------------- what Python code is made of
def _read_cell(owner: types.CellType) -> Items:
    try:
        return {"cell_contents": owner.cell_contents}
    except ValueError:  # it is empty
        return {}


def _restore_cell(owner: types.CellType, items: Items) -> None:
    if items:
        owner.cell_contents = items["cell_contents"]
    elif _read_cell(owner):
        del owner.cell_contents


def _put_cell(owner: types.CellType, key: Any, value: Any) -> None:
    owner.cell_contents = value


_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__")


def _read_function(owner: types.FunctionType) -> Items:
    return {**{name: getattr(owner, name) for name in _FUNCTION}, **vars(owner)}


def _restore_function(owner: types.FunctionType, items: Items) -> None:
    for name in _FUNCTION:
        if getattr(owner, name) is not items[name]:
            setattr(owner, name, items[name])
    restore_dict(vars(owner), {name: value for name, value in items.items() if name not in _FUNCTION})


def class_dict(kind: type) -> dict[str, Any]:
    """The dict behind the attributes of a class itself; what Python shows of it cannot tell its version."""
    (found,) = gc.get_referents(kind.__dict__)
    return found


def _restore_class(owner: type, items: Items) -> None:
    now = vars(owner)
    for name in [name for name in now if name not in items]:
        type.__delattr__(owner, name)
    for name, value in items.items():
        if vars(owner).get(name) is not value:
            type.__setattr__(owner, name, value)


def _restore_namespace(owner: types.ModuleType, items: Items) -> None:
    restore_dict(vars(owner), items)


def _put_global(owner: types.ModuleType, name: str, value: Any) -> None:
    vars(owner)[name] = value


CELL = Kind("variable", _read_cell, _restore_cell, _put_cell)
FUNCTION = Kind("function", _read_function, _restore_function, setattr, is_attribute=True)
CLASS = Kind("class", lambda owner: dict(vars(owner)), _restore_class, type.__setattr__, is_attribute=True)
NAMESPACE = Kind("Python module", lambda owner: dict(vars(owner)), _restore_namespace, _put_global, is_attribute=True)
METHOD = Kind(
    "method",
    lambda owner: {"__self__": owner.__self__, "__func__": owner.__func__},
    is_attribute=True,
    compared="not at all",
)
CLASS_METHOD = Kind(  # one in C: `apply` of a custom function, from torch 2.15 on
    "method", lambda owner: {"__self__": owner.__self__}, is_attribute=True, compared="not at all"
)
PARTIAL = Kind(
    "partial", lambda owner: {"func": owner.func, "args": owner.args, "keywords": owner.keywords}, is_attribute=True
)
_ACCESSED = ("__func__", "fget", "fset", "fdel", "func")
ACCESSOR = Kind(  # staticmethod, classmethod, property and the like
    "descriptor",
    lambda owner: {name: getattr(owner, name) for name in _ACCESSED if hasattr(owner, name)},
    is_attribute=True,
    compared="not at all",
)
WEAK = Kind("weak reference", lambda owner: {"()": owner()}, is_attribute=True)


def tables_of(cache: Any) -> list[dict[Any, Any]]:
    """Where a cached function keeps what it gave."""
    return [held for held in gc.get_referents(cache) if type(held) is dict and held is not vars(cache)]


def _read_cache(owner: Any) -> Items:
    """What it holds cannot be looked at, but whether anything was put into it or taken out since can.

    A recording fills it as a call would, and the program does not: one that was emptied again is not as it was.
    """
    filled = (*tuple(owner.cache_info())[1:], *map(dict_changes, tables_of(owner)))
    return {"__wrapped__": owner.__wrapped__, "cache_info()": filled}


CACHE = Kind("cached function", _read_cache, is_attribute=True)  # gives what the function would give


def remembers_tensors(cache: Any) -> bool:
    """Whether a cached function was called with tensors, as far as it remembers."""
    keys = itertools.chain.from_iterable(tables_of(cache))
    return any(is_a(part, torch.Tensor) for key in keys if is_a(key, tuple) for part in key)


# ------------------------------------------------------------------------------------------ parts of other classes
def _attributes_beside(model: Any) -> Callable[[Any], Items]:
    """Reads the attributes of an object but for those that all objects of its class have, like the given one."""
    inner = frozenset(vars(model))
    return lambda owner: {name: value for name, value in vars(owner).items() if name not in inner}


_beside_threads = _attributes_beside(threading.Thread())
_beside_loggers = _attributes_beside(logging.getLogger("foregrad"))  # one with a manager, which knows all loggers


def _ids_of(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(id, values))


def _read_logger(owner: logging.Logger) -> Items:
    """What decides whether something is logged. What handlers do is no matter of the program, but whether they are
    the same ones is."""
    levels = {"level": owner.level, "getEffectiveLevel()": owner.getEffectiveLevel(), "disabled": owner.disabled}
    ways = {"handlers": _ids_of(owner.handlers), "hasHandlers()": owner.hasHandlers(), "propagate": owner.propagate}
    return {**levels, **ways, "manager.disable": owner.manager.disable, **_beside_loggers(owner)}


def _restore_logger(owner: logging.Logger, items: Items) -> None:
    owner.setLevel(items["level"])
    owner.disabled, owner.propagate = items["disabled"], items["propagate"]
    owner.manager.disable = items["manager.disable"]
    if _ids_of(owner.handlers) != items["handlers"]:
        every = [*owner.handlers, *(found() for found in logging._handlerList)]  # type: ignore[attr-defined]
        known = {id(handler): handler for handler in every}
        owner.handlers[:] = [known[number] for number in items["handlers"] if number in known]
    _restore_beside(owner, _beside_loggers, items)


def _read_thread(owner: threading.Thread) -> Items:
    return {"name": owner.name, "daemon": owner.daemon, **_beside_threads(owner)}


def _restore_thread(owner: threading.Thread, items: Items) -> None:
    owner.name = items["name"]
    _restore_beside(owner, _beside_threads, items)


_PUT_BACK = ("level", "handlers")  # of a logger, by themselves


def _restore_beside(owner: Any, read: Callable[[Any], Items], items: Items) -> None:
    for name in read(owner).keys() - items.keys():
        del vars(owner)[name]
    vars(owner).update((name, value) for name, value in items.items() if name in vars(owner) and name not in _PUT_BACK)


LOGGER = Kind("logger", _read_logger, _restore_logger, is_attribute=True)
THREAD = Kind("thread", _read_thread, _restore_thread, is_attribute=True)
EXCEPTION = Kind(
    "exception",
    lambda owner: {"args": owner.args},
    lambda owner, items: setattr(owner, "args", items["args"]),
    is_attribute=True,
)
PLAIN_PARTS: dict[type, Callable[[Any], Any]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda owner: bytes.__getitem__(owner, slice(None)),
}
VALUE = Kind(  # of a subclass of a type of plain values, which may have attributes beside it
    "plain value",
    lambda owner: {"value": next(read for kind, read in PLAIN_PARTS.items() if is_a(owner, kind))(owner)},
    is_attribute=True,
    compared="not at all",
)
GETTER = Kind(  # of the module operator: what it was made with
    "getter", lambda owner: dict(enumerate(owner.__reduce__()[1])), compared="not at all"
)
REGISTERED = Kind(  # what counts as a subclass of an abstract class
    "registered classes",
    lambda owner: {id(kind): kind for kind in (found() for found in _get_dump(owner)[0]) if kind is not None},
)
SUBCLASSES = Kind("subclasses", lambda owner: {id(kind): kind for kind in type.__subclasses__(owner)})


# ---------------------------------------------------------------------------------------------------- tensors
def own_attributes(tensor: torch.Tensor) -> dict[str, Any] | None:
    """What the user has put on a tensor, if anything; what a front end or a wrapper subclass keeps is not meant."""
    held = vars(tensor)
    if not held or isinstance(tensor, FakeTensor) or is_wrapper(tensor):
        return None
    return None if all(name.startswith("_dynamo_") for name in held) else held


def is_users_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a wrapper subclass of the user's, who may read and set any attribute of it."""
    return is_wrapper(tensor) and not is_library_class(type(tensor))


# -------------------------------------------------------------------------------------------- state behind calls
_UNSET = object()


def _read_variable(owner: contextvars.ContextVar[Any]) -> Items:
    value = owner.get(_UNSET)
    return {} if value is _UNSET else {"get()": value}


def _restore_variable(owner: contextvars.ContextVar[Any], items: Items) -> None:
    if items and owner.get(_UNSET) is not items["get()"]:
        owner.set(items["get()"])


def _base_of(owner: random.Random) -> Any:
    """Who reads and sets the state of a generator: while a program is recorded, methods of Python's own tell of it."""
    return random.Random if owner is PYTHONS_GENERATOR else type(owner)


PYTHONS_GENERATOR: random.Random = getattr(random.getstate, "__self__")  # noqa: B009


def _restore_environment(owner: Any, items: Items) -> None:
    owner.clear()
    owner.update(items)


def _restore_random(owner: random.Random, items: Items) -> None:
    _base_of(owner).setstate(owner, items["state"])


def _restore_random_state(owner: Any, items: Items) -> None:
    state = items["state"]
    if isinstance(state, bytes):
        owner.set_state(pickle.loads(state))
    else:
        name, words, *others = state
        owner.set_state((name, sys.modules["numpy"].frombuffer(words, dtype="uint32"), *others))


def _frozen_state(owner: Any) -> bytes | tuple[Any, ...]:
    """The state of one of numpy's generators, which holds arrays, as a value that can be compared and given back."""
    state = owner.get_state() if hasattr(owner, "get_state") else owner.bit_generator.state
    if isinstance(state, tuple):  # of a Mersenne Twister, which draws for numpy's functions: each capture looks at it
        name, words, *others = state
        return name, words.tobytes(), *others
    return pickle.dumps(state)


def _restore_generator(owner: Any, items: Items) -> None:
    owner.bit_generator.state = pickle.loads(items["state"])


ENVIRONMENT = Kind("environment", dict, _restore_environment, compared="not at all")
VARIABLE = Kind(
    "context variable",
    _read_variable,
    _restore_variable,
    lambda owner, key, value: owner.set(value) and None,
    is_attribute=True,
)


def _read_state(owner: Any) -> Items:
    return {"state": _frozen_state(owner)}


RANDOM = Kind(
    "random generator",
    lambda owner: {"state": _base_of(owner).getstate(owner)},
    _restore_random,
    is_attribute=True,
    compared="not at all",
)
RANDOM_STATE = Kind("numpy random state", _read_state, _restore_random_state, is_attribute=True, compared="not at all")
GENERATOR = Kind("numpy generator", _read_state, _restore_generator, is_attribute=True, compared="not at all")
SCRIPT_MODULE = Kind("TorchScript module", script_attributes, restore_script_attributes)
RANDOM_KINDS = (RANDOM, RANDOM_STATE, GENERATOR)

# ----------------------------------------------------------------------------------------------------- the table
KINDS: dict[type, Kind] = {
    list: LIST,
    collections.OrderedDict: DICT,
    collections.defaultdict: DICT,
    dict: DICT,
    set: SET,
    tuple: TUPLE,
    frozenset: FROZENSET,
    collections.deque: DEQUE,
    types.MappingProxyType: MAPPING,
    bytearray: BYTES,
    array.array: ARRAY,
    memoryview: VIEW,
    io.StringIO: STREAM,
    io.BytesIO: STREAM,
    types.CellType: CELL,
    types.FunctionType: FUNCTION,
    types.MethodType: METHOD,
    types.ModuleType: NAMESPACE,
    type: CLASS,
    functools.partial: PARTIAL,
    property: ACCESSOR,
    staticmethod: ACCESSOR,
    classmethod: ACCESSOR,
    weakref.ref: WEAK,
    type(functools.lru_cache(len)): CACHE,
    contextvars.ContextVar: VARIABLE,
    type(os.environ): ENVIRONMENT,
    random.Random: RANDOM,
    logging.Logger: LOGGER,
    threading.Thread: THREAD,
    BaseException: EXCEPTION,
    operator.itemgetter: GETTER,
    operator.attrgetter: GETTER,
    operator.methodcaller: GETTER,
    ScriptModule: SCRIPT_MODULE,
    **dict.fromkeys(PLAIN_PARTS, VALUE),
}
"""Builtin types that hold state, and the kind of each; instances of subclasses are of that kind too."""

NUMPY_KINDS: dict[str, Kind] = {"ndarray": NDARRAY}
NUMPY_RANDOM_KINDS: dict[str, Kind] = {"RandomState": RANDOM_STATE, "Generator": GENERATOR}

OPAQUE: tuple[type, ...] = (
    # Known by their identity alone. Code, and what describes it:
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.CodeType,
    types.GenericAlias,
    types.UnionType,
    # Files, locks and what threads wait for: read once, or only there for their side effects.
    io.IOBase,
    type(threading.Lock()),
    type(threading.RLock()),
    type(vars(abc.ABC)["_abc_impl"]),  # see REGISTERED
    # Random state and objects in C++ that are followed while recording.
    torch.Generator,
    torch.ScriptObject,
    ScriptMethod,
    ConcreteModuleType,
)
"""Objects whose state is not looked into, on purpose; those of some modules of torch come on top."""

_IN_MEMORY = (io.StringIO, io.BytesIO)  # files that only the program can see


def kinds_of(value: Any) -> tuple[Kind, ...] | None:
    """The kinds of an object that holds state; none of an opaque one, and None for one that nothing is known about.

    >>> kinds_of(len), [kind.name for kind in kinds_of(collections.Counter())]
    ((), ['dict', 'object'])
    """
    kind = type(value)
    known = KINDS.get(kind) if value is not PYTHONS_GENERATOR else RANDOM
    if known is not None:
        return (known,) if kind is not collections.defaultdict else (DICT, FACTORY)
    if is_a(value, type):
        return (CLASS,)
    if kind is types.BuiltinFunctionType and is_a(value.__self__, type(torch.autograd.Function)):
        return (CLASS_METHOD,)
    is_opaque = is_a(value, OPAQUE) and not is_a(value, _IN_MEMORY)
    if kind is object or is_opaque or f"{kind.__module__}.".startswith(OPAQUE_MODULES):
        return ()
    base, found = _builtin_kind(kind)
    if found == (NDARRAY,) and value.dtype.hasobject:
        found = (OBJECTS,)
    if hides_state(kind, base, len(slot_members(kind))):
        is_function = callable(value) and type(getattr(value, "__name__", None)) is str  # one written in C
        return () if is_function else None
    if (has_attributes(kind) or slot_members(kind)) and found not in ((LOGGER,), (THREAD,)):
        found = (*found, OBJECT)
    return found or None


def _builtin_kind(kind: type) -> tuple[type, tuple[Kind, ...]]:
    """The base of a class that is in the table, and its kind."""
    for base in kind.__mro__:
        if base in KINDS:
            return base, (KINDS[base], FACTORY) if base is collections.defaultdict else (KINDS[base],)
        if base.__module__ == "numpy" and base.__name__ in NUMPY_KINDS:
            return base, (NUMPY_KINDS[base.__name__],)
        if str(base.__module__).startswith("numpy.random") and base.__name__ in NUMPY_RANDOM_KINDS:
            return base, (NUMPY_RANDOM_KINDS[base.__name__],)
        if base in _TRANSPARENT:
            return base, ()
    return object, ()


_TRANSPARENT = frozenset({threading.local})  # parts in C that show as attributes


# ---------------------------------------------------------------------------------------------------------------------
# What functions with an `lru_cache` remember, before a recording and after it.
#
# Such a function neither tells what it remembers nor forgets one result. But the dict that it looks up can be found
# as the garbage collector finds it, and a key that is gone from there is a call that was never made.
class CacheBefore:
    """The calls that a cached function remembers, as it was."""

    __slots__ = ("_before", "_keys", "of")

    def __init__(self, cache: Any) -> None:
        self.of = cache
        self._before = cache.cache_info()
        self._keys = [*_table_of(cache)]

    def forget_later_calls(self) -> None:
        """Make it as it was: tensors of a recording are among what it remembers since then."""
        now = self.of.cache_info()
        if now == self._before:
            return
        before = self._before
        if before.currsize == before.hits == before.misses == 0:
            self.of.cache_clear()
            return
        known, table = {*map(id, self._keys)}, _table_of(self.of)
        for key in [key for key in table if id(key) not in known]:
            del table[key]


def _table_of(cache: Any) -> dict[Any, Any]:
    """The dict in which a cached function looks calls up; one that keeps the order of calls has a list beside it.

    Such a list drops what is not in the dict any more when its turn comes.
    """
    size = cache.cache_info().currsize
    return next((table for table in tables_of(cache) if len(table) == size), {})
