"""Schedulers of learning rates: what a program steps is stepped by each call, after its graphs have run.

A scheduler holds numbers, and computes from them what it puts into the groups of its optimizer: no graph has a part in
it. So a program may step one without being recorded there, as long as it looks neither into the scheduler nor, once
that has been stepped, at what the next rates are. The user's own code in a scheduler may look at tensors and draw
random numbers, unless one sees that it does not: nothing may be written or drawn after it.
"""

from __future__ import annotations

import builtins
import functools
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

from ..codegen.pytree import flatten, unflatten
from ..graph.graph import Step
from ..host_numbers import HostNumber
from ..joint.side_effects import Escape
from ..ops import op_info
from ..record.retrace import Retrace, SchedulesAreRead
from ..stack_traces import user_stack, where
from ..values import PLAIN, is_plain
from .code import is_library_class, names_in
from .kinds import attributes_of, is_a

_OF_SCHEDULERS = (vars(lr_scheduler), vars(swa_utils))
_STEPS = frozenset({"step", "_update_lr", "__getattribute__", "__getattr__", "__init_subclass__"})
_USED = "the program uses it, or numbers of its optimizer, afterwards"
_RATES = (float, tuple, HostNumber)  # what a scheduler may change in a group, beside tensors


class Schedules:
    """The schedulers that a program can reach, and what it does to them while it is recorded."""

    def __init__(self, performed: bool) -> None:
        """Whether calls perform steps; otherwise schedulers are objects like any others."""
        self.performed = performed
        self._found: dict[int, tuple[str, LRScheduler]] = {}
        self._spent: list[tuple[dict[str, Any], str, Any, _Spent]] = []  # with what was there
        self._thread = 0  # that records
        self._operators: Sequence[Step] = ()  # of the last run, as they come
        self._sees_no_more = 0  # how many of them there were when the user's own code of a scheduler was to run
        self._is_read = False
        self.why = ""  # the program is recorded as what the code of schedulers does, where that is so
        self.steps: list[Escape] = []  # of the last run

    def takes(self, path: str, value: Any) -> bool:
        """Whether an object is a scheduler, into which nobody needs to look."""
        if not self.performed or not isinstance(value, LRScheduler):
            return False
        if not _is_ordinary(type(value)) or "optimizer" not in attributes_of(value):
            return False
        self._found[id(value)] = path, value
        return True

    def require_unread(self) -> None:
        """Give the recording up if the program has looked into a scheduler, or at rates that are those of later."""
        if self._is_read:
            raise Retrace(SchedulesAreRead())

    def around(self, run: Callable[[list[Any]], Any], operators: Sequence[Step]) -> Callable[[list[Any]], Any]:
        """A program whose steps of schedulers are noted; its operators are written down while it runs."""
        return functools.partial(self._run, run, operators) if self.performed else run

    def release(self) -> None:
        """Let go of all schedulers."""
        self._found.clear()

    def _run(self, run: Callable[[list[Any]], Any], operators: Sequence[Step], seen: list[Any]) -> Any:
        self.steps, self._operators, self._sees_no_more = [], operators, sys.maxsize
        try:
            with self._standing():
                result = run(seen)
        except Exception as error:
            if self.steps and not isinstance(error, Retrace):  # it may have met a rate that is not known
                raise Retrace(SchedulesAreRead()) from error
            raise
        for step in operators[self._sees_no_more :]:
            if op_info(step.op).written or "random" in op_info(step.op).traits:
                self._note_read(f"its own code might tell that {step.op} comes after it")
        self.require_unread()
        return result

    @contextmanager
    def _standing(self) -> Iterator[None]:
        self._thread = threading.get_ident()
        LRScheduler.__getattribute__ = self._attribute  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            self._thread = 0
            del LRScheduler.__getattribute__
            self._put_rates_back()

    def _put_rates_back(self) -> None:
        while self._spent:
            table, key, value, spent = self._spent.pop()
            if table.get(key) is not spent or sys.getrefcount(spent) > 3:  # the table, this variable, the count
                self._note_read(f"{_USED}: at its end")
            table[key] = value

    @property
    def _attribute(self) -> Callable[[LRScheduler, str], Any]:
        """What asking a scheduler for something does meanwhile: its class stays the one that the program knows."""

        def attribute(scheduler: LRScheduler, name: str) -> Any:
            if self.stand and id(scheduler) in self._found:
                if name == "step":
                    return functools.partial(self._step, scheduler)
                if name != "__class__":
                    self.is_read()
            return object.__getattribute__(scheduler, name)

        return attribute

    @property
    def stand(self) -> bool:
        """Whether the program runs, in this thread, and must not see what is not known."""
        return threading.get_ident() == self._thread

    def is_read(self) -> None:
        """What the program asks for is not known: it is recorded as what the scheduler's code does."""
        self._note_read(f"{_USED}: at {where(user_stack(2))}")
        self.require_unread()

    def _note_read(self, why: str) -> None:
        self._is_read = True
        names = [path for path, scheduler in self._found.values() if any(e.owner is scheduler for e in self.steps)]
        if names and not self.why:
            self.why = (
                f"The step of {names[-1]} could not be left to each call, since {why}. Step it last, or read rates "
                "outside of the program."
            )

    def _step(self, scheduler: LRScheduler, /, *args: Any, **kwargs: Any) -> None:
        path, _ = self._found[id(scheduler)]
        flat = flatten((args, kwargs), f"{path}.step()")
        if not all(isinstance(leaf, (Tensor, HostNumber)) or type(leaf) in PLAIN for leaf in flat.leaves):
            self.is_read()
        leaves = tuple([_as_it_is(leaf) for leaf in flat.leaves])
        build = functools.partial(unflatten, flat.tree)
        self.steps.append(Escape(scheduler, _step, "step", tuple(flat.paths), leaves, build))
        if not self._only_calculates(scheduler):
            self._sees_no_more = min(self._sees_no_more, len(self._operators))
        for group in attributes_of(scheduler)["optimizer"].param_groups:
            for key, value in group.items():
                if key != "params" and is_a(value, (*_RATES, Tensor)):
                    spent = group[key] = _Spent(self)
                    self._spent.append((group, key, value, spent))

    def _only_calculates(self, scheduler: LRScheduler) -> bool:
        """Whether it is torch's own code that works rates out, or code of the user's that sees nothing but numbers."""
        pending, seen = [scheduler], set[int]()
        while pending:
            value = pending.pop()
            if id(value) in seen or is_plain(value):
                continue
            seen.add(id(value))
            if isinstance(value, LRScheduler):
                if not is_library_class(type(value)):
                    return False
                pending += [one for one in attributes_of(value).values() if not _is_of_rates(one)]
            elif type(value) in (list, tuple):
                pending += value
            elif type(value) is dict:
                pending += value.values()
            else:
                reached = _reached_by(value)
                if reached is None:
                    return False
                pending += reached
        return True


_CALCULATE = frozenset(map(id, (abs, bool, divmod, float, int, len, max, min, pow, range, round, sum)))


def _is_of_rates(value: Any) -> bool:
    """Whether an attribute of a scheduler is what torch's own code works rates out of: only that may hold tensors."""
    values = value if type(value) is list else [value]
    return all(isinstance(one, (Optimizer, Tensor)) or is_plain(one) for one in values)


def _reached_by(value: Any) -> list[Any] | None:
    """What a function may look at, beside numbers that it is given; None if that is not known."""
    of_schedulers = any(getattr(value, "__globals__", None) is names for names in _OF_SCHEDULERS)
    if value is math or id(value) in _CALCULATE or of_schedulers:
        return []
    match value:
        case types.BuiltinFunctionType(__name__=name) if vars(math).get(name) is value:
            return []
        case functools.partial():
            return [value.func, value.args, value.keywords]
        case types.FunctionType(__code__=code):
            names, known = names_in(code), {**vars(builtins), **value.__globals__}
            if names.computed or names.stored or names.imported:
                return None
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return [*cells, *map(known.get, names.loaded), value.__defaults__, value.__kwdefaults__]
    return None


def _is_ordinary(kind: type) -> bool:
    """Whether steps are torch's own code, whatever rates a class of the user's computes."""
    if type(kind) is not type:
        return False
    users = [base for base in kind.__mro__ if not is_library_class(base)]
    return all(_STEPS.isdisjoint(vars(base)) for base in users)


def _as_it_is(leaf: Any) -> Any:
    """A tensor as it is now: the program may write to it afterwards."""
    if not isinstance(leaf, Tensor):
        return leaf
    with torch.no_grad():
        return leaf.clone()


def _step(scheduler: LRScheduler, key: str, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    args, kwargs = given
    scheduler.step(*args, **kwargs)


class _Spent:
    """Stands where a scheduler will put a number that the recording does not know."""

    __slots__ = ("__schedules",)

    def __init__(self, schedules: Schedules) -> None:
        object.__setattr__(self, "_Spent__schedules", schedules)

    def __getattribute__(self, name: str) -> Any:
        _ask(self)
        return object.__getattribute__(self, name)


def _ask(self: _Spent, *args: Any) -> Any:
    schedules = object.__getattribute__(self, "_Spent__schedules")
    if schedules.stand:
        schedules.is_read()
    return NotImplemented


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_ASKED = (
    *(f"__{side}{name}__" for side in ("", "r") for name in _OPERATORS),
    *("__neg__", "__pos__", "__abs__", "__float__", "__int__", "__index__", "__bool__", "__round__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__str__", "__repr__", "__format__"),
    *("__iter__", "__len__", "__getitem__", "__copy__", "__deepcopy__", "__reduce_ex__", "__torch_function__"),
)
for _name in _ASKED:
    setattr(_Spent, _name, _ask)
