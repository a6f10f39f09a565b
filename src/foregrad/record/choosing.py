"""Compositions that choose a kernel by whether an argument is a tensor subclass.

While a program is recorded every tensor counts as one, and eager would take the other kernel, which lays its result
otherwise in memory or rounds it otherwise. Where no gradient is needed the composition stays whole: the graph then
chooses as eager does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..ops import aten
from ..subclasses.layout import is_wrapper

CHOOSES_BY_SUBCLASS = frozenset({aten.max_pool1d.default, aten.linalg_svdvals.default, aten.linalg_eigvalsh.default})

# What calls them. Below autograd a composition comes to the recorder before it is taken apart.
_POOLING = (torch.max_pool1d, functional.max_pool1d, aten.max_pool1d, aten.max_pool1d.default)
_SPECTRAL = (torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.cond, torch.linalg.matrix_rank)
_NORMS = (torch.linalg.norm, torch.linalg.matrix_norm, torch.norm, torch.nuclear_norm, Tensor.norm)
FUNCTIONS_THAT_CHOOSE = frozenset({*_POOLING, *_SPECTRAL, *_NORMS})


def needs_no_gradient(given: Iterable[Any]) -> bool:
    """Whether a call with these arguments, none of which is a subclass in eager, is not differentiated."""
    tensors = [value for value in given if isinstance(value, Tensor)]
    followed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not followed and not any(map(is_wrapper, tensors))
