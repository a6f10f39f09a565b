"""`check`: eager PyTorch against a compiled callable, in everything that a user can observe."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .aspects import compare
from .observation import Observation, observe
from .program import Program, Side
from .report import CheckFailed, CheckReport, Difference, Run
from .scenarios import FORWARD_ONLY, Scenario, scenarios_for
from .variants import Variant, variants

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def check(
    fn: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    compile: Compile | None = None,
    training: bool = True,
    seed: int = 0,
    bitwise: bool = True,
    raise_on_difference: bool = True,
    **keywords: Any,
) -> CheckReport:
    """Compare a compiled callable with eager PyTorch in everything that a user can observe.

    >>> report = check(torch.sin, torch.ones(2, requires_grad=True), compile=lambda fn: fn)
    >>> report.ok
    True
    >>> report = check(torch.sin, torch.ones(2), compile=lambda fn: torch.cos, raise_on_difference=False)
    >>> report.differences[0].aspect, report.differences[0].where
    ('value', 'output')
    >>> check(torch.softmax, torch.ones(2), dim=0).ok
    True

    Nothing that is passed in is changed: arguments and modules are cloned, what a function closes over is put
    back, and so is the state of the random generators.

    Args:
        fn: A function or a module.
        *args: Its positional arguments.
        **keywords: Its keyword arguments.
        kwargs: More of them: those that have the name of an option.
        compile: Turns `fn` into the callable under test; Foregrad with a compiler that compiles nothing if
            it is left out.
        training: Also compare gradients. If False, both sides run under `torch.no_grad()`.
        seed: Set before each call; also decides new data and tangents.
        bitwise: Compare values bit by bit, all NaNs taken as one, rather than within a tolerance.
        raise_on_difference: Raise `CheckFailed`, whose message is the report.
    """
    program = Program.of(fn, args, _keywords_of(fn, keywords, kwargs))
    differences: list[Difference] = []
    runs: list[Run] = []
    causes: list[Exception] = []
    with torch.set_grad_enabled(training and torch.is_grad_enabled()), _undisturbed(program):
        sides = program.side(lambda fn: fn), program.side(compile or _default_compile)
        for variant in variants(program, seed):
            for run, seen, scenario in _runs(sides, variant, training, seed):
                runs.append(run)
                if seen is None:
                    continue
                found = list(compare(*seen, bitwise=bitwise, other_layout=scenario.other_layout))
                differences += [Difference(run.name, aspect, *mismatch) for aspect, mismatch in found]
                causes += _unexpected(seen[1], [aspect for aspect, _ in found])
    report = CheckReport(tuple(differences), tuple(runs))
    if raise_on_difference and not report.ok:
        raise CheckFailed(report) from (causes[0] if causes else None)
    return report


def _keywords_of(fn: Callable[..., Any], keywords: Mapping[str, Any], more: Any) -> dict[str, Any]:
    """The keyword arguments of the program. One that it does not take is refused: both sides would agree about it."""
    if more is not None and not isinstance(more, Mapping):
        raise TypeError(
            f"kwargs is a {type(more).__name__}, and must be a dict: the keyword arguments that have the name of an "
            "option of check. All others are passed as they are: check(fn, x, scale=2)."
        )
    given = {**keywords, **(more or {})}
    if len(given) < len(keywords) + len(more or {}):
        raise TypeError(f"given twice, and in kwargs: {', '.join(sorted(keywords.keys() & (more or {})))}.")
    try:
        taken = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters
    except (TypeError, ValueError):  # it has none: a function in C
        return given
    unknown = [name for name in keywords if name not in taken]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        options = [name for name, it in inspect.signature(check).parameters.items() if it.kind is it.KEYWORD_ONLY]
        raise TypeError(
            f"{unknown[0]} is neither an argument of {getattr(fn, '__name__', type(fn).__name__)} nor an option of "
            f"check, which are {', '.join(options)}."
        )
    return given


def _unexpected(seen: Observation, aspects: list[str]) -> list[Exception]:
    """The errors that eager did not raise: the first of them becomes the cause, for its traceback."""
    errors = {"error in forward": seen.forward_error, "error in backward": seen.backward_error}
    return [error for aspect, error in errors.items() if aspect in aspects and error is not None]


def _runs(
    sides: tuple[Side, Side], variant: Variant, training: bool, seed: int
) -> Iterator[tuple[Run, tuple[Observation, Observation] | None, Scenario]]:
    """Both observations for each scenario of a variant, or a run that says why it was skipped."""
    if variant.skipped:
        yield Run(variant.name, variant.skipped), None, FORWARD_ONLY
        return

    def both(scenario: Scenario) -> tuple[Observation, Observation]:
        eager, compiled = (observe(s, variant.arguments, variant.contents, scenario, seed) for s in sides)
        return eager, compiled

    forward = both(FORWARD_ONLY)
    raised = forward[0].forward_error is not None
    yield Run(f"{variant.name}, {FORWARD_ONLY.name}", eager_raised=raised), forward, FORWARD_ONLY
    if not training:
        return
    made, skipped = scenarios_for(forward[0].outlook)
    for scenario in made:
        yield Run(f"{variant.name}, {scenario.name}", eager_raised=raised), both(scenario), scenario
    for name, reason in skipped.items():
        yield Run(f"{variant.name}, {name}", reason), None, FORWARD_ONLY


@contextmanager
def _undisturbed(program: Program) -> Iterator[None]:
    """Give the user back the random generators, and what the function closes over, as they were."""
    outside = program.outside()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            outside.put_back(program.contents)


def _default_compile(fn: Callable[..., Any]) -> Callable[..., Any]:
    foregrad = importlib.import_module("foregrad")

    def nop(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return foregrad.make_boxed_func(graph.forward)

    transform = foregrad.aot_module if isinstance(fn, nn.Module) else foregrad.aot_function
    compiled: Callable[..., Any] = transform(fn, nop)
    return compiled
