"""`aot_export_module`: inputs, outputs, gradients, and what is refused."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import foregrad
from foregrad import ForegradError, aot_export_module
from foregrad.errors import ExportError, StateChangeError, UnknownOutputError
from foregrad.export import GraphSignature


class Net(nn.Module):
    """A parameter `w`, a buffer `n`, and a body."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.register_buffer("n", torch.zeros(2))

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


def export(body, *args, loss=None, **more):
    module = body if isinstance(body, nn.Module) else Net(body)
    joint = {"trace_joint": loss is not None, "output_loss_index": loss}
    return aot_export_module(module, args, **{**joint, **more})


def names(graph):
    return [n.name for n in graph.graph.find_nodes(op="placeholder")], [
        getattr(o, "name", o) for o in graph.graph.output_node().args[0]
    ]


def test_inputs_are_state_then_arguments_then_keywords():
    """X-1, G-1"""

    def body(m, x, *, k):
        return ((x * m.w + m.n + k),)

    graph, signature = export(body, torch.ones(2), kwargs={"k": torch.ones(2)})
    inputs, outputs = names(graph)
    assert signature.inputs_to_parameters == {inputs[0]: "w"} and signature.inputs_to_buffers == {inputs[1]: "n"}
    assert signature.user_inputs == inputs[2:] == ["args_0", "k"] and signature.user_outputs == outputs
    assert signature.in_spec.num_leaves == 4 and signature.out_spec.num_leaves == 1
    assert graph(torch.ones(2), torch.zeros(2), torch.ones(2), torch.full((2,), 5.0))[0].tolist() == [6, 6]


def test_placeholders_have_readable_names():
    """X-1"""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)
            self.register_buffer("mul", torch.ones(1))

        def forward(self, mul, pair):
            return (self.fc(mul) * self.mul + pair["a"][0],)

    graph, _ = export(Model(), torch.ones(1, 2), {"a": [torch.ones(1)]})
    assert names(graph)[0] == ["p_fc_weight", "p_fc_bias", "b_mul", "mul_1", "pair_a_0"]


def test_writes_become_outputs():
    """X-2"""
    graph, signature = export(lambda m, x: (m.n.add_(1), x.mul_(3), (x + 0,))[2], torch.ones(2))
    x, n = torch.ones(2), torch.zeros(2)
    found = graph(torch.ones(2), n, x)
    assert [t.tolist() for t in found] == [[1, 1], [3, 3], [3, 3]] and x.tolist() == [1, 1] and n.tolist() == [0, 0]
    inputs, outputs = names(graph)
    assert signature.buffers_to_mutate == {outputs[0]: "n"}
    assert signature.user_inputs_to_mutate == {outputs[1]: inputs[2]}


def test_inference_has_no_backward_even_where_the_program_switches_gradients_on():
    """X-3"""

    def body(m, x):
        with torch.enable_grad():
            return (x * m.w,)

    graph, signature = export(body, torch.ones(2))
    assert signature.backward_signature is None and len(names(graph)[1]) == 1
    with pytest.raises(RuntimeError, match=r"pre_dispatch is not supported when trace_joint is True\."):
        export(body, torch.ones(2), loss=0, pre_dispatch=True)


def test_gradients_of_the_loss_follow_the_outputs():
    """X-4, G-3"""

    def body(m, x, y):
        return x.detach() + 1, (x * x * m.w).sum()

    x = leaf(1.0, 2.0)
    graph, signature = export(body, x, torch.ones(2), loss=1)
    _extra, loss, dw, dx = graph(torch.ones(2), torch.zeros(2), x.detach(), torch.ones(2))
    assert loss.item() == 5 and dw.tolist() == [1, 4] and dx.tolist() == [2, 4]
    inputs, outputs = names(graph)
    backward = signature.backward_signature
    assert backward.loss_output == outputs[1] and backward.gradients_to_parameters == {outputs[2]: "w"}
    assert backward.gradients_to_user_inputs == {outputs[3]: inputs[2]}


def test_the_loss_may_have_any_shape_of_one_element_and_be_an_input():
    """X-4"""
    graph, _ = export(lambda m, x: ((x * m.w).sum().view(1, 1),), torch.ones(2), loss=0)
    loss, gradient = graph(torch.ones(2), torch.zeros(2), torch.ones(2))
    assert loss.shape == (1, 1) and gradient.tolist() == [1, 1]
    graph, signature = export(lambda m, x: (x,), leaf(3.0), loss=0)
    loss, gradient = graph(torch.ones(2), torch.zeros(2), torch.tensor([3.0]))
    assert (
        loss.tolist() == [3] and gradient.tolist() == [1] and not signature.backward_signature.gradients_to_parameters
    )


def test_loss_name_behind_written_inputs():
    """G-11"""
    graph, signature = export(lambda m, x: (m.n.add_(1), ((x * m.w).sum(),))[1], torch.ones(2), loss=0)
    assert signature.backward_signature.loss_output == signature.user_outputs[0] == names(graph)[1][1]


@pytest.mark.parametrize(
    ("body", "loss", "words"),
    [
        (lambda m, x: ((x * m.w).sum(), x * m.w), 0, "that was not the scalar loss"),
        (lambda m, x: (x.sum(),), 0, "was marked as the loss, but it does not require gradients"),
        (lambda m, x: (3,), 0, "was marked as the loss, but it does not require gradients"),
        (lambda m, x: (x * m.w,), 0, "to be a scalar, but it has shape"),
        (lambda m, x: ((x * m.w).sum() * 1j,), 0, "complex"),
        (lambda m, x: ((x * m.w).sum(),), 7, "returns 1 values"),
        (lambda m, x: (x * m.w).sum(), 0, "Graph output must be a"),
        (lambda m, x: {"a": (x * m.w).sum()}, 0, "Expected forward output to be either a tensor or a list/tuple"),
    ],
)
def test_conditions_on_the_loss(body, loss, words):
    """X-5"""
    with pytest.raises(RuntimeError, match=words) as raised:
        export(body, torch.ones(2), loss=loss)
    assert isinstance(raised.value, ForegradError)


def test_the_loss_must_be_named():
    """X-5"""
    with pytest.raises(RuntimeError, match="If trace_joint=True"):
        export(lambda m, x: (x,), torch.ones(2), trace_joint=True)


def test_a_parameter_without_gradient_is_left_out():
    """X-6"""
    graph, signature = export(lambda m, x: (x.sum(),), leaf(1.0), loss=0)
    assert signature.backward_signature.gradients_to_parameters == {} and len(names(graph)[1]) == 2


def test_written_parameters_are_outputs():
    """X-7, G-1"""

    def body(m, x):
        with torch.no_grad():
            m.w.neg_()
        return ((x * m.w).sum(),)

    graph, signature = export(body, torch.ones(2), loss=0)
    new, loss, gradient = graph(torch.ones(2), torch.zeros(2), torch.full((2,), 2.0))
    assert new.tolist() == [-1, -1] and loss.item() == -4 and gradient.tolist() == [2, 2]
    assert signature.parameters_to_mutate == {names(graph)[1][0]: "w"}


def test_refusals():
    """X-7, D-5, B-10"""
    with pytest.raises(RuntimeError, match="Found an input that received a metadata mutation"):
        export(lambda m, x: (x.t_(), (x + 1,))[1], torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="Found an input that received a metadata mutation"):
        export(lambda m, x: (x.resize_(9), (x + 1,))[1], torch.ones(2, 3))
    t = torch.ones(3)
    with pytest.raises(
        RuntimeError, match="Encountered duplicated inputs that are mutated in the graph you are trying"
    ):
        export(lambda m, a, b: (a.neg_(), (a - b,))[1], t, t)
    with pytest.raises(RuntimeError, match="Encountered aliased inputs that are mutated in the graph you are trying"):
        export(lambda m, a, b: (a.neg_(), (a[0] - b,))[1], t, t[1:])


def test_state_that_has_no_name_is_refused():
    """X-7"""
    cache, weight = torch.zeros(2), leaf(1.0, 2.0)
    with pytest.raises(ForegradError, match="register_buffer"):
        export(lambda m, x: (cache.add_(x), (x + 1,))[1], torch.ones(2))
    with pytest.raises(ForegradError, match="Register it as a parameter"):
        export(lambda m, x: ((x * weight * m.w).sum(),), torch.ones(2), loss=0)
    with pytest.raises(ForegradError, match="gradient"):
        export(lambda m, x: (setattr(m.w, "grad", x), (x + 1,))[1], torch.ones(2))
    module = Net(lambda m, x: ((x * m.w).sum(),))
    module.w.register_hook(lambda g: g * 2)
    with pytest.raises(ForegradError, match="hooks"):
        export(module, torch.ones(2), loss=0)


def test_tensors_that_the_program_finds_are_constants():
    """F-14"""
    table = torch.tensor([10.0, 20.0])
    graph, _signature = export(lambda m, x: (x + table,), torch.ones(2))
    assert graph(torch.ones(2), torch.zeros(2), torch.ones(2))[0].tolist() == [11, 21]
    assert len(names(graph)[0]) == 3


def test_what_is_allowed():
    """X-8"""
    t = torch.ones(2)
    graph, signature = export(lambda m, a, b, k: (a + b * k, a.view(1, 2), a, None, k), t, t, 3)
    found = graph(torch.ones(2), torch.zeros(2), t, torch.full((2,), 5.0), 99)
    assert found[0].tolist() == [16, 16] and found[2] is t and found[3] is None and found[4] == 3
    assert len(signature.user_inputs) == 3 and signature.user_outputs[3:] == [None, None]


def test_duplicates_of_parameters_are_inputs_of_their_own():
    """X-8, D-1"""
    module = Net(lambda m, x: ((m.w * x).sum(),))
    graph, _signature = export(module, module.w, loss=0)
    _, dw, dx = graph(torch.ones(2), torch.zeros(2), torch.full((2,), 7.0))
    assert dw.tolist() == [7, 7] and dx.tolist() == [1, 1]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return (self.b(self.a(x).sin()).sum(),)


def test_tied_parameters():
    """X-1"""
    module, x = Tied(), torch.randn(3, 2)
    graph, signature = export(module, x, loss=0)
    assert signature.parameters == ["a.weight", "b.weight"] and signature.ties == {"b.weight": "a.weight"}
    weight = module.a.weight.detach()
    _loss, *gradients = graph(weight, weight, x)
    module(x)[0].backward()
    assert list(signature.backward_signature.gradients_to_parameters.values()) == ["a.weight"]
    assert torch.allclose(sum(gradients), module.a.weight.grad)


def test_tied_buffers_are_written_once():
    """X-1, X-2, D-2"""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, affine=False)
            self.b.running_mean = self.a.running_mean

        def forward(self, x):
            self.a.running_mean.add_(1)
            return (x * self.b.running_mean,)

    graph, signature = export(Two(), torch.ones(2))
    assert list(signature.buffers_to_mutate.values()) == ["a.running_mean"]
    assert signature.ties == {"b.running_mean": "a.running_mean"} and len(names(graph)[0]) == 7


def test_equal_gradients_and_equal_updates_keep_their_names():
    """G-2, G-3"""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.u, self.v = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
            self.register_buffer("p", torch.zeros(2))
            self.register_buffer("q", torch.zeros(2))

        def forward(self, x):
            self.p = self.q = x * 2
            return ((self.u + self.v).sum(),)

    graph, signature = export(Two(), torch.ones(2), loss=0)
    assert sorted(signature.backward_signature.gradients_to_parameters.values()) == ["u", "v"]
    assert sorted(signature.buffers_to_mutate.values()) == ["p", "q"]
    found = graph(*[torch.ones(2)] * 4, torch.ones(2))
    assert [t.tolist() for t in found] == [[2, 2], [2, 2], 4, [1, 1], [1, 1]]


class Wrap(nn.Module):
    def __init__(self, root):
        super().__init__()
        self._export_root = root

    def forward(self, x):
        return (self._export_root(x),)


def test_assigned_attributes_are_refused_and_put_back():
    """X-12"""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache, self.k = torch.zeros(2), 0

        def forward(self, x):
            self.cache, self.k = x + 1, 5
            return x * 2

    root = Root()
    with pytest.raises(ValueError, match=r"The tensor attribute self\.cache was assigned during export"):
        export(Wrap(root), torch.ones(2))
    assert root.k == 0 and root.cache.tolist() == [0, 0]


class Holder(nn.Module):
    """Tensors in attributes, also inside of containers."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.cache, self.d, self.items = torch.zeros(2), {"a": [torch.zeros(2)]}, [torch.zeros(2), 1]
        self.pair, self.k = (torch.zeros(2),), 0

    def forward(self, x):
        self.k = 5
        self.body(self, x)
        return x * 2


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (lambda m, x: m.d["a"].__setitem__(0, x + 1), r"attribute self\.d\['a'\]\[0\] was"),
        (lambda m, x: (setattr(m, "cache", x), m.d["a"].__setitem__(0, x)), r"self\.cache, self\.d\['a'\]\[0\] were"),
        (lambda m, x: m.d.__setitem__("b", x + 1), r"self\.d\['b'\] was"),
        (lambda m, x: m.items.append(x + 1), r"self\.items\[2\] was"),
        (lambda m, x: setattr(m, "items", [x + 1]), r"self\.items\[0\] was"),
        (lambda m, x: setattr(m, "pair", (x + 1,)), r"self\.pair\[0\] was"),
        (lambda m, x: setattr(m, "fresh", x + 1), r"self\.fresh was"),
    ],
)
def test_tensors_put_into_containers_are_refused_and_put_back(body, named):
    """X-12"""
    root = Holder(body)
    before = repr(vars(root))
    with pytest.raises(ValueError, match=named) as raised:
        export(Wrap(root), torch.ones(2))
    assert isinstance(raised.value, ForegradError) and "during export" in str(raised.value)
    assert repr(vars(root)) == before


def test_assigned_buffers_are_written_buffers():
    """X-13"""

    class Acc(nn.Module):
        def __init__(self, grow):
            super().__init__()
            self.grow = grow
            self.register_buffer("n", torch.zeros(2))

        def forward(self, x):
            self.n = torch.cat([self.n, x]) if self.grow else self.n.add_(1) + x
            return x * 2

    graph, signature = export(Wrap(Acc(False)), torch.ones(2))
    assert list(signature.buffers_to_mutate.values()) == ["_export_root.n"]
    assert [t.tolist() for t in graph(torch.zeros(2), torch.ones(2))] == [[2, 2], [2, 2]]
    with pytest.raises(ForegradError, match="must be like the old one"):
        export(Wrap(Acc(True)), torch.ones(2))


def test_tokens():
    """E-5"""

    def body(m, x):
        torch.ops.aten._print("a")
        return ((x * m.w).sum(),)

    graph, signature = export(body, torch.ones(2), loss=0)
    inputs, outputs = names(graph)
    assert signature.input_tokens == inputs[:1] and signature.output_tokens == outputs[:1]
    assert signature.inputs_to_parameters == {inputs[1]: "w"} and signature.user_outputs == [outputs[1]]


def test_functional_random_numbers():
    """X-7, R-2"""
    with foregrad.config.patch(functionalize_rng_ops=True):
        graph, signature = export(lambda m, x: (nn.functional.dropout(x * m.w, 0.5).sum(),), torch.ones(64, 2), loss=0)
    assert sorted(signature.random_inputs.values()) == ["fwd_base_offset", "fwd_seed"]  # the backward draws nothing
    assert list(signature.random_outputs.values()) == ["fwd_offset"]
    random = [torch.tensor(5) if "seed" in role else torch.tensor(0) for role in signature.random_inputs.values()]
    first, again = (graph(torch.ones(2), torch.zeros(2), torch.ones(64, 2), *random) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert first[0] == first[-1].sum() != 0


def test_bad_arguments():
    with pytest.raises(ForegradError, match=r"torch.nn.Module can be exported"):
        aot_export_module(lambda x: x, (torch.ones(2),), trace_joint=False)
    with pytest.raises(ForegradError, match="tuple or a list"):
        aot_export_module(Net(lambda m, x: (x,)), torch.ones(2), trace_joint=False)
    with pytest.raises(ForegradError, match="has no shape yet"):
        aot_export_module(nn.LazyLinear(3), (torch.ones(1, 2),), trace_joint=False)
    with pytest.raises(ForegradError, match="must be a dict"):
        aot_export_module(Net(lambda m, x: (x,)), (torch.ones(2),), trace_joint=False, kwargs=[1])


def test_signature_from_positions():
    """G-2"""
    capture = foregrad.capture(
        lambda w, n, x: (n.add_(1), x.mul_(2), (x * w).sum())[2], *(torch.ones(2) for _ in range(3))
    )
    from foregrad.compat import describe
    from foregrad.export.api import export_config

    facts = describe(capture.joint, export_config(True), None, deterministic=False)
    given = {
        "in_spec": None,
        "out_spec": None,
        "graph_input_names": ["a", "b", "c"],
        "graph_output_names": ["n2", "x2", "y"],
        "view_mutation_metadata": facts,
        "named_parameters": ["w"],
        "named_buffers": ["n"],
        "num_user_inputs": 1,
        "num_user_outputs": 1,
        "loss_index": None,
        "backward_signature": None,
    }
    signature = GraphSignature.from_tracing_metadata(**given)
    assert signature.buffers_to_mutate == {"n2": "n"} and signature.user_inputs_to_mutate == {"x2": "c"}
    assert signature.user_outputs == ["y"] and signature.inputs_to_parameters == {"a": "w"}
    for change in (
        {"graph_input_names": ["a", "b", "c", "d"]},
        {"graph_output_names": ["n2", "x2"]},
        {"graph_output_names": ["n2", "n2", "y"]},
    ):
        with pytest.raises(AssertionError):
            GraphSignature.from_tracing_metadata(**{**given, **change})


class Pair:
    """Objects that a graph takes and returns only if pytree knows their class."""

    def __init__(self, x, y):
        self.x, self.y = x, y


class TakesPair(nn.Module):
    def forward(self, pair):
        return (pair.x * pair.y,)


class ReturnsPair(nn.Module):
    def forward(self, x):
        return (Pair(x, x * 2),)


class Appends(nn.Module):
    def forward(self, x, items):
        items.append(x)
        return (x * 2,)


def test_objects_that_hold_tensors_are_refused_by_name_until_pytree_knows_their_class():
    """X-11"""
    pair = Pair(torch.ones(2), torch.ones(2))
    with pytest.raises(ExportError, match=r"args\[0\] is a Pair that holds tensors.*register_pytree_node"):
        foregrad.aot_export_module(TakesPair(), (pair,), trace_joint=False)
    with pytest.raises(UnknownOutputError, match=r"at output\[0\].*register_pytree_node"):
        foregrad.aot_export_module(ReturnsPair(), (torch.ones(2),), trace_joint=False)
    with pytest.raises(StateChangeError, match=r"args\[1\]"):
        foregrad.aot_export_module(Appends(), (torch.ones(2), []), trace_joint=False)
    pytree.register_pytree_node(Pair, lambda p: ([p.x, p.y], None), lambda items, _: Pair(*items))
    try:
        graph, _ = foregrad.aot_export_module(TakesPair(), (pair,), trace_joint=False)
        assert torch.equal(graph(torch.full((2,), 3.0), torch.ones(2))[0], torch.full((2,), 3.0))
        foregrad.aot_export_module(ReturnsPair(), (torch.ones(2),), trace_joint=False)
    finally:
        pytree._deregister_pytree_node(Pair)
