"""A first call that gives shapes and no data, for front ends that compile in stages (J-14)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..joint.outputs import Constant, Number, SameAsInput
from ..slots import Input, Output
from .compilers import example_values
from .program import Program


def fake_at_first(program: Program, boxed: bool) -> Callable[..., list[Any]]:
    """A call that runs nothing the first time: its results are abstract, in the layout that the compiler reported."""
    calls = itertools.count()  # taking the next number is atomic

    def call(*args: Any) -> Any:
        if next(calls):
            return program.call(*args)
        given = list(args[0]) if boxed else args
        if boxed:
            args[0].clear()
        return abstract_results(program, given)

    return call


def abstract_results(program: Program, given: Any) -> list[Any]:
    """What the program would return for these arguments, without data."""
    joint = program.joint
    inputs = {r.slot: n for n, r in enumerate(i for i in joint.recording.inputs if isinstance(i.slot, Input))}
    places = {slot: n for n, slot in enumerate(joint.signature.returned)}
    results: list[Any] = []
    for i in range(joint.visible):
        match joint.outputs.results[i]:
            case Constant(value) | Number(value):
                results.append(value)
            case SameAsInput(recorded) if recorded.slot in inputs:
                results.append(given[inputs[recorded.slot]])
            case _:
                tensor = joint.outputs.tensors[i]
                assert tensor is not None
                reported = program.strides[places[Output(i)]] if program.strides else None
                results.append(_abstract(program, tensor, reported))
    return results


def _abstract(program: Program, tensor: Tensor, strides: Any) -> Tensor:
    [shown] = example_values(program.joint.recording.engine, [tensor], [strides])
    wants_grad = tensor.requires_grad and program.joint.is_training and torch.is_grad_enabled()
    return shown.requires_grad_() if wants_grad else shown
