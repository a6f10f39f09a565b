"""F-6, F-7: programs without gradients."""

import pytest
import torch

import foregrad
from helpers import grab, leaf, nop, plain


def watching(modes, fail=False):
    def compiler(graph, inputs):
        def run(*args):
            modes.append(torch.is_grad_enabled())
            if fail:
                raise ValueError("kernel failed")
            return graph(*args)

        return foregrad.make_boxed_func(run)

    return compiler


def test_gradients_are_off_while_the_graph_runs_and_on_again_after():
    """F-7"""
    modes = []
    y = foregrad.aot_function(lambda x: x.detach() * 2, watching(modes))(leaf(2))
    assert modes == [False] and torch.is_grad_enabled() and not y.requires_grad


def test_gradients_are_on_again_after_an_error():
    """F-7"""
    with pytest.raises(ValueError, match="kernel failed"):
        foregrad.aot_function(lambda x: x.detach() * 2, watching([], fail=True))(leaf(2))
    assert torch.is_grad_enabled()


def test_under_no_grad_the_mode_stays_off():
    """F-7"""
    modes = []
    compiled = foregrad.aot_function(lambda x: x * 2, watching(modes))
    with torch.no_grad():
        compiled(leaf(2))
        assert not torch.is_grad_enabled()
    assert modes == [False]


def test_inference_mode_gives_inference_tensors():
    """F-2"""
    compiled, _ = grab(lambda x: (x * 2, x.t()))
    x = plain(2, 2)
    with torch.inference_mode():
        a, b = compiled(x)
    assert a.is_inference() and b.data_ptr() == x.data_ptr()
    assert not compiled(x)[0].is_inference()


def test_inference_tensors_are_written_in_inference_mode():
    """M-1"""
    compiled, _ = grab(lambda x: x.add_(1) * 2)
    with torch.inference_mode():
        x = plain(2)
        assert compiled(x).tolist() == [4, 6] and x.tolist() == [2, 3]


def test_a_write_to_a_parameter_under_no_grad():
    """M-6"""
    w = torch.nn.Parameter(plain(2))
    compiled, graphs = grab(lambda w, g: w.sub_(g))
    with torch.no_grad():
        compiled(w, torch.ones(2))
    assert w.tolist() == [0, 1] and w.requires_grad and w.is_leaf and graphs.order == ["inference"]


def test_a_program_without_tensors():
    """F-4"""
    compiled, graphs = grab(lambda n, s: (n * 2, s))
    assert compiled(3, "a") == (6, "a") and graphs.ops("inference") == []


def test_a_program_that_returns_nothing():
    """F-3"""
    x = plain(2)
    assert grab(lambda x: x.zero_() and None if False else x.mul_(2) is None or None)[0](x) is None
    assert x.tolist() == [2, 4]


def test_compositions_run_as_eager_runs_them():
    """F-7"""
    lstm, x = torch.nn.LSTM(3, 2).double(), torch.randn(4, 5, 3, dtype=torch.float64)
    compiled = foregrad.aot_module(lstm, nop)
    with torch.inference_mode():
        out, (h, c) = lstm(x)
        found, (found_h, found_c) = compiled(x)
    assert torch.equal(out, found) and torch.equal(h, found_h) and torch.equal(c, found_c)
