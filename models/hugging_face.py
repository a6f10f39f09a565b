"""Models of Hugging Face's transformers, made from small configurations and called as their docs say.

Nothing is downloaded. Each is called by keyword, with labels where the task has them, and with the library's defaults
for everything else: caches, output objects, attention.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .case import Call, Case, Trial

os.environ.setdefault("HF_HUB_OFFLINE", "1")

_VOCABULARY, _CLASSES, _PICTURE = 99, 3, 32

# What the configurations of the library call their sizes; each takes those that it knows.
_SMALL: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "d_ff": 48,
    "n_inner": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "hidden_dim": 48,
    "dff": 48,
    "ffn_dim": 48,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_seq_len": 64,
    "image_size": _PICTURE,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}

# Where a configuration asks for sizes that fit each other, or calls them by names of its own.
_OTHERWISE: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_head": 4},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "deberta": {"pooler_hidden_size": 32},
    "deberta-v2": {"pooler_hidden_size": 32},
    "falcon": {"new_decoder_architecture": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 1},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 4},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "openai-gpt": {"n_positions": 64},
    "xlm": {"emb_dim": 32},
    "flaubert": {"emb_dim": 32},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    "focalnet": {
        "embed_dim": 16,
        "depths": [1, 1],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
        "hidden_sizes": [16, 32],
    },
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "convnextv2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    "segformer": {
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_encoder_blocks": 2,
        "sr_ratios": [2, 1],
        "num_attention_heads": [1, 2],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "mlp_ratios": [2, 2],
    },
    "poolformer": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "mobilevit": {"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16]},
    "pvt": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2]},
    "pvt_v2": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2]},
    "levit": {
        "hidden_sizes": [16, 16, 16],
        "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
        "image_size": 64,
    },
    "t5": {"decoder_start_token_id": 0},
    "longt5": {"decoder_start_token_id": 0},
    "switch_transformers": {"decoder_start_token_id": 0},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
    },
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "mamba_n_groups": 1,
        "attn_layer_indices": [1],
    },
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "hiera": {
        "image_size": [32, 32],
        "query_stride": [2, 2],
        "masked_unit_size": [2, 2],
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "num_query_pool": 1,
        "patch_size": [7, 7],
    },
    "whisper": {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
}

_SPEECH = {
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
}

CAUSAL = """
    apertus arcee bamba biogpt bloom codegen cohere cohere2 ctrl diffllama doge ernie4_5 exaone4 falcon
    falcon_mamba gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite helium llama
    mamba mamba2 ministral mistral mpt nemotron olmo olmo2 openai-gpt opt persimmon phi phi3 qwen2 qwen3
    recurrent_gemma rwkv seed_oss smollm3 stablelm starcoder2 xglm xlnet gpt_oss granitemoe mixtral olmoe
    qwen2_moe qwen3_moe deepseek_v2 deepseek_v3 lfm2 afmoe bert-generation bitnet cpmant deepseek_v4 ernie4_5_moe
    flex_olmo glm4_moe gpt_neox_japanese granitemoeshared hunyuan_v1_dense hunyuan_v1_moe jais2 jetmoe llama4_text
    minimax minimax_m2 moshi nanochat nemotron_h olmo3 phimoe roc_bert solar_open trocr vaultgemma xlm-roberta-xl
""".split()
MASKED = """
    albert bert camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm flaubert fnet
    ibert layoutlm longformer luke megatron-bert mobilebert modernbert mpnet nystromformer rembert roberta
    roberta-prelayernorm roformer squeezebert xlm xlm-roberta
""".split()
TRANSLATING = """
    bart blenderbot blenderbot-small led longt5 m2m_100 marian mbart mt5 mvp pegasus plbart prophetnet
    switch_transformers t5 umt5 bigbird_pegasus nllb-moe pegasus_x seamless_m4t_v2
""".split()
SEEING = """
    beit convnext convnextv2 data2vec-vision dinov2 focalnet hiera ijepa mobilenet_v1 mobilenet_v2 mobilevit
    poolformer pvt regnet resnet segformer swiftformer swin swinv2 vit vit_msn
""".split()
HEARING = ("hubert", "sew", "unispeech", "unispeech-sat", "wav2vec2", "wav2vec2-conformer", "wavlm")


def _tokens(length: int = 8) -> torch.Tensor:
    return torch.randint(3, _VOCABULARY, (2, length))


def _text(config: Any) -> dict[str, Any]:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens.clone()}


def _masked_text(config: Any) -> dict[str, Any]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": _tokens(), "attention_mask": mask, "labels": _tokens()}


def _translation(config: Any) -> dict[str, Any]:
    return {"input_ids": _tokens(), "labels": _tokens(6)}


def _pictures(config: Any) -> dict[str, Any]:
    size = getattr(config, "image_size", _PICTURE)
    size = size if isinstance(size, int) else size[0]
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(_CLASSES, (2,))}


def _sound(config: Any) -> dict[str, Any]:
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(_CLASSES, (2,))}


def _configuration(kind: str, given: dict[str, Any]) -> Any:
    """A small configuration of one kind of model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    known = {*dir(made()), *inspect.signature(made.__init__).parameters}
    sizes = {
        name: size
        for name, size in _SMALL.items()
        if name in known and not isinstance(getattr(made, name, 0), property)
    }
    sizes |= {"num_labels": _CLASSES} | _OTHERWISE.get(kind, {}) | given
    return made(**sizes)


def _maker(auto: str, kind: str, inputs: Callable[[Any], dict[str, Any]], given: dict[str, Any]) -> Callable[[], Trial]:
    def make() -> Trial:
        import transformers

        transformers.logging.set_verbosity_error()
        config = _configuration(kind, given)
        model = getattr(transformers, auto).from_config(config)
        return Trial(model.train(), lambda: Call(kwargs=inputs(config)))

    return make


def cases() -> Iterator[Case]:
    """The models of the table."""
    for kinds, auto, inputs, given in (
        (CAUSAL, "AutoModelForCausalLM", _text, {}),
        (MASKED, "AutoModelForMaskedLM", _masked_text, {}),
        (TRANSLATING, "AutoModelForSeq2SeqLM", _translation, {}),
        (SEEING, "AutoModelForImageClassification", _pictures, {}),
        (HEARING, "AutoModelForAudioClassification", _sound, _SPEECH),
    ):
        for kind in kinds:
            yield Case("transformers", kind, _maker(auto, kind, inputs, given))
