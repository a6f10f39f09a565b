"""What came of recording a program once: frozen, for all later layers to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..abstract.engine import Engine
from ..graph.graph import Step
from ..host_numbers import Expression
from ..slots import Primal
from .alias_groups import in_order
from .fakify import RecordedInput
from .hooks import HooksLeft
from .lift import TensorAccess
from .mutation_checks import Mutations
from .pre_dispatch import AboveAutograd
from .session import Ambient, Session


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One run of a program on abstract tensors: its inputs and what stood for them, and its operators in order."""

    session: Session  # has autograd's tape: backwards are recorded from it
    engine: Engine
    steps: Sequence[Step]  # of the forward
    inputs: Sequence[RecordedInput]
    memories: Sequence[RecordedInput]  # memory that inputs share, and roots in it
    all_inputs: Sequence[RecordedInput]  # shared memory, then the rest in the order of the graph, without wrappers
    real_tensors: Mapping[Primal, Tensor]  # until the session releases them
    grads_before: Mapping[Primal, Tensor]  # what stood for gradients of inputs before the program ran
    mutations: Mutations
    access: TensorAccess
    hooks: HooksLeft
    before: Ambient
    after: Ambient
    above_autograd: bool
    runs_backward: bool  # the program differentiates something by itself

    @classmethod
    def of(cls, session: Session) -> Recording:
        """What a session has found, once the program has run and its results are known to it."""
        recorder, lifted = session.recorder, session.lifted
        return cls(
            session,
            session.engine,
            tuple(session.steps),
            tuple(session.inputs),
            tuple(session.memories),
            _in_graph_order(session),
            session.real_tensors,
            session.grads_before,
            recorder.mutations,
            lifted.access,
            lifted.hooks_left,
            session.before,
            session.after,
            isinstance(recorder, AboveAutograd),
            recorder.runs_backward,
        )

    @property
    def decisions(self) -> Iterator[tuple[Expression, Any]]:
        """What the program, or torch, has decided by numbers of the host."""
        numbers = self.session.recorder.numbers
        yield from () if numbers is None else numbers.decisions

    @property
    def grad_enabled(self) -> bool:
        """Whether gradients were on when the program was called."""
        return self.before.grad_enabled

    def looks_at_grad(self, recorded: RecordedInput) -> bool:
        """Whether the program read or set the gradient of an input."""
        if not recorded.is_tensor or recorded.parent is not None:
            return False
        touched = id(recorded.seen) in self.access.grads
        return touched or (recorded.seen.is_leaf and recorded.seen.grad is not None)

    def properties_read(self, recorded: RecordedInput) -> set[str]:
        """Properties of an input, beside what is always compared, that the program read and found empty."""
        return self.access.properties.get(id(recorded.seen), set())

    def made_to_require_grad(self, tensor: Tensor) -> bool:
        """Whether the program called `requires_grad_()` on a tensor, and did not take it back."""
        return id(tensor) in self.access.made_to_require_grad and tensor.requires_grad


def _in_graph_order(session: Session) -> tuple[RecordedInput, ...]:
    plain = [i for i in session.inputs if i.layout is None]
    if not session.memories:
        return tuple(plain)
    order = in_order([(i.slot, session.real_tensors.get(i.slot, i.seen)) for i in plain])
    by_slot = {i.slot: i for i in session.inputs}
    return (*session.memories, *(by_slot[slot] for slot in order))
