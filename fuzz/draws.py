"""What stands in the place of a placeholder: parts of a statement, drawn to suit the tensors that a program has."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from .program import PLAIN, Statement
from .rows import Row

SMALL_FLOATS = ("0.5", "2.0", "-1.0", "0.25", "1.5")
FLOATS = ("torch.float32", "torch.float64", "torch.bfloat16")
VIEW_DTYPES = ("torch.int32", "torch.float32", "torch.int16", "torch.int64", "torch.float64", "torch.uint8")
SLICES = ("1:", ":1", ":-1", "::2", "1::2", ":2", "0:0", "-1:")


class NothingFits(Exception):
    """No tensor of the program can stand in this place."""


@dataclass
class Draw:
    """Fills in one template.

    Args:
        rng: Decides.
        tensors: The variables of the program so far.
        count: How many variables the program has made.
        chosen: What each placeholder became.
    """

    rng: random.Random
    tensors: Mapping[str, Tensor]
    count: int
    chosen: dict[str, str] = field(default_factory=dict)

    def statement(self, row: Row, block: str = PLAIN) -> Statement:
        """Make a statement from a row.

        >>> import torch
        >>> drawn = Draw(random.Random(0), {"x": torch.ones(2)}, count=0)
        >>> drawn.statement(Row("compute", "{r} = {a}.sin()")).source
        'v0 = x.sin()'

        Args:
            row: The template.
            block: The `with` line that it stands under.
        """
        source = re.sub(r"\{(\w+)\}", lambda found: self._fill(found[1]), row.template)
        reads = dict.fromkeys(self.chosen[name] for name in self.chosen if name in _TENSORS)
        makes = tuple(self.chosen[name] for name in ("r", "q") if name in self.chosen)
        return Statement(source, row.kind, row.operator, tuple(reads), makes, block)

    def _fill(self, name: str) -> str:
        if name == "slice" or name not in self.chosen:
            if name not in ("a", "r", "q") and "a" not in self.chosen and name not in _FREE:
                self._fill("a")
            self.chosen[name] = _DRAWS[name](self)
        return self.chosen[name]

    @property
    def _a(self) -> Tensor:
        return self.tensors[self.chosen["a"]]

    def any_tensor(self) -> str:
        """Any variable, the latest ones more often."""
        names = list(self.tensors)
        return self.rng.choice(names[-4:] if self.rng.random() < 0.4 else names)

    def similar_tensor(self) -> str:
        """A variable that is likely to go together with the first."""
        if self.rng.random() < 0.15:
            return self.any_tensor()
        alike = [n for n, t in self.tensors.items() if t.dtype == self._a.dtype and t.shape == self._a.shape]
        near = [n for n, t in self.tensors.items() if t.dtype == self._a.dtype and _broadcasts(t, self._a)]
        return self.rng.choice(alike if alike and self.rng.random() < 0.6 else near or alike)

    def tensor_apart(self) -> str:
        """A variable in another storage than the first: what an operator writes there must not be what it reads."""
        storage = self._a.untyped_storage().data_ptr()
        apart = [n for n, t in self.tensors.items() if t.dim() and t.untyped_storage().data_ptr() != storage]
        return self._one_of(apart)

    def dimension(self) -> str:
        rank = self._a.dim()
        return str(self.rng.randrange(-rank, rank)) if rank else "0"

    def shape(self) -> str:
        """A shape with as many elements as the first tensor has."""
        count = self._a.numel()
        divisors = [d for d in range(1, count + 1) if count % d == 0] or [0]
        first = self.rng.choice(divisors)
        return self.rng.choice([f"({first}, -1)", f"({first}, {count // first if first else 0})", f"({count},)"])

    def wider(self) -> str:
        """A shape to which the first tensor can be expanded."""
        sizes = [self.rng.choice([2, 3]) if size == 1 else size for size in self._a.shape]
        return _tuple([self.rng.choice([1, 2])] * self.rng.randrange(2) + sizes)

    def strided(self) -> str:
        """Sizes, strides and an offset that stay in the first tensor's storage."""
        room = self._a.untyped_storage().nbytes() // self._a.itemsize
        size = [self.rng.randint(1, 3) for _ in range(self.rng.randint(0, 2))]
        stride = [self.rng.choice([1, 1, 2, 3, size[-1]]) for _ in size]
        offset = self.rng.choice([0, 0, 1, int(self._a.storage_offset())])
        if offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) >= room:
            raise NothingFits
        return f"{_tuple(size)}, {_tuple(stride)}, {offset}"

    def permutation(self) -> str:
        return ", ".join(map(str, self.rng.sample(range(self._a.dim()), self._a.dim()))) or "()"

    def indices(self) -> str:
        """Positions along a dimension, in the shape that scatter and gather want."""
        rank = max(self._a.dim(), 1)
        count = self.rng.randint(1, 2)
        text = f"[{', '.join(str(self.rng.randrange(2)) for _ in range(count))}]"
        return f"torch.tensor({'[' * (rank - 1)}{text}{']' * (rank - 1)})"

    def index(self) -> str:
        count = self.rng.randint(1, 2)
        # A position that is written twice would make the outcome depend on the order.
        return f"torch.tensor({self.rng.sample(range(2), count)})"

    def batch(self) -> str:
        """A variable with channels, in the place of the first tensor."""
        self.chosen["a"] = self._one_of([n for n, t in self.tensors.items() if _has_channels(t)])
        return self.chosen["a"]

    def statistics(self) -> str:
        """A variable that can hold the running statistics of a norm over some batch of the program."""
        channels = {t.shape[1:2] for t in self.tensors.values() if _has_channels(t)}
        fitting = [n for n, t in self.tensors.items() if t.shape in channels and _can_hold_statistics(t)]
        return self._one_of(fitting)

    def _one_of(self, names: list[str]) -> str:
        if not names:
            raise NothingFits
        return self.rng.choice(names)

    def smaller(self) -> str:
        memory = int(self._a.untyped_storage().nbytes() // self._a.itemsize - self._a.storage_offset())
        count = max(0, min(self._a.numel(), memory))  # what lies beyond is not defined
        return self.rng.choice([f"({self.rng.randint(0, count)},)", f"(1, {count})", f"({count},)"])

    def larger(self) -> str:
        return f"({self._a.numel() + self.rng.randint(1, 3)},)"


def _has_channels(tensor: Tensor) -> bool:
    # The gradient of a norm over few numbers cancels to nearly nothing, of which a short dtype keeps only noise.
    return tensor.dim() >= 2 and tensor.is_floating_point() and tensor.itemsize >= 4


def _can_hold_statistics(tensor: Tensor) -> bool:
    return not tensor.requires_grad and tensor.is_floating_point() and tensor.is_contiguous()


def _broadcasts(small: Tensor, large: Tensor) -> bool:
    pairs = zip(reversed(small.shape), reversed(large.shape), strict=False)
    return small.dim() <= large.dim() and all(a in (1, b) for a, b in pairs)


def _tuple(sizes: list[int]) -> str:
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


_TENSORS = ("a", "b", "c", "apart", "batch", "stats")
_FREE = frozenset({"f", "n", "i", "o", "slice", "index", "dtype", "float", "batch", "stats"})

_DRAWS: dict[str, Callable[[Draw], str]] = {
    "a": Draw.any_tensor,
    "b": Draw.similar_tensor,
    "c": Draw.similar_tensor,
    "apart": Draw.tensor_apart,
    "r": lambda draw: f"v{draw.count}",
    "q": lambda draw: f"v{draw.count + 1}",
    "d": Draw.dimension,
    "e": Draw.dimension,
    "i": lambda draw: draw.rng.choice(["0", "1", "-1"]),
    "n": lambda draw: draw.rng.choice(["1", "2", "2", "3"]),
    "o": lambda draw: draw.rng.choice(["0", "1", "-1"]),
    "f": lambda draw: draw.rng.choice(SMALL_FLOATS),
    "slice": lambda draw: draw.rng.choice(SLICES),
    "shape": Draw.shape,
    "wider": Draw.wider,
    "strided": Draw.strided,
    "perm": Draw.permutation,
    "dtype": lambda draw: draw.rng.choice(VIEW_DTYPES),
    "float": lambda draw: draw.rng.choice(FLOATS),
    "mask": lambda draw: f"{draw.chosen['a']} > {draw.rng.choice(['0', '0.3'])}",
    "index": Draw.index,
    "indices": Draw.indices,
    "stats": Draw.statistics,
    "batch": Draw.batch,
    "smaller": Draw.smaller,
    "larger": Draw.larger,
}
