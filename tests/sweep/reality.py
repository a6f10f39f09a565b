"""Every operator that a program runs, on real tensors and on abstract ones: do they lie alike?"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from foregrad._torch import FakeTensor
from foregrad.abstract.engine import Engine
from foregrad.abstract.lean_engine import NO_SHAPES
from foregrad.abstract.tensor_meta import DTYPES, Several, described, intern, interned, survives_emptiness
from foregrad.abstract.trials import reconciled
from foregrad.slots import Input
from sweep.layouts import LAYOUTS, is_dense, with_layouts, with_sizes
from sweep.operators import Call, database


@dataclass(frozen=True)
class Seen:
    """One operator, once on real and once on abstract tensors: an answer or an error of each."""

    op: Any
    tensors: tuple[Any, ...]  # metadata
    text: str
    real: Any
    abstract: Any

    @property
    def layouts(self) -> frozenset[str]:
        return frozenset(meta.layout_class for meta in self.tensors)

    @property
    def dtypes(self) -> frozenset[str]:
        return frozenset(DTYPES.get(meta.dtype, str(meta.dtype)) for meta in self.tensors)

    @property
    def agrees(self) -> bool | None:
        """Whether the two are alike; None where there is nothing to compare."""
        if isinstance(self.real, Exception) or isinstance(self.abstract, NO_SHAPES):
            return None
        return not isinstance(self.abstract, Exception) and reconciled(self.abstract, self.real) == self.abstract

    @property
    def is_left_to_inference(self) -> bool:
        """Whether nothing is tried: strides of tensors without elements, for kernels that may not survive them."""
        return any(0 in meta.size for meta in self.tensors) and not survives_emptiness(self.op)

    def __str__(self) -> str:
        given = ", ".join(
            f"{m.dtype}{list(m.size)} {m.stride} +{m.offset}".removeprefix("torch.") for m in self.tensors
        )
        return (
            f"{self.op}({self.text}) of {given}\n    real     {shown(self.real)}\n    abstract {shown(self.abstract)}"
        )


def shown(answer: Any) -> str:
    if isinstance(answer, Several):
        return ", ".join(map(shown, answer.results))
    meta = getattr(answer, "meta", None)
    if meta is None:
        return repr(answer)[:200]
    bits = " conj" * meta.conj + " neg" * meta.neg
    where = {name: getattr(answer, name) for name in ("argument", "number", "nbytes") if hasattr(answer, name)}
    return f"{type(answer).__name__}({meta.dtype}{list(meta.size)} {meta.stride} +{meta.offset}{bits} {where or ''})"


Asked = Sequence[tuple[Callable[[], Engine], Callable[[Seen], None]]]  # engines, and who is told of their answers


class Observer(TorchDispatchMode):
    """Runs each operator on real tensors, and asks engines what they make of it."""

    def __init__(self, asked: Asked, dynamic: bool = False) -> None:
        super().__init__()
        self._asked = [(engine(), note) for engine, note in asked]
        self._dynamic = dynamic

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if op.namespace != "aten" or not all(map(is_dense, tensors)) or any(t.device.type == "meta" for t in tensors):
            return op(*args, **kwargs)
        metas = tuple(map(_real_meta, tensors))
        answers = [self._answer(engine, op, args, kwargs, tensors) for engine, _ in self._asked]
        out, error = None, None
        try:
            out = op(*args, **kwargs)
        except Exception as raised:
            error = raised
        real = error or described(out, tensors, _real_meta)
        text = str(tree_map(lambda v: "_" if isinstance(v, Tensor) else v, (*args, *kwargs.items())))[1:-1]
        for answer, (_, note) in zip(answers, self._asked, strict=True):
            note(Seen(op, metas, text, real, answer))
        if error is not None:
            raise error
        return out

    def _answer(self, engine: Engine, op: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        twins: dict[int, Tensor] = {}

        def twin(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in twins:
                twins[id(value)] = engine.fake(value, Input(f"x{len(twins)}"), dynamic=self._dynamic)
            return twins[id(value)]

        given, named = tree_map(twin, (args, kwargs))
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                out = engine.run(op, (FakeTensor,) if twins else (), tuple(given), named)
                return described(out, [twins[id(t)] for t in tensors], _hinted if self._dynamic else intern)
        except Exception as raised:
            return raised


def _real_meta(tensor: Tensor) -> Any:
    size, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return interned(size, stride, offset, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())


def _hinted(tensor: Any) -> Any:
    """The metadata of a tensor whose sizes may be symbols, with numbers in their places."""
    size, stride = (tuple(int(n) for n in numbers) for numbers in (tensor.shape, tensor.stride()))
    bits = tensor.is_conj(), tensor.is_neg()
    return interned(size, stride, int(tensor.storage_offset()), tensor.dtype, tensor.fake_device, *bits)


# ------------------------------------------------------------------------------------------------- what is run
OTHER_DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
FEW_LAYOUTS = ("contiguous", "transposed", "channels last", "expanded", "gaps")
WITH_ONES = ("contiguous", "transposed", "rotated", "channels last", "sliced")


@dataclass(frozen=True)
class Program:
    """A function of torch, called with certain layouts."""

    name: str
    function: Callable[..., Any]
    call: Call

    def run(self, observer: Any) -> None:
        """Forward and backward. Many calls with changed sizes are refused, which is as good as any answer."""
        with contextlib.suppress(Exception), observer:
            out = self.call.made_by(self.function)
            outs = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
            if outs and all(t.layout is torch.strided for t in outs):
                torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])


def programs(info: Any, device: str, few: bool = False) -> Iterator[Program]:
    """The calls that torch's database has for an operator, in all layouts, with sizes of one as well.

    Not with sizes of zero: some kernels of torch end the process then.
    """
    supported = info.supported_dtypes(device)
    main = next((d for d in (torch.float32, torch.complex64, torch.int64) if d in supported), None)
    for dtype in dict.fromkeys([main, *(d for d in OTHER_DTYPES if d in supported and not few)]):
        if dtype is None:
            continue
        number, layouts = (1 if few else 3, tuple(LAYOUTS)) if dtype is main else (1, FEW_LAYOUTS)
        for call in _calls(info, device, dtype, number):
            for laid in with_layouts(call, layouts):
                yield Program(f"{info.name}, {dtype}, {laid.name}", info.op, laid.call)
            if device != "cpu" and _has_integers(call):
                continue  # an index may be out of range of a smaller tensor, which ends the use of the device
            for changed in itertools.islice(with_sizes(call, 1), 3):
                for laid in with_layouts(changed, WITH_ONES, mixed=False):
                    yield Program(f"{info.name}, ones, {dtype}, {laid.name}", info.op, laid.call)


def _calls(info: Any, device: str, dtype: torch.dtype, limit: int) -> list[Call]:
    differentiable = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    try:
        samples = info.sample_inputs_func(info, device, dtype, differentiable)
        calls = [Call(s.input, s.args, s.kwargs) for s in samples]
    except Exception:  # the database has no samples of this dtype
        return []
    distinct = list({str(call): call for call in calls if _is_laid_out(call)}.values())
    return distinct[:: max(1, len(distinct) // limit)][:limit]


def _is_laid_out(call: Call) -> bool:
    tensors = [leaf for leaf in tree_leaves((call.input, call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(map(is_dense, tensors)) and sum(t.numel() for t in tensors) < 1 << 16


def _has_integers(call: Call) -> bool:
    tensors = [leaf for leaf in tree_leaves((call.input, call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    return any(t.dtype in (torch.int64, torch.int32) for t in tensors)


SHAPES = (
    *((3,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 4, 5)),
    *((3, 1), (1, 4, 1), (2, 1, 4, 5), (1, 3, 1, 4, 5)),
    *((0, 3), (2, 0, 1)),
)


def lifted(op: Any, args: Any, kwargs: Any) -> Iterator[Program]:
    """A pointwise operator on tensors of other ranks, all of the same shape."""
    for shape in SHAPES:

        def fit(value: Any, shape: tuple[int, ...] = shape) -> Any:
            if not isinstance(value, Tensor):
                return value
            with torch.no_grad():
                return value.detach().flatten()[:1].expand(shape).contiguous()

        call = Call(None, *tree_map(fit, (tuple(args), kwargs)))
        for laid in with_layouts(call):
            yield Program(f"{op} {shape}, {laid.name}", lambda _, *a, **k: op(*a, **k), laid.call)


class Pointwise(TorchDispatchMode):
    """Collects calls of pointwise operators, one of each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if torch.Tag.pointwise in op.tags and tensors and all(is_dense(t) and t.numel() for t in tensors):
            key = op, tuple(t.dtype for t in tensors)
            if key not in self.calls and not op._schema.is_mutable:
                kept = tree_map(
                    lambda v: v.detach().flatten()[:1].clone() if isinstance(v, Tensor) else v, (args, kwargs or {})
                )
                self.calls[key] = kept
        return op(*args, **(kwargs or {}))


def observe(infos: Sequence[Any], device: str, asked: Asked, dynamic: bool = False, few: bool = False) -> None:
    """Run operators of torch's database in all layouts; `few` leaves out most dtypes, and other ranks."""
    pointwise = Pointwise()
    for info in infos:
        torch.manual_seed(0)
        for number, program in enumerate(programs(info, device, few)):
            program.run(Observer(asked, dynamic))
            if number % 40 == 0 and not few:
                program.run(pointwise)
    for (op, _), (args, kwargs) in pointwise.calls.items():
        for program in lifted(op, args, kwargs):
            program.run(Observer(asked, dynamic))


def functional_twins(device: str) -> Iterator[Program]:
    """Functional twins of operators that write and also give something new. Programs do not call them."""
    for shape in ((4, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 4, 5), (2, 3, 1, 1), (1, 3, 4, 5)):
        x, noise = torch.rand(shape, device=device), torch.rand(shape, device=device)
        statistics = [torch.ones(shape[1], device=device) for _ in range(4)]
        twins = {
            torch.ops.aten._native_batch_norm_legit_functional.default: (x, *statistics, True, 0.1, 1e-5),
            torch.ops.aten.rrelu_with_noise_functional.default: (x, noise, 0.1, 0.3, True),
        }
        for op, args in twins.items():
            for laid in with_layouts(Call(args[0], args[1:], {})):
                yield Program(f"{op} {shape}, {laid.name}", op, laid.call)


def ordinary(device: str) -> Iterator[Program]:
    """What models are made of, in shapes and dtypes that the database does not have, in all layouts."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for name, function, shapes in _BLOCKS:
            tensors = [torch.rand(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
            layouts = tuple(LAYOUTS) if dtype is torch.float32 else FEW_LAYOUTS
            for laid in with_layouts(Call(tensors[0], tuple(tensors[1:]), {}), layouts):
                yield Program(f"{name}, {dtype}, {laid.name}", function, laid.call)


def _packed_attention(packed: Tensor, heads: int, causal: bool) -> Tensor:
    """Attention as transformers have it: queries, keys and values are parts of one tensor."""
    parts = packed.chunk(3, dim=-1)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def _blocks() -> Iterator[tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...]]]:
    for batch, heads in ((2, 4), (1, 2), (2, 1)):
        for causal in (False, True):
            attend = functools.partial(_packed_attention, heads=heads, causal=causal)
            yield f"packed attention, {batch}, {heads}", attend, ((batch, 5, 24),)
        plain = (batch, heads, 5, 8)
        yield f"attention, {batch}, {heads}", F.scaled_dot_product_attention, (plain, plain, plain)
        masked = (plain, plain, plain, (batch, 1, 5, 5))
        yield f"masked attention, {batch}, {heads}", F.scaled_dot_product_attention, masked
    for image in ((2, 8, 6, 6), (1, 8, 6, 6), (2, 8, 2, 2)):
        yield f"max pool, {image}", functools.partial(F.max_pool2d, kernel_size=2), (image,)
        overlapping = functools.partial(F.max_pool2d, kernel_size=3, stride=2, padding=1)
        yield f"overlapping max pool, {image}", overlapping, (image,)
        yield f"average pool, {image}", functools.partial(F.avg_pool2d, kernel_size=2), (image,)
        yield f"adaptive pool, {image}", functools.partial(F.adaptive_avg_pool2d, output_size=1), (image,)
        norm = functools.partial(F.batch_norm, running_mean=None, running_var=None, training=True)
        yield f"batch norm, {image}", lambda x, w, b, norm=norm: norm(x, weight=w, bias=b), (image, (8,), (8,))
        yield f"group norm, {image}", lambda x, w, b: F.group_norm(x, 4, w, b), (image, (8,), (8,))
        for kernel, groups in (((4, 8, 3, 3), 1), ((4, 8, 1, 1), 1), ((8, 1, 3, 3), 8)):
            same = functools.partial(F.conv2d, padding=kernel[-1] // 2, groups=groups)
            yield f"convolution, {image}, {kernel}", same, (image, kernel)
            yield f"convolution with bias, {image}, {kernel}", same, (image, kernel, kernel[:1])
    for shape in ((2, 5, 8), (2, 1, 8), (4, 8)):
        yield f"layer norm, {shape}", lambda x, w, b: F.layer_norm(x, (8,), w, b), (shape, (8,), (8,))
        yield f"root mean square norm, {shape}", lambda x, w: F.rms_norm(x, (8,), w), (shape, (8,))
        yield f"log softmax, {shape}", lambda x: F.log_softmax(x, -1), (shape,)
        yield f"split, {shape}", lambda x: x.split(4, -1), (shape,)
        yield f"cross entropy, {shape}", _classify, (shape,)
        for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits"):
            yield f"{name}, {shape}", getattr(F, name), (shape, shape)
        for name in ("gelu", "silu", "softplus", "hardswish", "leaky_relu", "elu", "mish"):
            yield f"{name}, {shape}", getattr(F, name), (shape,)


def _classify(logits: Tensor) -> Tensor:
    flat = logits.flatten(0, -2)
    return F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.int64, device=flat.device))


_BLOCKS = tuple(_blocks())


def part_of_database(device: str = "cpu") -> list[Any]:
    """The operators that a type of device has."""
    return [info for info in database() if info.supported_dtypes(device)]
