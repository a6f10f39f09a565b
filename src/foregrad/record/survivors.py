"""Which abstract tensors outlive a recording, and who holds them.

A program can put a tensor anywhere. Nobody can know all these places, so the tensors are asked: each knows how many
references there are to it, and the recording knows which of them are its own. Where they agree nothing has escaped,
and that is all there is to do. Where they do not, the objects that came into being since the recording began are
searched for holders, and the holders for theirs, up to one that is older: what is held by that is the user's to see. A
tensor that only new objects lead to belongs to the recording, mostly to autograd's tape (contexts of custom functions,
what hooks have packed), whose own references no Python object shows.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

from torch import Tensor

from .._torch import FakeTensor, FunctionContext, all_objects_count_as_old, held_by_cpp, referrers_of
from ..errors import EscapeError, UnsupportedError
from ..graph.graph import Step
from ..stack_traces import errors_behind, tracebacks_of, where
from .fakify import RecordedInput

_MOST_CONTAINERS = 10_000  # that are looked into, in a result; if there are more the search goes the long way
_NO_CONTAINERS = (Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_AT_ONCE = 32  # objects whose holders are asked for together: each takes a comparison with everything there is
_PACKAGE = __name__.partition(".")[0] + "."
_ARGS, _KWARGS, _OUT = attrgetter("args"), attrgetter("kwargs"), attrgetter("out")
_CACHED_FUNCTION = type(functools.lru_cache(len))
_HELD_BY_THREADS = (contextvars.Context,)  # which are new, perhaps, and which nothing leads to that Python shows


@dataclass(frozen=True, slots=True, eq=False)
class Survivor:
    """A recorded tensor that something holds which is not the recording's own."""

    tensor: Tensor
    holder: Any  # older than the recording
    trail: tuple[Any, ...]  # from what that holds down to the tensor

    @property
    def held(self) -> int:
        """The id of what the holder has of it."""
        return id(self.trail[0])


class Beginning:
    """The moment at which a recording begins: what is made from then on can be told from what was there before.

    Python's garbage collector knows objects by age. It must be paused until the recording ends.
    """

    def __init__(self) -> None:
        all_objects_count_as_old()
        self._collections = _collections()

    def survivors(self, suspects: Callable[[], list[Tensor]]) -> list[Survivor]:
        """Those tensors among the suspects that anything older leads to."""
        if not suspects():
            return []
        if _collections() != self._collections:
            raise UnsupportedError(
                "the program collects garbage while it is recorded, after which it cannot be told whether its tensors "
                "are held by anything that outlives it. Do so outside the program, or compile with fallback='eager'."
            )
        gc.collect(0)  # what only cycles hold is gone; everything else that is new moves to the next generation
        self._collections = _collections()
        found = set(map(id, suspects()))
        return _Search(found, gc.get_objects(1)).survivors() if found else []


def _collections() -> int:
    return sum(int(generation["collections"]) for generation in gc.get_stats())


class Recorded(Protocol):
    """What is asked of a recording here."""

    @property
    def steps(self) -> list[Step]: ...
    @property
    def memories(self) -> Sequence[RecordedInput]: ...
    @property
    def inputs(self) -> Sequence[RecordedInput]: ...
    @property
    def arguments(self) -> Sequence[Any]: ...
    @property
    def result(self) -> Any: ...
    @property
    def held_beside(self) -> Iterable[Any]: ...


# ----------------------------------------------------------------------------------------------- the short way
def suspects(recording: Recorded, known: Iterable[Any] = ()) -> list[Tensor]:
    """Recorded tensors with more references than the recording can account for.

    `known` are values of the user's objects that are known to be there, one for each reference.
    """
    held: Counter[int] = Counter()
    for values in (
        *_held_by_steps(recording.steps),
        _held_by_inputs(recording),
        _held_inside((recording.result, *recording.arguments, *known)),
    ):
        held.update(map(id, values))
    return [tensor for tensor, count in _counted(_made_by(recording)) if count > held[id(tensor)]]


def _counted(tensors: list[Any]) -> list[tuple[Tensor, int]]:
    """How many references there are to each tensor, but for one that C++ may hold, and to the list."""
    tensors.append(object())
    references = list(map(sys.getrefcount, tensors))
    tensors.pop()
    alone = references.pop()  # how many there are to an object that nothing else holds
    pairs = zip(tensors, references, strict=True)
    return [(t, count - alone - (count > alone and held_by_cpp(t))) for t, count in pairs]


def _made_by(recording: Recorded) -> list[Tensor]:
    """All tensors that a program can have come by."""
    made: dict[int, Tensor] = {id(out): out for out in map(_OUT, recording.steps) if type(out) is FakeTensor}
    for out in _nested(map(_OUT, recording.steps)):
        made.update((id(item), item) for item in out if isinstance(item, Tensor))
    for recorded in (*recording.memories, *recording.inputs):
        if recorded.is_tensor:
            made[id(recorded.seen)] = recorded.seen
    return list(made.values())


def _nested(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if type(value) is list or type(value) is tuple]


def _held_by_steps(steps: Sequence[Step]) -> Iterator[Iterable[Any]]:
    yield map(_OUT, steps)
    yield chain.from_iterable(_nested(map(_OUT, steps)))
    yield chain.from_iterable(map(_ARGS, steps))
    yield chain.from_iterable(_nested(chain.from_iterable(map(_ARGS, steps))))
    yield chain.from_iterable(map(dict.values, filter(None, map(_KWARGS, steps))))


def _held_by_inputs(recording: Recorded) -> Iterator[Any]:
    for recorded in (*recording.memories, *recording.inputs):
        yield recorded.seen
        yield recorded.leaf
        for _, view in recorded.views:
            yield view
    yield from recording.held_beside


def _held_inside(values: tuple[Any, ...]) -> Iterator[Any]:
    """What containers hold, and they themselves, except for those that something else holds as well."""
    yield from values
    edges = Counter(chain(map(id, values), map(id, values)))  # from where they were found, and from `values`
    pending = deque({id(value): value for value in values if _may_hold(value)}.values())
    seen = set(map(id, pending))
    postponed = 0  # so many in a row: more may lead to them than was found yet
    while pending and postponed < len(pending) and len(seen) < _MOST_CONTAINERS:
        value = pending.popleft()
        if sys.getrefcount(value) > edges[id(value)] + 2:  # by this function, and to be counted
            postponed += 1
            pending.append(value)
            continue
        postponed = 0
        inside = gc.get_referents(value)
        yield from inside
        edges.update(map(id, inside))
        pending.extend({id(item): item for item in inside if _may_hold(item) and id(item) not in seen}.values())
        seen.update(map(id, inside))
        del inside


def _may_hold(value: Any) -> bool:
    return gc.is_tracked(value) and not isinstance(value, _NO_CONTAINERS)


def held_by_frames(error: BaseException | None) -> Iterator[Any]:
    """What the frames hold through which an error came: they will not run again."""
    for one in errors_behind(error):
        for step in tracebacks_of(one):
            yield from gc.get_referents(step.tb_frame)


# ------------------------------------------------------------------------------------------------ the long way
class _Search:
    """Goes from tensors to what holds them, among the objects that are new, and from there to older ones."""

    def __init__(self, suspects: set[int], new: list[Any]) -> None:
        self._suspects = suspects  # by id
        self._new = new
        self._places = {id(value): place for place, value in enumerate(new)}
        self._holders: dict[int, list[int]] = {}  # by id: the places of new objects that refer to it
        for place, value in enumerate(new):
            for item in gc.get_referents(value):
                self._holders.setdefault(id(item), []).append(place)

    def survivors(self) -> list[Survivor]:
        """The suspects that something older leads to."""
        leads_to = self._climb()
        ends = [place for place in leads_to if self._has_unknown_holder(place)]
        found = [self._survivor(leads_to, self._new[p], p) for p in ends if isinstance(self._new[p], _HELD_BY_THREADS)]
        for start in range(0, len(ends), _AT_ONCE):
            some = {id(self._new[place]): place for place in ends[start : start + _AT_ONCE]}
            for holder in self._older_holders(some.values()):
                held = [some[id(item)] for item in gc.get_referents(holder) if id(item) in some]
                found += [self._survivor(leads_to, holder, place) for place in dict.fromkeys(held)]
        return found

    def _climb(self) -> dict[int, int | None]:
        """Everything new that leads to a suspect, by place, and the place of what it leads there by."""
        leads_to: dict[int, int | None] = {self._places[suspect]: None for suspect in self._suspects}
        pending = deque(leads_to)
        while pending:
            place = pending.popleft()
            for holder in self._holders.get(id(self._new[place]), ()):
                if holder not in leads_to and not _is_own(self._new[holder]):
                    leads_to[holder] = place
                    pending.append(holder)
        return leads_to

    def _has_unknown_holder(self, place: int) -> bool:
        """Whether an object has more references than new objects and C++ account for."""
        value = self._new[place]
        known = len(self._holders.get(id(value), ()))
        by_cpp = held_by_cpp(value) if isinstance(value, Tensor) else isinstance(value, FunctionContext)
        return sys.getrefcount(value) > known + by_cpp + 3  # in the list, by this function, and to be counted

    def _older_holders(self, places: Iterable[int]) -> list[Any]:
        values = [self._new[place] for place in places]
        holders = referrers_of(values)
        own = {id(values), id(self._new), id(holders)}
        older = [h for h in holders if id(h) not in self._places and id(h) not in own and not _is_own(h)]
        own.add(id(older))
        return _without_notes(older, own)

    def _survivor(self, leads_to: dict[int, int | None], holder: Any, place: int) -> Survivor:
        trail = [self._new[place]]
        while (below := leads_to[place]) is not None:
            place = below
            trail.append(self._new[place])
        return Survivor(trail[-1], holder, tuple(trail))


def _without_notes(holders: list[Any], searching: set[int]) -> list[Any]:
    """Holders without those containers in which only this package has noted what was around a program."""
    containers = [holder for holder in holders if type(holder) in (dict, list, tuple)]
    noted = _only_noted(containers, searching | {id(containers)}) if containers else set()
    return [holder for holder in holders if id(holder) not in noted]


def _only_noted(containers: list[Any], searching: set[int]) -> set[int]:
    """Those containers, by id, that nothing but objects of this package leads to, no variable and nothing in C++."""
    containers.append({})  # nothing but the list holds this one
    places = {id(container) for container in containers}
    seen: Counter[int] = Counter()
    own, others = set[int](), set[int]()
    for holder in referrers_of(containers):  # once for all: it looks at every object that there is
        inside = [id(item) for item in gc.get_referents(holder) if id(item) in places]
        seen.update(inside)
        if id(holder) not in searching and type(holder) is not types.FrameType:
            (own if _is_own(holder) else others).update(inside)
    del holder  # the list at least
    unseen = [sys.getrefcount(container) - seen[id(container)] for container in containers]
    alone = unseen.pop()
    containers.pop()
    hidden = {id(container) for container, count in zip(containers, unseen, strict=True) if count > alone}
    return own - others - hidden


def _is_own(value: Any) -> bool:
    """Whether an object is of a class of this package: a recording and its parts."""
    return str(type(value).__module__).startswith(_PACKAGE)


# ---------------------------------------------------------------------------------------------- in a backward
class References:
    """How many references there were to the tensors of a recording, before a backward was recorded after it."""

    def __init__(self, recording: Recorded) -> None:
        self._recording = recording
        self._start = len(recording.steps)
        self._before = {id(tensor): count for tensor, count in _counted(_made_by(recording))}
        self.results: tuple[Any, ...] = ()  # of the backward: nothing else may hold them yet

    def suspects(self) -> list[Tensor]:
        """Tensors with more references than then, and than the backward accounts for."""
        held = Counter(map(id, _held_inside((*self.results,))))
        for values in _held_by_steps(self._recording.steps[self._start :]):
            held.update(map(id, values))
        before = self._before
        return [t for t, count in _counted(_made_by(self._recording)) if count > before.get(id(t), 0) + held[id(t)]]


# ----------------------------------------------------------------------------------------------- left behind
class LeftBehind(FakeTensor):
    """What becomes of the tensors of a recording that has failed: every use of them raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise EscapeError(
            "this tensor was left behind by a recording that has failed: it has no data. Whatever holds it got it from "
            "a program that was to be compiled, and could not be."
        )


def disown(recording: Recorded) -> None:
    """Let no tensor of a recording be used any more, wherever it may be."""
    for tensor in _made_by(recording):
        if type(tensor) is FakeTensor:
            tensor.__class__ = LeftBehind


# ------------------------------------------------------------------------------------------------------ in words
def origin_of(tensor: Tensor, recording: Recorded) -> str:
    """Where a recorded tensor comes from, in the user's words."""
    for recorded in recording.inputs:
        if recorded.seen is tensor:
            return str(recorded.slot)
    for step in recording.steps:
        if step.out is tensor or (isinstance(step.out, (list, tuple)) and any(item is tensor for item in step.out)):
            return where(step.stack)
    return "an unknown line"


def escape_error(survivor: Survivor, recording: Recorded) -> EscapeError:
    """What is said about a tensor that is left where a compiled call cannot put another one."""
    return EscapeError(
        f"A tensor of the program escapes into {show(survivor)}; it was made at "
        f"{origin_of(survivor.tensor, recording)}. While the program is recorded its tensors have no data: return the "
        "tensor instead, or compile with fallback='eager'."
    )


def show(survivor: Survivor) -> str:
    """Where a tensor was left, as well as it can be told."""
    holder, trail = survivor.holder, survivor.trail
    if isinstance(holder, dict):
        owner = next((o for o in referrers_of([holder]) if _attributes_of(o) is holder), None)
        key = next((key for key, value in dict.items(holder) if value is trail[0]), None)
        if owner is None:
            cache = next((o for o in referrers_of([holder]) if type(o) is _CACHED_FUNCTION), None)
            return f"a dict, as {key!r}" if cache is None else _name(cache)
        return f"{_name(owner)}.{key}"
    if isinstance(trail[0], dict) and _attributes_of(holder) is trail[0] and len(trail) > 1:
        key = next((key for key, value in dict.items(trail[0]) if value is trail[1]), None)
        return f"{_name(holder)}.{key}"
    if isinstance(holder, types.CellType):
        return _variable(holder)
    return _name(holder)


def _attributes_of(owner: Any) -> Any:
    """The dict of an object's attributes, if it has one; that of a class is not what it shows."""
    if isinstance(owner, type):
        return next(iter(gc.get_referents(owner.__dict__)), None)
    return None if isinstance(owner, Tensor) else getattr(owner, "__dict__", None)


def _name(owner: Any) -> str:
    match owner:
        case types.ModuleType():
            return owner.__name__
        case type() | types.FunctionType():
            return owner.__qualname__
        case contextvars.Context():
            return "a context variable"
    wrapped = getattr(owner, "__wrapped__", None)
    if wrapped is not None:
        return f"the cache of {getattr(wrapped, '__qualname__', wrapped)}"
    return f"a {type(owner).__qualname__}"


def _variable(cell: types.CellType) -> str:
    """The name of a variable that functions share."""
    for closure in referrers_of([cell]):
        for function in referrers_of([closure]) if type(closure) is tuple else ():
            if isinstance(function, types.FunctionType) and function.__closure__ is closure:
                names = zip(function.__code__.co_freevars, closure or (), strict=True)
                return next(f"{name} (closure of {function.__name__})" for name, other in names if other is cell)
    return "a variable of a function"
