"""Models of diffusers, peft and PyG, made from small configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .case import Call, Case, Trial

# ---------------------------------------------------------------------------------------------------------- diffusers
_BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[], Call]]] = {
    "UNet2DModel": (
        {
            "sample_size": 16,
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
            **_BLOCKS,
        },
        lambda: Call((torch.randn(2, 3, 16, 16), torch.tensor([3, 7]))),
    ),
    "UNet2DConditionModel": (
        {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 4,
            **_BLOCKS,
        },
        lambda: Call(
            (torch.randn(2, 4, 16, 16), torch.tensor([3, 7])), {"encoder_hidden_states": torch.randn(2, 5, 16)}
        ),
    ),
    "AutoencoderKL": (
        {
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "latent_channels": 4,
            **_BLOCKS,
        },
        lambda: Call((torch.randn(2, 3, 16, 16),)),
    ),
    "VQModel": (
        {
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "latent_channels": 3,
            "num_vq_embeddings": 16,
            **_BLOCKS,
        },
        lambda: Call((torch.randn(2, 3, 16, 16),)),
    ),
    "DiTTransformer2DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": 10,
            "norm_num_groups": 4,
        },
        lambda: Call(
            (torch.randn(2, 4, 8, 8),), {"timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])}
        ),
    ),
    "SD3Transformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 8,
        },
        lambda: Call(
            (torch.randn(2, 4, 8, 8),),
            {
                "encoder_hidden_states": torch.randn(2, 5, 16),
                "pooled_projections": torch.randn(2, 16),
                "timestep": torch.tensor([3.0, 7.0]),
            },
        ),
    ),
    "FluxTransformer2DModel": (
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda: Call(
            (torch.randn(2, 16, 4),),
            {
                "encoder_hidden_states": torch.randn(2, 5, 16),
                "pooled_projections": torch.randn(2, 16),
                "timestep": torch.tensor([0.3, 0.7]),
                "img_ids": torch.randn(16, 3),
                "txt_ids": torch.zeros(5, 3),
            },
        ),
    ),
    "UNetMotionModel": (
        {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
            "cross_attention_dim": 16,
            "num_attention_heads": 2,
            "motion_num_attention_heads": 2,
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "norm_num_groups": 4,
        },
        lambda: Call((torch.randn(1, 4, 2, 8, 8), torch.tensor([3])), {"encoder_hidden_states": torch.randn(2, 5, 16)}),
    ),
    "PriorTransformer": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "embedding_dim": 16,
            "num_embeddings": 5,
            "additional_embeddings": 4,
        },
        lambda: Call(
            (torch.randn(2, 16), torch.tensor([3, 7]), torch.randn(2, 16)),
            {"encoder_hidden_states": torch.randn(2, 5, 16)},
        ),
    ),
    "ControlNetModel": (
        {
            "in_channels": 4,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 4,
            "conditioning_embedding_out_channels": (4, 8),
            **_BLOCKS,
        },
        lambda: Call(
            (torch.randn(2, 4, 16, 16), torch.tensor([3, 7])),
            {"encoder_hidden_states": torch.randn(2, 5, 16), "controlnet_cond": torch.randn(2, 3, 32, 32)},
        ),
    ),
}


def _diffuser(name: str, config: dict[str, Any], inputs: Callable[[], Call]) -> Callable[[], Trial]:
    def make() -> Trial:
        import diffusers

        return Trial(getattr(diffusers, name)(**config).train(), inputs)

    return make


def diffusers_cases() -> Iterator[Case]:
    """The models of diffusers in the table."""
    for name, (config, inputs) in DIFFUSERS.items():
        yield Case("diffusers", name, _diffuser(name, config, inputs))


# --------------------------------------------------------------------------------------------------------------- peft
PEFT: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
    "LoraConfig, DoRA": {"r": 4, "use_dora": True, "target_modules": ["q_proj", "v_proj"]},
    "LoHaConfig": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "LoKrConfig": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "AdaLoraConfig": {"total_step": 10, "init_r": 4, "target_r": 2, "target_modules": ["q_proj", "v_proj"]},
    "IA3Config": {"target_modules": ["k_proj", "v_proj"], "feedforward_modules": []},
    "OFTConfig": {"r": 4, "oft_block_size": 0, "target_modules": ["q_proj"]},
    "VeraConfig": {"r": 4, "target_modules": ["q_proj"]},
    "PromptTuningConfig": {"num_virtual_tokens": 3},
    "PrefixTuningConfig": {"num_virtual_tokens": 3},
    "PromptEncoderConfig": {"num_virtual_tokens": 3, "encoder_hidden_size": 8},
    "LoraConfig, all layers, rank-stabilized": {"r": 4, "use_rslora": True, "target_modules": "all-linear"},
    "LoraConfig, PiSSA": {"r": 4, "init_lora_weights": "pissa", "target_modules": ["q_proj"]},
    "LoraConfig, embedding": {"r": 4, "target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
    "BOFTConfig": {"boft_block_size": 4, "target_modules": ["q_proj"]},
    "C3AConfig": {"block_size": 8, "target_modules": ["q_proj"]},
    "FourierFTConfig": {"n_frequency": 10, "target_modules": ["q_proj"]},
    "HRAConfig": {"r": 4, "target_modules": ["q_proj"]},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    "MissConfig": {"r": 4, "target_modules": ["q_proj"]},
    "RandLoraConfig": {"r": 4, "target_modules": ["q_proj"]},
    "RoadConfig": {"group_size": 8, "target_modules": ["q_proj"]},
    "ShiraConfig": {"r": 4, "target_modules": ["q_proj"]},
    "TrainableTokensConfig": {"token_indices": [1, 2], "target_modules": ["embed_tokens"]},
    "VBLoRAConfig": {"num_vectors": 8, "vector_length": 8, "topk": 2, "target_modules": ["q_proj"]},
    "AdaptionPromptConfig": {"adapter_len": 3, "adapter_layers": 1},
}


def _adapted(name: str, given: dict[str, Any]) -> Callable[[], Trial]:
    def make() -> Trial:
        import peft
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        adapter = getattr(peft, name.partition(",")[0])(task_type="CAUSAL_LM", **given)
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapter)

        def inputs() -> Call:
            tokens = torch.randint(3, 99, (2, 8))
            return Call(
                kwargs={"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
            )

        return Trial(model.train(), inputs)

    return make


def peft_cases() -> Iterator[Case]:
    """The adapters of peft in the table, each around a small Llama."""
    yield from (Case("peft", name, _adapted(name, given)) for name, given in PEFT.items())


# ---------------------------------------------------------------------------------------------------------------- PyG
CONVOLUTIONS: dict[str, tuple[Any, ...]] = {
    "GCNConv": (8, 8),
    "SAGEConv": (8, 8),
    "GATConv": (8, 8),
    "GATv2Conv": (8, 8),
    "TransformerConv": (8, 8),
    "GraphConv": (8, 8),
    "ChebConv": (8, 8, 2),
    "TAGConv": (8, 8),
    "ARMAConv": (8, 8),
    "SGConv": (8, 8),
    "APPNP": (2, 0.1),
    "LEConv": (8, 8),
    "EdgeConv": (nn.Linear(16, 8),),
    "GINConv": (nn.Linear(8, 8),),
    "ResGatedGraphConv": (8, 8),
    "GeneralConv": (8, 8),
    "ClusterGCNConv": (8, 8),
    "AGNNConv": (),
    "AntiSymmetricConv": (8,),
    "CGConv": (8,),
    "FeaStConv": (8, 8),
    "FiLMConv": (8, 8),
    "GatedGraphConv": (8, 2),
    "GENConv": (8, 8),
    "HypergraphConv": (8, 8),
    "LGConv": (),
    "MFConv": (8, 8),
    "SSGConv": (8, 8, 0.1),
    "SuperGATConv": (8, 8),
}


class _Network(nn.Module):
    """A graph network that takes a batch of graphs as the library makes it."""

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.into, self.convolution, self.out = nn.Linear(4, 8), convolution, nn.Linear(8, 2)

    def forward(self, batch: Any) -> Any:
        from torch_geometric.nn import global_mean_pool

        hidden = self.convolution(self.into(batch.x).relu(), batch.edge_index)
        return self.out(global_mean_pool(hidden, batch.batch, size=2))


def _graphs() -> Call:
    from torch_geometric.data import Batch, Data

    graphs = [Data(x=torch.randn(5, 4), edge_index=torch.randint(5, (2, 12))) for _ in range(2)]
    return Call((Batch.from_data_list(graphs),))


def _graph_network(name: str, given: tuple[Any, ...]) -> Callable[[], Trial]:
    def make() -> Trial:
        import copy

        import torch_geometric.nn

        return Trial(_Network(getattr(torch_geometric.nn, name)(*copy.deepcopy(given))).train(), _graphs)

    return make


def pyg_cases() -> Iterator[Case]:
    """The convolutions of PyG in the table, each on a batch of graphs."""
    yield from (Case("pyg", name, _graph_network(name, given)) for name, given in CONVOLUTIONS.items())
