"""Errors and warnings about a program.

One family under `ForegradError`, so that a caller can catch all of them at once. Each class also inherits the
built-in class that the behavioural rules name, so that code written against torch's own layer keeps catching
what it used to catch. What the *user's program* raises while it is recorded is passed on untouched: it is
eager's own error.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class ForegradError(Exception):
    """The base class: what went wrong, where in the user's program, and what to do next."""


class CaptureError(ForegradError, RuntimeError):
    """The program cannot be recorded as it stands."""


class DataDependentError(CaptureError):
    """The program asked for the *value* of a tensor that has none while it is recorded."""


class EscapeError(CaptureError):
    """A recorded tensor outlived the recording in a place that the caller would see."""


class UnknownOutputError(CaptureError):
    """An output is of a type that may hide tensors."""


class UnsupportedError(CaptureError, NotImplementedError):
    """The program is sound, but Foregrad cannot compile it yet."""


class StateChangeError(CaptureError):
    """Recording changed Python state that a compiled call would not change again."""


class FirstCallError(StateChangeError):
    """The program changes Python state at its first call, and not again at the next: call it once before."""

    def __init__(self, change: str) -> None:
        super().__init__(f"{change}: call it once before it is recorded.")
        self.change = change


class MissingInputError(ForegradError, RuntimeError):
    """An input of a compiled program is gone: its storage was freed, or its name was deleted."""


class GraphOutputError(ForegradError, RuntimeError):
    """A flat program did not return a tuple or a list."""


class CompilerError(ForegradError, RuntimeError):
    """A compiler given by the user raised, or what it returned broke the contract."""


class BackwardError(ForegradError, RuntimeError):
    """A backward was asked for in a way that the compiled program cannot serve."""


class BackwardStateError(ForegradError, AssertionError):
    """A `BackwardState` where the whole backward is not being captured, or more than one."""


class FakeModeError(ForegradError, AssertionError):
    """Fake inputs of more than one fake mode."""


class ConfigError(ForegradError, AssertionError):
    """Options that contradict each other."""


class AssumptionError(ForegradError, AssertionError):
    """A call broke an assumption of the program (checked under `debug_assert`)."""


class NotFunctionalError(ForegradError, AssertionError):
    """A graph that must be free of side effects holds an operator that writes."""


class PartitionError(ForegradError, AssertionError):
    """A joint graph cannot be cut into a forward and a backward."""


class BudgetError(ForegradError, RuntimeError):
    """A memory budget out of range, or an unknown way to meet it."""


class InfeasibleBudgetError(BudgetError):
    """No plan that was found stays within a memory budget; the message says what the best one needs."""


class ExportError(ForegradError, RuntimeError):
    """A program cannot be exported as it stands, or was asked for in a way that contradicts itself."""


class ExportFileError(ExportError):
    """A file does not hold an exported program that can be loaded."""


class WeightsError(ExportError):
    """Weights do not fit an exported program: a name is missing or unknown, or a shape or dtype differs."""


class AssignedAttributeError(ExportError, ValueError):
    """The program assigns a tensor to an attribute that an exported graph would lose."""


class SignatureError(ForegradError, AssertionError):
    """Parts of a signature contradict each other."""


class VerificationError(ForegradError, AssertionError):
    """An internal check on a graph failed: a defect in Foregrad, please report it."""


class InternalError(ForegradError, RuntimeError):
    """Foregrad itself failed on a program that runs in eager: a defect, please report it."""


class EagerFallbackWarning(UserWarning):
    """A program could not be compiled, or was compiled too often, and runs eagerly instead."""


class IgnoredOptionWarning(UserWarning):
    """An option was set that torch's own layer knows and that has no effect here."""


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A sentence for an error about a name that does not exist, if another one is like it.

    >>> did_you_mean("inducto", ["inductor", "eager"]), did_you_mean("x", ["eager"])
    (" Did you mean 'inductor'?", '')
    """
    near = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {near[0]!r}?" if near else ""
