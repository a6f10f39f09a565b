"""What a joint graph takes and gives under `functionalize_rng_ops`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..functionalize.draws import Draws, RandomInputs
from .ir import Node


@dataclass(frozen=True, slots=True)
class RandomSide:
    """The state that one direction is given, and the offset that it gives back."""

    seed: Node
    base: Node
    offset: Node
    device: torch.device  # whose generator gives the state

    @property
    def draws(self) -> bool:
        """Whether anything is drawn."""
        return self.offset is not self.base


@dataclass(frozen=True, slots=True)
class RandomFacts:
    """Seeds and offsets, forward and backward; None where draws stay as they are."""

    forward: RandomSide | None
    backward: RandomSide | None

    @property
    def placeholders(self) -> list[Node]:
        """Seed and offset of the forward, then of the backward."""
        sides = [side for side in (self.forward, self.backward) if side is not None]
        return [node for side in sides for node in (side.seed, side.base)]

    @property
    def values(self) -> list[Any]:
        """Abstract values of the placeholders."""
        return [node.value for node in self.placeholders]

    @property
    def forward_outputs(self) -> Sequence[Node]:
        """The forward's new offset."""
        return () if self.forward is None else (self.forward.offset,)

    @property
    def backward_outputs(self) -> Sequence[Node]:
        """The backward's new offset, if it draws."""
        return (self.backward.offset,) if self.backward is not None and self.backward.draws else ()


def random_facts(draws: Draws, training: bool) -> RandomFacts:
    """The seeds and offsets of a graph; one without a backward has those of the forward only."""
    return RandomFacts(_side(draws.forward), _side(draws.backward) if training else None)


def _side(inputs: RandomInputs | None) -> RandomSide | None:
    return None if inputs is None else RandomSide(inputs.seed, inputs.base, inputs.offset, inputs.device)
