"""What torch knows about operators and script objects, and what front ends and compilers share with it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import TracingContext as TracingContext  # in which front ends hand over fake mode and strides
from torch._higher_order_ops.auto_functionalize import auto_functionalized as auto_functionalized
from torch._higher_order_ops.auto_functionalize import can_auto_functionalize
from torch._higher_order_ops.effects import _EffectType, _get_op_qualname, has_effects
from torch._higher_order_ops.effects import with_effects as with_effects
from torch._higher_order_ops.print import print as print_in_graph
from torch._higher_order_ops.torchbind import call_torchbind as call_torchbind
from torch._library import simple_registry
from torch._library.fake_class_registry import FakeScriptMethod, FakeScriptObject, _is_script_object, find_fake_class
from torch._logging import getArtifactLogger  # TORCH_LOGS=aot_joint_graph,aot_graphs
from torch._logging import trace_structured as trace_structured
from torch._logging._internal import trace_log
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket, TorchBindOpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule  # generates its code on the first call only
from torch.utils import _pytree

from .guards import disable_modes

pytree = _pytree  # the tree flattening that torch itself uses: containers registered there count


def registered_with_pytree(kind: type) -> tuple[Callable[..., Any], ...]:
    """What takes objects of a class apart and puts them together again, where the user has said so."""
    node = _pytree.SUPPORTED_NODES.get(kind)
    return () if node is None else (node.flatten_fn, node.unflatten_fn)


LazyGraphModule = _LazyGraphModule


_TORCHS_OWN = frozenset({"profiler", "aten", "prims", "prim", "quantized", "c10d", "_c10d_functional", "inductor"})


def is_extension(func: Any) -> bool:
    """Whether a function is an operator that is not torch's own, and may have kernels in Python."""
    if type(func) is OpOverload:
        return func.namespace not in _TORCHS_OWN
    return type(func) is OpOverloadPacket and func._qualified_op_name.partition("::")[0] not in _TORCHS_OWN


def identity_of(generator: torch.Generator) -> int:
    """Which random generator an object stands for: torch makes another one each time that an operator is given it."""
    return int(getattr(generator, "_cdata"))  # noqa: B009


def dynamo_aside() -> contextlib.AbstractContextManager[Any]:
    """Compiled functions inside a program run as they were written: Dynamo would trace the recorder itself.

    Loading Dynamo takes a second, so a program that does not use it does not load it.
    """
    loaded = "torch._dynamo.eval_frame" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()


class DynamoWatch:
    """Whether Dynamo is loaded from now on: by a program, or by torch, which does so for much shape inference."""

    def __init__(self) -> None:
        self._before = "torch._dynamo.eval_frame" in sys.modules

    @property
    def loaded(self) -> bool:
        """Whether it is there, and was not."""
        return not self._before and "torch._dynamo.eval_frame" in sys.modules

    @property
    def ran(self) -> bool:
        """Whether it has traced something, too."""
        return self.loaded and bool(sys.modules["torch._dynamo.utils"].counters["frames"])


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


def effect_type(effect: str) -> Any:
    """torch's own name for a kind of effect."""
    return next(kind for kind in _EffectType if str(kind.value).lower() == effect)


def core_aten_decompositions() -> dict[Any, Callable[..., Any]]:
    """Torch's table that takes programs apart into the core operators of ATen."""
    from torch._decomp import core_aten_decompositions as table  # torch.export's public table loads all of export

    return dict(table())


def collective_decompositions() -> dict[Any, Callable[..., Any]]:
    """A collective's result is waited for inside of a graph; eager wraps it in a tensor that waits when it is used."""
    if "torch.distributed._functional_collectives" not in sys.modules:
        return {}
    functional: Any = torch.ops._c10d_functional
    return {functional._wrap_tensor_autograd.default: functional.wait_tensor.default}


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


# Functions of packed sequences that read lengths in C++, which recorded tensors do not have.
PACKS, PADS = torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence
RECURRENT = (torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)
