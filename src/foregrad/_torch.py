"""The one seam to torch's private parts, seen to work on torch 2.11 and 2.13.

Every private name that Foregrad touches stands here, with the reason. Nothing else in the package may reach below
torch's public face (a test checks it).
"""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes
import functools
import gc
import itertools
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree  # the tree flattening that torch itself uses: containers registered there count
from torch._C import _autograd, _dynamo
from torch._guards import TracingContext  # front ends hand the fake mode and output strides over in it
from torch._higher_order_ops.auto_functionalize import auto_functionalized, can_auto_functionalize
from torch._higher_order_ops.effects import (  # loaded by torch itself
    _EffectType,
    _get_op_qualname,
    has_effects,
    with_effects,
)
from torch._higher_order_ops.print import print as print_in_graph
from torch._higher_order_ops.torchbind import call_torchbind
from torch._library import simple_registry
from torch._library.fake_class_registry import FakeScriptMethod, FakeScriptObject, _is_script_object, find_fake_class
from torch._logging import getArtifactLogger, trace_structured  # TORCH_LOGS=aot_joint_graph,aot_graphs
from torch._logging._internal import trace_log
from torch._ops import HigherOrderOperator, OpOverload, TorchBindOpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch.fx._lazy_graph_module import _LazyGraphModule  # generates its code on the first call only
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    free_symbols,
)
from torch.nested._internal import nested_tensor  # a fake mode loads it, and goes on with its numbers
from torch.nn.utils import parametrize  # which counts the blocks in which it keeps what it has computed
from torch.utils._device import DeviceContext  # the mode behind a default device
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy  # what bounds a symbolic size
from torch.utils.checkpoint import CheckpointFunction, _CachedTorchDispatchMode, _CheckpointFrame
from torch.utils.hooks import BackwardHook as _BackwardHook

LazyGraphModule = _LazyGraphModule
CheckpointFrame = _CheckpointFrame  # leads to what a checkpoint runs again
BackwardHook = _BackwardHook  # calls the backward hooks of a module
disable_modes = _disable_current_modes

__all__ = [
    "DataDependentOutputException",
    "DimDynamic",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "LazyGraphModule",
    "OpOverload",
    "ShapeEnv",
    "TorchDispatchMode",
    "TracingContext",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "artifact_logger",
    "auto_functionalized",
    "disable_modes",
    "free_symbols",
    "is_traceable_wrapper_subclass",
    "pytree",
    "structured_trace_wanted",
    "trace_structured",
    "with_effects",
]

# ------------------------------------------------------------------------------------------------ guards
# Checking type, dispatch keys (which hold layout, conj, neg and inference bits), dtype, device, requires_grad,
# sizes and strides of all inputs in one C++ call is what keeps a guard below 0.1 us an input.
GlobalStateGuard = _dynamo.guards.GlobalStateGuard  # grad mode, autocast, determinism, default dtype in one call
_dict_version: Callable[[Any], int] = _dynamo.guards.dict_version


def _version_or_empty(table: Any) -> int:
    """From Python 3.12 on the number does not tell when an empty dict is filled at once: `{}.update(other)`."""
    return _dict_version(table) if table else -1


# Changes whenever the dict does.
dict_version: Callable[[Any], int] = _dict_version if sys.version_info < (3, 12) else _version_or_empty


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


def global_module_hooks() -> list[Any]:
    """Hooks that run for every module."""
    module = torch.nn.modules.module
    return [getattr(module, name) for name in _GLOBAL_HOOKS]


_GLOBAL_HOOKS = [
    name
    for name, value in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and name.endswith("_hooks") and isinstance(value, dict)
]
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


# ---------------------------------------------------------------------------------------------- autograd
def boundary_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the checks for functorch, which the caller has done."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def next_sequence_number() -> int:
    """The number that autograd gives to the next node: an operator's own node was numbered just before it ran."""
    return int(_autograd._get_sequence_nr())


def running_node_number() -> int | None:
    """The sequence number of the autograd node that runs now, in backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def accumulates_gradient() -> bool:
    """Whether autograd is adding to a `.grad` right now, in backward."""
    node = torch._C._current_autograd_node()
    return node is not None and name_of_node(node) == "torch::autograd::AccumulateGrad"


def accumulating_into() -> torch.Tensor | None:
    """The leaf to which the autograd node that runs now adds a gradient, if it is such a node."""
    return getattr(torch._C._current_autograd_node(), "variable", None)


def saved_of_determinant() -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix and its determinant, as the node of a determinant that runs now has saved them, with their history."""
    node: Any = torch._C._current_autograd_node()
    return node._saved_A, node._saved_result


def running_node_name() -> str:
    """The name of the autograd node that runs now, as torch's own messages write it."""
    return name_of_node(torch._C._current_autograd_node())


def name_of_node(node: Any) -> str:
    """The name of an autograd node; a custom function may have put something else under `name` on its own."""
    return str(type(node).name(node))


def gradients_of(
    targets: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    create_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` that keeps the tape and that function modes do not see: they are for user-written code."""
    engine = torch.autograd.Variable._execution_engine
    # Where there is nothing to ask for, autograd still says what it refuses.
    found = engine.run_backward(
        tuple(targets),
        tuple(tangents),
        True,
        create_graph,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=not inputs,
    )
    return tuple(found) if inputs else ()


def run_engine(
    outputs: tuple[Any, ...],
    gradients: Any,
    retain_graph: bool | None,
    create_graph: bool,
    inputs: tuple[Any, ...],
    *,
    allow_unreachable: bool,
    accumulate: bool,
) -> tuple[torch.Tensor | None, ...]:
    """What `torch.autograd.backward` and `grad` do once function modes have seen them: theirs is not called again.

    Gradients that are not given are made by torch's own rules, with its errors.
    """
    given = torch.autograd._tensor_or_tensors_to_tuple(gradients, len(outputs))
    started = torch.autograd._make_grads(outputs, given, is_grads_batched=False)
    retain = create_graph if retain_graph is None else retain_graph
    engine = torch.autograd.Variable._execution_engine
    return engine.run_backward(
        outputs, started, retain, create_graph, inputs, allow_unreachable=allow_unreachable, accumulate_grad=accumulate
    )


def keeps_graph() -> bool:
    """Whether the backward that runs now was told to keep what was saved for it."""
    return bool(_autograd._get_current_graph_task_keep_graph())


def backward_id() -> int:
    """The number of the backward that runs now; there is no public name for it (torch 2.11 to 2.13)."""
    return torch._C._current_graph_task_id()


def will_run(node: Any) -> bool:
    """Whether the backward that runs now goes on to another node: nobody may have asked for a gradient there."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf that `torch.autograd.grad` was asked about; one that it was not gives False
        return True


def frees_when_run(node: Any) -> bool:
    """Whether a node holds saved tensors, which a backward frees once it has used them."""
    if hasattr(type(node), "_raw_saved_tensors"):  # a custom function
        try:
            return bool(node._raw_saved_tensors)
        except RuntimeError:  # it has run already, and says so even if it had saved none
            return False
    if type(node).__name__ == "CopySlices" or name_of_node(node).startswith("Foreach"):
        return True  # the first drops the whole node that it wraps, the others their lists, which cannot be looked at
    return any(name.startswith("_raw_saved_") and _is_saved(node, name) for name in dir(node))


def _is_saved(node: Any, name: str) -> bool:
    """Whether there is a tensor in a place for saved ones; one that may not be looked at any more is there too."""
    try:
        raw = getattr(node, name)
        places = raw if isinstance(raw, (tuple, list)) else (raw,)
        if any(place.unpack_hook is not None for place in places):  # looking at it would recompute a checkpoint
            return True
        return getattr(node, name.removeprefix("_raw")) is not None
    except RuntimeError:
        return True


HANDS_OVER = torch.overrides.handle_torch_function.__code__
"""The code with which a function of torch's in Python calls function modes; those in C call them by themselves."""


def function_that_asks(func: Any, frame: types.FrameType) -> Any:
    """What a function of torch's in Python hands over to a function mode when it is called: itself.

    It finds itself by its name (`relu`, `Tensor.norm`), under which there may be another one by now that the user has
    put there, and that perhaps calls it. `frame` is the one that hands over.
    """
    asking = frame.f_back
    if asking is None or getattr(func, "__code__", None) is asking.f_code or asking.f_code.co_freevars:
        return func
    code = asking.f_code
    found = asking.f_globals.get(code.co_name), getattr(torch.Tensor, code.co_name, None)
    return types.FunctionType(code, asking.f_globals) if any(known is func for known in found) else func


CALL_OF_A_MODULE = torch.nn.Module._call_impl.__code__
"""The code that calls a module: it reads the hooks, and hands over to the module's own code."""


def counts_versions(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a version counter, which inference tensors have not; there is no public way to ask."""
    try:
        return tensor._version >= 0
    except RuntimeError:
        return False


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Make the version counter say what eager's would."""
    _autograd._unsafe_set_version_counter((tensor,), (version,))


def shares_version_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a write to one tensor counts for the other: true of `detach()`, false of `.data`. Only trying tells."""
    if a.is_inference() or b.is_inference():
        return False
    before = a._version
    moved = b._version
    set_version(a, before + 1)
    shared = b._version != moved
    set_version(a, before)
    return shared


def copy_creation(view: torch.Tensor, real: torch.Tensor) -> None:
    """Let autograd allow and forbid for a view what it does for another: made under no_grad, one of several results."""
    _autograd._set_creation_meta(view, _autograd._get_creation_meta(real))


def lock_view(view: torch.Tensor) -> None:
    """Let autograd forbid writes to a view, with gradients on, as it does for one of several results."""
    _autograd._set_creation_meta(view, _autograd.CreationMeta.MULTI_OUTPUT_NODE)


def overrides_functions(kind: type[torch.Tensor]) -> bool:
    """Whether torch's functions ask a tensor class what they give: a subclass of its own type, by default."""
    disabled: Any = torch._C._disabled_torch_function_impl
    return kind.__torch_function__ is not disabled


def made_in_mode(tensor: torch.Tensor, inference: bool) -> torch.Tensor:
    """A tensor in the same memory that is an inference tensor, or none, wherever the given one was made."""
    with torch.inference_mode(inference), torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        return set_lazy_bits(made, tensor.is_conj(), tensor.is_neg())


def creation_of(view: torch.Tensor) -> str:
    """How a view came to be, in autograd's words: DEFAULT, NO_GRAD_MODE, MULTI_OUTPUT_NODE, ..."""
    return str(_autograd._get_creation_meta(view).name)


def is_version_error(error: BaseException) -> bool:
    """Whether autograd refuses because something that it saved was written to."""
    return any(words in str(error) for words in ("modified by an inplace operation", "has been modified inplace"))


def refusal_of_write(view: torch.Tensor) -> RuntimeError | None:
    """The error with which autograd forbids to write to a view with gradients on, if it does.

    A view that came about in the same way, of other tensors, is asked.
    """
    if not view._is_view() or view._base is None:
        return None
    like = torch.zeros(1, requires_grad=True)
    with torch.enable_grad():
        base = like if view._base.is_leaf and view._base.requires_grad else like * 1
        other = base.view(1)
        copy_creation(other, view)
        try:
            other.mul_(2)
        except RuntimeError as error:
            return error
    return None


def is_custom_function_node(node: Any) -> bool:
    """Whether an autograd node belongs to a user-written autograd.Function."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def is_reentrant_checkpoint(node: Any) -> bool:
    """Whether an autograd node belongs to `torch.utils.checkpoint` with `use_reentrant=True`."""
    return isinstance(node, CheckpointFunction._backward_cls)


def single_gradients_asked() -> bool:
    """Whether the backward that runs now is for some inputs only: `torch.autograd.grad`, or `backward(inputs=...)`."""
    return not torch.autograd._is_checkpoint_valid()


def refuse_single_gradients() -> None:
    """Raise what a reentrant checkpoint says to `torch.autograd.grad`: it looks at that before anything else."""
    CheckpointFunction.backward(None)


def has_accumulation_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks run when a gradient reaches a tensor; there is no public way to ask."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def _no_search_for_nan() -> contextlib.AbstractContextManager[Any]:
    """Anomaly mode looks for NaN in tensors that have no data. It is one for all threads: it is left alone if off."""
    if not torch.is_anomaly_enabled():
        return contextlib.nullcontext()
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


def saved_hooks_are_on() -> bool:
    """Whether hooks of the caller's get every tensor that is saved: no public function tells (2.11 to 2.13)."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def recording_autograd() -> Iterator[None]:
    """Autograd as a recording needs it: views replayed, on this thread, without the caller's saved-tensor hooks."""
    hooks = []
    while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        with (
            torch.autograd._force_original_view_tracking(True),
            torch.autograd.set_multithreading_enabled(False),
            _no_search_for_nan(),
        ):
            yield
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


def dynamo_aside() -> contextlib.AbstractContextManager[Any]:
    """Compiled functions inside a program run as they were written: Dynamo would trace the recorder itself.

    Loading Dynamo takes a second, so a program that does not use it does not load it.
    """
    loaded = "torch._dynamo.eval_frame" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()


# ------------------------------------------------------------------------------------------- state to keep
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


def all_objects_count_as_old() -> None:
    """Move everything to the oldest generation of the garbage collector."""
    if not gc.get_freeze_count():  # the user has frozen nothing, so that nothing of theirs is unfrozen
        gc.freeze()
        gc.unfreeze()
    else:
        gc.collect(1)


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


# ---------------------------------------------------------------------------------------------- operators
without_function_modes = torch._C.DisableTorchFunction  # the public context leaves modes on


def is_composite(op: OpOverload) -> bool:
    """Whether an operator is nothing but a composition of others (it reaches a mode whole only in inference mode).

    The dispatcher does not know TorchScript's own operators, such as `prim::device`.
    """
    if not torch._C._dispatch_has_kernel(op.name()):
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(op.name(), "CompositeImplicitAutograd") and not has_kernel(op.name(), "CPU")


def taken_apart(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composition as eager runs it. `op.decompose` prefers torch's rewritings in Python, and that of `lstm` gives
    a state of another shape before torch 2.13."""
    if not torch.is_inference_mode_enabled():
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    # A mode is below what counts the writes to normal tensors, and tells views of them, in inference mode as well.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def auto_functionalizable(op: OpOverload) -> bool:
    """Whether torch can make an operator that writes functional by cloning what it writes to."""
    return bool(can_auto_functionalize(op))


# The operators that begin and end a chain of tokens inside a graph; backends know them.
MAKE_TOKEN: OpOverload = torch.ops.prims._make_token.default
SINK_TOKENS: OpOverload = torch.ops.prims._sink_tokens.default


def effect_of(op: OpOverload | HigherOrderOperator) -> str | None:
    """The kind of side effect that an operator is registered with; it may be registered at any time."""
    held = _effect_holders.get(id(op))
    if held is None:
        held = _effect_holders[id(op)] = op, _effect_holder(op)
    effect = held[1].effect
    return None if effect is None or not has_effects(op) else str(effect.value).lower()


_effect_holders: dict[int, tuple[Any, Any]] = {}  # by id of the operator, which is kept


def _effect_holder(op: OpOverload | HigherOrderOperator) -> Any:
    """Where torch keeps the effect of an operator: looked up once, for this is asked for every recorded operator."""
    return simple_registry.singleton.find(_get_op_qualname(op)).effect


# Higher-order operators whose arguments are tensors, plain values and script objects: they need no look inside.
EFFECTFUL_HIGHER_ORDER = frozenset({call_torchbind, print_in_graph})


def takes_script_objects(op: OpOverload) -> bool:
    """Whether the schema of an operator has a place for a script object."""
    return isinstance(op, TorchBindOpOverload)


def is_script_object(value: object) -> bool:
    """Whether a value is an object of a C++ class that is registered with torch."""
    return isinstance(value, torch.ScriptObject) and bool(_is_script_object(value))


def fake_script_state(real: Any, fake: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An instance of the fake class that is registered for a script object, with fake tensors in its state."""
    with disable_modes():
        state = real.__obj_flatten__()
    name = real._type().qualified_name()
    found = find_fake_class(name)
    if found is None:
        raise RuntimeError(f"{name} has none.")
    return found.__obj_unflatten__(pytree.tree_map_only(torch.Tensor, fake, state))


def fake_script_object(real: Any, state: Any) -> Any:
    """A fake object in the form that torch's operators take; its own constructor would copy the real object."""
    fake = FakeScriptObject.__new__(FakeScriptObject)
    name = real._type().qualified_name()
    members = {"wrapped_obj": state, "script_class_name": name, "real_obj": real}
    methods = [method for method in real._method_names() if hasattr(state, method)]
    members |= {method: FakeScriptMethod(fake, method, None) for method in methods}
    for member, value in members.items():
        object.__setattr__(fake, member, value)
    return fake


def script_object_identity(real: Any) -> int:
    """What tells one script object from another: Python may hold several wrappers of one, which hash alike."""
    return hash(real)


_call_script_method = torch.ScriptMethod.__call__
_recordings_lock = threading.Lock()


class _Replaced:
    """A class of torch's has another method as long as any thread is inside."""

    def __init__(self, owner: type, name: str, method: Callable[..., Any]) -> None:
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


def _call_or_record(method: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of a script object, called as an operator where a mode listens."""
    if dispatch_mode_depth() and is_script_object(method.raw_owner):
        return call_torchbind(method.raw_owner, method.name, *args, **kwargs)
    return _call_script_method(method, *args, **kwargs)


# Methods of script objects run in C++, where no mode sees them; patching the call is what torch itself does.
script_calls_seen = _Replaced(torch.ScriptMethod, "__call__", _call_or_record)


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


@contextlib.contextmanager
def module_calls_seen(watch: ModuleWatch) -> Iterator[None]:
    """Tell a watch which modules the running thread calls; hooks on all modules would make each call take longer."""
    global _call_module
    thread = threading.get_ident()
    with _recordings_lock:
        before = _module_calls.get(thread)
        if not _module_calls:
            _call_module = torch.nn.Module._call_impl
        _module_calls[thread] = watch
        torch.nn.Module._call_impl = _call_and_note  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _recordings_lock:
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
    with _recordings_lock:
        before = _own_depths.get(thread)
        _own_depths[thread] = function_mode_depth()
        torch.overrides.has_torch_function = _overrides_as_in_eager
        torch.Tensor.as_subclass = _as_subclass  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _recordings_lock:
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


PythonNode = torch.autograd.function.BackwardCFunction  # of a custom function, on autograd's tape


def custom_function_of(node: PythonNode) -> type:
    """The class whose backward a node calls."""
    found: type = type(node)._forward_cls  # type: ignore[attr-defined]
    return found


_BETWEEN = frozenset({*sys.stdlib_module_names, "sympy", "mpmath"})  # who asks on behalf of others


def _asking_code() -> types.CodeType | None:
    """The code that asks for an attribute, past the library functions that it asks with."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _BETWEEN:
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _class_as_asked(plain: type, is_users: Callable[[types.CodeType], bool]) -> Callable[[Any, str], Any]:
    def attribute(symbol: Any, name: str) -> Any:
        if name == "__class__":
            code = _asking_code()
            if code is not None and is_users(code):
                return plain
        return object.__getattribute__(symbol, name)

    return attribute


@functools.cache
def sizes_like_numbers(is_users: Callable[[types.CodeType], bool]) -> Sequence[contextlib.AbstractContextManager[Any]]:
    """In these contexts `isinstance` takes symbolic numbers for plain ones, where the user's code asks.

    It asks a value for its class. Torch itself must tell symbols from numbers.
    """
    kinds = ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool))
    return [_Replaced(kind, "__getattribute__", _class_as_asked(plain, is_users)) for kind, plain in kinds]


_functorch_utils: Any = torch.autograd.function._functorch.utils
_unwrap_arguments = _functorch_utils.unwrap_dead_wrappers
_push_saved_hooks = _autograd._push_saved_tensors_default_hooks


class AutogradWatch(Protocol):
    """Wants to know what a program tells autograd past all modes."""

    def note_applied(self, args: tuple[Any, ...]) -> None:
        """A custom function is applied."""

    def note_saved_hooks(self, checkpoint: CheckpointFrame | None) -> None:
        """Hooks on what autograd saves are set, which it will call in backward; those of a checkpoint, perhaps."""

    def note_module_hooks(self, hooks: BackwardHook) -> None:
        """A module with backward hooks is called."""

    def note_cache(self, storage: dict[Any, Any]) -> None:
        """A selective checkpoint will keep values there."""


_watches: dict[int, AutogradWatch] = {}  # by thread


def _see_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    watch = _watches.get(threading.get_ident())
    if watch is not None:
        watch.note_applied(args)
    unwrapped: tuple[Any, ...] = _unwrap_arguments(args)
    return unwrapped


def _see_saved_hooks(pack: Any, unpack: Any) -> None:
    watch = _watches.get(threading.get_ident())
    if watch is not None:
        watch.note_saved_hooks(_checkpoint_of(pack))
    _push_saved_hooks(pack, unpack)


def _checkpoint_of(pack: Any) -> CheckpointFrame | None:
    """The checkpoint that a hook on what autograd saves belongs to: the hook has it in a variable."""
    if getattr(pack, "__module__", None) != CheckpointFrame.__module__:
        return None
    held = [cell.cell_contents for cell in pack.__closure__ or ()]
    return next((value for value in held if isinstance(value, CheckpointFrame)), None)


def cells_of_checkpoint(frame: CheckpointFrame) -> list[types.CellType]:
    """The variables in which a checkpoint keeps what it runs again, and in torch 2.11 what that was called with."""
    saver = getattr(vars(frame).get("input_saver"), "grad_fn", None)
    functions = [vars(frame)["recompute_fn"], getattr(saver, "get_args", None)]
    cells = [cell for function in functions for cell in getattr(function, "__closure__", None) or ()]
    return [cell for cell in cells if cell != types.CellType()]  # which are filled


_make_module_hooks = BackwardHook.__init__


def _see_module_hooks(hooks: Any, *args: Any, **kwargs: Any) -> None:
    _make_module_hooks(hooks, *args, **kwargs)
    watch = _watches.get(threading.get_ident())
    if watch is not None:
        watch.note_module_hooks(hooks)


_make_cache = _CachedTorchDispatchMode.__init__


def _see_cache(mode: Any, *args: Any, **kwargs: Any) -> None:
    _make_cache(mode, *args, **kwargs)
    watch = _watches.get(threading.get_ident())
    if watch is not None:
        watch.note_cache(mode.storage)


@contextlib.contextmanager
def autograd_watched(watch: AutogradWatch) -> Iterator[None]:
    """Tell a watch what the running thread does to autograd past all modes.

    `Function.apply` and `saved_tensors_hooks` look these two helpers up at each call (torch 2.11 to 2.13), so that
    those are seen, too, who have kept the bound method from before.
    """
    thread = threading.get_ident()
    with _recordings_lock:
        before = _watches.get(thread)
        _watches[thread] = watch
        _functorch_utils.unwrap_dead_wrappers = _see_arguments
        _autograd._push_saved_tensors_default_hooks = _see_saved_hooks  # type: ignore[assignment]
        _CachedTorchDispatchMode.__init__ = _see_cache  # type: ignore[method-assign, assignment]
        BackwardHook.__init__ = _see_module_hooks  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _recordings_lock:
            if before is None:
                del _watches[thread]
            else:
                _watches[thread] = before
            if not _watches:
                _functorch_utils.unwrap_dead_wrappers = _unwrap_arguments
                _autograd._push_saved_tensors_default_hooks = _push_saved_hooks
                _CachedTorchDispatchMode.__init__ = _make_cache  # type: ignore[method-assign]
                BackwardHook.__init__ = _make_module_hooks  # type: ignore[method-assign]


def effect_type(effect: str) -> Any:
    """torch's own name for a kind of effect."""
    return next(kind for kind in _EffectType if str(kind.value).lower() == effect)


def new_fake_mode(shape_env: ShapeEnv | None, for_all_sizes: bool = False) -> FakeTensorMode:
    """A fake mode that threads may use.

    Without a CUDA device it sets a device guard which belongs, before torch 2.13, to the thread that happens to be the
    first: the process crashes once that thread has ended. A thread that never ends is made the first.
    """
    static = _static_mode()
    if shape_env is None and not for_all_sizes:
        mode = _like_a_new_mode(static)
    else:
        mode = (ModeForAllSizes if for_all_sizes else FakeTensorMode)(shape_env=shape_env)
    if _GUARD_ENDS_WITH_THREAD and mode.avoid_device_init and not _guard_is_set.is_set():
        if threading.current_thread() is threading.main_thread():
            torch._C._ensureCUDADeviceGuardSet()
        else:
            threading.Thread(target=_set_guard_and_stay, daemon=True).start()
            _guard_is_set.wait()
        _guard_is_set.set()
    return mode


@functools.cache
def _static_mode() -> FakeTensorMode:
    """The first mode, for which torch loads much of itself.

    `torch.fx.wrap` leaves its frame in a cycle there, and every frame leads to its callers: until a collection happens
    to come, the user's objects in the frames of a first capture would live on.
    """
    with garbage_collection_paused():
        all_objects_count_as_old()
        mode = FakeTensorMode()
        gc.collect(0)  # what is new, and nothing of the user's
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


def collective_decompositions() -> dict[Any, Callable[..., Any]]:
    """A collective's result is waited for inside of a graph; eager wraps it in a tensor that waits when it is used."""
    if "torch.distributed._functional_collectives" not in sys.modules:
        return {}
    functional: Any = torch.ops._c10d_functional
    return {functional._wrap_tensor_autograd.default: functional.wait_tensor.default}


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
    """The names of what torch itself puts on fake tensors."""
    return frozenset(fake_attributes(FakeTensorMode(), torch.device("cpu")))


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
storages_asked_first = _Replaced(torch.UntypedStorage, "is_shared", _is_shared)


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


def artifact_logger(artifact: str) -> Any:
    """torch's logger for a kind of artefact, under a name below torch's own so that its handlers see it."""
    return getArtifactLogger("torch.foregrad", artifact)


def structured_trace_wanted() -> bool:
    """Whether somebody writes a structured trace; the handler itself finds out only by being given a first record."""
    return any(
        getattr(handler, "root_dir", "") is not None or getattr(handler, "stream", None) is not None
        for handler in trace_log.handlers
    )


def boxed_graph_wrapper_type() -> type | None:
    """The module type with which Dynamo asks for a boxed calling convention, if Dynamo is in use."""
    utils = sys.modules.get("torch._dynamo.utils")
    return None if utils is None else getattr(utils, "GmWrapper", None)


def is_backward_state(value: Any) -> bool:
    """Whether a value is what Dynamo hands hooks over in, from the forward to a backward that it captures whole."""
    module = sys.modules.get("torch.fx.experimental._backward_state")
    return module is not None and isinstance(value, module.BackwardState)


def first_call_is_fake() -> bool:
    """Whether a front end that compiles in stages wants shapes, and no data, from the first call."""
    context = TracingContext.try_get()
    return context is not None and bool(context.fakify_first_call)


def expression_of(value: Any) -> Any:
    """The sympy expression of a symbolic number."""
    return value.node.expr


def mark_dynamic_dims(tensor: torch.Tensor, dims: set[int]) -> None:
    """Tell Dynamo not to specialise on these sizes; the attribute was renamed in 2.13."""
    for attribute in ("_dynamo_weak_dynamic_indices", "_dynamo_propagated_dynamic_indices"):
        setattr(tensor, attribute, getattr(tensor, attribute, set()) | dims)


def is_static(tensor: torch.Tensor) -> bool:
    """Whether a tensor is known to have no symbolic sizes without looking at them one by one: most are."""
    return type(tensor) is FakeTensor and tensor.fake_mode.shape_env is None


def hint_of(value: Any) -> int:
    """The number that a symbolic integer had while recording; asking for it adds no guard."""
    return int(value.node.hint) if isinstance(value, torch.SymInt) else int(value)


def sympy_functions() -> Any:
    """torch's own sympy functions: FloorDiv, Mod and the like."""
    from torch.utils._sympy import functions

    return functions


def shape_guard_expression(shape_env: ShapeEnv, placeholders: Sequence[Any]) -> str | None:
    """The guards that a recording added, as an expression over the placeholders."""
    return shape_env.produce_guards_expression(placeholders)


def shape_guard(expression: str, count: int) -> Callable[..., bool]:
    """A function of the inputs that evaluates such an expression."""
    names = [f"t{i}" for i in range(count)]
    code = f"lambda {', '.join(names)}: (lambda L: {expression})({{{', '.join(f'{n!r}: {n}' for n in names)}}})"
    return eval(code, dict(symbolic_shapes.SYMPY_INTERP))


def symbolic_context(tensor: torch.Tensor) -> StatelessSymbolicContext[Any, Any]:
    """Every size of the tensor is a symbol of its own unless it equals another one."""
    return StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK] * tensor.dim())


def local_source(name: str) -> Any:
    """A name for an input, in the form in which a shape environment wants it."""
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)


def named_symbol(shape_env: ShapeEnv, name: str, value: int, low: int | None, high: int | None) -> Any:
    """A symbolic size between two bounds; sizes 0 and 1 are left out, as programs decide by them."""
    source = local_source(name)
    symbol = shape_env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
    known = shape_env.var_to_range[symbol]
    bounds = ValueRanges(known.lower if low is None else max(low, 2), known.upper if high is None else high)
    shape_env._update_var_to_range(symbol, known & bounds)
    return shape_env.create_symintnode(symbol, hint=value, source=source)


def symbol_range(shape_env: ShapeEnv, symbol: Any) -> Any:
    """The values that a symbol may take, as the shape environment knows them now."""
    return shape_env.var_to_range[symbol]


def conditions_beside_ranges(shape_env: ShapeEnv) -> list[Any]:
    """What a recording assumed about symbols that the ranges of the symbols do not say."""
    conditions = [shape_env.replace(guard.expr) for guard in shape_env.guards]
    return [c for c in conditions if not bool(bound_sympy(c, shape_env.var_to_range) == ValueRanges.wrap(True))]


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


# The operator behind torch.no_grad and torch.enable_grad: function modes see it, and graphs above autograd hold it.
SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled


def autograd_left_out() -> Any:
    """Leave autograd out: operators reach modes as they were called, without being taken apart."""
    return torch._C._AutoDispatchBelowAutograd()


@contextlib.contextmanager
def custom_functions_refused(refuse: Callable[[str], None]) -> Iterator[None]:
    """Call `refuse` where the running thread applies a custom function: no mode sees it without autograd."""
    apply, thread = torch.autograd.Function.__dict__["apply"], threading.get_ident()

    def refuse_here(cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            refuse(cls.__name__)
        return apply.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(refuse_here)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
