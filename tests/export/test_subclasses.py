"""Tensor subclasses in exported programs: the tensors in them are inputs and outputs, named by attributes."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

from export.against_eager import Net
from foregrad import ForegradError
from foregrad.errors import ExportError, WeightsError
from foregrad.export import aot_export_joint_simple, aot_export_module, export, load
from foregrad.subclasses.layout import is_wrapper, leaves_of
from subclass_pairs import Pair, pair
from subclasses.test_quantized import quantized_mlp

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load, before 2.13


def parts(value):
    """A tensor as the nested dict of the tensors in it, as lists."""
    if not is_wrapper(value):
        return value.tolist()
    return {name: parts(getattr(value, name)) for name in value.__tensor_flatten__()[0]}


def as_dict(value):
    """What stands for a wrapper in a call with plain tensors."""
    return (
        {name: as_dict(getattr(value, name)) for name in value.__tensor_flatten__()[0]} if is_wrapper(value) else value
    )


def named(path, value):
    """The tensors in a tensor, by path."""
    if not is_wrapper(value):
        return {path: value.tolist()}
    found = {}
    for name in value.__tensor_flatten__()[0]:
        found |= named(f"{path}.{name}", getattr(value, name))
    return found


def lists(gradients):
    return {name: tensor.tolist() for name, tensor in gradients.items()}


def body(m, x, y):
    """State and arguments that are subclasses, some of them written; a loss, and a nested result."""
    m.n.add_(1)
    y.mul_(2)
    return (x * m.w * m.table + m.n * y * m.u).sum(), {"x": (x + m.temporary).detach(), "n": m.n.detach()}


def model(make=pair):
    net = Net(body, w=nn.Parameter(make(3)), u=nn.Parameter(make(3)), n=make(3), temporary=make(3))
    net.table = make(3)
    return net


def nested(*shape, grad=False):
    return Pair(pair(*shape), pair(*shape), "outer").requires_grad_(grad)


@pytest.mark.parametrize("make", [pair, nested], ids=["pair", "nested"])
def test_a_training_step_is_eagers_before_and_after_a_file(make, tmp_path):
    """X-7, X-4, X-2"""
    eager = model(make)
    x, y = make(3, grad=True), make(3)
    program = export(copy.deepcopy(eager), (x, y), loss=0)
    program.save(tmp_path / "p.pt2")

    wanted = eager(x, y)
    wanted[0].backward()
    gradients = {}
    for name, parameter in eager.named_parameters():
        gradients |= named(name, parameter.grad)
    of_x = list(named("x", x.grad).values())
    state = named("n", eager.n)

    def compare(result, found, written, buffers):
        assert parts_of(result[0]) == parts(wanted[0])
        assert {k: parts_of(v) for k, v in result[1].items()} == {k: parts(v) for k, v in wanted[1].items()}
        found = lists(found)
        assert {k: v for k, v in found.items() if not k.startswith("x_")} == gradients
        assert [v for k, v in found.items() if k.startswith("x_")] == of_x
        assert parts(written) == parts(y)
        assert {name: buffers[name].tolist() for name in state} == state

    given = make(3)
    result, found = program(x, given)
    assert type(result[0]) is Pair and type(result[1]["x"]) is Pair
    compare(result, found, given, program.state)

    again, given = load(tmp_path / "p.pt2"), make(3)
    result, found = again(as_dict(x), as_dict(given))
    compare(result, found, given, again.state)

    theirs, given = torch.export.load(tmp_path / "p.pt2").module(), make(3)
    result, found = theirs(as_dict(x), as_dict(given))
    compare(result, found, given, dict(theirs.named_buffers()))


def parts_of(value):
    return {name: parts_of(part) for name, part in value.items()} if isinstance(value, dict) else parts(value)


def test_names():
    """X-7, G-1, G-3, G-7"""
    program = export(model(), (pair(3, grad=True), pair(3)), loss=0)
    signature, specs = program.signature, program.specs
    assert signature.parameters == specs.parameters == ["w.p", "w.q", "u.p", "u.q"]
    assert signature.buffers == ["n.p", "n.q", "temporary.p", "temporary.q"]
    assert specs.non_persistent_buffers == ["temporary.p", "temporary.q"]
    assert list(signature.inputs_to_parameters) == ["p_w_p", "p_w_q", "p_u_p", "p_u_q"]
    assert signature.user_inputs == ["x_p", "x_q", "args_1_p", "args_1_q"]
    assert list(signature.buffers_to_mutate.values()) == ["n.p", "n.q"]
    assert list(signature.user_inputs_to_mutate.values()) == signature.user_inputs[2:]
    backward = signature.backward_signature
    assert list(backward.gradients_to_parameters.values()) == ["w.p", "w.q", "u.p", "u.q"]
    assert list(backward.gradients_to_user_inputs.values()) == signature.user_inputs[:2]
    assert backward.loss_output == signature.user_outputs[0] and len(signature.user_outputs) == 6
    assert signature.in_spec.num_leaves == 4 + 4 + 4 and signature.out_spec.num_leaves == 6
    assert "parameter w.p" in str(program) and "gradient of parameter u.q" in str(program)


def test_only_what_is_written_is_returned():
    """X-2, X-7"""
    program = export(Net(lambda m, x: (x.p.add_(1), x * 2)[1]), (pair(2),))
    assert list(program.signature.user_inputs_to_mutate.values()) == ["x_p"]
    x = pair(2)
    assert parts(program(x)) == {"p": [4, 6], "q": [4, 8]} and parts(x) == {"p": [2, 3], "q": [2, 4]}


def test_a_write_with_gradients_on():
    """X-2, X-7"""

    def write(m, x):
        y = x * 1
        x.mul_(m.w)
        return (x * y).sum()

    eager, x = Net(write, w=nn.Parameter(pair(2))), pair(2)
    program = export(copy.deepcopy(eager), (pair(2),), loss=0)
    loss = eager(x)
    loss.backward()
    given = pair(2)
    result, gradients = program(given)
    assert parts(result) == parts(loss) and lists(gradients) == named("w", eager.w.grad)
    assert parts(given) == parts(x.detach())


def test_assigned_buffers():
    """X-13, X-7"""

    def assign(new):
        def body(m, x):
            m.n = new(m, x)
            return x * 2

        return Net(body, n=pair(2))

    program = export(assign(lambda m, x: m.n + x), (pair(2),))
    program(pair(2))
    assert program.state["n.p"].tolist() == [2, 4] and program.state["n.q"].tolist() == [4, 8]
    for new in (lambda m, x: x.p * 2, lambda m, x: Pair(x.p * 2, x.q * 2, "other")):
        with pytest.raises(ExportError, match="another kind of tensor into buffer n"):
            export(assign(new), (pair(2),))


def test_tied_parameters(tmp_path):
    """X-1, X-7"""
    eager = Net(lambda m, x: (x * m.w * m.v).sum(), w=nn.Parameter(pair(2)))
    eager.v = eager.w
    program = export(eager, (pair(2),), loss=0)
    assert program.signature.parameters == ["w.p", "w.q", "v.p", "v.q"]
    assert program.signature.ties == {"v.p": "w.p", "v.q": "w.q"}
    _, gradients = program(pair(2))
    eager(pair(2)).backward()
    assert lists(gradients) == named("w", eager.w.grad)
    program.save(tmp_path / "p.pt2")
    again = load(tmp_path / "p.pt2")
    assert again.signature.ties == program.signature.ties and again.state["v.p"] is again.state["w.p"]
    weights = {name: tensor + (name == "v.q") for name, tensor in program.state_dict.items()}
    with pytest.raises(WeightsError, match="are one tensor"):
        again.load_state_dict(weights)


def test_one_tensor_in_several_places_is_an_input_at_each():
    """X-8, X-7"""
    t = torch.ones(2)
    program = export(Net(lambda m, x: x * 2), (Pair(t, t),))
    assert parts(program(pair(2))) == {"p": [2, 4], "q": [4, 8]}
    x = pair(2)
    program = export(Net(lambda m, x, y: x - y), (x, x))
    assert parts(program(pair(2), Pair(torch.zeros(2), torch.ones(2)))) == {"p": [1, 2], "q": [1, 3]}
    net = Net(lambda m, x: x * m.n, n=Pair(t, t))
    assert export(net, (pair(2),)).signature.ties == {"n.q": "n.p"}
    with pytest.raises(ExportError, match="aliased inputs that are mutated"):
        export(Net(lambda m, x, y: (x.add_(1), x - y)[1]), (x, x))


def test_parameters_alone(tmp_path):
    """X-7: a plain argument, and a result that is a subclass."""
    program = export(Net(lambda m, x: x * m.w, w=nn.Parameter(pair(2))), (torch.ones(2),))
    assert parts(program(torch.full((2,), 3.0))) == {"p": [3, 6], "q": [6, 12]}
    program.save(tmp_path / "p.pt2")
    assert lists(load(tmp_path / "p.pt2")(torch.full((2,), 3.0))) == {"p": [3, 6], "q": [6, 12]}


def test_quantized_weights(tmp_path):
    """X-7: parts of several dtypes, and gradients for what is plain only."""
    eager, x = quantized_mlp(), torch.randn(4, 6)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = eager

        def forward(self, x):
            return self.mlp(x).square().mean()

    program = export(Loss(), (x,), loss=0)
    assert program.signature.parameters[:3] == ["mlp.0.weight.data_int8", "mlp.0.weight.scale", "mlp.0.bias"]
    program.save(tmp_path / "p.pt2")
    loss = Loss()(x)
    loss.backward()
    for found, gradients in (program(x), load(tmp_path / "p.pt2")(x)):
        assert torch.allclose(found, loss.detach()) and sorted(gradients) == ["mlp.0.bias", "mlp.2.bias"]
        assert torch.allclose(gradients["mlp.0.bias"], eager[0].bias.grad)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_tensors():
    """X-7: a result of the same lengths goes together with the argument."""

    def ragged():
        return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)

    layer = nn.Linear(3, 3)
    program = export(layer, (ragged(),))
    x = ragged()
    found = program(x)
    assert torch.equal(found.values(), layer(x).values()) and found.shape == x.shape
    assert (found + x).values().shape == (6, 3)


class Scaled(torch.Tensor):
    """Holds a tensor and a factor; ones are made so that the value is one."""

    @staticmethod
    def __new__(cls, data, factor):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data, factor):
        self.inside, self.factor = data, factor

    def __tensor_flatten__(self):
        return ["inside"], self.factor

    @classmethod
    def __tensor_unflatten__(cls, inner, factor, outer_size, outer_stride):
        return cls(inner["inside"], factor)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        aten, first = torch.ops.aten, args[0]
        if func is aten.mul.Tensor:
            a, b = (t if isinstance(t, cls) else cls(t / first.factor, first.factor) for t in args)
            return cls(a.inside * b.inside * first.factor, first.factor)
        if func is aten.ones_like.default:
            return cls(torch.full_like(first.inside, 1 / first.factor), first.factor)
        return cls(func(first.inside, *args[1:], **(kwargs or {})), first.factor)


def test_the_class_of_the_loss_says_what_the_first_gradient_is():
    """X-4, X-7"""
    eager = Net(lambda m, x: (x * m.w).sum(), w=nn.Parameter(Scaled(torch.tensor([3.0, 4.0]), 2.0)))
    x = Scaled(torch.tensor([1.0, 2.0]), 2.0)
    program = export(eager, (x,), loss=0)
    loss, gradients = program(x)
    wanted = eager(x)
    wanted.backward()
    assert loss.inside.item() == wanted.inside.item() == 22
    assert gradients["w.inside"].tolist() == eager.w.grad.inside.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: Pair(torch.ones(2), torch.ones(2), "other"), "parts or context"),
        (lambda: pair(3), "another size"),
        (lambda: torch.ones(2), "another structure"),
        (lambda: nested(2), "parts or context"),
        (lambda: {"p": torch.ones(2)}, "another structure"),
    ],
)
def test_calls_that_the_graph_was_not_made_for(given, words):
    """X-8"""
    program = export(Net(lambda m, x: x * 2), (pair(2),))
    with pytest.raises(ExportError, match=words):
        program(given())


def test_a_loaded_program_takes_plain_tensors(tmp_path):
    """X-7"""
    program = export(Net(lambda m, x: x * 2), (pair(2),))
    assert lists(program({"p": torch.ones(2), "q": torch.zeros(2)})) == {"p": [2, 2], "q": [0, 0]}
    program.save(tmp_path / "p.pt2")
    again = load(tmp_path / "p.pt2")
    with pytest.raises(ExportError, match=r"Pass the tensors in it: {'p': x\.p, 'q': x\.q}"):
        again(pair(2))


def test_weights_of_a_module(tmp_path):
    """A state dict with subclasses in it fits, if they are made of the same parts."""
    program = export(Net(lambda m, x: x * m.w, w=nn.Parameter(pair(2))), (torch.ones(2),))
    program.save(tmp_path / "p.pt2")
    other = Net(None, w=nn.Parameter(Pair(torch.zeros(2), torch.ones(2))))
    again = load(tmp_path / "p.pt2", other.state_dict())
    assert lists(again(torch.ones(2))) == {"p": [0, 0], "q": [1, 1]}
    with pytest.raises(WeightsError, match="shape"):
        program.load_state_dict({"w": Pair(torch.zeros(3), torch.zeros(3))})
    with pytest.raises(WeightsError, match="missing"):
        program.load_state_dict({"w": torch.zeros(2)})
    assert program.state["w.p"].tolist() == [1, 2]


def test_symbolic_sizes_of_fake_parts():
    """F-11, X-7"""
    from foregrad._torch import new_fake_mode, new_shape_env

    mode = new_fake_mode(new_shape_env())
    x = Pair(*(mode.from_tensor(torch.ones(5)) for _ in range(2)))
    graph, _ = aot_export_module(Net(lambda m, x: (x * x.shape[0],)), (x,), trace_joint=False)
    assert [t.tolist() for t in graph(torch.ones(3), torch.zeros(3))] == [[3] * 3, [0] * 3]


def test_refusals():
    """X-7, X-3, X-9"""
    constant = pair(2, grad=True)
    written = pair(2)
    plain = torch.ones(2, requires_grad=True)
    weight = {"w": nn.Parameter(pair(2))}
    with pytest.raises(RuntimeError, match="received a metadata mutation"):
        export(Net(lambda m, x: (x.t_(), x + 1)[1]), (pair(2, 3),))
    with pytest.raises(ForegradError, match="register_buffer"):
        export(Net(lambda m, x: (written.add_(1), x + 1)[1]), (pair(2),))
    with pytest.raises(ForegradError, match="Register it as a parameter"):
        export(Net(lambda m, x: (constant * x * m.w).sum(), **weight), (pair(2),), loss=0)
    with pytest.raises(ExportError, match="put together otherwise"):
        export(Net(lambda m, x: (x * m.w).sum(), **weight), (plain,), loss=0)
    with pytest.raises(ForegradError, match=r"of a Pair.*pre_dispatch"):
        export(Net(lambda m, x: x * m.w, **weight), (pair(2),), pre_dispatch=True)
    with pytest.raises(ExportError, match="cannot be symbols"):
        export(Net(lambda m, x: x * 2), (pair(2),), dynamic_shapes={"x": {0: Dim("batch")}})
    with pytest.raises(RuntimeError, match="traceable tensor subclass"):
        aot_export_joint_simple(lambda x: (x * 2,), (pair(2),), trace_joint=False)
    assert [leaf.tolist() for leaf in leaves_of(written)] == [[1, 2], [2, 4]]
