"""Random numbers and checkpointing on a CUDA device, whose generators count: a seed and an offset are their state."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import foregrad
from checking import check_core
from helpers import grab

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])


def leaf(*shape, **options):
    return torch.randn(*shape, device="cuda", **options).requires_grad_()


def region(x):
    return F.dropout(F.dropout(x.sin(), 0.3).exp(), 0.2) * torch.rand_like(x)


def attention(q):
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).sin()


@REENTRANT
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpointed_draws_agree_with_eager(reentrant, preserve):
    """R-4"""
    run = functools.partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=preserve)
    check_core(lambda x: run(region, x) + torch.rand(6, device="cuda"), leaf(4, 6))


@REENTRANT
def test_checkpointed_attention_agrees_with_eager(reentrant):
    """R-4: its kernels draw by themselves"""
    check_core(lambda q: checkpoint(attention, q, use_reentrant=reentrant), leaf(2, 4, 16, 64, dtype=torch.bfloat16))


@REENTRANT
def test_a_draw_on_the_cpu_beside_one_on_the_device(reentrant):
    """R-4: each replays the state of its own generator"""

    def both(x):
        return F.dropout(x.sin(), 0.3).exp() * torch.rand(6).to("cuda")

    check_core(lambda x: checkpoint(both, x, use_reentrant=reentrant), leaf(4, 6))


@REENTRANT
def test_a_region_saves_its_input_and_one_state(reentrant):
    """P-6: 16 bytes"""
    compiled, graphs = grab(lambda x: checkpoint(region, x, use_reentrant=reentrant))
    compiled(leaf(64, 64)).sum().backward()
    saved = [node.meta["val"] for node in graphs.outputs("forward")[1:] if node.op != "placeholder"]
    assert [(value.dtype, value.numel()) for value in saved] == [(torch.uint8, 16)]


@REENTRANT
def test_checkpointed_attention_is_recomputed(reentrant):
    """P-6: also where it drops nothing, and so draws nothing"""

    def plain_attention(q):
        return F.scaled_dot_product_attention(q, q, q).sin()

    compiled, graphs = grab(lambda q: checkpoint(plain_attention, q, use_reentrant=reentrant))
    compiled(leaf(2, 4, 16, 64, dtype=torch.bfloat16)).sum().backward()
    saved = [node.meta["val"].numel() for node in graphs.outputs("forward")[1:] if node.op != "placeholder"]
    assert all(count <= 16 for count in saved)


def test_checkpointing_lowers_the_peak_of_memory():
    """P-6: as much as it does in eager, to within a tenth"""

    def layer():
        return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256))

    layers = nn.ModuleList(layer() for _ in range(6)).cuda()

    def net(x, run):
        for layer in layers:
            x = run(layer, x)
        return x

    def peak(f):
        x = leaf(8192, 256)
        f(x).sum().backward()
        layers.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f(x).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    def freeing(graph, inputs):
        def run(args):
            return torch.fx.Interpreter(graph).boxed_run(args)

        run._boxed_call = True
        return run

    marked = functools.partial(checkpoint, use_reentrant=False)
    eager = peak(lambda x: net(x, marked))
    plain = peak(foregrad.aot_function(lambda x: net(x, lambda f, x: f(x)), freeing))
    compiled = peak(foregrad.aot_function(lambda x: net(x, marked), freeing))
    assert compiled < 1.1 * eager and compiled < 0.7 * plain


# ----------------------------------------------------------------------------------------------- functional
@pytest.fixture
def functional():
    with foregrad.config.patch(functionalize_rng_ops=True, verify=True):
        yield


def test_the_stream_is_eagers_own(functional):
    """R-3: a draw at the generator's seed and offset gives what the generator would have given"""

    def program(x):
        return F.dropout(x, 0.5) + torch.randn_like(x) * torch.rand(6, device="cuda")

    compiled, _ = grab(program)
    x = torch.ones(4, 6, device="cuda")
    torch.manual_seed(1)
    expected = [program(x) for _ in range(3)], torch.rand(3, device="cuda")
    torch.manual_seed(1)
    found = [compiled(x) for _ in range(3)], torch.rand(3, device="cuda")
    assert all(map(torch.equal, [*expected[0], expected[1]], [*found[0], found[1]]))


def test_the_generator_ends_at_a_multiple_of_four(functional):
    """R-3"""
    torch.cuda.manual_seed(0)
    compiled, _ = grab(lambda x: torch.rand_like(x))
    a, b = (compiled(torch.zeros(5, device="cuda")) for _ in range(2))
    assert not torch.equal(a, b) and torch.cuda.default_generators[0].get_offset() % 4 == 0


def test_a_program_that_draws_nothing_moves_nothing(functional):
    """R-3"""
    x = leaf(3)
    before = torch.cuda.get_rng_state()
    grab(lambda x: x.sin())[0](x).sum().backward()
    assert torch.equal(before, torch.cuda.get_rng_state())


@REENTRANT
def test_a_recomputed_draw_takes_the_same_seed_and_offset(functional, reentrant):
    """P-6: checkpointed or not, eager or not, the numbers are the same"""

    def gradient(f):
        x = torch.ones(8, 8, device="cuda", requires_grad=True)
        torch.manual_seed(2)
        f(x).sum().backward()
        return x.grad

    expected = gradient(region)
    compiled, graphs = grab(lambda x: checkpoint(region, x, use_reentrant=reentrant))
    assert torch.equal(gradient(compiled), expected) and "bwd_seed_1" not in graphs.inputs("backward")
    compiled, _ = grab(lambda q: checkpoint(attention, q, use_reentrant=reentrant))
    q = leaf(2, 4, 16, 64, dtype=torch.bfloat16)
    torch.manual_seed(3)
    compiled(q).sum().backward()
    found, q.grad = q.grad, None
    torch.manual_seed(3)
    attention(q).sum().backward()
    assert torch.equal(found, q.grad)
