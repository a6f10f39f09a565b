"""Modules that are hard to export, run beside eager: as exported, after a file, and by torch's own runner."""

from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

from export.against_eager import Net, compare, compare_above_autograd
from foregrad import ForegradError
from foregrad.errors import ExportError
from foregrad.export import export, load

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load, before 2.13


def param(*values, **options):
    return nn.Parameter(torch.tensor(values, **options))


def vector(grad=False):
    return torch.tensor([1.0, 2.0], requires_grad=grad)


def net(body, **state):
    return Net(body, **({"w": param(2.0, 3.0)} | state))


def write_everything(m, x):
    with torch.no_grad():
        m.w.mul_(0.5)
    m.n.add_(1)
    x.add_(1)
    return (x * m.w * m.n).sum(), m.n.clone(), m.n.view(2, 1), x


def write_a_leaf(m, x):
    with torch.no_grad():
        x.add_(1)
    return (x * m.w).sum()


def write_with_grad(m, x):
    x.mul_(m.w)
    return (x * x).sum()


def moving_average(m, x):
    with torch.no_grad():
        m.n.lerp_(m.w, 0.1)
        m.step += 1
    return ((m.w - m.n) * x * torch.where(m.step > 1, 2.0, 1.0)).sum()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return g * 7 * ctx.saved_tensors[0]


def every_draw(m, x):
    h = x * m.w * torch.randn_like(x) + torch.rand(2) + torch.randint(3, (2,)) + torch.empty(2).uniform_(1, 2)
    return (F.dropout(h, 0.5) + checkpoint(lambda t: F.dropout(t.sin(), 0.4), h, use_reentrant=False)).sum()


def constants(m, x):
    mask = torch.tensor([True, False])
    return (x * m.w * torch.tensor([1.0, 2.0])).masked_fill(mask, float("-inf")).softmax(0).max() + torch.arange(
        2
    ).sum()


Point = namedtuple("Point", "a b")

STEPS = {
    "unused parameter": (net(lambda m, x: (x * m.w).sum(), u=param(1.0)), (vector(),)),
    "unused input": (net(lambda m, x, y: (x * m.w).sum()), (vector(), vector(True))),
    "aliases": (net(lambda m, x: ((x * m.w).sum(), x, x.view(2, 1), m.n, m.w.detach()), n=vector()), (vector(),)),
    "writes": (
        net(lambda m, x: [t.detach() if i else t for i, t in enumerate(write_everything(m, x))], n=vector()),
        (vector(),),
    ),
    "a written leaf": (net(write_a_leaf), (vector(True),)),
    "an input written with gradients on": (net(write_with_grad), (vector(),)),
    "a moving average": (net(moving_average, n=torch.zeros(2), step=torch.tensor(0)), (vector(),)),
    "integers": (net(lambda m, x, y: (m.w[x] * y).sum()), (torch.tensor([0, 1, 1]), 2.5)),
    "booleans": (net(lambda m, x: torch.where(x, m.w, -m.w).sum()), (torch.tensor([True, False]),)),
    "integer buffers": (
        net(lambda m, x: ((m.w[m.i] * x).masked_fill(m.b, 0.0).sum(), m.i + 1), i=torch.tensor([1, 0]), b=vector() > 1),
        (vector(),),
    ),
    "constants": (net(constants), (vector(),)),
    "no elements": (net(lambda m, x: ((x * m.w).sum() + m.w.sum(), x * 2)), (torch.ones(0, 2),)),
    "bfloat16": (
        Net(lambda m, x: F.layer_norm(x * m.w, (2,)).float().sum(), w=param(1.0, 3.0, dtype=torch.bfloat16)),
        (vector().bfloat16(),),
    ),
    "complex": (Net(lambda m, x: (x.conj() * m.w).abs().square().sum(), w=param(1 + 2j, 3.0)), (vector() * 1j,)),
    "a transposed parameter": (
        Net(lambda m, x: (x * m.w).t().reshape(-1).square().sum(), w=nn.Parameter(torch.ones(3, 4).t())),
        (torch.rand(3, 4).t(),),
    ),
    "a frozen parameter": (net(lambda m, x: (x * m.w * m.u).sum(), u=nn.Parameter(vector(), False)), (vector(),)),
    "the loss twice": (net(lambda m, x: [(x * m.w).sum()] * 2), (vector(),)),
    "gradients inside": (
        net(lambda m, x: (lambda h: torch.autograd.grad(h.pow(3).sum(), h, create_graph=True)[0].sum())(x * m.w)),
        (vector(),),
    ),
    "a custom function": (net(lambda m, x: Cube.apply(x * m.w).sum()), (vector(),)),
    "draws": (net(every_draw), (vector(),)),
    "a list": (net(lambda m, x: sum(t.sum() for t in x) * m.w.sum()), ([vector(), vector(True)],)),
    "an ordered dict": (
        net(lambda m, x: OrderedDict(loss=(x["q"] * m.w).sum(), z=x["p"])),
        (OrderedDict(q=vector(), p=vector()),),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_training_steps(name, tmp_path):
    """X-1, X-2, X-4, X-8"""
    module, args = STEPS[name]
    compare(module, args, tmp_path / "p.pt2")


def test_forward_alone(tmp_path):
    """X-2, X-3, X-8"""
    aliases = net(lambda m, x: (x, x.view(2, 1), m.w, m.n, m.w[:1], x[0]), n=torch.ones(2))
    compare(aliases, (vector(),), tmp_path / "p.pt2", loss=None)
    compare(net(write_everything, n=torch.ones(2)), (vector(),), tmp_path / "p.pt2", loss=None)


class Named(nn.Module):
    """Nested, starred, keyword-only and unnamed arguments; numbers, flags and None."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.scales = nn.ParameterList([param(1.0, 2.0)])
        self.table = nn.ParameterDict({"a": param(1.0, 1.0)})
        self.register_buffer("input", torch.ones(2))
        self.register_buffer("nothing", None)

    def forward(self, d, *rest, flag, input=None, scale=2.0, **more):
        h = self.fc(d["a"]) * d["b"][0] * scale * self.scales[0] * self.table["a"] * self.input
        return None, {"loss": (h + rest[0] + more["extra"]).sum(), "more": [d["b"][1].detach(), flag, None, 3, 1.5]}


def test_names_and_structures(tmp_path):
    """X-1, X-8"""
    args = ({"a": torch.ones(3, 2), "b": [torch.tensor(2.0), torch.ones(1)]}, vector())
    compare(Named(), args, tmp_path / "p.pt2", loss=1, kwargs={"extra": vector(True), "flag": True, "input": None})


def test_keys_in_another_order():
    """X-1"""
    program = export(Net(lambda m, x, y: x["a"] - x["b"] * y), ({"a": vector(), "b": vector()},), {"y": 2})
    assert program({"b": vector(), "a": 3 * vector()}, y=2).tolist() == [1, 2]


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.norm(self.conv(x))).square().mean()


class Layer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out = self.layer(x)
        return (out[0] if isinstance(out, tuple) else out).square().mean()


class Tied(nn.Module):
    """One layer under two names, a bias that two layers share, and a buffer under two names, which is written."""

    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b, self.c.bias = self.a, self.a.bias
        self.register_buffer("n", torch.zeros(2))
        self.register_buffer("m", self.n)

    def forward(self, x):
        self.n.add_(1)
        return (self.c(self.b(self.a(x))) * self.m).sum()


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Conv, (2, 3, 6, 6)),
        (lambda: Conv().eval(), (2, 3, 6, 6)),
        (Tied, (3, 2)),
        (lambda: Layer(nn.LSTM(3, 4, 2, dropout=0.3)), (5, 2, 3)),
        (lambda: Layer(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)), (2, 3, 4)),
        (lambda: Layer(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))), (2, 3)),
    ],
    ids=["conv", "conv in eval", "tied", "lstm", "transformer", "spectral norm"],
)
def test_layers(make, shape, tmp_path):
    """X-2, X-4"""
    torch.manual_seed(0)
    compare(make(), (torch.randn(shape),), tmp_path / "p.pt2")


# --------------------------------------------------------------------------------------------------- sizes
BATCH, LENGTH = Dim("batch", min=2, max=32), Dim("length", min=2, max=64)


class Pairwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("n", torch.zeros(3))

    def forward(self, x, y):
        self.n.add_(x.mean(0))
        return (self.fc(x) - y).square().mean(), x.shape[0] * 2


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": {0: BATCH}, "y": {0: BATCH}},
        ({0: BATCH}, {0: BATCH}),
        [[BATCH, None], [BATCH, None]],
        ({0: Dim.AUTO}, {0: Dim.AUTO}),
        ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}),
    ],
    ids=["dict", "tuple", "list", "auto", "dynamic"],
)
def test_spellings_of_sizes(shapes, tmp_path):
    """F-11, X-4"""
    calls = [(torch.randn(n, 3), torch.randn(n, 3)) for n in (4, 2, 7)]
    program = compare(Pairwise(), calls[0], tmp_path / "p.pt2", calls=calls, dynamic_shapes=shapes)
    for run in (program, load(tmp_path / "p.pt2")):
        with pytest.raises(ExportError):
            run(torch.randn(4, 3), torch.randn(5, 3))


def test_a_size_that_must_not_be_fixed():
    """F-11"""
    with pytest.raises(ExportError, match=r"works only where x\.shape\[0\] is 4"):
        export(Net(lambda m, x: x + torch.ones(4)), (torch.ones(4),), dynamic_shapes={"x": {0: Dim.DYNAMIC}})
    program = export(Net(lambda m, x: x + torch.ones(4)), (torch.ones(4),), dynamic_shapes={"x": {0: Dim.AUTO}})
    assert program(torch.ones(4)).tolist() == [2] * 4
    with pytest.raises(ExportError, match="outside of 2 to 32"):
        export(Net(lambda m, x: x * 2), (torch.ones(4),), dynamic_shapes={"x": {0: BATCH}})(torch.ones(40))


@pytest.mark.parametrize(
    ("module", "shapes", "sizes"),
    [
        (Conv(), {0: BATCH}, [(4, 3, 8, 8), (2, 3, 8, 8), (20, 3, 8, 8)]),
        (Layer(nn.LSTM(3, 4, batch_first=True)), {0: BATCH}, [(5, 2, 3), (3, 2, 3)]),
        (net(lambda m, x: F.pad(x * m.w, (1, 0), value=2.0).sum()), {0: BATCH}, [(4, 2), (9, 2)]),
        (
            net(lambda m, x: F.scaled_dot_product_attention(x * m.w, x, x).sum()),
            {0: BATCH, 2: LENGTH},
            [(4, 1, 5, 2), (3, 1, 7, 2)],
        ),
        (net(lambda m, x: F.dropout(x * m.w, 0.5).sum()), {0: BATCH}, [(4, 2), (9, 2)]),
        (net(lambda m, x: (x * torch.arange(x.shape[0])[:, None] * m.w).view(-1).sum()), {0: BATCH}, [(4, 2), (9, 2)]),
        (net(lambda m, x: (x.add_(1), (x * m.w).sum())[1]), {0: BATCH}, [(4, 2), (9, 2)]),
    ],
    ids=["conv", "lstm", "pad", "attention", "dropout", "sizes", "write"],
)
def test_programs_for_all_sizes(module, shapes, sizes, tmp_path):
    """F-11, X-4"""
    calls = [(torch.randn(size),) for size in sizes]
    compare(module, calls[0], tmp_path / "p.pt2", calls=calls, dynamic_shapes={"x": shapes})


# --------------------------------------------------------------------------------------------- other calls
def test_a_tensor_that_lies_otherwise_in_memory():
    """X-8: views in the graph are right for one layout."""
    module = net(lambda m, x: (x.add_(1), (x * m.w[:1]).t().reshape(-1).square().sum())[1])
    program = export(module, (torch.ones(3, 4).t(),), loss=0)
    mine, eager = torch.ones(4, 3), torch.ones(4, 3)
    assert program(mine)[0].item() == module(eager).item() and torch.equal(mine, eager)
    program = export(net(lambda m, x: x.as_strided((2,), (1,))), (torch.ones(2, 3),))
    with pytest.raises(ExportError, match="lies otherwise in memory"):
        program(torch.ones(3, 2).t())


def test_what_a_file_cannot_hold(tmp_path):
    """A ForegradError by name, and no file."""
    by_name = export(Net(lambda m, x: Point(x.a * 2, x.b)), (Point(vector(), vector()),))
    assert by_name(Point(vector(), vector())).a.tolist() == [2, 4]
    text = export(Net(lambda m, x: (x, "text")), (vector(),))
    assert text(vector())[1] == "text"
    for program in (by_name, text):
        with pytest.raises(ExportError, match=r"torch\.export cannot"):
            program.save(tmp_path / "p.pt2")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------- above autograd
def with_and_without_grad(m, x):
    h = x * m.w
    with torch.no_grad():
        s = h.softmax(0)
        with torch.enable_grad():
            q = (h * 3).sum()
        z = q * 2
    return (h * s).sum() + q + z, s


@torch.no_grad()
def statistics(m, x):
    m.n.mul_(0.9).add_(x.mean())
    return m.n * 1


ABOVE = {
    "blocks": (net(with_and_without_grad), (vector(True),)),
    "a decorated function": (net(lambda m, x: (x * m.w * statistics(m, x)).sum(), n=torch.zeros(2)), (vector(),)),
    "detach": (net(lambda m, x: ((x * m.w).detach() * m.w).sum()), (vector(True),)),
    "in place": (net(lambda m, x: (x * m.w).mul_(2).add_(x).relu_().sum()), (vector(True),)),
    "aliases": (net(lambda m, x: ((x * m.w).sum(), x, x.view(2, 1), m.w)), (vector(True),)),
    "batch norm": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)), (torch.randn(5, 3),)),
    "batch norm in eval": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), (torch.randn(5, 3),)),
    "lstm": (Layer(nn.LSTM(3, 4)), (torch.randn(5, 2, 3),)),
}


@pytest.mark.parametrize("name", ABOVE)
def test_above_autograd(name, tmp_path):
    """X-3, X-2"""
    module, args = ABOVE[name]
    compare_above_autograd(module, args, tmp_path / "p.pt2")


def test_gradients_inside_are_refused_above_autograd():
    """X-3"""
    body = net(lambda m, x: torch.autograd.grad((x * m.w).sum(), x)[0])
    with pytest.raises(ForegradError, match="differentiates something by itself"):
        export(body, (vector(True),), pre_dispatch=True)
