"""Which memory is alive while a compiled network runs, forward and backward, against autograd's own machinery (J-13).

Every storage that an operator makes is watched by a weak reference, and the bytes of those that are alive are added up
after each operator. Graphs are run one operator after another, and drop what nobody reads any more, as generated code
does.
"""

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import foregrad
from helpers import grab, nop

LAYERS, BATCH, WIDTH = 20, 16, 32
ACTIVATION = BATCH * WIDTH * 4
WEIGHTS = LAYERS * WIDTH * WIDTH * 4


@pytest.fixture(autouse=True)
def _no_garbage_collection():
    """What is freed is freed at once, and not by a collector that happens to run."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Watch(TorchDispatchMode):
    """Notes how many bytes are alive after each operator that runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[int] = []
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        self.trace.append(self.alive)
        return result

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None or known[0].expired():
            self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    @property
    def alive(self) -> int:
        return sum(size for storage, size in self._storages.values() if not storage.expired())

    def run(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """A graph that is watched, called with a list that it empties."""

        def boxed(args: list[Any]) -> Any:
            with self:
                return fx.Interpreter(graph).boxed_run(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    def compiler(self, graph: fx.GraphModule, example_inputs: Any) -> Any:
        return self.run(graph)


class Network(nn.Module):
    """Layers without a bias, so that all that is saved is of one size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@dataclass(frozen=True)
class Step:
    """The bytes that are alive after each operator of a training step, behind it, and without its gradients."""

    forward: list[int]
    backward: list[int]
    end: int
    left: int


def train(call: Callable[[Tensor], Tensor], net: Network, watch: Watch, around: Any = None) -> Step:
    """A training step; `around` is entered where the operators are not run by graphs that are watched."""
    weights = list(net.parameters())
    x, tangent = torch.rand(BATCH, WIDTH), torch.ones(BATCH, WIDTH)
    for tensor in (x, tangent, *weights):
        watch.add(tensor)
    watch.trace.clear()
    with around or contextlib.nullcontext():
        y = call(x)
        del x, tensor
        forward = list(watch.trace)
        y.backward(tangent)
    backward = watch.trace[len(forward) :]
    del y, tangent
    end = watch.alive
    net.zero_grad()
    return Step(forward, backward, end, watch.alive)


def compiled_step() -> Step:
    watch, net = Watch(), Network()
    call = foregrad.aot_module(net, watch.compiler)
    first = train(call, net, watch)
    gc.collect()  # compiling leaves cycles behind, with the arguments of the first call in them
    second = train(call, net, watch)
    assert max(first.forward) == max(second.forward)
    assert max(first.backward) <= max(second.backward) + ACTIVATION  # the first backward frees as the others do
    return second


def eager_step() -> Step:
    watch, net = Watch(), Network()
    return train(net, net, watch, around=watch)


def bare_step() -> Step:
    """The same two graphs in an `autograd.Function` that does nothing but to save and to run."""
    watch, net = Watch(), Network()
    compiled, graphs = grab(net)
    compiled(torch.rand(BATCH, WIDTH)).sum().backward()
    net.zero_grad()
    run_forward, run_backward = (watch.run(graphs.modules[kind]) for kind in ("forward", "backward"))

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Tensor) -> Tensor:
            y, *saved = run_forward(list(args))
            ctx.save_for_backward(*saved)
            return y

        @staticmethod
        def backward(ctx: Any, tangent: Tensor) -> Any:
            return tuple(run_backward([*ctx.saved_tensors, tangent]))

    return train(lambda x: Bare.apply(*net.parameters(), x), net, watch)


def test_no_more_is_alive_than_with_a_bare_function():
    """J-13: at no point of forward and backward. A function that autograd runs holds what it saved until it returns."""
    ours, bare = compiled_step(), bare_step()
    assert ours.forward == bare.forward
    assert all(a <= b for a, b in zip(ours.backward, bare.backward, strict=True))
    assert ours.end == bare.end
    assert min(ours.forward) >= WEIGHTS and max(ours.forward) >= WEIGHTS + LAYERS * ACTIVATION  # they are measured


def test_no_more_is_alive_than_in_eager():
    """J-13: the peaks of forward and backward, and what is alive in the end."""
    ours, eager = compiled_step(), eager_step()
    assert max(ours.forward) <= max(eager.forward)
    assert max(ours.backward) <= max(eager.backward)
    assert ours.end == eager.end == 2 * WEIGHTS  # the weights and their gradients
    assert ours.left == eager.left == WEIGHTS


def test_saved_tensors_are_freed_while_the_backward_runs():
    """J-13: the last operators of the backward find no more than the first layer's, and gradients on their way."""
    ours, bare = compiled_step(), bare_step()
    assert ours.backward[-1] <= 2 * WEIGHTS + 4 * ACTIVATION
    assert bare.backward[-1] >= 2 * WEIGHTS + LAYERS * ACTIVATION  # autograd alone would hold them


def test_saved_tensors_are_kept_for_another_backward():
    """J-16, J-13: with `retain_graph` nothing is freed, and without it a second backward is refused as in eager."""
    watch, net = Watch(), Network()
    y = foregrad.aot_module(net, watch.compiler)(torch.rand(BATCH, WIDTH)).sum()
    y.backward(retain_graph=True)
    kept = watch.alive
    first = [weight.grad.clone() for weight in net.parameters()]
    net.zero_grad()
    y.backward()
    assert kept - watch.alive >= (LAYERS - 1) * ACTIVATION
    assert all(torch.equal(weight.grad, a) for weight, a in zip(net.parameters(), first, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_a_boxed_input_is_freed_while_the_graph_runs():
    """J-13: with gradients off, nobody but the graph holds what was passed in a list."""
    from torch._dynamo.utils import GmWrapper

    class Tower(nn.Module):
        def forward(self, x: Tensor) -> Any:
            for _ in range(LAYERS):
                x = x.tanh()
            return (x,)

    watch = Watch()
    module = GmWrapper(fx.symbolic_trace(Tower()), lambda args: args)
    call = foregrad.aot_module_simplified(module, [torch.rand(BATCH, WIDTH)], watch.compiler)
    box = [torch.rand(BATCH, WIDTH)]
    watch.add(box[0])
    result = call(box)
    assert box == [] and watch.trace == [2 * ACTIVATION] * LAYERS
    del result
    assert watch.alive == 0


def test_tensors_in_a_boxed_subclass_are_freed_while_the_graph_runs():
    """J-13, T-1: nor what is inside of it."""
    from torch._dynamo.utils import GmWrapper

    class Tower(nn.Module):
        def forward(self, x: Tensor) -> Any:
            for _ in range(LAYERS):
                x = x.tanh()
            return (x,)

    def pair() -> Tensor:
        return TwoTensor(torch.rand(BATCH, WIDTH), torch.rand(BATCH, WIDTH))

    watch = Watch()
    module = GmWrapper(fx.symbolic_trace(Tower()), lambda args: args)
    call = foregrad.aot_module_simplified(module, [pair()], watch.compiler)
    box: list[Any] = [pair()]
    watch.add(box[0].a), watch.add(box[0].b)
    result = call(box)
    assert box == [] and max(watch.trace) == 3 * ACTIVATION
    del result
    assert watch.alive == 0


def test_a_list_of_arguments_is_emptied_also_in_training():
    """J-13: once the call has returned, only what is saved is alive of its inputs."""
    from torch._dynamo.utils import GmWrapper

    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return ((x * 2 + y).sin(),)

    watch = Watch()
    module = GmWrapper(fx.symbolic_trace(Sum()), lambda args: args)
    examples = [torch.rand(BATCH, WIDTH, requires_grad=True), torch.rand(BATCH, WIDTH)]
    call = foregrad.aot_module_simplified(module, examples, watch.compiler, watch.compiler)
    x, y = torch.rand(BATCH, WIDTH, requires_grad=True), torch.rand(BATCH, WIDTH)
    box = [x * 1, y.clone()]
    for tensor in box:
        watch.add(tensor)
    del tensor
    (result,) = call(box)
    assert box == [] and watch.alive == 2 * ACTIVATION  # the result, and the argument of the sine
    result.sum().backward()
    assert torch.allclose(x.grad, 2 * (2 * x + y).cos())
    assert watch.alive == ACTIVATION


def garbage_of(call: Callable[[], Any]) -> list[Any]:
    """What a call leaves to the garbage collector."""
    call()  # for the first time: torch imports modules, and leaves frames behind
    gc.collect()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        call()
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_interpreting_a_graph_leaves_nothing_to_the_garbage_collector():
    """J-13"""
    module = foregrad.capture(lambda x, y: [x.sin() * y, torch.cat([x, y])], torch.ones(3), torch.ones(3)).joint_graph
    assert "_foregrad_flat" in vars(module)  # nobody has looked at it, so that it is interpreted
    assert garbage_of(lambda: module.forward(torch.ones(3), torch.ones(3))) == []


def test_capturing_leaves_no_tensor_to_the_garbage_collector():
    """J-13"""
    x = torch.ones(3, requires_grad=True)
    kept = []  # a program itself is an object with cycles, when it goes

    def capture_and_train():
        kept.append(foregrad.aot_function(lambda x, scale: (x.sin() * scale["by"]).exp(), nop))
        kept[-1](x * 2, {"by": torch.ones(3)}).sum().backward()

    assert not [found for found in garbage_of(capture_and_train) if isinstance(found, Tensor)]


def test_what_the_user_has_frozen_stays_frozen():
    gc.enable()
    gc.freeze()
    try:
        grab(lambda x: x + 1)[0](torch.ones(2))
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
