"""Options: `foregrad.config` holds the defaults, `AOTConfig` carries the resolved ones.

Defaults are read once, at the entry of a compilation, and travel from there as one frozen value. Nothing deeper in
the library reads a global or an environment variable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ._torch import FrontEnd
from .errors import ConfigError, IgnoredOptionWarning

Compiler = Callable[..., Any]
Partitioner = Callable[..., Any]
JointPass = Callable[[Any], Any]  # of a graph, which takes and returns the same values afterwards
NumbersAre = Literal["constants", "inputs", "in a tensor"]  # what the host's numbers are to the graphs of a compiler
Changing = Mapping[str, Literal[True] | frozenset[int]]  # the dimensions of inputs, by their names; True for an int


@dataclass
class Config:
    """The defaults of all options.

    >>> import foregrad
    >>> with foregrad.config.patch(debug_assert=True):
    ...     foregrad.config.debug_assert
    True
    >>> foregrad.config.debug_assert
    False
    """

    # What a compiled call checks and does.
    debug_assert: bool = False
    fallback: Literal["error", "eager"] = "error"
    max_specializations: int = 32
    reads: Literal["checked", "refused"] = "checked"
    max_reads: int = 256
    static_weight_shapes: bool = True
    view_replay_for_aliased_outputs: bool = True
    functionalize_rng_ops: bool = False
    unlift_effect_tokens: bool = False
    verify: bool = False
    # What the partitioners weigh.
    memory_budget: int | float | None = None
    cse: bool = True
    debug_partitioner: bool = field(default_factory=lambda: os.environ.get("AOT_PARTITIONER_DEBUG", "0") != "0")
    max_dist_from_bw: int = 1000
    ban_recompute_used_far_apart: bool = True
    ban_recompute_long_fusible_chains: bool = True
    ban_recompute_materialized_backward: bool = True
    ban_recompute_not_in_allowlist: bool = True
    ban_recompute_reductions: bool = True
    recompute_views: bool = False
    aggressive_recomputation: bool = False
    activation_memory_budget: float = 1.0
    activation_memory_budget_solver: str = "dp"
    activation_memory_budget_runtime_estimator: str = "flops"
    # The cache of compiled programs.
    enable_autograd_cache: bool = False
    strict_autograd_cache: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            raise ConfigError(f"foregrad.config has no option {name!r}; it has: {', '.join(self.__dataclass_fields__)}")
        if name in _WITHOUT_EFFECT and name in vars(self) and value != getattr(self, name):
            warnings.warn(
                f"foregrad.config.{name} has no effect: {_WITHOUT_EFFECT[name]}.", IgnoredOptionWarning, stacklevel=2
            )
        super().__setattr__(name, value)

    @contextlib.contextmanager
    def patch(self, **options: Any) -> Iterator[None]:
        """Set options for the length of a `with` block."""
        before = dict(vars(self))
        try:
            for name, value in options.items():
                setattr(self, name, value)
            yield
        finally:
            vars(self).update(before)

    def copy(self) -> Config:
        """A snapshot that later changes do not reach."""
        return dataclasses.replace(self)


_NO_BANS = "the peak is simulated, so that recomputing is banned nowhere"
_WITHOUT_EFFECT = {
    "ban_recompute_used_far_apart": _NO_BANS,
    "ban_recompute_long_fusible_chains": _NO_BANS,
    "ban_recompute_materialized_backward": _NO_BANS,
    "ban_recompute_reductions": _NO_BANS,
    "ban_recompute_not_in_allowlist": "there is no list of operators that may be computed again",
    "recompute_views": "a view is never saved beside its memory, and is always taken again",
    "activation_memory_budget_solver": "there is one solver, which simulates the peak",
    "activation_memory_budget_runtime_estimator": "there is one estimator, which counts FLOPs",
    "enable_autograd_cache": "there is no cache of compiled programs yet",
    "strict_autograd_cache": "there is no cache of compiled programs yet",
}
"""Options of torch's own layer that are accepted, and why they change nothing here."""


config = Config()

_aot_ids = itertools.count()


def next_aot_id() -> int:
    """The number of the next compiled graph in this process."""
    return next(_aot_ids)


@dataclass(frozen=True, slots=True)
class Compilers:
    """What compiles the graphs of one program."""

    forward: Compiler
    backward: Compiler
    inference: Compiler
    joint_pass: JointPass | None = None  # what becomes of a joint graph before it is cut


@dataclass(frozen=True, slots=True)
class Loss:
    """The one result that an exported program differentiates, by its place among the flat results."""

    index: int
    others_may_require_grad: bool = False  # they are returned as they are, and no gradient is taken for them


@dataclass(frozen=True)
class AOTConfig:
    """Everything that one compilation was asked for, fixed when it was asked.

    >>> AOTConfig(None, None, None, {}, 0, aot_id=0, keep_inference_input_mutations=False).dynamic_shapes
    False
    """

    fw_compiler: Compiler | None
    bw_compiler: Compiler | None
    partition_fn: Partitioner | None
    decompositions: Mapping[Any, Callable[..., Any]] | None
    num_params_buffers: int
    aot_id: int
    keep_inference_input_mutations: bool
    is_export: bool = False
    no_tangents: bool = False
    dynamic_shapes: bool = False
    aot_autograd_arg_pos_to_source: list[Any] | None = None
    inference_compiler: Compiler | None = None
    enable_log: bool = True
    pre_dispatch: bool = False
    cache_key: str | None = None
    options: Config = field(default_factory=config.copy)
    differentiate: bool | Loss = True  # everything that can be, nothing, or the loss alone
    name: str = "the program"  # what errors call it
    joint_pass: JointPass | None = None
    new_compilers: Callable[[], Compilers] | None = None  # for each program, where its graphs share something
    symbols_once_changed: bool = False  # sizes and ints become symbols at the first recording that finds others
    numbers: NumbersAre = "constants"  # what floats of optimizers, and what follows from them, are to graphs
    inplace: bool = False  # graphs that are not differentiated may write where the old value is dead
    release_gradients: bool | Literal["auto"] = "auto"  # such graphs let gradients go one by one
    changing_reads: frozenset[str] = frozenset()  # places where whole numbers that are read become symbols
    changing: Changing | None = None  # the only sizes and ints that become symbols; None for all
    draws_in_order: bool = True  # compilers leave random numbers in the order in which graphs draw them
    front_end: FrontEnd | None = None  # the one that guards the calls, and knows the symbols of sizes

    def for_program(self) -> AOTConfig:
        """The options of one program, with compilers of its own where they are made anew for each."""
        if self.new_compilers is None:
            return self
        made = self.new_compilers()
        return dataclasses.replace(
            self,
            fw_compiler=made.forward,
            bw_compiler=made.backward,
            inference_compiler=made.inference,
            joint_pass=made.joint_pass,
        )

    def __post_init__(self) -> None:
        if self.pre_dispatch and not self.is_export:
            raise ConfigError("Can only have pre_dispatch IR for export.")
        sources = self.aot_autograd_arg_pos_to_source
        if sources is not None and len({str(source) for source in sources}) != len(sources):
            raise ConfigError("The sources of the arguments must be distinct.")
