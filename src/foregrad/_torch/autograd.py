"""Autograd's nodes and engine: what they hold, which gradients they compute, and what a recording sees of them."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch._C import _autograd
from torch.utils.checkpoint import CheckpointFunction, _CachedTorchDispatchMode, _CheckpointFrame
from torch.utils.hooks import BackwardHook as _BackwardHook

from .fake import set_lazy_bits
from .guards import Replaced, recordings_lock

CheckpointFrame = _CheckpointFrame  # leads to what a checkpoint runs again


BackwardHook = _BackwardHook  # calls the backward hooks of a module


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


_version = operator.attrgetter("_version")


def versions_of(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """What the version counters of many tensors say."""
    return tuple(map(_version, tensors))


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Make many version counters say what eager's would."""
    _autograd._unsafe_set_version_counter(tensors, versions)


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


_REENTRANT_NODE: type = (
    CheckpointFunction._backward_cls
)  # to ask a function for it tells a recording that it is applied


def is_reentrant_checkpoint(node: Any) -> bool:
    """Whether an autograd node belongs to `torch.utils.checkpoint` with `use_reentrant=True`."""
    return isinstance(node, _REENTRANT_NODE)


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


PythonNode = torch.autograd.function.BackwardCFunction  # of a custom function, on autograd's tape


def custom_function_of(node: PythonNode) -> type:
    """The class whose backward a node calls."""
    found: type = type(node)._forward_cls  # type: ignore[attr-defined]
    return found


_push_saved_hooks = _autograd._push_saved_tensors_default_hooks


class AutogradWatch(Protocol):
    """Wants to know what a program tells autograd past all modes."""

    def note_applied(self, args: tuple[Any, ...], with_grad: bool) -> None:
        """A custom function is applied, with gradients on or off."""

    def note_saved_hooks(self, checkpoint: CheckpointFrame | None) -> None:
        """Hooks on what autograd saves are set, which it will call in backward; those of a checkpoint, perhaps."""

    def note_module_hooks(self, hooks: BackwardHook) -> None:
        """A module with backward hooks is called."""

    def note_cache(self, storage: dict[Any, Any]) -> None:
        """A selective checkpoint will keep values there."""

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A functorch transform wraps a tensor; gives what it is to wrap."""

    def call_script(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module of TorchScript is called, which reads its tensors in C++."""


_watches: dict[int, AutogradWatch] = {}  # by thread


def running_watch() -> AutogradWatch | None:
    """The watch of the running thread."""
    return _watches.get(threading.get_ident())


_applied: dict[int, tuple[type, bool]] = {}  # the function that autograd is about to run, and the grad mode, by thread


def _see_application(function: type, name: str) -> Any:
    """An attribute of a custom function.

    To apply one, autograd asks it in C++ for the class of its node, which nobody else does, and then for `forward`.
    What that is given is seen, also where somebody has kept the bound `apply` from before (torch 2.11 to 2.15).
    """
    value = type.__getattribute__(function, name)
    if name not in ("_backward_cls", "forward"):
        return value
    thread = threading.get_ident()
    watch = _watches.get(thread)
    if watch is None:
        return value
    if name == "_backward_cls":
        _applied[thread] = function, torch.is_grad_enabled()  # it is off in `forward`
        return value
    applied, with_grad = _applied.pop(thread, (None, False))
    return functools.partial(_note_and_call, watch, with_grad, value) if applied is function else value


def _note_and_call(watch: AutogradWatch, grad: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    watch.note_applied((*args, *kwargs.values()), grad)
    return forward(*args, **kwargs)


_applications_seen = Replaced(type(torch.autograd.Function), "__getattribute__", _see_application)


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


_transforms: Any = torch._functorch.eager_transforms


_vmap: Any = torch._functorch.vmap


_WRAPPING = ((_transforms, "_wrap_for_grad"), (_vmap, "_add_batch_dim"))


_wrapping = [(module, name, getattr(module, name)) for module, name in _WRAPPING]


def _of_stand_in(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """What wraps a tensor for a transform, and asks a watch first what to wrap."""

    def wrap_stand_in(tensor: Any, *args: Any) -> Any:
        watch = _watches.get(threading.get_ident())
        return wrap(tensor if watch is None else watch.stand_in(tensor), *args)

    return wrap_stand_in


_wrapping_stand_ins = [(module, name, _of_stand_in(wrap)) for module, name, wrap in _wrapping]


def _set_functions(functions: Sequence[tuple[Any, str, Callable[..., Any]]]) -> None:
    for module, name, function in functions:
        setattr(module, name, function)


@contextlib.contextmanager
def autograd_watched(watch: AutogradWatch) -> Iterator[None]:
    """Tell a watch what the running thread does to autograd past all modes.

    `saved_tensors_hooks` and the transforms of `torch.func` look these helpers up at each call (torch 2.11 to 2.15), so
    that those are seen, too, who have kept the bound method from before.
    """
    thread = threading.get_ident()
    with recordings_lock:
        before = _watches.get(thread)
        _watches[thread] = watch
        _autograd._push_saved_tensors_default_hooks = _see_saved_hooks  # type: ignore[assignment]
        _CachedTorchDispatchMode.__init__ = _see_cache  # type: ignore[method-assign, assignment]
        BackwardHook.__init__ = _see_module_hooks  # type: ignore[method-assign, assignment]
        _set_functions(_wrapping_stand_ins)
    try:
        with _applications_seen:
            yield
    finally:
        _applied.pop(thread, None)
        with recordings_lock:
            if before is None:
                del _watches[thread]
            else:
                _watches[thread] = before
            if not _watches:
                _autograd._push_saved_tensors_default_hooks = _push_saved_hooks
                _CachedTorchDispatchMode.__init__ = _make_cache  # type: ignore[method-assign]
                BackwardHook.__init__ = _make_module_hooks  # type: ignore[method-assign]
                _set_functions(_wrapping)


@contextlib.contextmanager
def custom_functions_refused(refuse: Callable[[str], None]) -> Iterator[None]:
    """Call `refuse` where the running thread applies a custom function: no mode sees it without autograd."""
    function: Any = torch.autograd.Function
    apply, thread = function.__dict__["apply"], threading.get_ident()

    def refuse_here(cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            refuse(cls.__name__)
        return apply.__get__(None, cls)(*args, **kwargs)

    function.apply = classmethod(refuse_here)
    try:
        yield
    finally:
        function.apply = apply
