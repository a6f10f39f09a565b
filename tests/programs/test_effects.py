"""Operators with side effects: in order, as often as in eager, forward and backward (group E)."""

import contextlib
import functools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op, with_effects

import foregrad
from checking import check_core
from foregrad.abstract.lean_engine import LeanEngine
from foregrad.abstract.lean_tensors import is_lean
from foregrad.abstract.tensor_meta import Table
from helpers import grab, leaf, nop, plain

LOG = []  # what happened, in order

library = torch.library.Library("foregrad_effects", "DEF")
library.define("note(str name, Tensor x) -> ()")
library.define("twice(Tensor x) -> Tensor")
library.define("both(Tensor x) -> (Tensor, Tensor)")
library.define("pieces(Tensor x) -> Tensor[]")
library.define("count(Tensor x) -> int")
library.define("late(Tensor x) -> Tensor")
library.define("overwrite(Tensor(a!) x) -> ()")


def implement(name, real, fake):
    def run(*args):
        LOG.append((name, *(a.tolist() if isinstance(a, torch.Tensor) else a for a in args)))
        return real(*args)

    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"foregrad_effects::{name}", fake)


implement("note", lambda name, x: None, lambda name, x: None)
implement("twice", lambda x: x * 2, torch.empty_like)
implement("both", lambda x: (x + 1, x + 2), lambda x: (torch.empty_like(x), torch.empty_like(x)))
implement("pieces", lambda x: [x + 1, x + 2], lambda x: [torch.empty_like(x), torch.empty_like(x)])
implement("count", lambda x: x.numel(), lambda x: 0)
implement("late", lambda x: x * 2, torch.empty_like)
implement("overwrite", lambda x: (x.data.fill_(7), None)[1], lambda x: None)
for effectful in ("note", "twice", "both", "pieces", "count"):
    _register_effectful_op(f"foregrad_effects::{effectful}", _EffectType.ORDERED)
ops = torch.ops.foregrad_effects


@pytest.fixture(autouse=True)
def empty_log():
    LOG.clear()


@pytest.fixture(params=[False, True], ids=["lifted", "unlifted"])
def form(request):
    with foregrad.config.patch(unlift_effect_tokens=request.param, verify=True):
        yield request.param


def logged(run):
    """What a call writes to the log."""
    LOG.clear()
    run()
    return list(LOG)


def same_log(program, make, times=2, **options):
    """A program and its compiled form leave the same log, call after call, with the same results."""
    compiled = foregrad.aot_function(program, nop, **options)
    for _ in range(times):
        expected = logged(lambda: train(program, make()))
        assert expected, "nothing happens in eager"
        assert logged(lambda: train(compiled, make())) == expected
    check_core(program, *make(), compile=lambda f: foregrad.aot_function(f, nop, **options))


def train(function, args):
    """Forward, and backward where there is one."""
    out = function(*args)
    LOG.append("between")
    results = [r for r in (out if isinstance(out, tuple) else (out,)) if r.requires_grad]
    if results:
        torch.autograd.backward([r.sum() for r in results])


class Noted(torch.autograd.Function):
    """Leaves a note in both directions."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        ctx.save_for_backward(x)
        ops.note(f"{name} forward", x)
        return x * 3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        ops.note(f"{ctx.name} backward", g * x)
        return g * 3, None


def hooked(x):
    y = x * 2
    y.register_hook(lambda g: ops.note("hook", g))
    ops.note("forward", y)
    return y.sin()


def nothing_depends_on_it(x):
    ops.note("a", x)
    ops.twice(x.detach())
    ops.note("b", x + 1)
    return x * 2


def results_of_effects(x):
    a, b = ops.both(x.detach())
    c, d = ops.pieces(a)
    return ops.twice(b) * c * x, d


def mutation(x, y):
    ops.note("before", y)
    y.mul_(2)
    ops.note("after", y)
    y.view(-1)[0].add_(1)
    return x * ops.twice(y)


def aliases(x, y):
    ops.note("x", x)
    t = x * 2
    ops.note("t", t)
    return t.view(-1), t.t(), y, y.view(-1)


def duplicates(x, y):
    x.add_(1)
    ops.note("y", y)
    return x * y


def shared_memory(x, y):
    x.mul_(2)
    ops.note("y", y)
    return y + ops.twice(x)[:1]


def nested(x, y):
    return Noted.apply(Noted.apply(x, "inner") * y, "outer"), Noted.apply(y, "aside")


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(lambda x: Noted.apply(x.sin(), "again").cos(), x, use_reentrant=False)


def grads_off(x):
    with torch.no_grad():
        ops.note("off", x)
        y = ops.twice(x)
    return x * y


def writes_in_backward(x, b):
    class Tick(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, b):
            ctx.b = b
            return x * 2

        @staticmethod
        def backward(ctx, g):
            ops.note("before", ctx.b)
            ctx.b.add_(1)
            ops.note("after", ctx.b)
            return g * 2, None

    return Tick.apply(x, b)


def overlapping():
    base = plain(4)
    return base[:3], base[1:]


def twice_the_same():
    x = plain(2)
    return x, x


PROGRAMS = {
    "dead": (nothing_depends_on_it, lambda: (leaf(2),)),
    "dead, inference": (nothing_depends_on_it, lambda: (plain(2),)),
    "results": (results_of_effects, lambda: (leaf(2),)),
    "results, inference": (results_of_effects, lambda: (plain(2),)),
    "mutation": (mutation, lambda: (leaf(2, 2), plain(2, 2))),
    "mutation, inference": (mutation, lambda: (plain(2, 2), plain(2, 2))),
    "aliases": (aliases, lambda: (leaf(2, 3), plain(2, 3))),
    "duplicates": (duplicates, twice_the_same),
    "shared memory": (shared_memory, overlapping),
    "backward": (lambda x: Noted.apply(x, "n") * 2, lambda: (leaf(2),)),
    "nested": (nested, lambda: (leaf(2), leaf(2))),
    "hook": (hooked, lambda: (leaf(2),)),
    "checkpoint": (checkpointed, lambda: (leaf(2),)),
    "no_grad": (grads_off, lambda: (leaf(2),)),
    "writes in backward": (writes_in_backward, lambda: (leaf(2), plain(2))),
    "only an effect": (lambda x: (ops.note("x", x), x)[1], lambda: (plain(2),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_effects_run_in_order_and_as_often_as_in_eager(name, form):
    """E-1, E-3, E-4"""
    same_log(*PROGRAMS[name])


@pytest.mark.parametrize("name", ["dead", "results", "mutation, inference", "nested", "hook"])
def test_effects_with_symbolic_sizes(name, form):
    """E-3"""
    same_log(*PROGRAMS[name], dynamic=True)


@pytest.mark.parametrize("name", ["mutation", "mutation, inference", "duplicates"])
def test_effects_beside_writes_in_the_graph(name, form):
    """E-3"""
    same_log(*PROGRAMS[name], keep_inference_input_mutations=True)


def test_recording_has_no_effect(capfd):
    """E-1"""
    foregrad.capture(lambda x: (ops.note("x", x), torch.ops.aten._print("no"), x * 2)[2], leaf(2))
    assert not LOG and capfd.readouterr().out == ""


def test_tokens_lead_the_graph():
    """E-2"""
    compiled, graphs = grab(nothing_depends_on_it)
    compiled(plain(2))
    assert graphs.inputs("inference") == ["arg0_1", "arg1_1"]
    assert graphs.ops("inference").count("with_effects") == 3
    token, result = graphs.outputs("inference")
    assert token.args == (next(n for n in reversed(token.graph.nodes) if n.target is with_effects), 0)
    assert result.name == "mul_1" or result.name == "mul"
    assert graphs.examples["inference"][0].shape == (0,)


def test_each_direction_has_a_chain_of_its_own():
    """E-2, V-8, V-10"""
    compiled, graphs = grab(lambda x: Noted.apply(x, "n"))
    compiled(leaf(2)).sum().backward()
    assert graphs.inputs("forward") == ["primals_1", "primals_2"]
    assert graphs.inputs("backward") == ["primals_2", "tangents_1", "tangents_token"]
    chain = [n for n in graphs.modules["backward"].graph.nodes if n.target is with_effects]
    assert [n.args[0].name for n in chain] == ["tangents_token"]
    gradient, token = graphs.outputs("backward")
    assert gradient.name.startswith("mul") and token.args == (chain[-1], 0)
    assert graphs.outputs("forward")[0].name == "getitem"


def test_the_joint_has_its_tokens_before_the_primals_and_behind_the_tangents():
    """E-2, V-9"""
    captured = foregrad.capture(lambda x: Noted.apply(x, "n"), leaf(2))
    names = [n.name for n in captured.joint_graph.graph.nodes if n.op == "placeholder"]
    assert names == ["primals_1", "primals_2", "tangents_1", "tangents_token"]
    assert [len(part) for part in captured.example_inputs] == [2, 1]
    assert len(captured.joint_graph.graph.output_node().args[0]) == 4
    assert "ordered token" in str(captured)


def test_a_partitioner_counts_the_tokens(form):
    """P-1"""
    seen = []

    def partition(graph, joint_inputs, *, num_fwd_outputs, **_):
        seen.append((len(joint_inputs[0]), num_fwd_outputs))
        return foregrad.default_partition(graph, joint_inputs, num_fwd_outputs=num_fwd_outputs)

    same_log(lambda x: Noted.apply(x, "n"), lambda: (leaf(2),), partition_fn=partition)
    assert seen[0] == (2, 2)


def test_facts_about_tokens():
    """E-1, E-4, V-5"""

    def facts():
        compiled = foregrad.aot_function(lambda x, b: (b.add_(1), ops.note("x", x), x * 2)[2], nop)
        compiled(leaf(2), plain(2))
        return compiled.specializations[0].metadata

    lifted = facts()
    assert list(lifted.tokens) == [_EffectType.ORDERED] and lifted.tokens[_EffectType.ORDERED].shape == (0,)
    assert lifted.num_forward_returns == 3 and lifted.num_forward == 3
    assert lifted.mutated_inp_runtime_indices == [1] and len(lifted.input_info) == 2
    with foregrad.config.patch(unlift_effect_tokens=True):
        unlifted = facts()
    assert facts() == facts(), "tokens are tensors, and take no part in comparisons"
    assert unlifted.tokens == {} and unlifted.num_forward_returns == 2 and unlifted.num_forward == 2


def test_the_unlifted_form_makes_and_sinks_its_tokens():
    """E-4"""
    with foregrad.config.patch(unlift_effect_tokens=True):
        compiled, graphs = grab(lambda x: Noted.apply(x, "n"))
        compiled(leaf(2)).sum().backward()
    assert graphs.inputs("forward") == ["primals_2"] and len(graphs.examples["forward"]) == 1
    assert graphs.inputs("backward") == ["primals_2", "tangents_1"] and len(graphs.examples["backward"]) == 2
    for kind in ("forward", "backward"):
        assert graphs.ops(kind)[0] == "_make_token.default" and graphs.ops(kind)[-1] == "_sink_tokens.default"
        module = graphs.modules[kind]
        assert not module.graph.eliminate_dead_code() or "with_effects" in graphs.ops(kind)
    assert len(graphs.outputs("backward")) == 1


def test_outputs_differentiated_one_after_another(form):
    """E-3: a backward for some of the outputs has the effects of those only."""
    compiled = foregrad.aot_function(nested, nop)

    def run(function):
        first, second = function(leaf(2), leaf(2))
        second.sum().backward(retain_graph=True)
        LOG.append("then")
        first.sum().backward(retain_graph=True)
        first.sum().backward()

    assert logged(lambda: run(compiled)) == logged(lambda: run(nested))


def test_gradients_that_are_kept_for_another_order(form):
    """E-3"""

    def run(function):
        x = leaf(2)
        (g,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        LOG.append(g.tolist())

    program = PROGRAMS["backward"][0]
    assert logged(lambda: run(foregrad.aot_function(program, nop))) == logged(lambda: run(program))


def test_a_backward_that_does_something_else_where_a_tangent_is_missing(form):
    """E-3: effects that only a backward for some of the outputs has."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, g, h):
            if h is None:
                ops.note("h is missing", g)
                return g * 2
            return h * 3 if g is None else g * 2 + h * 3

    compiled = foregrad.aot_function(Pair.apply, nop)

    def run(function):
        x = leaf(2)
        function(x)[0].sum().backward()
        LOG.append(x.grad.tolist())

    assert logged(lambda: run(compiled)) == logged(lambda: run(Pair.apply))


def test_modules(form):
    """E-3"""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls.add_(1)
            ops.note("calls", self.calls)
            y = self.linear(x)
            ops.note("y", y.detach().round())
            return (y,)

    net = Net()
    compiled = foregrad.aot_module(net, nop)
    flat = foregrad.aot_module_simplified(net, [plain(2)], nop)
    for function in (compiled, flat):
        before = net.calls.item()
        log = logged(lambda f=function: f(plain(2))[0].sum().backward())
        assert [entry[1] for entry in log] == ["calls", "y"] and log[0][2] == [before + 1]
    check_core(net, plain(2))


def test_under_no_grad_the_forward_has_its_effects(form):
    """E-3"""
    compiled = foregrad.aot_module_simplified(Once(), [leaf(2)], nop)  # one program for both kinds of calls
    assert len(logged(lambda: compiled(leaf(2)))) == 1
    with torch.no_grad():
        assert len(logged(lambda: compiled(leaf(2)))) == 1


class Once(nn.Module):
    def forward(self, x):
        return (ops.twice(x.detach()) * x,)


def test_printing_and_its_order(capfd, form):
    """E-1: torch's own printing operators, beside others of the same effect."""

    def program(x):
        torch.ops.aten._print("one")
        torch.ops.higher_order.print("two {} {k}", x.detach(), k=3)
        ops.note("three", x)
        torch.ops.aten._print("four")
        return x * 2

    program(plain(2))
    expected = capfd.readouterr().out
    assert expected.split() == ["one", "two", "tensor([1.,", "2.])", "3", "four"]
    compiled = foregrad.aot_function(program, nop)
    for x in (plain(2), leaf(2)):
        compiled(x)
        assert capfd.readouterr().out == expected


def test_a_tensor_of_a_closure_is_printed_as_it_is_now(capfd):
    """E-1, F-14"""
    w = plain(2)
    compiled = foregrad.aot_function(lambda x: (torch.ops.higher_order.print("{}", w), x * 2)[1], nop)
    for value in (5, 6):
        w.fill_(value)
        compiled(plain(2))
        assert capfd.readouterr().out == f"tensor([{value}., {value}.])\n"


def test_linear_algebra_raises_when_it_runs(form):
    """E-1: torch 2.13 registers the check of linear algebra as an effect."""
    compiled = foregrad.aot_function(torch.linalg.inv, nop)
    assert torch.equal(compiled(torch.eye(2)), torch.eye(2))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(torch.zeros(2, 2))


def test_an_effect_may_be_registered_at_any_time():
    """E-1"""

    def tokens():
        compiled, graphs = grab(lambda x: ops.late(x))
        compiled(plain(2))
        return graphs.ops("inference").count("with_effects")

    assert tokens() == 0
    handle = _register_effectful_op("foregrad_effects::late", _EffectType.ORDERED)
    assert tokens() == 1
    handle.destroy()
    assert tokens() == 0


def test_a_decomposition_replaces_an_operator_with_effects():
    """F-8, E-1"""
    table = {ops.twice.default: lambda x: x + x}
    compiled, graphs = grab(lambda x: ops.twice(x), decompositions=table)
    assert compiled(plain(2)).tolist() == [2, 4] and graphs.ops("inference") == ["add.Tensor"] and not LOG


def test_autocast(form):
    """E-3, J-11"""

    def program(x, w):
        y = x @ w
        ops.note("y", y.detach())
        return y

    compiled = foregrad.aot_function(program, nop)
    with torch.autocast("cpu", torch.bfloat16):
        expected = logged(lambda: program(leaf(2, 2), leaf(2, 2)))
        assert logged(lambda: compiled(leaf(2, 2), leaf(2, 2))) == expected


def test_an_operator_that_writes_has_no_token():
    """E-1: torch refuses to chain operators whose schema aliases."""
    with pytest.raises(AssertionError, match="Ops with aliasing is not supported"):
        with_effects(torch.tensor([]), torch.ops.aten.add_.Tensor, torch.ones(1), torch.ones(1))
    handle = _register_effectful_op("foregrad_effects::overwrite", _EffectType.ORDERED)
    try:
        same_log(lambda x: (ops.overwrite(x), x * 2)[1], lambda: (plain(2),))
    finally:
        handle.destroy()


def test_what_must_run_in_backward_is_kept_there():
    """P-4, for the backward: an operator that writes to its own tensor, and whose result nobody reads."""

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            ops.overwrite(g.clone())
            return g * 2

    same_log(Backward.apply, lambda: (leaf(2),))


def test_a_number_from_an_effect_is_refused():
    """E-1"""
    compiled = foregrad.aot_function(lambda x: x * ops.count(x), nop)
    with pytest.raises(
        foregrad.errors.UnsupportedError, match=r"foregrad_effects.count.default, at .*test_effects.* plain int"
    ):
        compiled(plain(2))
    fallback = foregrad.aot_function(lambda x: x * ops.count(x), nop, fallback="eager")
    with pytest.warns(foregrad.errors.EagerFallbackWarning):
        assert fallback(plain(2)).tolist() == [2, 4]


def test_attempts_that_autograd_refuses_leave_no_effect_behind(form):
    """E-1: one output cannot be differentiated; the other has its effects once."""

    def program(x, y):
        bad = x.exp()
        bad_out = bad * 1
        bad.add_(1)  # overwrites what exp has saved
        return bad_out, Noted.apply(y, "sound")

    def run(function):
        bad, sound = function(leaf(2), leaf(2))
        with contextlib.suppress(RuntimeError):
            bad.sum().backward()
        sound.sum().backward()

    compiled = foregrad.aot_function(program, nop)
    assert logged(lambda: run(compiled)) == logged(lambda: run(program))


@pytest.mark.parametrize("with_grad", [False, True])
def test_higher_order_operators_are_refused_by_name(with_grad):
    """The message names the operator and the user's line, whether Dynamo was loaded before or not."""

    def program(x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    compiled = foregrad.aot_function(program, nop)
    x = leaf(2) if with_grad else plain(2)
    with pytest.raises(foregrad.errors.UnsupportedError, match=r"higher-order operator cond, at .*test_effects.py"):
        compiled(x)


def test_higher_order_operators_that_load_dynamo_are_refused_by_name():
    """The same where Dynamo is loaded by the operator itself, in the middle of the recording."""
    program = """
import sys, torch, foregrad
def program(x):
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
assert "torch._dynamo" not in sys.modules
try:
    foregrad.aot_function(program, lambda graph, inputs: graph)(torch.ones(2))
except foregrad.errors.UnsupportedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120)
    assert "the higher-order operator cond, at <string>:4, cannot be compiled yet" in done.stdout, done.stderr[-2000:]


def test_a_function_compiled_by_dynamo_is_recorded_as_it_was_written():
    inner = torch.compile(lambda x: x.sin() * 2, backend="eager")
    check_core(lambda x: inner(x) + 1, leaf(2))


@functools.cache
def has_inductor():
    import shutil

    return shutil.which("g++") is not None


@pytest.mark.skipif(not has_inductor(), reason="Inductor needs a compiler")
@pytest.mark.parametrize("name", ["nested", "hook"])
def test_compilers_are_never_shown_a_lean_tensor(name, monkeypatch):
    monkeypatch.setattr(LeanEngine, "results", Table(64))  # what other programs have left there may hide it
    program, make = PROGRAMS[name]
    shown = []

    def compiler(graph, examples):
        shown.extend(examples)
        return foregrad.make_boxed_func(graph.forward)

    with foregrad.config.patch(unlift_effect_tokens=True):
        train(foregrad.aot_function(program, compiler), make())
    assert shown and not any(map(is_lean, shown))


def test_inductor_takes_the_unlifted_form():
    """E-4: a backend that cannot have tokens in a signature."""
    from torch._inductor.compile_fx import compile_fx_inner

    program, make = PROGRAMS["nested"]
    with foregrad.config.patch(unlift_effect_tokens=True):
        compiled = foregrad.aot_function(program, compile_fx_inner)
        assert logged(lambda: train(compiled, make())) == logged(lambda: train(program, make()))
