"""Objects of C++ classes that are registered with torch: their methods, and operators that take them (E-1).

Torch ships no such class that its own wheels let us call with effect, so a small one is compiled here, once for each
version of torch.
"""

import gc
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile

import pytest
import torch
from torch import nn

import foregrad
from helpers import grab, leaf, nop, plain

SOURCE = r"""
#include <ATen/ATen.h>
#include <torch/custom_class.h>
#include <torch/library.h>

struct Stack : torch::CustomClassHolder {
  std::vector<at::Tensor> kept;
  void push(at::Tensor x) { kept.push_back(x.detach().clone()); }
  at::Tensor pop() { auto x = kept.back(); kept.pop_back(); return x; }
  at::Tensor scale(at::Tensor x) { return x.mul(at::Scalar((double)kept.size())); }
  int64_t size() { return kept.size(); }
  std::tuple<std::tuple<std::string, std::vector<at::Tensor>>> flatten() {
    return std::make_tuple(std::make_tuple(std::string("kept"), kept));
  }
};
struct Bare : torch::CustomClassHolder {
  void touch() {}
};

TORCH_LIBRARY(foregrad_objects, m) {
  m.class_<Stack>("Stack").def(torch::init<>()).def("push", &Stack::push).def("pop", &Stack::pop)
      .def("scale", &Stack::scale).def("size", &Stack::size).def("__obj_flatten__", &Stack::flatten);
  m.class_<Bare>("Bare").def(torch::init<>()).def("touch", &Bare::touch);
  m.def("push_to(__torch__.torch.classes.foregrad_objects.Stack stack, Tensor x) -> Tensor");
}
"""


def build() -> str:
    """The compiled library, from an earlier run if there is one."""
    version = f"{torch.__version__}-{hashlib.sha256(SOURCE.encode()).hexdigest()[:12]}"
    folder = pathlib.Path(tempfile.gettempdir()) / f"foregrad-objects-{os.getuid()}-{version}"
    library = folder / "library.so"
    if not library.exists():
        folder.mkdir(exist_ok=True)
        source, made = folder / f"{os.getpid()}.cpp", folder / f"{os.getpid()}.so"
        source.write_text(SOURCE)
        root = pathlib.Path(torch.__file__).parent
        headers = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        libraries = [f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
        flags = ["-O0", "-shared", "-fPIC", "-std=c++20", "-w", abi]
        subprocess.run(["g++", *flags, *headers, str(source), "-o", str(made), *libraries], check=True, timeout=300)
        made.replace(library)
    return str(library)


@pytest.fixture(scope="module", autouse=True)
def classes():
    if shutil.which("g++") is None:
        pytest.skip("a C++ compiler is needed for a script class")
    torch.classes.load_library(build())

    @torch._library.register_fake_class("foregrad_objects::Stack")
    class FakeStack:
        def __init__(self, kept):
            self.kept = list(kept)

        @classmethod
        def __obj_unflatten__(cls, flat):
            return cls(**dict(flat))

        def push(self, x):
            self.kept.append(x)

        def pop(self):
            return self.kept.pop()

        def scale(self, x):
            return x * len(self.kept)

        def size(self):
            return len(self.kept)

    def push_to(stack, x):
        stack.push(x)
        return x * 2

    def fake_push_to(stack, x):
        stack.push(x)
        return torch.empty_like(x)

    torch.library.impl("foregrad_objects::push_to", "CompositeExplicitAutograd", push_to)
    torch.library.register_fake("foregrad_objects::push_to", fake_push_to)


@pytest.fixture
def stack():
    return torch.classes.foregrad_objects.Stack()


@pytest.fixture(params=[False, True], ids=["lifted", "unlifted"], autouse=True)
def form(request):
    with foregrad.config.patch(unlift_effect_tokens=request.param, verify=True):
        yield


def test_methods_and_operators_run_in_order(stack):
    """E-1"""

    def program(x):
        stack.push(x * 2)
        y = torch.ops.foregrad_objects.push_to(stack, x)
        return stack.pop() + y, stack.pop()

    compiled, graphs = grab(program)
    for _ in range(2):
        assert [t.tolist() for t in compiled(plain(2))] == [[3, 6], [2, 4]] and stack.size() == 0
    assert graphs.ops("inference").count("with_effects") == 4
    constants = [n for n in graphs.modules["inference"].graph.nodes if n.op == "get_attr"]
    assert len(constants) == 1, "one object, one constant"


def test_recording_leaves_the_object_alone(stack):
    """E-1"""
    stack.push(plain(2))
    foregrad.capture(lambda x: (stack.push(x), stack.pop() + stack.pop())[1], plain(2))
    assert stack.size() == 1


@pytest.mark.parametrize("by_operator", [False, True])
def test_calls_in_forward_and_backward(stack, by_operator):
    """E-1"""

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if by_operator:
                return torch.ops.foregrad_objects.push_to(stack, x)
            stack.push(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * stack.pop()

    compiled = foregrad.aot_function(lambda x, y: (Kept.apply(x), Kept.apply(y)), nop)
    x, y = leaf(2), (leaf(2) * 3).detach().requires_grad_()
    a, b = compiled(x, y)
    assert stack.size() == 2
    (a.sum() + b.sum()).backward()
    assert stack.size() == 0 and x.grad.tolist() == [1, 2] and y.grad.tolist() == [3, 6]
    x.grad = y.grad = None
    a, b = compiled(x, y)
    b.sum().backward(retain_graph=True)  # a backward of its own, recorded from the state that the forward left
    assert stack.size() == 1 and x.grad is None and y.grad.tolist() == [3, 6]
    a.sum().backward()
    assert stack.size() == 0 and x.grad.tolist() == [1, 2]


def test_objects_as_arguments_and_attributes(stack):
    """E-1, F-4"""

    class Net(nn.Module):
        def __init__(self, held):
            super().__init__()
            self.held = held

        def forward(self, x):
            self.held.push(x)
            return x * 2

    other = torch.classes.foregrad_objects.Stack()
    compiled = foregrad.aot_function(lambda s, x: (s.push(x), x + 1)[1], nop)
    compiled(stack, plain(2))
    compiled(other, plain(2))
    compiled(other, plain(2))
    assert (stack.size(), other.size()) == (1, 2)
    foregrad.aot_module(Net(stack), nop)(plain(2))
    assert stack.size() == 2


def test_two_names_for_one_object(stack):
    """E-1: Python may hold several wrappers of one object."""
    again = stack.push.raw_owner
    assert again is not stack
    compiled = foregrad.aot_function(lambda x: (stack.push(x), again.pop() * 2)[1], nop)
    assert compiled(plain(2)).tolist() == [2, 4] and stack.size() == 0


def test_a_state_that_gives_another_shape_is_refused_when_it_runs(stack):
    """The program was recorded for what the object held then."""
    stack.push(plain(2))
    compiled = foregrad.aot_function(lambda x: stack.pop().sum() * x, nop)
    assert compiled(plain(2)).tolist() == [3, 6]
    stack.push(plain(3))
    with pytest.raises(RuntimeError, match="mismatch"):
        compiled(plain(2))


def test_a_number_from_an_object_is_refused(stack):
    compiled = foregrad.aot_function(lambda x: x * stack.size(), nop)
    with pytest.raises(foregrad.errors.UnsupportedError, match=r"call_torchbind, at .*returns a plain int"):
        compiled(plain(2))


def test_methods_are_not_differentiated(stack):
    """Eager differentiates what the method computes; a compiled program says that it cannot."""
    stack.push(plain(2))
    result = foregrad.aot_function(lambda x: stack.scale(x), nop)(leaf(2))
    assert result.tolist() == [1, 2] and result.requires_grad
    with pytest.raises(RuntimeError, match="call_torchbind"):
        result.sum().backward()


def test_an_object_without_a_fake_class_is_refused():
    bare = torch.classes.foregrad_objects.Bare()
    compiled = foregrad.aot_function(lambda x: (bare.touch(), x * 2)[1], nop)
    with pytest.raises(foregrad.errors.CaptureError, match=r"test_script_objects.*register_fake_class"):
        compiled(plain(2))


def test_methods_are_called_as_before_outside_of_a_recording(stack):
    before = torch.ScriptMethod.__call__
    foregrad.aot_function(lambda x: (stack.push(x), x)[1], nop)(plain(2))
    assert torch.ScriptMethod.__call__ is before
    gc.collect()
    stack.push(plain(3))
    assert stack.size() == 2
