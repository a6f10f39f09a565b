"""Two worlds made of one script, taken through the same steps: one calls the program, the other what it compiles to."""

import builtins
import functools
import linecache
import pathlib
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from foregrad import errors
from foregrad._torch import without_function_modes
from foregrad.testing.report import Difference

from ..oracle import Outcome, anonymous
from .alive import abstract_tensors
from .ambient import HOOKS
from .program import StateProgram
from .same import Versions, differences
from .world import GIVEN, World

Compile = Callable[[Any], Callable[..., Any]]

# With these Foregrad says that it cannot do what eager does.
REFUSALS = (errors.CaptureError, errors.BackwardError, errors.MissingInputError)
_MOST_DIFFERENCES = 12
_REFUSED = ", refused"


def examine(program: StateProgram, compile: Compile | None = None) -> Outcome:
    """Compare a stateful program with eager, step by step.

    >>> from .generate import generate
    >>> examine(generate(0, 1), compile=lambda program: program).verdict
    'agrees'

    Args:
        program: The program.
        compile: Takes the place of Foregrad.
    """
    return _examine(program.script(), program.name, compile)


def compare(path: str) -> Outcome:
    """Compare two worlds made of a file; scripts of the fuzzer end with this.

    Args:
        path: The file.
    """
    source = pathlib.Path(path).read_text()
    return _examine(source, pathlib.Path(path).name)


def _examine(script: str, name: str, compile: Compile | None = None) -> Outcome:
    filename = f"<fuzz {name}>"
    with warnings.catch_warnings(), _lines_shown(script, filename):
        warnings.simplefilter("ignore")
        try:
            code = _compiled_code(script, filename)
            return _Comparison(name, code, compile).run()
        except Exception as error:
            text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            return Outcome(name, broken=f"comparing raised {anonymous(text)}")


@functools.lru_cache(8)
def _compiled_code(script: str, filename: str) -> types.CodeType:
    return builtins.compile(script, filename, "exec")


@contextmanager
def _lines_shown(script: str, filename: str) -> Iterator[None]:
    """While a script is loaded, tracebacks show its lines."""
    linecache.cache[filename] = len(script), None, script.splitlines(keepends=True), filename
    try:
        yield
    finally:
        linecache.cache.pop(filename, None)


class _Comparison:
    """The two worlds, and what was found so far."""

    def __init__(self, name: str, code: types.CodeType, compile: Compile | None) -> None:
        self._name = name
        self._eager, self._compiled = World(code), World(code)
        names = self._compiled.names
        with self._compiled.ambient.in_place():
            self._call = (compile or names["compile"])(names["program"])
        self._versions = Versions()
        self._found: list[Difference] = []
        self._refusals: list[str] = []
        self._eager_error = ""

    def run(self) -> Outcome:
        """Take all steps, until one fails or raises."""
        steps = [line for line in self._eager.names["STEPS"].splitlines() if line]
        self._compare("before the first step")
        for number, source in enumerate(steps):
            self._count_hooks_alike()
            if not self._step(f"step {number} ({source})", source) or self._found:
                break
        found = tuple(self._found[:_MOST_DIFFERENCES])
        return Outcome(self._name, found, tuple(dict.fromkeys(self._refusals)), self._eager_error)

    def _step(self, run: str, source: str) -> bool:
        """Take one step in both worlds; whether another can follow."""
        code = builtins.compile(source, "<step>", "exec")
        raised = _Raised(self._compiled.do(code, self._call))
        if raised.refused:
            self._look_for_abstract(run)
            if "call(" not in source:
                self._refused_halfway(code, raised)
                return False
            self._refusals.append(anonymous(raised.text))
            self._compare(run + _REFUSED)
            if self._found:
                return False
            raised = _Raised(self._compiled.do(code, self._compiled.names["program"]))
        eager = _Raised(self._eager.do(code, self._eager.names["program"]))
        if not raised.suits(eager):
            aspect = "error in backward" if "backward(" in source else "error in forward"
            self._found.append(Difference(run, aspect, "the step", eager.text, raised.text))
            return False
        if eager.kind:
            # What a step had done before it raised is not compared.
            self._eager_error = eager.kind
            return False
        self._look_for_abstract(run)
        self._compare(run)
        return True

    def _refused_halfway(self, code: types.CodeType, raised: "_Raised") -> None:
        """A backward was refused, and cannot be taken back: where eager raises the same, they agree."""
        eager = _Raised(self._eager.do(code, self._eager.names["program"]))
        if eager.kind and raised.suits(eager):
            self._eager_error = eager.kind
        else:
            self._refusals.append(anonymous(raised.text))

    def _count_hooks_alike(self) -> None:
        """Give the next hook the same number in both worlds: recording counts on, for hooks of its own."""
        both = self._eager.ambient.values, self._compiled.ambient.values
        for values in both:
            values[HOOKS] = max(other[HOOKS] for other in both)

    def _look_for_abstract(self, run: str) -> None:
        # A look at a tensor of a user's subclass must not run the user's code.
        with self._compiled.ambient.in_place(), without_function_modes():
            for found in dict.fromkeys(abstract_tensors(self._compiled.names)):
                self._found.append(Difference(run, "abstract tensor", found, "none", "left behind"))

    def _compare(self, run: str) -> None:
        if self._found:
            return
        eager, compiled = self._eager, self._compiled
        self._count_hooks_alike()
        here, there = ({**world.names, "process": world.ambient.compared()} for world in (eager, compiled))
        with without_function_modes():
            found = differences(here, there, self._versions, GIVEN)
        after = " after a refusal" if run.endswith(_REFUSED) else ""
        for unlike in found:
            aspect = f"{unlike.aspect} of {_whose(unlike.where)}{after}"
            self._found.append(Difference(run, aspect, unlike.where, unlike.eager, unlike.compiled))
        outlived = [*_outlived(eager.names.get("alive"), compiled.names.get("alive"))]
        self._found += [Difference(run, "life of a tensor", f"alive[{n}]", "freed", "alive") for n in outlived]


def _whose(where: str) -> str:
    """What a place belongs to, so that failures can be told apart without looking at each."""
    if where.startswith("process["):
        return where.split("'")[1]
    if where.endswith(".grad"):
        return "a gradient"
    return {"r": "a result", "a": "an argument"}.get(where[0] if where[1:2].isdigit() else "", "an object")


def _outlived(eager: list[bool] | None, compiled: list[bool] | None) -> Iterator[int]:
    """Which tensors live on after a compiled call, and not after eager's; the other way round does no harm."""
    for number, (here, there) in enumerate(zip(eager or (), compiled or (), strict=False)):
        if there and not here:
            yield number


class _Raised:
    """What a step raised, without holding on to it: a traceback keeps everything alive that it passed through."""

    def __init__(self, error: BaseException | None) -> None:
        self.kind = "" if error is None else type(error).__name__
        self._classes = {base.__name__ for base in type(error).__mro__} if error is not None else {""}
        message = "" if error is None else next(iter(str(error).splitlines()), "")
        self.text = f"{self.kind}: {message}" if error else "no error"
        self.refused = isinstance(error, REFUSALS)

    def suits(self, eager: "_Raised") -> bool:
        """Whether this is eager's error, or a special case of it."""
        return eager.kind in self._classes
