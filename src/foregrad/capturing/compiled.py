"""The callable that users get: a call with different shapes, dtypes, flags or Python values is compiled separately."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, fx, nn

from .._torch import (
    FakeTensor,
    dispatch_mode_depth,
    foreign_function_mode,
    forward_ad_level,
    garbage_collection_paused,
    is_about_symbols,
    is_functorch_wrapped,
    left_alone,
    under_functorch_transform,
)
from ..compat import ViewAndMutationMeta
from ..errors import CaptureError, EagerFallbackWarning, FirstCallError, ForegradError, StateChangeError
from ..graph.graph import Graph
from ..graph.reads import DataRead
from ..locks import Lock, recording_lock, state_lock
from ..logs import show_recompile
from ..options import AOTConfig, Changing
from ..runtime.assemble import Program, assemble
from ..runtime.saved_tensors import SavedValue
from ..stack_traces import user_stack, users_level, where
from ..values import Change
from .capture import Capture, capture_call, show_joint
from .explain import GuardText, names_of, with_owner
from .forward import Forward
from .given import Opening, user_path
from .guards import MISS, GuardedEntry
from .kinds import Lifetime
from .same_program import does_the_same

_TRIES = 3  # another thread may change what the guards look at, between the recording and the call

log = logging.getLogger("foregrad")


class Specialization:
    """One compiled program of a callable, for the calls that pass its guards."""

    def __init__(self, program: Program, lifetime: Lifetime, guards: GuardText | None = None) -> None:
        self._program = program
        self._lifetime = lifetime
        self._guards = guards
        self.call = program.call

    def why_not(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Change:
        """The guard that keeps a call from this program."""
        change = None if self.is_gone or self._guards is None else self._guards.failure(args, kwargs)
        gone = self._lifetime.first_gone
        return change or Change(f"{gone or 'something'} that the program depends on", "there", "gone")

    @property
    def is_gone(self) -> bool:
        """Whether an object that the program depends on is gone, so that no call will ever fit."""
        return self._lifetime.is_gone

    @property
    def metadata(self) -> ViewAndMutationMeta:
        """What the inputs and outputs are."""
        return self._program.metadata

    @property
    def joint_graph(self) -> fx.GraphModule:
        """Forward and backward as one graph."""
        return self._program.joint.module

    @property
    def forward_graph(self) -> fx.GraphModule:
        """What the forward compiler was given."""
        return self._program.forward_graph

    @property
    def forward_parts(self) -> tuple[fx.GraphModule, ...]:
        """The forward as its compiler was given it: cut where the program reads data, otherwise whole."""
        return self._program.forward_parts

    @property
    def backward_graph(self) -> fx.GraphModule | None:
        """What the backward compiler is given, if the program has a backward."""
        return self._program.backward_graph

    @property
    def flat_graph(self) -> Graph:
        """The forward as the run time has it: nodes in the order in which they run."""
        return self._program.flat_graph

    @property
    def saved(self) -> tuple[SavedValue, ...]:
        """What is kept for backward, and once gradients were differentiated, what is kept for that.

        >>> import foregrad, torch
        >>> square = foregrad.aot_function(torch.exp, lambda graph, inputs: foregrad.make_boxed_func(graph.forward))
        >>> x = torch.ones(2, requires_grad=True)
        >>> (gradient,) = torch.autograd.grad(square(x).sum(), x, create_graph=True)
        >>> for value in square.specializations[0].saved:
        ...     print(value)
        order 1: exp, float32[2], 8 bytes
        order 2: primals_1, float32[2], an input
        order 2: primals_2, float32[2], an input
        """
        return self._program.saved

    @property
    def reads(self) -> tuple[DataRead, ...]:
        """Where the program reads data, in order: a call that reads anything else is for another program.

        >>> import foregrad, torch
        >>> compiled = foregrad.compile(lambda x: x * 2 if x.sum() > 0 else x, backend="eager")
        >>> _ = compiled(torch.ones(2))
        >>> [(read.operator, read.value) for read in compiled.specializations[0].reads]
        [('bool()', True)]
        """
        return self._program.reads

    @property
    def source(self) -> str:
        """The generated Python: exactly what runs."""
        return self._program.source

    def __str__(self) -> str:
        return f"{show_joint(self._program.joint)}\n\n{self.source}"

    def __repr__(self) -> str:
        joint = self._program.joint
        kind = "training" if joint.is_training else "inference"
        return f"<{kind} program: {joint.op_count} operators, {len(joint.inputs)} inputs>"


class SeenSizes:
    """The sizes and ints that a callable was recorded with, by the place of each input."""

    def __init__(self) -> None:
        self._seen: dict[str, int | tuple[int, ...]] = {}
        self._changing: dict[str, Literal[True] | frozenset[int]] = {}

    def changing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Changing:
        """The dimensions, and ints, that were others in an earlier recording; those of this one are noted too.

        >>> import torch
        >>> sizes = SeenSizes()
        >>> sizes.changing((torch.ones(2, 4), 2), {}), sizes.changing((torch.ones(3, 4), 3), {})
        ({}, {'args[0]': frozenset({0}), 'args[1]': True})
        """
        flat = Opening().take((args, kwargs)).flat
        for path, leaf in zip(flat.paths, flat.leaves, strict=True):
            name = user_path(path)
            if type(leaf) is int:
                if self._seen.setdefault(name, leaf) != leaf:
                    self._changing[name] = True
            elif isinstance(leaf, Tensor):
                self._note(name, tuple(leaf.shape))
        return dict(self._changing)

    def _note(self, name: str, shape: tuple[int, ...]) -> None:
        before = self._seen.setdefault(name, shape)
        if isinstance(before, int) or len(before) != len(shape):
            return
        dims = frozenset(dim for dim, (one, other) in enumerate(zip(before, shape, strict=True)) if one != other)
        known = self._changing.get(name, frozenset())
        if dims and known is not True:
            self._changing[name] = known | dims


@dataclasses.dataclass(frozen=True)
class Recompile:
    """Why a call was compiled, where programs for other calls were there: the first guard of each that it fails.

    >>> import foregrad, torch
    >>> double = foregrad.aot_function(lambda x: x * 2, lambda graph, inputs: foregrad.make_boxed_func(graph.forward))
    >>> _ = double(torch.ones(2, 8)), double(torch.ones(2, 16))
    >>> print(*double.recompiles)
    args[0]: size of dimension 1 was 8, is 16
    """

    program: int  # the number of programs that were compiled before
    changes: tuple[Change, ...]  # one for each earlier program, the most recent first

    def __str__(self) -> str:
        latest = {change.path: str(change) for change in reversed(self.changes)}
        texts = [latest[path] for path in dict.fromkeys(change.path for change in self.changes)]
        return "; for a program before that, ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if texts[3:] else "")


class Compiled:
    """A function that is compiled when it is called, once for all calls that pass the same guards.

    `specializations` lists its programs, in the order in which they were compiled, and `recompiles` says of each but
    the first why it was compiled.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module | None, config: AOTConfig) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._module = module
        self._name = getattr(function, "__qualname__", type(function if module is None else module).__name__)
        self.config = dataclasses.replace(config, name=self._name)
        self._lock = Lock()
        self._eager = False
        self._first_calls = 0  # in a row, after which the program was to be recorded
        self.specializations: list[Specialization] = []
        self.recompiles: list[Recompile] = []
        self._calls: tuple[Callable[..., Any], ...] = ()
        self._sizes = SeenSizes()
        self._changing_reads: set[str] = set()  # where calls have read different whole numbers

    @left_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for call in self._calls:
            result = call(args, kwargs)
            if result is not MISS:
                return result
        return self._on_guard_miss(args, kwargs)

    def __repr__(self) -> str:
        return f"<compiled {self._name}, {len(self.specializations)} programs>"

    @property
    def original(self) -> nn.Module:
        """The module that was compiled."""
        assert self._module is not None
        return self._module

    @property
    def forward(self) -> Forward:
        """The forward of the module that was compiled."""
        assert isinstance(self._function, Forward)
        return self._function

    def _on_guard_miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that no program is for: compile one, or run the original where that is the only right thing."""
        for _ in range(_TRIES):
            if self._eager or state_lock.is_mine or recording_lock.is_mine or _inside_another_transform(args, kwargs):
                return self._function(*args, **kwargs)
            result = self._compile_and_call(args, kwargs)
            if result is not MISS:
                return result
        why = (
            "the guards refuse the very call that it was compiled for, since an argument or something that the "
            f"function reads changes while it is recorded or cannot be compared, at {where(user_stack(2))}."
        )
        if self.config.options.fallback != "eager":
            raise ForegradError(f"{self!r} cannot be compiled: {why}")
        self._eager = True
        return self._give_up(f"cannot be compiled and runs eagerly: {why}", args, kwargs)

    def _compile_and_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            result = self._try_programs(args, kwargs)  # another thread may have compiled it meanwhile
            if result is not MISS:
                return result
            changes = tuple([known.why_not(args, kwargs) for known in reversed(self.specializations)])
            self._changing_reads.update(change.place for change in changes if change.place)
            self._forget_those_gone()
            if len(self._calls) >= self.config.options.max_specializations:
                return self._give_up(
                    f"was compiled {len(self._calls)} times; from now on it runs eagerly where no program fits. "
                    f"{self._what_keeps_changing(changes)} Raise foregrad.config.max_specializations, or, where sizes "
                    "or numbers change, compile with dynamic=True.",
                    args,
                    kwargs,
                )
            try:
                call = self._specialize_or_not(args, kwargs, changes)
            except ForegradError as error:
                if self.config.options.fallback != "eager":
                    _tell_of_fallback(error)
                    raise
                self._eager = True
                return self._give_up(f"cannot be compiled and runs eagerly: {error}", args, kwargs)
            if call is None:
                with state_lock:
                    return self._function(*args, **kwargs)
        result = call(args, kwargs)
        if result is MISS:  # the guards may have met a tensor of a recording in another thread: none runs now
            with recording_lock:
                return self._try_programs(args, kwargs)
        return result

    def _note_first_call(self, change: FirstCallError) -> None:
        """The program changes what only its first call changes, which is made as it was written; so may others be."""
        self._first_calls += 1
        if self._first_calls > self.config.options.max_specializations:
            raise StateChangeError(
                f"{self._first_calls - 1} calls in a row ran as they were written, since each found something that "
                f"no call before it had changed. Now {change.change}. Change it outside the program, or compile with "
                "fallback='eager'."
            ) from None
        log.debug("%r is called once as it was written: %s", self, change)
        self._calls = tuple([functools.partial(self._ends_first_calls, call) for call in self._calls])

    def _ends_first_calls(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = call(args, kwargs)
        if result is not MISS:
            with self._lock:
                self._first_calls = 0
                self._forget_those_gone()
        return result

    def _try_programs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for call in self._calls:
            result = call(args, kwargs)
            if result is not MISS:
                return result
        return MISS

    def _specialize_or_not(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], changes: tuple[Change, ...]
    ) -> Callable[..., Any] | None:
        """A program for a call; None if the call must be made as it was written, which changes what no program can."""
        try:
            return self._specialize(args, kwargs, changes)
        except FirstCallError as change:
            self._note_first_call(change)
            return None

    def _specialize(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], changes: tuple[Change, ...]
    ) -> Callable[..., Any]:
        with garbage_collection_paused():
            capture = self._capture(args, kwargs)
            if changes:
                self._note_recompile(changes, capture)
            capture.return_borrowed()
            entry = GuardedEntry(capture)
            program = assemble(capture.joint, self.config.for_program(), entry)
            capture.joint.recording.session.release_arguments()
            capture.free_variables.release()
        self._first_calls = 0
        lifetime = capture.free_variables.lifetime
        self.specializations.append(Specialization(program, lifetime, entry.text(program)))
        self._calls = (program.call, *self._calls)
        return program.call

    def _note_recompile(self, changes: tuple[Change, ...], capture: Capture) -> None:
        """Say why, with the names that what the program reaches has now."""
        names = names_of(capture.free_variables.reached)
        named = tuple([with_owner(change, names) for change in changes])
        self.recompiles.append(Recompile(len(self.specializations), named))
        show_recompile(self._name, str(self.recompiles[-1]))

    def _what_keeps_changing(self, changes: tuple[Change, ...]) -> str:
        latest = [*(recompile.changes[0] for recompile in self.recompiles), with_owner(changes[0], {})]
        [(place, times), *_] = collections.Counter(change.path for change in latest).most_common()
        last = next(change for change in reversed(latest) if change.path == place)
        return f"What keeps changing is {place} ({times} times): at last it was {last.was}, and is {last.now}."

    def _forget_those_gone(self) -> None:
        """Programs that no call can fit any more are not tried again; a few are kept, to be looked at."""
        self._calls = tuple([known.call for known in reversed(self.specializations) if not known.is_gone])
        kept = self.config.options.max_specializations
        gone = [known for known in self.specializations if known.is_gone][:-kept]
        self.specializations[:] = [known for known in self.specializations if known not in gone]

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
        """Record the program; where symbols lead into what torch cannot do with them, with fixed numbers instead."""
        if not self._changing_reads:
            return self._capture_as(args, kwargs, self.config)
        symbols = dataclasses.replace(self.config, changing_reads=frozenset(self._changing_reads))
        captured = self._capture_as(args, kwargs, symbols)
        if not captured.has_read_symbols:
            return captured
        exactly = self._capture_as(args, kwargs, self.config)
        return captured if does_the_same(captured, exactly) else exactly

    def _capture_as(self, args: tuple[Any, ...], kwargs: dict[str, Any], config: AOTConfig) -> Capture:
        again = bool(self.specializations)
        if config.symbols_once_changed:
            changing = self._sizes.changing(args, kwargs)
            config = dataclasses.replace(config, dynamic_shapes=bool(changing), changing=changing)
        if not config.dynamic_shapes:
            return capture_call(self._function, args, kwargs, self._module, config, again)
        try:
            capture = capture_call(self._function, args, kwargs, self._module, config, again)
            if not any(map(is_about_symbols, capture.joint.backward.refused.values())):
                return capture
        except FirstCallError:
            raise
        except Exception as error:  # one that is not about symbols comes again with fixed numbers
            log.debug("recording with symbolic sizes failed, fixed ones are tried: %s", error)
        fixed = dataclasses.replace(config, dynamic_shapes=False)
        return capture_call(self._function, args, kwargs, self._module, fixed, again)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A compiled function in a class is a method, as the function itself would be."""
        is_method = instance is not None and hasattr(type(self._function), "__get__")
        return types.MethodType(self, instance) if is_method else self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A function that was compiled under its own name is pickled by that name, as functions are."""
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self, "__module__", None) or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if name and found is self else super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        copied = Compiled.__new__(Compiled)
        memo[id(self)] = copied
        copied.__setstate__({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return copied

    def __copy__(self) -> Compiled:
        return Compiled(self._function, self._module, self.config)

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without programs: it compiles its own."""
        return {"_function": self._function, "_module": self._module, "config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**{name.removeprefix("_"): value for name, value in state.items()})  # type: ignore[misc]

    def _give_up(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not getattr(self, "_warned", False):
            self._warned = True
            warnings.warn(f"{self!r} {why}", EagerFallbackWarning, stacklevel=users_level())
        return self._function(*args, **kwargs)


def _tell_of_fallback(error: ForegradError) -> None:
    """A program that is refused may always run as it is: say so, where the error itself does not."""
    if isinstance(error, CaptureError) and "fallback=" not in str(error):
        error.add_note("Or compile with fallback='eager', which runs the program as it is.")


def _inside_another_transform(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call happens inside another recording or a transform, which must see the original operators."""
    if dispatch_mode_depth() or foreign_function_mode() or under_functorch_transform() or forward_ad_level() >= 0:
        return True
    leaves = Opening().take((tuple(args), kwargs)).flat.leaves
    return any(
        isinstance(leaf, Tensor) and (is_functorch_wrapped(leaf) or isinstance(leaf, FakeTensor)) for leaf in leaves
    )
