"""What a compiled call checks, and what a recording leaves as it was: tensors, dicts, settings, modes, hooks."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch._C import _dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize  # which counts the blocks in which it keeps what it has computed
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks  # no public way to see them
from torch.utils._device import DeviceContext  # the mode behind a default device
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

disable_modes = _disable_current_modes


# Checking type, dispatch keys (which hold layout, conj, neg and inference bits), dtype, device, requires_grad,
# sizes and strides of all inputs in one C++ call is what keeps a guard below 0.1 us an input.
GlobalStateGuard = _dynamo.guards.GlobalStateGuard  # grad mode, autocast, determinism, default dtype in one call


def compared_settings(guard: Any) -> dict[str, Any]:
    """What a `GlobalStateGuard` compares, by torch's own names: to say which of it has changed."""
    found: dict[str, Any] = json.loads(guard.__getstate__())
    return found


# Goes up with each change, so that no number comes twice: a dict that was filled and is empty again has a new one.
dict_changes: Callable[[Any], int] = _dynamo.guards.dict_version


def _version_or_empty(table: Any) -> int:
    """From Python 3.12 on the number does not tell when an empty dict is filled at once: `{}.update(other)`."""
    return dict_changes(table) if table else -1


# Changes whenever the dict does.
dict_version: Callable[[Any], int] = dict_changes if sys.version_info < (3, 12) else _version_or_empty


def tensor_guard(
    tensors: Sequence[torch.Tensor], sizes: list[list[int | None]], strides: list[list[int | None]]
) -> Callable[..., bool]:
    """A C++ check for tensors like these; a size or stride of None is not checked."""
    guards: Any = _dynamo.guards.TensorGuards
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view  # asked of every input at each call; `_base` costs more


any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


deterministic_enabled: Callable[[], bool] = torch._C._get_deterministic_algorithms


dispatch_mode_depth: Callable[[], int] = torch._C._len_torch_dispatch_stack


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled  # without the context object of the public one


SettingProperty = torch.backends.ContextProp  # what the settings in torch.backends are


def settings_modules() -> list[Any]:
    """Namespaces of torch with functions that say how it is set: one by one, for a program that names them."""
    backends = [value for value in vars(torch.backends).values() if isinstance(value, types.ModuleType)]
    return [torch, torch.autograd, torch.cuda, torch.compiler, *backends]


FAST_ATTENTION = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)


"""What modules of torch call in evaluation, where the settings of attention let them."""


def attention_settings() -> tuple[Any, ...]:
    """Which kernels attention may use: the choice is made while recording."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_math_sdp_allow_fp16_bf16_reduction(),
        tuple(torch._C._get_sdp_priority_order()),
        torch.backends.mha.get_fastpath_enabled(),
    )


def _set_attention(settings: tuple[Any, ...]) -> None:
    flash, efficient, math, cudnn, halves, order, fast_path = settings
    torch._C._set_sdp_use_flash(flash)
    torch._C._set_sdp_use_mem_efficient(efficient)
    torch._C._set_sdp_use_math(math)
    torch._C._set_sdp_use_cudnn(cudnn)
    torch._C._set_math_sdp_allow_fp16_bf16_reduction(halves)
    torch._C._set_sdp_priority_order(list(order))
    torch.backends.mha.set_fastpath_enabled(fast_path)


def _anomaly_mode() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _device_autocast() -> tuple[Any, ...]:
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))


def _set_printing(options: dict[str, Any]) -> None:
    vars(torch._tensor_str.PRINT_OPTS).update(options)


SETTINGS_BY_CALLS: tuple[tuple[str, tuple[str, str], tuple[Callable[[], Any], Callable[[Any], Any]]], ...] = (
    (
        "anomaly mode",
        ("set_detect_anomaly set_anomaly_enabled", ""),
        (_anomaly_mode, lambda mode: torch.set_anomaly_enabled(*mode)),
    ),
    (
        "choice of attention kernels",
        (
            "enable_flash_sdp enable_mem_efficient_sdp enable_math_sdp enable_cudnn_sdp set_fastpath_enabled "
            "allow_fp16_bf16_reduction_math_sdp",
            "",
        ),
        (attention_settings, _set_attention),
    ),
    (
        "use of oneDNN",
        ("_set_mkldnn_enabled set_flags", ""),
        (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    ),
    (
        "autocast by device",
        ("", "get_autocast_dtype is_autocast_enabled"),
        (_device_autocast, lambda kept: None),
    ),
    (
        "printing of tensors",
        ("set_printoptions", ""),
        (lambda: dict(vars(torch._tensor_str.PRINT_OPTS)), _set_printing),
    ),
    (
        "conversion of parameters",
        ("set_overwrite_module_params_on_conversion", "get_overwrite_module_params_on_conversion"),
        (
            torch.__future__.get_overwrite_module_params_on_conversion,
            torch.__future__.set_overwrite_module_params_on_conversion,
        ),
    ),
)
"""What it is; the names of functions that set it, and of those that read it; how it is read, and set."""


def global_module_hooks() -> list[Any]:
    """Hooks that run for every module."""
    module = torch.nn.modules.module
    return [getattr(module, name) for name in _GLOBAL_HOOKS]


_GLOBAL_HOOKS = [
    name
    for name, value in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and name.endswith("_hooks") and isinstance(value, dict)
]


def global_optimizer_hooks() -> list[dict[Any, Any]]:
    """Hooks that run around the step of every optimizer."""
    return [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]


function_mode_depth: Callable[[], int] = torch._C._len_torch_function_stack


def foreign_function_mode() -> bool:
    """Whether a torch-function mode of the user's is on, which must see every call: a default device is none."""
    return function_mode_depth() > 0 and any(
        type(mode) is not DeviceContext for mode in torch.overrides._get_current_function_mode_stack()
    )


def forward_ad_level() -> int:
    """The level of forward-mode AD, negative when there is none: a compiled call then inlines the original function."""
    return int(torch.autograd.forward_ad._current_level)


def under_functorch_transform() -> bool:
    """Whether vmap, grad or jvp is running: a compiled call then inlines the original function."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_includes_key = torch._C._dispatch_tls_is_dispatch_key_included


_VMAP_MODE: Any = torch._C._parse_dispatch_key("VmapMode")


def under_vmap() -> bool:
    """Whether gradients may be batched now: by functorch, or by the older vmap behind `is_grads_batched`."""
    return torch._C._functorch.peek_interpreter_stack() is not None or _includes_key(_VMAP_MODE)


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a functorch transform."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Run as if no transform of functorch were on: inside of one, no tensor can be made to require grad."""
    return temporarily_clear_interpreter_stack() if under_functorch_transform() else contextlib.nullcontext()


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Recording makes many objects that live on; collecting among them costs a third of the time and finds nothing.

    Afterwards they count as old: the next collection would go through all of them otherwise.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            all_objects_count_as_old()
            gc.enable()


# What a custom function is given as `ctx`: the node of autograd that it belongs to holds one reference to it.
FunctionContext: type = torch._C._FunctionBase


_use_count: Callable[[torch.Tensor], int] = vars(torch._C.TensorBase)["_use_count"]


def held_by_cpp(tensor: torch.Tensor) -> bool:
    """Whether C++ holds a tensor: it has one reference to the Python object then, however many holders there are."""
    return _use_count(tensor) > 1


_has_frozen_objects = False


def all_objects_count_as_old() -> None:
    """Move everything to the oldest generation of the garbage collector."""
    global _has_frozen_objects
    # What the user has frozen stays so. It is counted one by one, so once it was found it is not counted again.
    _has_frozen_objects = _has_frozen_objects or bool(gc.get_freeze_count())
    if not _has_frozen_objects:
        gc.freeze()
        gc.unfreeze()
    else:
        gc.collect(1)


def referrers_of(values: Sequence[Any]) -> list[Any]:
    """What refers to any of these objects; `gc.get_referrers` leaves out what the user has frozen."""
    found = gc.get_referrers(*values)
    return [*found, *_frozen_referrers(values)] if _has_frozen_objects else found


def _frozen_referrers(values: Sequence[Any]) -> list[Any]:
    """Frozen objects are in no list that Python shows: modules and all other objects lead to them."""
    wanted = set(map(id, values))
    pending = gc.get_objects()
    shown = set(map(id, pending))
    pending.append(sys.modules)
    seen, found = set(map(id, pending)), []
    while pending:
        value = pending.pop()
        inside = gc.get_referents(value)
        if id(value) not in shown and any(id(item) in wanted for item in inside):
            found.append(value)
        following = {id(item): item for item in inside if id(item) not in seen and gc.is_tracked(item)}
        seen.update(following)
        pending.extend(following.values())
    return found


@contextlib.contextmanager
def ambient_state_kept() -> Iterator[None]:
    """Put grad mode, autocast and the random generators back to what they were."""
    grad_enabled = torch.is_grad_enabled()
    cpu_rng = torch.get_rng_state()
    cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    autocast = autocast_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu_rng)
        if cuda_rng is not None:
            torch.cuda.set_rng_state_all(cuda_rng)
        set_autocast_state(autocast)
        set_grad_enabled(grad_enabled)


@dataclass(frozen=True, slots=True)
class Settings:
    """Global settings that a program may read, and must not leave changed."""

    default_dtype: torch.dtype
    default_device: torch.device
    deterministic_mode: int
    matmul_precision: str

    @staticmethod
    def now() -> Settings:
        """As they are."""
        return Settings(
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_deterministic_debug_mode(),
            torch.get_float32_matmul_precision(),
        )

    def restore(self) -> str | None:
        """Put them back; gives the name of one that had changed."""
        now = Settings.now()
        if now == self:
            return None
        if now.default_dtype != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        if now.default_device != self.default_device:
            torch.set_default_device(None if self.default_device.type == "cpu" else self.default_device)
        if now.deterministic_mode != self.deterministic_mode:
            torch.set_deterministic_debug_mode(self.deterministic_mode)
        if now.matmul_precision != self.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        changed = next(f.name for f in fields(self) if getattr(now, f.name) != getattr(self, f.name))
        return changed.replace("_", " ")


AutocastState = tuple[Any, ...]


def autocast_state() -> AutocastState:
    """Everything that autocast reads, as plain data."""
    devices = ("cpu", "cuda")
    return (
        torch.is_autocast_cache_enabled(),
        *((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
    )


def set_autocast_state(state: AutocastState) -> None:
    """The inverse of `autocast_state`."""
    cache, *devices = state
    torch.set_autocast_cache_enabled(cache)
    for device, enabled, dtype in devices:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """Run without autocast: the casts are in the graph already."""
    with torch._C._DisableAutocast():
        yield


recordings_lock = threading.Lock()


class Replaced:
    """A class of torch's has another method, or a module another function, as long as any thread is inside."""

    def __init__(self, owner: type | types.ModuleType, name: str, method: Callable[..., Any]) -> None:
        self._owner, self._name, self._method = owner, name, method
        self._lock = threading.Lock()
        self._inside = 0
        self._before = vars(owner).get(name)  # None if it is inherited

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            setattr(self._owner, self._name, self._method)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._before is None:
                delattr(self._owner, self._name)
            elif not self._inside:
                setattr(self._owner, self._name, self._before)


class ModuleWatch(Protocol):
    """Wants to know which modules are being called."""

    innermost: Any

    def enter(self, module: torch.nn.Module) -> Any:
        """A module is called; gives what was innermost before."""


_module_calls: dict[int, ModuleWatch] = {}  # by thread


_call_module: Any = None  # what calls a module where nobody watches: the user may have replaced it


def _call_and_note(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    call, watch = _call_module, _module_calls.get(threading.get_ident())
    if watch is None:
        return call(module, *args, **kwargs)
    before = watch.enter(module)
    try:
        return call(module, *args, **kwargs)
    finally:
        watch.innermost = before


_Module = torch.nn.Module


_module_call, _module_call_impl = _Module.__call__, _Module._call_impl


_called_for_all = (*global_module_hooks(), _module_calls)  # empty as long as nobody wants to know of any module


def calls_modules_plainly() -> bool:
    """Whether a call of a module is nothing but that of its own hooks and its forward, as nearly always."""
    plainly = _Module.__call__ is _module_call and _Module._call_impl is _module_call_impl
    return plainly and not any(_called_for_all)


@contextlib.contextmanager
def module_calls_seen(watch: ModuleWatch) -> Iterator[None]:
    """Tell a watch which modules the running thread calls; hooks on all modules would make each call take longer."""
    global _call_module
    thread = threading.get_ident()
    with recordings_lock:
        before = _module_calls.get(thread)
        if not _module_calls:
            _call_module = torch.nn.Module._call_impl
        _module_calls[thread] = watch
        torch.nn.Module._call_impl = _call_and_note  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with recordings_lock:
            if before is None:
                del _module_calls[thread]
            else:
                _module_calls[thread] = before
            if not _module_calls:
                torch.nn.Module._call_impl = _call_module  # type: ignore[method-assign]


@contextlib.contextmanager
def overrides_told_as_in_eager() -> Iterator[None]:
    """Let modules choose as they do in eager.

    They take other kernels where an argument overrides torch's functions (attention in evaluation, with other strides
    and, for padded elements, other values). A recorded tensor does so only for being recorded, and the innermost
    function mode is the recording's own. For the same reason it can be made a plain tensor.
    """
    thread = threading.get_ident()
    with recordings_lock:
        before = _own_depths.get(thread)
        _own_depths[thread] = function_mode_depth()
        torch.overrides.has_torch_function = _overrides_as_in_eager
        torch.Tensor.as_subclass = _as_subclass  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with recordings_lock:
            if before is None:
                del _own_depths[thread]
            else:
                _own_depths[thread] = before
            if not _own_depths:
                torch.overrides.has_torch_function = _has_torch_function
                del torch.Tensor.as_subclass  # that of the class in C is found again


_own_depths: dict[int, int] = {}  # of the function mode of a recording, by thread


_has_torch_function = torch.overrides.has_torch_function


_base_as_subclass = torch.Tensor.as_subclass


def _overrides_as_in_eager(args: Iterable[Any]) -> bool:
    depth = _own_depths.get(threading.get_ident())
    by_module = str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.nn.")  # others are to tell the mode
    if not by_module or depth != 1 or function_mode_depth() != depth:  # modes of others are there in eager as well
        return _has_torch_function(args)
    return any(_overrides_functions(type(value)) for value in args if not isinstance(value, FakeTensor))


def _as_subclass(tensor: torch.Tensor, cls: type[Any]) -> Any:
    """No function mode is told of it."""
    if cls is torch.Tensor and _own_depths.get(threading.get_ident()) == function_mode_depth():
        return torch.ops.aten.alias(tensor)
    return _base_as_subclass(tensor, cls)


def cached_parametrizations() -> int:
    """How many blocks of `parametrize.cached()` are open: in them, what parametrizations give is kept."""
    return int(parametrize._cache_enabled)


def _overrides_functions(kind: type) -> bool:
    found = getattr(kind, "__torch_function__", None)
    return kind is not torch.Tensor and found is not None and found is not torch._C._disabled_torch_function_impl


# The operator behind torch.no_grad and torch.enable_grad: function modes see it, and graphs above autograd hold it.
SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled


def autograd_left_out() -> Any:
    """Leave autograd out: operators reach modes as they were called, without being taken apart."""
    return torch._C._AutoDispatchBelowAutograd()
