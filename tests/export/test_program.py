"""An `Exported`: running, printing, converting, files."""

import json
import random

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import foregrad
from export.models import build
from foregrad.errors import ExportError, ExportFileError, WeightsError
from foregrad.export import OutputKind, export, load, save

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load, before 2.13


class Model(nn.Module):
    """A written buffer, a constant, a number, a nested argument and a nested result."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.register_buffer("n", torch.zeros(2))
        self.register_buffer("t", torch.ones(2), persistent=False)
        self.table = torch.tensor([10.0, 20.0])

    def forward(self, pair, *, scale=1):
        self.n.add_(1)
        x = pair["a"]
        return {"loss": (x * self.w * self.t * scale).sum(), "more": [(x + self.table).detach(), self.n + 0, None]}


def example():
    return ({"a": torch.tensor([5.0, 7.0])},)


def exported(**more):
    return export(Model(), example(), {"scale": 2}, **more)


def test_it_runs_as_the_module():
    """X-2"""
    model, program = Model(), exported()
    for _ in range(2):
        wanted, found = model(*example(), scale=2), program(*example(), scale=2)
        assert torch.equal(found["loss"], wanted["loss"]) and torch.equal(found["more"][1], wanted["more"][1])
        assert torch.equal(found["more"][0], wanted["more"][0]) and found["more"][2] is None
    assert torch.equal(program.state["n"], model.n)


def test_a_training_step_gives_gradients_by_name():
    """X-4"""
    result, gradients = exported(loss=0)(*example(), scale=2)
    assert result["loss"].item() == 62 and {k: v.tolist() for k, v in gradients.items()} == {"w": [10, 14]}


def test_user_inputs_that_require_grad_and_are_written():
    """X-4, X-2"""

    class Plain(nn.Module):
        def forward(self, x, y):
            y.add_(1)
            return (x * y).sum()

    program = export(Plain(), (torch.ones(2, requires_grad=True), torch.ones(2)), loss=0)
    y = torch.zeros(2)
    loss, gradients = program(torch.ones(2), y)
    assert loss.item() == 2 and gradients["x"].tolist() == [1, 1] and y.tolist() == [1, 1]


def test_the_table():
    """Inputs, outputs, mutations, loss and gradients, then the graph."""
    lines = str(exported(loss=0)).splitlines()
    table = "\n".join(" ".join(line.split()) for line in lines)
    assert lines[0].startswith("exported training step: ")
    for row in (
        "input p_w parameter w float32 (2)",
        "input b_n buffer n float32 (2)",
        "input pair_a user input float32 (2)",
        "input scale user input = 2",
        "output add new value of buffer n float32 (2)",
        "output sum_1 loss float32 ()",
        "gradient of parameter w float32 (2)",
        "output None user output = None",
    ):
        assert row in table
    assert any(line.startswith("def forward(self, p_w, b_n") for line in lines)
    model, args = build("gpt")
    (tied,) = [line for line in str(export(model, args)).splitlines() if "parameter head.weight" in line]
    assert tied.split(maxsplit=4)[-1] == "float64 (17, 16), the same as tokens.weight"


def test_the_table_of_a_large_program_is_not_endless():
    """Rows of one kind and lines of code are cut, and all of it can be had."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(200)), nn.Flatten(0), nn.Linear(6, 1), nn.Flatten(0))
    program = export(model, (torch.ones(2, 3),), loss=0)
    text, whole = str(program), program.show(whole=True)
    lines = text.splitlines()
    assert len(lines) < 500 < 2000 < len(whole.splitlines()) and max(map(len, lines)) < 420
    assert lines[0].endswith("402 parameters of 2,407 elements") and sum("... 382 more" in line for line in lines) == 2
    assert "parameter 0.weight" in text and "gradient of parameter 201.bias" in text and "return (" in text
    rows = [line for line in lines[1:] if line.startswith(("  input", "  output"))]
    assert len({line.index("float32") for line in rows}) == 1
    assert all(f"parameter {n}.weight" in whole for n in range(200))


@pytest.mark.parametrize("loss", [None, 0])
def test_exported_programs_of_torch(loss, tmp_path):
    """X-1, G-7"""
    mine = exported(loss=loss)
    program = mine.to_exported_program()
    torch.export.save(program, tmp_path / "p.pt2")
    again = torch.export.load(tmp_path / "p.pt2")
    for theirs in (program, again):
        found = theirs.module()(*example(), scale=2)
        result = found if loss is None else found[0]
        assert result["loss"].item() == 62 and result["more"][0].tolist() == [15, 27]
        assert theirs.graph_signature.lifted_tensor_constants and "w" in theirs.graph_signature.parameters
        assert list(theirs.graph_signature.non_persistent_buffers) == ["t"]
        backward = theirs.graph_signature.backward_signature
        assert (backward is None) == (loss is None)
        if loss is not None:
            assert found[1]["w"].tolist() == [10, 14]
            assert list(backward.gradients_to_parameters.values()) == ["w"]


def test_buffers_written_by_torchs_own_module_get_no_history():
    """X-2"""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module = export(model, (torch.randn(4, 2),)).to_exported_program().module()
    for _ in range(2):
        module(torch.randn(4, 2))
    assert not any(buffer.requires_grad for buffer in module.buffers())


@pytest.mark.parametrize("loss", [None, 0])
def test_files(loss, tmp_path):
    """The signature, the state and the results are those of the program that was saved."""
    program = exported(loss=loss)
    save(program, tmp_path / "p.pt2")
    again = load(tmp_path / "p.pt2")
    assert [p.name for p in tmp_path.iterdir()] == ["p.pt2"]
    assert [s.kind for s in again.specs.input_specs] == [s.kind for s in program.specs.input_specs]
    assert [s.target for s in again.specs.output_specs] == [s.target for s in program.specs.output_specs]
    found = again(*example(), scale=2)
    assert (found if loss is None else found[0])["loss"].item() == 62
    assert again.state["n"].tolist() == [1, 1] and again.state["t"].tolist() == [1, 1]
    save(again, tmp_path / "q.pt2")
    assert load(tmp_path / "q.pt2").state["n"].tolist() == [1, 1]


def test_files_that_do_not_load(tmp_path):
    """A ForegradError by name."""
    with pytest.raises(ExportFileError, match="does not exist"):
        load(tmp_path / "nothing.pt2")
    (tmp_path / "text.pt2").write_text("not a program")
    with pytest.raises(ExportFileError, match="does not hold an exported program"):
        load(tmp_path / "text.pt2")
    torch.export.save(exported().to_exported_program(), tmp_path / "theirs.pt2")
    with pytest.raises(ExportFileError, match="it has no signature"):
        load(tmp_path / "theirs.pt2")
    whole = tmp_path / "whole.pt2"
    exported().save(whole)
    (tmp_path / "half.pt2").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(ExportFileError, match="does not hold an exported program"):
        load(tmp_path / "half.pt2")
    with pytest.raises(ExportFileError, match="cannot be written"):
        exported().save(tmp_path / "no" / "folder.pt2")


def test_a_signature_that_does_not_fit_its_program(tmp_path):
    """A ForegradError by name."""
    program = exported().to_exported_program()
    for text in ("{", '{"format": 1}', '{"format": 99}'):
        torch.export.save(program, tmp_path / "p.pt2", extra_files={"foregrad_signature.json": text})
        with pytest.raises(ExportFileError, match="does not fit its program"):
            load(tmp_path / "p.pt2")


def test_damaged_files(tmp_path):
    """A file that does not load is an ExportFileError, wherever it was cut or changed."""
    whole, damaged = tmp_path / "whole.pt2", tmp_path / "damaged.pt2"
    exported(loss=0).save(whole)
    data, draw = whole.read_bytes(), random.Random(0)
    refused = 0
    for i in range(40):
        bytes_now = bytearray(data[: draw.randrange(len(data))] if i % 2 else data)
        for _ in range(0 if i % 2 else 20):
            bytes_now[draw.randrange(len(data))] = draw.randrange(256)
        damaged.write_bytes(bytes_now)
        try:
            load(damaged)
        except ExportFileError:
            refused += 1
    assert refused > 30
    damaged.write_bytes(b"")
    for path in (damaged, tmp_path):
        with pytest.raises(ExportFileError):
            load(path)


def _renamed(names):
    return {f"other_{key}": value for key, value in names.items()}


def _swapped(names):
    return dict(zip(names, reversed(names.values()), strict=True))


CHANGES = {
    "no object": lambda stored: [],
    "a parameter": lambda stored: stored["signature"]["parameters"].__setitem__(0, "other"),
    "an input": lambda s: s["signature"].update(inputs_to_parameters=_renamed(s["signature"]["inputs_to_parameters"])),
    "buffers": lambda s: s["signature"].update(inputs_to_buffers=_swapped(s["signature"]["inputs_to_buffers"])),
    "a user input": lambda s: s["signature"]["user_inputs"].__setitem__(0, "other"),
    "a result": lambda s: s["signature"]["user_outputs"].__setitem__(1, "other"),
    "the loss": lambda s: s["signature"]["backward_signature"].update(loss_output="other"),
    "gradients": lambda s: s["signature"]["backward_signature"].update(gradients_to_parameters={}),
    "a tie": lambda s: s["signature"]["ties"].update(n="w"),
    "an unknown tie": lambda s: s["signature"]["ties"].update(n="other"),
    "a tree": lambda s: s.update(out_spec=s["in_spec"]),
    "no tree": lambda s: s.update(in_spec="[1, {}]"),
    "a field": lambda s: s["signature"].update(other=1),
    "a type": lambda s: s["signature"].update(parameters=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_signatures_that_say_otherwise_than_the_program(change, tmp_path):
    """G-1, G-7: both signatures in a file must agree."""
    path, name = tmp_path / "p.pt2", "foregrad_signature.json"
    program = exported(loss=0)
    program.save(path)
    beside = {name: ""}
    torch.export.load(path, extra_files=beside)
    stored = json.loads(beside[name])
    replaced = CHANGES[change](stored)
    text = json.dumps(replaced if replaced == [] else stored)
    torch.export.save(program.to_exported_program(), path, extra_files={name: text})
    with pytest.raises(ExportFileError, match="does not fit its program"):
        load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w": torch.ones(3)}, "shape"),
        ({"w": torch.ones(2, device="meta")}, "cannot be taken from the weights"),
        ({"w": torch.ones(2).to_sparse()}, "w"),
        ({"w": torch.ones(2, dtype=torch.float64)}, "dtype"),
        ({"w": 3}, "must be a tensor"),
        ({"other": torch.ones(2)}, "unknown"),
        ({"w": None}, "must be a tensor"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change, words, tmp_path):
    program = exported()
    program.save(tmp_path / "p.pt2")
    weights = {"n": torch.full((2,), 9.0), "w": torch.ones(2), **change}
    with pytest.raises(WeightsError, match=words):
        load(tmp_path / "p.pt2", weights)
    with pytest.raises(WeightsError, match=words):
        program.load_state_dict(weights)
    assert program.state["n"].tolist() == [0, 0] and program.state["w"].tolist() == [2, 3]
    with pytest.raises(WeightsError, match="missing"):
        program.load_state_dict({"n": torch.ones(2)})
    with pytest.raises(WeightsError, match="dict of tensors"):
        program.load_state_dict([torch.ones(2)])


def test_weights_that_fit(tmp_path):
    exported(loss=0).save(tmp_path / "p.pt2")
    program = load(tmp_path / "p.pt2", {"w": torch.ones(2), "n": torch.zeros(2)})
    assert program(*example(), scale=2)[0]["loss"].item() == 24


def test_tied_weights_must_be_equal():
    """X-1"""
    model, args = build("gpt")
    program = export(model, args, loss=0)
    weights = {name: tensor.clone() for name, tensor in program.state_dict.items()}
    program.load_state_dict(weights)
    weights["head.weight"] += 1
    with pytest.raises(WeightsError, match="are one tensor"):
        program.load_state_dict(weights)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (({"a": torch.ones(3)},), {"scale": 2}, "exported for"),
        (({"a": torch.ones(2, dtype=torch.float64)},), {"scale": 2}, "exported for"),
        (({"a": 3},), {"scale": 2}, "must be a tensor"),
        (example(), {"scale": 3}, "is 2 in the exported program"),
        (example(), {}, "another structure"),
        ((torch.ones(2),), {"scale": 2}, "another structure"),
    ],
)
def test_calls_that_the_graph_was_not_made_for(args, kwargs, words):
    """X-8"""
    with pytest.raises(ExportError, match=words):
        exported()(*args, **kwargs)


def test_kinds_of_written_parameters():
    """X-7, G-6"""

    class Decay(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            with torch.no_grad():
                self.w.mul_(0.5)
            return (self.w * x).sum()

    program = export(Decay(), (torch.ones(2),), loss=0)
    assert program.specs.output_specs[0].kind is OutputKind.PARAMETER_MUTATION
    theirs = program.to_exported_program()
    assert list(theirs.graph_signature.parameters_to_mutate.values()) == ["w"]
    loss, gradients = program(torch.ones(2))
    assert loss.item() == 1 and gradients["w"].tolist() == [1, 1] and program.state["w"].tolist() == [0.5, 0.5]


def test_tokens_leave_and_come_back(tmp_path):
    """E-5"""

    class Loud(nn.Module):
        def forward(self, x):
            torch.ops.aten._print("loud")
            return x * 2

    program = export(Loud(), (torch.ones(2),))
    assert program(torch.ones(2)).tolist() == [2, 2]
    program.save(tmp_path / "p.pt2")
    assert load(tmp_path / "p.pt2")(torch.ones(2)).tolist() == [2, 2]


def test_random_numbers_by_seed():
    """X-7, R-2"""
    with foregrad.config.patch(functionalize_rng_ops=True):
        program = export(nn.Dropout(0.5), (torch.ones(64),))
    module = program.to_exported_program().module()
    first, offsets = module(torch.ones(64), fwd_seed=torch.tensor(3), fwd_base_offset=torch.tensor(0))
    again, _ = program(torch.ones(64), fwd_seed=torch.tensor(3), fwd_base_offset=0)
    other, _ = module(torch.ones(64), fwd_seed=torch.tensor(4), fwd_base_offset=torch.tensor(0))
    assert torch.equal(first, again) and not torch.equal(first, other) and offsets["fwd_offset"] > 0
    with pytest.raises(ExportError, match=r"pass fwd_base_offset=torch\.tensor"):
        program(torch.ones(64), fwd_seed=torch.tensor(3))


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand_like(g)


def draw_in_forward(m, x):
    return (nn.functional.dropout(x * m.w, 0.5) + torch.rand_like(x)).square().sum()


def draw_in_checkpoint(m, x):
    return checkpoint(lambda h: nn.functional.dropout(h.sin(), 0.5), x * m.w, use_reentrant=False).square().sum()


def draw_in_backward(m, x):
    return Noise.apply(nn.functional.dropout(x * m.w, 0.5)).sum()


@pytest.mark.parametrize("body", [draw_in_forward, draw_in_checkpoint, draw_in_backward])
def test_a_training_step_with_functional_random_numbers(body, tmp_path):
    """X-7, R-2: runs are equal before and after a file, and the gradient is that of the draws of the forward."""
    x = torch.rand(32, 2)
    with foregrad.config.patch(functionalize_rng_ops=True):
        program = export(Apply(body), (x,), loss=0)
    roles = ["fwd_seed", "fwd_base_offset", *(["bwd_seed", "bwd_base_offset"] if body is draw_in_backward else [])]
    assert list(program.signature.random_inputs.values()) == roles
    program.save(tmp_path / "p.pt2")
    state = {role: torch.tensor(9 if "seed" in role else 16) for role in roles}
    loss, offsets, gradients = program(x, **state)
    assert offsets["fwd_offset"] > 16 and offsets.keys() == set(program.signature.random_outputs.values())
    for other in (program, load(tmp_path / "p.pt2"), torch.export.load(tmp_path / "p.pt2").module()):
        again = other(x, **state)
        assert torch.equal(again[0], loss) and torch.equal(again[2]["w"], gradients["w"])
        assert {k: int(v) for k, v in again[1].items()} == {k: int(v) for k, v in offsets.items()}
    with torch.no_grad():  # a difference of losses, with the draws held fixed
        program.state["w"][0] += 1e-2
        up = program(x, **state)[0]
        program.state["w"][0] -= 2e-2
        slope = (up - program(x, **state)[0]) / 2e-2
    if body is not draw_in_backward:
        assert torch.allclose(slope, gradients["w"][0], rtol=2e-2)
    else:
        assert 0 < gradients["w"][0] < slope  # a part of it, drawn


class Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b):
        ctx.save_for_backward(b)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        ctx.saved_tensors[0].add_(1)
        return g * 2, None


class Print(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        torch.ops.aten._print("backward")
        return g * 2


class Apply(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("n", torch.zeros(2))

    def forward(self, x):
        return self.body(self, x)


def test_a_backward_that_writes_comes_behind_a_forward_that_does():
    """M-17, X-2"""
    program = export(Apply(lambda m, x: (m.n.add_(10), Write.apply(x * m.w, m.n).sum())[1]), (torch.ones(2),), loss=0)
    loss, gradients = program(torch.ones(2))
    assert loss.item() == 4 and gradients["w"].tolist() == [2, 2] and program.state["n"].tolist() == [11, 11]


def test_effects_of_the_backward_follow_those_of_the_forward(capfd):
    """E-5"""

    def body(m, x):
        torch.ops.aten._print("forward")
        return Print.apply(x * m.w).sum()

    program = export(Apply(body), (torch.ones(2),), loss=0)
    assert len(program.signature.input_tokens) == len(program.signature.output_tokens) == 1
    program(torch.ones(2))
    assert capfd.readouterr().out.split() == ["forward", "backward"]
    only = export(Apply(lambda m, x: Print.apply(x * m.w).sum()), (torch.ones(2),), loss=0)
    assert len(only.signature.input_tokens) == 1
    only(torch.ones(2))
    assert capfd.readouterr().out.split() == ["backward"]


def test_objects_stay_here():
    """X-8"""

    class To(nn.Module):
        def forward(self, x, dtype):
            return x.to(dtype)

    program = export(To(), (torch.ones(2), torch.float64))
    assert program(torch.ones(2), torch.float64).dtype is torch.float64
    with pytest.raises(ExportError, match="cannot store"):
        program.to_exported_program()


class Swap(nn.Module):
    """Two buffers change places, and the old values are returned."""

    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.tensor([1.0, 2.0]))
        self.register_buffer("b", torch.tensor([3.0, 4.0]))

    def forward(self, x):
        old, part = self.a, self.a.view(1, 2)
        self.a, self.b = self.b, self.a
        return old, part, x * self.a


def test_buffers_that_change_places(tmp_path):
    """X-13, X-2"""
    model, program = Swap(), export(Swap(), (torch.ones(2),))
    program.save(tmp_path / "p.pt2")
    module = program.to_exported_program().module()
    for _ in range(2):
        wanted = [t.tolist() for t in model(torch.ones(2))]
        assert [t.tolist() for t in program(torch.ones(2))] == wanted
    assert program.state["a"].tolist() == [1, 2] and program.state["b"].tolist() == [3, 4]
    assert [t.tolist() for t in module(torch.ones(2))] == [[1, 2], [[1, 2]], [3, 4]]
    assert [t.tolist() for t in load(tmp_path / "p.pt2")(torch.ones(2))] == [[1, 2], [[1, 2]], [3, 4]]


class Predicting(torch.nn.Module):
    """Returns, beside the loss, what it was computed from: a prediction, views of it, a parameter, another head."""

    def __init__(self):
        super().__init__()
        self.linear, self.head = torch.nn.Linear(4, 2), torch.nn.Linear(2, 3)

    def forward(self, x, y):
        z = self.linear(x)
        loss = (z - y).square().mean()
        return {"loss": loss, "z": z, "views": (z[0], z.t()), "head": self.head(z), "weight": self.linear.weight}


def test_other_results_that_require_grad_are_returned_as_they_are(tmp_path):
    torch.manual_seed(0)
    model, x, y = Predicting(), torch.randn(3, 4), torch.randn(3, 2)
    save(export(model, (x, y), loss=0), tmp_path / "p.pt2")
    expected = model(x, y)
    expected["loss"].backward()
    for program in (export(model, (x, y), loss=0), load(tmp_path / "p.pt2")):
        result, gradients = program(x, y)
        assert result.keys() == expected.keys()
        found, wanted = pytree.tree_leaves(result), pytree.tree_leaves(expected)
        assert all(map(torch.equal, found, wanted)) and not any(tensor.requires_grad for tensor in found)
        assert gradients.keys() == {"linear.weight", "linear.bias"}  # the head is no part of the loss
        assert all(torch.equal(gradients[name], model.get_parameter(name).grad) for name in gradients)
