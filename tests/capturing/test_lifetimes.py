"""What a compiled program keeps alive: nothing that eager would not."""

import contextlib
import functools
import gc
import subprocess
import sys
import types
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad.graph.graph import Step
from helpers import leaf, nop, plain


class Held:
    pass


def module():
    return nn.Linear(2, 2)


def parametrized():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))


def function():
    weight = plain(2)
    return lambda x: x * weight


def with_attributes():
    held = Held()
    held.n, held.weight = 2, plain(2)
    return held


def own_class():
    return type("Own", (), {"n": 2, "weight": plain(2), "double": property(lambda self: 2)})


USES = {
    module: lambda o, x: o(x),
    parametrized: lambda o, x: o(x),
    function: lambda o, x: o(x),
    with_attributes: lambda o, x: x * o.n + o.weight,
    own_class: lambda o, x: x * o.n + o.weight,
}


def in_a_global():
    namespace = {"use": None}
    exec("def program(x): return use(held, x)", namespace)
    return namespace["program"], namespace, lambda o: namespace.update(held=o)


def in_an_attribute():
    namespace = {"holder": Held()}
    exec("def program(x): return use(holder.held, x)", namespace)
    return namespace["program"], namespace, lambda o: setattr(namespace["holder"], "held", o)


def in_a_tuple():
    namespace = {}
    exec("def program(x): return use(held[0], x)", namespace)
    return namespace["program"], namespace, lambda o: namespace.update(held=(o, 1))


def in_a_default():
    namespace = {}
    exec("def program(x, held=None): return use(held, x)", namespace)
    program = namespace["program"]
    return program, namespace, lambda o: setattr(program, "__defaults__", (o,))


def in_a_class():
    namespace = {"Holder": type("Holder", (), {})}
    exec("def program(x): return use(Holder.held, x)", namespace)
    return namespace["program"], namespace, lambda o: setattr(namespace["Holder"], "held", o)


@pytest.fixture(autouse=True)
def _imported():
    """What the first recording imports leaves garbage behind."""
    foregrad.aot_function(lambda x: x.sin(), nop)(leaf(2)).sum().backward()


@pytest.mark.parametrize("make", USES, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "place", [in_a_global, in_an_attribute, in_a_tuple, in_a_default, in_a_class], ids=lambda place: place.__name__
)
def test_what_was_replaced_is_freed(make, place):
    program, namespace, put = place()
    namespace["use"] = USES[make]
    held = make()
    put(held)
    compiled = foregrad.aot_function(program, nop)
    x = torch.ones(2, 2)
    expected = program(x)
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(compiled(x), expected)
    assert len(compiled.specializations) == 1
    alive = weakref.ref(held)
    del held, expected
    put(make())
    gc.collect()  # functions and classes are in cycles of their own
    assert alive() is None
    torch.testing.assert_close(compiled(x), program(x))
    assert [known.is_gone for known in compiled.specializations] == [True, False]


def test_a_module_is_freed_at_once():
    namespace = {"held": nn.Linear(2, 2)}
    exec("def program(x): return held(x)", namespace)
    compiled = foregrad.aot_function(namespace["program"], nop)
    compiled(torch.ones(2, 2))
    gc.collect()
    gc.disable()
    try:
        hooks, weight = weakref.ref(namespace["held"]._forward_hooks), weakref.ref(namespace["held"].weight)
        namespace["held"] = None
        assert hooks() is None and weight() is None
    finally:
        gc.enable()


@pytest.fixture
def no_collections():
    """Only what nothing leads to is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


counted, seen = [0], weakref.WeakSet()


def counts(x):
    counted[0] += 1
    return x * 2


def remembers(x):
    seen.add(x)
    return x * 2


def raises(x):
    raise ValueError("eager's own")


def cannot_be_multiplied(x):
    return x @ torch.ones(7, 7)


def reads(x):
    return x * 2 if x.sum().item() > 0 else x


def catches_the_refusal(x):
    try:
        return x * x.sum().item()
    except foregrad.ForegradError:
        return x


def moves(x):
    y = x.view(-1)
    x.set_(torch.zeros(3))
    return y


REFUSED = [counts, remembers, raises, cannot_be_multiplied, reads, catches_the_refusal, moves]


@pytest.mark.usefixtures("reads_refused")
@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_an_argument_of_a_refused_call_is_freed_at_once(program, no_collections):
    dynamic = program is not cannot_be_multiplied  # which torch would log, with the frames, where pytest keeps it
    compiled = foregrad.aot_function(program, nop, dynamic=dynamic)
    x = leaf(2, 2)
    alive, y = weakref.ref(x), x * 1
    with pytest.raises((RuntimeError, ValueError)) as caught:
        compiled(y)
    del caught, x, y
    assert alive() is None


def test_what_lies_in_one_memory_is_freed_although_it_is_recorded_twice(no_collections):
    compiled = foregrad.aot_function(lambda x, y: x.add_(1) * y, nop)
    whole = plain(4)
    alive = weakref.ref(whole)
    compiled(whole[:3], whole[1:])
    del whole
    assert alive() is None


_FIRST_CAPTURE = """
import gc, weakref
import torch
import foregrad

held = torch.nn.Linear(2, 2)
alive = weakref.ref(held)
compiled = foregrad.aot_function(lambda x: x * getattr(held, "note", 2.0), lambda graph, inputs: graph)
gc.collect()
gc.disable()
compiled(torch.ones(2))
del held
assert alive() is None
"""


def test_the_first_capture_of_a_process_keeps_nothing():
    subprocess.run([sys.executable, "-c", _FIRST_CAPTURE], check=True)


def test_a_class_that_was_made_for_an_argument_is_freed_after_a_second_capture():
    """From then on the code that runs tells what is read, class by class."""
    compiled = foregrad.aot_function(lambda x, m: x * m.in_features, nop)
    made = parametrized()
    alive = weakref.ref(made)
    compiled(plain(2), made)
    compiled(plain(3), made)
    del made
    gc.collect()  # the class is in cycles of its own
    assert alive() is None


def test_an_object_that_a_program_writes_to_is_freed():
    namespace = {"held": Held()}
    exec("def program(x):\n    held.last = x * 2\n    return x.sin()", namespace)
    compiled = foregrad.aot_function(namespace["program"], nop)
    compiled(plain(2))
    alive = weakref.ref(namespace["held"].last)
    namespace["held"] = Held()
    assert alive() is None
    compiled(plain(2))
    torch.testing.assert_close(namespace["held"].last, plain(2) * 2)


def test_programs_for_what_is_gone_do_not_count():
    namespace = {}
    exec("def program(x): return held(x)", namespace)
    with foregrad.config.patch(max_specializations=2):
        compiled = foregrad.aot_function(namespace["program"], nop)
        for _ in range(6):
            namespace["held"] = nn.Linear(2, 2)
            compiled(torch.ones(2, 2))
    assert len(compiled.specializations) <= 4


def test_arguments_are_freed_although_the_backward_was_refused():
    """The error is kept, and raised whenever backward is called."""

    def program(x):
        y = (x * 2).sin()
        z = y.exp()
        z.add_(1)  # which backward has saved
        return z

    compiled = foregrad.aot_function(program, nop)
    for _ in range(2):
        x = leaf(2)
        result = compiled(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
        alive = weakref.ref(x)
        del x, result
        gc.collect()
        assert alive() is None


def test_results_that_hooks_keep_are_freed():
    compiled = foregrad.aot_function(lambda x: (y := x.exp(), y * y), nop)
    x = leaf(2)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor], lambda packed: packed[0]):
        results = compiled(x)
    torch.autograd.grad(results[1].sum(), x, retain_graph=True)
    alive = [*map(weakref.ref, results)]
    del results
    gc.collect()
    assert [find() for find in alive] == [None, None]


def test_what_stands_on_an_argument_is_freed():
    compiled, x = foregrad.aot_function(lambda x: x * 2, nop), leaf(2)
    x.about, x.tag = [plain(3), Held()], "kept"
    compiled(x).sum().backward()
    alive = [*map(weakref.ref, x.about)]
    del x.about
    assert [find() for find in alive] == [None, None]


def test_tensors_in_a_tuple_that_was_replaced_are_those_of_the_new_one():
    namespace = {"held": (plain(2), (plain(2), 1))}
    exec("def program(x): return x * held[0] + held[1][0]", namespace)
    compiled, x = foregrad.aot_function(namespace["program"], nop), plain(2)
    for factor in (1, 2, 3):
        namespace["held"] = (plain(2) * factor, (plain(2) - factor, 1))
        torch.testing.assert_close(compiled(x), namespace["program"](x))


# ------------------------------------------------------------------------------------ what the tape leads to


class Noting(torch.autograd.Function):
    """Its backward looks at the module again."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x * module.factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.module.factor, None


class Scaling(nn.Linear):
    """A module with a number in it."""

    def __init__(self):
        super().__init__(2, 2)
        self.factor = 3.0

    def forward(self, x):
        return super().forward(x) * self.factor

    def twice(self, x, factor=1.0):
        return self(x) * 2 * factor


def with_hooks():
    module = Scaling()
    module.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * module.factor,))
    module.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * module.factor,))
    return module


ON_THE_TAPE = {
    "checkpointed module": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "reentrant checkpoint": lambda m, x: checkpoint(m, x, use_reentrant=True),
    "checkpointed method": lambda m, x: checkpoint(m.twice, x, use_reentrant=False),
    "checkpointed partial": lambda m, x: checkpoint(functools.partial(m.twice, factor=2.0), x, use_reentrant=False),
    "argument of a checkpoint": lambda m, x: checkpoint(Scaling.twice, m, x, use_reentrant=False),
    "custom function": lambda m, x: Noting.apply(x, m),
    "backward hooks": lambda m, x: m(x),
}


def module_for(use):
    return with_hooks() if use == "backward hooks" else Scaling()


@pytest.mark.parametrize("given", ["found", "passed"])
@pytest.mark.parametrize("use", ON_THE_TAPE)
def test_an_object_on_the_tape_lives_as_long_as_in_eager(use, given, no_collections):
    run, holder = ON_THE_TAPE[use], [module_for(use)]
    program = (lambda x: run(holder[0], x)) if given == "found" else (lambda x, m: run(m, x))
    compiled = foregrad.aot_function(program, nop)
    for _ in range(2):
        found = []
        for call in (program, compiled):
            y = call(leaf(2, 2), *([] if given == "found" else holder))
            alive = weakref.ref(holder[0])
            holder[0] = module_for(use)
            found.append([alive() is not None])
            y.sum().backward()
            found[-1].append(alive() is not None)
            try:
                y.sum().backward()
            except RuntimeError as error:
                found[-1].append(str(error).partition(".")[0])
            del y
            found[-1].append(alive() is not None)
        assert found[0] == found[1]


@pytest.mark.parametrize("use", ON_THE_TAPE)
def test_an_object_on_the_tape_is_read_as_it_is_when_backward_runs(use):
    gradients = []
    for side in (lambda function: function, lambda function: foregrad.aot_function(function, nop)):
        torch.manual_seed(0)
        module, x = module_for(use), leaf(2, 2)
        program = side(lambda x, m: ON_THE_TAPE[use](m, x))
        for factor in (3.0, 5.0, 5.0, 3.0):
            module.factor = 3.0
            y = program(x, module)
            module.factor = factor
            y.sum().backward(retain_graph=True)
            y.sum().backward()
            gradients.append(x.grad.clone())
    for eager, compiled in zip(gradients[:4], gradients[4:], strict=True):
        torch.testing.assert_close(eager, compiled)


def test_another_module_is_not_taken_for_the_one_on_the_tape():
    compiled = foregrad.aot_function(lambda x, m: Noting.apply(x, m), nop)
    one, two, x = Scaling(), Scaling(), leaf(2, 2)
    compiled(x, one).sum().backward()
    y = compiled(x, two)
    two.factor, x.grad = 7.0, None
    y.sum().backward()
    assert x.grad.tolist() == [[7.0, 7.0], [7.0, 7.0]]


def recorded_steps():
    gc.collect()
    return sum(type(found) is Step for found in gc.get_objects())


def adds_up(x):
    return x.sin() + x.cos() * x


def registers_a_hook(x):
    y = x * 2
    y.register_hook(lambda grad: grad * 2)
    return y * y + x


def cannot_be_recorded(x):
    return adds_up(x) * x.sum().item()


@pytest.mark.parametrize("program", [adds_up, registers_a_hook, cannot_be_recorded], ids=lambda f: f.__name__)
def test_a_recording_ends_with_its_program(program):
    before = recorded_steps()
    x = leaf(2)
    compiled = foregrad.aot_function(program, nop)
    with contextlib.suppress(foregrad.ForegradError):
        (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        gradient.sum().backward()
        assert recorded_steps() > before
        del gradient
    del compiled, x
    assert recorded_steps() == before


def test_an_array_that_became_a_tensor_is_freed(no_collections):
    array = numpy.ones(2)
    compiled = foregrad.aot_function(lambda x, a: x * torch.from_numpy(a), nop)
    compiled(plain(2), array)
    alive = weakref.ref(array)
    del array
    assert alive() is None


def test_a_python_module_that_was_passed_is_freed():
    helpers = types.ModuleType("helpers")
    exec("scale = 2.0\ndef double(x): return x * scale", vars(helpers))
    compiled = foregrad.aot_function(lambda x, h: h.double(x), nop)
    compiled(plain(2), helpers)
    alive = weakref.ref(helpers.double)
    del helpers
    gc.collect()  # a function and its namespace are a cycle
    assert alive() is None


def counts(x, held):
    held.n = getattr(held, "n", 0) + 1
    return x * 2


def puts_aside(x, held):
    held.last = [x * 2]
    return x


def is_counted_once(x, held):
    if not hasattr(held, "made"):
        held.made = True
    return x * 2


def looks_at_data(x, held):
    return x * 2 if x.sum() > 1 else x


@pytest.mark.parametrize("program", [counts, puts_aside, is_counted_once, looks_at_data])
def test_a_recording_that_is_given_up_leaves_its_arguments_to_their_owner(program):
    """No cycle of an error and its frames keeps them until garbage is collected."""
    compiled, held = foregrad.aot_function(program, nop), Held()
    watched = weakref.ref(held)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(foregrad.errors.ForegradError):
            compiled(plain(2), held)
        del held
        assert watched() is None
    finally:
        gc.enable()
