"""Writes to inputs: shape, data, both; written back after the graph, or by the graph itself."""

import pytest
import torch

import foregrad
from checking import check_core
from helpers import grab, leaf, nop, plain


def shape_then_data(x):
    x.transpose_(0, 1)
    x.sub_(1)
    return x + 0


def data_then_shape(x):
    x.mul_(3)
    x.t_()
    return x.sin()


def cancelling_changes(x):
    x.t_()
    x.t_()
    return x + 1


def a_view_from_before(x):
    row = x[0]
    x.t_()
    return row, x, x[0]


def shape_under_no_grad(x):
    with torch.no_grad():
        x.unsqueeze_(1)
    return x * 2


CHANGES = [
    lambda x: x.unsqueeze_(0) + 7,
    lambda x: (x.t_(), x * 2)[1],
    lambda x: (x.unsqueeze_(0), x.squeeze_(0), x.t_())[2],
    shape_then_data,
    data_then_shape,
    cancelling_changes,
    shape_under_no_grad,
]


@pytest.mark.parametrize("program", CHANGES, ids=lambda p: p.__name__)
@pytest.mark.parametrize("make", [lambda: plain(2, 3), lambda: leaf(2, 3) * 1], ids=["plain", "no leaf"])
def test_a_change_of_shape_reaches_the_caller(program, make):
    """M-3, M-4, M-5"""
    check_core(program, make())


def test_a_view_from_before_the_change_keeps_its_shape():
    """M-3"""
    check_core(a_view_from_before, plain(2, 3))


def test_a_change_of_shape_alone_has_no_tangent():
    """M-3"""
    compiled, graphs = grab(lambda x: x.unsqueeze_(0) + 7)
    x = leaf(2, 3)
    y = x * 1
    compiled(y).sum().backward()
    assert y.shape == (1, 2, 3)
    assert x.grad.shape == (2, 3)
    assert graphs.inputs("backward") == ["tangents_1"]


def test_compilers_see_the_shape_that_the_input_comes_with():
    """M-3"""
    compiled, graphs = grab(lambda x: (x.t_(), x * 2)[1])
    compiled(plain(2, 3))
    assert graphs.examples["inference"][0].shape == (2, 3)
    assert graphs.modules["inference"].graph.find_nodes(op="placeholder")[0].meta["val"].shape == (2, 3)


def test_values_have_the_shape_that_they_had():
    compiled, graphs = grab(lambda x: ((y := x * 2).unsqueeze_(0), y + 1)[1])
    compiled(plain(2, 3))
    shapes = {n.name: tuple(n.meta["val"].shape) for n in graphs.modules["inference"].graph.nodes if "val" in n.meta}
    assert shapes == {"arg0_1": (2, 3), "mul": (2, 3), "unsqueeze": (1, 2, 3), "add": (1, 2, 3)}


def test_changes_that_cancel_out_return_nothing():
    """M-5"""
    compiled, graphs = grab(cancelling_changes)
    compiled(plain(2, 3))
    assert len(graphs.outputs("inference")) == 1
    assert not compiled.specializations[0].metadata.input_info[0].mutates_metadata


def test_the_graph_may_write_to_its_inputs_itself():
    """M-8, M-12"""

    def program(x):
        x.exp_()
        return x, x - 1

    compiled, graphs = grab(program, keep_inference_input_mutations=True)
    x = torch.zeros(2)
    same, less = compiled(x)
    assert same is x
    assert x.tolist() == [1, 1]
    assert less.tolist() == [0, 0]
    assert graphs.ops("inference")[-1] == "copy_.default"
    assert len(graphs.outputs("inference")) == 2
    assert foregrad.assert_functional_graph(graphs.modules["inference"].graph) == 1


def test_writes_that_autograd_sees_stay_outside_the_graph():
    """M-9"""

    def program(b, w):
        b.add_(2)
        return b * w

    compiled, graphs = grab(program, keep_inference_input_mutations=True)
    b, w = torch.ones(2), leaf(2)
    compiled(b, w).sum().backward()
    assert "copy_.default" in graphs.ops("forward")
    assert b.tolist() == [3, 3] and w.grad.tolist() == [3, 3]
    compiled(leaf(2) * 1, leaf(2))
    assert "copy_.default" not in graphs.ops("forward")


WRITES = [
    lambda b, w: (b.add_(1), b.mul_(2), b * w)[2],
    lambda b, w: (b.copy_(w.detach()), w * 2)[1],
    lambda b, w: (b.t().zero_(), b[0].add_(3), b * w)[2],
]


@pytest.mark.parametrize("program", WRITES, ids=["twice", "copy", "through views"])
def test_writes_in_the_graph_are_eagers_writes(program):
    """M-8, M-9"""

    def compile(fn):
        return foregrad.aot_function(
            fn, lambda graph, inputs: foregrad.make_boxed_func(graph.forward), keep_inference_input_mutations=True
        )

    arguments = torch.randn(2, 3), torch.randn(2, 3).requires_grad_()
    report = check_core(program, *arguments, compile=compile, raise_on_difference=False)
    assert not [d for d in report.differences if "other aliasing" not in d.run], str(report)


def test_shape_and_data_without_grad_stay_outside_the_graph():
    """M-16"""
    x = torch.ones(2, 3)
    with torch.no_grad():
        y = grab(lambda x: (x.transpose_(0, 1), x.sub_(4), x + 1)[2], keep_inference_input_mutations=True)[0](x)
    assert x.shape == y.shape == (3, 2)
    assert x.unique().tolist() == [-3]


def uncounted(graph, example_inputs):
    """A compiler whose kernels write in place and tell nobody."""

    def run(args):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        before = [tensor._version for tensor in tensors]
        results = graph.forward(*args)
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(before))
        return results

    run._boxed_call = True
    return run


def behind_autograd(x, y):
    x.data.mul_(2)
    return x + y


def in_two_places(x, y):
    x.mul_(2)
    y.add_(1).mul_(2)
    return x + y


@pytest.mark.parametrize("compiler", [nop, uncounted])
@pytest.mark.parametrize("program", [behind_autograd, in_two_places])
def test_versions_are_eagers_however_a_compiler_counts(program, compiler):
    """Two views of one tensor that lie apart share its counter."""
    compiled = foregrad.aot_function(program, compiler, keep_inference_input_mutations=True)
    eager, whole = plain(4), plain(4)
    for _ in range(2):
        program(eager[:2], eager[2:])
        compiled(whole[:2], whole[2:])
        assert whole._version == eager._version and torch.equal(whole, eager)


def test_a_compiler_that_saves_an_input_for_what_it_has_written_there():
    """As Inductor does, and its writes count nothing: what is saved has the version that the caller sees."""

    def program(x):
        with torch.no_grad():
            x[0] = 0
        return x * x

    def forward(graph, examples):
        run = foregrad.backends.run_graph(graph, examples)

        def compiled(x):
            version = x._version
            product, written = run([x])
            torch._C._autograd._unsafe_set_version_counter((x,), (version,))
            assert torch.equal(written, x)
            return product, x

        return compiled

    compiled = foregrad.aot_function(program, forward, foregrad.backends.run_graph, keep_inference_input_mutations=True)
    x, y = torch.ones(3, 2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    program(x).sum().backward()
    compiled(y).sum().backward()
    assert torch.equal(x, y) and torch.equal(x.grad, y.grad) and x._version == y._version
    result = compiled(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
