"""What may differ from eager in the sweeps, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Excepted:
    """Accepted differences: those in whose text (program, call, run, what differs) the pattern `where` is found."""

    where: str
    reason: str
    in_some_versions: bool = False  # of torch: elsewhere it may except nothing


_SIZES = Excepted("DataDependentError", "its result has a size that depends on data")
_INDICES = Excepted(
    "DataDependentError", "for indices as a tensor, the gradient of the value has a size that depends on data"
)
_POSITIONS = Excepted("DataDependentError", "for positions as a tensor, its results have a size that depends on data")
_READS = Excepted("is argument 0", "eager reads what it has just written where the written tensor is also an argument")
_STALE = Excepted(
    r"may not be used|Output \d+ of",
    "pieces of a tensor that is written afterwards are refused at once; eager raises when they are used",
)
_SINGULAR = Excepted(
    "value of", "torch asks LAPACK for other outputs, and gets other last bits, where a mode is active"
)
_RANK = Excepted("out", "torch does not write to out= where a mode is active")

# By operator. An exception that excepts nothing any more fails the sweep.
EXCEPTIONS: dict[str, Excepted] = {
    "addmm_": _READS,
    "addmm_.decomposed": _READS,
    "baddbmm_": _READS,
    "masked_scatter_": _READS,
    "addbmm_": Excepted(r"called with float32\[1?\], ", "eager resizes a tensor that it should refuse to broadcast"),
    "sgn_": Excepted("ZeroTensors are immutable", "eager cannot add up the gradients that it gives"),
    "cumprod_": Excepted(
        "gradients of gradients",
        "it looks for zeros in the data to choose between two gradients",
    ),
    "index_reduce_.prod": Excepted("DataDependentError", "its second gradient looks at the data"),
    "scatter_reduce_.prod": Excepted("DataDependentError", "its second gradient looks at the data"),
    "nn.functional.rrelu_": Excepted(r"\[1, 0, 3\]", "what draws nothing is not recorded, and frees nothing"),
    "index_fill_": _INDICES,
    "index_put_": _INDICES,
    "masked_fill_": Excepted("gradient value", "for the gradient of the value, eager sums only what the mask selects"),
    "tensor_split": _POSITIONS,
    "chunk": _STALE,
    "split": _STALE,
    "split.list_args": _STALE,
    "split_with_sizes": _STALE,
    "unbind": _STALE,
    "detach_": Excepted("detached in place", "an input cannot be detached in place yet"),
    "nn.functional.dropout3d_": Excepted(
        "changed its shape in place", "it reshapes its input in place: autograd cannot follow that on abstract tensors"
    ),
    "_native_batch_norm_legit": Excepted("no functional twin", "with running statistics, out= has no functional twin"),
    "masked.prod": Excepted(
        "gradient value|needed for gradient|gradients of gradients",
        "prod looks for zeros in the data to choose between two gradients",
    ),
    "masked_select": _SIZES,
    "nonzero": _SIZES,
    "linalg.lstsq": _SIZES,
    "norm.nuc": _SINGULAR,
    "linalg.cond": _SINGULAR,
    "linalg.matrix_rank": _RANK,
    "linalg.matrix_rank.hermitian": _RANK,
}

_UNIQUE = Excepted(
    "DataDependentError: aten._unique",
    "behind torch 2.11 the gradient of a value that is filled in looks at the indices",
    in_some_versions=True,
)
_ZEROS = Excepted(
    r"^gradgradcheck.*DataDependentError: item\(\)",
    "its second gradient is another one where several factors are zero: autograd looks at the data",
)

# Operators whose compiled gradients are not to be had, all of them refused by name. An exception that excepts nothing
# any more fails the sweep.
REFUSED_GRADIENTS: dict[str, Excepted] = {
    "combinations": Excepted(
        "^gradgradcheck.*aten.masked_scatter_backward", "how its results lie cannot be tried, for sizes that are data"
    ),
    "index_put": Excepted(
        "^gradgradcheck.*needs a value of the forward that was not saved",
        "the size of what a mask selects is not saved",
    ),
    "index_fill": _UNIQUE,
    "trace": _UNIQUE,  # its second gradient: the first fills in the gradient on the diagonal
    "index_reduce.prod": _ZEROS,
    "scatter_reduce.prod": _ZEROS,
    "quantile": Excepted("DataDependentError: aten.equal", "torch 2.11 looks at its data", in_some_versions=True),
    "nanquantile": Excepted("DataDependentError: aten.equal", "torch 2.11 looks at its data", in_some_versions=True),
    "nn.functional.linear_cross_entropy.chunked_none": Excepted(
        "UnsupportedError: aten.addmm.out", "it adds to the result of addmm in place, by out="
    ),
}
