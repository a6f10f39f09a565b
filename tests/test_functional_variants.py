"""The functional twin of an operator that writes."""

import functools

import pytest
import torch

import foregrad
from checking import check_core
from foregrad.errors import UnsupportedError
from foregrad.functional_variants import functional_variant
from foregrad.graph.verify import assert_functional_graph
from foregrad.ops import Kind, op_info
from helpers import grab, leaf, plain

aten = torch.ops.aten

TWINS = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.mul_.Scalar: aten.mul.Scalar,
    aten.relu_.default: aten.relu.default,
    aten.index_put_.default: aten.index_put.default,
    aten.scatter_.src: aten.scatter.src,
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.add.out: aten.add.Tensor,
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten.native_batch_norm.default: aten._native_batch_norm_legit_functional.default,
    aten._foreach_add_.Scalar: aten._foreach_add.Scalar,
}


@pytest.mark.parametrize("op", TWINS, ids=str)
def test_a_writer_has_its_functional_twin(op):
    """M-1"""
    assert functional_variant(op).op is TWINS[op]


def test_every_in_place_operator_of_torch_has_a_twin_that_writes_nothing():
    """M-1: whatever is found must be functional."""
    found = 0
    for name in dir(aten):
        if not name.endswith("_") or name.startswith("__"):
            continue
        packet = getattr(aten, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if not torch._C._dispatch_has_kernel(op.name()):
                continue  # known to TorchScript only
            if op_info(op).kind is Kind.WRITE and (variant := functional_variant(op)) is not None:
                assert not variant.op._schema.is_mutable, op
                found += 1
    assert found > 200


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (aten.sin.default, Kind.PURE),
        (aten.view.default, Kind.VIEW),
        (aten.detach.default, Kind.VIEW),
        (aten.split.Tensor, Kind.VIEW),
        (aten.add_.Tensor, Kind.WRITE),
        (aten.add.out, Kind.WRITE),
        (aten.native_batch_norm.default, Kind.WRITE),
        (aten.t_.default, Kind.RESHAPE),
        (aten.set_.source_Tensor, Kind.RESHAPE),
        (aten.resize_.default, Kind.RESHAPE),
    ],
    ids=str,
)
def test_operators_are_told_apart_by_their_schema(op, kind):
    assert op_info(op).kind is kind


def test_random_operators_are_known():
    """R-4"""
    assert all("random" in op_info(op).traits for op in (aten.rand.default, aten.native_dropout.default))
    assert "random" not in op_info(aten.sin.default).traits


def batch_norm(training):
    def program(x, mean, variance):
        return torch._native_batch_norm_legit(x, None, None, mean, variance, training, 0.1, 1e-5)[0]

    return program


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_functional_whether_it_trains_or_not(training):
    """M-1, M-13: its schema says that it writes, also where it does not."""
    compiled, graphs = grab(batch_norm(training))
    compiled(leaf(4, 3), plain(3), plain(3))
    assert assert_functional_graph(graphs.modules["forward"].graph) == 0
    if not training:
        check_core(batch_norm(training), leaf(4, 3), plain(3), plain(3))


def test_batch_norm_that_writes_mean_and_variance_to_one_place_is_refused():
    """M-1: what comes out depends on the order in which the kernel writes."""
    statistics = plain(2, 3)
    with pytest.raises(UnsupportedError, match="writes to memory that it reads"):
        grab(batch_norm(True))[0](leaf(4, 3), statistics[0], statistics[0])
    x, expected = leaf(4, 3), plain(2, 3)
    grab(batch_norm(True))[0](x, statistics[0], statistics[1])  # side by side
    batch_norm(True)(x, expected[0], expected[1])
    assert torch.allclose(statistics, expected)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_beside_tensors_of_16_bits(dtype, inplace):
    """On the CPU, operators that write read a number in the dtype of what they write, and others in more."""
    number = -0.0024503534490411933

    def of_a_list(x):
        torch._foreach_mul_([x], [number])
        return x + 1

    def of_itself(x):
        return torch.ops.aten.mul_.Scalar(x.clone(), number)

    def by_a_whole_number(x):
        torch._foreach_mul_([x], 1001)
        return x + 1

    def not_in_place(x):
        return torch._foreach_mul([x.clone()], number)[0]

    for program in (of_a_list, of_itself, by_a_whole_number, not_in_place):
        x = torch.linspace(-0.5, 0.5, 200).to(dtype)
        compiled = foregrad.compile(program, backend="eager", inplace=inplace)
        mine, theirs = x.clone(), x.clone()
        assert torch.equal(compiled(mine), program(theirs)) and torch.equal(mine, theirs)


@pytest.mark.parametrize("compile", [functools.partial(foregrad.compile, backend="eager"), foregrad.train_step])
def test_rates_of_parameters_of_16_bits(compile):
    def step_of(parameter):
        optimizer = torch.optim.AdamW([parameter], foreach=True)

        def step(x, rate):
            optimizer.param_groups[0]["lr"] = rate
            (parameter * x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    start = torch.linspace(-1, 1, 64, dtype=torch.bfloat16)
    one, other = (torch.nn.Parameter(start.clone()) for _ in range(2))
    compiled, eager = compile(step_of(one)), step_of(other)
    for i in range(4):
        x = torch.linspace(-1, i, 64, dtype=torch.bfloat16)
        compiled(x, 0.1 * (i + 1))
        eager(x, 0.1 * (i + 1))
        assert torch.equal(one, other)


def test_one_number_beside_tensors_of_16_bits_and_others():
    def program(x, y):
        torch._foreach_mul_([x, y], 0.1)
        return x.float() + y

    with pytest.raises(UnsupportedError, match="tensors of one dtype at a time"):
        foregrad.compile(program, backend="eager")(torch.ones(3, dtype=torch.bfloat16), torch.ones(3))
