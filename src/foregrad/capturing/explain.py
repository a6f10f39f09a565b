"""Why a call does not fit a program: its guards, run once more, slowly, to say which of them fails and on what.

The explanation is made of the guards themselves. The text of a program's call is read up to its last guard, and each
`return MISS` in it is replaced by a look at the condition that led there: which part of it fails, what stands on its
two sides, and what the user calls the places in it. So there is nothing to keep in step with the guards, nothing that
a call pays for, and no guard without an explanation. Objects that compare many things in one call say themselves what
has changed (`explain`).
"""

from __future__ import annotations

import ast
import functools
import operator
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import autocast_state, compared_settings
from ..errors import ForegradError
from ..values import Change, same_value, shown
from .free_variables import Reached

Explain = Callable[..., Change | None]


@dataclass(frozen=True)
class GuardText:
    """The guards of a program as text, with what their names stand for."""

    source: str
    namespace: dict[str, Any]
    places: Mapping[str, str]  # text of an expression: the user's name for what it reads
    explainers: Mapping[str, Explain]  # of functions that cannot carry their own
    missed: Callable[[], Change | None] = lambda: None  # the read at which the last call left the program, if it did

    def failure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Change | None:
        """What a call is refused for; None if it is not, any more."""
        try:
            return self._explaining(args, kwargs, self._reader.failed) or self.missed()
        except ForegradError:
            raise
        except Exception as error:  # the state is as the user left it: what the guards cannot read, neither can this
            return Change("what the program reads", "readable", f"not: {type(error).__name__}: {error}")

    def _tree(self) -> ast.Module:
        """The lines of the call up to its last guard."""
        lines = self.source.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("def call("))
        end = max(i for i, line in enumerate(lines) if line.endswith("return MISS"))
        guards = lines[start + 1 : end + 1]
        return ast.parse("\n".join([f"def call(args, kwargs, {_FAILED}):", *guards, "    return None"]))

    @functools.cached_property
    def _reader(self) -> _Reader:
        return _Reader(self, self._tree())

    @functools.cached_property
    def _explaining(self) -> Callable[..., Change | None]:
        made: dict[str, Any] = {}
        exec(compile(ast.fix_missing_locations(_Asking().visit(self._tree())), "<guards>", "exec"), made)
        return types.FunctionType(made["call"].__code__, self.namespace)  # what is let go in it is let go here as well


_FAILED, _ERROR = "_failed", "_error"


class _Asking(ast.NodeTransformer):
    """Guards that ask why, where they would say that a call is for another program."""

    def visit_If(self, node: ast.If) -> ast.AST:
        if _is_miss(node.body):
            node.body = [self._ask(node, "None")]
        return self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        if _is_miss(node.body):
            node.name, node.body = _ERROR, [self._ask(node, _ERROR)]
        return node

    def _ask(self, node: ast.If | ast.ExceptHandler, error: str) -> ast.stmt:
        asked = ast.parse(f"return {_FAILED}({node.lineno}, locals(), {error})").body[0]
        return ast.copy_location(asked, node)


def _is_miss(body: list[ast.stmt]) -> bool:
    return len(body) == 1 and ast.unparse(body[0]) == "return MISS"


class _Reader:
    """Reads what guards say."""

    def __init__(self, guards: GuardText, tree: ast.Module) -> None:
        self._guards = guards
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        self._statements = {node.lineno: node for node in statements if not isinstance(node, ast.FunctionDef | ast.Try)}
        self._tests = {node.lineno: node.test for node in statements if isinstance(node, ast.If)}
        places = {"args": "args", "kwargs": "kwargs", **guards.places}
        self._places = {ast.unparse(ast.parse(text, mode="eval")): place for text, place in places.items()}
        self._assigned: dict[str, ast.expr] = {}
        for node in statements:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._assigned.setdefault(node.targets[0].id, node.value)

    def failed(self, line: int, scope: dict[str, Any], error: Exception | None) -> Change:
        """Why the guard on a line fails."""
        if error is None:
            return self._failing(self._tests[line], False, scope)
        step = error.__traceback__
        statement = self._statements.get(step.tb_lineno) if step is not None else None
        read = statement.value if isinstance(statement, ast.Assign) else None
        what = "what the program reads" if read is None else self._words(read)
        return Change(what, "there", f"not: {type(error).__name__}: {error}")

    def _failing(self, test: ast.expr, wanted: bool, scope: dict[str, Any]) -> Change:
        """The part of a condition because of which it is not as wanted."""
        match test:
            case ast.UnaryOp(ast.Not(), inner):
                return self._failing(inner, not wanted, scope)
            case ast.BoolOp(op, values):
                decisive = isinstance(op, ast.And) is wanted  # one that is not as wanted decides
                parts = [value for value in values if bool(self._value(value, scope)) is not wanted]
                return self._failing(parts[0] if decisive else values[-1], wanted, scope)
            case ast.Compare(left, [op], [right]):
                return self._compared(left, op, right, scope)
            case ast.Call(function, given):
                change = self._told(function, given, scope)
                if change is not None:
                    return change
        now = self._value(test, scope)
        return Change(self._words(test), shown(wanted if isinstance(now, bool) else type(now)()), shown(now))

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr, scope: dict[str, Any]) -> Change:
        now, was = self._value(left, scope), self._value(right, scope)
        match left, right:
            case ast.Call(ast.Name("id"), [inner]), _:
                return Change(self._words(inner), "another object", shown(self._value(inner, scope)))
            case ast.Call(function, given), ast.Constant(None):  # a pattern that is not matched
                told = self._told(function, given, scope)
                if told is not None:
                    return told
            case ast.Name(name), ast.Constant(None) if isinstance(self._assigned.get(name), ast.Call):
                call = self._assigned[name]
                assert isinstance(call, ast.Call)
                told = self._told(call.func, call.args, scope)
                if told is not None:
                    return told
            case ast.Call(ast.Name("tuple"), [inner]), _:
                return Change(f"the keys of {self._words(inner)}", shown(was), shown(now))
            case _, ast.Name() | ast.Attribute() | ast.Call() if isinstance(op, ast.Is | ast.IsNot):
                if not isinstance(was, type):
                    words = ("another than", "the same") if now is was else ("the same as", "another")
                    return Change(self._words(left), f"{words[0]} {self._words(right)}", words[1])
        if isinstance(op, ast.Lt | ast.Gt):
            return Change(
                self._words(left), f"{'below' if isinstance(op, ast.Lt) else 'above'} {shown(was)}", shown(now)
            )
        return Change(self._words(left), shown(was), shown(now))

    def _told(self, function: ast.expr, given: list[ast.expr], scope: dict[str, Any]) -> Change | None:
        """What a function that compares says itself, in the user's words for what it was given."""
        check = self._value(function, scope)
        values = self._value(ast.Tuple(given, ast.Load()), scope)
        if isinstance(check, functools.partial) and check.func is same_value:
            change: Change | None = Change("", shown(check.args[0]), shown(values[0]))
        else:
            explain = self._guards.explainers.get(ast.unparse(function)) or _explain_of(check)
            if explain is None:
                return None
            change = explain(*values)
        if change is None or change.owner is not None or not given:
            return change
        argument = _spread(given, scope, self._value)[change.argument]
        return replace(change, path=f"{self._words(argument)}{change.path}")

    def _value(self, expression: ast.expr, scope: dict[str, Any]) -> Any:
        code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<guard>", "eval")
        return eval(code, self._guards.namespace, scope)

    def _words(self, expression: ast.expr) -> str:
        return ast.unparse(
            _InUsersWords(self._places, self._assigned).visit(ast.parse(ast.unparse(expression), mode="eval"))
        )


class Named(NamedTuple):
    """The user's name for an object, or for the dict of its attributes."""

    path: str
    is_attributes: bool = False


def names_of(reached: Reached) -> dict[int, Named]:
    """The user's names for objects that a program reaches, by their ids."""
    names: dict[int, Named] = {}
    for path, owner, kind, _ in reached.holders:
        names.setdefault(id(owner), Named(path))
        if kind.is_attribute:
            names.setdefault(id(getattr(owner, "__dict__", owner)), Named(path, is_attributes=True))
    for parts in (*reached.modules, *reached.modules_in_arguments):
        names[id(parts.module)] = Named(parts.path or "self")
        names[id(vars(parts.module))] = Named(parts.path or "self", is_attributes=True)
    return names


_GLOBAL = re.compile(r"^(\w+) \(global\)")


def with_owner(change: Change, names: Mapping[int, Named]) -> Change:
    """A change with the name of what it belongs to, which is not kept."""
    path, owner = change.path, change.owner
    if owner is not None:
        named = names.get(id(owner)) or _name_of(owner)
        key = _ATTRIBUTE.fullmatch(path) if named.is_attributes else None
        path = f"{named.path}.{key[1]}" if key is not None else f"{named.path}{path}"
    return replace(change, path=_GLOBAL.sub(r"global \1", path), owner=None, argument=0)


_ATTRIBUTE = re.compile(r"\['(\w+)'\]")


def _name_of(owner: Any) -> Named:
    if isinstance(owner, dict) and isinstance(owner.get("__name__"), str):
        return Named(f"global {owner['__name__']}", is_attributes=True)
    name = getattr(owner, "__qualname__", None)
    return Named(name if isinstance(name, str) else f"a {type(owner).__name__} that the program reads")


class AmbientBefore:
    """Modes and settings that are compared in one call, as they were."""

    def __init__(self, guard: Any) -> None:
        self._guard, self._before = guard, _ambient()

    def explain(self) -> Change | None:
        """The first that is not as it was."""
        now = {**_ambient(), **compared_settings(type(self._guard)())}
        before = {**self._before, **compared_settings(self._guard)}
        return next(
            (Change(name, shown(before[name]), shown(now[name])) for name in now if now[name] != before[name]), None
        )


def _ambient() -> dict[str, Any]:
    """Those that have a name of their own."""
    cache, *devices = autocast_state()
    found: dict[str, Any] = {"grad mode": torch.is_grad_enabled(), "the default dtype": torch.get_default_dtype()}
    for device, enabled, dtype in devices:
        found |= {f"autocast on {device}": enabled, f"the dtype of autocast on {device}": dtype}
    found["the cache of autocast"] = cache
    found["deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
    found["the number of threads"] = torch.get_num_threads()
    return found


_SAME_FOR_ALL: tuple[tuple[str, Callable[[Tensor], Any]], ...] = (
    ("type", type),
    ("dtype", operator.attrgetter("dtype")),
    ("device", operator.attrgetter("device")),
    ("layout", operator.attrgetter("layout")),
    ("requires_grad", operator.attrgetter("requires_grad")),
    ("number of dimensions", Tensor.dim),
    ("conj bit", Tensor.is_conj),
    ("neg bit", Tensor.is_neg),
    ("inference tensor", Tensor.is_inference),
)


class TensorsBefore:
    """What is compared of all tensors of a call in one call into C++."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        sizes: Sequence[Sequence[int | None]],
        strides: Sequence[Sequence[int | None]],
    ) -> None:
        self._facts = [tuple([read(tensor) for _, read in _SAME_FOR_ALL]) for tensor in tensors]
        self._shapes = list(zip(sizes, strides, strict=True))

    def explain(self, *tensors: Any) -> Change | None:
        """The first difference."""
        for i, (now, before, (size, stride)) in enumerate(zip(tensors, self._facts, self._shapes, strict=True)):
            change = _tensor_change(now, before, size, stride)
            if change is not None:
                return replace(change, argument=i)
        return None


def _tensor_change(
    now: Any, before: tuple[Any, ...], size: Sequence[int | None], stride: Sequence[int | None]
) -> Change | None:
    if not isinstance(now, Tensor):
        return Change("", "a tensor", shown(now))
    for (what, read), was in zip(_SAME_FOR_ALL, before, strict=True):
        if read(now) != was:
            return Change(f": {what}", shown(was), shown(read(now)))
    strides = now.stride() if now.layout is torch.strided else stride
    for what, expected, found in (("size", size, now.shape), ("stride", stride, strides)):
        for dim, (was, length) in enumerate(zip(expected, found, strict=True)):
            if was is not None and length is not None and was != length:
                return Change(f": {what} of dimension {dim}", shown(was), shown(int(length)))
    return None


def same_structure_before(now: Any, before: Any) -> Change:
    """Containers of pytree."""
    return Change("", str(before), str(now))


def _explain_of(check: Any) -> Explain | None:
    found: Explain | None = getattr(check, "explain", None) or getattr(
        getattr(check, "__self__", None), "explain", None
    )
    return found


def _spread(given: list[ast.expr], scope: dict[str, Any], value: Callable[..., Any]) -> list[ast.expr]:
    """Arguments one by one, where several are given as `*state[2:40]`."""
    found: list[ast.expr] = []
    for one in given:
        match one:
            case ast.Starred(ast.Subscript(row, ast.Slice(ast.Constant(int(start)), ast.Constant(int(end))))):
                found += [ast.Subscript(row, ast.Constant(i), ast.Load()) for i in range(start, end)]
            case ast.Starred(row):
                found += [ast.Subscript(row, ast.Constant(i), ast.Load()) for i in range(len(value(row, scope)))]
            case _:
                found.append(one)
    return found


class _InUsersWords(ast.NodeTransformer):
    """An expression with the user's names for what it reads."""

    def __init__(self, places: Mapping[str, str], assigned: Mapping[str, ast.expr]) -> None:
        self._places, self._assigned = places, dict(assigned)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr):
            place = self._places.get(ast.unparse(node))
            if place is not None:
                return ast.Name(place, ast.Load())
            match node:
                case ast.Call(ast.Name("getattribute"), [inner, ast.Constant(str(name))]):
                    return ast.Attribute(self.visit(inner), name, ast.Load())
            if isinstance(node, ast.Name) and node.id in self._assigned:
                return self.visit(self._assigned.pop(node.id))
        return self.generic_visit(node)
