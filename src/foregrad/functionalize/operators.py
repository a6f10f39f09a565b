"""Operators of our own: functional forms that ATen lacks.

They are registered like any custom operator, with shape inference, so that compilers can call them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload
from ..ops import aten

library = torch.library.Library("foregrad", "DEF")

# The stream of an in-place random operator depends on the memory layout that it fills. ATen's functional forms fill a
# contiguous tensor; this one fills a fresh tensor of any layout, by the in-place operator itself.
library.define(
    "random_fill(str op, SymInt[] size, SymInt[] stride, Scalar[] parameters, *, ScalarType dtype, Device device, "
    "Generator? generator=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)

# oneDNN's recurrent layer keeps its workspace for the backward only while gradients are on; graphs run with them off.
library.define(
    "recurrent_layer(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, Tensor hx_, "
    "Tensor cx_, bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, bool has_biases, "
    "bool bidirectional, bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _random_fill(
    op: str,
    size: Sequence[int],
    stride: Sequence[int],
    parameters: Sequence[Any],
    *,
    dtype: Any,
    device: Any,
    generator: Any = None,
) -> Tensor:
    name, _, overload = op.partition(".")
    target = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return getattr(getattr(aten, name), overload)(target, *parameters, generator=generator)


def _random_fill_shape(
    op: str,
    size: Sequence[int],
    stride: Sequence[int],
    parameters: Sequence[Any],
    *,
    dtype: Any,
    device: Any,
    generator: Any = None,
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _recurrent_layer(*args: Any) -> Any:
    with torch.enable_grad():
        return aten.mkldnn_rnn_layer.default(*args)


library.impl("random_fill", _random_fill, "CompositeExplicitAutograd")
library.impl("recurrent_layer", _recurrent_layer, "CPU")
torch.library.register_fake("foregrad::random_fill", _random_fill_shape, lib=library)
torch.library.register_fake(
    "foregrad::recurrent_layer", lambda *args: aten.mkldnn_rnn_layer.default(*args), lib=library
)

RANDOM_FILL: OpOverload = torch.ops.foregrad.random_fill.default

# Operators that must be replaced where a graph runs with gradients off.
IN_GRAPHS: dict[OpOverload, OpOverload] = {
    aten.mkldnn_rnn_layer.default: torch.ops.foregrad.recurrent_layer.default,
}
