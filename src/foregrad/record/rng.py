"""Random numbers while recording: none are consumed, and a replayed draw is told from a new one.

Checkpointing restores a generator's state outside the dispatcher and runs a random operator once more. The
generator's own state names the draw: the same state of it again is the same draw. So that successive draws have
different states, each recorded draw moves its generator by one number; every state is put back after the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import disable_modes, identity_of, without_function_modes
from ..errors import UnsupportedError


class Generators:
    """The generators that a program draws from."""

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where  # the user's line, for an error
        self.known: Sequence[torch.Generator] = ()  # which the program finds or is given; it may become more
        self._draws: dict[Any, int] = {}
        # By the numbers of generators.
        self._before: dict[int, tuple[torch.Generator, Tensor]] = {}  # states to put back
        self._left: dict[int, tuple[torch.Generator, Tensor]] = {}  # where the last draw left each generator
        self._last: dict[int, tuple[int, int | None]] = {}  # the step of that draw, and the autograd node it ran in
        self._states_seen: list[Tensor] = []

    def begin(self) -> None:
        """Note generators as the program finds them, and move the default one on: a seed that is set again shows."""
        default = torch.default_generator
        with disable_modes(), without_function_modes():
            self._states_seen.append(default.get_state())
            torch.rand(1, device="cpu")
            self._left[identity_of(default)] = (default, default.get_state())
            self._left.update((identity_of(generator), (generator, generator.get_state())) for generator in self.known)

    def first_state(self, generator: torch.Generator) -> Tensor:
        """The state of a generator before the program drew from it."""
        if identity_of(generator) == identity_of(torch.default_generator):
            return self._states_seen[0]
        return self._before[identity_of(generator)][1]

    def draw(
        self, what: Any, generator: torch.Generator, position: int, may_reseed: bool, run: int | None
    ) -> tuple[int | None, int | None]:
        """Note a draw at a position of the recording; gives the position of the draw that it replays, if any.

        Also gives, for a replay, that of the draw right before it, if that ran in the same autograd node (`run`): a
        recomputation is one run, so where it is done at all both of them are.
        """
        with disable_modes(), without_function_modes():
            state, number = generator.get_state(), identity_of(generator)
            self._require_known(generator)
            self._before.setdefault(number, self._left.get(number, (generator, state)))
            key = (what, number, bytes(state.numpy().data))
            replayed = self._draws.get(key)
            follows = None
            if replayed is not None and self._last.get(number, (0, None))[1] == run is not None:
                follows = self._last[number][0] if torch.equal(self._left[number][1], state) else None
            if replayed is None and not may_reseed:
                self._refuse_reseeding(generator, state)
            torch.rand(1, generator=generator, device=generator.device)
            left = generator.get_state()
            self._states_seen += [state, left]
            self._left[number], self._last[number] = (generator, left), (position, run)
        self._draws.setdefault(key, position)
        return replayed, follows

    def refuse_state(self, tensor: Tensor) -> None:
        """The program looks at the state of a generator: a recording moves them otherwise than calls do."""
        if tensor.dtype is not torch.uint8 or tensor.ndim != 1 or tensor.device.type != "cpu":
            return
        with disable_modes(), without_function_modes():
            states = (*self._states_seen, *(state for _, state in self._left.values()))
            if any(torch.equal(tensor, state) for state in states):
                raise UnsupportedError(
                    f"the program reads the state of a random generator, at {self._where()}: this cannot be compiled "
                    "yet. Pass the state as an argument, or compile with fallback='eager'."
                )

    def _require_known(self, generator: torch.Generator) -> None:
        """Each call would draw on from where the last one left a generator that eager makes anew."""
        known = (torch.default_generator, *torch.cuda.default_generators, *self.known)
        if identity_of(generator) not in map(identity_of, known):
            raise UnsupportedError(
                f"the program draws from a random generator that it makes itself, at {self._where()}: this cannot be "
                "compiled yet. Pass the generator or what it draws as an argument, or compile with fallback='eager'."
            )

    def _refuse_reseeding(self, generator: torch.Generator, state: Tensor) -> None:
        """A graph draws from the generators as they are: a program must not set their state.

        Another thread may draw at the same time, so only a state that was seen before, or that of a fresh seed, is
        taken for one that the program has set.
        """
        _, left = self._left.get(identity_of(generator), (generator, state))
        if torch.equal(left, state):
            return
        fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed()).get_state()
        if torch.equal(state, fresh) or any(torch.equal(state, seen) for seen in self._states_seen):
            self._before.setdefault(identity_of(generator), (generator, left))
            raise UnsupportedError(
                f"the program sets the state of a random generator, at {self._where()} or before: this cannot be "
                "compiled yet. Seed outside the program, or compile with fallback='eager'."
            )

    def check(self) -> None:
        """At the end of the program each generator must be where the program's own draws left it."""
        with disable_modes(), without_function_modes():
            for generator, _ in list(self._left.values()):
                self._refuse_reseeding(generator, generator.get_state())

    def resume(self) -> None:
        """Draw in backward from where the forward left off."""
        drawn_from = (*self._last, identity_of(torch.default_generator))
        for generator, state in (self._left[number] for number in dict.fromkeys(drawn_from) if number in self._left):
            self._before.setdefault(identity_of(generator), (generator, generator.get_state()))
            generator.set_state(state)

    def restore(self) -> None:
        """Put every generator back."""
        for generator, state in self._before.values():
            generator.set_state(state)
        self._before.clear()
