"""The statements that a fuzzed program is made of, as tables of templates.

A placeholder in a template is drawn anew for each statement: `{a}`, `{b}`, `{c}` are tensors that the program has,
`{r}`, `{q}` are new ones, the others are described where they are drawn (`draws.py`). Templates need not always make
sense: a statement that raises in eager is thrown away while a program is made.
"""

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Row:
    """One kind of statement.

    >>> Row("write", "{a}.mul_({f})").operator
    'mul_'

    Args:
        kind: The table that it stands in.
        template: Python with placeholders.
    """

    kind: str
    template: str

    @cached_property
    def operator(self) -> str:
        """What the statement calls, as it is counted in the summary.

        >>> Row("write", "{a}[{slice}] = {f}").operator, Row("write", "{a} += {f}").operator
        ('[] =', '+=')
        """
        bare = re.sub(r"\{\w+\}", "", self.template)
        for pattern, name in _SYNTAX:
            if re.search(pattern, bare):
                return name
        bare = bare.split("; ")[-1]
        called = re.findall(r"(?:torch\.nn\.functional\.|torch\.|\.)?(\w+)(?:\.apply)?\(", bare)
        out = "(out=)" if "out=" in bare else ""
        return (called[0] if called else bare.strip(" =.")) + out


_SYNTAX = (
    (r"^(if|for) ", "branch or loop"),
    (r" if .* else ", "if else"),
    (r"^\[.*\] =", "[] ="),
    (r"^(\[.*\])? \+= ", "+="),
    (r"^(\[.*\])? \*= ", "*="),
    (r"^ -= ", "-="),
    (r" = \[.*\]$", "[]"),
    (r" @ ", "@"),
    (r"\.data\.(\w+_)\(", "data"),
    (r"\.data = ", "data ="),
    (r" = \.data", "data"),
    (r" = \.mT", "mT"),
    (r" = \.(real|imag)", "real or imag"),
)

_VIEWS = """
{r} = {a}.view({shape})
{r} = {a}.view(-1)
{r} = {a}.reshape({shape})
{r} = {a}.view_as({a})
{r} = {a}.view({dtype})
{r} = {a}.t()
{r} = {a}.mT
{r} = {a}.transpose({d}, {e})
{r} = {a}.swapaxes({d}, {e})
{r} = {a}.permute({perm})
{r} = {a}.movedim({d}, {e})
{r} = {a}.adjoint()
{r} = {a}.select({d}, {i})
{r} = {a}[{i}]
{r} = {a}[{slice}]
{r} = {a}[{slice}]
{r} = {a}[..., {slice}]
{r} = {a}[:, {slice}]
{r} = {a}[..., None]
{r} = {a}[..., {i}]
{r} = {a}.narrow({d}, {i}, {n})
{r} = torch.narrow({a}, {d}, 0, {n})
{r} = {a}.diagonal()
{r} = {a}.diagonal({o}, {d}, {e})
{r} = {a}.unfold({d}, {n}, {n})
{r} = {a}.expand({wider})
{r} = {a}.expand_as({b})
{r} = {a}.broadcast_to({wider})
{r} = {a}.squeeze()
{r} = {a}.squeeze({d})
{r} = {a}.squeeze(({d}, {e}))
{r} = {a}.unsqueeze({d})
{r} = {a}.split({n}, {d})[{i}]
{r}, {q} = {a}.split({n}, {d})
{r} = {a}.split([{n}, {n}], {d})[{i}]
{r} = torch.chunk({a}, 2, {d})[{i}]
{r}, {q} = {a}.chunk(2, {d})
{r} = {a}.unbind({d})[{i}]
{r}, {q} = {a}.unbind({d})
{r} = {a}.tensor_split(2, {d})[{i}]
{r} = torch.hsplit({a}, 2)[{i}]
{r} = {a}.as_strided({strided})
{r} = {a}.flatten()
{r} = {a}.flatten({d}, {e})
{r} = {a}.unflatten({d}, (1, -1))
{r} = {a}.unflatten({d}, (-1, 2))
{r} = {a}.ravel()
{r} = torch.view_as_real({a})
{r} = torch.view_as_complex({a})
{r} = {a}.real
{r} = {a}.imag
{r} = {a}.conj()
{r} = {a}.contiguous()
{r} = {a}.to({a}.dtype)
{r} = torch.atleast_2d({a})
{r} = torch.ops.aten.alias({a})
"""

_DETACHED = """
{r} = {a}.detach()
{r} = {a}.detach()
{r} = {a}.data
{r} = {a}.detach().requires_grad_()
{r} = {a}.detach().clone().requires_grad_()
{a}.requires_grad_()
{a}.detach_()
{r} = {a}.clone()
"""

_WRITES = """
{a}.add_({f})
{a}.add_({b})
{a}.add_({b}, alpha={f})
{a}.sub_({b})
{a}.mul_({f})
{a}.mul_({b})
{a}.div_(2.0)
{a}.neg_()
{a}.sin_()
{a}.cos_()
{a}.tanh_()
{a}.sigmoid_()
{a}.relu_()
{a}.square_()
{a}.abs_()
{a}.clamp_(-0.5, 1.0)
{a}.clamp_min_({f})
{a}.fill_({f})
{a}.fill_({b})
{a}.zero_()
{a}.copy_({b})
{a}.masked_fill_({mask}, {f})
{a}.index_fill_({d}, {index}, {f})
{a}.index_add_({d}, {index}, {b}.index_select({d}, {index}))
{a}.index_copy_({d}, {index}, {b}.index_select({d}, {index}))
{a}.scatter_({d}, {indices}, {f})
{a}.scatter_({d}, {indices}, {b}.gather({d}, {indices}))
{a}.scatter_add_({d}, {indices}, {b}.gather({d}, {indices}))
{a}.addcmul_({b}, {c})
{a}.lerp_({b}, 0.25)
{a}.tril_()
{a}.triu_()
{a}.cumsum_({d})
{a}.fill_diagonal_({f})
{a}.addcdiv_({b}, {c}.abs() + 1)
{a}.put_({index}, {b}.take({index}))
{a}.index_put_(({index},), {b}[{index}])
{a}.index_put_(({index},), {b}[{index}], accumulate=True)
{a}.conj_physical_()
{a} += {f}
{a} += {b}
{a} *= {b}
{a} -= {f}
{a}[{i}] = {f}
{a}[{i}] = {b}
{a}[{slice}] = {f}
{a}[{slice}] = {b}
{a}[{slice}] += {b}
{a}[..., {slice}] *= {f}
{a}[{index}] = {f}
{a}[{index}] = {b}
{a}[{mask}] = {f}
torch._foreach_add_([{a}, {apart}], {f})
torch._foreach_mul_([{a}, {apart}], {f})
torch._foreach_add_([{a}, {apart}], [{a}, {apart}])
torch.nn.functional.relu({a}, inplace=True)
torch.nn.functional.silu({a}, inplace=True)
torch.nn.functional.leaky_relu_({a})
torch.nn.functional.hardtanh_({a})
{r} = {a}.add_({f})
{r} = {a}.mul_({b})
{r} = {a}[{slice}].mul_({f})
{a}.view(-1).add_({f})
{a}.data.mul_({f})
{a}.data.add_({b})
{a}.detach().mul_({f})
{a}.detach()[{slice}].zero_()
{a}.diagonal().add_({f})
"""

_SHAPE_CHANGES = """
{a}.t_()
{a}.transpose_({d}, {e})
{a}.swapdims_({d}, {e})
{a}.unsqueeze_({d})
{a}.squeeze_()
{a}.squeeze_({d})
{a}.as_strided_({strided})
"""

_STORAGE_CHANGES = """
{a}.set_({b})
{a}.set_({b}.detach())
{a}.resize_({smaller})
{a}.resize_({larger}).fill_({f})
{a}.resize_as_({b}).fill_({f})
{a}.data = {b}.detach().clone()
"""

_OUT = """
torch.add({a}, {f}, out={b})
torch.mul({a}, {c}, out={b})
torch.sin({a}, out={b})
torch.cat([{a}, {a}], out={apart})
torch.sum({a}, {d}, out={apart})
torch.cumsum({a}, {d}, out={b})
{r} = torch.exp({a}, out={b})
"""

_COMPUTE = """
{r} = {a} + {b}
{r} = {a} - {b}
{r} = {a} * {b}
{r} = {a} * {f}
{r} = {a} * {b} + {c}
{r} = {a} / 2
{r} = -{a}
{r} = {a}.sin()
{r} = {a}.cos()
{r} = {a}.exp()
{r} = {a}.tanh()
{r} = {a}.sigmoid()
{r} = {a}.relu()
{r} = {a}.abs()
{r} = {a}.square()
{r} = {a}.clamp(-0.5, 1.0)
{r} = {a} @ {b}
{r} = {a} @ {a}.mT
{r} = torch.matmul({a}, {b}.t())
{r} = torch.outer({a}, {b})
{r} = torch.addmm({a}, {b}, {b}.t())
{r} = torch.nn.functional.linear({a}, {b})
{r} = {a}.sum()
{r} = {a}.sum({d})
{r} = {a}.mean({d}, keepdim=True)
{r} = {a}.amax({d})
{r}, {q} = {a}.max({d})
{r} = {a}.var()
{r} = {a}.norm()
{r} = {a}.cumsum({d})
{r} = {a}.softmax({d})
{r} = {a}.logsumexp({d})
{r}, {q} = {a}.sort({d})
{r}, {q} = {a}.topk(2, {d})
{r} = {a}.argmax({d})
{r} = torch.cat([{a}, {b}], {d})
{r} = torch.stack([{a}, {b}])
{r} = torch.stack([{a}, {a}], {d})
{r} = torch.where({mask}, {a}, {b})
{r} = {a}.gather({d}, {indices})
{r} = {a}.index_select({d}, {index})
{r} = {a}[{index}]
{r} = {a}.masked_fill({mask}, {f})
{r} = {a}.flip({d})
{r} = {a}.roll(1, {d})
{r} = {a}.tril()
{r} = {a}.repeat(2, 1)
{r} = {a}.to({float})
{r} = {a}.float()
{r} = {a} > 0
{r} = torch.zeros_like({a})
{r} = torch.ones({shape})
{r} = {a}.new_zeros({shape})
{r} = torch.nn.functional.layer_norm({a}, {a}.shape[-1:], eps=0.1)
{r} = torch.nn.functional.pad({a}, (1, 0))
{r} = torch.nn.functional.gelu({a})
{r} = torch.einsum("i...,j...->ij", {a}, {b})
{r} = torch._foreach_add([{a}, {b}], {f})[{i}]
"""

_RANDOM = """
{r} = torch.rand_like({a}, dtype={float})
{r} = torch.randn({shape})
{r} = torch.nn.functional.dropout({a}, 0.5)
{r} = torch.nn.functional.dropout({a}, 0.5, inplace=True)
{r} = torch.bernoulli({a}.sigmoid())
{r} = {a} * torch.randn_like({a}, dtype=torch.float32)
{a}.bernoulli_(0.5)
{a}.normal_()
{a}.uniform_()
{r} = torch.nn.functional.alpha_dropout({a}, 0.5, training=True)
"""

# Of contiguous batches: torch's shape inference gives other strides than its kernels for the rest.
# Only one of the two running statistics can be an input: eager leaves open what happens if both are the same.
_NORMS = """
{q} = torch.ones_like({stats}); {r} = torch.nn.functional.batch_norm({batch}.contiguous(), {stats}, {q}, training=True)
{q} = torch.zeros_like({stats}); {r} = torch.nn.functional.batch_norm({batch}.contiguous(), {q}, {stats}, training=True)
{r} = torch.nn.functional.batch_norm({batch}.contiguous(), {stats}, {stats}.square() + 1)
{r} = torch.nn.functional.batch_norm({batch}.contiguous(), None, None, training=True)
{q} = torch.ones_like({stats}); {r} = torch.nn.functional.instance_norm({batch}.contiguous(), {stats}, {q})
"""

_GRAD_MODE = """
torch.set_grad_enabled(False)
torch.set_grad_enabled(True)
"""

_CUSTOM = """
scale_({a}, {f})
{r} = add_and_sum({a}, {b})
shift_all_([{a}, {apart}], {f})
{r} = count_({a}, {apart})
{r} = count_({a})
{r} = smooth({a})
{r} = Doubled.apply({a})
{r} = ScaledByOperator.apply({a}, {f})
{r} = Flat.apply({a})
{r}, {q} = SineAndCosine.apply({a})
{r} = WritesInBackward.apply({a}, {b})
"""

_READS = """
{r} = {a} * {b}.sum().item()
{r} = {a} + {b}.abs().max().item()
{r} = {a} if {b}.sum() > {f} else -{a}
{r} = {a} if ({mask}).any() else {b}
{r} = {a}.detach() if {a}.isnan().any() else {a}.view(-1)
{r} = {a} * int(({mask}).sum())
{r} = {a} + sum({b}.flatten().tolist())
{r} = {a}[{mask}]
{r} = {a}.masked_select({mask})
{r} = ({mask}).nonzero()
{r} = {a}.unique()
{r} = {a}[: int(({mask}).sum())]
{r} = {a}.narrow({d}, 0, int(({mask}).any()))
{a}[{mask}] = {a}[{mask}] * 2
if {a}.sum() > {f}: {a}.mul_({f})
if ({mask}).all(): {b}.add_({a})
for _ in range(2): {a}.mul_(0.5) if {a}.abs().max() > {f} else {a}.add_({f})
"""

# How often each kind is drawn: writes and views make the programs that are hard to compile.
WEIGHTS = {
    "view": 30,
    "write": 27,
    "compute": 24,
    "detached": 5,
    "random": 5,
    "custom": 4,
    "shape change": 2,
    "storage change": 2,
    "out": 3,
    "norm": 2,
    "grad mode": 1,
    "read": 4,
}

_TABLES = {
    "view": _VIEWS,
    "write": _WRITES,
    "compute": _COMPUTE,
    "detached": _DETACHED,
    "random": _RANDOM,
    "custom": _CUSTOM,
    "shape change": _SHAPE_CHANGES,
    "storage change": _STORAGE_CHANGES,
    "out": _OUT,
    "norm": _NORMS,
    "grad mode": _GRAD_MODE,
    "read": _READS,
}

ROWS: dict[str, tuple[Row, ...]] = {
    kind: tuple(Row(kind, line) for line in table.strip().splitlines()) for kind, table in _TABLES.items()
}
