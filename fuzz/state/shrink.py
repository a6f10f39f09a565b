"""A failing stateful program made as small as it can be while it fails in the same way."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .program import Part, StateProgram

Fails = Callable[[StateProgram], bool]


def shrink(program: StateProgram, fails: Fails) -> StateProgram:
    """Take away steps, statements and objects that the failure does not need.

    >>> from .generate import generate
    >>> small = shrink(generate(0, 1), lambda program: len(program.statements) > 0)
    >>> len(small.statements), len(small.steps)
    (1, 0)

    Args:
        program: A program that fails.
        fails: Says whether a smaller one still fails in the same way.
    """
    asked = _Asked(fails)
    while True:
        before = program
        program = _fewer(program, "steps", asked)
        program = _fewer(program, "objects", asked)
        program = _plainer(program, asked)
        if program == before:
            return program


class _Asked:
    """Remembers which programs were tried."""

    def __init__(self, fails: Fails) -> None:
        self._fails = fails
        self._tried: set[StateProgram] = set()

    def fails(self, smaller: StateProgram, than: StateProgram) -> bool:
        """Whether something that is smaller, and was not tried before, fails."""
        if smaller == than or smaller in self._tried:
            return False
        self._tried.add(smaller)
        return self._fails(smaller)


def _fewer(program: StateProgram, what: str, asked: _Asked) -> StateProgram:
    """Without as many parts as possible: half of them at a time, then a quarter, down to single ones."""
    width = max(len(getattr(program, what)) // 2, 1)
    while width:
        end = len(getattr(program, what))
        while end > 0:
            parts, start = getattr(program, what), max(0, end - width)
            changes: dict[str, Any] = {what: parts[:start] + parts[end:]}
            smaller = _legal(replace(program, **changes))
            if asked.fails(smaller, program):
                program = smaller
            end = min(start, len(getattr(program, what)))
        width //= 2
    return program


def _plainer(program: StateProgram, asked: _Asked) -> StateProgram:
    """With everything else that can be made plainer, one thing after another."""
    for rewrite in (_with_fewer_statements, _with_less_returned, _with_plainer_steps, _with_plainer_compilation):
        again = True
        while again:
            again = False
            for smaller in rewrite(program):
                if asked.fails(smaller, program):
                    program, again = smaller, True
                    break
    return program


def _with_plainer_compilation(program: StateProgram) -> Iterator[StateProgram]:
    if program.options:
        yield replace(program, options="")
    if program.way != "aot":
        yield replace(program, options="", way="aot")
    if program.form in ("closure", "method", "callable"):
        yield _legal(_in_form(program, "function"))


def _with_fewer_statements(program: StateProgram) -> Iterator[StateProgram]:
    for position, statement in reversed([*enumerate(program.statements)]):
        left = program.statements[:position] + program.statements[position + 1 :]
        if not statement.makes and not re.search(r"\bv\d+ = ", statement.source):
            yield _legal(replace(program, statements=left))
            continue
        made = re.findall(r"\b(v\d+)(?= = )", statement.source)
        read = [name for name in re.findall(r"\b[vx]\d+\b", statement.source) if name not in made]
        for name in dict.fromkeys(read):
            yield _legal(_renamed(replace(program, statements=left), dict.fromkeys(made, name)))
    for position, statement in enumerate(program.statements):
        if statement.source.startswith("with ") and "\n" in statement.source:
            plain = replace(statement, source=statement.source.split("\n", 1)[1].strip())
            yield replace(program, statements=_put(program.statements, position, plain))


def _renamed(program: StateProgram, names: dict[str, str]) -> StateProgram:
    def rename(text: str) -> str:
        return re.sub(r"\bv\d+\b", lambda found: names.get(found[0], found[0]), text)

    statements = tuple(replace(part, source=rename(part.source)) for part in program.statements)
    return replace(program, statements=statements, returned=rename(program.returned))


def _put(items: tuple[Part, ...], position: int, item: Part) -> tuple[Part, ...]:
    return (*items[:position], item, *items[position + 1 :])


def _with_less_returned(program: StateProgram) -> Iterator[StateProgram]:
    names = re.findall(r"\b[vx]\d+\b", program.returned)
    for name in dict.fromkeys(names):
        if program.returned != name:
            yield replace(program, returned=name)


def _with_plainer_steps(program: StateProgram) -> Iterator[StateProgram]:
    for position, step in enumerate(program.steps):
        if step.source.startswith("with "):
            plain = replace(step, source=step.source.split(": ", 1)[1] if ": r" in step.source else step.source)
            yield replace(program, steps=_put(program.steps, position, plain))
        if found := re.match(r"(a\d+) = .*?(torch\.linspace\([^)]*\)\.reshape\([^)]*\))", step.source):
            for grad in ("", ".requires_grad_()"):
                plain = replace(step, source=f"{found[1]} = {found[2]}{grad}")
                if len(plain.source) < len(step.source):
                    yield replace(program, steps=_put(program.steps, position, plain))


def _in_form(program: StateProgram, form: str) -> StateProgram:
    def plain(part: Part) -> Part:
        source = re.sub(r"\b(?:self|program\.__self__|program)\.(o\d+)\b", r"\1", part.source)
        return replace(part, source=re.sub(r"; set_cell\(program.*\)$", "", source))

    statements = tuple(plain(part) for part in program.statements)
    return replace(program, form=form, statements=statements, steps=tuple(plain(part) for part in program.steps))


def _legal(program: StateProgram) -> StateProgram:
    """Drop everything that uses a name which nothing makes any more."""
    known: set[str] = set()
    objects = tuple(_kept(program.objects, known))
    roots = tuple(root for root in program.roots if root in known)
    gone = [root for root in program.roots if root not in known]
    inside = known | set(program.arguments)
    statements = tuple(_kept(program.statements, inside))
    returned = program.returned
    if not inside.issuperset(re.findall(r"\b[vx]\d+\b", returned)):
        returned = program.arguments[0]
    steps = tuple(_without(part, gone) for part in program.steps)
    return replace(
        program,
        objects=objects,
        roots=roots,
        statements=statements,
        returned=returned,
        steps=tuple(_kept(steps, known)),
    )


def _without(step: Part, gone: list[str]) -> Part:
    """A call that does not pass objects which are gone."""
    source = step.source
    if "call(" in source or "__defaults__ = (" in source or "forget(" in source:
        for root in gone:
            source = re.sub(rf", '?{root}\b'?(?=[,)])", "", source)
    return replace(step, source=source)


def _kept(parts: tuple[Part, ...], known: set[str]) -> Iterator[Part]:
    for part in parts:
        if found := re.match(r"forget\((.*)\)$", part.source):
            names = [name for name in found[1].split(", ") if name.strip("'") in known]
            part = replace(part, source=f"forget({', '.join(names)})")
        inner = set(re.findall(r"\b(v\d+)(?= = )", part.source))
        if known.issuperset(name for name in part.needs if _is_ours(name) and name not in inner):
            known.update(
                part.makes, inner, re.findall(r"\b\w*o\d+\b", part.source) if part.kind in ("object", "place") else ()
            )
            yield part


def _is_ours(name: str) -> bool:
    return re.fullmatch(r"(?:\w*_)?[oavrxh]\d+(?:_\w+)?", name) is not None
