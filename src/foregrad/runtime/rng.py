"""Seeds and offsets around graphs that draw, under `functionalize_rng_ops`.

A graph gets the seed and the offset of a generator after its inputs, and gives the next offset. The lines that pass
them stand right around the graph, in a function of the generated code, so that nothing outside of it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..codegen.writer import Writer
from ..functionalize.operators import default_generator
from ..functionalize.rng import RandomInputs
from ..graph.graph import Graph
from ..joint.build import Joint
from ..slots import RandomState
from .compilers import Boxed

_STEP = 4  # offsets are multiples of this
_SIGN = 1 << 63


@dataclass(frozen=True)
class GeneratorState:
    """The generator of a device as a seed and an offset.

    A generator that counts (CUDA) gives its own, and is moved to the offset after the draws. The CPU's cannot be moved
    to a place: each call that draws takes a new seed from it, which moves it on.

    >>> torch.manual_seed(0)
    <torch._C.Generator object at ...>
    >>> cpu = GeneratorState(torch.device("cpu"), draws=True)
    >>> bool(cpu.take()[0] == cpu.take()[0])
    False
    """

    device: torch.device
    draws: bool

    def take(self) -> tuple[Tensor, Tensor]:
        """The seed and the offset for one call."""
        generator = default_generator(self.device)
        if self.device.type == "cuda":
            return _number(generator.initial_seed()), _number(generator.get_offset())
        seed = _number(generator.initial_seed())
        return seed.random_(generator=torch.default_generator) if self.draws else seed, _number(0)

    def move_on(self, offset: Tensor) -> None:
        """Let the next call draw something else."""
        if self.draws and self.device.type == "cuda":
            default_generator(self.device).set_offset(-(-int(offset) // _STEP) * _STEP)


def _number(value: int) -> Tensor:
    """An integer of 64 bits, signed or not."""
    return torch.tensor((value + _SIGN) % (2 * _SIGN) - _SIGN, dtype=torch.int64, device="cpu")


def _state(side: RandomInputs) -> GeneratorState:
    return GeneratorState(side.device, side.draws)


def generators_of(joint: Joint) -> list[torch.Generator]:
    """The generators that a forward takes its seed from."""
    forward = joint.random.forward
    return [torch.default_generator, default_generator(forward.device)] if forward is not None else []


def _takes_state(graph: Graph) -> bool:
    """Whether a backward takes a seed of its own; it may also be given the forward's, as a saved value."""
    return any(node.slot == RandomState("bwd", "seed") for node in graph.inputs)


def around_forward(writer: Writer, name: str, joint: Joint) -> str:
    """Under which name to install a compiled forward that draws and is called by `name`."""
    assert joint.random.forward is not None
    return _define(writer, name, _state(joint.random.forward), len(joint.signature.returned))


def around_backward(writer: Writer, name: str, joint: Joint, graph: Graph) -> str:
    """The same for a backward, which takes a seed and an offset only if it draws."""
    if joint.random.backward is None or not _takes_state(graph):
        return name
    return _define(writer, name, _state(joint.random.backward), len(joint.primals) + len(joint.backward.writes))


def _define(writer: Writer, name: str, state: GeneratorState, position: int) -> str:
    """Write the function that passes the state; the new offset stands at a position of the results."""
    inner = writer.fresh(f"drawing_{name}")
    with writer.block(f"def {name}(args):"):
        writer.line(f"args += {writer.bind(state.take, 'seed_and_offset')}()")
        writer.line(f"results = {inner}(args)")
        writer.line(f"{writer.bind(state.move_on, 'move_generator')}(results[{position}])")
        writer.line(f"return (*results[:{position}], *results[{position + 1}:])")
    writer.line()
    return inner


def with_state(compiled: Boxed, graph: Graph, random: RandomInputs | None) -> Callable[[list[Any]], Any]:
    """A backward that is not called by the generated code, given its seed and its offset if it draws."""
    if random is None or not _takes_state(graph):
        return compiled
    state = GeneratorState(random.device, draws=True)

    def run(args: list[Any]) -> Any:
        *results, offset = compiled([*args, *state.take()])
        state.move_on(offset)
        return results

    return run
