"""One of two processes of the distributed tests: `python distributed_worker.py RANK FILE CASE`."""

import contextlib
import copy
import datetime
import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import foregrad

MODULES = []


def keep(graph, example_inputs):
    """A compiler that keeps its graph and runs it as it is."""
    MODULES.append(graph)
    return foregrad.make_boxed_func(graph.forward)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor + 0


def close(a, b):
    torch.testing.assert_close(full(a), full(b))


def require_plain_graphs():
    """Every value in a graph is a plain tensor, and there are functional collectives only."""
    for module in MODULES:
        for node in module.graph.nodes:
            value = node.meta.get("val")
            assert not isinstance(value, torch.Tensor) or type(value).__name__ == "FakeTensor", node
            if node.op == "call_function" and "c10d" in str(node.target):
                assert str(node.target).startswith("_c10d_functional."), node
                assert "_wrap_tensor" not in str(node.target), node


def collectives():
    return [str(n.target) for m in MODULES for n in m.graph.nodes if "_c10d_functional" in str(n.target)]


def train_both(module, inputs):
    """Eager and compiled steps give the same results and gradients."""
    expected = module(*inputs)
    full(expected).square().sum().backward()
    wanted = [p.grad for p in module.parameters()] + [x.grad for x in inputs]
    for tensor in (*module.parameters(), *inputs):
        tensor.grad = None
    compiled = foregrad.aot_module(module, keep)
    for _ in range(2):
        got = compiled(*inputs)
        close(got, expected)
        full(got).square().sum().backward()
        for tensor, grad in zip((*module.parameters(), *inputs), wanted, strict=True):
            assert (tensor.grad is None) == (grad is None)
            if grad is not None:
                assert type(tensor.grad) is type(grad)
                close(tensor.grad, grad)
            tensor.grad = None
    assert len(compiled.specializations) == 1
    require_plain_graphs()


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).reshape(batch, length, -1))


def tensor_parallel(mesh):
    """T-1, T-5: a tensor-parallel MLP"""
    mlp = parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    train_both(mlp, [torch.randn(4, 8, requires_grad=True)])
    assert collectives()


def attention(mesh):
    """T-1, T-5: a tensor-parallel attention block"""
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "out": RowwiseParallel()}
    train_both(parallelize_module(Attention(), mesh, plan), [torch.randn(2, 3, 8, requires_grad=True)])
    assert collectives()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), MLP()

    def forward(self, x):
        return self.mlp(self.norm(x))


def sequence_parallel(mesh):
    """T-1, T-5: the sequence is sharded in the norm, and gathered for the MLP"""
    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    block = parallelize_module(Block(), mesh, plan)
    train_both(block, [torch.randn(2, 4, 8, requires_grad=True)])
    assert any("all_gather" in name for name in collectives())


def inputs(mesh):
    """T-1, T-6: sharded and replicated inputs, and a gradient that arrives in another placement"""
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(torch.randn(6, 4), mesh, [Replicate()]).requires_grad_()

    def program(x, w):
        return (x @ w).relu()

    f = foregrad.aot_function(program, keep)
    expected = program(x, w)
    gradient = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    expected.backward(gradient)
    wanted = x.grad, w.grad
    for arriving in (gradient, gradient.redistribute(mesh, [Replicate()])):
        x.grad = w.grad = None
        got = f(x, w)
        assert got.placements == expected.placements
        close(got, expected)
        got.backward(arriving)
        close(x.grad, wanted[0])
        close(w.grad, wanted[1])
    assert len(f.specializations) == 1
    f(x.detach().redistribute(mesh, [Replicate()]).requires_grad_(), w)
    assert len(f.specializations) == 2
    require_plain_graphs()


class Counting(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.register_buffer("seen", distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))

    def forward(self, x):
        self.seen.add_(x)
        return self.seen * 2


def buffer(mesh):
    """T-9: a sharded buffer is written"""
    module = Counting(mesh)
    other = copy.deepcopy(module)
    compiled = foregrad.aot_module(other, keep)
    x = distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)])
    for _ in range(3):
        close(compiled(x), module(x))
        close(other.seen, module.seen)
    assert len(compiled.specializations) == 1


def gathered_weights(mesh):
    """T-1, T-5: parameters that are sharded, and gathered wherever they are used, in modules and in closures"""

    class Gather(nn.Module):
        def forward(self, weight):
            return weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])

    def sharded():
        torch.manual_seed(0)
        linear = nn.Linear(4, 2)
        for name, parameter in list(linear.named_parameters()):
            setattr(linear, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
            parametrize.register_parametrization(linear, name, Gather(), unsafe=True)
        return linear

    torch.manual_seed(dist.get_rank())
    x = torch.randn(3, 4)
    eager, module, closed_over = sharded(), sharded(), sharded()
    calls = eager, foregrad.aot_module(module, keep), foregrad.aot_function(lambda x: closed_over(x), keep)
    for call in calls:
        call(x).square().sum().backward()
    for found in (module, closed_over):
        for wanted, got in zip(eager.parameters(), found.parameters(), strict=True):
            close(got.grad, wanted.grad)
    weights = [distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_() for _ in range(2)]

    def using(weight):
        return lambda x: (x @ weight.full_tensor()).sin().sum()

    using(weights[0])(x).backward()
    foregrad.aot_function(using(weights[1]), keep)(x).backward()
    close(weights[1].grad, weights[0].grad)


def second_order(mesh):
    """J-10: gradients of gradients of sharded tensors"""

    def program(x, w):
        return (x @ w).tanh() * x.sum(1, keepdim=True)

    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(torch.randn(6, 4), mesh, [Replicate()]).requires_grad_()
    found = []
    for function in (program, foregrad.aot_function(program, keep)):
        y = function(x, w)
        first = torch.autograd.grad(y, (x, w), torch.ones_like(y.detach()), create_graph=True)
        tangents = [torch.ones_like(g.detach()) for g in first]
        found.append([*first, *torch.autograd.grad(first, (x, w), tangents)])
    for expected, got in zip(*found, strict=True):
        assert type(got) is DTensor and got.requires_grad == expected.requires_grad
        close(got.detach(), expected.detach())
    require_plain_graphs()


def partial(mesh):
    """T-6: a result that is a partial sum"""
    x = DTensor.from_local(torch.randn(3), mesh, [Partial()]).requires_grad_()
    f = foregrad.aot_function(lambda x: x * 2, keep)
    got = f(x)
    assert got.placements == (Partial(),)
    got.backward(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    close(x.grad, torch.full((3,), 2.0))


def data_parallel(mesh):
    """DistributedDataParallel around a compiled module trains as eager does, for ten steps"""
    torch.manual_seed(3)
    eager = MLP()
    module = copy.deepcopy(eager)
    reference = DistributedDataParallel(eager)
    compiled = DistributedDataParallel(foregrad.aot_module(module, keep))
    torch.manual_seed(10 + dist.get_rank())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, compiled)]
    for _ in range(10):
        x = torch.randn(4, 8)
        for model, optimizer in zip((reference, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(eager.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def whole_data_parallel(mesh):
    """A compiled DistributedDataParallel module trains as eager does, `no_sync` and unused parameters included"""
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        torch.manual_seed(3)
        eager = MLP()
        if "find_unused_parameters" in options:
            eager.unused = nn.Linear(2, 2)
        module = copy.deepcopy(eager)
        reference, parallel = (DistributedDataParallel(m, **options) for m in (eager, module))
        compiled = foregrad.aot_module(parallel, keep)
        torch.manual_seed(10 + dist.get_rank())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, module)]
        for step in range(4):
            x = torch.randn(4, 8)
            for called, owner, optimizer in zip((reference, compiled), (reference, parallel), optimizers, strict=True):
                alone = step == 1 and not options
                with owner.no_sync() if alone else contextlib.nullcontext():
                    called(x).square().mean().backward()
                if not alone:
                    optimizer.step()
                    optimizer.zero_grad()
        assert len(compiled.specializations) == 1
        for a, b in zip(eager.parameters(), module.parameters(), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(foregrad.errors.UnsupportedError, match=r"DistributedDataParallel\(aot_module\("):
        foregrad.aot_function(lambda x: parallel(x), keep)(torch.randn(4, 8))


def fully_sharded(mesh):
    """fully_shard around compiled modules, or compiled itself, trains as eager does; inside a program it is refused"""
    trained = []

    def same(module):
        return module

    def compiled(module):
        return foregrad.aot_module(module, keep)

    for before, after in ((same, same), (compiled, same), (same, compiled)):
        torch.manual_seed(3)
        model = nn.Sequential(before(nn.Linear(8, 8)), nn.ReLU(), before(nn.Linear(8, 2)))
        for i in (0, 2):
            model[i] = after(fully_shard(model[i], mesh=mesh))
        fully_shard(model, mesh=mesh)
        torch.manual_seed(10 + dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([parameter.full_tensor() for parameter in model.parameters()])
    assert all(map(torch.equal, trained[0], trained[1])) and all(map(torch.equal, trained[0], trained[2]))
    sharded = nn.Sequential(fully_shard(nn.Linear(8, 2), mesh=mesh))
    with pytest.raises(foregrad.errors.UnsupportedError, match=r"aot_module\(model, ...\); fully_shard\(model\)"):
        foregrad.aot_module(sharded, keep)(torch.randn(4, 8))


def failing(mesh):
    """A rank that fails says so, and the other does not wait for ever"""
    x = distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)])
    f = foregrad.aot_function(lambda x: x.redistribute(mesh, [Replicate()]) * 2, keep)
    close(f(x), full(x) * 2)
    if dist.get_rank() == 1:
        raise RuntimeError("this rank fails")
    full(f(x))


def failing_compiler(mesh):
    """A compiler that fails on one rank only"""

    def broken(graph, example_inputs):
        raise RuntimeError("this compiler fails")

    x = distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)])
    compiler = broken if dist.get_rank() == 1 else keep
    full(foregrad.aot_function(lambda x: x.redistribute(mesh, [Replicate()]) * 2, compiler)(x))


def group_gone(mesh):
    """A process group that is gone: for a program of before, its backward, and a new one"""
    x = distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)])
    gathered = foregrad.aot_function(lambda x: x.redistribute(mesh, [Replicate()]) * 2, keep)
    gathered(x)
    w = distribute_tensor(torch.randn(2, 4), mesh, [Replicate()]).requires_grad_()
    product = foregrad.aot_function(lambda x, w: (x @ w).redistribute(mesh, [Replicate()]), keep)
    y = product(x, w)
    gradient = torch.ones_like(y.detach())
    dist.destroy_process_group()
    raised = 0
    for call in (lambda: gathered(x), lambda: y.backward(gradient), lambda: product(x.detach(), w.detach())):
        try:
            full(call() or w.grad)
        except RuntimeError as error:
            print("raised:", error)
            raised += 1
    assert raised == 3, "a collective ran without its process group"


def main():
    rank, file, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    seconds = datetime.timedelta(seconds=5 if case.startswith("failing") else 40)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=seconds)
    mesh = init_device_mesh("cpu", (2,))
    names = case.split(",")
    with foregrad.config.patch(verify=True):
        for name in names:
            torch.manual_seed(0)
            MODULES.clear()
            globals()[name](mesh)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    # What is left holds threads of gloo, which torch joins in no certain order when an interpreter ends, and may abort.
    os._exit(0)


if __name__ == "__main__":
    main()
