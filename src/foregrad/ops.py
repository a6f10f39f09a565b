"""What an operator does, read off its schema once.

The recorder and the passes ask the same few questions about every operator: is it a view, does it write, is it
random. The answers are computed once for each overload and kept in a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

import torch
from torch import Tensor

from ._torch import SET_GRAD_ENABLED, HigherOrderOperator, OpOverload, is_composite, takes_script_objects

aten = torch.ops.aten


class Kind(Enum):
    """The cases that a pass tells apart."""

    PURE = auto()
    VIEW = auto()
    WRITE = auto()
    RESHAPE = auto()  # changes size, stride or storage of its own argument: t_, unsqueeze_, set_
    HIGHER_ORDER = auto()
    SWITCH = auto()  # of the grad mode, in a program that is recorded above autograd


# Operators that write to running statistics although their schema does not say so.
SILENT_WRITERS: dict[OpOverload, tuple[int, ...]] = {
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.miopen_batch_norm.default: (3, 4),
}

# Operators that change the geometry of their first argument, where no tag says so.
_RESHAPING = ("aten::set_", "aten::resize_", "aten::resize_as_")

# Views that autograd is not told about.
SILENT_VIEWS = frozenset({aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten._unsafe_view.default})

# Views that are the same tensor for every purpose but autograd's.
IDENTITIES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default})

# What autograd saves of an operator (positions of arguments, of results) where the first backward may not read it all:
# gradients that are differentiated themselves are computed by other formulas, and flow into all results.
SAVED_FOR_HIGHER_ORDERS: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {
    aten._linalg_det.default: ((0,), (0, 1, 2)),
    aten._linalg_slogdet.default: ((0,), (0, 2, 3)),
    aten._linalg_solve_ex.default: ((0,), (0, 1, 2)),
    aten._linalg_svd.default: ((), (0, 1, 2)),
    aten._linalg_eigh.default: ((), (0, 1)),
    aten.linalg_eig.default: ((), (0, 1)),
    aten.linalg_qr.default: ((), (0, 1)),
    aten.linalg_lu.default: ((), (0, 1, 2)),
}

COLLECTIVES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem", "_dtensor"}
)
"""Namespaces of operators that other processes take part in."""


@dataclass(frozen=True, slots=True)
class ViewStep:
    """One call of a view operator: its arguments after the first, and which of several results was taken."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None
    with_grad: bool = True  # gradients were on
    in_place: OpOverload | None = None  # the operator that did it to the tensor itself
    counts_alone: bool = False  # it was `.data`, whose writes do not count for what it was taken from


Trait = Literal[
    "random",
    "composite",  # a composition of other operators
    "impure",  # must run although its result is not read
    "out",  # takes `out=` tensors, which it may resize
    "list",  # one of torch's in-place operators on lists of tensors
    "uncounted",  # abstract tensors do not count its writes, real ones do
    "objects",  # script objects are among its arguments
    "identity",  # gives its argument, for every purpose but autograd's
    "pointwise",  # computes each element from those at its place
]


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What is known about one operator."""

    kind: Kind
    traits: frozenset[Trait]  # names: to hash the members of an enum takes longer
    written: tuple[int, ...] = ()  # positions of the arguments that it writes to
    names: tuple[str, ...] = ()  # of its arguments; to ask the schema takes much longer

    @property
    def is_plain(self) -> bool:
        """Whether it does nothing but compute, or look at memory."""
        special = self.traits & {"random", "composite", "list", "objects"}
        return self.kind in (Kind.PURE, Kind.VIEW) and not special


_KNOWN: dict[int, tuple[Any, OpInfo]] = {}  # by id of the operator, which is kept: to hash one takes longer


def op_info(op: OpOverload | HigherOrderOperator) -> OpInfo:
    """Classify an operator.

    >>> op_info(torch.ops.aten.add_.Tensor).kind.name, op_info(torch.ops.aten.view.default).kind.name
    ('WRITE', 'VIEW')
    """
    known = _KNOWN.get(id(op))
    if known is None:
        known = _KNOWN[id(op)] = op, _classify(op)
    return known[1]


def _classify(op: OpOverload | HigherOrderOperator) -> OpInfo:
    if isinstance(op, HigherOrderOperator):
        return OpInfo(Kind.HIGHER_ORDER, frozenset({"impure"}))
    if op is SET_GRAD_ENABLED:
        return OpInfo(Kind.SWITCH, frozenset({"impure"}))
    arguments = op._schema.arguments
    declared = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    written = SILENT_WRITERS.get(op, declared)
    returns_alias = any(r.alias_info is not None for r in op._schema.returns)
    if torch.Tag.inplace_view in op.tags or op._schema.name in _RESHAPING:
        kind = Kind.RESHAPE
    elif written:
        kind = Kind.WRITE
    elif returns_alias or op in IDENTITIES or op in SILENT_VIEWS:
        kind = Kind.VIEW
    else:
        kind = Kind.PURE
    random = torch.Tag.nondeterministic_seeded in op.tags
    has_out = any(a.is_out for a in arguments)
    lists = kind is Kind.WRITE and op._schema.name.startswith("aten::_foreach_")
    traits: dict[Trait, bool] = {
        "random": random,
        "composite": is_composite(op),
        "impure": random or not op._schema.returns,
        "out": has_out,
        "list": lists,
        "uncounted": lists or (has_out and any("List" in str(arguments[i].type) for i in written)),
        "objects": takes_script_objects(op),
        "identity": op in IDENTITIES,
        "pointwise": torch.Tag.pointwise in op.tags,
    }
    found = frozenset(trait for trait, holds in traits.items() if holds)
    return OpInfo(kind, found, written, tuple(argument.name for argument in arguments))


def draws(op: OpOverload | HigherOrderOperator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers: attention without dropout is random by its tag only.

    >>> attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    >>> draws(attention, (None, None, None, 0.5), {}), draws(attention, (None, None, None), {"is_causal": True})
    (True, False)
    """
    info = op_info(op)
    if "random" not in info.traits or "dropout_p" not in info.names:
        return "random" in info.traits
    place = info.names.index("dropout_p")
    rate = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
    return not isinstance(rate, (int, float)) or rate != 0


def does_more(op: OpOverload | HigherOrderOperator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call does more than to compute its results."""
    traits = op_info(op).traits
    return "impure" in traits and ("random" not in traits or draws(op, args, kwargs))


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Tensors among arguments that may be nested in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def written_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call that the operator writes to."""
    info = op_info(op)
    return [args[i] if i < len(args) else kwargs.get(info.names[i]) for i in info.written]
