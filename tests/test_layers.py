"""The layers of the package: each imports only those above it, and no module imports another in a circle.

Imports inside of functions and under TYPE_CHECKING count too: they hide a circle, they do not remove it.
"""

import ast
import pathlib

import pytest

import foregrad

SOURCE = pathlib.Path(foregrad.__file__).parent

LAYERS = (
    "_torch",
    "errors",
    "locks",
    "slots",
    "options",
    "logs",
    "values",
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
    "capturing",
    "api",
    "export",
    "testing",
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
