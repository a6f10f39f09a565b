"""The backward of a compiled program: when it is compiled, what it is given, what it refuses."""

import contextlib

import pytest
import torch

import foregrad
from foregrad.errors import BackwardError, UnsupportedError
from helpers import Graphs, grab, leaf, nop, plain


def test_the_backward_is_compiled_at_its_first_call_and_once():
    """J-7"""
    compiled, graphs = grab(lambda x: x.sin())
    y = compiled(leaf(2))
    assert graphs.order == ["forward"]
    y.sum().backward()
    compiled(leaf(2)).sum().backward()
    assert graphs.order == ["forward", "backward"]


def test_a_failing_ahead_of_time_backward_is_only_logged(caplog):
    """J-7"""
    tries = []

    def compiler(graph, inputs):
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not now")
        return foregrad.make_boxed_func(graph.forward)

    compiled = foregrad.aot_function(lambda x: x.sin().expand(3, x.shape[0]), nop, compiler, dynamic=True)
    x = leaf(2)
    y = compiled(x)
    assert len(tries) == 1 and "will be tried again" in caplog.text
    y.sum().backward()
    assert len(tries) == 2 and torch.allclose(x.grad, 3 * plain(2).cos())


def test_a_tangent_is_laid_out_as_the_backward_was_compiled_for():
    """J-3"""
    seen = []

    def compiler(graph, inputs):
        return foregrad.make_boxed_func(lambda *args: (seen.append(args[-1].stride()), graph(*args))[1])

    for output, stride in [(lambda x: x.sin(), (3, 1)), (lambda x: x.sin().t(), (1, 3))]:
        y = foregrad.aot_function(output, nop, compiler)(leaf(2, 3))
        for tangent in (torch.ones(y.shape), torch.ones(y.shape[::-1]).t(), torch.ones(()).expand(y.shape)):
            y.backward(tangent, retain_graph=True)
        assert seen == [stride] * 3
        seen.clear()


def test_an_input_of_an_output_that_takes_no_part_gets_none():
    """J-5 (Z)"""
    x, w = leaf(2), leaf(2)
    a, _ = grab(lambda x, w: (x * 2, w * 3))[0](x, w)
    a.sum().backward()
    assert x.grad.tolist() == [2, 2] and w.grad is None


def test_each_mask_of_tangents_is_compiled_once():
    """J-5"""
    compiled, graphs = grab(lambda x, w: (x * w, w.exp(), x.sin()))
    for _ in range(2):
        x, w = leaf(2), leaf(2)
        a, b, c = compiled(x, w)
        torch.autograd.backward([a, c], [torch.ones(2)] * 2)
        assert torch.allclose(x.grad, plain(2) + plain(2).cos()) and w.grad.tolist() == [1, 2]
    assert graphs.order == ["forward", "backward"]
    a, b, c = compiled(x, w)
    b.sum().backward()
    assert graphs.order == ["forward", "backward", "backward"]


def test_saved_tensors_go_through_autograds_own_store():
    """J-6"""
    log, compiled = [], grab(lambda x: x.sin() * x)[0]
    note = lambda name: lambda t: (log.append(name), t)[1]  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(note("pack"), note("unpack")):
        y = compiled(leaf(2))
    y.sum().backward()
    assert log.count("pack") == log.count("unpack") > 0
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_an_overwritten_saved_input_is_noticed():
    """J-6: version checks apply."""
    x = leaf(2)
    y = grab(lambda x: x.sin())[0](x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_backward_can_be_repeated_while_the_graph_is_retained():
    """J-17 (Z)"""
    x = leaf(2)
    y = grab(lambda x: x.exp())[0](x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert torch.allclose(x.grad, 2 * plain(2).exp())


def test_saved_tensors_are_freed_after_a_backward():
    """J-6"""
    import weakref

    saved = []

    def compiler(graph, inputs):
        def run(*args):
            result = graph(*args)
            saved.extend(weakref.ref(t) for t in result[1:])
            return result

        return foregrad.make_boxed_func(run)

    x = leaf(3)
    y = foregrad.aot_function(lambda x: x.exp().sin(), compiler, nop)(x)
    assert saved and all(ref() is not None for ref in saved)
    y.sum().backward()
    assert all(ref() is None or ref() is x for ref in saved)


def test_the_tape_of_an_input_without_a_gradient_is_not_walked():
    """J-4"""
    y = leaf(2).exp()
    y.sum().backward()
    x = leaf(2)
    compiled, graphs = grab(lambda x, y: x - 3 * y.detach())
    compiled(x, y).sum().backward()
    assert x.grad.tolist() == [1, 1] and graphs.outputs("backward")[1] is None


def test_determinism_switched_on_later_is_refused():
    """J-9"""
    y = grab(lambda x: x.sin())[0](leaf(2))
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(BackwardError, match=r"This compiled backward function is being run with.*Switch it on"):
            y.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_determinism_switched_off_later_is_fine():
    """J-9"""
    x = leaf(2)
    torch.use_deterministic_algorithms(True)
    try:
        y = grab(lambda x: x.sin())[0](x)
    finally:
        torch.use_deterministic_algorithms(False)
    y.sum().backward()
    assert torch.allclose(x.grad, plain(2).cos())


def test_what_autograd_refuses_is_raised_in_backward_and_not_before():
    """Z: the forward is kept."""

    def program(x):
        y = x.exp()
        z = y.sin()
        y.add_(1)
        return z

    y = grab(program)[0](leaf(2))
    assert torch.equal(y, plain(2).exp().sin()) and y.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_error_of_a_user_written_backward_is_raised_in_backward():
    """Z"""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            raise KeyError("on purpose")

    y = grab(Broken.apply)[0](leaf(2))
    assert y.tolist() == [2, 4]
    with pytest.raises(KeyError, match="on purpose"):
        y.sum().backward()


def test_reported_strides_reach_the_examples_of_the_backward():
    """J-8"""
    from torch._guards import TracingContext, tracing

    context, graphs = TracingContext(torch._subclasses.FakeTensorMode()), Graphs()

    def forward(graph, inputs):
        context.output_strides.extend([(2, 1), (1, 2)])
        return foregrad.make_boxed_func(graph.forward)

    class Sine(torch.nn.Module):
        def forward(self, x):
            return (x.sin(),)

    with tracing(context):
        call = foregrad.aot_module_simplified(Sine(), (leaf(2, 2),), forward, graphs.compiler("backward"))
    call(leaf(2, 2))[0].sum().backward()
    assert graphs.examples["backward"][0].stride() == (1, 2)


def test_a_write_to_what_eager_would_not_read_again_is_refused_by_name():
    """Eager saves the mask; a backward that computes it again needs the tensor that it was computed from."""
    signs = plain(4)
    partition = foregrad.min_cut_rematerialization_partition
    compiled = foregrad.aot_function(lambda x: torch.where(signs > 0, x, -x), nop, partition_fn=partition)
    for keeps_graph in (False, True):
        y = compiled(leaf(4))
        signs.neg_()
        with pytest.raises(BackwardError, match=r"modified by an inplace operation.* reads signs .* once more"):
            y.sum().backward(create_graph=keeps_graph)


class Halves(torch.autograd.Function):
    """The backward of one result only looks at a size that that of both does not look at."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        if second is None:
            return first * 2 if first.shape[0] > 5 else first * 100
        return first * 2 + second * 3


def test_a_later_backward_that_assumes_more_about_sizes_is_refused():
    """The guards of the call are written by then: it would be wrong at other sizes."""
    compiled = foregrad.aot_function(lambda x: Halves.apply(x), nop, dynamic=True)
    for size in (8, 4):
        x = leaf(size)
        first, second = compiled(x)
        with pytest.raises(BackwardError, match="depends on sizes otherwise"):
            first.sum().backward(retain_graph=True)
        (first + second).sum().backward()
        assert torch.equal(x.grad, torch.full((size,), 5.0))


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("others", [False, True])
def test_a_write_to_a_result_that_is_computed_again_is_refused(hooked, others):
    """Eager saves the result, and refuses; or has the hooks give it back, and computes with it."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.clone())

    def program(x):
        y = x * 2
        return (y, x * y) if others else (y.detach(), x * y)

    compiled = foregrad.aot_function(program, nop, partition_fn=foregrad.min_cut_rematerialization_partition)
    with hooks if hooked else contextlib.nullcontext():
        y, z = compiled(leaf(4))
    with torch.no_grad():
        y.mul_(1.5)
    with pytest.raises(BackwardError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("program", [lambda x, w: torch.where(w > 0, x, -x), lambda x, w: (x * w).sin()])
@pytest.mark.parametrize("keeps_graph", [False, True])
def test_a_write_behind_saved_tensor_hooks_is_refused_by_name(program, keeps_graph):
    """With them, autograd checks no versions."""
    compiled = foregrad.aot_function(program, nop, partition_fn=foregrad.min_cut_rematerialization_partition)
    w = plain(4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.clone()):
        y = compiled(leaf(4), w)
    w.neg_()
    with pytest.raises(BackwardError, match=r"modified by an inplace operation.* saved-tensor hooks were active"):
        y.sum().backward(create_graph=keeps_graph)


@pytest.mark.parametrize("write", [lambda w: w.mul_(2), lambda w: w.data.mul_(2), lambda w: w.detach()[1:].mul_(2)])
def test_a_tensor_that_the_program_writes_to_and_reads_is_checked_afterwards(write):
    """The graph saves its new value, not the tensor."""

    def program(x, w):
        write(w)
        return x * w

    compiled = foregrad.aot_function(program, nop)
    for written_again in (False, True):
        for fn in (program, compiled):
            x, w = leaf(4), plain(4)
            y = fn(x, w)
            if not written_again:
                y.sum().backward(retain_graph=True)
                y.sum().backward()
                torch.testing.assert_close(x.grad, 2 * w)
                continue
            w.neg_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_a_write_to_what_eager_saves_raises_eagers_words_in_the_name_of_the_program():
    partition = foregrad.min_cut_rematerialization_partition
    x = leaf(4)
    y = foregrad.aot_function(lambda x: x.sin(), nop, partition_fn=partition)(x)
    with torch.no_grad():
        x.neg_()
    with pytest.raises(BackwardError, match=r"modified by an inplace operation.* The backward of .*<lambda>"):
        y.sum().backward()


def test_a_write_to_what_a_checkpoint_would_read_again_is_refused_by_name():
    """Eager computes with the new value; a compiled backward has saved the old one."""
    layer = torch.nn.Linear(3, 3)

    def program(x):
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

    y = foregrad.aot_function(program, nop)(leaf(2, 3))
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(BackwardError, match=r"modified by an inplace operation.* The backward of .*program"):
        y.sum().backward()


@pytest.mark.parametrize("direct", [True, False])
def test_what_a_backward_of_other_results_has_freed_before_a_program_is_refused_by_name(direct):
    """Autograd goes through a program as a whole, and on to what computed arguments that have no part in it."""

    def program(x, w):
        return x * 2, w * 3

    computed = leaf(3).exp()
    first, second = foregrad.aot_function(program, nop)(leaf(3), computed)
    first.sum().backward()
    with pytest.raises(BackwardError, match=r"a second time.*program is compiled.*retain_graph=True"):
        (second if direct else computed).sum().backward()


def test_what_keeps_nothing_before_a_program_can_be_differentiated_again():
    def program(x, w):
        return x * 2, w * 3

    w = leaf(3)
    first, second = foregrad.aot_function(program, nop)(leaf(3), -w)
    first.sum().backward()
    second.sum().backward()
    torch.testing.assert_close(w.grad, torch.full((3,), -3.0))


def test_an_error_that_eager_does_not_raise_under_saved_tensor_hooks_is_refused_by_name():
    weight = leaf(3)

    def program(x):
        y = x * weight
        with torch.no_grad():
            weight.mul_(2)
        return y

    compiled = foregrad.aot_function(program, nop)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.clone()):
        y = compiled(leaf(3))
    with pytest.raises(BackwardError, match="saved-tensor hooks were active"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        compiled(leaf(3)).sum().backward()
    assert not isinstance(raised.value, BackwardError)


def test_a_write_behind_a_hooked_module_under_saved_tensor_hooks_is_refused_by_name():
    """Eager looks at the view that the module was given only where it unpacks it by itself."""
    layer = torch.nn.Softplus()
    layer.register_full_backward_hook(lambda module, gradients, tangents: None)

    def program(x):
        y = layer(x)
        x.add_(1)
        return y

    compiled = foregrad.aot_function(program, nop)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.clone()):
        y = compiled(leaf(3) * 1)
    with pytest.raises(BackwardError, match="saved-tensor hooks were active"):
        y.sum().backward()


def test_gradients_of_gradients_for_an_input_made_to_require_grad_late_are_refused_by_name():
    """Eager's graph holds the very tensor, which requires grad when its gradients are differentiated."""

    def program(x, y):
        z = y * x
        y.requires_grad_()
        return z

    compiled = foregrad.aot_function(program, nop)
    compiled(leaf(3), plain(3)).sum().backward()
    with pytest.raises(UnsupportedError, match="after it has computed with it"):
        compiled(leaf(3), plain(3)).sum().backward(create_graph=True)


def test_a_refusal_that_eager_may_not_come_across_is_named():
    """Eager raises only on the way to the gradients that are asked for; here no way leads there."""

    def program(x):
        y = x.detach().requires_grad_().clamp(-1, 1)
        x.sigmoid_()
        return y

    compiled = foregrad.aot_function(program, nop)
    for call in (program, compiled):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            call(leaf(3) * 1).sum().backward()
        assert not isinstance(raised.value, BackwardError)
    x = leaf(3)
    assert torch.autograd.grad(program(x * 1).sum(), x, allow_unused=True) == (None,)
    with pytest.raises(BackwardError, match="its backward runs as a whole"):
        torch.autograd.grad(compiled(x * 1).sum(), x, allow_unused=True)
