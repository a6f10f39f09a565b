"""What is known of tensors with symbols in their sizes is what FakeTensorMode says of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foregrad
from foregrad._torch import FakeTensor
from foregrad.abstract.engine import Engine
from foregrad.abstract.symbolic_engine import SymbolicEngine
from foregrad.abstract.symbolic_results import written
from foregrad.ops import op_info
from helpers import leaf, nop


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.bare = nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False)
        self.up, self.down, self.qkv = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 24)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        q, k, v = self.qkv(self.bare(x)).view(-1, 2, 12).transpose(0, 1).chunk(3, -1)
        x = x + ((q @ k.mT).softmax(-1) @ v).transpose(0, 1).reshape(-1, 8)
        return torch.where(x > 0, x, 0.5 * x.exp()) / x.square().mean(-1, keepdim=True).add(1).sqrt()


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        rows = x[x[:, 0] > 0]
        for block in self.blocks:
            rows = block(rows)
        return rows.log_softmax(-1)[:, 1:4].sum()


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(10, 8), nn.Linear(8, 5)

    def forward(self, tokens):
        seen = tokens[tokens != 3]
        hidden = self.table(seen).tanh()
        mixed = (hidden + hidden.mean(0)) * hidden.new_zeros(hidden.shape[0], 1).add_(2).unsqueeze(0).expand(3, -1, 8)
        return F.cross_entropy(self.out(mixed[0]), seen % 5) + mixed.double().sum()


def shapes(x, y):
    z = x.clone()
    z.mul_(y.t()).clamp_(-1, 1)
    return (z.t() @ y.t()).relu().sum(0), torch.cat([x, x]).detach(), torch.ops.aten.alias(z.permute(1, 0)).select(0, 0)


PROGRAMS = {
    "rows": (Rows, lambda n: (leaf(6, 8).roll(n, 1) - n / 10,), {}),
    "tokens": (Tokens, lambda n: (torch.arange(9) * (n + 1) % 10,), {}),
    "shapes": (lambda: shapes, lambda n: (leaf(4 + n, 3), leaf(3, 4 + n)), {"dynamic": True}),
}


class Differs(Exception):
    pass


def described(value, tensors):
    """Size, strides and the rest in symbols, and what it shares its memory with."""
    if isinstance(value, (list, tuple)):
        return [described(item, tensors) for item in value]
    if not isinstance(value, FakeTensor):
        return value
    memory = value.untyped_storage()._cdata
    return written(value), [i for i, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == memory]


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_known_is_what_shape_inference_says(name, monkeypatch):
    make, arguments, options = PROGRAMS[name]
    answer, checked = SymbolicEngine._answer, []

    def compared(self, op, types, args, kwargs):
        found = answer(self, op, types, args, kwargs)
        if not op_info(op).written and not op_info(op).traits & {"random"}:
            tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, FakeTensor)]
            said = self.infer(op, types, args, kwargs)
            said = self._witnessed(op, args, kwargs, said)
            if described(found, tensors) != described(said, tensors):
                raise Differs(f"{op}: {described(found, tensors)}, and not {described(said, tensors)}")
            checked.append(op)
        return found

    monkeypatch.setattr(SymbolicEngine, "_answer", compared)
    program = make()
    compile = foregrad.aot_module if isinstance(program, nn.Module) else foregrad.aot_function
    results = compile(program, nop, **options)(*arguments(0))
    sum(r.sum() for r in (results if isinstance(results, tuple) else [results]) if r.requires_grad).backward()
    assert len(checked) > 10


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_program_serves_all_sizes(name):
    make, arguments, options = PROGRAMS[name]
    program = make()
    compile = foregrad.aot_module if isinstance(program, nn.Module) else foregrad.aot_function
    compiled = compile(program, nop, **options)
    for n in range(4):
        results, expected = (f(*arguments(n)) for f in (compiled, program))
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
    assert len(compiled.specializations) == 1


def test_layers_that_are_alike_are_worked_out_once(monkeypatch):
    asked, infer = [], Engine.infer

    def counted(self, op, *given):
        if isinstance(self, SymbolicEngine):
            asked.append(op)
        return infer(self, op, *given)

    monkeypatch.setattr(Engine, "infer", counted)
    counts = []
    for depth in (2, 6):
        model = Rows()
        model.blocks = nn.ModuleList(Block() for _ in range(depth))
        foregrad.aot_module(model, nop)(leaf(6, 8)).backward()
        counts.append(len(asked))
        asked.clear()
    assert counts[0] == counts[1]


def test_a_view_of_another_dtype_is_one_each_time():
    """`view_as_real` looks at memory of another dtype: what was said of it is not said of its argument's."""

    def program(x):
        z = torch.complex(x, x.sin())
        return torch.view_as_real(z).sum() + torch.view_as_real(z).cos().sum(), z.abs()

    compiled = foregrad.aot_function(program, nop, dynamic=True)
    for n in (3, 4):
        x, y = (torch.linspace(0.1, 1, n).requires_grad_() for _ in range(2))
        for run, given in ((program, x), (compiled, y)):
            total, size = run(given)
            (total + size.sum()).backward()
        assert torch.equal(x.grad, y.grad)
    assert len(compiled.specializations) == 1
