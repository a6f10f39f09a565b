"""The entry points."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx, nn

from ._torch import (
    FakeTensor,
    FrontEnd,
    boxed_graph_wrapper_type,
    deterministic_enabled,
    first_call_is_fake,
    garbage_collection_paused,
    never_traced,
)
from .capturing.capture import Capture, capture_call, capture_flat, state_of
from .capturing.compiled import Compiled, Specialization
from .capturing.compiled_module import AOTModule, made_of
from .capturing.graph_programs import run_graph_program
from .capturing.kinds import Lifetime
from .compat import describe
from .errors import ConfigError, PartitionError
from .options import AOTConfig, Compiler, Partitioner, config, next_aot_id
from .partition import default_partition, min_cut_rematerialization_partition
from .partition.rematerialize import check_budgets, plan_of
from .partition.report import PartitionReport, report_of
from .runtime.assemble import assemble, fake_at_first
from .runtime.call import FlatEntry
from .runtime.layouts import layouts_of
from .slots import GradOf, Inner, Input

Decompositions = Mapping[Any, Callable[..., Any]]


def resolve(
    fw_compiler: Compiler | None,
    bw_compiler: Compiler | None,
    inference_compiler: Compiler | None,
    fallback: Literal["error", "eager"] | None = None,
    memory_budget: float | None = None,
    **fields: Any,
) -> AOTConfig:
    """All options of one compilation as one frozen value."""
    options = config.copy()
    if memory_budget is not None:
        options.memory_budget = memory_budget
        if fields["partition_fn"] not in (None, default_partition, min_cut_rematerialization_partition):
            raise ConfigError(
                "memory_budget is for Foregrad's own partitioner. Leave partition_fn out, or give your own its budget."
            )
    check_budgets(options)
    if fallback is not None:
        options.fallback = fallback
    if options.fallback not in ("error", "eager"):
        raise ConfigError(f"fallback must be 'error' or 'eager', not {options.fallback!r}.")
    return AOTConfig(
        fw_compiler=fw_compiler,
        bw_compiler=bw_compiler or fw_compiler,
        inference_compiler=inference_compiler or fw_compiler,
        aot_id=next_aot_id(),
        options=options,
        **fields,
    )


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Partitioner = default_partition,
    decompositions: Decompositions | None = None,
    num_params_buffers: int = 0,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    dynamic: bool = False,
    enable_log: bool = True,
    fallback: Literal["error", "eager"] | None = None,
    memory_budget: float | None = None,
) -> Compiled:
    """Compile a function: its forward and backward go through the given compilers, and it behaves as before.

    >>> import torch, foregrad
    >>> run_as_it_is = lambda graph, inputs: foregrad.make_boxed_func(graph.forward)
    >>> f = foregrad.aot_function(lambda x: x.sin(), run_as_it_is)
    >>> x = torch.zeros(2, requires_grad=True)
    >>> f(x).sum().backward(); x.grad
    tensor([1., 1.])
    >>> f.specializations
    [<training program: 3 operators, 1 inputs>]

    Nothing is recorded before the first call. A call with different shapes, dtypes, grad mode or Python values is
    compiled separately.

    Args:
        fn: any function of tensors and Python values, nested in containers.
        fw_compiler: `compiler(graph_module, example_inputs)` gives a callable; see `make_boxed_func`.
        bw_compiler: for the backward; the forward's if not given. It runs at the first backward.
        partition_fn: cuts the joint graph into forward and backward.
        decompositions: operators and what to record in their place, also in that of those that write the same values.
        num_params_buffers: so many leading inputs keep fixed shapes when `dynamic`.
        keep_inference_input_mutations: let the graph itself write to inputs where autograd does not mind.
        inference_compiler: for programs without gradients; the forward's if not given.
        dynamic: sizes and int arguments become symbols, so that one program serves many.
        enable_log: show graphs under TORCH_LOGS.
        fallback: "eager" runs what cannot be compiled as it is, with one warning. Default: `foregrad.config.fallback`.
        memory_budget: what a training step may have alive at its peak, see `min_cut_rematerialization_partition`,
            which then is the partitioner.
    """
    if not callable(fn):
        raise ConfigError(f"aot_function compiles a function, not {fn!r}.")
    resolved = resolve(
        fw_compiler,
        bw_compiler,
        inference_compiler,
        fallback,
        memory_budget,
        partition_fn=partition_fn,
        decompositions=decompositions,
        num_params_buffers=num_params_buffers,
        keep_inference_input_mutations=keep_inference_input_mutations,
        dynamic_shapes=dynamic,
        enable_log=enable_log,
    )
    return Compiled(fn, None, resolved)


compiled_function = aot_function


def aot_module(mod: nn.Module, *args: Any, **kwargs: Any) -> AOTModule:
    """Compile a module: parameters and buffers are inputs of its graphs, looked up at each call.

    >>> import torch, foregrad
    >>> run_as_it_is = lambda graph, inputs: foregrad.make_boxed_func(graph.forward)
    >>> linear = foregrad.aot_module(torch.nn.Linear(3, 1), run_as_it_is)
    >>> linear(torch.ones(2, 3)).sum().backward()
    >>> linear.orig_module.weight.grad
    tensor([[2., 2., 2.]])

    Args:
        mod: the module.
        *args, **kwargs: as for `aot_function`, from `fw_compiler` on.
    """
    if not isinstance(mod, nn.Module):
        raise ConfigError(f"aot_module compiles a torch.nn.Module, not {mod!r}; for a function there is aot_function.")
    return module_with(mod, aot_function(mod, *args, **kwargs).config)


def module_with(mod: nn.Module, resolved: AOTConfig) -> AOTModule:
    """A module that is compiled with these options."""
    mod = mod.orig_module if isinstance(mod, AOTModule) else mod
    for prefix, module in mod.named_modules():
        for kind, tensors in (("param", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if isinstance(tensor, FakeTensor):
                    path = f"{prefix}.{name}" if prefix else name
                    raise ConfigError(f"Unexpected fake {kind} {path}: a module to compile must hold real tensors.")
    return made_of(mod, resolved)


compiled_module = aot_module


def aot_module_simplified(
    mod: nn.Module,
    args: Sequence[Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Partitioner = default_partition,
    decompositions: Decompositions | None = None,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    memory_budget: float | None = None,
) -> Callable[..., list[Any]]:
    """Compile a module at once, for a front end that has flattened its arguments and guards its calls itself.

    >>> import torch, foregrad
    >>> class Twice(torch.nn.Module):
    ...     def forward(self, x): return (x * 2,)
    >>> run_as_it_is = lambda graph, inputs: foregrad.make_boxed_func(graph.forward)
    >>> foregrad.aot_module_simplified(Twice(), [torch.ones(1)], run_as_it_is)(torch.ones(1))
    [tensor([2.])]

    The result takes the flat arguments and returns a flat list. It has one program, whatever it is called with.

    Args:
        mod: takes flat arguments and returns a tuple or list.
        args: example arguments; fake ones with a shape environment give symbolic sizes.
        fw_compiler, bw_compiler, partition_fn, decompositions, keep_inference_input_mutations, inference_compiler,
            memory_budget: as for `aot_function`.
    """
    if not isinstance(mod, nn.Module):
        raise ConfigError(f"aot_module_simplified compiles a torch.nn.Module, not {mod!r}.")
    resolved = resolve(
        fw_compiler,
        bw_compiler,
        inference_compiler,
        memory_budget=memory_budget,
        partition_fn=partition_fn,
        decompositions=decompositions,
        num_params_buffers=len(state_of(mod, dynamic=False)),
        keep_inference_input_mutations=keep_inference_input_mutations,
        dynamic_shapes=any(isinstance(a, FakeTensor) and a.fake_mode.shape_env is not None for a in args),
        front_end=FrontEnd.now(),
    )
    return flat_call(mod, args, resolved)


def flat_call(
    mod: nn.Module, args: Sequence[Any], resolved: AOTConfig, slots: Sequence[Input] | None = None
) -> Callable[..., list[Any]]:
    """One program for a front end: it takes flat arguments, and nothing is compared when it is called."""
    with garbage_collection_paused():
        captured = capture_flat(mod, args, resolved, slots)
        entry = flat_entry(captured, boxed=_wants_boxed_calls(mod))
        if resolved.front_end is not None:
            entry = _as_recorded(entry, captured, mod)
            resolved.front_end.tell(
                [value for _, value in entry.state], describe(captured.joint, resolved, None, deterministic_enabled())
            )
        program = assemble(captured.joint, resolved, entry)
    captured.joint.recording.session.release_arguments()
    call = fake_at_first(program, entry.boxed) if first_call_is_fake() else program.call
    return _with_module_methods(call, mod, Specialization(program, Lifetime()), entry.boxed)


def _as_recorded(entry: FlatEntry, captured: Capture, mod: nn.Module) -> FlatEntry:
    """Inputs that overlap otherwise than those that were recorded: the program is run as it is written."""
    layouts = layouts_of(captured.joint, captured.shared, entry.inputs, captured.joint.recording.real_tensors)
    if layouts is None:
        return entry
    as_it_is = functools.partial(run_graph_program, mod) if isinstance(mod, fx.GraphModule) else mod
    return replace(entry, fits=layouts.hold, otherwise=never_traced(as_it_is))


def _wants_boxed_calls(mod: nn.Module) -> bool:
    wrapper = boxed_graph_wrapper_type()
    return wrapper is not None and isinstance(mod, wrapper)


def flat_entry(captured: Capture, boxed: bool) -> FlatEntry:
    """The entry of a program that is called with flat arguments; what it finds by itself is fixed from now on."""
    recording = captured.joint.recording
    inputs = [recorded.slot for recorded in recording.inputs if isinstance(recorded.slot, Input)]
    fixed = [
        (slot, value) for slot, value in recording.real_tensors.items() if not isinstance(slot, (Input, GradOf, Inner))
    ]
    return FlatEntry(fixed, inputs, boxed, captured.joint, captured.shared)


def _with_module_methods(
    call: Callable[..., list[Any]], mod: nn.Module, specialization: Specialization, boxed: bool
) -> Callable[..., list[Any]]:
    call.zero_grad = mod.zero_grad  # type: ignore[attr-defined]
    call.named_parameters = mod.named_parameters  # type: ignore[attr-defined]
    call.named_buffers = mod.named_buffers  # type: ignore[attr-defined]
    call.specializations = [specialization]  # type: ignore[attr-defined]
    if boxed:
        call._boxed_call = True  # type: ignore[attr-defined]
    return call


def capture(fn_or_module: Callable[..., Any], *args: Any, **kwargs: Any) -> Capture:
    """Record a program and give its joint graph and metadata, without compiling anything.

    >>> import torch, foregrad
    >>> print(foregrad.capture(lambda x: x.sin(), torch.zeros(2, requires_grad=True)))
    training program, 3 operators
      input   args[0]: float32, (2,), requires grad
      returns output 0
      takes   tangent of output 0
      gives   gradient of args[0]

    Args:
        fn_or_module: a function or a module.
        *args, **kwargs: what to record it on.
    """
    module = fn_or_module if isinstance(fn_or_module, nn.Module) else None
    resolved = resolve(
        None,
        None,
        None,
        partition_fn=None,
        decompositions=None,
        num_params_buffers=0,
        keep_inference_input_mutations=False,
    )
    with garbage_collection_paused():
        return capture_call(fn_or_module, args, kwargs, module, resolved)


def explain_partition(
    fn: Callable[..., Any], *args: Any, memory_budget: float | None = None, **kwargs: Any
) -> PartitionReport:
    """Record a program and tell how `min_cut_rematerialization_partition` cuts it.

    >>> report = explain_partition(lambda x: x.cos().sinh().cos(), torch.ones(256, requires_grad=True))
    >>> [(row.name, row.saved, row.reason) for row in report.rows][:2]
    [('primals_1', True, 'an input'), ('cos', False, 'cheaper to compute than to keep')]
    >>> report.saved_bytes, report.peak
    (0, 4096)

    Args:
        fn: a function or a module.
        *args, **kwargs: what to record it on.
        memory_budget: as for `min_cut_rematerialization_partition`.
    """
    joint = capture(fn, *args, **kwargs).joint
    if not joint.is_training:
        raise PartitionError("There is nothing to cut: the program has no gradients.")
    options = config.copy()
    if memory_budget is not None:
        options.memory_budget = memory_budget
    with torch.no_grad():
        plan = plan_of(joint.graph, options)
    if plan is None:
        raise PartitionError("There is nothing to cut: no operator belongs to the backward.")
    return report_of(plan)
