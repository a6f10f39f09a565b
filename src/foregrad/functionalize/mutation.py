"""Operators that write to their arguments, one kind after another.

Each is replaced by its functional variant, and the new values are stored in the written tensors.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload, auto_functionalizable, auto_functionalized, hint_of
from ..abstract.engine import has_gaps, is_empty
from ..errors import UnsupportedError
from ..functional_variants import (
    IDLE_VARIANTS,
    TRAINING_FLAG,
    Variant,
    functional_variant,
    idle_arguments,
    is_idle_batch_norm,
    really_written,
    variant_arguments,
)
from ..graph.graph import Node, Step
from ..ops import aten, op_info, tensors_in, written_arguments
from ..record.alias_groups import may_overlap
from ..stack_traces import where
from .operators import RANDOM_FILL
from .state import TensorState, Walk
from .storage import fit_results
from .view_inverses import takes_any_layout


def write(walk: Walk, step: Step) -> None:
    """Replace a step that writes."""
    if step.computed is not None:
        _by_decomposition(walk, step, step.computed)
    elif step.op is aten.copy_.default:
        _copy(walk, step)
    elif _fills_with_random(step):
        _random_fill(walk, step)
    elif is_idle_batch_norm(step.op, step.args):
        _idle_batch_norm(walk, step)
    elif (variant := functional_variant(step.op)) is not None:
        _by_variant(walk, step, variant)
    elif auto_functionalizable(step.op):
        _by_cloning(walk, step)
    else:
        raise UnsupportedError(
            f"{step.op}, at {where(step.stack)}, writes to its arguments and has no functional twin: it cannot be "
            "compiled yet."
        )


def _idle_batch_norm(walk: Walk, step: Step) -> None:
    """Batch norm that has or updates no running statistics, by an operator that does not even say that it writes."""
    twin = IDLE_VARIANTS.get(step.op)
    if twin is None:
        walk.pure(step)
        return
    args = walk.args(idle_arguments(step.op, step.args))
    walk.results(walk.graph.call(twin, args, walk.kwargs(step.kwargs), step.out), step.out)


# ------------------------------------------------------------------------------------------ functional variants
def _by_variant(walk: Walk, step: Step, variant: Variant) -> None:
    targets = really_written(step.op, step.args, step.kwargs)
    _refuse_reading_results(walk, step, variant.pointwise, targets)
    if variant.op is aten.conj_physical.default and not step.args[0].is_complex():  # it would return the input itself
        variant = replace(variant, op=aten.clone.default, pointwise=False)
    returns = variant.returns
    if returns == len(targets) and _writes_nothing(walk, step, targets):
        fit_results(walk, step, targets)
        return
    args, kwargs = variant_arguments(step.op, variant, step.args, step.kwargs, walk.device)
    results: Sequence[Any] | None = None
    if returns == 1:
        of_target = _result if isinstance(targets[0], Tensor) else _list_result
        results = [of_target(walk, variant, args, kwargs, targets[0])]
    elif "out" in op_info(step.op).traits:  # what is given by `out=` may lie otherwise
        results = walk.infer(variant.op, [*map(walk.shape_now, args)], kwargs)
    node = _functional_call(walk, step, variant, args, kwargs)
    fit_results(walk, step, targets)
    values = [node]
    if returns > 1:
        values = [walk.graph.call(operator.getitem, (node, i), {}, None) for i in range(returns)]
    fresh = len(values) - len(targets)
    outs = step.out if isinstance(step.out, (list, tuple)) else (step.out,)
    made = _fresh_results(walk, outs, variant, args, kwargs) if fresh else []
    for value, out, result in zip(values[:fresh], outs, made, strict=False):
        value.value = result
        walk.add_fresh(out, value if result is out else walk.with_layout(value, out))
    for value, target, result in zip(values[fresh:], targets, results or [None] * len(targets), strict=True):
        _store(walk, step, value, target, result)


def _writes_nothing(walk: Walk, step: Step, targets: Sequence[Any]) -> bool:
    """What is not there cannot be written; where it is differentiated, autograd wants to see it all the same.

    A custom function writes without gradients, and tells autograd afterwards.
    """
    empty = all(isinstance(t, Tensor) and is_empty(t) and is_empty(walk.shape_now(t)) for t in targets)
    return empty and not any(t.requires_grad for t in tensors_in(step.args))


def _refuse_reading_results(walk: Walk, step: Step, pointwise: bool, targets: Sequence[Any]) -> None:
    """Operators that would read, while they run, what they have written already."""
    if "out" in op_info(step.op).traits and not pointwise:
        given = [a for i, a in enumerate(step.args) if i not in op_info(step.op).written]
        shared = {id(walk.state_of(t).storage) for t in tensors_in(given)}
        reads = any(id(walk.state_of(t).storage) in shared for t in tensors_in(targets))
    elif step.op in TRAINING_FLAG:  # running statistics that lie in what they are taken from, or in each other
        shared = {id(walk.state_of(t).storage) for t in tensors_in(step.args[:3])}
        states = [walk.state_of(t) for t in tensors_in(targets)]
        reads = any(id(state.storage) in shared for state in states) or _overlap(states)
    elif isinstance(targets[0], (list, tuple)):
        _refuse_gaps(walk, step, targets)
        reads = _reads_others(walk, step, targets[0])
    else:
        return
    if reads:
        raise UnsupportedError(
            f"{step.op}, at {where(step.stack)}, writes to memory that it reads as another argument: it cannot be "
            "compiled yet. Pass a clone."
        )


def _refuse_gaps(walk: Walk, step: Step, targets: Sequence[Any]) -> None:
    """A step of a fused optimizer goes through memory from where each tensor starts, whatever its strides."""
    if sum(isinstance(target, (list, tuple)) for target in targets) < 2:
        return
    if any(has_gaps(walk.shape_now(tensor)) for tensor in tensors_in((*step.args, *step.kwargs.values()))):
        raise UnsupportedError(
            f"{step.op}, at {where(step.stack)}, goes through memory as it lies, and one of its tensors has gaps "
            "there: this cannot be compiled yet. Pass tensors without gaps, or use an optimizer that is not fused."
        )
    _refuse_overlap(walk, step, list(tensors_in(targets)))


def _refuse_overlap(walk: Walk, step: Step, targets: Sequence[Tensor]) -> None:
    if _overlap([walk.state_of(target) for target in targets]):
        raise UnsupportedError(
            f"{step.op}, at {where(step.stack)}, writes to tensors that share memory: it cannot be compiled yet."
        )


def _reads_others(walk: Walk, step: Step, targets: Sequence[Tensor]) -> bool:
    """Whether a list operator reads, for one of its results, the memory of another."""
    lists = [a for a in (*step.args, *step.kwargs.values()) if isinstance(a, (list, tuple)) and len(a) == len(targets)]
    written: dict[int, set[int]] = {}  # by storage: the places of the results that lie there
    for i, target in enumerate(targets):
        written.setdefault(id(walk.state_of(target).storage), set()).add(i)
    for column in (a for a in lists if a is not targets):
        for i, item in enumerate(column):
            if isinstance(item, Tensor) and written.get(id(walk.state_of(item).storage), {i}) != {i}:
                return True
    return False


def _functional_call(walk: Walk, step: Step, variant: Variant, args: list[Any], kwargs: dict[str, Any]) -> Node:
    if "random" in op_info(step.op).traits:
        result = walk.infer(variant.op, [*map(walk.shape_now, args)], kwargs)
        return walk.draw(step, variant.op, args, kwargs, result)
    return walk.graph.call(variant.op, walk.args(args), walk.kwargs(kwargs), None)


def _store(walk: Walk, step: Step, value: Node, target: Any, result: Any) -> None:
    """Store new values; `result` is the abstract result of the functional operator where it may differ."""
    if target is None:
        return
    if isinstance(target, (list, tuple)):
        _refuse_overlap(walk, step, target)
        shapes = [walk.shape_now(item) for item in target]
        value.value = shapes if result is None else list(result)
        for i, (item, shape, given) in enumerate(zip(target, shapes, value.value, strict=True)):
            element = walk.graph.call(operator.getitem, (value, i), {}, given)
            walk.store(step, walk.state_of(item), element, exact=given is shape or _lie_alike(given, shape))
    else:
        shape = walk.shape_now(target)
        exact = result is None or _lie_alike(result, shape)
        by_itself = "out" in op_info(step.op).traits and torch.Tag.pointwise not in step.op.tags
        if result is not None and result.dtype != shape.dtype and by_itself:
            raise UnsupportedError(
                f"{step.op}, at {where(step.stack)}, computes in the dtype of the result that it was given: this "
                "cannot be compiled yet."
            )
        if result is not None and not torch.can_cast(result.dtype, shape.dtype):
            kinds = [torch.empty(0, dtype=dtype).type().split(".")[-1] for dtype in (result.dtype, shape.dtype)]
            given, wanted = (kind.removesuffix("Tensor") for kind in kinds)
            raise RuntimeError(f"result type {given} can't be cast to the desired output type {wanted}")
        if result is not None and tuple(result.shape) != tuple(shape.shape):
            if "out" in op_info(step.op).traits:
                raise UnsupportedError(
                    f"{step.op}, at {where(step.stack)}, resizes a result that it was given, and its shape inference "
                    "does not say how. Give it a tensor of the right shape."
                )
            raise RuntimeError(
                f"output with shape {list(shape.shape)} doesn't match the broadcast shape {list(result.shape)}"
            )
        value.value = shape if exact else result
        walk.store(step, walk.state_of(target), value, exact)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    return one.stride() == other.stride() and one.dtype == other.dtype


def _overlap(states: Iterable[TensorState]) -> bool:
    """Whether tensors that one operator writes to may have memory in common."""
    storages: dict[int, list[TensorState]] = {}
    for state in states:
        storages.setdefault(id(state.storage), []).append(state)
    together = (pair for group in storages.values() for pair in itertools.combinations(group, 2))
    return any(may_overlap(a.tensor, b.tensor) for a, b in together)


def _result(walk: Walk, variant: Variant, args: list[Any], kwargs: dict[str, Any], target: Any) -> Tensor | None:
    """The abstract result of the functional operator, unless it is sure to be like the written tensor."""
    if target is None:
        return None
    args = [walk.shape_now(a) for a in args]
    shape = walk.shape_now(target)
    tensors = [a for a in args if isinstance(a, Tensor)]
    like = shape.shape, shape.stride(), shape.dtype
    alike = variant.pointwise and all((t.shape, t.stride(), t.dtype) == like for t in tensors)
    alike = alike and _has_common_strides(shape)
    numbers = tuple(type(a) for a in (*args, *kwargs.values()) if not isinstance(a, Tensor))
    key = variant.op, shape.dtype, numbers  # a float among them makes integers floats
    if alike and not has_gaps(shape) and key in _KEEPS_DTYPE:
        return None
    result: Tensor = walk.infer(variant.op, args, kwargs)
    if alike and len(tensors) == len(list(tensors_in((*args, *kwargs.values())))) and result.dtype == shape.dtype:
        _KEEPS_DTYPE.add(key)
    return result


def _list_result(
    walk: Walk, variant: Variant, args: list[Any], kwargs: dict[str, Any], target: Sequence[Tensor]
) -> list[Tensor] | None:
    """The abstract results of an operator on lists, unless they are sure to be like the written tensors."""

    def now(value: Any) -> Any:
        return [walk.shape_now(item) for item in value] if isinstance(value, (list, tuple)) else walk.shape_now(value)

    given, named = tuple(map(now, args)), {name: now(value) for name, value in kwargs.items()}
    columns = [a for a in (*given, *named.values()) if isinstance(a, list) and a and isinstance(a[0], Tensor)]
    beside = [a for a in (*given, *named.values()) if isinstance(a, Tensor)]  # one number for all
    plain = all(_are_plain_and_alike(row) for row in zip(*columns, strict=True))
    if plain and all(a.dim() == 0 and all(a.dtype == item.dtype for item in columns[0]) for a in beside):
        return None
    return list(walk.infer(variant.op, given, named))


def _are_plain_and_alike(row: Sequence[Tensor]) -> bool:
    """Whether a kernel that goes over these tensors element by element gives another one that lies as they do."""
    first, *others = row
    if others:
        like = first.shape, first.stride(), first.dtype
        if any((t.shape, t.stride(), t.dtype) != like for t in others):
            return False
    return not has_gaps(first) and (1 not in map(hint_of, first.shape) or _has_common_strides(first))


def _has_common_strides(tensor: Tensor) -> bool:
    """Whether a kernel gives its result these strides: those of dimensions of size one lead nowhere, and may change."""
    sizes, strides = [hint_of(n) for n in tensor.shape], [hint_of(n) for n in tensor.stride()]
    if 1 not in sizes:
        return True
    return strides == [math.prod(max(n, 1) for n in sizes[d + 1 :]) for d in range(len(sizes))]


def _fresh_results(
    walk: Walk, outs: Sequence[Any], variant: Variant, args: list[Any], kwargs: dict[str, Any]
) -> list[Any]:
    """The results of the functional variant: those of the operator, where they lie alike. They may be other kernels."""
    given, named = [*map(walk.shape_now, args)], {name: a for name, a in kwargs.items() if name != "generator"}
    with torch.no_grad():
        strides = walk.engine.strides(variant.op, tuple(given), named)
    alike = [stride is None or stride == out.stride() for out, stride in zip(outs, strides, strict=False)]
    if all(alike):
        return list(outs)
    made = walk.infer(variant.op, given, named)
    return [out if same else result for out, same, result in zip(outs, alike, made, strict=False)]


# Pointwise operators that were seen to give the dtype of their tensors, if these are all of one.
_KEEPS_DTYPE: set[tuple[OpOverload, torch.dtype, tuple[type, ...]]] = set()


# ----------------------------------------------------------------------------------------------- decompositions
def _by_decomposition(walk: Walk, step: Step, computed: Sequence[Any]) -> None:
    """The user's decomposition of the functional variant has computed the results: store them."""
    targets = [] if is_idle_batch_norm(step.op, step.args) else written_arguments(step.op, step.args, step.kwargs)
    if targets:
        _refuse_reading_results(walk, step, "pointwise" in op_info(step.op).traits, targets)
        if _writes_nothing(walk, step, targets):
            fit_results(walk, step, targets)
            return
    taken = {id(walk.state_of(tensor).storage) for tensor in tensors_in((*step.args, *step.kwargs.values()))}
    fresh = len(computed) - len(targets)
    outs = step.out if isinstance(step.out, (list, tuple)) else (step.out,)
    for value, out in zip(computed[:fresh], outs, strict=False):
        node = _own_value(walk, value, taken)
        alike = (value.stride(), value.dtype) == (out.stride(), out.dtype)
        walk.add_fresh(out, node if alike else walk.with_layout(node, out))
    nodes = [_own_values(walk, value, taken) for value in computed[fresh:]]
    fit_results(walk, step, targets)
    for target, value, node in zip(targets, computed[fresh:], nodes, strict=True):
        if isinstance(target, (list, tuple)):
            for one in zip(node, target, value, strict=True):
                _store(walk, step, *one)
        else:
            _store(walk, step, node, target, value)


def _own_values(walk: Walk, value: Any, taken: set[int]) -> Any:
    """Nodes for what a decomposition computed: a tensor, or a list of them."""
    if isinstance(value, (list, tuple)):
        return [_own_value(walk, item, taken) for item in value]
    return _own_value(walk, value, taken)


def _own_value(walk: Walk, tensor: Tensor, taken: set[int]) -> Node:
    """The value of a tensor, cloned where it lies in memory that is taken already; its own is taken from here on."""
    storage = id(walk.state_of(tensor).storage)
    node = walk.node_of(tensor)
    if storage in taken or not walk.engine.is_abstract(tensor):
        return walk.emit(aten.clone.default, node)
    taken.add(storage)
    return node


# -------------------------------------------------------------------------------------------- operators of users
def _by_cloning(walk: Walk, step: Step) -> None:
    """A custom operator: torch's own wrapper clones what it writes to, and returns the clones after its results."""
    names = [a.name for a in step.op._schema.arguments]
    given = {**dict(zip(names, step.args, strict=False)), **step.kwargs}
    for argument in step.op._schema.arguments:
        given.setdefault(argument.name, argument.default_value)
    written = [names[i] for i in op_info(step.op).written]
    _refuse_shared_arguments(walk, step, given, written)
    if step.repeats is not None:
        raise UnsupportedError(
            f"{step.op}, at {where(step.stack)}, draws random numbers, writes to its arguments, and is run again by a "
            "checkpoint: it cannot be compiled yet. Let it return its result instead."
        )
    returns = len(step.op._schema.returns)
    outs = () if returns == 0 else (step.out,) if returns == 1 else tuple(step.out)
    values = (*(outs or (None,)), *(given[name] for name in written))
    node = walk.graph.call(auto_functionalized, (step.op,), walk.kwargs(given), values)
    node.impure = True  # it may do more than it says, and eager runs it whether its result is used or not
    for i, out in enumerate(outs):
        walk.results(walk.graph.call(operator.getitem, (node, i), {}, out), out)
    for i, name in enumerate(written, max(1, returns)):
        target = given[name]
        if target is not None:
            value = walk.graph.call(operator.getitem, (node, i), {}, target)
            _store(walk, step, value, target, None)


def _refuse_shared_arguments(walk: Walk, step: Step, given: dict[str, Any], written: list[str]) -> None:
    """The operator would read from an argument what it wrote to another; clones lie apart."""
    storages = [id(walk.state_of(t).storage) for value in given.values() for t in tensors_in([value])]
    touched = {id(walk.state_of(t).storage) for name in written for t in tensors_in([given[name]])}
    if any(storages.count(storage) > 1 for storage in touched):
        raise UnsupportedError(
            f"{step.op}, at {where(step.stack)}, writes to memory that another of its arguments looks at: it cannot be "
            "compiled yet. Pass a clone."
        )


# ------------------------------------------------------------------------------------------------- special ones
def _fills_with_random(step: Step) -> bool:
    """Whether a random operator overwrites a tensor whose layout decides the order of its draws."""
    if "random" not in op_info(step.op).traits or step.kwargs or not isinstance(step.args[0], Tensor):
        return False
    unnamable = step.op._overloadname == "from"  # a keyword: no generated code can call the functional form
    numbers = all(isinstance(a, (int, float)) for a in step.args[1:])
    return numbers and (unnamable or not step.args[0].is_contiguous())


def _random_fill(walk: Walk, step: Step) -> None:
    state = walk.state_of(step.args[0])
    name = f"{step.op._schema.name.split('::')[1]}.{step.op._overloadname or 'default'}"
    geometry = list(state.tensor.shape), list(state.tensor.stride())
    options = {"dtype": state.tensor.dtype, "device": walk.device(state.tensor)}
    node = walk.draw(step, RANDOM_FILL, (name, *geometry, list(step.args[1:])), options, state.tensor)
    walk.store(step, state, node, exact=True)


def _copy(walk: Walk, step: Step) -> None:
    target, source = step.args[0], step.args[1]
    state = walk.state_of(target)
    if not isinstance(source, Tensor):  # a number: torch takes it for a tensor of no dimensions
        node = walk.graph.call(aten.copy.default, (walk.read(state), *walk.args((source,))), {}, state.tensor)
        walk.store(step, state, node, exact=not has_gaps(target))
        return
    same_kind = target.dtype == source.dtype and walk.device(target) == walk.device(source)
    if same_kind and target.shape == source.shape:
        node = walk.node_of(source)
        if not takes_any_layout(state) and not step.becomes_grad:
            # A tensor of its own, as in eager: the source may be an input that is written later.
            node = walk.graph.call(aten.clone.default, (node,), {}, state.tensor)
        walk.store(step, state, node, exact=target.stride() == source.stride() and not has_gaps(target))
    else:
        node = walk.graph.call(aten.copy.default, (walk.read(state), walk.node_of(source)), {}, state.tensor)
        walk.store(step, state, node, exact=not has_gaps(target))
