"""Fake tensors and their modes, storages without data, and shape inference."""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import ctypes
import functools
import gc
import importlib
import itertools
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import TracingContext  # front ends hand the fake mode and output strides over in it
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorConverter, in_kernel_invocation_manager
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensorException
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch.nested._internal import nested_tensor  # a fake mode loads it, and goes on with its numbers
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

from .guards import Replaced, all_objects_count_as_old, disable_modes, garbage_collection_paused
from .operators import without_function_modes

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


def new_fake_mode(shape_env: ShapeEnv | None, for_all_sizes: bool = False) -> FakeTensorMode:
    """A fake mode that threads may use.

    Without a CUDA device it sets a device guard that does nothing and has eight devices. Autograd's engine would start
    a thread for each of them, none of which it can use, and refuse to run in a forked process from then on: it is
    started before. And the guard belongs, before torch 2.13, to the thread that happens to be the first: the process
    crashes once that thread has ended. A thread that never ends is made the first.
    """
    if shape_env is None and not for_all_sizes:
        mode = _like_a_new_mode(_static_mode())
    else:
        _load_dynamo()
        mode = (ModeForAllSizes if for_all_sizes else FakeTensorMode)(shape_env=shape_env)
    if mode.avoid_device_init:
        _start_engine()
    if _GUARD_ENDS_WITH_THREAD and mode.avoid_device_init and not _guard_is_set.is_set():
        if threading.current_thread() is threading.main_thread():
            torch._C._ensureCUDADeviceGuardSet()
        else:
            threading.Thread(target=_set_guard_and_stay, daemon=True).start()
            _guard_is_set.wait()
        _guard_is_set.set()
    return mode


@functools.cache
def _start_engine() -> None:
    """Let autograd's engine start its threads, for the devices that there are now."""
    with disable_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True, device="cpu")
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((leaf,), (torch.zeros((), device="cpu"),), False, False, (leaf,), False, False)


@functools.cache
def _load_dynamo() -> None:
    """What a mode with symbolic sizes needs.

    `torch.fx.wrap` leaves its frame in a cycle there, and every frame leads to its callers: until a collection happens
    to come, the user's objects in the frames of a first capture would live on.
    """
    with garbage_collection_paused():
        all_objects_count_as_old()
        importlib.import_module("torch._dynamo.config")
        gc.collect(0)  # what is new, and nothing of the user's


@functools.cache
def _static_mode() -> FakeTensorMode:
    """The mode that others are copies of."""
    return FakeTensorMode() if "torch._dynamo.config" in sys.modules else _mode_without_dynamo()


class _TorchForAMode:
    """What the constructor of a mode is given for `torch`: itself, but for two settings of Dynamo's."""

    _dynamo = types.SimpleNamespace(
        config=types.SimpleNamespace(fake_tensor_cache_enabled=False, fake_tensor_cache_crosscheck_enabled=False)
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _mode_without_dynamo() -> FakeTensorMode:
    """A mode without a cache, made by torch's own constructor.

    To read whether the cache is wanted, which a recording never has, the constructor imports Dynamo, Inductor and
    sympy: 800 modules. The names that it looks for stay the same from torch 2.11 to 2.15.
    """
    stand_in = _TorchForAMode()

    def import_or_stand_in(name: str, *args: Any) -> Any:
        found = torch if name == "torch._dynamo.config" else __import__(name, *args)
        return stand_in if found is torch else found

    init: Any = FakeTensorMode.__init__
    names = {**init.__globals__, "__builtins__": {**vars(builtins), "__import__": import_or_stand_in}}
    mode = FakeTensorMode.__new__(FakeTensorMode)
    types.FunctionType(init.__code__, names, init.__name__, None, init.__closure__)(mode, **init.__kwdefaults__)
    return mode


def _like_a_new_mode(mode: FakeTensorMode) -> FakeTensorMode:
    """A copy of a mode that was never used; the constructor reads the lines of the whole stack, for a message."""
    new = copy.copy(mode)
    for name, value in vars(mode).items():
        if isinstance(value, (list, collections.deque)):
            setattr(new, name, copy.copy(value))
    new.fake_tensor_converter = FakeTensorConverter(copy_data=mode.propagate_real_tensors, export=False)
    new.nt_tensor_id_initial_count = new.nt_tensor_id_counter = nested_tensor._tensor_id_counter
    return new


_GUARD_ENDS_WITH_THREAD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


_guard_is_set = threading.Event()


def _set_guard_and_stay() -> None:
    torch._C._ensureCUDADeviceGuardSet()
    _guard_is_set.set()
    threading.Event().wait()


def is_jagged_size(number: Any) -> bool:
    """Whether a size stands for the lengths of a nested tensor's rows: it is equal to itself, and no number."""
    return isinstance(number, torch.SymInt) and bool(number.node.is_nested_int())


def names_jagged_size(tensor: torch.Tensor) -> bool:
    """Whether a nested tensor's jagged size is named after this very tensor of offsets."""
    module = sys.modules.get("torch.nested._internal.nested_tensor")
    return module is not None and tensor in module._tensor_symint_registry


def dispatched_in_cpp(kind: type) -> bool:
    """Whether torch runs the operators of a subclass in C++ and not by its `__torch_dispatch__`: DTensor's are."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and kind is getattr(module, "DTensor", None)


def make_fake(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor around a meta tensor that is already there; `from_tensor` costs ten times as much."""
    return FakeTensor(mode, meta, device)


_make_subclass = torch.Tensor._make_subclass


_make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass


_forbid_writing = torch._C._set_throw_on_mutable_data_ptr


_storage_address: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]


def fake_attributes(mode: FakeTensorMode, device: torch.device) -> dict[str, Any]:
    """What the constructor of a fake tensor puts on it, whatever its shape."""
    with disable_modes(), without_function_modes():
        return dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), device)))


@functools.cache
def fake_attribute_names() -> frozenset[str]:
    """The names of what torch itself puts on fake tensors, also once C++ has asked for sizes that are symbols."""
    capsules = itertools.product(("", "sym_"), ("sizes", "strides"), ("", "_len"))
    sizes = (f"_{kind}{what}_capsule{length}" for kind, what, length in capsules)
    return frozenset((*fake_attributes(_static_mode(), torch.device("cpu")), *sizes))


def fake_shell(meta: torch.Tensor, device: torch.device) -> Any:
    """A fake tensor around a meta tensor, without its attributes: the constructor takes three times as long."""
    shell = _make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    _forbid_writing(shell)
    return shell


NO_DATA = "Cannot access data pointer of"  # what the error of a storage begins with that refuses to be read, or written


_FLAGS_END = 64  # flags of a storage lie before this byte of it


def _place_of_reading_flag() -> int | None:
    """Where in a storage the flag lies that lets any access to its data raise; None if that cannot be told.

    Builds without CUDA have no function that sets it. They have functions for the flags on both sides of it, which show
    where it lies; whether it does what it should is tried on a storage that has data.
    """
    near, tried = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")
    snapshots = [ctypes.string_at(_storage_address(near), _FLAGS_END)]
    for set_flag in (_forbid_writing, torch._C._set_warn_deprecated_on_mutable_data_ptr):
        set_flag(near)
        snapshots.append(ctypes.string_at(_storage_address(near), _FLAGS_END))
    before, behind = (
        [i for i, (old, new) in enumerate(zip(a, b, strict=True)) if (old, new) == (0, 1)]
        for a, b in itertools.pairwise(snapshots)
    )
    if len(before) != 2 or len(behind) != 1 or behind[0] != before[-1] + 2:
        return None
    place = before[-1] + 1
    ctypes.c_bool.from_address(_storage_address(tried) + place).value = True
    try:
        tried.untyped_storage()[0]
    except RuntimeError as error:
        return place if NO_DATA in str(error) else None
    return None


_READING_FLAG = _place_of_reading_flag()


DATA_CAN_BE_FORBIDDEN = _READING_FLAG is not None


_flag_at = ctypes.c_bool.from_address


def _reading_flag(address: int) -> ctypes.c_bool:
    return ctypes.c_bool() if _READING_FLAG is None else _flag_at(address + _READING_FLAG)


def forbid_data(tensor: torch.Tensor) -> None:
    """Let whoever asks the storage of a tensor for its data, to read or to write, get an error and no pointer.

    Kernels, numpy, dlpack and pickle all ask the storage: there is no other way to the data.
    """
    _forbid_writing(tensor)
    if _READING_FLAG is not None:
        _flag_at(_storage_address(tensor) + _READING_FLAG).value = True


class Withheld:
    """Storages of genuine fake tensors, which refuse to be read as long as a program runs.

    These tensors say that they are on a device, and kernels may believe it. FakeTensorMode itself and compilers compare
    their storages and copy them, with pointers to nothing.
    """

    def __init__(self, own: bool) -> None:
        self._own = own  # tensors of other people's modes are left as they are
        self._storages: dict[int, torch.UntypedStorage] = {}  # by address
        self._running = False

    def add(self, value: object) -> None:
        """A tensor that the program may get."""
        if self._own and type(value) is FakeTensor and value.layout is torch.strided:
            with without_function_modes():
                storage = value.untyped_storage()
            self._storages[storage._cdata] = storage
            _reading_flag(storage._cdata).value = self._running

    def while_running(self) -> contextlib.AbstractContextManager[None]:
        """Let the program, and nobody else, be refused."""
        return self._switched(True)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Let FakeTensorMode do as it likes with all of them."""
        return self._switched(False) if self._running else contextlib.nullcontext()

    @contextlib.contextmanager
    def _switched(self, running: bool) -> Iterator[None]:
        before, self._running = self._running, running
        self._set()
        try:
            yield
        finally:
            self._running = before
            self._set()

    def _set(self) -> None:
        for address in self._storages:
            _reading_flag(address).value = self._running


@contextlib.contextmanager
def data_allowed(*storages: torch.UntypedStorage) -> Iterator[None]:
    """`set_` compares how storages would free their data, and that counts as reading."""
    flags = [_reading_flag(storage._cdata) for storage in storages]
    before = [flag.value for flag in flags]
    for flag in flags:
        flag.value = False
    try:
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.value = value


def _is_shared(storage: torch.UntypedStorage) -> bool:
    if _reading_flag(storage._cdata).value:
        raise RuntimeError(f"{NO_DATA} a recorded tensor.")
    return bool(torch._C.StorageBase.is_shared(storage))  # type: ignore[attr-defined]


# The one method of storages out of which C++ lets no error come: the process would end.
storages_asked_first = Replaced(torch.UntypedStorage, "is_shared", _is_shared)


def null_tensor(size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A fake tensor, without its attributes, in a storage of its own that has a device, a size, and no data.

    C++ knows its device; it asks Python for that of one around a meta tensor, about three times for each operator.
    """
    tensor = _make_wrapper_subclass(FakeTensor, size, stride, 0, None, dtype, torch.strided, device)
    forbid_data(tensor)
    return tensor


def null_alias(plain: torch.Tensor) -> Any:
    """A fake tensor, without its attributes, that lies where a plain tensor without data does."""
    return _make_subclass(FakeTensor, plain, False)


def null_view(base: Any, size: Any, stride: Any, offset: int) -> Any:
    """A fake tensor, without its attributes, that looks at the memory of one without data. No mode is told."""
    with torch._C._DisableTorchDispatch(), below_autograd():
        return _make_subclass(FakeTensor, base.as_strided(size, stride, offset), False)


def put_into(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: Any, size: Any, stride: Any) -> None:
    """Let a tensor look at other memory. Neither autograd nor any mode is told."""
    key = getattr(torch._C.DispatchKey, tensor.device.type.upper())
    with data_allowed(tensor.untyped_storage(), storage):
        torch.ops.aten.set_.source_Storage_storage_offset._op_dk(key, tensor, storage, offset, size, stride)


def looking_at(storage: torch.UntypedStorage, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> torch.Tensor:
    """A plain tensor that looks at a storage, which may be one without data."""
    plain = torch.empty(0, dtype=dtype, device=storage.device)
    with data_allowed(storage):
        return plain.set_(storage, offset, size, stride)


def forget_constant(tensor: torch.Tensor) -> None:
    """A fake tensor that stood for a known value, and all that look at its memory, stand for none from now on."""
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        tensor.fake_mode.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)


def put_gate(mode: FakeTensorMode, gate: Callable[..., Any]) -> None:
    """Let a gate see every operator of a fake mode, with the mode's own `dispatch`.

    A subclass of the mode would not do: higher-order operators know the modes by their very type.
    """
    found: Callable[[], Any] = weakref.ref(mode)

    def dispatch(op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return gate(functools.partial(FakeTensorMode.dispatch, found()), op, types, args, kwargs or {})

    mode.dispatch = dispatch  # type: ignore[method-assign, assignment]


# Views of the meta tensors inside fake ones must not share a version counter, as autograd would have it.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView


_cpu_autocast: Any = torch._C._parse_dispatch_key("AutocastCPU")


_cuda_autocast: Any = torch._C._parse_dispatch_key("AutocastCUDA")


_AUTOCAST = torch._C.DispatchKeySet(_cpu_autocast) | torch._C.DispatchKeySet(_cuda_autocast)


@contextlib.contextmanager
def quiet_inference() -> Iterator[None]:
    """FakeTensorMode logs each error of a meta kernel at length, also those that are expected."""
    disabled = _fake_tensor_log.disabled
    _fake_tensor_log.disabled = True
    try:
        yield
    finally:
        _fake_tensor_log.disabled = disabled


_fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def kernels_only() -> Iterator[None]:
    """Operators go straight to their kernels, past modes, autograd and autocast, which came before."""
    with (
        disable_modes(),
        torch._C.DisableTorchFunction(),
        torch._C._ExcludeDispatchKeyGuard(_AUTOCAST),
        below_autograd(),
    ):
        yield


def without_own_cache(mode: FakeTensorMode) -> FakeTensorMode:
    """A fake mode that works everything out: its own cache costs as much as most of its kernels."""
    mode.cache_enabled = False
    return mode


def backend_settings() -> tuple[Any, ...]:
    """Which libraries kernels may use: the layout of a convolution's result depends on them."""
    return (
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_nnpack_enabled(),
    )


def run_on_meta(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator's meta kernel on fake tensors, without the many questions that FakeTensorMode asks before."""
    with in_kernel_invocation_manager(mode), below_autograd():
        return op(*args, **kwargs)


def set_lazy_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """The same data read with the conj or neg bit set."""
    tensor = torch._conj(tensor) if conj else tensor
    return torch._neg_view(tensor) if neg else tensor


def running_fake_mode() -> FakeTensorMode | None:
    """The fake mode that a front end has put into its tracing context."""
    context = TracingContext.try_get()
    return None if context is None else context.fake_mode


def mark_dynamic_dims(tensor: torch.Tensor, dims: set[int]) -> None:
    """Tell Dynamo not to specialise on these sizes; the attribute was renamed in 2.13."""
    for attribute in ("_dynamo_weak_dynamic_indices", "_dynamo_propagated_dynamic_indices"):
        setattr(tensor, attribute, getattr(tensor, attribute, set()) | dims)


def is_static(tensor: torch.Tensor) -> bool:
    """Whether a tensor is known to have no symbolic sizes without looking at them one by one: most are."""
    return type(tensor) is FakeTensor and tensor.fake_mode.shape_env is None


def python_kernels_first() -> Any:
    """Let torch's Python kernels stand in front of those in C++.

    Some of the latter (padding, recurrent layers) read sizes as numbers, which would fix a symbolic size to that of the
    example.
    """
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def dispatch_with_symbols(mode: FakeTensorMode) -> Callable[..., Any]:
    """What a fake mode with symbolic sizes does for an operator: those without a meta kernel run in Python."""
    in_python: dict[Any, bool] = {}

    def dispatch(op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        composite = in_python.get(op)
        if composite is None:
            composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeExplicitAutograd")
            in_python[op] = composite
        if not composite:
            return mode.dispatch(op, types, args, kwargs)
        with python_kernels_first():
            return mode.dispatch(op, types, args, kwargs)

    return dispatch


_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class ModeForAllSizes(FakeTensorMode):
    """A fake mode that takes no notice of which library would run a convolution.

    Below 16 images that may be another one. It decides how the result lies in memory, and nothing else; a graph that is
    run chooses again. What the shapes themselves require is asked of the meta kernel.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _CONVOLUTIONS or self.shape_env is None:
            return super().dispatch(func, types, args, kwargs)
        run_on_meta(self, func, args, kwargs or {})
        with self.shape_env.suppress_guards():
            return super().dispatch(func, types, args, kwargs)


SPARSE_PARTS = (
    *(torch.Tensor._values, torch.Tensor._indices, torch.Tensor.values, torch.Tensor.indices),
    *(torch.Tensor.col_indices, torch.Tensor.row_indices),
)


"""How a program asks for the parts of a sparse tensor that are as long as it has elements."""


SPARSE_NUMBERS = (torch.Tensor._nnz, torch.Tensor.is_coalesced)


"""What is asked of a sparse tensor that guards compare where it is an input."""


def stored_elements(tensor: torch.Tensor) -> int:
    """How many elements a sparse tensor holds."""
    return tensor._nnz()
