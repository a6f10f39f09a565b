"""Dynamo, the front end of `torch.compile`: what it hands over beside a graph, and what it wants back.

It is loaded whenever one of these functions has anything to do.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import SymInt, fx
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

F = TypeVar("F", bound=Callable[..., Any])


class Geometry(NamedTuple):
    """How a tensor lies in its memory, in the symbols of a front end."""

    size: tuple[int | SymInt, ...]
    stride: tuple[int | SymInt, ...]
    offset: int | SymInt

    @property
    def has_numbers(self) -> bool:
        """Whether there is a number behind each symbol; the user may ask for symbols that have none."""
        return all(map(_has_number, (*self.size, *self.stride, self.offset)))

    def as_numbers(self) -> None:
        """Let the front end compile again for other numbers: each symbol is guarded to be what it is."""
        for number in (*self.size, *self.stride, self.offset):
            int(number)


@dataclass(frozen=True)
class FrontEnd:
    """What a front end of torch's has put around the program that it hands over."""

    context: TracingContext
    compile_context: CompileContext | None
    mode: FakeTensorMode

    @classmethod
    def now(cls) -> FrontEnd | None:
        """The one that is compiling."""
        context = TracingContext.try_get()
        if context is None or context.fake_mode is None:
            return None
        return cls(context, CompileContext.try_get(), context.fake_mode)

    def geometry(self, real: torch.Tensor) -> Geometry | None:
        """The sizes of an input; None where the front end compiles again for other ones."""
        known = self.context.tensor_to_context.get(real)
        if known is None or _is_static(known):
            return None
        fake = self.mode.from_tensor(real, symbolic_context=known, source=known.tensor_source, trace=False)
        size, stride = (tuple(map(number_of, numbers)) for numbers in (fake.shape, fake.stride()))
        found = Geometry(size, stride, number_of(fake.storage_offset()))
        return found if any(isinstance(n, SymInt) for n in (*size, *stride, found.offset)) else None

    def give_up_symbols(self, inputs: Sequence[Any]) -> bool:
        """Let it compile again for other sizes and ints; whether there were any symbols."""
        found = False
        for value in inputs:
            if isinstance(value, SymInt) and isinstance(number_of(value), SymInt) and _has_number(value):
                int(value)
                found = True
            known = self.geometry(value) if isinstance(value, torch.Tensor) else None
            if known is not None and known.has_numbers:
                known.as_numbers()
                found = True
        return found

    def require_numbers(self, real: torch.Tensor, parts: Callable[[Any], Sequence[torch.Tensor]]) -> None:
        """Let it compile again for other sizes of a wrapper subclass, and of the tensors in it."""
        known = self.context.tensor_to_context.get(real)
        if known is not None and not _is_static(known):
            fake = self.mode.from_tensor(real, symbolic_context=known, source=known.tensor_source, trace=False)
            for part in (fake, *parts(fake)):
                Geometry(tuple(part.shape), tuple(part.stride()), part.storage_offset()).as_numbers()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be compiled by it again: a backward is compiled when the front end has long finished."""
        if TracingContext.try_get() is not None:
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracing(self.context))
            if self.compile_context is not None:
                stack.enter_context(compile_context(self.compile_context))
            yield

    def tell(self, parameters: Sequence[Any], metadata: Any) -> None:
        """What compilers look for in the context of a front end, once a program is recorded."""
        context = self.context
        context.fw_metadata = metadata
        context.params_flat = list(parameters)
        context.params_flat_unwrap_subclasses = list(parameters)
        context.params_unwrapped_to_flat_index = list(range(len(parameters)))


def number_of(number: int | SymInt) -> int | SymInt:
    """A symbolic number, or the plain one that it is known to be."""
    return int(number) if isinstance(number, SymInt) and number.node.expr.is_number else number


def _has_number(number: int | SymInt) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return not free_unbacked_symbols(number)


def _is_static(context: Any) -> bool:
    """Whether all sizes of a tensor are guarded; so are its strides and its offset then."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    inner = getattr(context, "inner_contexts", {})
    static = all(kind is DimDynamic.STATIC for kind in getattr(context, "dynamic_sizes", ()))
    return static and all(map(_is_static, inner.values()))


@contextlib.contextmanager
def tracing_in(mode: FakeTensorMode) -> Iterator[None]:
    """The context of the front end, or a new one, in which examples of this mode are the ones that compilers know."""
    context = TracingContext.try_get()
    with tracing(TracingContext(mode)) if context is None else TracingContext.patch(fake_mode=mode):
        yield


def passes_through(error: BaseException) -> bool:
    """Whether an error is how parts of torch tell Dynamo what to do: to start again, or to leave a frame as it is."""
    dynamo = sys.modules.get("torch._dynamo.exc")
    if dynamo is None:
        return False
    if isinstance(error, dynamo.BackendCompilerFailed):  # Inductor says so that it has failed
        return False
    names = ("RestartAnalysis", "TensorifyScalarRestartAnalysis", "ShortenTraceback", "SkipFrame")
    return isinstance(error, tuple(getattr(dynamo, name) for name in names if hasattr(dynamo, name)))


# ---------------------------------------------------------------------------------------------------------------------
# The graph of a front end.
_STATIC = "_dynamo_static_input_type"


@dataclass(frozen=True)
class Placeholder:
    """An input of Dynamo's graph."""

    name: str  # in the user's words, where Dynamo knows where it comes from
    is_static: bool  # a parameter, or what else stays where it is
    number: Any = None  # the symbol of a float that Dynamo hands over in a tensor


def placeholders(graph: fx.GraphModule) -> list[Placeholder]:
    """The inputs of a graph, in order."""
    return [_placeholder(node) for node in graph.graph.find_nodes(op="placeholder")]


def _placeholder(node: fx.Node) -> Placeholder:
    source = getattr(node, "_dynamo_source", None)
    memo = getattr(node.meta.get("example_value"), "item_memo", None)
    number = memo if isinstance(memo, torch.SymFloat) and hasattr(memo.node._expr, "name") else None
    name = node.name if source is None else _in_users_words(_name_of(source), node.name)
    return Placeholder(name, _is_static_input(node), number)


def static_inputs(graph: fx.GraphModule) -> list[bool]:
    """Which inputs of a graph are parameters and buffers, in order."""
    return [_is_static_input(node) for node in graph.graph.find_nodes(op="placeholder")]


def _is_static_input(node: fx.Node) -> bool:
    return bool((node.meta.get("tensor_dict") or {}).get(_STATIC))


def _name_of(source: Any) -> str:
    """A property from torch 2.12 on, a method before."""
    name = source.name
    return str(name() if callable(name) else name)


def _in_users_words(source: str, otherwise: str) -> str:
    """`L['self']._modules['fc']._parameters['weight']` is `self.fc.weight`."""
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    text = re.sub(r"^[LG]\['([^']*)'\]", r"\1", text)
    return text if text.replace("_", "a")[:1].isalpha() else otherwise


_END_OF_TRANSFORM = {
    "Grad": "_grad_decrement_nesting",
    "Jvp": "_jvp_decrement_nesting",
    "Vmap": "_vmap_decrement_nesting",
    "Functionalize": "_func_decrement_nesting",
}


@contextlib.contextmanager
def transforms_ended() -> Iterator[None]:
    """Leave the transforms of `torch.func` that a graph has begun, where an error keeps it from ending them."""
    functorch: Any = torch._C._functorch  # its own function for this fails on torch 2.11 where nothing is left
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    except BaseException:
        while functorch.get_dynamic_layer_stack_depth() > depth:
            kind = functorch.peek_interpreter_stack().key()
            getattr(functorch, _END_OF_TRANSFORM[kind.name])()
        raise


def specialize_floats(numbers: Sequence[Any]) -> None:
    """Let Dynamo start again with these floats as constants, which it guards.

    It does so once for each. One that is left is read inside of a subgraph, and is guarded here.
    """
    from torch._dynamo import TensorifyState
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    names = [number.node._expr.name for number in numbers]
    asked = [name for name in names if not TensorifyState.should_specialize(name)]
    for name in asked:
        TensorifyState.specialize(name)
    if asked:
        raise TensorifyScalarRestartAnalysis
    for number in numbers:
        float(number)


def checkpoint_operator() -> Any:
    """What Dynamo puts in the place of `torch.utils.checkpoint.checkpoint`: it takes the body as a graph."""
    return torch.ops.higher_order.tag_activation_checkpoint


def checkpoint_contexts(body: Any) -> Callable[[], Any] | None:
    """The `context_fn` that the user has given to a checkpoint."""
    found: Callable[[], Any] | None = body.meta.get("_checkpoint_context_fn")
    return found


def counts_aot(outcome: str) -> None:
    """Dynamo's own counter of the graphs that layers like this one have taken."""
    from torch._dynamo.utils import counters

    counters["aot_autograd"][outcome] += 1


def reads_are_captured() -> bool:
    """Whether Dynamo leaves reads of data in its graphs, instead of breaking them there."""
    config: Any = sys.modules.get("torch._dynamo.config")
    return config is not None and bool(config.capture_scalar_outputs or config.capture_dynamic_output_shape_ops)


def compiled_autograd_is_on() -> bool:
    """Whether Dynamo is to capture whole backwards."""
    config: Any = sys.modules.get("torch._dynamo.config")
    state: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    asked = config is not None and bool(config.compiled_autograd)
    return asked or (state is not None and bool(getattr(state, "compiled_autograd_enabled", False)))


def leave_untraced(code: types.CodeType) -> None:
    """Let Dynamo run functions as they are, with all that they call: autograd calls those that are backwards."""
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            leave_untraced(part)
            set_code_exec_strategy(part, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def left_alone(function: F) -> F:
    """A function that Dynamo runs as it is: torch's own mark, and what keeps frames below a graph break from it.

    `torch.compiler.disable` would load Dynamo, and stand around each call.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "Foregrad has compiled it"  # type: ignore[attr-defined]
    function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def never_traced(function: Any) -> Any:
    """A function that Dynamo runs as it is, with all that it calls."""
    return torch.compiler.disable(function, reason="it is the code of a compiled program")
