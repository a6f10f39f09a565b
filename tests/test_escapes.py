"""Tensors that a program leaves behind: on modules, and in `.grad`."""

import pytest
import torch
from torch import nn

import foregrad
from checking import check_core
from helpers import leaf, nop, plain


class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))


class Net(nn.Module):
    """A parameter, a buffer, a plain tensor, a child, and a body given as a function."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(plain(2))
        self.register_buffer("state", plain(2) * 10)
        self.plain = plain(2) * 100
        self.child = Child()

    def forward(self, *args):
        return self.body(self, *args)


def a_result(m, x):
    m.made = x * 2
    return m.made + 1


def what_is_returned(m, x):
    m.made = x * m.weight
    return m.made, m.made.view(-1, 1)


def an_input(m, x):
    m.made = x
    return x * 2


def a_view_of_an_input(m, x):
    m.made = x[1:]
    return x * 2


def a_view_of_a_result(m, x):
    y = x * m.weight
    m.made, m.plain = y[1:], y.detach()
    return y


def a_written_input(m, x):
    m.made = x
    x.add_(1)
    m.made.mul_(2)
    return m.made * m.weight


def the_parameter(m, x):
    m.made = m.weight
    m.plain = m.weight.view(2, 1)
    return x * m.made


def over_a_plain_tensor(m, x):
    m.plain = m.plain + x.detach()
    return m.plain * m.weight


def over_a_buffer(m, x):
    m.state = m.state + x.detach()
    return m.state * m.weight


def over_a_buffer_by_an_input(m, x):
    m.state = x.detach()
    return m.state * m.weight


def over_a_buffer_that_is_written_then(m, x):
    old = m.state
    m.state = old * 2
    old.add_(1)
    m.state.sub_(x.detach())
    return old * m.weight


def over_a_buffer_with_itself(m, x):
    m.state = m.state
    return x * m.state


def twice(m, x):
    m.made = x * 2
    m.made = m.made * 3
    return m.made - x


def set_then_removed(m, x):
    m.made = x * 2
    y = m.made + 1
    del m.made
    return y


def nothing_in_its_place(m, x):
    y = m.plain * x
    m.plain = None
    m.state = None
    return y


def on_a_child(m, x):
    m.child.made = x * 3
    m.child.seen = x.detach()[:2] + m.child.seen
    return m.child.made * m.weight


def on_both(m, x):
    m.made = m.child.made = x * 3
    return m.made


def exchanged(m, x):
    m.state, m.plain = m.plain, m.state
    return m.state * x


def registered(m, x):
    m.register_buffer("made", x.detach() * 2)
    return m.made * m.weight


def without_grad(m, x):
    with torch.no_grad():
        m.made = x * m.weight
    return m.made


def random_numbers(m, x):
    m.made = torch.rand_like(x)
    return m.made * x


BODIES = [a_result, what_is_returned, an_input, a_view_of_an_input, a_view_of_a_result, a_written_input, the_parameter]
BODIES += [over_a_plain_tensor, over_a_buffer, over_a_buffer_by_an_input, over_a_buffer_that_is_written_then, twice]
BODIES += [over_a_buffer_with_itself, set_then_removed, nothing_in_its_place, on_a_child, on_both, exchanged]
BODIES += [registered, without_grad, random_numbers]
ARGUMENTS = {"plain": plain, "leaf": leaf, "result": lambda n: leaf(n) * 1}


@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_attributes_that_a_module_sets(body):
    """F-9: after the call the module holds what it would hold in eager."""
    for name, make in ARGUMENTS.items():
        if not (name == "leaf" and body is a_written_input):
            check_core(Net(body), make(2))
    check_core(Net(body), plain(2), training=False)


@pytest.mark.parametrize("body", [b for b in BODIES if b is not nothing_in_its_place], ids=lambda b: b.__name__)
def test_attributes_call_after_call(body):
    """F-2, F-9: each call goes on from what the last one left, and the programs do not grow without end."""

    def play(wrap):
        module, seen = Net(body), []
        call = wrap(module)
        for step in range(1, 6):
            torch.manual_seed(step)
            seen.append(call(plain(2) / step)[0].tolist())
            held = [getattr(module, name, None) for name in ("made", "plain", "state")]
            seen.append([None if t is None else (t.detach().tolist(), t.requires_grad) for t in held])
        return seen, call

    expected, _ = play(lambda module: module)
    got, compiled = play(lambda module: foregrad.aot_module(module, nop))
    assert got == expected
    assert len(compiled.specializations) <= 2


def test_one_can_differentiate_through_an_attribute():
    """F-9"""

    def play(wrap):
        module = Net(what_is_returned)
        module_call = wrap(module)
        out, _ = module_call(leaf(2))
        (module.made * 3).sum().backward()
        return module.made is out, module.weight.grad.tolist(), module.made.grad_fn is not None

    assert play(lambda module: foregrad.aot_module(module, nop)) == play(lambda module: module)


def test_a_function_sets_an_attribute_of_a_module_that_it_closes_over():
    """F-14"""
    net = Net(None)

    def program(x):
        net.made = x * net.weight
        net.child.seen = net.child.seen + 1
        return net.made.sum()

    check_core(program, plain(2))
    check_core(program, leaf(2))


def test_attributes_do_not_keep_recorded_tensors():
    """F-9: what is held is an ordinary tensor."""
    module = Net(a_view_of_a_result)
    foregrad.aot_module(module, nop)(plain(2))
    assert type(module.made) is type(module.plain) is torch.Tensor
    assert module.made.tolist() == [4]


def assigned(x, w):
    w.grad = x * 2
    return x + w.detach()


def assigned_an_input(x, w):
    w.grad = x
    return w * x


def assigned_then_written(x, w):
    g = x * 2
    w.grad = g
    g.add_(1)
    return w * g


def accumulated_once(x, w):
    loss = (x * w * w).sum()
    loss.backward()
    return loss.detach()


def accumulated_twice(x, w):
    (x * w).sum().backward()
    (w * w).sum().backward()
    return x * 2


def accumulated_and_returned(x, w):
    loss = (x * w * w).sum()
    loss.backward(retain_graph=True)
    return loss


def accumulated_beside_a_result(x, w):
    (w * 3).sum().backward()
    return x * w


def accumulated_for_some(x, w):
    torch.autograd.backward((x * w).sum(), inputs=[w])
    return x + 1


def accumulated_through_a_custom_tangent(x, w):
    (w.sin()).backward(x.detach())
    return w.detach() * 1


def read_back(x, w):
    (x * w).sum().backward()
    return w.grad * 2


def a_step_of_descent(x, w):
    w.grad = None
    loss = (x * w).square().sum()
    loss.backward()
    with torch.no_grad():
        w.sub_(0.1 * w.grad)
    return loss.detach()


def cleared(x, w):
    w.grad = None
    return x * w


def of_a_result(x, w):
    h = w * 2
    h.retain_grad()
    (h * x).sum().backward()
    return h.grad + 1


IN_GRAD = [assigned, assigned_an_input, assigned_then_written, accumulated_once, accumulated_twice, read_back, cleared]
IN_GRAD += [accumulated_and_returned, accumulated_beside_a_result, accumulated_for_some]
IN_GRAD += [accumulated_through_a_custom_tangent, a_step_of_descent, of_a_result]


def with_a_gradient(*shape):
    w = leaf(*shape)
    w.grad = plain(*shape) * 100
    return w


@pytest.mark.parametrize("program", IN_GRAD, ids=lambda p: p.__name__)
def test_gradients_that_a_program_leaves(program):
    """J-5, F-14: on arguments, also where there was one before."""
    for x in (plain(2), leaf(2)):
        if not (x.requires_grad and program is assigned_an_input):
            check_core(program, x, leaf(2))
    check_core(program, plain(2), with_a_gradient(2))
    check_core(program, plain(2), nn.Parameter(plain(2)))


@pytest.mark.parametrize("program", IN_GRAD, ids=lambda p: p.__name__)
def test_gradients_of_parameters(program):
    """F-9"""
    check_core(Net(lambda m, x: program(x, m.weight)), plain(2))


@pytest.mark.parametrize("program", IN_GRAD, ids=lambda p: p.__name__)
def test_gradients_call_after_call(program):
    """F-2: the same object goes on being the gradient where autograd adds to it in place."""

    def play(call):
        w, seen = leaf(2), []
        for step in range(1, 6):
            before = w.grad
            call(plain(2) / step, w)
            seen.append((w.tolist(), None if w.grad is None else w.grad.tolist(), w.grad is before, w._version))
            seen.append(None if before is None else before.tolist())
        return seen

    compiled = foregrad.aot_function(program, nop)
    assert play(compiled) == play(program)
    assert len(compiled.specializations) <= 2
