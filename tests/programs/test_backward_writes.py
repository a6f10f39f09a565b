"""What a backward writes: buffers, gradients, shapes; when it happens, how often, and only where autograd goes."""

import pytest
import torch
from torch import nn
from torch.autograd import Function

import foregrad
from foregrad.errors import BackwardError, UnsupportedError
from helpers import leaf, nop, plain


def shown(value):
    """Tensors as what they hold, so that two runs can be compared."""
    if isinstance(value, torch.Tensor):
        return [list(value.shape), value.stride(), value.requires_grad, value.detach().tolist()]
    return [shown(v) for v in value] if isinstance(value, (list, tuple)) else value


def agree(program, scene):
    """A scene shows the same when it is played with what Foregrad makes of the program."""
    assert shown(scene(foregrad.aot_function(program, nop))) == shown(scene(program))


def attempted(step, *args, **kwargs):
    """The class of what a step raises, as part of what is seen."""
    try:
        step(*args, **kwargs)
    except RuntimeError as error:
        return "RuntimeError" if isinstance(error, BackwardError) else type(error).__name__  # eager's class
    return "done"


class Tick(Function):
    """Counts its backwards in a tensor that it saved."""

    @staticmethod
    def forward(ctx, x, b):
        ctx.save_for_backward(b)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.saved_tensors[0].add_(1)
        return gradient * 2, None


class InBackward(Function):
    """Calls a function on the gradient and a tensor that autograd does not watch over."""

    @staticmethod
    def forward(ctx, x, b, write):
        ctx.b, ctx.write = b, write
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        result = ctx.write(gradient, ctx.b)
        return gradient * 2 if result is None else result, None, None


def writes(function):
    """A program whose backward calls a function on the gradient and `b`."""

    def program(x, b):
        return InBackward.apply(x * 3, b, function) * 1

    program.__name__ = function.__name__
    return program


@writes
def adds_one(gradient, b):
    b.add_(1)


@writes
def logs_the_gradient(gradient, b):
    b.copy_(gradient)
    b[0].mul_(2)


@writes
def reads_what_it_wrote(gradient, b):
    b.add_(1)
    return gradient * b


@writes
def reads_then_writes(gradient, b):
    result = gradient * b
    b.mul_(2)
    return result


@writes
def transposes(gradient, b):
    b.t_()


@writes
def writes_and_transposes(gradient, b):
    b.add_(1)
    b.t_()


@writes
def scales_the_gradient_in_place(gradient, b):
    return gradient.mul_(2)


@writes
def turns_the_gradient_in_place(gradient, b):
    return gradient.neg_().t_().contiguous().t()


def a_hook_that_logs(x, b):
    h = x * 2
    h.register_hook(lambda g: b.add_(g.abs()) * 0 + g)
    return h.sin()


def a_hook_that_clips(x, b):
    h = x * 2
    h.register_hook(lambda g: g.clamp_(-1, 1))
    return h.sin() + h


def a_hook_on_the_output(x, b):
    y = x.sin()
    y.register_hook(lambda g: (b.add_(1), g.mul_(2))[1])
    return y


def a_shared_gradient(x, b):
    return InBackward.apply(x, b, lambda g, b: g.mul_(2)) + x


def saved(x, b):
    return Tick.apply(x, b)


def written_in_both(x, b):
    b.add_(10)
    return Tick.apply(x, b)


def written_after_it_was_saved(x, b):
    y = Tick.apply(x, b)
    b.add_(10)
    return y


def in_order(x, b):
    first = InBackward.apply(x, b, lambda g, b: b.mul_(2) * 0)
    second = InBackward.apply(x, b, lambda g, b: b.add_(3) * 0)
    return first + second


def a_view_of_the_buffer(x, b):
    return InBackward.apply(x, b[1:], lambda g, row: row.add_(7) * 0 + g)


def the_leaf_itself(x, b):
    h = x * 1
    h.register_hook(lambda g: x.data.sub_(0.5 * g))
    return h * b


PROGRAMS = [adds_one, logs_the_gradient, reads_what_it_wrote, reads_then_writes, transposes, writes_and_transposes]
PROGRAMS += [scales_the_gradient_in_place, turns_the_gradient_in_place, a_hook_that_logs, a_hook_that_clips]
PROGRAMS += [a_hook_on_the_output, a_shared_gradient, saved, written_in_both, written_after_it_was_saved, in_order]
PROGRAMS += [a_view_of_the_buffer, the_leaf_itself]


def once(call):
    x, b, tangent = leaf(2, 3), plain(2, 3) * 10, plain(2, 3)
    y = call(x, b)
    after_forward = b.clone(), b._version, y.clone()
    done = attempted(y.backward, tangent)
    return after_forward, done, b, b._version, x, x.grad, tangent


def twice(call):
    x, b = leaf(2, 3), plain(2, 3) * 10
    y = call(x, b)
    seen = [b.clone()]
    for retain in (True, False):
        seen += [attempted(y.backward, plain(2, 3), retain_graph=retain), shown(b), shown(x.grad)]
    return seen


def keeping_the_graph(call):
    x, b = leaf(2, 3), plain(2, 3) * 10
    try:
        (first,) = torch.autograd.grad(call(x, b), x, plain(2, 3), create_graph=True)
    except RuntimeError:
        return "refused"
    return first, b, b._version


def through_a_sum(call):
    x, b = leaf(2, 3), plain(2, 3) * 10
    done = attempted((call(x, b).sum() * 3).backward)
    return (done, b, x.grad) if done == "done" else done


def two_calls(call):
    x, b, other = leaf(2, 3), plain(2, 3) * 10, plain(2, 3)
    first, second = call(x, b), call(x * 2, other)
    seen = [attempted(first.backward, plain(2, 3)), b, other.clone()]
    return *seen, attempted(second.backward, plain(2, 3)), b, other, x.grad


SCENES = [once, twice, keeping_the_graph, through_a_sum, two_calls]
CASES = [(p, s) for p in PROGRAMS for s in SCENES if not (s is keeping_the_graph and p is a_hook_that_logs)]


@pytest.mark.parametrize(("program", "scene"), CASES, ids=lambda f: f.__name__)
def test_a_backward_writes_as_in_eager(program, scene):
    """M-14, M-15, M-17, J-17"""
    agree(program, scene)


def test_a_differentiable_write_in_backward_is_refused():
    """M-14: in eager the log would require grad from then on."""
    x, log = leaf(2, 3), plain(2, 3)
    y = foregrad.aot_function(a_hook_that_logs, nop)(x, log)
    with pytest.raises(UnsupportedError, match=r"makes args\[1\] require grad by writing to it"):
        torch.autograd.grad(y, x, plain(2, 3), create_graph=True)
    assert torch.equal(log, plain(2, 3))


def test_a_second_derivative_is_refused_where_the_backward_writes():
    """J-17: it is not left out in silence where the first gradient is one part of a loss."""
    x = leaf(2, 3)
    y = foregrad.aot_function(lambda x, b: InBackward.apply(x.sin(), b, lambda g, b: b.add_(1)), nop)(x, plain(2, 3))
    (first,) = torch.autograd.grad(y, x, plain(2, 3), create_graph=True)
    with pytest.raises(BackwardError, match="Double backward"):
        (first.square().sum() + x.sum()).backward()


MOVES = {
    "resize_": lambda g, b: (b.resize_(8), None)[1],
    "set_": lambda g, b: (b.set_(g * 5), None)[1],
    ".data": lambda g, b: setattr(b, "data", b * 5),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_other_memory_in_backward_is_refused_for_now(move):
    """M-17: the call itself says so, and nothing is written."""
    x, b = leaf(2, 3), plain(2, 3)
    with pytest.raises(UnsupportedError, match="the backward resizes or moves args"):
        foregrad.aot_function(writes(move), nop)(x, b)
    assert shown([x, b, x._version, b._version, x.grad]) == shown([leaf(2, 3), plain(2, 3), 0, 0, None])


def test_the_write_of_one_branch_only():
    """M-14, J-5: the graph is kept, as one output after another without that is for later (checking.py)."""

    def program(x, w, b, c):
        return InBackward.apply(x, b, lambda g, b: b.add_(1) * 0), InBackward.apply(w, c, lambda g, c: c.add_(g) * 0)

    def scene(call):
        x, w, b, c = leaf(2), leaf(2), plain(2), plain(2)
        first, second = call(x, w, b, c)
        first.sum().backward(retain_graph=True)
        seen = [b.tolist(), c.tolist(), w.grad is None, b._version, c._version]
        second.sum().backward()
        return *seen, b, c, x.grad, w.grad, b._version, c._version

    agree(program, scene)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_view_that_shows_elements_twice_is_written_through_its_memory(requires_grad):
    def scene(call):
        x, memory = leaf(2), plain(3).requires_grad_(requires_grad)
        call(x, memory.expand(2, 3)).sum().backward()
        return memory, x.grad, memory.grad

    agree(lambda x, b: InBackward.apply(x, b.diagonal(), lambda g, b: b.add_(1) * g), scene)


def test_a_write_that_only_a_later_backward_makes_is_refused():
    state, x, b = {"writes": False}, leaf(2), plain(2)
    compiled = foregrad.aot_function(
        lambda x, b: InBackward.apply(x, b, lambda g, b: b.add_(1) * g if state["writes"] else g * 2), nop
    )
    result = compiled(x, b)
    state["writes"] = True
    with pytest.raises(BackwardError, match=r"writes to args\[1\], which it did not when the program was compiled"):
        result.sum().backward()
    assert (b.tolist(), b._version, x.grad) == (plain(2).tolist(), 0, None)


def test_a_backward_that_writes_to_what_another_saved_is_refused():
    """M-14: together they fail in eager too, and alone they work; the forward can be called in any case."""

    def program(x, b):
        return x * b, InBackward.apply(x, b, lambda g, b: b.add_(1) * 0)

    x = leaf(2)
    first, second = foregrad.aot_function(program, nop)(x, plain(2))
    assert (first.tolist(), second.tolist()) == ([1, 4], [2, 4])
    with pytest.raises(UnsupportedError, match="writes to what the backward of another has saved"):
        first.sum().backward()


def test_memory_of_two_histories_that_a_backward_writes_is_refused():
    """M-14, B-5"""

    def program(x, w):
        return InBackward.apply(w, x, lambda g, x: x.add_(1) * g)

    w = leaf(2, 3)
    with pytest.raises(UnsupportedError, match="inputs with histories of their own"):
        foregrad.aot_function(program, nop)(w.detach().requires_grad_(), w)
    assert w.tolist() == plain(2, 3).tolist()


def test_a_backward_with_a_graph_that_would_write_to_a_leaf_of_the_program():
    """M-14: eager does not go there for the gradients of `x` alone."""

    def program(x):
        own = x.detach().requires_grad_()
        return InBackward.apply(own, own, lambda g, own: own.add_(1) * g) + x * x

    x = leaf(3)
    (gradient,) = torch.autograd.grad(program(x).sum(), x, create_graph=True)
    assert gradient.tolist() == [2, 4, 6]
    y = foregrad.aot_function(program, nop)(x).sum()
    with pytest.raises(UnsupportedError, match="a leaf that the program made"):
        torch.autograd.grad(y, x, create_graph=True)


def test_a_backward_write_to_the_bytes_of_another_dtype():
    """M-14: whatever the partitioner would rather compute again."""

    def program(y, z, w):
        z.tril_()
        return InBackward.apply(w, z, lambda g, z: z.add_(1).sum() * g)

    def scene(call):
        y, w = plain(2, 2), leaf(2)
        call(y, y.view(torch.int32), w).sum().backward()
        return y, w.grad

    for partition in (foregrad.default_partition, foregrad.min_cut_rematerialization_partition):
        compiled = foregrad.aot_function(program, nop, partition_fn=partition)
        assert shown(scene(compiled)) == shown(scene(program))


def test_gradients_for_some_inputs_run_the_whole_backward():
    """M-14, a documented difference: eager runs only the nodes on the way to `w`, a compiled backward all of them."""

    def program(x, w, b):
        return InBackward.apply(x, b, lambda g, b: b.add_(1) * 0 + g) * w

    def scene(call):
        x, w, b = leaf(2), leaf(2), plain(2)
        y = call(x, w, b).sum()
        (for_w,), first = torch.autograd.grad(y, w, retain_graph=True), b.tolist()
        (for_x,), second = torch.autograd.grad(y, x), b.tolist()
        return for_w.tolist(), for_x.tolist(), [first, second]

    gradients = [2, 4], [1, 2]
    assert scene(program) == (*gradients, [[1, 2], [2, 3]])
    assert scene(foregrad.aot_function(program, nop)) == (*gradients, [[2, 3], [3, 4]])


def test_a_result_that_the_backward_writes_is_refused_for_now():
    """M-14: what was returned would have to be the tensor that the backward writes."""

    def program(x):
        seen = x.detach() * 0
        return InBackward.apply(x, seen, lambda g, seen: seen.add_(g) * 0 + g), seen, seen[1:]

    x = leaf(3)
    with pytest.raises(UnsupportedError, match="writes in backward to a tensor that the forward made"):
        foregrad.aot_function(program, nop)(x)
    assert (x.tolist(), x._version, x.grad) == ([1, 2, 3], 0, None)


def test_a_buffer_that_is_also_returned():
    """M-12, M-14"""

    def program(x, b):
        return InBackward.apply(x, b, lambda g, b: b.add_(g) * 0 + g), b, b.view(-1)

    def scene(call):
        x, b = leaf(2, 2), plain(2, 2)
        y, same, flat = call(x, b)
        y.backward(plain(2, 2))
        return same is b, flat, b, x.grad

    agree(program, scene)


class Scaled(nn.Module):
    """The recipe of low-precision training: scales follow the largest gradient seen."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(plain(3, 3))
        self.register_buffer("history", torch.zeros(4))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        def write(gradient, history):
            history.copy_(history.roll(1))
            history[0] = gradient.abs().max()
            self.scale.copy_(history.max())
            return gradient * self.scale

        return InBackward.apply(x @ self.weight, self.history, write)


def test_a_module_that_keeps_scales_of_its_gradients():
    """M-14, F-9: step after step, with one program."""

    def train(wrap):
        module = Scaled()
        call, seen = wrap(module), []
        for step in range(1, 5):
            call(plain(2, 3)).backward(plain(2, 3) / step)
            seen += [module.history.tolist(), module.scale.tolist(), module.weight.grad.tolist()]
        return seen, call

    got, compiled = train(lambda module: foregrad.aot_module(module, nop))
    assert got == train(lambda module: module)[0]
    assert len(compiled.specializations) == 1


def test_a_closure_that_counts_backwards():
    """M-14, F-14"""
    count = torch.zeros(())

    def program(x):
        y = x * 2
        y.register_hook(lambda g: count.add_(1) * 0 + g)
        return y

    def scene(call):
        count.zero_()
        for _ in range(3):
            call(leaf(2)).sum().backward()
        return count.tolist()

    agree(program, scene)


def test_the_gradient_that_the_user_passes_is_written():
    """M-15"""

    def scene(call):
        x, tangent = leaf(2, 3), plain(3, 2).t()
        row = tangent[0]
        call(x, plain(2, 3)).backward(tangent)
        return tangent, row, tangent._version, x.grad

    agree(lambda x, b: InBackward.apply(x, b, lambda g, b: g.mul_(2)), scene)
    agree(a_hook_on_the_output, scene)


def test_a_backward_write_under_no_grad_is_never_made():
    """M-14"""

    def scene(call):
        b = plain(2, 3)
        with torch.no_grad():
            call(leaf(2, 3), b)
        call(plain(2, 3), b)
        return b, b._version

    agree(saved, scene)
    agree(adds_one, scene)


def test_what_a_backward_with_a_graph_may_not_write():
    """M-14: gradients are on then, and the view of a leaf is refused as it is in eager."""
    base = leaf(3)
    for call in (InBackward.apply, foregrad.aot_function(InBackward.apply, nop)):
        x = leaf(2)
        y = call(x, base[:2], lambda g, b: b.add_(1))
        with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
            torch.autograd.grad(y, x, plain(2), create_graph=True)
    assert torch.equal(base.detach(), plain(3))


class Ticks(Function):
    """Counts its backwards in a tensor that it was given."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x * 2

    @staticmethod
    def backward(ctx, g):
        ctx.count.add_(1)
        return g * 2, None


def test_one_of_several_views_may_not_be_written_by_a_backward_with_a_graph():
    """M-14"""
    for call in (Ticks.apply, foregrad.aot_function(Ticks.apply, nop)):
        x, count = leaf(2), (leaf(3) * 1).chunk(2)[0]
        y = call(x, count)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            torch.autograd.grad(y, x, plain(2), create_graph=True)


def test_a_view_without_grad_of_what_the_backward_writes_is_not_read_again():
    """M-14: eager speaks of the view here, where it speaks of a version elsewhere."""

    def program(x):
        with torch.no_grad():
            view = x.view(-1)
        counted = Ticks.apply(view, x)
        return view.square(), counted

    def scene(call):
        x = leaf(2)
        outputs = call(x)
        tangents = [plain(2), plain(2)]
        torch.autograd.backward(outputs, tangents, retain_graph=True)
        return attempted(torch.autograd.backward, outputs, tangents), x

    agree(program, scene)


def test_a_backward_with_a_graph_may_write_to_the_data_of_a_leaf():
    """M-14: to autograd, that is another tensor, whose second derivatives are refused by name."""

    def program(x):
        count = x.data
        y = Ticks.apply(x, count)
        count.add_(x)
        return y

    for call in (program, foregrad.aot_function(program, nop)):
        x = leaf(2)
        (gradient,) = torch.autograd.grad(call(x), x, plain(2), create_graph=True)
        assert gradient.tolist() == [2, 4]
