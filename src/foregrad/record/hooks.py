"""Hooks that the program registers, and other code of the user's that runs in a backward."""

from __future__ import annotations

import contextlib
import dis
import inspect
import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._torch import CALL_OF_A_MODULE
from ..errors import UnsupportedError
from ..slots import Primal
from ..stack_traces import Stack, is_own_code, is_users_code, user_stack, where
from ..values import loosely
from .fakify import RecordedInput

# ---------------------------------------------------------------------------------------------------------------------
# Hooks that the program registers while it is recorded.
#
# A hook on an intermediate is part of the recorded backward. One on an input belongs to the caller's tensor: it stays
# there, and sees the gradient from everywhere. It is on the abstract tensor while the program runs, for a backward
# inside the program must meet it, and is taken off before the program itself is differentiated.
Registering = Literal["register_hook", "register_post_accumulate_grad_hook"]
REGISTERING: dict[Any, Registering] = {
    Tensor.register_hook: "register_hook",
    Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
}


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """A hook that the program gave to a tensor."""

    tensor: Tensor
    how: Registering
    hook: Callable[..., Any]
    handle: RemovableHandle
    node: Any  # of autograd, that the tensor had then
    stack: Stack

    @property
    def is_there(self) -> bool:
        """Whether it was not taken off since."""
        return self.handle.id in (self.handle.hooks_dict_ref() or {})

    @property
    def serves_several(self) -> bool:
        """Whether it is a part of `register_multi_grad_hook`, which keeps account of several tensors."""
        code = getattr(self.hook, "__code__", None)
        return code is not None and code.co_filename == torch.autograd.graph.__file__


class HooksLeft(NamedTuple):
    """The hooks that a program has registered and not removed."""

    on_inputs: tuple[Registered, ...] = ()
    inside: tuple[Registered, ...] = ()


class Hooks:
    """Registers hooks for the program, and notes them."""

    def __init__(self) -> None:
        self._registered: list[Registered] = []
        self._guards: list[RemovableHandle] = []

    def register(self, method: Any, tensor: Tensor, hook: Callable[..., Any]) -> RemovableHandle:
        """Do what the program asks for, and remember it."""
        node = tensor.grad_fn  # first: it brings a view up to date, without which torch 2.13 crashes on the next line
        handle: RemovableHandle = method(tensor, hook)
        self._registered.append(Registered(tensor, REGISTERING[method], hook, handle, node, user_stack(4)))
        return handle

    @property
    def held(self) -> Iterator[Tensor]:
        """The tensors that are held here."""
        for registered in self._registered:
            yield registered.tensor

    def guard(self, recorded: RecordedInput) -> None:
        """The caller's own hooks on an input: a backward inside the program would have to run them."""

        def refuse(gradient: Tensor) -> None:
            raise UnsupportedError(
                f"the program differentiates {recorded.slot}, which has a hook or retains its gradient, at "
                f"{where(user_stack(2))}: this cannot be compiled yet. Compile with fallback='eager'."
            )

        self._guards.append(recorded.seen.register_hook(refuse))

    def without_guards(self, hooks: dict[int, Any] | None) -> dict[int, Any] | None:
        """The hooks of a tensor, as the program would find them in eager."""
        ours = {guard.id for guard in self._guards}
        if not hooks or ours.isdisjoint(hooks):
            return hooks
        return OrderedDict((key, hook) for key, hook in hooks.items() if key not in ours) or None

    def finish(self, inputs: Container[int]) -> HooksLeft:
        """The program has run: what it left. `inputs` are the ids of what stands for them."""
        for handle in self._guards:
            handle.remove()
        left = [hook for hook in self._registered if hook.is_there]
        on_inputs = tuple(hook for hook in left if id(hook.tensor) in inputs)
        for hook in on_inputs:
            hook.handle.remove()
        return HooksLeft(on_inputs, tuple(hook for hook in left if id(hook.tensor) not in inputs))


# ---------------------------------------------------------------------------------------------------------------------
# Code of the user's that runs in a backward: custom functions, hooks, what a checkpoint runs again.
#
# Eager runs it when backward is called, and it finds Python's state as it is then. It is recorded after the forward,
# so what it reads is noted, and compared when the compiled backward runs.
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Call(NamedTuple):
    """A function that ran: its code, its namespace, and what it was given or found in enclosing functions."""

    code: CodeType
    namespace: dict[str, Any]
    values: dict[str, Any]


class UserCode:
    """What ran while a backward was recorded."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.tensors: dict[Primal, Tensor] = {}  # real ones that it found by itself
        self._modules: dict[int, weakref.ref[nn.Module]] = {}  # by id
        self._seen: set[tuple[int, ...]] = set()

    def note(self, frame: FrameType) -> None:
        """A function is called."""
        code = frame.f_code
        # Without builtins it reads its arguments alone: a named tuple's.
        if is_users_code(code) and frame.f_builtins and not _goes_on(frame):
            values = frame.f_locals
            key = id(code), *map(id, values.values())
            if key not in self._seen and not _is_imported(frame):
                self._seen.add(key)
                self.calls.append(Call(code, frame.f_globals, dict(values)))
        elif code is CALL_OF_A_MODULE:
            module = frame.f_locals["self"]
            self._modules[id(module)] = weakref.ref(module)

    def living_calls(self) -> list[Call]:
        """The calls, with those of their values that live on without them; the calls are forgotten.

        What the backward itself has made and dropped cannot be changed by anything.
        """
        loose = [(c.code, c.namespace, {name: loosely(v) for name, v in c.values.items()}) for c in self.calls]
        self.calls.clear()
        calls = []
        for code, namespace, references in loose:
            values = {name: reference() for name, reference in references.items()}
            alive = {name: value for name, value in values.items() if value is not None}
            calls.append(Call(code, namespace, alive))
        return calls

    def living_modules(self) -> list[nn.Module]:
        """The modules that were called, torch's own too: their hooks and their attributes are the user's to change."""
        found = [reference() for reference in self._modules.values()]
        return [module for module in found if module is not None]


def _goes_on(frame: FrameType) -> bool:
    """Whether a generator goes on that had begun before: its beginning was seen, or it is garbage that is collected.

    One that lives on is refused where the program reaches it.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_GENERATOR:
        return False
    beginning = next((i.offset for i in dis.get_instructions(code) if i.opname == "RESUME"), 0)
    return frame.f_lasti > beginning


def _is_imported(frame: FrameType) -> bool:
    """Whether a function runs because a module is imported, which happens once."""
    back: FrameType | None = frame
    while back is not None and not back.f_code.co_filename.startswith(_OURS):
        if back.f_code.co_filename.startswith("<frozen importlib"):
            return True
        back = back.f_back
    return False


class BackwardState(Protocol):
    """Python state that a recorded backward has read."""

    @property
    def tensors(self) -> Sequence[Primal]:
        """Inputs that it found by itself."""

    def holds(self) -> bool:
        """Whether it is as it was."""

    def require_same(self, tensors: Sequence[Tensor]) -> None:
        """Raise if the inputs that it found are not those that the forward has taken."""


class Changes(Protocol):
    """The user's objects, as they were."""

    def undo(self, recording: Any) -> Exception | None:
        """Put back what a recording changed; gives the error for it."""


class BackwardGuards(Protocol):
    """Guards what code of the user's does in backwards."""

    def read_by(self, code: UserCode) -> BackwardState | None:
        """What it has read."""

    def before(self) -> Changes | None:
        """The user's objects before it runs once more; None while the program is recorded, when others look at them."""


@contextlib.contextmanager
def user_code_seen() -> Iterator[UserCode]:
    """Collects the functions that are called; a debugger, or whoever else traces the thread, goes on."""
    found, before = UserCode(), sys.gettrace()

    def note(frame: FrameType, event: Any, argument: Any) -> Any:
        if event == "call":
            found.note(frame)
        return None if before is None else before(frame, event, argument)

    sys.settrace(note)
    try:
        yield found
    finally:
        sys.settrace(before)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels of operators that the user has written in Python, and torch calls by itself while a program is recorded.
@contextlib.contextmanager
def kernels_seen(calling: CodeType, about_to_run: Callable[[FrameType], None]) -> Iterator[None]:
    """Tells of functions of the user's that an operator, called by some code of ours, calls above the recorder."""
    before = sys.gettrace()

    def note(frame: FrameType, event: Any, argument: Any) -> Any:
        if event == "call" and is_users_code(frame.f_code) and _only_torch_between(calling, frame):
            about_to_run(frame)
        return None if before is None else before(frame, event, argument)

    sys.settrace(note)
    try:
        yield
    finally:
        sys.settrace(before)


def _only_torch_between(calling: CodeType, frame: FrameType) -> bool:
    """Whether torch has called a function for code of ours; what is called while a module is imported is no kernel."""
    back = frame.f_back
    while back is not None and back.f_code is not calling:
        name = back.f_code.co_filename
        if is_users_code(back.f_code) or is_own_code(back.f_code) or name.startswith("<frozen importlib"):
            return False
        back = back.f_back
    return True
