"""The recorder: one dispatch mode, under autograd and above the abstract tensors.

Autograd runs in C++ as it does in eager, so custom functions, hooks, `no_grad` and in-place rules behave as they do
in eager, with eager's own errors. The recorder writes down every operator that reaches it, views and in-place
operators as they are; passes make sense of them later.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from .._torch import (
    EFFECTFUL_HIGHER_ORDER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    accumulates_gradient,
    accumulating_into,
    collective_decompositions,
    disable_modes,
    is_without_kernel,
    next_sequence_number,
    running_node_name,
    running_node_number,
    taken_apart,
    without_function_modes,
)
from ..abstract.engine import Engine, is_empty
from ..abstract.kernel_checks import DOUBTFUL, can_be_asked, error_missed, error_of_eager, twin_of_refused
from ..abstract.nested import AS_PADDED_BATCH, MAKES_STRIDED_NESTED, strided_nested
from ..abstract.real_kernels import SIZED_BY_LISTS, given_by_kernel
from ..errors import CaptureError, DataDependentError, ForegradError, UnsupportedError
from ..functional_variants import call_of_variant
from ..graph.graph import Step
from ..graph.reads import READ, Read
from ..host_numbers import HostNumber, HostNumbers, host_number, in_python
from ..ops import Kind, OpInfo, aten, draws, op_info, tensors_in, written_arguments
from ..stack_traces import (
    GRADIENT_SUM,
    Called,
    KnownOrigins,
    ModuleCalls,
    Origin,
    Stack,
    own_slow_trace,
    said_now,
    show_stack,
    user_stack,
    where,
)
from ..subclasses.layout import is_wrapper
from .checked_reads import MASKS, SIZED_BY_DATA, WRITES_BY_MASK, CheckedReads, require_fitting_masks
from .host_state import HostState
from .mutation_checks import ForeignMemory, MutationChecks, Mutations, lists_share_memory, one_after_another
from .reads import Reads
from .refusals import communicating, explained, has_no_inference
from .rng import Generators
from .script_objects import ScriptObjects
from .subclasses import PLAIN_TYPES, WrapperCalls

get_default_dtype = torch.get_default_dtype  # asked for every operator
_DEVICE_OF = torch.ops.prim.device.default
_SIZES_OF = torch.ops.aten.size.default
_COPY = torch.ops.aten.copy_.default
_ZERO = torch.ops.aten.zero_.default
_CHANGES = (Kind.WRITE, Kind.RESHAPE)  # an argument, in place
_GIVES_NUMBERS = {
    aten._local_scalar_dense.default: "item()",
    aten.is_nonzero.default: "bool()",
    aten.equal.default: "equal()",
    aten.allclose.default: "allclose()",
}
_SELECTS = (aten.index.Tensor, aten.masked_select.default)
_NOT_EAGERS = (NotImplementedError, AssertionError, AttributeError, KeyError, UnsupportedFakeTensorException)


def _looked(op: OpOverload, others: tuple[Any, ...], named: dict[str, Any], *tensors: torch.Tensor) -> Any:
    """What an operator gives that takes tensors first, and then numbers."""
    return op(*tensors, *others, **named)


# ---------------------------------------------------------------------------------------------------------------------
# Compositions that choose a kernel by whether an argument is a tensor subclass.
#
# While a program is recorded every tensor counts as one, and eager would take the other kernel, which lays its result
# otherwise in memory or rounds it otherwise. Where no gradient is needed the composition stays whole: the graph then
# chooses as eager does.
CHOOSES_BY_SUBCLASS = frozenset({aten.max_pool1d.default, aten.linalg_svdvals.default, aten.linalg_eigvalsh.default})


def needs_no_gradient(given: Iterable[Any]) -> bool:
    """Whether a call with these arguments, none of which is a subclass in eager, is not differentiated."""
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    followed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not followed and not any(map(is_wrapper, tensors))


_TAKE_NUMBERS = ("_foreach_", "_fused_", "fill", "full", "scalar_tensor", "new_full", "masked_fill", "lerp", "addc")


def plain_numbers(op: OpOverload, value: Any) -> Any:
    """An argument with plain numbers in it, to run an operator on abstract tensors.

    Where the shape of the result may depend on a number, it is this one for good.
    """
    if type(value) in (list, tuple):
        return type(value)(plain_numbers(op, item) for item in value) if any(map(host_number, value)) else value
    number = host_number(value)
    if number is None:
        return value
    if not number.is_in_graphs:
        return number.exact()
    name = op._schema.name.removeprefix("aten::")
    return number.value if "pointwise" in op_info(op).traits or name.startswith(_TAKE_NUMBERS) else number.exact()


class _LastNode:
    """The node of autograd's that has run last, as hooks on nodes tell.

    Nothing leads from here to the recording: the recording leads to the nodes, and no collector sees what they hold.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    def finished(self, number: int, gradients: Any, incoming: Any) -> None:
        self.number = number


class _Calls(ModuleCalls):
    """Notes the modules that are called, and refuses those whose work no operator shows."""

    def __init__(self, refuse: Callable[[Exception], Exception]) -> None:
        super().__init__()
        self._refuse = refuse

    def enter(self, module: torch.nn.Module) -> Called | None:
        refusal = communicating(module)
        if refusal is not None:
            raise self._refuse(refusal)
        return super().enter(module)


def _without_inference(op: OpOverload, stack: Stack) -> CaptureError:
    return CaptureError(
        f"{op}, at {where(stack)}, has no shape inference. Register one (torch.library.register_fake), or compile "
        "with fallback='eager'."
    )


_OF_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""Dtypes of the tensors that operators make of numbers where a tensor is expected."""


class Recorder(TorchDispatchMode):
    """Writes down every operator that the program and autograd run."""

    supports_higher_order_operators = True

    def __init__(self, engine: Engine, decompositions: Mapping[Any, Callable[..., Any]], from_nodes: bool) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.backward = False
        self.runs_backward = False  # the program differentiates something by itself
        self.mutations = Mutations()
        self.engine = engine
        self._refusal: Exception | None = None
        self._run = engine.run
        self._twins_decompose = bool(decompositions)
        self._decompositions = {**collective_decompositions(), **AS_PADDED_BATCH, **decompositions}
        self._decomposed = {id(op) for op in self._decompositions}  # to hash an operator takes longer
        self._plain: set[int] = set()  # ids of operators that only have to be run and written down
        self._from_nodes = from_nodes  # the program is a graph whose nodes know the user's lines better than frames do
        self.calls = _Calls(self.refuse)
        self._known = KnownOrigins()  # of the forward
        self._origin: Origin | None = None  # of the operator that runs now
        self.generators = Generators(lambda: where(user_stack(2)))
        self.reads = Reads(self.steps, engine)
        self.checked_reads: CheckedReads | None = None  # where calls can compare what the program reads
        self.numbers: HostNumbers | None = None  # where calls can work them out
        self.meets_numbers = False  # those or others among the arguments of operators
        self.host_state: HostState | None = None
        self.number_arguments: dict[str, HostNumber] = {}  # of the operator that is called, by their names
        self._places: dict[int, tuple[int, int]] = {}  # of masks, by their ids: the step that gave them, the version
        self._read: Read | Literal["known"] | None = None  # that the operator is whose result was found last
        self._default_dtype = torch.get_default_dtype()
        self._devices: set[torch.device] = set()
        self._last_node = _LastNode()  # of those whose gradients are summed up
        self._watched: set[Any] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # spares a wrapper around every call

    # What few programs need is made on first use.
    @functools.cached_property
    def mutation_checks(self) -> MutationChecks:
        return MutationChecks(self.engine, self.steps, self.mutations)

    @functools.cached_property
    def foreign(self) -> ForeignMemory:
        return ForeignMemory(self.steps)

    @functools.cached_property
    def objects(self) -> ScriptObjects:
        return ScriptObjects(self.engine)

    @functools.cached_property
    def wrappers(self) -> WrapperCalls:
        return WrapperCalls()

    def is_used(self, part: Literal["mutation_checks", "foreign", "objects", "wrappers"]) -> bool:
        """Whether the program has needed one of these."""
        return part in vars(self)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """What else holds while the program runs."""
        return contextlib.nullcontext()

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tracing = own_slow_trace()
        if tracing is not None:
            if isinstance(op, OpOverload) and op._schema.name.startswith(
                "aten::"
            ):  # no code of the user's runs in here
                sys.settrace(None)
            else:
                tracing = None
        try:
            return self._dispatch(op, types, args, kwargs or {})
        except ForegradError as error:
            self.refuse(error)
            raise
        finally:
            if tracing is not None:
                sys.settrace(tracing)

    def refuse(self, error: Exception) -> Exception:
        """Remember the first refusal: a program that catches it would go on in another way than in eager."""
        self._refusal = self._refusal or error
        return error

    def raise_caught(self, error: Exception | None = None) -> None:
        """Raise what the program has caught; `error` is what came out of it instead, if anything did."""
        if self._refusal is not None and self._refusal is not error:
            raise self._refusal from error

    def forget_refusal(self) -> None:
        """Start again."""
        self._refusal = None

    def _dispatch(self, op: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op is _DEVICE_OF and type(args[0]) is FakeTensor:  # of genuine ones, autograd asks it all the time
            return self.engine.device_of(args[0])
        if not types and args and isinstance(op, OpOverload):
            args = self._of_recorded(op, args)
        if not PLAIN_TYPES.issuperset(types):
            return self.wrappers.run(self, op, types, args, kwargs, self._stack())
        if id(op) in self._plain and get_default_dtype() is self._default_dtype:
            stack, origin = self._stack(), self._origin
            if "device" in kwargs:
                self._require_device(kwargs["device"])
            return self._note(op, args, kwargs, self._result(op, types, args, kwargs, stack), stack, origin)
        if op is _DEVICE_OF:
            return self.engine.device_of(args[0]) if self.engine.is_abstract(args[0]) else args[0].device
        if isinstance(op, HigherOrderOperator):
            return self._higher_order(op, args, kwargs)
        if op.namespace == "profiler":
            return op(*args, **kwargs)
        if op is _SIZES_OF:
            raise UnsupportedError(
                "a kernel of torch, or one of its derivatives, cannot compute with symbolic sizes. Compile with "
                "dynamic=False."
            )
        info = op_info(op)
        if id(op) in self._decomposed or "composite" in info.traits or "list" in info.traits:
            replaced = self._decompose(op, info, args, kwargs)
            if replaced is not NotImplemented:
                return replaced
        return self._run_and_note(op, info, types, args, kwargs)

    def _of_recorded(self, op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments among which torch has found no recorded tensor: real ones, and numbers that it had wrapped."""
        if isinstance(args[0], torch.Tensor):
            return self.foreign.copied(op, args)
        if type(args[0]) in _OF_NUMBERS and (op_info(op).kind is Kind.VIEW or op in _GIVES_NUMBERS):
            return self._of_tensors(op, args)
        return args

    def _of_tensors(self, op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with tensors in place of the numbers: derivatives take views of them, TorchScript compares them."""

        def tensor(number: Any) -> Any:
            return self._dispatch(aten.scalar_tensor.default, (), (number,), {"dtype": _OF_NUMBERS[type(number)]})

        wanted = (
            str(argument.type) == "Tensor" and type(arg) in _OF_NUMBERS
            for argument, arg in zip(op._schema.arguments, args, strict=False)
        )
        return tuple([tensor(arg) if is_tensor else arg for is_tensor, arg in zip(wanted, args, strict=True)])

    def _run_and_note(
        self, op: OpOverload, info: OpInfo, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator on abstract tensors, with all checks around it, and write it down."""
        stack, origin = self._stack(), self._origin
        if "device" in kwargs:
            self._require_device(kwargs["device"])
        random, changes = "random" in info.traits, info.kind in _CHANGES
        if random and info.kind is Kind.WRITE and 0 in info.written and is_empty(args[0]):
            # Abstract kernels look at the dtype even where there is nothing to draw; it is a write all the same.
            return self._note(_ZERO, args[:1], {}, args[0], stack, origin)
        if changes:
            self.foreign.refuse_write(written_arguments(op, args, kwargs), stack)
        if op in WRITES_BY_MASK:
            self._find_places(args)
        shapes = self.mutation_checks.before(op, args, kwargs, stack) if changes else ()
        computed = self._by_variant(op, args, kwargs) if self._twins_decompose and info.kind is Kind.WRITE else None
        out = self._checked_result(op, types, args, kwargs, stack)
        if changes:
            self.mutation_checks.after(op, args, kwargs, shapes)
        if get_default_dtype() is not self._default_dtype and info.kind is Kind.PURE:
            kwargs = self._with_its_dtype(op, types, args, kwargs, out)
        repeats, follows = self._draw(op, kwargs, args) if random and computed is None else (None, None)
        if info.is_plain and self._is_plain(op):
            self._plain.add(id(op))
        self._note(op, args, kwargs, out, stack, origin, repeats, follows)
        if computed is not None:
            self.steps[-1].computed = computed
        return out

    def _checked_result(
        self, op: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], stack: Stack
    ) -> Any:
        """The abstract result of an operator, where eager has one; fake script objects stand for real ones."""
        objects = "objects" in op_info(op).traits
        given, named = self.objects.replaced((args, kwargs), stack) if objects else (args, kwargs)
        out = self._result(op, types, given, named, stack)
        missed = error_missed(op, args, kwargs, out) if id(op) in DOUBTFUL else None
        if missed is not None:
            raise missed
        return self.objects.fresh(out) if objects else out

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that the program reads: the same at each call, or checked by it."""
        if self.backward:  # what it follows from may have been written since
            return self.reads.constant(tensor)
        return self.reads.value(tensor, lambda: where(user_stack(3)))

    def item(self, tensor: torch.Tensor) -> float | None:
        """The number in a tensor on the host, if calls can work it out before their graphs run."""
        if self.numbers is None or self.host_state is None or self.backward:
            return None
        value = self.host_state.value(tensor)
        if value is None:
            return None
        self.reads.count += 1
        if not self.host_state.varies(tensor):
            return value
        known = self.host_state.item_given(tensor)
        if known is None:
            known = self.numbers.new(value)
            stack = self._stack()
            self._note(aten._local_scalar_dense.default, (tensor,), {}, known, stack, self._origin)
            self.host_state.note_item(tensor, known)
        return known  # type: ignore[return-value]  # it behaves like a float

    def is_constant(self, args: Sequence[Any]) -> bool:
        """Whether the tensors among arguments are the same at each call."""
        values = [self.reads.constant(tensor) for tensor in tensors_in(args)]
        return bool(values) and all(value is not None for value in values)

    def read(self, what: str, look: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        """A value that the program reads, and that each call compares; `NotImplemented` where calls cannot."""
        if self.checked_reads is None:
            return NotImplemented
        stack = self._stack()
        origin = self._origin
        found, read = self.checked_reads.number(what, look, tensors, stack, self.backward)
        self.reads.count += 1
        if read is not None:
            self._read = read
            followed = read.is_number or bool(read.symbols)
            self._note(READ, (list(tensors),), {}, found if followed else None, stack, origin)
        return found

    def _read_data(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], stack: Stack) -> Any:
        """The result of an operator that gives numbers, or whose result has a size that depends on data."""
        if op in _GIVES_NUMBERS:
            tensors = list(tensors_in(args))
            how = functools.partial(_looked, op, args[len(tensors) :], kwargs)
            found = self.read(_GIVES_NUMBERS[op], how if len(tensors) < len(args) or kwargs else op, tensors)
            self._read = None if found is NotImplemented else "known"
            return found
        if self.checked_reads is None or op not in SIZED_BY_DATA:
            return NotImplemented
        if op in _SELECTS and (self.backward or (op is aten.index.Tensor and self.has_symbols_of_reads)):
            return self._selected_by_places(op, args)
        found, read = self.checked_reads.results(op, args, kwargs, stack, self.backward)
        self._read = read or "known"
        return found

    def _is_plain(self, op: OpOverload) -> bool:
        """Whether an operator that does nothing but compute may be run and written down without another look."""
        return id(op) not in self._decomposed and id(op) not in DOUBTFUL and op not in WRITES_BY_MASK

    def _find_places(self, args: tuple[Any, ...]) -> None:
        """A write by a mask, of a value that is differentiated: its gradient will be selected by the same mask."""
        if self.checked_reads is None:
            return
        masks = args[1] if isinstance(args[1], (list, tuple)) else args[1:2]
        if not self.backward and isinstance(args[2], torch.Tensor) and args[2].requires_grad:
            for mask in masks:
                if mask is not None and mask.dtype in MASKS:
                    self._places_in(mask)

    def _places_in(self, mask: torch.Tensor) -> Sequence[torch.Tensor]:
        """Where a mask is true, in each dimension."""
        position, version = self._places.get(id(mask), (0, None))
        if version != mask._version:
            with self:
                aten.unbind.int(aten.nonzero.default(mask), 1)
            position = len(self.steps) - 1
            self._places[id(mask)] = position, mask._version  # the steps hold it
        found: Sequence[torch.Tensor] = self.steps[position].out
        return found

    @property
    def has_symbols_of_reads(self) -> bool:
        """Whether sizes that are read are symbols."""
        return self.checked_reads is not None and self.checked_reads.are_symbols

    def _selected_by_places(self, op: OpOverload, args: tuple[Any, ...]) -> Any:
        """What masks select; of a gradient, by the places that the forward has found."""
        masks = args[1] if op is aten.index.Tensor else [args[1]]
        indices: list[Any] = []
        if not self.backward:
            require_fitting_masks(args[0], masks)
        for mask in masks:
            if mask is None or mask.dtype not in MASKS:
                indices.append(mask)
            else:
                indices += self._places_in(mask)
        if self.checked_reads is not None and self.checked_reads.is_over:
            # A backward that is recorded later has what autograd has saved, the mask: it selects as it is.
            with without_function_modes():
                return self.engine.run(aten.index.Tensor, (type(args[0]),), (args[0], indices), {})
        with self:
            found = aten.index.Tensor(args[0], indices)
        self._read = "known"
        return found

    def _values_of(self, args: Sequence[Any]) -> list[torch.Tensor] | None:
        values = [self.value_of(tensor) for tensor in tensors_in(args)]
        known = [value for value in values if value is not None]
        return known if values and len(known) == len(values) else None

    def _result(
        self, op: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], stack: Stack
    ) -> Any:
        """The abstract result of an operator, or an error that says what the user can do."""
        if id(op) in MAKES_STRIDED_NESTED:
            raise strided_nested(stack)
        if self.meets_numbers:
            args, kwargs = plain_numbers(op, args), {k: plain_numbers(op, value) for k, value in kwargs.items()}
        try:
            with without_function_modes():  # in backward, operators come straight from C++, with the modes still on
                return self._run(op, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            number = self.item(args[0]) if op is aten._local_scalar_dense.default else None
            if number is not None:
                self._read = "known"
                return number
            values = self._values_of(args) if op in _GIVES_NUMBERS else None
            if values is not None:
                self._read = "known"
                with disable_modes(), without_function_modes():
                    return op(*values)
            found = self._read_data(op, args, kwargs, stack)
            if found is not NotImplemented:
                return found
            if op in SIZED_BY_LISTS and (made := given_by_kernel(self.engine, op, args, kwargs)) is not None:
                return made
            raise DataDependentError(
                f"{op}, at {where(stack)}: its result depends on the data of a recorded tensor, which has none. "
                "Rewrite it with an operator of fixed output size (torch.where, masked_fill), or compile with "
                "fallback='eager'."
            ) from None
        except UnsupportedOperatorException:
            raise _without_inference(op, stack) from None
        except ForegradError as refusal:
            said = refusal.__cause__  # by the kernel, to tensors that stand in for these
            told = None if said is None else error_of_eager(op, args, kwargs)
            if told is not None and (type(told), str(told)) == (type(said), str(said)):
                raise told from None
            raise
        except Exception as error:
            return self._despite(error, op, types, args, kwargs, stack)

    def _despite(
        self,
        error: Exception,
        op: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stack: Stack,
    ) -> Any:
        """The abstract result of an operator that shape inference refuses, if there is one in eager."""
        told = error_of_eager(op, args, kwargs) if op.namespace == "aten" else None
        twin = twin_of_refused(op, args) if told is None else None
        if twin is not None:
            return self._result(twin[0], types, twin[1], {}, stack)
        if told is not None and not is_without_kernel(told):  # eager was asked with plain tensors
            try:
                raise told from None
            finally:
                del told  # it leads to this frame
        if has_no_inference(error):
            raise _without_inference(op, stack) from None
        if explained(error) is not None:
            raise
        if op.namespace == "aten" and (isinstance(error, _NOT_EAGERS) or can_be_asked(args, kwargs)):
            raise UnsupportedError(
                f"{op}, at {where(stack)}: its shape inference refuses what the operator itself takes, so that it "
                f"cannot be compiled. Compile with fallback='eager'. ({type(error).__name__}: {error})"
            ) from error
        raise

    def _note(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        stack: Stack,
        origin: Origin | None,
        repeats: int | None = None,
        follows: int | None = None,
    ) -> Any:
        """Write an operator down; numbers that were read are none of its results."""
        read, self._read = self._read, None
        if read == "known":
            return out
        if self.number_arguments and op._schema.name.startswith("aten::_fused_"):
            kwargs = {**kwargs, **self.number_arguments}
        step = Step(op, args, kwargs, out, torch.is_grad_enabled(), self.backward, stack, repeats, follows)
        step.becomes_grad = self.backward and op is _COPY and accumulates_gradient()
        step.origin, step.read = origin, read
        self.steps.append(step)
        return out

    def _higher_order(self, op: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator with side effects and without a schema; those that hold programs cannot be recorded."""
        stack = self._stack()
        if op not in EFFECTFUL_HIGHER_ORDER:
            raise UnsupportedError(f"the higher-order operator {op.name()}, at {where(stack)}, cannot be compiled yet.")
        given, named = self.objects.replaced((args, kwargs), stack)
        with without_function_modes():
            out = self.objects.fresh(self.engine.run_higher_order(op, given, named))
        step = Step(op, args, kwargs, out, torch.is_grad_enabled(), self.backward, stack, None)  # type: ignore[arg-type]
        self.steps.append(step)
        return out

    def _with_its_dtype(
        self, op: OpOverload, types: Any, args: Any, kwargs: dict[str, Any], out: Any
    ) -> dict[str, Any]:
        """What the program does under a default dtype of its own must give the same under the caller's."""
        inside = torch.get_default_dtype()
        torch.set_default_dtype(self._default_dtype)
        try:
            with without_function_modes():
                otherwise = self._run(op, types, args, kwargs)
        finally:
            torch.set_default_dtype(inside)
        made, others = ([t.dtype for t in tensors_in([value])] for value in (out, otherwise))
        if made == others:
            return kwargs
        if len(made) == 1 and any(a.name == "dtype" and a.kwarg_only for a in op._schema.arguments):
            return {**kwargs, "dtype": made[0]}
        raise UnsupportedError(
            f"{op}, at {where(self._stack())}, under a default dtype that the program has set: this cannot be compiled "
            "yet. Convert its argument to a dtype first."
        )

    def _decompose(self, op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace an operator by others: on the user's wish, or because it is a mere composition."""
        decomposition = self._decompositions.get(op)
        if decomposition is not None:
            out = self._taken_apart_by(decomposition, args, kwargs)
            return out if needs_no_gradient(args) or self._stands_for(op, args, kwargs, out) else NotImplemented
        if "composite" in info.traits and not (op in CHOOSES_BY_SUBCLASS and needs_no_gradient(args)):
            with self:
                return taken_apart(op, args, kwargs)
        if "list" in info.traits and lists_share_memory(args, kwargs):
            self.mutations.written_together.extend(args[0])
            with self:
                one_after_another(op, args, kwargs)
            return None
        return NotImplemented

    def _taken_apart_by(self, decomposition: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.meets_numbers:
            args, kwargs = in_python(tuple(args)), {name: in_python(value) for name, value in kwargs.items()}
        with self:
            return decomposition(*args, **kwargs)

    def _stands_for(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """Whether a decomposition gives all that the operator gives, and not only what programs look at.

        What autograd saves of an operator is read by the operator's own backward. That of flash attention on a CPU
        expects a sum for each row, where torch's decomposition gives the attention itself. Bytes are a library's
        workspace, which a decomposition has no use for.
        """
        if len(op._schema.returns) == 1:
            return True
        pairs = zip(tensors_in([self.engine.run(op, (), args, kwargs)]), tensors_in([out]), strict=True)
        return all(own.shape == other.shape for own, other in pairs if own.dtype is not torch.uint8)

    def _by_variant(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any] | None:
        """What an operator that writes would write, by the user's decomposition of its functional variant."""
        call = call_of_variant(op, args, kwargs, self.engine.device_of)
        decomposition = None if call is None else self._decompositions.get(call[0])
        if call is None or decomposition is None:
            return None
        twin, given, named = call
        computed = self._taken_apart_by(decomposition, given, named)
        if computed is NotImplemented:
            return None
        return tuple(computed) if len(twin._schema.returns) > 1 else (computed,)

    def _stack(self) -> Stack:
        """The user's line: of the operator itself, or in backward of the operator that it differentiates."""
        number = running_node_number()
        if number is not None and not self.backward:
            self._note_inner_backward()
        elif number is not None:
            return self._stack_in_backward(number)
        said = said_now()
        stack: Stack = ((said or {}).get("stack_trace") or ()) if self._from_nodes else user_stack(3)
        last, modules = next_sequence_number() - 1, self.calls.innermost
        running = None if number is None else running_node_name()  # of a backward inside of the program
        self._origin = last, running, modules, said
        self._known.add(last, stack, modules, said)
        return stack

    def _stack_in_backward(self, number: int) -> Stack:
        """The line of the operator whose node runs; what the node computes belongs to the same modules."""
        stack, modules, said = known = self._known.find(number)
        if torch.is_grad_enabled():  # nodes that are made now are differentiated in their turn
            self._known.add(next_sequence_number() - 1, *known)
        if number != self._last_node.number:
            self._origin = number, running_node_name(), modules, said
            return stack
        self._origin = number, None, modules, None
        return f"{GRADIENT_SUM}\n{show_stack(stack)}"

    def _note_inner_backward(self) -> None:
        """The program itself runs a backward, which must not reach the user's own tensors."""
        self.runs_backward = True
        leaf = accumulating_into()
        if leaf is not None and not self.engine.is_abstract(leaf):
            raise UnsupportedError(
                f"the program differentiates a custom function that takes a tensor of shape {tuple(leaf.shape)} which "
                f"the program finds by itself, at {where(user_stack(4))}: this cannot be compiled yet. Pass it as an "
                "argument, or compile with fallback='eager'."
            )

    def watch_gradient_sums(self, edges: Sequence[tuple[Any, Any]]) -> None:
        """Tell the sums that autograd makes between nodes of its tape from the operators of the nodes themselves.

        Autograd adds a gradient up right after the node that made it has run, so a hook at its end marks the border.
        """
        self._last_node.number = None
        producers: dict[Any, list[Any]] = {}
        for node, following in edges:
            producers.setdefault(following, []).append(node)
        for several in producers.values():
            if len(several) > 1:
                for node in several:
                    if node not in self._watched:
                        self._watched.add(node)
                        node.register_hook(functools.partial(self._last_node.finished, int(node._sequence_nr())))

    def _require_device(self, device: Any) -> None:
        """Raise eager's own error for a device that this build lacks, before an abstract tensor pretends otherwise."""
        if device is not None and device not in self._devices:
            with disable_modes():
                torch.empty(0, device=device)
            self._devices.add(device)

    def _draw(self, op: OpOverload, kwargs: dict[str, Any], args: tuple[Any, ...]) -> tuple[int | None, int | None]:
        """The earlier step whose draw this random operator replays, if it does, and the one that it follows."""
        if not draws(op, args, kwargs):
            return None, None
        generator = kwargs.get("generator") or self.default_generator(args, kwargs)
        if not self.backward:
            self.follow_seeds([generator], drawing=op)
        run = running_node_number() if self.backward else None
        return self.generators.draw(op, generator, len(self.steps), run=run)

    def follow_seeds(self, generators: Sequence[torch.Generator], drawing: OpOverload | None = None) -> None:
        """Write down where the program has put generators, before a draw or at its end."""
        for generator in generators:
            reseed = self.generators.reseeding(generator, drawing)
            if reseed is None:
                continue
            if self.checked_reads is None:
                raise UnsupportedError(
                    f"the program sets the state of a random generator, at {reseed.place} or before: this cannot be "
                    "compiled here. Seed outside the program, or compile with fallback='eager'."
                )
            self.steps.append(Step(READ, ([],), {}, None, torch.is_grad_enabled(), False, user_stack(3), None))
            self.steps[-1].read = reseed

    def default_generator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
        """What a random operator draws from, unless it is given a generator."""
        tensors = [a for a in args if self.engine.is_abstract(a)]
        device = self.engine.device_of(tensors[0]) if tensors else torch.device(kwargs.get("device") or "cpu")
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            return torch.cuda.default_generators[index]
        return torch.default_generator
