"""Stateful programs that read data: branches, loops, numbers, lists and sizes that depend on the values of tensors.

A program is called six times, with values from a small pool, so that programs miss and take turns. NaN, infinities,
-0.0 and sizes 0 and 1 are among them.
"""

from .generate import ProgramGenerator, drawing_world, drawn
from .layers import LAYOUTS, SHAPES
from .program import Part, StateProgram

CALLS_OF_EACH = 6

# `{k}` is a name for a number or a list. The last name of a statement that starts with `v` can be used by the next one.
BOOLS = (
    "{r} = {a} * 2 if {b}.sum() > {f} else -{a}",
    "{r} = {a}.sin() if {b}.isnan().any() else {a}.cos()",
    "{r} = {a} * 2 if ({a} > {f}).all() else {a} + 1",
    "{r} = {a} if {x}.max() < {b}.min() + {f} else {a}.clamp(-1.0, 1.0)",
    "{r} = {a} * bool({b}.flatten()[0] > {f})",
    "{r} = {a} * 2 if torch.equal({a}, {b}) else {a}",
    "{r} = {a} * 2 if torch.allclose({a}, {b}) else {a} + 1",
    "{r} = {a} / {a}.norm() if {a}.norm() else {a} + 1",
    "{r} = {a} * 2 if not {b}.isfinite().all() else {a}",
    "{r} = {a} * 2 if ({a} > {f}).any() and not ({b} < 0).all() else {b}",
    "{r} = {a} - 1 if torch.signbit({b}).any() else {a} * {b}",
    "{r} = {a} * 2 if {b}.mean() != {b}.mean() else {a}",
    "{r} = {a} if {x}.numel() and {x}.flatten()[-1] > {f} else {a} * 2",
    "{r} = {a}\nif {b}.sum() > {f}:\n    {r} = {a} * 2\nelif {b}.isnan().any():\n    {r} = {a}.nan_to_num()\n"
    "else:\n    {r} = {a} - 1",
    "if {b}.isnan().any():\n    raise ValueError('a number is missing')\n{r} = {a} * 2",
    "assert not {b}.isinf().any()\n{r} = {a} + 1",
    "{r} = {a}\ntry:\n    {r} = {a} * 2 if {b}.sum() > {f} else {a}.view(7)\nexcept RuntimeError:\n    {r} = -{a}",
    "with torch.no_grad():\n    {k} = bool({b}.abs().max() > {f})\n{r} = {a} * 2 if {k} else {a}",
)

NUMBERS = (
    "{r} = {a} * {b}.sum().item()",
    "{r} = {a} + {b}.abs().max().item()",
    "{r} = {a} + float({b}.mean())",
    "{r} = {a} * int(({b} > {f}).sum())",
    "{r} = {a} + ({b} > {f}).sum().item() % 3",
    "{r} = {a} * round({b}.detach().sum().item(), 2)",
    "{k} = {b}.sum().item()\n{r} = {a} * {k} if {k} > {f} else {a} - {k}",
    "{k} = {b}.mean().item()\n{r} = {a} * (0.0 if math.isnan({k}) else {k})",
    "{k} = {b}.sum().item()\n{r} = torch.full_like({a}, {k}) + {a}",
    "{k} = int({b}.argmax())\n{r} = {a} * ({k} % 3)",
    "{r} = {a} * math.copysign(1.0, {b}.flatten()[0].item())",
    "{r} = {a} * min(max({b}.sum().item(), -1.0), 1.0)",
    "{r} = {a}.roll(int(({b} > {f}).sum()), -1)",
    "{k} = {b}.mean().item()\n{r} = {a} * ({k} == {k})",
    "{r} = {a} + len(str(int(({b} > {f}).sum())))",
    "{r} = {a} * 2 if ({b} > {f}).sum().item() in (0, 3, 12) else {a}",
    "{r} = {a} / (({b} > {f}).sum().item() or 2)",
    "{k} = ({b} > {f}).sum().item()\n{r} = {a} * ({k} // 2 + ({k} - 1) ** 2)",
    "{r} = {a} * -({b}.min().item())",
    "{r} = {a} + torch.tensor({b}.sum().item())",
    "{r} = {a} + torch.arange(int(({b} > {f}).sum())).sum()",
    "{r} = {a} + torch.ones(4)[: int(({b} > {f}).sum()) % 5].sum()",
    "{r} = {a}[..., : int(({b} > {f}).sum()) % 5].sum() + {a}",
    "{r} = {a} * torch.zeros(int(({b} > {f}).sum()), 4).shape[0]",
    "{r} = {a} * {b}.detach().numpy().sum().item()",
    "{k} = {x}.detach().norm().item()\n{r} = {a} * (1.0 / {k} if {k} > 1.0 else 1.0)",
    "{r} = {a} * torch.autograd.grad(({x} * {x}).sum(), {x})[0].sum().item()",
)

LISTS = (
    "{r} = {a} * sum({b}.flatten()[:3].tolist())",
    "{r} = {a} * len([n for n in {b}.flatten().tolist() if n > {f}])",
    "{r} = {a} + torch.tensor({b}.flatten()[:4].tolist()).sum()",
    "{r} = {a} * max({b}.flatten().tolist(), default=1.0)",
    "{r} = {a} + {b}.flatten()[:4].argsort().tolist()[-1]",
    "{r} = {a} + sum(({b} > {f}).flatten().tolist())",
    "{r} = {a}\nfor {k} in ({b} > {f}).flatten().nonzero().flatten().tolist()[:3]:\n    {r} = {r} + {k}",
    "{r} = {a}\nfor {k} in {b}.flatten()[:3]:\n    {r} = {r} * 2 if {k} > {f} else {r} - 1",
    "{k} = {b}.flatten()[:4].tolist()\n{r} = {a} * (2 if {k} == sorted({k}) else 3)",
)

SIZES = (
    "{r} = {a} + {a}[{a} > {f}].sum()",
    "{r} = {a} * {a}[{b} > {f}].mean()",
    "{r} = {a} + {b}[{b}.isnan()].numel()",
    "{r} = {a} + {a}.masked_select({b} > {f}).sum()",
    "{r} = {a}.clone()\n{r}[{a} > {f}] = {b}[{a} > {f}] * 2",
    "{r} = {a}.clone()\n{r}[{r}.isnan()] = 0.0",
    "{r} = {a}.clone()\n{r}[{b} > {f}] *= 2",
    "{r} = {a} + {a}[{b}.flatten(1).sum(1) > {f}].sum()",
    "{r} = {a}[{b}.flatten(1).sum(1) > {f}]",
    "{r} = {a} + ({b} > {f}).nonzero().sum()",
    "{r} = {a} * ({b} > {f}).nonzero().shape[0]",
    "{r} = {a} + {a}.flatten()[({b}.flatten() > {f}).nonzero(as_tuple=True)[0]].sum()",
    "{k} = torch.where({b} > {f})\n{r} = {a} + {a}[{k}].sum()",
    "{k} = {a}[{b} > {f}]\n{r} = {a} * 2 if {k}.numel() == 0 else {a} + {k}.max()",
    "{k} = {a}[{b} > {f}]\n{r} = {a} * 2 if len({k}) > 2 else {a} + {k}.sum()",
    "{r} = {a} * {b}.round().unique().numel()",
    "{r} = {a} + {b}.round().unique(return_counts=True)[1].sum()",
    "{r} = {a} + {b}.detach().nan_to_num().clamp(0, 3).long().flatten().bincount().numel()",
    "{r} = {a} + torch.ones(3).repeat_interleave(({b}.flatten()[:3].detach().nan_to_num() > {f}).long()).sum()",
    "{r} = {a} + torch.cat([{a}[{b} > {f}], {a}[{b} <= {f}]]).sum()",
    "{r} = torch.zeros_like({a}).masked_scatter({b} > {f}, {a}[{b} > {f}]) + {a}",
    "{r} = {a}.index_put(({b} > {f},), torch.tensor({f}))",
    "{r} = {a} + {a}.sort(-1)[0][({b}[..., 0] > {f})].sum()",
)

LOOPS = (
    "{r} = {a}\nfor _ in range(4):\n    if {r}.abs().sum() < 4.0:\n        break\n    {r} = {r} * 0.5",
    "{r} = {a}\n{k} = 0\nwhile {r}.abs().max() > 1.0 and {k} < 5:\n    {r} = {r} / 2\n    {k} += 1",
    "{r} = {a}\nfor _ in range(int(({b} > {f}).sum()) % 4):\n    {r} = {r}.sin()",
    "{r} = {a}\nfor _ in range(3):\n    {r} = {r} * 2 if {r}.sum() < {f} else {r} - {b}",
    "{r} = {a}.clone()\n{k} = 0\nwhile ({r} > {f}).any():\n    {r}[{r} > {f}] -= 1\n    {k} += 1\n"
    "    if {k} == 3:\n        break",
    "{r} = {a}\nwhile not {r}.isfinite().all():\n    {r} = {r}.nan_to_num(0.0, 1.0, -1.0)",
)

CHANCE = (
    "{r} = {a} if torch.rand(()).item() < 0.5 else {a} * 2",
    "{r} = torch.nn.functional.dropout({a}, 0.5) if {b}.sum() > {f} else {a}",
    "{r} = {a} * 2 if torch.nn.functional.dropout({b}, 0.5).sum() > {f} else {a}",
    "{r} = {a} + torch.rand(4) * (torch.rand(4) > 0.5).sum().item()",
    "{r} = {a} + torch.randperm(4).tolist()[0]",
    "{r} = {a} + torch.rand(int(({b} > {f}).sum())).sum()",
    "{r} = {a} * torch.bernoulli(torch.full((4,), 0.5)).nonzero().shape[0]",
)

WRITES = (
    "{x}.masked_fill_({x}.isnan(), 0.0)",
    "{x}[{x} > {f}] = 0.0",
    "if {b}.sum() > {f}:\n    {x}.mul_(2)",
    "{x}.add_({b}.sum().item())",
    "if ({x} > {f}).any():\n    {x}[0] = {f}",
    "with torch.no_grad():\n    {x}.clamp_(max={b}.mean().item())",
    "totals['n'] += int(({b} > {f}).sum())",
    "setattr(shelf, 'last', {b}.sum().item())",
    "gradients.append({b}.sum().item())",
    "{b}.register_hook(lambda g: g * 2 if g.sum() > {f} else g)",
)

TABLES = {
    "bool that is read": BOOLS,
    "number that is read": NUMBERS,
    "list that is read": LISTS,
    "size that is read": SIZES,
    "loop over reads": LOOPS,
    "chance that is read": CHANCE,
    "write after a read": WRITES,
}
_WEIGHTS = (4, 4, 2, 4, 2, 1, 1)

# Reads of what objects hold: `{t}` is a tensor of theirs.
OF_OBJECTS = (
    "{r} = {a} if {t}.sum() > {f} else -{a}",
    "{r} = {a} * {t}.sum().item()",
    "{r} = {a} + {t}[{t} > {f}].sum()",
    "{r} = {a} * int(({t} > {f}).sum())",
)

# Values for an argument: `{full}` is one with distinct elements, none of them special.
VALUES = (
    "{full}",
    "{full}",
    "-{full}",
    "{full} * 10",
    "torch.zeros_like({full})",
    "torch.zeros_like({full}) * -1.0",
    "torch.ones_like({full})",
    "{full}.masked_fill({full} > 1.0, float('nan'))",
    "{full}.masked_fill({full} > 1.5, float('inf'))",
    "{full}.masked_fill({full} < 0.0, float('-inf'))",
    "{full}.masked_fill({full} < 0.0, -0.0)",
    "torch.full_like({full}, float('nan'))",
    "{full}.flip(-1)",
)

_GRADS = ("{value}", *["({value}).detach().requires_grad_()"] * 2, "({value}).requires_grad_() * 1")
_IN_POOL = (2, 3, 3, 4)

_RETURNED = (
    "({last}, {last}.detach().sum().item())",
    "({last}, bool({last}.isnan().any()))",
    "({last}, ({last} > 0).sum().item())",
    "[{last}, {last}[{last} > 0]]",
    "({last} > 0).nonzero()",
    "{last}.flatten().tolist()[:2]",
)


def generate(seed: int | str, number: int) -> StateProgram:
    """Make the reading program of a seed and a number, always the same.

    >>> generate(0, 1) == generate(0, 1)
    True

    Args:
        seed: The seed of the run.
        number: The program's place in it.
    """
    return drawn(ReadingGenerator, f"reads/{seed}/{number}")


class ReadingGenerator(ProgramGenerator):
    """Draws one program that reads data."""

    def _draw_objects(self) -> None:
        if self._rng.random() < 0.5:
            super()._draw_objects()

    def _statement(self) -> Part | None:
        drawing, rng = self._drawing, self._rng
        if drawing.objects and rng.random() < 0.45:
            tensors = [(drawn, t) for drawn in drawing.objects for t in drawn.kind.tensors]
            if not tensors or rng.random() < 0.7:
                return super()._statement()
            drawn, tensor = rng.choice(tensors)
            source = rng.choice(OF_OBJECTS).replace("{t}", tensor)
            return Part(drawing.fill(source, p=self._path(drawn)), "read of an object", drawn.kind.name)
        kind = rng.choices(list(TABLES), _WEIGHTS)[0]
        template = rng.choice(TABLES[kind])
        return Part(drawing.fill(template), kind, template)

    def _returned(self) -> str:
        if self._rng.random() < 0.7:
            return super()._returned()
        return self._rng.choice(_RETURNED).replace("{last}", self._drawing.variables[-1])

    def _with_steps(self, program: StateProgram) -> StateProgram:
        """Six calls in eager, with arguments from a pool."""
        world, rng, drawing = drawing_world(program), self._rng, self._drawing
        drawing.held += [f"a{position}" for position in range(len(drawing.arguments))]
        pools = [self._pool() for _ in drawing.held]
        for _ in range(CALLS_OF_EACH):
            for name, pool in zip(drawing.held, pools, strict=True):
                self._add(world, program, Part(f"{name} = {rng.choice(pool)}", "step", "values"))
            if self._add_call(world, program) and rng.random() < 0.5:
                last = f"r{len(drawing.results) - 1}"
                self._add(world, program, Part(f"backward({last})", "step", "backward"))
            if drawing.objects and rng.random() < 0.15:
                self._add_event(world, program)
        return self._finished(program)

    def _pool(self) -> list[str]:
        """A few values for one argument, most of which need the same guards."""
        rng = self._rng
        grad = rng.choice(_GRADS)
        return [self._value(grad if rng.random() < 0.85 else rng.choice(_GRADS)) for _ in range(rng.choice(_IN_POOL))]

    def _value(self, grad: str) -> str:
        """The Python of a tensor for the program."""
        rng, family = self._rng, self._drawing.family
        shape = SHAPES[family][0]
        if (chance := rng.random()) < 0.2:
            shape = (0 if chance < 0.07 else 1, *shape[1:])
        count = 1
        for size in shape:
            count *= size
        full = f"torch.linspace(-1.0, 2.0, {count}).reshape({', '.join(map(str, shape))})"
        if rng.random() < 0.15 and shape[0] > 1:
            layout = rng.choice([layout for layout in LAYOUTS["any"] if "expand" not in layout])
            full = layout.replace("{full}", full).replace("{batch}", str(shape[0]))
        return grad.replace("{value}", rng.choice(VALUES).replace("{full}", full))
