"""Calls that may read the memory of recorded tensors, tried in processes of their own.

As a script it prints the names of those that end their process, where the same calls in eager do not.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import os
import pickle
import signal
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.dlpack

import foregrad
from foregrad.errors import CaptureError

Call = Callable[[torch.Tensor], Any]
BATCH = 24  # calls that share a process, as long as it survives them
SECONDS = 120

# ------------------------------------------------------------------------------------------------- the calls
TYPICAL: dict[str, Call] = {
    "apply_": lambda x: x.apply_(lambda v: v + 1),
    "map_": lambda x: x.map_(x, lambda a, b: a + b),
    "const_data_ptr": lambda x: x.const_data_ptr() if hasattr(x, "const_data_ptr") else x.data_ptr(),
    "ctypes": lambda x: ctypes.c_float.from_address(x.data_ptr()).value,
    "from_dlpack": torch.from_dlpack,
    "to_dlpack": torch.utils.dlpack.to_dlpack,
    "share_memory_": lambda x: x.share_memory_(),
    "is_shared": lambda x: x.is_shared(),
    "pickle": lambda x: pickle.dumps(x),
    "torch.save": lambda x: torch.save(x, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "struct": lambda x: struct.pack("f", x.sum()),
    "float": lambda x: float(x.sum()),
    "bytes": bytes,
    "torch.tensor": lambda x: torch.tensor(list(x)),
    "FloatTensor": lambda x: torch.FloatTensor(x),
    "storage": lambda x: x.untyped_storage()[0],
    "storage list": lambda x: x.untyped_storage().tolist(),
    "storage clone": lambda x: x.untyped_storage().clone(),
    "storage resize": lambda x: x.untyped_storage().resize_(1000),
    "storage fill": lambda x: x.untyped_storage().fill_(1),
    "storage swap": lambda x: torch.ones(4).untyped_storage()._swap_data_ptr_(x.untyped_storage()),
    "storage is_shared": lambda x: x.untyped_storage().is_shared(),
    "share in file": lambda x: x.untyped_storage()._share_filename_cpu_(),
    "rebuilt": lambda x: torch._utils._rebuild_tensor(x.untyped_storage(), 0, (4,), (1,)).sum().item(),
    "set_": lambda x: torch.empty(0).set_(x.untyped_storage()).sum().item(),
    "view": lambda x: x[1:].apply_(lambda v: v),
    "grown": lambda x: x.clone().resize_(100).apply_(lambda v: v),
    "moved": lambda x: torch.empty(0).set_(x).apply_(lambda v: v),
    "data": lambda x: x.data.apply_(lambda v: v),
    "conjugated": lambda x: torch.complex(x, x).conj().imag.apply_(lambda v: v),
    "a sum": lambda x: x.sum().apply_(lambda v: v),
    "alias": lambda x: torch._C._is_alias_of(x, torch.ones(3)),
    "add": lambda x: x + 1,
    "add_": lambda x: x.add_(1),
    "matmul": lambda x: x.view(2, 2) @ x.view(2, 2),
    "sort": lambda x: x.sort(),
    "cat": lambda x: torch.cat([x, x]),
    "conv": lambda x: torch.conv1d(x.view(1, 1, 4), x.view(1, 1, 4)),
    "copy to real": lambda x: torch.zeros(4).copy_(x),
    "text": str,
    "print options": lambda x: torch._tensor_str._str(x),
}
with contextlib.suppress(ImportError):
    import numpy as np

    TYPICAL |= {
        "asarray": np.asarray,
        "ufunc": lambda x: np.add(x, 1),
        "numpy dlpack": np.from_dlpack,
        "numpy": lambda x: x.numpy(),
    }


def methods() -> dict[str, Call]:
    """Every method and property of tensors."""
    left_out = {"__class__", "__init_subclass__", "__subclasshook__", "__del__"}
    return {
        f"Tensor.{name}": lambda x, name=name: _try(getattr(x, name), (), (x,), (0,), (1.5,), (x, x), (0, 1), (min,))
        for name in dir(torch.Tensor)
        if name not in left_out
    }


def functions() -> dict[str, Call]:
    """Every function of torch's public modules."""
    modules = [torch, torch.nn.functional, torch.linalg, torch.fft, torch.special, torch.utils, torch.utils.dlpack]
    left_out = {"manual_seed", "set_num_threads", "set_num_interop_threads", "compile", "load", "initial_seed"}
    return {
        f"{module.__name__}.{name}": lambda x, module=module, name=name: _try(
            getattr(module, name),
            (x,),
            (x, x),
            ([x, x],),
            (x, 0),
            (x, x, x),
            (x, 1, 1),
            (x.view(2, 2), x.view(2, 2)),
            (x.long(), x),
        )
        for module in modules
        for name in dir(module)
        if not name.startswith("_") and name not in left_out and callable(getattr(module, name))
        if not isinstance(getattr(module, name), type)
    }


def operators() -> dict[str, Call]:
    """Every operator of aten."""
    found: dict[str, Call] = {}
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for overload in packet.overloads():
                op = getattr(packet, overload)
                found[str(op)] = lambda x, op=op: _call_operator(op, x)
    return found


def _call_operator(op: Any, x: torch.Tensor) -> None:
    for tensor in (x, x.view(2, 2), x.view(1, 1, 2, 2), x.long()):
        arguments = op._schema.arguments
        given = [_argument(str(a.type), tensor) for a in arguments if not a.kwarg_only and not a.has_default_value()]
        named = {
            a.name: _argument(str(a.type), tensor) for a in arguments if a.kwarg_only and not a.has_default_value()
        }
        _try(lambda given=given, named=named: op(*given, **named), ())


def _argument(kind: str, x: torch.Tensor) -> Any:
    plain = {"Tensor": x, "int": 1, "SymInt": 1, "float": 0.5, "bool": False, "number": 1, "Scalar": 1, "str": "mean"}
    if kind.startswith(("Optional", "Device", "Generator")) or kind.endswith("?"):
        return None
    if kind.startswith("List") or kind.endswith("[]"):
        inner = kind.removeprefix("List[").removesuffix("]").removesuffix("[")
        return [_argument(inner, x)] * 2
    return plain.get(kind, 0)


def _try(f: Callable[..., Any], *several: Sequence[Any]) -> None:
    for args in several:
        with contextlib.suppress(Exception):
            f(*args)


# ------------------------------------------------------------------------------------------------ the contexts
def _no_dispatch() -> Any:
    return torch._C._DisableTorchDispatch()


def _no_functions() -> Any:
    return torch._C.DisableTorchFunction()


@contextlib.contextmanager
def _neither() -> Iterator[None]:
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunction():
        yield


CONTEXTS = {
    "": contextlib.nullcontext,
    "without dispatch": _no_dispatch,
    "without functions": _no_functions,
    "without either": _neither,
}
ENGINES = {"lean": {}, "symbols": {"dynamic": True}, "inference": {}}


def record(calls: Sequence[Call], engine: str) -> None:
    """Let a program make these calls on its own tensors, in all contexts."""

    def program(x: torch.Tensor) -> torch.Tensor:
        for call in calls:
            for context in CONTEXTS.values():
                with contextlib.suppress(Exception), context():
                    call(x)
                with contextlib.suppress(Exception), context():
                    call(x * 2)
        return x * 2

    with torch.inference_mode(engine == "inference"), contextlib.suppress(Exception):
        compiled = foregrad.aot_function(program, lambda graph, _: graph, **ENGINES[engine])
        compiled(torch.arange(4.0))


def run_in_eager(calls: Sequence[Call], engine: str) -> None:
    """The same calls on a real tensor."""
    for call in calls:
        with contextlib.suppress(Exception):
            call(torch.arange(4.0))


# ----------------------------------------------------------------------------------------------- the processes
def survives(run: Callable[[Sequence[Call], str], None], calls: Sequence[Call], engine: str) -> bool:
    """Whether a process that makes these calls ends of its own accord."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(0, 2)
        signal.alarm(SECONDS)
        with contextlib.suppress(BaseException):
            run(calls, engine)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return not os.WIFSIGNALED(status)


def crashing(calls: dict[str, Call], engine: str) -> Iterator[str]:
    """The names of calls that end their process, and do not do so in eager."""
    names = list(calls)
    for start in range(0, len(names), BATCH):
        batch = names[start : start + BATCH]
        if survives(record, [calls[name] for name in batch], engine):
            continue
        for name in batch:
            if not survives(record, [calls[name]], engine) and survives(run_in_eager, [calls[name]], engine):
                yield name


def refused(call: Call) -> bool:
    """Whether a program that makes a call is refused by name."""
    try:
        foregrad.aot_function(lambda x: (call(x * 1), x * 2)[1], lambda graph, _: graph)(torch.arange(4.0))
    except CaptureError:
        return True
    return False


KINDS = {"typical": lambda: TYPICAL, "methods": methods, "functions": functions, "operators": operators}


def main(kind: str, *engines: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for engine in engines:
        for name in crashing(KINDS[kind](), engine):
            print(engine, name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
