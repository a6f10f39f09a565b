"""The same call with its tensors laid out in other ways: every class of layout, and sizes of one and of zero."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sweep.operators import Call


def is_dense(value: Any) -> bool:
    """Whether a value is a tensor that can be laid out in another way."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not (value.is_quantized or value.is_nested)


def _like(tensor: Tensor, empty: Tensor) -> Tensor:
    """The data of a tensor in memory that is laid out in another way."""
    return empty.copy_(tensor)


def contiguous(tensor: Tensor) -> Tensor:
    return _like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device))


def permuted(order: Callable[[int], list[int]]) -> Callable[[Tensor], Tensor]:
    """Memory that is contiguous in another order of the dimensions."""

    def lay(tensor: Tensor) -> Tensor:
        dims = order(tensor.dim())
        back = [dims.index(d) for d in range(tensor.dim())]
        memory = torch.empty([tensor.shape[d] for d in dims], dtype=tensor.dtype, device=tensor.device)
        return _like(tensor, memory.permute(back))

    return lay


def channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() not in (4, 5):
        return contiguous(tensor)
    form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return _like(tensor, empty.contiguous(memory_format=form))


def expanded(dim: int) -> Callable[[Tensor], Tensor]:
    """One element along a dimension, shown many times."""

    def lay(tensor: Tensor) -> Tensor:
        if not tensor.dim() or not tensor.numel():
            return contiguous(tensor)
        d = dim % tensor.dim()
        return contiguous(tensor.narrow(d, 0, 1)).expand(tensor.shape)

    return lay


def offset(tensor: Tensor) -> Tensor:
    memory = torch.empty(tensor.numel() + 5, dtype=tensor.dtype, device=tensor.device)
    return _like(tensor, memory[3 : 3 + tensor.numel()].view(tensor.shape))


def gaps(tensor: Tensor) -> Tensor:
    """Every second element of the last dimension, from the second on."""
    if not tensor.dim():
        return contiguous(tensor)
    memory = torch.empty((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype, device=tensor.device)
    return _like(tensor, memory[..., 1::2])


def sliced(tensor: Tensor) -> Tensor:
    """A part of a larger tensor, as `x[:, :n]` gives."""
    if tensor.dim() < 2:
        return offset(tensor)
    shape = [tensor.shape[0], tensor.shape[1] + 1, *tensor.shape[2:]]
    memory = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return _like(tensor, memory[:, : tensor.shape[1]])


def reversed_in_memory(lay: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same, with the dimensions in the opposite order."""

    def lay_reversed(tensor: Tensor) -> Tensor:
        back = range(tensor.dim())[::-1]
        return lay(tensor.permute(*back)).permute(*back) if tensor.dim() else lay(tensor)

    return lay_reversed


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": contiguous,
    "transposed": permuted(lambda n: list(range(n))[::-1]),
    "last two swapped": permuted(lambda n: [*range(n - 2), n - 1, n - 2] if n > 1 else list(range(n))),
    "first two swapped": permuted(lambda n: [1, 0, *range(2, n)] if n > 1 else list(range(n))),
    "rotated": permuted(lambda n: [*range(1, n), 0] if n else []),
    "channels last": channels_last,
    "expanded": expanded(0),
    "last expanded": expanded(-1),
    "offset": offset,
    "gaps": gaps,
    "sliced": sliced,
    "transposed, with gaps": reversed_in_memory(gaps),
    "transposed, expanded": reversed_in_memory(expanded(0)),
}


@dataclass(frozen=True)
class LaidOut:
    """A call in a layout."""

    call: Call
    name: str


def with_layouts(call: Call, names: Iterable[str] = tuple(LAYOUTS), mixed: bool = True) -> Iterator[LaidOut]:
    """A call with all of its tensors in each layout; if `mixed`, also with only the first of them or the others."""
    leaves, tree = tree_flatten((call.input, call.args, call.kwargs))
    dense = [i for i, leaf in enumerate(leaves) if is_dense(leaf)]
    for name in names:
        lay = LAYOUTS[name]
        chosen = {name: dense}
        if mixed and len(dense) > 1 and name != "contiguous":
            chosen |= {f"{name}, the first": dense[:1], f"{name}, the others": dense[1:]}
        for how, which in chosen.items():
            laid = [
                detached(lay if i in which else contiguous, leaf) if i in dense else leaf
                for i, leaf in enumerate(leaves)
            ]
            yield LaidOut(Call(*tree_unflatten(laid, tree)), how)


def detached(lay: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return lay(tensor.detach()).detach().requires_grad_(tensor.requires_grad)


def with_sizes(call: Call, size: int) -> Iterator[Call]:
    """A call in which all dimensions of one size have another: 1 or 0. Many operators refuse some of these."""
    leaves = [leaf for leaf in tree_flatten((call.input, call.args, call.kwargs))[0] if is_dense(leaf)]
    for n in sorted({n for leaf in leaves for n in leaf.shape if n > size}):

        def cut(value: Any, n: int = n) -> Any:
            if not is_dense(value):
                return value
            for d, m in enumerate(value.shape):
                if m == n:
                    value = value.narrow(d, 0, size)
            return value.detach().requires_grad_(value.requires_grad)

        yield Call(*tree_map(cut, (call.input, call.args, call.kwargs)))
