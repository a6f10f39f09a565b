"""What a program returns, and what it puts into the objects that it is given: which of it each call makes anew.

An object that the program was given, or that exists around it, comes back as the very same object. Whatever else holds
tensors was made by the program, and is made again by each call.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Set
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor

from ..codegen.pytree import Around, Flat, Given, Look, TakingApart, flatten
from ..errors import StateChangeError, UnknownOutputError
from ..joint.side_effects import NO_CHANGES, ArgumentChanges
from ..record.session import Session
from ..values import PLAIN
from .given import Copies, can_be_opened, user_path
from .kinds import is_a
from .walk import Walk

_COMPUTED = (Tensor, SymInt, SymFloat, SymBool)


class Results:
    """Takes what comes of one recording apart."""

    def __init__(self, given: Copies | None, reachable: Walk, known_before: Set[int]) -> None:
        """`known_before` are the ids of what the program could reach before it ran."""
        self._given = given
        self._reachable = reachable
        self._known_before = known_before
        self._around: dict[int, Around] = {}

    def take(self, session: Session) -> tuple[Flat, ArgumentChanges]:
        """The result, and what becomes of the arguments."""
        given = self._given
        if given is None or given.taken.opening.closed:
            return self._take_plainly(session), NO_CHANGES
        taking = TakingApart(Look(can_be_opened, self._knows, same_objects=True, made_anew=True))
        changes = given.changes(taking)
        for change in changes:
            value, path = given.taken.objects[change.of.number]
            if id(value) in self._reachable.seen:
                raise StateChangeError(
                    f"the program changes {user_path(path)}, which it also finds by itself: this cannot be compiled "
                    "yet. Pass it, or let the program find it, or compile with fallback='eager'."
                )
        leaves, paths = taking.leaves, taking.paths
        taking.leaves, taking.paths = [], []
        tree = taking.take(session.result, "output")
        given.settle()
        shared = frozenset(taking.shared)
        flat = Flat(tree, taking.leaves, taking.paths, shared)
        return flat, ArgumentChanges(tuple(changes), tuple(leaves), tuple(paths), shared)

    @property
    def around(self) -> tuple[Around, ...]:
        """What exists around the program, of all that was taken apart."""
        return tuple(self._around.values())

    def _take_plainly(self, session: Session) -> Flat:
        """For export: what the program was given must be as it was."""
        if self._given is not None:
            self._given.require_unchanged("that it was given")
        flat = flatten(session.result, "output")
        for path, leaf in zip(flat.paths, flat.leaves, strict=True):
            if can_be_opened(leaf):
                raise UnknownOutputError(
                    f"Found {type(leaf)} in output, which is not a known type, at {path}: a graph returns what pytree "
                    "can take apart. Return its tensors in a tuple, list or dict, or register its class with "
                    "torch.utils._pytree.register_pytree_node."
                )
        return flat

    def _knows(self, value: Any) -> Given | Around | None:
        kind = type(value)
        if kind in PLAIN or issubclass(kind, _COMPUTED):
            return None
        assert self._given is not None
        known = self._given.place_of(value) or self._around.get(id(value))
        if known is None and kind is not tuple and self._is_around(value):
            if id(value) in self._reachable.in_arguments:
                self._given.taken.require_others()
            known = self._around[id(value)] = Around(value)
        return known

    def _is_around(self, value: Any) -> bool:
        """Whether an object was there before the program ran; the garbage collector tells those that are new."""
        if id(value) in self._known_before:
            return True
        if not gc.is_tracked(value):
            return is_a(value, type)  # one of Python's own
        return id(value) not in self._young

    @functools.cached_property
    def _young(self) -> frozenset[int]:
        return frozenset(id(value) for generation in (0, 1) for value in gc.get_objects(generation))
