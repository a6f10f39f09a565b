"""Inputs that share memory, one of them written: every other one must see it, inside the program and after it."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import foregrad
from checking import check_core
from foregrad.errors import UnsupportedError
from helpers import grab, leaf, nop, plain


def lie_in(storage, *layout, dtype=torch.float32):
    """A tensor in a storage that no other tensor's autograd knows of."""
    return torch.empty(0, dtype=dtype).set_(storage, *layout)


def without_a_base():
    storage = plain(6).untyped_storage()
    return lie_in(storage, 0, (4,)), lie_in(storage, 2, (4,))


def of_two_dtypes_without_a_base():
    storage = plain(4).untyped_storage()
    return lie_in(storage, 0, (2,), dtype=torch.float64), lie_in(storage, 1, (3,), dtype=torch.int16)


def views(of, *how):
    """Makes views of one tensor."""
    return lambda: tuple(view(base) for base in [of()] for view in how)


def numbers():
    return plain(4, 4)


def complex_numbers():
    return torch.tensor([1 + 2j, 3 - 1j, -2 + 0.5j])


def a_result():
    return leaf(4, 4) * 1


def same(t):
    return t


OVERLAPS = {
    "shifted": views(numbers, lambda t: t.view(-1)[:5], lambda t: t.view(-1)[2:9]),
    "row and column": views(numbers, lambda t: t[1], lambda t: t[:, 1]),
    "base first": views(numbers, same, lambda t: t[1:3]),
    "base last": views(numbers, lambda t: t[1:, 2:], same),
    "transposed": views(numbers, same, lambda t: t.t()),
    "reshaped": views(numbers, lambda t: t.view(2, 8), lambda t: t.view(8, 2)),
    "every second": views(numbers, lambda t: t.view(-1)[::2], lambda t: t.view(-1)[1:6]),
    "one element": views(numbers, lambda t: t[0, 0], lambda t: t[0]),
    "empty beside": views(numbers, lambda t: t[:2], lambda t: t[:0]),
    "same place": views(numbers, lambda t: t[1:], lambda t: t[1:]),
    "views of views": views(numbers, lambda t: t[1:].t()[1:], lambda t: t.view(2, 2, 4).select(1, 1).t()),
    "detached": views(numbers, same, lambda t: t.detach()[1:]),
    "data": views(numbers, lambda t: t[:2], lambda t: t.data),
    "no base": without_a_base,
    "equal item size": views(numbers, same, lambda t: t.view(torch.int32)[1:]),
    "smaller items": views(numbers, lambda t: t[1:], lambda t: t.view(torch.int16)),
    "larger items": views(numbers, lambda t: t[:2], lambda t: t.view(torch.float64)),
    "two dtypes, no base": of_two_dtypes_without_a_base,
    "complex and real": views(complex_numbers, same, torch.view_as_real),
    "real part and complex": views(complex_numbers, lambda z: z.real, same),
    "conjugated": views(complex_numbers, same, lambda z: z.conj()[1:]),
    "negated": views(complex_numbers, lambda z: z.conj().imag, same),
}


def write_the_first(a, b):
    before = b * 1
    a.mul_(2)
    return before, b + 1


def write_the_second(a, b):
    b.add_(1)
    return a * 3


def write_both(a, b):
    a.mul_(2)
    b.add_(1)
    a.sub_(3)
    return a.clone(), b.clone()


def return_the_members(a, b):
    a.add_(1)
    return b, {"first": a}, b


def return_views_of_members(a, b):
    a.add_(1)
    return b.unsqueeze(0), a.expand(2, *a.shape), b.detach()


def write_through_what_hides_it(a, b):
    a.detach().mul_(2)
    with torch.no_grad():
        b.add_(1)
    return a * b.sum()


def write_a_part(a, b):
    a.select(-1, 0).fill_(7) if a.dim() else a.fill_(7)
    return b * 2


ON_ANY_PAIR = [write_the_first, write_the_second, write_both, write_a_part, write_through_what_hides_it]
ON_ANY_PAIR += [return_the_members, return_views_of_members]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("program", ON_ANY_PAIR, ids=lambda p: p.__name__)
def test_a_write_is_seen_through_every_alias(program, overlap):
    """B-1, B-4, B-5, B-6, B-8, B-11"""
    check_core(program, *OVERLAPS[overlap]())


DIFFERENTIABLE = {
    "shifted": views(a_result, lambda t: t.view(-1)[:5], lambda t: t.view(-1)[2:9]),
    "row and column": views(a_result, lambda t: t[1], lambda t: t[:, 1]),
    "base first": views(a_result, same, lambda t: t[1:3]),
    "base last": views(a_result, lambda t: t[1:, 2:], same),
    "transposed": views(a_result, lambda t: t.t(), same),
    "detached": views(a_result, same, lambda t: t.detach()),
    "detached is written": views(a_result, lambda t: t.detach(), same),
    "data": views(a_result, lambda t: t[1:], lambda t: t.data[:2]),
    "as integers": views(a_result, same, lambda t: t.view(torch.int32)),
}


@pytest.mark.parametrize("overlap", DIFFERENTIABLE)
@pytest.mark.parametrize("program", ON_ANY_PAIR, ids=lambda p: p.__name__)
def test_gradients_go_through_the_base(program, overlap):
    """B-4, B-5, B-6, M-2"""
    check_core(program, *DIFFERENTIABLE[overlap]())


WITH_A_WEIGHT = {
    "a weight makes the base differentiable": lambda a, b, w: (a.mul_(w), b * 2)[1],
    "saved, then written through an alias": lambda a, b, w: ((y := w * b), a.mul_(3), y)[2],
    "written, then saved": lambda a, b, w: (a.mul_(3), w * b, w * a)[1:],
    "copied onto each other": lambda a, b, w: (a.copy_(b.flip(0)), b.copy_(a.clone() * w), a * 1)[2],
    "view from before": lambda a, b, w: ((v := b.view(-1)[1:]), a.mul_(2), v.mul_(w.sum()), a * 1, v)[3:],
}
RESHAPED = {
    "a change of shape beside a write": lambda a, b, w: (b.unsqueeze_(1), a.exp_(), b * w, b)[2:],
    "a write after a change of shape": lambda a, b, w: (a.unsqueeze_(0), a.mul_(2), a.squeeze(0) * w, b + 1)[2:],
}
BESIDE_A_WEIGHT = {
    "views": views(numbers, lambda t: t.view(-1)[:4], lambda t: t.view(-1)[2:6]),
    "base and view": views(numbers, lambda t: t.view(-1)[:4], lambda t: t[0]),
    "data": views(numbers, lambda t: t.data[1], lambda t: t[1]),
    "no base": without_a_base,
}


@pytest.mark.parametrize("overlap", BESIDE_A_WEIGHT)
@pytest.mark.parametrize("case", [*WITH_A_WEIGHT, *RESHAPED])
def test_a_write_beside_a_weight(case, overlap):
    """B-4, B-5, B-7, M-2"""
    check_core((WITH_A_WEIGHT | RESHAPED)[case], *BESIDE_A_WEIGHT[overlap](), leaf(4))


DIFFERENTIABLE_BASE = views(a_result, lambda t: t[1], lambda t: t.view(-1)[2:6])


@pytest.mark.parametrize("case", WITH_A_WEIGHT)
def test_a_write_beside_a_weight_to_a_differentiable_base(case):
    """B-4, B-5, B-7, M-2"""
    check_core(WITH_A_WEIGHT[case], *DIFFERENTIABLE_BASE(), leaf(4))


@pytest.mark.parametrize("case", RESHAPED)
def test_a_write_to_the_base_of_a_reshaped_view_is_refused_for_now(case):
    """M-2, M-4: a view changes its shape in place, and its base is written with gradients."""
    members = DIFFERENTIABLE_BASE()
    with pytest.raises(UnsupportedError, match="a view has changed its shape"):
        foregrad.aot_function(RESHAPED[case], nop)(*members, leaf(4))
    assert [(t.tolist(), t._version) for t in members] == [([5, 6, 7, 8], 0), ([3, 4, 5, 6], 0)]


def each_scales_the_next(*members):
    for a, b in pairwise(members):
        b.mul_(a.mean())
    return members[-1] * 1, members[0]


def a_duplicate_beside_a_view(a, b, c):
    a.mul_(2)
    b.add_(1)
    return c * 1, b


@pytest.mark.parametrize("count", [2, 3, 9])
def test_any_number_of_members(count):
    """B-9"""
    for base in (plain(22), leaf(22) * 1):
        check_core(each_scales_the_next, *(base[2 * i : 2 * i + 5] for i in range(count)))


def test_members_in_containers_and_keywords():
    """B-1, F-3"""

    def program(pair, *, named):
        pair[1].mul_(2)
        named["b"][0].add_(1)
        return {"sum": pair[0] + named["b"][0], "same": named["b"][0]}

    base = plain(3, 4)
    check_core(program, (base[0], base[:3, 0]), kwargs={"named": {"b": [base.view(-1)[:4]]}})


def test_two_groups_at_once():
    """B-3"""

    def program(p, tail, k, column, q, v, u):
        tail.sub_(1)
        column.exp_()
        return p.sum() * k + q.sum() + u.sum(), v * 1

    u, v = plain(3), plain(2)
    check_core(program, plain(1), u[1:], 7, v.view(2, 1), plain(4), v, u)


@pytest.mark.parametrize("make", [lambda: plain(4), lambda: leaf(4) * 1], ids=["plain", "differentiable"])
def test_a_duplicate_beside_a_view(make):
    """D-2, D-3, B-1"""
    x = make()
    check_core(a_duplicate_beside_a_view, x, x, x[1:])
    check_core(a_duplicate_beside_a_view, x, x[1:], x)
    v = x[1:]
    check_core(a_duplicate_beside_a_view, v, v, x)


@pytest.mark.parametrize("make", [lambda: plain(2), lambda: leaf(2) * 1], ids=["plain", "differentiable"])
def test_one_tensor_twice(make):
    """D-1, D-2, D-6"""
    x = make()
    check_core(lambda a, b: (a.sub_(4), b.neg_(), a * b)[2], x, x)
    check_core(lambda a, b: (a.add_(a), b.unsqueeze_(0), b, a)[2:], x, x)
    check_core(lambda a, b, z: (a.add_(a), (t := z * b).view(-1), t.view(2, 1))[1:], x, x, leaf(2))


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("memory", plain(6))
        self.register_buffer("window", self.memory[1:4])
        self.weight = nn.Parameter(plain(3))

    def forward(self, x):
        self.window.mul_(2)
        x.add_(1)
        return self.memory.sum() * self.weight + x.sum()


def test_buffers_that_overlap_each_other_and_an_argument():
    """B-1, F-9"""
    module = Running()
    check_core(module, plain(3))
    check_core(module, module.memory[3:])
    check_core(module, module.weight.detach()[1:])


def test_tensors_of_a_closure_overlap_an_argument():
    """B-1, F-14"""
    memory, weight = plain(5), leaf(3)

    def program(x):
        x.mul_(2)
        memory[:2].add_(1)
        return memory.sum() * weight + x.sum()

    check_core(program, memory[1:])
    check_core(program, weight.data[1:])


def test_parameters_that_share_a_storage_are_written_without_grad():
    """B-5, M-6"""

    def program(flat, p, q):
        with torch.no_grad():
            p.mul_(2)
            flat.add_(1)
        return p * q[:3]

    flat = plain(6)
    check_core(program, flat, nn.Parameter(flat[:3]), nn.Parameter(flat[2:]))
    check_core(program, flat.clone(), *(flat[i : i + 4].detach().requires_grad_()[: 3 + i] for i in range(2)))


@pytest.mark.parametrize(
    "member", [lambda t: t[1:2].expand(3), lambda t: t.unfold(0, 2, 1)], ids=["expanded", "windows"]
)
def test_a_member_that_overlaps_itself(member):
    """B-1, B-4"""
    for base in (plain(4), leaf(4) * 1):
        check_core(lambda a, b: (a.mul_(2), b * 1, b)[1:], base[:3], member(base))


def test_members_are_inference_tensors():
    """B-1"""
    with torch.inference_mode():
        base = plain(4)
        check_core(write_both, base[:3], base[1:])
        check_core(return_the_members, base[:3], base[1:])


@pytest.mark.parametrize("options", [{"dynamic": True}, {"keep_inference_input_mutations": True}], ids=str)
def test_options_do_not_change_it(options):
    """B-1, M-8, M-9"""
    base, result = plain(6), leaf(6) * 1
    for program in (write_both, return_the_members):
        for pair in ((base[:4], base[1:]), (result[:4], result[1:])):
            check_core(program, *pair, compile=lambda fn: foregrad.aot_function(fn, nop, **options))


def test_a_real_detached_alias_shares_the_version():
    """B-5"""

    def versions(call):
        x = leaf(3) * 1
        alias, w = x.detach(), leaf(3)
        before = alias._version
        y = (call(x, alias) * w).sum()
        return alias._version - before, x._version, torch.autograd.grad(y, w)[0].tolist()

    program = lambda a, b: (a.neg_(), b * 2)[1]  # noqa: E731
    assert versions(foregrad.aot_function(program, nop)) == versions(program)


NEGATE = lambda a, b: (a.neg_(), b + 1)[1]  # noqa: E731
TURN = lambda a, b: (a.t_(), b + 1)[1]  # noqa: E731
COUNTS = {
    "rows": (NEGATE, lambda t: (t[:2], t[2:]), 2),
    "halves of rows": (NEGATE, lambda t: (t[:, :4], t[:, 4:]), 2),
    "ends": (NEGATE, lambda t: (t.view(-1)[:3], t.view(-1)[-3:]), 2),
    "empty": (NEGATE, lambda t: (t, t[:0]), 2),
    "overlapping": (NEGATE, lambda t: (t[:3], t[1:]), 1),
    "shape only": (TURN, lambda t: (t.view(8, 4), t.view(-1)), 2),
}


@pytest.mark.parametrize(("program", "members", "count"), COUNTS.values(), ids=COUNTS)
def test_only_views_that_may_overlap_become_one_input(program, members, count):
    """B-1, B-2, B-4"""
    check_core(program, *members(plain(4, 8)))
    check_core(program, *members(leaf(4, 8) * 1))
    compiled, graphs = grab(program)
    compiled(*members(plain(4, 8)))
    assert len(graphs.inputs("inference")) == count


def test_each_pattern_gets_its_program_once():
    """B-8, D-2, F-2"""
    compiled = foregrad.aot_function(write_both, nop)

    def play(call):
        seen = []
        for _ in range(2):
            for start in (0, 1, 2, 3):
                base = plain(6)
                seen.append([t.tolist() for t in call(base[:3], base[start : start + 3])] + [base.tolist()])
            x = plain(3)
            seen.append([t.tolist() for t in call(x, x)] + [x.tolist()])
        return seen

    assert play(compiled) == play(write_both)
    known = len(compiled.specializations)
    assert play(compiled) == play(write_both)
    assert len(compiled.specializations) == known <= 5


def test_a_view_that_is_resized_before_a_differentiable_write_is_refused():
    """B-5, M-10: it requires grad when its shape would be changed."""

    def program(x, y, w):
        w.resize_((5,))
        y += x

    y = plain(2, 3)
    with pytest.raises(UnsupportedError, match="makes it require grad"):
        foregrad.aot_function(program, nop)(leaf(2, 3), y, y[0::2])
    assert y.tolist() == plain(2, 3).tolist()


def test_a_part_that_grows_beside_bytes_of_another_dtype():
    """B-4: as_strided_ reaches what lies behind the part, in memory that is shown as integers too."""

    def program(y, z):
        y.as_strided_((1, 3), (3, 1), 0)
        y.mul_(2)
        return z + 1

    x = plain(3)
    check_core(program, x[:2], x.detach().view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.int16, torch.float64])
@pytest.mark.parametrize("go", [lambda x, y: x.exp(), lambda x, y: (x * x).sum() + (y * y).sum(), lambda x, y: x])
def test_an_input_that_the_program_makes_require_grad_beside_views_in_another_dtype(go, dtype):
    """B-5: neither family stands for the memory, so its root is an input for the sake of its gradient."""
    memory = plain(4)
    check_core(lambda x, y, z: (x.requires_grad_(), go(x, y))[1], memory, memory[:2], memory.detach().view(dtype))


def makes_both(x, y):
    y.requires_grad_()
    x.requires_grad_()
    return y * 2, x * 3


def assigns_to_both(x, y):
    x.requires_grad = True
    y.requires_grad = True
    return y


@pytest.mark.parametrize("program", [makes_both, assigns_to_both])
def test_a_view_and_its_base_that_the_program_makes_require_grad(program):
    """The view gets a gradient of its own."""
    x = plain(3)
    y = x[1:]
    with pytest.raises(UnsupportedError, match=r"makes args\[1\] require grad and what it is a view of"):
        foregrad.aot_function(program, nop)(x, y)
    assert not x.requires_grad and not y.requires_grad


def test_a_base_that_the_program_makes_require_grad_by_assignment():
    def program(x, y):
        x.requires_grad = True
        return y * 2, x * 3

    x = plain(3)
    check_core(program, x, x[1:])


def test_a_tensor_found_outside_that_the_program_makes_require_grad_by_assignment():
    seen = []
    for transform in (lambda f: f, lambda f: foregrad.aot_function(f, nop)):
        weight, x = plain(3), leaf(3)

        def program(x, weight=weight):
            weight.requires_grad = True
            return (x * weight).sum()

        call = transform(program)
        for _ in range(2):
            call(x).backward()
        seen.append([weight.requires_grad, weight.grad.tolist(), x.grad.tolist()])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("has_a_program", [False, True])
def test_one_memory_with_two_storages(has_a_program):
    """The storages do not tell that a write to one input shows in the other; eager's result does."""

    def program(x, y):
        x.mul_(2)
        return x + y

    def pair():
        x = torch.ones(4)
        return x, torch.from_numpy(x.numpy())

    compiled = foregrad.aot_function(program, nop)
    if has_a_program:
        assert torch.equal(compiled(torch.ones(4), torch.ones(4)), program(torch.ones(4), torch.ones(4)))
    with pytest.raises(foregrad.errors.UnsupportedError, match="a storage of its own"):
        compiled(*pair())
    unwritten = foregrad.aot_function(lambda x, y: x * y, nop)
    assert torch.equal(unwritten(*pair()), torch.ones(4))
