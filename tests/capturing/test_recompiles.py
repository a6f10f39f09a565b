"""Why was it compiled again? Each kind of guard says what has changed, in the user's words (F-2)."""

import ast
import dataclasses
import logging
import types
import warnings

import pytest
import torch
from torch import nn

import foregrad
from foregrad.capturing.explain import GuardText
from foregrad.errors import EagerFallbackWarning
from helpers import grab, leaf, nop, plain

FACTOR = 2
NUMBERS = [1, 2]
TABLE = {"k": 1}


class Thing:
    pass


THING = Thing()
THING.n, THING.inner = 1, Thing()
THING.inner.text = "a"


@dataclasses.dataclass
class Box:
    tensor: torch.Tensor
    n: int


def double(x):
    return x * 2


def reasons(program, *calls, **options):
    """Why the program was compiled after its first call; a call is a tuple of arguments, or a function."""
    compiled, _ = grab(program, **options)
    for call in calls:
        call(compiled) if callable(call) else compiled(*call)
    assert len(compiled.recompiles) == len(compiled.specializations) - 1
    assert [recompile.program for recompile in compiled.recompiles] == [*range(1, len(compiled.specializations))]
    return [str(recompile.changes[0]) for recompile in compiled.recompiles]


def under(mode, *args):
    def call(compiled):
        with mode:
            compiled(*args)

    return call


TENSORS = {
    "size": (plain(2, 8), plain(2, 16), "args[0]: size of dimension 1 was 8, is 16"),
    "stride": (plain(2, 8), plain(8, 2).T, "args[0]: stride of dimension 0 was 8, is 1"),
    "rank": (plain(2), plain(2, 1), "args[0]: number of dimensions was 1, is 2"),
    "dtype": (plain(2), plain(2).double(), "args[0]: dtype was torch.float32, is torch.float64"),
    "device": (
        plain(2),
        torch.ones(2, device="meta"),
        "args[0]: device was device(type='cpu'), is device(type='meta')",
    ),
    "requires grad": (plain(2), leaf(2), "args[0]: requires_grad was False, is True"),
    "class": (plain(2), nn.Parameter(plain(2), False), "args[0]: type was Tensor, is Parameter"),
    "conj bit": (
        plain(2).to(torch.complex64),
        plain(2).to(torch.complex64).conj(),
        "args[0]: conj bit was False, is True",
    ),
    "leaf": (leaf(2), leaf(2) * 1, "args[0].is_leaf was True, is False"),
    "view": (plain(2), plain(4)[:2], "args[0]._is_view() was False, is True"),
    "offset": (plain(4)[:2], plain(4)[2:], "args[0].storage_offset() was 0, is 2"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors(kind):
    before, now, expected = TENSORS[kind]
    assert reasons(double, (before,), (now,)) == [expected]


def test_modes_and_settings(monkeypatch):
    x = plain(2)
    assert reasons(double, (x,), under(torch.no_grad(), x)) == ["grad mode was True, is False"]
    assert reasons(double, (x,), under(torch.inference_mode(), x))[0].endswith("mode was True, is False")
    assert reasons(double, (x,), under(torch.autocast("cpu"), x)) == ["autocast on cpu was False, is True"]
    assert reasons(double, (x,), under(torch.device("meta"), x)) == ["the number of function modes was 0, is 1"]

    def with_doubles(compiled):
        torch.set_default_dtype(torch.float64)
        try:
            compiled(x)
        finally:
            torch.set_default_dtype(torch.float32)

    assert reasons(double, (x,), with_doubles) == ["the default dtype was torch.float32, is torch.float64"]

    def deterministic(compiled):
        torch.use_deterministic_algorithms(True)
        try:
            compiled(x)
        finally:
            torch.use_deterministic_algorithms(False)

    assert reasons(double, (x,), deterministic) == ["deterministic algorithms was False, is True"]

    def without_math(compiled):
        torch.backends.cuda.enable_math_sdp(False)
        try:
            compiled(plain(1, 1, 2, 2))
        finally:
            torch.backends.cuda.enable_math_sdp(True)

    attention = lambda q: nn.functional.scaled_dot_product_attention(q, q, q)  # noqa: E731
    [reason] = reasons(attention, (plain(1, 1, 2, 2),), without_math)
    assert reason.startswith("the attention settings was (True, ")


def test_arguments_of_python():
    scaled = lambda x, *, scale=1: x * scale  # noqa: E731
    by = lambda scale: lambda compiled: compiled(plain(2), scale=scale)  # noqa: E731
    assert reasons(scaled, by(2), by(3)) == ["kwargs['scale'] was 2, is 3"]
    assert reasons(scaled, by(2), by(2.5)) == ["type(kwargs['scale']) was int, is float"]
    assert reasons(scaled, by(0.0), by(-0.0)) == ["kwargs['scale'] was 0.0, is -0.0"]
    assert reasons(scaled, by(2), (plain(2),)) == ["the keys of kwargs was ('scale',), is ()"]
    count = lambda x, items: x * len(items)  # noqa: E731
    assert reasons(count, (plain(2), [1, 2]), (plain(2), [1])) == ["len(args[1]) was 2, is 1"]
    assert reasons(count, (plain(2), [1, 2]), (plain(2), (1, 2))) == ["type(args[1]) was list, is tuple"]
    assert reasons(count, (plain(2), [1, [2]]), (plain(2), [1, [3]])) == ["args[1][1][0] was 2, is 3"]
    assert reasons(count, (plain(2), {"a": 1}), (plain(2), {"b": 1})) == ["the keys of args[1] was ('a',), is ('b',)"]
    called = lambda f, x: f(x)  # noqa: E731
    [reason] = reasons(called, (torch.sin, plain(2)), (torch.cos, plain(2)))
    assert reason.startswith("args[0] was another object, is a builtin")


@pytest.mark.parametrize("kind", [Box, lambda tensor, n: types.SimpleNamespace(tensor=tensor, n=n)])
def test_arguments_that_are_objects(kind):
    program = lambda box: box.tensor * box.n  # noqa: E731
    assert reasons(program, (kind(plain(2), 1),), (kind(plain(2), 2),)) == ["args[0].n was 1, is 2"]
    [reason] = reasons(program, (kind(plain(2), 1),), (kind(plain(3), 1),))
    assert reason == "args[0].tensor: size of dimension 0 was 2, is 3"


def test_tensors_that_are_one_or_share_memory():
    added = lambda x, y: x + y  # noqa: E731
    x, y = plain(2), plain(2)
    assert reasons(added, (x, x), (x, y)) == ["args[1] was the same as args[0], is another"]

    def written(x, y):
        x.add_(1)
        return x * y

    def parts(offset, *storages):
        return [torch.empty(0).set_(storage, offset, (2,), (1,)) for storage in storages]

    one, other = (plain(4).untyped_storage() for _ in range(2))
    [reason] = reasons(written, (x, y), parts(0, one, one))
    assert reason == "args[1], its memory, was its own, is shared with another input"
    [reason] = reasons(written, parts(2, one, other), parts(2, one, one))
    assert reason == "which of args[0], args[1] share memory was (0, 1), is (0, 0)"


def test_attributes_and_gradients_of_tensors():
    tagged = plain(2)
    tagged.tag = 1
    assert reasons(double, (plain(2),), (tagged,)) == ["args[0], its attributes, was none, is ['tag']"]
    weight = leaf(2)

    def with_gradient(compiled):
        weight.grad = plain(2)
        compiled(plain(2))

    program = lambda x: x if weight.grad is None else x * weight.grad  # noqa: E731
    [reason] = reasons(program, (plain(2),), with_gradient)
    assert reason.endswith(".grad was None, is a tensor")


def _module():
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Sequential(nn.ReLU()))


CHANGES = {
    "training": (lambda m: m[1].eval(), "self.1.training was True, is False"),
    "attribute": (lambda m: setattr(m[1], "p", 0.7), "self.1.p was 0.5, is 0.7"),
    "new attribute": (lambda m: setattr(m[1], "note", "a"), "self.1.note was absent, is 'a'"),
    "own attribute": (lambda m: setattr(m, "note", "a"), "self.note was absent, is 'a'"),
    "parameter": (lambda m: m[0].weight.requires_grad_(False), "parameter 0.weight: requires_grad was True, is False"),
    "no parameter": (lambda m: setattr(m[0], "bias", None), "self.0.bias was a tensor, is None"),
    "buffer": (lambda m: m[0].register_buffer("b", plain(1)), "self.0.b was absent, is a tensor"),
    "child": (lambda m: m.append(nn.ReLU()), "self.3 was absent, is a ReLU"),
    "another child": (
        lambda m: m[2].__setitem__(0, nn.Tanh()),
        "a ReLU that the program depends on was there, is gone",
    ),
    "hook": (
        lambda m: m[0].register_forward_hook(lambda m, a, o: o * 2),
        "self.0, its hooks, was 0 functions, is 1 functions",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_modules(kind):
    change, expected = CHANGES[kind]

    def changed(compiled):
        change(compiled)
        compiled(plain(1, 2))

    assert reasons(_module(), (plain(1, 2),), changed) == [expected]


def test_many_parameters_have_their_names():
    module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(12)])

    def changed(compiled):
        compiled[7].weight = nn.Parameter(plain(2, 2).T)
        compiled(plain(1, 2))

    assert reasons(module, (plain(1, 2),), changed) == ["parameter 7.weight: stride of dimension 0 was 2, is 1"]


def test_what_a_program_finds_by_itself(monkeypatch):
    closed = [3]
    number = 5

    def program(x, k=1):
        return x * FACTOR * NUMBERS[0] * TABLE["k"] * THING.n * len(THING.inner.text) * closed[0] * number * k

    def other_number():
        nonlocal number
        number = 6

    def after(change):
        def call(compiled):
            change()
            compiled(plain(2))

        return call

    found = reasons(
        program,
        (plain(2),),
        after(lambda: monkeypatch.setitem(globals(), "FACTOR", 3)),
        after(lambda: NUMBERS.__setitem__(0, 7)),
        after(lambda: monkeypatch.setitem(TABLE, "k", 2)),
        after(lambda: monkeypatch.setattr(THING, "n", 4)),
        after(lambda: monkeypatch.setattr(THING.inner, "text", "bb")),
        after(lambda: closed.append(4)),
        after(other_number),
        after(lambda: setattr(program, "__defaults__", (2,))),
    )
    NUMBERS[0] = 1
    assert found == [
        f"global {__name__}.FACTOR was 2, is 3",
        "global NUMBERS was [1, 2], is [7, 2]",
        "global TABLE was {'k': 1}, is {'k': 2}",
        "global THING.n was 1, is 4",
        "global THING.inner.text was 'a', is 'bb'",
        "closed (closure of program) was [3], is [3, 4]",
        "number (closure of program) was 5, is 6",
        "program.__defaults__ was (1,), is (2,)",
    ]


def test_relations_between_sizes():
    program = lambda x, y: x + y  # noqa: E731
    calls = [(plain(4, 3), plain(4, 3)), (plain(5, 3), plain(5, 3)), (plain(5, 3), plain(3))]
    [reason] = reasons(program, *calls, dynamic=True)
    assert reason == "args[1]: number of dimensions was 2, is 1"
    halves = lambda x: x * 2 if x.shape[0] > 3 else x  # noqa: E731
    [reason] = reasons(halves, (plain(4),), (plain(6),), (plain(2),), dynamic=True)
    assert reason == "args[0], as to sizes, was such that 4 <= args[0].size()[0], is (2,)"


def test_each_earlier_program_has_its_reason():
    compiled = foregrad.aot_function(double, nop)
    for x in (plain(2), plain(3), plain(3).double()):
        compiled(x)
    last = compiled.recompiles[-1]
    assert [str(change) for change in last.changes] == [
        "args[0]: dtype was torch.float32, is torch.float64",
        "args[0]: dtype was torch.float32, is torch.float64",
    ]
    assert str(last) == "args[0]: dtype was torch.float32, is torch.float64"
    with pytest.raises(dataclasses.FrozenInstanceError):
        last.program = 3
    compiled(plain(4))
    assert "; for a program before that, args[0]: size of dimension 0 was 3, is 4" in str(compiled.recompiles[-1])
    compiled(plain(2)), compiled(plain(3))
    assert len(compiled.recompiles) == 3


@pytest.mark.usefixtures("reads_refused")
def test_a_refused_call_is_no_recompile():
    compiled = foregrad.aot_function(lambda x, flag: x * x.sum().item() if flag else x, nop)
    compiled(plain(2), False)
    with pytest.raises(foregrad.errors.DataDependentError):
        compiled(plain(2), True)
    assert compiled.recompiles == []


def test_the_warning_at_the_limit_names_what_keeps_changing():
    with foregrad.config.patch(max_specializations=3):
        module = foregrad.aot_module(nn.ReLU(), nop)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for n in range(2, 7):
                module(plain(n))
    assert len(seen) == 1 and seen[0].filename == __file__ and seen[0].category is EagerFallbackWarning
    assert "keeps changing is args[0]: size of dimension 0 (3 times): at last it was 4, and is 5." in str(
        seen[0].message
    )
    assert len(module.recompiles) == 2


def test_torch_logs_recompiles(caplog):
    logger = logging.getLogger("torch.foregrad.__recompiles")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        with caplog.at_level(logging.DEBUG, logger=logger.name):
            reasons(double, (plain(2),), (plain(3),))
    finally:
        logger.setLevel(before)
    assert "Recompiling double\n  args[0]: size of dimension 0 was 2, is 3" in caplog.text


def test_every_guard_in_the_text_can_be_asked():
    """Whatever a guard looks like, it is told from the text of the call: none falls back to 'something changed'."""
    compiled, _ = grab(_module())
    compiled(plain(1, 2))
    source = compiled.specializations[0].source
    guards = [line.strip() for line in source.splitlines() if line.endswith("return MISS")]
    tree = GuardText(source, {}, {}, {})._tree()
    asked = [node for node in ast.walk(tree) if isinstance(node, ast.Return) and ast.unparse(node) == "return MISS"]
    assert len(asked) == len(guards) > 5


def test_a_guard_that_raises_is_a_reason():
    """A place that is no longer there."""
    holder = Thing()
    holder.weight = plain(2)

    def gone(compiled):
        del holder.weight
        with pytest.raises(AttributeError), warnings.catch_warnings():
            compiled(plain(2))

    assert reasons(lambda x: x * holder.weight, (plain(2),), gone) == []


def test_attributes_that_the_program_does_not_read_may_change():
    """After one recompilation it is known which code runs: a count of steps is none of its business."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(2, 2), 2
            self.steps, self.losses = 0, []

        def forward(self, x):
            return self.layer(x) * self.scale

        def step(self, x):
            loss = self(x).sum()
            self.steps += 1
            self.losses.append(loss.item())
            return loss

    module = Counting()
    compiled = foregrad.aot_module(module, nop)
    for _ in range(5):
        compiled.step(plain(1, 2)).backward()
    assert len(compiled.specializations) == 2 and module.steps == 5
    compiled.scale = 3
    assert torch.equal(compiled(plain(1, 2)), module(plain(1, 2)))
    assert str(compiled.recompiles[-1].changes[0]) == "self.scale was 2, is 3"


class Matched(nn.Module):
    __match_args__ = ("n",)
    n = 1

    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, x):
        return self.read(self, x)


def by_name(module, x):
    match module:
        case Matched(n=n):
            return x * n


def by_place(module, x):
    match module:
        case Matched(n):
            return x * n


@pytest.mark.parametrize("read", [by_name, by_place])
def test_attributes_that_a_pattern_reads_are_compared(read):
    module = Matched(read)
    compiled = foregrad.aot_module(module, nop)
    for n in range(4):
        module.n = n
        assert torch.equal(compiled(plain(2)), plain(2) * n)
