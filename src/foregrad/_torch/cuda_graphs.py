"""CUDA graphs: the work of a device, recorded once and launched again in one piece."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class GraphMemory:
    """The memory in which the graphs of one stream keep what they compute; they run one after another."""

    device: torch.device
    pool: Any
    stream: Any  # no work is done on it: graphs are recorded there
    holder: Any  # torch gives a pool up once its last graph is gone, and does not take it back: this one stays


def new_memory(device: torch.device) -> GraphMemory:
    """Memory for the graphs of another stream."""
    with torch.cuda.device(device):
        pool, stream, holder = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            holder.capture_begin(pool=pool, capture_error_mode="thread_local")
            torch.zeros(1, device=device)
            holder.capture_end()
        return GraphMemory(device, pool, stream, holder)


def wait_for(device: torch.device) -> None:
    """Until everything that was launched on a device is done."""
    torch.cuda.synchronize(device)


def current_stream_of(device: torch.device) -> int:
    """Which stream the work of a device goes to."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def being_captured() -> bool:
    """Whether somebody else records a graph of what runs now."""
    return torch.cuda.is_current_stream_capturing()


def kernel_settings() -> tuple[Any, ...]:
    """What else decides about the kernels that a graph launches."""
    return (
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
        torch._C._get_fp32_precision_getter("cuda", "conv"),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_deterministic_algorithms(),
    )


def captured(
    run: Callable[[], Any], memory: GraphMemory, generators: Iterable[torch.Generator]
) -> tuple[Callable[[], None], Any]:
    """Record the work of a function: what launches it again, and what the function returned, which has no data yet.

    The default generator takes part by itself. The function must have run before, so that libraries are set up.
    """
    graph = torch.cuda.CUDAGraph()
    default = torch.cuda.default_generators[memory.device.index or 0]
    before = [(generator, generator.clone_state()) for generator in (default, *generators)]
    for generator in generators:
        graph.register_generator_state(generator)
    collects = gc.isenabled()
    torch.cuda.synchronize(memory.device)
    gc.disable()  # what it frees may ask the driver for something that no capture allows
    try:
        with torch.cuda.device(memory.device), torch.cuda.stream(memory.stream):
            graph.capture_begin(pool=memory.pool, capture_error_mode="thread_local")
            try:
                results = run()
            except BaseException:
                _end_broken(graph)
                raise
            graph.capture_end()
    except BaseException:
        for generator, state in before:  # a capture that fails leaves it waiting for its end
            generator.graphsafe_set_state(state)
        raise
    finally:
        if collects:
            gc.enable()
    return graph.replay, results


def _end_broken(graph: Any) -> None:
    """What went wrong is being raised already; ending the capture says once more that it did."""
    try:
        graph.capture_end()
    except RuntimeError:
        return


def storage_of(tensor: Tensor) -> int:
    """The memory of a tensor as `storage_users` takes it, for as long as the tensor is there."""
    return tensor.untyped_storage()._cdata


def storage_users(storage: int) -> int:
    """How many hold a memory: nothing public tells."""
    return int(torch._C._storage_Use_Count(storage))


def unowned(tensor: Tensor) -> Tensor:
    """A tensor over the same memory that does not keep it: graphs of one pool may use it in turn."""
    storage = tensor.untyped_storage()
    place = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return bare.set_(place, tensor.storage_offset(), tensor.size(), tensor.stride())


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Many copies in few launches: nothing public does that."""
    torch._foreach_copy_(list(targets), list(sources))
