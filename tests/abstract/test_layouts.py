"""Results lie in memory as the kernels lay them, whatever torch's shape inference says."""

import functools
import gc
import logging
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foregrad
from foregrad import check
from foregrad._torch import hint_of
from foregrad.abstract import tensor_meta as layouts
from foregrad.abstract import trials
from foregrad.abstract.lean_engine import LeanEngine
from foregrad.abstract.tensor_meta import NOTHING_KNOWN, Fresh, Row, interned, layout_class, rows_in
from foregrad.abstract.trials import shrinkings, smaller, strides_in_order
from foregrad.errors import UnsupportedError
from foregrad.ops import Kind, op_info
from helpers import leaf, nop, plain

CPU = torch.device("cpu")
symbolic = functools.partial(foregrad.aot_function, fw_compiler=nop, dynamic=True)


def turned(*shape):
    """A tensor whose first dimension is the innermost one."""
    return plain(*shape[::-1]).permute(*reversed(range(len(shape)))).requires_grad_()


def channels_last(*shape):
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return plain(*shape).to(memory_format=form).requires_grad_()


PROGRAMS = {
    "batch norm 1d": (lambda x: F.batch_norm(x, None, None, training=True), lambda: turned(4, 3)),
    "batch norm of sequences": (lambda x: F.batch_norm(x, None, None, training=True), lambda: turned(4, 3, 5)),
    "batch norm 2d": (lambda x: F.batch_norm(x, None, None, training=True), lambda: turned(2, 3, 4, 5)),
    "batch norm 3d": (lambda x: F.batch_norm(x, None, None, training=True), lambda: turned(2, 3, 2, 4, 5)),
    "batch norm 2d, channels last": (nn.BatchNorm2d(3), lambda: channels_last(2, 3, 4, 5)),
    "batch norm, evaluation": (nn.BatchNorm1d(3).eval(), lambda: turned(4, 3, 5)),
    "rrelu": (lambda x: F.rrelu(x, training=True), lambda: turned(4, 5)),
    "channel shuffle": (lambda x: F.channel_shuffle(x, 2), lambda: channels_last(2, 4, 3, 3)),
    "max pool 1d": (lambda x: F.max_pool1d(x, 2), lambda: turned(2, 3, 8)),
    "max pool 1d, no gradients": (lambda x: F.max_pool1d(x, 3, 1, 1), lambda: turned(2, 3, 8).detach()),
    "max pool 1d, no gradients, of torch": (lambda x: torch.max_pool1d(x, 2), lambda: turned(2, 3, 8).detach()),
    "group norm with ones": (lambda x: F.group_norm(x, 2), lambda: leaf(2, 4, 1, 1)),
    "group norm, channels last": (lambda x: F.group_norm(x, 2), lambda: channels_last(1, 4, 3, 1)),
    "log sigmoid": (F.logsigmoid, lambda: turned(3, 4)),
    "a product with ones": (lambda x: x * x[0], lambda: turned(1, 1, 5)),
    "an upsampled image of one channel": (
        lambda x: F.interpolate(x, size=(3, 3), mode="bilinear"),
        lambda: turned(2, 1, 4, 4),
    ),
    "batch norm, permuted and with gaps": (nn.BatchNorm2d(4), lambda: turned(4, 4, 3, 5)[::2]),
    "batch norm, channels last of one pixel": (
        nn.BatchNorm2d(4),
        lambda: plain(2, 4).as_strided((2, 4, 1, 1), (4, 1, 4, 4)).requires_grad_(),
    ),
    "dropout, channels last of one channel": (lambda x: F.dropout(x, 0.5), lambda: channels_last(2, 1, 4, 4)),
    "a part of a larger tensor": (lambda x: torch.ones_like(x[:, :1]) * x[:, :1], lambda: leaf(1, 4)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_lie_as_in_eager(name):
    program, make = PROGRAMS[name]
    compiled = foregrad.aot_module(program, nop) if isinstance(program, nn.Module) else None
    x = make()
    if compiled is None:
        check(program, x)
        compiled = foregrad.aot_function(program, nop)
    expected, got = ((program)(x), compiled(x))
    assert got.stride() == expected.stride() and got.storage_offset() == expected.storage_offset()


@pytest.mark.parametrize(
    "name", [name for name, (program, _) in PROGRAMS.items() if not isinstance(program, nn.Module)]
)
def test_results_of_symbolic_sizes_lie_as_in_eager(name):
    program, make = PROGRAMS[name]
    x = make()
    assert symbolic(program)(x).stride() == program(x).stride()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_without_gradients_lie_as_in_eager(name, dynamic):
    """Some compositions take another kernel then."""
    program, make = PROGRAMS[name]
    compile = foregrad.aot_module if isinstance(program, nn.Module) else foregrad.aot_function
    x = make().detach()
    expected, got = program(x), compile(program, nop, dynamic=dynamic)(x)
    assert got.stride() == expected.stride() and got.storage_offset() == expected.storage_offset()


@pytest.mark.parametrize(
    "program",
    [
        torch.linalg.svdvals,
        lambda x: torch.linalg.eigvalsh(x @ x.mT),
        lambda x: torch.linalg.matrix_norm(x, "nuc"),
        lambda x: torch.norm(x, "nuc", dim=(0, 1)),
        torch.linalg.cond,
    ],
)
def test_values_without_gradients_are_of_the_kernel_that_eager_takes(program):
    x = plain(5, 4)
    assert torch.equal(foregrad.aot_function(program, nop)(x), program(x))


def test_other_sizes_lie_alike():
    """The strides of a symbolic result are computed from its sizes."""
    compiled = symbolic(lambda x: F.logsigmoid(x).view(-1))
    for shape in ((3, 4), (5, 6)):
        x = plain(*shape).t()
        assert torch.equal(compiled(x), F.logsigmoid(x).view(-1))


def test_symbolic_results_of_another_dtype_than_inferred():
    """The kernel decides about the dtype too, and about all results of an operator."""
    q = plain(2, 2, 8, 8).double().transpose(1, 2)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    seen = []

    def look(graph, inputs):
        seen.extend(n.meta["val"] for n in graph.graph.nodes if "flash" in str(n.target))
        return nop(graph, inputs)

    foregrad.aot_function(lambda q: attend(q, q, q), look, dynamic=True)(q)
    for value, real in zip(*seen, attend(q, q, q), strict=True):
        assert value.dtype is real.dtype and tuple(map(hint_of, value.stride())) == real.stride()


def rnn_workspace(x, state, *weights):
    return torch.ops.aten.mkldnn_rnn_layer(x, *weights, state, state, False, [], 2, 4, 1, True, False, False, True)[3]


def lstm_arguments(batch):
    torch.manual_seed(0)
    return plain(2, batch, 3), torch.zeros(1, batch, 4), plain(16, 3), plain(16, 4), plain(16), plain(16)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="there is no such library here")
def test_a_workspace_of_symbolic_sizes_is_the_librarys_own():
    model = nn.LSTM(3, 4)
    compiled = foregrad.aot_module(model, nop, dynamic=True)
    for batch in (5, 7, 3):
        x = leaf(2, batch, 3)
        expected, got = (torch.autograd.grad(f(x)[0].sum(), x)[0] for f in (model, compiled))
        assert torch.equal(got, expected)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="there is no such library here")
@pytest.mark.parametrize(
    "size", [lambda w: w.shape[0], lambda w: w.size(0), lambda w: w.numel(), len, lambda w: w.float().shape[0]]
)
def test_the_size_of_a_workspace_is_the_real_one(size):
    def read(*given):
        return given[0] * size(rnn_workspace(*given))

    for batch in (5, 50):
        given = lstm_arguments(batch)
        assert torch.equal(symbolic(read)(*given), read(*given))


@pytest.mark.parametrize("size", [(2, 0, 3), (0, 3), (3, 0), (2, 1, 0)])
def test_strides_of_symbolic_results_without_elements_are_known(size):
    like = interned(size, torch.empty(size).stride(), 0, torch.float32, CPU, False, False)
    assert strides_in_order(like, size, {}) == like.stride


def branch(x):
    y = F.batch_norm(x, None, None, training=True)
    return y * 2 if y.is_contiguous() else y * 3


def drop(x):
    return F.dropout(F.batch_norm(x, None, None, training=True), 0.5)


def write_through_a_view(x):
    y = F.logsigmoid(x)
    y.view(-1)[0] = 1.0
    return y


def reshape_and_write(x):
    y = F.channel_shuffle(x, 2)
    y.reshape(2, -1).zero_()  # a copy, or a view
    return y


BEHAVIOUR = {
    "a branch on contiguity": (branch, lambda: turned(4, 3, 5)),
    "random numbers": (drop, lambda: turned(4, 3, 5)),
    "a view that only some layouts allow": (write_through_a_view, lambda: turned(4, 3)),
    "a reshape that is a view or a copy": (reshape_and_write, lambda: channels_last(2, 4, 3, 3)),
}


@pytest.mark.parametrize("name", BEHAVIOUR)
def test_what_depends_on_the_layout_is_as_in_eager(name):
    program, make = BEHAVIOUR[name]
    check(program, make())
    check(program, make().detach(), compile=symbolic)


def test_values_of_the_graph_lie_as_the_results_do():
    """Compilers see the real strides."""
    graph = foregrad.capture(lambda x: F.logsigmoid(x), plain(3, 4).t()).joint_graph.graph
    (node,) = (n for n in graph.nodes if n.target is torch.ops.aten.log_sigmoid_forward.default)
    assert node.meta["val"][0].stride() == F.logsigmoid(plain(3, 4).t()).stride()


@pytest.mark.parametrize("shape", [(700, 300), (3, 70000)])
def test_large_tensors_are_told_by_small_ones(shape, monkeypatch):
    monkeypatch.setattr(trials, "LARGE", 1 << 16)  # nothing of this size may be tried
    x = plain(*shape).t()
    compiled = foregrad.aot_function(lambda x: F.logsigmoid(x), nop)
    assert compiled(x).stride() == F.logsigmoid(x).stride()


def test_a_kernel_that_shape_inference_does_not_know_is_asked():
    """Shape inference refuses float32, the kernel does not."""
    a, b = plain(6, 8), plain(2, 8, 4)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    try:
        torch._grouped_mm(a, b, offs=offsets)
    except RuntimeError as error:
        pytest.skip(f"eager refuses it too: {error}")
    check(lambda a, b: torch._grouped_mm(a, b, offs=offsets), a, b)


# --------------------------------------------------------------------------------------------------- trials
@pytest.fixture
def nothing_known(monkeypatch):
    """Every operator is tried."""
    monkeypatch.setattr(Row, "covers", lambda self, layouts, dtypes: False)
    LeanEngine.results.clear()
    yield
    LeanEngine.results.clear()


def test_random_numbers_are_put_back(nothing_known):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    foregrad.capture(lambda x: torch.bernoulli(F.rrelu(x, training=True)), turned(3, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_the_user_is_left_alone(nothing_known):
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    foregrad.capture(lambda x: torch.bernoulli(x, generator=generator), torch.full((3,), 0.5))
    assert torch.equal(generator.get_state(), before)


def test_arguments_are_not_written(nothing_known):
    x, mean, var = turned(4, 3), torch.zeros(3), torch.ones(3)
    foregrad.capture(lambda x: F.batch_norm(x, mean, var, training=True), x)
    assert torch.equal(mean, torch.zeros(3)) and torch.equal(var, torch.ones(3))


def test_autocast_does_not_reach_a_trial(nothing_known):
    with torch.autocast("cpu", torch.bfloat16):
        check(lambda x, w: F.linear(x, w).softmax(-1), plain(3, 4), plain(5, 4))


def test_pivots_are_tried_as_numbers_of_rows(nothing_known):
    """From torch 2.15 on the kernel refuses others; a column is no hint that they are in range."""
    (a, b), solve = (plain(2, 2) + torch.eye(2), plain(2, 1)), torch.linalg.lu_solve
    check(lambda a, b: solve(*torch.linalg.lu_factor(a), b), a.requires_grad_(), b)


def write_by_a_mask(x):
    return x.clone().index_put((x > 3,), x.new_ones(3)), x.clone().masked_scatter(x > 3, x.new_ones(3))


def test_writes_by_masks_are_tried_with_what_fits_every_mask(nothing_known):
    x = plain(2, 3)
    for ours, eager in zip(foregrad.aot_function(write_by_a_mask, nop)(x), write_by_a_mask(x), strict=True):
        assert torch.equal(ours, eager) and ours.stride() == eager.stride()


def test_custom_operators_are_not_tried(nothing_known):
    """Their fake kernel is the author's word."""
    ran = []

    @torch.library.custom_op("foregrad_layouts::note", mutates_args=())
    def note(x: torch.Tensor) -> torch.Tensor:
        ran.append(x.shape)
        return x.clone()

    note.register_fake(lambda x: torch.empty_like(x))
    foregrad.capture(lambda x: note(x), turned(2, 3))
    assert not ran


def test_what_cannot_be_tried_is_refused_by_name(nothing_known, monkeypatch):
    monkeypatch.setattr(trials, "run_for_real", lambda case, fill: (_ for _ in ()).throw(RuntimeError("bad values")))
    with pytest.raises(UnsupportedError, match=r"aten\.sin\.default.*bad values.*fallback='eager'"):
        foregrad.capture(lambda x: x.sin(), turned(2, 3))


def test_a_whole_model_without_a_table(nothing_known):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )
    check(model, plain(2, 3, 8, 8))


class Images(nn.Module):
    """What related sizes there are: of windows, of strides, of indices into images."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
            *(nn.Conv2d(16, 24, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)),
        )

    def forward(self, x):
        return F.cross_entropy(self.layers(x), torch.zeros(len(x), dtype=torch.int64))


def test_trials_are_silent(nothing_known, caplog, capfd):
    for form in (torch.contiguous_format, torch.channels_last):
        x = plain(4, 3, 64, 64).to(memory_format=form)
        with warnings.catch_warnings(record=True) as warned:
            foregrad.capture(Images().to(memory_format=form), x)
        assert not warned
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert capfd.readouterr() == ("", "")


def test_a_trial_that_fails_holds_nothing(nothing_known, monkeypatch):
    """The error of a trial leads, frame by frame, to the recorded tensors."""
    alive = []

    class Watched(RuntimeError):
        def __init__(self):
            super().__init__("bad values")
            alive.append(weakref.ref(self))

    monkeypatch.setattr(trials, "run_for_real", lambda case, fill: (_ for _ in ()).throw(Watched()))
    gc.disable()
    try:
        with pytest.raises(UnsupportedError, match="bad values"):
            foregrad.capture(lambda x: x.sin(), turned(2, 3))
        assert alive and not any(error() for error in alive[:-1])
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------ the table
def attention(x):
    q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in x.chunk(3, dim=-1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


ORDINARY = {
    "attention": (attention, lambda: leaf(2, 16, 96)),
    "layer norm": (lambda x: F.gelu(F.layer_norm(x, (8,))), lambda: leaf(2, 5, 8)),
    "pooling": (lambda x: F.avg_pool2d(F.max_pool2d(x, 2), 2), lambda: leaf(2, 3, 8, 8)),
    "pooling, channels last": (lambda x: F.max_pool2d(x, 3, 2, 1), lambda: channels_last(2, 3, 8, 8)),
    "convolution": (nn.Conv2d(3, 4, 3), lambda: leaf(2, 3, 8, 8)),
    "activations": (lambda x: F.log_softmax(F.silu(x), -1), lambda: leaf(4, 5)),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_need_no_trial(name, monkeypatch):
    """For the versions that there is a table for."""
    program, make = ORDINARY[name]
    tried = []
    run = trials.run_for_real
    monkeypatch.setattr(trials, "run_for_real", lambda case, fill: tried.append(case.op) or run(case, fill))
    LeanEngine.results.clear()
    foregrad.aot_function(program, nop)(make()).sum().backward()
    assert [op for op in tried if op_info(op).kind is not Kind.VIEW] == []  # views look at no data


def test_a_table_grows_by_what_takes_in_no_disagreement():
    from sweep.tables import extended

    def seen(agrees, *layouts, dtype="float32"):
        return "op", frozenset(layouts), frozenset({dtype}), agrees

    row = {"contiguous"}, {"float32"}
    assert extended(row, [], [seen(True, "contiguous", "permuted")]) == ({"contiguous", "permuted"}, {"float32"})
    before = [frozenset({"contiguous", "permuted"})]
    assert extended(row, before, [seen(True, "permuted"), seen(True, "expanded")]) == (
        {"contiguous", "expanded"},
        {"float32"},
    )
    assert extended(row, [], [seen(False, "contiguous")]) == (set(), {"float32"})
    by_dtype = [frozenset({"contiguous"})]
    assert extended(row, by_dtype, [seen(True, "contiguous", dtype="half")]) == row


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (plain(2, 3), "contiguous"),
        (plain(2, 3).t(), "permuted"),
        (plain(2, 1), "contiguous with ones"),
        (torch.empty_strided((2, 1), (1, 7)), "as contiguous with ones"),
        (torch.empty_strided((2, 1, 3), (1, 7, 2)), "permuted with ones"),
        (channels_last(2, 1, 4, 5), "as contiguous 4d with ones"),
        (torch.empty_strided((2, 3, 1, 1), (3, 1, 3, 3)), "as contiguous 4d with ones"),
        (channels_last(2, 3, 4, 5), "channels last 4d"),
        (channels_last(2, 3, 2, 4, 5), "channels last 5d"),
        (turned(2, 3, 4, 5), "permuted 4d"),
        (plain(3).expand(2, 3), "expanded"),
        (plain(3).expand(4, 3).t(), "expanded"),
        (plain(2, 3).t().expand(4, 3, 2), "expanded and permuted"),
        (plain(8)[::2], "with gaps"),
        (plain(4, 6).t()[:, ::2], "with gaps and permuted"),
        (channels_last(2, 3, 4, 5)[:, :2], "with gaps and permuted 4d"),
        (plain(6).unfold(0, 3, 1), "overlapping"),
        (plain(0, 3), "empty"),
        (plain(), "contiguous"),
    ],
)
def test_classes_of_layout(tensor, expected):
    assert layout_class(tensor.shape, tensor.stride()) == expected


def test_a_row_covers_what_it_names():
    group = {"layouts": ["contiguous"], "dtypes": ["float32"], "operators": ["aten.sin.default"]}
    row = rows_in({"agree": [group]})["aten.sin.default"]
    assert row.covers(["contiguous"], [torch.float32])
    assert not row.covers(["contiguous", "permuted"], [torch.float32])
    assert not row.covers(["contiguous"], [torch.float64])
    assert not NOTHING_KNOWN.covers(["contiguous"], [torch.float32])


def test_there_is_a_table_for_this_torch():
    """CONTRIBUTING.md says how to make one for a new release."""
    table = layouts.table_for("cpu")
    assert len(table) > 300 and table["aten.mm.default"].covers(["contiguous", "permuted"], [torch.float32])
    assert not table["aten.native_batch_norm.default"].covers(["permuted"], [torch.float32])


def test_stand_ins_keep_the_class_of_layout():
    metas = [
        interned((64, 300, 1), (1, 64, 64), 0, torch.float32, CPU, False, False),
        interned((64, 300), (0, 2), 5, torch.float32, CPU, False, False),
    ]
    for sizes in shrinkings(metas):
        for meta in metas:
            small = smaller(meta, sizes)
            assert small.layout_class == meta.layout_class and small.reach <= meta.reach


def test_an_answer_is_what_is_recorded(nothing_known, monkeypatch):
    """The test above would pass if trials were not asked: here one answers something else."""
    odd = Fresh(interned((2, 3), (1, 2), 0, torch.float32, CPU, False, False))
    monkeypatch.setattr(trials, "run_for_real", lambda case, fill: odd)
    graph = foregrad.capture(lambda x: x.sin(), plain(2, 3)).joint_graph.graph
    (node,) = (n for n in graph.nodes if n.target is torch.ops.aten.sin.default)
    assert node.meta["val"].stride() == (1, 2)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_layouts_without_gradients(mode):
    with mode():
        x = plain(3, 4).t()
        assert foregrad.aot_function(F.logsigmoid, nop)(x).stride() == F.logsigmoid(x).stride()
        check(lambda x: F.logsigmoid(x) * 2, x, training=False)


def test_constants_keep_their_values():
    check(lambda x: x * int(torch.tensor(3) + 1), plain(2))


@pytest.mark.parametrize("reduce", [torch.max, torch.argmin, torch.amax, lambda x: x.max(0)])
def test_a_reduction_of_nothing_is_refused_though_nobody_reads_it(reduce):
    """Shape inference lets it pass, and without a reader no kernel would refuse it either."""

    def program(x):
        reduce(x)
        return x * 2

    with pytest.raises((RuntimeError, IndexError)):
        program(plain(0))
    with pytest.raises((foregrad.ForegradError, RuntimeError, IndexError)):
        foregrad.aot_function(program, nop)(plain(0))


@pytest.mark.parametrize("make", [foregrad.aot_function, functools.partial(foregrad.aot_function, dynamic=True)])
@pytest.mark.parametrize(
    "product",
    [torch.mm, lambda x, w: F.linear(x, w), lambda x, w: F.conv1d(x[None], w[..., None])],
    ids=["mm", "linear", "conv"],
)
def test_an_error_about_dtypes_is_raised_also_where_nobody_reads_the_result(product, make):
    """Shape inference does not look at all dtypes that a kernel looks at."""

    def program(x, w):
        product(x, w)
        return x

    with pytest.raises(RuntimeError) as eager:
        program(plain(3, 3).double(), plain(3, 3))
    with pytest.raises(RuntimeError) as compiled:
        make(program, nop)(plain(3, 3).double(), plain(3, 3))
    assert str(compiled.value) == str(eager.value)


def test_a_kernel_that_takes_a_mixture_of_dtypes_is_asked_once(monkeypatch):
    asked = []
    tried = trials.tried
    monkeypatch.setattr(trials, "tried", lambda case: (asked.append(case.op), tried(case))[1])
    for rows in (3, 4, 5):
        foregrad.aot_function(lambda x: torch.cat([x, x.double()]), nop)(plain(rows, 2))
    assert asked.count(torch.ops.aten.cat.default) <= 1
