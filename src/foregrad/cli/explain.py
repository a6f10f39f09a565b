"""Does a program compile? If not, which line, why, and what to do; if it does, what it saves and what that costs."""

from __future__ import annotations

import linecache
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..api import aot_function, aot_module, capture
from ..capturing.capture import Capture
from ..errors import FirstCallError, ForegradError
from ..graph.fx import from_fx, joint_from_fx, to_fx
from ..graph.reads import Read
from ..joint.build import Joint
from ..options import config
from ..partition.default import cut
from ..partition.memory import simulate
from ..partition.rematerialize import plan_of
from ..partition.report import HEAD, NUMBERS, PartitionReport, report_of
from ..runtime.compilers import make_boxed_func
from ..slots import Buffer, FreeTensor, Input, Output, Param
from ..stack_traces import is_users_code, tracebacks_of
from ..values import shown
from .output import doing
from .parts import Excerpt, Part, Table, Text, Verdict, size
from .targets import Call

_ONCE = "after a call as it is written, since that changes something once"
_MOST = 12  # rows of a table that is cut off


def explain(
    name: str, program: Callable[..., Any], calls: Sequence[Call], budget: float | None
) -> tuple[int, list[Part]]:
    """The exit code, 1 where the program is refused or fails, and the report."""
    compiled: Any
    if isinstance(program, nn.Module):
        compiled = aot_module(program, _as_it_is)
    else:
        compiled = aot_function(program, _as_it_is)
    seen: list[tuple[str, ...]] = []
    try:
        with doing(f"recording {name}"):
            recorded = _recorded(program, calls[0])
        for number, call in enumerate(calls, 1):
            with doing(f"compiling and running call {number}" if len(calls) > 1 else "compiling and running it"):
                before = len(compiled.specializations)
                compiled(*call.args, **call.kwargs)
            seen.append((f"call {number}", *_program_of_call(compiled, before)))
        if recorded is None:
            recorded = capture(program, *calls[0].args, **calls[0].kwargs), None
    except Exception as error:
        return 1, _refused(f"{name}, in call {len(seen) + 1}," if len(calls) > 1 else name, error)
    with doing("planning what to save"):
        parts = _about(name, *recorded, budget)
    return 0, [*parts, Table("calls", ("", "program", "because of"), tuple(seen))] if len(calls) > 1 else parts


def _recorded(program: Callable[..., Any], call: Call) -> tuple[Capture, float | None] | None:
    """A recording, and the seconds that it took; None if the first call must be made as it is written."""
    started = time.perf_counter()
    try:
        return capture(program, *call.args, **call.kwargs), time.perf_counter() - started
    except FirstCallError:
        return None


def _as_it_is(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """A compiler that compiles nothing."""
    return make_boxed_func(graph.forward)


# -------------------------------------------------------------------------------------------------- it compiles
@dataclass(frozen=True, slots=True)
class Cost:
    """What a way to cut a program costs, in bytes and in operations that are done twice."""

    saved: int
    peak: int
    flops: int

    @property
    def cells(self) -> tuple[str, ...]:
        """As a row shows it."""
        return size(self.saved), size(self.peak), f"{self.flops / 1e6:.1f} MFLOP" if self.flops else "nothing"


def _about(name: str, captured: Capture, seconds: float | None, budget: float | None) -> list[Part]:
    joint = captured.joint
    if not joint.is_training:
        line = f"{name} compiles: a program of {_count(joint.op_count, 'operator')}, without gradients."
        return [Verdict(line, good=True), _program(captured, seconds), *_reads(captured)]
    forward, backward = cut(joint.graph)
    sizes = f"{len(forward.nodes)} in the forward and {len(backward.nodes)} in the backward"
    line = f"{name} compiles: a training program of {joint.op_count} operators, {sizes}."
    parts: list[Part] = [Verdict(line, good=True), _program(captured, seconds), *_reads(captured)]
    returned = [*map(Output, range(len(joint.graph.forward_outputs)))]
    simulated = simulate(from_fx(to_fx(forward), returned), joint_from_fx(to_fx(backward), 0))
    rows = [("default_partition", *Cost(simulated.saved, simulated.peak, 0).cells)]
    report = _report(joint, budget)
    if report is not None:
        label = "min_cut_rematerialization_partition" if budget is None else f"memory_budget={budget:g}"
        rows.append((label, *Cost(report.saved_bytes, report.peak, report.flops).cells))
    head = ("", "saved for backward", "peak", "computed again")
    parts.append(Table("memory, beyond the inputs", head, tuple(rows), numbers=(1, 2)))
    if report is not None:
        title = f"what {rows[1][0]} saves and computes again"
        parts.append(Table(title, HEAD, report.table, NUMBERS, report.summary))
    return parts


def _report(joint: Joint, budget: float | None) -> PartitionReport | None:
    options = config.copy()
    if budget is not None:
        options.memory_budget = budget
    with torch.no_grad():
        plan = plan_of(joint.graph, options)
    return None if plan is None else report_of(plan)


def _program(captured: Capture, seconds: float | None) -> Table:
    primals = captured.joint.primals
    by_kind: dict[type, list[Any]] = {Input: [], Param: [], Buffer: [], FreeTensor: []}
    for facts in primals:
        by_kind.setdefault(type(facts.recorded.slot), []).append(facts.recorded)
    rows = [("argument", f"{recorded.slot}: {_described(recorded.seen)}") for recorded in by_kind[Input]]
    for kind, title in ((Param, "parameters"), (Buffer, "buffers"), (FreeTensor, "found by itself")):
        if by_kind[kind]:
            total = sum(_bytes(recorded.seen) for recorded in by_kind[kind])
            some = ", ".join(recorded.slot.path for recorded in by_kind[kind][:3])
            more = ", ..." if len(by_kind[kind]) > 3 else ""
            rows.append((title, f"{len(by_kind[kind])}, {size(total)}: {some}{more}"))
    written = [str(facts.recorded.slot) for facts in primals if facts.written]
    if written:
        rows.append(("writes to", f"{', '.join(written[:_MOST])}{', ...' if len(written) > _MOST else ''}"))
    rows.append(("returns", _count(sum(isinstance(leaf, Tensor) for leaf in captured.result.leaves), "tensor")))
    rows.append(("recorded in", f"{seconds:.2f} s") if seconds is not None else ("recorded", _ONCE))
    return Table("program", ("", ""), tuple(rows))


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    shape = ", ".join(map(str, value.shape))
    grad = ", requires grad" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')}[{shape}]{grad}"


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _reads(captured: Capture) -> list[Table]:
    """What the program reads of its data: a call that reads anything else is compiled separately."""
    rows = [(read.place, shown(read.value.tolist())) for read in captured.reads]
    for node in captured.joint.graph.nodes:
        if isinstance(read := node.read, Read):
            value = "any size" if read.symbols else shown(read.value)
            rows.append((read.place, f"{read.what}: {value}"))
    more = (f"... and {len(rows) - _MOST} more",) if len(rows) > _MOST else ()
    head = ("where", "what it was")
    return [Table("data that it reads, and each call compares", head, tuple(rows[:_MOST]), (), more)] if rows else []


def _program_of_call(compiled: Any, before: int) -> tuple[str, str]:
    """Which program a call has run, and why it was compiled."""
    programs = len(compiled.specializations)
    if not programs:
        return "as written", "it changes something once; the next call is compiled"
    if programs == before:
        return "known", ""
    recompiles = [recompile for recompile in compiled.recompiles if recompile.program == before]
    return f"number {programs}", str(recompiles[-1]) if recompiles else "the first program"


# --------------------------------------------------------------------------------------------- it does not compile
def _refused(name: str, error: Exception) -> list[Part]:
    ours = isinstance(error, ForegradError)
    head = f"{name} does not compile." if ours else f"{name} fails, as it does in eager."
    text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return [Verdict(head, good=False), Text(tuple(text.splitlines())), *_excerpt(error)]


def _excerpt(error: Exception) -> list[Excerpt]:
    """The user's line with those around it: that of which the message speaks, or on which the error came about."""
    told = re.search(r"at (\S[^:\n]*):(\d+)", "\n".join([str(error), *getattr(error, "__notes__", ())]))
    frames = [(step.tb_frame.f_code, step.tb_lineno) for step in tracebacks_of(error)]
    places = [(code.co_filename, number) for code, number in frames if is_users_code(code)]
    if told is not None and linecache.getline(told[1], int(told[2])):
        places.append((told[1], int(told[2])))
    if not places:
        return []
    file, number = places[-1]
    around = [(n, linecache.getline(file, n).rstrip()) for n in range(max(1, number - 2), number + 3)]
    last = max((n for n, line in around if line), default=number)
    return [Excerpt(file, tuple([(n, line) for n, line in around if n <= last]), number)]
