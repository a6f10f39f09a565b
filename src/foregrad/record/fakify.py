"""Fake tensors for the arguments of a program, with the Python attributes of the real ones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor

from .._torch import (
    DATA_CAN_BE_FORBIDDEN,
    FakeTensor,
    FrontEnd,
    Geometry,
    copy_creation,
    disable_modes,
    dispatch_mode_depth,
    fake_attribute_names,
    is_backward_state,
    new_fake_mode,
    new_shape_env,
    number_of,
    running_fake_mode,
    shape_env_of_reads,
    without_own_cache,
)
from ..abstract.engine import Engine
from ..abstract.lean_engine import LeanEngine
from ..abstract.symbolic_engine import SymbolicEngine
from ..errors import FakeModeError, FirstCallError, StateChangeError, UnsupportedError
from ..ops import ViewStep, aten
from ..slots import Primal, ViewRoot
from ..subclasses.layout import Layout, is_wrapper, leaves_of, wrappers_in
from ..values import is_plain
from .alias_groups import AliasGroup, SharedMemory, root_of

# ---------------------------------------------------------------------------------------------------------------------
# Python attributes of tensors: what the user, or the program, has put on them.
#
# The program sees an abstract tensor with the attributes of its argument, and the user's own object where it finds a
# tensor by itself. Neither may leave a trace: what the program puts there is refused, for a compiled call would not
# see what was there before.
MARKS = ("_foregrad_", "_dynamo_", "_is_param")  # also hints for front ends, and what makes a tensor a parameter


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """Attributes that are not the recording's own."""
    held = vars(tensor)
    others = held.keys() - _not_the_users
    if not others:
        return {}
    _not_the_users.update(name for name in others if name.startswith(MARKS) or name in fake_attribute_names())
    return {name: held[name] for name in held if name not in _not_the_users}


_not_the_users: set[str] = set()  # names that were seen on tensors, of what torch or Foregrad has put there


def let_go_of_attributes(seen: Tensor) -> None:
    """Keep nothing of the user's alive that a recorded tensor has from its argument; plain values may stay."""
    if vars(seen).keys() <= _not_the_users:
        return
    for name, value in own_attributes(seen).items():
        if not is_plain(value):
            del vars(seen)[name]


class FoundAttributes:
    """The attributes of the user's own tensors, as the recording found them."""

    def __init__(self) -> None:
        self._before: list[tuple[Primal, Tensor, Tensor, dict[str, Any]]] = []

    def note(self, slot: Primal, real: Tensor, seen: Tensor) -> None:
        """A tensor becomes an input."""
        self._before.append((slot, real, seen, own_attributes(real) if vars(real) else {}))

    def put_back(self) -> StateChangeError | None:
        """Undo what the program did to them; gives what is to be said about that."""
        refusal = None
        for slot, real, seen, before in self._before:
            if not before and vars(real).keys() <= _not_the_users and vars(seen).keys() <= _not_the_users:
                continue
            changed = [*_changed(own_attributes(real), before), *_changed(own_attributes(seen), before)]
            for name in changed:
                vars(real).pop(name, None)
                if name in before:
                    vars(real)[name] = before[name]
                refusal = refusal or StateChangeError(
                    f"the program changes the attribute {name!r} of {slot}: a compiled call would not see what it "
                    "was before. Set it outside the program, or compile with fallback='eager'."
                )
        self._before.clear()
        return refusal


def _changed(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Attributes that are not what they were."""
    return [name for name in {**now, **before} if now.get(name, _ABSENT) is not before.get(name, _ABSENT)]


_ABSENT = object()


# ---------------------------------------------------------------------------------------------------------------------
# Which engine a program is recorded on.
def engine_for(
    inputs: Sequence[Argument], dynamic: bool, reads: bool = False, front_end: FrontEnd | None = None
) -> Engine:
    """The engine for a recording: over the inputs' own fake mode if they have one.

    `dynamic` says that sizes of inputs are symbols, `reads` that sizes are which the program reads. A front end that
    guards the calls has symbols of its own, where it has any.
    """
    plain = [(slot, leaf) for slot, value, _ in inputs for leaf in (leaves_of(value) if is_wrapper(value) else [value])]
    fakes = [(slot, value) for slot, value in plain if isinstance(value, FakeTensor)]
    for slot, value in fakes:
        if value.fake_mode is not fakes[0][1].fake_mode:
            raise FakeModeError(
                f"{fakes[0][0]} and {slot} belong to two fake modes. Make them under one FakeTensorMode and call again."
            )
    if fakes:
        return SymbolicEngine(fakes[0][1].fake_mode, "the inputs are fake tensors of a mode of their own")
    if front_end is None:
        mode = running_fake_mode()
        if mode is not None:
            return SymbolicEngine(mode, "a front end has a fake mode of its own")
    elif any(isinstance(given.dynamic, Geometry) or _is_symbol(given.value) for given in inputs):
        mode = without_own_cache(new_fake_mode(front_end.mode.shape_env))
        return SymbolicEngine(mode, "the front end has symbols for sizes", own=True)
    if dynamic:
        return SymbolicEngine(new_fake_mode(new_shape_env()), "sizes are symbols", own=True)
    if reads:
        return SymbolicEngine(without_own_cache(new_fake_mode(shape_env_of_reads())), "sizes are read", own=True)
    if not DATA_CAN_BE_FORBIDDEN:
        return SymbolicEngine(
            new_fake_mode(None), "this build of torch has no storages that refuse to be read", own=True
        )
    return LeanEngine(new_fake_mode(None))


def _is_symbol(value: object) -> bool:
    return isinstance(value, SymInt) and isinstance(number_of(value), SymInt)


# ---------------------------------------------------------------------------------------------------------------------
# What stands for the arguments of a program while it is recorded.
class Argument(NamedTuple):
    """A value that goes into a recording: a tensor, or any Python object, which is a constant of the program."""

    slot: Primal
    value: Any
    dynamic: bool | frozenset[int] | Geometry = False  # sizes of a tensor, all or these, or an int, become symbols


class Object(NamedTuple):
    """Stands for an argument that is an object: it is not kept."""

    kind: str

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class RecordedInput(NamedTuple):
    """What stood for an argument while the program ran."""

    slot: Primal
    seen: Any  # what the program saw: an abstract tensor, a symbolic int, or the value itself if it is plain
    leaf: Tensor | None = None  # what gradients are taken for
    start_node: Any = None  # the autograd node of `seen` before the program ran
    was_leaf: bool = False
    was_inference: bool = False
    required_grad: bool = False
    same_as: RecordedInput | None = None  # an earlier input that is the same tensor
    parent: RecordedInput | None = None  # the input whose memory it looks at
    views: tuple[tuple[ViewStep, Tensor], ...] = ()  # that give it from there, each with its result
    layout: Layout | None = None  # of a wrapper subclass
    inner: tuple[RecordedInput, ...] = ()  # the plain tensors in it

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.seen, Tensor)

    @property
    def differentiated(self) -> Tensor | None:
        """What gradients are taken for: also an input that the program itself made require grad, or a root of some."""
        if self.leaf is not None:
            return self.leaf
        is_member = self.parent is not None and not isinstance(self.slot, ViewRoot)
        if self.same_as or is_member or not isinstance(self.seen, Tensor):
            return None
        return self.seen if self.seen.requires_grad and self.seen.is_leaf else None


def has_hooks(tensor: Tensor) -> bool:
    """Whether anything happens when a gradient of a tensor is computed."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks or tensor.retains_grad)


class _NonLeaf(torch.autograd.Function):
    """Makes a tensor that is no leaf out of one that is, without recording an operator."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, box: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)  # no gradient gives none, not zeros
        return box[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return gradient, None


def is_start_node(node: Any) -> bool:
    """Whether an autograd node belongs to an input that is no leaf."""
    return type(node).__name__ == "_NonLeafBackward"


def _as_inference_tensor(real: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A fake is an inference tensor exactly if the real tensor is one."""
    if real.is_inference() == torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    return torch.inference_mode(real.is_inference())


def _as_leaf_or_not(real: Tensor, fake: Tensor, again: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None]:
    """What the program sees for a tensor, and what gradients are taken for, if it requires grad.

    An inference tensor may: `.data =` can make one of a leaf, or it was made in inference mode.
    """
    if not real.requires_grad:
        return fake, None
    with _as_inference_tensor(fake):
        leaf = fake.requires_grad_()
    if real.is_leaf:
        return leaf, leaf
    with disable_modes(), _as_inference_tensor(real), torch.enable_grad():
        return _NonLeaf.apply(leaf, [again()]), leaf


def require_shape(value: Tensor, slot: Primal) -> None:
    """Refuse a lazy parameter, which gets its shape at the first call: nothing else may be asked of it."""
    if type(value) is not Tensor and torch.nn.parameter.is_lazy(value):
        raise FirstCallError(f"{slot} of the module has no shape yet")


def fakify(engine: Engine, argument: Argument) -> RecordedInput:
    """Make what stands for an argument: not a view, and a leaf exactly if the argument is one."""
    value = argument.value
    if type(value) is int and argument.dynamic is True:
        return RecordedInput(argument.slot, engine.symbol(value, argument.slot))
    if isinstance(value, SymInt):
        return RecordedInput(argument.slot, number_of(value))
    if not isinstance(value, Tensor):
        if type(value) in (set, frozenset) and is_plain(value):
            return RecordedInput(argument.slot, type(value)(list(value)))
        kept = is_plain(value) or is_backward_state(value)
        return RecordedInput(argument.slot, value if kept else Object(type(value).__qualname__))
    require_shape(value, argument.slot)
    fake = functools.partial(engine.fake, value, argument.slot, argument.dynamic)
    if dispatch_mode_depth() or value.is_inference() != torch.is_inference_mode_enabled():
        with disable_modes(), _as_inference_tensor(value):
            seen = fake()
    else:
        seen = fake()
    seen, leaf = _as_leaf_or_not(value, seen, fake)
    _copy_attributes(value, seen)
    return _recorded(argument.slot, value, seen, leaf)


def fakify_wrapper(argument: Argument, layout: Layout, inner: Sequence[RecordedInput]) -> RecordedInput:
    """A wrapper around what stands for the plain tensors in it. Autograd sees the wrapper only."""
    value = argument.value

    def fake() -> Tensor:
        parts = [item.seen for item in inner]
        with torch.no_grad():
            built: Tensor = layout.build(parts)
        if not is_wrapper(built) or any(a is not b for a, b in zip(leaves_of(built), parts, strict=True)):
            raise UnsupportedError(
                f"{layout.kind.__name__}.__tensor_unflatten__ must build a tensor around the very tensors that it is "
                f"given; {argument.slot} cannot be compiled."
            )
        for part, real in zip(wrappers_in(built), wrappers_in(value), strict=True):
            part.requires_grad_(real.requires_grad)  # what is differentiated for it is found on the tape
        return built.requires_grad_(False) if built.requires_grad else built

    with disable_modes(), _as_inference_tensor(value):
        seen, leaf = _as_leaf_or_not(value, fake(), fake)
    for name, attribute in vars(value).items():
        vars(seen).setdefault(name, attribute)
    return _recorded(argument.slot, value, seen, leaf, layout=layout, inner=tuple(inner))


def _recorded(slot: Primal, value: Tensor, seen: Tensor, leaf: Tensor | None = None, **more: Any) -> RecordedInput:
    grad = value.requires_grad
    return RecordedInput(slot, seen, leaf, seen.grad_fn, value.is_leaf, value.is_inference(), grad, **more)


def _copy_attributes(value: Tensor, seen: Tensor) -> None:
    if not isinstance(value, FakeTensor):
        vars(seen).update(vars(value))  # that the user has put on the tensor
    if isinstance(value, torch.nn.Parameter):
        seen._is_param = True


def fakify_root(memory: RecordedInput, alias_group: AliasGroup) -> RecordedInput:
    """What autograd takes some inputs to be views of, where it is not the memory's own input: cut off from that."""
    root = alias_group.root
    with disable_modes(), _as_inference_tensor(root), torch.no_grad():
        views = _take_views(memory.seen, alias_group.views)
        seen, once_more = (views[-1][1].data if alias_group.own_version else views[-1][1].detach() for _ in range(2))
    seen, leaf = _as_leaf_or_not(root, seen, lambda: once_more)
    views.append((ViewStep(aten.detach.default, (), {}, None), seen))
    return _recorded(alias_group.slot, root, seen, leaf, parent=memory, views=tuple(views))


def fakify_member(
    memory: RecordedInput, root: RecordedInput, argument: Argument, shared: SharedMemory
) -> RecordedInput:
    """An input that is a view, for autograd too, of something that stands in already."""
    value = argument.value
    steps = shared.views_from(root_of(value), value)
    if not steps:
        return _recorded(argument.slot, value, root.seen, parent=root)
    made_with_grad = value.requires_grad or not root.required_grad
    with disable_modes(), _as_inference_tensor(value):
        with torch.set_grad_enabled(made_with_grad):
            seen = _take_views(root.seen, steps)[-1][1]
        with torch.no_grad():  # writes are carried back to the memory itself, wherever the root lies in it
            views = _take_views(memory.seen, shared.views_from(shared.base, value))
    if seen._is_view() and value._is_view():
        copy_creation(seen, value)
    _copy_attributes(value, seen)
    views[-1] = views[-1][0], seen
    return _recorded(argument.slot, value, seen, parent=memory, views=tuple(views))


def _take_views(tensor: Tensor, steps: Sequence[ViewStep]) -> list[tuple[ViewStep, Tensor]]:
    views: list[tuple[ViewStep, Tensor]] = []
    for step in steps:
        tensor = step.op(tensor, *step.args, **step.kwargs)
        views.append((step, tensor))
    return views
