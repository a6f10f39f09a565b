"""Sizes that may change, as `torch.export` spells them: arguments become fake tensors with symbols for these sizes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import SymInt, Tensor, nn

from .._torch import (
    FakeTensor,
    FakeTensorMode,
    conditions_beside_ranges,
    expression_of,
    named_symbol,
    new_fake_mode,
    new_shape_env,
    pytree,
    symbol_range,
)
from ..errors import ExportError
from ..subclasses.layout import is_wrapper

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


@dataclass
class Symbols:
    """The symbols of one export, by the names of their dimensions."""

    mode: FakeTensorMode
    sizes: dict[str, Any] = field(default_factory=dict)  # symbolic sizes
    wanted: dict[str, Any] = field(default_factory=dict)  # the ranges that were asked for
    may_be_fixed: set[str] = field(default_factory=set)  # `Dim.AUTO`
    may_be_related: set[str] = field(default_factory=set)  # `Dim.AUTO` and `Dim.DYNAMIC`

    @property
    def _env(self) -> ShapeEnv:
        assert self.mode.shape_env is not None
        return self.mode.shape_env

    def size(self, dim: Any, actual: int, where: str) -> Any:
        """The size for one entry of `dynamic_shapes`."""
        if dim is None or _hint(dim) == "STATIC":
            return actual
        if isinstance(dim, int):
            if dim != actual:
                raise ExportError(f"{where} has size {actual}, but dynamic_shapes says {dim}.")
            return actual
        if _hint(dim) is not None:
            self.may_be_related.add(where)
            if _hint(dim) == "AUTO":
                self.may_be_fixed.add(where)
            return self._symbol(where, actual, where, dim.min, dim.max)
        root = getattr(dim, "root", None)
        if root is not None:  # a dimension that is computed from another
            if root.__name__ not in self.sizes:
                raise ExportError(f"{where} is {dim.__name__}: its {root.__name__} must stand at an earlier place.")
            size = dim.fn(self.sizes[root.__name__])
            self._require(size, actual, where)
            return size
        name = getattr(dim, "__name__", None)
        if name is None or not hasattr(dim, "min"):
            raise ExportError(f"{where}: {dim!r} is no torch.export.Dim, and no size.")
        return self._symbol(name, actual, where, dim.min, dim.max)

    def _symbol(self, name: str, actual: int, where: str, low: Any = None, high: Any = None) -> Any:
        if name not in self.sizes:
            if actual < 2:
                raise ExportError(
                    f"{where} has size {actual}. An example of a size that may change must have at least 2 there: "
                    "programs treat 0 and 1 otherwise, by broadcasting."
                )
            if (low is not None and actual < low) or (high is not None and actual > high):
                raise ExportError(f"{where} has size {actual}, which is outside of [{low}, {high}] for {name}.")
            self.sizes[name] = named_symbol(self._env, name, actual, low, high)
            self.wanted[name] = symbol_range(self._env, expression_of(self.sizes[name]))
        self._require(self.sizes[name], actual, where)
        return self.sizes[name]

    def _require(self, size: Any, actual: int, where: str) -> None:
        if size.node.hint != actual:
            raise ExportError(
                f"{where} has size {actual}, but its dimension in dynamic_shapes has size {size.node.hint} elsewhere."
            )

    def ranges(self) -> dict[Any, Any]:
        """The range of each symbol after the recording, if the program holds for all that was asked for."""
        found: dict[Any, Any] = {}
        owners: dict[Any, str] = {}
        for name, size in self.sizes.items():
            symbol = expression_of(size)
            if not symbol.is_symbol or symbol in owners:
                if name not in (self.may_be_fixed if symbol.is_number else self.may_be_related):
                    raise ExportError(
                        f"the program works only where {name} is {owners.get(symbol, symbol)}. Leave it out of "
                        "dynamic_shapes, say so there, or change what depends on it."
                    )
                continue
            owners[symbol] = name
            found[symbol] = symbol_range(self._env, symbol)
            if found[symbol] != self.wanted[name] and name not in self.may_be_related:
                low, high = found[symbol].lower, found[symbol].upper
                raise ExportError(
                    f"the program works only where {low} <= {name} <= {high}. Say so: torch.export.Dim({name!r}, "
                    f"min={low}, max={high})."
                )
        for condition in conditions_beside_ranges(self._env):
            names = ", ".join(f"{symbol} is {name}" for symbol, name in owners.items())
            raise ExportError(
                f"the program works only where {condition} ({names}): it cannot be exported for all of these sizes."
            )
        return found


def ranges_of_fakes(values: Any) -> dict[Any, Any]:
    """The ranges of the symbols in fake arguments that the caller has made."""
    found: dict[Any, Any] = {}
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, FakeTensor) and leaf.fake_mode.shape_env is not None:
            for size in leaf.shape:
                if isinstance(size, SymInt):
                    env = leaf.fake_mode.shape_env
                    found |= {symbol: symbol_range(env, symbol) for symbol in expression_of(size).free_symbols}
    return found


def _hint(dim: Any) -> str | None:
    """AUTO, DYNAMIC or STATIC."""
    kind = getattr(dim, "type", None)
    return getattr(kind, "name", None) if type(dim).__name__ == "_DimHint" else None


def with_symbolic_sizes(
    mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> tuple[tuple[Any, ...], dict[str, Any], Symbols]:
    """The example call with fake tensors where `dynamic_shapes` says that a size may change."""
    symbols = Symbols(new_fake_mode(new_shape_env(duck_shape=False), for_all_sizes=True))
    names, starred = _names(mod, args, kwargs)
    if isinstance(dynamic_shapes, (tuple, list)):
        if len(dynamic_shapes) != len(names):
            raise ExportError(f"dynamic_shapes has {len(dynamic_shapes)} entries for {len(names)} arguments.")
        specs = dict(zip(names, dynamic_shapes, strict=True))
    elif isinstance(dynamic_shapes, Mapping):
        specs = dict(dynamic_shapes)
    else:
        raise ExportError(f"dynamic_shapes must be a dict, a tuple or a list, not {type(dynamic_shapes).__name__}.")
    unknown = specs.keys() - set(names)
    if unknown:
        raise ExportError(f"dynamic_shapes names {sorted(unknown)}, but the arguments are {', '.join(names)}.")
    positional = [name for name in names if name not in kwargs]
    named = positional.index(starred) if starred is not None else len(args)
    new_args = [_replaced(v, specs.get(n), n, symbols) for v, n in zip(args[:named], positional, strict=False)]
    if starred is not None:
        new_args += _replaced(args[named:], specs.get(starred), starred, symbols)
    new_kwargs = {key: _replaced(value, specs.get(key), key, symbols) for key, value in kwargs.items()}
    return tuple(new_args), new_kwargs, symbols


def _names(mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[str], str | None]:
    """The names of the arguments, as `forward` calls them, and the one that further positional ones share."""
    try:
        bound = inspect.signature(mod.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ExportError(f"the example arguments do not fit forward: {error}") from error
    names: list[str] = []
    starred = None
    for name in bound.arguments:
        kind = bound.signature.parameters[name].kind
        starred = name if kind is inspect.Parameter.VAR_POSITIONAL else starred
        if kind is inspect.Parameter.VAR_KEYWORD:
            names += list(bound.arguments[name])
        else:
            names.append(name)
    return names, starred


def _replaced(value: Any, spec: Any, where: str, symbols: Symbols) -> Any:
    if spec is None:
        return value
    if isinstance(value, Tensor):
        return _symbolic_tensor(value, spec, where, symbols)
    if isinstance(value, (list, tuple)) and isinstance(spec, (list, tuple)) and len(spec) == len(value):
        items = [_replaced(v, s, f"{where}[{i}]", symbols) for i, (v, s) in enumerate(zip(value, spec, strict=True))]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict) and isinstance(spec, Mapping) and spec.keys() <= value.keys():
        return {k: _replaced(v, spec.get(k), f"{where}[{k!r}]", symbols) for k, v in value.items()}
    raise ExportError(f"dynamic_shapes does not fit {where}, which is a {type(value).__name__}.")


def _symbolic_tensor(tensor: Tensor, spec: Any, where: str, symbols: Symbols) -> Tensor:
    if is_wrapper(tensor):
        raise ExportError(
            f"{where} is a {type(tensor).__name__}: the sizes of a tensor subclass cannot be symbols here."
        )
    dims = dict(enumerate(spec)) if isinstance(spec, (list, tuple)) else spec
    if not isinstance(dims, Mapping) or not all(isinstance(d, int) and 0 <= d < tensor.dim() for d in dims):
        raise ExportError(f"dynamic_shapes does not fit {where}, a tensor of {tensor.dim()} dimensions: {spec!r}.")
    sizes = [symbols.size(dims.get(d), n, f"{where}.shape[{d}]") for d, n in enumerate(tensor.shape)]
    if not any(isinstance(n, SymInt) for n in sizes):
        return tensor
    with symbols.mode, torch.no_grad():
        fake = torch.empty_strided(sizes, _strides(tensor, sizes, where), dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_(tensor.requires_grad)


def _strides(tensor: Tensor, sizes: list[Any], where: str) -> list[Any]:
    """The strides of a tensor whose elements lie one after another, for other sizes."""
    strides: list[Any] = [1] * tensor.dim()
    expected, step = 1, None
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]))
    if tensor.is_contiguous():
        order = list(reversed(range(tensor.dim())))
    for d in order:
        strides[d] = 1 if step is None else step
        if tensor.shape[d] != 1 and tensor.stride(d) != expected:
            raise ExportError(f"{where} has gaps between its elements: pass a contiguous copy of it.")
        expected = expected * tensor.shape[d]
        step = strides[d] * sizes[d]
    return strides
