"""Numbers that the host works out at run time, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..codegen.writer import Writer, tuple_of, unpack
from ..graph.fx import boxed_code, to_fx
from ..graph.host_part import HostPart
from ..host_numbers import OtherNumbers
from ..slots import Slot
from .call import Entry


@dataclass(frozen=True)
class _Worked:
    """Works the numbers out."""

    run: Callable[[list[Any]], Any]

    def __call__(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.run([*inputs])
        with torch.no_grad():
            return self.run([*inputs])


@dataclass(frozen=True)
class _InATensor:
    """Puts numbers into a tensor on a device, for which nobody has to wait."""

    device: torch.device

    def __call__(self, numbers: Sequence[float]) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.tensor(numbers, dtype=torch.float64, device="cpu")
        on_host = torch.tensor(numbers, dtype=torch.float64, device="cpu", pin_memory=True)
        return on_host.to(self.device, non_blocking=True)


def write_host_part(writer: Writer, part: HostPart, entry: Entry) -> Sequence[Slot]:
    """Lines that work the numbers out, and the slots of those that the graph takes.

    A call by whose numbers the program would decide otherwise is for another program. An error in Python's arithmetic
    is the program's own, which raises it while it is recorded.
    """
    slots = [output.slot for output in part.graph.outputs]
    work_out = writer.bind(_Worked(boxed_code(to_fx(part.graph))), "host_numbers")
    given = [node.slot for node in part.graph.inputs if node.slot is not None]
    names = [writer.variable(slot) for slot in slots]
    call = f"{work_out}({', '.join(writer.listed(given))})"
    with writer.block("try:"):
        writer.line(f"{unpack(names)} = {call}" if names else call)
    errors = tuple_of([writer.bind(OtherNumbers, "OtherNumbers"), "ArithmeticError", "ValueError"])
    writer.line(f"except {errors}: {entry.other_numbers(writer)}")
    if part.tensor is None:
        return slots[: len(slots) - len(part.returned)]
    assert part.tensor.slot is not None
    put = writer.bind(_InATensor(part.tensor.value.device), "in_a_tensor")
    taken = names[: len(names) - len(part.returned)]
    writer.line(f"{writer.variable(part.tensor.slot)} = {put}({tuple_of(taken)})")
    return [part.tensor.slot]


def write_numbers_returned(writer: Writer, part: HostPart) -> None:
    """Lines that give results of the program which are numbers their variables."""
    for slot, number in part.returned.items():
        writer.line(f"{writer.variable(slot)} = {writer.variable(number)}")
