"""`aot_function`: when it compiles, what the compilers are given, what the caller gets back."""

import functools

import pytest
import torch

import foregrad
from helpers import grab, leaf, nop, plain

aten = torch.ops.aten


def test_nothing_is_recorded_before_the_first_call(capsys):
    """F-1"""

    def program(x):
        print("runs")
        return x.sin()

    compiled, graphs = grab(program)
    assert capsys.readouterr().out == "" and graphs.order == []
    compiled(leaf(2))
    assert capsys.readouterr().out == "runs\n" and graphs.order == ["forward"]


def test_the_program_runs_once_while_it_is_compiled_and_not_again(capsys):
    """F-12"""
    compiled = foregrad.aot_function(lambda x: (print("runs"), x * 2)[1], nop)
    for _ in range(3):
        compiled(leaf(2)).sum().backward()
    assert capsys.readouterr().out == "runs\n"


def test_one_compiler_serves_forward_backward_and_inference():
    """F-1"""
    seen = []

    def compiler(graph, inputs):
        seen.append(foregrad.get_aot_graph_name().split("_")[-2])
        return foregrad.make_boxed_func(graph.forward)

    compiled = foregrad.aot_function(lambda x: x.sin(), compiler)
    compiled(leaf(2)).sum().backward()
    compiled(plain(2))
    assert seen == ["forward", "backward", "inference"]


def test_name_and_docstring_are_kept():
    """F-1"""

    def half(x):
        """Half of it."""
        return x / 2

    compiled = foregrad.aot_function(half, nop)
    assert compiled.__name__ == "half" and compiled.__doc__ == "Half of it." and "half" in repr(compiled)
    assert foregrad.compiled_function is foregrad.aot_function


def test_positional_options_stand_in_the_order_of_the_rule():
    """F-1"""
    called = []

    def partition(graph, inputs, *, num_fwd_outputs):
        called.append("partition")
        return foregrad.default_partition(graph, inputs, num_fwd_outputs=num_fwd_outputs)

    compiled = foregrad.aot_function(lambda x: x.sin(), nop, nop, partition, {}, 0, False, nop)
    compiled(leaf(2)).sum().backward()
    assert called == ["partition"]


def test_the_result_has_the_structure_that_the_function_returned():
    """F-3"""
    out = grab(lambda x: (x + 1, [x + 2], {"k": None, "s": "text"}))[0](plain(1))
    assert type(out) is tuple and type(out[1]) is list and out[2] == {"k": None, "s": "text"}
    assert type(grab(lambda x: [x + 1])[0](plain(1))) is list
    assert type(grab(lambda x: x.shape)[0](plain(2, 3))) is torch.Size


def test_positional_and_keyword_arguments_reach_the_function_as_they_were_given():
    """F-3"""
    compiled, _ = grab(lambda a, b=2, *rest, c=3, **more: a * b + sum(rest) * c + more.get("d", 0))
    assert compiled(plain(1)).item() == 2
    assert compiled(plain(1), 5, plain(1), c=10, d=100).item() == 115
    assert compiled(plain(1), b=4).item() == 4
    assert len(compiled.specializations) == 3


def test_any_python_object_may_be_an_argument():
    """F-4"""

    class Settings:
        factor = 3

    settings = Settings()
    compiled, _ = grab(lambda x, s, dtype: (x * s.factor).to(dtype))
    assert compiled(plain(2), settings, torch.float64).dtype is torch.float64
    assert compiled(plain(2), settings, torch.float64).tolist() == [3, 6]
    assert len(compiled.specializations) == 1


def test_training_needs_something_to_differentiate():
    """F-6"""
    for program, argument, kind in [
        (lambda x: x * 2, leaf(2), "forward"),
        (lambda x: x * 2, plain(2), "inference"),
        (lambda x: x.detach() * 2, leaf(2), "inference"),
        (lambda x: x.argmax(), leaf(2), "inference"),
        (lambda x: x.neg_(), leaf(2) * 1, "forward"),
    ]:
        compiled, graphs = grab(program)
        compiled(argument)
        assert graphs.order == [kind]


def test_without_gradients_the_inference_compiler_runs():
    """F-6"""
    compiled, graphs = grab(lambda x: x * 2)
    with torch.no_grad():
        assert not compiled(leaf(2)).requires_grad
    assert graphs.order == ["inference"]


def test_a_decomposition_replaces_an_operator():
    """F-8"""
    rules = {torch.ops.aten.t.default: lambda x: x.transpose(0, 1)}
    compiled, graphs = grab(lambda x: x.t() + 0, decompositions=rules)
    assert compiled(plain(2, 3)).shape == (3, 2)
    assert graphs.ops("inference")[0] == "transpose.int"


def test_a_decomposition_is_differentiated_as_the_operator_was():
    """F-8: the operator's own derivative is asked for, and its parts are replaced too."""
    rules = {torch.ops.aten.tanh.default: lambda x: 2 * torch.sigmoid(2 * x) - 1}
    compiled, graphs = grab(lambda x: x.tanh(), decompositions=rules)
    x, y = plain(3).double().requires_grad_(), plain(3).double().requires_grad_()
    compiled(x).sum().backward()
    y.tanh().sum().backward()
    assert "tanh.default" not in graphs.ops("forward")
    assert torch.allclose(x.grad, y.grad)


@pytest.mark.parametrize(
    ("change", "twin", "rule"),
    [
        (lambda x, y: x.lerp_(y, 0.5), aten.lerp.Scalar, lambda a, b, w: a + (b - a) * w),
        (lambda x, y: torch.sigmoid(y, out=x), aten.sigmoid.default, lambda a: 1 / (1 + (-a).exp())),
        (lambda x, y: x.t().addcmul_(y, y), aten.addcmul.default, lambda a, b, c: a + b * c),
        (
            lambda x, y: torch._foreach_lerp_([x], [y], 0.5),
            aten._foreach_lerp.Scalar,
            lambda a, b, w: [p + (q - p) * w for p, q in zip(a, b, strict=True)],
        ),
    ],
)
def test_a_decomposition_serves_operators_that_write_too(change, twin, rule):
    """F-8: what is computed by it becomes the value of the written tensor, without a copy."""

    def program(x, y):
        change(x, y)
        return x * 2

    compiled, graphs = grab(program, decompositions={twin: rule})
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    ours = x.clone()
    assert torch.allclose(compiled(ours, y), program(x, y))
    assert torch.allclose(ours, x) and ours._version == x._version
    names = graphs.ops("inference")
    assert not {str(twin).removeprefix("aten."), "clone.default", "copy.default"} & set(names)


def test_a_decomposition_that_returns_its_argument_shares_no_memory():
    """F-8: the written tensor keeps a value of its own."""
    rules = {aten.abs.default: lambda x: x}

    def program(x, y):
        torch.abs(x, out=y)
        x.add_(1)
        return y * 1

    compiled, _ = grab(program, decompositions=rules)
    x, y = plain(2), plain(2)
    assert compiled(x, y).tolist() == y.tolist() == [1, 2]
    assert x.tolist() == [2, 3]


def test_symbolic_sizes_let_one_program_serve_many():
    """F-11"""
    compiled, graphs = grab(lambda x, n: x * n, dynamic=True)
    assert compiled(plain(4), 3).tolist() == [3, 6, 9, 12]
    assert compiled(plain(7), 5).tolist() == [5 * i for i in range(1, 8)]
    assert graphs.order == ["inference"]


def test_symbolic_sizes_in_a_backward():
    """F-11, J-7: sizes that are saved ask for the backward at once."""
    compiled, graphs = grab(lambda x: x.sin().expand(3, x.shape[0]), dynamic=True)
    compiled(leaf(2))
    assert graphs.order == ["forward", "backward"]
    x = leaf(5)
    compiled(x).sum().backward()
    assert len(compiled.specializations) == 1
    assert torch.allclose(x.grad, 3 * x.detach().cos())


def test_a_relation_between_sizes_that_the_program_relied_on_is_guarded():
    """F-11, F-2"""
    compiled, _ = grab(lambda x, y: x + y if x.shape[0] == y.shape[0] else x.sum() + y, dynamic=True)
    assert compiled(plain(3), plain(4)).tolist() == [7, 8, 9, 10]
    assert compiled(plain(5), plain(6)).tolist() == [16, 17, 18, 19, 20, 21]
    assert compiled(plain(2), plain(2)).tolist() == [2, 4]


def test_leading_inputs_keep_fixed_shapes():
    """F-11"""
    compiled, graphs = grab(lambda w, x: x * w.sum(), dynamic=True, num_params_buffers=1)
    compiled(plain(2), plain(3))
    weight, data = (value.shape[0] for value in graphs.examples["inference"])
    assert type(weight) is int and isinstance(data, torch.SymInt)
    with foregrad.config.patch(static_weight_shapes=False):
        compiled, graphs = grab(lambda w, x: x * w.sum(), dynamic=True, num_params_buffers=1)
        compiled(plain(2), plain(3))
    assert all(isinstance(value.shape[0], torch.SymInt) for value in graphs.examples["inference"])


def test_compiling_is_not_visible_in_results():
    """F-12"""

    def program(x):
        x.add_(1)
        return x + torch.rand(2)

    x = torch.zeros(2)
    torch.manual_seed(0)
    y = grab(program)[0](x)
    torch.manual_seed(0)
    assert x.tolist() == [1, 1] and torch.equal(y, 1 + torch.rand(2))


def test_saved_tensor_hooks_of_the_caller_do_not_see_the_recording():
    """F-12, J-6"""
    packed, compiled = [], grab(lambda x: x.sin() * x)[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(type(t)), t)[1], lambda t: t):
        compiled(leaf(2)).sum().backward()
    assert packed and set(packed) == {torch.Tensor}


def test_inside_another_recording_the_original_function_is_inlined():
    """Z"""
    inner = foregrad.aot_function(lambda x: x.sin() * 2, nop)
    compiled, graphs = grab(lambda x: inner(x) + 1)
    x = leaf(3)
    compiled(x).sum().backward()
    assert graphs.ops("forward")[:2] == ["sin.default", "mul.Tensor"] and inner.specializations == []
    assert torch.allclose(x.grad, 2 * x.detach().cos())


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "fake"])
def test_inside_a_transform_the_original_function_runs(transform):
    """Z"""
    compiled = foregrad.aot_function(lambda x: (x.sin() * 2).sum(-1), nop)
    x = plain(2, 3)
    if transform == "vmap":
        assert torch.equal(torch.func.vmap(compiled)(x), (x.sin() * 2).sum(-1))
    elif transform == "grad":
        assert torch.allclose(torch.func.grad(compiled)(x[0]), 2 * x[0].cos())
    elif transform == "jvp":
        assert torch.allclose(torch.func.jvp(compiled, (x[0],), (torch.ones(3),))[1], (2 * x[0].cos()).sum())
    else:
        with torch._subclasses.FakeTensorMode() as mode:
            assert compiled(mode.from_tensor(x)).shape == (2,)
    assert compiled.specializations == []


def test_capture_gives_graph_and_facts_without_compiling():
    """V-9"""
    captured = foregrad.capture(lambda x, k: x.sin() * k, leaf(2), 3)
    names = [n.name for n in captured.joint_graph.graph.find_nodes(op="placeholder")]
    assert names == ["primals_1", "primals_2", "tangents_1"]
    assert [len(part) for part in captured.example_inputs] == [2, 1]
    assert "training program" in str(captured) and "args[0]: float32, (2,), requires grad" in str(captured)


def test_a_partial_and_a_method_are_compiled_as_the_functions_they_are():
    """F-1"""

    class Scale:
        def __init__(self):
            self.factor = leaf(2)

        def apply(self, x):
            return x * self.factor

    scale = Scale()
    compiled, _ = grab(scale.apply)
    compiled(torch.ones(2)).sum().backward()
    assert scale.factor.grad.tolist() == [1, 1]
    assert grab(functools.partial(torch.mul, plain(2)))[0](plain(2)).tolist() == [1, 4]


def test_the_generated_source_can_be_read():
    """What runs is shown: guards, the graph, the return."""
    compiled, _ = grab(lambda x: x * 2)
    compiled(plain(2))
    (only,) = compiled.specializations
    assert "def call(args, kwargs):" in only.source and "inference_graph([args_0])" in only.source
    assert "inference program" in str(only) and only.backward_graph is None


GLOBAL = torch.ones(3)


def found_tensors():
    closure, differentiable = plain(3), leaf(3)
    box, computed = [plain(2)], leaf(3) * 2
    return {
        "closure": (lambda x: (x * 2, closure), closure),
        "differentiable": (lambda x: (x * 2, differentiable), differentiable),
        "global": (lambda x: (x * 2, GLOBAL), GLOBAL),
        "list": (lambda x: (x * 2, box[0]), box[0]),
        "with a history": (lambda x: (x * 2, computed), computed),
        "default": (lambda x, found=closure: (x * 2, found), closure),
        "partial": (functools.partial(lambda found, x: (x * 2, found), closure), closure),
    }


@pytest.mark.parametrize("kind", found_tensors())
@pytest.mark.parametrize("example", [plain, leaf])
def test_a_tensor_that_is_found_and_returned_is_that_tensor(kind, example):
    program, found = found_tensors()[kind]
    compiled, _ = grab(program)
    for _ in range(2):
        assert compiled(example(2))[1] is found
    assert len(compiled.specializations) == 1
