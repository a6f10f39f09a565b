"""Behind `torch.compile`: Dynamo in front, Foregrad in the middle."""

import contextlib
import functools
import importlib
import pathlib
import tomllib
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import foregrad
from dynamo_comparison import difference
from foregrad._torch import transforms_ended
from foregrad.errors import ConfigError, EagerFallbackWarning
from foregrad.record.fakify import Object

# Dynamo itself asks whether tensors between two graphs have gradients.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def seen(program, args, seed=0):
    """All that a step shows: results, gradients, and the arguments afterwards."""
    args = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
    torch.manual_seed(seed)
    result = program(*args)
    results = result if isinstance(result, tuple | list) else [result]
    loss = sum((r * r).sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    return [*results, *(a.grad for a in args if isinstance(a, torch.Tensor) and a.is_leaf), *args]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b) and a.stride() == b.stride()
    return a == b


def agree(program, compiled, *calls):
    for args in calls:
        expected, found = seen(program, args), seen(compiled, args)
        assert len(expected) == len(found) and all(map(same, expected, found)), args


def behind(program, compiler="eager", dynamic=None, **settings):
    return torch.compile(program, backend=foregrad.backend(compiler, **settings), dynamic=dynamic)


def leaf(*size):
    return torch.randn(*size, requires_grad=True)


# ---------------------------------------------------------------------------------------------------------------------
# Sizes and numbers.
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_a_gradient_follows_the_size_of_the_batch(dynamic):
    def program(x, w):
        return (x + w).sum()

    w = leaf(3)
    agree(program, behind(program, dynamic=dynamic), *([torch.randn(n, 3), w] for n in (2, 5, 7, 1)))


def test_sizes_ints_and_floats_that_change():
    def program(x, n, p):
        return x.view(n, -1).sum(0) * x.shape[0] * p + n

    calls = [(leaf(12), 2, 0.5), (leaf(12), 3, 0.7), (leaf(24), 4, 0.7), (leaf(36), 6, 0.1)]
    for dynamic in (None, True):
        agree(program, behind(program, dynamic=dynamic), *calls)


def test_a_size_that_is_marked_is_one_program_for_all():
    counted = []

    def compiler(graph, examples):
        counted.append(graph)
        return graph.forward

    compiled = behind(lambda x: x.sin().mean(0), compiler)
    for n in (4, 5, 6):
        x = torch.randn(n, 3)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.allclose(compiled(x), x.sin().mean(0))
    assert len(counted) == 1


def test_views_of_one_memory_that_is_written_have_sizes_that_dynamo_compares():
    def program(whole, part):
        part.mul_(2)
        return whole.sum(), part.sin()

    compiled = behind(program, dynamic=True)
    for n in (4, 5, 6):
        expected, given = torch.arange(2.0 * n), torch.arange(2.0 * n)
        assert all(map(torch.equal, program(expected, expected[n:]), compiled(given, given[n:])))
        assert torch.equal(expected, given)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints, whose random numbers are eager's.
def dropped(x):
    return nn.functional.dropout(x.sin(), 0.5).cos()


def keep_products(ctx, op, *args, **kwargs):
    is_product = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_checkpoint_draws_the_same_mask_again(reentrant, dynamic):
    def program(x):
        return checkpoint(dropped, checkpoint(dropped, x, use_reentrant=reentrant), use_reentrant=reentrant) * 2

    agree(program, behind(program, dynamic=dynamic), [leaf(1000)], [leaf(1001)])


@pytest.mark.filterwarnings("ignore:.*context_fn:UserWarning")
def test_a_selective_checkpoint_draws_the_same_mask_again():
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)

    def program(x, w):
        return checkpoint(lambda x: dropped((x @ w).sin()), x, use_reentrant=False, context_fn=contexts) * 2

    agree(program, behind(program), [leaf(20, 20), leaf(20, 20)])


def test_a_buffer_that_is_written_in_a_checkpoint():
    """It is no argument of the user's, which a checkpoint would not run on again once it is written."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return checkpoint(lambda x: checkpoint(self.norm, x.sin(), use_reentrant=False), x, use_reentrant=False)

    net, other = Net(), Net()
    compiled = behind(other)
    for n in (4, 4, 6):
        x = torch.randn(n, 4)
        for expected, found in zip(seen(net, [x]), seen(compiled, [x]), strict=True):
            assert torch.equal(expected, found) if isinstance(expected, torch.Tensor) else expected == found
    states = [*net.state_dict().values(), net.norm.weight.grad], [*other.state_dict().values(), other.norm.weight.grad]
    assert all(map(torch.equal, *states)) and int(net.norm.num_batches_tracked) > 3


# ---------------------------------------------------------------------------------------------------------------------
# Whole models, and what Dynamo makes of programs.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.tied = self.fc

    def forward(self, x):
        x = self.norm(self.fc(x)).relu()
        torch._dynamo.graph_break()
        return self.tied(nn.functional.dropout(x, 0.2)).sum(1)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_a_model_trains_as_in_eager(dynamic):
    model, other = Model(), Model()
    compiled = behind(other, dynamic=dynamic)
    for net in (model, other):
        net.steps = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step, n in enumerate((4, 4, 6)):
        for net, program in ((model, model), (other, compiled)):
            torch.manual_seed(step)
            net.steps.zero_grad()
            program(torch.randn(n, 8)).square().sum().backward()
            net.steps.step()
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    model.eval(), other.eval()
    assert torch.equal(*(torch.manual_seed(0) and program(torch.ones(3, 8)) for program in (model, compiled)))


def test_gradients_of_gradients():
    """Torch's own layer refuses them."""

    def program(x):
        return (x**3).sin().sum()

    x = leaf(5)
    found = []
    for f in (program, behind(program)):
        (first,) = torch.autograd.grad(f(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        found.append((first, second, *torch.autograd.grad(second.sum(), x)))
    assert all(map(torch.allclose, *found))


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_backward_of_some_results_reads_what_the_partition_has_saved(dynamic):
    """The cut saves what only the backward computes of the forward (a cosine), and not what leads there."""

    def program(x):
        return x.mul_(2), x.sin().exp()

    compiled = behind(program, partition="min_cut", dynamic=dynamic)
    for n in (4, 5, 6):
        for i in (0, 1):
            x, y = leaf(n), None
            y = x.detach().clone().requires_grad_()
            program(x * 2)[i].square().sum().backward()
            compiled(y * 2)[i].square().sum().backward()
            assert torch.allclose(x.grad, y.grad)


def test_a_backward_of_some_results_is_given_all_sizes():
    """A compiler finds in them what symbols stand for, also where the graph reads `n + 1` only."""
    given = []

    def compiler(graph, examples):
        given.append([str(n.meta["val"]) for n in graph.graph.nodes if n.op == "placeholder"])
        return foregrad.backends.run_graph(graph, examples)

    def program(x, n):
        return (x * (n + 1)).sum(), x * 2

    x = leaf(4)
    behind(program, compiler, dynamic=True)(x, 3)[0].backward()
    symbols = {name for name in given[0] if name[0] == "s"}
    assert len(symbols) == 2 and all(symbols <= set(names) for names in given)
    assert torch.equal(x.grad, torch.full((4,), 4.0))


def test_inductor_and_options_of_torch_compile():
    def program(x, w):
        return nn.functional.layer_norm(x @ w, (4,)).relu().sum(1)

    compiled = torch.compile(
        program, backend=foregrad.dynamo.backends.foregrad, options={"memory_budget": 0.5, "max_autotune": False}
    )
    x, w = leaf(3, 4), leaf(4, 4)
    for n in (3, 5, 6):
        x = leaf(n, 4)
        for e, f in zip(seen(program, [x, w]), seen(compiled, [x, w]), strict=True):
            assert torch.allclose(e, f, atol=1e-5)


def test_compilers_know_what_stays_where_it_is():
    slots = []

    def compiler(graph, examples):
        slots.append(graph.meta["slots"].inputs)
        return graph.forward

    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    behind(Layer(2, 2), compiler)(torch.ones(1, 2))
    assert {slot.path: slot.stays for slot in slots[0]} == {"self.weight": True, "self.bias": True, "x": False}


# ---------------------------------------------------------------------------------------------------------------------
# What Dynamo does not compare.
def writes(x, y):
    x.add_(y.sum())
    y.mul_(2)
    return x * y


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_a_call_whose_inputs_overlap_otherwise_is_run_as_it_is_written(first):
    """Torch itself is silently wrong here."""
    ways = [
        lambda m: (m[:4].clone(), m[4:8].clone()),
        lambda m: (m[:4], m[2:6]),
        lambda m: (m[2:6], m[:4]),
        lambda m: (m[:4], m[4:8]),
    ]
    compiled = behind(writes, dynamic=False)
    for way in [ways[first], *ways]:
        expected, given = torch.arange(10.0), torch.arange(10.0)
        assert torch.equal(writes(*way(expected)), compiled(*way(given)))
        assert torch.equal(expected, given)


def test_the_offset_of_an_input_is_not_written_into_a_graph():
    def program(x):
        return x.as_strided((2, 2), (1, 2)) * 3

    compiled = behind(program, dynamic=False)
    for start in (0, 3, 5):
        x = torch.arange(20.0)[start : start + 6]
        assert torch.equal(compiled(x), program(x))


def test_dynamo_does_not_trace_a_backward():
    def program(x, w):
        loss = (x @ w).square().mean()
        return loss.detach(), torch.autograd.grad(loss, w)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo breaks the graph, and says so
        agree(program, behind(program), [torch.randn(2, 3), leaf(3, 1)])
    traced = [str(key) for key in torch._dynamo.convert_frame.input_codes.seen]
    assert not any("foregrad program" in name or "/src/foregrad/" in name for name in traced)


def test_what_cannot_be_compiled_for_all_sizes_is_compiled_for_each():
    def program(x):
        return nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear")

    agree(program, behind(program, dynamic=True), *([leaf(1, 2, n, n)] for n in (4, 5)))


def test_floats_inside_of_a_checkpoint():
    def program(x, p):
        return checkpoint(lambda x: nn.functional.dropout(x, p) * p, x, use_reentrant=False).sin()

    agree(program, behind(program, dynamic=True), *([leaf(100), p] for p in (0.5, 0.25)))


def test_compiled_optimizers():
    """Dynamo hands over lists of its own kind, and tensors that the graph holds."""

    def trained(compiles):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
        step = torch.compile(optimizer.step, backend=foregrad.backend("eager")) if compiles else optimizer.step
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sin().sum().backward()
            step()
        return model.weight

    assert torch.allclose(trained(False), trained(True), atol=1e-5)  # Dynamo has it compute in another order


def test_what_foregrad_has_compiled_is_left_alone():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = foregrad.compile(nn.Linear(3, 3), "eager")
            self.function = foregrad.compile(torch.sin, "eager")

        def forward(self, x):
            return self.function(self.inner(x.cos()) * 2)

    outer = Outer()
    agree(outer, behind(outer), [leaf(2, 3)])
    assert len(outer.inner.specializations) == 1


def test_inductor_is_given_numbers_for_floats_that_only_a_checkpoint_reads():
    given = []

    def compiler(graph, examples):
        given.extend(examples)
        return foregrad.backends.run_graph(graph, examples)

    def program(x, p):
        return checkpoint(lambda x: x.sin() * p, x, use_reentrant=False)

    torch.compile(program, backend=foregrad.backend(compiler), dynamic=True)(torch.ones(3), 0.5)
    assert any(isinstance(example, Object) for example in given)  # an input that no graph reads
    torch.compiler.reset()
    agree(program, behind(program, "inductor", dynamic=True), [torch.ones(3), 0.5])


@contextlib.contextmanager
def one_process(path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_each_bucket_of_a_parallel_module_is_a_program(tmp_path):
    compiled = []

    def compiler(graph, examples):
        compiled.append(graph)
        return foregrad.backends.run_graph(graph, examples)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)), nn.Dropout(0.2))

        def forward(self, x):
            return self.layers(x)

    with one_process(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net, other = Net(), Net()
        parallel = torch.compile(
            nn.parallel.DistributedDataParallel(other, bucket_cap_mb=1.2), backend=foregrad.backend(compiler)
        )
        for n in (2, 3):
            x = torch.randn(n, 600)
            assert all(map(same, seen(net, [x]), seen(parallel, [x])))
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), other.parameters(), strict=True))
    assert len(compiled) > 4  # Dynamo's DDPOptimizer has cut the forward


# ---------------------------------------------------------------------------------------------------------------------
# Bad input.
def test_a_size_without_a_number_is_refused_by_name():
    x = torch.ones(4, 3)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    with pytest.raises(Exception, match=r"UnsupportedError: an input has a size without a number .* mark_dynamic"):
        behind(lambda x: x.sin())(x)


def test_a_refusal_names_the_line_of_the_user():
    def program(x):
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,))

    with pytest.raises(Exception, match=r"cond, at .*test_dynamo.py:\d+: return torch.cond"):
        behind(program)(torch.ones(3))


def test_an_error_ends_the_transforms_that_a_graph_has_begun():
    with contextlib.suppress(ValueError), transforms_ended():
        torch._C._functorch._grad_increment_nesting()
        torch._C._functorch._vmap_increment_nesting(3, "error")
        torch._C._functorch._jvp_increment_nesting()
        raise ValueError
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def test_compiled_autograd_is_refused_by_name():
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(Exception, match="compiled autograd captures"),
    ):
        behind(lambda x: x.sin().sum())(leaf(3))


def test_a_refusal_comes_by_name_or_falls_back():
    def program(x):
        return x.nonzero()

    x = torch.tensor([0.0, 1.0, 2.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        with pytest.raises(Exception, match=r"nonzero(.|\n)*capture_dynamic_output_shape_ops off"):
            behind(program)(x)
        torch.compiler.reset()
        with pytest.warns(EagerFallbackWarning, match="nonzero"):
            assert torch.equal(behind(program, fallback="eager")(x), program(x))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"compiler": "inducto"}, "There is no backend 'inducto'. Did you mean 'inductor'?"),
        ({"compiler": "eager", "partition": "mincut"}, "partition must be"),
        ({"options": {"max_autotun": True}}, "Did you mean 'max_autotune'?"),
    ],
    ids=str,
)
def test_a_mistake_is_said_at_once(given, text):
    with pytest.raises(ConfigError) as refused:
        foregrad.backend(**given)
    assert text in str(refused.value)


def test_a_machine_without_a_compiler_of_its_own():
    """Inductor's error is one of a compiler, which `fallback` is for."""

    def program(x):
        return x.sin() * 2

    config = importlib.import_module("torch._inductor.config")
    missing = config.patch({"cpp.cxx": ("/nowhere/g++",), "fx_graph_cache": False})
    x = leaf(3)
    with missing, pytest.raises(Exception, match=r"CompilerError: The compiler of the forward .*No working C\+\+"):
        behind(program, "inductor")(x)
    torch.compiler.reset()
    with missing, pytest.warns(EagerFallbackWarning, match=r"No working C\+\+"):
        agree(program, behind(program, "inductor", fallback="eager"), [x])


def test_the_names_of_the_package_lead_to_backends():
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    named = project["entry-points"]["torch_dynamo_backends"]
    assert sorted(named) == ["foregrad", "foregrad_eager"]
    for name, target in named.items():
        module, _, attribute = target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        assert found.__name__ == name and found.settings.compiler == ("inductor" if name == "foregrad" else "eager")


@pytest.mark.parametrize("name", ["GRU cells", "autoencoder", "views", "object changed"])
def test_some_of_the_programs_of_the_sweep(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert difference(name, "default", "eager") == "equal"
