"""Take lists of tensors apart and put them together again (T-11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._torch import pytree
from ..errors import AssumptionError
from ..schemas import ViewAndMutationMeta
from .layout import is_wrapper, leaves_of
from .schemas import SubclassCreationMeta, creation_meta

Metas = Sequence[int | SubclassCreationMeta]


def unwrap_tensor_subclasses(wrapped_args: Any, *, is_joint_structure: bool) -> Any:
    """Lists with the plain tensors of wrappers in their places, depth first.

    >>> import torch
    >>> from torch.testing._internal.two_tensor import TwoTensor
    >>> two = TwoTensor(torch.zeros(1), torch.ones(1))
    >>> unwrap_tensor_subclasses([two, 3], is_joint_structure=False)
    [tensor([0.]), tensor([1.]), 3]

    Args:
        wrapped_args: a list, or with `is_joint_structure` the pair (primals, tangents).
        is_joint_structure: each part of the pair is converted alone.
    """
    if is_joint_structure:
        primals, tangents = _pair(wrapped_args)
        return _unwrap(primals), _unwrap(tangents)
    return _unwrap(wrapped_args)


def _unwrap(args: Sequence[Any]) -> list[Any]:
    return [leaf for arg in args for leaf in (leaves_of(arg) if isinstance(arg, Tensor) else [arg])]


def _pair(args: Any) -> tuple[Any, Any]:
    if not isinstance(args, tuple) or len(args) != 2 or not all(isinstance(part, (list, tuple)) for part in args):
        raise AssumptionError("in joint form the argument is the pair (primals, tangents), each of them a list")
    return args


def wrap_tensor_subclasses(
    unwrapped_args: Sequence[Any],
    *,
    subclass_metas: Metas,
    num_fw_outs_saved_for_bw: int | None = None,
    is_runtime: bool = False,
) -> tuple[Any, ...]:
    """Wrappers, and plain values, from a flat list; what is saved for a backward stands behind them and stays plain.

    Args:
        unwrapped_args: the flat list.
        subclass_metas: for each result its position in the list, or the record of a wrapper.
        num_fw_outs_saved_for_bw: how many further values there are at the end.
        is_runtime: autograd's state is not copied from the recorded instances.
    """
    taken = sum(meta.arg_count if isinstance(meta, SubclassCreationMeta) else 1 for meta in subclass_metas)
    saved = num_fw_outs_saved_for_bw or 0
    if len(unwrapped_args) != taken + saved:
        raise AssumptionError(
            f"Expected the number actual unwrapped-subclass outputs to be {taken} and {saved} saved values, not "
            f"{len(unwrapped_args)} in all"
        )
    wrapped = [
        meta.creation_fn(unwrapped_args, is_runtime=is_runtime)
        if isinstance(meta, SubclassCreationMeta)
        else unwrapped_args[meta]
        for meta in subclass_metas
    ]
    return (*wrapped, *unwrapped_args[taken:])


def wrap_tensor_subclasses_maybe_joint(
    unwrapped_args: Any, *, is_joint_structure: bool, meta: ViewAndMutationMeta
) -> tuple[Any, ...]:
    """The same for the inputs of a program, or with `is_joint_structure` for the pair (primals, tangents)."""
    if is_joint_structure:
        primals, tangents = _pair(unwrapped_args)
        return (
            wrap_tensor_subclasses(primals, subclass_metas=meta.subclass_inp_meta),
            wrap_tensor_subclasses(tangents, subclass_metas=meta.subclass_tangent_meta),
        )
    return wrap_tensor_subclasses(unwrapped_args, subclass_metas=meta.subclass_inp_meta)


def requires_subclass_dispatch(args: Any, fw_metadata: ViewAndMutationMeta) -> bool:
    """Whether any leaf of the arguments, or any output of the forward graph, is a wrapper subclass."""
    given = any(is_wrapper(leaf) for leaf in pytree.tree_leaves(args))
    return given or any(isinstance(meta, SubclassCreationMeta) for meta in fw_metadata.subclass_fw_graph_out_meta)


def create_subclass_meta(args: Sequence[Any]) -> list[int | SubclassCreationMeta]:
    """For each value its position in the flat list, or the record of a wrapper, which must hold fake tensors.

    >>> create_subclass_meta([5, 6])
    [0, 1]
    """
    metas: list[int | SubclassCreationMeta] = []
    position = 0
    for arg in args:
        metas.append(creation_meta(arg, position) if is_wrapper(arg) else position)
        position += len(leaves_of(arg)) if is_wrapper(arg) else 1
    return metas


def get_types_for_subclass(tensor: Any) -> list[str]:
    """The word "Tensor" for each plain tensor in a tensor.

    >>> import torch
    >>> get_types_for_subclass(torch.ones(1))
    ['Tensor']
    """
    return ["Tensor"] * len(leaves_of(tensor))
