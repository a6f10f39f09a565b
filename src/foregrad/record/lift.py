"""Tensors that the program finds by itself (parameters, closures, globals) become inputs of the recording."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function

from .._torch import (
    FAST_ATTENTION,
    HANDS_OVER,
    SPARSE_NUMBERS,
    SPARSE_PARTS,
    BackwardHook,
    CheckpointFrame,
    FakeTensor,
    below_autograd,
    changes_its_module,
    counts_versions,
    disable_modes,
    function_that_asks,
    hint_of,
    is_about_inference_tensors,
    is_extension,
    is_functorch_wrapped,
    outside_transforms,
    run_on_stand_ins,
    set_version,
    sizes_told_apart,
    without_function_modes,
)
from ..abstract.engine import (
    CHECKED_PROPERTIES,
    FROM_BEFORE,
    SIZES,
    follows_from_guards,
    is_known,
    refuse_plain_result,
    refuse_property,
    refuse_size_of_workspace,
)
from ..abstract.kernel_checks import VALUE_CHECKS
from ..abstract.sparse import has_unknown_length
from ..errors import DataDependentError, ForegradError, UnsupportedError
from ..host_numbers import HostNumber
from ..ops import aten
from ..stack_traces import is_own_code, is_users_code, user_stack, where
from ..subclasses.layout import is_wrapper
from ..values import PLAIN
from .borrowed import Borrowed, Caches
from .checked_reads import MOST_ELEMENTS
from .hooks import REGISTERING, Hooks, HooksLeft, kernels_seen
from .lengths import READS_LENGTHS, TAKES_LISTS, assign_by_masks, select_by_symbols
from .recorder import Recorder, needs_no_gradient
from .refusals import WAY_OUT, explained
from .tape import INNER_BACKWARDS, differentiated, tape_nodes

# ---------------------------------------------------------------------------------------------------------------------
# Real tensors that the program finds by itself: parameters, closures, globals.
#
# They must never meet the recording as they are: `buf.add_(x)` on a real `buf` would change the user's tensor, and
# autograd would run into the user's own tape. This mode sees every torch call before autograd does and puts an
# fake in the place of each real tensor. A call that gives back a fake (an in-place operator does) gives back
# the real tensor, so that `self.count += 1` assigns to the module what was there before. Properties that read no data
# and give no tensor are answered by the real tensor itself.
_TENSOR_PROPERTIES = frozenset(getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag"))
_GRAD = vars(Tensor.__base__)["grad"].__get__
_GRAD_FN = vars(Tensor.__base__)["grad_fn"].__get__
_GRAD_SETTER = vars(Tensor.__base__)["grad"].__set__
_DATA_SETTER = vars(Tensor.__base__)["data"].__set__
_REQUIRES_GRAD_SETTER = vars(Tensor.__base__)["requires_grad"].__set__
_SETTERS = frozenset({_GRAD_SETTER, _DATA_SETTER, _REQUIRES_GRAD_SETTER})

# What asks for data, or for memory, of a tensor that has none.
NEEDS_DATA: dict[Any, str] = {
    Tensor.item: "item()",
    Tensor.tolist: "tolist()",
    Tensor.numpy: "numpy()",
    Tensor.__array__: "numpy",
    Tensor.__bool__: "bool()",
    Tensor.__int__: "int()",
    Tensor.__float__: "float()",
    Tensor.__complex__: "complex()",
    Tensor.__index__: "an index",
    Tensor.data_ptr: "data_ptr()",
    Tensor.untyped_storage: "untyped_storage()",
    Tensor.storage: "storage()",
    Tensor.__dlpack__: "dlpack",
    Tensor.share_memory_: "share_memory_()",
    Tensor.is_shared: "is_shared()",
    Tensor.__deepcopy__: "a deep copy",
    Tensor.__reduce_ex__: "pickle",
    Tensor.__repr__: "the text",
    Tensor.__format__: "the text",
}
_GIVES_NUMBERS = frozenset(
    {
        *(Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__),
        Tensor.__index__,
    }
)
_MAY_GIVE_SYMBOLS = frozenset({Tensor.item, Tensor.tolist})  # Python makes whole numbers of what others give
_GIVES_ARRAYS: tuple[Any, ...] = (Tensor.numpy, Tensor.__array__)
_GIVES_TEXT = frozenset({Tensor.__repr__, Tensor.__format__})


# All functions that are looked at before they are called.
_TAKES_FAKES = frozenset(
    {*INNER_BACKWARDS, *REGISTERING, *VALUE_CHECKS, *READS_LENGTHS, *TAKES_LISTS, Tensor.__setitem__}
)
_SPECIAL = frozenset(
    {
        *NEEDS_DATA,
        *_TAKES_FAKES,
        *_SETTERS,
        *(Tensor.requires_grad_, Tensor.detach_, Tensor.set_),
        *SPARSE_PARTS,
    }
)


# What calls the operators of `CHOOSES_BY_SUBCLASS`. Below autograd they come to the recorder whole.
_POOLING = (torch.max_pool1d, functional.max_pool1d, aten.max_pool1d, aten.max_pool1d.default)
_SPECTRAL = (torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.cond, torch.linalg.matrix_rank)
_NORMS = (torch.linalg.norm, torch.linalg.matrix_norm, torch.norm, torch.nuclear_norm, Tensor.norm)
FUNCTIONS_THAT_CHOOSE = frozenset({*_POOLING, *_SPECTRAL, *_NORMS})

_STAYS = PLAIN | {FakeTensor}  # types of which no value has anything put in its place
_FROM_NUMBERS = (torch.tensor, torch.as_tensor)

# Functions that choose a kernel while the program is recorded, by settings that it does not see.
_ATTENDS = frozenset(
    {
        *(torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.multi_head_attention_forward),
        *FAST_ATTENTION,
    }
)


@dataclass(frozen=True, slots=True)
class TensorAccess:
    """What the program read and set of tensors, beside what operators do; ids are those of what stands for them."""

    data_assigned: set[int] = field(default_factory=set)  # moved last by `.data =`
    made_to_require_grad: set[int] = field(default_factory=set)  # `requires_grad_()` was called on them
    grads: set[int] = field(default_factory=set)  # their `.grad` was read or set
    properties: dict[int, set[str]] = field(default_factory=dict)  # that were read: compared at each call
    attention: set[Any] = field(default_factory=set)  # functions that were called, and chose a kernel for it


class LiftedTensors(TorchFunctionMode):
    """Replaces real tensors by their fakes before autograd sees them."""

    def __init__(
        self,
        recorder: Recorder,
        adopt: Callable[[Tensor], Tensor],
        need_grad: Callable[[Tensor], None],
        before_requiring_grad: Callable[[Tensor, Tensor], None],
        kernel_runs: Callable[[FrameType], None],
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._abstract = recorder.engine.is_abstract
        self._need_grad = need_grad  # raises if a tensor holds a gradient that is no input
        self._kernel_runs = kernel_runs  # is told of kernels in Python
        self._before_requiring_grad = before_requiring_grad  # raises if eager's views would see it otherwise
        self.access = TensorAccess()
        self._start_nodes: dict[int, Any] = {}  # of inputs that are no leaves, by id of what stands for them
        self.hooks_left = HooksLeft()
        self.applies_functions = False  # custom ones, torch's own included
        self.reaches_into_tape = False  # the program may have put functions of its own into autograd's nodes
        self.found_in_backward: set[int] = set()  # ids of fakes of real tensors that were met since it began
        self._adopt = adopt  # makes a hidden input of a tensor that was not known before
        self._fakes: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # by id of the real tensor
        self._lifted: dict[int, weakref.ref[Tensor]] = {}  # by id of the fake
        self._arguments: dict[int, Tensor] = {}  # the real tensors of the arguments, by id of what the program sees

    # What few programs need is made on first use.
    @functools.cached_property
    def hooks(self) -> Hooks:
        return Hooks()

    @functools.cached_property
    def caches(self) -> Caches:
        return Caches()

    @functools.cached_property
    def borrowed(self) -> Borrowed:
        return Borrowed()

    def is_used(self, part: Literal["hooks", "caches", "borrowed"]) -> bool:
        """Whether the program has needed one of these."""
        return part in vars(self)

    def finish(self, inputs: Container[int]) -> None:
        """The program has run. `inputs` are the ids of what stands for them."""
        if self.is_used("hooks"):
            self.hooks_left = self.hooks.finish(inputs)
        if self.is_used("caches"):
            self.caches.finish()

    def register(self, real: Tensor, fake: Tensor) -> None:
        """From now on `fake` stands for `real`."""
        self._note(real, fake)
        self._lifted[id(fake)] = weakref.ref(real)

    def _note(self, real: Tensor, fake: Tensor) -> None:
        if real.requires_grad and not real.is_leaf:
            self._start_nodes[id(fake)] = fake.grad_fn
        if self._known_fake(real) is None:
            self._fakes[id(real)] = weakref.ref(real), fake

    def _known_fake(self, real: Tensor) -> Tensor | None:
        """The fake, unless the id belonged to a tensor that is gone."""
        known = self._fakes.get(id(real))
        return known[1] if known is not None and known[0]() is real else None

    def note_argument(self, real: Tensor, seen: Tensor) -> None:
        """`seen` is what the program was given for `real`; the program finding `real` by itself finds the same."""
        self._arguments[id(seen)] = real
        self._note(real, seen)

    def release_arguments(self) -> None:
        """Forget the real tensors of the arguments."""
        for real in self._arguments.values():
            self._fakes.pop(id(real), None)
        self._arguments.clear()

    @property
    def held(self) -> Iterator[Tensor]:
        """All tensors that are held here, once for each reference."""
        for _, fake in self._fakes.values():
            yield fake
        if self.is_used("hooks"):
            yield from self.hooks.held

    def fake_of(self, real: Tensor) -> Tensor:
        """The fake of a real tensor, adopted if it is met for the first time."""
        fake = self._known_fake(real)
        if fake is None:
            with outside_transforms():
                fake = self._adopt(real)
            self.register(real, fake)
        self.found_in_backward.add(id(fake))
        return fake

    def note_applied(self, args: tuple[Any, ...], with_grad: bool) -> None:
        """A custom function takes real tensors as they are, and autograd's edge leads to them: they are inputs."""
        self.applies_functions = True
        with without_function_modes():
            for value in args:
                if not isinstance(value, Tensor) or is_functorch_wrapped(value):
                    continue
                fake = value if self._abstract(value) else self.fake_of(value)
                if with_grad and fake.is_leaf and fake.requires_grad:  # a stale view raises
                    self._recorder.mutation_checks.note_taken(fake)

    def note_saved_hooks(self, checkpoint: CheckpointFrame | None) -> None:
        """Autograd will call the program back for what it saves."""
        self.reaches_into_tape = True
        if checkpoint is not None:
            self.borrowed.note(checkpoint)

    def note_module_hooks(self, hooks: BackwardHook) -> None:
        """Autograd will call the backward hooks of a module."""
        self.borrowed.note(hooks)

    def note_cache(self, storage: dict[Any, Any]) -> None:
        """A selective checkpoint keeps values."""
        self.caches.add(storage)

    def stand_in(self, tensor: Tensor) -> Tensor:
        """A functorch transform wraps a tensor, past all modes: no operator may find a real one inside."""
        with without_function_modes():
            return tensor if self._abstract(tensor) or is_functorch_wrapped(tensor) else self.fake_of(tensor)

    def call_script(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module of TorchScript is called, which reads its tensors in C++."""
        assigned = changes_its_module(method)
        if assigned is not None:
            raise self._recorder.refuse(
                UnsupportedError(
                    f"a TorchScript module assigns to its attribute {assigned!r}, or calls a method of that name which "
                    f"an interface hides, at {where(user_stack(3))}: this cannot be compiled yet. Call the module that "
                    "TorchScript was made of, or compile with fallback='eager'."
                )
            )
        given, named = self._swap(args), self._swap_named(kwargs)
        return run_on_stand_ins(method, given, named, self.stand_in)

    def _swap(self, value: Any) -> Any:
        kind = type(value)
        if kind in _STAYS:
            return value
        if kind is tuple or kind is list:
            return kind([item if type(item) in _STAYS else self._swap(item) for item in value])
        if not isinstance(value, Tensor) or self._abstract(value) or is_functorch_wrapped(value):
            return value
        return self.fake_of(value)

    def _swap_named(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: self._swap(value) for name, value in values.items()} if values else values

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function gives that asks for data: of a value that calls compare, or that is always the same."""
        tensor = args[0] if args else None
        if not isinstance(tensor, Tensor):
            return NotImplemented
        if (number := self._number_of(func, tensor)) is not None:
            return number
        numbers = func in _GIVES_NUMBERS
        if numbers and self._recorder.checked_reads is not None:
            tensor = self._swap(tensor)
        if numbers and is_wrapper(tensor):  # it says itself what it holds
            return self._call(func, args, kwargs)
        if func in _GIVES_ARRAYS and self._recorder.checked_reads is not None and _may_be_an_array(tensor):
            return self._array(self._swap(tensor), *args[1:], **kwargs)
        value = self._known_value(func, tensor)
        if value is not None:
            if not numbers and func not in _GIVES_TEXT:
                return NotImplemented
            with disable_modes(), without_function_modes():
                return func(value, *args[1:], **kwargs)
        found = NotImplemented
        if numbers and self._abstract(tensor):
            found = self._recorder.read(NEEDS_DATA[func], func, [tensor])
        if found is NotImplemented:
            raise DataDependentError(
                f"{NEEDS_DATA[func]} of a recorded tensor, at {where(user_stack(3))}. While a program is recorded its "
                f"tensors have no data. {WAY_OUT}"
            )
        return found

    def _array(self, tensor: Tensor, dtype: Any = None, *, force: bool = False) -> Any:
        """The numbers of a small tensor as an array: neither of them can be written, for they share memory in eager."""
        numbers = self._read(Tensor.tolist, (tensor,), {})
        self._recorder.foreign.note_shown(tensor)
        with disable_modes(), without_function_modes():
            array = torch.tensor(numbers, dtype=tensor.dtype).reshape(tensor.shape).numpy()
            array.flags.writeable = False
            return array if dtype is None else array.astype(dtype)

    def _known_value(self, func: Any, tensor: Tensor) -> Tensor | None:
        """The value of a tensor that the program reads, if it is the same at each call, or a guard compares it."""
        if not self._abstract(tensor):
            return None
        if func in _GIVES_NUMBERS:
            reads = self._recorder.checked_reads
            if func in _MAY_GIVE_SYMBOLS and reads is not None and reads.changes(user_stack(3)):
                return self._recorder.reads.constant(tensor)
            return self._recorder.value_of(tensor)
        if func in _GIVES_TEXT:
            return self._recorder.reads.constant(tensor)
        return self._recorder.engine.value_of(tensor)

    def _is_input(self, tensor: Tensor) -> bool:
        return not self._abstract(tensor) or id(tensor) in self._arguments or id(tensor) in self._lifted

    def _look_at_grad(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor whose `.grad` is read or set; a gradient from before the call must be an input."""
        real = self._arguments.get(id(tensor), tensor)
        if not self._abstract(real):
            self._need_grad(real)
        seen = tensor if self._abstract(tensor) else self.fake_of(tensor)
        self.access.grads.add(id(seen))
        return seen

    def _read_property(self, func: Any, tensor: Any) -> Any:
        """A property that gives no tensor, and that guards compare, if it follows from nothing else."""
        if not isinstance(tensor, Tensor) or is_functorch_wrapped(tensor) or is_own_code(who_asks(func)):
            return func(tensor)
        seen = tensor if self._abstract(tensor) else self.fake_of(tensor)  # from now on an input, and checked as such
        name = func.__self__.__name__
        if name in CHECKED_PROPERTIES or not is_users_code(who_asks(func)):
            return func(tensor)
        real = self._real_of(seen)
        value: Any = self.hooks.without_guards(func(seen)) if name == "_backward_hooks" else func(seen)
        base = self._real_of(value) if name == "_base" and value is not None else None
        if name == "grad_fn" and real is not None and value is self._start_nodes.get(id(seen)):
            value = real.grad_fn  # what was computed before the call: its type is compared
            self.access.properties.setdefault(id(seen), set()).add(name)
        elif name == "_version" or not all(is_known(name, known) for known in (real, base) if known is not None):
            refuse_property(name)
        if name in FROM_BEFORE and real is not None:
            self.access.properties.setdefault(id(seen), set()).add(name)
        return value

    def _real_of(self, seen: Tensor) -> Tensor | None:
        """The tensor of the caller's that a recorded one stands for, if it does."""
        found = self._lifted.get(id(seen))
        return self._arguments.get(id(seen)) if found is None else found()

    def _require_grad(self, tensor: Tensor) -> None:
        self.access.made_to_require_grad.update((id(tensor), id(self._swap(tensor))))
        real = self._arguments.get(id(tensor), tensor)
        if not self._abstract(real) and not is_functorch_wrapped(real):
            self._before_requiring_grad(real, self.fake_of(real))

    def _assign_data(self, target: Tensor, value: Tensor) -> None:
        """`x.data = y` moves a tensor to other memory as `set_` does, without counting as a write."""
        if target.dtype != value.dtype:
            raise UnsupportedError(
                f"assigning .data of another dtype, at {where(user_stack(3))}, cannot be compiled yet."
            )
        if target.is_inference() != value.is_inference():
            raise UnsupportedError(
                f"assigning .data, at {where(user_stack(3))}, makes an inference tensor of a normal one, or the other "
                "way round, which cannot be compiled yet."
            )
        version = 0 if target.is_inference() else target._version
        with torch.no_grad():
            aten.set_.source_Tensor(target, value.detach())
        if not target.is_inference():
            set_version(target, version)
        self.access.data_assigned.add(id(target))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        calling = sys._getframe(1)
        if calling.f_code is HANDS_OVER:
            func = function_that_asks(func, calling)
        try:
            return self._handle(func, args, kwargs or {})
        except ForegradError as error:
            self._recorder.refuse(error)
            raise
        except RuntimeError as error:
            refusal = explained(error)
            if isinstance(refusal, DataDependentError):  # others may have to do with how inputs share memory
                raise self._recorder.refuse(refusal) from error
            if is_about_inference_tensors(error) and self._meets_half_inference():
                raise self._recorder.refuse(
                    UnsupportedError(
                        f"the program uses a tensor that `.data =` has given an inference tensor, at "
                        f"{where(user_stack(2))}: this cannot be compiled yet. Compile with fallback='eager'."
                    )
                ) from error
            raise

    def _meets_half_inference(self) -> bool:
        """Whether an input says that it is an inference tensor and counts its versions like any other."""
        known = (*self._arguments.values(), *(find() for find, _ in self._fakes.values()))
        return any(real is not None and real.is_inference() and counts_versions(real) for real in known)

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in SIZES and args:
            refuse_size_of_workspace(args[0])
        if getattr(func, "__name__", None) == "__get__" and func not in _TENSOR_PROPERTIES:
            return self._get(func, args)
        found = self._special(func, args, kwargs) if func in _SPECIAL else NotImplemented
        return self._call(func, args, kwargs) if found is NotImplemented else found

    def _special(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function gives that is more to a recording than its operators; NotImplemented where they are all."""
        if func in NEEDS_DATA:
            return self._read(func, args, kwargs)
        if func in _SETTERS:
            return self._set(func, args)
        if func not in _TAKES_FAKES:
            self._before(func, args[0])
            return NotImplemented
        given = self._swap(args)
        if func in REGISTERING:
            return self.hooks.register(func, *given, **kwargs)
        if func in VALUE_CHECKS:
            VALUE_CHECKS[func](*given, **kwargs)
            return NotImplemented
        if func in TAKES_LISTS:
            return TAKES_LISTS[func](*given, **kwargs)
        if func in INNER_BACKWARDS:
            named = self._swap_named(kwargs)
            if not self._recorder.backward:
                self._require_own_tape(func, *differentiated(func, given, named))
            with self:
                return INNER_BACKWARDS[func](*given, **named)
        if self._recorder.checked_reads is None:
            return NotImplemented
        if func is Tensor.__setitem__:
            return None if assign_by_masks(*given) else NotImplemented
        named = self._swap_named(kwargs)
        return READS_LENGTHS[func](lambda tensor: self._read(Tensor.tolist, (tensor,), {}), *given, **named)

    def _require_own_tape(self, func: Any, results: tuple[Any, ...], inputs: tuple[Any, ...] | None) -> None:
        """A backward of the program's own must end where the call begins: what was computed before is the caller's.

        It may have been computed from any other tensor of the caller's, in this call or in the next one.
        """
        if not self._start_nodes:
            return
        nodes = set(tape_nodes(results))
        for place, node in self._start_nodes.items():
            others = inputs is None or any(id(one) != place and self._is_input(one) for one in inputs)
            if node in nodes and others:
                raise UnsupportedError(
                    f"{func.__name__}(), at {where(user_stack(4))}, goes on to what was computed before the call: the "
                    "program uses a tensor that is no leaf. This cannot be compiled yet. Pass x.detach(), or compile "
                    "with fallback='eager'."
                )

    def _before(self, func: Any, tensor: Tensor) -> None:
        """A method of a tensor is called, of which more than its operator counts."""
        if func is Tensor.requires_grad_:
            self._require_grad(tensor)
        elif func is Tensor.detach_:
            self._before_detaching(tensor)
        elif func in SPARSE_PARTS:
            if not self._is_input(tensor):
                _refuse_unknown_length(func, self._swap(tensor))
        elif func is Tensor.set_:
            self.access.data_assigned.discard(id(tensor))

    def _get(self, func: Any, args: tuple[Any, ...]) -> Any:
        """A property of a tensor that is no view of it."""
        if func == _GRAD:
            return func(self._look_at_grad(args[0]), *args[1:])
        if func == _GRAD_FN:
            self.reaches_into_tape = True
        return self._read_property(func, args[0])

    def _set(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Assign to a property of a tensor."""
        if func == _DATA_SETTER:
            return self._assign_data(*self._swap(args))
        if func == _GRAD_SETTER:
            return func(self._look_at_grad(args[0]), self._swap(args[1]))
        self._require_grad(args[0])
        return self._call(func, args, {})

    def _before_detaching(self, tensor: Tensor) -> None:
        if self._arguments.get(id(tensor), tensor)._is_view():
            _a_view().detach_()  # raises eager's error: the recording does not know that it is a view
        if not tensor.requires_grad:
            return
        if self._is_input(tensor):
            raise UnsupportedError(
                f"an input is detached in place, at {where(user_stack(2))}, which cannot be compiled yet. Use detach()."
            )
        self._recorder.mutation_checks.note_detached(tensor)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function with fakes in the places of real tensors; a fake that comes back is the real tensor again."""
        if func in _ATTENDS:
            return self._attend(func, args, kwargs)
        return self._call_any(func, args, kwargs)

    def _attend(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Torch has several kernels of attention, and another one where there is nothing to attend to."""
        self.access.attention.add(func)
        with sizes_told_apart() if self._recorder.has_symbols_of_reads else contextlib.nullcontext():
            return self._call_any(func, args, kwargs)

    def _call_any(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._recorder.numbers is not None:
            func, args, kwargs = self._with_numbers(func, args, kwargs)
        given, named = self._swap(args), self._swap_named(kwargs)
        found = self._another_way(func, given, named)
        if found is not NotImplemented:
            return found
        values_read = self._recorder.reads.count
        try:
            result = self._run_extension(func, given, named) if is_extension(func) else func(*given, **named)
        finally:
            self._recorder.number_arguments = {}
        if isinstance(result, Tensor) and id(result) in self._lifted:
            real = self._lifted[id(result)]()
            return result if real is None else real
        if (
            type(result) in PLAIN
            and func not in NEEDS_DATA
            and not follows_from_guards(func, result)
            and is_users_code(who_asks(func))
            and not (func in SPARSE_NUMBERS and self._is_input(args[0]))
            and self._recorder.reads.count == values_read  # it is none that it was given
            and not self._recorder.is_constant([*given, *named.values()])
        ):
            refuse_plain_result(func, result)
        return result

    def _another_way(self, func: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What a function gives that would do something else to recorded tensors than it does in eager."""
        if func in FUNCTIONS_THAT_CHOOSE and needs_no_gradient((*given, *named.values())):
            with below_autograd():
                return func(*given, **named)
        if func is Tensor.__getitem__ and self._recorder.has_symbols_of_reads:
            return select_by_symbols(*given)
        return NotImplemented

    def _number_of(self, func: Any, tensor: Tensor) -> float | None:
        """What `item()` gives of a tensor on the host, if calls can work it out before their graphs run."""
        follows = func is Tensor.item and self._recorder.numbers is not None
        return self._recorder.item(self._swap(tensor)) if follows else None

    def _with_numbers(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """A call whose numbers torch takes as they are: it asks for those that its schema calls floats."""
        if func in _FROM_NUMBERS and args and type(args[0]) is HostNumber and kwargs.keys() <= {"dtype", "device"}:
            return torch.scalar_tensor, args, kwargs
        if getattr(func, "__name__", "").startswith("_fused_"):
            found = {name: value for name, value in kwargs.items() if type(value) is HostNumber}
            self._recorder.number_arguments = found
            kwargs = {**kwargs, **{name: number.value for name, number in found.items()}}
        return func, args, kwargs

    def _run_extension(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that may have kernels in Python, some of which run above the recorder."""
        with kernels_seen(sys._getframe().f_code, self._kernel_runs):
            return func(*args, **kwargs)


def _may_be_an_array(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor are few enough, and of a kind, to be compared at each call."""
    exact = not tensor.is_floating_point() and not tensor.is_complex() and tensor.layout is torch.strided
    return exact and tensor.device.type == "cpu" and not is_wrapper(tensor) and hint_of(tensor.numel()) <= MOST_ELEMENTS


def _refuse_unknown_length(func: Any, tensor: Tensor) -> None:
    if has_unknown_length(tensor):
        raise DataDependentError(
            f"{func.__name__}() of a sparse tensor, at {where(user_stack(4))}: how many elements it holds is data, "
            "which recorded tensors do not have. Make it of its indices and values (torch.sparse_coo_tensor), or "
            "compile with fallback='eager'."
        )


def _a_view() -> Tensor:
    with disable_modes(), without_function_modes():
        return torch.zeros(1).view(1)


def who_asks(func: Any) -> CodeType:
    """The code that calls a function of tensors or reads a property, past what hands the call on to a mode."""
    between = {id(handle_torch_function.__code__), id(getattr(func, "__code__", None))}
    frame = sys._getframe(1)
    while frame.f_back is not None and (id(frame.f_code) in between or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return frame.f_code
