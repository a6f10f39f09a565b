"""What a program can reach by itself, as it is needed: to undo what a recording changes, and to guard each call."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from ..errors import UnsupportedError
from .code import CodeThatRan, Names, ReadByName
from .kinds import DICT, FROZENSET, SET, is_a
from .module_guards import ModuleGuard
from .sources import Source
from .walk import Holder, Reached, Unfollowed, Walk, looked_at


class FreeVariables(Walk):
    """Everything that a function can reach without being given it, as far as its scope goes."""

    guards_state = False
    modules_guard: ModuleGuard | None = None
    refusal: UnsupportedError | None = None  # what a program that runs was told, and may have caught

    def note_state(self) -> None:
        """Note what each call compares, as it is now: before the program changes anything."""
        self._note_compared()
        self.modules_guard = ModuleGuard([*self.modules.values()], self.lifetime) if self.modules else None

    @property
    def code_that_ran(self) -> CodeThatRan | None:
        """Which code ran in a recording, where names in code tell too little."""
        return None

    @property
    def reached(self) -> Reached:
        """What a recording may change."""
        modules, in_arguments = [*self.modules.values()], [*self.modules_in_arguments.values()]
        return Reached(self.holders, self.tensors, self.stored_globals, modules, in_arguments)

    def tell(self, note: Callable[[Reached], None]) -> None:
        """Tell of whatever else comes to be reached while the program runs."""

    def noting_code(self) -> contextlib.AbstractContextManager[None]:
        """Notes which code runs, where that has to be known."""
        return contextlib.nullcontext()

    def recording_ends(self) -> None:
        """The program will not run again."""

    def _note_compared(self) -> None:
        with looked_at():
            noted, self._compared = self._compared, []
            for add, args in noted:
                add(self.state, *args)
            self.guards_state = self.state.finish()

    @property
    def needs_code_that_runs(self) -> bool:
        """Whether names in code tell too little, so that what runs has to be noted."""
        return not self._scope.knows_code and (self._computes_names or bool(self.unknown))

    def changed_for_good(self) -> list[Unfollowed]:
        """What a recording may change and nothing can put back, as far as the names in the program lead there."""
        if not self._hidden_state or not self._scope.needs_names:
            return self._hidden_state
        if self._is_of_no_use:
            return []
        named = ReadByName(Names(attributes=frozenset(self._names)))
        return FreeVariables(self._root, self._arguments, named)._hidden_state

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
        self._root, self._arguments = len, ()
        for held in (
            *(self.plain, self.fixed, self.cells, self.stored_globals, self.holders, self.tensors, self.sources),
            *(self.modules, self.modules_in_arguments, self._compared, self._seen, self._inside, self._unnamed),
            *(self._later, self._functions, self._namespaces),
        ):
            held.clear()
        for pattern in self.patterns.values():
            pattern.release()

    def source_of(self, tensor: Tensor) -> Source:
        """Where a tensor was found; one that is nowhere to be found is held as it is."""
        found = self.sources.of(tensor)
        if not found:  # a method was called by a name that stands nowhere
            for member in itertools.chain.from_iterable(self._unnamed.values()):
                self._enter_function(member)
            self._unnamed.clear()
            self._look_at_functions()
            found = self.sources.of(tensor)
        return found[0] if found else Source(tensor, "held", None, f"a tensor of shape {tuple(tensor.shape)}")


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
