"""Nested tensors of the strided layout, as a TransformerEncoder makes them: a batch without its padding.

The sizes of such a tensor are data, which recorded tensors do not have. The padded batch has sizes: it stands for the
nested tensor, with a mask that tells its rows from padding. In graphs, an operator that wants the nested tensor makes
it, runs, and pads its result again, which changes no number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import NestedStandIn, nested_by_mask
from ..errors import UnsupportedError
from ..ops import aten
from ..stack_traces import Stack, user_stack, where

_LAYER = aten._transformer_encoder_layer_fwd.default
_NEEDED = sum(not argument.has_default_value() for argument in _LAYER._schema.arguments)

MAKES_STRIDED_NESTED = frozenset(
    map(
        id,
        (
            *(aten._nested_tensor_from_tensor_list.default, aten._nested_tensor_from_mask.default),
            *(aten._nested_tensor_from_mask_left_aligned.default, aten._nested_from_padded.default),
        ),
    )
)
"""Operators, by their ids, that make a nested tensor whose sizes are data, or ask for one."""

library = torch.library.Library("foregrad", "FRAGMENT")
library.define(
    str(_LAYER._schema)
    .removeprefix("aten::_")
    .replace("transformer_encoder_layer_fwd(Tensor src, ", "encoder_layer_of_nested(Tensor src, Tensor rows, ")
)


def _encoder_layer_of_nested(src: Tensor, rows: Tensor, *others: Any) -> Tensor:
    return _LAYER(nested_by_mask(src, rows), *others).to_padded_tensor(0.0, src.shape)


library.impl("encoder_layer_of_nested", _encoder_layer_of_nested, "CompositeExplicitAutograd")
torch.library.register_fake(
    "foregrad::encoder_layer_of_nested", lambda src, rows, *others: src.new_empty(src.shape), lib=library
)


def strided_nested(stack: Stack) -> UnsupportedError:
    """The refusal of a nested tensor of the strided layout."""
    return UnsupportedError(
        f"a nested tensor of the strided layout is made or used, at {where(stack)}: its sizes are data, which recorded "
        "tensors do not have. Make one with layout=torch.jagged; of a TransformerEncoder, set "
        "enable_nested_tensor=False, or compile with fallback='eager'."
    )


class PaddedBatch(NestedStandIn):
    """What a program sees of a nested tensor while it is recorded."""

    padded: Tensor
    rows: Tensor

    @staticmethod
    def __new__(cls, padded: Tensor, rows: Tensor) -> PaddedBatch:
        made: PaddedBatch = cls.like(padded)
        made.padded, made.rows = padded, rows
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["padded", "rows"], None

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], meta: None, size: Any, stride: Any) -> PaddedBatch:
        return PaddedBatch(inner["padded"], inner["rows"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What becomes of it, for what a TransformerEncoder does; its sizes are nobody's to ask."""
        batch = args[0]
        if type(batch) is PaddedBatch and not kwargs:
            if op is aten.dim.default:
                return batch.padded.dim()
            if op is _LAYER and all(arg is None for arg in args[_NEEDED:]):  # torch has none with a mask
                layer = torch.ops.foregrad.encoder_layer_of_nested.default
                return PaddedBatch(layer(batch.padded, batch.rows, *args[1:_NEEDED]), batch.rows)
            if op is aten.to_padded_tensor.default and args[2:] == ([*batch.padded.shape],):
                return torch.where(batch.rows.unsqueeze(-1), batch.padded, args[1])
        raise strided_nested(user_stack(2))


def _rows(mask: Tensor) -> Tensor:
    """Which rows the nested tensor has: as many as are marked, and the first ones, whichever they are."""
    return torch.arange(mask.shape[1], device=mask.device) < mask.sum(1, keepdim=True)


def _fits(t: Tensor, mask: Tensor) -> bool:
    return t.dim() == 3 and mask.dtype is torch.bool and tuple(mask.shape) == tuple(t.shape[:2])


def _from_mask(t: Tensor, mask: Tensor, mask_check: bool = True) -> Any:
    """The stand-in, where the mask is not to be checked, and the nested tensor not differentiated."""
    if mask_check or not _fits(t, mask) or (torch.is_grad_enabled() and t.requires_grad):
        return NotImplemented
    return PaddedBatch(t, _rows(mask))


def _is_left_aligned(t: Tensor, mask: Tensor) -> Any:
    return bool((_rows(mask) == mask).all()) if _fits(t, mask) else NotImplemented  # the program reads it


AS_PADDED_BATCH: Mapping[Any, Callable[..., Any]] = {
    aten._nested_tensor_from_mask.default: _from_mask,
    aten._nested_tensor_from_mask_left_aligned.default: _is_left_aligned,
}
"""What happens in place of operators that make nested tensors; `NotImplemented` where they are refused."""
