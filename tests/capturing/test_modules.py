"""`aot_module` and `aot_module_simplified`: state of modules as inputs of graphs."""

import copy

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import ConfigError, GraphOutputError
from helpers import Graphs, grab, leaf, nop, plain


class Net(nn.Module):
    """A parameter, a buffer, and a body given as a function."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("n", torch.zeros(2))

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


def simplified(body, *args, **options):
    graphs = Graphs()
    call = foregrad.aot_module_simplified(
        Net(body), args, graphs.compiler("forward"), graphs.compiler("backward"), **options
    )
    return call, graphs


def test_parameters_then_buffers_are_leading_inputs_after_the_arguments_are_known():
    """F-9, V-8"""
    compiled, graphs = grab(Net(lambda m, x: x * m.w + m.n))
    compiled(torch.ones(2)).sum().backward()
    assert len(graphs.inputs("forward")) == 3 and compiled.orig_module.w.grad.tolist() == [1, 1]
    slots = [str(slot) for slot in compiled.specializations[0]._program.joint.signature.primals]
    assert slots == ["parameter w", "buffer n", "args[0]"]


def test_the_compiled_module_is_a_module_with_the_same_parameters():
    """F-9"""
    module = nn.Linear(2, 1)
    compiled = foregrad.aot_module(module, nop)
    assert isinstance(compiled, nn.Module) and compiled.orig_module is module
    assert [p is q for p, q in zip(compiled.parameters(), module.parameters(), strict=True)] == [True, True]
    assert foregrad.compiled_module is foregrad.aot_module


def test_a_replaced_parameter_is_looked_up():
    """F-9 (Z)"""
    module = nn.Linear(2, 1, bias=False)
    compiled, _ = grab(module)
    compiled(torch.ones(1, 2)).sum().backward()
    module.weight = nn.Parameter(torch.zeros(1, 2))
    compiled(torch.ones(1, 2)).sum().backward()
    assert compiled(torch.ones(1, 2)).item() == 0 and module.weight.grad.tolist() == [[1, 1]]


def test_an_optimizer_step_reaches_the_next_call():
    """F-9"""
    module = nn.Linear(3, 1)
    compiled, graphs = grab(module)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.005)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = compiled(plain(2, 3)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and graphs.order == ["forward", "backward"]


def test_training_and_eval_have_a_program_each():
    """F-2"""
    module = nn.Sequential(nn.Dropout(0.5))
    compiled, _ = grab(module)
    compiled(torch.ones(64))
    module.eval()
    assert compiled(torch.ones(64)).sum() == 64
    module.train()
    assert compiled(torch.ones(64)).sum() != 64
    assert len(compiled.specializations) == 2


def test_running_statistics_advance_as_in_eager():
    """M-1, trap 3 of batch norm: its schema does not tell that it writes."""
    ours, theirs = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    compiled, _ = grab(ours)
    for i in range(3):
        x = plain(4, 3) * (i + 1)
        assert torch.equal(compiled(x), theirs(x))
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_a_shared_parameter_gets_the_sum_of_its_gradients():
    """F-9: duplicates are kept, one for each name."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    compiled, graphs = grab(module)
    compiled(torch.eye(2)).sum().backward()
    ours, module[0].weight.grad = module[0].weight.grad, None
    module(torch.eye(2)).sum().backward()
    assert torch.equal(ours, module[0].weight.grad) and len(graphs.inputs("forward")) == 3


def test_a_fake_parameter_is_refused():
    """F-9"""
    with torch._subclasses.FakeTensorMode():
        module = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"Unexpected fake param weight.*real tensors"):
        foregrad.aot_module(module, nop)


def test_a_module_compiled_at_once_takes_and_gives_flat_values():
    """F-10"""
    call, graphs = simplified(lambda m, x: (x * m.w, x + 1), torch.ones(2))
    assert graphs.order == ["forward"]
    result = call(torch.full((2,), 3.0))
    assert type(result) is list and [t.tolist() for t in result] == [[3, 3], [4, 4]]
    assert [name for name, _ in call.named_parameters()] == ["w"]
    assert [name for name, _ in call.named_buffers()] == ["n"]
    result[0].sum().backward()
    weight = dict(call.named_parameters())["w"]
    assert weight.grad.tolist() == [3, 3]
    call.zero_grad()
    assert weight.grad is None


def test_a_module_compiled_at_once_must_return_a_tuple():
    """F-10"""
    with pytest.raises(GraphOutputError, match="Graph output must be a"):
        simplified(lambda m, x: x * m.w, torch.ones(2))


def test_a_module_compiled_at_once_has_one_program():
    """F-10, F-2: its front end guards it."""
    call, graphs = simplified(lambda m, x: (x * m.w,), torch.ones(2))
    with torch.no_grad():
        assert not call(torch.ones(2))[0].requires_grad
    call(torch.ones(2))[0].sum().backward()
    assert graphs.order == ["forward", "backward"] and len(call.specializations) == 1


def test_a_broken_assumption_is_named():
    """L-3, L-5"""
    with foregrad.config.patch(debug_assert=True):
        call, _ = simplified(lambda m, x, y: (x * y * m.w,), leaf(2), torch.ones(2))
    with pytest.raises(AssertionError, match="input 1 would not require grad, but at runtime"):
        call(leaf(2), leaf(2))
    assert call(torch.ones(2), torch.ones(2))[0].tolist() == [1, 1]


def test_fake_examples_with_a_shape_environment_give_symbolic_sizes():
    """F-11"""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    example = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(4))
    graphs = Graphs()

    class Twice(nn.Module):
        def forward(self, x):
            return (x * 2,)

    call = foregrad.aot_module_simplified(Twice(), [example], graphs.compiler("inference"))
    assert isinstance(graphs.examples["inference"][0].shape[0], torch.SymInt)
    assert call(torch.ones(7))[0].tolist() == [2] * 7


def test_a_boxed_list_is_emptied_before_the_graph_runs():
    """J-13"""
    import weakref

    from torch._dynamo.utils import GmWrapper

    class Inc(nn.Module):
        def forward(self, x):
            return (x + 1,)

    gone = []

    def run(args):
        held = weakref.ref(args[0])
        args.clear()
        gone.append(held() is None)
        return [torch.zeros(2)]

    run._boxed_call = True
    module = GmWrapper(torch.fx.symbolic_trace(Inc()), lambda args: args)
    call = foregrad.aot_module_simplified(module, [torch.ones(2)], lambda graph, inputs: run)
    box = [torch.ones(2)]
    call(box)
    assert box == [] and gone == [True]


def test_a_graph_module_keeps_the_lines_of_its_nodes():
    """L-6"""

    class Program(nn.Module):
        def forward(self, x):
            return (x.sin() * x,)

    traced = torch.fx.symbolic_trace(Program())
    for node in traced.graph.nodes:
        node.stack_trace = f"line of {node.name}"
    graphs = Graphs()
    call = foregrad.aot_module_simplified(traced, [leaf(2)], graphs.compiler("forward"), graphs.compiler("backward"))
    call(leaf(2))[0].sum().backward()
    lines = {
        n.target.__name__: n.meta.get("stack_trace", "")
        for n in graphs.modules["backward"].graph.nodes
        if n.op == "call_function"
    }
    assert "line of sin" in lines["cos.default"] and "Gradient addition node" in lines["add.Tensor"]


@pytest.mark.parametrize("affine", [True, False])
def test_models_write_to_hundreds_of_buffers(affine):
    """Three for each batch norm, and what the backward needs behind them."""
    model = nn.Sequential(*[nn.BatchNorm1d(2, affine=affine) for _ in range(90)])
    eager, x = copy.deepcopy(model), torch.randn(4, 2)
    compiled = foregrad.aot_module(model, nop)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    results = [call(given) for call, given in zip((eager, compiled), inputs, strict=True)]
    for result in results:
        result.square().sum().backward()
    assert torch.equal(*results) and torch.equal(inputs[0].grad, inputs[1].grad)
    assert all(torch.equal(a, b) for a, b in zip(eager.buffers(), model.buffers(), strict=True))
