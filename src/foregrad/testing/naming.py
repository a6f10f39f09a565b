"""Names, in the user's words, for every tensor that a call takes or returns, or that the program holds.

Two observations can only be compared tensor by tensor, so each tensor needs a name that is the same on both
sides and that the user recognises: `argument 1 (x)["a"]`, `output[0]`, `parameter fc.weight`.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..capturing.given import can_be_opened
from ..codegen import pytree
from ..codegen.objects import shape_of

Named = tuple[str, Tensor]

_MODULE_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True)
class Tree:
    """A nested value taken apart: each container described, each leaf named.

    >>> unfold({"a": [1.5]}, "output").leaves
    {'output["a"][0]': 1.5}

    Args:
        containers: The exact type and the keys of each container, by name.
        leaves: What is not a container, by name.
        objects: The containers themselves, but for tuples, by name.
    """

    containers: Mapping[str, str]
    leaves: Mapping[str, object]
    objects: Mapping[str, object] = field(default_factory=dict)

    def tensors(self) -> list[Named]:
        """The leaves that are tensors.

        >>> unfold([1, torch.ones(1)], "output").tensors()
        [('output[1]', tensor([1.]))]
        """
        return [(where, leaf) for where, leaf in self.leaves.items() if isinstance(leaf, Tensor)]


def unfold(value: object, where: str) -> Tree:
    """Take a nested value apart, containers of every kind and plain objects included.

    >>> unfold((1, [2]), "output").containers
    {'output': 'tuple of [0], [1]', 'output[1]': 'list of [0]'}

    Args:
        value: What to take apart; where it leads back to a part of itself, the leaf says so.
        where: The name of the whole.
    """
    containers: dict[str, str] = {}
    leaves: dict[str, object] = {}
    objects: dict[str, object] = {}
    above: dict[int, str] = {}  # names, by id

    def walk(value: object, where: str) -> None:
        if id(value) in above:
            leaves[where] = f"leads back to {above[id(value)]}"
            return
        children = _children(value)
        if children is None:
            leaves[where] = value
            return
        containers[where] = f"{type(value).__qualname__} of {', '.join(key for key, _ in children)}"
        if type(value) is not tuple:
            objects[where] = value
        above[id(value)] = where
        for key, child in children:
            walk(child, where + key)
        del above[id(value)]

    walk(value, where)
    return Tree(containers, leaves, objects)


def _children(value: object) -> list[tuple[str, object]] | None:
    """The parts of a container with the way to write each, or None for a leaf."""
    if isinstance(value, (Tensor, torch.Size, type, ModuleType, nn.Module, str, bytes, torch.Generator)):
        return None
    if isinstance(value, dict):
        items = [(_subscript(key), child) for key, child in dict.items(value)]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [(f".{name}", child) for name, child in zip(value._fields, value, strict=True)]
    elif isinstance(value, (list, tuple, deque)):
        items = [(f"[{index}]", child) for index, child in enumerate(value)]
    else:
        items = []
    shape = shape_of(type(value))
    if shape is None:
        return items if isinstance(value, (dict, list, tuple, deque)) else None
    named = {**shape.attributes(value), **shape.filled(value)}
    return items + [(f".{name}", child) for name, child in named.items()]


def _subscript(key: object) -> str:
    return f'["{key}"]' if isinstance(key, str) else f"[{key!r}]"


def tensors_in(value: object, where: str) -> list[Named]:
    """Name every tensor in a value, and every tensor that a module in it holds.

    >>> [name for name, _ in tensors_in([torch.ones(1), 2], "argument 0")]
    ['argument 0[0]']

    Args:
        value: Any nested value.
        where: The name of the whole.
    """
    named: list[Named] = []
    for name, leaf in unfold(value, where).leaves.items():
        if isinstance(leaf, Tensor):
            named.append((name, leaf))
        elif isinstance(leaf, nn.Module):
            named += [(f"{kind} {path} of {name}", tensor) for kind, path, tensor in _held_by(leaf)]
    return named


def module_tensors(module: nn.Module, prefix: str = "") -> list[Named]:
    """Name what a module holds: parameters, buffers, and tensors that are plain attributes.

    >>> [name for name, _ in module_tensors(nn.Linear(1, 1))]
    ['parameter weight', 'parameter bias']

    Args:
        module: The module; a tensor that it holds under two names is named twice.
        prefix: How the user reaches the module, such as `model.`.
    """
    return [(f"{kind} {prefix}{path}", tensor) for kind, path, tensor in _held_by(module)]


def _held_by(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for path, parameter in module.named_parameters(remove_duplicate=False):
        yield "parameter", path, parameter
    for path, buffer in module.named_buffers(remove_duplicate=False):
        yield "buffer", path, buffer
    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            if isinstance(value, Tensor) and name not in _MODULE_REGISTRIES:
                yield "attribute", f"{path}.{name}" if path else name, value


def name_arguments(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[str], list[object], pytree.Tree]:
    """Take the arguments of a call apart, objects included, and name each leaf.

    >>> name_arguments(lambda x, y: x, (1, [2, 3]), {})[0]
    ['argument 0 (x)', 'argument 1 (y)[0]', 'argument 1 (y)[1]']

    Args:
        fn: What will be called; its signature gives the names.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    taking = pytree.TakingApart(pytree.Look(can_be_opened, same_objects=True, subscript=_subscript))
    names = argument_names(fn, len(args), kwargs)
    trees = [taking.take(value, name) for name, value in zip(names, (*args, *kwargs.values()), strict=True)]
    positional = pytree.Items(tuple, tuple(trees[: len(args)]))
    tree = pytree.Items(tuple, (positional, pytree.Entries(tuple(kwargs), tuple(trees[len(args) :]))))
    return taking.paths, taking.leaves, tree


def argument_names(fn: Callable[..., Any], positional: int, keywords: Iterable[str]) -> list[str]:
    """The name of each argument of a call.

    >>> argument_names(lambda x, y: x, 1, ["y"])
    ['argument 0 (x)', 'argument y']

    Args:
        fn: What will be called; its signature gives the names.
        positional: How many positional arguments there are.
        keywords: The names of the others.
    """
    names = [f" ({name})" for name in _positional_names(fn)] + [""] * positional
    return [f"argument {i}{names[i]}" for i in range(positional)] + [f"argument {name}" for name in keywords]


def _positional_names(fn: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def captured(fn: Callable[..., Any]) -> dict[str, object]:
    """What a function reaches without being given it: closures, globals, bound objects, partial arguments.

    >>> scale = torch.ones(1)
    >>> list(captured(lambda x: x * scale))
    ['scale']

    Args:
        fn: The function. Helpers in its closure are followed; global helpers are not.
    """
    found: dict[str, object] = {}
    seen: set[int] = set()

    def visit(value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, partial):
            found.update({f"partial argument {i}": given for i, given in enumerate(value.args)})
            found.update(value.keywords)
            visit(value.func)
        elif isinstance(value, MethodType):
            found["self"] = value.__self__
            visit(value.__func__)
        elif isinstance(value, FunctionType):
            variables = inspect.getclosurevars(value)
            holders = {k: v for k, v in variables.globals.items() if isinstance(v, (Tensor, nn.Module))}
            found.update(holders, **variables.nonlocals)
            for helper in variables.nonlocals.values():
                visit(helper)

    visit(fn)
    return found
