"""Modes around a compiled call, and modes that the program itself enters: eager is the law."""

import contextlib
import types

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import foregrad
from checking import check_core
from foregrad.errors import StateChangeError, UnsupportedError
from helpers import grab, leaf, nop, plain


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


# ------------------------------------------------------------------------------------------------ inference mode
def inference_inside(x):
    with torch.inference_mode():
        y = x * 2
    return y, x + y


def inference_view_inside(x):
    with torch.inference_mode():
        return x.view(-1)


def out_of_inference_inside(x):
    with torch.inference_mode(False), torch.enable_grad():
        y = x.clone().requires_grad_() * 2
    return y


@pytest.mark.parametrize("program", [lambda x: x * 2, lambda x: x.view(-1), out_of_inference_inside])
def test_inference_mode_around(program):
    """F-2"""
    with torch.inference_mode():
        check_core(program, plain(3))


@pytest.mark.parametrize("program", [inference_inside, inference_view_inside])
def test_inference_mode_inside(program):
    """F-2"""
    check_core(program, leaf(3))
    check_core(program, plain(3))


def test_programs_for_and_without_inference_mode():
    """F-2"""
    f = foregrad.aot_function(lambda x: x * 2, nop)
    y = f(leaf(2))
    with torch.inference_mode():
        z = f(leaf(2))
    assert y.requires_grad and not y.is_inference() and z.is_inference() and not z.requires_grad
    assert f(leaf(2)).requires_grad and len(f.specializations) == 2


# ------------------------------------------------------------------------------------- default dtype and device
def a_factory_of_another_dtype(x):
    with default_dtype(torch.float64):
        y = torch.ones(3)
    return x * y, torch.ones(3)


def several_factories_of_another_dtype(x):
    with default_dtype(torch.float64):
        y = torch.zeros(3) + torch.full((3,), 2.0) + torch.arange(3.0) + torch.tensor(1.5) + torch.linspace(0, 1, 3)
        z = x.double().sin() + torch.ones(3, dtype=torch.float32)
    return y, z


@pytest.mark.parametrize("program", [a_factory_of_another_dtype, several_factories_of_another_dtype])
def test_a_default_dtype_inside(program):
    check_core(program, leaf(3))


def test_an_operator_that_takes_the_programs_default_dtype_is_refused():
    def program(n):
        with default_dtype(torch.float64):
            return n / 2

    with pytest.raises(UnsupportedError, match=r"aten.div.*return n / 2.*under a default dtype"):
        foregrad.aot_function(program, nop)(torch.arange(3))
    assert torch.get_default_dtype() is torch.float32


def test_a_default_dtype_around():
    """F-2"""
    f = foregrad.aot_function(lambda x: x * torch.ones(3), nop)
    assert f(leaf(3)).dtype is torch.float32
    with default_dtype(torch.float64):
        assert f(leaf(3)).dtype is torch.float64
        check_core(lambda n: n / 2, torch.arange(3))
    assert f(leaf(3)).dtype is torch.float32


def a_factory_elsewhere(x):
    with torch.device("meta"):
        y = torch.ones(3)
    return x * 2, y


def test_a_device_inside():
    check_core(a_factory_elsewhere, leaf(3))


@pytest.mark.parametrize("around", [torch.device, default_device])
def test_a_device_around(around):
    """F-2"""
    f = foregrad.aot_function(lambda x: (x * 2, torch.ones(3)), nop)
    assert f(leaf(3))[1].device.type == "cpu"
    for device in ("meta", "cpu", "meta"):
        with around(device):
            assert f(leaf(3))[1].device.type == device
    assert f(leaf(3))[1].device.type == "cpu"
    assert len(f.specializations) == 3


SETTERS = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "deterministic mode": lambda: torch.use_deterministic_algorithms(True),
    "matmul precision": lambda: torch.set_float32_matmul_precision("high"),
}


@pytest.mark.parametrize("name", SETTERS)
def test_a_program_that_leaves_a_setting_changed_is_refused(name):
    before = torch.get_default_device(), torch.get_float32_matmul_precision()

    def program(x):
        SETTERS[name]()
        return x * 2

    with pytest.raises(StateChangeError, match=f"leaves another {name} behind"):
        foregrad.aot_function(program, nop)(leaf(3))
    assert (torch.get_default_device(), torch.get_float32_matmul_precision()) == before

    def raises(x):
        SETTERS[name]()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        foregrad.aot_function(raises, nop)(leaf(3))
    assert (torch.get_default_device(), torch.get_float32_matmul_precision()) == before


# ------------------------------------------------------------------------------------------------- determinism
def test_determinism_that_the_program_sets_and_takes_back():
    def program(x):
        torch.use_deterministic_algorithms(True)
        y = x * (2 if torch.are_deterministic_algorithms_enabled() else 3)
        torch.use_deterministic_algorithms(False)
        return y

    check_core(program, leaf(3))


def test_determinism_is_a_fact_of_the_program():
    """J-9, F-2"""
    f, graphs = grab(lambda x: x.sin())
    f(leaf(2)).sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        x = leaf(2)
        y = f(x)
        y.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert graphs.order == ["forward", "backward"] * 2
    z = f(x)
    assert torch.equal(z, y) and len(f.specializations) == 2


# -------------------------------------------------------------------------- what a program can ask about itself
ASKS = {
    "torch.compiler.is_compiling": torch.compiler.is_compiling,
    "torch.compiler.is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
    "torch.compiler.is_exporting": torch.compiler.is_exporting,
    "torch.jit.is_tracing": torch.jit.is_tracing,
    "torch.jit.is_scripting": torch.jit.is_scripting,
    "torch.onnx.is_in_onnx_export": lambda: torch.onnx.is_in_onnx_export(),
}


@pytest.mark.parametrize("name", ASKS)
def test_a_program_that_asks_whether_it_is_compiled_hears_what_eager_says(name):
    ask = ASKS[name]
    check_core(lambda x: x * 2 if ask() else x * 3, leaf(3))


def found_when_it_is_asked(x):
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor) or type(x) is FakeTensor or not issubclass(FakeTensor, torch.Tensor)


ASKS_ABOUT_TENSORS = {
    "torch.fx.Proxy": lambda x: isinstance(x, torch.fx.Proxy),
    "is_fx_tracing": lambda x: torch.fx._symbolic_trace.is_fx_tracing(),
    "FakeTensor": lambda x: isinstance(x, torch._subclasses.FakeTensor),
    "getattr FakeTensor": lambda x: isinstance(x * 2, getattr(torch, "_subclasses").fake_tensor.FakeTensor),  # noqa: B009
    "imported FakeTensor": found_when_it_is_asked,
    "is_fake": lambda x: torch._subclasses.fake_tensor.is_fake(x),
    "detect_fake_mode": lambda x: torch._guards.detect_fake_mode([x]) is not None,
    "length of the dispatch stack": lambda x: torch._C._len_torch_dispatch_stack() > 0,
    "current dispatch mode": lambda x: torch.utils._python_dispatch._get_current_dispatch_mode() is not None,
    "dispatch modes": lambda x: bool(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
    "in a dispatch mode": lambda x: torch.utils._python_dispatch.is_in_torch_dispatch_mode(),
    "length of the function stack": lambda x: torch._C._len_torch_function_stack() > 0,
    "current function mode": lambda x: torch.overrides._get_current_function_mode() is not None,
    "function modes": lambda x: bool(torch.overrides._get_current_function_mode_stack()),
    "function modes are on": lambda x: torch._C._is_torch_function_mode_enabled(),
    "has_torch_function": lambda x: torch.overrides.has_torch_function((x, 1)),
    "has_torch_function_unary": lambda x: torch.overrides.has_torch_function_unary(x),
    "level of functorch": lambda x: torch._C._functorch.maybe_current_level() is not None,
}


@pytest.mark.parametrize("name", ASKS_ABOUT_TENSORS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_a_program_that_asks_whether_it_is_traced_hears_what_eager_says(name, dynamic):
    ask = ASKS_ABOUT_TENSORS[name]
    x = leaf(3)
    assert not ask(x)
    result = foregrad.aot_function(lambda x: x * 2 if ask(x) else x * 3, nop, dynamic=dynamic)(x)
    torch.testing.assert_close(result, x * 3)
    assert not ask(x)


@pytest.mark.parametrize("name", ASKS_ABOUT_TENSORS)
def test_a_backward_that_asks_hears_what_eager_says(name):
    ask = ASKS_ABOUT_TENSORS[name]

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (2 if ask(gradient) else 3)

    x = leaf(3)
    foregrad.aot_function(Asks.apply, nop)(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 3.0))


def asks_inside_a_mode(x):
    with SinPlusOne() as mode:
        found = [torch.utils._python_dispatch._get_current_dispatch_mode() is mode]
        found.append(torch._C._len_torch_dispatch_stack() == 1)
        found.append(torch.utils._python_dispatch._get_current_dispatch_mode_stack() == [mode])
        found.append(torch.utils._python_dispatch.is_in_torch_dispatch_mode())
    with AddOne() as mode:
        found.append(torch.overrides._get_current_function_mode() is mode)
        found.append(torch._C._len_torch_function_stack() == 1)
        found.append(torch.overrides._get_current_function_mode_stack() == [mode])
        found.append(torch.overrides.has_torch_function((x,)))
    return x * sum(number * 2**place for place, number in enumerate(found))


def test_modes_of_the_program_itself_are_found():
    torch.testing.assert_close(asks_inside_a_mode(plain(3)), plain(3) * 255)
    check_core(asks_inside_a_mode, leaf(3))


def test_fake_arguments_are_found():
    """They are fake in eager, too."""

    class Program(nn.Module):
        def forward(self, x):
            return (x * 2 if isinstance(x, torch._subclasses.FakeTensor) else x * 3,)

    with torch._subclasses.FakeTensorMode():
        x = torch.ones(3)
    program = Program()
    torch.testing.assert_close(foregrad.aot_module_simplified(program, [x], nop)(plain(3))[0], plain(3) * 2)


def test_a_function_of_the_users_that_can_be_overridden():
    weight = leaf(3)

    def scaled(x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(scaled, (x,), x)
        return x * weight

    check_core(scaled, leaf(3))


def test_nothing_is_left_of_the_answers():
    modules = (torch._C, torch.overrides, torch.utils._python_dispatch, torch._subclasses, torch._guards)
    before = [dict(vars(module)) for module in modules]
    with pytest.raises(ZeroDivisionError):
        foregrad.aot_function(lambda x: x / (1 // 0), nop)(plain(2))
    foregrad.aot_function(torch.sin, nop)(leaf(2)).sum().backward()
    for module, names in zip(modules, before, strict=True):
        assert type(module) is types.ModuleType
        assert all(vars(module)[name] is value for name, value in names.items())


# -------------------------------------------------------------------------------------------- modes of the user
class AddOne(TorchFunctionMode):
    """Changes what `mul` gives."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result + 1 if getattr(func, "__name__", "") == "mul" else result


class Names(TorchFunctionMode):
    """Notes what is called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class SinPlusOne(TorchDispatchMode):
    """Changes what `sin` gives."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result + 1 if func is torch.ops.aten.sin.default else result


def program(x):
    return x.sin() * 2


@pytest.mark.parametrize("mode", [AddOne, SinPlusOne, Names])
def test_a_mode_around_the_call(mode):
    """The user's mode sees what it sees in eager: the original function runs under it."""
    f = foregrad.aot_function(program, nop)
    f(leaf(3))
    with mode():
        check_core(program, leaf(3))
        assert torch.equal(f(leaf(3)), program(leaf(3)))
    assert torch.equal(f(leaf(3)), program(leaf(3)))
    assert len(f.specializations) == 1


def test_one_mode_is_not_taken_for_another():
    f = foregrad.aot_function(program, nop)
    for mode in (AddOne(), torch.device("cpu"), Names(), AddOne()):
        with mode:
            assert torch.equal(f(leaf(3)), program(leaf(3)))
    x = leaf(3)
    with Names() as noted:
        f(x)
        f(x)
    assert noted.names == ["sin", "mul", "sin", "mul"]


def function_mode_inside(x):
    with AddOne():
        return x.sin() * 2


def dispatch_mode_inside(x):
    with SinPlusOne():
        return x.sin() * 2


def counted_inside(x):
    with FlopCounterMode(display=False):
        return x @ x


@pytest.mark.parametrize("inside", [function_mode_inside, dispatch_mode_inside, counted_inside])
def test_a_mode_inside_the_program(inside):
    check_core(inside, leaf(3))


def test_flops_are_counted_through_a_compiled_program():
    f = foregrad.aot_function(lambda x: x @ x, nop)
    f(leaf(3, 3))
    with FlopCounterMode(display=False) as counter:
        f(leaf(3, 3)).sum().backward()
    with FlopCounterMode(display=False) as eager:
        x = leaf(3, 3)
        (x @ x).sum().backward()
    assert counter.get_total_flops() == eager.get_total_flops() == 3 * 54


def an_inference_tensor(x):
    with torch.inference_mode():
        y, z = x * 2, torch.tensor([1.0, 2.0])
    return y, z, y.view(-1), y[0].clone(), x * 2


def a_view_in_inference_mode(x):
    with torch.inference_mode():
        y = x[0]
    return y, x * 2


def a_normal_tensor(x):
    with torch.inference_mode(False):
        y = torch.ones(2)
    return y, y[0], x * 2


@pytest.mark.parametrize("program", [an_inference_tensor, a_view_in_inference_mode, a_normal_tensor])
@pytest.mark.parametrize("caller", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_results_are_inference_tensors_as_in_eager(program, caller):
    seen = []
    for fn in (program, foregrad.aot_function(program, nop)):
        with caller():
            results = fn(leaf(2, 2))
        seen.append([])
        for result in results:
            seen[-1] += [result.is_inference(), result.requires_grad]
            try:
                result.mul_(2)
            except RuntimeError as error:
                seen[-1].append(type(error))
        seen[-1] += [result.tolist() for result in results]
    assert seen[0] == seen[1]


def test_data_is_assigned_in_inference_mode():
    def program(x, y):
        x.data = y * 2
        return x + 1

    with torch.inference_mode():
        check_core(program, plain(3), plain(3))


@pytest.mark.parametrize(
    "program", [lambda x: x * 2, lambda x: x.view(-1) + 1, lambda x: x.mul_(2) + 1], ids=["read", "viewed", "written"]
)
@pytest.mark.parametrize("piece", [slice(None), slice(1, None)], ids=["whole", "a view"])
def test_inference_mode_takes_tensors_with_a_history(program, piece):
    eager, given = ((leaf(4) * 2)[piece] for _ in range(2))
    with torch.inference_mode():
        expected, result = program(eager), grab(program)[0](given)
    assert torch.equal(expected, result) and result.is_inference() and torch.equal(eager, given)


def made_by_assigning_data():
    x = leaf(3)
    with torch.inference_mode():
        x.data = x.data * 2
    return x


def made_in_inference_mode():
    with torch.inference_mode():
        return torch.tensor([1.0, -2.0, 3.0], requires_grad=True)


def test_a_write_to_what_was_assigned_in_inference_mode_is_refused_by_name():
    """Eager writes to it, for it counts its versions."""
    x = plain(3)
    with torch.inference_mode():
        x.data = x.data * 2
    with pytest.raises(UnsupportedError, match=r"uses a tensor that `\.data =` has given an inference tensor"):
        foregrad.aot_function(lambda x: x.add_(1) * 2, nop)(x)
    assert torch.equal(x, plain(3) * 2)


def test_the_version_of_what_was_assigned_in_inference_mode_is_refused_by_name():
    """Eager knows it, and it is no inference tensor in this."""
    x = plain(3)
    with torch.inference_mode():
        x.data = x.data * 2
    with pytest.raises(UnsupportedError, match=r"uses a tensor that `\.data =` has given an inference tensor"):
        foregrad.aot_function(lambda x: x * (1 + x._version), nop)(x)


@pytest.mark.parametrize("make", [made_by_assigning_data, made_in_inference_mode])
@pytest.mark.parametrize("program", [lambda x: x * 2, lambda x: x.exp(), lambda x: (x + 1) * torch.ones(3)])
def test_an_inference_tensor_that_requires_grad(make, program):
    """Torch differentiates it where another tensor of the call is a normal one."""
    seen = []
    for fn in (program, foregrad.aot_function(program, nop)):
        x = make()
        result = fn(x)
        seen.append([result.requires_grad, result.is_inference(), result.tolist()])
        if result.requires_grad:
            result.sum().backward()
            seen[-1].append(x.grad.tolist())
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "partition", [foregrad.default_partition, foregrad.min_cut_rematerialization_partition], ids=["default", "min-cut"]
)
def test_a_backward_is_not_computed_from_an_inference_tensor(partition):
    with torch.inference_mode():
        shift = plain(3)

    def program(x, w):
        return ((x + shift) * w).sin()

    compiled = foregrad.aot_function(program, nop, partition_fn=partition)
    gradients = []
    for fn in (program, compiled):
        x, w = leaf(3), leaf(3)
        fn(x, w).sum().backward()
        gradients.append((x.grad.tolist(), w.grad.tolist()))
    assert gradients[0] == gradients[1]


def test_writes_inside_of_a_composition_count_in_inference_mode():
    """It is taken apart below autograd, which counts them in eager."""
    eager, recorded = (torch.nn.InstanceNorm1d(4, affine=True, track_running_stats=True) for _ in range(2))
    compiled = foregrad.aot_module(recorded, nop)
    with torch.inference_mode():
        eager(plain(2, 4, 4)), compiled(plain(2, 4, 4))
    assert eager.running_mean._version == recorded.running_mean._version


ATTENTION = {
    "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    "layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_in_evaluation_takes_the_kernels_of_eager(name):
    """Its results lie otherwise in memory than those of the operators that training takes."""
    model = ATTENTION[name]().eval()
    times = 3 if name == "attention" else 1
    compiled, x = foregrad.aot_function(lambda x: model(*[x] * times), nop), plain(2, 3, 8)
    with torch.no_grad():
        for fast in (True, False, True):
            torch.backends.mha.set_fastpath_enabled(fast)
            try:
                ours, theirs = compiled(x), model(*[x] * times)
            finally:
                torch.backends.mha.set_fastpath_enabled(True)
            for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (ours, theirs)), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
                assert a.stride() == b.stride()
    assert len(compiled.specializations) == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_that_eager_leaves_out():
    model = ATTENTION["encoder"]().eval()
    mask = torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        compiled = foregrad.aot_module(model, nop)
        x = plain(2, 3, 8)
        assert torch.equal(compiled(x, src_key_padding_mask=mask), model(x, src_key_padding_mask=mask))


def test_a_plain_tensor_is_made_a_plain_tensor():
    held = nn.ParameterList([nn.Parameter(plain(2))])

    def program(x):
        kept = x.as_subclass(torch.Tensor)
        return kept * 2 + held[0].as_subclass(torch.Tensor), kept

    check_core(program, leaf(2))
    compiled = foregrad.aot_function(program, nop)
    for _ in range(2):
        torch.testing.assert_close(compiled(plain(2)), program(plain(2)))
        held[0] = nn.Parameter(plain(2) * 3)
    assert "as_subclass" not in vars(torch.Tensor)


def test_parametrizations_that_are_cached_are_refused():
    layer, x = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), plain(1, 2)
    compiled, eager = (foregrad.aot_module(layer, nop, fallback=way) for way in (None, "eager"))
    expected = layer(x)
    torch.testing.assert_close(compiled(x), expected)
    with nn.utils.parametrize.cached():
        with pytest.raises(UnsupportedError, match=r"parametrize.cached\(\) is at work"):
            compiled(x)
        with pytest.warns(UserWarning, match="parametrize"):
            torch.testing.assert_close(eager(x), expected)
    torch.testing.assert_close(compiled(x), expected)
