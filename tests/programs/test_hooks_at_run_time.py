"""Hooks and `retain_grad`, made before, inside and after a compiled call."""

import warnings

import pytest
import torch
from torch import nn

import foregrad
from checking import check_core
from foregrad.errors import EscapeError, UnsupportedError
from helpers import grab, leaf, nop, plain

multi_grad_hook = torch.autograd.graph.register_multi_grad_hook


def square(gradient):
    """Not linear: it matters whether it sees the whole gradient."""
    return gradient * gradient


def compiled(program):
    return foregrad.aot_function(program, nop)


def gradients(tensors):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors that are no leaves
        return [None if t.grad is None else t.grad.clone() for t in tensors]


def train(program, leaves):
    """Two calls with the same tensors, each followed by a backward; the inputs are used beside the program too."""
    x, w = leaf(3), leaf(3)
    a, b = (x, w) if leaves else (x * 1, w * 1)
    seen = []
    for _ in range(2):
        out = program(a, b)
        results = out if isinstance(out, tuple) else (out,)
        loss = sum((y * y).sum() for y in results if y.requires_grad) + (a**3).sum() + b.sum()
        loss.backward(retain_graph=True)
        seen += gradients((x, w, a, b, *results))
        seen += [bool(t._backward_hooks) for t in (a, b)]
    return seen


def agree(program, leaves=True):
    eager, ours = train(program, leaves), train(compiled(program), leaves)
    assert len(eager) == len(ours)
    for one, other in zip(eager, ours, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one is other or one == other


# ------------------------------------------------------------------------------------------- inside, on inputs
def on_an_input(x, w):
    x.register_hook(square)
    return x * w


def with_an_intermediate(x, w):
    y = x.sin()
    x.register_hook(lambda g: g * g * y.detach())
    return y * w


def with_an_input(x, w):
    x.register_hook(lambda g: g * g * w.detach())
    return x * w


def with_a_default(x, w):
    y = w.detach() + 1

    def hook(g, *, factor=y):
        return g * factor

    x.register_hook(hook)
    return x * w


def with_a_function_that_holds_a_tensor(x, w):
    y = w.detach() + 1
    scale = lambda g: g * y  # noqa: E731
    x.register_hook(lambda g: scale(g) + 1)
    return x * w


def through_a_partial(x, w):
    import functools

    x.register_hook(functools.partial(torch.mul, w.detach() * 2))
    return x * w


def taken_off(x, w):
    x.register_hook(lambda g: g * 100).remove()
    return x * w


def two_hooks(x, w):
    x.register_hook(square)
    x.register_hook(lambda g: g + 1)
    w.register_hook(lambda g: g * 3)
    return x * w


def kept_on_inputs(x, w):
    x.retain_grad()
    w.retain_grad()
    return x * w


def without_a_gradient_of_its_own(x, w):
    x.register_hook(square)
    with torch.no_grad():
        return x * w


ON_INPUTS = [on_an_input, with_an_intermediate, with_an_input, with_a_default, through_a_partial, taken_off, two_hooks]
ON_INPUTS += [with_a_function_that_holds_a_tensor, kept_on_inputs, without_a_gradient_of_its_own]


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "no leaves"])
@pytest.mark.parametrize("program", ON_INPUTS, ids=lambda p: p.__name__)
def test_hooks_on_inputs_stay_and_see_the_whole_gradient(program, leaves):
    """Z, J-1 (item 13)"""
    agree(program, leaves)
    check_core(program, leaf(3), leaf(3))


def before_a_write(x, w):
    x.register_hook(square)
    x.mul_(w)
    return x.sin()


def after_a_write(x, w):
    x.mul_(w)
    x.register_hook(square)
    x.retain_grad()
    return w * 2


def kept_before_a_write(x, w):
    x.retain_grad()
    x.mul_(w)
    return w.sin()


@pytest.mark.parametrize("program", [before_a_write, after_a_write, kept_before_a_write], ids=lambda p: p.__name__)
def test_hooks_on_inputs_that_are_written(program):
    """Z, M-1: a hook stays with the value that the input had, a kept gradient goes with the input."""
    agree(program, leaves=False)


def hooked_before_the_other_is_written(x, y):
    x.register_hook(square)
    y.mul_(2)
    return y.sin()


def hooked_after_the_other_was_written(x, y):
    y.mul_(2)
    x.grad_fn
    x.register_hook(square)
    return y.sin()


def hooked_and_written(x, y):
    y.register_hook(square)
    y.mul_(2)
    return x.sin()


def written_and_kept(x, y):
    y.mul_(2)
    y.register_hook(square)
    y.retain_grad()
    return x.detach()


@pytest.mark.parametrize("make", [lambda b: (b[:3], b[1:]), lambda b: (b, b)], ids=["views", "twice"])
@pytest.mark.parametrize(
    "program",
    [
        hooked_before_the_other_is_written,
        hooked_and_written,
        written_and_kept,
        on_an_input,
    ],
    ids=lambda p: p.__name__,
)
def test_hooks_on_inputs_that_share_memory(program, make):
    """B-5, D-2"""
    agree_on_inputs_of_one_base(program, make)


def test_a_hook_on_a_view_after_another_view_was_written():
    """B-5"""
    agree_on_inputs_of_one_base(hooked_after_the_other_was_written, lambda b: (b[:3], b[1:]))
    x = leaf(3) * 1
    with pytest.raises(UnsupportedError, match="a part of its gradient"):
        compiled(hooked_after_the_other_was_written)(x, x)


def agree_on_inputs_of_one_base(program, make):
    results = []
    for transform in (lambda f: f, compiled):
        base = leaf(4)
        inputs = make(base * 1)
        out = transform(program)(*inputs)
        loss = (out**2).sum() if out.requires_grad else 0
        (loss + sum((t**3).sum() for t in inputs)).backward()
        results.append(base.grad)
    torch.testing.assert_close(*results)


def test_a_hook_on_an_input_that_the_program_makes_require_grad():
    """M-7"""

    def program(x, w):
        x.requires_grad_()
        x.register_hook(square)
        return x * w

    results = []
    for transform in (lambda f: f, compiled):
        x, w = plain(3), leaf(3)
        (transform(program)(x, w).sum() + x.sum()).backward()
        results.append((x.grad, w.grad))
    torch.testing.assert_close(*results)


MODULE_HOOKS = {
    "backward": lambda m: m.register_full_backward_hook(lambda m, given, taken: (given[0] * 3,)),
    "before backward": lambda m: m.register_full_backward_pre_hook(lambda m, taken: (taken[0] * 3,)),
    "forward": lambda m: m.register_forward_hook(lambda m, args, out: out * 2),
    "before forward": lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    "on the output": lambda m: m.register_forward_hook(lambda m, args, out: out.register_hook(square) and None),
}


@pytest.mark.parametrize("where", [0, 1, None], ids=["first", "inner", "whole"])
@pytest.mark.parametrize("kind", MODULE_HOOKS)
def test_hooks_of_modules(kind, where):
    """Z: of the modules inside, and of the compiled module itself."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    MODULE_HOOKS[kind](module if where is None else module[where])
    check_core(module, leaf(2, 3))
    check_core(module, plain(2, 3))


def test_a_hook_on_a_parameter():
    """Z"""

    class Clipped(nn.Linear):
        def forward(self, x):
            self.weight.register_hook(lambda g: g.clamp(max=1))
            return super().forward(x)

    results = []
    for transform in (lambda m: m, lambda m: foregrad.aot_module(m, nop)):
        torch.manual_seed(0)
        module = Clipped(3, 2)
        run = transform(module)
        run(plain(2, 3)).sum().backward()
        run(plain(2, 3)).sum().backward()
        results.append((module.weight.grad.tolist(), len(module.weight._backward_hooks)))
    assert results[0] == results[1] and results[0][1] == 2


def test_a_post_accumulate_hook_that_the_program_registers():
    """Z"""

    def program(x, w):
        def hook(tensor):
            tensor.grad = tensor.grad * 2

        x.register_post_accumulate_grad_hook(hook)
        return x * w

    agree(program)


def test_a_hook_that_reads_a_symbolic_size():
    """F-11"""

    def program(x):
        n = x.shape[0]
        x.register_hook(lambda g: g * n)
        return x.sin()

    f = foregrad.aot_function(program, nop, dynamic=True)
    for n in (3, 5):
        x = leaf(n)
        f(x).sum().backward()
        torch.testing.assert_close(x.grad, plain(n).cos() * n)
    assert len(f.specializations) == 1


# ------------------------------------------------------------------------------------------ inside, on results
def on_a_result(x, w):
    y = x * w
    y.register_hook(square)
    return y, y.sin()


def on_a_view_of_an_input(x, w):
    y = x.view(-1)
    y.register_hook(square)
    return y, x * w


def on_a_view_of_a_result(x, w):
    h = x * w
    y = h.view(-1)
    y.register_hook(lambda g: g * g * w.detach())
    return h, y


def on_one_of_two_views(x, w):
    h = x * w
    y = h.view(-1)
    y.register_hook(square)
    y.retain_grad()
    return y, h.view(3, 1)


def kept_result(x, w):
    y = x * w
    y.retain_grad()
    return y


ON_RESULTS = [on_a_result, on_a_view_of_an_input, on_a_view_of_a_result, on_one_of_two_views, kept_result]


@pytest.mark.parametrize("program", ON_RESULTS, ids=lambda p: p.__name__)
def test_hooks_and_kept_gradients_of_results(program):
    """Z, J-1 (item 13)"""
    agree(program)
    agree(program, leaves=False)


# ---------------------------------------------------------------------------------------------------- refused
def used_inside(x, w):
    y = (x * w).view(-1)
    y.register_hook(square)
    return y, (y + 1).view(3, 1), y.sin(), y.view(1, 3)


def written_and_used_inside(x, w):
    x.mul_(w)
    x.retain_grad()
    return x.sin()


def between_two_writes(x, w):
    x.mul_(w)
    x.register_hook(square)
    x.mul_(w)
    return w * 2


def several_at_once(x, w):
    multi_grad_hook((x, w), lambda gradients: None)
    return x * w


def any_of_several(x, w):
    multi_grad_hook((x, w), lambda gradient: None, mode="any")
    return x * w


def counts(x, w):
    n = 0

    def hook(g):
        nonlocal n
        n += 1
        return g * n

    x.register_hook(hook)
    return x * w


def collects(x, w):
    seen = []
    x.register_hook(seen.append)
    x.register_hook(lambda g: (seen.append(1), g)[1])
    return x * w


def holds_an_object(x, w):
    class Holder:
        pass

    holder = Holder()
    holder.tensor = w * 2
    x.register_hook(lambda g: g * holder.tensor.detach())
    return x * w


REFUSED = [(used_inside, "a part of its gradient"), (written_and_used_inside, "a part of its gradient")]
REFUSED += [(between_two_writes, "between two writes"), (several_at_once, "register_multi_grad_hook")]
REFUSED += [(any_of_several, "register_multi_grad_hook"), (counts, "assigns n"), (collects, "holds a list")]
REFUSED += [(holds_an_object, "a Holder with tensors")]


@pytest.mark.parametrize(("program", "words"), REFUSED, ids=lambda p: getattr(p, "__name__", ""))
def test_hooks_that_cannot_be_repeated_are_refused(program, words):
    """Nothing wrong is done, and nothing stays behind on the caller's tensors."""
    x, w = leaf(3) * 1, leaf(3)
    with pytest.raises(UnsupportedError, match=words):
        compiled(program)(x, w)
    assert not x._backward_hooks and not w._backward_hooks and not x.retains_grad


def test_a_backward_inside_the_program_meets_the_programs_own_hook():
    def program(x):
        handle = x.register_hook(square)
        (g,) = torch.autograd.grad((x * 3).sum(), x)
        handle.remove()
        return g * x

    check_core(program, leaf(3))


def test_a_backward_inside_the_program_that_would_run_the_callers_hooks_is_refused():
    def program(x):
        (g,) = torch.autograd.grad((x * 3).sum(), x)
        return g * x

    f, x = compiled(program), leaf(3)
    assert f(x).tolist() == [3, 6, 9]
    x.register_hook(square)
    with pytest.raises(UnsupportedError, match=r"args\[0\], which has a hook"):
        f(x)
    kept = leaf(3) * 1
    kept.retain_grad()
    with pytest.raises(UnsupportedError, match="retains its gradient"):
        f(kept)
    assert f(leaf(3)).tolist() == [3, 6, 9]


def test_a_hook_that_puts_a_gradient_elsewhere_is_refused():
    seen = []

    def program(x):
        y = x.sin()
        y.register_hook(lambda g: seen.append(g))
        return y * 2

    with pytest.raises(EscapeError, match="seen"):
        compiled(program)(leaf(3))
    assert seen == []


# --------------------------------------------------------------------------------------------- several tensors
def test_a_multi_grad_hook_on_intermediates():
    """The hook runs where the gradients are: in the recorded backward."""

    def program(x, w, total):
        a, b = x.sin(), w.cos()
        multi_grad_hook((a, b), lambda grads: total.add_(sum(g.detach() for g in grads)))
        return a * b

    report = check_core(program, leaf(3), leaf(3), torch.zeros(3), raise_on_difference=False)
    # A backward that writes to an input cannot be differentiated yet.
    assert {(d.run.split(", ")[-1], d.compiled[:13]) for d in report.differences} == {
        ("gradients of gradients", "BackwardError")
    }


def test_a_multi_grad_hook_around_the_call():
    logs = []
    for transform in (lambda f: f, compiled):
        x, w, log = leaf(3), leaf(3), []
        y, z = transform(lambda x, w: (x * w, w.sin()))(x, w)
        multi_grad_hook(
            (x, w, y, z), lambda grads, log=log: log.append([None if g is None else g.tolist() for g in grads])
        )
        multi_grad_hook((x, y), lambda g, log=log: log.append(g.tolist()), mode="any")
        y.sum().backward(retain_graph=True)
        (y * z).sum().backward()
        logs.append(log)
    assert logs[0] == logs[1] and len(logs[0]) == 4


# ----------------------------------------------------------------------------------------- before and after it
def test_hooks_made_outside():
    """J-6: on inputs before the call and after it, on outputs, with what they see and in order."""
    logs = []
    for transform in (lambda f: f, compiled):
        x, w, log = leaf(3), nn.Parameter(plain(3)), []
        note = lambda name, log=log: lambda g: log.append((name, g.detach().clone().tolist()))  # noqa: E731
        x.register_hook(note("before"))
        w.register_post_accumulate_grad_hook(lambda p, log=log: log.append(("after", p.grad.tolist())))
        h = x * 2
        h.retain_grad()
        y, z = transform(lambda h, w: (h * w, h.sin()))(h, w)
        y.retain_grad()
        y.register_hook(note("output"))
        y.register_hook(square)
        x.register_hook(note("later"))
        ((y * 3).sum() + z.sum()).backward()
        logs.append((log, h.grad, y.grad, x.grad, w.grad))
    assert logs[0][0] == logs[1][0]
    for one, other in zip(logs[0][1:], logs[1][1:], strict=True):
        torch.testing.assert_close(one, other)


def test_results_that_retain_their_gradients_and_are_written_to():
    """Torch would take one for another: it knows them by their numbers in a node, which a write changes."""

    def program(x):
        results = x * 2, x.sin(), x.cos()
        for result in results:
            result.retain_grad()
        return results

    seen = []
    for transform in (lambda f: f, compiled):
        x = leaf(3)
        results = transform(program)(x)
        for factor, result in enumerate(results, 2):
            result.mul_(factor)
        sum((y * y).sum() for y in results).backward()
        seen.append([x.grad.tolist(), *(y.grad.tolist() for y in results)])
    assert seen[0] == seen[1]


def test_an_optimizer_that_steps_in_backward():
    """A post-accumulate hook that updates the parameter and frees its gradient."""
    results = []
    for transform in (lambda m: m, lambda m: foregrad.aot_module(m, nop)):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in module.parameters()}

        def step(p, optimizers=optimizers):
            optimizers[p].step()
            p.grad = None

        for p in module.parameters():
            p.register_post_accumulate_grad_hook(step)
        run = transform(module)
        for _ in range(3):
            run(plain(2, 3)).sum().backward()
        assert all(p.grad is None for p in module.parameters())
        results.append([p.detach().clone() for p in module.parameters()])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------ saved tensors
def packed_inside(x, w):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        return (x * w).sin()


def saved_on_the_cpu_inside(x, w):
    with torch.autograd.graph.save_on_cpu():
        return (x * w).sin().exp()


def no_hooks_inside(x, w):
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        return (x * w).sin()


@pytest.mark.parametrize("program", [packed_inside, saved_on_the_cpu_inside, no_hooks_inside], ids=lambda p: p.__name__)
def test_saved_tensor_hooks_inside_the_program(program):
    """J-6"""
    check_core(program, leaf(3), leaf(3))


def test_saved_tensor_hooks_around_the_call():
    """J-6: what is packed is what is unpacked, a wrong unpacking shows in the gradients."""
    f, packed = compiled(lambda x: x.sin() * x), []
    x = leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t + 1)[1], lambda t: t - 1):
        y = f(x)
    assert packed
    y.sum().backward()
    torch.testing.assert_close(x.grad, plain(3).cos() * plain(3) + plain(3).sin())
    x = leaf(3)
    with torch.autograd.graph.save_on_cpu():
        y = f(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, plain(3).cos() * plain(3) + plain(3).sin())


def test_hooks_outside_and_inside_use_one_program():
    """F-2: hooks of the caller are no reason to record again."""
    f, graphs = grab(lambda x: x.sin())
    f(leaf(2)).sum().backward()
    x = leaf(2)
    x.register_hook(square)
    f(x).sum().backward()
    assert graphs.order == ["forward", "backward"]
    torch.testing.assert_close(x.grad, plain(2).cos() ** 2)


def two_results(x):
    y = x.sin()
    return y, y * 2


def wait_by_hook(y):
    y.register_hook(lambda gradient: None)


@pytest.mark.parametrize("wait", [torch.Tensor.retain_grad, wait_by_hook])
def test_waiting_for_a_gradient_that_stays_inside_in_part_is_refused(wait):
    """B-5: what comes from the second result never leaves the compiled backward."""
    y, z = foregrad.aot_function(two_results, nop)(leaf(3))
    wait(y)
    with pytest.raises(UnsupportedError, match=r"output\[0\] has a hook, or retain_grad"):
        z.sum().backward()


@pytest.mark.parametrize("wait", [torch.Tensor.retain_grad, wait_by_hook])
def test_waiting_for_a_gradient_behind_a_hook_of_the_program_is_refused(wait):
    """In eager it is what the hook returns; that is inside of the compiled backward."""

    def program(x, waits):
        y = x.clone().relu_()
        y.register_hook(lambda g: g * 2)
        if waits:
            y.retain_grad()
        return y

    call = compiled(program)
    y = call(leaf(3), False)
    wait(y)
    with pytest.raises(UnsupportedError, match=r"output has a hook, or retain_grad.* the program gave it a hook"):
        y.sum().backward()
    with pytest.raises(UnsupportedError, match=r"gives output a hook and calls retain_grad\(\)"):
        call(leaf(3), True)
    x = leaf(3)
    call(x, False).sum().backward()
    assert x.grad.max() == 2


def test_waiting_for_the_gradient_of_a_written_input_that_stays_inside_in_part_is_refused():
    x = leaf(3) * 1
    z = foregrad.aot_function(lambda x: (x.mul_(2), x * 3)[1], nop)(x)
    x.retain_grad()
    with pytest.raises(UnsupportedError, match="other results are computed from it"):
        z.sum().backward()


def test_waiting_for_a_gradient_that_comes_from_outside_alone():
    x = leaf(3)
    for call in (two_results, foregrad.aot_function(two_results, nop)):
        y, _ = call(x)
        y.retain_grad()
        y.sum().backward()
        assert y.grad.tolist() == [1, 1, 1]
        y, z = call(x)
        y.register_hook(lambda gradient: None).remove()
        z.sum().backward()
    first, second, _ = foregrad.aot_function(lambda x: (*(p := (x * 1).split(2)), p[0] * 2), nop)(leaf(4))
    second.retain_grad()  # a piece of the same split from which nothing else is computed
    (first.sum() + second.sum()).backward()
    assert second.grad.tolist() == [1, 1]
