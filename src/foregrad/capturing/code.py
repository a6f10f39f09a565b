"""What a program may call and read, as far as its code tells, and what did run."""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from ..values import SETTLED

T = TypeVar("T")

_LIBRARIES = frozenset({"torch", "foregrad", "numpy", *sys.stdlib_module_names})


@functools.cache
def in_a_library(module: str | None) -> bool:
    """Whether a class or function is Python's, torch's or ours: its state is its own matter, and not looked into."""
    return type(module) is str and module != "__main__" and module.partition(".")[0] in _LIBRARIES


def is_library_function(function: types.FunctionType) -> bool:
    """Whether a function belongs to Python, torch, numpy or us: its file tells, for code may say any name of itself."""
    return is_library_file(function.__code__.co_filename)


@functools.cache
def is_library_file(name: str) -> bool:
    """Whether a file of code belongs to Python, torch, numpy or us."""
    if name.startswith(_OTHER_PACKAGES) and not name.startswith(_OWN_PACKAGES):
        return False
    return name.startswith((*_OWN_PACKAGES, *_PYTHONS_OWN, "<frozen"))


def is_library_class(kind: type) -> bool:
    """Whether a class belongs to Python, torch, numpy or us, and is found where it says that it is."""
    if not in_a_library(kind.__module__):
        return False
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is kind or not kind.__dictoffset__ or kind.__module__.partition(".")[0] in ("torch", "foregrad")


def found_where_it_says(kind: type) -> bool:
    """Whether a class is in the Python module that it names, under its name; none of the user's code runs."""
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found is kind


def is_library_module(module: types.ModuleType) -> bool:
    """Whether a Python module belongs to Python, torch, numpy or us."""
    if type(module) is not types.ModuleType and in_a_library(type(module).__module__):
        return True  # operators of torch are in modules of its own making, which it fills as they are named
    return in_a_library(module.__name__) and sys.modules.get(module.__name__) is module


_PYTHONS_OWN = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)})
_OTHER_PACKAGES = tuple(
    os.path.join(path, source) for path in _PYTHONS_OWN for source in ("site-packages", "dist-packages")
)
_OWN_PACKAGES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(__file__), getattr(sys.modules.get("numpy"), "__file__", None))
    if path is not None
)

Use = Literal["by others", "by name", "to make one", "to prepare one"]
_MAKES_ONE = frozenset({"__init__", "__new__", "__post_init__", "__set_name__", "__init_subclass__"})
_CALLED_BY_TORCH = ("forward", "_call_impl", "_wrapped_call_impl", "_slow_forward", "modules", "children", "parameters")
_PREPARES_ONE = frozenset(
    name for name in vars(nn.Module) if not name.startswith(("__", "named_", "get_", *_CALLED_BY_TORCH))
)


def methods_of(kind: type) -> list[tuple[str, types.FunctionType, Use]]:
    """The functions of a class, and what calls them: code that names them, or Python and torch by themselves.

    What a module does to be moved, loaded or printed (`to`, `float`, `train`) is a part of programs that name it.
    """
    known = _names_of(tuple(base for base in kind.__mro__ if is_library_class(base)))
    is_module = issubclass(kind, nn.Module)
    found: list[tuple[str, types.FunctionType, Use]] = []
    for name, member in vars(kind).items():
        function = member
        if type(member) is not types.FunctionType:
            function = None if type(member) in SETTLED else _behind(member)
            if not isinstance(function, types.FunctionType):
                continue
        use: Use = "by others" if name.startswith("__") or name in known else "by name"
        if name in _MAKES_ONE:
            use = "to make one"
        elif is_module and name in _PREPARES_ONE:
            use = "to prepare one"
        found.append((name, function, use))
    return found


def _behind(member: Any) -> Any:
    """The function in a descriptor of Python's own; no code of the user's runs."""
    kind = type(member)
    if issubclass(kind, (staticmethod, classmethod)):
        return member.__func__
    if issubclass(kind, property):
        return member.fget
    return member.func if issubclass(kind, functools.cached_property) else None


@functools.lru_cache(maxsize=1024)
def _names_of(classes: tuple[type, ...]) -> frozenset[str]:
    """All names in classes of a library, which stay as they are."""
    return frozenset().union(*map(vars, classes))


class Names(NamedTuple):
    """Names that stand in a function and in the functions inside it."""

    loaded: frozenset[str] = frozenset()  # globals
    stored: frozenset[str] = frozenset()  # globals that it assigns
    attributes: frozenset[str] = frozenset()  # of anything, also where they are written as text
    assigned: frozenset[str] = frozenset()  # those that it may assign
    imported: frozenset[str] = frozenset()  # Python modules
    computed: bool = False  # others may be put together when it runs
    compares: bool = False  # which object something is may make a difference: `is`, `id()`


ANY_MODULE = "*"
"""Stands among imported names where code may put the name of a Python module together."""

READ_NAMESPACE = frozenset({"globals", "eval", "exec"})
"""Functions of Python that find all globals, whatever their names."""

BUILTINS_THAT_LOOK_UP = frozenset({"vars", "eval", "exec", "globals", "locals"})  # also names of methods of others
_LOOK_UP = BUILTINS_THAT_LOOK_UP | {"attrgetter", "methodcaller", "getmembers", "__dict__"}
_READ_ALL = _LOOK_UP | {
    "__match_args__",
    "getattr",
    "__getattribute__",
    "asdict",
    "astuple",
    "fields",
    "replace",
    "copy",
    "deepcopy",
    "dump",
    "dumps",
    "pformat",
    "format",
    "format_map",
    "dir",
}


def may_read_all(names: Names) -> bool:
    """Whether code may read attributes whose names do not stand in it."""
    return not _READ_ALL.isdisjoint(names.attributes)


def _computes_names(code: types.CodeType, loaded: Sequence[str]) -> bool:
    """Whether code may call methods by names that do not stand in it. A class that finds attributes its own way does
    not: whoever asks it names them. Nor does `model.eval()`."""
    if code.co_name in ("__getattr__", "__getattribute__", "__setattr__", "__delattr__"):
        return False
    names = _LOOK_UP.intersection(code.co_names)
    if names and (not names <= BUILTINS_THAT_LOOK_UP or not names.isdisjoint(loaded)):
        return True
    return "getattr" in code.co_names and not _names_are_written_out(code)


def _names_are_written_out(code: types.CodeType) -> bool:
    """Whether `getattr` is called with a name that stands there, wherever it is called."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "PRECALL", "EXTENDED_ARG")]
    return all(
        _second_argument_is_text(instructions[at + 1 :])
        for at, instruction in enumerate(instructions)
        if instruction.argval == "getattr" and instruction.opname.startswith("LOAD")
    )


def _second_argument_is_text(rest: list[dis.Instruction]) -> bool:
    """Follow the stack up to the call: the second argument must be a constant that nothing is done to."""
    depth, text_at = 0, None
    for at, instruction in enumerate(rest):
        if instruction.opname == "CALL" and instruction.argval == depth:
            return text_at is not None
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            return False
        depth += dis.stack_effect(instruction.opcode, instruction.arg)
        if depth < 1:
            return False
        if depth == 2 and text_at is None and instruction.opname == "LOAD_CONST" and type(instruction.argval) is str:
            text_at = at
        elif depth == 2 or (depth == 1 and at > 0):
            text_at = None
    return False


_names: dict[int, tuple[weakref.ref[types.CodeType], Names]] = {}  # by id: Python computes the hash of code each time


def names_in(code: types.CodeType) -> Names:
    """The names in a function."""
    known = _names.get(id(code))
    if known is None or known[0]() is not code:  # the id may have belonged to code that is gone
        known = _names[id(code)] = weakref.ref(code), _read_names(code)
    return known[1]


def _read_names(code: types.CodeType) -> Names:
    """Read from the bytes of code, since taking instructions apart would cost more than recording.

    Each instruction has one byte for itself and one for its argument.
    """
    words, names, constants = code.co_code, code.co_names, code.co_consts  # each is made anew when it is asked for
    operations, arguments = words[::2], words[1::2]
    loaded = [names[number >> 1] for number in _arguments_of(_LOAD_GLOBAL, operations, arguments)]
    loaded += [names[number] for number in _arguments_of(_LOAD_NAME, operations, arguments)]
    stored = [names[number] for number in _arguments_of(_STORE_GLOBAL, operations, arguments)]
    imported = [names[number] for number in _arguments_of(_IMPORT_NAME, operations, arguments)]
    assigned = [names[number] for number in _arguments_of(_STORE_ATTR, operations, arguments)]
    assigned += [names[number] for number in _arguments_of(_DELETE_ATTR, operations, arguments)]
    texts = [constant for constant in constants if type(constant) is str and constant.isidentifier()]
    texts += _read_by_patterns(constants, [*_arguments_of(_MATCH_CLASS, operations, arguments)])
    if _finds_modules(names, code):
        imported += [ANY_MODULE, *(constant for constant in constants if type(constant) is str)]
    if not _ASSIGN.isdisjoint(names):
        assigned += texts
    own = Names(
        *(frozenset(loaded), frozenset(stored), frozenset((*texts, *names)), frozenset(assigned), frozenset(imported)),
        computed=_computes_names(code, loaded),
        compares="id" in loaded or _compares_objects(operations),
    )
    return functools.reduce(_joined, [names_in(one) for one in constants if type(one) is types.CodeType], own)


def _joined(one: Names, other: Names) -> Names:
    return Names(*map(operator.or_, one, other))


def _read_by_patterns(constants: Sequence[Any], classes: Sequence[int]) -> list[str]:
    """Names of attributes that patterns with classes read: `case Point(x=0)`; for `case Point(0)` the class knows."""
    if not classes:
        return []
    names = [name for constant in constants if type(constant) is tuple for name in constant if type(name) is str]
    return [*names, "__match_args__"] if any(classes) else names


def _compares_objects(operations: bytes) -> bool:
    """Whether code asks for one object, other than a constant: `a is b`, not `a is None`."""
    at = operations.find(_IS_OP)
    while at > 0 and operations[at - 1] == _LOAD_CONST:
        at = operations.find(_IS_OP, at + 1)
    return at >= 0


def _finds_modules(names: Sequence[str], code: types.CodeType) -> bool:
    """Whether code may look for Python modules by what they are called."""
    if "modules" in names and "sys" in (*names, *code.co_freevars, *code.co_varnames):
        return True
    return "import_module" in names or "__import__" in names


_LOAD_GLOBAL, _LOAD_NAME, _STORE_GLOBAL, _IMPORT_NAME, _EXTENDED_ARG = map(
    dis.opmap.__getitem__, ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "IMPORT_NAME", "EXTENDED_ARG")
)


_STORE_ATTR, _DELETE_ATTR = dis.opmap["STORE_ATTR"], dis.opmap["DELETE_ATTR"]
_ASSIGN = frozenset({"setattr", "delattr", "__setattr__", "__delattr__", "__dict__", "vars"})
_IS_OP, _LOAD_CONST, _MATCH_CLASS = dis.opmap["IS_OP"], dis.opmap["LOAD_CONST"], dis.opmap["MATCH_CLASS"]


def _arguments_of(operation: int, operations: bytes, arguments: bytes) -> Iterator[int]:
    """The arguments of one kind of instruction."""
    at = operations.find(operation)
    while at >= 0:
        argument, shift, before = arguments[at], 8, at - 1
        while before >= 0 and operations[before] == _EXTENDED_ARG:
            argument |= arguments[before] << shift
            shift, before = shift + 8, before - 1
        yield argument
        at = operations.find(operation, at + 1)


# ---------------------------------------------------------------------------------------------------------------------
# What counts of everything that a program could reach: one of these cases.
class Scope:
    """What the names in the program's code lead to: more than it calls and reads, as far as names tell.

    A program that puts names together needs one of the others: the walk ends where it does so.
    """

    needs_names = True  # the names in code must tell everything
    knows_code = False  # which code runs is known
    finds_any_name = False  # names that do not stand in the code count too
    reads_everything = True  # any attribute of an object may be read

    def calls(self, code: types.CodeType) -> bool:
        """Whether a function with this code counts, once it was found."""
        return True

    def reads(self, kind: type) -> Container[str] | None:
        """Names of attributes that are read of objects of a class; None if it may be any."""
        return None


class AnyName(Scope):
    """Whatever may be called, by any name: for a program that puts names together, where none can see what runs."""

    needs_names = False
    finds_any_name = True


class AboutToRun(AnyName):
    """Whatever functions may read that are about to run."""

    knows_code = True


class ReadByName(Scope):
    """What the program may call, and attributes of these names."""

    needs_names = False

    def __init__(self, names: Names) -> None:
        self._names = names
        self.reads_everything = may_read_all(names)

    def reads(self, kind: type) -> Container[str] | None:
        return None if self.reads_everything or self._reads_itself(kind) else self._names.attributes

    def _reads_itself(self, kind: type) -> bool:
        return not issubclass(kind, nn.Module) and reads_itself(kind)


class KnownCode(ReadByName):
    """What the code that ran calls, and reads by the names in it."""

    knows_code = True
    finds_any_name = True

    def __init__(self, code: Mapping[int, types.CodeType]) -> None:
        self._code = code  # by id
        super().__init__(Names(attributes=frozenset().union(*(names_in(c).attributes for c in code.values()))))

    def calls(self, code: types.CodeType) -> bool:
        return id(code) in self._code

    def _reads_itself(self, kind: type) -> bool:
        return reads_itself(kind)


class CodeThatRan(Scope):
    """The code of all functions that were called while it was noted."""

    needs_names = False
    knows_code = True
    finds_any_name = True

    def __init__(self, before: Callable[[types.FrameType], None] | None = None) -> None:
        self.code: dict[int, types.CodeType] = {}  # by id
        self._done = set[int]()  # ids of what is known by now
        self._before = before  # is told of the user's functions when they are about to run for the first time
        self._looking = set[int]()  # ids of what reads attributes whose names do not stand in it, in Python's library
        self._called = set[int]()  # those among them that the user's code has called itself
        self.named_beside = set[str]()  # attributes that getters of Python's module operator read
        self._named = weakref.WeakKeyDictionary[type, frozenset[str]]()  # see `reads`

    def _note(self, frame: types.FrameType) -> None:
        """A function is called that was not called before, or one that looks for names."""
        code = frame.f_code
        known = id(code)
        if known not in self.code:
            self.code[known] = code
            if not is_library_file(code.co_filename):
                if self._before is not None:
                    self._before(frame)
            elif not code.co_filename.startswith(_OWN_PACKAGES):
                self._looking.update([known] if may_read_all(names_in(code)) else [])
        if known not in self._looking:
            self._done.add(known)
        elif frame.f_back is not None and not is_library_file(frame.f_back.f_code.co_filename):
            self._called.add(known)
            self._done.add(known)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what is called; what runs meanwhile is a good deal slower."""
        before, known = sys.gettrace(), self._done

        def note(frame: types.FrameType, event: str, argument: Any) -> None:  # for each call: nearly all are known
            if id(frame.f_code) not in known:
                self._note(frame)

        sys.settrace(note)
        try:
            yield
        finally:
            sys.settrace(before)

    def calls(self, code: types.CodeType) -> bool:
        return id(code) in self.code

    @functools.cached_property
    def reads_everything(self) -> bool:  # type: ignore[override]
        """Whether code of the user's, or of Python's library for it, may have read any attribute of an object."""
        looking = [self.code[known] for known in self._called]
        return any(may_read_all(names_in(code)) for code in (*looking, *filter(_is_users, self.code.values())))

    @functools.cached_property
    def _named_by_user(self) -> frozenset[str]:
        return frozenset().union(*(names_in(code).attributes for code in filter(_is_users, self.code.values())))

    def reads(self, kind: type) -> Container[str] | None:
        """What the user's code has read, or methods of the library's classes that a class derives from."""
        if self.reads_everything:
            return None
        if kind not in self._named:
            files = set[str | None]().union(*map(_files_of, filter(is_library_class, kind.__mro__)))
            inner = (names_in(code).attributes for code in self.code.values() if code.co_filename in files)
            self._named[kind] = self._named_by_user.union(self.named_beside, *inner)
        return self._named[kind]


def _once_for_each_class(function: Callable[[type], T]) -> Callable[[type], T]:
    """Remember what a function says of classes, which are not kept alive: some are made for one object."""
    known: weakref.WeakKeyDictionary[type, T] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def remembered(kind: type) -> T:
        if kind not in known:
            known[kind] = function(kind)
        return known[kind]

    return remembered


@_once_for_each_class
def _files_of(kind: type) -> frozenset[str | None]:
    """Where the code of a library's class stands; it may say that it is of another module (`torch.optim.Adafactor`)."""
    methods = [member for member in vars(kind).values() if type(member) is types.FunctionType]
    own = {method.__code__.co_filename for method in methods}
    return frozenset({getattr(sys.modules.get(kind.__module__), "__file__", None), *own})


def reads_itself(kind: type) -> bool:
    """Whether methods of a library read attributes of an object, which no name in the program tells (`UserDict`)."""
    return any(is_library_class(base) and _has_python_code(base) for base in kind.__mro__)


@_once_for_each_class
def _has_python_code(kind: type) -> bool:
    """Whether a class of a library is written in Python."""
    return any(type(member) is types.FunctionType for member in vars(kind).values())


def _is_users(code: types.CodeType) -> bool:
    """Whether code belongs to the user, and is no module that was imported or class that was made meanwhile."""
    return not is_library_file(code.co_filename) and code.co_name not in ("<module>", "__create_fn__")


def can_see_code_that_runs() -> bool:
    """Whether no debugger or the like is at work."""
    return sys.gettrace() is None
