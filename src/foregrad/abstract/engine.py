"""Abstract tensors: tensors that have all metadata and no data.

An engine makes them and says what operators give for them. All engines are built on torch's FakeTensorMode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import SymInt, Tensor

from .._torch import (
    FakeTensor,
    FakeTensorMode,
    Geometry,
    HigherOrderOperator,
    OpOverload,
    Withheld,
    argument_symbol,
    data_allowed,
    dispatch_with_symbols,
    forget_constant,
    is_static,
    local_source,
    make_fake,
    put_gate,
    quiet_inference,
    run_on_meta,
    set_lazy_bits,
    symbolic_context,
)
from ..errors import MissingInputError, UnsupportedError
from ..ops import Kind, aten, op_info, tensors_in, written_arguments
from ..slots import Primal
from ..stack_traces import user_stack, where
from ..subclasses.layout import is_wrapper, leaves_of, require_traceable
from .sparse import SPARSE, abstract_sparse, given_for_sparse

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

# Operators with one result whose meta kernels are exact on every device, and the kernel to run. They are most of what a
# program runs, and FakeTensorMode asks many questions before it comes to the same kernels.
DIRECT: dict[OpOverload, OpOverload] = {
    op: op
    for op in (
        aten.add.Tensor,
        aten.alias.default,
        aten.bmm.default,
        aten.clone.default,
        aten.detach.default,
        aten.div.Scalar,
        aten.div.Tensor,
        aten.expand.default,
        aten.lt.Scalar,
        aten.mean.dim,
        aten.mm.default,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.neg.default,
        aten.permute.default,
        aten.pow.Tensor_Scalar,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.sub.Tensor,
        aten.sum.dim_IntList,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten.where.self,
    )
} | {aten._unsafe_view.default: aten.view.default}


def _require_dense(real: Tensor, slot: Primal) -> None:
    """Refuse tensors of other layouts, and those whose memory was given back."""
    if real.layout is not torch.strided or real.is_quantized or real.is_nested:
        kind = "quantized" if real.is_quantized else "nested" if real.is_nested else str(real.layout)
        raise UnsupportedError(f"{slot} is {kind}: only strided and sparse tensors can be compiled yet.")
    has_data = not isinstance(real, FakeTensor) and real.device.type != "meta"
    if has_data and real.numel() and not real.untyped_storage().nbytes():
        raise MissingInputError(
            f"{slot} was freed: it has {real.numel()} elements and its storage has none. "
            "Give it its data back (untyped_storage().resize_) before the call."
        )


@dataclass(frozen=True, slots=True)
class EngineReport:
    """On which abstract tensors a program was recorded, and what was left to FakeTensorMode."""

    name: str  # lean, or fake for the whole recording
    reason: str = ""  # why the whole recording
    by_operator: Mapping[str, str] = field(default_factory=dict)  # operators whose results are not kept, and why
    found: int = 0  # results that were known
    worked_out: int = 0  # results that had to be worked out, and are known now

    def __str__(self) -> str:
        about = f": {self.reason}" if self.reason else f", {self.found} results known, {self.worked_out} worked out"
        return "\n".join([f"{self.name}{about}", *(f"  {op}: {why}" for op, why in self.by_operator.items())])


class Engine:
    """Abstract tensors by torch's FakeTensorMode, and all that is asked about them."""

    name = "fake"

    def __init__(self, mode: FakeTensorMode, reason: str = "", own: bool = False) -> None:
        self.mode = mode
        self.reason = reason  # why not the lean engine
        self.own_mode = mode if own else None  # None if it is the caller's, who sees fake tensors in any case
        self.withheld = Withheld(own)
        if own:
            put_gate(mode, functools.partial(_with_storages_open, self.withheld))
        self._static = mode.shape_env is None
        self._dispatch = mode.dispatch if self._static else dispatch_with_symbols(mode)  # it runs for every operator

    @property
    def shape_env(self) -> ShapeEnv | None:
        """The shape environment of a dynamic recording."""
        return self.mode.shape_env

    @property
    def symbolic(self) -> bool:
        """Whether sizes may be symbols."""
        return self.mode.shape_env is not None

    def is_abstract(self, value: object) -> bool:
        """Whether a value is one of this engine's tensors."""
        return type(value) is FakeTensor or (is_wrapper(value) and all(map(self.is_abstract, leaves_of(value))))

    def fake(self, real: Tensor, slot: Primal, dynamic: bool | frozenset[int] | Geometry) -> Tensor:
        """An abstract tensor like `real`, in storage of its own, that autograd sees as a fresh leaf."""
        if type(real) is not Tensor and type(real) is not torch.nn.Parameter:
            require_traceable(real, str(slot))
        if real.layout in SPARSE and not isinstance(real, FakeTensor):
            return make_fake(self.mode, abstract_sparse(real), real.device)
        _require_dense(real, slot)
        device = real.fake_device if isinstance(real, FakeTensor) else real.device
        size: Any = real.shape
        stride: Any = real.stride()
        offset: Any = real.storage_offset()
        if isinstance(dynamic, Geometry):
            size, stride, offset = dynamic
        elif dynamic and self.shape_env is not None and not isinstance(real, FakeTensor):
            size, stride, offset = self.shape_env.create_symbolic_sizes_strides_storage_offset(
                real, local_source(str(slot)), symbolic_context=symbolic_context(real, dynamic)
            )
        fake = self._strided(size, stride, offset, real.dtype, device)
        if real.is_conj() or real.is_neg():
            with torch.no_grad(), self.mode:
                fake = set_lazy_bits(fake, conj=real.is_conj(), neg=real.is_neg()).detach()  # no view
        return fake

    def symbol(self, value: int, slot: Primal) -> int | SymInt:
        """A symbolic integer that stands for an argument."""
        assert self.shape_env is not None
        return argument_symbol(self.shape_env, str(slot), value)

    def like(self, tensor: Tensor, dense: bool) -> Tensor:
        """A fresh abstract tensor with the geometry of another; `dense` makes it contiguous if that has holes."""
        assert isinstance(tensor, FakeTensor)
        stride = tensor.stride()
        if dense and has_gaps(tensor):
            stride = torch.empty(tensor.shape, device="meta").stride()
        return self._strided(tensor.shape, stride, 0, tensor.dtype, tensor.fake_device)

    def run(self, op: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The abstract result of an operator."""
        out = self._answer(op, types, args, kwargs)
        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            self.withheld.add(tensor)
        fresh = isinstance(out, Tensor) and all(out is not given for given in (*args, *kwargs.values()))
        if fresh and out.requires_grad:  # below autograd only a decomposition says so, of a tensor that it made
            out.requires_grad_(False)
        return out

    def strides(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Sequence[int] | None]:
        """How the results of an operator lie; None for one that is no tensor."""
        out = self.run(op, (), args, kwargs)
        outs = out if isinstance(out, (list, tuple)) else (out,)
        return [one.stride() if isinstance(one, Tensor) else None for one in outs]

    def _answer(self, op: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.infer(op, types, args, kwargs)

    def infer(self, op: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch's shape inference says that an operator gives; of sparse tensors, what kernels say."""
        if self._static and (given := given_for_sparse(self.mode, op, args, kwargs)) is not NotImplemented:
            return given
        if self._static and op in DIRECT:
            device = _common_device(args)
            if device is not None:
                return make_fake(self.mode, run_on_meta(self.mode, DIRECT[op], args, kwargs), device)
        with quiet_inference():  # who keeps logs would keep the recorded tensors in their tracebacks
            return self._dispatch(op, types, args, kwargs)

    def run_higher_order(self, op: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The abstract result of an operator that has no schema."""
        with self.mode:
            return op(*args, **kwargs)

    def report(self) -> EngineReport:
        """What it has done."""
        return EngineReport(self.name, self.reason)

    def forget(self, tensor: Tensor) -> None:
        """Told when the metadata of a tensor was changed by other means than `run`: an engine may have kept it."""

    def shown(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What compilers are shown of abstract tensors: FakeTensors that autograd does not know."""
        with torch.no_grad():
            return [self.run(aten.detach.default, (FakeTensor,), (tensor,), {}) for tensor in tensors]

    def strided(self, tensor: Tensor, stride: Sequence[int], device: torch.device) -> Tensor:
        """A fresh abstract tensor with other strides."""
        return self._strided(tensor.shape, tuple(stride), 0, tensor.dtype, device)

    def laid_out(self, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A fresh abstract tensor of any layout; sizes may be symbols."""
        return self._strided(tuple(size), tuple(stride), 0, dtype, device)

    def device_of(self, tensor: Tensor) -> torch.device:
        """The device that an abstract tensor pretends to be on."""
        assert isinstance(tensor, FakeTensor)
        return tensor.fake_device

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor that is a constant of the program, which may be read."""
        return getattr(tensor, "constant", None)

    def _strided(self, size: Any, stride: Any, offset: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        if isinstance(offset, SymInt) or offset != 0:
            reach = offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
            meta = torch.empty((reach,), dtype=dtype, device="meta").as_strided(size, stride, offset)
        fake = make_fake(self.mode, meta, device)
        self.withheld.add(fake)
        return fake


def _with_storages_open(
    withheld: Withheld, dispatch: Callable[..., Any], op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let FakeTensorMode put results into the storages of arguments; for some operators, into any storage."""
    given = list(tensors_in((args, list(kwargs.values()))))
    if op_info(op).kind is Kind.RESHAPE or any(map(_has_value, given)):
        opened = withheld.paused()
    else:
        opened = data_allowed(*(tensor.untyped_storage() for tensor in given if tensor.layout is torch.strided))
    if any(map(_has_value, given)) and not all(map(_has_value, given)):
        _forget_values(op, args, kwargs)
    with opened:
        return dispatch(op, types, args, kwargs)


def _forget_values(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A constant that is written among other tensors is none any more; FakeTensorMode does not look into lists."""
    lists = [written for written in written_arguments(op, args, kwargs) if isinstance(written, (list, tuple))]
    for tensor in tensors_in(lists):
        forget_constant(tensor)


def _has_value(tensor: Tensor) -> bool:
    """Whether a tensor is a constant, or is about to be made one."""
    return type(tensor) is not FakeTensor or tensor.constant is not None


def _common_device(args: tuple[Any, ...]) -> torch.device | None:
    """The device of all tensors among the arguments, if they are abstract, without a known value, and on one."""
    device = None
    for arg in args:
        if isinstance(arg, Tensor):
            if (
                type(arg) is not FakeTensor
                or arg.constant is not None
                or (device or arg.fake_device) != arg.fake_device
            ):
                return None
            device = arg.fake_device
    return device


def geometry_of(tensor: Tensor) -> tuple[Any, ...]:
    """Size, stride and offset: where a tensor lies in its storage."""
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def is_empty(value: object) -> bool:
    """Whether a value is a tensor that is known to have no elements."""
    return isinstance(value, Tensor) and not isinstance(value.numel(), SymInt) and not value.numel()


def has_gaps(tensor: Tensor) -> bool:
    """Whether a tensor's elements do not fill a stretch of memory one by one, in some order of its dimensions."""
    if is_static(tensor) and tensor.numel() and tensor.is_contiguous():
        return False
    expected = 1
    for d in sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d])):
        if tensor.shape[d] != 1:
            if tensor.stride(d) != expected:
                return True
            expected = expected * tensor.shape[d]
    return False


# ---------------------------------------------------------------------------------------------------------------------
# What a program may read of a recorded tensor: what guards compare at each call, and nothing else.
#
# Sizes, dtype, device, flags and the like are checked before a program runs. Where a tensor lies, how often it was
# written, what autograd knows about it from before the call: all this may be another thing at the next call, and eager
# would see it. A read of it is refused, unless its answer follows from what is checked.
CHECKED_PROPERTIES = frozenset(
    {
        *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "names", "name", "volatile"),
        *("requires_grad", "is_leaf", "grad_dtype", "output_nr"),
        *("_has_symbolic_sizes_strides", "_python_dispatch"),
        *(name for name in dir(Tensor) if name.startswith("is_")),
        *("grad", "data", "T", "H", "mT", "mH", "real", "imag"),
    }
)
"""Properties of tensors whose values guards compare, or that are tensors themselves."""

CHECKED_FUNCTIONS = frozenset(
    {
        *("dim", "ndimension", "numel", "nelement", "size", "stride", "storage_offset", "element_size", "get_device"),
        *("dense_dim", "sparse_dim", "type", "has_names", "dim_order", "result_type", "can_cast", "is_tensor"),
        *("is_complex", "is_floating_point", "is_signed", "is_conj", "is_neg", "is_inference", "is_contiguous"),
        *("is_same_size", "_is_view", "_is_zerotensor", "_nested_tensor_size"),
        *("__len__", "__hash__", "__dir__", "__class__"),
    }
)
"""Functions of tensors that give a plain value which follows from what guards compare."""

SIZES = frozenset(
    {
        *(Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel),
        *(Tensor.shape.__get__, Tensor.nbytes.__get__),  # type: ignore[attr-defined]
    }
)
"""How a program reads the size of a tensor."""

WORKSPACE = "_foregrad_workspace"
"""Where a recorded tensor notes that only a library knows its size, and what it is this time."""

_WHY = {
    "_version": "counts the writes from before the call",
    "_base": "is the tensor that it is a view of, outside of the program",
    "_backward_hooks": "holds what was registered before the call",
}


def refuse_size_of_workspace(tensor: Any) -> None:
    """Refuse to read the size of a tensor that only a library knows, if this is one."""
    if isinstance(tensor, Tensor) and WORKSPACE in vars(tensor):
        raise UnsupportedError(
            f"the program reads the size of a library's workspace, at {where(user_stack(4))}, which is not known for "
            "symbolic sizes. Compile with dynamic=False."
        )


def refuse_property(name: str) -> None:
    """Refuse to read a property that guards know nothing about."""
    why = _WHY.get(name, "may be another one at the next call")
    raise UnsupportedError(
        f"the program reads .{name} of a tensor, which {why}, at {where(user_stack(4))}: a compiled call would not "
        "look again. Read it outside and pass it as an argument, or compile with fallback='eager'."
    )


FROM_BEFORE = frozenset({"retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks"})
"""Properties that are compared at each call if a program reads them: there was nothing while it was recorded."""


def is_known(name: str, real: Tensor) -> bool:
    """Whether a property of a tensor from before the call says what the recording says too."""
    if name in FROM_BEFORE:
        return not getattr(real, name)
    return name == "grad_fn" or (name == "_base" and not real._is_view())


def follows_from_guards(func: Any, result: Any) -> bool:
    """Whether what a function gives for recorded tensors is no plain value, or one that guards have an eye on."""
    return type(result) not in (bool, int, float, str) or getattr(func, "__name__", "") in CHECKED_FUNCTIONS


def refuse_plain_result(func: Any, result: Any) -> None:
    """Refuse a plain value that a function gives for recorded tensors."""
    raise UnsupportedError(
        f"{func.__name__}, at {where(user_stack(4))}, gives a {type(result).__name__} that may be another one at the "
        "next call: a compiled call would not look again. Call it outside and pass what it gives as an argument, or "
        "compile with fallback='eager'."
    )
