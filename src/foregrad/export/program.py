"""An exported program: a graph, its signature, the state of its module, and the checks on each call."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn

from .._torch import expression_of, pytree
from ..capturing.capture import Capture
from ..errors import ExportError, WeightsError
from ..ops import aten
from ..slots import Buffer, Param
from ..subclasses.layout import is_wrapper
from ..values import same_value
from .files import read, save, to_exported_program
from .graph import ExportedGraph, show
from .signature import ExportGraphSignature, InputKind, OutputKind
from .subclasses import Wrappers, plain_state, plain_weights, refuse_wrappers


# ---------------------------------------------------------------------------------------------------------------------
# Whether a call of an exported program is one that its graph was made for.
def checked_call(nodes: Sequence[fx.Node], values: Sequence[Any], ranges: dict[Any, Any]) -> list[Any]:
    """User inputs as the graph takes them, if they are like those that it was recorded on.

    Symbolic sizes must agree and lie in their ranges. A tensor that lies otherwise in memory is copied: the graph has
    views that are right for one layout only.
    """
    symbols: dict[Any, int] = {}
    pending: list[tuple[str, Any, int]] = []
    for node, value in zip(nodes, values, strict=True):
        expected = node.meta.get("val")
        if isinstance(expected, Tensor):
            pending += _check_tensor(node.name, expected, value)
        elif "val" in node.meta and not (type(value) is type(expected) and same_value(value, expected)):
            raise ExportError(f"{node.name} is {expected!r} in the exported program, which was called with {value!r}.")
    for place, size, actual in pending:
        expression = expression_of(size)
        if expression.is_symbol and expression not in symbols:
            symbols[expression] = actual
            if expression in ranges and actual not in ranges[expression]:
                bounds = ranges[expression]
                raise ExportError(f"{place} is {actual}, which is outside of {bounds.lower} to {bounds.upper}.")
    for place, size, actual in pending:
        wanted = expression_of(size).subs(symbols)
        if wanted != actual:
            raise ExportError(f"{place} is {actual}, but must be {wanted} ({expression_of(size)}).")
    return [_with_layout(node, value, symbols) for node, value in zip(nodes, values, strict=True)]


def _with_layout(node: fx.Node, value: Any, symbols: dict[Any, int]) -> Any:
    """A tensor with the strides that the graph was recorded for."""
    expected = node.meta.get("val")
    if not isinstance(expected, Tensor) or not value.numel():
        return value
    strides = [int(expression_of(n).subs(symbols)) if isinstance(n, SymInt) else n for n in expected.stride()]
    if all(n == m for size, n, m in zip(value.shape, strides, value.stride(), strict=True) if size > 1):
        return value
    if node.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        raise ExportError(
            f"{node.name} lies otherwise in memory than in the exported program, which reads memory by as_strided: "
            f"pass a tensor with the strides {tuple(strides)}."
        )
    with torch.no_grad():
        copy = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
        return value.detach().clone() if _repeats(copy) else copy.copy_(value)


def _repeats(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _check_tensor(name: str, expected: Tensor, value: Any) -> list[tuple[str, Any, int]]:
    if not isinstance(value, Tensor):
        raise ExportError(f"{name} must be a tensor, not {type(value).__name__}.")
    fits = value.dtype == expected.dtype and value.dim() == expected.dim()
    pairs = list(zip(expected.shape, value.shape, strict=False))
    if not fits or any(not isinstance(n, SymInt) and n != m for n, m in pairs):
        raise ExportError(
            f"{name} has shape {tuple(value.shape)} and dtype {value.dtype}, but the program was exported for "
            f"{tuple(expected.shape)} and {expected.dtype}."
        )
    return [(f"{name}.shape[{d}]", n, m) for d, (n, m) in enumerate(pairs) if isinstance(n, SymInt)]


# ---------------------------------------------------------------------------------------------------------------------
# An exported program: a graph, its signature, and the state of the module that it came from.
def state_of_module(module: nn.Module, capture: Capture) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Parameters and buffers by name, and which buffers a state dict leaves out."""
    hidden = {
        f"{prefix}.{key}" if prefix else key
        for prefix, child in module.named_modules(remove_duplicate=False)
        for key in child._non_persistent_buffers_set
    }
    state: dict[str, Tensor] = {}
    non_persistent: set[str] = set()
    for slot, place in capture.state:
        assert isinstance(slot, (Param, Buffer))
        plain = dict(plain_state(slot, place.owner[place.key]))
        state |= plain
        if isinstance(slot, Buffer) and slot.path in hidden:
            non_persistent |= plain.keys()
    return state, frozenset(non_persistent)


@dataclass(frozen=True, eq=False)
class Exported(ExportedGraph):
    """A program as one graph without side effects, with everything that is needed to run it.

    Calling it runs it on its state as the module would have run: new values of buffers are kept. A training step
    returns its result and the gradients by name; those of user inputs have the names of their nodes. A program with
    functional random numbers takes seeds and offsets by keyword, and returns the new offsets right after its result.
    """

    @cached_property
    def _specs(self) -> ExportGraphSignature:
        return self.specs

    @cached_property
    def _user_inputs(self) -> list[fx.Node]:
        wanted = set(self.signature.user_inputs)
        return [node for node in self.graph_module.graph.find_nodes(op="placeholder") if node.name in wanted]

    # ------------------------------------------------------------------------------------------- running
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        specs = self._specs
        kwargs, random = self._without_random(kwargs)
        args, kwargs = self._in_order(args, kwargs)
        together = self._takes_wrappers(args, kwargs)
        if together is not None:
            args, kwargs = together.take_apart(args, kwargs)
        flat = self._flat_arguments(args, kwargs)
        users = iter(checked_call(self._user_inputs, flat, self.ranges))
        values = [
            random[spec.arg.name] if spec.arg.name in random else self._input(spec, users) for spec in specs.input_specs
        ]
        with torch.no_grad():
            outputs = self.graph_module(*values)
        by_node = dict(zip(self.signature.user_inputs, flat, strict=True))
        results: list[Any] = []
        gradients: dict[str, Tensor] = {}
        writes: list[tuple[Tensor, Tensor]] = []
        for spec, value in zip(specs.output_specs, outputs, strict=True):
            match spec.kind:
                case OutputKind.BUFFER_MUTATION | OutputKind.PARAMETER_MUTATION:
                    writes.append((self.state[str(spec.target)], value))
                case OutputKind.USER_INPUT_MUTATION:
                    writes.append((by_node[str(spec.target)], value))
                case OutputKind.GRADIENT_TO_PARAMETER | OutputKind.GRADIENT_TO_USER_INPUT:
                    gradients[str(spec.target)] = value
                case OutputKind.USER_OUTPUT | OutputKind.LOSS_OUTPUT:
                    results.append(value)
                case OutputKind.TOKEN:
                    pass
        with torch.no_grad():
            for target, value in writes:
                target.detach().copy_(value)
        count = self.signature.out_spec.num_leaves
        offsets = dict(zip(self.signature.random_outputs.values(), results[count:], strict=True))
        results = results[:count]
        if together is not None:
            result = together.put_together(results)
        else:
            result = pytree.tree_unflatten(results, self.signature.out_spec)
        more: list[dict[str, Tensor]] = [offsets] if offsets else []
        more += [gradients] if self.signature.backward_signature is not None else []
        return (result, *more) if more else result

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keys of dicts, and keyword arguments, in the order in which the program was exported with them."""
        state = (0,) * self.signature.state_count
        together, kwargs = _ordered(((*state, *args), kwargs), self.signature.in_spec)
        return together[len(state) :], kwargs

    def _takes_wrappers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wrappers | None:
        """How to put tensors together, unless the call is one with the tensors inside of wrappers."""
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_wrapper(leaf)]
        if self.wrappers is None:
            refuse_wrappers(given)
            return None
        return self.wrappers if given or not any(self.wrappers.arguments) else None

    def _without_random(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keyword arguments, and by node the seeds and offsets among them."""
        wanted = self.signature.random_inputs
        missing = [role for role in wanted.values() if role not in kwargs]
        if missing:
            raise ExportError(
                f"the program takes the seed and the offset of its random numbers as arguments: pass "
                f"{', '.join(f'{role}=torch.tensor(...)' for role in missing)}."
            )
        rest = {key: value for key, value in kwargs.items() if key not in wanted.values()} if wanted else kwargs
        return rest, {node: torch.as_tensor(kwargs[role]) for node, role in wanted.items()}

    def _flat_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        count = self.signature.state_count
        leaves, spec = pytree.tree_flatten(((*[0] * count, *args), kwargs))
        if spec != self.signature.in_spec:
            raise ExportError("the program is called with another structure of arguments than it was exported with.")
        return leaves[count:]

    def _input(self, spec: Any, users: Iterator[Any]) -> Any:
        match spec.kind:
            case InputKind.PARAMETER | InputKind.BUFFER:
                return self.state[spec.target].detach()
            case InputKind.TOKEN:
                return torch.empty(0)
            case _:
                value = next(users)
                return value.detach() if isinstance(value, Tensor) and value.requires_grad else value

    # ------------------------------------------------------------------------------------------- weights
    def load_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Put other weights in; nothing is changed unless all of them fit."""
        wanted = self.state_dict
        if not isinstance(weights, Mapping):
            raise WeightsError(f"weights are a dict of tensors by name, not a {type(weights).__name__}.")
        weights = {path: part for name, tensor in weights.items() for path, part in plain_weights(name, tensor)}
        missing, unknown = wanted.keys() - weights.keys(), weights.keys() - wanted.keys()
        if missing or unknown:
            raise WeightsError(
                f"the weights do not fit: missing {sorted(missing) or 'nothing'}, unknown {sorted(unknown) or 'none'}."
            )
        for name, tensor in wanted.items():
            new = weights[name]
            if not isinstance(new, Tensor):
                raise WeightsError(f"{name} must be a tensor, not {type(new).__name__}.")
            if new.shape != tensor.shape or new.dtype != tensor.dtype:
                raise WeightsError(
                    f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype} in the exported program, but "
                    f"{tuple(new.shape)} and {new.dtype} in the weights."
                )
        for name, first in self.signature.ties.items():
            if name in wanted and not torch.equal(weights[name], weights[first]):
                raise WeightsError(f"{name} and {first} are one tensor in the exported program and differ here.")
        with torch.no_grad():
            copies = {name: _copied(weights[name], tensor, name) for name, tensor in wanted.items()}
            for name, tensor in wanted.items():
                tensor.copy_(copies[name])

    # ------------------------------------------------------------------------------------ printing, leaving
    def __str__(self) -> str:
        return self.show()

    def show(self, whole: bool = False) -> str:
        """A table of inputs and outputs, then the graph. Of a large program only the beginnings, if not `whole`."""
        return show(self, whole)

    def to_exported_program(self) -> Any:
        """The same as a `torch.export.ExportedProgram`. A training step returns (result, gradients by name)."""
        return to_exported_program(self)

    def save(self, path: Any) -> None:
        """Write the program, weights included, to a file that `load`, and `torch.export.load`, can read."""
        save(self, path)


def _copied(weight: Tensor, like: Tensor, name: str) -> Tensor:
    """A weight where the old one lies: what cannot be copied is found out before anything is changed."""
    try:
        if weight.is_meta:
            raise RuntimeError("it has no data")
        return torch.empty_like(like).copy_(weight)
    except (RuntimeError, NotImplementedError) as error:
        raise WeightsError(f"{name} cannot be taken from the weights: {error}") from error


def _ordered(value: Any, spec: Any) -> Any:
    """A nested value whose dicts have their keys in the order of a tree, where they have the same keys."""
    parts = [spec.child(i) for i in range(spec.num_children)] if hasattr(spec, "child") else spec.children_specs
    if spec.type is dict and type(value) is dict and value.keys() == set(spec.context):
        return {key: _ordered(value[key], part) for key, part in zip(spec.context, parts, strict=True)}
    if spec.type in (list, tuple) and type(value) is spec.type and len(value) == len(parts):
        return spec.type([_ordered(item, part) for item, part in zip(value, parts, strict=True)])
    return value


def load(path: str | os.PathLike[str], weights: Any = None) -> Exported:
    """Read an exported program; `weights` are put in the place of its own, all or none."""
    exported = Exported(**vars(read(path)))
    if weights is not None:
        exported.load_state_dict(weights)
    return exported
