"""A stateful program as plain data, and as the Python that runs."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .rows import SUPPORT

MODULES = (
    "argparse", "array", "collections", "contextvars", "copy", "dataclasses", "decimal", "enum", "fractions",
    "functools", "io", "itertools", "math", "numpy", "operator", "pathlib", "queue", "random", "re", "threading",
    "torch.utils.checkpoint", "types", "weakref",
)  # fmt: skip

_NAME = re.compile(r"\b[a-z]\w*\d+\b")
_ROOT = re.compile(r"\bo\d+\b")


@dataclass(frozen=True)
class Part:
    """Some lines: an object of the world, a statement of the program, or a step of the caller.

    >>> part = Part("v1 = v0 * o2.p", "read", "int")
    >>> part.makes, part.needs
    (('v1',), ('v0', 'o2'))

    Args:
        source: Its Python.
        kind: What sort of thing it is.
        name: Which one of that sort, as it is counted.
    """

    source: str
    kind: str
    name: str

    @property
    def makes(self) -> tuple[str, ...]:
        """The numbered names that it defines."""
        found = re.findall(r"^ *(?:with [^\n]*?: )?([a-z]\w*\d+)(?:, ([a-z]\w*\d+))* = ", self.source, re.MULTILINE)
        functions = re.findall(r"^def ([a-z]\w*\d+)\(", self.source, re.MULTILINE)
        later = re.findall(r"; ([a-z]\w*\d+) = ", self.source)
        return tuple(dict.fromkeys([*(name for names in found for name in names if name), *functions, *later]))

    @property
    def needs(self) -> tuple[str, ...]:
        """The numbered names that it uses and does not define."""
        made = set(self.makes)
        return tuple(dict.fromkeys(name for name in _NAME.findall(self.source) if name not in made))


@dataclass(frozen=True)
class StateProgram:
    """Objects, a function or module that uses them, and what its caller does in turns.

    Args:
        name: The grammar, the seed and the number, from which it is made again.
        objects: What there is when the first call is made.
        roots: The objects that the program is given, by name.
        form: How it is given them; a key of `FORMS`.
        arguments: The names of its tensor parameters.
        statements: The body.
        returned: The expression that it returns.
        steps: What the caller does.
        options: Further arguments of what compiles it, as Python.
        way: What compiles it; a key of `WAYS`.
    """

    name: str
    objects: tuple[Part, ...]
    roots: tuple[str, ...]
    form: str
    arguments: tuple[str, ...]
    statements: tuple[Part, ...]
    returned: str
    steps: tuple[Part, ...]
    options: str = ""
    way: str = "aot"

    def function(self) -> str:
        """The Python of the program itself."""
        return FORMS[self.form](self)

    def script(self) -> str:
        """A script that makes two worlds of itself and compares them, and that stands by itself."""
        world = "\n\n".join([*(part.source for part in self.objects), self.function()])
        steps = "\n".join(part.source for part in self.steps)
        support = "\n\n".join(_support(world + steps))
        text = "\n".join([support, world, steps])
        imports = [*_imports(text), "import torch", "", "import foregrad", f"from {_COMPARE} import compare"]
        way = WAYS["aot_module" if self.form == "module" and self.way == "aot" else self.way]
        compiling = f"def compile(program):\n    return {way.format(options=self.options and f', {self.options}')}"
        parts = [f"# program {self.name} of the fuzzer: run it to compare two worlds made of it", "\n".join(imports)]
        parts += [part for part in (support, world, compiling) if part]
        parts.append(f'STEPS = r"""\n{steps}\n"""')
        parts.append('if __name__ == "__main__":\n    print(compare(__file__))')
        return "\n\n".join(parts) + "\n"

    def __str__(self) -> str:
        return self.script()

    def covered(self) -> Iterator[tuple[str, str]]:
        """What the program covers, as kinds and names to be counted."""
        yield "state: form", self.form
        yield "state: way", f"{self.way} {self.options}".strip()
        for part in (*self.objects, *self.statements, *self.steps):
            yield f"state: {part.kind}", part.name


_COMPARE = "fuzz.state"

_BOXED = "lambda graph, inputs: foregrad.make_boxed_func(graph.forward)"

# The calls that compile a program.
WAYS = {
    "aot": f"foregrad.aot_function(program, {_BOXED}{{options}})",
    "aot_module": f"foregrad.aot_module(program, {_BOXED}{{options}})",
    "compile": "foregrad.compile(program, 'eager'{options})",
    "train_step": "foregrad.train_step(program{options})",
}


def _imports(text: str) -> Iterator[str]:
    for module in MODULES:
        if re.search(rf"(?<![\w.]){re.escape(module)}\.", text):
            yield f"import {module}"


def _support(text: str) -> list[str]:
    """The definitions that a text mentions, and those that they mention in turn."""
    while True:
        wanted = [source for name, source in SUPPORT.items() if re.search(rf"\b{name}\b", text)]
        if all(source in text for source in wanted):
            return wanted
        text = "\n".join([*(source for source in wanted if source not in text), text])


def rooted(path: str, form: str) -> str:
    """The way to an object, as the body of a program writes it.

    >>> rooted("o3.p[1]", "module"), rooted("o3.p[1]", "function")
    ('self.o3.p[1]', 'o3.p[1]')

    Args:
        path: The way, as the world writes it.
        form: How the program is given its objects.
    """
    return f"self.{path}" if form in ("module", "method", "callable") and _ROOT.match(path) else path


def assigned(root: str, value: str, form: str, roots: tuple[str, ...]) -> str:
    """The step that gives a program another object in the place of one.

    >>> assigned("o1", "3", "method", ("o1",))
    'program.__self__.o1 = 3'

    Args:
        root: The name of the object.
        value: The other one, as Python.
        form: How the program is given its objects.
        roots: All that it is given.
    """
    match form:
        case "closure":
            return f"{root} = {value}; set_cell(program, '{root}', {root})"
        case "default":
            return f"{root} = {value}; program.__defaults__ = ({', '.join(roots)},)"
        case "module" | "callable":
            return f"program.{root} = {value}"
        case "method":
            return f"program.__self__.{root} = {value}"
        case _:
            return f"{root} = {value}"


def _body(program: StateProgram, indent: str = "    ") -> str:
    lines = [line for part in program.statements for line in part.source.splitlines()]
    return "\n".join(indent + line for line in [*lines, f"return {program.returned}"])


def _scope(program: StateProgram, word: str) -> str:
    """The declaration of names that the program assigns and does not own."""
    targets = [re.match(r"(?:with [^\n]*:\n *)?(o\d+) [+*]?= ", part.source) for part in program.statements]
    names = dict.fromkeys(target[1] for target in targets if target)
    return f"    {word} {', '.join(names)}\n" if names else ""


def _function(program: StateProgram) -> str:
    return f"def program({', '.join(program.arguments)}):\n{_scope(program, 'global')}{_body(program)}"


def _argument(program: StateProgram) -> str:
    return f"def program({', '.join([*program.arguments, *program.roots])}):\n{_body(program)}"


def _default(program: StateProgram) -> str:
    defaults = [f"{root}={root}" for root in program.roots]
    return f"def program({', '.join([*program.arguments, *defaults])}):\n{_body(program)}"


def _closure(program: StateProgram) -> str:
    inner = f"def program({', '.join(program.arguments)}):\n{_scope(program, 'nonlocal')}{_body(program)}"
    indented = "\n".join(f"    {line}" for line in inner.splitlines())
    roots = ", ".join(program.roots)
    return f"def make_program({roots}):\n{indented}\n\n    return program\n\n\nprogram = make_program({roots})"


def _class(program: StateProgram, base: str, method: str, lines: Iterable[str] = ()) -> str:
    given = "".join(f", {root}" for root in program.roots)
    assignments = [*lines, *(f"self.{root} = {root}" for root in program.roots)] or ["pass"]
    parameters = ", ".join(["self", *program.arguments])
    initial = "\n".join(f"        {line}" for line in assignments)
    return (
        f"class Program{base}:\n    def __init__(self{given}):\n{initial}\n\n"
        f"    def {method}({parameters}):\n{_body(program, ' ' * 8)}\n\n\n"
    )


def _module(program: StateProgram) -> str:
    defined = _class(program, "(torch.nn.Module)", "forward", ["super().__init__()"])
    return f"{defined}program = Program({', '.join(program.roots)})"


def _method(program: StateProgram) -> str:
    return f"{_class(program, '', 'run')}program = Program({', '.join(program.roots)}).run"


def _callable(program: StateProgram) -> str:
    return f"{_class(program, '', '__call__')}program = Program({', '.join(program.roots)})"


FORMS = {
    "function": _function,
    "argument": _argument,
    "default": _default,
    "closure": _closure,
    "module": _module,
    "method": _method,
    "callable": _callable,
}
