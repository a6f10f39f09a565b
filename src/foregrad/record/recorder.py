"""The recorder: one dispatch mode, under autograd and above the abstract tensors.

Autograd runs in C++ as it does in eager, so custom functions, hooks, `no_grad` and in-place rules behave as they do
in eager, with eager's own errors. The recorder writes down every operator that reaches it, views and in-place
operators as they are; passes make sense of them later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback

from .._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    UnsupportedOperatorException,
    disable_modes,
    next_sequence_number,
    running_node_number,
    without_function_modes,
)
from ..errors import CaptureError, DataDependentError, UnsupportedError
from ..ops import Kind, aten, op_info
from .engine import Engine
from .lines import GRADIENT_SUM, Stack, show_stack, user_stack, where
from .lists import is_list_write, lists_share_memory, one_after_another
from .overlap import ask_eager, lies_awkwardly, overlap_in_part, storage_of, tensors_in, written_arguments
from .randomness import Generators
from .tape import tape_edges

_DEVICE_OF = torch.ops.prim.device.default


class Step:
    """One recorded operator call."""

    __slots__ = ("args", "backward", "grad_enabled", "kwargs", "op", "out", "repeats", "stack")

    def __init__(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        grad_enabled: bool,
        backward: bool,
        stack: Stack,
        repeats: int | None,
    ) -> None:
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.out = out
        self.grad_enabled = grad_enabled
        self.backward = backward
        self.stack = stack
        self.repeats = repeats  # the earlier step whose random draw this one replays


class Recorder(TorchDispatchMode):
    """Writes down every operator that the program and autograd run."""

    supports_higher_order_operators = True

    def __init__(self, engine: Engine, decompositions: Mapping[Any, Callable[..., Any]], from_nodes: bool) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.backward = False
        self.shapes_before: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._reshaped_views: list[torch.Tensor] = []
        self._engine = engine
        self._run = engine.run
        self._decompositions = decompositions
        self._from_nodes = from_nodes  # the program is a graph whose nodes know the user's lines better than frames do
        self._stacks: dict[int, Stack] = {}  # of the forward, by autograd's sequence number
        self.generators = Generators(lambda: where(user_stack(2)))
        self._devices: set[torch.device] = set()
        self._finished_node: int | None = None  # set by hooks on nodes whose gradients are summed up
        self._watched: set[Any] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # spares a wrapper around every call

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if op is _DEVICE_OF:
            return self._engine.device_of(args[0]) if self._engine.is_abstract(args[0]) else args[0].device
        if isinstance(op, HigherOrderOperator):
            raise UnsupportedError(
                f"the higher-order operator {op.name()}, at {where(user_stack(2))}, cannot be compiled yet."
            )
        if op.namespace == "profiler":
            return op(*args, **kwargs)
        replaced = self._decompose(op, args, kwargs)
        if replaced is not NotImplemented:
            return replaced
        info = op_info(op)
        stack = self._stack()
        if "device" in kwargs:
            self._require_device(kwargs["device"])
        if info.kind is Kind.RESHAPE:
            if any(isinstance(n, torch.SymInt) for n in args[0].shape):
                raise UnsupportedError(f"{op}, at {where(stack)}, of a symbolic size: it cannot be compiled yet.")
            self._refuse_views_of_old_shape(op, args[0], stack)
            before = self._run(aten.detach.default, types, (args[0],), {})
            self.shapes_before.setdefault(id(args[0]), []).append((len(self.steps), before))
            if args[0]._is_view():
                self._reshaped_views.append(args[0])
        elif info.kind is Kind.WRITE:
            self._before_write(op, written_arguments(op, args, kwargs), args, kwargs, stack)
        outs = self._given_results(op, args, kwargs) if info.has_out else ()
        shape = args[0].shape if info.kind is Kind.WRITE and isinstance(args[0], torch.Tensor) else None
        try:
            with without_function_modes():  # in backward, operators come straight from C++, with the modes still on
                out = self._run(op, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise DataDependentError(
                f"{op}, at {where(stack)}: its result depends on the data of a recorded tensor, which has none. "
                "Rewrite it with an operator of fixed output size (torch.where, masked_fill), or compile with "
                "fallback='eager'."
            ) from error
        except UnsupportedOperatorException as error:
            raise CaptureError(
                f"{op}, at {where(stack)}, has no shape inference. Register one (torch.library.register_fake), or "
                "compile with fallback='eager'."
            ) from error
        if shape is not None and not info.has_out and args[0].shape != shape:  # a real kernel refuses to grow it
            raise RuntimeError(
                f"output with shape {list(shape)} doesn't match the broadcast shape {list(args[0].shape)}"
            )
        if is_list_write(op):  # abstract tensors do not count these writes, real ones do
            torch.autograd.graph.increment_version(tuple(tensors_in(written_arguments(op, args, kwargs))))
        for given, before in outs:
            if (given.shape, given.stride()) != (before.shape, before.stride()):
                self.shapes_before.setdefault(id(given), []).append((len(self.steps), before))
        repeats = self._draw(op, kwargs, args) if info.random else None
        self.steps.append(Step(op, args, kwargs, out, torch.is_grad_enabled(), self.backward, stack, repeats))
        return out

    def _given_results(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The `out=` tensors of a call, each with a copy of its metadata."""
        arguments = op._schema.arguments
        given = [kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(arguments) if a.is_out]
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        return [(t, self._run(aten.detach.default, (type(t),), (t,), {})) for t in tensors]

    def _refuse_views_of_old_shape(self, op: OpOverload, tensor: torch.Tensor, stack: Stack) -> None:
        """Autograd replays views from the shape that their base has now."""
        views = (
            step for step in self.steps if step.args and step.args[0] is tensor and op_info(step.op).kind is Kind.VIEW
        )
        if tensor.requires_grad and any(step.op is not aten.detach.default for step in views):
            raise UnsupportedError(
                f"{op}, at {where(stack)}, changes the shape of a tensor of which a view was taken before: this cannot "
                "be compiled yet. Change the shape first, or take a view of another shape instead."
            )

    def _before_write(
        self, op: OpOverload, written: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], stack: Stack
    ) -> None:
        if self._reshaped_views and torch.is_grad_enabled():
            self._refuse_rebase_of_reshaped(op, written, stack)
        if lies_awkwardly(written, (*args, *kwargs.values()), torch.Tag.pointwise in op.tags):
            ask_eager(op, args, kwargs)
            if overlap_in_part(written, (*args, *kwargs.values())):
                raise UnsupportedError(
                    f"{op}, at {where(stack)}, writes to memory that it reads as another argument: what comes out "
                    "depends on the order in which it does so, and cannot be compiled. Pass a clone."
                )

    def _refuse_rebase_of_reshaped(self, op: OpOverload, written: Sequence[Any], stack: Stack) -> None:
        """Autograd takes a view of an abstract tensor again in the shape that it was made with."""
        storages = {storage_of(t) for t in tensors_in(written)}
        for view in self._reshaped_views:
            base = view._base
            if base is not None and base.requires_grad and storage_of(view) in storages:
                raise UnsupportedError(
                    f"{op}, at {where(stack)}, writes to memory of which a view has changed its shape in place: this "
                    "cannot be compiled yet. Take a new view instead of changing the shape of the old one."
                )

    def _decompose(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace an operator by others: on the user's wish, or because it is a mere composition."""
        decomposition = self._decompositions.get(op)
        if decomposition is not None:
            with self:
                return decomposition(*args, **kwargs)
        if op_info(op).composite:
            with self:
                return op.decompose(*args, **kwargs)
        if is_list_write(op) and lists_share_memory(op, args, kwargs):
            with self:
                one_after_another(op, args, kwargs)
            for target in args[0]:
                torch.autograd.graph.increment_version(target)
            return None
        return NotImplemented

    def _stack(self) -> Stack:
        """The user's line: of the operator itself, or in backward of the operator that it differentiates."""
        number = running_node_number() if self.backward else None
        if number is not None:
            stack = self._stacks.get(number, ())
            return f"{GRADIENT_SUM}\n{show_stack(stack)}" if number == self._finished_node else stack
        if self._from_nodes:
            stack = fx_traceback.get_current_meta().get("stack_trace") or ()
        else:
            stack = user_stack(3)
        self._stacks.setdefault(next_sequence_number() - 1, stack)
        return stack

    def watch_gradient_sums(self, targets: Sequence[torch.Tensor]) -> None:
        """Tell the sums that autograd makes between nodes from the operators of the nodes themselves.

        Autograd adds a gradient up right after the node that made it has run, so a hook at its end marks the border.
        """
        self._finished_node = None
        producers: dict[Any, list[Any]] = {}
        for node, following in tape_edges(targets):
            producers.setdefault(following, []).append(node)
        for several in producers.values():
            if len(several) > 1:
                for node in several:
                    if node not in self._watched:
                        self._watched.add(node)
                        node.register_hook(functools.partial(self._node_finished, int(node._sequence_nr())))

    def _node_finished(self, number: int, gradients: Any, incoming: Any) -> None:
        self._finished_node = number

    def _require_device(self, device: Any) -> None:
        """Raise eager's own error for a device that this build lacks, before an abstract tensor pretends otherwise."""
        if device is not None and device not in self._devices:
            with disable_modes():
                torch.empty(0, device=device)
            self._devices.add(device)

    def _draw(self, op: OpOverload, kwargs: dict[str, Any], args: tuple[Any, ...]) -> int | None:
        """The earlier step whose draw this random operator replays, if it does."""
        generator = kwargs.get("generator") or self._default_generator(args, kwargs)
        return self.generators.draw(op, generator, len(self.steps), may_reseed=self.backward)

    def _default_generator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
        tensors = [a for a in args if self._engine.is_abstract(a)]
        device = self._engine.device_of(tensors[0]) if tensors else torch.device(kwargs.get("device") or "cpu")
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            return torch.cuda.default_generators[index]
        return torch.default_generator
