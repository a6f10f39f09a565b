"""Random numbers while recording: none are consumed, and a replayed draw is told from a new one.

Checkpointing restores a generator's state outside the dispatcher and runs a random operator once more. The
generator's own state names the draw: the same state of it again is the same draw. So that successive draws have
different states, each recorded draw moves its generator by one number; every state is put back after the recording.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import disable_modes, identity_of, without_function_modes
from ..errors import UnsupportedError
from ..graph.reads import START, Reseed

_FAR = 1009  # where a recording begins, from what the program finds: further than draws go that follow the same seed


class Generators:
    """The generators that a program draws from."""

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where  # the user's line, for an error
        self.known: Sequence[torch.Generator] = ()  # which the program finds or is given; it may become more
        self._draws: dict[Any, int] = {}
        self._before: dict[int, tuple[torch.Generator, Tensor]] = {}  # states to put back
        self._first: dict[int, Tensor] = {}  # states before the program drew, by ids of generators
        self._left: dict[int, tuple[torch.Generator, Tensor]] = {}  # where the last draw left each generator
        self._stands: dict[int, Tensor] = {}  # the same, but for draws that are replayed: these move no generator
        self._begun: dict[int, Tensor] = {}  # where the program has found it
        self._last: dict[int, tuple[int, int | None]] = {}  # the step of that draw, and the autograd node it ran in
        self._states_seen: list[Tensor] = []
        self._left_behind: dict[Any, int] = {}  # by generator and state before a reseeding: its number
        self._reseedings = 0

    def begin(self) -> None:
        """Note generators as the program finds them, and move them on: a seed that is set again shows."""
        with disable_modes(), without_function_modes():
            found = {identity_of(generator): generator for generator in (*_defaults(), *self.known)}
            for generator in found.values():
                self._adopt(generator)

    def _adopt(self, generator: torch.Generator) -> None:
        state = generator.get_state()
        self._states_seen.append(state)
        self._first[identity_of(generator)] = state
        self._before.setdefault(identity_of(generator), (generator, state))
        if generator.device.type == "cuda":
            generator.set_offset(generator.get_offset() + 4 * _FAR)
        else:
            torch.rand(_FAR, generator=generator, device=generator.device)
        self._begun[identity_of(generator)] = generator.get_state()
        self._put(generator, self._begun[identity_of(generator)])

    def _put(self, generator: torch.Generator, state: Tensor) -> None:
        self._left[identity_of(generator)], self._stands[identity_of(generator)] = (generator, state), state

    def first_state(self, generator: torch.Generator) -> Tensor:
        """The state of a generator before the program drew from it."""
        return self._first[identity_of(generator)]

    def reseeding(self, generator: torch.Generator, drawing: Any = None) -> Reseed | None:
        """Where the program has put a generator since its last draw, if it has, before it is `drawing` again.

        One that nobody had before the program was made by it: each call makes it anew, as it is now. Another thread may
        draw at the same time, so of the default generators only a state that was seen before, or that of a fresh seed,
        is taken for one that the program has set.
        """
        with disable_modes(), without_function_modes():
            state = generator.get_state()
            if identity_of(generator) not in self._left:
                return self._meet(generator, state)
            before = self._stands[identity_of(generator)]
            to = None if torch.equal(before, state) else self._target(generator, state, drawing)
            if to is None:
                return None
            self._left_behind[_key(generator, before)] = self._reseedings
            self._put(generator, state)
            return self._reseed(generator, to)

    def _meet(self, generator: torch.Generator, state: Tensor) -> Reseed | None:
        """A generator is drawn from that the recording has not begun with."""
        self._adopt(generator)
        if identity_of(generator) in map(identity_of, (*_defaults(), *self.known)):
            return None
        if not torch.equal(state, _seeded_like(generator)):
            raise UnsupportedError(
                f"the program draws from a random generator that it makes of the state of another, at {self._where()}: "
                "this cannot be compiled yet. Pass the generator as an argument, or compile with fallback='eager'."
            )
        generator.set_state(state)
        self._put(generator, state)
        del self._begun[identity_of(generator)]  # which means nothing to the next call
        return self._reseed(generator, state)

    def _reseed(self, generator: torch.Generator, to: Tensor | int) -> Reseed:
        self._reseedings += 1
        return Reseed(self._reseedings - 1, generator, to, self._where())

    def _target(self, generator: torch.Generator, state: Tensor, drawing: Any) -> Tensor | int | None:
        """What a state is to a call: a fact, or where the generator was before.

        None where another thread has drawn, and for a draw that is replayed.
        """
        begun = self._begun.get(identity_of(generator))
        if begun is not None and torch.equal(state, begun):
            return START
        earlier = self._left_behind.get(_key(generator, state))
        if earlier is not None:
            return earlier
        if torch.equal(state, _seeded_like(generator)):
            return state
        if (drawing, *_key(generator, state)) in self._draws:
            return None
        if threading.active_count() > 1 and not any(torch.equal(state, seen) for seen in self._states_seen):
            return None
        raise UnsupportedError(
            f"the program puts a random generator, at {self._where()} or before, where it was between two draws, or "
            "where it never was: this cannot be compiled yet. Seed it, or compile with fallback='eager'."
        )

    def draw(
        self, what: Any, generator: torch.Generator, position: int, run: int | None
    ) -> tuple[int | None, int | None]:
        """Note a draw at a position of the recording; gives the position of the draw that it replays, if any.

        Also gives, for a replay, that of the draw right before it, if that ran in the same autograd node (`run`): a
        recomputation is one run, so where it is done at all both of them are.
        """
        with disable_modes(), without_function_modes():
            state, known = generator.get_state(), identity_of(generator)
            self._before.setdefault(known, (generator, state))
            key = what, *_key(generator, state)
            stands = self._stands.get(known)
            goes_on = stands is not None and torch.equal(stands, state)  # a seed that was set again, perhaps
            replayed = None if goes_on else self._draws.get(key)
            follows = None
            if replayed is not None and self._last.get(known, (0, None))[1] == run is not None:
                follows = self._last[known][0] if torch.equal(self._left[known][1], state) else None
            torch.rand(1, generator=generator, device=generator.device)
            self._left[known] = (generator, generator.get_state())
            self._states_seen += [state, self._left[known][1]]
            if replayed is None:
                self._stands[known] = self._left[known][1]
                self._draws[key] = position
            self._last[known] = position, run
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

    @property
    def met(self) -> list[torch.Generator]:
        """All that were met so far."""
        return [generator for generator, _ in self._left.values()]

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


def _key(generator: torch.Generator, state: Tensor) -> tuple[int, bytes]:
    return identity_of(generator), bytes(state.numpy().data)


def _seeded_like(generator: torch.Generator) -> Tensor:
    """The state of a generator right after it was seeded."""
    return torch.Generator(generator.device).manual_seed(generator.initial_seed()).get_state()


def _defaults() -> list[torch.Generator]:
    """The generators that are there without anybody's doing."""
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
