"""Sizes that may change."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from foregrad import aot_export_module
from foregrad.errors import ExportError
from foregrad.export import export, load

BATCH = Dim("batch")


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x, target):
        return F.cross_entropy(self.norm(self.fc(x)), target)


def call(size):
    return torch.randn(size, 3), torch.randint(4, (size,))


def test_one_step_for_many_batch_sizes(tmp_path):
    """F-11, X-4"""
    model = Norm()
    exported = export(model, call(5), loss=0, dynamic_shapes={"x": {0: BATCH}, "target": {0: BATCH}})
    exported.save(tmp_path / "p.pt2")
    for program in (exported, load(tmp_path / "p.pt2")):
        for size in (2, 5, 31):
            args = call(size)
            found, gradients = program(*args)
            wanted = F.cross_entropy(
                F.batch_norm(model.fc(args[0]), None, None, model.norm.weight, model.norm.bias, True), args[1]
            )
            expected = torch.autograd.grad(wanted, list(model.parameters()))
            assert torch.allclose(found, wanted)
            for gradient, eager in zip(gradients.values(), expected, strict=True):
                assert torch.allclose(gradient, eager, atol=1e-6)
        loss, _ = program.to_exported_program().module()(*call(11))
        assert loss.shape == ()


def test_calls_outside_of_the_range():
    """F-11"""
    exported = export(Norm(), call(5), dynamic_shapes=({0: Dim("batch", min=3, max=8)}, {0: BATCH}))
    with pytest.raises(ExportError, match="outside of"):
        exported(*call(9))
    with pytest.raises(ExportError, match=r"target\.shape\[0\] is 5, but must be 4"):
        exported(call(4)[0], call(5)[1])


def test_fake_inputs_with_a_shape_environment(tmp_path):
    """F-11"""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(5, 3))

    class Sum(nn.Module):
        def forward(self, x):
            return (x.sum() / x.shape[0],)

    graph, _ = aot_export_module(Sum(), (x,), trace_joint=False)
    assert graph(torch.ones(7, 3))[0].item() == 3
    exported = export(Sum(), (x,))
    exported.save(tmp_path / "p.pt2")
    for program in (exported, load(tmp_path / "p.pt2")):
        assert len(program.ranges) == 2 and program(torch.ones(9, 3))[0].item() == 3


class Body(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, *more, **named):
        return self.body(x, *more, **named)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda x: x + torch.ones(4, 3), "only where batch is 4"),
        (
            lambda x: x * 2 if x.shape[0] > 3 else x,
            r"only where 4 <= batch <= int_oo. Say so: torch.export.Dim\('batch', min=4",
        ),
        (lambda x: x * 2 if x.shape[0] % 2 == 0 else x, "only where"),
    ],
)
def test_programs_that_do_not_hold_for_all_sizes(body, words):
    """F-11"""
    with pytest.raises(ExportError, match=words):
        export(Body(body), (torch.ones(4, 3),), dynamic_shapes={"x": {0: BATCH}})


def test_auto_may_be_fixed():
    """F-11"""
    fixed = export(Body(lambda x: x + torch.ones(4, 3)), (torch.ones(4, 3),), dynamic_shapes={"x": {0: Dim.AUTO}})
    with pytest.raises(ExportError):
        fixed(torch.ones(5, 3))
    free = export(Body(lambda x: x * 2), (torch.ones(4, 3),), dynamic_shapes={"x": {0: Dim.AUTO, 1: Dim.STATIC}})
    assert free(torch.ones(5, 3)).shape == (5, 3)


def test_nested_and_starred_and_computed_dimensions():
    """F-11"""

    def body(x, *more, **named):
        return x.sum() + more[0]["a"].sum() + named["y"].sum()

    args = torch.ones(4, 3), {"a": torch.ones(3, 8)}
    shapes = {"x": (BATCH, None), "more": ({"a": {1: 2 * BATCH}},), "y": None}
    program = export(Body(body), args, {"y": torch.ones(1)}, dynamic_shapes=shapes)
    assert program(torch.ones(5, 3), {"a": torch.ones(3, 10)}, y=torch.ones(1)).item() == 46
    with pytest.raises(ExportError, match="must be 10"):
        program(torch.ones(5, 3), {"a": torch.ones(3, 11)}, y=torch.ones(1))


def test_two_dimensions_of_one_size_stay_two():
    """F-11"""
    shapes = {"x": {0: Dim("a"), 1: Dim("b")}}
    program = export(Body(lambda x: x.t() * 2), (torch.ones(4, 4),), dynamic_shapes=shapes)
    assert program(torch.ones(5, 7)).shape == (7, 5)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"y": {0: BATCH}}, r"names \['y'\]"),
        ({"x": {2: BATCH}}, "does not fit x"),
        ({"x": "batch"}, "does not fit x"),
        ({"x": {0: "batch"}}, "no torch.export.Dim"),
        ({"x": {0: 5}}, "dynamic_shapes says 5"),
        ({"x": {0: BATCH, 1: BATCH}}, "elsewhere"),
        ({"x": {0: Dim("batch", min=9)}}, "outside of"),
        ({"x": {0: 2 * BATCH}}, "earlier place"),
        (({0: BATCH}, None), "2 entries for 1 arguments"),
        (3, "must be a dict"),
    ],
)
def test_bad_input(shapes, words):
    with pytest.raises(ExportError, match=words):
        export(Body(lambda x: x), (torch.ones(4, 3),), dynamic_shapes=shapes)


def test_bad_examples():
    with pytest.raises(ExportError, match="at least 2"):
        export(Body(lambda x: x), (torch.ones(1, 3),), dynamic_shapes={"x": {0: BATCH}})
    with pytest.raises(ExportError, match="gaps"):
        export(Body(lambda x: x), (torch.ones(4, 6)[:, ::2],), dynamic_shapes={"x": {0: BATCH}})
    with pytest.raises(ExportError, match="do not fit forward"):
        export(Norm(), (torch.ones(4, 3),), dynamic_shapes={"x": {0: BATCH}})
