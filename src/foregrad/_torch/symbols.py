"""Symbolic sizes: their environment, the guards over them, and what a user's code sees of them.

torch's own modules for them load sympy, which takes as long as all of Foregrad: they are loaded by the first function
that needs them, and so not at all for a program whose sizes are numbers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .guards import Replaced

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, StatelessSymbolicContext

_BETWEEN = frozenset({*sys.stdlib_module_names, "sympy", "mpmath"})  # who asks on behalf of others


def _asking_code() -> types.CodeType | None:
    """The code that asks for an attribute, past the library functions that it asks with."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _BETWEEN:
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _class_as_asked(plain: type, is_users: Callable[[types.CodeType], bool]) -> Callable[[Any, str], Any]:
    def attribute(symbol: Any, name: str) -> Any:
        if name == "__class__":
            code = _asking_code()
            if code is not None and is_users(code):
                return plain
        return object.__getattribute__(symbol, name)

    return attribute


@functools.cache
def sizes_like_numbers(is_users: Callable[[types.CodeType], bool]) -> Sequence[contextlib.AbstractContextManager[Any]]:
    """In these contexts `isinstance` takes symbolic numbers for plain ones, where the user's code asks.

    It asks a value for its class. Torch itself must tell symbols from numbers.
    """
    kinds = ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool))
    return [Replaced(kind, "__getattribute__", _class_as_asked(plain, is_users)) for kind, plain in kinds]


def new_shape_env(duck_shape: bool | None = None) -> ShapeEnv:
    """An environment for symbolic sizes; `duck_shape` gives equal sizes one symbol, as torch does unless it is told."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv(duck_shape=duck_shape)


def shape_env_of_reads() -> ShapeEnv:
    """An environment for sizes that a program reads: any of them may be 0 or 1, and none is that of an input."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv(
        allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, specialize_zero_one=False, duck_shape=False
    )


def sizes_of_any_kind() -> contextlib.AbstractContextManager[Any]:
    """In this context torch does not ask whether a symbolic size is 0 or 1, to lay a tensor out otherwise then."""
    import torch.fx.experimental._config as config

    return config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


def sizes_told_apart() -> contextlib.AbstractContextManager[Any]:
    """In this context, inside of the one above, torch asks again, and guards: it chooses a kernel by it, or a size."""
    import torch.fx.experimental._config as config

    return config.patch(backed_size_oblivious=False)  # type: ignore[attr-defined]


def read_symbol(shape_env: ShapeEnv, name: str, value: int, is_size: bool) -> Any:
    """A symbolic number that a program has read."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    from torch.utils._sympy.value_ranges import ValueRanges

    source = local_source(name)
    symbol = shape_env.create_symbol(
        value, source, dynamic_dim=DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True
    )
    if is_size:  # as a range: where sympy itself takes a symbol for positive, it drops the guard of `n > 0`
        known = shape_env.var_to_range[symbol]
        shape_env.var_to_range[symbol] = ValueRanges(0, known.upper)
    return shape_env.create_symintnode(symbol, hint=value, source=source)


def conditions_on_symbols(shape_env: ShapeEnv) -> list[tuple[str, frozenset[str]]]:
    """What a recording assumed about symbols, as Python text, each with the names of the symbols in it."""
    from torch.utils._sympy.printers import PythonPrinter

    printed = PythonPrinter()
    found = {
        printed.doprint(guard.expr): frozenset(str(symbol) for symbol in guard.expr.free_symbols)
        for guard in shape_env.guards
    }
    return [(text, names) for text, names in found.items() if names]


def condition_on_symbols(text: str, names: Sequence[str]) -> Callable[..., bool]:
    """A function of the values of symbols that evaluates such text."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    return eval(f"lambda {', '.join(names)}: {text}", dict(SYMPY_INTERP))


def free_symbols(value: Any) -> set[Any]:
    """The symbols in the sizes of a value."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return set(free_symbols(value))


def expression_of(value: Any) -> Any:
    """The sympy expression of a symbolic number."""
    return value.node.expr


@contextlib.contextmanager
def guards_noticed(shape_env: ShapeEnv) -> Iterator[Callable[[], bool]]:
    """Tells whether anything has been assumed about symbols since; a front end that has finished would not say so."""
    before, frozen = (len(shape_env.guards), len(shape_env.replacements)), shape_env.frozen
    shape_env.frozen = False
    try:
        yield lambda: (len(shape_env.guards), len(shape_env.replacements)) != before
    finally:
        shape_env.frozen = frozen


def hint_of(value: Any) -> int:
    """The number that a symbolic integer had while recording; asking for it adds no guard."""
    known: Any = value.node.hint if isinstance(value, torch.SymInt) else value
    return int(known)


def equal_for_all_sizes(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether numbers, symbolic ones among them, are written alike; to ask whether they are equal adds a guard."""

    def written(number: Any) -> Any:
        return number.node.expr if isinstance(number, torch.SymInt) else number

    return [*map(written, some)] == [*map(written, others)]


def sympy_functions() -> Any:
    """torch's own sympy functions: FloorDiv, Mod and the like."""
    from torch.utils._sympy import functions

    return functions


def shape_guard_expression(shape_env: ShapeEnv, placeholders: Sequence[Any]) -> str | None:
    """The guards that a recording added, as an expression over the placeholders."""
    return shape_env.produce_guards_expression(placeholders)


def shape_guard(expression: str, count: int) -> Callable[..., bool]:
    """A function of the inputs that evaluates such an expression."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    names = [f"t{i}" for i in range(count)]
    code = f"lambda {', '.join(names)}: (lambda L: {expression})({{{', '.join(f'{n!r}: {n}' for n in names)}}})"
    return eval(code, dict(SYMPY_INTERP))


def symbolic_context(tensor: torch.Tensor, dims: bool | frozenset[int]) -> StatelessSymbolicContext[Any, Any]:
    """The sizes of the tensor, all or these, are symbols of their own unless they equal others."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    changing = range(tensor.dim()) if isinstance(dims, bool) else dims
    kinds = [DimDynamic.DUCK if dim in changing else DimDynamic.STATIC for dim in range(tensor.dim())]
    return StatelessSymbolicContext(dynamic_sizes=kinds)


def local_source(name: str) -> Any:
    """A name for an input, in the form in which a shape environment wants it."""
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)


def argument_symbol(shape_env: ShapeEnv, name: str, value: int) -> Any:
    """A symbolic number that stands for an argument."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = local_source(name)
    symbol = shape_env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC, positive=None)
    return shape_env.create_symintnode(symbol, hint=value, source=source)


def named_symbol(shape_env: ShapeEnv, name: str, value: int, low: int | None, high: int | None) -> Any:
    """A symbolic size between two bounds; sizes 0 and 1 are left out, as programs decide by them."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    from torch.utils._sympy.value_ranges import ValueRanges

    source = local_source(name)
    symbol = shape_env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
    known = shape_env.var_to_range[symbol]
    bounds = ValueRanges(known.lower if low is None else max(low, 2), known.upper if high is None else high)
    shape_env._update_var_to_range(symbol, known & bounds)
    return shape_env.create_symintnode(symbol, hint=value, source=source)


def symbol_range(shape_env: ShapeEnv, symbol: Any) -> Any:
    """The values that a symbol may take, as the shape environment knows them now."""
    return shape_env.var_to_range[symbol]


def conditions_beside_ranges(shape_env: ShapeEnv) -> list[Any]:
    """What a recording assumed about symbols that the ranges of the symbols do not say."""
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    conditions = [shape_env.replace(guard.expr) for guard in shape_env.guards]
    return [c for c in conditions if not bool(bound_sympy(c, shape_env.var_to_range) == ValueRanges.wrap(True))]
