"""The fuzzer: it finds what is planted, makes it small, and finds nothing where nothing is wrong."""

import contextlib
import functools
import runpy
from dataclasses import replace

import pytest
import torch

from fuzz import Failure, FuzzProgram, Input, Statement, Storage, examine, fails_with, generate, shrink
from fuzz.__main__ import main
from fuzz.program import loaded
from fuzz.workers import Examine, Make, Workers
from testing.planted import PLANTED

SEED = "tests"
CHUNK = 25
CHUNKS = 12
WITHIN = 500
SMALL = 6

made = functools.cache(functools.partial(generate, SEED))


def eager(fn):
    return fn


def only(source):
    """A program of one statement."""
    statement = Statement(source, "write", "add_", ("x",))
    return FuzzProgram("by hand", (Storage("s0", (2,), "float32"),), (Input("x", "s0"),), (statement,), ("x",))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_program_differs_from_eager(chunk):
    """Refusals are not failures here: they are counted where many programs run."""
    programs = [made(number) for number in range(chunk * CHUNK, (chunk + 1) * CHUNK)]
    failures = [Failure(outcome, program) for program in programs if (outcome := examine(program)).failed]
    assert not failures, "\n\n".join(str(smallest(failure)) for failure in failures)


def smallest(failure):
    signature = failure.outcome.signature
    small = shrink(failure.program, functools.partial(fails_with, signature))
    return Failure(examine(small), small)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_made_small(name):
    fault = PLANTED[name]
    fails = functools.partial(fails_with, fault.aspect, compile=fault.plant)
    found = next((program for program in map(made, range(WITHIN)) if fails(program)), None)
    assert found is not None
    small = shrink(found, fails)
    assert len(small.statements) <= SMALL, str(small)
    assert not examine(small, eager).failed


def test_eager_does_not_differ_from_itself():
    assert [number for number in range(100) if examine(made(number), eager).failed] == []


def test_a_program_is_made_again_from_its_seed_and_number():
    assert [generate(SEED, number) for number in range(10)] == [made(number) for number in range(10)]
    assert len({made(number).function() for number in range(20)}) == 20


def test_the_script_of_a_program_stands_by_itself(tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(only("x.add_(1)").script())
    runpy.run_path(str(path), run_name="__main__")
    assert "no difference" in capsys.readouterr().out


def test_what_foregrad_refuses_is_not_a_difference():
    outcome = examine(only("x.add_(len(str(x)))"))
    assert outcome.verdict == "refused" and outcome.refusals[0].startswith("DataDependentError")


def test_what_eager_refuses_is_counted_apart():
    assert examine(only("x.add_(torch.ones(7))")).verdict == "refused by eager"


def test_a_program_that_ends_its_process_does_not_end_the_run():
    hang, die = only("while True: pass"), only("import os; os._exit(9)")
    tasks = [Make(SEED, 0), Examine(hang), Examine(die), Examine(only("x.add_(1)"))]
    with Workers(1, limit=12.0) as workers:
        outcomes = [result.outcome for result in workers.run(tasks)]
    assert [outcome.broken for outcome in outcomes[1:]] == ["ran for more than 12 seconds", "ended with status 9", ""]
    assert outcomes[0].name == f"{SEED}/0" and outcomes[3].verdict == "agrees"


def test_the_command_line_shows_a_program(capsys):
    assert main(["--seed", SEED, "--grammar", "tensors", "--show", "3"]) == 0
    assert capsys.readouterr().out == f"{made(3)}\n"


def test_gradients_of_few_bits_are_not_drawn():
    """The order in which they are added up shows."""
    programs = [generate("bits", number) for number in range(400)]
    coarse = [p for p in programs if any(storage.dtype == "bfloat16" for storage in p.storages)]
    assert coarse
    for program in coarse:
        with loaded(replace(program, passing="apart")) as script:
            made = script.make_inputs()
            with contextlib.suppress(Exception), torch.enable_grad():  # the program may change the mode
                script.program(*made)
        assert not any(t.requires_grad and t.is_leaf for t in made if t.dtype == torch.bfloat16)


def test_a_program_that_kills_its_process_while_it_is_drawn_was_killed_by_eager():
    """Drawing acts it out in eager. A process that has compiled others before is not believed."""
    worker = Workers(1)._workers[0]
    for compiled_before, expected in ((0, "refused by eager"), (3, "broken")):
        worker.task, worker.program, worker.done = Make(SEED, 5), None, compiled_before
        result = worker._died_drawing("killed by signal 11")
        assert result.outcome.verdict == expected and result.again == bool(compiled_before)
    worker.end()
