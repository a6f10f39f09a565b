"""What a function may call, as far as its code tells, and what did run."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from torch import nn

_LIBRARIES = frozenset({"torch", "foregrad", *sys.stdlib_module_names})


@functools.cache
def in_a_library(module: str | None) -> bool:
    """Whether a class or function is Python's, torch's or ours: its state is its own matter, and not looked into."""
    return module is not None and module != "__main__" and module.partition(".")[0] in _LIBRARIES


Use = Literal["by others", "by name", "to make one"]
_MAKES_ONE = frozenset({"__init__", "__new__", "__post_init__", "__set_name__", "__init_subclass__"})
_DESCRIBES_ONE = frozenset({"__repr__", "__str__", "__format__", "__dir__", "__sizeof__", "__reduce__"})
_PREPARES_ONE = frozenset(name for name in vars(nn.Module) if not name.startswith("__")) - {"forward"}


def methods_of(kind: type) -> list[tuple[str, types.FunctionType, Use]]:
    """The functions of a class, and who calls them: somebody who names them, or Python and torch by themselves.

    What a module does to be moved, loaded or printed (`to`, `float`, `train`) is no part of a program, and has the
    names of what tensors do.
    """
    known = _names_of(tuple(base for base in kind.__mro__ if in_a_library(base.__module__)))
    is_module = issubclass(kind, nn.Module)
    found: list[tuple[str, types.FunctionType, Use]] = []
    for name, member in vars(kind).items():
        function = member
        if type(member) is not types.FunctionType:
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not isinstance(function, types.FunctionType):
                continue
        if is_module and name in _PREPARES_ONE:
            continue
        by_others = (name.startswith("__") or name in known) and name not in _DESCRIBES_ONE
        use: Use = "to make one" if name in _MAKES_ONE else "by others" if by_others else "by name"
        found.append((name, function, use))
    return found


@functools.lru_cache(maxsize=1024)
def _names_of(classes: tuple[type, ...]) -> frozenset[str]:
    """All names in classes of a library, which stay as they are."""
    return frozenset().union(*map(vars, classes))


class Names(NamedTuple):
    """Names that stand in a function and in the functions inside it."""

    loaded: frozenset[str]  # globals
    stored: frozenset[str]  # globals that it assigns
    attributes: frozenset[str]  # of anything, also where they are written as text


_names: dict[int, tuple[types.CodeType, Names]] = {}  # by id: Python computes the hash of code anew each time


def names_in(code: types.CodeType) -> Names:
    """The names in a function."""
    known = _names.get(id(code))
    if known is None:
        known = _names[id(code)] = code, _read_names(code)
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
    texts = [constant for constant in constants if type(constant) is str and constant.isidentifier()]
    inner = [names_in(constant) for constant in constants if type(constant) is types.CodeType]
    if not inner:
        return Names(frozenset(loaded), frozenset(stored), frozenset((*texts, *names)))
    return Names(
        frozenset(loaded).union(*(found.loaded for found in inner)),
        frozenset(stored).union(*(found.stored for found in inner)),
        frozenset((*texts, *names)).union(*(found.attributes for found in inner)),
    )


_LOAD_GLOBAL, _LOAD_NAME, _STORE_GLOBAL, _EXTENDED_ARG = map(
    dis.opmap.__getitem__, ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "EXTENDED_ARG")
)


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


@contextlib.contextmanager
def code_that_runs(wanted: bool) -> Iterator[dict[int, types.CodeType] | None]:
    """Collects the code of all functions that are called, by its id; None where it is not wanted or cannot be known.

    It makes a recording slower by an eighth.
    """
    if not wanted or sys.gettrace() is not None:  # a debugger or the like is at work
        yield None
        return
    ran: dict[int, types.CodeType] = {}

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        ran[id(frame.f_code)] = frame.f_code

    sys.settrace(note)
    try:
        yield ran
    finally:
        sys.settrace(None)
