"""Stateful programs from a seed and a number.

A program is made by acting it out: objects, statements and steps are tried one after another, and what raises is thrown
away. So the tables need not know what goes together.
"""

import random
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..generate import partitioners
from .kinds import ABOUT_EXACT_TYPES, KINDS, NUMBER_USES, TENSOR_USES, Kind
from .layers import LAYOUTS, SHAPES, layer_kinds
from .places import PLACES, Place
from .program import MODULES, Part, StateProgram, assigned, rooted
from .rows import (
    ARGUMENT_EVENTS,
    BLOCKS,
    CALLS,
    COMPUTE,
    EFFECTS,
    GLOBAL_EVENTS,
    MENTIONED,
    MODES,
    QUESTIONS,
    RANDOM,
    RESULT_EVENTS,
    SUPPORT,
)
from .world import World

_FLOATS = ("0.5", "2.0", "-1.0", "0.25", "1.5", "0.0", "-0.0")
_TRIES = 6
_FORM_WEIGHTS = {"function": 5, "argument": 3, "default": 1, "closure": 3, "module": 4, "method": 1, "callable": 1}
# A step that eager refuses ends the comparison: few of them are kept.
_KEPT_ERRORS = 0.03


@dataclass(frozen=True)
class Object:
    """An object of the world, as it is being drawn: a value, and the places around it.

    Args:
        kind: What the value is.
        places: The places around it, the innermost first.
        names: The name of the value, and of each place.
    """

    kind: Kind
    places: tuple[Place, ...]
    names: tuple[str, ...]

    @property
    def value(self) -> str:
        """The name of the value itself."""
        return self.names[0]

    @property
    def root(self) -> str:
        """The name of the outermost object."""
        return self.names[-1]

    def path(self, root: str, depth: int | None = None) -> str:
        """How the value, or a place around it, is reached from an expression for the outermost object."""
        way = root
        for place in reversed(self.places[depth if depth is not None else 0 :]):
            way = place.path.replace("{o}", way)
        return way


@dataclass
class Drawing:
    """A program as far as it is drawn."""

    rng: random.Random
    family: str
    form: str
    objects: list[Object] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    statements: list[Part] = field(default_factory=list)
    steps: list[Part] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    handles: list[str] = field(default_factory=list)
    count: int = 0

    def number(self) -> int:
        """A number that no other name has."""
        self.count += 1
        return self.count

    def fill(self, template: str, **given: str) -> str:
        """Put drawn things in the places of a template."""
        chosen = dict(given)

        def one(found: re.Match[str]) -> str:
            name = found[1]
            if name in ("f", "i"):
                return self.rng.choice(_FLOATS) if name == "f" else str(self.rng.randint(1, 4))
            if name not in chosen:
                chosen[name] = self._draw(name)
            return chosen[name]

        return re.sub(r"\{([a-zA-Z]\w*)\}", one, template)

    def _draw(self, name: str) -> str:
        match name:
            case "a" | "b":
                # Mostly the last one, so that most of what a program computes is part of its result.
                return self.variables[-1] if self.rng.random() < 0.75 else self.rng.choice(self.variables)
            case "x":
                return self.rng.choice(self.arguments)
            case "r":
                return f"v{self.number()}"
            case "h" | "k":
                return f"{'h' if name == 'h' else 'n'}{self.number()}"
            case "arg":
                return self.rng.choice(self.held)
            case "res":
                return self.rng.choice(self.results)
        raise KeyError(name)


def generate(seed: int | str, number: int) -> StateProgram:
    """Make the stateful program of a seed and a number, always the same.

    >>> generate(0, 1) == generate(0, 1)
    True

    Args:
        seed: The seed of the run.
        number: The program's place in it.
    """
    return drawn(ProgramGenerator, f"state/{seed}/{number}")


def drawn(kind: "type[ProgramGenerator]", name: str) -> StateProgram:
    """Draw a program of a kind, which its name decides; the process stays as it was."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        warnings.simplefilter("ignore")
        return kind(name).program()


class ProgramGenerator:
    """Draws one program."""

    def __init__(self, name: str) -> None:
        self._rng, self._name = random.Random(name), name
        rng = self._rng
        form = rng.choices(list(_FORM_WEIGHTS), list(_FORM_WEIGHTS.values()))[0]
        self._drawing = Drawing(rng, rng.choice(list(SHAPES)), form)
        # Half of the programs only read, so that what is read has a chance to be all that goes wrong.
        self._only_reads = rng.random() < 0.5
        self._has_symbols = "dynamic=True" in self._options()
        self._kinds = (*KINDS, *layer_kinds(self._drawing.family))

    def program(self) -> StateProgram:
        """The whole program."""
        drawing, rng = self._drawing, self._rng
        self._draw_objects()
        drawing.arguments = [f"x{i}" for i in range(rng.choice([1, 1, 1, 2]))]
        drawing.variables = list(drawing.arguments)
        program = self._so_far()
        world = drawing_world(program)
        self._draw_statements(world)
        program = replace(self._so_far(), returned=self._returned())
        return self._with_steps(program)

    def _so_far(self) -> StateProgram:
        drawing = self._drawing
        roots = tuple(o.root for o in drawing.objects)
        return StateProgram(
            self._name,
            tuple(drawing.parts),
            roots,
            drawing.form,
            tuple(drawing.arguments),
            tuple(drawing.statements),
            "None",
            tuple(drawing.steps),
            self._options(),
        )

    def _options(self, computed_once: bool = False) -> str:
        # Drawn apart, so that a new partitioner does not change the programs.
        rng = random.Random(f"{self._name}/options")
        partitioner = rng.choice(partitioners())
        if computed_once:  # what a backward computes again does not see what was written to a result, or sees too much
            partitioner = "default_partition"
        chosen = [f"partition_fn=foregrad.{partitioner}"] if partitioner != "default_partition" else []
        return ", ".join(chosen + (["dynamic=True"] if rng.random() < 0.03 else []))

    # ------------------------------------------------------------------------------------------------ objects
    def _draw_objects(self) -> None:
        world = drawing_world(_EMPTY)
        for _ in range(self._rng.choice([1, 1, 2, 2, 3])):
            for _ in range(_TRIES):
                kind = self._rng.choices(self._kinds, [kind.weight for kind in self._kinds])[0]
                depth = self._rng.choices([0, 1, 2, 3], [5, 4, 2, 1])[0]
                places = tuple(self._rng.choices(PLACES, [place.weight for place in PLACES], k=depth))
                drawn, parts = self._object(kind, places)
                if _can_be_made(parts, world):
                    self._drawing.objects.append(drawn)
                    self._drawing.parts += parts
                    break

    def _object(self, kind: Kind, places: tuple[Place, ...]) -> tuple[Object, list[Part]]:
        drawing = self._drawing
        names = [f"o{drawing.number()}" for _ in range(1 + len(places))]
        source = kind.define or f"{{o}} = {self._rng.choice(kind.makes)}"
        parts = [Part(drawing.fill(source, o=names[0], O=names[0].upper()), "object", kind.name)]
        for place, inner, name in zip(places, names, names[1:], strict=False):
            source = drawing.fill(place.define, o=name, O=name.upper(), v=inner)
            parts.append(Part(source, "place", place.name))
        return Object(kind, places, tuple(names)), parts

    def _made(self, drawn: Object) -> str:
        """Another value of an object's kind."""
        base = drawn.value
        return self._drawing.fill(self._rng.choice(drawn.kind.makes), o=base, O=base.upper())

    # --------------------------------------------------------------------------------------------- statements
    def _draw_statements(self, world: World) -> None:
        drawing, rng, scope = self._drawing, self._rng, self._scope(world)
        wanted = rng.randint(2, 7)
        for _ in range(_TRIES * wanted):
            if len(drawing.statements) >= wanted:
                return
            statement = self._statement()
            if statement is None or not self._fits(statement, world, scope):
                continue
            drawing.statements.append(statement)

    def _scope(self, world: World) -> dict[str, Any]:
        """The variables that a program starts with."""
        drawing = self._drawing
        scope: dict[str, Any] = {}
        for name in drawing.arguments:
            # Not a leaf: it can be written, and have hooks.
            scope[name] = eval(f"{self._argument(plain=True)}.requires_grad_() * 1", world.names)
        if drawing.form in ("module", "method", "callable"):
            program = world.names["program"]
            scope["self"] = getattr(program, "__self__", program)
        return scope

    def _fits(self, statement: Part, world: World, scope: dict[str, Any]) -> bool:
        before = dict(scope)
        world.names.update(scope)
        with world.ambient.in_place():
            try:
                exec(statement.source, world.names)
            except Exception:
                return False
        made = re.findall(r"\bv\d+\b(?= = )", statement.source)
        for name in dict.fromkeys(made):
            value = world.names[name]
            if not isinstance(value, torch.Tensor) or value.numel() > 256:
                return False
            # Something of another shape may be computed, but what follows has the shape of the arguments.
            if value.shape[-1:] == (4,) and value.dim() == before[self._drawing.arguments[0]].dim():
                self._drawing.variables.append(name)
            scope[name] = value
        return True

    def _statement(self) -> Part | None:
        drawing, rng = self._drawing, self._rng
        chance = rng.random()
        block = rng.choice(BLOCKS) if rng.random() < 0.06 else ""
        if chance < (0.7 if self._only_reads else 0.5):
            part = self._read()
        elif chance < 0.7:
            part = self._write()
        else:
            tables = {"compute": COMPUTE, "question": QUESTIONS, "random": RANDOM, "effect": EFFECTS}
            weights = [3, 3, 0, 0] if self._only_reads else [3, 3, 1, 3]
            kind = rng.choices(list(tables), weights)[0]
            template = rng.choice(tables[kind])
            part = Part(drawing.fill(template), kind, template)
        if part is None:
            return None
        return replace(part, source=f"{block}\n    {part.source}") if block and "\n" not in part.source else part

    def _path(self, drawn: Object, depth: int | None = None) -> str:
        """How the body of the program reaches an object, or a place around it."""
        return drawn.path(rooted(drawn.root, self._drawing.form), depth)

    def _read(self) -> Part | None:
        drawn = self._rng.choice(self._drawing.objects)
        kind = drawn.kind
        path = self._path(drawn)
        uses: list[str] = [*kind.reads, *kind.reads]
        numbers = [use for use in NUMBER_USES if not (self._has_symbols and use in ABOUT_EXACT_TYPES)]
        uses += [use.replace("{n}", self._rng.choice(kind.numbers)) for use in numbers if kind.numbers]
        uses += [use.replace("{t}", self._rng.choice(kind.tensors)) for use in TENSOR_USES if kind.tensors]
        if kind.reads and self._rng.random() < 0.6:
            uses = list(kind.reads)
        if not uses:
            return None
        source = self._drawing.fill(self._rng.choice(uses), p=path, o=drawn.value, O=drawn.value.upper())
        return Part(source, "read", kind.name)

    def _write(self) -> Part | None:
        drawn = self._rng.choice(self._drawing.objects)
        kind = drawn.kind
        path = self._path(drawn)
        names = {"p": path, "o": drawn.value, "O": drawn.value.upper()}
        writes = list(kind.writes)
        for value in kind.assigns:
            if not drawn.places:
                writes.append(f"{{p}} = {value}")
            elif drawn.places[0].assign:
                names["owner"] = self._path(drawn, 1)
                writes.append(drawn.places[0].assign.replace("{v}", value))
        if not writes:
            return None
        return Part(self._drawing.fill(self._rng.choice(writes), **names), "write", kind.name)

    def _returned(self) -> str:
        rng, variables = self._rng, self._drawing.variables
        last = variables[-1]
        other = rng.choice(variables)
        forms = [
            last,
            last,
            last,
            f"({last}, {other})",
            f"{{'a': {last}, 'b': [{other}]}}",
            f"({last}, 2)",
            f"[{last}, None]",
        ]
        if rng.random() < 0.05:
            forms = [
                "None",
                "torch.tensor([1.0, 2.0])",
                f"({last}, torch.ones(2))",
                f"torch.nn.Parameter({last}.detach())",
            ]
        return rng.choice(forms)

    # -------------------------------------------------------------------------------------------------- steps
    def _argument(self, plain: bool = False) -> str:
        """The Python of a tensor for the program."""
        rng, family = self._rng, self._drawing.family
        shape = SHAPES[family][0] if plain or rng.random() < 0.8 else rng.choice(SHAPES[family])
        count = 1
        for size in shape:
            count *= size
        sizes, start = ", ".join(map(str, shape)), rng.choice([-1.0, -0.5])
        full = f"torch.linspace({start}, 2.0, {count}, dtype=torch.float32).reshape({sizes})"
        layouts = [*LAYOUTS["any"], *LAYOUTS.get(family, ())]
        layout = "{full}" if plain else rng.choice(layouts)
        source = (
            layout.replace("{full}", full)
            .replace("{shape}", ", ".join(map(str, shape)))
            .replace("{batch}", str(shape[0]))
        )
        # A tensor of its own: the arguments that the grammar of tensors draws look at each other's memory.
        match 0 if plain else rng.choice([0, 0, 1, 1, 1, 2]):
            case 1:
                return (
                    f"{source}.detach().requires_grad_()"
                    if "expand" not in source
                    else f"{source}.clone().requires_grad_()"
                )
            case 2:
                return f"{source}.requires_grad_() * 1"
        return source

    def _with_steps(self, program: StateProgram) -> StateProgram:
        """Act out the program in eager, and keep the steps that do not raise."""
        world = drawing_world(program)
        calls = self._rng.choice([2, 2, 2, 3, 3, 4, 5])
        for _ in range(_TRIES):
            # Arguments that the program can take: what it was drawn with requires grad and is no leaf.
            self._drawing.steps.clear()
            self._new_arguments(world, program)
            if self._add_call(world, program):
                break
        for call in range(calls):
            if call and not self._add_call(world, program):
                break
            # What a backward reads may change before it runs.
            if self._rng.random() < 0.25:
                self._add_event(world, program)
            if self._rng.random() < 0.6:
                self._add(world, program, Part(f"backward(r{call})", "step", "backward"))
            for _ in range(self._rng.choice([0, 1, 1, 1, 2, 2]) if call < calls - 1 else 0):
                self._add_event(world, program)
        if self._rng.random() < 0.15 and self._drawing.results:
            # Objects that are arguments go too; others are the program's for as long as there is one.
            objects = program.roots if program.form == "argument" else ()
            names = ", ".join(repr(name) for name in [*self._drawing.held, *self._drawing.results, *objects])
            self._drawing.steps.append(Part(f"forget({names})", "step", "forget"))
        return self._finished(program)

    def _finished(self, program: StateProgram) -> StateProgram:
        """The program with its steps, and options that go with them."""
        steps = tuple(self._drawing.steps)
        written = any(re.search(r"\bwrite\(|\.data\b", step.source) for step in steps)
        return replace(program, steps=steps, options=self._options(computed_once=written))

    def _add_event(self, world: World, program: StateProgram) -> None:
        for _ in range(_TRIES):
            event = self._event(program)
            if event is not None and self._add(world, program, event):
                return

    def _new_arguments(self, world: World, program: StateProgram) -> None:
        drawing = self._drawing
        for position in range(len(drawing.arguments)):
            name = f"a{position}"
            for _ in range(_TRIES):
                if self._add(world, program, Part(f"{name} = {self._argument()}", "step", "new argument")):
                    break
            if name not in drawing.held:
                drawing.held.append(name)

    def _add_call(self, world: World, program: StateProgram) -> bool:
        drawing = self._drawing
        given = [*drawing.held, *(program.roots if drawing.form == "argument" else ())]
        result = f"r{len(drawing.results)}"
        call = f"{result} = call({', '.join(given)})"
        template = self._rng.choice(CALLS)
        for how in (template, "{call}"):
            if self._add(world, program, Part(how.replace("{call}", call), "call", how)):
                drawing.results.append(result)
                return True
        return False

    def _add(self, world: World, program: StateProgram, step: Part) -> bool:
        """Keep a step if it can be taken."""
        raised = world.do(compile(step.source, "<step>", "exec"), world.names["program"])
        if raised is not None and (step.kind == "event" or self._rng.random() > _KEPT_ERRORS):
            return False
        self._drawing.steps.append(step)
        if handle := re.match(r"(h\d+) = ", step.source):
            self._drawing.handles.append(handle[1])
        return raised is None

    def _event(self, program: StateProgram) -> Part | None:
        drawing, rng = self._drawing, self._rng
        chance = rng.random()
        if chance < 0.55:
            return self._object_event(program)
        if drawing.handles and chance < 0.63:
            return Part(f"{rng.choice(drawing.handles)}.remove()", "event", "hook removed")
        if chance < 0.7:
            return Part(f"{rng.choice(drawing.held)} = {self._argument()}", "event", "new argument")
        tables: dict[str, Sequence[str]] = {"mode": MODES, "global": GLOBAL_EVENTS, "argument": ARGUMENT_EVENTS}
        if drawing.results:
            tables["result"] = RESULT_EVENTS
        kind = rng.choice(list(tables))
        text = program.script()
        fitting = [t for t in tables[kind] if t not in MENTIONED or re.search(MENTIONED[t], text)]
        # What aot_module returns is a module, too: hooks on all modules run for it beside the original.
        fitting = [t for t in fitting if program.form != "module" or "nn.modules.module" not in t]
        template = rng.choice(fitting or tables[kind])
        return Part(drawing.fill(template), "event", template)

    def _object_event(self, program: StateProgram) -> Part | None:
        drawing, rng = self._drawing, self._rng
        body = "\n".join(part.source for part in drawing.statements)
        used = [drawn for drawn in drawing.objects if re.search(rf"\b{drawn.root}\b", body)]
        drawn = rng.choice(used if used and rng.random() < 0.9 else drawing.objects)
        names = {"o": drawn.value, "O": drawn.value.upper(), "p": drawn.path(drawn.root)}
        options: list[str] = list(drawn.kind.events)
        if drawn.kind.makes:
            options += [self._replaced(drawn, program)] * max(1, len(options) // 3)
        source = rng.choice(options) if options else ""
        return Part(drawing.fill(source, **names), "event", f"{drawn.kind.name}: {source}") if source else None

    def _replaced(self, drawn: Object, program: StateProgram) -> str:
        """Another value in the place of an object's value, or of a place around it."""
        new = self._made(drawn)
        if not drawn.places:
            return assigned(drawn.root, new, self._drawing.form, program.roots)
        place, name = drawn.places[0], drawn.names[1]
        ways = [place.assign] if place.assign else []
        way = self._rng.choice([*ways, *place.events]) if ways or place.events else ""
        path = place.path.replace("{o}", name)
        for placeholder, text in {"p": path, "owner": name, "o": name, "O": name.upper(), "v": new}.items():
            way = way.replace(f"{{{placeholder}}}", text)
        return way


def drawing_world(program: StateProgram) -> World:
    """A world with everything that a part to come may mention."""
    world = World(compile(program.script(), f"<fuzz {program.name}>", "exec"))
    missing = [source for name, source in SUPPORT.items() if name not in world.names]
    assert world.do(compile("\n\n".join([f"import {', '.join(MODULES)}", *missing]), "<support>", "exec"), len) is None
    return world


_EMPTY = StateProgram("objects", (), (), "function", ("x0",), (), "x0", ())


def _can_be_made(parts: list[Part], world: World) -> bool:
    return world.do(compile("\n".join(part.source for part in parts), "<objects>", "exec"), len) is None
