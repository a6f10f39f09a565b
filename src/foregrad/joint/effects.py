"""What a program does to the objects around it, beside its results: tensors that it assigns.

Each such tensor is a result that the user does not see: it is computed, classified and rebuilt like any other, and the
run time then puts it where the program put it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._torch import disable_modes
from ..functionalize.walk import Functionalizer
from ..ops import ViewStep, aten
from ..record.recording import Recording
from ..slots import Primal
from ..values import loosely
from .inputs import InputFacts, is_stale
from .outputs import leaf_behind

Put = Callable[[Any, Any, Any], None]  # into an object, under a key, a value
Build = Callable[[list[Any]], Any]


class Owner:
    """An object of the user's, as long as the program can run."""

    __slots__ = ("_find",)

    def __init__(self, value: Any) -> None:
        self._find = loosely(value)

    def find(self) -> Any:
        """The object; None if it is gone: nobody can see what would be done to it."""
        return self._find()

    def release(self) -> None:
        """Let go of an object that cannot be referred to weakly."""
        self._find = _nothing


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Escape:
    """A tensor, or a new container with tensors in it, that the program put into an object of the user's."""

    owner: Any
    put: Put
    key: Any
    paths: tuple[str, ...]  # of the leaves, in the user's words
    leaves: tuple[Any, ...]  # tensors, and constants beside them; a single None where it took a tensor away
    build: Build | None = None  # makes a new container of them


@dataclass(frozen=True, slots=True)
class Assigned:
    """Hidden results that go into an object of the user's: a single one as it is, or several in a new container."""

    outputs: tuple[int, ...]
    owner: Owner
    put: Put
    key: Any
    build: Build | None


@dataclass(frozen=True, slots=True)
class GradAssigned:
    """A hidden result that becomes the gradient of an input."""

    output: int
    of: Primal


@dataclass(frozen=True, slots=True)
class Moved:
    """A hidden result to whose memory an input was moved, by `set_`."""

    output: int
    input: Primal
    with_grad: bool  # gradients were on
    counted: bool  # as a write to the input: `set_` is, `.data =` is not
    leaf: bool  # it requires grad and was a leaf


Effect = Assigned | GradAssigned | Moved


class Effects:
    """Collects the hidden results of a program behind those that the user sees."""

    def __init__(self, visible: Sequence[Any], paths: Sequence[str]) -> None:
        self.leaves = list(visible)
        self.paths = list(paths)
        self.effects: list[Effect] = []

    def add(self, leaf: Any, path: str) -> int:
        """A hidden result; gives its place."""
        self.leaves.append(leaf)
        self.paths.append(path)
        return len(self.leaves) - 1

    def add_escapes(self, escapes: Sequence[Escape]) -> None:
        """Tensors that the program assigned."""
        for escape in escapes:
            outputs = tuple(map(self.add, escape.leaves, escape.paths))
            self.effects.append(Assigned(outputs, Owner(escape.owner), escape.put, escape.key, escape.build))

    def add_leaves(self, recording: Recording, functionalizer: Functionalizer) -> None:
        """Leaves that the program made, where it gives out views of them alone."""
        known = {id(leaf) for leaf in self.leaves}
        for leaf, path in list(zip(self.leaves, self.paths, strict=True)):
            base = leaf_behind(recording, functionalizer, leaf)
            if base is not None and id(base) not in known:
                known.add(id(base))
                self.add(base, path)

    def add_inputs(self, recording: Recording, functionalizer: Functionalizer, inputs: Sequence[InputFacts]) -> None:
        """Inputs that were moved to other memory, and gradients that the program gave them."""
        for facts in inputs:
            recorded = facts.recorded
            if not recorded.is_tensor or recorded.same_as is not None:
                continue
            if not is_stale(recorded.seen) and recorded.seen.is_leaf:
                before, after = recording.grad_before(recorded), recorded.seen.grad
                if after is not before:
                    output = self.add(after, f"{recorded.slot}.grad")
                    self.effects.append(GradAssigned(output, recorded.slot))
            if facts.moved is not None:
                with disable_modes():
                    alias = recorded.seen.data  # whose writes do not count for the input
                step = ViewStep(aten.detach.default, (), {}, None, counts_alone=True)
                functionalizer.add_view(functionalizer.state_of(recorded.seen), alias, step)
                output = self.add(alias, str(recorded.slot))
                leaf = recorded.was_leaf and (recorded.required_grad or facts.made_to_require_grad)
                counted = not facts.moved_uncounted or recorded.was_inference  # those count nothing
                self.effects.append(Moved(output, recorded.slot, facts.moved.grad_enabled, counted, leaf))
