"""Where an operator comes from: the user's line, the modules around it, and what the program says about it.

A frame is the user's if its file belongs neither to torch nor to Foregrad. Only code objects and positions are kept
while recording (about a microsecond an operator); lines and text are found when a graph is shown.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import os
import re
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.fx.traceback as fx_traceback
from torch import nn

from ._torch import CALL_OF_A_MODULE
from .errors import ForegradError

P = ParamSpec("P")
R = TypeVar("R")
Stack = tuple[tuple[CodeType, int], ...] | str

_NOT_THE_USERS = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, __file__))
GRADIENT_SUM = "Gradient addition node due to multiple use of tensor around:"


# What is known about code, by id, since Python computes the hash of code anew each time: it, whether it is the user's
# (None where programs start), and what is kept of it.
_known: dict[int, tuple[weakref.ref[CodeType], bool | None, CodeType]] = {}
DEEPEST = 6  # frames of a stack that are kept


def _know(code: CodeType, users: bool | None) -> tuple[weakref.ref[CodeType], bool | None, CodeType]:
    """Note what code is. Stacks keep a copy that tells lines and nothing else: the user's code is not kept alive."""
    forget = functools.partial(_forget, _known, id(code))  # the table itself: the module's names end before it
    known = _known[id(code)] = weakref.ref(code, forget), users, code.replace(co_consts=()) if users else code
    return known


def _forget(known: dict[int, Any], identity: int, _: object) -> None:
    known.pop(identity, None)


def is_users_code(code: CodeType) -> bool:
    """Whether code belongs neither to torch nor to Foregrad."""
    known = _known.get(id(code))
    if known is None:
        name = code.co_filename
        known = _know(code, not name.startswith(_NOT_THE_USERS) and not name.startswith("<frozen"))
    return bool(known[1])


def is_own_code(code: CodeType) -> bool:
    """Whether code belongs to Foregrad."""
    return code.co_filename.startswith(_NOT_THE_USERS[1])


def own_slow_trace() -> Any:
    """What of ours notes the code that runs in this thread, where that slows all of it down: up to Python 3.11."""
    tracing = sys.gettrace() if sys.version_info < (3, 12) else None
    if tracing is None:
        return None
    code = getattr(tracing, "__code__", None)
    return tracing if code is not None and code.co_filename.startswith(_NOT_THE_USERS[1]) else None


def clear_own_frames(error: BaseException) -> None:
    """Let the frames of Foregrad forget their variables, through which an error came.

    One of them mostly has the error itself, which leads back to the frame: the user's objects, which are in the others,
    would live on until a collection happens to come.
    """
    for one in errors_behind(error):
        for step in tracebacks_of(one):
            if is_own_code(step.tb_frame.f_code):
                with contextlib.suppress(RuntimeError):  # it still runs
                    step.tb_frame.clear()


def tracebacks_of(error: BaseException) -> Iterator[TracebackType]:
    """The steps of an error's traceback, outermost first."""
    step = error.__traceback__
    while step is not None:
        yield step
        step = step.tb_next


def errors_behind(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that led to it: each once, for one that was raised again may lead back to itself.

    >>> first, second = ValueError(), KeyError()
    >>> first.__context__, second.__context__ = second, first
    >>> [type(one).__name__ for one in errors_behind(first)]
    ['ValueError', 'KeyError']
    """
    pending, seen = [error], set[int]()
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            pending += [one.__context__, one.__cause__]
            yield one


def starts_programs(function: Callable[P, R]) -> Callable[P, R]:
    """Frames below this function are not the program's own: stacks end there, if they have found anything by then."""
    code: CodeType = function.__code__
    _know(code, None)
    return function


def user_stack(depth: int = 1) -> Stack:
    """The user's frames, innermost first; the text of a front end, where its graph is run."""
    text: str | None = fx_traceback.current_meta.get("stack_trace")
    if text:
        return text
    frame: FrameType | None = sys._getframe(depth)
    found: list[tuple[CodeType, int]] = []
    known = _known
    while frame is not None:
        code = frame.f_code
        try:
            _, users, copy = known[id(code)]
        except KeyError:
            is_users_code(code)
            _, users, copy = known[id(code)]
        if users:
            found.append((copy, frame.f_lasti))
            if len(found) == DEEPEST:
                break
        elif users is None and found:
            break
        frame = frame.f_back
    return tuple(found)


def users_level() -> int:
    """The `stacklevel` of a warning that the caller gives, so that it shows the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_users_code(frame.f_code):
        frame, level = frame.f_back, level + 1
    return level


@functools.lru_cache(maxsize=8192)
def show_stack(stack: Stack) -> str:
    """The text of a stack, outermost first, as a traceback prints it."""
    if isinstance(stack, str):
        return stack
    lines = []
    for code, instruction in reversed(stack):
        number = _line_of(code, instruction)
        lines.append(f'  File "{code.co_filename}", line {number}, in {code.co_name}')
        text = linecache.getline(code.co_filename, number).strip()
        if text:
            lines.append(f"    {text}")
    return "\n".join(lines)


def where(stack: Stack) -> str:
    """One line for an error message: the innermost place in the user's program."""
    if isinstance(stack, str):
        places = _PRINTED.findall(stack)
        users = [place for place in places if not place[0].startswith(_NOT_THE_USERS)]
        if places:
            return "{}:{}: {}".format(*(users or places)[-1])
        return stack.strip().splitlines()[-1] if stack.strip() else "an unknown line"
    if not stack:
        return "an unknown line"
    code, instruction = stack[0]
    return _place(code, _line_of(code, instruction))


_PRINTED = re.compile(r'File "([^"]*)", line (\d+), in .*\n *([^\n]*)')  # what a front end notes in its graph


def _line_of(code: CodeType, instruction: int) -> int:
    """The line of an instruction; to ask a frame for it takes five times as long as for the instruction."""
    position = next(itertools.islice(code.co_positions(), instruction // 2, None), None)
    return code.co_firstlineno if position is None or position[0] is None else position[0]


def _place(code: CodeType, number: int) -> str:
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number}" + (f": {text}" if text else "")


def source_of(error: BaseException) -> str:
    """The user's line on which an error came about: the innermost of its traceback, or of those who ask now."""
    place = None
    for step in tracebacks_of(error):
        if is_users_code(step.tb_frame.f_code):
            place = _place(step.tb_frame.f_code, step.tb_lineno)
    return place or where(user_stack(2))


def note_place(error: BaseException, program: nn.Module | None = None) -> None:
    """Say in one line where an error came about that torch or Foregrad raises; the user's own is left alone.

    The line names the module that was being called, for the line that failed may be torch's own, and the innermost line
    of the user's that calls it: one of their own files, if there is one, rather than of a package that they installed.
    """
    modules: list[nn.Module] = [] if program is None else [program]
    lines: list[tuple[CodeType, int]] = []
    last = None
    for step in tracebacks_of(error):
        last = step.tb_frame.f_code
        if last is CALL_OF_A_MODULE and isinstance(module := step.tb_frame.f_locals.get("self"), nn.Module):
            modules += [module] if module is not program else []
        elif is_users_code(last):
            lines.append((last, step.tb_lineno))
    if last is None or is_users_code(last):
        return
    own = [line for line in lines if not _is_installed(line[0])] or lines
    place = _place(*own[-1]) if own else where(user_stack(2))
    told = place in str(error) or (not own and isinstance(error, ForegradError))  # which says what it is about
    note = "" if told else f"at {place}"
    if modules:
        path, kind = _path_of(modules), type(modules[-1]).__name__
        note = (f"in {path} ({kind})" if path else f"in {kind}") + (note and f", called {note}")
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _is_installed(code: CodeType) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(code.co_filename.split(os.sep))


def _path_of(modules: Sequence[nn.Module]) -> str:
    """The name of the last of some modules in the first, each of which calls the next."""
    called = Called(None, modules[0], "")
    for module in modules[1:]:
        called = Called(called, module, None)
    return called.find_path()


def drop_own_frames(error: BaseException) -> None:
    """Leave the frames of Foregrad out of the traceback of an error that torch raises: it is eager's own."""
    steps = list(tracebacks_of(error))
    if isinstance(error, ForegradError) or not steps or is_own_code(steps[-1].tb_frame.f_code):
        return
    kept = None
    for step in reversed(steps):
        if not is_own_code(step.tb_frame.f_code):
            kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    error.__traceback__ = kept


def passes_through(error: Exception, package: str) -> bool:
    """Whether an error came out of, or through, a package."""
    return any(_is_of(step.tb_frame, package) for step in tracebacks_of(error))


def _is_of(frame: FrameType, package: str) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(package)


def caller_of(error: Exception, package: str) -> str:
    """The function that the user called, and where, when an error came out of a package below it."""
    name = place = None
    for step in tracebacks_of(error):
        frame = step.tb_frame
        if is_users_code(frame.f_code):
            name, place = None, _place(frame.f_code, step.tb_lineno)
        elif place is not None:
            name = name or frame.f_code.co_name
            if _is_of(frame, package):
                return f"{name}, at {place},"
    return f"at {place or 'an unknown line'}"


# ---------------------------------------------------------------------------------------------------------------------
# Where an operator comes from, besides its line: which modules were being called, and what the program says about it.
#
# Only references are kept while recording; names of modules are found when a graph is shown.
class Called:
    """A module that is being called, by another one perhaps."""

    __slots__ = ("_class", "_stack", "module", "outer", "path")

    def __init__(self, outer: Called | None, module: nn.Module, path: str | None) -> None:
        self.outer = outer
        self.module = weakref.ref(module)
        self._class = type(module).__module__, type(module).__qualname__  # which may be its own, and go with it
        self.path = path  # in the outermost module, once it was asked for
        self._stack: dict[str, tuple[str, str]] | None = None

    def stack(self) -> dict[str, tuple[str, str]]:
        """Paths and classes of the modules that are being called, outermost first."""
        if self._stack is None:
            path = self.find_path()
            before = {} if self.outer is None else self.outer.stack()
            self._stack = {**before, path: (path, ".".join(self._class))}
        return dict(self._stack)

    def find_path(self) -> str:
        """Its name in the outermost module; one that is not found in the module that calls it goes by its class."""
        if self.path is None:
            outer, module = None if self.outer is None else self.outer.module(), self.module()
            names = [] if outer is None or module is None else [n for n, m in outer.named_modules() if m is module]
            before = self.outer.find_path() if self.outer is not None and names else ""
            self.path = ".".join(filter(None, (before, *names[:1]))) if names else self._class[1].rpartition(".")[2]
        return self.path


class ModuleCalls:
    """The modules that are being called, innermost first."""

    def __init__(self) -> None:
        self.innermost: Called | None = None
        self.root: nn.Module | None = None  # the program, if it is one
        self.root_is_called = False

    def begin_in(self, module: nn.Module) -> None:
        """The program is the forward of a module, which is being called."""
        self.root, self.innermost = module, Called(None, module, "")

    def enter(self, module: nn.Module) -> Called | None:
        """A module is called; gives what was innermost before."""
        before = self.innermost
        self.root_is_called |= module is self.root
        self.innermost = Called(before, module, "" if module is self.root else None)
        return before


Said = Mapping[str, Any]  # what `torch.fx.traceback` knows of an operator: annotations, and fields of a graph's node
# Of an operator: autograd's number of its node; in backward, of the node that runs and its name; modules; what is said.
Origin = tuple[int, str | None, Called | None, Said | None]


def said_now() -> Said | None:
    """What the program says about the operators that it calls now."""
    meta = fx_traceback.current_meta
    if not meta:
        return None
    return {**meta, "custom": dict(meta["custom"])} if "custom" in meta else meta


class Known(NamedTuple):
    """What is remembered of an operator of the forward, for its backward."""

    stack: Stack = ()
    modules: Called | None = None
    said: Said | None = None


_NOTHING = Known()
_NO_NUMBER = 1 << 62  # nodes that add to gradients are numbered from the end


class KnownOrigins:
    """Operators of the forward, by autograd's number of the node that was made last when they ran."""

    def __init__(self) -> None:
        self._by_number: dict[int, Known] = {}
        self._numbers: list[int] = []

    def add(self, number: int, stack: Stack, modules: Called | None, said: Said | None) -> None:
        if number not in self._by_number:
            self._by_number[number] = Known(stack, modules, said)
            self._numbers.append(number)

    def find(self, number: int) -> Known:
        """The operator that a node belongs to; some nodes are made after it, as that of a write to a view."""
        known = self._by_number.get(number)
        if known is None and number < _NO_NUMBER:
            before = bisect_right(self._numbers, number)
            known = self._by_number[self._numbers[before - 1]] if before else None
        return known or _NOTHING
