"""`torch.autograd.detect_anomaly()` around a compiled program names the user's line (J-7)."""

import warnings

import pytest
import torch

import foregrad
from helpers import leaf, nop


def root_of_zero(x):
    y = (x * 2).sin()
    z = y.sqrt()  # the line to name
    return (z * 0).sum()


def masked_later(x):
    """The NaN does not reach the input, yet eager looks at every node."""
    c = x > 0.5
    y = torch.where(c, x, torch.zeros(3)).sqrt()  # the line to name
    return torch.where(c, y, torch.zeros(3)).sum()


def a_product_of_zero_and_infinity(x):
    y = x.log()  # the line to name
    return (y * 0).sum()


class Infinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * float("nan")  # the line that eager does not name either


def a_custom_function(x):
    return Infinite.apply(x * 2).sum()  # the line to name


PROGRAMS = [root_of_zero, masked_later, a_product_of_zero_and_infinity, a_custom_function]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
        warnings.filterwarnings("ignore", message="Error detected in")
        yield


def message(program, compile):
    x = torch.zeros(3, requires_grad=True)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values") as raised:
        compile(program)(x).backward()
    assert type(raised.value) is RuntimeError
    return str(raised.value)


def compiled(program, **options):
    return foregrad.aot_function(program, nop, **options)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_nan_in_the_compiled_backward(program, dynamic):
    """The function that eager names, with the line of the forward that it differentiates."""
    eager = message(program, lambda f: f)
    ours = message(program, lambda f: compiled(f, dynamic=dynamic))
    assert eager.partition(" returned")[0] == ours.partition(" returned")[0]
    assert "# the line to name" in ours


def test_a_program_that_was_compiled_before():
    """Anomaly mode is no fact of the program: it matters when backward is called."""
    f, x = compiled(root_of_zero), torch.zeros(3, requires_grad=True)
    f(leaf(3)).backward()
    y = f(x)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match=r"(?s)SqrtBackward0.*y.sqrt"):
        y.backward()
    f(x).backward()
    assert x.grad.isnan().all() and len(f.specializations) == 1


def test_without_the_check_for_nan():
    x = torch.zeros(3, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=False):
        compiled(root_of_zero)(x).backward()
    assert x.grad.isnan().all()


def test_in_a_backward_of_some_outputs():
    """J-5"""
    x = torch.zeros(3, requires_grad=True)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="SqrtBackward0"):
        compiled(lambda x: (root_of_zero(x), x.sin()))(x)[0].backward()
    _, z = compiled(lambda x: (root_of_zero(x), x.sin()))(x)
    with torch.autograd.detect_anomaly():
        z.sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


def inner_nan(x):
    """A NaN that never leaves the node which makes it."""
    return torch.nn.functional.layer_norm(x, (3,)).sum() + (x / x.detach()).sum()


def test_gradients_are_the_same_without_nan():
    for program in (lambda x: x.exp().sin().sum(), lambda x: (x @ x).exp(), inner_nan):
        x, y = leaf(3), leaf(3)
        f = compiled(program)
        with torch.autograd.detect_anomaly():
            f(x).backward()
        f(y).backward()
        assert torch.equal(x.grad, y.grad)


def test_a_nan_that_comes_from_outside():
    """Eager names the first function that passes it on; here too it is one of the program."""
    x = leaf(3)
    y = compiled(lambda x: x.sin().exp())(x)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="ExpBackward0"):
        y.backward(torch.full((3,), float("nan")))


def test_a_nan_after_the_program_is_eagers_own():
    x = leaf(3)
    y = compiled(lambda x: x - x)(x).sqrt()
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
        (y * 0).sum().backward()


def test_hooks_on_all_modules_do_not_see_the_backward_graph():
    calls = []
    x = leaf(2)
    compiled = foregrad.aot_function(lambda x: x.sin(), nop)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *given: calls.append(given[0]))
    try:
        with torch.autograd.detect_anomaly(check_nan=False):
            compiled(x).sum().backward()
    finally:
        handle.remove()
    assert not calls
