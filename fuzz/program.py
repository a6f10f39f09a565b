"""A fuzzed program as plain data, and as the Python that runs.

The script that is printed for a failing program is the very text that was executed, so nothing can get lost between
the fuzzer and the reader.
"""

import itertools
import linecache
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import custom

PLAIN = ""
NO_GRAD = "with torch.no_grad():"
ENABLE_GRAD = "with torch.enable_grad():"


@dataclass(frozen=True)
class Storage:
    """Memory that inputs look at.

    >>> print(*Storage("s0", (2, 3), "float32", "leaf").lines(), sep="; ")
    s0 = torch.linspace(-1.3, 1.7, 6).reshape(2, 3).clone(); s0.requires_grad_()

    Args:
        name: The name of the tensor over the whole of it.
        shape: Its shape.
        dtype: The name of its dtype.
        grad: `none`, `leaf`, or `non-leaf`.
        start: The first value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    grad: str = "none"
    start: float = -1.3

    def lines(self) -> list[str]:
        """The Python that makes it.

        >>> Storage("s0", (), "float32").lines()
        ['s0 = torch.linspace(-1.3, 1.7, 1).reshape(()).clone()']
        """
        count, shape = 1, ", ".join(map(str, self.shape)) or "()"
        for size in self.shape:
            count *= size
        values = f"torch.linspace({self.start}, {round(self.start + 3, 1)}, {count}).reshape({shape})"
        cast = "" if self.dtype == "float32" else f".to(torch.{self.dtype})"
        match self.dtype:
            case "complex64":
                cast = f".mul(1 + 0.5j){cast}"
            case "int64":
                cast = f".mul(3){cast}"
        first = f"{self.name} = {values}{cast}.clone()"
        match self.grad:
            case "leaf":
                return [first, f"{self.name}.requires_grad_()"]
            case "non-leaf":
                return [first, f"{self.name} = {self.name}.requires_grad_() * 1"]
            case _:
                return [first]


@dataclass(frozen=True)
class Input:
    """One argument: how it looks at a storage.

    >>> Input("x", "s0", "{}[1:]").line
    'x = s0[1:]'

    Args:
        name: The parameter's name.
        of: The storage's name.
        how: An expression in which `{}` stands for the storage.
    """

    name: str
    of: str
    how: str = "{}"

    @property
    def line(self) -> str:
        """The Python that makes it.

        >>> Input("x", "s0").line
        'x = s0'
        """
        return f"{self.name} = {self.how.replace('{}', self.of)}"


@dataclass(frozen=True)
class Statement:
    """One line of a program.

    >>> Statement("v0 = x.t()", "view", "t", reads=("x",), makes=("v0",)).makes
    ('v0',)

    Args:
        source: Its Python.
        kind: The table it was drawn from.
        operator: What it calls.
        reads: The tensors that it uses.
        makes: The variables that it defines.
        block: The `with` line that it stands under, or nothing.
    """

    source: str
    kind: str
    operator: str
    reads: tuple[str, ...]
    makes: tuple[str, ...] = ()
    block: str = PLAIN

    def with_names(self, names: dict[str, str]) -> "Statement":
        """The same statement over other variables.

        >>> Statement("v1 = x * v0", "compute", "*", ("x", "v0"), ("v1",)).with_names({"v0": "x"}).source
        'v1 = x * x'

        Args:
            names: The new name for each old one.
        """
        source = re.sub(r"\b[a-z]\w*\b", lambda found: names.get(found[0], found[0]), self.source)
        reads = tuple(names.get(name, name) for name in self.reads)
        return Statement(source, self.kind, self.operator, reads, self.makes, self.block)


@dataclass(frozen=True)
class Options:
    """How a program is compiled and compared.

    >>> Options().for_aot_function()
    ''

    Args:
        training: Compare gradients too; otherwise both sides run under `no_grad`.
        keep_inference_input_mutations: As for `aot_function`.
        dynamic: As for `aot_function`.
        partitioner: The name of a partitioner in `foregrad`.
    """

    training: bool = True
    keep_inference_input_mutations: bool = False
    dynamic: bool = False
    partitioner: str = "default_partition"

    def for_aot_function(self) -> str:
        """The keyword arguments of `aot_function`, as far as they are not the defaults.

        >>> Options(dynamic=True).for_aot_function()
        ', dynamic=True'
        """
        given = [f"{name}=True" for name in ("keep_inference_input_mutations", "dynamic") if getattr(self, name)]
        if self.partitioner != Options.partitioner:
            given.append(f"partition_fn=foregrad.{self.partitioner}")
        return "".join(f", {argument}" for argument in given)


FORMS = ("tuple", "tuple", "list", "dict", "nested")
PASSING = ("apart", "in an object", "in a list")


@dataclass(frozen=True)
class FuzzProgram:
    """A program over a few storages, with its inputs and how to check it.

    >>> x = Input("x", "s0")
    >>> double = Statement("x.mul_(2)", "write", "mul_", ("x",))
    >>> print(FuzzProgram("0/0", (Storage("s0", (2,), "float32"),), (x,), (double,), ("x",)).function())
    def program(x):
        x.mul_(2)
        return x

    Args:
        name: Seed and number, from which `generate` makes it again.
        storages: The memory behind the inputs.
        inputs: The parameters.
        statements: The body.
        results: The variables that are returned.
        form: The container that they are returned in: one of `FORMS`, "object", or "one" for a single result.
        passing: How the inputs are passed: one of `PASSING`.
        options: How it is compiled and compared.
    """

    name: str
    storages: tuple[Storage, ...]
    inputs: tuple[Input, ...]
    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    form: str = "one"
    options: Options = Options()
    passing: str = "apart"

    def make_inputs(self) -> str:
        """The Python of the function that makes the inputs.

        >>> print(FuzzProgram("0/0", (Storage("s", (1,), "float32"),), (Input("x", "s"),), (), ("x",)).make_inputs())
        def make_inputs():
            s = torch.linspace(-1.3, 1.7, 1).reshape(1).clone()
            x = s
            return (x,)
        """
        lines = [line for storage in self.storages for line in storage.lines()]
        lines += [given.line for given in self.inputs]
        names = ", ".join(given.name for given in self.inputs)
        match self.passing:
            case "in an object":
                held = ", ".join(f"{given.name}={given.name}" for given in self.inputs)
                returned = f"(types.SimpleNamespace({held}, n=1, log=[]),)"
            case "in a list":
                returned = f"([{names}],)"
            case _:
                returned = f"({names},)" if len(self.inputs) == 1 else names
        return "\n    ".join(["def make_inputs():", *lines, f"return {returned}"])

    def function(self) -> str:
        """The Python of the program itself.

        >>> print(FuzzProgram("0/0", (), (Input("x", "s0"),), (), ("x", "x"), "tuple").function())
        def program(x):
            return (x, x)
        """
        lines = self._head()
        for block, statements in itertools.groupby(self.statements, key=lambda statement: statement.block):
            indent = "    "
            if block:
                lines.append(f"    {block}")
                indent = "        "
            lines += [indent + statement.source for statement in statements]
        return "\n".join([*lines, *self._changes(), f"    return {self._returned()}"])

    def _head(self) -> list[str]:
        names = ", ".join(given.name for given in self.inputs)
        match self.passing:
            case "in an object":
                return [
                    "def program(box):",
                    f"    {names}, = {', '.join(f'box.{given.name}' for given in self.inputs)},",
                ]
            case "in a list":
                return ["def program(box):", f"    {names}, = box"]
        return [f"def program({names}):"]

    def _changes(self) -> list[str]:
        """What the program does to the object or list that its inputs came in."""
        if self.passing == "apart" or not self.results:
            return []
        first, last = self.results[0], self.results[-1]
        if self.passing == "in a list":
            return [f"    box[0] = {first}", f"    box.append([{last}, box])"]
        return [f"    box.{self.inputs[0].name}, box.n = {first}, box.n + 1", f"    box.log.append({{'last': {last}}})"]

    def _returned(self) -> str:
        match self.form, self.results:
            case _, ():
                return "None"
            case "one", (result,):
                return result
            case "list", results:
                return f"[{', '.join(results)}]"
            case "dict", results:
                return "{" + ", ".join(f'"r{position}": {name}' for position, name in enumerate(results)) + "}"
            case "object", (first, *rest):
                held = ", box=box" if self.passing != "apart" else ""
                return f"types.SimpleNamespace(first={first}, rest=[{', '.join(rest)}], again={first}{held})"
            case "nested", (first, *rest):
                return f'({first}, {{"rest": [{", ".join(rest)}]}})'
            case _, (result,):
                return f"({result},)"
            case _, results:
                return f"({', '.join(results)})"

    def covered(self) -> Iterator[tuple[str, str]]:
        """What the program covers, as kinds and names to be counted.

        >>> list(FuzzProgram("0/0", (), (), (Statement("x.mul_(2)", "write", "mul_", ("x",)),), ()).covered())[0]
        ('write', 'mul_')
        """
        for statement in self.statements:
            yield statement.kind, statement.operator
        yield "options", "training" if self.options.training else "inference"
        yield "options", self.options.partitioner
        for name in ("keep_inference_input_mutations", "dynamic"):
            if getattr(self.options, name):
                yield "options", name
        yield "inputs passed", self.passing
        yield "results returned", self.form

    def script(self) -> str:
        """A script that checks the program, and that stands by itself.

        >>> print(FuzzProgram("0/7", (Storage("s", (1,), "float32"),), (Input("x", "s"),), (), ("x",)).script())
        # program 0/7 of the fuzzer
        import torch
        import foregrad
        ...
        if __name__ == "__main__":
            print(foregrad.check(program, *make_inputs()))
        """
        helpers = [name for name in custom.NAMES if re.search(rf"\b{name}\b", self.function())]
        imports = ["import torch", "import foregrad"]
        if "types." in self.make_inputs() + self.function():
            imports.insert(0, "import types")
        if helpers:
            imports.append(f"from {custom.__name__} import {', '.join(helpers)}")
        parts = [f"# program {self.name} of the fuzzer\n" + "\n".join(imports), self.make_inputs(), self.function()]
        arguments = "program, *make_inputs()"
        if self.options.for_aot_function():
            parts.append(_COMPILED.format(self.options.for_aot_function()))
            arguments += ", compile=compiled"
        if not self.options.training:
            arguments += ", training=False"
        parts.append(f'if __name__ == "__main__":\n    print(foregrad.check({arguments}))')
        return "\n\n\n".join(parts)

    def __str__(self) -> str:
        return self.script()


_COMPILED = """def compiled(fn):
    def nop(graph, example_inputs):
        return foregrad.make_boxed_func(graph.forward)

    return foregrad.aot_function(fn, nop{})"""


@dataclass(frozen=True)
class Loaded:
    """A program that was executed: what its script defines.

    >>> program = FuzzProgram("0/7", (Storage("s", (1,), "float32"),), (Input("x", "s"),), (), ("x",))
    >>> with loaded(program) as script:
    ...     script.program(*script.make_inputs()).shape
    torch.Size([1])

    Args:
        program: The function under test.
        make_inputs: Makes its inputs.
        compile: Compiles it with the options of the program; None where they are the defaults.
    """

    program: Callable[..., Any]
    make_inputs: Callable[[], tuple[Any, ...]]
    compile: Callable[..., Any] | None


@contextmanager
def loaded(program: FuzzProgram) -> Iterator[Loaded]:
    """Execute a program's script; while it is loaded, tracebacks show its lines.

    >>> with loaded(FuzzProgram("0/7", (), (), (), ())) as script:
    ...     print(script.program())
    None

    Args:
        program: What to load.
    """
    script, filename = program.script(), f"<fuzz {program.name}>"
    linecache.cache[filename] = len(script), None, script.splitlines(keepends=True), filename
    namespace: dict[str, Any] = {"__name__": "foregrad_fuzz_program"}
    try:
        exec(compile(script, filename, "exec"), namespace)
        yield Loaded(namespace["program"], namespace["make_inputs"], namespace.get("compiled"))
    finally:
        linecache.cache.pop(filename, None)
