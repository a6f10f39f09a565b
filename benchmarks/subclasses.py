"""What a tensor subclass costs: one wrapper in, one wrapper out, over a compiler that returns constants.

Both sides go through `aot_module_simplified`, with the same compiler. Whoever builds a wrapper pays for its class's own
constructor, which is Python; that floor is measured by itself. "By hand" is the least that can be written: it reads the
tensors out of the wrapper, calls the compiled programs and builds the wrapper again, in an `autograd.Function` where
gradients are asked for. In inference the constructor alone is more than 0.6 of torch's whole call, so the mark is set
on what is left without it; in training it is set on whole calls too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from .runtime import Boxed, ConstantCompiler, OfInputs, best_times, program, same, simplified
from .sides import PEER, SUBJECT
from .table import Mark, Table

WANTED = 0.6
BUILT = {"inference": 1, "forward": 1, "forward + backward": 2}
"""Wrappers that a call builds: its result, and the gradient of its input."""


def two(requires_grad: bool) -> Any:
    """A wrapper of two tensors."""
    return TwoTensor(torch.ones(4, 4), torch.ones(4, 4)).requires_grad_(requires_grad)


def wrapper(a: Tensor, b: Tensor) -> Tensor:
    """What both sides call to build a wrapper."""
    return cast(Tensor, TwoTensor.__tensor_unflatten__({"a": a, "b": b}, None, (4, 4), (4, 1)))


def times(kind: str, rounds: int) -> dict[str, float]:
    """Microseconds of one kind of call, by side; those of the constructor are for one wrapper."""
    x, tangent = two(kind != "inference"), two(False)
    theirs, _ = simplified(PEER, OfInputs(), [x])
    ours, compiler = simplified(SUBJECT, OfInputs(), [x])
    forwards: dict[str, Callable[[], Tensor]] = {
        PEER.name: lambda: theirs(x)[0],
        SUBJECT.name: lambda: ours(x)[0],
        "by hand": lambda: bare(x),
    }
    forwards[SUBJECT.name]()  # its programs are there from now on
    if kind != "inference":
        torch.autograd.grad(forwards[SUBJECT.name](), x, tangent)
    bare = by_hand(compiler)
    calls: dict[str, Callable[[], object]] = {}
    for name, forward in forwards.items():
        check(f"{name}, {kind}", forward, x, tangent)
        calls[name] = _with_backward(forward, x, tangent) if kind == "forward + backward" else forward
    calls["constructor"] = lambda: wrapper(tangent.a, tangent.b)
    return best_times(calls, rounds)


def _with_backward(forward: Callable[[], Tensor], x: Tensor, tangent: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(forward(), x, tangent)


def check(name: str, forward: Callable[[], Tensor], x: Any, tangent: Any) -> None:
    """Eager's values and gradients, or no figures."""
    got, expected = forward(), program(x)
    same(name, parts(got), parts(expected))
    if x.requires_grad:
        gradients = [torch.autograd.grad(y, x, tangent)[0] for y in (forward(), expected)]
        same(f"{name}, gradient", parts(gradients[0]), parts(gradients[1]))


def parts(tensor: Any) -> list[Tensor]:
    if type(tensor) is not TwoTensor:
        raise SystemExit(f"a {type(tensor).__name__} came where eager gives a TwoTensor")
    return [tensor.a, tensor.b]


def by_hand(compiler: ConstantCompiler) -> Callable[[Any], Tensor]:
    """The least that can be written around the compiled programs."""
    forward = compiler.programs["forward"]
    backward = compiler.programs.get("backward")
    return _plain(forward) if backward is None else _function(forward, backward)


def _plain(forward: Boxed) -> Callable[[Any], Tensor]:
    def call(x: Any) -> Tensor:
        with torch.no_grad():
            a, b = forward([x.a, x.b])
            return wrapper(a, b)

    return call


def _function(forward: Boxed, backward: Boxed) -> Callable[[Any], Tensor]:
    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Tensor:
            a, b, *saved = forward([x.a, x.b])
            ctx.save_for_backward(*saved)
            return wrapper(a, b)

        @staticmethod
        def backward(ctx: Any, *tangents: Any) -> Tensor:
            [tangent] = tangents
            a, b = backward([*ctx.saved_tensors, tangent.a, tangent.b])
            return wrapper(a, b)

    return cast("Callable[[Any], Tensor]", ByHand.apply)


def run(rounds: int) -> tuple[list[Table], list[Mark]]:
    """The table, and the marks."""
    torch.set_num_threads(1)
    header = ["call", "torch µs", "constructor µs", "by hand µs", "foregrad µs", "foregrad / torch", "without it"]
    table = Table(
        "One tensor subclass in, one out",
        header,
        note=(
            "`TwoTensor`. The constructor is the class's own Python, which everybody calls for each wrapper that is "
            'built; "without it" compares what is left when it is taken off both sides.'
        ),
    )
    whole, rest = {}, {}
    for kind, built in BUILT.items():
        time_of = times(kind, 3 * rounds)  # there are few of them, and they are short
        constructor = built * time_of["constructor"]
        whole[kind] = time_of["foregrad"] / time_of["torch"]
        rest[kind] = (time_of["foregrad"] - constructor) / (time_of["torch"] - constructor)
        microseconds = time_of["torch"], constructor, time_of["by hand"], time_of["foregrad"]
        table.add(kind, *(f"{t:.1f}" for t in microseconds), f"{whole[kind]:.2f}", f"{rest[kind]:.2f}")
    training = {kind: ratio for kind, ratio in whole.items() if kind != "inference"}
    return [table], [_mark("a subclass, training", training), _mark("a subclass, without its constructor", rest)]


def _mark(name: str, ratios: dict[str, float]) -> Mark:
    worst = max(ratios, key=ratios.__getitem__)
    return Mark(name, f"≤ {WANTED:g}×", f"{ratios[worst]:.2f}× ({worst})", ratios[worst] <= WANTED)
