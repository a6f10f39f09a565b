"""The grammar of stateful programs: what it draws is compared step by step, and eager agrees with itself."""

import functools
import runpy

import pytest
import torch

from fuzz import fails_with, state
from fuzz.state import Part, StateProgram
from testing.planted_state import PLANTED, PLANTED_IN_STEPS

SEED = "tests"
WITHIN = 400
SMALL_BODY, SMALL_STORY = 3, 6

made = functools.cache(functools.partial(state.generate, SEED))


def eager(program):
    return program


def by_hand(body, *steps, objects=(), form="function"):
    """A program of one statement over one argument."""
    roots = tuple(name for part in objects for name in Part(part, "object", "by hand").makes)
    return StateProgram(
        "by hand",
        tuple(Part(source, "object", "by hand") for source in objects),
        roots,
        form,
        ("x0",),
        (Part(body, "write", "by hand"),),
        "x0",
        tuple(Part(source, "step", "by hand") for source in ("a0 = torch.ones(2)", "r0 = call(a0)", *steps)),
    )


def test_eager_does_not_differ_from_itself():
    assert [number for number in range(60) if state.examine(made(number), eager).failed] == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_made_small(name):
    fault = PLANTED[name]
    fails = functools.partial(fails_with, fault.aspect, compile=fault.plant)
    found = next((program for program in map(made, range(WITHIN)) if fails(program)), None)
    assert found is not None
    small = state.shrink(found, fails)
    assert len(small.statements) <= SMALL_BODY and len(small.steps) <= SMALL_STORY, str(small)
    assert not state.examine(small, eager).failed


def test_a_program_is_made_again_from_its_seed_and_number():
    assert [state.generate(SEED, number) for number in range(10)] == [made(number) for number in range(10)]
    assert len({made(number).script() for number in range(20)}) == 20


def test_the_script_of_a_program_stands_by_itself(tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(by_hand("x0.add_(1)").script())
    runpy.run_path(str(path), run_name="__main__")
    assert "program.py: agrees" in capsys.readouterr().out


def test_what_foregrad_refuses_is_not_a_difference():
    outcome = state.examine(by_hand("x0.add_(len(str(x0)))"))
    assert outcome.verdict == "refused" and outcome.refusals[0].startswith("DataDependentError")


def test_what_eager_refuses_is_counted_apart():
    assert state.examine(by_hand("x0.add_(torch.ones(7))")).verdict == "refused by eager"


def test_sets_of_tensors_are_compared_without_an_order():
    """They are hashed by their addresses."""
    body = "o1.update([x0 + n for n in range(6)])"
    program = by_hand(body, "o2 = next(t for t in o1 if t[0] == 3)", objects=["o1 = set()", "o2 = None"])
    assert all(state.examine(program, eager).verdict == "agrees" for _ in range(5))


def test_weak_references_to_tensors_are_compared_by_what_they_lead_to():
    objects = ["import weakref; o1 = weakref.WeakSet()", "o2 = []"]
    program = by_hand("o2.extend(x0 + n for n in range(6)); o1.update(o2)", objects=objects)
    assert all(state.examine(program, eager).verdict == "agrees" for _ in range(5))


def test_an_object_that_only_a_cycle_holds_is_as_good_as_freed():
    """A recording leaves cycles; when Python frees them is not determined."""
    objects = ["class O2: pass", "import weakref; o1 = O2(); o3 = weakref.ref(o1)"]
    program = by_hand("x0.add_(1)", "o1 = None", objects=objects)

    def leaves_a_cycle(call):
        def wrong(x):
            cycle = [call.__globals__["o1"]]
            cycle.append(cycle)
            return call(x)

        return wrong

    assert state.examine(program, leaves_a_cycle).verdict == "agrees"
    kept = []
    assert state.examine(program, lambda call: lambda x: kept.append(call.__globals__["o1"]) or call(x)).failed


def test_hooks_are_compared_without_their_numbers():
    """The recording takes some of these."""
    steps = "a0 = torch.ones(2).requires_grad_()", "r0 = call(a0)", "h0 = a0.register_hook(lambda g: g * 3)"
    program = by_hand("x0.requires_grad and x0.register_hook(lambda g: g * 2)", *steps)
    assert state.examine(program).verdict == "agrees"


def test_a_set_with_another_member_is_found():
    program = by_hand("o1.add(x0 + 1)", objects=["o1 = set()"])
    planted = state.examine(program, lambda program: lambda x: program(x + 1))
    assert planted.verdict == "differs"


def test_a_view_that_autograd_says_nothing_about_is_compared():
    layer = "o1 = torch.nn.Linear(2, 2); o1.register_full_backward_hook(lambda m, i, o: None)"
    program = by_hand("x0 = o1(x0)", "r0.detach().fill_(7.0)", objects=[layer])
    assert state.examine(program, eager).verdict == "agrees"


def numbers_of_the_first_call(program):
    """A planted fault: what `item()` gave in the first call, it gives in every call."""
    known = []

    def call(*args):
        numbers = iter(known)

        def item(tensor):
            number = next(numbers, None)
            if number is None:
                number = torch._C.TensorBase.item(tensor)
                known.append(number)
            return number

        torch.Tensor.item = item
        try:
            return program(*args)
        finally:
            del torch.Tensor.item

    return call


def test_a_number_that_is_read_only_once_is_found_and_made_small():
    fails = functools.partial(fails_with, "value of a result", compile=numbers_of_the_first_call)
    found = next((program for n in range(WITHIN) if fails(program := state.reads.generate(SEED, n))), None)
    assert found is not None
    small = state.shrink(found, fails)
    assert len(small.statements) <= SMALL_BODY and len(small.steps) <= SMALL_STORY, str(small)


def test_programs_that_read_are_made_again_and_agree_with_eager_itself():
    made_so = [state.reads.generate(SEED, number) for number in range(40)]
    assert made_so == [state.reads.generate(SEED, number) for number in range(40)]
    assert [program.name for program in made_so if state.examine(program, eager).failed] == []
    assert {"loop over reads", "size that is read"} <= {part.kind for program in made_so for part in program.statements}
    assert any("nan" in step.source for program in made_so for step in program.steps)
    assert sum(step.kind == "call" for program in made_so for step in program.steps) > 5 * len(made_so) - 40


@pytest.mark.parametrize("name", PLANTED_IN_STEPS)
def test_a_fault_that_is_planted_in_a_training_step_is_found_and_made_small(name):
    fault = PLANTED_IN_STEPS[name]
    fails = functools.partial(fails_with, fault.aspect, compile=fault.plant)
    found = next((program for n in range(WITHIN) if fails(program := state.steps.generate(SEED, n))), None)
    assert found is not None
    small = state.shrink(found, fails)
    assert len(small.statements) <= 4 and len(small.steps) <= SMALL_STORY, str(small)
    assert not state.examine(small, eager).failed


def test_training_steps_are_made_again_and_agree_with_eager_itself():
    made_so = [state.steps.generate(SEED, number) for number in range(40)]
    assert made_so == [state.steps.generate(SEED, number) for number in range(40)]
    assert [program.name for program in made_so if state.examine(program, eager).failed] == []
    text = "".join(map(str, made_so))
    assert all(word in text for word in ("train_step(", "lr_scheduler", "GradScaler", "AveragedModel", "clip_grad"))
    assert sum(step.kind == "call" for program in made_so for step in program.steps) > 2.5 * len(made_so)
