"""A program under test and its two sides.

Arguments are cloned for every call. What a program holds (a module's parameters and buffers, what a function
closes over) cannot be: the compiled callable is bound to it and must be called again. It is put back instead,
in place, before every call.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, UntypedStorage, nn

from ..codegen import pytree
from .cloning import Cloner, Contents, has_storage, plain_parts, storage_key
from .naming import (
    Named,
    Tree,
    argument_names,
    captured,
    module_tensors,
    name_arguments,
    tensors_in,
    unfold,
)


@dataclass(frozen=True)
class Call:
    """Fresh arguments for one call, with a name for every tensor among them.

    >>> x = torch.ones(2)
    >>> call = Arguments.of(torch.sin, (x,), {}).clone(Cloner(Contents.of([x])))
    >>> call.tensors
    (('argument 0', tensor([1., 1.])),)

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
        tensors: All tensors in the arguments, and the bases of those that are views.
        leaves: Where the gradient of each arrives.
        generators: The random generators in the arguments.
        whole: The arguments themselves, by name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Named, ...]
    leaves: tuple[Named, ...]
    generators: tuple[tuple[str, Generator], ...]
    whole: tuple[tuple[str, object], ...]

    def unfolded(self, when: str) -> Tree:
        """The arguments that are no tensors, taken apart as they are now.

        >>> call = Arguments.of(lambda x: x, ([1],), {}).clone(Cloner(Contents({})))
        >>> call.unfolded("now").leaves
        {'argument 0 (x)[0] now': 1}

        Args:
            when: Stands after each name.
        """
        trees = [unfold(value, name) for name, value in self.whole if not isinstance(value, Tensor)]
        containers, leaves, objects = (
            {f"{where} {when}": it for tree in trees for where, it in getattr(tree, part).items()}
            for part in ("containers", "leaves", "objects")
        )
        return Tree(containers, leaves, objects)


@dataclass(frozen=True)
class Arguments:
    """The user's arguments, flat and named; never passed to a program themselves.

    >>> Arguments.of(lambda x, y: x, (1,), {"y": {"a": 2}}).names
    ('argument 0 (x)', 'argument y["a"]')

    Args:
        names: The name of each leaf.
        values: The leaves.
        tree: How they are put together.
        arguments: The name of each argument.
        apart: Clone every leaf by itself, so that nothing is shared among arguments.
    """

    names: tuple[str, ...]
    values: tuple[object, ...]
    tree: pytree.Tree
    arguments: tuple[str, ...]
    apart: bool = False

    @staticmethod
    def of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Arguments":
        """Name the arguments of a call.

        >>> Arguments.of(lambda x: x, (1,), {}).values
        (1,)

        Args:
            fn: What will be called.
            args: The positional arguments.
            kwargs: The keyword arguments.
        """
        names, values, tree = name_arguments(fn, args, kwargs)
        arguments = argument_names(fn, len(args), kwargs)
        return Arguments(tuple(names), tuple(values), tree, tuple(arguments))

    def tensors(self) -> list[Named]:
        """All tensors in the arguments.

        >>> Arguments.of(lambda x: x, (1,), {}).tensors()
        []
        """
        return [t for name, value in self._leaves() for t in tensors_in(value, name)]

    def with_values(self, values: Sequence[object], *, apart: bool = False) -> "Arguments":
        """The same call with other leaves.

        >>> Arguments.of(lambda x: x, (1,), {}).with_values([2]).values
        (2,)

        Args:
            values: The new leaves.
            apart: Clone every leaf by itself.
        """
        return replace(self, values=tuple(values), apart=apart)

    def clone(self, cloner: Cloner) -> Call:
        """Make fresh arguments.

        >>> Arguments.of(lambda x: x, (1,), {}).clone(Cloner(Contents({}))).args
        (1,)

        Args:
            cloner: Makes the copies.
        """
        values: list[object] = []
        tensors: list[Named] = []
        leaves: list[Named] = []
        for name, value in self._leaves():
            own = Cloner(cloner.contents) if self.apart else cloner
            values.append(own.value(value))
            for where, tensor in tensors_in(values[-1], name):
                tensors.append((where, tensor))
                leaves.append((where, own.leaf_behind(tensor)))
                if tensor._is_view() and tensor._base is not None:
                    tensors.append((f"base of {where}", tensor._base))
                    leaves.append((f"base of {where}", own.leaf_behind(tensor._base)))
        args, kwargs = pytree.unflatten(self.tree, values)
        whole = tuple(zip(self.arguments, (*args, *kwargs.values()), strict=True))
        pairs = zip(self.names, values, strict=True)
        generators = tuple((name, value) for name, value in pairs if isinstance(value, Generator))
        return Call(args, kwargs, tuple(tensors), tuple(leaves), generators, whole)

    def _leaves(self) -> list[tuple[str, object]]:
        return list(zip(self.names, self.values, strict=True))


@dataclass(frozen=True)
class _Kept:
    """How one held tensor was, so that it can be put back."""

    tensor: Tensor
    storage: UntypedStorage
    key: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    is_leaf: bool
    requires_grad: bool
    grad: Tensor | None

    @staticmethod
    def of(tensor: Tensor, key: int) -> "_Kept":
        layout = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        grad = tensor.grad if tensor.is_leaf else None
        kept_grad = None if grad is None else grad.detach().clone()
        flags = tensor.is_leaf, tensor.requires_grad
        return _Kept(tensor, tensor.untyped_storage(), key, *layout, *flags, kept_grad)

    def put_back(self, contents: Contents) -> None:
        tensor, bytes_then = self.tensor, contents.storages[self.key]
        if self.is_leaf and not tensor.is_leaf:
            tensor.detach_()
        if self.storage.nbytes() != bytes_then.nbytes():
            self.storage.resize_(bytes_then.nbytes())
        self.storage.copy_(bytes_then, non_blocking=False)
        now = tensor.storage_offset(), tensor.size(), tensor.stride()
        moved = tensor.untyped_storage().data_ptr() != self.storage.data_ptr()
        if moved or now != (self.offset, self.size, self.stride):
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = empty.set_(self.storage, self.offset, self.size, self.stride)
        if self.is_leaf:
            tensor.requires_grad_(self.requires_grad)
            tensor.grad = None if self.grad is None else self.grad.clone()


class State:
    """The tensors that a callable holds between calls, and how they were before the first.

    >>> linear = nn.Linear(1, 1)
    >>> state = State([("", linear)], [], {})
    >>> contents = Contents.of(linear.parameters())
    >>> _ = nn.init.constant_(linear.bias, 5.0)
    >>> state.put_back(contents)
    >>> linear.bias.item() == 5.0
    False

    Args:
        modules: Modules with the prefix under which the user reaches them.
        tensors: Tensors outside any module.
        keys: The `storage_key` in the contents for a held tensor's identity, where it is not its own.
    """

    def __init__(
        self, modules: Sequence[tuple[str, nn.Module]], tensors: Sequence[Named], keys: Mapping[int, int]
    ) -> None:
        self._modules = tuple(modules)
        self._loose = tuple(tensors)
        self._attributes = [
            (module, dict(vars(module)), [(held, dict(held)) for held in _registries(module)])
            for _, root in self._modules
            for module in root.modules()
        ]
        unique = {id(part): part for _, tensor in self.tensors() for part in plain_parts(tensor)}
        self._kept = [
            _Kept.of(part, keys.get(id(part), storage_key(part))) for part in unique.values() if has_storage(part)
        ]

    def tensors(self) -> list[Named]:
        """What is held now.

        >>> [name for name, _ in State([("net.", nn.Linear(1, 1, bias=False))], [], {}).tensors()]
        ['parameter net.weight']
        """
        held = [named for prefix, module in self._modules for named in module_tensors(module, prefix)]
        return held + list(self._loose)

    def put_back(self, contents: Contents) -> None:
        """Make everything as it was, with the given bytes.

        >>> State([], [], {}).put_back(Contents({}))

        Args:
            contents: The bytes of each storage.
        """
        for module, attributes, registries in self._attributes:
            now = vars(module)
            for name in [n for n, value in now.items() if isinstance(value, Tensor) and n not in attributes]:
                del now[name]
            now.update(attributes)
            for registry, entries in registries:
                registry.clear()
                registry.update(entries)
        with torch.no_grad():
            for kept in self._kept:
                kept.put_back(contents)


def _registries(module: nn.Module) -> list[dict[str, Any]]:
    return [module._parameters, module._buffers, module._modules]


@dataclass(frozen=True)
class Side:
    """One of the two that are compared: what is called, and what it holds.

    >>> side = Program.of(torch.sin, (torch.zeros(1),), {}).side(lambda fn: fn)
    >>> side.target is torch.sin
    True

    Args:
        target: What is called.
        state: What it holds.
        cloner: Knows what the arguments share with what it holds.
    """

    target: Callable[..., Any]
    state: State
    cloner: Cloner

    def prepare(self, arguments: Arguments, contents: Contents) -> Call:
        """Put the state back and make fresh arguments.

        >>> program = Program.of(torch.sin, (torch.zeros(1),), {})
        >>> program.side(lambda fn: fn).prepare(program.arguments, program.contents).args
        (tensor([0.]),)

        Args:
            arguments: The arguments to clone.
            contents: The bytes behind arguments and state.
        """
        with torch.inference_mode(False):
            self.state.put_back(contents)
            return arguments.clone(Cloner(contents, like=self.cloner))


@dataclass(frozen=True)
class Program:
    """A function or a module with the arguments to call it with.

    >>> program = Program.of(nn.Linear(2, 1), (torch.ones(2),), {})
    >>> len(program.contents.storages)
    3

    Args:
        fn: The function or module.
        arguments: Its arguments.
        held: What it holds, by name.
        contents: The bytes behind all of them.
    """

    fn: Callable[..., Any]
    arguments: Arguments
    held: tuple[Named, ...]
    contents: Contents

    @staticmethod
    def of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Program":
        """Look at a function, what it holds, and its arguments, and remember all values.

        >>> Program.of(torch.sin, (1,), {}).held
        ()

        Args:
            fn: The function or module.
            args: The positional arguments.
            kwargs: The keyword arguments.
        """
        arguments = Arguments.of(fn, args, kwargs)
        held = tuple(module_tensors(fn) if isinstance(fn, nn.Module) else _outside(fn).tensors())
        tensors = [tensor for _, tensor in arguments.tensors() + list(held)]
        return Program(fn, arguments, held, Contents.of(tensors))

    def tensors(self) -> list[Tensor]:
        """Every tensor that a call can reach.

        >>> Program.of(torch.sin, (torch.zeros(1),), {}).tensors()
        [tensor([0.])]
        """
        return [tensor for _, tensor in self.arguments.tensors() + list(self.held)]

    def outside(self) -> State:
        """What a function closes over, which both sides share; a module is copied, so that nothing is shared.

        >>> scale = torch.ones(1)
        >>> Program.of(lambda x: x * scale, (scale,), {}).outside().tensors()
        [('captured scale', tensor([1.]))]
        """
        return State([], [], {}) if isinstance(self.fn, nn.Module) else _outside(self.fn)

    def side(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Side:
        """Build one side: a module is copied, a function keeps what it closes over.

        >>> Program.of(torch.sin, (), {}).side(lambda fn: abs).target
        <built-in function abs>

        Args:
            make: Turns the function or module into what is called.
        """
        cloner = Cloner(self.contents)
        if not isinstance(self.fn, nn.Module):
            for _, tensor in self.held:
                cloner.adopt(tensor)
            return Side(make(self.fn), self.outside(), cloner)
        with torch.inference_mode(False):
            memo: dict[int, object] = {id(tensor): cloner.tensor(tensor) for _, tensor in self.held}
            module = copy.deepcopy(self.fn, memo)
        originals = {id(memo[id(tensor)]): tensor for _, tensor in self.held}
        keys = {
            id(own): storage_key(part)
            for _, clone in module_tensors(module)
            if id(clone) in originals
            for own, part in zip(plain_parts(clone), plain_parts(originals[id(clone)]), strict=True)
            if has_storage(part)
        }
        return Side(make(module), State([("", module)], [], keys), cloner)


def _outside(fn: Callable[..., Any]) -> State:
    """What a function reaches through its closure, its globals and the object it is bound to."""
    modules: list[tuple[str, nn.Module]] = []
    tensors: list[Named] = []
    for name, value in captured(fn).items():
        for where, leaf in unfold(value, name).leaves.items():
            if isinstance(leaf, nn.Module):
                modules.append((f"{where}.", leaf))
            elif isinstance(leaf, Tensor):
                tensors.append((f"captured {where}", leaf))
    return State(modules, tensors, {})
