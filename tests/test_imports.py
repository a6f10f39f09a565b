"""What the package stands on: torch's public face, one seam to its private parts, and none of what it replaces."""

import ast
import importlib
import os
import pathlib
import subprocess
import sys

import pytest

import foregrad

SOURCE = pathlib.Path(foregrad.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
SEAM = SOURCE / "_torch"

# The oracle must not stand on what it judges, so it reaches these two by itself.
ALLOWED = {"testing": ("torch.utils._pytree", "torch.Tensor._make_subclass")}

# What Foregrad is an implementation of, or what would do its work for it.
FORBIDDEN_MODULES = (
    "torch._functorch.aot_autograd",
    "torch._functorch._aot_autograd",
    "torch._functorch.partitioners",
    "functorch.compile",
    "torch._dynamo.backends.common",
    "torch.fx.experimental.proxy_tensor",
    "torch._subclasses.functional_tensor",
    "torch._dynamo.symbolic_convert",
    "torch._dynamo.convert_frame",
    "torch._dynamo.eval_frame",
    "torch._export",
)
FORBIDDEN_NAMES = (
    "make_fx",
    "FunctionalTensorMode",
    "FunctionalTensor",
    "torch.func.functionalize",
    "torch.compile",
    "torch.export.export",
    "torch._dynamo.export",
    "torch._dynamo.optimize",
)


def names_in(path: pathlib.Path) -> list[tuple[int, str]]:
    """Every dotted name that a file imports or reads, with its line."""
    tree = ast.parse(path.read_text())
    found = []
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                found.append((node.lineno, name.name))
                aliases[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for name in node.names:
                full = f"{node.module}.{name.name}"
                found.append((node.lineno, full))
                aliases[name.asname or name.name] = full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := dotted_name(node)):
            head, *rest = dotted.split(".")
            found.append((node.lineno, ".".join([aliases.get(head, head), *rest])))
    return found


def dotted_name(node: ast.expr) -> str | None:
    """`a.b.c` as text, or None for what is not a plain chain of names."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def is_forbidden(name: str) -> bool:
    inside = any(name == module or name.startswith(f"{module}.") for module in FORBIDDEN_MODULES)
    return inside or any(name == banned or name.endswith(f".{banned}") for banned in FORBIDDEN_NAMES)


def is_private_to_torch(name: str) -> bool:
    parts = name.split(".")
    return parts[0] in ("torch", "functorch") and any(
        part.startswith("_") and not part.startswith("__") for part in parts[1:]
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_uses_nothing_that_is_forbidden(path):
    assert [f"line {line}: {name}" for line, name in names_in(path) if is_forbidden(name)] == []


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parent != SEAM], ids=lambda path: str(path.relative_to(SOURCE))
)
def test_torchs_private_parts_are_touched_in_one_place(path):
    allowed = ALLOWED.get(path.parent.name, ())
    private = [(line, name) for line, name in names_in(path) if is_private_to_torch(name)]
    assert [f"line {line}: {name}" for line, name in private if not name.startswith(allowed)] == []


REPOSITORY = pathlib.Path(__file__).parent.parent
RARELY_RUN = sorted(
    path
    for folder in ("tests/sweep", "benchmarks", "models", "examples")
    for path in (REPOSITORY / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", RARELY_RUN, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_what_is_rarely_run_imports_only_what_there_is(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "foregrad":
            module = importlib.import_module(node.module)
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not missing, f"line {node.lineno}: {node.module} has no {', '.join(missing)}"


def test_the_search_finds_what_it_looks_for(tmp_path):
    """Otherwise the tests above could not fail."""
    path = tmp_path / "program.py"
    path.write_text(
        "import torch\n"
        "import torch._functorch.partitioners as p\n"
        "from torch.fx.experimental.proxy_tensor import make_fx as trace\n"
        "from torch import _C as c\n"
        "f = torch.compile(len)\n"
        "g = torch.ops.aten._conj.default\n"
        "h = x._version\n"
    )
    names = names_in(path)
    assert {line for line, name in names if is_forbidden(name)} == {2, 3, 5}
    assert {line for line, name in names if is_private_to_torch(name)} == {2, 4, 6}


RUN_WITHOUT_THEM = """
import importlib, pkgutil, types
import torch, torch.export, torch.func

def refuse(*args, **kwargs):
    raise AssertionError("a forbidden function was called")

def disarm(function):
    # Other modules may hold the function itself, so its code is what must go.
    try:
        function.__code__ = refuse.__code__
    except ValueError:  # it closes over something; what it calls is disarmed too
        pass

def disarm_module(module):
    for name, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
            disarm(value)
            if value.__closure__:
                setattr(module, name, refuse)

whole = ["torch._functorch.aot_autograd", "torch._functorch.partitioners", "torch._dynamo.backends.common",
         "torch._dynamo.convert_frame", "functorch.compile"]
package = importlib.import_module("torch._functorch._aot_autograd")
whole += [f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(package.__path__)]
for name in whole:
    disarm_module(importlib.import_module(name))
proxy = importlib.import_module("torch.fx.experimental.proxy_tensor")
functional = importlib.import_module("torch._subclasses.functional_tensor")
convert = importlib.import_module("torch._dynamo.symbolic_convert")
for function in (proxy.make_fx, torch.compile, torch.func.functionalize, torch.export.export, torch._dynamo.optimize,
                 torch._dynamo.export):
    disarm(function)
for kind in (proxy.ProxyTorchDispatchMode, proxy.PythonKeyTracer, functional.FunctionalTensorMode,
             convert.InstructionTranslatorBase):
    kind.__init__ = refuse
functional.FunctionalTensor.to_functional = staticmethod(refuse)
torch._enable_functionalization = torch._to_functional_tensor = refuse

def must_refuse(call):
    try:
        call()
    except AssertionError as error:
        assert "forbidden" in str(error)
    else:
        raise SystemExit("a forbidden function still works")

must_refuse(lambda: torch._functorch.aot_autograd.aot_function(torch.sin, len)(torch.ones(1)))
must_refuse(lambda: proxy.make_fx(torch.sin)(torch.ones(1)))
must_refuse(lambda: torch.compile(torch.sin))
must_refuse(lambda: torch.func.functionalize(torch.sin)(torch.ones(1)))
must_refuse(lambda: torch._functorch.partitioners.default_partition(None, (), num_fwd_outputs=0))

import foregrad
from torch import nn
nop = lambda graph, inputs: foregrad.make_boxed_func(graph.forward)

def program(x, w, b):
    b.add_(1)
    y = torch.relu(x @ w) * 1
    y[0].mul_(2)
    return y * b, y.t(), x

for dynamic in (False, True):
    x, w, b = torch.ones(2, 3, requires_grad=True), torch.ones(3, 2, requires_grad=True), torch.zeros(2)
    out, view, same = foregrad.aot_function(program, nop, dynamic=dynamic)(x, w, b)
    assert same is x and b.tolist() == [1, 1]
    out.sum().backward()
    assert x.grad.tolist() == [[4, 4, 4], [2, 2, 2]], x.grad

net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 1))
foregrad.aot_module(net, nop)(torch.randn(8, 3)).sum().backward()
assert net[0].weight.grad is not None and net[1].num_batches_tracked.item() == 1
with torch.no_grad():
    foregrad.aot_module(net.eval(), nop)(torch.randn(8, 3))

class Flat(nn.Module):
    def forward(self, x):
        torch.ops.higher_order.print("effect")
        return (x.sin(),)

x = torch.ones(2, requires_grad=True)
foregrad.aot_module_simplified(Flat(), [x], nop)(x)[0].sum().backward()
print("done")
"""


def test_programs_are_captured_and_run_while_the_forbidden_parts_raise():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN_WITHOUT_THEM],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
    )
    assert done.returncode == 0 and done.stdout.split() == ["effect", "done"], done.stderr[-3000:]
