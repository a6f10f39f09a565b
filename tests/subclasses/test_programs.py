"""Programs over wrapper subclasses behave as in eager."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import foregrad
from checking import check_core
from foregrad.subclasses.layout import leaves_of
from helpers import Graphs, leaf, nop, plain
from subclass_pairs import Pair, compare, look, pair, storages


def two(*shape, grad=False):
    return TwoTensor(plain(*shape), plain(*shape) * 3).requires_grad_(grad)


MAKERS = {"pair": pair, "two": two}


def nonleaf(tensor):
    return tensor * 1


def in_place(x):
    x.mul_(3)
    return x + 1


def written_under_no_grad(x, y):
    with torch.no_grad():
        x.add_(2)
    return y * x


def views_of_intermediate(x):
    t = x * 2
    return t.view(-1), t.view(3, 2)


def base_and_view(x):
    t = x * 2
    return t, t.t()


def reshaped(x):
    x.t_()
    return x + 1


def written_view(x):
    x.view(-1)[:2].mul_(5)
    return x * 2


PROGRAMS = {
    "one": (lambda x: x * 3, lambda m, g: [m(2, 3, grad=g)]),
    "sin": (lambda x: x.sin().cos(), lambda m, g: [m(2, 3, grad=g)]),
    "two": (lambda x, y: (x @ y.t()).relu(), lambda m, g: [m(2, 3, grad=g), m(4, 3, grad=g)]),
    "mixed": (lambda x, w: w - x * 2, lambda m, g: [m(3, grad=g), leaf(3) if g else plain(3)]),
    "several": (lambda x: (x + 1, [x.exp(), 5]), lambda m, g: [m(3, grad=g)]),
    "itself": (lambda x: (x, x * 2), lambda m, g: [m(3, grad=g)]),
    "view": (lambda x: x.view(-1), lambda m, g: [m(2, 3, grad=g)]),
    "view of a view": (lambda x: x.t().unsqueeze(0), lambda m, g: [m(2, 3, grad=g)]),
    "detached": (lambda x: (x.detach(), x * 1), lambda m, g: [m(2, 3, grad=g)]),
    "views of an intermediate": (views_of_intermediate, lambda m, g: [m(2, 3, grad=g)]),
    "base and view": (base_and_view, lambda m, g: [m(2, 3, grad=g)]),
    "in place": (in_place, lambda m, g: [nonleaf(m(2, 3, grad=g))]),
    "in place, returned": (lambda x: x.mul_(3), lambda m, g: [nonleaf(m(2, 3, grad=g))]),
    "under no_grad": (written_under_no_grad, lambda m, g: [m(3), m(3, grad=g)]),
    "through a view": (written_view, lambda m, g: [nonleaf(m(2, 3, grad=g))]),
    "nested": (lambda x: x * x.cos(), lambda m, g: [Pair(m(3), m(3)).requires_grad_(g)]),
    "twice": (lambda a, b: a * b + b, lambda m, g: [m(3, grad=g)] * 2),
    "constant": (lambda x: (x.sum(), x.shape[0], None), lambda m, g: [m(3, grad=g)]),
    "output only": (lambda x: Pair(x * 2, x + 1) * 2, lambda m, g: [plain(3)]),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, kind, grad):
    """T-1 to T-5, T-9, T-10: values, memory, versions, identity, gradients"""
    program, make = PROGRAMS[name]
    compare(program, lambda: make(MAKERS[kind], grad))


def test_change_of_shape():
    """T-9"""
    compare(reshaped, lambda: [pair(2, 3)])
    compare(lambda x: (x.unsqueeze_(0), x.mul_(2), x + 1)[2], lambda: [pair(2, 3)])


def shared_inner():
    t = plain(3)
    return [Pair(t, plain(3)), Pair(plain(3), t)]


def shared_views():
    t = plain(4)
    return [Pair(t[:3], plain(3)), t[1:], pair(3)]


@pytest.mark.parametrize("make", [shared_inner, shared_views])
def test_inner_tensors_that_share_memory(make):
    """T-9, B-10: a write to one subclass is seen by another that holds the same memory"""
    compare(lambda a, b, *rest: (a.mul_(2), a + b, b * 1)[1:], make)
    compare(lambda a, b, *rest: (b.mul_(2), a + b, a * 1)[1:], make)
    compare(lambda a, b, *rest: a + b, make)


def test_same_subclass_twice():
    """D-5"""

    def twice():
        return [pair(3)] * 2

    compare(lambda a, b: (a.neg_(), a + b)[1], twice)
    compiled = foregrad.aot_function(lambda a, b: (a.neg_(), a + b)[1], nop)
    same, one, other = pair(3), pair(3), pair(3)
    assert compiled(same, same).p.tolist() == [-2, -4, -6]
    assert compiled(one, other).p.tolist() == [0, 0, 0]
    assert len(compiled.specializations) == 2


def test_inner_tensor_beside_its_wrapper():
    """B-10: a plain input that lies in a subclass as well"""

    def make():
        t = plain(3)
        return [t, Pair(t, plain(3))]

    compare(lambda t, w: (t.mul_(2), w + 1)[1], make)
    compare(lambda t, w: (w.mul_(2), t + 1)[1], make)


def test_graphs_hold_plain_tensors():
    """T-1"""
    graphs = Graphs()
    f = foregrad.aot_function(lambda x: x.sin(), graphs.compiler("forward"), graphs.compiler("backward"))
    x = pair(3, grad=True)
    f(x).backward(pair(3))
    for kind in ("forward", "backward"):
        for node in graphs.modules[kind].graph.nodes:
            value = node.meta.get("val")
            assert not isinstance(value, torch.Tensor) or type(value).__name__ == "FakeTensor"
    assert graphs.ops("forward") == ["sin.default", "sin.default"]


def test_guards():
    """F-2: type, context and inner tensors are facts"""
    f = foregrad.aot_function(lambda x: x * 2, nop)
    f(pair(3)), f(pair(3))
    assert len(f.specializations) == 1
    assert f(Pair(plain(3), plain(3), "odd")).tag == "odd"
    f(two(3)), f(plain(3)), f(pair(4)), f(pair(3, grad=True)), f(Pair(pair(3), pair(3)))
    assert len(f.specializations) == 7
    assert f(pair(3)).q.tolist() == [4, 8, 12]
    assert len(f.specializations) == 7


def test_parameters():
    """F-9, T-5: a module whose parameter is a subclass"""
    module = torch.nn.Linear(3, 2)
    module.weight = torch.nn.Parameter(pair(2, 3), requires_grad=True)
    module.bias = torch.nn.Parameter(pair(2))
    compiled = foregrad.aot_module(module, nop)
    x = plain(4, 3)
    expected = module(x)
    expected.backward(torch.ones_like(expected.detach()))
    grads = module.weight.grad, module.bias.grad
    module.zero_grad()
    got = compiled(x)
    assert type(got) is Pair and torch.equal(got.q, expected.q)
    got.backward(torch.ones_like(got.detach()))
    for parameter, grad in zip((module.weight, module.bias), grads, strict=True):
        assert torch.equal(parameter.grad.p, grad.p) and torch.equal(parameter.grad.q, grad.q)


def test_closure():
    """F-14: a subclass that the program finds by itself"""
    w = pair(3, grad=True)
    f = foregrad.aot_function(lambda x: x * w, nop)
    f(plain(3)).backward(pair(3))
    assert type(w.grad) is Pair and w.grad.p.tolist() == [1, 4, 9]


def test_simplified():
    """F-10: one program, for flat arguments"""

    class Twice(torch.nn.Module):
        def forward(self, x, y):
            return x * 2 + y, y

    f = foregrad.aot_module_simplified(Twice(), [pair(3), plain(3)], nop)
    out, y = f(pair(3), plain(3))
    assert type(out) is Pair and out.q.tolist() == [5, 10, 15] and type(y) is torch.Tensor


@pytest.mark.parametrize("kind", MAKERS)
def test_dynamic(kind):
    """F-11: one program for many sizes, forward and backward"""
    f = foregrad.aot_function(lambda x, y: (x @ x.t()).sin() * y.sum(), nop, dynamic=True)
    for n, m in ((3, 4), (5, 2), (6, 7)):
        x, y = MAKERS[kind](n, m, grad=True), plain(n)
        expected = (x @ x.t()).sin() * y.sum()
        (want,) = torch.autograd.grad(expected, x, torch.ones_like(expected.detach()))
        got = f(x, y)
        (grad,) = torch.autograd.grad(got, x, torch.ones_like(got.detach()))
        for a, b in zip((*leaves_of(expected), *leaves_of(want)), (*leaves_of(got), *leaves_of(grad)), strict=True):
            assert a.stride() == b.stride()
            assert torch.allclose(a, b)
        assert got.shape == expected.shape and got.stride() == expected.stride()
    assert len(f.specializations) == 1


def test_dynamic_views_and_writes():
    """F-11, T-9: in inference, with a view and a write"""
    f = foregrad.aot_function(lambda x: (x.mul_(2), x.t() + 1)[1], nop, dynamic=True)
    for n in (2, 3, 5):
        x, y = pair(n, 3), pair(n, 3)
        got = f(x)
        y.mul_(2)
        assert torch.equal(got.q, (y.t() + 1).q) and torch.equal(x.p, y.p) and got.shape == (3, n)


class Padded(Pair):
    """One row more than its inner tensors have."""

    @staticmethod
    def __new__(cls, p, q, tag="std"):
        return torch.Tensor._make_wrapper_subclass(cls, (p.shape[0] + 1,), dtype=p.dtype)


def test_dynamic_sizes_that_nothing_inside_has():
    """F-11: fixed sizes serve instead"""
    f = foregrad.aot_function(lambda x: x * 2, nop, dynamic=True)
    for n in (3, 5, 3):
        got = f(Padded(plain(n), plain(n)))
        assert got.p.tolist() == (plain(n) * 2).tolist() and got.shape == (n + 1,)


def test_programs_without_inputs_for_the_graph():
    """T-1: a subclass that is made from nothing"""
    f = foregrad.aot_function(lambda: Pair(torch.ones(2), torch.zeros(2)) * 2, nop)
    assert f().p.tolist() == [2, 2]


def test_requires_grad_inside():
    """M-7: a subclass that the program makes require grad"""
    x = pair(2)
    foregrad.aot_function(lambda x: x.requires_grad_() * 2, nop)(x).backward(pair(2))
    assert x.requires_grad and x.grad.q.tolist() == [4, 8]


def test_gradient_from_before():
    """A program that reads the gradient of a subclass"""

    def make():
        x = pair(2, grad=True)
        x.grad = pair(2)
        return [x]

    f = foregrad.aot_function(lambda x: x.detach() + x.grad, nop)
    for _ in range(2):
        assert f(*make()).q.tolist() == [4, 8]
    assert len(f.specializations) == 1


def test_hooks():
    """J-6: a hook on a subclass, and `retain_grad` on one that is no leaf"""
    seen = []
    x = pair(2, grad=True)
    x.register_hook(lambda g: seen.append(g))
    y = foregrad.aot_function(lambda x: x * 3, nop)(x)
    y.retain_grad()
    y.backward(pair(2))
    assert type(seen[0]) is Pair and y.grad.p.tolist() == [1, 2]


def test_related_subclasses():
    """B-5: views of one subclass, written without gradients, and refused with them"""

    def views():
        x = pair(4)
        return [x[:2], x[2:], x]

    compare(lambda a, b, x: (a.mul_(2), b + 1, x * 1)[1:], views)
    x = pair(4, grad=True) * 1
    f = foregrad.aot_function(lambda a, b: (a.mul_(2), b + a)[1], nop)
    with pytest.raises(foregrad.errors.UnsupportedError, match="of which another input is a view"):
        f(x[:2], x[2:])
    with pytest.raises(foregrad.errors.UnsupportedError, match="of which another input is a view"):
        f(x.view(4), x)


def test_random():
    """R-1: functional random numbers beside subclasses"""
    with foregrad.config.patch(functionalize_rng_ops=True):
        f = foregrad.aot_function(lambda x: torch.dropout(x, 0.5, True), nop)
        x = Pair(torch.ones(64), torch.ones(64)).requires_grad_()
        y = f(x)
        y.backward(Pair(torch.ones(64), torch.ones(64)))
    assert torch.equal(y.p, x.grad.p) and torch.equal(y.q, x.grad.q) and 0 < (y.p == 0).sum() < 64


def test_keeping_writes_in_the_graph():
    """M-9: the graph itself writes to inner tensors"""
    graphs = Graphs()
    f = foregrad.aot_function(
        lambda x: (x.mul_(2), x + 1)[1], graphs.compiler("inference"), keep_inference_input_mutations=True
    )
    x = pair(2)
    assert f(x).p.tolist() == [3, 5] and x.q.tolist() == [4, 8]
    assert graphs.ops("inference").count("copy_.default") == 2


def test_source_is_readable():
    """Generated code: flattening and rebuilding stand in it"""
    f = foregrad.aot_function(lambda x: x.sin(), nop)
    f(pair(2, grad=True))
    source = f.specializations[0].source
    assert "plain_forward_graph([i0.p, i0.q])" in source and "unflatten_Pair({'p': r[0], 'q': r[1]}, 'std'" in source
    f = foregrad.aot_module_simplified(Sine(), [pair(2)], nop)
    lines = f.specializations[0].source.splitlines()
    assert lines.count("    args_0_p = args_0.p") == 1 and not any("def inference_graph" in line for line in lines)


class Sine(torch.nn.Module):
    def forward(self, x):
        return (x.sin(),)


def test_unread_inner_tensors_are_not_read():
    """Where autograd takes the wrapper, the call around it does not look into it"""
    f = foregrad.aot_module_simplified(Sine(), [pair(2, grad=True)], nop)
    assert "args_0.p" not in f.specializations[0].source


class Tripled(torch.autograd.Function):
    """A derivative of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x


def differentiates(x):
    y = x * x
    y.backward(torch.ones_like(y.detach()))
    return x.grad * 2


def writes_inside(x):
    x.p.mul_(2)
    return x + 1


OTHERS = {
    "checkpoint": (lambda x: checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False), True),
    "reentrant checkpoint": (lambda x: checkpoint(lambda t: t.sin().exp(), x, use_reentrant=True), True),
    "custom function": (lambda x: Tripled.apply(x) + 1, True),
    "gradient inside": (lambda x: torch.autograd.grad(x * x, x, torch.ones_like(x.detach()))[0], True),
    "backward inside": (differentiates, True),
    "inner tensor written": (writes_inside, False),
    "inner tensors returned": (lambda x: (x.p.view(-1), Pair(x.q, x.p)), False),
    "split": (lambda x: x.split(2), True),
    "pieces of an intermediate": (lambda x: (x * 2).unbind(0), True),
    "a leaf": (lambda x: x.detach().requires_grad_(), False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_programs(name):
    """T-1, T-10: what else programs do"""
    program, grad = OTHERS[name]
    compare(program, lambda: [pair(4, 2, grad=grad)], backward=name not in ("a leaf", "backward inside"))


def test_inference_mode():
    """F-2"""
    f = foregrad.aot_function(lambda x: (x.mul_(2), x + 1)[1], nop)
    with torch.inference_mode():
        for _ in range(2):
            x = pair(2)
            y = f(x)
            assert y.is_inference() and y.p.tolist() == [3, 5] and x.q.tolist() == [4, 8]
    assert len(f.specializations) == 1


def test_autocast():
    """J-11"""
    x, w = pair(2, 3, grad=True), pair(3, 2, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = foregrad.aot_function(lambda x, w: x @ w, nop)(x, w), x @ w
    assert y.dtype is torch.bfloat16 and torch.equal(y.p, expected.p) and torch.equal(y.q, expected.q)


def test_moves_are_refused():
    """M-10: `set_` and `.data =` of a subclass"""
    for program in (lambda x, y: x.detach().set_(y), lambda x, y: setattr(x, "data", y)):
        with pytest.raises(foregrad.errors.UnsupportedError, match=r"set_.* of a tensor subclass"):
            foregrad.aot_function(program, nop)(pair(2), pair(2))


def test_out():
    """M-1: a result that is written to an argument"""
    compare(lambda x, out: torch.add(x, x, out=out), lambda: [pair(3), pair(3)])


def stale_by_a_write_unseen(x):
    v = x.view(-1)
    with torch.no_grad():
        x.mul_(2)
    return v


def stale_as_taken_unseen(x):
    with torch.no_grad():
        v = x.view(-1)
    x.mul_(2)
    return v


def stale_pieces(x):
    first, *_ = x.unbind(0)
    x.mul_(2)
    return first


def stale_view_of_a_view(x):
    v = x.view(-1)[1:]
    x.mul_(2)
    return v


def attempts(tensor):
    """What happens when a view is used in all ways."""
    seen = [tensor._version, tensor._is_view(), tensor.requires_grad]
    for use in (lambda t: t.grad_fn is None, lambda t: t * 2, lambda t: t.add_(1), lambda t: t.detach()):
        try:
            found = use(tensor)
            seen.append(look(found.detach(), versions=False) if isinstance(found, torch.Tensor) else found)
        except RuntimeError as error:
            seen.append(str(error).split(".")[0])
    return seen


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    "program", [stale_by_a_write_unseen, stale_as_taken_unseen, stale_pieces, stale_view_of_a_view]
)
def test_views_that_may_not_be_used_any_more(program, kind, enabled, grad):
    """A-8, T-9: they are refused by autograd in the same way"""

    def run(function):
        x = MAKERS[kind](3, 2, grad=grad) * 1
        with torch.set_grad_enabled(enabled):
            v = function(x)
            shared = storages([v, x])
            return attempts(v), shared, look(x.detach())

    compiled = foregrad.aot_function(program, nop)
    expected = run(program)
    assert run(compiled) == expected and run(compiled) == expected


def test_an_input_that_is_written_is_not_saved():
    """P-1, T-9: the partitioner computes from something else what the backward needs"""
    cut = foregrad.min_cut_rematerialization_partition
    compare(lambda x: (x.mul_(2).add_(1), x.sin()), lambda: [nonleaf(pair(3, grad=True))], partition_fn=cut)


class Product(torch.nn.Module):
    """Everything in it is a subclass, its weight twice."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(two(3, 3) / 9)
        self.tied = self.weight
        self.register_buffer("scale", two(3) / 3)

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(2)
        return (x @ self.weight) @ self.tied * self.scale


def complex_names(x, *, options, rest=()):
    return {"y": options["w"] * x, "z": [x, *(r + 1 for r in rest)]}


def strided(*shape):
    return TwoTensor(plain(*shape).t(), plain(*shape).t() * 2).requires_grad_()


def of(dtype):
    return TwoTensor((plain(2, 3) / 4).to(dtype), (plain(2, 3) / 2).to(dtype)).requires_grad_()


def expanded():
    return TwoTensor(plain(1, 3).expand(2, 3), (plain(1, 3) * 2).expand(2, 3)).requires_grad_()


HARD = {
    "two in two": (lambda x: (x * x.sin(), x.t()), lambda: [TwoTensor(two(2, 3), two(2, 3)).requires_grad_()], {}),
    "two in pair, pair in two": (
        lambda x, y: (x * 2, y.exp()),
        lambda: [TwoTensor(pair(3), pair(3)).requires_grad_(), Pair(two(3), two(3)).requires_grad_()],
        {},
    ),
    "keywords": (
        complex_names,
        lambda: [two(3, grad=True)],
        {"options": {"w": two(3, grad=True)}, "rest": [pair(2, grad=True), two(1)]},
    ),
    "nothing in it": (lambda x: (x * 2, x.t() @ x), lambda: [two(0, 3, grad=True)], {}),
    "no dimension": (lambda x: x * x.exp(), lambda: [two(grad=True)], {}),
    "half": (lambda x: (x @ x.t()).relu(), lambda: [of(torch.bfloat16)], {}),
    "double": (lambda x: x.to(torch.float32) * 2, lambda: [of(torch.float64)], {}),
    "strided": (lambda x: (x * 2, x.t().contiguous()), lambda: [strided(3, 2)], {}),
    "strided in part": (lambda x: x * x, lambda: [Pair(plain(3, 2).t(), plain(2, 3)).requires_grad_()], {}),
    "expanded": (lambda x: x * x, lambda: [expanded()], {}),
    "module": (Product(), lambda: [plain(2, 3)], {}),
    "module, of a subclass": (Product(), lambda: [two(2, 3, grad=True)], {}),
    "batch norm": (torch.nn.BatchNorm1d(3), lambda: [two(4, 3, grad=True)], {}),
    "same inner tensor": (lambda x: x.mul_(2), lambda: [TwoTensor(*[plain(3)] * 2)], {}),
    "mixed": (lambda x, y: torch.cat([x, y]), lambda: [two(3, grad=True), leaf(2)], {}),
    "written part": (lambda x, v: (x[1:].copy_(v), x * 2)[1], lambda: [two(3, 2), two(2, 2, grad=True)], {}),
    "attention": (
        lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q),
        lambda: [two(1, 2, 4, 8, grad=True)],
        {},
    ),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", HARD)
def test_hard_programs(name, training):
    """T-1 to T-10: nested, of all shapes and dtypes, in modules and keywords"""
    function, make, keywords = HARD[name]
    check_core(function, *make(), kwargs=keywords, training=training)


@pytest.mark.parametrize("transform", ["vjp", "jvp", "vmap", "jacrev", "grad"])
def test_transforms(transform):
    """F-13: torch.func over a compiled function"""
    ways = {
        "vjp": lambda f: torch.func.vjp(f, two(3))[1](two(3)),
        "jvp": lambda f: torch.func.jvp(f, (two(3),), (two(3),)),
        "vmap": lambda f: torch.func.vmap(f)(two(2, 3)),
        "jacrev": lambda f: torch.func.jacrev(f)(two(2)),
        "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(two(3)),
    }

    def program(x):
        return x.sin() * x

    got, expected = ways[transform](foregrad.aot_function(program, nop)), ways[transform](program)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        assert look(a, versions=False) == look(b, versions=False)


@pytest.mark.parametrize("inside", [True, False])
def test_inference_tensors(inside):
    """F-2: made in inference mode, used there or elsewhere"""
    found = []
    for function in (OTHERS["split"][0], foregrad.aot_function(OTHERS["split"][0], nop)):
        with torch.inference_mode():
            x = two(4, 2)
        with torch.inference_mode(inside):
            found.append([(look(piece, versions=False), piece.is_inference()) for piece in function(x * 1)])
    assert found[0] == found[1]


def written_inside(x):
    x.p.mul_(2)
    return x.p * 3


TAKEN_OUT = {
    "one": lambda x: x.p * 2,
    "both": lambda x: x.p * x.p.sin() + x.q,
    "beside its wrapper": lambda x: (x.p * 2, x * 3),
    "together": lambda x: x * x.p,
    "itself": lambda x: x.p,
    "a view": lambda x: x.p.view(-1),
    "in a new one": lambda x: Pair(x.p * 2, x.q * 3) * 2,
    "written": written_inside,
}


@pytest.mark.parametrize("outside", [False, True], ids=["wrapper without grad", "wrapper with grad"])
@pytest.mark.parametrize("name", TAKEN_OUT)
def test_gradients_of_inner_tensors(name, outside):
    """T-2, J-10: a tensor that the program takes out of a subclass has gradients of its own"""

    def run(function):
        p, q = leaf(3), leaf(3)
        x = Pair(p * 1, q * 1).requires_grad_(outside)
        outputs = pytree.tree_leaves(function(x))
        tracked = [t for t in outputs if t.requires_grad]
        ends = [p, q, x] if outside else [p, q]
        ones = [torch.ones_like(t.detach()) for t in tracked]
        first = torch.autograd.grad(tracked, ends, ones, allow_unused=True, create_graph=True)
        again = [g for g in first if g is not None and g.requires_grad]
        ones = [torch.ones_like(g.detach()) for g in again]
        second = torch.autograd.grad(again, ends, ones, allow_unused=True) if again else ()
        return [look(t, versions=False) for t in (*outputs, *first, *second)], storages([*outputs, x])

    compiled = foregrad.aot_function(TAKEN_OUT[name], nop)
    expected = run(TAKEN_OUT[name])
    assert run(compiled) == expected and run(compiled) == expected
    assert len(compiled.specializations) == 1


def without_grad(p, q):
    return Pair(p, q).requires_grad_(False)


def first_written(x, y):
    x.p.mul_(2)
    return y.p * 3


def plain_written(x, t):
    t.mul_(2)
    return x.p * 3 + t


def shared(x, y):
    return x.p * 2 + y.p


SHARED_INSIDE = {
    "in two": (shared, lambda p, q: [without_grad(p, q), without_grad(p, q * 1)]),
    "in two, written": (first_written, lambda p, q: [without_grad(p, q), without_grad(p, q)]),
    "views in two, written": (first_written, lambda p, q: [without_grad(p[:2], q[:2]), without_grad(p[1:], q[1:])]),
    "beside its wrapper": (lambda x, t: x.p * 2 + t, lambda p, q: [without_grad(p, q), p]),
    "beside its wrapper, written": (plain_written, lambda p, q: [without_grad(p, q), p]),
    "a view beside its wrapper, written": (plain_written, lambda p, q: [without_grad(p[:2], q[:2]), p[1:]]),
    "twice in one": (lambda x: x.p * 2 + x.q, lambda p, q: [without_grad(p, p)]),
    "one twice": (shared, lambda p, q: [without_grad(p, q)] * 2),
}


@pytest.mark.parametrize("name", SHARED_INSIDE)
def test_gradients_of_shared_inner_tensors(name):
    """T-2, B-10, D-5: and also where it lies in several places"""
    program, make = SHARED_INSIDE[name]

    def run(function):
        p, q = leaf(3), leaf(3)
        args = make(p * 1, q * 1)
        y = function(*args)
        gradients = torch.autograd.grad(y, [p, q], torch.ones_like(y.detach()), allow_unused=True)
        return (
            [look(t, versions=False) for t in (y, *gradients)],
            [look(x.detach()) for x in args],
            storages([y, *args]),
        )

    compiled = foregrad.aot_function(program, nop)
    expected = run(program)
    assert run(compiled) == expected and run(compiled) == expected


def first_is_written(a, b):
    a.mul_(3)
    return b * 2


def second_is_written(a, b):
    b.mul_(3)
    return a * 2


def both_are_written(a, b):
    a.mul_(3)
    with torch.no_grad():
        b.add_(1)
    return a * b


def both_are_returned(a, b):
    a.view(-1)[:2].mul_(3)
    return b.view(-1), a, b


def around(p, q=None):
    return Pair(p, torch.ones(4) if q is None else q)


ALIASES = {
    "a view of an inner tensor": lambda x: x.p.view(-1),
    "another wrapper of it": lambda x: around(x.p),
    "another wrapper of views": lambda x: around(x.q.view(-1), x.p.view(-1)),
    "another wrapper with gradients": lambda x: around(x.p.view(-1), x.q).requires_grad_(),
    "detached": lambda x: x.detach(),
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("program", [first_is_written, second_is_written, both_are_written, both_are_returned])
def test_writes_with_gradients_to_shared_memory(program, alias):
    """B-10: data, versions and gradients, where autograd knows nothing of what inputs have in common"""

    def run(function):
        source = pair(4, grad=True)
        x = source * 1
        args = [x, ALIASES[alias](x)]
        try:
            outputs = pytree.tree_leaves(function(*args))
            tracked = [t for t in (*outputs, x) if t.requires_grad]
            ones = [torch.ones_like(t.detach()) for t in tracked]
            gradients = torch.autograd.grad(tracked, source, ones, allow_unused=True)
        except RuntimeError as error:
            return str(error).split(".")[0]
        seen = [look(t, versions=False) for t in (*outputs, *gradients)], [look(t.detach()) for t in args]
        return *seen, storages([*outputs, *args])

    compiled = foregrad.aot_function(program, nop)
    expected = run(program)
    assert run(compiled) == expected and run(compiled) == expected


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("alias", [lambda x: x.detach(), lambda x: x.detach().view(-1), lambda x: x.p.view(-1)])
@pytest.mark.parametrize("written", [0, 1])
def test_writes_that_count_for_another_subclass(written, alias, grad):
    """B-10, J-8: what was saved of a subclass is found changed where it shares its version counter, and only there"""
    w = leaf(4)

    def program(a, b):
        y = (b if written == 0 else a) * w
        with torch.set_grad_enabled(grad):
            (a if written == 0 else b).mul_(3)
        return y

    def run(function):
        x = pair(4, grad=True) * 1
        y = function(x, alias(x))
        try:
            return look(torch.autograd.grad(y, w, torch.ones_like(y.detach()))[0], versions=False)
        except RuntimeError as error:
            return str(error).split(":")[0]

    compiled = foregrad.aot_function(program, nop)
    expected = run(program)
    assert run(compiled) == expected and run(compiled) == expected
