"""What the command line names: a program in a file or a module, and what to call it with."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class BadUsage(Exception):
    """What was given on the command line cannot be used; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments for a program."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor to make, as `--shape x=2x128:int64` says."""

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(text: str) -> Shape:
        """Read one.

        >>> Shape.of("x=2x128:int64")
        Shape(name='x', size=(2, 128), dtype=torch.int64)
        >>> Shape.of("scale=()")
        Shape(name='scale', size=(), dtype=torch.float32)
        """
        found = re.fullmatch(r"(\w+)=(\(\)|\d+(?:x\d+)*)(?::(?:torch\.)?(\w+))?", text)
        if found is None:
            raise BadUsage(
                f"--shape {text}: expected NAME=SIZES or NAME=SIZES:DTYPE, such as x=2x128:int64 or scale=()."
            )
        name, sizes, dtype = found.groups()
        kind = getattr(torch, dtype or "float32", None)
        if not isinstance(kind, torch.dtype):
            raise BadUsage(f"--shape {text}: there is no dtype {dtype}. {_similar(dtype, _DTYPES)}")
        return Shape(name, () if sizes == "()" else tuple(map(int, sizes.split("x"))), kind)

    def make(self, requires_grad: bool) -> Tensor:
        """Numbers that mean little: zeros for integers, which are mostly indices, and draws for others."""
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            return torch.zeros(self.size, dtype=self.dtype)
        drawn = torch.rand(self.size, generator=torch.Generator().manual_seed(0))
        return drawn.to(self.dtype).requires_grad_(requires_grad)


_DTYPES = sorted(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))


def program_named(text: str, names: Sequence[str]) -> Callable[..., Any]:
    """A function or module; a class of modules is made, and a function without arguments is asked for one.

    `names` are the arguments that are given: a function that takes them is the program itself.
    """
    found = value_named(text)
    if isinstance(found, type) and issubclass(found, nn.Module):
        with _told(f"{found.__name__}() raises", "Name a function without arguments that makes the module."):
            return found()
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise BadUsage(
            f"{text} is a {type(found).__name__}: expected a function, a module, or a function that makes one."
        )
    parameters = parameters_of(found)
    wanted = [
        p for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if wanted or parameters is _UNKNOWN or (names and set(names) <= parameters.keys()):
        return found
    with _told(f"{text}() raises", "Expected a function that makes a module without arguments."):
        made = found()
    return made if callable(made) else found


_UNKNOWN: Mapping[str, inspect.Parameter] = {}


def parameters_of(program: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function, or of a module's forward; `_UNKNOWN` for functions in C that do not tell."""
    try:
        return inspect.signature(program.forward if isinstance(program, nn.Module) else program).parameters
    except (TypeError, ValueError):
        return _UNKNOWN


def calls_of(program: Callable[..., Any], inputs: Sequence[str], shapes: Sequence[str]) -> list[Call]:
    """The calls that were asked for: one for each of `--inputs`, or as many as one name has shapes."""
    calls = [_call_from(text) for text in inputs] if inputs else _calls_with(program, [Shape.of(s) for s in shapes])
    parameters = parameters_of(program)
    for call in calls if parameters is not _UNKNOWN else ():
        try:
            inspect.Signature(list(parameters.values())).bind(*call.args, **call.kwargs)
        except TypeError as error:
            takes = ", ".join(map(str, parameters.values()))
            raise BadUsage(
                f"the inputs do not fit the program, which takes ({takes}): {error}. "
                "Give each with --shape NAME=2x128:int64, or all with --inputs FILE:FACTORY."
            ) from None
    return calls


def _call_from(text: str) -> Call:
    """What a factory gives: a tuple of arguments, a dict of keyword arguments, both in a tuple, or the one argument."""
    given = value_named(text)
    if callable(given) and not isinstance(given, Tensor):
        with _told(f"{text}() raises", "Expected a function without arguments that gives those of the program."):
            given = given()
    match given:
        case (tuple() | list() as args, dict() as kwargs):
            return Call(tuple(args), kwargs)
        case tuple() | list():
            return Call(tuple(given), {})
        case dict() if all(isinstance(name, str) for name in given):
            return Call((), given)
    return Call((given,), {})


def _calls_with(program: Callable[..., Any], shapes: Sequence[Shape]) -> list[Call]:
    by_name: dict[str, list[Shape]] = {}
    for shape in shapes:
        by_name.setdefault(shape.name, []).append(shape)
    parameters = parameters_of(program)
    open_ended = parameters is _UNKNOWN or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in by_name if not open_ended else ():
        if name not in parameters:
            raise BadUsage(f"--shape {name}=...: the program has no such argument. {_similar(name, list(parameters))}")
    # What has no weights is differentiated with respect to its arguments.
    weights = program.parameters() if isinstance(program, nn.Module) else ()
    grad = not any(weight.requires_grad for weight in weights)
    calls = []
    for i in range(max([1, *map(len, by_name.values())])):
        made = {name: given[min(i, len(given) - 1)].make(grad) for name, given in by_name.items()}
        by_place = [n for n in made if parameters is _UNKNOWN or _is_positional(parameters.get(n))]
        calls.append(Call(tuple(made.pop(name) for name in by_place), made))
    return calls


def _is_positional(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and parameter.kind is parameter.POSITIONAL_ONLY


# ------------------------------------------------------------------------------------------------ names and files
def value_named(text: str) -> Any:
    """What stands behind `model.py:Net` or `package.module:Net.method`."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise BadUsage(f"{text}: expected FILE:NAME or MODULE:NAME, such as model.py:Net or package.model:make_net.")
    value: Any = module_at(place)
    for part in name.split("."):
        if not hasattr(value, part):
            public = [known for known in dir(value) if not known.startswith("_")]
            raise BadUsage(f"{place} has no {name}. {_similar(part, public)}")
        value = getattr(value, part)
    return value


@functools.cache
def module_at(place: str) -> Any:
    """A module, by its name or by its file."""
    if not (place.endswith(".py") or "/" in place):
        sys.path.insert(0, "") if "" not in sys.path else None
        with _told(f"{place} cannot be imported", "Expected a file, or a module that can be imported from here."):
            return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise BadUsage(f"there is no file {place}.")
    name = path.stem if path.stem not in sys.modules else f"explained_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadUsage(f"{place} is no Python file.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as when it is run: it may import its neighbours
    with _told(f"{place} cannot be imported", "Expected a file that can be imported without being run."):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _told(what: str, expected: str) -> Iterator[None]:
    """Tell what code of the user's raises in one line, with the place; `sys.exit` is no way out of an import."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THEIRS)]
        place = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        if isinstance(error, SyntaxError) and error.filename:
            place = f", at {error.filename}:{error.lineno}"
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise BadUsage(f"{what}: {text}{place}. {expected}") from None


_NOT_THEIRS = (str(Path(__file__).parent), "<frozen")


def _similar(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"Is it {close[0]}?"
    return f"It has {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}." if known else "It has none."
