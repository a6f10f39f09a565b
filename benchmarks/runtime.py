"""What the compiled callable costs by itself: forward, forward with backward, and a call under `no_grad`.

The compiler here does nothing: its programs compute their outputs on the first call and return the same
tensors ever after. What is left is the wrapper around the two programs. It is compared with torch's
wrapper, and with the least that PyTorch asks for: an `autograd.Function` written by hand that runs the same
two programs and saves the same tensors. A second table tells what the guards of `aot_function` and
`aot_module` add to a callable that has none.

All variants are timed in turn, round after round in one process, and the best round of each counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .sides import PEER, SUBJECT, Side
from .table import Mark, Table

SIZES = (2, 10, 100)
OVERHEAD_WANTED = 1.15
NO_GRAD_WANTED = 0.2
GUARDS_WANTED = (3.0, 0.3)
"""Microseconds for a call, and for each of its inputs."""

Boxed = Callable[[list[Any]], list[Any]]
Call = Callable[[], object]


def program(*inputs: Tensor) -> Tensor:
    """The program that is compiled: a product of its inputs, each of which gets a gradient."""
    y = inputs[0]
    for x in inputs[1:]:
        y = y * x
    return y.sin()


class OfInputs(nn.Module):
    """`program` as a module without state. `aot_module_simplified` wants a tuple of outputs."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor]:
        return (program(*inputs),)


class OfParameters(nn.Module):
    """`program` over the parameters of a module."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(value.detach().clone()) for value in values)

    def forward(self) -> tuple[Tensor]:
        return (program(*self.values),)


class ConstantCompiler:
    """Compiles to programs that return, from the second call on, what they returned on the first."""

    def __init__(self) -> None:
        self.programs: dict[str, Boxed] = {}

    def forward(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        return self._compile("forward", graph)

    def backward(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        return self._compile("backward", graph)

    def _compile(self, direction: str, graph: torch.fx.GraphModule) -> Boxed:
        outputs: list[Any] | None = None

        def constant(inputs: list[Any]) -> list[Any]:
            nonlocal outputs
            if outputs is None:
                outputs = list(graph(*inputs))
            inputs.clear()
            return list(outputs)

        cast(Any, constant)._boxed_call = True
        self.programs[direction] = constant
        return constant


def simplified(side: Side, module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Callable[..., Any], ConstantCompiler]:
    """The callable without guards, and the compiler that holds its two programs."""
    compiler = ConstantCompiler()
    compiled = side.load().aot_module_simplified(
        module, inputs, fw_compiler=compiler.forward, bw_compiler=compiler.backward
    )
    return compiled, compiler


def of_function(side: Side) -> Callable[..., Tensor]:
    compiler = ConstantCompiler()
    compiled = side.load().aot_function(program, fw_compiler=compiler.forward, bw_compiler=compiler.backward)
    return cast("Callable[..., Tensor]", compiled)


def of_module(side: Side, module: nn.Module) -> Callable[..., Any]:
    compiler = ConstantCompiler()
    compiled = side.load().aot_module(module, fw_compiler=compiler.forward, bw_compiler=compiler.backward)
    return cast("Callable[..., Any]", compiled)


def by_hand(forward: Boxed, backward: Boxed) -> Callable[..., Tensor]:
    """The least that PyTorch asks for: a plain `autograd.Function` around two programs."""

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            output, *saved = forward(list(inputs))
            ctx.save_for_backward(*saved)
            return cast(Tensor, output)

        @staticmethod
        def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor, ...]:
            return tuple(backward([*ctx.saved_tensors, *tangents]))

    return cast("Callable[..., Tensor]", ByHand.apply)


def best_times(calls: Mapping[str, Call], rounds: int, block: float = 0.004) -> dict[str, float]:
    """Microseconds of each call: the best of many short blocks, in turn so that all meet the same noise."""
    counts = {}
    for name, call in calls.items():
        for _ in range(20):
            call()
        start = time.perf_counter()
        for _ in range(20):
            call()
        counts[name] = max(10, int(block / ((time.perf_counter() - start) / 20)))
    best = dict.fromkeys(calls, float("inf"))
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                repeat = range(counts[name])
                start = time.perf_counter()
                for _ in repeat:
                    call()
                best[name] = min(best[name], (time.perf_counter() - start) / counts[name])
    finally:
        gc.enable()
    return {name: seconds * 1e6 for name, seconds in best.items()}


def check(name: str, call: Callable[[], Tensor], leaves: Sequence[Tensor], tangent: Tensor) -> None:
    """Eager's values and gradients, or no figures: programs compute on their first call, then remember."""
    value = program(*leaves)
    expected = [value, *torch.autograd.grad(value, leaves, tangent)]
    for _ in range(2):
        got = call()
        same(name, [got, *torch.autograd.grad(got, leaves, tangent)], expected)
    with torch.no_grad():
        same(f"{name} under no_grad", [call()], [value])


def same(name: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    try:
        torch.testing.assert_close([x.detach() for x in got], [x.detach() for x in expected], rtol=1e-5, atol=1e-7)
    except AssertionError as error:
        raise SystemExit(f"{name} does not compute what eager computes: {error}") from None


def overheads(size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Times of the wrapper by kind of call and by variant, for a program of `size` inputs."""
    inputs, tangent = data(size)
    theirs, _ = simplified(PEER, OfInputs(), inputs)
    ours, compiler = simplified(SUBJECT, OfInputs(), inputs)
    check("torch", lambda: theirs(*inputs)[0], inputs, tangent)
    check("foregrad", lambda: ours(*inputs)[0], inputs, tangent)
    bare = by_hand(compiler.programs["forward"], compiler.programs["backward"])
    check("the Function by hand", lambda: bare(*inputs), inputs, tangent)

    forward: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: theirs(*inputs)[0],
        "by hand": lambda: bare(*inputs),
        "foregrad": lambda: ours(*inputs)[0],
    }

    def with_backward(call: Callable[[], Tensor]) -> Call:
        return lambda: torch.autograd.grad(call(), inputs, tangent)

    times = {
        "forward": best_times(forward, rounds),
        "forward + backward": best_times({name: with_backward(call) for name, call in forward.items()}, rounds),
    }
    with torch.no_grad():
        times["no_grad"] = best_times(forward, rounds)
    return times


def guard_costs(size: int, rounds: int) -> dict[str, float]:
    """Microseconds that a callable with guards adds to the one without, forward only."""
    inputs, tangent = data(size)
    module = OfParameters(inputs)
    parameters = list(module.parameters())
    calls: dict[str, Callable[[], Tensor]] = {}
    for side in (PEER, SUBJECT):
        plain, _ = simplified(side, OfInputs(), inputs)
        function, stateless = of_function(side), of_module(side, OfInputs())
        plain_stateful, _ = simplified(side, module, ())
        stateful = of_module(side, module)
        calls |= {
            f"{side.name}: simplified": lambda f=plain: f(*inputs)[0],
            f"{side.name}: function": lambda f=function: f(*inputs),
            f"{side.name}: module": lambda f=stateless: f(*inputs)[0],
            f"{side.name}: simplified, parameters": lambda f=plain_stateful: f()[0],
            f"{side.name}: module, parameters": lambda f=stateful: f()[0],
        }
    for name, call in calls.items():
        check(name, call, parameters if "parameters" in name else inputs, tangent)
    times = best_times(cast("dict[str, Call]", calls), rounds)
    return {
        f"{side.name}: {added}": times[f"{side.name}: {added}"] - times[f"{side.name}: {over}"]
        for side in (PEER, SUBJECT)
        for added, over in (
            ("function", "simplified"),
            ("module", "simplified"),
            ("module, parameters", "simplified, parameters"),
        )
    }


def data(size: int) -> tuple[list[Tensor], Tensor]:
    """Inputs near one, so that a product of a hundred of them neither vanishes nor overflows."""
    generator = torch.Generator().manual_seed(size)
    inputs = [(0.9 + 0.2 * torch.rand(4, 4, generator=generator)).requires_grad_() for _ in range(size)]
    return inputs, torch.ones(4, 4)


def run(rounds: int) -> tuple[list[Table], list[Mark]]:
    """Measure all sizes; gives the two tables and the marks."""
    torch.set_num_threads(1)
    times = {size: overheads(size, rounds) for size in SIZES}
    guards = {size: guard_costs(size, rounds) for size in SIZES}
    return [overhead_table(times), guard_table(guards)], [*overhead_marks(times), guard_mark(guards)]


def overhead_table(times: Mapping[int, Mapping[str, Mapping[str, float]]]) -> Table:
    table = Table(
        "Run time",
        ["call", "inputs", "torch µs", "by hand µs", "foregrad µs", "foregrad / torch", "foregrad / by hand"],
        note=(
            "A compiler that returns constants, so this is the wrapper alone; best of the rounds. "
            '"By hand" is an `autograd.Function` over the same two programs.'
        ),
    )
    for kind in ("forward", "forward + backward", "no_grad"):
        for size in SIZES:
            time_of = times[size][kind]
            ours = time_of["foregrad"]
            table.add(
                kind,
                str(size),
                *(f"{time_of[name]:.1f}" for name in ("torch", "by hand", "foregrad")),
                f"{ours / time_of['torch']:.2f}",
                f"{ours / time_of['by hand']:.2f}",
            )
    return table


def overhead_marks(times: Mapping[int, Mapping[str, Mapping[str, float]]]) -> list[Mark]:
    def mark(kind: str, against: str, wanted: float) -> Mark:
        ratios = {size: times[size][kind]["foregrad"] / times[size][kind][against] for size in SIZES}
        worst = max(ratios, key=ratios.__getitem__)
        return Mark(
            f"{kind}, against {against}",
            f"≤ {wanted:g}×",
            f"{ratios[worst]:.2f}× ({worst} inputs)",
            ratios[worst] <= wanted,
        )

    return [
        mark("forward", "by hand", OVERHEAD_WANTED),
        mark("forward + backward", "by hand", OVERHEAD_WANTED),
        mark("no_grad", "torch", NO_GRAD_WANTED),
    ]


def guard_table(guards: Mapping[int, Mapping[str, float]]) -> Table:
    table = Table(
        "What guards add",
        ["over aot_module_simplified", *(f"{size} inputs µs" for size in SIZES), "per input µs"],
        note="A forward call. Torch's callables check nothing: theirs is the cost of flattening arguments.",
    )
    small, large = SIZES[0], SIZES[-1]
    for name, label in (
        ("foregrad: function", "foregrad.aot_function"),
        ("foregrad: module", "foregrad.aot_module"),
        ("foregrad: module, parameters", "foregrad.aot_module, parameters as inputs"),
        ("torch: function", "torch's aot_function"),
        ("torch: module", "torch's aot_module"),
        ("torch: module, parameters", "torch's aot_module, parameters as inputs"),
    ):
        slope = (guards[large][name] - guards[small][name]) / (large - small)
        table.add(label, *(f"{guards[size][name]:.1f}" for size in SIZES), f"{slope:.2f}")
    return table


def guard_mark(guards: Mapping[int, Mapping[str, float]]) -> Mark:
    call, each = GUARDS_WANTED
    added = {size: guards[size]["foregrad: function"] for size in SIZES}
    return Mark(
        "guards of aot_function",
        f"≤ {call:g} µs + {each:g} µs an input",
        " / ".join(f"{value:.1f}" for value in added.values()) + f" µs at {' / '.join(map(str, SIZES))} inputs",
        all(value <= call + each * size for size, value in added.items()),
    )
