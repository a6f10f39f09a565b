"""Which line of the user's program an operator comes from.

A frame counts as the user's if its file belongs neither to torch nor to Foregrad. Only code objects and places in them
are kept while recording (about a microsecond an operator); lines and text are found when a graph is shown.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
Stack = tuple[tuple[CodeType, int], ...] | str

_NOT_THE_USERS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)
GRADIENT_SUM = "Gradient addition node due to multiple use of tensor around:"


# What is known about code, by id, since Python computes the hash of code anew each time: it, whether it is the user's
# (None where programs start), and what is kept of it.
_known: dict[int, tuple[weakref.ref[CodeType], bool | None, CodeType]] = {}
DEEPEST = 6  # frames of a stack that are kept


def _know(code: CodeType, users: bool | None) -> tuple[weakref.ref[CodeType], bool | None, CodeType]:
    """Note what code is. Stacks keep a copy that tells lines and nothing else: the user's code is not kept alive."""
    forget = functools.partial(_forget, id(code))
    known = _known[id(code)] = weakref.ref(code, forget), users, code.replace(co_consts=()) if users else code
    return known


def _forget(identity: int, _: object) -> None:
    _known.pop(identity, None)


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


def clear_own_frames(error: BaseException) -> None:
    """Let the frames of Foregrad forget their variables, through which an error came.

    One of them mostly has the error itself, which leads back to the frame: the user's objects, which are in the others,
    would live on until a collection happens to come.
    """
    for one in errors_behind(error):
        step = one.__traceback__
        while step is not None:
            if is_own_code(step.tb_frame.f_code):
                with contextlib.suppress(RuntimeError):  # it still runs
                    step.tb_frame.clear()
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
    """The user's frames, innermost first."""
    frame: FrameType | None = sys._getframe(depth)
    found: list[tuple[CodeType, int]] = []
    known = _known
    while frame is not None and len(found) < DEEPEST:
        code = frame.f_code
        noted = known.get(id(code))
        if noted is None:
            is_users_code(code)
            noted = known[id(code)]
        if noted[1]:
            found.append((noted[2], frame.f_lasti))
        elif noted[1] is None and found:
            break
        frame = frame.f_back
    return tuple(found)


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
        return stack.strip().splitlines()[-1] if stack.strip() else "an unknown line"
    if not stack:
        return "an unknown line"
    code, instruction = stack[0]
    return _place(code, _line_of(code, instruction))


def _line_of(code: CodeType, instruction: int) -> int:
    """The line of an instruction; to ask a frame for it takes five times as long as for the instruction."""
    position = next(itertools.islice(code.co_positions(), instruction // 2, None), None)
    return code.co_firstlineno if position is None or position[0] is None else position[0]


def _place(code: CodeType, number: int) -> str:
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number}" + (f": {text}" if text else "")


def place_of(error: BaseException) -> str:
    """The user's line on which an error came about: the innermost of its traceback, or of those who ask now."""
    place, trace = None, error.__traceback__
    while trace is not None:
        if is_users_code(trace.tb_frame.f_code):
            place = _place(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return place or where(user_stack(2))


def passes_through(error: Exception, package: str) -> bool:
    """Whether an error came out of, or through, a package."""
    trace = error.__traceback__
    while trace is not None and not str(trace.tb_frame.f_globals.get("__name__")).startswith(package):
        trace = trace.tb_next
    return trace is not None


def caller_of(error: Exception, package: str) -> str:
    """The function that the user called, and where, when an error came out of a package below it."""
    name = place = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if is_users_code(frame.f_code):
            name, place = None, _place(frame.f_code, trace.tb_lineno)
        elif place is not None:
            name = name or frame.f_code.co_name
            if str(frame.f_globals.get("__name__")).startswith(package):
                return f"{name}, at {place},"
        trace = trace.tb_next
    return f"at {place or 'an unknown line'}"
