"""One program through the oracle, and what came of it."""

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from foregrad import errors
from foregrad.testing.checking import check
from foregrad.testing.report import Difference

from .program import FuzzProgram, Loaded, loaded

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

# What docs/limits.md calls different on purpose: a backward through some outputs checks the versions of all that was
# saved, so it may raise where eager would not look.
_MISSING_TANGENT = "no tangent for"
_WRITTEN_SINCE = "RuntimeError: one of the variables needed for gradient computation has been modified"

# A program that raises leaves its caller's grad mode as it was; eager leaves it as the program had set it.
_GRAD_MODE = "grad mode after forward"

# A gradient that is zero whatever the input is may require grad on one side only, where a write to a view made it;
# its own gradient is then zeros there and None on the other. Any other gradient that was lost has a value.
_OF_GRADIENTS = "gradients of gradients"

_LONGEST_MESSAGE = 140


@dataclass(frozen=True)
class Outcome:
    """What came of one program.

    >>> Outcome("0/0").verdict
    'agrees'

    Args:
        name: Seed and number of the program.
        differences: What the compiled callable does differently from eager.
        refusals: What Foregrad said that it cannot compile.
        eager_error: What eager itself raised in the forward.
        broken: How the run ended, where nothing could be compared: a crash, a hang, an error in the oracle.
    """

    name: str
    differences: tuple[Difference, ...] = ()
    refusals: tuple[str, ...] = ()
    eager_error: str = ""
    broken: str = ""

    @property
    def verdict(self) -> str:
        """The outcome in one word or two.

        >>> Outcome("0/0", refusals=("UnsupportedError: not yet",)).verdict
        'refused'
        """
        if self.broken:
            return "broken"
        if self.differences:
            return "differs"
        if self.refusals:
            return "refused"
        return "refused by eager" if self.eager_error else "agrees"

    @property
    def signature(self) -> str:
        """What the failure looks like, without what is particular to this program.

        >>> Outcome("0/0", (Difference("same data", "value", "output", "1.0", "2.0"),)).signature
        'value'
        """
        return self.broken or next(iter(signatures(self.differences)), "")

    @property
    def failed(self) -> bool:
        """Whether somebody has to look at it.

        >>> Outcome("0/0", broken="killed by signal 11").failed
        True
        """
        return self.verdict in ("differs", "broken")

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.verdict}"]
        lines += [
            f"    {said}" for said in (self.broken, self.eager_error, *self.refusals, *map(str, self.differences))
        ]
        return "\n".join(line for line in lines if line.strip())


def signatures(differences: tuple[Difference, ...]) -> list[str]:
    """What each difference looks like, each once: its aspect, and for an error its class and its text.

    >>> signatures((Difference("same data", "error in forward", "the call", "no error", "TypeError: 3 of 4"),))
    ['error in forward: no error / TypeError: _ of _']

    Args:
        differences: What was found.
    """
    return list(dict.fromkeys(_signature(difference) for difference in differences))


def _signature(difference: Difference) -> str:
    if not difference.aspect.startswith("error"):
        return difference.aspect
    eager = difference.eager.split(":")[0]
    return f"{difference.aspect}: {eager} / {anonymous(difference.compiled)[:_LONGEST_MESSAGE]}"


def anonymous(message: str) -> str:
    """A message without code, names and numbers, so that two programs can say the same.

    >>> anonymous("UnsupportedError: argument 0 (x), at <fuzz 0/12>:23: x.add_(1), cannot be compiled yet.")
    'UnsupportedError: argument _, at <fuzz>, cannot be compiled yet.'

    Args:
        message: The text of an error.
    """
    for pattern, replacement in _PARTICULARS:
        message = re.sub(pattern, replacement, message)
    return message


_PARTICULARS = (
    # A line of a program ends where the sentence goes on with a word, not with a variable.
    (r"<fuzz [^>]*>:\d+: .*?(?=[,:] [a-z]{2,} [a-z]|\. [A-Z]|\.?$)", "<fuzz>"),
    (r" at /.*$", ""),
    (r"(?<=the program )(changes|draws from|can reach|puts a tensor into) .*?(?=[,:])", r"\1 _"),
    (r"\d+ \([a-z]\w*\)", "_"),
    (r"\b\d+(\.\d+)?\b", "_"),
    (r"[(\[][_, ]*[)\]]", "[_]"),
)


def examine(program: FuzzProgram, compile: Compile | None = None) -> Outcome:
    """Compare a program with eager in everything that a user can observe.

    >>> from .generate import generate
    >>> examine(generate(0, 2), compile=lambda fn: fn).verdict
    'agrees'

    Args:
        program: The program.
        compile: Takes the place of Foregrad.
    """
    with warnings.catch_warnings(), loaded(program) as script:
        warnings.simplefilter("ignore")
        eager_error = _eager_error(script, program.options.training)
        try:
            report = check(
                script.program,
                *script.make_inputs(),
                compile=compile or script.compile,
                training=program.options.training,
                bitwise=False,  # kernels round differently where tensors lie differently in memory
                raise_on_difference=False,
            )
        except Exception as error:
            text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            return Outcome(program.name, eager_error=eager_error, broken=f"check raised {anonymous(text)}")
    raised = {run.name for run in report.runs if run.eager_raised}
    counted = [difference for difference in report.differences if not _is_accepted(difference, raised)]
    refused = [difference for difference in counted if _is_refusal(difference)]
    # A run that was refused has nothing else to compare.
    without = {difference.run for difference in refused}
    differences = tuple(difference for difference in counted if difference.run not in without)
    refusals = tuple(dict.fromkeys(anonymous(difference.compiled) for difference in refused))
    return Outcome(program.name, differences, refusals, eager_error)


def _is_accepted(difference: Difference, raised: set[str]) -> bool:
    if _MISSING_TANGENT in difference.run and difference.compiled.startswith(_WRITTEN_SINCE):
        return True
    if _OF_GRADIENTS in difference.run and _is_about_zeros(difference):
        return True
    return difference.run in raised and difference.where == _GRAD_MODE


def _is_about_zeros(difference: Difference) -> bool:
    if difference.aspect == "gradient presence":
        return {difference.eager[:5], difference.compiled[:5]} <= {"zeros", "None"}
    return difference.aspect == "gradient requires_grad"


def _eager_error(script: Loaded, training: bool) -> str:
    """The class of the error that eager raises on the program's own inputs."""
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
        try:
            script.program(*script.make_inputs())
        except Exception as error:
            return type(error).__name__
    return ""


def _refusing_classes() -> Iterator[str]:
    """The errors with which Foregrad says that it cannot compile a program."""
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, (errors.CaptureError, errors.BackwardError)):
            yield name


_REFUSALS = frozenset(_refusing_classes())


def _is_refusal(difference: Difference) -> bool:
    return difference.aspect.startswith("error") and difference.compiled.split(":")[0] in _REFUSALS
