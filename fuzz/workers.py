"""Programs run in processes of their own, so that one that kills its process, or hangs, does not end the run."""

import gc
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection, wait

import torch

from .grammars import GRAMMARS, Program, fails_with, grammar_of
from .oracle import Outcome
from .program import FuzzProgram
from .state import StateProgram

# A process is replaced after so many tasks: what torch keeps for each program adds up.
_TASKS_PER_PROCESS = 2000
# A recording lets everything count as old, so that Python hardly ever looks for cycles among old objects. Whoever asks
# for what refers to an object goes through all of them.
_TASKS_PER_COLLECTION = 30
_SECONDS_TO_START = 120.0

_STARTED = "started"
TOO_LONG = "ran for more than"


@dataclass(frozen=True)
class Make:
    """Generate the program of a seed and a number, and examine it."""

    seed: int | str
    number: int
    grammar: str = "tensors"

    @property
    def name(self) -> str:
        """As its program will be called."""
        return (
            f"{self.seed}/{self.number}" if self.grammar == "tensors" else f"{self.grammar}/{self.seed}/{self.number}"
        )


@dataclass(frozen=True)
class Examine:
    """Examine a program."""

    program: Program


@dataclass(frozen=True)
class Shrink:
    """Make a program smaller while a failure of this signature stays."""

    program: Program
    signature: str


Task = Make | Examine | Shrink


@dataclass(frozen=True)
class Result:
    """A program and what came of it.

    Args:
        task: What was asked for.
        program: The program; for `Shrink` the smaller one. None where not even generating it ended.
        outcome: What came of it.
        again: Whether to ask once more, in a new process: this one died while it drew a program, which runs in eager
            only, but it had compiled others before.
    """

    task: Task
    program: Program | None
    outcome: Outcome
    again: bool = False


def _serve(pipe: Connection) -> None:
    """Do one task after another; what is about to be examined is sent first, in case it kills the process."""
    torch.set_num_threads(1)
    _be_quiet()
    done = 0
    while (task := pipe.recv()) is not None:
        pipe.send(_STARTED)
        done += 1
        if done % _TASKS_PER_COLLECTION == 0:
            gc.collect()
        match task:
            case Make(seed, number, grammar):
                program = GRAMMARS[grammar].generate(seed, number)
            case Examine(program):
                pass
            case Shrink(program, signature):
                program = grammar_of(program).shrink(program, partial(fails_with, signature))
        pipe.send(program)
        pipe.send(grammar_of(program).examine(program))


def _be_quiet() -> None:
    """Let nothing through of what torch says about programs that raise: it would bury the progress of the run."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())


class _Worker:
    """A process and what it is doing."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()
        there.close()
        self.done = 0
        self.give(None)

    def give(self, task: Task | None) -> None:
        """Start a task."""
        self.task, self.program, self.since, self.started = task, None, time.monotonic(), False
        if isinstance(task, Examine | Shrink):
            self.program = task.program
        if task is not None:
            self.pipe.send(task)

    def receive(self) -> Result | None:
        """The result if it is complete; a process that is gone makes one as well."""
        assert self.task is not None
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            status = self._process.exitcode or 0
            how = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
            return self._died_drawing(how) if self.started and self.program is None else self._broken(how)
        match message:
            case Outcome():
                self.done += 1
                return Result(self.task, self.program, message)
            case FuzzProgram() | StateProgram():
                self.program = message
            case _:
                # Starting a process takes seconds, which are not the program's.
                self.since, self.started = time.monotonic(), True
        return None

    def late(self, limit: float) -> Result | None:
        """A result for a task that takes longer than the limit; the process is ended."""
        allowed = 10 * limit if isinstance(self.task, Shrink) else limit
        if time.monotonic() - self.since < (allowed if self.started else max(allowed, _SECONDS_TO_START)):
            return None
        self.end()
        return self._broken(f"{TOO_LONG} {limit:g} seconds")

    def _died_drawing(self, how: str) -> Result:
        """A program is acted out in eager while it is drawn: where nothing was compiled before, eager has crashed."""
        assert self.task is not None
        fresh, broken = not self.done, self._broken(how)
        eagers = Outcome(broken.outcome.name, eager_error=f"{how}, in eager")
        return Result(self.task, None, eagers) if fresh else replace(broken, again=True)

    def _broken(self, how: str) -> Result:
        assert self.task is not None
        task, self.done = self.task, _TASKS_PER_PROCESS
        name = self.program.name if self.program else task.name if isinstance(task, Make) else "?"
        return Result(task, self.program, Outcome(name, broken=how))

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


class Workers:
    """A few processes that share out tasks among them.

    Args:
        count: How many processes.
        limit: How many seconds one program may take.
    """

    def __init__(self, count: int, limit: float = 60.0) -> None:
        self._limit = limit
        self._workers = [_Worker() for _ in range(count)]

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def run(self, tasks: Iterable[Task]) -> Iterator[Result]:
        """Do all tasks; the results come as they are ready.

        Args:
            tasks: What to do.
        """
        left = iter(tasks)
        idle, busy = list(self._workers), []
        while True:
            while idle and (task := next(left, None)) is not None:
                worker = self._fresh(idle.pop())
                worker.give(task)
                busy.append(worker)
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in list(busy):
                result = worker.receive() if worker.pipe in ready else worker.late(self._limit)
                if result is not None:
                    busy.remove(worker)
                    idle.append(worker)
                    if result.again:
                        left = chain([result.task], left)
                    else:
                        yield result

    def _fresh(self, worker: _Worker) -> _Worker:
        """The worker, or a new one in its place where its process is gone or has done enough."""
        if worker.done < _TASKS_PER_PROCESS:
            return worker
        worker.end()
        position = self._workers.index(worker)
        self._workers[position] = _Worker()
        return self._workers[position]
