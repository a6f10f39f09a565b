"""Copies of tensors that a program cannot tell from the originals.

Two sides are only comparable if they start from equal inputs, and "equal" includes all that decides how a
program behaves: which tensors share a storage, how each lies in it, and what autograd knows of each. Storages
are therefore copied once, and tensors are laid into the copies.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Generator, Tensor, UntypedStorage, nn
from torch.autograd.function import FunctionCtx

from .naming import tensors_in


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The ordinary tensors that hold the data: the tensor itself, or the inner tensors of a wrapper subclass.

    >>> x = torch.ones(2)
    >>> next(plain_parts(x)) is x
    True

    Args:
        tensor: Any tensor.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    wrapper = cast(Any, tensor)
    for attribute in wrapper.__tensor_flatten__()[0]:
        yield from plain_parts(getattr(wrapper, attribute))


def has_storage(tensor: Tensor) -> bool:
    """Whether size, strides and offset say where the elements are.

    >>> has_storage(torch.ones(2)), has_storage(torch.ones(2).to_sparse())
    (True, False)

    Args:
        tensor: Any tensor.
    """
    wrapped = hasattr(tensor, "__tensor_flatten__")
    return tensor.layout == torch.strided and not tensor.is_nested and not wrapped


def storage_key(tensor: Tensor) -> int:
    """A number that is equal for two living tensors exactly when they share a storage, even an empty one.

    >>> x = torch.ones(2)
    >>> storage_key(x) == storage_key(x[:1])
    True

    Args:
        tensor: A tensor for which `has_storage` holds.
    """
    return cast(int, tensor.untyped_storage()._cdata)


@dataclass(frozen=True)
class Contents:
    """The bytes behind a set of tensors, kept apart from the tensors.

    >>> x = torch.ones(2)
    >>> contents = Contents.of([x])
    >>> Cloner(contents).tensor(x.zero_())
    tensor([1., 1.])

    Args:
        storages: A copy of each storage, by `storage_key`.
    """

    storages: Mapping[int, UntypedStorage]

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> "Contents":
        """Copy the bytes behind some tensors.

        >>> len(Contents.of([torch.ones(1), torch.ones(1)]).storages)
        2

        Args:
            tensors: Tensors that may share storages.
        """
        parts = [part for tensor in tensors for part in plain_parts(tensor) if has_storage(part)]
        by_key = {storage_key(part): part.untyped_storage() for part in parts}
        return Contents({key: _copy(storage) for key, storage in by_key.items()})

    def redrawn(self, tensors: Iterable[Tensor], seed: int) -> "Contents":
        """Give other values to floating-point data, in the range of the old ones; keep everything else.

        A storage that is also read as integers keeps its bytes: they may be indices.

        >>> x = torch.full((2,), 4.0)
        >>> y = Cloner(Contents.of([x]).redrawn([x], seed=0)).tensor(x)
        >>> bool(((2 <= y) & (y < 4)).all())
        True

        Args:
            tensors: The tensors that lie in the storages.
            seed: Decides the new values.
        """
        dtypes: dict[int, set[torch.dtype]] = {}
        for tensor in tensors:
            for part in plain_parts(tensor):
                if has_storage(part):
                    dtypes.setdefault(storage_key(part), set()).add(part.dtype)
        generator = Generator().manual_seed(seed)
        new = {key: _redraw(old, dtypes.get(key, set()), generator) for key, old in self.storages.items()}
        return Contents(new)


def _redraw(storage: UntypedStorage, dtypes: set[torch.dtype], generator: Generator) -> UntypedStorage:
    inexact = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    if len(dtypes) != 1 or not inexact or storage.device.type == "meta":
        return storage
    (dtype,) = inexact
    if dtype.is_complex:
        dtype = dtype.to_real()
    count = storage.nbytes() // dtype.itemsize
    old = _lay(storage, dtype, 0, (count,), (1,)).to("cpu", torch.float64)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
    # Scaling keeps probabilities, variances and roots in their domain; zeros would stay what they are.
    new = old * (1 + drawn) / 2 if old.any() else drawn
    return new.to(storage.device, dtype).untyped_storage()


def _copy(storage: UntypedStorage) -> UntypedStorage:
    return cast(UntypedStorage, cast(Any, storage).clone())


def _lay(
    storage: UntypedStorage, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


class _Behind(torch.autograd.Function):
    """Puts a leaf behind a tensor that already lies where it has to lie."""

    @staticmethod
    def forward(ctx: FunctionCtx, leaf: Tensor, box: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)  # as autograd's own nodes: no gradient gives none, not zeros
        return box[0]

    @staticmethod
    def backward(ctx: FunctionCtx, *tangents: Tensor) -> tuple[Tensor, None]:
        return tangents[0], None


class Cloner:
    """Clones values so that what they share, and what autograd knows of them, stays the same.

    >>> x = torch.ones(3)
    >>> clone = Cloner(Contents.of([x]))
    >>> a, b = clone.tensor(x), clone.tensor(x[1:])
    >>> a.zero_(), b
    (tensor([0., 0., 0.]), tensor([0., 0.]))

    Args:
        contents: The bytes that the clones start with.
        like: Another cloner whose clones this one goes on sharing.
    """

    def __init__(self, contents: Contents, like: "Cloner | None" = None) -> None:
        self.contents = contents
        self._storages: dict[int, UntypedStorage] = dict(like._storages) if like else {}
        self._clones: dict[int, Tensor] = dict(like._clones) if like else {}
        self._leaves: dict[int, Tensor] = dict(like._leaves) if like else {}
        # Clones are found by the identity of their originals, which must not be reused meanwhile.
        self._originals: list[Tensor] = []

    def adopt(self, tensor: Tensor) -> None:
        """Let a tensor stand for itself, so that what shares its storage goes on sharing it.

        >>> x = torch.ones(2)
        >>> clone = Cloner(Contents.of([x]))
        >>> clone.adopt(x)
        >>> clone.tensor(x) is x
        True

        Args:
            tensor: A tensor that the program holds, which cannot be replaced by a clone.
        """
        self._remember(tensor, tensor)
        for part in plain_parts(tensor):
            if has_storage(part):
                self._storages[storage_key(part)] = part.untyped_storage()

    def value(self, value: object) -> object:
        """Clone any argument: tensors and modules for sure, other objects where Python can copy them.

        >>> Cloner(Contents({})).value([1, "a"])
        [1, 'a']

        Args:
            value: The original.
        """
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, Generator):
            return value.clone_state()
        memo: dict[int, object] = {id(t): self.tensor(t) for _, t in tensors_in(value, "")}
        try:
            return copy.deepcopy(value, memo)
        except Exception:
            return value

    def leaf_behind(self, clone: Tensor) -> Tensor:
        """The leaf at which a clone's gradient arrives: the clone itself unless its original is not a leaf.

        >>> x = torch.ones(2, requires_grad=True) * 2
        >>> clone = Cloner(Contents.of([x]))
        >>> clone.leaf_behind(clone.tensor(x)).is_leaf
        True

        Args:
            clone: What `tensor` returned.
        """
        return self._leaves.get(id(clone), clone)

    def tensor(self, original: Tensor) -> Tensor:
        """Clone a tensor; the same original always gives the same clone.

        >>> x = nn.Parameter(torch.ones(2, 3)).t()
        >>> y = Cloner(Contents.of([x])).tensor(x)
        >>> y.stride(), y._base is not None, type(y._base).__name__
        ((1, 3), True, 'Parameter')

        Args:
            original: Any tensor whose storage is in the contents.
        """
        known = self._clones.get(id(original))
        if known is not None:
            return known
        with torch.inference_mode(original.is_inference()):
            clone = self._build(original)
        self._remember(original, clone)
        if original.is_leaf and original.grad is not None:
            clone.grad = original.grad.detach().clone()
        if original.retains_grad:
            clone.retain_grad()
        return clone

    def _remember(self, original: Tensor, clone: Tensor) -> None:
        self._clones[id(original)] = clone
        self._originals.append(original)

    def _build(self, original: Tensor) -> Tensor:
        if hasattr(original, "__tensor_flatten__"):
            return self._wrapper(original)
        if not has_storage(original):
            return self._with_autograd(original, original.detach().clone())
        view = self._view(original) if original._is_view() else None
        return self._with_autograd(original, self._data(original)) if view is None else view

    def _data(self, original: Tensor) -> Tensor:
        """A tensor without history that lies in the copied storage as the original lies in its own."""
        key = storage_key(original)
        if key not in self._storages:
            self._storages[key] = _copy(self.contents.storages[key])
        with torch.no_grad():
            offset, size, stride = int(original.storage_offset()), original.size(), original.stride()
            data = _lay(self._storages[key], original.dtype, offset, size, stride)
            if original.is_conj():
                data = data.conj().detach()
            return data._neg_view().detach() if original.is_neg() else data

    def _with_autograd(self, original: Tensor, data: Tensor) -> Tensor:
        """Make data a parameter, a leaf or a non-leaf, as the original is."""
        if isinstance(original, nn.Parameter):
            parameter = torch.Tensor._make_subclass(type(original), data, original.requires_grad)
            vars(parameter).update(vars(original))
            return parameter
        if original.grad_fn is None:
            return data.requires_grad_(original.requires_grad)
        leaf = data.clone().requires_grad_()
        with torch.enable_grad():
            clone = cast(Tensor, cast(Any, _Behind).apply(leaf, [data]))
        self._leaves[id(clone)] = leaf
        return clone

    def _view(self, original: Tensor) -> Tensor | None:
        """A view of the cloned base, or None where autograd's relation to the base cannot be made again."""
        assert original._base is not None
        base = self.tensor(original._base)
        differentiable = original.grad_fn is not None
        with torch.set_grad_enabled(differentiable or not base.requires_grad):
            view = _replay(original, base)
        if original.is_leaf and original.requires_grad and not view.requires_grad:
            view.requires_grad_()
        same = _outline(view) == _outline(original) and (view.grad_fn is not None) == differentiable
        return view if same else None

    def _wrapper(self, original: Tensor) -> Tensor:
        wrapper = cast(Any, original)
        attributes, context = wrapper.__tensor_flatten__()
        inner = {name: self.tensor(getattr(wrapper, name)) for name in attributes}
        rebuild = cast(Any, type(original)).__tensor_unflatten__
        data: Tensor = rebuild(inner, context, original.size(), original.stride())
        if original.grad_fn is None:
            return data.requires_grad_(original.requires_grad)
        return self._with_autograd(original, data)


_MULTI_OUTPUT_VIEWS = frozenset({"UnbindBackward0", "SplitBackward0", "SplitWithSizesBackward0"})


def _replay(original: Tensor, base: Tensor) -> Tensor:
    if type(original.grad_fn).__name__ in _MULTI_OUTPUT_VIEWS and original.dtype == base.dtype:
        # Autograd forbids writes to one of several outputs of a view, and a plain replay would allow them.
        size, stride = (1, *original.size()), (1, *original.stride())
        return base.as_strided(size, stride, original.storage_offset()).unbind(0)[0]
    return cast(Tensor, cast(Any, original)._view_func_unsafe(base))


def _outline(tensor: Tensor) -> tuple[object, ...]:
    bits = tensor.is_conj(), tensor.is_neg(), tensor.requires_grad
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset(), *bits
