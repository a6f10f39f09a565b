"""What a compiler fuses is no memory: Inductor's own lowerings are asked, and the simulation follows."""

import pytest
import torch
from torch import nn

import foregrad
from foregrad._torch import InductorProgram
from foregrad.abstract.lean_tensors import to_fake_tensors
from foregrad.graph.fx import from_fx, to_fx
from foregrad.partition.costs import UNKNOWN
from foregrad.partition.model import Model
from foregrad.partition.plan import Plan
from foregrad.partition.search import Frontier, with_less_work
from helpers import leaf, nop

pytestmark = pytest.mark.filterwarnings("ignore")  # what Inductor says about itself
SIZE = 64 * 64 * 4


@torch.library.custom_op("foregrad_tests::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halve.register_fake(torch.empty_like)
halve.register_autograd(lambda ctx, grad: grad / 2)


def asked(program, *args):
    """The joint graph of a program, about whose nodes Inductor was asked."""
    joint = foregrad.capture(program, *args).joint.graph
    module = to_fx(joint)
    InductorProgram({}).note_lowerings(module, to_fake_tensors([node.value for node in joint.inputs]))
    return from_fx(module, [output.slot for output in joint.outputs])


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_says_what_it_makes_of_operators(dynamic):
    """Also of one that nobody has heard of: it is a kernel."""

    def program(x, w):
        return (halve((x @ w).exp()) + x.sum(1, keepdim=True)).t().sin(), x.cumsum(0)

    compiled = foregrad.aot_function(program, nop, dynamic=dynamic)
    compiled(leaf(16, 16), leaf(16, 16))
    module = compiled.specializations[0].joint_graph
    InductorProgram({}).note_lowerings(module, [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")])
    found = {node.name: node.meta.get("lowered") for node in module.graph.nodes}
    assert found["exp"] == found["sin"] == found["add"] == "inlined"
    assert found["sum_1"] == "loops"
    assert found["mm"] is None and found["t"] is None and found["halve"] is None


def plain_plan(graph):
    """A plan that saves what the backward reads."""
    model = Model(graph)
    return Plan(model, frozenset(i for i in model.read if model.savable[i]))


def test_a_chain_that_is_fused_takes_the_memory_of_its_result():
    def program(x):
        return (x.exp() + 1).sin().cos()

    graph = asked(program, torch.ones(64, 64))
    fused = plain_plan(foregrad.capture(program, torch.ones(64, 64)).joint.graph), plain_plan(graph)
    assert [plan.forward_memory.peak for plan in fused] == [2 * SIZE, SIZE]


def test_what_a_kernel_reads_is_memory():
    """And what is fused keeps alive what it is made of, until it is read."""

    def program(x, w):
        y = (x @ w) * 2
        z = w.t() @ w
        return (y.exp() + 1) @ w + z

    [memory] = [plain_plan(asked(program, *(torch.ones(64, 64) for _ in range(2)))).forward_memory]
    names = [node.name for node in asked(program, *(torch.ones(64, 64) for _ in range(2))).nodes]
    alive = dict(zip(names, memory.alive, strict=True))
    assert alive["mm"] == alive["mul"] == SIZE  # it is worked out by `add`
    assert alive["mm_1"] == 2 * SIZE and alive["exp"] == 2 * SIZE
    assert alive["add"] == 3 * SIZE  # which is memory for the product, beside what it was made of


def test_an_operator_that_is_fused_costs_what_it_reads():
    """One that Inductor does not know is a kernel of which nobody knows what it costs."""

    def program(x):
        return halve(x).sin()

    graph = asked(program, leaf(64, 64))
    model = Model(graph)
    place = {node.name: model.index[node] for node in graph.nodes}
    assert model.flops[place["halve"]] == UNKNOWN and model.flops[place["sin"]] == 0
    assert model.moved[place["sin"]] == SIZE


def test_below_the_peak_kernels_find_what_they_read():
    """Gradients of weights peak at the end: until then there is room for what would be written again."""

    def program(x, *weights):
        for w in weights:
            x = (x @ w).exp() + 1
        return x.sum()

    graph = asked(program, leaf(16, 64), *(leaf(64, 64) for _ in range(4)))
    smallest = Frontier(Model(graph)).smallest
    found = with_less_work(smallest)
    assert found.peak <= smallest.peak and len(found.recomputed) < len(smallest.recomputed)
    smallest.model.fusion = None
    assert with_less_work(smallest) is smallest  # whatever is computed again is a kernel of its own


@pytest.mark.skipif(__import__("shutil").which("g++") is None, reason="Inductor needs a C++ compiler")
def test_the_simulated_peak_is_that_of_the_allocator(monkeypatch):
    """Normalizations, GELU and residual additions, which Inductor fuses: within 5%."""
    from benchmarks.compile import peak_of
    from foregrad.partition import rematerialize

    plans = []
    plan_of = rematerialize.plan_of
    monkeypatch.setattr(rematerialize, "plan_of", lambda *args: plans.append(plan_of(*args)) or plans[-1])
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner, self.outer = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, x):
            return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))

    model = nn.Sequential(Block(), Block(), Block())
    compiled, x = foregrad.compile(model), torch.randn(2048, 32)

    def step():
        for parameter in model.parameters():
            parameter.grad = None
        compiled(x).square().mean().backward()

    for _ in range(2):
        step()
    for parameter in model.parameters():
        parameter.grad = None
    real = peak_of(step, torch.device("cpu"))
    plan = plans[0]
    unfused = Plan(Model(plan.model.joint), plan.kept, plan.order)
    unfused.model.fusion = None
    assert abs(plan.peak / real - 1) < 0.05 < abs(unfused.peak / real - 1), (plan.peak, unfused.peak, real)
