"""Train a model three steps, in eager and compiled, and compare everything that can be seen of it."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import foregrad
from foregrad.errors import DataDependentError

from .case import Case

STEPS = 3
_SEED = 20

Verdict = Literal["equal", "reads data", "refused", "differs", "crashes", "eager fails"]


@dataclass(frozen=True)
class Outcome:
    """What became of one model: the reason is empty where it is equal to eager, bit by bit."""

    library: str
    name: str
    verdict: Verdict
    reason: str = ""
    programs: int = 0
    seconds: float = 0.0


def run_graph(graph: Any, inputs: Any) -> Any:
    """The compiler of the table: the graph as it is."""
    return foregrad.make_boxed_func(graph.forward)


def compare(case: Case) -> Outcome:
    """Try one model."""
    try:
        expected = _train(case, lambda program: program)
    except Exception as error:
        return Outcome(case.library, case.name, "eager fails", _text(error))
    compiled: list[Any] = []

    def compile_it(program: Callable[..., Any]) -> Callable[..., Any]:
        door = foregrad.aot_module if isinstance(program, nn.Module) else foregrad.aot_function
        compiled.append(door(program, run_graph))
        return compiled[-1]

    start = time.perf_counter()
    verdict: Verdict
    try:
        found = _train(case, compile_it)
    except DataDependentError as error:
        verdict, reason = "reads data", _text(error)
    except foregrad.ForegradError as error:
        verdict, reason = "refused", _text(error)
    except Exception as error:
        verdict, reason = "crashes", _text(error)
    else:
        reason = next(_differences(expected, found), "")
        verdict = "differs" if reason else "equal"
    seconds = time.perf_counter() - start
    return Outcome(
        case.library, case.name, verdict, reason, len(compiled[0].specializations) if compiled else 0, seconds
    )


def _text(error: BaseException) -> str:
    """An error in one line; where it came from, unless it is one of ours."""
    words = " ".join(str(error).split())
    place = ""
    if not isinstance(error, foregrad.ForegradError):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f" ({frame.filename.rsplit('site-packages/')[-1]}:{frame.lineno})"
    return f"{type(error).__name__}: {words}{place}"


def _train(case: Case, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[tuple[str, Any]]:
    """Everything that can be seen of three steps of training, by name."""
    random.seed(_SEED)
    torch.manual_seed(_SEED)
    trial = case.make()
    original = trial.program
    module = original if isinstance(original, nn.Module) else None
    program = wrap(original)
    optimizer: torch.optim.Optimizer | None = None
    seen: list[tuple[str, Any]] = []
    for step in range(STEPS):
        call = trial.inputs()
        result = program(*call.args, **call.kwargs)
        parameters = [] if module is None else list(module.parameters())  # lazy modules have theirs by now
        if parameters and optimizer is None:
            optimizer = torch.optim.SGD(parameters, lr=0.05)  # one that takes sparse gradients too
        leaves = [(f"step {step}: {path}", value) for path, value in walk(result, "output")]
        tensors = [value for _, value in leaves if isinstance(value, Tensor) and value.requires_grad]
        loss = getattr(result, "loss", None)
        if not isinstance(loss, Tensor):
            loss = sum((torch.view_as_real(t) if t.is_complex() else t).float().mean() for t in tensors)
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
        seen += leaves + [(f"step {step}: {path}", value) for path, value in walk((call.args, call.kwargs), "inputs")]
        if module is not None and optimizer is not None:
            seen += [(f"step {step}: gradient of {name}", p.grad) for name, p in module.named_parameters()]
            optimizer.step()
            optimizer.zero_grad()
        seen = [(name, value.detach().clone() if isinstance(value, Tensor) else value) for name, value in seen]
    if module is not None:
        seen += [(f"state: {name}", value) for name, value in module.state_dict().items()]
    seen.append(("random state", torch.get_rng_state()))
    return seen


def walk(value: Any, path: str, known: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """The leaves of a nested value, objects taken apart by what they hold, each once."""
    known = set() if known is None else known
    if isinstance(value, Tensor | nn.Module | type(None) | int | float | str | torch.dtype | torch.device):
        yield path, value if not isinstance(value, nn.Module) else type(value).__name__
        return
    if id(value) in known:
        return
    known.add(id(value))
    yield f"type of {path}", type(value).__qualname__
    if isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, f"{path}[{key!r}]", known)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from walk(item, f"{path}[{i}]", known)
    for name, item in getattr(value, "__dict__", {}).items():
        yield from walk(item, f"{path}.{name}", known)


def _differences(expected: list[tuple[str, Any]], found: list[tuple[str, Any]]) -> Iterator[str]:
    if [name for name, _ in expected] != [name for name, _ in found]:
        missing = [name for name, _ in expected if name not in dict(found)]
        more = [name for name, _ in found if name not in dict(expected)]
        yield f"other things are seen: missing {missing[:3]}, more {more[:3]}"
        return
    for (name, wanted), (_, got) in zip(expected, found, strict=True):
        if not _same(wanted, got):
            yield f"{name}: {_show(wanted, got)}"


def _same(wanted: Any, got: Any) -> bool:
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        return type(wanted) is type(got) and (wanted == got or wanted != wanted)
    alike = type(wanted) is type(got) and wanted.shape == got.shape and wanted.dtype == got.dtype
    if wanted.layout is not torch.strided or wanted.is_quantized:
        return alike and wanted.layout == got.layout and torch.equal(wanted.to_dense(), got.to_dense())
    return alike and torch.allclose(wanted, got, rtol=0, atol=0, equal_nan=True)


def _show(wanted: Any, got: Any) -> str:
    if isinstance(wanted, Tensor) and isinstance(got, Tensor) and wanted.shape == got.shape and wanted.numel():
        return f"differs by at most {(wanted.double() - got.double()).abs().max().item():.2g}"
    return f"{str(got)[:60]} in place of {str(wanted)[:60]}"
