"""Planted faults: each takes a right callable and makes it wrong in one way that a user could observe.

A fault names a program, arguments on which the fault shows, the wrapper that plants it, and the aspect under
which `check` must find it. The wrapper takes any callable that does what the program does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Program = Callable[..., Any]
Wrapper = Callable[[Program], Program]


@dataclass(frozen=True)
class Fault:
    program: Program
    arguments: Callable[[], tuple[Any, ...]]
    plant: Wrapper
    aspect: str


FAULTS: dict[str, Fault] = {}


def fault(
    name: str, program: Program, arguments: Callable[[], tuple[Any, ...]], aspect: str
) -> Callable[[Wrapper], Wrapper]:
    def register(plant: Wrapper) -> Wrapper:
        FAULTS[name] = Fault(program, arguments, plant, aspect)
        return plant

    return register


def plain(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(1.0, count + 1).reshape(shape).clone()


def leaf(*shape: int) -> Tensor:
    return plain(*shape).requires_grad_()


def _scale(x: Tensor) -> Tensor:
    return x * 2


def _scale_in_place(x: Tensor) -> Tensor:
    return x.mul_(2).sum()


def _two_branches(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, y * 3


def _transpose(x: Tensor) -> Tensor:
    return (x * 2).t()


def _view(x: Tensor) -> Tensor:
    return x.view(-1)


def _same(x: Tensor) -> Tensor:
    return x


def _tail(x: Tensor) -> Tensor:
    return (x * 2)[1:]


def _dropout(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5)


def _add(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(1) * y


def _raise(x: Tensor) -> Tensor:
    raise IndexError("no such row")


def _pair(x: Tensor) -> tuple[Tensor, float]:
    return x + 1, 0.5


def _fresh_leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _set_grad_mode(x: Tensor) -> Tensor:
    y = x * 2
    torch.set_grad_enabled(False)
    return y


def _conj(x: Tensor) -> Tensor:
    return x.conj()


@fault("dropped write-back", _scale_in_place, lambda: (plain(3),), "value")
def _(right: Program) -> Program:
    return lambda x: right(x.clone())


@fault("zeros for a None gradient", _two_branches, lambda: (leaf(3), leaf(3)), "gradient presence")
def _(right: Program) -> Program:
    def wrong(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = right(x, y)
        return a + 0 * y.sum(), b + 0 * x.sum()

    return wrong


@fault("lost output stride", _transpose, lambda: (plain(2, 3),), "stride")
def _(right: Program) -> Program:
    return lambda x: right(x).contiguous()


@fault("lost alias", _view, lambda: (plain(2, 3),), "storage sharing")
def _(right: Program) -> Program:
    return lambda x: right(x).clone()


@fault("lost identity", _same, lambda: (plain(3),), "identity")
def _(right: Program) -> Program:
    return lambda x: right(x).view_as(x)


@fault("stale guard: data of the first call", _scale, lambda: (plain(3),), "value")
def _(right: Program) -> Program:
    first: list[Tensor] = []

    def wrong(x: Tensor) -> Tensor:
        first[:] = first or [right(x)]
        return first[0].clone()

    return wrong


@fault("stale guard: aliasing of the first call", _add, lambda: (plain(3), plain(3)), "value")
def _(right: Program) -> Program:
    def wrong(x: Tensor, y: Tensor) -> Tensor:
        return right(x, y.clone())

    return wrong


@fault("random number drawn once more", _dropout, lambda: (plain(8),), "random state")
def _(right: Program) -> Program:
    def wrong(x: Tensor) -> Tensor:
        y = right(x)
        torch.rand(1)
        return y

    return wrong


class _Redraw(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(99)
            return torch.nn.functional.dropout(tangent, 0.5)


@fault("random number redrawn in backward", _dropout, lambda: (leaf(64),), "gradient value")
def _(right: Program) -> Program:
    return _Redraw.apply


@fault("wrong version counter", _scale_in_place, lambda: (plain(3),), "version counter")
def _(right: Program) -> Program:
    def wrong(x: Tensor) -> Tensor:
        y = right(x)
        x.copy_(x.clone())
        return y

    return wrong


@fault("lost requires_grad", _scale, lambda: (leaf(3),), "requires_grad")
def _(right: Program) -> Program:
    return lambda x: right(x).detach()


class _ReadsRowMajor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Tensor:
        if 0 in tangent.stride():
            return tangent
        contiguous = torch.empty(tangent.shape).stride()
        return tangent.as_strided(tangent.shape, contiguous)


@fault("transposed tangent read as contiguous", _scale, lambda: (leaf(2, 3),), "gradient value")
def _(right: Program) -> Program:
    return lambda x: _ReadsRowMajor.apply(right(x))


class _DoublesExpanded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * 2 if 0 in tangent.stride() else tangent


@fault("wrong for expanded tangents", _scale, lambda: (leaf(2, 3),), "gradient value")
def _(right: Program) -> Program:
    return lambda x: _DoublesExpanded.apply(right(x))


@fault("wrong class of error", _raise, lambda: (plain(3),), "error in forward")
def _(right: Program) -> Program:
    def wrong(x: Tensor) -> Tensor:
        try:
            return right(x)
        except IndexError as error:
            raise ValueError(str(error)) from error

    return wrong


@fault("swallowed error", _raise, lambda: (plain(3),), "error in forward")
def _(right: Program) -> Program:
    def wrong(x: Tensor) -> Tensor:
        try:
            return right(x)
        except IndexError:
            return x

    return wrong


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Tensor:
        raise RuntimeError("no backward was compiled")


@fault("error in backward", _scale, lambda: (leaf(3),), "error in backward")
def _(right: Program) -> Program:
    return lambda x: _FailsInBackward.apply(right(x))


@fault("list for tuple", _two_branches, lambda: (plain(3), plain(3)), "structure")
def _(right: Program) -> Program:
    return lambda x, y: list(right(x, y))


@fault("other Python value", _pair, lambda: (plain(3),), "non-tensor value")
def _(right: Program) -> Program:
    return lambda x: (right(x)[0], 0.25)


@fault("non-leaf for leaf", _fresh_leaf, lambda: (plain(3),), "leaf or not")
def _(right: Program) -> Program:
    return lambda x: right(x) * 1


@fault("lost dtype", _scale, lambda: (plain(3).bfloat16(),), "dtype")
def _(right: Program) -> Program:
    return lambda x: right(x).float()


@fault("lost storage offset", _tail, lambda: (plain(3),), "storage offset")
def _(right: Program) -> Program:
    return lambda x: right(x).clone()


@fault("lost sign of zero", _scale, lambda: (torch.tensor([-0.0, 1.0]),), "value")
def _(right: Program) -> Program:
    return lambda x: right(x) + 0.0


@fault("lost change of grad mode", _set_grad_mode, lambda: (plain(3),), "global state")
def _(right: Program) -> Program:
    def wrong(x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            return right(x)

    return wrong


@fault("lost conj bit", _conj, lambda: (torch.ones(2, dtype=torch.complex64) * 1j,), "conj bit")
def _(right: Program) -> Program:
    return lambda x: right(x).resolve_conj()


@fault("lost gradient stride", _scale, lambda: (leaf(2, 3),), "gradient stride")
def _(right: Program) -> Program:
    def wrong(x: Tensor) -> Tensor:
        x.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", leaf.grad.t().contiguous().t()))
        return right(x)

    return wrong


class Box:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


def _grow(x: Tensor, box: Box) -> Box:
    box.w = torch.cat([box.w, x])
    box.n += 1
    box.log.append(box.w)
    return box


def _a_box() -> tuple[Tensor, Box]:
    return leaf(2), Box(w=leaf(3), n=1, log=[])


@fault("a copy of an argument that comes back", _grow, _a_box, "identity")
def _(right: Program) -> Program:
    return lambda x, box: Box(**vars(right(x, box)))


@fault("a number in an argument that is not changed", _grow, _a_box, "non-tensor value")
def _(right: Program) -> Program:
    def wrong(x: Tensor, box: Box) -> Box:
        n = box.n
        right(x, box).n = n
        return box

    return wrong


@fault("a list in an argument that is not changed", _grow, _a_box, "structure")
def _(right: Program) -> Program:
    def wrong(x: Tensor, box: Box) -> Box:
        right(x, box).log.clear()
        return box

    return wrong


@fault("another list in an argument", _grow, _a_box, "identity")
def _(right: Program) -> Program:
    def wrong(x: Tensor, box: Box) -> Box:
        right(x, box).log = [*box.log]
        return box

    return wrong


@fault("a tensor in an argument without its gradient", _grow, _a_box, "requires_grad")
def _(right: Program) -> Program:
    def wrong(x: Tensor, box: Box) -> Box:
        right(x, box).w = box.w.detach()
        return box

    return wrong
