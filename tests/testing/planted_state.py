"""Planted faults in what a callable does with the state around it: each makes a right callable wrong in one way.

They know nothing of the program that they are planted in, and do nothing where it gives them no opportunity.
"""

import random
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foregrad.errors import UnsupportedError

Program = Callable[..., Any]
Wrapper = Callable[[Program], Program]
Places = dict[Any, tuple[Any, Callable[[Any], None]]]


@dataclass(frozen=True)
class Planted:
    plant: Wrapper
    aspect: str


PLANTED: dict[str, Planted] = {}


def planted(name: str, aspect: str) -> Callable[[Wrapper], Wrapper]:
    def register(plant: Wrapper) -> Wrapper:
        PLANTED[name] = Planted(plant, aspect)
        return plant

    return register


def world_of(program: Program) -> dict[str, Any]:
    """The names of the world that a program lives in."""
    function = getattr(program, "__func__", program)
    if not isinstance(function, types.FunctionType):
        function = type(program).forward if isinstance(program, nn.Module) else type(program).__call__
    return function.__globals__


def objects(world: dict[str, Any], depth: int = 4) -> Iterator[Any]:
    """What the names of the world lead to, through attributes and containers."""
    todo = [(value, depth) for name, value in world.items() if not name.startswith("__")]
    seen: set[int] = set()
    while todo:
        value, left = todo.pop()
        if id(value) in seen or isinstance(value, (type, types.ModuleType, types.FunctionType, Tensor)):
            continue
        seen.add(id(value))
        yield value
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        todo += [(part, left - 1) for part in (*parts, *getattr(value, "__dict__", {}).values()) if left]


def plain_values(world: dict[str, Any]) -> Places:
    """Numbers and texts in attributes, lists and dicts."""
    places: Places = {}
    for value in objects(world):
        table = value if isinstance(value, (dict, list)) else getattr(value, "__dict__", None)
        if table is None:
            continue
        entries = enumerate(table) if isinstance(table, list) else list(table.items())
        for key, held in entries:
            if isinstance(held, (int, float, str)) and key != "training":
                places[id(table), key] = held, lambda new, table=table, key=key: table.__setitem__(key, new)
    return places


def class_attributes(world: dict[str, Any]) -> Places:
    return {
        (kind, name): (held, lambda new, kind=kind, name=name: setattr(kind, name, new))
        for kind in world.values()
        if isinstance(kind, type)
        for name, held in vars(kind).items()
        if name not in ("__dict__", "__weakref__", "__doc__")
    }


def hooks(world: dict[str, Any]) -> Places:
    def put(table: dict[int, Any], new: dict[int, Any]) -> None:
        table.clear()
        table.update(new)

    return {
        id(table): (dict(table), lambda new, table=table: put(table, new))
        for module in objects(world)
        if isinstance(module, nn.Module)
        for table in (module._forward_hooks, module._forward_pre_hooks)
    }


def training(world: dict[str, Any]) -> Places:
    return {
        id(module): (module.training, lambda new, module=module: setattr(module, "training", new))
        for module in objects(world)
        if isinstance(module, nn.Module)
    }


def functions_of_torch(world: dict[str, Any]) -> Places:
    owners = ((torch, "sin"), (torch, "add"), (torch.nn.functional, "relu"), (torch.nn.Linear, "forward"))
    return {
        (owner, name): (getattr(owner, name), lambda new, owner=owner, name=name: setattr(owner, name, new))
        for owner, name in owners
    }


def read_once(places: Callable[[dict[str, Any]], Places]) -> Wrapper:
    """Every call finds in these places what the first one found."""

    def plant(right: Program) -> Program:
        world, first = world_of(right), {}

        def wrong(*args: Any) -> Any:
            now = places(world)
            if not first:
                first.update({key: value for key, (value, _) in now.items()})
            stale = {key: first[key] for key in now if key in first and first[key] != now[key][0]}
            for key, value in stale.items():
                now[key][1](value)
            try:
                return right(*args)
            finally:
                after = places(world)
                for key, value in stale.items():
                    if key in after and after[key][0] == value:
                        now[key][1](now[key][0])

        return wrong

    return plant


PLANTED["numbers in objects are read once"] = Planted(read_once(plain_values), "value of a result")
PLANTED["class attributes are read once"] = Planted(read_once(class_attributes), "value of a result")
PLANTED["hooks are looked at once"] = Planted(read_once(hooks), "value of a result")
PLANTED["the training flag is read once"] = Planted(read_once(training), "value of a result")
PLANTED["functions of torch are looked up once"] = Planted(read_once(functions_of_torch), "value of a result")


@planted("writes to objects happen at the first call only", "value of an object")
def _(right):
    world, calls = world_of(right), []

    def wrong(*args):
        before = plain_values(world)
        output = right(*args)
        calls.append(None)
        if len(calls) > 1:
            for key, (value, _) in plain_values(world).items():
                if key in before and before[key][0] != value:
                    before[key][1](before[key][0])
        return output

    return wrong


@planted("an abstract tensor is left behind", "abstract tensor")
def _(right):
    world = world_of(right)

    def wrong(*args):
        before = {id(value): len(value) for value in objects(world) if isinstance(value, list)}
        output = right(*args)
        for value in objects(world):
            if isinstance(value, list) and len(value) > before.get(id(value), len(value)):
                value[-1] = torch.empty(1, device="meta")
        return output

    return wrong


@planted("arguments are kept alive", "life of a tensor")
def _(right):
    kept = []

    def wrong(*args):
        kept.append(args)
        return right(*args)

    return wrong


@planted("a result is the same tensor at each call", "identity of a result")
def _(right):
    first = []

    def wrong(*args):
        output = right(*args)
        if isinstance(output, Tensor) and not output.requires_grad and all(output is not given for given in args):
            first[:] = first or [output]
            return first[0] if first[0].shape == output.shape and torch.equal(first[0], output) else output
        return output

    return wrong


@planted("draws of random happen at the first call only", "value of the state of random")
def _(right):
    calls = []

    def wrong(*args):
        before = random.getstate()
        output = right(*args)
        calls.append(None)
        if len(calls) > 1:
            random.setstate(before)
        return output

    return wrong


@planted("a refusal comes after the writes", "value of an object after a refusal")
def _(right):
    world = world_of(right)

    def wrong(*args):
        before = {key: value for key, (value, _) in plain_values(world).items()}
        output = right(*args)
        if any(before.get(key, value) != value for key, (value, _) in plain_values(world).items()):
            raise UnsupportedError("the program changes an object")
        return output

    return wrong


@planted("the grad mode of the first call is kept", "requires_grad of a result")
def _(right):
    first = []

    def wrong(*args):
        first[:] = first or [torch.is_grad_enabled()]
        with torch.set_grad_enabled(first[0] and not torch.is_inference_mode_enabled()):
            return right(*args)

    return wrong


# ------------------------------------------------------------------------------------------------- of training steps
PLANTED_IN_STEPS: dict[str, Planted] = {}


def optimizers(world: dict[str, Any]) -> Iterator[torch.optim.Optimizer]:
    yield from (value for value in objects(world) if isinstance(value, torch.optim.Optimizer))


def rates(world: dict[str, Any]) -> Places:
    return {
        (id(group), name): (value, lambda new, group=group, name=name: group.__setitem__(name, new))
        for optimizer in optimizers(world)
        for group in optimizer.param_groups
        for name, value in group.items()
        if isinstance(value, float)
    }


PLANTED_IN_STEPS["rates are read once"] = Planted(read_once(rates), "value of an object")


def state_is_new(right: Program) -> Program:
    """Every step begins with empty state, as the first did."""
    world = world_of(right)

    def wrong(*args: Any) -> Any:
        for optimizer in optimizers(world):
            optimizer.state.clear()
        return right(*args)

    return wrong


def gradients_are_released(right: Program) -> Program:
    """Those that the step leaves, too."""
    world = world_of(right)

    def wrong(*args: Any) -> Any:
        output = right(*args)
        for optimizer in optimizers(world):
            optimizer.zero_grad()
        return output

    return wrong


def schedules_stand_still(right: Program) -> Program:
    world = world_of(right)

    def wrong(*args: Any) -> Any:
        before = {key: value for key, (value, _) in rates(world).items()}
        output = right(*args)
        for key, (_, put) in rates(world).items():
            put(before.get(key, 0.0))
        return output

    return wrong


PLANTED_IN_STEPS["state is always new"] = Planted(state_is_new, "value of an object")
PLANTED_IN_STEPS["gradients that the step leaves are gone"] = Planted(gradients_are_released, "type of a gradient")
PLANTED_IN_STEPS["a schedule inside of the step has no effect"] = Planted(schedules_stand_still, "value of an object")
