"""Derivatives of derivatives of determinants, which autograd chooses by the data of a matrix.

The gradient of a determinant is found by solving a system, or from the singular values where the matrix is singular. If
it is to be differentiated again, autograd looks at the determinant first, and cannot for abstract tensors: it takes the
singular values always, whose derivatives are not finite where two of them are equal. So the gradient is computed here
in both ways, each for matrices that it is good for, and the determinant chooses in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._torch import name_of_node, saved_of_determinant

_NODE = "LinalgDetBackward0"
_FOLLOWED = "foregrad: its gradient can be differentiated"  # a mark on nodes
_SINGULAR = 100  # determinants below so many times the precision of the dtype: what autograd takes for zero


def follow_determinants(nodes: Iterable[Any]) -> None:
    """Let these nodes of a tape, where they belong to determinants, give gradients that can be differentiated."""
    for node in nodes:
        if node is not None and name_of_node(node) == _NODE and _FOLLOWED not in node.metadata:
            node.metadata[_FOLLOWED] = True
            node.register_hook(_replaced)


def _replaced(gradients: tuple[Tensor | None, ...], tangents: tuple[Tensor | None, ...]) -> Any:
    """A hook of autograd: what stands in place of the gradient that the node has found."""
    (gradient,), tangent = gradients, tangents[0]
    if not torch.is_grad_enabled() or gradient is None or tangent is None or not gradient.numel():
        return None
    return (_gradient(*saved_of_determinant(), tangent),)


def _gradient(matrix: Tensor, determinant: Tensor, tangent: Tensor) -> Tensor:
    """The gradient of a determinant for its tangent, in operators that can be differentiated in turn."""
    zero = _SINGULAR * torch.finfo(matrix.dtype).eps
    singular = (determinant.abs() < zero)[..., None, None]
    size = matrix.shape[-1]
    options: dict[str, Any] = {"dtype": matrix.dtype, "device": matrix.device}
    regular_ones = torch.where(singular, torch.eye(size, **options), matrix)
    scale = (tangent * _determinant(regular_ones).conj()).unsqueeze(-1).expand(matrix.shape[:-1])
    by_solving = torch.linalg.solve_ex(regular_ones.mH, torch.diag_embed(scale))[0]
    distinct = torch.diag(torch.arange(1, size + 1, device=matrix.device).to(matrix.dtype))
    by_values = _by_singular_values(torch.where(singular, matrix, distinct), tangent)
    return torch.where(singular, by_values, by_solving)


def _by_singular_values(matrix: Tensor, tangent: Tensor) -> Tensor:
    """The same from the products of all singular values but one."""
    left, values, right = torch.linalg.svd(matrix)
    one = torch.ones_like(values[..., :1])
    before = torch.cat([one, values[..., :-1]], -1).cumprod(-1)
    behind = torch.cat([one, values[..., 1:].flip(-1)], -1).cumprod(-1).flip(-1)
    weights = ((_determinant(left) * _determinant(right)).conj() * tangent).unsqueeze(-1) * (before * behind)
    return (left * weights.unsqueeze(-2)) @ right


def _determinant(matrix: Tensor) -> Tensor:
    found = torch.linalg.det(matrix)
    follow_determinants([found.grad_fn])
    return found
