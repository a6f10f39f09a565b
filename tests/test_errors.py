"""Bad input: what went wrong, where, and the way out, in the user's words; and nothing of the user's is touched."""

import functools
import pathlib
import random
import traceback

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import foregrad
from foregrad import ForegradError, errors
from foregrad.capturing.capture import Attempt, retrace_until_stable
from foregrad.errors import (
    CaptureError,
    CompilerError,
    DataDependentError,
    EagerFallbackWarning,
    EscapeError,
    FakeModeError,
    FirstCallError,
    InternalError,
    MissingInputError,
    StateChangeError,
    UnknownOutputError,
    UnsupportedError,
)
from foregrad.record.retrace import GradientBefore
from helpers import grab, leaf, nop, plain

HERE = pathlib.Path(__file__).name


class Box:
    """A container that nobody has registered."""

    def __init__(self, inside):
        self.inside = inside


class Holder(nn.Module):
    """Does something to itself in each call."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.calls = 0
        self.last = None
        self.seen = []

    def forward(self, x):
        self.what(self, x)
        return x * 2


def compile_and_call(fn, *args, **options):
    compiled = foregrad.aot_module if isinstance(fn, nn.Module) else foregrad.aot_function
    return compiled(fn, nop, **options)(*args)


# ----------------------------------------------------------------------------------------- reading a value
READS = {
    "item": (lambda x: x * x.sum().item(), r"item\(\)"),
    "bool": (lambda x: x if x.sum() > 0 else -x, r"bool\(\)"),
    "float": (lambda x: x * float(x.sum()), r"float\(\)"),
    "int": (lambda x: x * int(x.sum()), r"int\(\)"),
    "complex": (lambda x: x * complex(x.sum()), r"complex\(\)"),
    "tolist": (lambda x: x * x.tolist()[0], r"(tolist|item)\(\)"),
    "numpy": (lambda x: x * float(x.detach().numpy()[0]), r"numpy\(\)"),
    "data_ptr": (lambda x: x * x.data_ptr(), r"data_ptr\(\)"),
    "storage": (lambda x: x * x.untyped_storage().nbytes(), r"untyped_storage\(\)"),
    "index": (lambda x: x * [1, 2][x.argmax()], "an index"),
    "a range": (lambda x: [x for _ in range(x.argmax())], "an index"),
}


@pytest.mark.usefixtures("reads_refused")
@pytest.mark.parametrize("name", READS)
def test_reading_a_value_names_the_line_and_the_way_out(name):
    program, words = READS[name]
    message = rf"{words} of a recorded tensor, at .*{HERE}:\d+.*torch.where"
    with pytest.raises(DataDependentError, match=message) as caught:
        compile_and_call(program, leaf(2))
    assert "fallback='eager'" in str(caught.value) and isinstance(caught.value, RuntimeError)


@pytest.mark.usefixtures("reads_refused")
def test_reading_a_tensor_of_the_closure_names_the_line_too():
    """F-14: its value would be baked in."""
    scale = plain(1)
    with pytest.raises(DataDependentError, match=rf"item\(\) .*{HERE}:\d+"):
        compile_and_call(lambda x: x * scale.item(), leaf(2))


def test_a_constant_of_the_program_may_be_read():
    assert compile_and_call(lambda x: x * torch.tensor(3.0).item(), plain(2)).tolist() == [3, 6]


DATA_DEPENDENT = {
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "an index of bools": lambda x: x[x > 1],
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.long()),
}


@pytest.mark.usefixtures("reads_refused")
@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_a_size_that_depends_on_data_names_operator_line_and_way_out(name):
    with pytest.raises(DataDependentError, match=rf"aten\..*{HERE}:\d+.*depends on the data.*torch.where") as caught:
        compile_and_call(DATA_DEPENDENT[name], plain(3))
    assert "fallback='eager'" in str(caught.value)


@pytest.mark.usefixtures("reads_refused")
def test_batch_norm_with_a_cumulative_average_reads_its_count():
    with pytest.raises(DataDependentError, match=r"float\(\) of a recorded tensor"):
        compile_and_call(nn.BatchNorm1d(2, momentum=None), plain(3, 2))


# ---------------------------------------------------------------------------------------------- operators
@pytest.fixture
def without_shape_inference():
    library = torch.library.Library("foregrad_tests", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x.clone(), "CPU")
    yield torch.ops.foregrad_tests.opaque
    library._destroy()


def test_an_operator_without_shape_inference_names_how_to_register_one(without_shape_inference):
    with pytest.raises(
        CaptureError, match=rf"foregrad_tests.opaque.*{HERE}:\d+.*no shape inference.*register_fake.*fallback='eager'"
    ):
        compile_and_call(lambda x: without_shape_inference(x) + 1, plain(2))


def test_a_device_that_this_build_lacks_raises_eagers_error():
    """Trap 11: an abstract tensor must not pretend."""
    device = next(d for d in ("cuda", "xpu", "mps") if not torch.get_device_module(d).is_available())
    for program in (lambda x: x + torch.ones(2, device=device), lambda x: x.to(device) * 2):
        with pytest.raises((RuntimeError, AssertionError, NotImplementedError)) as eager:
            program(leaf(2))
        with pytest.raises(type(eager.value)) as ours:
            compile_and_call(program, leaf(2))
        assert str(ours.value)[:40] == str(eager.value)[:40]


# ---------------------------------------------------------------------------------------- inputs, outputs
def test_what_no_call_could_make_again_in_the_output():
    """F-4"""
    words = r"Found <class 'list_iterator'> in output, which is not a known type, at output\[1\]\.inside.*outside"
    with pytest.raises(UnknownOutputError, match=words):
        compile_and_call(lambda x: (x + 1, Box(iter([x]))), plain(2))


def test_fake_inputs_of_two_modes():
    """F-12"""
    one, other = (FakeTensorMode().from_tensor(plain(2)) for _ in range(2))

    class Add(nn.Module):
        def forward(self, a, b):
            return (a + b,)

    with pytest.raises(FakeModeError, match=r"two fake modes.*one FakeTensorMode") as caught:
        foregrad.aot_module_simplified(Add(), [one, other], nop)
    assert isinstance(caught.value, AssertionError)


def test_an_input_whose_storage_was_freed():
    x = plain(2)
    x.untyped_storage().resize_(0)
    with pytest.raises(MissingInputError, match=r"args\[0\]\[1\] was freed.*untyped_storage\(\)\.resize_"):
        compile_and_call(lambda pair: pair[1] * 2, (plain(2), x))


def test_a_compiler_that_is_none_of_the_three():
    with pytest.raises(CompilerError, match=r"compiler.* the inference graph"):
        foregrad.aot_function(lambda x: x * 2, None)(plain(2))


# ------------------------------------------------------------------------------------------------- escapes
@functools.lru_cache
def doubled(x):
    return x * 2


def test_a_tensor_that_escapes_into_a_cache():
    with pytest.raises(EscapeError, match=r"escapes into the cache of doubled.*made at .*return the tensor"):
        compile_and_call(lambda x: doubled(x) + 1, plain(2))


def test_a_count_in_a_plain_attribute_is_refused_by_name():
    """F-2 (Z)"""
    module = Holder(lambda m, x: setattr(m, "calls", m.calls + 1))
    with pytest.raises(StateChangeError, match=r"changes .*calls.*buffer.*fallback='eager'"):
        compile_and_call(module, plain(2))
    assert module.calls == 0


# ------------------------------------------------------------------------------------ not yet, on purpose


def test_a_tensor_of_another_layout_is_refused_for_now():
    with pytest.raises(UnsupportedError, match=r"args\[0\] .*torch._mkldnn.*only strided and sparse"):
        compile_and_call(lambda x: x.to_dense() * 2, torch.eye(2).to_mkldnn())


# --------------------------------------------------------------------------------- what an error leaves behind
FAILURES = {
    "reading a value": lambda x: x.add_(1) * x.sum().item(),
    "a size that depends on data": lambda x: (torch.rand(2), x.add_(1).nonzero())[1],
    "an unknown output": lambda x: Box(iter([x.add_(1)])),
    "an error of the program": lambda x: x.add_(1) @ torch.rand(7),
    "grad mode and autocast changed before": lambda x: (
        torch.set_grad_enabled(False),
        torch.set_autocast_enabled("cpu", True),
        x.add_(1).item(),
    ),
}


@pytest.mark.usefixtures("reads_refused")
@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_compile_leaves_everything_as_it_was(name):
    """F-12"""
    x = leaf(2) * 1
    before, version, state = x.detach().clone(), x._version, torch.get_rng_state()
    cast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    compiled = foregrad.aot_function(FAILURES[name], nop)
    for _ in range(2):
        with pytest.raises((ForegradError, RuntimeError)):
            compiled(x)
        assert torch.equal(x, before) and x._version == version and x.grad_fn is not None
        assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == cast
    assert compiled.specializations == []
    assert foregrad.aot_function(lambda x: x * 2, nop)(plain(2)).tolist() == [2, 4]


def test_a_compiler_that_fails_leaves_everything_as_it_was():
    """F-12"""

    def compiler(graph, inputs):
        torch.rand(3)
        raise ValueError("on purpose")

    x, state = plain(2), torch.get_rng_state()
    module = nn.BatchNorm1d(2)
    for fn, args in ((lambda x: x.add_(1) * 2, (x,)), (module, (plain(3, 2),))):
        compile_with = foregrad.aot_module if isinstance(fn, nn.Module) else foregrad.aot_function
        with pytest.raises(CompilerError):
            compile_with(fn, compiler)(*args)
    assert x.tolist() == [1, 2] and torch.equal(torch.get_rng_state(), state)
    assert module.num_batches_tracked.item() == 0 and module.running_mean.tolist() == [0, 0]


# ------------------------------------------------------------------------------------------------- the family
def test_every_error_belongs_to_one_family():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    ours = [kind for kind in kinds if not issubclass(kind, Warning)]
    assert len(ours) > 10 and all(issubclass(kind, ForegradError) for kind in ours)
    for kind in ours:
        if kind is not ForegradError:
            assert issubclass(kind, (RuntimeError, AssertionError)), kind


@pytest.mark.usefixtures("reads_refused")
def test_what_cannot_be_compiled_can_run_eagerly_with_one_warning():
    compiled, _ = grab(lambda x: x * x.sum().item(), fallback="eager")
    with pytest.warns(EagerFallbackWarning, match=r"runs eagerly: item\(\) of a recorded tensor"):
        assert compiled(plain(2)).tolist() == [3, 6]
    assert compiled(plain(3)).tolist() == [6, 12, 18] and compiled.specializations == []


def test_an_error_of_the_program_itself_is_never_hidden_by_the_fallback(capsys):
    def program(x):
        print("called")
        raise KeyError("mine")

    compiled, _ = grab(program, fallback="eager")
    with pytest.raises(KeyError, match="mine"):
        compiled(plain(2))
    assert capsys.readouterr().out == "called\n"


# ------------------------------------------------------------------------------------------- Foregrad's own faults
@pytest.mark.parametrize("part", ["foregrad.runtime.assemble.stages_of", "foregrad.capturing.capture.build_joint"])
def test_a_fault_of_foregrad_is_one_of_its_errors(part, monkeypatch):
    def fails(*args, **kwargs):
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(part, fails)
    with pytest.raises(InternalError, match="ZeroDivisionError: inside") as raised:
        grab(torch.sin)[0](plain(2))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    compiled, _ = grab(lambda x: x * 2, fallback="eager")
    with pytest.warns(EagerFallbackWarning):
        assert compiled(plain(2)).tolist() == [2, 4]


def test_recording_again_has_an_end():
    class Recorded:
        real_tensors: dict = {}

    attempts = []

    def attempt(shown):
        attempts.append(1)
        return Attempt(Recorded(), GradientBefore(plain(1)))

    with pytest.raises(UnsupportedError, match="other tensors each time"):
        retrace_until_stable(attempt)
    assert len(attempts) < 30


# ------------------------------------------------------------------------------------- what recording cannot follow
@torch.library.custom_op("foregrad_tests::without_a_fake", mutates_args=())
def without_a_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


REFUSED = {
    "an operator without a fake kernel": without_a_fake,
    "a nested tensor": lambda x: torch.nested.nested_tensor([x[:1].detach(), x.detach()]).to_padded_tensor(0.0),
    "a quantized channel": lambda x: torch.quantize_per_channel(
        x.detach().view(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8
    ).dequantize(),
    "integers of a quantized tensor": lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.quint8).int_repr(),
    "tensors that change places": lambda x: (torch.utils.swap_tensors(x.detach().clone(), torch.ones(4)), x)[1],
    "a lazy module that is made inside": lambda x: nn.LazyLinear(3)(x),
}

REFUSED_BEFORE = {  # torch 2.15, whose abstract kernels know them
    "an mkldnn tensor": lambda x: x.detach().to_mkldnn().to_dense(),
    "a compressed tensor": lambda x: torch.sparse_csr_tensor([0, 1, 2], [0, 1], x[:2], (2, 2)).to_dense(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", REFUSED.values(), ids=REFUSED)
def test_what_recording_cannot_follow_is_refused_by_name(program):
    with pytest.raises(CaptureError, match=HERE):
        grab(program)[0](leaf(4))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", REFUSED_BEFORE.values(), ids=REFUSED_BEFORE)
def test_what_newer_versions_of_torch_can_follow_is_as_in_eager(program):
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
        foregrad.check(program, leaf(4))
        return
    with pytest.raises(CaptureError, match=HERE):
        grab(program)[0](leaf(4))


@torch.jit.script
def scripted(x):
    y = x * 2
    if y.size(0) > 2:
        y = y + 1
    return y.relu()


@torch.jit.script
def scripted_branch(x):
    if bool(x.sum() > 0):
        return x * 2
    return x


def test_torchscript_functions_are_recorded():
    compiled, _ = grab(lambda x: scripted(x) * 2)
    for _ in range(3):
        x, y = leaf(4), leaf(4)
        compiled(x).sum().backward()
        (scripted(y) * 2).sum().backward()
        assert torch.equal(x.grad, y.grad)
    with foregrad.config.patch(reads="refused"), pytest.raises(DataDependentError):
        grab(scripted_branch)[0](leaf(4))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layer", [lambda: nn.LazyLinear(3), nn.LazyBatchNorm1d], ids=["weights", "buffers"])
def test_lazy_modules_are_recorded_once_they_have_run(layer):
    """The first call gives them their shapes (see capturing/test_first_calls.py); recording alone cannot."""
    module = layer()
    with pytest.raises(FirstCallError, match=r"weight of the module has no shape yet: call it once before"):
        foregrad.capture(module, plain(2, 4))
    with pytest.raises(FirstCallError, match="has no shape yet"):
        foregrad.capture(lambda x: module(x), plain(2, 4))
    module(plain(2, 4))
    assert foregrad.capture(module, plain(2, 4)).joint.is_training


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.view(2, 2).to_sparse_csr() @ x[:2],
        lambda x: x.view(2, 2).to_sparse_bsr((1, 1)).to_dense(),
        lambda x: torch.sparse.softmax(x.view(2, 2).to_sparse(), 1).to_dense(),
    ],
    ids=["csr", "bsr", "coo"],
)
def test_sparse_intermediates_are_recorded(program):
    compiled = foregrad.aot_function(program, nop, enable_log=False)  # torch's printer of graphs asks for strides
    assert torch.equal(compiled(leaf(4)), program(leaf(4)))


# ---------------------------------------------------------------------------------- where an error came about
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 5), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.linear(x))


class Stack(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), block])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Reads(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def raised_by(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


def raises_in_eager(fn, *args, dynamic=False):
    """What a compiled call raises, which is what eager raises."""
    expected = raised_by(lambda: fn(*args))
    error = raised_by(lambda: compile_and_call(fn, *args, dynamic=dynamic))
    assert type(error) is type(expected) and str(error) == str(expected)
    return error


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_error_in_a_module_of_torch_names_the_module_and_the_line_that_calls_it(dynamic):
    error = raises_in_eager(Stack(Block()), plain(2, 4), dynamic=dynamic)
    (note,) = error.__notes__
    assert note.startswith("in layers.1.norm (LayerNorm), called at ") and HERE in note and "self.norm(" in note


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_shape_error_is_short(dynamic, caplog):
    """One error, without what led to it; nothing of FakeTensorMode's, in the log either."""
    error = raises_in_eager(lambda a, b: a @ b, plain(2, 3), plain(2, 3), dynamic=dynamic)
    assert error.__suppress_context__ or error.__context__ is None
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    text = "".join(traceback.format_exception(error))
    assert text.count("Traceback") == 1 and "fake_tensor" not in text and "FakeTensor" not in text
    assert "recorder.py" not in text and text.rstrip().endswith("plain(2, 3), plain(2, 3), dynamic=dynamic)")
    assert len(error.__notes__) == 1 and HERE in error.__notes__[0]


def test_the_module_that_was_compiled_is_named_by_its_class_and_the_call():
    error = raises_in_eager(nn.Linear(3, 4), plain(2, 5))
    (note,) = error.__notes__
    assert note.startswith("in Linear, called at ") and HERE in note


@pytest.mark.usefixtures("reads_refused")
def test_a_refusal_names_the_module_and_its_line_once():
    error = raised_by(lambda: compile_and_call(Stack(Reads()), plain(2)))
    assert isinstance(error, DataDependentError) and f"{HERE}:" in str(error)
    assert error.__notes__ == ["in layers.1 (Reads)"]


def test_what_the_users_own_code_raises_is_left_as_it_is():
    kept = ValueError("mine")

    def program(x):
        raise kept

    assert raised_by(lambda: compile_and_call(program, plain(2))) is kept
    assert not hasattr(kept, "__notes__")


def test_a_note_is_not_added_twice():
    """The program raises the same error again: one that it keeps."""
    errors = []

    def program(x):
        try:
            return x @ x
        except RuntimeError as error:
            errors.append(error)
            raise

    kept = raised_by(lambda: compile_and_call(program, plain(2, 3)))
    assert len(kept.__notes__) == 1


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.bernoulli(x, 7.0),
        lambda x: torch.multinomial(x.long(), 7),
        lambda x: F.dropout(x, 3.0),
        lambda x: x.view(7),
        lambda x: torch.cat([x, x[0]]),
        lambda x: F.cross_entropy(x, torch.zeros(5, dtype=torch.long)),
        lambda x: x.scatter(5, x.long(), x),
        lambda x: x.long().mean(),
    ],
)
def test_a_call_that_eager_refuses_is_refused_in_its_words(program):
    raises_in_eager(program, plain(2, 3))


# --------------------------------------------------------------------------------------- the way out was tried
def detaches_an_input(x):
    return x.detach_() * 2


def draws_from_pythons_generator(x):
    return x * random.random()


def makes_a_view_longer(x):
    return x[:2].resize_(6)[:3] * 2


def writes_through_overlapping_elements(x):
    return x.as_strided((2, 2), (1, 1)).add_(1)


WAYS_OUT = {
    "reads": lambda: (lambda x: x * 2 if x.sum() > 0 else x, leaf(3)),
    "result of unknown size": lambda: (lambda x: x[x > 0] * 2, leaf(3)),
    "draw": lambda: (draws_from_pythons_generator, leaf(3)),
    "detached input": lambda: (detaches_an_input, leaf(3)),
    "longer view": lambda: (makes_a_view_longer, plain(3)),
    "overlapping elements": lambda: (writes_through_overlapping_elements, plain(3)),
    "data of another dtype": lambda: (lambda x: setattr(x, "data", x.data.double()) or x * 2, plain(3)),
    "mkldnn": lambda: (lambda x: x.to_dense() * 2, plain(3, 3).to_mkldnn()),
}


@pytest.mark.usefixtures("reads_refused")
@pytest.mark.parametrize("name", WAYS_OUT)
def test_a_refused_program_runs_with_the_fallback_that_its_error_names(name):
    """In the text, or in the note that is added where the text names another way."""
    program, argument = WAYS_OUT[name]()
    error = raised_by(lambda: compile_and_call(program, argument))
    assert isinstance(error, CaptureError)
    assert "fallback='eager'" in "".join([str(error), *getattr(error, "__notes__", ())])
    program, argument = WAYS_OUT[name]()
    other = WAYS_OUT[name]()[1]
    random.seed(0)
    with pytest.warns(EagerFallbackWarning, match="runs eagerly"):
        ours = compile_and_call(program, argument, fallback="eager")
    random.seed(0)
    assert torch.equal(ours, program(other)) and ours.requires_grad == program(other).requires_grad
