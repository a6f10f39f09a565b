"""Small versions of the eight families of the benchmark, and their joint graphs."""

import importlib
from dataclasses import dataclass

import torch
from torch import fx, nn

import foregrad
from benchmarks.models import GPT
from benchmarks.partition_models import LSTM, Mixer, MoE, ResNet18, UNet, ViT
from foregrad.graph.fx import from_fx, joint_from_fx
from foregrad.partition.memory import Simulation, simulate
from foregrad.slots import Output


def _text(vocabulary, batch, length):
    return torch.randint(vocabulary, (batch, length)), torch.randint(vocabulary, (batch, length))


SMALL = {
    "gpt": lambda: (GPT(2, width=32, vocabulary=64, length=16), _text(64, 2, 16)),
    "resnet": lambda: (ResNet18(10, 8), (torch.randn(2, 3, 32, 32), torch.randint(10, (2,)))),
    "vit": lambda: (ViT(2, 24, 2, 32), (torch.randn(2, 3, 32, 32), torch.randint(10, (2,)))),
    "unet": lambda: (UNet(4, 2), (torch.randn(1, 3, 16, 16), torch.randint(2, (1, 16, 16)))),
    "lstm": lambda: (LSTM(16), _text(256, 2, 5)),
    "moe": lambda: (MoE(1, 16), _text(256, 2, 8)),
    "vocabulary": lambda: (GPT(1, width=16, vocabulary=512, length=16), _text(512, 2, 16)),
    "mixer": lambda: (Mixer(2, 24, 16), (torch.randn(2, 3, 32, 32), torch.randint(10, (2,)))),
}


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model and a batch, in double precision, so that gradients can be compared closely."""
    torch.manual_seed(0)
    model, inputs = SMALL[name]()
    return model.double(), tuple(x.double() if x.is_floating_point() else x for x in inputs)


def simulated(forward: fx.GraphModule, backward: fx.GraphModule, own: int) -> Simulation:
    """The memory of two graphs; so many results of the forward are its own."""
    return simulate(from_fx(forward, [*map(Output, range(own))]), joint_from_fx(backward, 0))


@dataclass(frozen=True)
class Joint:
    """A joint graph, and how many of its outputs are the forward's."""

    graph: fx.GraphModule
    outputs: int


def joint_of(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[Joint, list[torch.Tensor]]:
    """The joint graph of a model with inductor's decompositions, and its primals; the model has its gradients then."""
    from torch._inductor.decomposition import select_decomp_table

    importlib.import_module("torch._inductor.lowering")  # the decompositions look into it

    joints, calls = [], []

    def partition(graph, joint_inputs, *, num_fwd_outputs, **_):
        joints.append(Joint(graph, num_fwd_outputs))
        return foregrad.default_partition(graph, joint_inputs, num_fwd_outputs=num_fwd_outputs)

    def compile(graph, examples):
        def run(args):
            calls.append([value.detach().clone() for value in args])
            return graph(*args)

        return foregrad.make_boxed_func(lambda *args: run(args))

    compiled = foregrad.aot_module(model, compile, partition_fn=partition, decompositions=select_decomp_table())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    compiled(*inputs)
    model.load_state_dict(buffers, strict=False)
    model(*inputs).backward()
    return joints[0], calls[0]
