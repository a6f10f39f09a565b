"""What a program can reach by itself: what a recording may change of it, and what each call compares."""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import ForegradError, UnsupportedError
from .kinds import DICT, FROZENSET, SET, Kind, Lifetime, is_a
from .module_guards import ModuleGuard, ModuleParts
from .patterns import ObjectPattern
from .sources import FoundTensors, Source
from .state_guards import StateGuard


class Holder(NamedTuple):
    """An object of the user's that holds state, as one of the kinds that it is of."""

    path: str  # in the user's words
    owner: Any
    kind: Kind
    in_argument: bool = False  # it is reached through an argument only: each call has its own


class Reached(NamedTuple):
    """What a recording may change of the user's objects."""

    holders: Sequence[Holder]
    tensors: Sequence[tuple[str, Tensor]]
    stored_globals: Sequence[tuple[str, dict[str, Any], str]]
    modules: Sequence[ModuleParts]
    modules_in_arguments: Sequence[ModuleParts]


class Unfollowed(NamedTuple):
    """An object that a program can reach, and why its state cannot be followed."""

    path: str
    why: str
    is_used_up: bool = False  # reading takes something out of it that nothing can put back


class TensorSources:
    """All places in which tensors were found; a parameter or buffer belongs to its module, wherever else it is held."""

    def __init__(self) -> None:
        self._in_modules: dict[int, list[Source]] = {}  # by the id of the tensor
        self._elsewhere: dict[int, list[Source]] = {}
        self._tables: list[tuple[str, dict[str, Any], list[tuple[str, int]]]] = []  # of modules, not looked at yet

    def add(self, tensor: Tensor, source: Source) -> None:
        """A tensor was found outside of modules."""
        self._elsewhere.setdefault(id(tensor), []).append(source)

    def add_table(self, path: str, table: dict[str, Any]) -> None:
        """The parameters or buffers of a module, as they are: the program may exchange them."""
        self._tables.append((path, table, [(key, id(tensor)) for key, tensor in table.items()]))

    def of(self, tensor: Tensor) -> list[Source]:
        """Where a tensor was found."""
        return self._of(id(tensor))

    def _of(self, identity: int) -> list[Source]:
        for path, table, before in self._tables:
            for key, found in before:
                source = Source(table, "item", key, f"{path}.{key}" if path else key)
                self._in_modules.setdefault(found, []).append(source)
        self._tables.clear()
        return [*self._in_modules.get(identity, ()), *self._elsewhere.get(identity, ())]

    def of_argument(self, tensor: Tensor) -> list[Source]:
        """Places that must hold the tensor that an argument is; those outside of arguments hold the same one."""
        found = [source for source in self.of(tensor) if source.how != "held"]
        inside = [source for source in found if source.how == "argument"]
        return inside + [source for source in found if source.how != "argument"][:1]

    def outside_arguments(self) -> FoundTensors:
        """All tensors that were found outside of arguments."""
        self._of(0)
        sources = [source for found in self._elsewhere.values() for source in found if source.how != "argument"]
        held = [id(source.held) for source in sources if source.how == "held"]
        readers = [source.reader() for source in sources if source.how != "held"]
        return FoundTensors(frozenset((*self._in_modules, *held)), readers)

    def in_several_places(self) -> Iterator[tuple[Source, Source]]:
        """Of a tensor that is found in several places one is read: the others must hold it too."""
        self._of(0)
        inside, elsewhere = self._in_modules, self._elsewhere
        several = [identity for identity, found in inside.items() if len(found) > 1 or identity in elsewhere]
        for identity in several + [one for one, found in elsewhere.items() if len(found) > 1 and one not in inside]:
            found = [source for source in self._of(identity) if source.how not in ("held", "argument")]
            for other in found[1:]:
                yield found[0], other

    def clear(self) -> None:
        """Let go of all."""
        for held in (self._in_modules, self._elsewhere, self._tables):
            held.clear()


class FreeVariables:
    """Everything that a function can reach without being given it, as a walk has found it."""

    def __init__(self) -> None:
        self.plain: list[tuple[Source, Any]] = []  # containers of plain values, compared as a whole
        self.cells: list[tuple[str, types.CellType]] = []
        self.fixed: list[tuple[Source, Any]] = []  # what is in cells
        self.stored_globals: list[tuple[str, dict[str, Any], str]] = []
        self.holders: list[Holder] = []
        self.tensors: list[tuple[str, Tensor]] = []  # which the program may put attributes on
        self.modules: dict[int, ModuleParts] = {}  # by id
        self.modules_in_arguments: dict[int, ModuleParts] = {}
        self.patterns: dict[int, ObjectPattern] = {}  # of arguments that are objects, by the number of the leaf
        self.sources = TensorSources()
        self.unknown: list[Unfollowed] = []
        self.unknown_arguments: list[Unfollowed] = []
        self.compares_objects = False  # a program may ask whether one tensor is another
        self.lifetime = Lifetime()
        self.state = StateGuard(self.lifetime)
        self.guards_state = False
        self.modules_guard: ModuleGuard | None = None
        self._compared: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # how, until it is noted
        self._seen: dict[int, Any] = {}  # by id; kept, so that an id stays its own
        self._inside: dict[int, tuple[Any, Any]] = {}  # what holds a container of plain values, by its id, and the key

    @property
    def reached(self) -> Reached:
        """What a recording may change."""
        modules, in_arguments = [*self.modules.values()], [*self.modules_in_arguments.values()]
        return Reached(self.holders, self.tensors, self.stored_globals, modules, in_arguments)

    @property
    def seen(self) -> Mapping[int, Any]:
        """All objects that were found, by id."""
        return self._seen

    @property
    def in_arguments(self) -> frozenset[int]:
        """The ids of objects that are reached through the leaves of arguments only."""
        holders = [id(holder.owner) for holder in self.holders if holder.in_argument]
        return frozenset((*holders, *self.modules_in_arguments))

    def note_state(self) -> None:
        """Note what each call compares, as it is now: before the program changes anything."""
        self._note_compared()
        self.modules_guard = ModuleGuard([*self.modules.values()], self.lifetime) if self.modules else None

    def _note_compared(self) -> None:
        with looked_at():
            noted, self._compared = self._compared, []
            for add, args in noted:
                add(self.state, *args)
            self.guards_state = self.state.finish()

    def fix(self, owners: Iterable[Any]) -> None:
        """What calls write to must be the very same object, however alike another one may be."""
        tops = {id(value): source for source, value in self.plain}
        for owner in owners:
            while id(owner) in self._inside:
                outer, key = self._inside[id(owner)]
                self.state.add_identity(functools.partial(operator.getitem, outer, key), owner)
                owner = outer
            if id(owner) in tops:
                self.state.add_identity(tops[id(owner)].read, owner)
        for one, other in self.sources.in_several_places():
            self.state.add_same(one.reader(), other.reader())
        self._note_compared()

    def require(self, objects: Iterable[Any]) -> None:
        """The program is let go with any of some objects; in arguments, too, they must be the very same ones."""
        fixed = {id(self.lifetime.hold(value)()) for value in objects}
        for pattern in self.patterns.values() if fixed else ():
            pattern.require(fixed)

    def knows(self, value: Any) -> bool:
        """Whether a value that can be referred to weakly is the user's, and no tensor: the program can reach it."""
        return id(value) in self._seen and type(value).__weakrefoffset__ != 0 and not is_a(value, Tensor)

    def release(self) -> None:
        """Let go of everything that only a recording needs; no argument stays alive."""
        for held in (
            *(self.plain, self.fixed, self.cells, self.stored_globals, self.holders, self.tensors, self.sources),
            *(self.modules, self.modules_in_arguments, self._compared, self._seen, self._inside),
        ):
            held.clear()
        for pattern in self.patterns.values():
            pattern.release()


@contextlib.contextmanager
def looked_at() -> Iterator[None]:
    """Objects of the user's are looked at: where that cannot be done, the program is refused."""
    try:
        yield
    except ForegradError:
        raise
    except RecursionError as error:
        raise UnsupportedError(
            "the program can reach objects that lead to others so many times in a row that they cannot be followed. "
            "Keep them in a list, raise Python's recursion limit, or compile with fallback='eager'."
        ) from error
    except Exception as error:
        raise UnsupportedError(
            f"the program can reach an object that cannot be looked at: {type(error).__name__}: {error}. Pass what the "
            "program needs of it as an argument, or compile with fallback='eager'."
        ) from error


def refuse_inputs_as_keys(holders: Iterable[Holder], inputs: Iterable[Any]) -> None:
    """Refuse a program that can reach a set or dict in which one of its inputs is a key: tensors are keys by identity,
    and what stands for an input while recording is another tensor."""
    given = {id(value) for value in inputs if is_a(value, Tensor)}
    for path, owner, kind, _ in holders if given else ():
        if kind not in (SET, FROZENSET, DICT) or {str}.issuperset(map(type, kind.read(owner))):
            continue
        if any(id(key) in given for key in kind.read(owner)):
            raise UnsupportedError(
                f"the program can reach {path}, in which a tensor that it is given is a key: this cannot be compiled "
                "yet. Keep tensors in a list, pass another tensor, or compile with fallback='eager'."
            )


def refuse_unknown(unknown: Sequence[Unfollowed]) -> None:
    """Refuse a program that can reach what cannot be followed."""
    for path, why, _ in unknown:
        raise UnsupportedError(
            f"the program can reach {path}, which {why}: whether it is the same at the next call cannot be seen. Pass "
            "what the program needs of it as an argument, or compile with fallback='eager'."
        )
