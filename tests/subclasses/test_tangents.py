"""Gradients of results that are wrapper subclasses."""

import pytest
import torch

import foregrad
from foregrad import ForegradError
from foregrad.errors import UnsupportedError
from helpers import Graphs, leaf, nop, plain
from subclass_pairs import Pair, pair


def compiled(program, **options):
    return foregrad.aot_function(program, nop, **options)


class Plainly(Pair):
    """Its gradients always have the tag "plain"."""

    def __coerce_tangent_metadata__(self):
        return type(self)(self.p, self.q, "plain")


class Soft(Pair):
    """Converts itself to any tag."""

    def __coerce_same_metadata_as_tangent__(self, tag, expected_type=None):
        return type(self)(self.p, self.q, tag)


class OlderSoft(Pair):
    """The same, in the form without the expected type."""

    def __coerce_same_metadata_as_tangent__(self, tag):
        return type(self)(self.p, self.q, tag)


class Stripped(Pair):
    """Becomes a plain tensor where one is expected."""

    def __coerce_same_metadata_as_tangent__(self, tag, expected_type=None):
        return self.p if expected_type is torch.Tensor else None


def test_guess():
    """T-6: the class says what its gradients look like"""
    x = Plainly(plain(2), plain(2), "odd").requires_grad_()
    f = compiled(lambda x: x * 2)
    y = f(x)
    assert f.specializations[0].metadata.traced_tangent_metas == [(["p", "q"], "plain")]
    y.backward(Plainly(plain(2), plain(2), "plain"))
    assert x.grad.tag == "plain" and x.grad.q.tolist() == [2, 4]


@pytest.mark.parametrize("kind", [Soft, OlderSoft])
def test_conversion(kind):
    """T-7, in both forms of the method"""
    x = kind(plain(2), plain(2)).requires_grad_()
    compiled(lambda x: x * 3)(x).backward(kind(plain(2), plain(2), "odd"))
    assert x.grad.p.tolist() == [3, 6] and x.grad.tag == "std"


def test_conversion_to_plain():
    """T-7: a subclass arrives where a plain tensor is expected"""
    x = leaf(2)
    compiled(lambda x: x * 3)(x).backward(Stripped(plain(2), plain(2)))
    assert type(x.grad) is torch.Tensor and x.grad.tolist() == [3, 6]


def test_nested_conversion():
    """T-7: inside of another subclass"""
    x = Pair(Soft(plain(2), plain(2)), Soft(plain(2), plain(2))).requires_grad_()
    odd = Pair(Soft(plain(2), plain(2), "odd"), Soft(plain(2), plain(2)))
    compiled(lambda x: x * 3)(x).backward(odd)
    assert x.grad.p.tag == "std" and x.grad.p.q.tolist() == [3, 6]


def test_mismatch():
    """T-7, T-8: which result, what was expected, what came"""
    y = compiled(lambda x: x * 3)(pair(2, grad=True))
    words = "expected to be a Pair of p and q with context 'std', and a Pair of p and q with context 'odd' came"
    with pytest.raises(RuntimeError, match=words):
        y.backward(Pair(plain(2), plain(2), "odd"))
    y = compiled(lambda x: x * 3)(pair(2, grad=True))
    with pytest.raises(ForegradError, match=r"metadata.*a Pair of p and q with context 'std', and a Tensor came"):
        y.backward(torch.ones(2))
    y = compiled(lambda x: x * 3)(leaf(2))
    with pytest.raises(RuntimeError, match=r"metadata.*a plain tensor, and a Pair"):
        y.backward(pair(2))
    y = compiled(lambda x: x * 3)(Pair(pair(2), pair(2)).requires_grad_())
    with pytest.raises(RuntimeError, match="metadata"):
        y.backward(Pair(pair(2), plain(2)))


def test_memory_format():
    """T-6, J-3: inner tensors are brought into the recorded layout"""
    seen = []

    def backward(graph, example_inputs):
        def run(args):
            seen.append([a.stride() for a in args[-2:]])
            return graph(*args)

        run._boxed_call = True
        return run

    f = foregrad.aot_function(lambda x: x * 2, nop, backward)
    x = pair(2, 3, grad=True)
    f(x).backward(Pair(plain(3, 2).t(), plain(3, 2).t()))
    assert seen == [[(3, 1), (3, 1)]] and x.grad.p.tolist() == [[2, 6, 10], [4, 8, 12]]


def test_only_some_results_take_part():
    """J-5, J-16: a result that takes no part in backward needs no gradient"""
    x, w = pair(2, grad=True), pair(2, grad=True)
    a, b = compiled(lambda x, w: (x.sin(), w.exp()))(x, w)
    a.backward(pair(2))
    assert w.grad is None and torch.allclose(x.grad.q, x.q.cos() * 2 * plain(2))
    b.backward(pair(2))
    assert torch.allclose(w.grad.p, w.p.exp() * plain(2))


def test_gradient_of_another_kind():
    """T-5: a plain input gets a gradient that is a subclass, or a subclass a plain one"""
    graphs = Graphs()
    x, w = pair(2, grad=True), leaf(2)
    f = foregrad.aot_function(lambda x, w: w - x, graphs.compiler("forward"), graphs.compiler("backward"))
    f(x, w).backward(pair(2))
    assert type(w.grad) is Pair and w.grad.q.tolist() == [2, 4] and len(graphs.outputs("backward")) == 4


def test_saved_subclasses_are_watched():
    """J-6: a write to a subclass, between forward and backward, is found as in eager"""
    x = pair(2, grad=True) * 1
    y = compiled(lambda x: x.sin())(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(pair(2))
    y = compiled(lambda x: x.exp())(pair(2, grad=True))
    y.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(pair(2))


def test_second_backward():
    """J-17"""
    x = pair(2, grad=True)
    y = compiled(lambda x: x.sin())(x)
    y.backward(pair(2), retain_graph=True)
    y.backward(pair(2))
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(pair(2))
    assert torch.allclose(x.grad.p, 2 * x.p.cos() * plain(2))


def test_batched_gradients_are_refused():
    """J-10: not yet, of subclasses"""
    x = pair(2, grad=True)
    y = compiled(lambda x: x.sin())(x)
    with pytest.raises(UnsupportedError, match=r"a batched backward .* with tensor subclasses"):
        torch.autograd.grad(y, x, Pair(torch.eye(2), torch.eye(2)), is_grads_batched=True)


def test_a_context_that_tells_whether_it_requires_grad():
    """T-7: a gradient that requires grad has the context of one that does not"""

    class Telling(Pair):
        def __tensor_flatten__(self):
            return ["p", "q"], (self.tag, self.requires_grad)

        @classmethod
        def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
            return cls(inner["p"], inner["q"], context[0])

    x = Telling(plain(2), plain(2) * 2).requires_grad_()
    for create_graph in (False, True):
        tangent = Telling(plain(2), plain(2)).requires_grad_()
        y = compiled(lambda x: x * x)(x)
        (g,) = torch.autograd.grad(y, x, tangent, create_graph=create_graph)
        assert g.q.tolist() == [4, 16] and g.requires_grad is create_graph
    (t,) = torch.autograd.grad(g, tangent, Telling(plain(2), plain(2)))
    assert t.q.tolist() == [4, 16]
