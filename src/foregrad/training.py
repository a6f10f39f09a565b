"""`foregrad.train_step`: a whole training step, with its backward and its optimizer inside, as one program."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .capturing.compiled import Compiled, Recompile, Specialization
from .compiling import compile
from .errors import ConfigError, ForegradError
from .options import AOTConfig, Compiler
from .partition.memory import StepMemory, step_memory

_MOST_OBJECTS = 8  # combinations of them, which are kept alive
_STATE = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)


def _is_state(value: Any) -> bool:
    """Whether an argument holds what steps change, so that a program is for this very object."""
    return isinstance(value, _STATE)


def _names_of(fn: Callable[..., Any]) -> list[str]:
    """The parameters of a function that are given in order, and can be given by name."""
    parameters = inspect.signature(fn).parameters.values()
    return [p.name for p in itertools.takewhile(lambda p: p.kind is p.POSITIONAL_OR_KEYWORD, parameters)]


class TrainStep:
    """A training step that is compiled when it is called: once for the first call, and once for all others.

    What else is compiled, and why, is in `specializations` and `recompiles`.
    """

    def __init__(self, fn: Callable[..., Any], config: AOTConfig) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._config = fn, config
        self._over: dict[Any, Compiled] = {}  # by the objects that it was called with
        self._alone = Compiled(fn, None, config)

    @functools.cached_property
    def _names(self) -> list[str]:
        return _names_of(self._fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(map(_is_state, args)) or any(map(_is_state, kwargs.values())):
            return self._call_over_objects(args, kwargs)
        return self._alone(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._alone).replace("<compiled", "<training step", 1)

    def _call_over_objects(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is given models and optimizers: a step of its own for each of them, which finds them itself."""
        if not kwargs.keys().isdisjoint(self._names[: len(args)]):
            inspect.signature(self._fn).bind(*args, **kwargs)  # which raises what the call would
        if len(args) > len(self._names):
            raise ConfigError(f"{self!r} takes models and optimizers by the names of its parameters: {self._names}.")
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        objects = {name: value for name, value in given.items() if _is_state(value)}
        key = tuple([(name, id(value)) for name, value in objects.items()])
        compiled = self._over.get(key)
        if compiled is None:
            if len(self._over) >= _MOST_OBJECTS:
                del self._over[next(iter(self._over))]
            compiled = self._over[key] = Compiled(functools.partial(self._fn, **objects), None, self._config)
        return compiled(**{name: value for name, value in given.items() if name not in objects})

    @property
    def _all(self) -> list[Compiled]:
        return [self._alone, *self._over.values()]

    @property
    def specializations(self) -> list[Specialization]:
        """The programs, in the order in which they were compiled; those for one model after those for another."""
        return [program for compiled in self._all for program in compiled.specializations]

    @property
    def recompiles(self) -> list[Recompile]:
        """Why each program but the first was compiled."""
        return [recompile for compiled in self._all for recompile in compiled.recompiles]

    @property
    def graph(self) -> fx.GraphModule:
        """The graph of the latest program, as its backend was given it: forward, backward and updates."""
        return self._latest.forward_graph

    @property
    def memory(self) -> StepMemory:
        """What the latest program has alive at its peak, by kind."""
        return step_memory(self._latest.flat_graph)

    @property
    def _latest(self) -> Specialization:
        if not self.specializations:
            raise ForegradError(f"{self!r} was not called yet: call it once, and it has a program to look at.")
        return self.specializations[-1]


def train_step(
    fn: Callable[..., Any],
    backend: str | Compiler = "eager",
    *,
    mode: str | None = None,
    memory_budget: float | None = None,
    release_gradients: bool | Literal["auto"] = "auto",
    cuda_graph: bool = False,
    fallback: Literal["error", "eager"] | None = None,
    options: Mapping[str, Any] | None = None,
) -> TrainStep:
    """Compile a whole training step: forward, loss, backward, clipping and optimizers, as one program.

    >>> import torch, foregrad
    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> @foregrad.train_step
    ... def step(x):
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss.item()
    >>> losses = [step(torch.ones(2, 8)) for _ in range(3)]
    >>> losses[0] > losses[1] > losses[2], len(step.specializations) <= 2
    (True, True)

    Parameters, optimizer state and buffers are written in place, as in eager. Results are detached: the backward is
    inside. Numbers in `param_groups` are read at each call, and a schedule that the step steps is stepped at its end.

    Args:
        fn: the step. It finds models and optimizers by itself, or is given them as arguments.
        backend: as for `foregrad.compile`. For compilers of your own, a new learning rate is a new program.
        mode: as for `foregrad.compile`.
        memory_budget: what may be alive at the peak beyond what the step is given, before operators write in place:
            bytes (an int), or a fraction between the lowest and the highest peak (a float). What does not fit is
            computed again.
        release_gradients: let each gradient go before the next one comes, where nothing needs them all at once; "auto"
            does so where it saves more than a MiB of the peak.
        cuda_graph: launch the compiled step as one CUDA graph, with the backend "cudagraphs" over this one.
        fallback: as for `foregrad.compile`.
        options: as for `foregrad.compile`.
    """
    if isinstance(fn, nn.Module) or not callable(fn):
        raise ConfigError(f"train_step takes a function that makes a whole step, not {type(fn).__name__}.")
    if cuda_graph:
        backend, options = "cudagraphs", {**(options or {}), "backend": backend}
    compiled = compile(
        fn,
        backend,
        mode=mode,
        dynamic=False,
        memory_budget=memory_budget,
        fallback=fallback,
        inplace=True,
        options=options,
    )
    config = dataclasses.replace(compiled.config, release_gradients=release_gradients, differentiate=False)
    return TrainStep(fn, config)
