"""The layers of the package: each imports only those above it, and no module imports another in a circle.

Imports inside of functions and under TYPE_CHECKING count too: they hide a circle, they do not remove it.
"""

import ast
import pathlib
import sys

import pytest

import foregrad
from helpers import leaf, nop, plain

SOURCE = pathlib.Path(foregrad.__file__).parent

LAYERS = (
    "_torch",
    "errors",
    "locks",
    "slots",
    "options",
    "logs",
    "values",
    "host_numbers",
    "ops",
    "functional_variants",
    "stack_traces",
    "subclasses",
    "abstract",
    "graph",
    "codegen",
    "record",
    "functionalize",
    "joint",
    "compat",
    "partition",
    "runtime",
    "backends",
    "capturing",
    "api",
    "compiling",
    "training",
    "dynamo",
    "export",
    "testing",
    "cli",
    "__main__",
)
"""From the top to the bottom; docs/architecture.md says what each is for."""

MODULES = {path.relative_to(SOURCE).with_suffix("").parts: path for path in SOURCE.rglob("*.py")}


def imports_of(module: tuple[str, ...]) -> set[tuple[str, ...]]:
    """The modules of the package that a module imports, wherever in its text."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = list(module[: len(module) - node.level]) + (node.module.split(".") if node.module else [])
            for name in node.names:
                ways = ([*base, name.name], base, [*base, "__init__"], [*base, name.name, "__init__"])
                found |= {next(tuple(way) for way in ways if tuple(way) in MODULES)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not any(name.split(".")[0] == "foregrad" for name in names), (
                "imports inside of the package are relative"
            )
    return found - {module}


IMPORTS = {module: imports_of(module) for module in MODULES}


@pytest.mark.parametrize("module", sorted(set(MODULES) - {("__init__",)}), ids="/".join)
def test_a_module_imports_only_layers_above_its_own(module):
    own = LAYERS.index(module[0])
    assert [other for other in IMPORTS[module] if other == ("__init__",) or LAYERS.index(other[0]) > own] == []


def test_no_modules_import_each_other_in_a_circle():
    done: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], above: tuple[tuple[str, ...], ...]) -> None:
        circle = above[above.index(module) :] if module in above else ()
        assert not circle, " -> ".join("/".join(one) for one in (*circle, module))
        if module not in done:
            for other in IMPORTS[module]:
                visit(other, (*above, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_every_layer_is_there():
    assert {module[0] for module in MODULES} == {*LAYERS, "__init__"}


CALLBACKS = {
    ("record", "capturing"),
    ("_torch", "abstract"),
    ("_torch", "record"),
    ("logs", "runtime"),
    ("codegen", "capturing"),
    ("runtime", "capturing"),
}
"""Calls to a layer below; docs/architecture.md says why there are any."""


def test_a_program_calls_no_layer_below_but_for_callbacks():
    """The first call of three operators, and its backward."""
    home = f"{SOURCE}/"
    found = set()

    def layer(frame):
        path = frame.f_code.co_filename
        return pathlib.Path(path[len(home) :]).parts[0].removesuffix(".py") if path.startswith(home) else None

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_name != "<genexpr>" and frame.f_back is not None:
            caller, called = layer(frame.f_back), layer(frame)
            if None not in (caller, called) and LAYERS.index(called) > LAYERS.index(caller):
                found.add((caller, called))

    compiled = foregrad.aot_function(lambda x, w: (x @ w).relu().sum(), nop)
    x, w = plain(2, 3), leaf(3, 2)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        compiled(x, w).backward()
    finally:
        sys.setprofile(before)
    assert ("record", "capturing") in found <= CALLBACKS
