"""Wrong calls of a program and of its backward: eager's class of error, and the argument where eager names it."""

import contextlib
import re

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import BackwardError
from helpers import leaf, nop, plain


def product(x, w):
    return (x * w).sin()


def two(x, w):
    return x * w, w.sin()


def wrong_shape(run):
    run(product)(leaf(3), leaf(3)).backward(torch.ones(4))


def wrong_shape_of_the_second(run):
    torch.autograd.backward(run(two)(leaf(3), leaf(3)), [torch.ones(3), torch.ones(2, 3)])


def too_few_tangents(run):
    torch.autograd.backward(run(two)(leaf(3), leaf(3)), [torch.ones(3)])


def a_complex_tangent(run):
    run(product)(leaf(3), leaf(3)).backward(torch.ones(3, dtype=torch.complex64))


def a_tangent_elsewhere(run):
    run(product)(leaf(3), leaf(3)).backward(torch.ones(3, device="meta"))


def no_tangent(run):
    run(product)(leaf(3), leaf(3)).backward()


def a_tangent_that_is_no_tensor(run):
    run(product)(leaf(3), leaf(3)).backward([1, 2, 3])


def nothing_to_differentiate(run):
    run(product)(plain(3), plain(3)).sum().backward()


def an_input_without_a_part(run):
    x, w = leaf(3), leaf(3)
    torch.autograd.grad(run(lambda x, w: x * 2)(x, w).sum(), w)


def freed(run):
    y = run(product)(leaf(3), leaf(3)).sum()
    y.backward()
    y.backward()


def an_input_was_written(run):
    a = leaf(3) * 1
    y = run(product)(a, leaf(3))
    a.add_(1)
    y.sum().backward()


def a_parameter_was_written(run):
    w = leaf(3)
    y = run(product)(leaf(3), w)
    with torch.no_grad():
        w.add_(1)
    y.sum().backward()


def a_closure_was_written(run):
    w = leaf(3)
    y = run(lambda x: x * w * w)(leaf(3))
    with torch.no_grad():
        w.mul_(2)
    y.sum().backward()


def an_output_was_written(run):
    y = run(lambda x, w: (x * w).exp())(leaf(3), leaf(3))
    y.add_(1)
    y.sum().backward()


def an_inference_tensor_would_be_saved(run):
    with torch.inference_mode():
        w = torch.ones(3)
    run(product)(leaf(3), w)


def a_leaf_is_written(run):
    run(lambda x, w: x.add_(w))(leaf(3), leaf(3))


def a_missing_argument(run):
    run(product)(leaf(3))


def an_argument_too_many(run):
    run(product)(leaf(3), leaf(3), leaf(3))


def an_unknown_keyword(run):
    run(product)(leaf(3), other=leaf(3))


WITH_EAGERS_WORDS = [wrong_shape, wrong_shape_of_the_second, too_few_tangents, a_complex_tangent]
WITH_EAGERS_WORDS += [a_tangent_elsewhere, no_tangent, a_tangent_that_is_no_tensor, nothing_to_differentiate]
WITH_EAGERS_WORDS += [an_input_without_a_part, freed, a_parameter_was_written, a_closure_was_written]
WITH_EAGERS_WORDS += [an_inference_tensor_would_be_saved, a_leaf_is_written, a_missing_argument, an_argument_too_many]
WITH_EAGERS_WORDS += [an_unknown_keyword]


def error_of(scene, run):
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever eager raises
        scene(run)
    return raised.value


def compiled(function):
    return foregrad.aot_function(function, nop)


def warm(function):
    """Compiled, and called before in the right way."""
    run = compiled(function)
    args = [leaf(3) for _ in range(function.__code__.co_argcount)]
    with contextlib.suppress(RuntimeError):  # of the program that writes to a leaf, which is right nowhere
        results = run(*args)
        torch.autograd.backward(results, [torch.ones(3)] * (len(results) if isinstance(results, tuple) else 1))
    return run


@pytest.mark.parametrize("run", [compiled, warm])
@pytest.mark.parametrize("scene", WITH_EAGERS_WORDS, ids=lambda s: s.__name__)
def test_the_error_is_eagers(scene, run):
    """J-6, J-17, M-7: class and words; those about saved tensors go on with the name of the program."""
    eager, ours = error_of(scene, lambda f: f), error_of(scene, run)
    assert type(ours) in (type(eager), BackwardError) and isinstance(ours, type(eager))
    assert str(ours).startswith(str(eager)) if isinstance(ours, BackwardError) else str(ours) == str(eager)


@pytest.mark.parametrize("scene", [an_input_was_written, an_output_was_written], ids=lambda s: s.__name__)
def test_a_saved_tensor_that_was_written_is_named_with_its_versions(scene):
    """J-6"""
    eager, ours = error_of(scene, lambda f: f), error_of(scene, compiled)
    without_node = lambda error: re.sub(r", which is output 0 of \w+,", "", str(error))  # noqa: E731
    assert isinstance(ours, (type(eager), BackwardError)) and without_node(ours).startswith(without_node(eager))


def devices(run):
    run(product)(leaf(3), torch.ones(3, device="meta"))


def devices_in_a_list(run):
    run(lambda x, w: torch.cat([x, w]))(leaf(3), torch.ones(3, device="meta"))


def shapes(run):
    run(product)(leaf(3), leaf(4))


def shapes_of_matrices(run):
    run(lambda x, w: x @ w)(leaf(3, 2), leaf(3, 2))


def dtypes_of_matrices(run):
    run(lambda x, w: x @ w)(leaf(2, 2), leaf(2, 2).double())


def a_device_that_is_not_there(run):
    run(lambda x: x.to("cuda:99"))(leaf(3))


IN_FORWARD = [devices, devices_in_a_list, shapes, shapes_of_matrices, dtypes_of_matrices, a_device_that_is_not_there]


@pytest.mark.parametrize("scene", IN_FORWARD, ids=lambda s: s.__name__)
def test_errors_of_operators_have_eagers_class(scene):
    """What the program raises while it is recorded is passed on: shape inference has words of its own."""
    eager, ours = error_of(scene, lambda f: f), error_of(scene, compiled)
    assert isinstance(ours, type(eager))


def test_tangents_of_another_dtype_are_cast():
    """J-3"""
    for dtype in (torch.float64, torch.int64):
        results = []
        for run in (lambda f: f, compiled):
            x, w = leaf(3), leaf(3)
            run(product)(x, w).backward(torch.ones(3, dtype=dtype))
            results.append((x.grad, w.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_nothing_was_saved_so_nothing_was_freed():
    """J-17"""
    x = leaf(3)
    y = compiled(lambda x: x + 1)(x).sum()
    y.backward()
    y.backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_a_callable_still_works_after_a_wrong_call():
    """A call that raised leaves nothing behind."""
    module = nn.Linear(3, 1)
    run = foregrad.aot_module(module, nop)
    for wrong in (plain(2, 4), "text", torch.ones(2, 3, device="meta")):
        with pytest.raises((RuntimeError, TypeError)):
            run(wrong)
    x = plain(2, 3)
    assert torch.equal(run(x), module(x))
    run(x).sum().backward()
    assert module.weight.grad.tolist() == [[5, 7, 9]]
