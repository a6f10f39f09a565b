"""Python attributes of tensors, and parameters that a program makes and returns."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import foregrad
from foregrad.errors import ExportError, StateChangeError, UnsupportedError
from helpers import leaf, nop


def on_a_result(x):
    y = x * 2
    y.tag = "a"
    return y, y


def on_a_view(x):
    y = x.view(-1)
    y.tag = (1, 2.0)
    return y


def on_pieces(x):
    first, second = (x * 2).unbind()
    first.tag = None
    return first, second


def a_container(x):
    y = x + 1
    y.tag = [1, {"k": 2}]
    return y


def a_tensor(x):
    y = x * 2
    y.scale = x.detach().sum()
    y.scale.made = True
    return y, y.scale + 1


def a_size(x):
    y = x * 2
    y.rows = x.shape[0] * 2
    return y


def on_a_constant(x):
    t = torch.tensor([1.0])
    t.tag = 1
    return t, x * 2


def taken_away(x):
    y = x * 2
    y.tag = 1
    del y.tag
    return y


def a_parameter(x):
    p = nn.Parameter(x.detach() * 2)
    p.tag = 1
    return p, p, nn.Parameter(torch.ones(2), requires_grad=False), nn.Buffer(torch.ones(1)), x * 2


def a_parameter_in_memory_of_an_input(x):
    return nn.Parameter(x), nn.Parameter(x[0]), x * 2


PROGRAMS = [
    on_a_result,
    on_a_view,
    on_pieces,
    a_container,
    a_tensor,
    a_size,
    on_a_constant,
    taken_away,
    a_parameter,
    a_parameter_in_memory_of_an_input,
]


def described(value):
    if isinstance(value, torch.Tensor):
        inside = {name: described(item) for name, item in vars(value).items() if name[:7] != "_dynamo"}
        return type(value), value.tolist(), value.requires_grad, value.is_leaf, inside
    return type(value), value


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_have_the_attributes_and_the_type_that_eager_gives(program, training, dynamic):
    seen = []
    for fn in (program, foregrad.aot_function(program, nop, dynamic=dynamic)):
        seen.append([])
        for _ in range(3):
            with torch.set_grad_enabled(training):
                results = pytree.tree_leaves(fn(leaf(2, 2)))
            seen[-1] += [described(result) for result in results]
            seen[-1].append([results.index(result) for result in results if result is results[0]])
            for result in results:
                for value in vars(result).values():
                    if isinstance(value, list):
                        value.append("the caller's")
    assert seen[0] == seen[1]


def test_parameters_share_memory_as_in_eager():
    x = leaf(2, 2)
    p, q, _ = foregrad.aot_function(a_parameter_in_memory_of_an_input, nop)(x)
    assert p.data_ptr() == q.data_ptr() == x.data_ptr()


class Marks(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.weight.calls = 0

    def forward(self, x):
        self.weight.calls += 1
        return x * self.weight


def test_attributes_of_inputs_and_parameters_are_refused():
    def mark(x):
        x.tag = x * 2
        return x * 2

    x, module = leaf(2), Marks()
    with pytest.raises(StateChangeError, match=r"the attribute 'tag' of args\[0\]"):
        foregrad.aot_function(mark, nop)(x)
    with pytest.raises(StateChangeError, match="the attribute 'calls' of parameter weight"):
        foregrad.aot_module(module, nop)(x)
    assert not hasattr(x, "tag")
    assert module.weight.calls == 0


def test_what_cannot_be_put_on_a_result_again_is_refused():
    def program(x):
        y = x * 2
        y.tag = object()
        return y

    with pytest.raises(UnsupportedError, match=r"puts a object on a result, as output\.tag"):
        foregrad.aot_function(program, nop)(leaf(2))


def test_exported_graphs_have_no_attributes():
    class Marked(nn.Module):
        def forward(self, x):
            return (on_a_result(x)[0],)

    with pytest.raises(ExportError, match="puts the attribute 'tag' on output 0"):
        foregrad.aot_export_module(Marked(), [leaf(2).detach()], trace_joint=False)
