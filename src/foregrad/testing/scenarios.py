"""What is asked of autograd after a call: which outputs get a tangent, how it lies in memory, in which order.

Each scenario is one row. A compiled backward is specialised to the tangents that it expects, so a tangent
that lies differently, or is missing, is where it goes wrong.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from .cloning import has_storage
from .naming import Named

TangentMaker = Callable[[Tensor, Generator], Tensor]
_LEFT_OUT_AT_MOST = 3


def contiguous(output: Tensor, generator: Generator) -> Tensor:
    """A tangent in row-major order.

    >>> contiguous(torch.ones(2, 3).t(), Generator()).stride()
    (2, 1)

    Args:
        output: The output that it is for.
        generator: Draws the values.
    """
    return _draw(output.shape, output, generator)


def transposed(output: Tensor, generator: Generator) -> Tensor:
    """A tangent with its dimensions in the opposite order, or with gaps if there is only one.

    >>> transposed(torch.ones(2, 3), Generator()).stride()
    (1, 2)

    Args:
        output: The output that it is for.
        generator: Draws the values.
    """
    if not output.dim():
        return _draw((), output, generator)
    if output.dim() == 1:
        return _draw((2 * output.shape[0],), output, generator)[::2]
    return _draw(output.shape[::-1], output, generator).permute(*reversed(range(output.dim())))


def expanded(output: Tensor, generator: Generator) -> Tensor:
    """A tangent with one element in memory, as `sum().backward()` gives.

    >>> expanded(torch.ones(2, 3), Generator()).stride()
    (0, 0)

    Args:
        output: The output that it is for.
        generator: Draws the values.
    """
    return _draw((), output, generator).expand(output.shape)


def alike(output: Tensor, generator: Generator) -> Tensor:
    """A tangent that lies in memory as the output does, unless the output has gaps or repeats itself.

    >>> alike(torch.ones(2, 3).t(), Generator()).stride()
    (1, 3)

    Args:
        output: The output that it is for.
        generator: Draws the values.
    """
    return torch.empty_like(output.detach()).copy_(_draw(output.shape, output, generator))


def _draw(shape: Sequence[int], output: Tensor, generator: Generator) -> Tensor:
    wide = torch.complex128 if output.is_complex() else torch.float64
    drawn = torch.randn(shape, dtype=wide, generator=generator, device="cpu")
    return drawn.to(output.device, output.dtype)


Gradients = Mapping[str, Tensor | None]
Order = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Named]], Gradients]


def _together(outputs: Sequence[Tensor], tangents: Sequence[Tensor], leaves: Sequence[Named]) -> Gradients:
    torch.autograd.backward(outputs, tangents)
    return {}


def _one_after_another(outputs: Sequence[Tensor], tangents: Sequence[Tensor], leaves: Sequence[Named]) -> Gradients:
    for output, tangent in zip(outputs, tangents, strict=True):
        torch.autograd.backward([output], [tangent])
    return {}


def _twice(outputs: Sequence[Tensor], tangents: Sequence[Tensor], leaves: Sequence[Named]) -> Gradients:
    torch.autograd.backward(outputs, tangents, retain_graph=True)
    torch.autograd.backward(outputs, tangents)
    return {}


def _of_gradients(outputs: Sequence[Tensor], tangents: Sequence[Tensor], leaves: Sequence[Named]) -> Gradients:
    """Differentiate the gradients; the first ones are shown too, and whether they require grad."""
    able = {where: leaf for where, leaf in leaves if leaf.is_leaf and leaf.requires_grad}
    if not able:
        return {}
    found = torch.autograd.grad(outputs, list(able.values()), tangents, create_graph=True, allow_unused=True)
    again = [gradient for gradient in found if gradient is not None and gradient.requires_grad]
    if again:
        torch.autograd.backward(again, [torch.ones_like(gradient) for gradient in again])
    # A sum of gradients lies in memory as the one that came first, and autograd promises no order.
    dense = [None if gradient is None else gradient.contiguous() for gradient in found]
    return {f"first gradient of {where}": gradient for where, gradient in zip(able, dense, strict=True)}


@dataclass(frozen=True)
class Scenario:
    """One way to call backward.

    >>> x = torch.ones(2, requires_grad=True)
    >>> shown = Scenario("contiguous tangents", contiguous).backward([x * 2], [("x", x)], seed=0)
    >>> x.grad.shape
    torch.Size([2])

    Args:
        name: What it is called in the report.
        tangent: Makes the tangent of an output.
        left_out: The position of the output that gets none.
        order: Calls backward for outputs and tangents; gradients that do not arrive at the leaves it returns.
        other_layout: Tangents lie in memory in another way than their outputs, so a sum over one may take another
            order and differ in its last bits; so may gradients of gradients, which autograd sums in its own order.
    """

    name: str
    tangent: TangentMaker
    left_out: int | None = None
    order: Order = _together
    other_layout: bool = False

    def backward(self, outputs: Iterable[Tensor], leaves: Sequence[Named], seed: int) -> Gradients:
        """Send tangents into the outputs that take part.

        >>> Scenario("contiguous tangents", contiguous).backward([torch.ones(2)], [], seed=0)
        {}

        Args:
            outputs: All outputs that are tensors; those that do not require grad are passed over.
            leaves: Where gradients arrive.
            seed: Decides the tangents, which are the same for both sides.
        """
        differentiable = [output for output in outputs if output.requires_grad]
        pairs = [
            (output, self._tangent(output, seed + position))
            for position, output in enumerate(differentiable)
            if position != self.left_out
        ]
        if not pairs:
            return {}
        return self.order([output for output, _ in pairs], [tangent for _, tangent in pairs], leaves)

    def _tangent(self, output: Tensor, seed: int) -> Tensor:
        if not has_storage(output):
            # A subclass decides itself how it lies in memory, and autograd wants a tangent of its own kind.
            return torch.ones_like(output.detach())
        return self.tangent(output, Generator().manual_seed(seed))


FORWARD_ONLY = Scenario("no backward", contiguous, order=lambda outputs, tangents, leaves: {})


@dataclass(frozen=True)
class Outlook:
    """What decides which scenarios make sense: the differentiable outputs that eager returned.

    >>> Outlook(("output",), any_dimension=False).differentiable
    ('output',)

    Args:
        differentiable: Their names.
        any_dimension: Whether one of them has a dimension.
    """

    differentiable: tuple[str, ...]
    any_dimension: bool


def scenarios_for(outlook: Outlook) -> tuple[list[Scenario], dict[str, str]]:
    """The backward scenarios for a program, and the ones that make no sense for it with the reason.

    >>> made, skipped = scenarios_for(Outlook(("output",), any_dimension=False))
    >>> [scenario.name for scenario in made]
    ['contiguous tangents', 'backward twice', 'gradients of gradients']
    >>> skipped["expanded tangents"]
    'no differentiable output has a dimension'

    Args:
        outlook: The outputs that eager returned.
    """
    if not outlook.differentiable:
        return [], {"backward": "no output requires grad"}
    made = [
        Scenario("contiguous tangents", contiguous),
        Scenario("backward twice", contiguous, order=_twice),
        Scenario("gradients of gradients", alike, order=_of_gradients, other_layout=True),
    ]
    skipped: dict[str, str] = {}
    for name, maker in (("transposed tangents", transposed), ("expanded tangents", expanded)):
        if outlook.any_dimension:
            made.append(Scenario(name, maker, other_layout=True))
        else:
            skipped[name] = "no differentiable output has a dimension"
    if len(outlook.differentiable) == 1:
        skipped["missing tangents"] = "there is one differentiable output"
        return made, skipped
    for position, name in list(enumerate(outlook.differentiable))[:_LEFT_OUT_AT_MOST]:
        made.append(Scenario(f"no tangent for {name}", contiguous, left_out=position))
    made.append(Scenario("one output after another", contiguous, order=_one_after_another))
    return made, skipped
