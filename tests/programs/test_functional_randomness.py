"""`functionalize_rng_ops`: graphs that take a seed and an offset instead of drawing from a generator."""

import functools

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad.functionalize.operators import keyed_generator
from foregrad.runtime.rng import GeneratorState
from helpers import grab, leaf, plain


@pytest.fixture(autouse=True)
def functional():
    with foregrad.config.patch(functionalize_rng_ops=True, verify=True):
        yield


def dropout(x):
    return F.dropout(x, 0.5)


def run(compiled, x, seed=0):
    """The result and the gradient of a program, from a seed."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    y = compiled(x)
    y.sum().backward()
    return y.detach(), x.grad


# --------------------------------------------------------------------------------------------- the convention
def test_the_forward_takes_a_seed_and_an_offset_and_returns_the_next_offset():
    """R-2 (Z), V-8"""
    compiled, graphs = grab(dropout)
    x = leaf(64)
    y = compiled(x)
    y.sum().backward()
    assert graphs.inputs("forward") == ["primals_1", "fwd_seed_1", "fwd_base_offset_1"]
    offset = graphs.outputs("forward")[1].meta["val"]
    assert offset.numel() == 1 and offset.dtype is torch.int64
    assert graphs.inputs("backward")[-1] == "tangents_1" and len(graphs.outputs("backward")) == 1
    assert torch.equal(y != 0, x.grad != 0)


def test_an_inference_graph_has_the_same_convention():
    """R-2 (Z), V-8"""
    compiled, graphs = grab(lambda x, b: (b.add_(1), dropout(x), x + 1)[1:])
    compiled(plain(4), plain(2))
    assert graphs.inputs("inference") == ["arg0_1", "arg1_1", "fwd_seed_1", "fwd_base_offset_1"]
    assert [node.meta["val"].dtype for node in graphs.outputs("inference")] == [torch.float32] * 3 + [torch.int64]


def test_a_program_that_draws_nothing_returns_the_offset_it_was_given():
    """R-3: and moves no generator"""
    compiled, graphs = grab(lambda x: x.sin())
    before = torch.get_rng_state()
    compiled(leaf(3)).sum().backward()
    assert graphs.outputs("forward")[1].name == "fwd_base_offset_1" and torch.equal(before, torch.get_rng_state())


def test_a_backward_takes_its_own_state_only_if_it_draws():
    """R-2 (Z), V-10"""
    redraw = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    compiled, graphs = grab(lambda x: redraw(lambda t: dropout(t.sin()).exp(), x))
    compiled(leaf(8)).sum().backward()
    assert graphs.inputs("backward")[-3:] == ["tangents_1", "bwd_seed_1", "bwd_base_offset_1"]
    gradient, offset = graphs.outputs("backward")
    assert gradient.meta["val"].shape == (8,) and offset.meta["val"].dtype is torch.int64


def test_the_joint_graph_takes_four_values_behind_the_tangents():
    """V-9, P-1"""
    seen = {}

    def partition(joint, values, *, num_fwd_outputs, **_):
        seen.update(names=[n.name for n in joint.graph.find_nodes(op="placeholder")], count=num_fwd_outputs)
        seen.update(values=len(values), outputs=len(joint.graph.output_node().args[0]))
        return foregrad.default_partition(joint, values, num_fwd_outputs=num_fwd_outputs)

    compiled, _ = grab(dropout, partition_fn=partition)
    y, gradient = run(compiled, plain(64))
    state = ["fwd_seed_1", "fwd_base_offset_1", "bwd_seed_1", "bwd_base_offset_1"]
    assert seen["names"] == ["primals_1", "tangents_1", *state]
    assert (seen["count"], seen["values"], seen["outputs"]) == (2, 6, 3) and torch.equal(y != 0, gradient != 0)


def test_the_record_of_facts_counts_the_offset():
    """V-5, V-6"""
    compiled, graphs = grab(dropout)
    compiled(leaf(4))
    record = compiled.specializations[0].metadata
    assert record.is_rng_op_functionalized and record.num_outputs_rng_offset == 1
    assert (record.num_forward_returns, record.num_forward) == (1, 2)
    saved = graphs.outputs("forward")[record.tensors_saved_for_backwards_slice]
    assert [node.meta["val"].shape for node in saved] == [(4,)]


def test_it_is_off_by_default():
    """R-4, L-7"""
    with foregrad.config.patch(functionalize_rng_ops=False):
        compiled, graphs = grab(dropout)
        compiled(leaf(4))
    assert graphs.inputs("forward") == ["primals_1"] and "seed" not in compiled.specializations[0].source
    assert not compiled.specializations[0].metadata.is_rng_op_functionalized


# --------------------------------------------------------------------------------------------------- the stream
def test_a_seed_repeats_the_numbers_and_calls_differ():
    """R-1 (Z), R-3"""
    compiled, _ = grab(lambda x: x + torch.rand_like(x))
    torch.manual_seed(0)
    first, second = compiled(plain(8)), compiled(plain(8))
    torch.manual_seed(0)
    assert torch.equal(compiled(plain(8)), first) and not torch.equal(first, second)


def test_draws_of_one_call_differ():
    """R-3: each takes the offset that the one before has left"""
    compiled, graphs = grab(lambda x: (torch.rand_like(x), torch.rand_like(x), torch.rand(8)))
    results = compiled(plain(8))
    assert len({tuple(result.tolist()) for result in results}) == 3
    assert graphs.ops("inference").count("rand_like_at.default") == 2


def test_the_numbers_have_the_distribution_that_was_asked_for():
    """R-1 (Z)"""
    compiled, _ = grab(lambda x: (torch.rand(20000), torch.randn(20000), F.dropout(x, 0.25)))
    uniform, normal, dropped = compiled(torch.ones(20000))
    assert abs(uniform.mean() - 0.5) < 0.02 and abs(uniform.std() - 12**-0.5) < 0.02
    assert abs(normal.mean()) < 0.03 and abs(normal.std() - 1) < 0.03
    assert abs((dropped == 0).float().mean() - 0.25) < 0.02


def test_a_graph_draws_from_no_generator():
    """R-1: the generator moves before the graph runs, not in it"""
    compiled, graphs = grab(lambda x: F.rrelu(dropout(x), training=True) + torch.empty(8, 8).t().normal_())
    compiled(leaf(8, 8)).sum().backward()
    inputs = torch.ones(8, 8), torch.tensor(5), torch.tensor(0)
    with torch.no_grad():
        before = torch.get_rng_state()
        once, again = graphs.modules["forward"](*inputs), graphs.modules["forward"](*inputs)
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(once[0], again[0])
    assert once[1] == 12  # three draws


def test_a_generator_of_the_users_own_is_drawn_from_as_it_is():
    """R-1: it is not in the state that is passed"""
    own, twin = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    compiled, _ = grab(lambda x, g: x + torch.rand(4, generator=g))
    assert torch.equal(compiled(plain(4), own), plain(4) + torch.rand(4, generator=twin))


def test_a_seed_of_64_bits_goes_through():
    """R-3: seeds are unsigned, tensors are signed"""
    before = torch.get_rng_state()
    try:
        torch.manual_seed(2**64 - 3)
        seed, offset = GeneratorState(torch.device("cpu"), draws=False).take()
        assert (int(seed), int(offset)) == (-3, 0)
        torch.manual_seed(-3)
        assert int(GeneratorState(torch.device("cpu"), draws=False).take()[0]) == -3
    finally:
        torch.set_rng_state(before)


def test_keys_that_agree_in_32_bits_give_different_numbers():
    """R-1: all bits of the seed and of the offset count"""
    keys = [(7, 0), (7, 4), (7 + 2**32, 0), (7 + 2**63, 0), (7, 2**40)]
    drawn = {float(torch.rand(1, generator=keyed_generator(torch.device("cpu"), *key))) for key in keys}
    assert len(drawn) == len(keys)


# --------------------------------------------------------------------------------------------------- replays
def program(region_of):
    def region(x):
        return dropout(x.sin()).exp() * torch.rand_like(x)

    return lambda x: region(region_of(region, region_of(region, x)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_recomputed_draw_takes_the_same_seed_and_offset(reentrant, dynamic):
    """P-6: a checkpointed program computes what it computes without"""
    expected = run(grab(program(lambda f, x: f(x)))[0], plain(5, 8))
    compiled, graphs = grab(program(functools.partial(checkpoint, use_reentrant=reentrant)), dynamic=dynamic)
    found = run(compiled, plain(5, 8))
    assert torch.equal(found[0], expected[0]) and torch.allclose(found[1], expected[1], rtol=1e-6)
    assert graphs.ops("backward").count("bernoulli_at.p") == 2 and "bwd_seed_1" not in graphs.inputs("backward")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_saves_its_input_a_seed_and_offsets(reentrant):
    """P-6"""
    compiled, graphs = grab(lambda x: checkpoint(lambda t: dropout(dropout(t.sin()).exp()), x, use_reentrant=reentrant))
    compiled(leaf(64, 64)).sum().backward()
    saved = graphs.outputs("forward")[2:]
    assert [n.name for n in saved if n.meta["val"].numel() > 1] == ["primals_1"] and len(saved) == 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_redrawing_region_draws_anew_in_backward(reentrant):
    """R-2: forward and backward draw independently, and a seed repeats both"""
    redraw = functools.partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=False)
    expected = run(grab(program(lambda f, x: f(x)))[0], plain(5, 8))
    compiled, _ = grab(program(redraw))
    found, again = run(compiled, plain(5, 8)), run(compiled, plain(5, 8))
    assert torch.equal(found[0], expected[0]) and not torch.allclose(found[1], expected[1])
    assert torch.equal(found[1], again[1])


def test_a_backward_for_some_outputs_draws_too():
    """J-5, R-2"""
    redraw = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    compiled, _ = grab(lambda x: (redraw(lambda t: dropout(t.sin()).exp(), x), x.cos()))

    def gradient(seed, which):
        x = torch.ones(64, requires_grad=True)
        torch.manual_seed(seed)
        compiled(x)[which].sum().backward()
        return x.grad

    assert torch.equal(gradient(1, 0), gradient(1, 0)) and not torch.equal(gradient(1, 0), gradient(2, 0))
    assert torch.equal(gradient(1, 1), -torch.ones(64).sin())


def test_a_double_backward_replays_draws_and_makes_no_new_ones():
    """J-10, R-2"""

    def gradients(region_of):
        compiled, _ = grab(lambda x: region_of(lambda t: dropout(t.sin()).exp() * torch.rand_like(t), x))
        x = plain(5, 8).requires_grad_()
        torch.manual_seed(4)
        (first,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        return first.detach(), torch.autograd.grad(first.sin().sum(), x)[0]

    expected = gradients(lambda f, x: f(x))
    found = gradients(functools.partial(checkpoint, use_reentrant=False))
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(found, expected, strict=True))
    redraw = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(foregrad.errors.UnsupportedError, match="preserve_rng_state=True"):
        gradients(redraw)


def test_the_source_shows_what_passes_the_state():
    """`source` is exactly what runs."""
    compiled, _ = grab(dropout)
    compiled(leaf(4))
    source = compiled.specializations[0].source
    assert "args += seed_and_offset()" in source and "move_generator(results[1])" in source


def test_a_module_of_a_front_end():
    """F-10, R-2: flat arguments"""

    class Drop(torch.nn.Module):
        def forward(self, x):
            return (dropout(x),)

    run_as_it_is = grab(dropout)[1].compiler("forward")
    call = foregrad.aot_module_simplified(Drop(), [leaf(64)], run_as_it_is)
    x = leaf(64)
    (y,) = call(x)
    y.sum().backward()
    assert torch.equal(y != 0, x.grad != 0)
