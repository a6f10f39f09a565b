"""Checkpointing: what the user marked for recomputation is recomputed by the backward graph, not saved for it."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import foregrad
from checking import check_core
from foregrad.api import resolve
from foregrad.capturing.compiled import Compiled
from helpers import Graphs, grab

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
PRESERVE = pytest.mark.parametrize("preserve", [True, False], ids=["preserve", "redraw"])
STATE = torch.get_rng_state().numel()  # bytes of the CPU generator


def leaf(*shape):
    return torch.randn(*shape).requires_grad_()


class Block(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(size), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks that are checkpointed one by one."""

    def __init__(self, blocks=3, **options):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.options = options

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return x


class Nested(nn.Module):
    """A checkpoint inside of a checkpoint."""

    def __init__(self, outer, inner):
        super().__init__()
        self.first, self.second = Block(), Block()
        self.outer, self.inner = outer, inner

    def both(self, x):
        return checkpoint(self.second, self.first(x).sin(), use_reentrant=self.inner).cos()

    def forward(self, x):
        return checkpoint(self.both, x, use_reentrant=self.outer)


def saved_by(program, *args):
    """What the compiled forward saves beside the program's own inputs, as abstract tensors; and its graphs."""
    compiled, graphs = grab(program)
    compiled(*args).sum().backward()
    record = compiled.specializations[0].metadata
    nodes = graphs.outputs("forward")[record.num_forward :]
    return [node.meta["val"] for node in nodes if node.op != "placeholder"], graphs


def is_state(value):
    return value.dtype is torch.uint8 and value.numel() == STATE


# ------------------------------------------------------------------------------------------- eager is the oracle
@REENTRANT
@PRESERVE
def test_checkpointed_blocks_agree_with_eager(reentrant, preserve):
    """R-4: values, gradients and the stream are eager's, whether draws are replayed or made anew"""
    check_core(Net(2, use_reentrant=reentrant, preserve_rng_state=preserve), leaf(5, 8))


@REENTRANT
@PRESERVE
def test_arguments_that_require_grad_get_their_gradients(reentrant, preserve):
    """R-4"""

    def program(x, w):
        run = functools.partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=preserve)
        return run(lambda x, w: F.dropout((x @ w).relu().sin(), 0.5).cos(), x, w) * 2, x.sin()

    check_core(program, leaf(4, 4), leaf(4, 4))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # eager says so too
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_nested_checkpoints_agree_with_eager(outer, inner):
    """R-4: the inner recomputation runs inside of the outer one, with the user's parameters seen"""
    check_core(Nested(outer, inner), leaf(5, 8))


@REENTRANT
def test_sequential_checkpoints_agree_with_eager(reentrant):
    """R-4"""
    layers = nn.Sequential(Block(), nn.Tanh(), Block())
    check_core(lambda x: checkpoint_sequential(layers, 2, x, use_reentrant=reentrant), leaf(5, 8))


@REENTRANT
@PRESERVE
def test_several_results_each_with_a_draw(reentrant, preserve):
    """R-4, J-5: a backward for one of the results makes the draws of both, in their order"""

    def region(x):
        return F.dropout(x.sin(), 0.3).exp(), F.dropout(x.cos(), 0.2).sin()

    check_core(lambda x: checkpoint(region, x, use_reentrant=reentrant, preserve_rng_state=preserve), leaf(5, 8))


@REENTRANT
def test_regions_that_are_differentiated_apart(reentrant):
    """J-5: each region has a state of its own, so that one can be recomputed without the other"""

    def program(x):
        first = checkpoint(lambda t: F.dropout(t.sin(), 0.3).exp(), x, use_reentrant=reentrant)
        second = checkpoint(lambda t: F.dropout(t.cos(), 0.3).exp(), x, use_reentrant=reentrant)
        return second, first

    check_core(program, leaf(5, 8))


def everything_random(x):
    drawn = torch.randn_like(x) * torch.randint(1, 5, (8,)) + torch.normal(x.exp(), 1.0)
    filled = torch.empty(8, 5).t().normal_() + torch.empty(5, 8).exponential_().bernoulli_(0.4)
    return x.sin() * drawn * filled + F.rrelu(x, training=True).exp() + x[torch.randperm(5)].sin()


@REENTRANT
def test_every_kind_of_draw_is_replayed(reentrant):
    """P-6: operators with and without a generator argument, in place, and of any layout"""
    check_core(lambda x: checkpoint(everything_random, x, use_reentrant=reentrant), leaf(5, 8))


def test_draws_from_a_generator_of_the_users_own_are_made_anew():
    """R-4: checkpointing puts the default generators back, and no others"""
    x = leaf(5, 8)

    def run(f):
        own = torch.Generator().manual_seed(3)
        copy = x.detach().clone().requires_grad_()
        y = f(copy, own)
        y.sum().backward()
        return y.detach(), copy.grad, own.get_state()

    def program(x, own):
        return checkpoint(lambda t: t.sin() * torch.rand(5, 8, generator=own), x, use_reentrant=False)

    assert all(torch.equal(a, b) for a, b in zip(run(program), run(grab(program)[0]), strict=True))


def test_generators_in_the_same_state_draw_each():
    def run(f):
        generators = [torch.Generator().manual_seed(3) for _ in range(2)]
        results = [f(torch.ones(3), *generators) for _ in range(2)]
        return *results, *(generator.get_state() for generator in generators)

    def program(x, first, second):
        return x + torch.rand(3, generator=first) * torch.rand(3, generator=second)

    assert all(torch.equal(a, b) for a, b in zip(run(program), run(grab(program)[0]), strict=True))


@pytest.mark.parametrize("backward_of", [[1], [0], [0, 1]])
def test_a_batch_norm_that_runs_twice_and_is_recomputed_once(backward_of):
    """The recomputation counts its batches, and their versions, as often as it runs."""
    logs = []
    for transform in (lambda f: f, lambda f: grab(f)[0]):
        norm, x = nn.BatchNorm1d(4), torch.linspace(-1, 2, 12).reshape(3, 4)
        twice = lambda x, norm=norm: [checkpoint(norm, x, use_reentrant=False) for _ in range(2)]  # noqa: E731
        results = transform(twice)(x)
        sum((results[i] ** 2).sum() for i in backward_of).backward()
        logs.append([(buffer.tolist(), buffer._version) for buffer in norm.buffers()])
    assert logs[0] == logs[1]


@REENTRANT
def test_autocast_is_restored_in_the_recomputation(reentrant):
    """J-11"""

    def program(x):
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(lambda t: F.dropout(t @ t.t(), 0.3).exp(), x, use_reentrant=reentrant)

    check_core(program, leaf(5, 8))


def test_a_recomputation_that_does_not_stop_early():
    """R-4"""

    def program(x):
        with set_checkpoint_early_stop(False):
            return checkpoint(lambda t: F.dropout(t.sin(), 0.3) + torch.rand(8), x, use_reentrant=False)

    check_core(program, leaf(5, 8))


def test_a_draw_in_backward_that_nobody_reads_still_moves_the_stream():
    """P-4 (Z)"""

    def region(x):
        torch.rand(3)
        return x.sin().exp().sin()

    check_core(lambda x: checkpoint(region, x, use_reentrant=False, preserve_rng_state=False) * torch.rand(8), leaf(8))
    check_core(
        lambda x: (checkpoint(region, x, use_reentrant=False, preserve_rng_state=False), x.exp() * torch.rand(8)),
        leaf(8),
    )


def test_gradients_inside_the_program_recompute_too():
    """R-4: the recomputation runs while the program itself differentiates, and finds its parameters"""
    block = Block()

    def program(x):
        y = checkpoint(block, x, use_reentrant=False)
        return torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0]

    check_core(program, leaf(5, 8))


@PRESERVE
def test_a_double_backward_recomputes_as_often_as_eager(preserve):
    """J-10, R-4: also where its draws are made anew, and whether anybody reads them or not"""

    def program(x):
        region = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=preserve)
        return region(lambda t: F.dropout(t.sin(), 0.3).exp() * torch.rand_like(t), x) * 2

    def run(f):
        x = torch.linspace(0, 1, 40).requires_grad_()
        torch.manual_seed(3)
        (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), x)
        return first.detach(), second, torch.rand(2)

    assert all(map(torch.equal, run(program), run(grab(program)[0])))


def test_sizes_may_be_symbolic():
    """F-11"""
    compiled, graphs = grab(
        lambda x: checkpoint(lambda t: F.dropout(t.sin(), 0.5).exp(), x, use_reentrant=False), dynamic=True
    )
    for rows in (5, 7):
        x = leaf(rows, 8)
        twin = x.detach().clone().requires_grad_()
        torch.manual_seed(1)
        compiled(x).sum().backward()
        torch.manual_seed(1)
        F.dropout(twin.sin(), 0.5).exp().sum().backward()
        assert torch.equal(x.grad, twin.grad)
    assert len(graphs.order) == 2


@REENTRANT
def test_attention_that_draws_nothing_before_a_draw(reentrant):
    """Its kernel is random by its tag: computed again in the backward, it gave a state that was not the forward's."""

    def region(q):
        return F.dropout(F.scaled_dot_product_attention(q, q.sin(), q.cos(), is_causal=True), 0.5)

    def program(q):
        return checkpoint(region, checkpoint(region, q, use_reentrant=reentrant), use_reentrant=reentrant)

    compiled, found = foregrad.compile(program, "eager", partition="min_cut"), []
    data = torch.randn(1, 2, 16, 4)
    for run in (program, compiled):
        torch.manual_seed(0)
        q = data.clone().requires_grad_()
        run(q).square().sum().backward()
        found.append(q.grad)
    assert torch.equal(*found)
    names = compiled.specializations[0].forward_graph.code
    assert "bernoulli_with_state" in names and "attention_for_cpu_with_state" not in names


# ------------------------------------------------------------------------------------------- what is saved
@REENTRANT
def test_a_region_saves_its_input_and_one_state_of_the_generator(reentrant):
    """P-6: as eager's checkpoint does, however much the region draws"""

    def region(x):
        return F.dropout(F.dropout(x.sin(), 0.3).exp(), 0.2) * torch.rand_like(x)

    saved, graphs = saved_by(lambda x: checkpoint(region, x, use_reentrant=reentrant), leaf(64, 64))
    assert len(saved) == 1 and is_state(saved[0])
    draws = [name for name in graphs.ops("backward") if "from_state" in name]
    assert draws == ["bernoulli_from_state.p", "bernoulli_from_state.p", "rand_like_from_state.default"]


@REENTRANT
def test_each_draw_has_a_state_where_the_compiler_may_change_their_order(reentrant):
    """Two masks do not depend on each other: Inductor may draw the second one first."""

    def program(x):
        return checkpoint(lambda x: F.dropout(F.dropout(x.sin(), 0.3).exp(), 0.2), x, use_reentrant=reentrant)

    graphs = Graphs()
    compilers = graphs.compiler("forward"), graphs.compiler("backward"), graphs.compiler("inference")
    fixed = {"decompositions": None, "num_params_buffers": 0, "keep_inference_input_mutations": False}
    compiled = Compiled(program, None, resolve(*compilers, partition_fn=None, draws_in_order=False, **fixed))
    compiled(leaf(8, 8)).sum().backward()
    backward = graphs.modules["backward"].graph
    states = {node.args[0] for node in backward.nodes if "from_state" in str(node.target)}
    assert len(states) == 2 and all(state.op == "placeholder" for state in states)


@REENTRANT
def test_blocks_save_what_stands_between_them(reentrant):
    """P-6"""
    saved, graphs = saved_by(Net(use_reentrant=reentrant), leaf(5, 8))
    between = [value for value in saved if not is_state(value)]
    assert [tuple(value.shape) for value in between] == [(5, 8)] * 2 and len(saved) == 5
    assert graphs.ops("backward").count("gelu.default") == 3


@REENTRANT
def test_checkpointing_saves_less_than_it_would_without(reentrant):
    """P-6"""

    def size(program):
        return sum(value.numel() * value.element_size() for value in saved_by(program, leaf(64, 8))[0])

    net = Net(use_reentrant=reentrant)
    assert size(net) < size(nn.Sequential(*net.blocks)) / 3


@REENTRANT
def test_a_redrawing_region_saves_nothing_but_its_input(reentrant):
    """R-4: without preserve_rng_state the recomputation draws anew"""
    run = functools.partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=False)
    saved, graphs = saved_by(lambda x: run(lambda t: F.dropout(t.sin(), 0.5).exp(), x), leaf(64, 64))
    assert not saved and "bernoulli.p" in graphs.ops("backward")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # eager says so too
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_nested_regions_need_the_state_of_the_outer_one_only(outer, inner):
    """P-6"""
    saved, _ = saved_by(Nested(outer, inner), leaf(5, 8))
    assert [is_state(value) for value in saved] == [True]


def test_a_reentrant_checkpoint_copies_no_gradients():
    """What autograd copies for `.grad` because the recording holds it too is not copied by the graph."""
    _, graphs = saved_by(lambda x, w: checkpoint(torch.mm, x, w, use_reentrant=True), leaf(3, 3), leaf(3, 3))
    assert "clone.default" not in graphs.ops("backward")


def test_a_selective_checkpoint_saves_what_its_policy_says():
    """P-5: the values of marked operators are saved, everything else is recomputed"""

    def policy(context, op, *args, **kwargs):
        matmul = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if matmul else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    net = Net(1, use_reentrant=False, context_fn=contexts)
    x = leaf(5, 8)
    twin = x.detach().clone().requires_grad_()
    torch.manual_seed(2)
    saved, graphs = saved_by(net, x)
    torch.manual_seed(2)
    net(twin).sum().backward()
    assert torch.equal(x.grad, twin.grad)
    assert sorted(tuple(v.shape) for v in saved if not is_state(v)) == [(5, 8), (5, 32)]
    backward = graphs.ops("backward")
    assert "addmm.default" not in backward and "gelu.default" in backward and "bernoulli_from_state.p" in backward


# ------------------------------------------------------------------------------------------- inner backwards
WEIGHT = nn.Parameter(torch.randn(4, 4))


class RunsBackward(torch.autograd.Function):
    """Adds to the gradient of a parameter that it finds, by a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x @ WEIGHT).sin()

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = (x @ WEIGHT).sin()
        y.backward(gradient)
        return x.grad


def test_a_function_that_calls_backward_in_its_backward():
    """J-14: what it adds to `.grad` of a parameter is a gradient"""
    check_core(RunsBackward.apply, leaf(3, 4))


def test_recording_a_reentrant_checkpoint_leaves_gradients_alone():
    """F-12"""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = before = torch.ones(3)
    compiled, _ = grab(lambda x: checkpoint(lambda t, w: (t * w).sin(), x, weight, use_reentrant=True))
    compiled(leaf(3))
    assert weight.grad is before and weight.grad.tolist() == [1, 1, 1]


def test_a_hooked_parameter_given_to_a_reentrant_checkpoint_is_refused():
    """F-12: its hook would run while the program is recorded"""
    weight = nn.Parameter(torch.ones(3))
    weight.register_post_accumulate_grad_hook(lambda w: None)
    compiled, _ = grab(lambda x: checkpoint(lambda t, w: (t * w).sin(), x, weight, use_reentrant=True))
    with pytest.raises(foregrad.errors.UnsupportedError, match="use_reentrant=False"):
        compiled(leaf(3))


def test_a_closure_tensor_with_a_history_given_to_a_reentrant_checkpoint_is_refused():
    """F-14: a whole backward would run into the user's own tape"""
    weight = nn.Parameter(torch.ones(3))
    twice = weight * 2
    compiled, _ = grab(lambda x: checkpoint(lambda t, w: (t * w).sin(), x, twice, use_reentrant=True))
    with pytest.raises(foregrad.errors.UnsupportedError, match="no leaf"):
        compiled(leaf(3))
    assert weight.grad is None


def test_a_random_custom_operator_that_writes_is_not_replayed_silently():
    """P-6"""
    with torch.library._scoped_library("foregrad_tests_replay", "FRAGMENT") as library:
        library.define("fill_(Tensor(a!) x) -> ()", tags=(torch.Tag.nondeterministic_seeded,))
        library.impl("fill_", lambda x: x.normal_() and None, "CPU")
        library.impl("fill_", lambda x: None, "Meta")

        def region(x):
            noise = torch.empty(3)
            torch.ops.foregrad_tests_replay.fill_(noise)
            return x.sin() * noise

        compiled, _ = grab(lambda x: checkpoint(region, x, use_reentrant=False))
        with pytest.raises(foregrad.errors.UnsupportedError, match="run again by a checkpoint"):
            compiled(leaf(3))


# ------------------------------------------------------------------------------------------ gradients of some inputs
def outcome(function, ask):
    """What comes of asking for gradients: the gradients, or the error's words."""
    x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    try:
        asked = ask(function(x, w), x, w)
    except RuntimeError as error:
        return str(error)
    return [None if t is None else t.tolist() for t in (*(asked or ()), x.grad, w.grad)]


ASKED = {
    "of what goes through it": lambda y, x, w: torch.autograd.grad(y[0].sum(), x),
    "of what goes past it": lambda y, x, w: torch.autograd.grad(y[0].sum() + y[1].sum(), w),
    "of another result": lambda y, x, w: torch.autograd.grad(y[1].sum(), x),
    "of both": lambda y, x, w: torch.autograd.grad(y[0].sum(), (x, w)),
    "by backward": lambda y, x, w: y[0].sum().backward(inputs=[x]),
    "by backward, past it": lambda y, x, w: y[1].sum().backward(inputs=[w]),
    "of all": lambda y, x, w: (y[0] + y[1]).sum().backward(),
}
INSIDE = {
    "refused": lambda y, x, w: torch.autograd.grad(y.sum(), w),
    "none": lambda y, x, w: torch.autograd.grad(y.sum(), w, allow_unused=True),
    "added": lambda y, x, w: y.sum().backward(),
}


@pytest.mark.parametrize("name", ASKED)
def test_single_gradients_through_a_reentrant_checkpoint_are_refused_as_in_eager(name):
    """J-13"""

    def program(x, w):
        return checkpoint(lambda a: (a * a).sin(), x, use_reentrant=True) + w.exp(), x * w

    compiled, _ = grab(program)
    assert outcome(compiled, ASKED[name]) == outcome(program, ASKED[name])


@pytest.mark.parametrize("name", INSIDE)
def test_what_only_a_reentrant_checkpoint_finds_has_no_single_gradient(name):
    """J-13"""

    def program(x, w):
        return checkpoint(lambda a: (a * w).sin(), x, use_reentrant=True)

    compiled, _ = grab(program)
    assert outcome(compiled, INSIDE[name]) == outcome(program, INSIDE[name])


def keep_sines(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.sin.default else CheckpointPolicy.PREFER_RECOMPUTE


def backwards(*results):
    """One backward after the other, each of some results."""

    def ask(y, x, w):
        for several in results:
            sum(y[i].sum() for i in several).backward(retain_graph=True)

    return ask


SECOND = {
    "twice": backwards([0], [0]),
    "with another result": backwards([0], [0, 1]),
    "past it": backwards([1], [0], [1]),
    "for second gradients": lambda y, x, w: torch.autograd.grad(
        torch.autograd.grad(y[0].sum(), x, create_graph=True)[0].sum(), x
    ),
}


@pytest.mark.parametrize("name", SECOND)
def test_one_backward_runs_through_a_selective_checkpoint(name):
    """J-13: as in eager, however many backwards were recorded"""
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_sines)

    def program(x, w):
        region = checkpoint(lambda a: (a * a).sin().exp() * w, x, use_reentrant=False, context_fn=contexts)
        return region, x * 2

    compiled, _ = grab(program)
    assert outcome(compiled, SECOND[name]) == outcome(program, SECOND[name])
    assert outcome(compiled, SECOND[name]) == outcome(program, SECOND[name])
