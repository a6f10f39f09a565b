"""The front door: `foregrad.compile`, its backends by name, and sizes that become symbols once they change."""

import weakref

import pytest
import torch
from torch import nn

import foregrad
from foregrad.backends.eager import run_graph
from foregrad.errors import CompilerError, ConfigError, EagerFallbackWarning


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def trained(model, program, sizes=(2, 2)):
    """Losses and gradients of some steps."""
    seen = []
    for step, size in enumerate(sizes):
        torch.manual_seed(step)
        loss = program(torch.randn(size, 3)).square().sum()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return seen


@pytest.mark.parametrize("backend", ["eager", "aot_eager", lambda graph, inputs: graph.forward], ids=str)
def test_a_module_trains_as_in_eager(backend):
    model, other = two_layers(), two_layers()
    compiled = trained(other, foregrad.compile(other, backend))
    assert all(map(torch.equal, trained(model, model), compiled))


def test_a_function_is_compiled():
    double = foregrad.compile(lambda x: (x * 2, x.sin()), "eager")
    x = torch.ones(3, requires_grad=True)
    y, z = double(x)
    (y + z).sum().backward()
    assert torch.equal(x.grad, 2 + torch.ones(3).cos())


def test_a_size_that_changes_becomes_a_symbol_at_the_second_recording():
    model, other = two_layers(), two_layers()
    program = foregrad.compile(other, "eager")
    assert all(map(torch.equal, trained(model, model, (2, 3, 5, 7)), trained(other, program, (2, 3, 5, 7))))
    assert len(program.specializations) == 2
    assert program(torch.ones(9, 3)).shape == (9, 1)
    assert len(program.specializations) == 2


def test_only_the_dimension_that_changes_becomes_a_symbol():
    """The batch has the size of another dimension by chance: they are not taken for one."""
    program = foregrad.compile(lambda x: x.view(x.shape[0], 3, -1).sum(2), "eager")
    for size in (2, 3, 5, 9):
        x = torch.randn(size, 12)
        assert torch.equal(program(x), x.view(size, 3, -1).sum(2))
    assert len(program.specializations) == 2


def test_an_int_that_changes_becomes_a_symbol():
    program = foregrad.compile(lambda x, n: x * n + n, "eager")
    for n in (2, 3, 5, 9):
        assert torch.equal(program(torch.ones(2), n), torch.full((2,), 2.0 * n))
    assert len(program.specializations) == 2


def test_dynamic_says_when_sizes_are_symbols():
    never, always = (foregrad.compile(torch.sin, "eager", dynamic=dynamic) for dynamic in (False, True))
    for size in (2, 3, 5):
        never(torch.ones(size)), always(torch.ones(size))
    assert (len(never.specializations), len(always.specializations)) == (3, 1)


def test_a_graph_that_runs_as_it_is_frees_what_it_was_given():
    """It empties its list of arguments, and drops each value after its last use."""
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return run_graph(graph, inputs)

    program = foregrad.compile(lambda x, y: x.sin().sin().sum(), compiler, partition="default")
    program(torch.ones(4, requires_grad=True), torch.ones(2)).backward()
    for graph in graphs:
        given = [
            torch.ones(value.shape) for value in (node.meta["val"] for node in graph.graph.find_nodes(op="placeholder"))
        ]
        alive = [weakref.ref(value) for value in given]
        results = run_graph(graph, None)(given)
        assert given == []
        assert all(reference() is None or any(reference() is result for result in results) for reference in alive)


def test_min_cut_is_the_default_partition():
    graphs = {}

    for name, partition in (("min_cut", None), ("default", "default")):

        def compiler(graph, inputs, name=name):
            graphs.setdefault(name, graph)
            return graph.forward

        x = torch.ones(256, requires_grad=True)
        foregrad.compile(lambda x: x.cos().sinh().cos(), compiler, partition=partition)(x).sum().backward()
    saved = {name: len(graph.graph.output_node().args[0]) - 1 for name, graph in graphs.items()}
    assert saved["min_cut"] < saved["default"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"backend": "inducto"}, "There is no backend 'inducto'. Did you mean 'inductor'? There are: inductor, eager"),
        ({"backend": 3}, "backend must be a name or a function"),
        ({"backend": "eager", "mode": "reduce-overhead"}, "mode is for the backend 'inductor'"),
        ({"backend": "eager", "options": {"max_autotune": True}}, "options is for the backend 'inductor'"),
        ({"mode": "fast"}, "Inductor has no 'fast' for mode"),
        ({"options": {"max_autotun": True}}, "Inductor has no 'max_autotun' for options. Did you mean 'max_autotune'?"),
        ({"mode": 3}, "Inductor has no 3 for mode"),
        ({"options": {"max_autotune": "yes"}}, "Inductor's option 'max_autotune' is a bool, and cannot be 'yes'"),
        ({"options": ["max_autotune"]}, "options is a dict of Inductor's settings"),
        ({"backend": "eager", "dynamic": "yes"}, "dynamic must be True, False or None"),
        ({"backend": "eager", "decompositions": ["core_aten"]}, "decompositions must be 'core_aten' or 'inductor'"),
        ({"backend": "eager", "partition": ["min_cut"]}, "partition must be 'default' or 'min_cut'"),
        ({"backend": "eager", "partition": "mincut"}, "partition must be 'default' or 'min_cut'"),
        ({"backend": "eager", "fallback": "no"}, "fallback must be"),
    ],
    ids=lambda given: str(given)[:30],
)
def test_bad_input_is_refused_before_anything_runs(given, text):
    with pytest.raises(ConfigError) as refused:
        foregrad.compile(two_layers(), **given)
    assert text in str(refused.value)


def test_what_is_not_callable_is_refused():
    with pytest.raises(ConfigError, match="compiles a function or a module"):
        foregrad.compile(3)


def test_a_compiler_that_raises_in_the_backward_leaves_the_tensors_as_they_were():
    def compiler(graph, inputs):
        if any(node.name.startswith("tangents") for node in graph.graph.nodes):
            raise ValueError("not today")
        return graph.forward

    x = torch.ones(3, requires_grad=True)
    loss = foregrad.compile(lambda x: x.sin().sum(), compiler)(x)
    with pytest.raises(CompilerError, match="not today"):
        loss.backward()
    assert x.grad is None and torch.equal(x, torch.ones(3))


def _wrong(change, phase):
    """A compiler whose graphs of a phase return something else."""

    def compiler(graph, inputs):
        run = run_graph(graph, inputs)
        if phase == "forward" and any("tangents" in node.name for node in graph.graph.nodes):
            return run
        return foregrad.make_boxed_func(lambda *args: change(run(list(args))))

    return compiler


_CHANGES = {
    "returned 1 values": lambda results: results[:1],
    "dtype torch.float64": lambda results: [r.double() for r in results],
    "shape \\(1, 3, 3\\)": lambda results: [r[None] for r in results],
    "strides \\(1, 3\\)": lambda results: [r.t().contiguous().t() for r in results],
}


@pytest.mark.parametrize("said", _CHANGES)
def test_a_compiler_that_returns_something_else_is_found_out(said):
    """Nothing was written by then; with `fallback="eager"` the graph runs as it is, and the user is told."""

    def program(x, count):
        count += 1
        return (x * 2).sin()

    expected = torch.ones(3, 3, requires_grad=True)
    program(expected, torch.zeros(3, 3)).sum().backward()
    x, count = torch.ones(3, 3, requires_grad=True), torch.zeros(3, 3)
    with pytest.raises(CompilerError, match=said):
        foregrad.compile(program, _wrong(_CHANGES[said], "forward"))(x, count)
    assert not count.any() and x.grad is None and count._version == 0
    compiled = foregrad.compile(program, _wrong(_CHANGES[said], "forward"), fallback="eager")
    with pytest.warns(EagerFallbackWarning, match=said):
        loss = compiled(x, count).sum()
    loss.backward()
    compiled(x, count)  # as it is from now on
    assert torch.equal(x.grad, expected.grad) and (count == 2).all()


def test_a_backward_that_cannot_be_compiled_runs_as_it_is():
    """Its forward has run, so that the program cannot."""

    def compiler(graph, inputs):
        if any("tangents" in node.name for node in graph.graph.nodes):
            raise ValueError("not today")
        return run_graph(graph, inputs)

    compiled = foregrad.compile(torch.sin, compiler, fallback="eager")
    x = torch.ones(2, requires_grad=True)
    loss = compiled(x).sum()
    with pytest.warns(EagerFallbackWarning, match="backward graph runs as it is, operator by operator: .*not today"):
        loss.backward()
    assert torch.equal(x.grad, x.detach().cos())
    compiled(x).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach().cos())


def test_a_graph_that_draws_is_not_run_twice():
    def drops(results):
        return results[:1]

    compiled = foregrad.compile(torch.nn.functional.dropout, _wrong(drops, "forward"), fallback="eager")
    with pytest.raises(CompilerError, match="returned 1 values"):
        compiled(torch.ones(3, requires_grad=True))


def test_a_compiler_sees_what_each_input_and_output_is():
    seen = []

    def compiler(graph, inputs):
        seen.append(graph.meta["slots"])
        return graph.forward

    model = nn.Linear(2, 1)
    foregrad.compile(model, compiler)(torch.ones(1, 2)).sum().backward()
    assert [str(slot) for slot in seen[0].inputs] == ["parameter weight", "parameter bias", "args[0]"]
    assert str(seen[0].outputs[0]) == "output 0"
    assert [str(slot) for slot in seen[1].outputs] == [f"gradient of {slot}" for slot in seen[0].inputs]


def test_decompositions_by_name():
    silu = foregrad.compile(torch.nn.functional.silu, "eager", decompositions="core_aten")
    x = torch.linspace(-2, 2, 5, requires_grad=True)
    assert torch.allclose(silu(x), torch.nn.functional.silu(x))
    assert "aten.silu" not in silu.specializations[0].forward_graph.code
    with pytest.raises(ConfigError, match="'core_aten' or 'inductor', or a table, not 'core'"):
        foregrad.compile(torch.sin, decompositions="core")


def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_decomposition_that_gives_its_backward_something_else_is_not_used():
    """Torch's table gives the backward of flash attention the attention itself in place of a sum for each row."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 8, 4, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
    compiled = foregrad.compile(attention, "eager", decompositions="core_aten")
    found = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))
    assert "flash_attention" not in compiled.specializations[-1].forward_graph.code
