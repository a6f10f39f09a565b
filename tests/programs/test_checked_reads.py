"""Programs that look at their data: each is compared with eager over ten calls, in everything that a user can observe.

A row is a program, what makes the arguments of its nth call, and how many programs may be compiled for it.
"""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad import min_cut_rematerialization_partition
from foregrad.capturing.guards import MISS
from foregrad.errors import DataDependentError
from helpers import leaf, nop, plain

CALLS = 10
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]], int]] = {}


def program(arguments: Callable[[int], tuple[Any, ...]], most: int = 2) -> Callable[..., Any]:
    """Put a function, or what makes a module, into the table."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        assert fn.__name__ not in PROGRAMS
        PROGRAMS[fn.__name__] = fn, arguments, most
        return fn

    return register


def values(n: int, *shape: int) -> Tensor:
    """Other values at each call."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(n))
    return made.requires_grad_()


def observed(fn: Callable[..., Any], args: tuple[Any, ...], n: int) -> list[Any]:
    """What a call does: its result or its error, gradients, inputs, versions, random numbers."""
    torch.manual_seed(n)
    given = copy.deepcopy(args)
    tensors = [a for a in given if isinstance(a, Tensor)]
    seen: list[Any] = []
    try:
        result = fn(*given)
        results = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, tuple) else [result]
        seen += [(r.detach().clone(), r.stride(), r.requires_grad) if isinstance(r, Tensor) else r for r in results]
        total = [r.sum() for r in results if isinstance(r, Tensor) and r.requires_grad]
        if total:
            sum(total).backward()
    except (ValueError, RuntimeError, IndexError, AssertionError) as error:
        if isinstance(error, foregrad.ForegradError):
            raise
        seen.append((type(error), str(error).splitlines()[0]))
    seen += [(t.detach(), t.grad if t.is_leaf else None, t._version, t.requires_grad) for t in tensors]
    state = list(fn.parameters()) + list(fn.buffers()) if isinstance(fn, nn.Module) else []
    seen += [(t.detach().clone(), None if t.grad is None else t.grad.clone(), t._version) for t in state]
    return [*seen, torch.get_rng_state()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
    return a == b or (a != a and b != b)


def compare(fn: Any, arguments: Callable[[int], tuple[Any, ...]], most: int, compile: Callable[..., Any]) -> Any:
    """Ten calls of a program and of the original, each on its own copies."""
    made = fn() if isinstance(fn, type) else fn
    original, compiled = copy.deepcopy(made), compile(copy.deepcopy(made))
    for n in range(CALLS):
        expected, found = (observed(f, arguments(n), n) for f in (original, compiled))
        for one, other in zip(found, expected, strict=True):
            assert same(one, other), f"in call {n}"
    assert len(compiled.specializations) <= most, compiled.recompiles
    return compiled


def aot(fn: Any) -> Any:
    return (foregrad.aot_module if isinstance(fn, nn.Module) else foregrad.aot_function)(fn, nop)


# ------------------------------------------------------------------------------------------------------ decisions
@program(lambda n: (values(n, 3, 4), values(n + 1, 4, 2)))
def a_branch(x, w):
    y = (x @ w).relu()
    return y.sin() if y.sum() > 2 else y * 2


@program(lambda n: (values(n, 3),), 4)
def two_branches(x):
    y = x.exp() if x.sum() > 0 else x.cos()
    return y * 2 if y.max() > 1.2 else y + 1


@program(lambda n: (values(n, 4),), 10)
def an_item(x):
    return x * 2 if x.sum().item() > 0 else x - 1


@program(lambda n: (values(n, 4),))
def a_condition_that_is_returned(x):
    positive = bool((x > 0).any())
    return x * 2, positive


@program(lambda n: (values(n, 4), n % 3 == 0), 3)
def a_decision_behind_another_of_python(x, flag):
    if flag:
        return x * 3 if x.mean() > 0 else x * 4
    return x


@program(lambda n: (torch.tensor([float("nan") if n % 2 else 1.0, 2.0], requires_grad=True),))
def nan_is_skipped(x):
    loss = x.square().sum()
    return torch.zeros_like(x) if loss.isnan() else loss * x


@program(lambda n: (torch.tensor([float("inf") if n % 3 == 1 else -0.0 if n % 3 else 0.0, 2.0]),), 2)
def infinity_is_skipped(x):
    return x * 0 if torch.isinf(x).any() else x + 1


@program(lambda n: (values(n, 4), values(n if n % 2 else n + 1, 4)))
def are_equal(x, y):
    return x * 2 if torch.equal(x, y) else x * y


@program(lambda n: (values(n, 4), torch.tensor(n % 3)), 3)
def an_index_that_is_a_tensor(x, i):
    return x[i] * 2


@program(lambda n: (values(n, 6),), 6)
def a_guarded_index(x):
    i = int(x.detach().argmax())
    return x[i] * x[: i + 1].sum()


@program(lambda n: (values(n, 3),), 6)
def a_list(x):
    order = x.detach().argsort().tolist()
    return sum(x[i] * (k + 1) for k, i in enumerate(order))


@program(lambda n: (values(n, 3),), 10)
def a_float(x):
    scale = float(x.detach().abs().max())
    return x / scale


@program(lambda n: (values(n, 2),))
def in_a_tensor(x):
    return x * 2 if 1 in (x > 0).int() else x * 3


@program(lambda n: (values(n, 2),))
def an_assertion(x):
    if not (x > -1).all():
        raise AssertionError("too small")  # an assertion, without what pytest makes of one
    return x.log1p()


@program(lambda n: (values(n, 2),))
def an_error_of_the_program(x):
    if x[0] < 0:
        raise ValueError("negative")
    return x.sqrt()


# ----------------------------------------------------------------------------------------------------------- loops
@program(lambda n: (values(n, 3),), 4)
def until_it_is_small(x):
    while x.abs().max() > 0.3:
        x = x / 2
    return x * 3


@program(lambda n: (values(n, 1).detach().abs() + 1,), 4)
def newton_with_gradients_inside(a):
    x = a.clone().requires_grad_()
    for _ in range(20):
        y = x * x - a
        if y.abs().max() < 1e-4:
            break
        (slope,) = torch.autograd.grad(y.sum(), x)
        x = (x - y / slope).detach().requires_grad_()
    return x.detach()


@program(lambda n: (values(n, 4, 4),), 4)
def sinkhorn(x):
    p = x.exp()
    for _ in range(50):
        p = p / p.sum(0)
        p = p / p.sum(1, keepdim=True)
        if (p.sum(0) - 1).abs().max() < 1e-2:
            break
    return p


@program(lambda n: (values(n, 5, 2).detach(), values(n + 7, 5).detach()), 10)
def greedy_suppression(points, scores):
    kept = []
    left = scores.clone()
    while (left > -10).any():
        i = int(left.argmax())
        kept.append(i)
        left[(points - points[i]).norm(dim=1) < 1.0] = -100.0
        left[i] = -100.0
    return points[kept], scores[kept]


# ------------------------------------------------------------------------------------------------- writes, state
@program(lambda n: (values(n, 3).detach(),))
def written_before_and_after(x):
    x.mul_(2)
    if x.sum() > 0:
        x.add_(1)
    else:
        x.sub_(1)
    return x * 3


@program(lambda n: (values(n, 3).detach(), values(n + 1, 3)))
def written_through_a_view(x, y):
    x[1:].copy_(y[1:].detach())
    if x[1] > 0:
        x[0] = 0.0
    return x * y


@program(lambda n: (values(n, 4).detach(),))
def a_resized_input(x):
    x.unsqueeze_(0)
    return x * 2 if x.sum() > 0 else x


@program(lambda n: (values(n, 4).detach(),))
def made_to_require_grad(x):
    x.requires_grad_()
    return x.sin() if x.detach().sum() > 0 else x.cos()


@program(lambda n: (values(n, 0).detach(), values(n, 2)))
def a_write_to_nothing(x, y):
    x.add_(1)
    return y * 2 if y.sum() > 0 else y


@program(lambda n: (values(n, 4),))
class CountsItsCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        self.mean.lerp_(x.detach(), 0.5)
        if self.mean.sum() > 0:
            return x * 2
        return x * self.mean


@program(lambda n: (values(n, 6, 4),), 8)
class EarlyExit(nn.Module):
    """Over normalization and dropout: what a branch does not run, it neither draws nor counts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2)) for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.abs().max() > 1.9:
                break
        return x


@program(lambda n: (values(n, 3, 4),), 8)
class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = F.dropout(layer(x), 0.1)
        return x


@program(lambda n: (values(n, 3),))
def dropout_before(x):
    y = F.dropout(x, 0.5)
    return y * torch.rand(3) if y.sum() > 0 else y


GENERATOR = torch.Generator().manual_seed(1)


@program(lambda n: (values(n, 3), GENERATOR.manual_seed(n)), 10)  # for each generator one
def a_generator_of_its_own(x, generator):
    noise = torch.rand(3, generator=generator)
    return x * noise if noise[0] > 0.5 else x * torch.rand(3, generator=generator)


@program(lambda n: (values(n, 4),))
def without_gradients_inside(x):
    with torch.no_grad():
        scale = 2.0 if x.norm() > 1.5 else 3.0
    return x * scale


@program(lambda n: (values(n, 4),))
def under_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        y = x[None] @ x[:, None]
        y = y * 2 if y.sum() > 3 else y
    return y.float()


@program(lambda n: (values(n, 4),))
def a_result_that_is_the_input(x):
    return x if x.sum() > 0 else x[1:]


@program(lambda n: (values(n, 4).detach(),))
def a_read_of_what_was_written_between(x):
    y = torch.zeros(4)
    first = bool(y.any())
    y += x.relu()
    return (y * 2 if y[0] > 0 else y), first


# -------------------------------------------------------------------------------------- sizes that depend on data
@program(lambda n: (values(n, 6),), 1)
def nonzero_and_an_index_by_it(x):
    return x[(x > 0).nonzero()[:, 0]] * 2


@program(lambda n: (values(n, 6),), 1)
def an_index_of_bools(x):
    return x[x > 0].sin()


@program(lambda n: (values(n, 3, 4), values(n, 4)), 5)
def an_index_of_bools_beside_a_slice(x, y):
    return x[:, y > 0] * 2, x[1:][x[1:, 0] > 0]


@program(lambda n: (values(n, 6),), 2)
def selected_by_a_mask(x):
    return x.masked_select(x > 0.3).exp()


@program(lambda n: (values(n, 6).detach(),), 1)
def unique_values(x):
    found, inverse, counts = torch.unique((x * 2).round(), return_inverse=True, return_counts=True)
    return found, inverse * 2, counts + 1


@program(lambda n: (values(n, 6).detach(),), 1)
def unique_values_in_a_row(x):
    return torch.unique_consecutive(x > 0), torch.unique((x > 0).view(3, 2), dim=0)


@program(lambda n: (values(n, 6),), 1)
def repeated(x):
    return x.repeat_interleave((x.detach().abs() * 2).long()) * 2


@program(lambda n: (values(n, 6),), 1)
def counted(x):
    return torch.bincount((x.detach().abs() * 3).long())[0] * x


@program(lambda n: (values(n, 6),), 3)
def places_where_it_is_so(x):
    (places,) = torch.where(x > 0.5)
    return x[places].sum() if len(places) else x.sum()


@program(lambda n: (values(n, 6),))
def a_constant_written_by_a_mask(x):
    y = torch.zeros_like(x)
    y[x > 0] = 1.0
    return y * x


@program(lambda n: (values(n, 6),), 1)
def a_value_written_by_a_mask(x):
    y, mask = torch.zeros(6), x.detach() > 0
    y[mask] = x[mask].sin()
    return y * x


@program(lambda n: (values(n, 6),), 1)
def one_value_written_by_a_mask(x):
    y = x.clone().view(2, 3)
    y[y.detach() > 0] = x[0] * 2
    return y * y


@program(lambda n: (values(n, 6),), 1)
def written_by_a_mask_beside_a_slice(x):
    y, mask = torch.zeros(2, 6), x.detach() > 0
    y[:, mask] = x[mask] * 2
    return y


@program(lambda n: (values(n, 6),), 1)
def scattered_by_a_mask(x):
    return torch.zeros(6).masked_scatter(x.detach() > 0, x * 2)


@program(lambda n: (values(n, 6).detach(), values(n + 1, 6)), 1)
def an_input_written_by_a_mask(x, y):
    mask = x > 0
    x[mask] = y[mask] * 2
    return x.sum()


@program(lambda n: (values(n, 6),), 1)
def clusters(x):
    labels = (x.detach() > 0).long()
    return torch.stack([x[labels == k].sum() for k in range(2)])


@program(lambda n: (values(n, 5, 4),), 1)
class Experts(nn.Module):
    """Each expert runs on the rows that are sent to it."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out


@program(lambda n: (values(n, 5, 4),), 10)
class StackedExperts(nn.Module):
    """The experts that anything is sent to, by their numbers."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.weights = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen):
            rows = (chosen == expert).nonzero().flatten()
            out[rows] = x[rows] @ self.weights[expert]
        return out


@program(lambda n: (values(n, 4, 6), torch.tensor([1 + n % 3, 2, 3, 1])), 3)
def lengths(x, length):
    longest = int(length.max())
    mask = torch.arange(longest)[None] < length[:, None]
    rows = [row[:k].sum() for row, k in zip(x, length.tolist(), strict=True)]
    return (x[:, :longest] * mask).sum(1) / length, torch.stack(rows)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_as_in_eager(name):
    compare(*PROGRAMS[name], aot)


# --------------------------------------------------------------------------------------- what else can be observed
def test_two_branches_are_two_programs_and_no_compiler_is_called_after_the_second():
    compiled_graphs = []

    def compiler(graph, inputs):
        compiled_graphs.append(graph)
        return foregrad.make_boxed_func(graph.forward)

    compiled = foregrad.aot_function(a_branch, compiler)
    ones = [torch.full((3, 4), 1.0 if n % 2 else -1.0) for n in range(100)]
    for x in ones[:2]:
        compiled(x, torch.ones(4, 2, requires_grad=True)).sum().backward()
    count = len(compiled_graphs)
    for x in ones:
        w, v = (torch.ones(4, 2, requires_grad=True) for _ in range(2))
        compiled(x, w).sum().backward(), a_branch(x, v).sum().backward()
        assert torch.equal(w.grad, v.grad)
    assert len(compiled.specializations) == 2 and len(compiled_graphs) == count
    assert "bool() at " in str(compiled.recompiles[0]) and "was False, is True" in str(compiled.recompiles[0])


SIZES = {
    "nonzero": (lambda x, m: x[m.nonzero()[:, 0]].sum() * 2, 1),
    "masked_select": (lambda x, m: x.masked_select(m).sum(), 1),
    "a mask": (lambda x, m: x[m].exp().sum(), 1),
    "unique": (lambda x, m: x.sum() * torch.unique(torch.arange(20)[m]).sum(), 1),
    "repeat_interleave": (lambda x, m: x.repeat_interleave(m.long()).sum(), 1),
    "bincount": (lambda x, m: torch.bincount(torch.arange(20)[m]).sum() * x.sum(), 1),
    "the result itself": (lambda x, m: x[m] * 2, 3),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_from_none_to_all_are_one_program(name):
    program, most = SIZES[name]
    compiled = foregrad.aot_function(program, nop)
    for n in (3, *range(21), 0):
        found = []
        for f in (compiled, program):
            x, mask = leaf(20), torch.arange(20) < n
            result = f(x, mask)
            result.sum().backward()
            found.append((result.detach(), x.grad, result.shape, result.stride()))
        assert same(*found), n
    assert len(compiled.specializations) <= most, compiled.recompiles


def test_the_forward_is_whole_and_in_parts():
    compiled = foregrad.aot_function(two_branches, nop)
    compiled(leaf(3))
    [program] = compiled.specializations
    assert len(program.forward_parts) == 3
    assert [n.target for n in program.forward_graph.graph.nodes].count(torch.ops.foregrad.read.default) == 2
    assert "# read 0: bool() is True, at " in program.source
    again = foregrad.aot_function(lambda x: x * 2, nop)
    again(leaf(3))
    assert again.specializations[0].forward_parts == (again.specializations[0].forward_graph,)


def test_a_loop_that_does_not_end_is_told():
    def endless(x):
        while x.sum() > 0:
            x = x * 2
        return x

    x = plain(3)
    with (
        foregrad.config.patch(max_reads=20),
        pytest.raises(DataDependentError, match="more than 20 times"),
    ):
        foregrad.aot_function(endless, nop)(x)
    assert torch.equal(x, plain(3)) and x._version == 0


def test_a_side_effect_before_a_read_is_refused():
    calls = []
    with torch.library._scoped_library("foregrad_reads", "DEF") as library:
        library.define("tell(Tensor x) -> ()")
        library.impl("tell", lambda x: calls.append(x), "CompositeExplicitAutograd")
        torch.library.register_fake("foregrad_reads::tell", lambda x: None, lib=library)
        torch.library._register_effectful_op("foregrad_reads::tell", torch._library.effects.EffectType.ORDERED)

        def program(x):
            torch.ops.foregrad_reads.tell(x)
            return x * 2 if x.sum() > 0 else x

        with pytest.raises(DataDependentError, match="side effects, and the program reads data after it"):
            foregrad.aot_function(program, nop)(plain(3))

        def after(x):
            y = x * 2 if x.sum() > 0 else x
            torch.ops.foregrad_reads.tell(y)
            return y

        assert not calls
        compiled = foregrad.aot_function(after, nop)
        for sign in (1, -1, 1):
            assert torch.equal(compiled(sign * plain(3)), after(sign * plain(3)))
        assert len(calls) == 6


def test_nothing_real_is_kept():
    compiled = foregrad.aot_function(lambda x: (x + 1) * 2 if (x + 1).sum() > 0 else x, nop)
    x = torch.ones(1000)
    given = weakref.ref(x)
    compiled(x)
    del x
    gc.collect()
    assert given() is None
    assert not [o for o in gc.get_objects() if type(o) is Tensor and o.shape == (1000,)]


def test_a_miss_leaves_everything_as_it_was():
    def program(x, y, z):
        y.mul_(2)
        z.requires_grad_()
        noise = torch.rand(3)
        return (x * noise * z).sum() if y.sum() > 0 else (x - noise).sum()

    compiled = foregrad.aot_function(program, nop)
    compiled(plain(3), plain(3), plain(3))
    call = compiled.specializations[0].call
    x, y, z = plain(3), -plain(3), plain(3)
    state = torch.get_rng_state()
    assert call((x, y, z), {}) is MISS
    assert torch.equal(y, -plain(3)) and y._version == 0 and not z.requires_grad
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()


@pytest.mark.parametrize(
    "options", [{"memory_budget": 0.1}, {"dynamic": True}, {"keep_inference_input_mutations": True}]
)
@pytest.mark.parametrize("name", ["a_branch", "written_before_and_after", "EarlyExit", "dropout_before"])
def test_under_other_options(name, options):
    fn, arguments, _ = PROGRAMS[name]
    kind = foregrad.aot_module if isinstance(fn, type) else foregrad.aot_function
    compare(fn, arguments, 20, lambda f: kind(f, nop, **options))


@pytest.mark.parametrize("name", ["a_branch", "written_before_and_after", "EarlyExit", "until_it_is_small"])
def test_behind_the_front_door(name):
    fn, arguments, _ = PROGRAMS[name]
    compare(fn, arguments, 20, lambda f: foregrad.compile(f, backend="eager"))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_with_gradients_off(mode):
    compiled = foregrad.aot_function(two_branches, nop)
    with mode():
        for n in range(CALLS):
            x = values(n, 3)
            assert torch.equal(compiled(x), two_branches(x))


def test_gradients_of_gradients():
    def cube(x):
        return x**3 if x.sum() > 0 else x**2

    compiled = foregrad.aot_function(cube, nop)
    for sign in (1.0, -1.0, 1.0):
        found = []
        for f in (compiled, cube):
            x = (sign * plain(3)).requires_grad_()
            (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.sum(), x)[0])
        assert torch.equal(*found)


def masked_and_branched(x, w):
    y = (x @ w).tanh()
    return (y[y > 0] ** 2).sum() + (y**3 if y.sum() > 0 else y.exp()).sum()


@pytest.mark.parametrize(
    "options", [{}, {"memory_budget": 0.3}, {"dynamic": True}, {"partition_fn": min_cut_rematerialization_partition}]
)
def test_masks_and_branches_under_all_partitions(options):
    compare(
        masked_and_branched,
        lambda n: (values(n, 4, 4), values(n + 1, 4, 4)),
        4,
        lambda f: foregrad.aot_function(f, nop, **options),
    )


def test_gradients_of_gradients_that_are_zero():
    """Autograd's zeros without memory."""

    def program(x):
        return x.view(3, -1).abs() * (2 if (x > 0.3).nonzero().shape[0] else 3)

    compiled = foregrad.aot_function(program, nop)
    for n in (3, 6):
        found = []
        for f in (compiled, program):
            x, tangent = values(n, n), torch.ones(3, n // 3, requires_grad=True)
            (first,) = torch.autograd.grad(f(x), x, tangent, create_graph=True)
            found.append(torch.autograd.grad(first.sum(), (x, tangent), allow_unused=True))
        assert same(*found)


def test_gradients_of_gradients_of_what_a_mask_selects():
    compiled = foregrad.aot_function(masked_and_branched, nop)
    for n in range(4):
        found = []
        for f in (compiled, masked_and_branched):
            x, w = values(n, 4, 4), values(n + 1, 4, 4)
            first = torch.autograd.grad(f(x, w), (x, w), create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), (x, w)))
        assert same(*found)


def test_threads_take_programs_of_their_own_data():
    compiled, wrong = foregrad.aot_function(masked_and_branched, nop), []

    def work(start):
        for n in range(start, start + 8):
            found = []
            for f in (compiled, masked_and_branched):
                x, w = values(n, 4, 4), values(n + 1, 4, 4)
                f(x, w).backward()
                found.append((x.grad, w.grad))
            wrong.extend([] if same(*found) else [n])

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_follows_a_read_of_other_data_never_runs():
    ran = []
    with torch.library._scoped_library("foregrad_traps", "DEF") as library:
        library.define("trap(Tensor x) -> Tensor")
        library.impl("trap", lambda x: (ran.append(float(x[0])), x.clone())[1], "CompositeExplicitAutograd")
        torch.library.register_fake("foregrad_traps::trap", torch.empty_like, lib=library)

        def program(x):
            return torch.ops.foregrad_traps.trap(x) if x.sum() > 0 else x * 2

        compiled = foregrad.aot_function(program, nop)
        for sign in (1, -1, 1, -1, -1):
            compiled(sign * plain(3))
    assert ran == [float(plain(3)[0])] * 2


def test_a_partitioner_that_drops_reads_is_told():
    def partition(module, inputs, *, num_fwd_outputs):
        for node in list(module.graph.nodes):
            if node.target is torch.ops.foregrad.read.default:
                module.graph.erase_node(node)
        return foregrad.default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs)

    with pytest.raises(foregrad.errors.PartitionError, match="left a read out of the forward"):
        foregrad.aot_function(two_branches, nop, partition_fn=partition)(leaf(3))
    compiled = foregrad.aot_function(
        two_branches, nop, partition_fn=lambda *a, **k: foregrad.default_partition(*a, **k)
    )
    for n in range(CALLS):
        assert torch.equal(compiled(values(n, 3)), two_branches(values(n, 3)))


def test_a_program_lists_its_reads():
    def program(x):
        rows = x[x > 0]
        return rows.sum() if len(rows) > 2 else x.sum() * (2 if x.max() > 1 else 3)

    compiled = foregrad.aot_function(program, nop)
    compiled(torch.tensor([1.0, 2.0, 3.0, -1.0]))
    compiled(torch.tensor([2.0, -1.0]))
    many, few = (specialization.reads for specialization in compiled.specializations)
    assert [read.operator for read in many] == ["aten.nonzero.default"] and many[0].symbol is not None
    assert many[0].symbol in str(many[0].condition) and "rows = x[x > 0]" in many[0].place
    assert few[-1].operator == "bool()" and few[-1].value is True and few[-1].symbol is None
    assert f"has the size {many[0].symbol} where " in str(many[0])


def test_past_the_limit_the_warning_names_the_read_that_keeps_changing():
    with foregrad.config.patch(max_specializations=3):
        compiled = foregrad.aot_function(lambda x: x * x.sum().item(), nop)
    for n in range(3):
        compiled(torch.full((2,), n + 1.0))
    with pytest.warns(foregrad.errors.EagerFallbackWarning, match=r"What keeps changing is item\(\) at .*test_checked"):
        assert torch.equal(compiled(torch.full((2,), 4.0)), torch.full((2,), 32.0))


@pytest.mark.parametrize("partition", [foregrad.default_partition, foregrad.min_cut_rematerialization_partition])
def test_what_a_checkpoint_counts_again_is_read_in_the_forward(partition):
    """Batch norm without momentum reads how many batches it has seen, and counts once more when it is run again."""
    norm, other = (torch.nn.BatchNorm1d(4, momentum=None) for _ in range(2))
    compiled = foregrad.aot_function(
        lambda x: checkpoint(norm, x, use_reentrant=False) * 2, nop, partition_fn=partition
    )
    for step in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).requires_grad_()
        y = x.detach().requires_grad_()
        (checkpoint(other, y, use_reentrant=False) * 2).square().sum().backward()
        compiled(x).square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        assert all(map(torch.equal, norm.buffers(), other.buffers()))
