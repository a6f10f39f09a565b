"""Programs recorded above autograd, to be differentiated by whoever runs them."""

import pytest
import torch
from torch import nn

from export.models import MODELS, build
from foregrad import ForegradError, aot_export_module
from foregrad.export import export, load


class Body(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.register_buffer("n", torch.zeros(2))

    def forward(self, x):
        return (self.body(self, x),)


def pre_dispatch(module, *args):
    return aot_export_module(module, args, trace_joint=False, pre_dispatch=True)


def targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def gradients_of(graph, signature, module, args):
    """What autograd says about a graph that is run on the module's own parameters."""
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    outputs = graph(*(state[name] for name in (*signature.parameters, *signature.buffers)), *args)
    names = [getattr(node, "name", None) for node in graph.graph.output_node().args[0]]
    loss = outputs[names.index(signature.user_outputs[0])]
    return torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)


def test_switches_and_composites_stay():
    """X-3"""

    def body(m, x):
        h = nn.functional.linear(x, m.w[None])
        with torch.no_grad():
            scale = h.softmax(0)
        return (h * scale * h.detach()).sum()

    module = Body(body)
    graph, signature = pre_dispatch(module, torch.randn(3, 2))
    found = targets(graph)
    assert torch.ops.aten.linear.default in found and torch.ops.aten.softmax.int in found
    assert found.count(torch._C._set_grad_enabled) == 2 and torch.ops.aten.detach.default in found
    assert signature.backward_signature is None
    x = torch.randn(3, 2)
    mine = gradients_of(graph, signature, module, (x,))
    assert torch.allclose(mine[0], torch.autograd.grad(module(x)[0], module.w)[0])
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", MODELS)
def test_models_can_be_differentiated(name):
    """X-3"""
    model, args = build(name)

    class Tuple(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *args):
            return (self.model(*args),)

    module = Tuple()
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    graph, signature = pre_dispatch(module, *args)
    assert all(torch.equal(b, buffers[n]) for n, b in module.named_buffers())
    mine = gradients_of(graph, signature, module, args)
    wanted = torch.autograd.grad(module(*args)[0], list(module.parameters()), allow_unused=True)
    for a, b in zip(mine, wanted, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm() + 1e-15


def test_buffer_writes_are_outputs_and_files_work(tmp_path):
    """X-2, X-3"""
    program = export(Body(lambda m, x: (m.n.add_(1), x * m.w)[1]), (torch.ones(2),), pre_dispatch=True)
    program.save(tmp_path / "p.pt2")
    again = load(tmp_path / "p.pt2")
    assert again(torch.ones(2))[0].tolist() == [2, 3] and again.state["n"].tolist() == [1, 1]


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * 3


def write_without_grad(m, x):
    y = x * m.w
    with torch.no_grad():
        y.mul_(2)
    return y


def write_parameter_without_grad(m, x):
    with torch.no_grad():
        m.w.mul_(2)
    return x * m.w


def write_through_detach(m, x):
    y = x * m.w
    y.detach().mul_(2)
    return y


def inference_inside(m, x):
    with torch.inference_mode():
        return x * 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda m, x: Triple.apply(x * m.w), "custom function Triple"),
        (write_without_grad, "write that autograd does not see"),
        (write_parameter_without_grad, "write that autograd does not see"),
        (write_through_detach, "write that autograd does not see"),
        (inference_inside, "inference mode"),
    ],
)
def test_what_would_be_differentiated_otherwise_is_refused(body, words):
    """X-3"""
    with pytest.raises(ForegradError, match=words):
        pre_dispatch(Body(body), torch.ones(2))
    assert Triple.apply(torch.ones(1)).item() == 1


def test_eagers_own_refusal():
    """X-3, M-7"""
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        pre_dispatch(Body(lambda m, x: m.w.mul_(2)), torch.ones(2))
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        pre_dispatch(Body(lambda m, x: m.w[0].mul_(2)), torch.ones(2))


def test_writes_through_views_and_draws():
    """X-3"""

    def body(m, x):
        y = x * m.w
        y[0].mul_(y[1].clone())
        return (nn.functional.dropout(y, 0.5) * y).sum()

    module, x = Body(body), torch.randn(4, 2)
    graph, signature = pre_dispatch(module, x)
    torch.manual_seed(3)
    mine = gradients_of(graph, signature, module, (x,))
    torch.manual_seed(3)
    assert torch.allclose(mine[0], torch.autograd.grad(module(x)[0], module.w)[0])


def test_writes_that_autograd_sees_or_need_not_see():
    """X-3"""

    def body(m, x):
        y = x * m.w
        y.mul_(y.clone())
        with torch.no_grad():
            z = x * 2
            z.add_(1)
            m.n.add_(z)
        return (y * z * m.n).sum()

    module = Body(body)
    graph, signature = pre_dispatch(module, torch.ones(2))
    mine = gradients_of(graph, signature, module, (torch.ones(2),))
    assert torch.allclose(mine[0], torch.autograd.grad(module(torch.ones(2))[0], module.w)[0])


def test_attention_stays_whole_and_chooses_its_kernel_when_it_runs():
    """X-3: with a mask that requires grad eager takes another kernel, whose result lies otherwise in memory."""

    def body(m, x):
        q = x.view(2, 4, 2, 3).transpose(1, 2)
        mask = m.w[:, None, None] * torch.ones(1, 2, 4, 4)
        return nn.functional.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2).reshape(2, 4, 6).square().sum()

    module, x = Body(body), torch.randn(2, 4, 6)
    graph, signature = pre_dispatch(module, x)
    assert torch.ops.aten.scaled_dot_product_attention.default in targets(graph)
    (mine,) = gradients_of(graph, signature, module, (x,))
    assert torch.allclose(mine, torch.autograd.grad(module(x)[0], module.w)[0], atol=1e-6)
