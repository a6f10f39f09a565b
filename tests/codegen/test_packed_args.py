"""Programs of many values, which their code holds in lists; the other tests are about programs of few."""

import itertools

import pytest
import torch
from torch import nn

import foregrad
from checking import check_core
from foregrad.codegen.writer import FEW, PackedArgs, Writer, pack_if_many, spread
from foregrad.slots import Input, Output
from helpers import leaf, nop, plain

MANY = FEW + 2


class Layers(nn.Module):
    """Many layers: parameters, buffers that are written (one of them only read), saved tensors and views of them."""

    def __init__(self, layers: int = MANY, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(6))
        self.register_buffer("scale", plain(3))
        if tied:
            self.layers[-1].weight = self.layers[1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)).t().sin().t()
            if i < len(self.norms):
                x = self.norms[i](x)
        return x * self.scale


@pytest.mark.parametrize(("training", "tied"), [(True, True), (False, False)])
def test_a_model_of_many_parameters_and_buffers(training, tied):
    """F-9"""
    check_core(Layers(tied=tied).train(training), leaf(4, 3))


def test_its_code_does_not_grow_with_its_depth():
    """F-2"""
    sources = []
    for layers in (MANY, 2 * MANY):
        compiled = foregrad.aot_module(Layers(layers).eval(), nop)
        compiled(plain(4, 3)).sum().backward()
        sources.append(compiled.specializations[0].source)
    assert len(sources[1]) - len(sources[0]) < 20
    assert "state = [*map(getitem" in sources[0] and "apply(nondiff_args, *state[0:" in sources[0]


def test_a_parameter_among_many_is_guarded():
    """F-2"""
    module = Layers()
    compiled = foregrad.aot_module(module, nop)
    compiled(plain(4, 3)).sum().backward()
    module.layers[3].weight = nn.Parameter(plain(3, 3) * 2)
    x = plain(4, 3)
    module.eval(), compiled.eval()
    assert torch.equal(compiled(x), module(x))
    module.layers[3].weight.requires_grad_(False)
    compiled(x).sum().backward()
    assert module.layers[3].weight.grad is None
    module.layers[3].weight.data = plain(10)[1:].view(3, 3)
    assert torch.equal(compiled(x), module(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_function_of_many_inputs(dynamic):
    """F-11: gradients for some of them, in between others."""

    def combine(*xs):
        total = xs[0] * xs[1]
        for a, b in itertools.pairwise(xs):
            total = total + a.t() * b.exp().t()
        return total, xs[2] + 1

    inputs = [leaf(3, 3) if i % 3 else plain(3, 3) for i in range(MANY)]

    def compile(fn):
        return foregrad.aot_function(fn, nop, dynamic=dynamic)

    check_core(combine, *inputs, compile=compile)
    check_core(combine, *[x * 2 for x in inputs], compile=compile)  # no leaves


def test_many_inputs_of_which_some_are_written():
    """M-1"""

    def write(*xs):
        total = xs[0] * 2
        for i, x in enumerate(xs):
            total = total * x.sin()
            if i % 4 == 1:
                x.add_(1)
        return total

    check_core(write, *[plain(3) if i % 4 == 1 else leaf(3) for i in range(MANY)])


class CountedInBackward(torch.autograd.Function):
    """Writes to one of its inputs when it is differentiated."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        ctx.count.add_(1)
        return grad * 2, None


def test_the_backward_writes_to_one_of_many_inputs():
    """M-1"""

    def count(*xs):
        total = CountedInBackward.apply(xs[0], xs[3])
        for x in xs[4:]:
            total = total * x.sin().t()
        return total

    states = []
    for call in (count, foregrad.aot_function(count, nop)):  # gradients of gradients are refused: no `check_core`
        inputs = [plain(2, 2) if i == 3 else leaf(2, 2) for i in range(MANY)]
        for _ in range(2):
            call(*inputs).sum().backward()
        states.append([inputs[3].tolist(), *(x.grad.tolist() for x in inputs[4:]), inputs[0].grad.tolist()])
    assert states[0] == states[1] and states[0][0] == [[3, 4], [5, 6]]


def test_slots_in_a_row_get_names_where_they_are_asked_for():
    writer, slots = Writer("a program"), [Input(f"args[{i}]") for i in range(MANY)]
    with writer.block("def call(args):"):
        writer.row(slots, "given", "[*args]")
        writer.line(f"{writer.variable(Output(0))} = sum([{', '.join(writer.listed(slots))}])")
        writer.line(f"return {writer.variable(Output(0))}, {writer.variable(slots[5])}")
    writer.run("<a test>")
    assert "args_5 = given[5]" in writer.source and "args_6" not in writer.source
    assert "sum([*given])" in writer.source
    assert writer.namespace["call"](range(MANY)) == (sum(range(MANY)), 5)


def test_values_side_by_side_are_taken_together():
    row = PackedArgs("row", 100).items()
    assert spread(row) == ["*row"] and spread(row[:FEW]) == [f"row[{i}]" for i in range(FEW)]
    assert spread([row[99], *row[10:50], "x", *row[51:]]) == ["row[99]", "*row[10:50]", "x", "*row[51:100]"]
    assert spread([]) == [] and spread(list(reversed(row)))[0] == "row[99]"


def test_few_values_have_names():
    assert pack_if_many("s", "saved", FEW)[0] == [f"s{i}" for i in range(FEW)]
    assert pack_if_many("s", "saved", FEW + 1)[0] == ["*saved"] and pack_if_many("s", "saved", 0) == ([], [])
